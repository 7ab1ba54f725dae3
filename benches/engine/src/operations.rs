//! The operations, in an order in which each finds what it needs.

use std::time::Instant;

use anyhow::Result;
use futures::{TryStreamExt, stream};
use rfs_core::meta::{
    FileCommit, LinkArgs, MakeArgs, Membership, Meta, NewPack, PackState, RenameArgs, RenameMode,
    SetattrArgs, XattrMode,
};
use rfs_core::types::{
    Block, Caller, ChunkIndex, Ino, Kind, Name, PackId, PackedRun, SessionId, SetAttr, Slice, Stored,
};
use serde_json::{Map, Value, json};

/// Operations a second by operation.
pub(crate) type Rates = Map<String, Value>;

const CALLER: Caller = Caller { uid: 0, gid: 0, pid: 1 };
/// Bytes that one slice covers.
const SLICE_BYTES: u32 = 64 << 10;

/// Measures everything once, on an empty volume.
pub(crate) async fn measure(meta: &Meta, count: u32, at_once: usize) -> Result<Rates> {
    let mut rates = Recorder { count, at_once, rates: Rates::new() };
    directories(meta, &mut rates).await?;
    listings(meta, &mut rates).await?;
    names(meta, &mut rates).await?;
    attributes(meta, &mut rates).await?;
    xattrs(meta, &mut rates).await?;
    contents(meta, &mut rates).await?;
    Ok(rates.rates)
}

/// Runs operations and notes their rates.
struct Recorder {
    count: u32,
    at_once: usize,
    rates: Rates,
}

impl Recorder {
    async fn rate(&mut self, name: &str, operation: impl AsyncFn(u32) -> Result<()>) -> Result<()> {
        self.rate_of(name, self.count, operation).await
    }

    async fn rate_of(
        &mut self,
        name: &str,
        count: u32,
        operation: impl AsyncFn(u32) -> Result<()>,
    ) -> Result<()> {
        let (items, operation) = (stream::iter((0..count).map(Ok)), &operation);
        let begin = Instant::now();
        items.try_for_each_concurrent(self.at_once, |i| operation(i)).await?;
        self.rates.insert(name.to_owned(), json!(f64::from(count) / begin.elapsed().as_secs_f64()));
        Ok(())
    }
}

fn name(prefix: char, number: u32) -> Result<Name> {
    Ok(Name::new(format!("{prefix}{number}"))?)
}

async fn make(meta: &Meta, parent: Ino, name: &Name, kind: Kind) -> Result<Ino> {
    let target = (kind == Kind::Symlink).then_some(&b"where/it/points"[..]);
    let args = MakeArgs { parent, name, kind, mode: 0o755, rdev: 0, target, caller: &CALLER };
    Ok(meta.make(args).await?.ino)
}

async fn rename(meta: &Meta, dir: Ino, from: &Name, to: &Name) -> Result<()> {
    let (parent, new_parent, mode) = (dir, dir, RenameMode::Replace);
    meta.rename(RenameArgs { parent, name: from, new_parent, new_name: to, mode }).await?;
    Ok(())
}

async fn directories(meta: &Meta, rates: &mut Recorder) -> Result<()> {
    let root = Ino::ROOT;
    rates.rate("mkdir", async |i| make(meta, root, &name('d', i)?, Kind::Directory).await.map(drop)).await?;
    rates.rate("mvdir", async |i| rename(meta, root, &name('d', i)?, &name('e', i)?).await).await?;
    rates.rate("rmdir", async |i| Ok(meta.rmdir(root, &name('e', i)?).await.map(drop)?)).await
}

/// As readdir with attributes, which is what the kernel asks for.
async fn listings(meta: &Meta, rates: &mut Recorder) -> Result<()> {
    for (operation, entries, fewer) in [("readdir_10", 10, 1), ("readdir_1k", 1000, 50)] {
        let dir = make(meta, Ino::ROOT, &Name::new(operation)?, Kind::Directory).await?;
        for i in 0..entries {
            make(meta, dir, &name('f', i)?, Kind::File).await?;
        }
        let count = (rates.count / fewer).max(1);
        let list = async |_| Ok(meta.readdirplus(dir, None, 4096).await.map(drop)?);
        rates.rate_of(operation, count, list).await?;
    }
    Ok(())
}

async fn names(meta: &Meta, rates: &mut Recorder) -> Result<()> {
    let dir = make(meta, Ino::ROOT, &Name::new("names")?, Kind::Directory).await?;
    rates.rate("mknod", async |i| make(meta, dir, &name('n', i)?, Kind::Fifo).await.map(drop)).await?;
    rates.rate("create", async |i| make(meta, dir, &name('f', i)?, Kind::File).await.map(drop)).await?;
    rates.rate("lookup", async |i| Ok(meta.lookup(dir, &name('f', i)?).await.map(drop)?)).await?;
    rates.rate("rename", async |i| rename(meta, dir, &name('f', i)?, &name('g', i)?).await).await?;
    rates.rate("unlink", async |i| Ok(meta.unlink(dir, &name('g', i)?).await.map(drop)?)).await?;
    let linked = make(meta, dir, &Name::new("linked")?, Kind::File).await?;
    let link = async |i| {
        Ok(meta.link(LinkArgs { ino: linked, parent: dir, name: &name('l', i)? }).await.map(drop)?)
    };
    rates.rate("link", link).await?;
    rates.rate("symlink", async |i| make(meta, dir, &name('s', i)?, Kind::Symlink).await.map(drop)).await
}

async fn attributes(meta: &Meta, rates: &mut Recorder) -> Result<()> {
    let ino = make(meta, Ino::ROOT, &Name::new("attributes")?, Kind::File).await?;
    rates.rate("getattr", async |_| Ok(meta.getattr(ino).await.map(drop)?)).await?;
    let setattr = async |i: u32| {
        let mode = if i.is_multiple_of(2) { 0o644 } else { 0o600 };
        let set = SetAttr { mode: Some(mode), ..SetAttr::default() };
        let membership = Membership::CheckedByKernel;
        Ok(meta.setattr(SetattrArgs { ino, set: &set, caller: &CALLER, membership, written: None }).await?)
    };
    rates.rate("setattr", async |i| setattr(i).await.map(drop)).await?;
    // The kernel checks permissions; what is left of access(2) is to see that the inode is there.
    rates.rate("access", async |_| Ok(meta.getattr(ino).await.map(drop)?)).await
}

async fn xattrs(meta: &Meta, rates: &mut Recorder) -> Result<()> {
    let ino = make(meta, Ino::ROOT, &Name::new("xattrs")?, Kind::File).await?;
    let xattr = |i: u32| format!("user.{i}").into_bytes();
    let set = async |i| Ok(meta.setxattr(ino, &xattr(i % 10), b"value", XattrMode::Either).await?);
    rates.rate("setxattr", set).await?;
    rates.rate("getxattr", async |_| Ok(meta.getxattr(ino, b"user.0").await.map(drop)?)).await?;
    for i in 0..10 {
        set(i).await?;
    }
    rates.rate("listxattr_10", async |_| Ok(meta.listxattr(ino).await.map(drop)?)).await?;
    for i in 1..10 {
        meta.removexattr(ino, &xattr(i)).await?;
    }
    rates.rate("listxattr_1", async |_| Ok(meta.listxattr(ino).await.map(drop)?)).await?;
    let owner = make(meta, Ino::ROOT, &Name::new("removexattr")?, Kind::File).await?;
    // The names of one inode are limited, so that some are set and removed in turn; only removing counts.
    let batch = rates.count.min(1000);
    for i in 0..batch {
        meta.setxattr(owner, &xattr(i), b"value", XattrMode::Create).await?;
    }
    rates.rate_of("removexattr", batch, async |i| Ok(meta.removexattr(owner, &xattr(i)).await?)).await
}

/// Slices are committed and read as metadata; no byte of them is stored.
async fn contents(meta: &Meta, rates: &mut Recorder) -> Result<()> {
    let session = meta.session_id().unwrap_or(SessionId(0));
    let pack = PackId::new(session, 1);
    let commit = async |ino: Ino, chunk: u64, at: u32, new: &[NewPack]| {
        let block = Block { stored_len: SLICE_BYTES, raw: true, checksum: u64::from(at) };
        let run = PackedRun {
            pack,
            pack_offset: 0,
            block_bytes: 128 << 10,
            plain_len: SLICE_BYTES,
            skip: 0,
            blocks: vec![block],
        };
        let slice = Slice { offset: at * SLICE_BYTES, len: SLICE_BYTES, stored: Stored::Packed(run) };
        let start = ChunkIndex(chunk).start() + u64::from(at * SLICE_BYTES);
        let file = FileCommit {
            ino,
            chunks: vec![(ChunkIndex(chunk), vec![slice])],
            grow_to: Some(start + u64::from(SLICE_BYTES)),
            mtime: None,
            allocated_delta: i64::from(SLICE_BYTES),
        };
        anyhow::Ok(meta.commit(&[file], new).await.map(drop)?)
    };
    let written = make(meta, Ino::ROOT, &Name::new("write")?, Kind::File).await?;
    commit(written, 0, 0, &[NewPack { pack, bytes: 1 << 26, state: PackState::Stored }]).await?;
    rates.rate("write", async |i| commit(written, 1 + u64::from(i / 256), i % 256, &[]).await).await?;
    for (operation, slices) in [("read_1", 1), ("read_10", 10)] {
        let ino = make(meta, Ino::ROOT, &Name::new(operation)?, Kind::File).await?;
        for at in 0..slices {
            commit(ino, 0, at, &[]).await?;
        }
        rates.rate(operation, async |_| Ok(meta.chunk(ino, ChunkIndex(0)).await.map(drop)?)).await?;
    }
    Ok(())
}

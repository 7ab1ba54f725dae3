//! truncate: the length, and what was stored beyond it.
//!
//! Chunks beyond a new end can be many. A transaction removes some; if there are more it stores where they begin, and
//! further transactions remove them page by page. Whatever may make the file longer or write to it finishes that
//! first, so that old bytes never show up again, even after a crash in between.

use rfs_kv::Txn;

use crate::meta::inode::{Node, known, load};
use crate::meta::key::Field;
use crate::meta::record::{self, Truncation};
use crate::meta::usage::{self, Change};
use crate::meta::{FILE_BYTES_MAX, FLAG_APPEND, FLAG_IMMUTABLE, Meta, key};
use crate::types::{
    Attr, CHUNK_BYTES, ChunkIndex, ErrorKind, Ino, Kind, Result, SessionId, Slice, Timestamp,
};

use super::chunks::{LiveBytes, append_slices, clear_groups};
use super::commit::check_packs_of;
use super::setattr::kill_set_ids_of_written;

/// Slice groups that one transaction removes.
const TRIM_PAGE: usize = 512;

/// What to truncate.
#[derive(Debug, Clone)]
pub struct TruncateArgs {
    /// The file.
    pub ino: Ino,
    /// Its new length in bytes.
    pub size: u64,
    /// Change of the bytes that are not holes.
    pub allocated_delta: i64,
    /// Holes over the part of the last chunk that is beyond the new end.
    pub cut: Option<(ChunkIndex, Vec<Slice>)>,
    /// The new mtime; `None` leaves it (truncate(2) without a change of the length).
    pub mtime: Option<Timestamp>,
    /// The new ctime; `None` is now.
    pub ctime: Option<Timestamp>,
    /// Whether set-user-id and set-group-id bits are dropped (an unprivileged caller).
    pub kill_suid_sgid: bool,
}

impl Meta {
    /// Sets the length of a file (truncate(2)).
    ///
    /// Reads the inode's record, times, length and truncations and the chunks beyond the new end, so it conflicts with
    /// every commit to the file. Each transaction removes at most 512 slice groups; the first one that does also sets the
    /// length. What is left to remove if a later one fails is not part of the file, and whoever changes it next goes on.
    ///
    /// # Errors
    /// `IsDirectory`; `Invalid` for what has no length; `FileTooLarge` above 2^57 bytes; `NotPermitted` where flags forbid
    /// it; `Stale`.
    pub async fn truncate(&self, args: &TruncateArgs) -> Result<Attr> {
        if args.size > FILE_BYTES_MAX {
            return Err(ErrorKind::FileTooLarge.into());
        }
        let session = self.session()?.id();
        let reservation = self.usage.reserve(Change::bytes(args.allocated_delta)).await?;
        let now = self.now();
        loop {
            let outcome =
                self.mutate(|txn| async move { truncate_in(&*txn, args, now, session).await }).await?;
            match outcome {
                Outcome::Done { attr, trim } => {
                    reservation.keep();
                    if trim && let Err(error) = self.trim(args.ino).await {
                        tracing::debug!(ino = args.ino.0, %error, "could not remove all that was cut off");
                    }
                    return Ok(attr);
                }
                Outcome::TrimFirst => self.trim(args.ino).await?,
            }
        }
    }

    /// Finishes the removal of chunks beyond the end that a truncation began. One transaction a page.
    pub(in crate::meta) async fn trim(&self, ino: Ino) -> Result<()> {
        while self.mutate(|txn| async move { trim_in(&*txn, ino).await }).await? {}
        Ok(())
    }
}

#[derive(Debug, Clone)]
pub(in crate::meta) enum Outcome {
    Done { attr: Attr, trim: bool },
    TrimFirst,
}

pub(in crate::meta) async fn truncate_in(
    txn: &dyn Txn,
    args: &TruncateArgs,
    now: Timestamp,
    session: SessionId,
) -> Result<Outcome> {
    let rest = key::inode(args.ino, Field::Length)..key::inode(args.ino, Field::Subdirectories);
    txn.add_read_conflict(&rest.start, &rest.end);
    let truncation = key::inode(args.ino, Field::Truncation);
    txn.add_read_conflict(&truncation, &key::successor(&truncation));
    let mut node = known(load(txn, args.ino).await?)?;
    check(&node)?;
    if node.truncation.trim_from.is_some() {
        return Ok(Outcome::TrimFirst);
    }
    let mut live = LiveBytes::default();
    let trim = args.size < node.length && shorten(txn, args, &mut node, &mut live).await?;
    if args.size != node.length {
        node.length = args.size;
        txn.set(&key::inode(args.ino, Field::Length), &record::encode_length(args.size));
    }
    if let Some((chunk, slices)) = &args.cut {
        check_packs_of(txn, slices.iter(), &[]).await?;
        append_slices(txn, args.ino, *chunk, slices, &mut 0)?;
        live.gain(slices);
    }
    live.store(txn);
    if args.allocated_delta != 0 {
        node.allocated += args.allocated_delta;
        txn.add(&key::inode(args.ino, Field::Allocated), args.allocated_delta);
        usage::add_in(txn, session, Change::bytes(args.allocated_delta));
    }
    let before = node.inode;
    if args.kill_suid_sgid {
        kill_set_ids_of_written(&mut node.inode);
    }
    if node.inode != before {
        node.store_inode(txn);
    }
    if let Some(mtime) = args.mtime {
        node.times.mtime = mtime;
    }
    node.times.ctime = args.ctime.unwrap_or(now);
    node.store_times(txn);
    Ok(Outcome::Done { attr: node.attr(), trim })
}

fn check(node: &Node) -> Result<()> {
    match node.inode.kind {
        Kind::File => {}
        Kind::Directory => return Err(ErrorKind::IsDirectory.into()),
        Kind::Symlink | Kind::Fifo | Kind::Socket | Kind::CharDevice | Kind::BlockDevice => {
            return Err(ErrorKind::Invalid.into());
        }
    }
    if node.inode.flags & (FLAG_IMMUTABLE | FLAG_APPEND) != 0 {
        return Err(ErrorKind::NotPermitted.into());
    }
    Ok(())
}

/// Removes the chunks beyond the new end if they are few; otherwise says that they are to be trimmed.
async fn shorten(txn: &dyn Txn, args: &TruncateArgs, node: &mut Node, live: &mut LiveBytes) -> Result<bool> {
    let from = ChunkIndex(args.size.div_ceil(CHUNK_BYTES));
    let (_, more) = clear_groups(txn, &key::chunks_from(args.ino, from), TRIM_PAGE, live).await?;
    node.truncation = Truncation { count: node.truncation.count + 1, trim_from: more.then_some(from.0) };
    txn.set(&key::inode(args.ino, Field::Truncation), &node.truncation.encode());
    Ok(more)
}

/// Removes one page; returns whether there are more.
async fn trim_in(txn: &dyn Txn, ino: Ino) -> Result<bool> {
    let key = key::inode(ino, Field::Truncation);
    let value = txn.get(&key).await?;
    let truncation = value.as_deref().map(Truncation::decode).transpose()?.unwrap_or_default();
    let Some(from) = truncation.trim_from else { return Ok(false) };
    let mut live = LiveBytes::default();
    let range = key::chunks_from(ino, ChunkIndex(from));
    let (_, more) = clear_groups(txn, &range, TRIM_PAGE, &mut live).await?;
    live.store(txn);
    if !more {
        txn.set(&key, &Truncation { trim_from: None, ..truncation }.encode());
    }
    Ok(more)
}

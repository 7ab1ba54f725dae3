//! rename.

use rfs_kv::Txn;

use crate::meta::inode::{
    Entry, Node, check_empty, check_entry, check_flags, directory, drop_name, get_dentry, get_inode, load,
    named, touch_directory,
};
use crate::meta::key::Field;
use crate::meta::record::{DentryRecord, Inode};
use crate::meta::{Meta, Unlinked, key};
use crate::types::{Error, ErrorKind, Ino, Kind, Name, Result, SessionId, Timestamp};

/// What to do with the target's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RenameMode {
    /// Replace what is there.
    Replace,
    /// Fail when something is there (`RENAME_NOREPLACE`).
    NoReplace,
    /// Swap the two (`RENAME_EXCHANGE`).
    Exchange,
}

/// What to rename, and to what.
#[derive(Debug, Clone, Copy)]
pub struct RenameArgs<'a> {
    /// Directory of the source.
    pub parent: Ino,
    /// Name of the source.
    pub name: &'a Name,
    /// Directory of the target.
    pub new_parent: Ino,
    /// Name of the target.
    pub new_name: &'a Name,
    /// What to do with the target's name.
    pub mode: RenameMode,
}

/// What a rename did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Renamed {
    /// The inode that has the target's name now.
    pub moved: Ino,
    /// Its kind.
    pub moved_kind: Kind,
    /// With `Exchange`, the inode that has the source's name now.
    pub exchanged: Option<Ino>,
    /// With `Replace`, the inode that had the target's name.
    pub replaced: Option<Unlinked>,
}

/// Most ancestors of a directory; more are a loop, that is damage.
const DEPTH_MAX: usize = 1 << 20;

impl Meta {
    /// Moves or swaps names atomically (renameat2(2)).
    ///
    /// Source and target that are the same inode are left as they are. A target that is replaced loses a name as with
    /// [`Meta::unlink`] or [`Meta::rmdir`].
    ///
    /// Reads both directories' records, both dentries, both inodes, and for a directory that changes its parent all
    /// ancestors of where it goes: two renames that together would make a loop conflict. Writes 4 to 11 keys, < 2 kB.
    ///
    /// # Errors
    /// `NotFound` no source, or (`Exchange`) no target, or a removed directory; `Exists` (`NoReplace`); `IsDirectory` and
    /// `NotDirectory` when kinds differ (not for `Exchange`); `NotEmpty` target; `Invalid` when a directory would go into
    /// itself; `NotPermitted` where flags forbid it.
    pub async fn rename(&self, args: RenameArgs<'_>) -> Result<Renamed> {
        let now = self.now();
        let session = self.session()?.id();
        let args = &args;
        self.mutate(|txn| async move { rename_in(&*txn, args, now, session).await }).await
    }
}

pub(in crate::meta) async fn rename_in(
    txn: &dyn Txn,
    args: &RenameArgs<'_>,
    now: Timestamp,
    session: SessionId,
) -> Result<Renamed> {
    // Read together, judged in the order of Linux.
    let (source, target, from, to) = futures::join!(
        get_dentry(txn, args.parent, args.name),
        get_dentry(txn, args.new_parent, args.new_name),
        directory(txn, args.parent, Entry::Remove),
        new_directory(txn, args)
    );
    let (source, target) = (source?, target?);
    let source = source.ok_or(ErrorKind::NotFound)?;
    match (args.mode, target) {
        (RenameMode::NoReplace, Some(_)) => return Err(ErrorKind::Exists.into()),
        (RenameMode::Exchange, None) => return Err(ErrorKind::NotFound.into()),
        (_, Some(target)) if target.ino == source.ino => {
            let (moved, moved_kind) = (source.ino, source.kind);
            return Ok(Renamed { moved, moved_kind, exchanged: None, replaced: None });
        }
        _ => {}
    }
    from?;
    if let (Some(to), true) = (to?, target.is_some()) {
        check_entry(&to, Entry::Remove)?;
    }
    let (moving, target) = futures::try_join!(load_named(txn, source), async {
        match target {
            Some(target) => load_named(txn, target).await.map(Some),
            None => Ok(None),
        }
    })?;
    check_flags(&moving.inode)?;
    if args.parent != args.new_parent {
        check_loops(txn, args, &moving, target.as_ref()).await?;
    }
    if let Some(target) = &target {
        check_target(args.mode, &moving, target)?;
    }
    let (moved, moved_kind) = (source.ino, source.kind);
    let mut renamed = Renamed { moved, moved_kind, exchanged: None, replaced: None };
    match target {
        Some(target) if args.mode == RenameMode::Exchange => {
            renamed.exchanged = Some(target.ino);
            let there = DentryRecord { ino: target.ino, kind: target.inode.kind };
            txn.set(&key::dentry(args.parent, args.name), &there.encode());
            reparent(txn, target, args.new_parent, args.parent, now);
        }
        Some(target) => {
            if target.inode.kind == Kind::Directory {
                check_empty(txn, target.ino).await?;
                txn.add(&key::inode(args.new_parent, Field::Subdirectories), -1);
            }
            renamed.replaced = Some(drop_name(txn, target, now, session));
            txn.clear(&key::dentry(args.parent, args.name));
        }
        None => txn.clear(&key::dentry(args.parent, args.name)),
    }
    txn.set(&key::dentry(args.new_parent, args.new_name), &source.encode());
    reparent(txn, moving, args.parent, args.new_parent, now);
    touch_directory(txn, args.parent, now);
    if args.new_parent != args.parent {
        touch_directory(txn, args.new_parent, now);
    }
    Ok(renamed)
}

/// The target's directory, unless it is the source's too.
async fn new_directory(txn: &dyn Txn, args: &RenameArgs<'_>) -> Result<Option<Inode>> {
    if args.parent == args.new_parent {
        return Ok(None);
    }
    directory(txn, args.new_parent, Entry::Add).await.map(Some)
}

async fn load_named(txn: &dyn Txn, dentry: DentryRecord) -> Result<Node> {
    named(load(txn, dentry.ino).await?, dentry.ino)
}

/// The target may be replaced by, or swapped with, what moves.
fn check_target(mode: RenameMode, moving: &Node, target: &Node) -> Result<()> {
    check_flags(&target.inode)?;
    let is_directory = |node: &Node| node.inode.kind == Kind::Directory;
    match (is_directory(moving), is_directory(target)) {
        _ if mode == RenameMode::Exchange => Ok(()),
        (true, false) => Err(ErrorKind::NotDirectory.into()),
        (false, true) => Err(ErrorKind::IsDirectory.into()),
        (true, true) | (false, false) => Ok(()),
    }
}

/// No directory goes into itself.
async fn check_loops(
    txn: &dyn Txn,
    args: &RenameArgs<'_>,
    moving: &Node,
    target: Option<&Node>,
) -> Result<()> {
    if moving.inode.kind == Kind::Directory {
        check_not_inside(txn, args.new_parent, moving.ino).await?;
    }
    match target {
        Some(target) if args.mode == RenameMode::Exchange && target.inode.kind == Kind::Directory => {
            check_not_inside(txn, args.parent, target.ino).await
        }
        _ => Ok(()),
    }
}

/// Walks from `dir` to the root, with conflicts, and fails with `Invalid` when it meets `outer`.
async fn check_not_inside(txn: &dyn Txn, dir: Ino, outer: Ino) -> Result<()> {
    let mut at = dir;
    for _ in 0..DEPTH_MAX {
        if at == outer {
            return Err(ErrorKind::Invalid.into());
        }
        if at == Ino::ROOT {
            return Ok(());
        }
        let inode = get_inode(txn, at).await?;
        let inode = inode.ok_or_else(|| {
            Error::new(ErrorKind::Io, format!("damaged metadata: the ancestor {at} of {dir} is missing"))
        })?;
        at = inode.parent;
    }
    Err(Error::new(ErrorKind::Io, format!("damaged metadata: the ancestors of {dir} form a loop")))
}

/// The change of an inode whose name moves from the directory `from` to `to`.
fn reparent(txn: &dyn Txn, mut node: Node, from: Ino, to: Ino, now: Timestamp) {
    node.times.ctime = now;
    node.store_times(txn);
    if node.inode.kind == Kind::Directory && from != to {
        node.inode.parent = to;
        node.store_inode(txn);
        txn.add(&key::inode(from, Field::Subdirectories), -1);
        txn.add(&key::inode(to, Field::Subdirectories), 1);
    }
}

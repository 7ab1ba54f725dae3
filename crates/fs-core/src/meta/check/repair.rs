//! Repairs, one finding a transaction.
//!
//! Each reads what the finding is about, with conflicts, and does nothing where that is not as the finding says any
//! more. So a second run of a repair is harmless, and so is a finding that is out of date. Repairs can uncover more
//! (a dentry that is removed leaves an inode without a name): check again until nothing is found.

use rfs_kv::Txn;

use crate::meta::inode::{get_dentry, get_inode, load, peek, touch_directory};
use crate::meta::key::{Counter, Field};
use crate::meta::ops::chunks::{LiveBytes, clear_groups};
use crate::meta::record::{self, DentryRecord, Inode, PackRecord, Truncation};
use crate::meta::usage::{self, Change, totals_in};
use crate::meta::{MakeArgs, Meta, PackState, key};
use crate::types::{
    Caller, ChunkIndex, Error, ErrorKind, Ino, Kind, Name, PackId, Result, SessionId, Timestamp,
};

use super::Finding;

/// Where inodes without a name get one, in the root directory.
const LOST_AND_FOUND: &str = "lost+found";
/// The session of orphan records that repairs write: it never lives, so the next mount removes the inode.
const NOBODY: SessionId = SessionId(0);
/// Slice groups that one transaction removes.
const GROUPS_PAGE: usize = 512;

/// What repairs did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Repaired {
    /// Findings that were mended.
    pub mended: Vec<Finding>,
    /// Findings that did not hold any more.
    pub outdated: Vec<Finding>,
}

impl Meta {
    /// Mends what a check found. Inodes without a name get one in `/lost+found`. Records that do not decode stay as they
    /// are: what they said is lost, and removing them could only lose more.
    ///
    /// # Errors
    /// `ReadOnly` without a session.
    pub async fn repair(&self, findings: &[Finding]) -> Result<Repaired> {
        let mut repaired = Repaired::default();
        for finding in findings {
            if matches!(finding, Finding::Undecodable { .. }) {
                continue;
            }
            let mended = self.repair_one(finding).await?;
            let list = if mended { &mut repaired.mended } else { &mut repaired.outdated };
            list.push(finding.clone());
        }
        self.refresh_usage().await?;
        Ok(repaired)
    }

    async fn repair_one(&self, finding: &Finding) -> Result<bool> {
        let session = self.session()?.id();
        let now = self.now();
        match finding {
            Finding::Unreachable { ino, .. } => {
                let dir = self.lost_and_found().await?;
                self.mutate(|txn| async move { attach(&*txn, dir, *ino, now).await }).await
            }
            Finding::StraySlices { ino } => {
                while self.mutate(|txn| async move { clear_slices(&*txn, *ino).await }).await? {}
                Ok(true)
            }
            Finding::SlicesBeyondEnd { ino, from } => {
                let marked = self.mutate(|txn| async move { mark_trim(&*txn, *ino, *from).await }).await?;
                self.trim(*ino).await?;
                Ok(marked)
            }
            _ => self.mutate(|txn| async move { mend_in(&*txn, finding, session, now).await }).await,
        }
    }

    /// The directory for inodes without a name; made at need.
    async fn lost_and_found(&self) -> Result<Ino> {
        let name = Name::new(LOST_AND_FOUND)?;
        let caller = Caller { uid: 0, gid: 0, pid: 0 };
        let args = MakeArgs {
            parent: Ino::ROOT,
            name: &name,
            kind: Kind::Directory,
            mode: 0o700,
            rdev: 0,
            target: None,
            caller: &caller,
        };
        match self.make(args).await {
            Ok(attr) => Ok(attr.ino),
            Err(error) if error.kind == ErrorKind::Exists => {
                let attr = self.lookup(Ino::ROOT, &name).await?;
                match attr.kind {
                    Kind::Directory => Ok(attr.ino),
                    _ => Err(Error::new(
                        ErrorKind::NotDirectory,
                        "/lost+found is not a directory: rename it first",
                    )),
                }
            }
            Err(error) => Err(error),
        }
    }
}

/// Repairs of one transaction. Returns whether the finding still held.
async fn mend_in(txn: &dyn Txn, finding: &Finding, session: SessionId, now: Timestamp) -> Result<bool> {
    match finding {
        Finding::Undecodable { .. } => Ok(false),
        Finding::RootMissing => make_root(txn, now).await,
        Finding::DanglingDentry { dir, name, ino } => match get_inode(txn, *ino).await? {
            Some(_) => Ok(false),
            None => clear_dentry(txn, *dir, name, *ino, now).await,
        },
        Finding::DentryOutsideDirectory { dir, name, ino } => match get_inode(txn, *dir).await? {
            Some(inode) if inode.kind == Kind::Directory => Ok(false),
            _ => clear_dentry_only(txn, *dir, name, *ino).await,
        },
        Finding::SecondName { dir, name, ino } => clear_dentry(txn, *dir, name, *ino, now).await,
        Finding::WrongKind { dir, name, ino, actual } => {
            let record = DentryRecord { ino: *ino, kind: *actual };
            let wrong = get_dentry(txn, *dir, name).await?.is_some_and(|d| d.ino == *ino && d != record);
            if wrong {
                txn.set(&key::dentry(*dir, name), &record.encode());
            }
            Ok(wrong)
        }
        Finding::WrongParent { ino, stored, actual } => {
            change_inode(txn, *ino, |inode| inode.parent == *stored, |inode| inode.parent = *actual).await
        }
        Finding::WrongNlink { ino, stored, counted } => {
            let holds = |inode: &Inode| inode.nlink == *stored;
            let mended = change_inode(txn, *ino, holds, |inode| inode.nlink = *counted).await?;
            if mended {
                let range = key::orphans_of(*ino);
                txn.clear_range(&range.begin, &range.end);
            }
            Ok(mended)
        }
        Finding::WrongSubdirectories { ino, stored, counted } => {
            correct_counter(txn, &key::inode(*ino, Field::Subdirectories), *stored, *counted).await
        }
        Finding::WrongAllocated { ino, stored, counted } => {
            let mended = correct_counter(txn, &key::inode(*ino, Field::Allocated), *stored, *counted).await?;
            if mended {
                usage::add_in(txn, session, Change::bytes(counted - stored));
            }
            Ok(mended)
        }
        Finding::OrphanWithoutRecord { ino } => {
            let orphan = get_inode(txn, *ino).await?.is_some_and(|inode| inode.nlink == 0);
            if orphan {
                txn.set(&key::orphan(*ino, NOBODY), &record::encode_orphan());
            }
            Ok(orphan)
        }
        Finding::StaleOrphanRecord { ino, session } => {
            let key = key::orphan(*ino, *session);
            let stale = get_inode(txn, *ino).await?.is_none_or(|inode| inode.nlink > 0);
            let held = stale && txn.get(&key).await?.is_some();
            if held {
                txn.clear(&key);
            }
            Ok(held)
        }
        Finding::StrayAttributes { ino } => clear_stray(txn, *ino, &key::inodes(*ino, *ino)).await,
        Finding::StrayXattrs { ino } => clear_stray(txn, *ino, &key::xattrs(*ino)).await,
        Finding::WrongPackLive { pack, stored, counted } => {
            correct_counter(txn, &key::pack_live(*pack), *stored, *counted).await
        }
        Finding::PackWithoutRecord { pack, live } => make_pack(txn, *pack, *live).await,
        Finding::WrongInodesUsed { stored, counted } => {
            let held = totals_in(txn).await?.inodes == *stored;
            if held {
                txn.add(&key::usage(Counter::Inodes, session), counted - stored);
            }
            Ok(held)
        }
        Finding::WrongBytesUsed { stored, counted } => {
            let held = totals_in(txn).await?.bytes == *stored;
            if held {
                txn.add(&key::usage(Counter::Bytes, session), counted - stored);
            }
            Ok(held)
        }
        Finding::Unreachable { .. } | Finding::StraySlices { .. } | Finding::SlicesBeyondEnd { .. } => {
            unreachable!("repaired by several transactions")
        }
    }
}

async fn make_root(txn: &dyn Txn, now: Timestamp) -> Result<bool> {
    if get_inode(txn, Ino::ROOT).await?.is_some() {
        return Ok(false);
    }
    let root = Inode {
        kind: Kind::Directory,
        mode: 0o755,
        nlink: 2,
        uid: 0,
        gid: 0,
        rdev: 0,
        flags: 0,
        generation: 0,
        parent: Ino::ROOT,
        crtime: now,
    };
    txn.set(&key::inode(Ino::ROOT, Field::Inode), &root.encode());
    Ok(true)
}

/// Removes a dentry if it still names `ino`.
async fn clear_dentry(txn: &dyn Txn, dir: Ino, name: &Name, ino: Ino, now: Timestamp) -> Result<bool> {
    let cleared = clear_dentry_only(txn, dir, name, ino).await?;
    if cleared {
        touch_directory(txn, dir, now);
    }
    Ok(cleared)
}

async fn clear_dentry_only(txn: &dyn Txn, dir: Ino, name: &Name, ino: Ino) -> Result<bool> {
    let held = get_dentry(txn, dir, name).await?.is_some_and(|dentry| dentry.ino == ino);
    if held {
        txn.clear(&key::dentry(dir, name));
    }
    Ok(held)
}

async fn change_inode(
    txn: &dyn Txn,
    ino: Ino,
    holds: impl Fn(&Inode) -> bool + Send,
    change: impl Fn(&mut Inode) + Send,
) -> Result<bool> {
    let Some(mut inode) = get_inode(txn, ino).await?.filter(|inode| holds(inode)) else {
        return Ok(false);
    };
    change(&mut inode);
    txn.set(&key::inode(ino, Field::Inode), &inode.encode());
    Ok(true)
}

async fn correct_counter(txn: &dyn Txn, key: &[u8], stored: i64, counted: i64) -> Result<bool> {
    let value = txn.get(key).await?;
    let now = value.as_deref().map(record::decode_counter).transpose()?.unwrap_or(0);
    if now != stored {
        return Ok(false);
    }
    txn.add(key, counted - stored);
    Ok(true)
}

/// Removes what belongs to an inode that does not exist.
async fn clear_stray(txn: &dyn Txn, ino: Ino, range: &key::KeyRange) -> Result<bool> {
    let stray = get_inode(txn, ino).await?.is_none();
    if stray {
        txn.clear_range(&range.begin, &range.end);
    }
    Ok(stray)
}

async fn make_pack(txn: &dyn Txn, pack: PackId, live: i64) -> Result<bool> {
    if txn.get(&key::pack(pack)).await?.is_some() {
        return Ok(false);
    }
    let bytes = u64::try_from(live).unwrap_or(0);
    txn.set(&key::pack(pack), &PackRecord { bytes, state: PackState::Stored }.encode());
    let value = txn.get(&key::pack_live(pack)).await?;
    let stored = value.as_deref().map(record::decode_counter).transpose()?.unwrap_or(0);
    txn.add(&key::pack_live(pack), live - stored);
    Ok(true)
}

/// Removes one page of the slices of what is not a file. Returns whether there are more.
async fn clear_slices(txn: &dyn Txn, ino: Ino) -> Result<bool> {
    if get_inode(txn, ino).await?.is_some_and(|inode| inode.kind == Kind::File) {
        return Ok(false);
    }
    let mut live = LiveBytes::default();
    let range = key::chunks_from(ino, ChunkIndex(0));
    let (_, more) = clear_groups(txn, &range, GROUPS_PAGE, &mut live).await?;
    live.store(txn);
    Ok(more)
}

/// Marks the chunks from `from` on to be trimmed if they still lie beyond the end.
async fn mark_trim(txn: &dyn Txn, ino: Ino, from: ChunkIndex) -> Result<bool> {
    let length = key::inode(ino, Field::Length);
    txn.add_read_conflict(&length, &key::successor(&length));
    let Some(node) = peek(txn, ino).await? else { return Ok(false) };
    if node.length > from.start() || node.truncation.trim_from.is_some() {
        return Ok(false);
    }
    let truncation = Truncation { count: node.truncation.count + 1, trim_from: Some(from.0) };
    txn.set(&key::inode(ino, Field::Truncation), &truncation.encode());
    Ok(true)
}

/// Gives an inode without a name one in `dir`.
async fn attach(txn: &dyn Txn, dir: Ino, ino: Ino, now: Timestamp) -> Result<bool> {
    let Some(mut node) = load(txn, ino).await? else { return Ok(false) };
    let name = Name::new(format!("ino-{ino}"))?;
    if get_dentry(txn, dir, &name).await?.is_some() {
        return Ok(false);
    }
    node.times.ctime = now;
    node.store_times(txn);
    if node.inode.kind == Kind::Directory {
        node.inode.nlink = 2;
        node.inode.parent = dir;
        txn.add(&key::inode(dir, Field::Subdirectories), 1);
    } else {
        node.inode.nlink = 1;
    }
    node.store_inode(txn);
    let orphans = key::orphans_of(ino);
    txn.clear_range(&orphans.begin, &orphans.end);
    txn.set(&key::dentry(dir, &name), &DentryRecord { ino, kind: node.inode.kind }.encode());
    touch_directory(txn, dir, now);
    Ok(true)
}

//! Tables: open files, inodes with state in memory, and how often the kernel knows an inode.
//!
//! Everything is sharded, and no lock here is held while another one is taken, except an inode's state under its
//! shard's lock. An inode's state exists as long as somebody holds an [`InodeRef`] or it is not clean.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ops::Deref;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

use super::inode::Inode;
use super::readahead::Readahead;
use super::request::{Fh, OpenFlags};
use crate::types::{Attr, ErrorKind, Ino, Result};

const SHARDS: usize = 64;

pub(super) fn shard_of<T>(shards: &[T], number: u64) -> &T {
    // Inode and handle numbers are consecutive, so the low bits spread them.
    let index = usize::try_from(number % SHARDS as u64).expect("below the number of shards");
    &shards[index]
}

pub(super) fn shards<T: Default>() -> Box<[T]> {
    (0..SHARDS).map(|_| T::default()).collect()
}

/// Inodes with state in memory.
#[derive(Debug)]
pub(super) struct InodeTable {
    shards: Box<[Mutex<InodeShard>]>,
    retired: AtomicU64,
}

#[derive(Debug, Default)]
struct InodeShard {
    inodes: HashMap<Ino, Arc<Inode>>,
    retired: u64,
}

/// What a lookup in the table says.
pub(super) enum Found {
    /// The state.
    Here(InodeRef),
    /// None; a new one may be inserted if no state was dropped since (the number says so).
    Absent(u64),
}

impl InodeTable {
    pub(super) fn new() -> Arc<InodeTable> {
        Arc::new(InodeTable { shards: shards(), retired: AtomicU64::new(0) })
    }

    pub(super) fn get(self: &Arc<InodeTable>, ino: Ino) -> Option<InodeRef> {
        let inode = shard_of(&self.shards, ino.0).lock().inodes.get(&ino).cloned()?;
        Some(InodeRef { inode, table: Arc::clone(self) })
    }

    pub(super) fn find(self: &Arc<InodeTable>, ino: Ino) -> Found {
        let shard = shard_of(&self.shards, ino.0).lock();
        match shard.inodes.get(&ino) {
            Some(inode) => Found::Here(InodeRef { inode: Arc::clone(inode), table: Arc::clone(self) }),
            None => Found::Absent(shard.retired),
        }
    }

    /// Makes state from attributes that were read after [`InodeTable::find`] returned `absent`. `None`: state came and
    /// went meanwhile, so the attributes may be old.
    pub(super) fn insert(self: &Arc<InodeTable>, attr: &Attr, absent: u64) -> Option<InodeRef> {
        let mut shard = shard_of(&self.shards, attr.ino.0).lock();
        let retired = shard.retired;
        let inode = match shard.inodes.entry(attr.ino) {
            Entry::Occupied(there) => Arc::clone(there.get()),
            Entry::Vacant(_) if retired != absent => return None,
            Entry::Vacant(free) => Arc::clone(free.insert(Arc::new(Inode::new(attr)))),
        };
        drop(shard);
        Some(InodeRef { inode, table: Arc::clone(self) })
    }

    /// How many states were dropped: if it has not changed, attributes read meanwhile need no second look.
    pub(super) fn retired(&self) -> u64 {
        self.retired.load(Ordering::Acquire)
    }

    /// All inodes with state.
    pub(super) fn all(self: &Arc<InodeTable>) -> Vec<InodeRef> {
        let mut all = Vec::new();
        for shard in &self.shards {
            let inodes: Vec<_> = shard.lock().inodes.values().cloned().collect();
            all.extend(inodes.into_iter().map(|inode| InodeRef { inode, table: Arc::clone(self) }));
        }
        all
    }

    pub(super) fn count(&self) -> u64 {
        self.shards.iter().map(|shard| shard.lock().inodes.len() as u64).sum()
    }
}

/// Keeps an inode's state in memory.
#[derive(Debug, Clone)]
pub(super) struct InodeRef {
    inode: Arc<Inode>,
    table: Arc<InodeTable>,
}

impl Deref for InodeRef {
    type Target = Inode;

    fn deref(&self) -> &Inode {
        &self.inode
    }
}

impl Drop for InodeRef {
    fn drop(&mut self) {
        // The table's and this one; others are only made from one of these, under the lock or from a living reference.
        if Arc::strong_count(&self.inode) > 2 {
            return;
        }
        let mut shard = shard_of(&self.table.shards, self.inode.ino.0).lock();
        if Arc::strong_count(&self.inode) == 2 && self.inode.state().is_clean() {
            shard.inodes.remove(&self.inode.ino);
            shard.retired += 1;
            self.table.retired.fetch_add(1, Ordering::Release);
        }
    }
}

/// How often somebody outside knows an inode.
#[derive(Debug, Clone, Copy, Default)]
struct Known {
    lookups: u64,
    opens: u32,
    orphan: bool,
}

/// How often the kernel knows each inode, and how many handles it has.
#[derive(Debug)]
pub(super) struct KnownTable {
    shards: Box<[Mutex<HashMap<Ino, Known>>]>,
}

/// Whether somebody can still reach an inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reach {
    Known,
    /// It has no name, and nobody knows it any more.
    Unreachable,
}

impl KnownTable {
    pub(super) fn new() -> KnownTable {
        KnownTable { shards: shards() }
    }

    pub(super) fn looked_up(&self, ino: Ino) {
        shard_of(&self.shards, ino.0).lock().entry(ino).or_default().lookups += 1;
    }

    pub(super) fn opened(&self, ino: Ino) {
        shard_of(&self.shards, ino.0).lock().entry(ino).or_default().opens += 1;
    }

    pub(super) fn forget(&self, ino: Ino, count: u64) -> Reach {
        self.lower(ino, |known| known.lookups = known.lookups.saturating_sub(count))
    }

    pub(super) fn closed(&self, ino: Ino) -> Reach {
        self.lower(ino, |known| known.opens = known.opens.saturating_sub(1))
    }

    /// The inode lost its last name.
    pub(super) fn orphaned(&self, ino: Ino) -> Reach {
        match shard_of(&self.shards, ino.0).lock().get_mut(&ino) {
            Some(known) => {
                known.orphan = true;
                Reach::Known
            }
            None => Reach::Unreachable,
        }
    }

    /// Whether there are orphans: in use, or waiting for the kernel to say that they no longer are (it tells of a close as
    /// of a forgotten inode some time later).
    pub(super) fn has_orphans(&self) -> bool {
        self.shards.iter().any(|shard| shard.lock().values().any(|known| known.orphan))
    }

    pub(super) fn is_known(&self, ino: Ino) -> bool {
        shard_of(&self.shards, ino.0).lock().contains_key(&ino)
    }

    pub(super) fn count(&self) -> u64 {
        self.shards.iter().map(|shard| shard.lock().len() as u64).sum()
    }

    fn lower(&self, ino: Ino, by: impl FnOnce(&mut Known)) -> Reach {
        let mut shard = shard_of(&self.shards, ino.0).lock();
        let Entry::Occupied(mut entry) = shard.entry(ino) else { return Reach::Known };
        by(entry.get_mut());
        let known = *entry.get();
        if known.lookups > 0 || known.opens > 0 {
            return Reach::Known;
        }
        entry.remove();
        if known.orphan { Reach::Unreachable } else { Reach::Known }
    }
}

/// An open file.
#[derive(Debug)]
pub(super) struct FileHandle {
    pub(super) inode: InodeRef,
    pub(super) flags: OpenFlags,
    pub(super) readahead: Mutex<Readahead>,
    /// Set when it is read ahead of: those who are share the memory for it.
    pub(super) read_ahead_of: OnceLock<Arc<()>>,
    /// Failures of the file that this handle has told, or that were before it.
    pub(super) failures_told: AtomicU64,
    pub(super) told_by: ToldBy,
}

/// What tells of bytes that could not be stored, besides fsync.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ToldBy {
    Close,
    /// Close asks nothing (docs/decisions/0014).
    NextWrite,
}

type HandleShard = Mutex<HashMap<Fh, Arc<FileHandle>>>;

/// Open files. Their numbers come from one sequence and are not reused.
#[derive(Debug)]
pub(super) struct HandleTable {
    files: Box<[HandleShard]>,
    next: AtomicU64,
}

impl HandleTable {
    pub(super) fn new() -> HandleTable {
        HandleTable { files: shards(), next: AtomicU64::new(1) }
    }

    pub(super) fn add_file(&self, handle: FileHandle) -> Fh {
        let fh = Fh(self.next.fetch_add(1, Ordering::Relaxed));
        shard_of(&self.files, fh.0).lock().insert(fh, Arc::new(handle));
        fh
    }

    pub(super) fn file(&self, fh: Fh) -> Result<Arc<FileHandle>> {
        shard_of(&self.files, fh.0).lock().get(&fh).cloned().ok_or(ErrorKind::BadHandle.into())
    }

    pub(super) fn remove_file(&self, fh: Fh) -> Result<Arc<FileHandle>> {
        shard_of(&self.files, fh.0).lock().remove(&fh).ok_or(ErrorKind::BadHandle.into())
    }

    pub(super) fn count(&self) -> u64 {
        self.files.iter().map(|shard| shard.lock().len() as u64).sum()
    }
}

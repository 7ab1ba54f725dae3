//! What FUSE and gateways call: one method a request, named as the system calls are.
//!
//! Owns handles, lookup counts, dirty bytes and the tasks that flush, read ahead, compact and collect garbage. It is the
//! only place that knows both metadata and data. It knows no kernel structures and no errnos. Permissions are the
//! kernel's business; what the kernel leaves to a filesystem (set-id bits, inode flags, capacity) is decided here and below.
//!
//! Requests that need neither the store nor a gate finish in one poll. Bytes become part of a file in four steps: dirty
//! (`write`), batch (a flush took them), placed (they have their place in a pack), committed (the pack is stored or staged
//! and the metadata names it). Lock order: see `inode`; tables and lists are leaves, but for a shard over an inode's state.

mod attr;
mod commit;
mod compact;
mod copy;
mod dir;
mod dirty;
mod flush;
pub mod fsck;
mod gc;
mod handle;
pub mod info;
mod inode;
mod namespace;
mod paths;
mod places;
mod read;
mod readahead;
mod request;
mod space;
pub mod staging;
mod strides;
mod write;
mod xattr;

#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

pub use request::{
    AccessMode, AtimeMode, CopyArgs, DirEntry, DirSink, FallocateMode, Fh, FsyncMode, GcReport, NewNode,
    NodeKind, OpenFlags, Opened, ReaddirArgs, ReaddirMode, RenameArgs, RenameMode, ShutdownReport, Statfs,
    StoreRoom, SyncMode, Unsaved, VfsOptions, VfsStats, Whence, WriteAccess, WriteArgs, WriteOrigin,
    XattrMode,
};

use flush::Flusher;
use gc::Collector;
use handle::{HandleTable, InodeTable, KnownTable};
use places::Places;

use crate::data::{Budget, Data};
use crate::meta::{HEARTBEAT, Meta};
use crate::tasks::Tasks;
use crate::types::{ErrorKind, Result, Timestamp};

/// A mounted filesystem.
pub struct Vfs {
    meta: Arc<Meta>,
    data: Arc<Data>,
    memory: Arc<Budget>,
    options: VfsOptions,
    read_only: AtomicBool,
    inodes: Arc<InodeTable>,
    known: KnownTable,
    handles: HandleTable,
    places: Places,
    /// As many more references as there are handles that are read ahead of.
    readers_ahead: Arc<()>,
    flusher: Flusher,
    collector: Collector,
    tasks: Tasks,
    /// Bytes of all files that are counted against the capacity and not committed.
    reserved_bytes: AtomicU64,
    /// Counts extended attributes that were set, or may have been.
    xattrs_set: AtomicU64,
    counters: Counters,
}

impl fmt::Debug for Vfs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Vfs")
            .field("options", &self.options)
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}

/// What is only counted.
#[derive(Debug, Default)]
struct Counters {
    flush_failures: AtomicU64,
    chunks_compacted: AtomicU64,
    orphans_reaped: AtomicU64,
    packs_deleted: AtomicU64,
}

impl Vfs {
    /// Starts to serve a volume: begins the background tasks and reaps what a crash left behind. `memory` is the budget
    /// that `data` was opened with. Must be called in a tokio runtime, which the tasks then use until [`Vfs::shutdown`].
    pub fn mount(meta: Arc<Meta>, data: Arc<Data>, memory: Arc<Budget>, options: VfsOptions) -> Arc<Vfs> {
        let read_only = options.access == WriteAccess::ReadOnly || meta.session_id().is_none();
        let tasks = Tasks::new(Arc::clone(data.health()));
        let vfs = Arc::new(Vfs {
            meta,
            data,
            memory,
            read_only: AtomicBool::new(read_only),
            inodes: InodeTable::new(),
            known: KnownTable::new(),
            handles: HandleTable::new(),
            places: Places::new(),
            readers_ahead: Arc::default(),
            flusher: Flusher::new(),
            collector: Collector::new(),
            tasks,
            reserved_bytes: AtomicU64::new(0),
            xattrs_set: AtomicU64::new(0),
            counters: Counters::default(),
            options,
        });
        if vfs.meta.session_id().is_some() {
            vfs.start_watchman();
            vfs.start_flusher();
            vfs.start_settler();
            vfs.start_collector();
            if vfs.options.heartbeat {
                vfs.start_heartbeat();
            }
        }
        vfs
    }

    /// Has all tasks end when one has panicked: what it left half done is nothing to write on from.
    fn start_watchman(self: &Arc<Vfs>) {
        let (vfs, health) = (Arc::downgrade(self), Arc::clone(self.data.health()));
        self.tasks.spawn(async move {
            health.wait_broken().await;
            if let Some(vfs) = vfs.upgrade() {
                vfs.tasks.cancel();
            }
        });
    }

    /// Gives signs of life, so that no other client takes this one for dead. What the store of the metadata may have counted
    /// without an answer is read after one that was answered.
    fn start_heartbeat(self: &Arc<Vfs>) {
        let vfs = Arc::downgrade(self);
        self.tasks.spawn(async move {
            let mut beats = tokio::time::interval(HEARTBEAT);
            beats.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
            loop {
                beats.tick().await;
                let Some(vfs) = vfs.upgrade() else { return };
                match vfs.meta.heartbeat().await {
                    Ok(()) => {
                        if let Err(error) = vfs.meta.recount().await {
                            tracing::debug!(%error, "could not read what the volume holds");
                        }
                    }
                    Err(error) if error.kind == ErrorKind::Stale => {
                        tracing::error!(
                            "another client has mounted the volume, this one may not change it any more"
                        );
                        return;
                    }
                    // Requests tell that the store is away.
                    Err(error) => tracing::debug!(%error, "could not give a sign of life"),
                }
            }
        });
    }

    /// Settings of the mount.
    pub fn options(&self) -> &VfsOptions {
        &self.options
    }

    /// The volume's metadata, for fsck and info.
    pub fn meta(&self) -> &Arc<Meta> {
        &self.meta
    }

    /// The volume's data, for fsck and info.
    pub fn data(&self) -> &Arc<Data> {
        &self.data
    }

    /// Why nothing is changed any more: what the background task said that panicked. Reading goes on.
    pub fn broken(&self) -> Option<&str> {
        self.data.health().broken()
    }

    /// Whether changes are refused.
    pub fn is_read_only(&self) -> bool {
        self.read_only.load(Ordering::Acquire)
    }

    /// Switches between read-only and read-write (mount -o remount). Before it is read-only, everything is stored.
    ///
    /// # Errors
    /// `Io` when something could not be stored; the mount is read-only nevertheless, and goes on trying.
    /// `ReadOnly` when the volume was opened without the right to write.
    pub async fn set_read_only(&self, access: WriteAccess) -> Result<()> {
        match access {
            WriteAccess::ReadOnly => {
                self.read_only.store(true, Ordering::Release);
                self.sync_all().await
            }
            WriteAccess::ReadWrite if self.meta.session_id().is_none() => Err(ErrorKind::ReadOnly.into()),
            WriteAccess::ReadWrite => {
                self.read_only.store(false, Ordering::Release);
                Ok(())
            }
        }
    }

    /// Stores everything and ends all tasks, the session and the data layer. Nothing may be called afterwards.
    pub async fn shutdown(&self) -> ShutdownReport {
        let mut report = ShutdownReport::default();
        self.read_only.store(true, Ordering::Release);
        if self.may_commit() {
            // What nobody can reach any more need not be stored.
            self.reap_closed().await;
        }
        if self.meta.session_id().is_some()
            && let Err(error) = self.sync_all().await
        {
            report.errors.push(error);
        }
        if self.may_commit() {
            self.reap_closed().await;
        }
        self.tasks.end().await;
        for inode in self.inodes.all() {
            let bytes = inode.state().unsaved_bytes();
            if inode.state().needs_flush() && bytes > 0 {
                report.unsaved.push(Unsaved { ino: inode.ino, path: None, bytes });
            }
        }
        self.name_unsaved(&mut report).await;
        if self.may_commit()
            && let Err(error) = self.give_up_garbage().await
        {
            report.errors.push(error);
        }
        if let Err(error) = self.data.close().await {
            report.errors.push(error);
        }
        if self.may_commit()
            && let Err(error) = self.settle_staged().await
        {
            report.errors.push(error);
        }
        if let Err(error) = self.meta.close().await {
            report.errors.push(error);
        }
        report
    }

    /// Whether what is done on the filesystem's own account may change anything.
    fn may_commit(&self) -> bool {
        self.meta.session_id().is_some() && self.broken().is_none()
    }

    /// Gives the files that were not saved their paths.
    async fn name_unsaved(&self, report: &mut ShutdownReport) {
        let wanted = report.unsaved.iter().map(|unsaved| unsaved.ino).collect();
        match paths::paths_of(&self.meta, &wanted).await {
            Ok(mut paths) => {
                for unsaved in &mut report.unsaved {
                    unsaved.path = paths.remove(&unsaved.ino);
                }
            }
            Err(error) => report.errors.push(error),
        }
    }

    /// Counts and sizes now.
    pub fn stats(&self) -> VfsStats {
        let mut stats = VfsStats::default();
        for inode in self.inodes.all() {
            let file = inode.state();
            let dirty = file.dirty.data_bytes();
            stats.dirty_bytes += dirty;
            stats.pending_bytes += file.unsaved_bytes() - dirty;
        }
        stats.files_open = self.handles.count();
        stats.inodes_known = self.known.count();
        stats.inodes_active = self.inodes.count();
        stats.flush_failures = self.counters.flush_failures.load(Ordering::Relaxed);
        stats.chunks_compacted = self.counters.chunks_compacted.load(Ordering::Relaxed);
        stats.orphans_reaped = self.counters.orphans_reaped.load(Ordering::Relaxed);
        stats.packs_deleted = self.counters.packs_deleted.load(Ordering::Relaxed);
        stats
    }

    fn check_writable(&self) -> Result<()> {
        if self.is_read_only() {
            return Err(ErrorKind::ReadOnly.into());
        }
        self.data.health().check()
    }

    fn now(&self) -> Timestamp {
        self.meta.clock().now()
    }
}

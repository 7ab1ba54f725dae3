//! Opening, writing and closing files.
//!
//! A write puts bytes into the file's dirty map and returns. Before that it takes memory from the budget (and waits for
//! a flush when there is none) and room from the volume's capacity, so that no accepted byte is refused later.

use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::Vfs;
use super::flush::{INLINE_BYTES_MAX, STREAM_BYTES_MIN, UNIT_BYTES};
use super::handle::{FileHandle, InodeRef, Reach, ToldBy};
use super::inode::{Failure, InodeState, Life, SetIds};
use super::readahead::Readahead;
use super::request::{AccessMode, Fh, OpenFlags, Opened, SyncMode, WriteArgs, WriteOrigin};
use crate::data::BudgetGuard;
use crate::meta::{FILE_BYTES_MAX, FLAG_APPEND, FLAG_IMMUTABLE, Membership, SetattrArgs};
use crate::types::{Caller, Error, ErrorKind, Ino, Result, SetAttr};

impl Vfs {
    /// Opens a file (open(2)). With `O_TRUNC` the kernel empties it by a `setattr` of its own.
    ///
    /// # Errors
    /// `ReadOnly` for writing; `NotPermitted` where inode flags forbid it; `IsDirectory`; `Stale`.
    pub async fn open(&self, ino: Ino, flags: OpenFlags) -> Result<Opened> {
        let inode = if flags.access.writes() {
            self.check_writable()?;
            let ((), inode) = futures::try_join!(self.check_flags(ino, flags), self.inode(ino))?;
            inode
        } else {
            self.inode(ino).await?
        };
        Ok(self.open_state(inode, flags, ToldBy::Close))
    }

    async fn check_flags(&self, ino: Ino, flags: OpenFlags) -> Result<()> {
        let attr = self.meta.getattr(ino).await?;
        let append_only = attr.flags & FLAG_APPEND != 0 && !flags.append;
        if attr.flags & FLAG_IMMUTABLE != 0 || append_only {
            return Err(ErrorKind::NotPermitted.into());
        }
        Ok(())
    }

    /// Opens a file whose state is in memory.
    pub(super) fn open_state(&self, inode: InodeRef, flags: OpenFlags, told_by: ToldBy) -> Opened {
        self.known.opened(inode.ino);
        let failures = inode.state().failures;
        let handle = FileHandle {
            inode,
            flags,
            readahead: Mutex::new(Readahead::default()),
            read_ahead_of: OnceLock::new(),
            failures_told: AtomicU64::new(failures),
            told_by,
        };
        let fh = self.handles.add_file(handle);
        let no_flush = told_by == ToldBy::NextWrite || !flags.access.writes();
        let direct_io = !self.options.kernel_keeps_written && flags.access == AccessMode::Write;
        // One client owns the volume, so the kernel's pages can only be outdated by what the kernel itself does.
        Opened { fh, keep_cache: true, direct_io, no_flush }
    }

    /// Writes (pwrite(2)): all bytes, or none.
    ///
    /// # Errors
    /// `BadHandle` unless open for writing; `ReadOnly`; `FileTooLarge` beyond 2^57 bytes; `NoSpace` at the capacity; `Io`
    /// when there was no memory for `io_timeout` because nothing could be stored. What could not be stored before, where
    /// no close will tell it.
    pub async fn write(&self, args: WriteArgs) -> Result<u32> {
        self.check_writable()?;
        let handle = self.handles.file(args.fh)?;
        if !handle.flags.access.writes() || handle.inode.ino != args.ino {
            return Err(ErrorKind::BadHandle.into());
        }
        let len = u32::try_from(args.bytes.len()).map_err(|_| ErrorKind::Invalid)?;
        if len == 0 {
            return Ok(0);
        }
        let inode = &handle.inode;
        // A kernel that caches writes asks at close in any case, and forgets the bytes of a write that fails.
        let is_told = args.origin == WriteOrigin::Process && !self.options.kernel_caches_writes;
        if is_told
            && handle.told_by == ToldBy::NextWrite
            && let Some(failure) = untold_failure(&handle)
        {
            return Err(failure.into());
        }
        if args.kill_suid_sgid {
            self.kill_set_ids(inode).await?;
        }
        let placed_by_kernel = self.options.kernel_caches_writes || args.origin == WriteOrigin::KernelCache;
        let append = handle.flags.append && !placed_by_kernel;
        let memory = self.write_memory(u64::from(len)).await?;
        let range = args.offset..args.offset.saturating_add(u64::from(len));
        self.claim_space(inode, range, u64::from(len)).await?;
        let room = Room { memory, bytes: u64::from(len) };
        let wrote = self.write_dirty(inode, &args, append, room)?;
        self.after_write(inode, &wrote);
        if handle.flags.sync == SyncMode::EveryWrite {
            self.fsync_inode(inode).await?;
        }
        Ok(len)
    }

    /// The part of a write that happens under the file's lock.
    fn write_dirty(&self, inode: &InodeRef, args: &WriteArgs, append: bool, room: Room) -> Result<Wrote> {
        let mut guard = inode.state();
        let state = &mut *guard;
        let offset = if append { state.length } else { args.offset };
        let len = args.bytes.len() as u64;
        let end = offset.checked_add(len).filter(|end| *end <= FILE_BYTES_MAX);
        let Some(end) = end.filter(|_| state.life != Life::Dead) else {
            drop(guard);
            self.reserved_bytes.fetch_sub(room.bytes, Ordering::Relaxed);
            let dead = end.is_some();
            return Err(if dead { ErrorKind::Stale } else { ErrorKind::FileTooLarge }.into());
        };
        state.dirty.write(offset, args.bytes.clone());
        state.hold(Some(room.memory));
        state.length = state.length.max(end);
        // A kernel that caches writes sends the times itself; without that cache, this is a page of a shared mapping.
        if args.origin == WriteOrigin::Process || !self.options.kernel_caches_writes {
            state.written_at(self.now());
        }
        let stream = state.stream.advance(offset, len, STREAM_BYTES_MIN, UNIT_BYTES);
        let newly = !std::mem::replace(&mut state.listed, true);
        self.account(state, room.bytes);
        Ok(Wrote { newly, stream })
    }

    fn after_write(&self, inode: &InodeRef, wrote: &Wrote) {
        if wrote.newly {
            self.flusher.list(inode.clone());
        }
        if wrote.stream {
            self.flusher.stream(inode.clone());
        }
    }

    /// Memory for bytes to write: at once if there is some, otherwise after a flush has made some.
    pub(super) async fn write_memory(&self, bytes: u64) -> Result<BudgetGuard> {
        if let Some(guard) = self.memory.try_acquire(bytes) {
            return Ok(guard);
        }
        let acquire = self.memory.acquire(bytes);
        match self.options.io_timeout {
            None => Ok(acquire.await),
            Some(limit) => tokio::time::timeout(limit, acquire).await.map_err(|_| {
                Error::new(ErrorKind::Io, "nothing could be stored for too long, and memory is full")
            }),
        }
    }

    /// Counts `bytes` bytes against the capacity, which take the place of what is stored in `range`.
    ///
    /// # Errors
    /// `NoSpace` when they do not fit, counting everything that waits to be committed.
    pub(super) async fn claim_space(&self, inode: &InodeRef, range: Range<u64>, bytes: u64) -> Result<()> {
        if self.try_claim(bytes, bytes) {
            return Ok(());
        }
        // Near the limit it must be known exactly: what waits is committed first, and only bytes that were holes count.
        self.flush_everything().await?;
        let replaced = self.committed_bytes_in(inode, range).await?;
        let needed = bytes.saturating_sub(replaced);
        if needed == 0 {
            self.reserved_bytes.fetch_add(bytes, Ordering::Relaxed);
            return Ok(());
        }
        let mut tries = 0;
        while !self.try_claim(bytes, needed) {
            if !self.more_room(&mut tries).await {
                return Err(ErrorKind::NoSpace.into());
            }
        }
        Ok(())
    }

    /// Claims `len` bytes if `needed` more would fit.
    fn try_claim(&self, len: u64, needed: u64) -> bool {
        let reserved = self.reserved_bytes.fetch_add(len, Ordering::Relaxed);
        let fits = self.meta.bytes_left().is_none_or(|left| reserved.saturating_add(needed) <= left);
        if !fits {
            self.reserved_bytes.fetch_sub(len, Ordering::Relaxed);
        }
        fits
    }

    /// Brings the count of uncommitted bytes up to date after a change of `state`; `claimed` were counted already.
    pub(super) fn account(&self, state: &mut InodeState, claimed: u64) {
        let before = state.reserved + claimed;
        state.reserved = state.unsaved_bytes();
        if state.reserved >= before {
            self.reserved_bytes.fetch_add(state.reserved - before, Ordering::Relaxed);
        } else {
            self.reserved_bytes.fetch_sub(before - state.reserved, Ordering::Relaxed);
        }
    }

    /// Drops set-user-id and set-group-id bits before a write by an unprivileged process, if there are any.
    pub(super) async fn kill_set_ids(&self, inode: &InodeRef) -> Result<()> {
        if inode.state().set_ids == SetIds::None {
            return Ok(());
        }
        let attr = self.meta.getattr(inode.ino).await?;
        // Set-group-id without execution by the group is the mark of mandatory locking and stays.
        if attr.mode & 0o4000 != 0 || attr.mode & 0o2010 == 0o2010 {
            let set = SetAttr { kill_suid_sgid: true, ..SetAttr::default() };
            let nobody = Caller { uid: attr.uid, gid: attr.gid, pid: 0 };
            let args = SetattrArgs {
                ino: inode.ino,
                set: &set,
                caller: &nobody,
                membership: Membership::CheckedByKernel,
                written: None,
            };
            self.meta.setattr(args).await?;
        }
        inode.state().set_ids = SetIds::None;
        Ok(())
    }

    /// A descriptor was closed (close(2)): tells of a failure to store that nobody was told through this handle.
    ///
    /// # Errors
    /// The failure, as long as bytes of the file are not stored.
    #[expect(clippy::unused_async, reason = "on volumes with several clients it will wait")]
    pub async fn flush(&self, ino: Ino, fh: Fh) -> Result<()> {
        let handle = self.handles.file(fh)?;
        if handle.inode.ino != ino {
            return Err(ErrorKind::BadHandle.into());
        }
        match untold_failure(&handle) {
            Some(failure) => Err(failure.into()),
            // Bytes that no worker will ever fail to store.
            None if handle.inode.state().needs_flush() => self.data.health().check(),
            None => Ok(()),
        }
    }

    /// The last descriptor of a handle was closed.
    ///
    /// # Errors
    /// `BadHandle`.
    #[expect(clippy::unused_async, reason = "on volumes with several clients it will wait")]
    pub async fn release(&self, fh: Fh) -> Result<()> {
        let handle = self.handles.remove_file(fh)?;
        let ino = handle.inode.ino;
        if handle.flags.access.writes() {
            let dirty = handle.inode.state().dirty.data_bytes();
            if dirty > INLINE_BYTES_MAX {
                self.closed_dirty(dirty);
            }
        }
        drop(handle);
        if self.known.closed(ino) == Reach::Unreachable {
            self.collector.reap_later(ino);
        }
        Ok(())
    }
}

/// What a write has taken before it happens.
struct Room {
    memory: BudgetGuard,
    bytes: u64,
}

/// What follows from a write.
struct Wrote {
    newly: bool,
    stream: bool,
}

/// A failure to store that this handle has not told yet; told with this.
pub(super) fn untold_failure(handle: &FileHandle) -> Option<Failure> {
    let state = handle.inode.state();
    let told = handle.failures_told.swap(state.failures, Ordering::Relaxed);
    state.failure.clone().filter(|_| told < state.failures)
}

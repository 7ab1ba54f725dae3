//! Attributes: the metadata's, brought up to date by what is known of files in memory.

use super::Vfs;
use super::handle::{Found, InodeRef, Reach};
use super::inode::{Fresh, SetIds};
use super::request::{AtimeMode, Fh, Statfs};
use crate::meta::{Membership, SetattrArgs};
use crate::types::{Attr, Caller, ErrorKind, Ino, Kind, NAME_BYTES_MAX, Result, SetAttr, SetTime, Timestamp};

/// What a volume without limits says is free if the store does not say how much it can take, in bytes: 1 PiB.
const FREE_WITHOUT_LIMIT: u64 = 1 << 50;
/// The same in inodes.
const INODES_FREE_WITHOUT_LIMIT: u64 = 1 << 31;
/// An access time older than this is updated in any case (relatime), in seconds.
const RELATIME_SECS: i64 = 24 * 60 * 60;

impl Vfs {
    /// The attributes of an inode (stat(2)).
    ///
    /// # Errors
    /// `Stale` when there is no such inode.
    pub async fn getattr(&self, ino: Ino) -> Result<Attr> {
        // State that exists now stays the truth: it is looked up before the metadata is read.
        let inode = self.inodes.get(ino);
        let retired = self.inodes.retired();
        let attr = self.meta.getattr(ino).await?;
        match inode {
            Some(inode) => {
                let mut attr = attr;
                inode.state().refresh(&mut attr);
                Ok(attr)
            }
            None => self.current(attr, retired).await,
        }
    }

    /// Brings attributes that were just read from the metadata up to date. `retired` is what the table said before.
    pub(super) async fn current(&self, mut attr: Attr, mut retired: u64) -> Result<Attr> {
        loop {
            if attr.kind != Kind::File {
                return Ok(attr);
            }
            if let Some(inode) = self.inodes.get(attr.ino) {
                inode.state().refresh(&mut attr);
                return Ok(attr);
            }
            // Without state, the metadata is the truth, unless state went away since it was read.
            let now = self.inodes.retired();
            if now == retired {
                return Ok(attr);
            }
            retired = now;
            attr = self.meta.getattr(attr.ino).await?;
        }
    }

    /// The state of a regular file, made if it is not in memory.
    ///
    /// # Errors
    /// `Stale` without such an inode; `IsDirectory`, `Invalid` for what has no contents.
    pub(super) async fn inode(&self, ino: Ino) -> Result<InodeRef> {
        loop {
            let absent = match self.inodes.find(ino) {
                Found::Here(inode) => return Ok(inode),
                Found::Absent(absent) => absent,
            };
            let attr = self.meta.getattr(ino).await?;
            check_contents(attr.kind)?;
            if let Some(inode) = self.inodes.insert(&attr, absent) {
                // Spares the first read a look, unless it will change the access time.
                if !atime_is_due(&attr, self.now()) {
                    let mut state = inode.state();
                    state.atime_due_at = state.atime_due_at.max(atime_due_at(attr.atime));
                }
                return Ok(inode);
            }
        }
    }

    /// Changes attributes (chmod(2), chown(2), utimensat(2), truncate(2)).
    ///
    /// # Errors
    /// `ReadOnly`; `NotPermitted` where inode flags forbid it; those of truncate; `Stale`.
    pub async fn setattr(&self, caller: &Caller, ino: Ino, set: SetAttr, fh: Option<Fh>) -> Result<Attr> {
        self.check_writable()?;
        if self.options.kernel_caches_writes
            && let Some(mtime) = time_of_cached_write(&set)
            && let Some(attr) = self.wrote_in_cache(ino, mtime).await?
        {
            return Ok(attr);
        }
        let Some(size) = set.size else { return self.set_attributes(caller, ino, set).await };
        let inode = match fh.and_then(|fh| self.handles.file(fh).ok()) {
            Some(handle) if handle.inode.ino == ino => handle.inode.clone(),
            Some(_) | None => self.inode(ino).await?,
        };
        let mut attr = self.truncate(&inode, size, &set).await?;
        // A truncate sets the times itself; other attributes may come with it in one request.
        let rest = SetAttr { size: None, kill_suid_sgid: false, ctime: None, mtime: None, ..set };
        if rest != SetAttr::default() {
            attr = self.set_attributes(caller, ino, SetAttr { ctime: set.ctime, ..rest }).await?;
        }
        inode.state().refresh(&mut attr);
        Ok(attr)
    }

    /// The kernel tells when it last wrote to its cache: committed with the bytes, and allowed even if the file was made
    /// immutable since. `None` for anything but a regular file.
    async fn wrote_in_cache(&self, ino: Ino, mtime: Timestamp) -> Result<Option<Attr>> {
        let mut attr = self.meta.getattr(ino).await?;
        if attr.kind != Kind::File {
            return Ok(None);
        }
        let inode = self.inode(ino).await?;
        let newly = {
            let mut state = inode.state();
            state.written_at(mtime);
            state.refresh(&mut attr);
            !std::mem::replace(&mut state.listed, true)
        };
        if newly {
            self.flusher.list(inode);
        }
        Ok(Some(attr))
    }

    async fn set_attributes(&self, caller: &Caller, ino: Ino, mut set: SetAttr) -> Result<Attr> {
        let retired = self.inodes.retired();
        let membership = Membership::CheckedByKernel;
        let mut written = take_written(&mut set);
        let Some(inode) = self.inodes.get(ino) else {
            let args = SetattrArgs { ino, set: &set, caller, membership, written };
            let attr = self.meta.setattr(args).await?;
            return self.current(attr, retired).await;
        };
        // A commit must not bring back an mtime from before this change.
        let _gate = inode.flush_gate.lock().await;
        {
            let mut state = inode.state();
            if let Some(mtime) = state.mtime
                && !mtime.committed
                && set.mtime.is_none()
            {
                written = written.or(Some(mtime.time));
            }
            if set.mode.is_some() || set.uid.is_some() || set.gid.is_some() {
                state.set_ids = SetIds::Perhaps;
            }
        }
        let before = inode.state().mtime;
        let args = SetattrArgs { ino, set: &set, caller, membership, written };
        let mut attr = self.meta.setattr(args).await?;
        let mut state = inode.state();
        // A write that came meanwhile is newer.
        let same =
            |a: Option<Fresh>, b: Option<Fresh>| a.map(|fresh| fresh.time) == b.map(|fresh| fresh.time);
        if same(before, state.mtime) {
            state.mtime = Some(Fresh { time: attr.mtime, committed: true });
        }
        if set.atime.is_some() {
            state.atime = None;
        }
        state.refresh(&mut attr);
        Ok(attr)
    }

    /// Sizes of the volume (statfs(2)); dirty bytes count as used. No more is free than the store can take.
    ///
    /// # Errors
    /// `Io`.
    pub async fn statfs(&self) -> Result<Statfs> {
        let stored = self.meta.statfs().await?;
        let reserved = self.reserved_bytes.load(std::sync::atomic::Ordering::Relaxed);
        let bytes_used = stored.used_bytes.saturating_add(reserved);
        let store_room = self.options.store_room.as_ref().and_then(|room| room.bytes_free());
        let store_room = store_room.unwrap_or(FREE_WITHOUT_LIMIT);
        let bytes_total = stored.capacity.unwrap_or(bytes_used.saturating_add(store_room));
        let bytes_free = bytes_total.saturating_sub(bytes_used).min(store_room);
        let unlimited = stored.inodes_used.saturating_add(INODES_FREE_WITHOUT_LIMIT);
        let inodes_total = stored.inodes_max.unwrap_or(unlimited);
        Ok(Statfs {
            block_bytes: 4096,
            bytes_total,
            bytes_free,
            inodes_total,
            inodes_free: inodes_total.saturating_sub(stored.inodes_used),
            name_bytes_max: u32::try_from(NAME_BYTES_MAX).unwrap_or(u32::MAX),
        })
    }

    /// Notes a read of a file for its access time (relatime): at most one look at the attributes between two writes.
    /// Tells whether the access time moved.
    pub(super) async fn accessed_file(&self, inode: &InodeRef) -> Result<bool> {
        if self.options.atime == AtimeMode::Noatime || self.is_read_only() {
            return Ok(false);
        }
        let now = self.now();
        {
            let mut state = inode.state();
            if now.secs < state.atime_due_at {
                return Ok(false);
            }
            state.atime_due_at = atime_due_at(now);
        }
        let mut attr = self.meta.getattr(inode.ino).await?;
        let (due, newly) = {
            let mut state = inode.state();
            state.refresh(&mut attr);
            let due = atime_is_due(&attr, now);
            if due {
                state.atime = Some(Fresh { time: now, committed: false });
            } else {
                state.atime_due_at = state.atime_due_at.min(atime_due_at(attr.atime));
            }
            (due, due && !std::mem::replace(&mut state.listed, true))
        };
        if newly {
            self.flusher.list(inode.clone());
        }
        Ok(due)
    }

    /// Notes a read of a directory or a symbolic link for its access time.
    pub(super) async fn accessed_other(&self, attr: &Attr) -> Result<()> {
        let now = self.now();
        if self.options.atime == AtimeMode::Relatime && !self.is_read_only() && atime_is_due(attr, now) {
            self.meta.touch_atime(attr.ino, now).await?;
        }
        Ok(())
    }

    /// The kernel gives up `count` lookups of `ino`.
    pub fn forget(&self, ino: Ino, count: u64) {
        if self.known.forget(ino, count) == Reach::Unreachable {
            self.collector.reap_later(ino);
        }
        if !self.known.is_known(ino) {
            self.places.forget(ino);
        }
    }
}

/// A kernel that caches writes tells when it wrote: mtime and ctime, and nothing else. That is no utimensat(2), which
/// immutable and append-only files refuse. (One that leaves out atime looks the same and passes for it.)
fn take_written(set: &mut SetAttr) -> Option<Timestamp> {
    let Some(SetTime::To(mtime)) = set.mtime else { return None };
    set.ctime?;
    let written = SetAttr { mtime: set.mtime, ctime: set.ctime, ..SetAttr::default() };
    if *set != written {
        return None;
    }
    set.mtime = None;
    Some(mtime)
}

/// The time, if this is how a kernel that caches writes reports one: mtime and ctime alone, and the same, as a write sets
/// them.
fn time_of_cached_write(set: &SetAttr) -> Option<Timestamp> {
    let Some(SetTime::To(mtime)) = set.mtime else { return None };
    let times = SetAttr { mtime: set.mtime, ctime: Some(mtime), ..SetAttr::default() };
    (*set == times).then_some(mtime)
}

fn atime_is_due(attr: &Attr, now: Timestamp) -> bool {
    attr.atime <= attr.mtime
        || attr.atime <= attr.ctime
        || now.secs.saturating_sub(attr.atime.secs) >= RELATIME_SECS
}

/// When an access time that is not due becomes so by age, in seconds since 1970.
fn atime_due_at(atime: Timestamp) -> i64 {
    atime.secs.saturating_add(RELATIME_SECS)
}

fn check_contents(kind: Kind) -> Result<()> {
    match kind {
        Kind::File => Ok(()),
        Kind::Directory => Err(ErrorKind::IsDirectory.into()),
        Kind::Symlink | Kind::Fifo | Kind::Socket | Kind::CharDevice | Kind::BlockDevice => {
            Err(ErrorKind::Invalid.into())
        }
    }
}

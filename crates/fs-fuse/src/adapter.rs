//! One method per FUSE request: decodes its arguments, names the call of [`Vfs`] that serves it, and the reply that takes its
//! result.
//!
//! Decides what the kernel may remember (time-to-live of names and attributes, pages, directory listings) and nothing else.
//! Permissions are the kernel's business (`default_permissions`); flock(2) and fcntl(2) locks are too, and are exact there
//! as long as one client has the volume. Knows neither metadata nor data. Locks are held for a few instructions: the count
//! of writers, and the reply of a directory listing, which its request alone holds.

use std::ffi::OsStr;
use std::future::Future;
use std::io;
use std::ops::Deref;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use fuser::{
    BsdFileFlags, CopyFileRangeFlags, Errno, FileHandle, Filesystem, FopenFlags, INodeNo, InitFlags,
    IoctlFlags, KernelConfig, LockOwner, OpenFlags, PollEvents, PollFlags, PollNotifier, RenameFlags,
    ReplyAttr, ReplyBmap, ReplyCreate, ReplyData, ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty, ReplyEntry,
    ReplyIoctl, ReplyLock, ReplyLseek, ReplyOpen, ReplyPoll, ReplyStatfs, ReplyWrite, ReplyXattr, Request,
    TimeOrNow, WriteFlags,
};
use rfs_core::types::{Error, ErrorKind, Ino, Name, Result, SetAttr};
use rfs_core::vfs::{
    AccessMode, CopyArgs, DirEntry, Fh, FsyncMode, NewNode, NodeKind, OpenFlags as VfsOpenFlags, ReaddirArgs,
    RenameArgs, RenameMode, Vfs, WriteArgs, WriteOrigin,
};
use tracing::{debug, debug_span, trace, warn};

use crate::answer::{Answer, LookupReply, XattrReply};
use crate::bridge::Bridge;
use crate::buffers::Buffers;
use crate::convert;
use crate::given::{Created, Entry, Given, OpenFile};
use crate::listing::{Listing, Page};
use crate::mount::Sharing;
use crate::notify::{Notice, Notices};
use crate::tune::Caching;
use crate::writers::Writers;

/// Largest write the kernel sends in one request; the most pages that a request of the kernel can have are 256.
const WRITE_BYTES_MAX: u32 = 1 << 20;

/// Requests of the kernel's own (read-ahead, write-back) under way at once; the default of 16 starves a fast reader.
const BACKGROUND_MAX: u16 = 64;

/// From how many of them on the kernel holds writers back.
const CONGESTION_THRESHOLD: u16 = 48;

/// How long the kernel may believe names and attributes that only this mount can change. Not for ever, so that a mistake
/// in what is invalidated heals.
const EXCLUSIVE_TTL: Duration = Duration::from_hours(1);

/// The same where other clients can change them.
const SHARED_TTL: Duration = Duration::from_secs(1);

/// Most bytes of one `copy_file_range`: the answer counts them in 32 bits.
const COPY_BYTES_MAX: u64 = 1 << 31;

/// Calls of `linux/fs.h` that lsattr, chattr and `xfs_io` make. The kernel asks for the second pair's form of the flags
/// before it sets the first pair's.
const FS_IOC_GETFLAGS: u32 = 0x8008_6601;
const FS_IOC_SETFLAGS: u32 = 0x4008_6602;
const FS_IOC_FSGETXATTR: u32 = 0x801c_581f;
const FS_IOC_FSSETXATTR: u32 = 0x401c_5820;

/// What the adapter needs to know of the mount.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AdapterOptions {
    pub(crate) sharing: Sharing,
    pub(crate) caching: Caching,
    /// Whether changes of names are made durable before they are answered (`dirsync`).
    pub(crate) sync_names: bool,
}

/// Serves FUSE requests from a [`Vfs`].
#[derive(Debug)]
pub(crate) struct Adapter {
    fs: Fs,
    bridge: Bridge,
    notices: Notices,
    options: AdapterOptions,
    ttl: Duration,
    /// Kept while the kernel caches writes.
    writers: Option<Arc<Writers>>,
    buffers: Buffers,
    /// Whether the kernel keeps the listings of directories until it changes them. It does where only this mount does.
    keeps_listings: bool,
}

impl Adapter {
    pub(crate) fn new(vfs: Arc<Vfs>, bridge: Bridge, notices: Notices, options: AdapterOptions) -> Adapter {
        let ttl = match options.sharing {
            Sharing::Exclusive => EXCLUSIVE_TTL,
            Sharing::Shared => SHARED_TTL,
        };
        let fs = Fs { vfs, notices: notices.clone(), sync_names: options.sync_names };
        let writers = (options.caching == Caching::Writes).then(Arc::default);
        Adapter {
            fs,
            bridge,
            notices,
            options,
            ttl,
            writers,
            buffers: Buffers::default(),
            keeps_listings: false,
        }
    }

    /// Serves a request about `ino`: does `work`, and answers with what it comes to.
    fn serve<T, F>(
        &self,
        op: &'static str,
        request: &Request,
        ino: INodeNo,
        reply: impl Answer<T>,
        work: impl FnOnce(Fs, Ino) -> F,
    ) where
        T: Given,
        F: Future<Output = Result<T>> + Send + 'static,
    {
        let span = debug_span!("fuse", op, req = request.unique().0, ino = ino.0, pid = request.pid());
        trace!(parent: &span, "asked");
        let ttl = self.ttl;
        self.bridge.answer(span, work(self.fs.clone(), convert::ino(ino)), move |result| match result {
            Ok(value) => reply.give(value, ttl),
            Err(errno) => reply.fail(errno, ttl),
        });
    }

    fn list<R: Listing>(&self, op: &'static str, request: &Request, ino: INodeNo, cookie: u64, reply: R) {
        let ttl = self.ttl;
        let page = Page::new(Arc::clone(&self.fs.vfs), reply);
        let filled = page.clone();
        self.serve(op, request, ino, page, |fs, dir| async move {
            let args = ReaddirArgs { dir, cookie, mode: R::MODE, entries_max: R::ENTRIES_MAX };
            fs.readdir(args, &mut |entry: &DirEntry<'_>| filled.take(entry, ttl)).await
        });
    }

    /// Answers with the inode's flags, encoded.
    fn get_flags(&self, request: &Request, ino: INodeNo, reply: ReplyIoctl, encode: fn(u32) -> Vec<u8>) {
        self.serve("getflags", request, ino, reply, |fs, ino| async move {
            Ok(encode(fs.getattr(ino).await?.flags))
        });
    }

    fn set_flags(&self, request: &Request, ino: INodeNo, flags: u32, reply: ReplyIoctl) {
        let (caller, notices) = (convert::caller(request), self.notices.clone());
        self.serve("setflags", request, ino, reply, |fs, ino| async move {
            let set = SetAttr { flags: Some(flags), ..SetAttr::default() };
            fs.setattr(&caller, ino, set, None).await?;
            // To the kernel an ioctl changes nothing, yet ctime has changed.
            notices.send(Notice::Attributes(ino)).await;
            Ok(Vec::new())
        });
    }

    /// The table that a handle opened with `flags` is to be counted in.
    fn writers_of(&self, flags: VfsOpenFlags) -> Option<Arc<Writers>> {
        self.writers.clone().filter(|_| flags.access.writes())
    }

    /// How to get what the kernel holds of files; `None` if it holds nothing.
    fn unsent(&self) -> Option<Unsent> {
        let writers = self.writers.clone().filter(|writers| writers.any())?;
        Some(Unsent { writers, notices: self.notices.clone() })
    }
}

/// The filesystem, as a request uses it.
#[derive(Debug, Clone)]
struct Fs {
    vfs: Arc<Vfs>,
    notices: Notices,
    sync_names: bool,
}

impl Deref for Fs {
    type Target = Vfs;

    fn deref(&self) -> &Vfs {
        &self.vfs
    }
}

impl Fs {
    /// Has the kernel look a name up again whose change was not answered: it may have come about.
    fn named<T>(&self, parent: Ino, name: &Name, changed: Result<T>) -> Result<T> {
        if changed.as_ref().is_err_and(Error::unanswered) {
            self.notices.forget_name(parent, name);
        }
        changed
    }

    /// Makes what changed in `directory` durable if the mount asks for it (`dirsync`).
    async fn changed(&self, directory: Ino) -> Result<()> {
        if self.sync_names { self.vfs.fsyncdir(directory).await } else { Ok(()) }
    }

    /// The same for what gave the kernel something.
    async fn gave<T: Given>(self, directory: Ino, given: impl FnOnce(Arc<Vfs>) -> T) -> Result<T> {
        let changed = self.changed(directory).await;
        let given = given(self.vfs);
        match changed {
            Ok(()) => Ok(given),
            Err(error) => {
                given.take_back().await;
                Err(error)
            }
        }
    }
}

/// What the kernel may hold of files that are open for writing.
struct Unsent {
    writers: Arc<Writers>,
    notices: Notices,
}

impl Unsent {
    /// Has the kernel send it.
    async fn fetch(&self, ino: Ino) {
        if self.writers.has(ino) {
            self.notices.write_back(ino).await;
        }
    }
}

/// The names whose files take the place of others.
fn movers<'a>(args: &RenameArgs<'a>) -> Vec<(Ino, &'a Name)> {
    let (from, to) = ((args.parent, args.name), (args.new_parent, args.new_name));
    match args.mode {
        RenameMode::NoReplace => vec![],
        RenameMode::Replace => vec![from],
        RenameMode::Exchange => vec![from, to],
    }
}

/// Whether a change of size takes set-id bits away. The kernel says so (`FATTR_KILL_SUIDGID`) where fuser does not listen;
/// its rule is: unless the caller has `CAP_FSETID`, which is root.
fn truncation_kills_set_id(request: &Request) -> bool {
    request.uid() != 0
}

impl Filesystem for Adapter {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> io::Result<()> {
        // Not FUSE_ATOMIC_O_TRUNC: the kernel would send an open with O_RDONLY|O_TRUNC before it looks whether the file is being
        // executed, and refuse it when the file is empty already. Without it no open has O_TRUNC, on macOS neither (macFUSE's
        // `fuse_filehandle_get`): the kernel sends a setattr.
        let mut wanted = InitFlags::empty();
        if cfg!(target_os = "linux") {
            wanted |= InitFlags::FUSE_DO_READDIRPLUS
                | InitFlags::FUSE_PARALLEL_DIROPS
                | InitFlags::FUSE_ASYNC_DIO
                | InitFlags::FUSE_CACHE_SYMLINKS
                | InitFlags::FUSE_HANDLE_KILLPRIV_V2
                | InitFlags::FUSE_HAS_IOCTL_DIR;
            // What a listing tells of its entries stays good as long as only this mount changes them. Else the kernel guesses
            // which listings are followed by questions about the entries; it sees no such question before the second page, as
            // programs ask when they have read all names, and then asks for each one.
            wanted |= match self.options.sharing {
                Sharing::Exclusive => InitFlags::FUSE_EXPLICIT_INVAL_DATA,
                Sharing::Shared => InitFlags::FUSE_AUTO_INVAL_DATA | InitFlags::FUSE_READDIRPLUS_AUTO,
            };
        }
        if let Err(missing) = config.add_capabilities(wanted) {
            debug!(?missing, "the kernel lacks some capabilities");
            // What is left is supported, so this cannot fail.
            let _ = config.add_capabilities(wanted & !missing);
        }
        // Cookies mean the same to all listings of a directory, so they may come out of the kernel's memory.
        self.keeps_listings = cfg!(target_os = "linux")
            && self.options.sharing == Sharing::Exclusive
            && config.add_capabilities(InitFlags::FUSE_NO_OPENDIR_SUPPORT).is_ok();
        if self.options.caching == Caching::Writes {
            config.add_capabilities(InitFlags::FUSE_WRITEBACK_CACHE).map_err(|_| {
                io::Error::new(
                    io::ErrorKind::Unsupported,
                    "the kernel has no write-back cache for FUSE: use nowriteback",
                )
            })?;
        }
        if !self.fs.options().kernel_keeps_written {
            // The kernel without it has no care for what it keeps of a file while writes to the file go past that.
            let refused = |_| {
                let needs = "writes past the kernel's page cache need Linux 6.6: leave --cache-written on";
                io::Error::new(io::ErrorKind::Unsupported, needs)
            };
            config.add_capabilities(InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP).map_err(refused)?;
        }
        let limits = [
            config.set_max_write(WRITE_BYTES_MAX).err(),
            config.set_max_background(BACKGROUND_MAX).err().map(u32::from),
            config.set_congestion_threshold(CONGESTION_THRESHOLD).err().map(u32::from),
        ];
        for nearest in limits.into_iter().flatten() {
            warn!(nearest, "a limit of the FUSE connection was refused");
        }
        Ok(())
    }

    fn lookup(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let name = convert::name(name);
        self.serve("lookup", request, parent, LookupReply(reply), |fs, parent| async move {
            let attr = fs.lookup(parent, &name?).await?;
            Ok(Entry { vfs: fs.vfs, attr })
        });
    }

    fn forget(&self, _request: &Request, ino: INodeNo, nlookup: u64) {
        Bridge::tell(|| self.fs.forget(convert::ino(ino), nlookup));
    }

    fn getattr(&self, request: &Request, ino: INodeNo, _fh: Option<FileHandle>, reply: ReplyAttr) {
        self.serve("getattr", request, ino, reply, |fs, ino| async move { fs.getattr(ino).await });
    }

    fn setattr(
        &self,
        request: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        ctime: Option<SystemTime>,
        fh: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        // A request that changes nothing is chown(2) with -1 for both, which takes set-id bits away all the same.
        let changes_else = mode.is_some() || size.is_some() || atime.is_some() || mtime.is_some();
        let chowns = uid.is_some() || gid.is_some() || !changes_else;
        let set = SetAttr {
            mode: mode.map(convert::permissions),
            uid,
            gid,
            size,
            atime: atime.map(convert::set_time),
            mtime: mtime.map(convert::set_time),
            ctime: ctime.map(convert::timestamp),
            flags: None,
            kill_suid_sgid: chowns || (size.is_some() && truncation_kills_set_id(request)),
        };
        let (caller, fh) = (convert::caller(request), fh.map(|fh| Fh(fh.0)));
        self.serve("setattr", request, ino, reply, |fs, ino| async move {
            fs.setattr(&caller, ino, set, fh).await
        });
    }

    fn readlink(&self, request: &Request, ino: INodeNo, reply: ReplyData) {
        self.serve("readlink", request, ino, reply, |fs, ino| async move { fs.readlink(ino).await });
    }

    fn mknod(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        _umask: u32,
        rdev: u32,
        reply: ReplyEntry,
    ) {
        let (name, caller) = (convert::name(name), convert::caller(request));
        self.serve("mknod", request, parent, reply, |fs, parent| async move {
            let kind = convert::kind_of_mode(mode).ok_or(ErrorKind::Invalid)?;
            let mode = convert::permissions(mode);
            let name = name?;
            let node = NewNode { caller: &caller, parent, name: &name, mode };
            let attr = fs.named(parent, &name, fs.mknod(node, NodeKind { kind, rdev }).await)?;
            fs.gave(parent, |vfs| Entry { vfs, attr }).await
        });
    }

    fn mkdir(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        _umask: u32,
        reply: ReplyEntry,
    ) {
        let (name, caller) = (convert::name(name), convert::caller(request));
        let mode = convert::permissions(mode);
        self.serve("mkdir", request, parent, reply, |fs, parent| async move {
            let name = name?;
            let node = NewNode { caller: &caller, parent, name: &name, mode };
            let attr = fs.named(parent, &name, fs.mkdir(node).await)?;
            fs.gave(parent, |vfs| Entry { vfs, attr }).await
        });
    }

    fn unlink(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let name = convert::name(name);
        self.serve("unlink", request, parent, reply, |fs, parent| async move {
            let name = name?;
            fs.named(parent, &name, fs.unlink(parent, &name).await)?;
            fs.changed(parent).await
        });
    }

    fn rmdir(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let name = convert::name(name);
        self.serve("rmdir", request, parent, reply, |fs, parent| async move {
            let name = name?;
            fs.named(parent, &name, fs.rmdir(parent, &name).await)?;
            fs.changed(parent).await
        });
    }

    fn symlink(&self, request: &Request, parent: INodeNo, name: &OsStr, target: &Path, reply: ReplyEntry) {
        let (name, caller) = (convert::name(name), convert::caller(request));
        let target = Bytes::copy_from_slice(target.as_os_str().as_bytes());
        self.serve("symlink", request, parent, reply, |fs, parent| async move {
            let name = name?;
            let node = NewNode { caller: &caller, parent, name: &name, mode: 0o777 };
            let attr = fs.named(parent, &name, fs.symlink(node, &target).await)?;
            fs.gave(parent, |vfs| Entry { vfs, attr }).await
        });
    }

    fn rename(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        new_parent: INodeNo,
        new_name: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let (name, new_name) = (convert::name(name), convert::name(new_name));
        let (new_parent, unsent) = (convert::ino(new_parent), self.unsent());
        self.serve("rename", request, parent, reply, |fs, parent| async move {
            let mode = convert::rename_mode(flags).ok_or(ErrorKind::Invalid)?;
            let (name, new_name) = (name?, new_name?);
            let args = RenameArgs { parent, name: &name, new_parent, new_name: &new_name, mode };
            // A file that takes another's place brings its contents along, also those that the kernel has not sent: after a
            // crash the name shows the old file or the new one, not an empty one.
            if let Some(unsent) = unsent {
                for (parent, name) in movers(&args) {
                    let Ok(file) = fs.lookup(parent, name).await else { continue };
                    fs.forget(file.ino, 1);
                    unsent.fetch(file.ino).await;
                }
            }
            let renamed = fs.named(parent, &name, fs.rename(args).await);
            fs.named(new_parent, &new_name, renamed)?;
            fs.changed(parent).await?;
            fs.changed(new_parent).await
        });
    }

    fn link(
        &self,
        request: &Request,
        ino: INodeNo,
        new_parent: INodeNo,
        new_name: &OsStr,
        reply: ReplyEntry,
    ) {
        let (name, parent) = (convert::name(new_name), convert::ino(new_parent));
        self.serve("link", request, ino, reply, |fs, ino| async move {
            let name = name?;
            let attr = fs.named(parent, &name, fs.link(ino, parent, &name).await)?;
            fs.gave(parent, |vfs| Entry { vfs, attr }).await
        });
    }

    fn open(&self, request: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let flags = convert::open_flags(flags);
        let writers = self.writers_of(flags);
        // Pages of a file that was written here stay in the kernel, and reads of them are not seen here.
        let cached = self.options.caching == Caching::Writes && flags.access == AccessMode::Read;
        let notices = cached.then(|| self.notices.clone());
        self.serve("open", request, ino, reply, |fs, ino| async move {
            let opened = fs.open(ino, flags).await?;
            if let Some(notices) = notices
                && fs.opened_for_reading(opened.fh).await.unwrap_or(false)
            {
                notices.send(Notice::Attributes(ino)).await;
            }
            Ok(OpenFile { vfs: fs.vfs, ino, opened, writers })
        });
    }

    fn create(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        _umask: u32,
        flags: i32,
        reply: ReplyCreate,
    ) {
        let (name, caller) = (convert::name(name), convert::caller(request));
        let exclusive = flags & libc::O_EXCL != 0;
        let (mode, flags) = (convert::permissions(mode), convert::open_flags(OpenFlags(flags)));
        let writers = self.writers_of(flags);
        self.serve("create", request, parent, reply, |fs, parent| async move {
            let name = name?;
            let node = NewNode { caller: &caller, parent, name: &name, mode };
            let created = fs.named(parent, &name, fs.create(node, flags).await);
            let (attr, opened) = created.map_err(|error| match error.kind {
                // Of a name that came about after the kernel looked for it, which looks again when it is told so.
                ErrorKind::Exists if !exclusive => ErrorKind::Stale.into(),
                _ => error,
            })?;
            let file = |vfs| OpenFile { vfs, ino: attr.ino, opened, writers };
            fs.gave(parent, |vfs| Created { attr, file: file(vfs) }).await
        });
    }

    fn read(
        &self,
        request: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        self.serve("read", request, ino, reply, |fs, ino| async move {
            fs.read(ino, Fh(fh.0), offset, size).await
        });
    }

    fn write(
        &self,
        request: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        data: &[u8],
        write_flags: WriteFlags,
        flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let (fh, bytes) = (Fh(fh.0), self.buffers.copy(data));
        let origin = if write_flags.contains(WriteFlags::FUSE_WRITE_CACHE) {
            WriteOrigin::KernelCache
        } else {
            WriteOrigin::Process
        };
        // Also set for a single write with RWF_DSYNC and on a `sync` mount, which the handle knows nothing of.
        let sync = origin == WriteOrigin::Process && flags.0 & libc::O_DSYNC != 0;
        let kill_suid_sgid = write_flags.contains(WriteFlags::FUSE_WRITE_KILL_SUIDGID);
        self.serve("write", request, ino, reply, |fs, ino| async move {
            let written = fs.write(WriteArgs { ino, fh, offset, bytes, origin, kill_suid_sgid }).await?;
            if sync {
                fs.fsync(ino, Some(fh), FsyncMode::Data).await?;
            }
            Ok(written)
        });
    }

    fn flush(
        &self,
        request: &Request,
        ino: INodeNo,
        fh: FileHandle,
        _lock_owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        self.serve("flush", request, ino, reply, |fs, ino| async move { fs.flush(ino, Fh(fh.0)).await });
    }

    fn release(
        &self,
        request: &Request,
        ino: INodeNo,
        fh: FileHandle,
        flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        if let Some(writers) = self.writers_of(convert::open_flags(flags)) {
            writers.released(convert::ino(ino));
        }
        self.serve("release", request, ino, reply, |fs, _| async move { fs.release(Fh(fh.0)).await });
    }

    fn fsync(&self, request: &Request, ino: INodeNo, fh: FileHandle, datasync: bool, reply: ReplyEmpty) {
        let mode = if datasync { FsyncMode::Data } else { FsyncMode::All };
        self.serve("fsync", request, ino, reply, |fs, ino| async move {
            fs.fsync(ino, Some(Fh(fh.0)), mode).await
        });
    }

    fn opendir(&self, _request: &Request, _ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        if self.keeps_listings {
            // Not again, then: the kernel opens and closes directories by itself, and keeps their listings.
            reply.error(Errno::ENOSYS);
        } else {
            reply.opened(FileHandle(0), FopenFlags::empty());
        }
    }

    fn readdir(&self, request: &Request, ino: INodeNo, _fh: FileHandle, offset: u64, reply: ReplyDirectory) {
        self.list("readdir", request, ino, offset, reply);
    }

    fn readdirplus(
        &self,
        request: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        reply: ReplyDirectoryPlus,
    ) {
        self.list("readdirplus", request, ino, offset, reply);
    }

    fn releasedir(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _flags: OpenFlags,
        reply: ReplyEmpty,
    ) {
        reply.ok();
    }

    fn fsyncdir(&self, request: &Request, ino: INodeNo, _fh: FileHandle, _datasync: bool, reply: ReplyEmpty) {
        self.serve("fsyncdir", request, ino, reply, |fs, ino| async move { fs.fsyncdir(ino).await });
    }

    fn statfs(&self, request: &Request, ino: INodeNo, reply: ReplyStatfs) {
        self.serve("statfs", request, ino, reply, |fs, _| async move { fs.statfs().await });
    }

    fn setxattr(
        &self,
        request: &Request,
        ino: INodeNo,
        name: &OsStr,
        value: &[u8],
        flags: i32,
        _position: u32,
        reply: ReplyEmpty,
    ) {
        let (name, value) = (Bytes::copy_from_slice(name.as_bytes()), Bytes::copy_from_slice(value));
        self.serve("setxattr", request, ino, reply, |fs, ino| async move {
            let mode = convert::xattr_mode(flags).ok_or(ErrorKind::Invalid)?;
            fs.setxattr(ino, &name, &value, mode).await
        });
    }

    fn getxattr(&self, request: &Request, ino: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        let name = Bytes::copy_from_slice(name.as_bytes());
        self.serve("getxattr", request, ino, XattrReply { reply, size }, |fs, ino| async move {
            fs.getxattr(ino, &name).await
        });
    }

    fn listxattr(&self, request: &Request, ino: INodeNo, size: u32, reply: ReplyXattr) {
        self.serve("listxattr", request, ino, XattrReply { reply, size }, |fs, ino| async move {
            fs.listxattr(ino).await
        });
    }

    fn removexattr(&self, request: &Request, ino: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let name = Bytes::copy_from_slice(name.as_bytes());
        self.serve(
            "removexattr",
            request,
            ino,
            reply,
            |fs, ino| async move { fs.removexattr(ino, &name).await },
        );
    }

    fn fallocate(
        &self,
        request: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        self.serve("fallocate", request, ino, reply, |fs, ino| async move {
            let mode = convert::fallocate_mode(mode).ok_or(ErrorKind::NotSupported)?;
            fs.fallocate(ino, Fh(fh.0), mode, offset, length).await
        });
    }

    fn lseek(
        &self,
        request: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: i64,
        whence: i32,
        reply: ReplyLseek,
    ) {
        let unsent = self.unsent();
        self.serve("lseek", request, ino, reply, |fs, ino| async move {
            let whence = convert::whence(whence).ok_or(ErrorKind::Invalid)?;
            let offset = u64::try_from(offset).map_err(|_| ErrorKind::NoSuchAddress)?;
            // The kernel asks without sending first what it holds of the file, and would be told of holes where data is.
            if let Some(unsent) = unsent {
                unsent.fetch(ino).await;
            }
            fs.lseek(ino, Fh(fh.0), offset, whence).await
        });
    }

    fn copy_file_range(
        &self,
        request: &Request,
        ino_in: INodeNo,
        _fh_in: FileHandle,
        offset_in: u64,
        ino_out: INodeNo,
        _fh_out: FileHandle,
        offset_out: u64,
        len: u64,
        _flags: CopyFileRangeFlags,
        reply: ReplyWrite,
    ) {
        let args = CopyArgs {
            from: convert::ino(ino_in),
            from_offset: offset_in,
            to: convert::ino(ino_out),
            to_offset: offset_out,
            len: len.min(COPY_BYTES_MAX),
        };
        self.serve("copy_file_range", request, ino_in, reply, |fs, _| async move {
            let copied = fs.copy_file_range(args).await?;
            Ok(u32::try_from(copied).unwrap_or(u32::MAX))
        });
    }

    fn ioctl(
        &self,
        request: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        _flags: IoctlFlags,
        cmd: u32,
        in_data: &[u8],
        _out_size: u32,
        reply: ReplyIoctl,
    ) {
        let given = in_data.first_chunk().copied().map(u32::from_ne_bytes);
        match (cmd, given) {
            (FS_IOC_GETFLAGS, _) => {
                self.get_flags(request, ino, reply, |flags| flags.to_ne_bytes().to_vec());
            }
            (FS_IOC_FSGETXATTR, _) => {
                self.get_flags(request, ino, reply, |flags| convert::fsxattr(flags).to_vec());
            }
            (FS_IOC_SETFLAGS, Some(flags)) => self.set_flags(request, ino, flags, reply),
            (FS_IOC_FSSETXATTR, Some(xflags)) => match convert::flags_of_fsxattr(xflags) {
                Some(flags) => self.set_flags(request, ino, flags, reply),
                None => reply.error(Errno::EOPNOTSUPP),
            },
            _ => reply.error(Errno::ENOTTY),
        }
    }

    // Never asked for: the kernel checks permissions, keeps locks, and knows that files are always ready.

    fn getlk(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _lock_owner: LockOwner,
        _start: u64,
        _end: u64,
        _typ: i32,
        _pid: u32,
        reply: ReplyLock,
    ) {
        reply.error(Errno::ENOSYS);
    }

    fn setlk(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _lock_owner: LockOwner,
        _start: u64,
        _end: u64,
        _typ: i32,
        _pid: u32,
        _sleep: bool,
        reply: ReplyEmpty,
    ) {
        reply.error(Errno::ENOSYS);
    }

    fn bmap(&self, _request: &Request, _ino: INodeNo, _blocksize: u32, _idx: u64, reply: ReplyBmap) {
        reply.error(Errno::ENOSYS);
    }

    fn poll(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _notifier: PollNotifier,
        _events: PollEvents,
        _flags: PollFlags,
        reply: ReplyPoll,
    ) {
        reply.error(Errno::ENOSYS);
    }
}

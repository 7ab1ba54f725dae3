//! One method per FUSE request: decodes its arguments, names the call of [`Vfs`] that serves it, encodes the answer.
//!
//! Decides what the kernel may remember (time-to-live of names and attributes, pages, directory listings) and nothing else.
//! Permissions are the kernel's business (`default_permissions`); flock(2) and fcntl(2) locks are too, and are exact there
//! as long as one client has the volume. Knows neither metadata nor data. Locks are held for a few instructions: the count
//! of writers, and the reply of a directory listing, which its request alone holds.

use std::ffi::OsStr;
use std::future::Future;
use std::io;
use std::ops::ControlFlow;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use fuser::{
    BsdFileFlags, CopyFileRangeFlags, Errno, FileAttr, FileHandle, Filesystem, FopenFlags, Generation,
    INodeNo, InitFlags, IoctlFlags, KernelConfig, LockOwner, OpenFlags, PollEvents, PollFlags, PollNotifier,
    RenameFlags, ReplyAttr, ReplyBmap, ReplyCreate, ReplyData, ReplyDirectory, ReplyDirectoryPlus,
    ReplyEmpty, ReplyEntry, ReplyIoctl, ReplyLock, ReplyLseek, ReplyOpen, ReplyPoll, ReplyStatfs, ReplyWrite,
    ReplyXattr, Request, TimeOrNow, WriteFlags,
};
use parking_lot::Mutex;
use rfs_core::types::{Attr, ErrorKind, Ino, Name, Result, SetAttr};
use rfs_core::vfs::{
    AccessMode, CopyArgs, DirEntry, Fh, FsyncMode, NewNode, NodeKind, OpenFlags as VfsOpenFlags, Opened,
    ReaddirArgs, ReaddirMode, RenameArgs, RenameMode, Statfs, Vfs, WriteArgs, WriteOrigin,
};
use tracing::{Span, debug, debug_span, warn};

use crate::bridge::Bridge;
use crate::buffers::Buffers;
use crate::convert;
use crate::given::{Created, Entry, Given, OpenDirectory, OpenFile};
#[cfg(target_os = "linux")]
use crate::killed;
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

/// Entries that fit an answer of 32 KiB (what the C library asks for) with names of average length; with attributes, each
/// is 128 bytes longer.
const NAMES_PER_ANSWER: usize = 768;
const ENTRIES_PLUS_PER_ANSWER: usize = 192;

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
    vfs: Arc<Vfs>,
    bridge: Bridge,
    notices: Notices,
    options: AdapterOptions,
    ttl: Duration,
    /// Kept while the kernel caches writes.
    writers: Option<Arc<Writers>>,
    buffers: Buffers,
    mountpoint: Arc<Path>,
}

impl Adapter {
    pub(crate) fn new(
        vfs: Arc<Vfs>,
        bridge: Bridge,
        notices: Notices,
        mountpoint: &Path,
        options: AdapterOptions,
    ) -> Adapter {
        let ttl = match options.sharing {
            Sharing::Exclusive => EXCLUSIVE_TTL,
            Sharing::Shared => SHARED_TTL,
        };
        let writers = (options.caching == Caching::Writes).then(Arc::default);
        let (buffers, mountpoint) = (Buffers::default(), mountpoint.into());
        Adapter { vfs, bridge, notices, options, ttl, writers, buffers, mountpoint }
    }

    /// The table that a handle opened with `flags` is to be counted in.
    fn writers_of(&self, flags: VfsOpenFlags) -> Option<Arc<Writers>> {
        self.writers.clone().filter(|_| flags.access.writes())
    }

    /// A call changes a file by itself, after which the kernel sends the file's times.
    fn changing(&self, ino: Ino) {
        if let Some(writers) = &self.writers {
            writers.changing(ino);
        }
    }

    fn vfs(&self) -> Arc<Vfs> {
        Arc::clone(&self.vfs)
    }

    /// What changes names in `directory` waits for it to be durable if the mount is `dirsync`.
    fn names(&self) -> Names {
        Names { vfs: self.vfs(), sync: self.options.sync_names }
    }

    fn answer_entry(
        &self,
        span: Span,
        reply: ReplyEntry,
        work: impl Future<Output = Result<Entry>> + Send + 'static,
    ) {
        let ttl = self.ttl;
        self.bridge.answer(span, work, move |result| match result {
            Ok(Entry { attr, .. }) => reply.entry(&ttl, &convert::file_attr(&attr), generation(&attr)),
            Err(e) => reply.error(e),
        });
    }

    fn answer_attr(
        &self,
        span: Span,
        reply: ReplyAttr,
        work: impl Future<Output = Result<Attr>> + Send + 'static,
    ) {
        let ttl = self.ttl;
        self.bridge.answer(span, work, move |result| match result {
            Ok(attr) => reply.attr(&ttl, &convert::file_attr(&attr)),
            Err(e) => reply.error(e),
        });
    }

    fn answer_empty(
        &self,
        span: Span,
        reply: ReplyEmpty,
        work: impl Future<Output = Result<()>> + Send + 'static,
    ) {
        self.bridge.answer(span, work, move |result| match result {
            Ok(()) => reply.ok(),
            Err(e) => reply.error(e),
        });
    }

    /// Answers with a value whose size alone is asked for by `size` 0, as for extended attributes.
    fn answer_sized(
        &self,
        span: Span,
        size: u32,
        reply: ReplyXattr,
        work: impl Future<Output = Result<Bytes>> + Send + 'static,
    ) {
        self.bridge.answer(span, work, move |result| match result {
            Ok(value) => match u32::try_from(value.len()) {
                Ok(len) if size == 0 => reply.size(len),
                Ok(len) if len <= size => reply.data(&value),
                Ok(_) | Err(_) => reply.error(Errno::ERANGE),
            },
            Err(e) => reply.error(e),
        });
    }

    fn list<R: Listing>(&self, span: Span, fh: FileHandle, cookie: u64, reply: R) {
        let vfs = self.vfs();
        let ttl = self.ttl;
        // The work fills the reply; whoever answers takes it out. If the answer goes out before the work is done, the
        // work finds it gone.
        let slot = Arc::new(Mutex::new(Some(Filled { reply, looked_up: Vec::new() })));
        let filled = Arc::clone(&slot);
        let owner = self.vfs();
        let args = ReaddirArgs { fh: Fh(fh.0), cookie, mode: R::MODE, entries_max: R::ENTRIES_MAX };
        let work = async move {
            let mut sink = |entry: &DirEntry<'_>| {
                let taken = filled.lock().as_mut().is_some_and(|filled| filled.take(entry, ttl));
                if taken { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
            };
            vfs.readdir(args, &mut sink).await
        };
        self.bridge.answer(span, work, move |result| {
            let Some(Filled { reply, looked_up }) = slot.lock().take() else { return };
            match result {
                Ok(()) => reply.send(),
                Err(e) => {
                    reply.fail(e);
                    // Each was counted when it was taken.
                    for ino in looked_up {
                        owner.forget(ino, 1);
                    }
                }
            }
        });
    }

    /// Answers with the inode's flags, encoded.
    fn get_flags(&self, span: Span, ino: INodeNo, reply: ReplyIoctl, encode: fn(u32) -> Vec<u8>) {
        let vfs = self.vfs();
        let number = convert::ino(ino);
        let work = async move { Ok(vfs.getattr(number).await?.flags) };
        self.bridge.answer(span, work, move |result| match result {
            Ok(flags) => reply.ioctl(0, &encode(flags)),
            Err(e) => reply.error(e),
        });
    }

    fn set_flags(&self, request: &Request, ino: INodeNo, flags: u32, reply: ReplyIoctl) {
        let vfs = self.vfs();
        let number = convert::ino(ino);
        let caller = convert::caller(request);
        let notices = self.notices.clone();
        let work = async move {
            let set = SetAttr { flags: Some(flags), ..SetAttr::default() };
            vfs.setattr(&caller, number, set, None).await?;
            // To the kernel an ioctl changes nothing, yet ctime has changed.
            notices.send(Notice::Attributes(number)).await;
            Ok(())
        };
        self.bridge.answer(span("setflags", request, ino), work, move |result| match result {
            Ok(()) => reply.ioctl(0, &[]),
            Err(e) => reply.error(e),
        });
    }
}

/// Makes changes of names durable where the mount asks for it.
struct Names {
    vfs: Arc<Vfs>,
    sync: bool,
}

impl Names {
    async fn changed(&self, directory: Ino) -> Result<()> {
        if self.sync { self.vfs.fsyncdir(directory).await } else { Ok(()) }
    }

    /// The same for what gave the kernel something.
    async fn gave<T: Given>(&self, directory: Ino, given: T) -> Result<T> {
        match self.changed(directory).await {
            Ok(()) => Ok(given),
            Err(error) => {
                given.take_back().await;
                Err(error)
            }
        }
    }

    fn entry(&self, attr: Attr) -> Entry {
        Entry { vfs: Arc::clone(&self.vfs), attr }
    }
}

/// A listing on its way out.
struct Filled<R> {
    reply: R,
    looked_up: Vec<Ino>,
}

impl<R: Listing> Filled<R> {
    /// Takes an entry; false if it does not fit.
    fn take(&mut self, entry: &DirEntry<'_>, ttl: Duration) -> bool {
        let taken = self.reply.take(entry, ttl);
        if taken && entry.attr.is_some() {
            self.looked_up.push(entry.ino);
        }
        taken
    }
}

/// An answer that holds a piece of a directory listing.
trait Listing: Send + 'static {
    const MODE: ReaddirMode;
    const ENTRIES_MAX: usize;

    /// Takes an entry; false if it does not fit.
    fn take(&mut self, entry: &DirEntry<'_>, ttl: Duration) -> bool;
    fn send(self);
    fn fail(self, errno: Errno);
}

impl Listing for ReplyDirectory {
    const MODE: ReaddirMode = ReaddirMode::Names;
    const ENTRIES_MAX: usize = NAMES_PER_ANSWER;

    fn take(&mut self, entry: &DirEntry<'_>, _ttl: Duration) -> bool {
        let kind = convert::file_type(entry.kind);
        !self.add(INodeNo(entry.ino.0), entry.cookie, kind, OsStr::from_bytes(entry.name))
    }

    fn send(self) {
        self.ok();
    }

    fn fail(self, errno: Errno) {
        self.error(errno);
    }
}

impl Listing for ReplyDirectoryPlus {
    const MODE: ReaddirMode = ReaddirMode::Plus;
    const ENTRIES_MAX: usize = ENTRIES_PLUS_PER_ANSWER;

    fn take(&mut self, entry: &DirEntry<'_>, ttl: Duration) -> bool {
        let name = OsStr::from_bytes(entry.name);
        // `.` and `..` have no attributes: they are listed, not looked up. The kernel takes number and kind and no more.
        let (number, ttl, attr, generation) = if let Some(attr) = entry.attr {
            (INodeNo(entry.ino.0), ttl, convert::file_attr(attr), generation(attr))
        } else {
            let kind = convert::file_type(entry.kind);
            let attr = FileAttr { ino: INodeNo(entry.ino.0), kind, ..convert::no_attr() };
            (INodeNo(0), Duration::ZERO, attr, Generation(0))
        };
        !self.add(number, entry.cookie, name, &ttl, &attr, generation)
    }

    fn send(self) {
        self.ok();
    }

    fn fail(self, errno: Errno) {
        self.error(errno);
    }
}

fn generation(attr: &Attr) -> Generation {
    Generation(u64::from(attr.generation))
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

/// What the kernel may do with an open file.
fn fopen_flags(opened: &Opened) -> FopenFlags {
    let mut flags = FopenFlags::empty();
    flags.set(FopenFlags::FOPEN_KEEP_CACHE, opened.keep_cache);
    flags.set(FopenFlags::FOPEN_DIRECT_IO, opened.direct_io);
    flags.set(FopenFlags::FOPEN_NOFLUSH, opened.no_flush);
    flags
}

fn span(op: &'static str, request: &Request, ino: INodeNo) -> Span {
    debug_span!("fuse", op, req = request.unique().0, ino = ino.0, pid = request.pid())
}

/// Whether a change of size takes set-id bits away. The kernel says so (`FATTR_KILL_SUIDGID`) where fuser does not listen;
/// its rule is: unless the caller has `CAP_FSETID`, which is root.
fn truncation_kills_set_id(request: &Request) -> bool {
    request.uid() != 0
}

impl Filesystem for Adapter {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let mut wanted = InitFlags::FUSE_ATOMIC_O_TRUNC;
        if cfg!(target_os = "linux") {
            wanted |= InitFlags::FUSE_DO_READDIRPLUS
                | InitFlags::FUSE_READDIRPLUS_AUTO
                | InitFlags::FUSE_PARALLEL_DIROPS
                | InitFlags::FUSE_ASYNC_DIO
                | InitFlags::FUSE_CACHE_SYMLINKS
                | InitFlags::FUSE_HANDLE_KILLPRIV_V2
                | InitFlags::FUSE_HAS_IOCTL_DIR;
            wanted |= match self.options.sharing {
                Sharing::Exclusive => InitFlags::FUSE_EXPLICIT_INVAL_DATA,
                Sharing::Shared => InitFlags::FUSE_AUTO_INVAL_DATA,
            };
        }
        if let Err(missing) = config.add_capabilities(wanted) {
            debug!(?missing, "the kernel lacks some capabilities");
            // What is left is supported, so this cannot fail.
            let _ = config.add_capabilities(wanted & !missing);
        }
        if self.options.caching == Caching::Writes {
            config.add_capabilities(InitFlags::FUSE_WRITEBACK_CACHE).map_err(|_| {
                io::Error::new(
                    io::ErrorKind::Unsupported,
                    "the kernel has no write-back cache for FUSE: use nowriteback",
                )
            })?;
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
        let vfs = self.vfs();
        let name = convert::name(name);
        let parent_ino = convert::ino(parent);
        let ttl = self.ttl;
        let work = async move {
            let attr = vfs.lookup(parent_ino, &name?).await?;
            Ok(Entry { vfs, attr })
        };
        self.bridge.answer(span("lookup", request, parent), work, move |result| match result {
            Ok(Entry { attr, .. }) => reply.entry(&ttl, &convert::file_attr(&attr), generation(&attr)),
            Err(Errno::ENOENT) => reply.entry(&ttl, &convert::no_attr(), Generation(0)),
            Err(e) => reply.error(e),
        });
    }

    fn forget(&self, _request: &Request, ino: INodeNo, nlookup: u64) {
        Bridge::tell(|| self.vfs.forget(convert::ino(ino), nlookup));
    }

    fn getattr(&self, request: &Request, ino: INodeNo, _fh: Option<FileHandle>, reply: ReplyAttr) {
        let vfs = self.vfs();
        let number = convert::ino(ino);
        self.answer_attr(span("getattr", request, ino), reply, async move { vfs.getattr(number).await });
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
        let vfs = self.vfs();
        let number = convert::ino(ino);
        let caller = convert::caller(request);
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
        let fh = fh.map(|fh| Fh(fh.0));
        let work = async move { vfs.setattr(&caller, number, set, fh).await };
        self.answer_attr(span("setattr", request, ino), reply, work);
    }

    fn readlink(&self, request: &Request, ino: INodeNo, reply: ReplyData) {
        let vfs = self.vfs();
        let number = convert::ino(ino);
        let work = async move { vfs.readlink(number).await };
        self.bridge.answer(span("readlink", request, ino), work, move |result| match result {
            Ok(target) => reply.data(&target),
            Err(e) => reply.error(e),
        });
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
        let names = self.names();
        let name = convert::name(name);
        let caller = convert::caller(request);
        let parent_ino = convert::ino(parent);
        let work = async move {
            let kind = convert::kind_of_mode(mode).ok_or(ErrorKind::Invalid)?;
            let node = NewNode {
                caller: &caller,
                parent: parent_ino,
                name: &name?,
                mode: convert::permissions(mode),
            };
            let attr = names.vfs.mknod(node, NodeKind { kind, rdev }).await?;
            names.gave(parent_ino, names.entry(attr)).await
        };
        self.answer_entry(span("mknod", request, parent), reply, work);
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
        let names = self.names();
        let name = convert::name(name);
        let caller = convert::caller(request);
        let parent_ino = convert::ino(parent);
        let work = async move {
            let mode = convert::permissions(mode);
            let node = NewNode { caller: &caller, parent: parent_ino, name: &name?, mode };
            let attr = names.vfs.mkdir(node).await?;
            names.gave(parent_ino, names.entry(attr)).await
        };
        self.answer_entry(span("mkdir", request, parent), reply, work);
    }

    fn unlink(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let names = self.names();
        let name = convert::name(name);
        let caller = convert::caller(request);
        let parent_ino = convert::ino(parent);
        let work = async move {
            names.vfs.unlink(&caller, parent_ino, &name?).await?;
            names.changed(parent_ino).await
        };
        self.answer_empty(span("unlink", request, parent), reply, work);
    }

    fn rmdir(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let names = self.names();
        let name = convert::name(name);
        let caller = convert::caller(request);
        let parent_ino = convert::ino(parent);
        let work = async move {
            names.vfs.rmdir(&caller, parent_ino, &name?).await?;
            names.changed(parent_ino).await
        };
        self.answer_empty(span("rmdir", request, parent), reply, work);
    }

    fn symlink(&self, request: &Request, parent: INodeNo, name: &OsStr, target: &Path, reply: ReplyEntry) {
        let names = self.names();
        let name = convert::name(name);
        let target = Bytes::copy_from_slice(target.as_os_str().as_bytes());
        let caller = convert::caller(request);
        let parent_ino = convert::ino(parent);
        let work = async move {
            let node = NewNode { caller: &caller, parent: parent_ino, name: &name?, mode: 0o777 };
            let attr = names.vfs.symlink(node, &target).await?;
            names.gave(parent_ino, names.entry(attr)).await
        };
        self.answer_entry(span("symlink", request, parent), reply, work);
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
        let names = self.names();
        let (name, new_name) = (convert::name(name), convert::name(new_name));
        let caller = convert::caller(request);
        let (parent_ino, new_parent) = (convert::ino(parent), convert::ino(new_parent));
        let writers = self.writers.clone().filter(|writers| writers.any());
        let unsent = writers.map(|writers| (writers, self.notices.clone()));
        let work = async move {
            let args = RenameArgs {
                caller: &caller,
                parent: parent_ino,
                name: &name?,
                new_parent,
                new_name: &new_name?,
                mode: convert::rename_mode(flags).ok_or(ErrorKind::Invalid)?,
            };
            // A file that takes another's place brings its contents along, also those that the kernel has not sent: after a
            // crash the name shows the old file or the new one, not an empty one.
            if let Some((writers, notices)) = unsent {
                for (parent, name) in movers(&args) {
                    let Ok(file) = names.vfs.lookup(parent, name).await else { continue };
                    names.vfs.forget(file.ino, 1);
                    if writers.has(file.ino) {
                        notices.write_back(file.ino).await;
                    }
                }
            }
            names.vfs.rename(args).await?;
            names.changed(parent_ino).await?;
            names.changed(new_parent).await
        };
        self.answer_empty(span("rename", request, parent), reply, work);
    }

    fn link(
        &self,
        request: &Request,
        ino: INodeNo,
        new_parent: INodeNo,
        new_name: &OsStr,
        reply: ReplyEntry,
    ) {
        let names = self.names();
        let name = convert::name(new_name);
        let caller = convert::caller(request);
        let (number, parent) = (convert::ino(ino), convert::ino(new_parent));
        let work = async move {
            let attr = names.vfs.link(&caller, number, parent, &name?).await?;
            names.gave(parent, names.entry(attr)).await
        };
        self.answer_entry(span("link", request, ino), reply, work);
    }

    fn open(&self, request: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let vfs = self.vfs();
        let number = convert::ino(ino);
        let caller = convert::caller(request);
        let flags = convert::open_flags(flags);
        // Pages of a file that was written here stay in the kernel, and reads of them are not seen here.
        let cached = self.options.caching == Caching::Writes && flags.access == AccessMode::Read;
        let notices = cached.then(|| self.notices.clone());
        let work = async move {
            let opened = vfs.open(&caller, number, flags).await?;
            if let Some(notices) = notices
                && vfs.opened_for_reading(opened.fh).await.unwrap_or(false)
            {
                notices.send(Notice::Attributes(number)).await;
            }
            Ok(OpenFile { vfs, opened })
        };
        let writers = self.writers_of(flags);
        self.bridge.answer(span("open", request, ino), work, move |result| match result {
            Ok(OpenFile { opened, .. }) => {
                if let Some(writers) = writers {
                    writers.opened(number);
                }
                reply.opened(FileHandle(opened.fh.0), fopen_flags(&opened));
            }
            Err(e) => reply.error(e),
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
        let names = self.names();
        let name = convert::name(name);
        let caller = convert::caller(request);
        let parent_ino = convert::ino(parent);
        let flags = convert::open_flags(OpenFlags(flags));
        let work = async move {
            let node = NewNode {
                caller: &caller,
                parent: parent_ino,
                name: &name?,
                mode: convert::permissions(mode),
            };
            let (attr, opened) = names.vfs.create(node, flags).await?;
            names.gave(parent_ino, Created { entry: names.entry(attr), opened }).await
        };
        let ttl = self.ttl;
        let writers = self.writers_of(flags);
        self.bridge.answer(span("create", request, parent), work, move |result| match result {
            Ok(Created { entry: Entry { attr, .. }, opened }) => {
                if let Some(writers) = writers {
                    writers.opened(attr.ino);
                }
                let fh = FileHandle(opened.fh.0);
                reply.created(&ttl, &convert::file_attr(&attr), generation(&attr), fh, fopen_flags(&opened));
            }
            Err(e) => reply.error(e),
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
        let vfs = self.vfs();
        let number = convert::ino(ino);
        let work = async move { vfs.read(number, Fh(fh.0), offset, size).await };
        self.bridge.answer(span("read", request, ino), work, move |result| match result {
            Ok(bytes) => reply.data(&bytes),
            Err(e) => reply.error(e),
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
        let vfs = self.vfs();
        let (number, fh) = (convert::ino(ino), Fh(fh.0));
        let origin = if write_flags.contains(WriteFlags::FUSE_WRITE_CACHE) {
            WriteOrigin::KernelCache
        } else {
            WriteOrigin::Process
        };
        // Also set for a single write with RWF_DSYNC and on a `sync` mount, which the handle knows nothing of.
        let sync = origin == WriteOrigin::Process && flags.0 & libc::O_DSYNC != 0;
        let args = WriteArgs {
            ino: number,
            fh,
            offset,
            bytes: self.buffers.copy(data),
            origin,
            kill_suid_sgid: write_flags.contains(WriteFlags::FUSE_WRITE_KILL_SUIDGID),
        };
        let work = async move {
            let written = vfs.write(args).await?;
            if sync {
                vfs.fsync(number, Some(fh), FsyncMode::Data).await?;
            }
            Ok(written)
        };
        self.bridge.answer(span("write", request, ino), work, move |result| match result {
            Ok(written) => reply.written(written),
            Err(e) => reply.error(e),
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
        let vfs = self.vfs();
        let number = convert::ino(ino);
        #[cfg(target_os = "linux")]
        let killed = {
            let times_follow = self.writers.as_ref().is_some_and(|writers| writers.times_follow(number));
            (times_follow && killed::is_killed(request.pid())).then(|| Arc::clone(&self.mountpoint))
        };
        self.answer_empty(span("flush", request, ino), reply, async move {
            let flushed = vfs.flush(number, Fh(fh.0)).await;
            #[cfg(target_os = "linux")]
            if let Some(mountpoint) = killed {
                killed::forget_error(mountpoint).await;
            }
            flushed
        });
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
        let vfs = self.vfs();
        self.answer_empty(span("release", request, ino), reply, async move { vfs.release(Fh(fh.0)).await });
    }

    fn fsync(&self, request: &Request, ino: INodeNo, fh: FileHandle, datasync: bool, reply: ReplyEmpty) {
        let vfs = self.vfs();
        let number = convert::ino(ino);
        let mode = if datasync { FsyncMode::Data } else { FsyncMode::All };
        let work = async move { vfs.fsync(number, Some(Fh(fh.0)), mode).await };
        self.answer_empty(span("fsync", request, ino), reply, work);
    }

    fn opendir(&self, request: &Request, ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        let vfs = self.vfs();
        let number = convert::ino(ino);
        let work = async move {
            let fh = vfs.opendir(number).await?.fh;
            Ok(OpenDirectory { vfs, fh })
        };
        self.bridge.answer(span("opendir", request, ino), work, move |result| match result {
            // No FOPEN_CACHE_DIR: a cookie that the kernel remembers from one handle means nothing to another, and the
            // kernel goes on from it when a change of the directory drops its listing half way.
            Ok(OpenDirectory { fh, .. }) => reply.opened(FileHandle(fh.0), FopenFlags::empty()),
            Err(e) => reply.error(e),
        });
    }

    fn readdir(&self, request: &Request, ino: INodeNo, fh: FileHandle, offset: u64, reply: ReplyDirectory) {
        self.list(span("readdir", request, ino), fh, offset, reply);
    }

    fn readdirplus(
        &self,
        request: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        reply: ReplyDirectoryPlus,
    ) {
        self.list(span("readdirplus", request, ino), fh, offset, reply);
    }

    fn releasedir(
        &self,
        request: &Request,
        ino: INodeNo,
        fh: FileHandle,
        _flags: OpenFlags,
        reply: ReplyEmpty,
    ) {
        let vfs = self.vfs();
        self.answer_empty(
            span("releasedir", request, ino),
            reply,
            async move { vfs.releasedir(Fh(fh.0)).await },
        );
    }

    fn fsyncdir(&self, request: &Request, ino: INodeNo, _fh: FileHandle, _datasync: bool, reply: ReplyEmpty) {
        let vfs = self.vfs();
        let number = convert::ino(ino);
        self.answer_empty(span("fsyncdir", request, ino), reply, async move { vfs.fsyncdir(number).await });
    }

    fn statfs(&self, request: &Request, ino: INodeNo, reply: ReplyStatfs) {
        let vfs = self.vfs();
        let work = async move { vfs.statfs().await };
        self.bridge.answer(span("statfs", request, ino), work, move |result| match result {
            Ok(statfs) => send_statfs(reply, &statfs),
            Err(e) => reply.error(e),
        });
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
        let vfs = self.vfs();
        let number = convert::ino(ino);
        let caller = convert::caller(request);
        let name = Bytes::copy_from_slice(name.as_bytes());
        let value = Bytes::copy_from_slice(value);
        let work = async move {
            let mode = convert::xattr_mode(flags).ok_or(ErrorKind::Invalid)?;
            vfs.setxattr(&caller, number, &name, &value, mode).await
        };
        self.answer_empty(span("setxattr", request, ino), reply, work);
    }

    fn getxattr(&self, request: &Request, ino: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        let vfs = self.vfs();
        let number = convert::ino(ino);
        let name = Bytes::copy_from_slice(name.as_bytes());
        let work = async move { vfs.getxattr(number, &name).await };
        self.answer_sized(span("getxattr", request, ino), size, reply, work);
    }

    fn listxattr(&self, request: &Request, ino: INodeNo, size: u32, reply: ReplyXattr) {
        let vfs = self.vfs();
        let number = convert::ino(ino);
        let work = async move { vfs.listxattr(number).await };
        self.answer_sized(span("listxattr", request, ino), size, reply, work);
    }

    fn removexattr(&self, request: &Request, ino: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let vfs = self.vfs();
        let number = convert::ino(ino);
        let caller = convert::caller(request);
        let name = Bytes::copy_from_slice(name.as_bytes());
        let work = async move { vfs.removexattr(&caller, number, &name).await };
        self.answer_empty(span("removexattr", request, ino), reply, work);
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
        let vfs = self.vfs();
        let number = convert::ino(ino);
        self.changing(number);
        let work = async move {
            let mode = convert::fallocate_mode(mode).ok_or(ErrorKind::NotSupported)?;
            vfs.fallocate(number, Fh(fh.0), mode, offset, length).await
        };
        self.answer_empty(span("fallocate", request, ino), reply, work);
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
        let vfs = self.vfs();
        let number = convert::ino(ino);
        // The kernel asks without sending first what it holds of the file, and would be told of holes where data is.
        let dirty = self.writers.as_ref().is_some_and(|writers| writers.has(number));
        let write_back = dirty.then(|| self.notices.clone());
        let work = async move {
            let whence = convert::whence(whence).ok_or(ErrorKind::Invalid)?;
            let offset = u64::try_from(offset).map_err(|_| ErrorKind::NoSuchAddress)?;
            if let Some(notices) = write_back {
                notices.write_back(number).await;
            }
            vfs.lseek(number, Fh(fh.0), offset, whence).await
        };
        self.bridge.answer(span("lseek", request, ino), work, move |result| match result {
            Ok(found) => reply.offset(i64::try_from(found).unwrap_or(i64::MAX)),
            Err(e) => reply.error(e),
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
        let vfs = self.vfs();
        let args = CopyArgs {
            from: convert::ino(ino_in),
            from_offset: offset_in,
            to: convert::ino(ino_out),
            to_offset: offset_out,
            len: len.min(COPY_BYTES_MAX),
        };
        self.changing(args.to);
        let work = async move { vfs.copy_file_range(args).await };
        self.bridge.answer(span("copy_file_range", request, ino_in), work, move |result| match result {
            Ok(copied) => reply.written(u32::try_from(copied).unwrap_or(u32::MAX)),
            Err(e) => reply.error(e),
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
                self.get_flags(span("getflags", request, ino), ino, reply, |flags| {
                    flags.to_ne_bytes().to_vec()
                });
            }
            (FS_IOC_FSGETXATTR, _) => {
                self.get_flags(span("getflags", request, ino), ino, reply, |flags| {
                    convert::fsxattr(flags).to_vec()
                });
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

fn send_statfs(reply: ReplyStatfs, statfs: &Statfs) {
    let block_bytes = u64::from(statfs.block_bytes.max(1));
    let free = statfs.bytes_free / block_bytes;
    reply.statfs(
        statfs.bytes_total / block_bytes,
        free,
        free,
        statfs.inodes_total,
        statfs.inodes_free,
        statfs.block_bytes,
        statfs.name_bytes_max,
        statfs.block_bytes,
    );
}

//! A FUSE filesystem that keeps names in memory and stores nothing: how fast the kernel's protocol itself allows metadata to be.
//!
//! It answers the requests that rfs answers for the same work, with the same settings of the connection, so what rfs is slower
//! is its own. Files have no contents, and nothing is checked: it is there to be measured.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::io;
use std::path::Path;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, UNIX_EPOCH};

use fuser::{
    Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo, InitFlags,
    KernelConfig, LockOwner, MountOption, OpenFlags, RenameFlags, ReplyAttr, ReplyCreate, ReplyData,
    ReplyEmpty, ReplyEntry, ReplyOpen, Request,
};

/// How long the kernel may keep names and attributes, also those that are missing: only it changes them.
const TTL: Duration = Duration::from_hours(1);
const FIRST: Generation = Generation(0);

/// Serves until unmounted.
pub(crate) fn run(mount_point: &Path) -> anyhow::Result<()> {
    let mut config = fuser::Config::default();
    config.mount_options = vec![MountOption::FSName("null".to_owned()), MountOption::DefaultPermissions];
    config.n_threads = Some(std::thread::available_parallelism()?.get());
    config.clone_fd = true;
    fuser::mount(Null(Mutex::new(Names::new())), mount_point, &config)?;
    Ok(())
}

struct Null(Mutex<Names>);

struct Names {
    entries: HashMap<(INodeNo, OsString), INodeNo>,
    kinds: HashMap<INodeNo, FileType>,
    last: INodeNo,
}

impl Names {
    fn new() -> Names {
        let kinds = HashMap::from([(INodeNo::ROOT, FileType::Directory)]);
        Names { entries: HashMap::new(), kinds, last: INodeNo::ROOT }
    }

    fn get(&self, parent: INodeNo, name: &OsStr) -> Result<FileAttr, Errno> {
        self.attr(*self.entries.get(&(parent, name.to_owned())).ok_or(Errno::ENOENT)?)
    }

    fn attr(&self, ino: INodeNo) -> Result<FileAttr, Errno> {
        let kind = *self.kinds.get(&ino).ok_or(Errno::ENOENT)?;
        Ok(FileAttr {
            ino,
            size: 0,
            blocks: 0,
            atime: UNIX_EPOCH,
            mtime: UNIX_EPOCH,
            ctime: UNIX_EPOCH,
            crtime: UNIX_EPOCH,
            kind,
            perm: 0o755,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        })
    }

    fn make(&mut self, parent: INodeNo, name: &OsStr, kind: FileType) -> Result<FileAttr, Errno> {
        self.last.0 += 1;
        let ino = self.last;
        self.entries.insert((parent, name.to_owned()), ino);
        self.kinds.insert(ino, kind);
        self.attr(ino)
    }

    fn remove(&mut self, parent: INodeNo, name: &OsStr) -> Result<(), Errno> {
        let ino = self.entries.remove(&(parent, name.to_owned())).ok_or(Errno::ENOENT)?;
        self.kinds.remove(&ino);
        Ok(())
    }

    fn rename(&mut self, from: (INodeNo, &OsStr), to: (INodeNo, &OsStr)) -> Result<(), Errno> {
        let ino = self.entries.remove(&(from.0, from.1.to_owned())).ok_or(Errno::ENOENT)?;
        self.entries.insert((to.0, to.1.to_owned()), ino);
        Ok(())
    }
}

impl Null {
    fn names(&self) -> MutexGuard<'_, Names> {
        self.0.lock().expect("nobody panics with it")
    }
}

fn answer_entry(reply: ReplyEntry, entry: Result<FileAttr, Errno>) {
    match entry {
        Ok(attr) => reply.entry(&TTL, &attr, FIRST),
        Err(errno) => reply.error(errno),
    }
}

fn answer_empty(reply: ReplyEmpty, done: Result<(), Errno>) {
    match done {
        Ok(()) => reply.ok(),
        Err(errno) => reply.error(errno),
    }
}

impl Filesystem for Null {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let wanted = InitFlags::FUSE_PARALLEL_DIROPS
            | InitFlags::FUSE_HANDLE_KILLPRIV_V2
            | InitFlags::FUSE_EXPLICIT_INVAL_DATA;
        config
            .add_capabilities(wanted)
            .map_err(|missing| io::Error::other(format!("the kernel lacks {missing:?}")))
    }

    fn lookup(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        answer_entry(reply, self.names().get(parent, name));
    }

    fn getattr(&self, _request: &Request, ino: INodeNo, _fh: Option<FileHandle>, reply: ReplyAttr) {
        match self.names().attr(ino) {
            Ok(attr) => reply.attr(&TTL, &attr),
            Err(errno) => reply.error(errno),
        }
    }

    fn mkdir(
        &self,
        _request: &Request,
        parent: INodeNo,
        name: &OsStr,
        _mode: u32,
        _umask: u32,
        reply: ReplyEntry,
    ) {
        answer_entry(reply, self.names().make(parent, name, FileType::Directory));
    }

    fn create(
        &self,
        _request: &Request,
        parent: INodeNo,
        name: &OsStr,
        _mode: u32,
        _umask: u32,
        _flags: i32,
        reply: ReplyCreate,
    ) {
        match self.names().make(parent, name, FileType::RegularFile) {
            Ok(attr) => reply.created(&TTL, &attr, FIRST, FileHandle(0), FopenFlags::FOPEN_KEEP_CACHE),
            Err(errno) => reply.error(errno),
        }
    }

    fn unlink(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        answer_empty(reply, self.names().remove(parent, name));
    }

    fn rmdir(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        answer_empty(reply, self.names().remove(parent, name));
    }

    fn rename(
        &self,
        _request: &Request,
        parent: INodeNo,
        name: &OsStr,
        new_parent: INodeNo,
        new_name: &OsStr,
        _flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        answer_empty(reply, self.names().rename((parent, name), (new_parent, new_name)));
    }

    fn open(&self, _request: &Request, _ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        reply.opened(FileHandle(0), FopenFlags::FOPEN_KEEP_CACHE | FopenFlags::FOPEN_NOFLUSH);
    }

    fn read(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _offset: u64,
        _size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        reply.data(&[]);
    }

    fn flush(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        reply.ok();
    }
}

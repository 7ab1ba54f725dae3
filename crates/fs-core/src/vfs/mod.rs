//! What FUSE and gateways call: one method a request, named as the system calls are.
//!
//! Owns handles, lookup counts, dirty bytes and the tasks that flush, read ahead, compact and collect garbage. It is the
//! only place that knows both metadata and data. It knows no kernel structures and no errnos.

mod request;

pub use request::{
    AccessMode, AtimeMode, CopyArgs, DirEntry, DirSink, FallocateMode, Fh, FsyncMode, GcReport, NewNode,
    NodeKind, OpenFlags, Opened, ReaddirArgs, ReaddirMode, RenameArgs, RenameMode, ShutdownReport, Statfs,
    SyncMode, Unsaved, VfsOptions, VfsStats, Whence, WriteAccess, WriteArgs, WriteOrigin, XattrMode,
};

use bytes::Bytes;

use crate::types::{Attr, Caller, ErrorKind, Ino, Name, Result, SetAttr};

/// A mounted filesystem.
#[derive(Debug)]
pub struct Vfs {
    options: VfsOptions,
}

#[expect(clippy::unused_async, reason = "shape of the interface")]
#[expect(missing_docs, reason = "shape of the interface")]
impl Vfs {
    pub fn options(&self) -> &VfsOptions {
        &self.options
    }
    pub async fn shutdown(&self) -> ShutdownReport {
        ShutdownReport::default()
    }

    // namespace; each that returns an Attr counts one kernel lookup of it
    pub async fn lookup(&self, parent: Ino, name: &Name) -> Result<Attr> {
        let _ = (parent, name);
        Err(ErrorKind::NotSupported.into())
    }
    pub fn forget(&self, ino: Ino, count: u64) {
        let _ = (ino, count);
    }
    pub async fn mknod(&self, node: NewNode<'_>, kind: NodeKind) -> Result<Attr> {
        let _ = (node, kind);
        Err(ErrorKind::NotSupported.into())
    }
    pub async fn mkdir(&self, node: NewNode<'_>) -> Result<Attr> {
        let _ = node;
        Err(ErrorKind::NotSupported.into())
    }
    pub async fn symlink(&self, node: NewNode<'_>, target: &[u8]) -> Result<Attr> {
        let _ = (node, target);
        Err(ErrorKind::NotSupported.into())
    }
    pub async fn create(&self, node: NewNode<'_>, flags: OpenFlags) -> Result<(Attr, Opened)> {
        let _ = (node, flags);
        Err(ErrorKind::NotSupported.into())
    }
    pub async fn link(&self, caller: &Caller, ino: Ino, parent: Ino, name: &Name) -> Result<Attr> {
        let _ = (caller, ino, parent, name);
        Err(ErrorKind::NotSupported.into())
    }
    pub async fn unlink(&self, caller: &Caller, parent: Ino, name: &Name) -> Result<()> {
        let _ = (caller, parent, name);
        Err(ErrorKind::NotSupported.into())
    }
    pub async fn rmdir(&self, caller: &Caller, parent: Ino, name: &Name) -> Result<()> {
        let _ = (caller, parent, name);
        Err(ErrorKind::NotSupported.into())
    }
    pub async fn rename(&self, args: RenameArgs<'_>) -> Result<()> {
        let _ = args;
        Err(ErrorKind::NotSupported.into())
    }
    pub async fn readlink(&self, ino: Ino) -> Result<Bytes> {
        let _ = ino;
        Err(ErrorKind::NotSupported.into())
    }

    // attributes
    pub async fn getattr(&self, ino: Ino) -> Result<Attr> {
        let _ = ino;
        Err(ErrorKind::NotSupported.into())
    }
    pub async fn setattr(&self, caller: &Caller, ino: Ino, set: SetAttr, fh: Option<Fh>) -> Result<Attr> {
        let _ = (caller, ino, set, fh);
        Err(ErrorKind::NotSupported.into())
    }
    pub async fn access(&self, caller: &Caller, ino: Ino, mask: u32) -> Result<()> {
        let _ = (caller, ino, mask);
        Err(ErrorKind::NotSupported.into())
    }
    pub async fn statfs(&self) -> Result<Statfs> {
        Err(ErrorKind::NotSupported.into())
    }
    pub async fn getxattr(&self, ino: Ino, name: &[u8]) -> Result<Bytes> {
        let _ = (ino, name);
        Err(ErrorKind::NotSupported.into())
    }
    pub async fn setxattr(
        &self,
        caller: &Caller,
        ino: Ino,
        name: &[u8],
        value: &[u8],
        mode: XattrMode,
    ) -> Result<()> {
        let _ = (caller, ino, name, value, mode);
        Err(ErrorKind::NotSupported.into())
    }
    /// The names, each followed by a NUL, as listxattr(2) returns them.
    pub async fn listxattr(&self, ino: Ino) -> Result<Bytes> {
        let _ = ino;
        Err(ErrorKind::NotSupported.into())
    }
    pub async fn removexattr(&self, caller: &Caller, ino: Ino, name: &[u8]) -> Result<()> {
        let _ = (caller, ino, name);
        Err(ErrorKind::NotSupported.into())
    }

    // files
    pub async fn open(&self, caller: &Caller, ino: Ino, flags: OpenFlags) -> Result<Opened> {
        let _ = (caller, ino, flags);
        Err(ErrorKind::NotSupported.into())
    }
    pub async fn read(&self, ino: Ino, fh: Fh, offset: u64, len: u32) -> Result<Bytes> {
        let _ = (ino, fh, offset, len);
        Err(ErrorKind::NotSupported.into())
    }
    pub async fn write(&self, args: WriteArgs) -> Result<u32> {
        let _ = args;
        Err(ErrorKind::NotSupported.into())
    }
    pub async fn flush(&self, ino: Ino, fh: Fh) -> Result<()> {
        let _ = (ino, fh);
        Err(ErrorKind::NotSupported.into())
    }
    pub async fn release(&self, fh: Fh) -> Result<()> {
        let _ = fh;
        Err(ErrorKind::NotSupported.into())
    }
    pub async fn fsync(&self, ino: Ino, fh: Option<Fh>, mode: FsyncMode) -> Result<()> {
        let _ = (ino, fh, mode);
        Err(ErrorKind::NotSupported.into())
    }
    pub async fn fallocate(
        &self,
        ino: Ino,
        fh: Fh,
        mode: FallocateMode,
        offset: u64,
        len: u64,
    ) -> Result<()> {
        let _ = (ino, fh, mode, offset, len);
        Err(ErrorKind::NotSupported.into())
    }
    pub async fn lseek(&self, ino: Ino, fh: Fh, offset: u64, whence: Whence) -> Result<u64> {
        let _ = (ino, fh, offset, whence);
        Err(ErrorKind::NotSupported.into())
    }
    pub async fn copy_file_range(&self, args: CopyArgs) -> Result<u64> {
        let _ = args;
        Err(ErrorKind::NotSupported.into())
    }

    // directories
    pub async fn opendir(&self, ino: Ino) -> Result<Opened> {
        let _ = ino;
        Err(ErrorKind::NotSupported.into())
    }
    pub async fn readdir(&self, args: ReaddirArgs, sink: DirSink<'_>) -> Result<()> {
        let _ = (args, sink);
        Err(ErrorKind::NotSupported.into())
    }
    pub async fn releasedir(&self, fh: Fh) -> Result<()> {
        let _ = fh;
        Err(ErrorKind::NotSupported.into())
    }
    pub async fn fsyncdir(&self, ino: Ino) -> Result<()> {
        let _ = ino;
        Err(ErrorKind::NotSupported.into())
    }

    // the whole mount
    pub async fn sync_all(&self) -> Result<()> {
        Err(ErrorKind::NotSupported.into())
    }
    pub async fn set_read_only(&self, access: WriteAccess) -> Result<()> {
        let _ = access;
        Err(ErrorKind::NotSupported.into())
    }
    pub async fn gc(&self) -> Result<GcReport> {
        Err(ErrorKind::NotSupported.into())
    }
    pub fn stats(&self) -> VfsStats {
        VfsStats::default()
    }
}

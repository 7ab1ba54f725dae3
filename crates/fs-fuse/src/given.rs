//! What a request gives to the kernel, and how it is taken back.
//!
//! The kernel gives back each lookup (forget) and each handle (release) that it was told of. One that it was not told of,
//! because its answer came too late or a later step of the request failed, nobody would give back: the inode could not be
//! reaped as long as the mount lives.

use std::future::Future;
use std::sync::Arc;

use bytes::Bytes;
use rfs_core::types::{Attr, Result};
use rfs_core::vfs::{Fh, Opened, Statfs, Vfs};
use tracing::error;

/// The result of a request.
pub(crate) trait Given: Send + Sized + 'static {
    /// Gives back what the kernel will not, because it was told of an error.
    fn take_back(self) -> impl Future<Output = ()> + Send {
        std::future::ready(())
    }
}

impl Given for () {}
impl Given for u32 {}
impl Given for u64 {}
impl Given for Attr {}
impl Given for Bytes {}
impl Given for Statfs {}

/// An inode that was looked up.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) vfs: Arc<Vfs>,
    pub(crate) attr: Attr,
}

impl Given for Entry {
    async fn take_back(self) {
        self.vfs.forget(self.attr.ino, 1);
    }
}

/// An open file.
#[derive(Debug)]
pub(crate) struct OpenFile {
    pub(crate) vfs: Arc<Vfs>,
    pub(crate) opened: Opened,
}

impl Given for OpenFile {
    async fn take_back(self) {
        told(self.vfs.release(self.opened.fh).await);
    }
}

/// An open directory.
#[derive(Debug)]
pub(crate) struct OpenDirectory {
    pub(crate) vfs: Arc<Vfs>,
    pub(crate) fh: Fh,
}

impl Given for OpenDirectory {
    async fn take_back(self) {
        told(self.vfs.releasedir(self.fh).await);
    }
}

/// A new file that is open.
#[derive(Debug)]
pub(crate) struct Created {
    pub(crate) entry: Entry,
    pub(crate) opened: Opened,
}

impl Given for Created {
    async fn take_back(self) {
        told(self.entry.vfs.release(self.opened.fh).await);
        self.entry.take_back().await;
    }
}

fn told(released: Result<()>) {
    if let Err(error) = released {
        error!(%error, "a handle that nobody was told of could not be released");
    }
}

//! What a request gives to the kernel, and how it is taken back.
//!
//! The kernel gives back each lookup (forget) and each handle (release) that it was told of. One that it was not told of,
//! because its answer came too late or a later step of the request failed, nobody would give back: the inode could not be
//! reaped as long as the mount lives.

use std::future::Future;
use std::sync::Arc;

use bytes::Bytes;
use rfs_core::types::{Attr, Ino, Result};
use rfs_core::vfs::{Opened, Statfs, Vfs};
use tracing::error;

use crate::writers::Writers;

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
impl Given for Vec<u8> {}
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
    pub(crate) ino: Ino,
    pub(crate) opened: Opened,
    /// Where it is to be counted, if it can write.
    pub(crate) writers: Option<Arc<Writers>>,
}

impl OpenFile {
    /// The kernel is about to be told of it.
    pub(crate) fn is_told(&self) {
        if let Some(writers) = &self.writers {
            writers.opened(self.ino);
        }
    }
}

impl Given for OpenFile {
    async fn take_back(self) {
        check(self.vfs.release(self.opened.fh).await);
    }
}

/// A new file that is open.
#[derive(Debug)]
pub(crate) struct Created {
    pub(crate) attr: Attr,
    pub(crate) file: OpenFile,
}

impl Given for Created {
    async fn take_back(self) {
        let vfs = Arc::clone(&self.file.vfs);
        self.file.take_back().await;
        vfs.forget(self.attr.ino, 1);
    }
}

fn check(released: Result<()>) {
    if let Err(error) = released {
        error!(%error, "a handle that nobody was told of could not be released");
    }
}

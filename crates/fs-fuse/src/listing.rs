//! Answers that hold a piece of a directory listing: filled while the work goes on, not when it is done.

use std::ffi::OsStr;
use std::ops::ControlFlow;
use std::os::unix::ffi::OsStrExt as _;
use std::sync::Arc;
use std::time::Duration;

use fuser::{Errno, FileAttr, Generation, INodeNo, ReplyDirectory, ReplyDirectoryPlus};
use parking_lot::Mutex;
use rfs_core::types::Ino;
use rfs_core::vfs::{DirEntry, ReaddirMode, Vfs};

use crate::answer::{Answer, generation};
use crate::convert;

/// Entries that fit an answer of 32 KiB (what the C library asks for) with names of average length; with attributes, each
/// is 128 bytes longer.
const NAMES_PER_ANSWER: usize = 768;
const ENTRIES_PLUS_PER_ANSWER: usize = 192;

/// A reply that takes entries until it is full.
pub(crate) trait Listing: Send + 'static {
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

/// A listing that the work fills and that whoever answers takes out: if the answer goes out before the work is done, the
/// work finds it gone.
pub(crate) struct Page<R> {
    vfs: Arc<Vfs>,
    filled: Arc<Mutex<Option<Filled<R>>>>,
}

struct Filled<R> {
    reply: R,
    looked_up: Vec<Ino>,
}

impl<R> Clone for Page<R> {
    fn clone(&self) -> Page<R> {
        Page { vfs: Arc::clone(&self.vfs), filled: Arc::clone(&self.filled) }
    }
}

impl<R: Listing> Page<R> {
    pub(crate) fn new(vfs: Arc<Vfs>, reply: R) -> Page<R> {
        Page { vfs, filled: Arc::new(Mutex::new(Some(Filled { reply, looked_up: Vec::new() }))) }
    }

    /// Takes an entry; `Break` if it does not fit.
    pub(crate) fn take(&self, entry: &DirEntry<'_>, ttl: Duration) -> ControlFlow<()> {
        let mut filled = self.filled.lock();
        let Some(filled) = filled.as_mut() else { return ControlFlow::Break(()) };
        if !filled.reply.take(entry, ttl) {
            return ControlFlow::Break(());
        }
        if entry.attr.is_some() {
            // Counted by the listing before it waits again; and the time for the answer ends only while it waits.
            filled.looked_up.push(entry.ino);
        }
        ControlFlow::Continue(())
    }
}

impl<R: Listing> Answer<()> for Page<R> {
    fn give(self, (): (), _ttl: Duration) {
        if let Some(filled) = self.filled.lock().take() {
            filled.reply.send();
        }
    }

    fn fail(self, errno: Errno, _ttl: Duration) {
        let Some(Filled { reply, looked_up }) = self.filled.lock().take() else { return };
        reply.fail(errno);
        // Each was counted when it was taken.
        for ino in looked_up {
            self.vfs.forget(ino, 1);
        }
    }
}

//! What the filesystem tells the kernel unasked: that something the kernel remembers is no longer so.
//!
//! Threads of their own write these notifications, because the kernel takes locks for them which a request that is being
//! answered may hold; from inside a callback they can deadlock. The queues to them are bounded. Who finds that of inodes
//! full waits, and no FUSE thread is among them (requests that notify do so from the async side). For names the kernel
//! locks their directory, as it does for each request that changes one: nobody waits for them, and they have a thread of
//! their own, as some of those requests wait for dirty pages.

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::thread;

use fuser::{INodeNo, Notifier};
use rfs_core::types::{Ino, Name};
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{mpsc, oneshot};
use tracing::{debug, warn};

/// Notifications that wait for the thread at most.
const QUEUE_MAX: usize = 1024;

/// Something to tell the kernel.
#[derive(Debug)]
pub(crate) enum Notice {
    /// The attributes of an inode changed.
    Attributes(Ino),
    /// Dirty pages of a file are to be written back, after which `done` is told.
    WriteBack {
        /// The file.
        ino: Ino,
        /// Told when the writes were answered.
        done: oneshot::Sender<()>,
    },
}

/// The sending end.
#[derive(Debug, Clone)]
pub(crate) struct Notices {
    inodes: mpsc::Sender<Notice>,
    names: mpsc::Sender<(Ino, Name)>,
}

/// The receiving end, before its threads run.
#[derive(Debug)]
pub(crate) struct Queue {
    inodes: mpsc::Receiver<Notice>,
    names: mpsc::Receiver<(Ino, Name)>,
}

/// A queue of notices.
pub(crate) fn queue() -> (Notices, Queue) {
    let (to_inodes, inodes) = mpsc::channel(QUEUE_MAX);
    let (to_names, names) = mpsc::channel(QUEUE_MAX);
    (Notices { inodes: to_inodes, names: to_names }, Queue { inodes, names })
}

impl Notices {
    /// Sends a notice; waits while the queue is full. After the mount has ended it goes nowhere.
    pub(crate) async fn send(&self, notice: Notice) {
        let _ = self.inodes.send(notice).await;
    }

    /// Has the kernel forget whether `parent` has `name`. Returns at once: the request that asks may hold the lock that
    /// this takes.
    pub(crate) fn forget_name(&self, parent: Ino, name: &Name) {
        if let Err(TrySendError::Full(_)) = self.names.try_send((parent, name.clone())) {
            warn!(%parent, ?name, "too many names are to be forgotten, the kernel may show an old one until it asks again");
        }
    }

    /// Has the kernel write back what it holds of a file, and waits for that.
    ///
    /// The protocol has no message for it, but dropping a file's pages writes the dirty ones first.
    pub(crate) async fn write_back(&self, ino: Ino) {
        let (done, finished) = oneshot::channel();
        self.send(Notice::WriteBack { ino, done }).await;
        // An error means that the mount has ended.
        let _ = finished.await;
    }
}

impl Queue {
    /// Starts the threads. They end when every [`Notices`] is gone.
    pub(crate) fn start(self, notifier: Notifier) -> io::Result<()> {
        let Queue { mut inodes, mut names } = self;
        let of_names = notifier.clone();
        thread::Builder::new().name("rfs-notify".to_owned()).spawn(move || {
            while let Some(notice) = inodes.blocking_recv() {
                tell(&notifier, notice);
            }
        })?;
        thread::Builder::new().name("rfs-names".to_owned()).spawn(move || {
            while let Some((parent, name)) = names.blocking_recv() {
                let name = OsStr::from_bytes(name.as_bytes());
                told(parent, of_names.inval_entry(INodeNo(parent.0), name));
            }
        })?;
        Ok(())
    }
}

fn tell(notifier: &Notifier, notice: Notice) {
    let (ino, result) = match &notice {
        Notice::Attributes(ino) => (*ino, notifier.inval_inode(INodeNo(ino.0), -1, 0)),
        Notice::WriteBack { ino, .. } => (*ino, notifier.inval_inode(INodeNo(ino.0), 0, 0)),
    };
    told(ino, result);
    if let Notice::WriteBack { done, .. } = notice {
        // The request that asked may have been given up.
        let _ = done.send(());
    }
}

fn told(ino: Ino, result: io::Result<()>) {
    match result {
        Ok(()) => {}
        // The mount has ended; so has what the kernel remembered.
        Err(e) if e.raw_os_error() == Some(libc::ENODEV) => debug!(%ino, "mount has ended"),
        // It remembers nothing of this.
        Err(e) if e.raw_os_error() == Some(libc::ENOENT) => {}
        Err(error) => {
            warn!(%ino, %error, "kernel refused a notification, it may show old data until it asks again");
        }
    }
}

//! What the filesystem tells the kernel unasked: that something the kernel remembers is no longer so.
//!
//! One thread of its own writes these notifications, because the kernel takes locks for them which a request that is being
//! answered may hold; from inside a callback they can deadlock. The queue to it is bounded; who finds it full waits, and no
//! FUSE thread is among them (requests that notify do so from the async side).

use std::io;
use std::thread::{self, JoinHandle};

use fuser::{INodeNo, Notifier};
use rfs_core::types::Ino;
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
pub(crate) struct Notices(mpsc::Sender<Notice>);

/// The receiving end, before its thread runs.
#[derive(Debug)]
pub(crate) struct Queue(mpsc::Receiver<Notice>);

/// A queue of notices.
pub(crate) fn queue() -> (Notices, Queue) {
    let (send, receive) = mpsc::channel(QUEUE_MAX);
    (Notices(send), Queue(receive))
}

impl Notices {
    /// Sends a notice; waits while the queue is full. After the mount has ended it goes nowhere.
    pub(crate) async fn send(&self, notice: Notice) {
        let _ = self.0.send(notice).await;
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
    /// Starts the thread. It ends when every [`Notices`] is gone.
    pub(crate) fn start(mut self, notifier: Notifier) -> io::Result<JoinHandle<()>> {
        thread::Builder::new().name("rfs-notify".to_owned()).spawn(move || {
            while let Some(notice) = self.0.blocking_recv() {
                tell(&notifier, notice);
            }
        })
    }
}

fn tell(notifier: &Notifier, notice: Notice) {
    let (ino, result) = match &notice {
        Notice::Attributes(ino) => (*ino, notifier.inval_inode(INodeNo(ino.0), -1, 0)),
        Notice::WriteBack { ino, .. } => (*ino, notifier.inval_inode(INodeNo(ino.0), 0, 0)),
    };
    match result {
        Ok(()) => {}
        // The mount has ended; so has what the kernel remembered.
        Err(e) if e.raw_os_error() == Some(libc::ENODEV) => debug!(%ino, "mount has ended"),
        Err(error) => {
            warn!(%ino, %error, "kernel refused a notification, it may show old data until it asks again");
        }
    }
    if let Notice::WriteBack { done, .. } = notice {
        // The request that asked may have been given up.
        let _ = done.send(());
    }
}

//! Watches of keys within this process.
//!
//! A watch that is dropped removes itself. One short lock, taken after an engine's own.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::oneshot;

use crate::{KvError, Watch};

type Waiting = HashMap<Bytes, Vec<(u64, oneshot::Sender<()>)>>;

#[derive(Default)]
struct Shared {
    waiting: Mutex<(u64, Waiting)>,
    /// Number of watches, read without the lock by every commit.
    count: AtomicUsize,
}

/// The watches of one engine.
#[derive(Clone, Default)]
pub struct Watches {
    shared: Arc<Shared>,
}

/// Removes its watch when dropped.
struct Registration {
    shared: Arc<Shared>,
    key: Bytes,
    id: u64,
}

impl Drop for Registration {
    fn drop(&mut self) {
        let mut waiting = self.shared.waiting.lock();
        if let Some(list) = waiting.1.get_mut(&self.key) {
            let before = list.len();
            list.retain(|(id, _)| *id != self.id);
            self.shared.count.fetch_sub(before - list.len(), Ordering::Relaxed);
            if list.is_empty() {
                waiting.1.remove(&self.key);
            }
        }
    }
}

impl Watches {
    /// A watch of `key` that ends with the first change after this call.
    pub fn watch(&self, key: &[u8]) -> Watch {
        let key = Bytes::copy_from_slice(key);
        let (sender, receiver) = oneshot::channel();
        let mut waiting = self.shared.waiting.lock();
        waiting.0 += 1;
        let id = waiting.0;
        waiting.1.entry(key.clone()).or_default().push((id, sender));
        self.shared.count.fetch_add(1, Ordering::SeqCst);
        drop(waiting);
        let registration = Registration { shared: Arc::clone(&self.shared), key, id };
        Box::pin(async move {
            let _registration = registration;
            receiver.await.map_err(|_| KvError::Unavailable("the metadata store was closed".into()))
        })
    }

    /// Whether nobody watches anything.
    pub fn is_empty(&self) -> bool {
        self.shared.count.load(Ordering::SeqCst) == 0
    }

    /// Ends the watches of `keys`. Call it after the change can be read.
    pub fn notify<'a>(&self, keys: impl Iterator<Item = &'a Bytes>) {
        let mut waiting = self.shared.waiting.lock();
        for key in keys {
            if let Some(list) = waiting.1.remove(key) {
                self.shared.count.fetch_sub(list.len(), Ordering::Relaxed);
                for (_, sender) in list {
                    // A receiver that is gone no longer waits.
                    let _ = sender.send(());
                }
            }
        }
    }

    /// Ends all watches with `Unavailable`.
    pub fn close(&self) {
        let dropped = std::mem::take(&mut self.shared.waiting.lock().1);
        self.shared.count.fetch_sub(dropped.values().map(Vec::len).sum(), Ordering::Relaxed);
    }
}

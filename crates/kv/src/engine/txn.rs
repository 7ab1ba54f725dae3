//! A transaction whose writes wait in a buffer until its engine commits them.
//!
//! The buffer is the same for every engine in this process; what is read and how a commit is decided is the engine's
//! [`Snapshot`]. Lock order: the buffer, then the engine's locks.

use async_trait::async_trait;
use bytes::Bytes;
use parking_lot::Mutex;

use super::buffer::{Commit, TxnBuffer};
use super::range::read_key;
use crate::{Isolation, RangePage, RangeQuery, Result, Txn, Versionstamp};

/// The store as a transaction found it at its beginning.
pub trait Snapshot: Send + Sync {
    /// What a transaction that wrote nothing returns from its commit.
    fn stamp(&self) -> Versionstamp;

    /// The value of `key` at the beginning.
    ///
    /// # Errors
    /// `Conflict` for a transaction that is too old, `Unavailable` for a store that is closed or fails.
    fn get(&self, key: &[u8]) -> Result<Option<Bytes>>;

    /// A page of the layers at the beginning, merged with `buffer` (see [`read_range`](super::read_range)).
    ///
    /// # Errors
    /// As for [`Snapshot::get`].
    fn range(&self, buffer: &Mutex<TxnBuffer>, query: &RangeQuery) -> Result<RangePage>;

    /// Validates what was read against later commits, and applies the writes.
    ///
    /// # Errors
    /// As for [`Txn::commit`].
    fn commit(&self, commit: Commit) -> impl Future<Output = Result<Versionstamp>> + Send;
}

/// [`Txn`] for engines that keep writes in memory until the commit.
pub struct BufferedTxn<S> {
    snapshot: S,
    buffer: Mutex<TxnBuffer>,
}

impl<S: Snapshot> BufferedTxn<S> {
    /// A transaction that has read and written nothing.
    pub fn new(snapshot: S) -> Self {
        Self { snapshot, buffer: Mutex::default() }
    }

    fn read(&self, key: &[u8], isolation: Isolation) -> Result<Option<Bytes>> {
        read_key(&self.buffer, key, isolation, || self.snapshot.get(key))
    }
}

#[async_trait]
impl<S: Snapshot> Txn for BufferedTxn<S> {
    async fn get(&self, key: &[u8]) -> Result<Option<Bytes>> {
        self.read(key, Isolation::Serializable)
    }

    async fn snapshot_get(&self, key: &[u8]) -> Result<Option<Bytes>> {
        self.read(key, Isolation::Snapshot)
    }

    async fn range(&self, query: RangeQuery) -> Result<RangePage> {
        self.snapshot.range(&self.buffer, &query)
    }

    fn set(&self, key: &[u8], value: &[u8]) {
        self.buffer.lock().set(key, value);
    }

    fn clear(&self, key: &[u8]) {
        self.buffer.lock().clear(key);
    }

    fn clear_range(&self, begin: &[u8], end: &[u8]) {
        self.buffer.lock().clear_range(begin, end);
    }

    fn add(&self, key: &[u8], delta: i64) {
        self.buffer.lock().add(key, delta);
    }

    fn max(&self, key: &[u8], value: &[u8]) {
        self.buffer.lock().max(key, value);
    }

    fn set_versionstamped_key(&self, prefix: &[u8], order: u16, suffix: &[u8], value: &[u8]) {
        self.buffer.lock().set_versionstamped_key(prefix, order, suffix, value);
    }

    fn set_versionstamped_value(&self, key: &[u8], prefix: &[u8], suffix: &[u8]) {
        self.buffer.lock().set_versionstamped_value(key, prefix, suffix);
    }

    fn add_read_conflict(&self, begin: &[u8], end: &[u8]) {
        self.buffer.lock().add_read_range(Bytes::copy_from_slice(begin), Bytes::copy_from_slice(end));
    }

    async fn commit(&self) -> Result<Versionstamp> {
        let taken = self.buffer.lock().take()?;
        match taken {
            Some(commit) => self.snapshot.commit(commit).await,
            None => Ok(self.snapshot.stamp()),
        }
    }
}

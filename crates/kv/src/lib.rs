//! The contract between the filesystem's metadata logic and a transactional, ordered key-value store.
//!
//! An engine knows bytes and never hears the word inode. The contract is that of the stricter engine
//! (FoundationDB): serializable transactions with optimistic conflicts, a commit whose outcome may be unknown, and
//! the limits in [`Limits`] on every engine, so that code which runs on one engine runs on all.
//!
//! Owns: the traits, the errors, the one retry loop ([`transact`]), the reference engine (`MemKv`), the engine that
//! fails on purpose (`FaultKv`) and the suite that every engine must pass (`conformance`).

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures::future::BoxFuture;

pub mod conformance;
pub mod engine;
mod fault;
mod mem;
mod transact;

pub use fault::{FaultCounts, FaultKv, Faults};
pub use mem::{MemKv, MemOptions, TimeSource};
pub use transact::{Attempt, Retry, RetryClass, transact, transact_recent};

/// What went wrong, by what a caller does about it.
#[derive(Debug, Clone, thiserror::Error)]
pub enum KvError {
    /// Another transaction changed what this one read: run it again.
    #[error("transaction conflict")]
    Conflict,
    /// The commit may or may not have been applied: run it again if a second run is harmless.
    #[error("commit result unknown")]
    MaybeCommitted,
    /// The transaction, a key or a value exceeds [`Limits`]: split the work.
    #[error("too large: {0}")]
    TooLarge(String),
    /// The store has no room for the change; what is in it can be read, and changes work again when there is room.
    #[error("metadata store full: {0}")]
    Full(String),
    /// The store does not answer, or failed: wait, or tell the user.
    #[error("metadata store unavailable: {0}")]
    Unavailable(String),
}

/// Shorthand for results of this crate.
pub type Result<T, E = KvError> = std::result::Result<T, E>;

/// Limits of an engine. Every engine enforces the strictest of them all (FoundationDB's).
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Bytes of one transaction (10 MB): keys and values written, and the keys of what conflicts.
    pub txn_bytes_max: usize,
    /// Bytes of one key (9.9 kB: FoundationDB's 10 kB, less the prefix that tells volumes of one cluster apart).
    pub key_bytes_max: usize,
    /// Bytes of one value (100 kB).
    pub value_bytes_max: usize,
    /// Whether a commit can end as [`KvError::MaybeCommitted`]. Where it cannot, operations need not store a
    /// request slot with their change.
    pub commit_may_be_unknown: bool,
    /// Whether `commit` returns only when the change is durable. Where it does not, durability is asked for with
    /// [`Kv::sync`].
    pub commit_is_durable: bool,
}

impl Limits {
    /// FoundationDB's limits, which every engine enforces.
    pub const STRICTEST: Limits = Limits {
        txn_bytes_max: 10_000_000,
        key_bytes_max: 9_900,
        value_bytes_max: 100_000,
        commit_may_be_unknown: true,
        commit_is_durable: true,
    };
}

/// A commit's place in the order of all commits: 8 bytes version and 2 bytes batch order, big-endian. Later commits
/// compare greater.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Versionstamp(pub [u8; 10]);

/// Whether a read takes part in conflict detection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Isolation {
    /// A later change of what was read makes the commit fail with [`KvError::Conflict`].
    Serializable,
    /// The read never causes a conflict.
    Snapshot,
}

/// Which way a range is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// Ascending keys.
    Forward,
    /// Descending keys.
    Reverse,
}

/// One page of a range read: keys in `[begin, end)`, at most `limit` entries.
#[derive(Debug, Clone)]
pub struct RangeQuery {
    /// First key, included.
    pub begin: Bytes,
    /// Last key, excluded.
    pub end: Bytes,
    /// Most entries to return; at least 1.
    pub limit: usize,
    /// Order of the entries; `Reverse` starts at `end`.
    pub direction: Direction,
    /// Whether the part of the range that was read conflicts with later writes.
    pub isolation: Isolation,
}

/// What a range read found.
#[derive(Debug, Clone, Default)]
pub struct RangePage {
    /// Keys and values in the order asked for.
    pub entries: Vec<(Bytes, Bytes)>,
    /// Whether the range holds more entries than were returned.
    pub more: bool,
}

/// How long ago the point may be that [`Kv::begin_recent`] reads at.
pub const RECENT: Duration = Duration::from_millis(100);

/// A transactional ordered store.
#[async_trait]
pub trait Kv: Send + Sync + 'static {
    /// Limits that this engine enforces.
    fn limits(&self) -> Limits;

    /// Starts a transaction that reads at one point in the order of commits, after all that have returned to anybody.
    async fn begin(&self) -> Result<Arc<dyn Txn>>;

    /// As [`Kv::begin`], but the point may be up to [`RECENT`] ago where another client has committed since, so that the
    /// engine need not ask for it each time. It is after all commits that have returned to users of this value, those whose
    /// outcome was unknown included.
    ///
    /// What it reads may be outdated, what it commits is not: it conflicts as every transaction does. For who has reason to
    /// believe that nobody else commits.
    fn begin_recent(&self) -> BoxFuture<'_, Result<Arc<dyn Txn>>> {
        self.begin()
    }

    /// Returns when every commit that returned before this call is durable.
    async fn sync(&self) -> Result<()>;

    /// Returns a future that ends when the value of `key` differs from what it was when `watch` returned.
    /// It may end early; the caller reads again.
    async fn watch(&self, key: &[u8]) -> Result<Watch>;

    /// Makes everything durable and releases the store. Later calls fail with [`KvError::Unavailable`].
    async fn close(&self) -> Result<()>;
}

/// Ends when a watched key has changed; dropping it ends the watch.
pub type Watch = BoxFuture<'static, Result<()>>;

/// One transaction. Reads see the state at its beginning plus its own earlier writes (not its versionstamped ones).
/// Writes are buffered until `commit`; errors of size are told there.
#[async_trait]
pub trait Txn: Send + Sync {
    /// The value of `key`; conflicts with later writes of it.
    async fn get(&self, key: &[u8]) -> Result<Option<Bytes>>;

    /// The value of `key`, without conflict.
    async fn snapshot_get(&self, key: &[u8]) -> Result<Option<Bytes>>;

    /// A page of a range.
    async fn range(&self, query: RangeQuery) -> Result<RangePage>;

    /// Makes `key` be `value` at commit.
    fn set(&self, key: &[u8], value: &[u8]);

    /// Removes `key` at commit.
    fn clear(&self, key: &[u8]);

    /// Removes all keys in `[begin, end)` at commit.
    fn clear_range(&self, begin: &[u8], end: &[u8]);

    /// Adds `delta` to the little-endian i64 at `key` (absent = 0), wrapping, without reading it: two adds do not
    /// conflict.
    fn add(&self, key: &[u8], delta: i64);

    /// Makes `key` the greater of its value and `value`, compared as little-endian unsigned integers of the length
    /// of `value` (absent = `value`), without reading it.
    fn max(&self, key: &[u8], value: &[u8]);

    /// Sets `prefix ++ versionstamp (10 bytes) ++ order (big-endian) ++ suffix` to `value`. `order` tells several
    /// such keys of one transaction apart.
    fn set_versionstamped_key(&self, prefix: &[u8], order: u16, suffix: &[u8], value: &[u8]);

    /// Sets `key` to `prefix ++ versionstamp (10 bytes) ++ suffix`.
    fn set_versionstamped_value(&self, key: &[u8], prefix: &[u8], suffix: &[u8]);

    /// Makes the commit conflict with writes to `[begin, end)` as if it had been read.
    fn add_read_conflict(&self, begin: &[u8], end: &[u8]);

    /// Commits. A transaction without writes always succeeds. Call once.
    ///
    /// # Errors
    /// `Conflict`, `MaybeCommitted`, `TooLarge`, `Full`, `Unavailable`.
    async fn commit(&self) -> Result<Versionstamp>;
}

//! The reference engine: everything in memory, with FoundationDB's semantics.
//!
//! Transactions read at a version and are validated at commit against what was written since; those older than 5 s,
//! or too many commits behind, conflict. Limits are enforced. Time is injected, so that simulations run on their own.
//!
//! Lock order: a transaction's buffer, then the shared state, then watches.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use parking_lot::Mutex;

use crate::engine::{
    BufferedTxn, Chunk, Commit, CurrentState, Lookup, Memtable, Snapshot, Source, TxnBuffer, Watches,
    read_range, stamp_of,
};
use crate::{Direction, Kv, KvError, Limits, RangePage, RangeQuery, Result, Txn, Versionstamp, Watch};

/// Time since some fixed moment.
pub type TimeSource = Arc<dyn Fn() -> Duration + Send + Sync>;

/// How a [`MemKv`] behaves.
#[derive(Clone)]
pub struct MemOptions {
    /// Where time comes from; tokio's clock (which tests may pause) by default.
    pub time: TimeSource,
    /// Transactions older than this conflict (5 s).
    pub txn_age_max: Duration,
    /// Transactions that began more commits ago than this conflict (100,000).
    pub history_commits_max: usize,
}

impl Default for MemOptions {
    fn default() -> Self {
        let start = tokio::time::Instant::now();
        Self {
            time: Arc::new(move || start.elapsed()),
            txn_age_max: Duration::from_secs(5),
            history_commits_max: 100_000,
        }
    }
}

/// A commit that old transactions may still have to be validated against.
struct PastCommit {
    time: Duration,
    version: u64,
    keys: Vec<Bytes>,
}

#[derive(Default)]
struct State {
    table: Memtable,
    version: u64,
    /// Transactions that read at an older version conflict.
    oldest: u64,
    history: VecDeque<PastCommit>,
}

impl State {
    /// Forgets what only transactions that are too old could need.
    fn prune(&mut self, now: Duration, options: &MemOptions) {
        while let Some(first) = self.history.front() {
            let outdated = first.time + options.txn_age_max < now;
            if !outdated && self.history.len() <= options.history_commits_max {
                break;
            }
            let Some(first) = self.history.pop_front() else { break };
            self.oldest = first.version;
            for key in &first.keys {
                self.table.prune_key(key, self.oldest);
            }
            self.table.prune_cleared(self.oldest);
        }
    }
}

struct Shared {
    state: Mutex<State>,
    watches: Watches,
    options: MemOptions,
}

/// A store in memory. Handles made by [`MemKv::reopen`] share its contents.
pub struct MemKv {
    shared: Arc<Shared>,
    closed: Arc<AtomicBool>,
}

impl Default for MemKv {
    fn default() -> Self {
        Self::new()
    }
}

impl MemKv {
    /// An empty store on tokio's clock.
    pub fn new() -> Self {
        Self::with_options(MemOptions::default())
    }

    /// An empty store.
    pub fn with_options(options: MemOptions) -> Self {
        let shared = Shared { state: Mutex::default(), watches: Watches::default(), options };
        Self { shared: Arc::new(shared), closed: Arc::default() }
    }

    /// Another handle on the same contents, as another client would have; open even if this one is closed.
    #[must_use]
    pub fn reopen(&self) -> Self {
        Self { shared: Arc::clone(&self.shared), closed: Arc::default() }
    }

    /// Number of keys that are stored, removed ones that old transactions may still read included.
    pub fn key_count(&self) -> usize {
        self.shared.state.lock().table.len()
    }

    fn check_open(&self) -> Result<()> {
        check_open(&self.closed)
    }
}

fn check_open(closed: &AtomicBool) -> Result<()> {
    if closed.load(Ordering::Acquire) {
        return Err(KvError::Unavailable("the metadata store was closed".into()));
    }
    Ok(())
}

#[async_trait]
impl Kv for MemKv {
    fn limits(&self) -> Limits {
        Limits::STRICTEST
    }

    async fn begin(&self) -> Result<Arc<dyn Txn>> {
        self.check_open()?;
        let began = (self.shared.options.time)();
        let read_version = self.shared.state.lock().version;
        Ok(Arc::new(BufferedTxn::new(MemSnapshot {
            shared: Arc::clone(&self.shared),
            closed: Arc::clone(&self.closed),
            read_version,
            began,
        })))
    }

    async fn sync(&self) -> Result<()> {
        self.check_open()
    }

    async fn watch(&self, key: &[u8]) -> Result<Watch> {
        self.check_open()?;
        let _state = self.shared.state.lock();
        Ok(self.shared.watches.watch(key))
    }

    async fn close(&self) -> Result<()> {
        self.check_open()?;
        self.closed.store(true, Ordering::Release);
        Ok(())
    }
}

/// The store at the beginning of a transaction.
struct MemSnapshot {
    shared: Arc<Shared>,
    closed: Arc<AtomicBool>,
    read_version: u64,
    began: Duration,
}

impl MemSnapshot {
    fn check_age(&self, state: &State, now: Duration) -> Result<()> {
        check_open(&self.closed)?;
        if self.read_version < state.oldest || self.began + self.shared.options.txn_age_max < now {
            return Err(KvError::Conflict);
        }
        Ok(())
    }

    fn now(&self) -> Duration {
        (self.shared.options.time)()
    }
}

impl Snapshot for MemSnapshot {
    fn stamp(&self) -> Versionstamp {
        stamp_of(self.read_version)
    }

    fn get(&self, key: &[u8]) -> Result<Option<Bytes>> {
        let now = self.now();
        let state = self.shared.state.lock();
        self.check_age(&state, now)?;
        Ok(match state.table.get(key, self.read_version) {
            Lookup::Missing => None,
            Lookup::Found(value) => value,
        })
    }

    fn range(&self, buffer: &Mutex<TxnBuffer>, query: &RangeQuery) -> Result<RangePage> {
        read_range(buffer, &[self], query)
    }

    async fn commit(&self, commit: Commit) -> Result<Versionstamp> {
        let now = self.now();
        let state = &mut *self.shared.state.lock();
        self.check_age(state, now)?;
        if state.table.conflicts(commit.reads(), self.read_version) {
            return Err(KvError::Conflict);
        }
        let version = state.version + 1;
        let stamp = stamp_of(version);
        let cleared = commit.cleared().to_vec();
        let changes = commit.resolve(stamp, &Newest(&state.table))?;
        let keys: Vec<Bytes> = changes.iter().map(|(key, _)| key.clone()).collect();
        state.table.apply(version, changes, &cleared, state.oldest);
        state.version = version;
        if !self.shared.watches.is_empty() {
            self.shared.watches.notify(keys.iter());
        }
        state.history.push_back(PastCommit { time: now, version, keys });
        state.prune(now, &self.shared.options);
        Ok(stamp)
    }
}

impl Source for MemSnapshot {
    fn scan(&self, begin: &[u8], end: &[u8], direction: Direction, limit: usize) -> Result<Chunk> {
        let now = self.now();
        let state = self.shared.state.lock();
        self.check_age(&state, now)?;
        Ok(state.table.scan(begin, end, direction, limit, self.read_version))
    }
}

/// The newest version of everything.
struct Newest<'a>(&'a Memtable);

impl CurrentState for Newest<'_> {
    fn get(&self, key: &[u8]) -> Result<Option<Bytes>> {
        Ok(match self.0.get(key, u64::MAX) {
            Lookup::Missing => None,
            Lookup::Found(value) => value,
        })
    }

    fn keys(&self, begin: &[u8], end: &[u8]) -> Result<Vec<Bytes>> {
        let chunk = self.0.scan(begin, end, Direction::Forward, usize::MAX, u64::MAX);
        Ok(chunk.entries.into_iter().filter_map(|(key, value)| value.map(|_| key)).collect())
    }
}

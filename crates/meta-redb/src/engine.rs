//! The state that transactions and the committer share, and how a commit is applied to it.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::Bytes;
use parking_lot::{Condvar, Mutex};
use rfs_kv::engine::{Commit, CurrentState, Lookup, Source, Watches, stamp_of};
use rfs_kv::{Direction, KvError, Result, Versionstamp, Watch};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::RedbOptions;
use crate::layer::{Base, Layer, View};
use crate::open::Opened;

/// The error of a store that was closed.
pub(crate) fn closed() -> KvError {
    KvError::Unavailable("the metadata store was closed".into())
}

/// Why the file cannot be written.
#[derive(Debug, Clone, Default)]
pub(crate) struct WriteFailure {
    /// Its disk is full.
    pub(crate) full: bool,
    pub(crate) text: String,
}

impl From<WriteFailure> for KvError {
    fn from(failure: WriteFailure) -> KvError {
        if failure.full { KvError::Full(failure.text) } else { KvError::Unavailable(failure.text) }
    }
}

/// Layers and redb states that only running transactions still keep.
struct Retired {
    since: Instant,
    layer: Weak<Layer>,
    base: Weak<Base>,
    bytes: usize,
}

pub(crate) struct State {
    view: Arc<View>,
    /// Of the last commit.
    version: u64,
    active_bytes: usize,
    /// When the active layer got its first commit.
    dirty_since: Instant,
    frozen_bytes: usize,
    /// Commits up to this version are awaited by somebody.
    sync_target: u64,
    /// The committer is to start now.
    wake: bool,
    stopping: bool,
    /// Why writing to the file does not work at the moment.
    failure: Option<WriteFailure>,
    retired: VecDeque<Retired>,
}

impl State {
    /// Fails when commits are refused.
    fn check_writable(&self) -> Result<()> {
        match &self.failure {
            _ if self.stopping => Err(closed()),
            Some(failure) => Err(failure.clone().into()),
            None => Ok(()),
        }
    }
}

/// What those who wait for the committer look at.
#[derive(Debug, Clone, Default)]
struct Progress {
    /// Commits up to this version are durable.
    durable: u64,
    /// Number of attempts that failed, and how the last did.
    failures: u64,
    failure: WriteFailure,
    /// The committer has ended, with or without an error.
    stopped: Option<Result<(), String>>,
}

pub(crate) struct Engine {
    pub(crate) options: RedbOptions,
    state: Mutex<State>,
    /// Wakes the committer.
    work: Condvar,
    progress: watch::Sender<Progress>,
    watches: Watches,
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").field("options", &self.options).finish_non_exhaustive()
    }
}

/// What a transaction begins with.
pub(crate) struct Beginning {
    pub(crate) view: Arc<View>,
    pub(crate) version: u64,
}

/// What the committer is to do.
pub(crate) enum Task {
    /// Write this layer, whose last commit has that version.
    Flush(Arc<Layer>),
    /// End.
    Stop,
}

impl Engine {
    pub(crate) fn new(options: RedbOptions, opened: &Opened) -> Self {
        let version = opened.version_next();
        let base = Base::newest(&opened.database);
        let view = View { active: Arc::new(Layer::new()), frozen: None, base: Arc::new(base) };
        let state = State {
            view: Arc::new(view),
            version,
            active_bytes: 0,
            dirty_since: Instant::now(),
            frozen_bytes: 0,
            sync_target: 0,
            wake: false,
            stopping: false,
            failure: None,
            retired: VecDeque::new(),
        };
        Self {
            options,
            state: Mutex::new(state),
            work: Condvar::new(),
            progress: watch::Sender::new(Progress { durable: version, ..Progress::default() }),
            watches: Watches::default(),
        }
    }

    pub(crate) fn begin(&self) -> Result<Beginning> {
        let state = self.state.lock();
        if state.stopping {
            return Err(closed());
        }
        Ok(Beginning { view: Arc::clone(&state.view), version: state.version })
    }

    pub(crate) fn pending_bytes(&self) -> usize {
        let state = self.state.lock();
        state.active_bytes + state.frozen_bytes
    }

    pub(crate) fn watch(&self, key: &[u8]) -> Result<Watch> {
        let state = self.state.lock();
        if state.stopping {
            return Err(closed());
        }
        Ok(self.watches.watch(key))
    }

    /// Applies `commit` of a transaction that began at `beginning`.
    pub(crate) async fn commit(&self, commit: Commit, beginning: &Beginning) -> Result<Versionstamp> {
        self.wait_for_room().await?;
        let prefetched = self.prefetch(&commit)?;
        let mut state = self.state.lock();
        state.check_writable()?;
        if state.version > beginning.version
            && beginning.view.active.conflicts(commit.reads(), beginning.version)?
        {
            return Err(KvError::Conflict);
        }
        let version = state.version + 1;
        let stamp = stamp_of(version);
        let cleared = commit.cleared().to_vec();
        let current = Current { view: &state.view, prefetched: &prefetched };
        let changes = commit.resolve(stamp, &current)?;
        let watched = !self.watches.is_empty();
        let keys: Vec<Bytes> =
            if watched { changes.iter().map(|(key, _)| key.clone()).collect() } else { Vec::new() };
        let was_clean = state.active_bytes == 0;
        if was_clean {
            state.dirty_since = Instant::now();
        }
        state.active_bytes = state.view.active.apply(version, changes, &cleared);
        state.version = version;
        let full = state.active_bytes >= self.options.flush_bytes && state.frozen_bytes == 0 && !state.wake;
        state.wake |= full;
        drop(state);
        if was_clean || full {
            self.work.notify_one();
        }
        if watched {
            self.watches.notify(keys.iter());
        }
        Ok(stamp)
    }

    /// Waits while too much is in memory only.
    async fn wait_for_room(&self) -> Result<()> {
        let has_room = || -> Result<bool> {
            let mut state = self.state.lock();
            state.check_writable()?;
            let room = state.active_bytes + state.frozen_bytes < self.options.memory_bytes_max;
            if !room && state.frozen_bytes == 0 && !state.wake {
                state.wake = true;
                self.work.notify_one();
            }
            Ok(room)
        };
        if has_room()? {
            return Ok(());
        }
        let mut progress = self.progress.subscribe();
        while !has_room()? {
            progress.changed().await.map_err(|_| closed())?;
        }
        Ok(())
    }

    /// Reads from redb what resolving `commit` needs, so that it is not read while everybody waits.
    fn prefetch(&self, commit: &Commit) -> Result<Prefetched> {
        let mut prefetched = Prefetched::default();
        if commit.cleared().is_empty() && commit.keys_on_top().next().is_none() {
            return Ok(prefetched);
        }
        let view = Arc::clone(&self.state.lock().view);
        for key in commit.keys_on_top() {
            if view.lookup(key, u64::MAX)? == Lookup::Missing {
                prefetched.values.insert(key.clone(), view.base.get(key)?);
            }
        }
        for (begin, end) in commit.cleared() {
            let keys = base_keys(&view.base, begin, end)?;
            prefetched.ranges.insert((begin.clone(), end.clone()), keys);
        }
        prefetched.base = Some(Arc::clone(&view.base));
        Ok(prefetched)
    }

    /// Returns when everything committed before is durable.
    pub(crate) async fn sync(&self) -> Result<()> {
        let mut progress = self.progress.subscribe();
        let failures_before = progress.borrow_and_update().failures;
        let target = {
            let mut state = self.state.lock();
            if state.stopping {
                return Err(closed());
            }
            let target = state.version;
            if self.progress.borrow().durable < target {
                state.sync_target = state.sync_target.max(target);
                state.wake = true;
                self.work.notify_one();
            }
            target
        };
        loop {
            {
                let progress = progress.borrow_and_update();
                if progress.durable >= target {
                    return Ok(());
                }
                if progress.failures > failures_before {
                    return Err(progress.failure.clone().into());
                }
                if progress.stopped.is_some() {
                    return Err(closed());
                }
            }
            progress.changed().await.map_err(|_| closed())?;
        }
    }

    /// Tells the committer to end after a last flush; false if it was told before.
    pub(crate) fn ask_to_stop(&self) -> bool {
        let mut state = self.state.lock();
        let first = !state.stopping;
        state.stopping = true;
        self.work.notify_one();
        first
    }

    /// Waits until the committer has ended.
    pub(crate) async fn stopped(&self) -> Result<(), String> {
        let mut progress = self.progress.subscribe();
        match progress.wait_for(|progress| progress.stopped.is_some()).await {
            Ok(progress) => progress.stopped.clone().unwrap_or(Ok(())),
            Err(_) => Err("the metadata store's committer is gone".into()),
        }
    }

    /// The committer's next task; waits for it. Freezes the active layer unless a frozen one is still to be written.
    pub(crate) fn next_task(&self) -> Task {
        let mut state = self.state.lock();
        loop {
            let dirty = state.frozen_bytes > 0 || state.active_bytes > 0;
            if state.stopping && !dirty {
                return Task::Stop;
            }
            let awaited = state.sync_target > self.progress.borrow().durable;
            let full = state.active_bytes >= self.options.flush_bytes;
            // After a failure the committer has paused already.
            if dirty && (state.stopping || state.wake || awaited || full || state.failure.is_some()) {
                break;
            }
            if dirty {
                let left = self.options.durable_interval.saturating_sub(state.dirty_since.elapsed());
                if left.is_zero() || self.work.wait_for(&mut state, left).timed_out() {
                    break;
                }
            } else {
                state.wake = false;
                self.work.wait(&mut state);
            }
        }
        state.wake = false;
        let frozen = match &state.view.frozen {
            Some(frozen) => Arc::clone(frozen),
            None => freeze(&mut state),
        };
        Task::Flush(frozen)
    }

    /// The frozen layer, up to `version`, is durable and is part of `base`.
    pub(crate) fn flushed(&self, version: u64, base: Arc<Base>) {
        let mut state = self.state.lock();
        let view = View { active: Arc::clone(&state.view.active), frozen: None, base };
        let before = std::mem::replace(&mut state.view, Arc::new(view));
        let retired = Retired {
            since: Instant::now(),
            layer: before.frozen.as_ref().map(Arc::downgrade).unwrap_or_default(),
            base: Arc::downgrade(&before.base),
            bytes: state.frozen_bytes,
        };
        state.retired.push_back(retired);
        state.frozen_bytes = 0;
        if state.failure.take().is_some() {
            tracing::info!("the metadata file can be written again");
        }
        let expired = take_expired(&mut state, &self.options);
        drop(state);
        for retired in &expired {
            retired.expire();
        }
        self.progress.send_modify(|progress| progress.durable = version);
    }

    /// Writing failed; `base` is what can be read now.
    pub(crate) fn flush_failed(&self, failure: WriteFailure, base: Arc<Base>) {
        let mut state = self.state.lock();
        let view = View { active: Arc::clone(&state.view.active), frozen: state.view.frozen.clone(), base };
        state.view = Arc::new(view);
        if state.failure.is_none() {
            tracing::error!(
                error = failure.text,
                "writing the metadata file failed; changes are refused until it works"
            );
        }
        state.failure = Some(failure.clone());
        drop(state);
        self.progress.send_modify(|progress| {
            progress.failures += 1;
            progress.failure = failure;
        });
    }

    /// Lets go of every state of the file that is still read.
    pub(crate) fn release_bases(&self, release: impl Fn(&Base)) {
        let (view, retired) = {
            let mut state = self.state.lock();
            (Arc::clone(&state.view), std::mem::take(&mut state.retired))
        };
        release(&view.base);
        for base in retired.iter().filter_map(|retired| retired.base.upgrade()) {
            release(&base);
        }
        self.state.lock().retired.extend(retired);
    }

    /// Whether the store is being closed.
    pub(crate) fn is_stopping(&self) -> bool {
        self.state.lock().stopping
    }

    /// Waits before a failed flush is tried again: a while, or until somebody asks.
    pub(crate) fn wait_to_retry(&self) {
        let mut state = self.state.lock();
        if !state.wake && !state.stopping {
            self.work.wait_for(&mut state, RETRY_INTERVAL);
        }
    }

    /// The committer ends.
    pub(crate) fn has_stopped(&self, outcome: Result<(), String>) {
        self.state.lock().stopping = true;
        self.watches.close();
        self.progress.send_modify(|progress| progress.stopped = Some(outcome));
    }
}

/// Pause between attempts to write to a file that fails.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

fn freeze(state: &mut State) -> Arc<Layer> {
    let active = Arc::new(Layer::new());
    let frozen = Arc::clone(&state.view.active);
    frozen.set_next(Arc::clone(&active));
    let view = View { active, frozen: Some(Arc::clone(&frozen)), base: Arc::clone(&state.view.base) };
    state.view = Arc::new(view);
    state.frozen_bytes = std::mem::take(&mut state.active_bytes);
    frozen
}

impl Retired {
    fn expire(&self) {
        if let Some(layer) = self.layer.upgrade() {
            layer.expire();
        }
        if let Some(base) = self.base.upgrade() {
            base.expire();
        }
    }

    fn is_kept(&self) -> bool {
        self.layer.strong_count() > 0 || self.base.strong_count() > 0
    }
}

/// Takes what nobody keeps any longer, and what is kept for too long or takes too much memory.
fn take_expired(state: &mut State, options: &RedbOptions) -> Vec<Retired> {
    let now = Instant::now();
    let mut kept_bytes = 0;
    for retired in state.retired.iter_mut().rev() {
        if retired.layer.strong_count() == 0 {
            retired.bytes = 0;
        }
        kept_bytes += retired.bytes;
    }
    let mut expired = Vec::new();
    // A second more than transactions may last, so that none is caught in the middle of a read.
    let age_max = options.txn_age_max + Duration::from_secs(1);
    while let Some(first) = state.retired.front() {
        let outdated = now.saturating_duration_since(first.since) > age_max;
        if first.is_kept() && !outdated && kept_bytes <= options.memory_bytes_max {
            break;
        }
        kept_bytes -= first.bytes;
        expired.extend(state.retired.pop_front());
    }
    expired
}

fn base_keys(base: &Base, begin: &[u8], end: &[u8]) -> Result<Vec<Bytes>> {
    let chunk = base.scan(begin, end, Direction::Forward, usize::MAX)?;
    Ok(chunk.entries.into_iter().map(|(key, _)| key).collect())
}

/// What was read from one state of redb before the commit took the lock.
#[derive(Default)]
struct Prefetched {
    base: Option<Arc<Base>>,
    values: HashMap<Bytes, Option<Bytes>>,
    ranges: HashMap<(Bytes, Bytes), Vec<Bytes>>,
}

/// The newest state, for a commit that holds the lock.
struct Current<'a> {
    view: &'a View,
    prefetched: &'a Prefetched,
}

impl Current<'_> {
    fn is_prefetched(&self) -> bool {
        self.prefetched.base.as_ref().is_some_and(|base| Arc::ptr_eq(base, &self.view.base))
    }
}

impl CurrentState for Current<'_> {
    fn get(&self, key: &[u8]) -> Result<Option<Bytes>> {
        match self.view.lookup(key, u64::MAX)? {
            Lookup::Found(value) => Ok(value),
            Lookup::Missing => match self.prefetched.values.get(key) {
                Some(value) if self.is_prefetched() => Ok(value.clone()),
                _ => self.view.base.get(key),
            },
        }
    }

    fn keys(&self, begin: &[u8], end: &[u8]) -> Result<Vec<Bytes>> {
        let range = (Bytes::copy_from_slice(begin), Bytes::copy_from_slice(end));
        let stored = match self.prefetched.ranges.get(&range) {
            Some(keys) if self.is_prefetched() => keys.clone(),
            _ => base_keys(&self.view.base, begin, end)?,
        };
        let mut present: BTreeMap<Bytes, bool> = stored.into_iter().map(|key| (key, true)).collect();
        for layer in [self.view.frozen.as_ref(), Some(&self.view.active)].into_iter().flatten() {
            let chunk =
                layer.with(|table| table.scan(begin, end, Direction::Forward, usize::MAX, u64::MAX))?;
            present.extend(chunk.entries.into_iter().map(|(key, value)| (key, value.is_some())));
        }
        Ok(present.into_iter().filter_map(|(key, live)| live.then_some(key)).collect())
    }
}

#[cfg(test)]
mod tests {
    use rfs_kv::Txn as _;
    use rfs_kv::engine::BufferedTxn;

    use super::*;
    use crate::open::{create_file, open_database};
    use crate::txn::RedbSnapshot;

    #[tokio::test]
    async fn nobody_waits_for_a_committer_that_is_gone() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("meta.redb");
        let options = RedbOptions::default();
        let opener = create_file(&path, &options).expect("a file");
        let store = open_database(&path, &opener, &options).expect("it opens");
        let engine = Arc::new(Engine::new(options, &store));
        let txn = BufferedTxn::new(RedbSnapshot::begin(&engine).expect("it is open"));
        txn.set(b"key", b"value");
        txn.commit().await.expect("it commits in memory");
        let gone = async { engine.has_stopped(Err("it panicked".into())) };
        let (synced, ()) = tokio::join!(engine.sync(), gone);
        assert!(matches!(synced, Err(KvError::Unavailable(_))), "{synced:?}");
    }
}

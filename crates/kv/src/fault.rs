//! An engine that fails on purpose, around any other.
//!
//! Every fault is one that FoundationDB can show: a conflict nobody can explain, a commit whose outcome is unknown and
//! that was applied or was not, an unreachable store, slowness. The seed alone decides what happens, as long as
//! callers call in the same order.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures::FutureExt;
use futures::future::BoxFuture;
use parking_lot::Mutex;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::{Kv, KvError, Limits, RangePage, RangeQuery, Result, Txn, Versionstamp, Watch};

/// How likely each fault is, from 0.0 to 1.0.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Faults {
    /// A commit with writes ends as `Conflict` and is not applied.
    pub conflict: f64,
    /// A commit with writes is applied and ends as `MaybeCommitted`.
    pub maybe_applied: f64,
    /// A commit with writes is not applied and ends as `MaybeCommitted`.
    pub maybe_lost: f64,
    /// A read ends as `Conflict`, as when the transaction became too old.
    pub read_conflict: f64,
    /// `begin`, a read, `sync` or a commit (which is then not applied) ends as `Unavailable`.
    pub unavailable: f64,
    /// A call takes longer than it must.
    pub delay: f64,
    /// Longest such delay, on tokio's clock.
    pub delay_max: Duration,
}

impl Faults {
    /// No faults at all.
    pub const NONE: Faults = Faults {
        conflict: 0.0,
        maybe_applied: 0.0,
        maybe_lost: 0.0,
        read_conflict: 0.0,
        unavailable: 0.0,
        delay: 0.0,
        delay_max: Duration::ZERO,
    };

    /// What retry loops must get over: conflicts and unknown outcomes, each in a tenth of the commits.
    pub const RETRYABLE: Faults =
        Faults { conflict: 0.1, maybe_applied: 0.1, maybe_lost: 0.1, read_conflict: 0.02, ..Faults::NONE };
}

/// How many faults there were.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FaultCounts {
    /// Conflicts at commit or read.
    pub conflicts: u64,
    /// Unknown outcomes of applied commits.
    pub maybe_applied: u64,
    /// Unknown outcomes of commits that were not applied.
    pub maybe_lost: u64,
    /// Unavailable answers.
    pub unavailable: u64,
}

#[derive(Default)]
struct Counters {
    conflicts: AtomicU64,
    maybe_applied: AtomicU64,
    maybe_lost: AtomicU64,
    unavailable: AtomicU64,
}

struct Dice {
    rng: Mutex<StdRng>,
    faults: Mutex<Faults>,
    counters: Counters,
}

impl Dice {
    fn roll(&self, pick: impl Fn(&Faults) -> f64, counter: &AtomicU64) -> bool {
        let probability = pick(&self.faults.lock()).clamp(0.0, 1.0);
        let hit = probability > 0.0 && self.rng.lock().random_bool(probability);
        if hit {
            counter.fetch_add(1, Ordering::Relaxed);
        }
        hit
    }

    async fn delay(&self) {
        let faults = *self.faults.lock();
        if faults.delay <= 0.0 || faults.delay_max.is_zero() {
            return;
        }
        let pause = {
            let mut rng = self.rng.lock();
            let hit = rng.random_bool(faults.delay.min(1.0));
            hit.then(|| faults.delay_max.mul_f64(rng.random_range(0.0..1.0)))
        };
        if let Some(pause) = pause {
            tokio::time::sleep(pause).await;
        }
    }

    fn check_available(&self) -> Result<()> {
        if self.roll(|faults| faults.unavailable, &self.counters.unavailable) {
            return Err(KvError::Unavailable("injected fault".into()));
        }
        Ok(())
    }

    async fn before_read(&self) -> Result<()> {
        self.delay().await;
        self.check_available()?;
        if self.roll(|faults| faults.read_conflict, &self.counters.conflicts) {
            return Err(KvError::Conflict);
        }
        Ok(())
    }
}

/// A store that fails on purpose.
pub struct FaultKv<K: ?Sized> {
    inner: Arc<K>,
    dice: Arc<Dice>,
}

impl<K: Kv + ?Sized> FaultKv<K> {
    /// Wraps `inner`; `seed` decides which calls fail.
    pub fn new(inner: Arc<K>, seed: u64, faults: Faults) -> Self {
        let dice = Dice {
            rng: Mutex::new(StdRng::seed_from_u64(seed)),
            faults: Mutex::new(faults),
            counters: Counters::default(),
        };
        Self { inner, dice: Arc::new(dice) }
    }

    fn with_faults(&self, inner: Arc<dyn Txn>) -> Arc<dyn Txn> {
        Arc::new(FaultTxn { inner, dice: Arc::clone(&self.dice), wrote: AtomicBool::new(false) })
    }

    /// Changes what fails from now on, in running transactions too.
    pub fn set_faults(&self, faults: Faults) {
        *self.dice.faults.lock() = faults;
    }

    /// Faults so far.
    pub fn counts(&self) -> FaultCounts {
        let counters = &self.dice.counters;
        FaultCounts {
            conflicts: counters.conflicts.load(Ordering::Relaxed),
            maybe_applied: counters.maybe_applied.load(Ordering::Relaxed),
            maybe_lost: counters.maybe_lost.load(Ordering::Relaxed),
            unavailable: counters.unavailable.load(Ordering::Relaxed),
        }
    }
}

#[async_trait]
impl<K: Kv + ?Sized> Kv for FaultKv<K> {
    fn limits(&self) -> Limits {
        Limits { commit_may_be_unknown: true, ..self.inner.limits() }
    }

    async fn begin(&self) -> Result<Arc<dyn Txn>> {
        self.dice.delay().await;
        self.dice.check_available()?;
        Ok(self.with_faults(self.inner.begin().await?))
    }

    fn begin_recent(&self) -> BoxFuture<'_, Result<Arc<dyn Txn>>> {
        async {
            self.dice.delay().await;
            self.dice.check_available()?;
            Ok(self.with_faults(self.inner.begin_recent().await?))
        }
        .boxed()
    }

    async fn sync(&self) -> Result<()> {
        self.dice.delay().await;
        self.dice.check_available()?;
        self.inner.sync().await
    }

    async fn watch(&self, key: &[u8]) -> Result<Watch> {
        self.inner.watch(key).await
    }

    async fn close(&self) -> Result<()> {
        self.inner.close().await
    }
}

struct FaultTxn {
    inner: Arc<dyn Txn>,
    dice: Arc<Dice>,
    wrote: AtomicBool,
}

impl FaultTxn {
    fn writing(&self) -> &dyn Txn {
        self.wrote.store(true, Ordering::Relaxed);
        &*self.inner
    }
}

#[async_trait]
impl Txn for FaultTxn {
    async fn get(&self, key: &[u8]) -> Result<Option<Bytes>> {
        self.dice.before_read().await?;
        self.inner.get(key).await
    }

    async fn snapshot_get(&self, key: &[u8]) -> Result<Option<Bytes>> {
        self.dice.before_read().await?;
        self.inner.snapshot_get(key).await
    }

    async fn range(&self, query: RangeQuery) -> Result<RangePage> {
        self.dice.before_read().await?;
        self.inner.range(query).await
    }

    fn set(&self, key: &[u8], value: &[u8]) {
        self.writing().set(key, value);
    }

    fn clear(&self, key: &[u8]) {
        self.writing().clear(key);
    }

    fn clear_range(&self, begin: &[u8], end: &[u8]) {
        self.writing().clear_range(begin, end);
    }

    fn add(&self, key: &[u8], delta: i64) {
        self.writing().add(key, delta);
    }

    fn max(&self, key: &[u8], value: &[u8]) {
        self.writing().max(key, value);
    }

    fn set_versionstamped_key(&self, prefix: &[u8], order: u16, suffix: &[u8], value: &[u8]) {
        self.writing().set_versionstamped_key(prefix, order, suffix, value);
    }

    fn set_versionstamped_value(&self, key: &[u8], prefix: &[u8], suffix: &[u8]) {
        self.writing().set_versionstamped_value(key, prefix, suffix);
    }

    fn add_read_conflict(&self, begin: &[u8], end: &[u8]) {
        self.inner.add_read_conflict(begin, end);
    }

    async fn commit(&self) -> Result<Versionstamp> {
        if !self.wrote.load(Ordering::Relaxed) {
            return self.inner.commit().await;
        }
        let (dice, counters) = (&self.dice, &self.dice.counters);
        dice.delay().await;
        dice.check_available()?;
        if dice.roll(|faults| faults.conflict, &counters.conflicts) {
            return Err(KvError::Conflict);
        }
        if dice.roll(|faults| faults.maybe_lost, &counters.maybe_lost) {
            return Err(KvError::MaybeCommitted);
        }
        let stamp = self.inner.commit().await?;
        dice.delay().await;
        if dice.roll(|faults| faults.maybe_applied, &counters.maybe_applied) {
            return Err(KvError::MaybeCommitted);
        }
        Ok(stamp)
    }
}

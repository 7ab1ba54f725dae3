//! What operations cost: calls one after the other are trips to the store, keys are bytes to write.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures::FutureExt;
use futures::future::BoxFuture;
use rfs_kv::{KvError, Limits, RangePage, RangeQuery, Txn, Versionstamp, Watch};

use super::*;

/// How long a call takes, on a clock that stands still otherwise: the time that an operation takes tells how many calls
/// it awaits one after the other.
const TRIP: Duration = Duration::from_millis(1);

/// Counts what is asked of an engine on which commits always have a known outcome.
struct CountKv {
    inner: MemKv,
    counts: Arc<Counts>,
}

#[derive(Default)]
struct Counts {
    reads: AtomicUsize,
    writes: AtomicUsize,
}

struct CountTxn {
    inner: Arc<dyn Txn>,
    counts: Arc<Counts>,
}

impl CountTxn {
    async fn read(&self) {
        self.counts.reads.fetch_add(1, Ordering::Relaxed);
        tokio::time::sleep(TRIP).await;
    }

    fn write(&self) {
        self.counts.writes.fetch_add(1, Ordering::Relaxed);
    }
}

#[async_trait]
impl Kv for CountKv {
    fn limits(&self) -> Limits {
        Limits { commit_may_be_unknown: false, ..self.inner.limits() }
    }

    async fn begin(&self) -> Result<Arc<dyn Txn>, KvError> {
        tokio::time::sleep(TRIP).await;
        Ok(Arc::new(CountTxn { inner: self.inner.begin().await?, counts: Arc::clone(&self.counts) }))
    }

    fn begin_recent(&self) -> BoxFuture<'_, Result<Arc<dyn Txn>, KvError>> {
        let begin = async {
            let txn: Arc<dyn Txn> =
                Arc::new(CountTxn { inner: self.inner.begin().await?, counts: Arc::clone(&self.counts) });
            Ok(txn)
        };
        begin.boxed()
    }

    async fn sync(&self) -> Result<(), KvError> {
        self.inner.sync().await
    }

    async fn watch(&self, key: &[u8]) -> Result<Watch, KvError> {
        self.inner.watch(key).await
    }

    async fn close(&self) -> Result<(), KvError> {
        self.inner.close().await
    }
}

#[async_trait]
impl Txn for CountTxn {
    async fn get(&self, key: &[u8]) -> Result<Option<Bytes>, KvError> {
        self.read().await;
        self.inner.get(key).await
    }

    async fn snapshot_get(&self, key: &[u8]) -> Result<Option<Bytes>, KvError> {
        self.read().await;
        self.inner.snapshot_get(key).await
    }

    async fn range(&self, query: RangeQuery) -> Result<RangePage, KvError> {
        self.read().await;
        self.inner.range(query).await
    }

    fn set(&self, key: &[u8], value: &[u8]) {
        self.write();
        self.inner.set(key, value);
    }

    fn clear(&self, key: &[u8]) {
        self.write();
        self.inner.clear(key);
    }

    fn clear_range(&self, begin: &[u8], end: &[u8]) {
        self.write();
        self.inner.clear_range(begin, end);
    }

    fn add(&self, key: &[u8], delta: i64) {
        self.write();
        self.inner.add(key, delta);
    }

    fn max(&self, key: &[u8], value: &[u8]) {
        self.write();
        self.inner.max(key, value);
    }

    fn set_versionstamped_key(&self, prefix: &[u8], order: u16, suffix: &[u8], value: &[u8]) {
        self.write();
        self.inner.set_versionstamped_key(prefix, order, suffix, value);
    }

    fn set_versionstamped_value(&self, key: &[u8], prefix: &[u8], suffix: &[u8]) {
        self.write();
        self.inner.set_versionstamped_value(key, prefix, suffix);
    }

    fn add_read_conflict(&self, begin: &[u8], end: &[u8]) {
        self.inner.add_read_conflict(begin, end);
    }

    async fn commit(&self) -> Result<Versionstamp, KvError> {
        tokio::time::sleep(TRIP).await;
        self.inner.commit().await
    }
}

/// Trips, reads and writes since the last call.
struct Meter {
    counts: Arc<Counts>,
    since: tokio::time::Instant,
}

impl Meter {
    fn take(&mut self) -> (u128, usize, usize) {
        let (last, now) = (self.since, tokio::time::Instant::now());
        self.since = now;
        let trips = (now - last).as_millis() / TRIP.as_millis();
        let taken = |count: &AtomicUsize| count.swap(0, Ordering::Relaxed);
        (trips, taken(&self.counts.reads), taken(&self.counts.writes))
    }
}

#[tokio::test(start_paused = true)]
async fn operations_stay_within_their_budget() {
    let counts = Arc::new(Counts::default());
    let v = Fixture::new(Arc::new(CountKv { inner: MemKv::new(), counts: Arc::clone(&counts) })).await;
    let dir = v.dir(ROOT, "d").await;
    v.file(dir, "first").await;
    let mut meter = Meter { counts, since: tokio::time::Instant::now() };
    let mut take = || meter.take();
    take();
    // Who is alone need not ask at which point to read. A change ends with a trip for its commit.
    let file = v.file(dir, "f").await;
    assert_eq!(take(), (2, 3, 4), "create");
    v.dir(dir, "s").await;
    assert_eq!(take(), (2, 3, 5), "mkdir");
    v.meta.getattr(file).await.unwrap();
    assert_eq!(take(), (1, 1, 0), "getattr");
    v.meta.lookup(dir, &name("f")).await.unwrap();
    assert_eq!(take(), (2, 2, 0), "lookup");
    v.meta.readdirplus(dir, None, 1000).await.unwrap();
    assert_eq!(take(), (2, 2, 0), "readdirplus");
    v.rename((dir, "f"), (dir, "g"), RenameMode::Replace).await.unwrap();
    assert_eq!(take(), (3, 5, 4), "rename");
    v.meta.unlink(dir, &name("g")).await.unwrap();
    assert_eq!(take(), (3, 4, 5), "unlink");
    v.meta.rmdir(dir, &name("s")).await.unwrap();
    assert_eq!(take(), (3, 5, 6), "rmdir");
    v.meta.reap(&[file]).await.unwrap();
    assert_eq!(take(), (3, 4, 6), "reap of one");
    let mut removed = Vec::new();
    for index in 0..20 {
        let text = format!("r{index}");
        removed.push(v.file(dir, &text).await);
        v.meta.unlink(dir, &name(&text)).await.unwrap();
    }
    take();
    v.meta.reap(&removed).await.unwrap();
    assert_eq!(take(), (4, 61, 101), "reap of many");
}

#[tokio::test(start_paused = true)]
async fn who_is_not_alone_asks_at_which_point_to_read() {
    let counts = Arc::new(Counts::default());
    let v = Fixture::new(Arc::new(CountKv { inner: MemKv::new(), counts: Arc::clone(&counts) })).await;
    let shared = OpenOptions { sharing: Sharing::Shared, ..OpenOptions::default() };
    let reading = OpenOptions { read_only: true, ..OpenOptions::default() };
    let mut meter = Meter { counts, since: tokio::time::Instant::now() };
    for options in [shared, reading] {
        let meta = Meta::open(Arc::clone(&v.kv), v.clock.clone(), &options).await.unwrap();
        meter.take();
        meta.getattr(ROOT).await.unwrap();
        assert_eq!(meter.take(), (2, 1, 0), "getattr, {options:?}");
        if !options.read_only {
            let set = SetAttr { mode: Some(0o700), ..SetAttr::default() };
            let membership = Membership::CheckedByKernel;
            let args = SetattrArgs { ino: ROOT, set: &set, caller: &CALLER, membership, written: None };
            meta.setattr(args).await.unwrap();
            assert_eq!(meter.take(), (3, 2, 2), "chmod, {options:?}");
        }
    }
}

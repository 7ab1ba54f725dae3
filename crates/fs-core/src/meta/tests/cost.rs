//! What operations cost: reads one after the other are trips to the store, keys are bytes to write.

use std::sync::atomic::{AtomicUsize, Ordering};

use async_trait::async_trait;
use bytes::Bytes;
use rfs_kv::{KvError, Limits, RangePage, RangeQuery, Txn, Versionstamp, Watch};

use super::*;

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
    fn read(&self) {
        self.counts.reads.fetch_add(1, Ordering::Relaxed);
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
        Ok(Arc::new(CountTxn { inner: self.inner.begin().await?, counts: Arc::clone(&self.counts) }))
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
        self.read();
        self.inner.get(key).await
    }

    async fn snapshot_get(&self, key: &[u8]) -> Result<Option<Bytes>, KvError> {
        self.read();
        self.inner.snapshot_get(key).await
    }

    async fn range(&self, query: RangeQuery) -> Result<RangePage, KvError> {
        self.read();
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
        self.inner.commit().await
    }
}

#[tokio::test]
async fn operations_stay_within_their_budget() {
    let counts = Arc::new(Counts::default());
    let v = Fixture::new(Arc::new(CountKv { inner: MemKv::new(), counts: Arc::clone(&counts) })).await;
    let dir = v.dir(ROOT, "d").await;
    v.file(dir, "first").await;
    let take = || (counts.reads.swap(0, Ordering::Relaxed), counts.writes.swap(0, Ordering::Relaxed));
    take();
    let file = v.file(dir, "f").await;
    assert_eq!(take(), (3, 4), "create");
    v.dir(dir, "s").await;
    assert_eq!(take(), (3, 5), "mkdir");
    v.meta.getattr(file).await.unwrap();
    assert_eq!(take(), (1, 0), "getattr");
    v.meta.lookup(dir, &name("f")).await.unwrap();
    assert_eq!(take(), (2, 0), "lookup");
    v.meta.readdirplus(dir, None, 1000).await.unwrap();
    assert_eq!(take(), (2, 0), "readdirplus");
    v.rename((dir, "f"), (dir, "g"), RenameMode::Replace).await.unwrap();
    assert_eq!(take(), (5, 4), "rename");
    v.meta.unlink(dir, &name("g")).await.unwrap();
    assert_eq!(take(), (4, 5), "unlink");
    v.meta.rmdir(dir, &name("s")).await.unwrap();
    assert_eq!(take(), (5, 6), "rmdir");
}

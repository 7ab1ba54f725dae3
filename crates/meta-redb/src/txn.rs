//! One transaction: its reads go to the layers of its beginning, its writes wait in a buffer.

use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use parking_lot::Mutex;
use rfs_kv::engine::{Source, TxnBuffer, read_key, read_range, stamp_of};
use rfs_kv::{Isolation, KvError, RangePage, RangeQuery, Result, Txn, Versionstamp};
use tokio::time::Instant;

use crate::engine::{Beginning, Engine};
use crate::layer::LayerAt;

pub(crate) struct RedbTxn {
    engine: Arc<Engine>,
    beginning: Beginning,
    began: Instant,
    buffer: Mutex<TxnBuffer>,
}

impl RedbTxn {
    pub(crate) fn begin(engine: &Arc<Engine>) -> Result<Self> {
        let began = Instant::now();
        let beginning = engine.begin()?;
        Ok(Self { engine: Arc::clone(engine), beginning, began, buffer: Mutex::default() })
    }

    fn check_age(&self) -> Result<()> {
        if self.began.elapsed() > self.engine.options.txn_age_max {
            return Err(KvError::Conflict);
        }
        Ok(())
    }

    fn read(&self, key: &[u8], isolation: Isolation) -> Result<Option<Bytes>> {
        self.check_age()?;
        let Beginning { view, version } = &self.beginning;
        read_key(&self.buffer, key, isolation, || view.get(key, *version))
    }
}

#[async_trait]
impl Txn for RedbTxn {
    async fn get(&self, key: &[u8]) -> Result<Option<Bytes>> {
        self.read(key, Isolation::Serializable)
    }

    async fn snapshot_get(&self, key: &[u8]) -> Result<Option<Bytes>> {
        self.read(key, Isolation::Snapshot)
    }

    async fn range(&self, query: RangeQuery) -> Result<RangePage> {
        self.check_age()?;
        let Beginning { view, version } = &self.beginning;
        let active = LayerAt { layer: &view.active, version: *version };
        let frozen = view.frozen.as_ref().map(|layer| LayerAt { layer, version: *version });
        let mut sources: Vec<&dyn Source> = vec![&active];
        sources.extend(frozen.as_ref().map(|layer| layer as &dyn Source));
        sources.push(&*view.base);
        read_range(&self.buffer, &sources, &query)
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
        let Some(commit) = taken else {
            return Ok(stamp_of(self.beginning.version));
        };
        self.check_age()?;
        self.engine.commit(commit, &self.beginning).await
    }
}

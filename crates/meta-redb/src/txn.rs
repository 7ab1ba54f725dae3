//! What a transaction reads: the layers of its beginning. Its writes wait in [`rfs_kv::engine::BufferedTxn`].

use std::sync::Arc;

use bytes::Bytes;
use parking_lot::Mutex;
use rfs_kv::engine::{Commit, Snapshot, Source, TxnBuffer, read_range, stamp_of};
use rfs_kv::{KvError, RangePage, RangeQuery, Result, Versionstamp};
use tokio::time::Instant;

use crate::engine::{Beginning, Engine};
use crate::layer::LayerAt;

pub(crate) struct RedbSnapshot {
    engine: Arc<Engine>,
    beginning: Beginning,
    began: Instant,
}

impl RedbSnapshot {
    pub(crate) fn begin(engine: &Arc<Engine>) -> Result<Self> {
        let began = Instant::now();
        let beginning = engine.begin()?;
        Ok(Self { engine: Arc::clone(engine), beginning, began })
    }

    fn check_age(&self) -> Result<()> {
        if self.began.elapsed() > self.engine.options.txn_age_max {
            return Err(KvError::Conflict);
        }
        Ok(())
    }
}

impl Snapshot for RedbSnapshot {
    fn stamp(&self) -> Versionstamp {
        stamp_of(self.beginning.version)
    }

    fn get(&self, key: &[u8]) -> Result<Option<Bytes>> {
        self.check_age()?;
        let Beginning { view, version } = &self.beginning;
        view.get(key, *version)
    }

    fn range(&self, buffer: &Mutex<TxnBuffer>, query: &RangeQuery) -> Result<RangePage> {
        self.check_age()?;
        let Beginning { view, version } = &self.beginning;
        let active = LayerAt { layer: &view.active, version: *version };
        let frozen = view.frozen.as_ref().map(|layer| LayerAt { layer, version: *version });
        let mut sources: Vec<&dyn Source> = vec![&active];
        sources.extend(frozen.as_ref().map(|layer| layer as &dyn Source));
        sources.push(&*view.base);
        read_range(buffer, &sources, query)
    }

    async fn commit(&self, commit: Commit) -> Result<Versionstamp> {
        self.check_age()?;
        self.engine.commit(commit, &self.beginning).await
    }
}

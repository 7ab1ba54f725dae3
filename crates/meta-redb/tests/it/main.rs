//! The redb engine: conformance, crashes, failing disks, damaged files.

use std::sync::Arc;

use rfs_kv::{Kv, conformance};
use rfs_meta_redb::{RedbKv, RedbOptions};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redb_conforms() {
    let dir = tempfile::tempdir().unwrap();
    let count = std::sync::atomic::AtomicU32::new(0);
    conformance::all(|| async {
        let index = count.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let path = dir.path().join(format!("{index}.redb"));
        Arc::new(RedbKv::create(path, RedbOptions::default()).unwrap()) as Arc<dyn Kv>
    })
    .await;
}

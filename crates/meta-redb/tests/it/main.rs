//! The redb engine: conformance, crashes, failing disks, damaged files.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking, too")]

mod crash;
mod disk;
mod failing;
mod opening;
mod snapshots;
mod steps;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use rfs_kv::{Kv, conformance};
use rfs_meta_redb::{RedbKv, RedbOptions};

/// Writes layers out all the time, so that every read crosses several.
fn restless() -> RedbOptions {
    RedbOptions {
        durable_interval: Duration::from_millis(1),
        flush_bytes: 1,
        memory_bytes_max: 10_000_000,
        ..RedbOptions::default()
    }
}

async fn conforms(options: RedbOptions) {
    let dir = tempfile::tempdir().unwrap();
    let count = AtomicU32::new(0);
    conformance::all(|| async {
        let index = count.fetch_add(1, Ordering::Relaxed);
        let path = dir.path().join(format!("{index}.redb"));
        Arc::new(RedbKv::create(path, options.clone()).unwrap()) as Arc<dyn Kv>
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redb_conforms() {
    conforms(RedbOptions::default()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redb_conforms_while_it_flushes_all_the_time() {
    conforms(restless()).await;
}

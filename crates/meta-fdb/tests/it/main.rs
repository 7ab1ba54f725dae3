//! The engine on a real FoundationDB; skipped with a line that says so where none is found.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use rfs_kv::{Kv, KvError, Limits, RECENT, Txn, Watch, conformance, transact_recent};
use rfs_meta_fdb::{FdbKv, FdbOptions, OpenError, PREFIX_BYTES_MAX, stop_network};
use rfs_testkit::{FdbServer, or_skip};

async fn connect(server: &FdbServer, prefix: &str) -> FdbKv {
    let options = FdbOptions {
        cluster_file: Some(server.cluster_file().to_owned()),
        prefix: prefix.as_bytes().to_vec(),
        library: Some(server.library().to_owned()),
        ..FdbOptions::default()
    };
    FdbKv::connect(options).await.expect("a running cluster can be connected to")
}

// One test: the client's network thread runs once a process and is stopped at its end.
#[test]
fn the_engine_keeps_the_contract() {
    let Some(server) = or_skip(FdbServer::start()) else { return };
    let runtime = tokio::runtime::Runtime::new().expect("a runtime can be made");
    runtime.block_on(async {
        let missing = FdbOptions { cluster_file: Some("/nonexistent".into()), ..FdbOptions::default() };
        assert!(matches!(FdbKv::connect(missing).await, Err(OpenError::ClusterFile(..))));
        let long = FdbOptions { prefix: vec![b'p'; PREFIX_BYTES_MAX + 1], ..FdbOptions::default() };
        assert!(matches!(FdbKv::connect(long).await, Err(OpenError::Prefix(100))));

        let count = AtomicU32::new(0);
        let server = &server;
        conformance::all(|| {
            // As long as a prefix can be, so that the limits are those of the longest keys.
            let number = count.fetch_add(1, Ordering::Relaxed);
            let prefix = format!("{number:0>PREFIX_BYTES_MAX$}");
            async move { Arc::new(connect(server, &prefix).await) as Arc<dyn Kv> }
        })
        .await;

        conformance::all(|| {
            let number = count.fetch_add(1, Ordering::Relaxed);
            async move { Arc::new(Recent(connect(server, &format!("recent {number}")).await)) as Arc<dyn Kv> }
        })
        .await;

        volumes_do_not_see_each_other(server).await;
        others_are_seen_a_little_later_and_never_overwritten(server).await;
        nobody_at_the_address_is_told(server).await;
    });
    stop_network();
}

/// Begins every transaction where a client that is alone may: for such a one this is all that the contract asks.
struct Recent(FdbKv);

#[async_trait]
impl Kv for Recent {
    fn limits(&self) -> Limits {
        self.0.limits()
    }

    async fn begin(&self) -> rfs_kv::Result<Arc<dyn Txn>> {
        self.0.begin_recent().await
    }

    async fn sync(&self) -> rfs_kv::Result<()> {
        self.0.sync().await
    }

    async fn watch(&self, key: &[u8]) -> rfs_kv::Result<Watch> {
        self.0.watch(key).await
    }

    async fn close(&self) -> rfs_kv::Result<()> {
        self.0.close().await
    }
}

/// Two clients count in turns. Neither count is lost, though each begins before the other's commit time and again.
async fn others_are_seen_a_little_later_and_never_overwritten(server: &FdbServer) {
    let clients = [connect(server, "shared").await, connect(server, "shared").await];
    let count = async |kv: &FdbKv| {
        transact_recent(kv, |txn, attempt| async move {
            let counted = match txn.get(b"n").await? {
                Some(value) => u64::from_le_bytes(value[..].try_into().expect("a counter has eight bytes")),
                None => 0,
            };
            txn.set(b"n", &(counted + 1).to_le_bytes());
            Ok::<_, KvError>((counted, attempt.index))
        })
        .await
        .expect("the cluster answers")
    };
    let mut began_behind = 0;
    for turn in 0..200 {
        let (counted, runs) = count(&clients[usize::from(turn % 3 == 0)]).await;
        assert_eq!(counted, turn);
        began_behind += u32::from(runs > 0);
    }
    assert!(began_behind > 0, "each transaction has asked for its version");
    tokio::time::sleep(RECENT).await;
    let txn = clients[0].begin_recent().await.expect("the cluster answers");
    let seen = txn.get(b"n").await.expect("the cluster answers");
    assert_eq!(seen.as_deref(), Some(&200_u64.to_le_bytes()[..]), "what the other has counted last");
}

async fn volumes_do_not_see_each_other(server: &FdbServer) {
    let (short, long) = (connect(server, "v").await, connect(server, "v\u{1}").await);
    let txn = short.begin().await.expect("a transaction begins");
    txn.set(b"\x01key", b"value");
    txn.commit().await.expect("nobody else writes");
    let found = long.begin().await.expect("a transaction begins").get(b"key").await.expect("a read works");
    assert_eq!(found, None, "a prefix that another one begins with");
}

async fn nobody_at_the_address_is_told(server: &FdbServer) {
    let dir = tempfile::TempDir::new().expect("a temporary directory can be made");
    let cluster_file = dir.path().join("fdb.cluster");
    std::fs::write(&cluster_file, "a:b@127.0.0.1:1\n").expect("a file can be written");
    let options = FdbOptions {
        cluster_file: Some(cluster_file),
        library: Some(server.library().to_owned()),
        timeout: Duration::from_secs(2),
        ..FdbOptions::default()
    };
    assert!(matches!(FdbKv::connect(options).await, Err(OpenError::NoAnswer(_))));
}

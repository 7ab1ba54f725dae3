//! The reference engine and the failing engine.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use futures::FutureExt;
use futures::future::BoxFuture;
use rfs_kv::{
    FaultKv, Faults, Kv, KvError, Limits, MemKv, MemOptions, Result, Txn, Watch, conformance, transact,
    transact_recent,
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mem_kv_conforms() {
    conformance::all(|| async { Arc::new(MemKv::new()) as Arc<dyn Kv> }).await;
}

#[tokio::test]
async fn a_wrapper_without_faults_conforms() {
    conformance::all(|| async {
        Arc::new(FaultKv::new(Arc::new(MemKv::new()), 1, Faults::NONE)) as Arc<dyn Kv>
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn transactions_older_than_five_seconds_conflict() {
    let kv = MemKv::new();
    let (young, old) = (kv.begin().await.unwrap(), kv.begin().await.unwrap());
    tokio::time::sleep(Duration::from_millis(4999)).await;
    young.set(b"a", b"1");
    young.commit().await.unwrap();
    tokio::time::sleep(Duration::from_millis(2)).await;
    old.set(b"b", b"1");
    assert!(matches!(old.get(b"a").await, Err(KvError::Conflict)));
    assert!(matches!(old.commit().await, Err(KvError::Conflict)));
}

#[tokio::test]
async fn transactions_too_many_commits_behind_conflict() {
    let kv = MemKv::with_options(MemOptions { history_commits_max: 10, ..MemOptions::default() });
    let old = kv.begin().await.unwrap();
    for index in 0..12_u8 {
        transact(&kv, |txn, _| async move {
            txn.set(&[index], b"");
            txn.clear(&[index.wrapping_sub(1)]);
            Ok::<_, KvError>(())
        })
        .await
        .unwrap();
    }
    old.set(b"a", b"1");
    assert!(matches!(old.commit().await, Err(KvError::Conflict)));
    assert!(kv.key_count() <= 12, "removed keys are forgotten");
}

#[tokio::test]
async fn injected_faults_are_survived_and_counted() {
    let kv = FaultKv::new(Arc::new(MemKv::new()), 42, Faults::RETRYABLE);
    let unsure = AtomicU64::new(0);
    for _ in 0..500 {
        let unsure = &unsure;
        transact(&kv, |txn, attempt| async move {
            if attempt.maybe_committed {
                unsure.fetch_add(1, Ordering::Relaxed);
            }
            txn.add(b"n", 1);
            Ok::<_, KvError>(())
        })
        .await
        .unwrap();
    }
    let counts = kv.counts();
    assert!(counts.conflicts > 10 && counts.maybe_applied > 10 && counts.maybe_lost > 10, "{counts:?}");
    assert!(unsure.load(Ordering::Relaxed) >= counts.maybe_applied + counts.maybe_lost);
    kv.set_faults(Faults::NONE);
    let txn = kv.begin().await.unwrap();
    let sum = txn.get(b"n").await.unwrap().unwrap();
    let sum = u64::from_le_bytes(sum[..].try_into().unwrap());
    assert_eq!(sum, 500 + counts.maybe_applied, "an applied commit counts once more for each blind retry");
}

#[tokio::test(start_paused = true)]
async fn outages_and_delays_are_injected() {
    let faults = Faults { unavailable: 0.5, delay: 1.0, delay_max: Duration::from_secs(10), ..Faults::NONE };
    let kv = FaultKv::new(Arc::new(MemKv::new()), 3, faults);
    let start = tokio::time::Instant::now();
    let mut failed = 0;
    for _ in 0..100 {
        failed += u32::from(matches!(kv.begin().await, Err(KvError::Unavailable(_))));
    }
    assert!((20..80).contains(&failed), "{failed}");
    assert!(start.elapsed() > Duration::from_secs(100));
}

/// Another client of the store has always committed since the point that `begin_recent` reads at.
struct Behind(MemKv);

#[async_trait]
impl Kv for Behind {
    fn limits(&self) -> Limits {
        self.0.limits()
    }

    async fn begin(&self) -> Result<Arc<dyn Txn>> {
        self.0.begin().await
    }

    fn begin_recent(&self) -> BoxFuture<'_, Result<Arc<dyn Txn>>> {
        async {
            let txn = self.0.begin().await?;
            let other = self.0.begin().await?;
            other.add(b"n", 1);
            other.commit().await?;
            Ok(txn)
        }
        .boxed()
    }

    async fn sync(&self) -> Result<()> {
        self.0.sync().await
    }

    async fn watch(&self, key: &[u8]) -> Result<Watch> {
        self.0.watch(key).await
    }

    async fn close(&self) -> Result<()> {
        self.0.close().await
    }
}

#[tokio::test]
async fn what_began_behind_other_clients_sees_them_in_its_second_run() {
    let kv = FaultKv::new(Arc::new(Behind(MemKv::new())), 1, Faults::NONE);
    let runs = AtomicU64::new(0);
    let runs = &runs;
    let double = |txn: Arc<dyn Txn>, _| async move {
        runs.fetch_add(1, Ordering::Relaxed);
        let number = |value: Option<bytes::Bytes>| {
            value.map_or(0, |value| u64::from_le_bytes(value[..].try_into().unwrap()))
        };
        let before = number(txn.get(b"n").await?);
        txn.set(b"n", &(2 * before).to_le_bytes());
        Ok::<_, KvError>(before)
    };
    assert_eq!(transact_recent(&kv, double).await.unwrap(), 1, "the other client's is there");
    assert_eq!(transact_recent(&kv, double).await.unwrap(), 3, "both clients' are");
    assert_eq!(runs.load(Ordering::Relaxed), 4);
}

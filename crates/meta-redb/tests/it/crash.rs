//! A crash keeps a prefix of the commits that holds all that was synced.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rfs_kv::Kv;
use rfs_meta_redb::{RedbKv, RedbOptions};

use crate::disk::Disk;
use crate::steps::Steps;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn power_loss_keeps_a_prefix_with_all_that_was_synced() {
    const LOSSES: u32 = 25;
    for seed in 0..4 {
        let disk = Disk::default();
        let options = RedbOptions { durable_interval: Duration::from_millis(2), ..RedbOptions::default() };
        let kv = Arc::new(RedbKv::open_with_backend(disk.opener(), options).unwrap());
        let synced = Arc::new(AtomicU64::new(0));
        let enough = Arc::new(AtomicBool::new(false));
        let writer = tokio::spawn({
            let (kv, synced, enough) = (Arc::clone(&kv), Arc::clone(&synced), Arc::clone(&enough));
            async move {
                let mut number = 0;
                while !enough.load(Ordering::SeqCst) {
                    number += 1;
                    Steps::commit(&*kv, number).await.unwrap();
                    if number % 11 == 0 {
                        kv.sync().await.unwrap();
                        synced.store(number, Ordering::SeqCst);
                    }
                }
            }
        });
        let mut rng = StdRng::seed_from_u64(seed);
        for loss in 0..LOSSES {
            tokio::time::sleep(Duration::from_micros(rng.random_range(0..3000))).await;
            let before = synced.load(Ordering::SeqCst);
            let image = disk.after_power_loss(&mut rng);
            let found = RedbKv::open_with_backend(image.opener(), RedbOptions::default()).unwrap();
            let last = Steps::check(&found).await;
            assert!(
                last >= before,
                "seed {seed}, loss {loss}: step {before} was synced, but {last} is the last"
            );
        }
        enough.store(true, Ordering::SeqCst);
        writer.await.unwrap();
        assert!(synced.load(Ordering::SeqCst) > 0, "nothing was synced");
        assert!(disk.syncs() > u64::from(LOSSES), "only {} syncs of the disk", disk.syncs());
    }
}

#[tokio::test]
async fn everything_is_durable_within_the_interval() {
    let disk = Disk::default();
    let options = RedbOptions { durable_interval: Duration::from_millis(50), ..RedbOptions::default() };
    let kv = RedbKv::open_with_backend(disk.opener(), options).unwrap();
    Steps::commit(&kv, 1).await.unwrap();
    let deadline = tokio::time::Instant::now() + Duration::from_secs(20);
    loop {
        let found = RedbKv::open_with_backend(disk.synced_only().opener(), RedbOptions::default()).unwrap();
        if Steps::check(&found).await == 1 {
            break;
        }
        assert!(tokio::time::Instant::now() < deadline, "not durable after 20 s");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn closing_and_dropping_keep_everything() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("meta.redb");
    let options = RedbOptions { durable_interval: Duration::from_hours(1), ..RedbOptions::default() };
    let kv = RedbKv::create(&path, options.clone()).unwrap();
    let mut stamps = Vec::new();
    for number in 1..=5 {
        Steps::commit(&kv, number).await.unwrap();
    }
    stamps.push(kv.begin().await.unwrap().commit().await.unwrap());
    kv.close().await.unwrap();
    let kv = RedbKv::open(&path, options.clone()).unwrap();
    assert_eq!(Steps::check(&kv).await, 5);
    Steps::commit(&kv, 6).await.unwrap();
    stamps.push(kv.begin().await.unwrap().commit().await.unwrap());
    drop(kv);
    let kv = RedbKv::open(&path, options).unwrap();
    assert_eq!(Steps::check(&kv).await, 6);
    stamps.push(kv.begin().await.unwrap().commit().await.unwrap());
    assert!(stamps.is_sorted(), "{stamps:?}");
    assert!(stamps[0] < stamps[1] && stamps[1] < stamps[2]);
}

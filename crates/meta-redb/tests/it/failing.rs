//! A disk that is full or fails: nothing synced is lost, what can go on goes on.

use std::time::Duration;

use rfs_kv::{Kv, KvError};
use rfs_meta_redb::{RedbKv, RedbOptions};

use crate::disk::Disk;
use crate::steps::{Steps, get, set};

fn is_unavailable<T>(result: Result<T, KvError>, text: &str) {
    match result {
        Err(KvError::Unavailable(found)) => assert!(found.contains(text), "{found:?} does not say {text:?}"),
        Err(error) => panic!("{error:?}"),
        Ok(_) => panic!("succeeded"),
    }
}

fn is_full<T>(result: Result<T, KvError>) {
    let text = "cannot write the metadata file";
    match result {
        Err(KvError::Full(found)) => assert!(found.contains(text), "{found:?} does not say {text:?}"),
        Err(error) => panic!("{error:?}"),
        Ok(_) => panic!("succeeded"),
    }
}

fn slow_options() -> RedbOptions {
    RedbOptions { durable_interval: Duration::from_hours(1), ..RedbOptions::default() }
}

#[tokio::test]
async fn a_full_disk_refuses_changes_until_there_is_space() {
    let disk = Disk::default();
    let kv = RedbKv::open_with_backend(disk.opener(), slow_options()).unwrap();
    Steps::commit(&kv, 1).await.unwrap();
    kv.sync().await.unwrap();
    let old = kv.begin().await.unwrap();
    let watch = kv.watch(b"number").await.unwrap();

    disk.set_bytes_max(Some(disk.len()));
    Steps::commit(&kv, 2).await.unwrap();
    for index in 0..100_u8 {
        set(&kv, &[b'x', index], &vec![7; 50_000]).await.unwrap();
    }
    is_full(kv.sync().await);
    is_full(Steps::commit(&kv, 3).await);
    is_full(kv.close().await);
    assert_eq!(Steps::check(&kv).await, 2, "what was committed can be read");
    assert_eq!(get(&kv, b"x\x07").await.unwrap(), Some(vec![7; 50_000]));
    old.set(b"a", b"1");
    assert!(old.commit().await.is_err());

    disk.set_bytes_max(None);
    kv.sync().await.unwrap();
    Steps::commit(&kv, 3).await.unwrap();
    kv.sync().await.unwrap();
    watch.await.unwrap();
    drop(kv);
    let kv = RedbKv::open_with_backend(disk.synced_only().opener(), slow_options()).unwrap();
    assert_eq!(Steps::check(&kv).await, 3);
    assert_eq!(get(&kv, b"x\x63").await.unwrap(), Some(vec![7; 50_000]));
}

#[tokio::test]
async fn a_full_disk_recovers_by_itself() {
    let disk = Disk::default();
    let kv = RedbKv::open_with_backend(disk.opener(), slow_options()).unwrap();
    disk.set_bytes_max(Some(0));
    Steps::commit(&kv, 1).await.unwrap();
    is_full(kv.sync().await);
    is_full(Steps::commit(&kv, 2).await);
    disk.set_bytes_max(None);
    let deadline = tokio::time::Instant::now() + Duration::from_secs(20);
    while Steps::commit(&kv, 2).await.is_err() {
        assert!(tokio::time::Instant::now() < deadline, "still refused after 20 s");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    kv.close().await.unwrap();
    let kv = RedbKv::open_with_backend(disk.synced_only().opener(), slow_options()).unwrap();
    assert_eq!(Steps::check(&kv).await, 2);
}

#[tokio::test]
async fn a_failed_sync_of_the_disk_is_final() {
    let disk = Disk::default();
    let kv = RedbKv::open_with_backend(disk.opener(), slow_options()).unwrap();
    Steps::commit(&kv, 1).await.unwrap();
    kv.sync().await.unwrap();
    disk.set_syncs_fail(true);
    Steps::commit(&kv, 2).await.unwrap();
    is_unavailable(kv.sync().await, "mount again");
    disk.set_syncs_fail(false);
    is_unavailable(kv.sync().await, "mount again");
    is_unavailable(Steps::commit(&kv, 3).await, "mount again");
    drop(kv);
    let kv = RedbKv::open_with_backend(disk.synced_only().opener(), slow_options()).unwrap();
    assert_eq!(Steps::check(&kv).await, 1);
}

#[tokio::test]
async fn commits_wait_when_too_much_is_in_memory() {
    let disk = Disk::default();
    let options = RedbOptions { memory_bytes_max: 300_000, ..slow_options() };
    let kv = RedbKv::open_with_backend(disk.opener(), options).unwrap();
    for index in 0..100_u8 {
        set(&kv, &[index], &vec![1; 90_000]).await.unwrap();
        assert!(kv.pending_bytes() < 500_000, "{} bytes in memory", kv.pending_bytes());
    }
    disk.set_bytes_max(Some(0));
    let mut refused = None;
    for index in 100..110_u8 {
        refused = refused.or(set(&kv, &[index], &vec![1; 90_000]).await.err());
    }
    is_full(refused.map_or(Ok(()), Err));
    disk.set_bytes_max(None);
    kv.close().await.unwrap();
}

#[tokio::test]
async fn damage_behind_its_back_ends_in_errors_only() {
    let original = Disk::default();
    let kv = RedbKv::open_with_backend(original.opener(), slow_options()).unwrap();
    for number in 1..400 {
        Steps::commit(&kv, number).await.unwrap();
    }
    kv.close().await.unwrap();
    let mut failures = 0;
    for page in 0..original.len() / 4096 {
        let disk = original.synced_only();
        disk.damage(page * 4096, &[0xa5; 300]);
        failures += u32::from(use_damaged(&disk).await.is_err());
    }
    assert!(failures > 2, "{failures} pages made a difference");
}

async fn use_damaged(disk: &Disk) -> Result<(), String> {
    let kv = RedbKv::open_with_backend(disk.opener(), slow_options()).map_err(|error| error.to_string())?;
    let text = |error: KvError| error.to_string();
    let txn = kv.begin().await.map_err(text)?;
    let query = rfs_kv::RangeQuery {
        begin: vec![0].into(),
        end: vec![0xff].into(),
        limit: 10_000,
        direction: rfs_kv::Direction::Forward,
        isolation: rfs_kv::Isolation::Snapshot,
    };
    txn.range(query).await.map_err(text)?;
    Steps::commit(&kv, 400).await.map_err(text)?;
    kv.sync().await.map_err(text)
}

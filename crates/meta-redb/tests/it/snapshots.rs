//! Transactions keep what they read from, but not for ever.

use std::sync::Arc;
use std::time::Duration;

use rfs_kv::{Kv, KvError};
use rfs_meta_redb::{RedbKv, RedbOptions};

use crate::disk::Disk;
use crate::restless;
use crate::steps::{Steps, get, set};

#[tokio::test]
async fn a_transaction_sees_its_beginning_across_flushes() {
    let disk = Disk::default();
    let kv = RedbKv::open_with_backend(disk.opener(), restless()).unwrap();
    set(&kv, b"a", b"1").await.unwrap();
    set(&kv, b"b", b"1").await.unwrap();
    let (reader, writer, blind) =
        (kv.begin().await.unwrap(), kv.begin().await.unwrap(), kv.begin().await.unwrap());
    writer.get(b"a").await.unwrap();
    for number in 1..50 {
        set(&kv, b"a", &[number]).await.unwrap();
        set(&kv, &[b'c', number], b"1").await.unwrap();
        kv.sync().await.unwrap();
    }
    assert_eq!(reader.get(b"a").await.unwrap().as_deref(), Some(&b"1"[..]));
    assert_eq!(reader.get(b"c\x01").await.unwrap(), None);
    writer.set(b"b", b"2");
    assert!(matches!(writer.commit().await, Err(KvError::Conflict)), "validated against flushed layers");
    blind.set(b"b", b"3");
    blind.commit().await.unwrap();
    assert_eq!(get(&kv, b"b").await.unwrap(), Some(b"3".to_vec()));
}

#[tokio::test]
async fn an_old_transaction_conflicts() {
    let disk = Disk::default();
    let options = RedbOptions { txn_age_max: Duration::from_millis(20), ..restless() };
    let kv = RedbKv::open_with_backend(disk.opener(), options).unwrap();
    let old = kv.begin().await.unwrap();
    tokio::time::sleep(Duration::from_millis(40)).await;
    assert!(matches!(old.get(b"a").await, Err(KvError::Conflict)));
    old.set(b"a", b"1");
    assert!(matches!(old.commit().await, Err(KvError::Conflict)));
}

#[tokio::test]
async fn a_forgotten_transaction_does_not_keep_memory() {
    let disk = Disk::default();
    let options = RedbOptions { memory_bytes_max: 200_000, ..restless() };
    let kv = RedbKv::open_with_backend(disk.opener(), options).unwrap();
    let forgotten = kv.begin().await.unwrap();
    assert_eq!(forgotten.get(b"a").await.unwrap(), None);
    for index in 0..20_u8 {
        set(&kv, &[b'x', index], &vec![1; 50_000]).await.unwrap();
        kv.sync().await.unwrap();
    }
    forgotten.set(b"a", b"1");
    forgotten.add_read_conflict(b"y", b"z");
    assert!(matches!(forgotten.commit().await, Err(KvError::Conflict)), "its history was dropped");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn readers_beside_a_writer_and_flushes_see_whole_steps() {
    let disk = Disk::default();
    let kv = Arc::new(RedbKv::open_with_backend(disk.opener(), restless()).unwrap());
    let writer = tokio::spawn({
        let kv = Arc::clone(&kv);
        async move {
            for number in 1..600 {
                Steps::commit(&*kv, number).await.unwrap();
            }
        }
    });
    let number = |value: Option<bytes::Bytes>| {
        value.map_or(0, |value| u64::from_le_bytes(value[..].try_into().unwrap()))
    };
    while !writer.is_finished() {
        let txn = kv.begin().await.unwrap();
        let last = number(txn.get(b"number").await.unwrap());
        tokio::task::yield_now().await;
        assert_eq!(number(txn.get(b"sum").await.unwrap()), last * (last + 1) / 2);
        let query = rfs_kv::RangeQuery {
            begin: b"log".to_vec().into(),
            end: b"loh".to_vec().into(),
            limit: 1,
            direction: rfs_kv::Direction::Reverse,
            isolation: rfs_kv::Isolation::Snapshot,
        };
        let page = txn.range(query).await.unwrap();
        assert_eq!(number(page.entries.first().map(|(_, value)| value.clone())), last);
    }
    writer.await.unwrap();
    assert_eq!(Steps::check(&*kv).await, 599);
}

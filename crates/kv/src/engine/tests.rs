use bytes::Bytes;

use super::*;

#[test]
fn a_watch_that_is_dropped_leaves_nothing_behind() {
    let watches = Watches::default();
    let watch = watches.watch(b"key");
    assert!(!watches.is_empty());
    drop(watch);
    assert!(watches.is_empty());
}

#[test]
fn a_hot_key_keeps_only_versions_that_somebody_can_read() {
    let mut table = Memtable::default();
    let key = Bytes::from_static(b"key");
    for version in 1..=100_u64 {
        let value = Bytes::copy_from_slice(&version.to_le_bytes());
        table.apply(version, vec![(key.clone(), Some(value))], &[], version.min(50));
    }
    let bytes_full = table.bytes();
    table.apply(101, vec![(key.clone(), None)], &[(key.clone(), Bytes::from_static(b"z"))], 100);
    assert!(table.bytes() < bytes_full);
    table.prune_key(b"key", 101);
    table.prune_cleared(101);
    assert_eq!((table.bytes(), table.is_empty()), (0, true));
}

#[test]
fn versions_that_can_be_read_are_kept() {
    let mut table = Memtable::default();
    let key = Bytes::from_static(b"key");
    for version in 1..=100_u64 {
        let value = Bytes::copy_from_slice(&version.to_le_bytes());
        table.apply(version, vec![(key.clone(), Some(value))], &[], version.min(50));
    }
    let at = |version: u64| table.get(b"key", version);
    assert_eq!(at(49), Lookup::Missing);
    for version in 50..=100_u64 {
        assert_eq!(at(version), Lookup::Found(Some(Bytes::copy_from_slice(&version.to_le_bytes()))));
    }
}

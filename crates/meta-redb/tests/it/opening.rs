//! What can be wrong with a file, and what the user is told.

use std::path::Path;

use redb::{Database, TableDefinition};
use rfs_kv::Kv;
use rfs_meta_redb::{OpenError, RedbKv, RedbOptions};

use crate::steps::{get, set};

fn open(path: &Path) -> Result<RedbKv, OpenError> {
    RedbKv::open(path, RedbOptions::default())
}

fn create(path: &Path) -> Result<RedbKv, OpenError> {
    RedbKv::create(path, RedbOptions::default())
}

/// Asserts the variant, and that the text names the file.
macro_rules! fails {
    ($result:expr, $pattern:pat, $path:expr) => {{
        let error = $result.map(|_| "success").unwrap_err();
        assert!(matches!(error, $pattern), "{error:?}");
        let text = error.to_string();
        assert!(text.contains($path.to_str().unwrap()), "{text:?} names the file");
        text
    }};
}

#[tokio::test]
async fn a_missing_file_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("none.redb");
    let text = fails!(open(&path), OpenError::NotFound(_), path);
    assert!(text.contains("rfs format"));
    let deeper = dir.path().join("no/such/dir/meta.redb");
    fails!(create(&deeper), OpenError::NotFound(_), deeper);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "nothing is left behind");
}

#[tokio::test]
async fn a_file_that_exists_is_not_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("meta.redb");
    let kv = create(&path).unwrap();
    set(&kv, b"a", b"1").await.unwrap();
    kv.close().await.unwrap();
    fails!(create(&path), OpenError::Exists(_), path);
    let other = dir.path().join("other");
    std::fs::write(&other, b"a letter").unwrap();
    fails!(create(&other), OpenError::Exists(_), other);
    assert_eq!(std::fs::read(&other).unwrap(), b"a letter");
    assert_eq!(get(&open(&path).unwrap(), b"a").await.unwrap(), Some(b"1".to_vec()));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2, "nothing is left behind");
}

#[tokio::test]
async fn a_file_of_something_else_is_told_and_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("meta.redb");
    for contents in [Vec::new(), b"a letter".to_vec(), vec![0; 100_000], vec![0xff; 100_000]] {
        std::fs::write(&path, &contents).unwrap();
        fails!(open(&path), OpenError::Damaged { .. }, path);
        assert_eq!(std::fs::read(&path).unwrap(), contents);
    }
    std::fs::remove_file(&path).unwrap();
    let database = Database::create(&path).unwrap();
    drop(database);
    fails!(open(&path), OpenError::Damaged { .. }, path);
    fails!(open(dir.path()), OpenError::Io { .. } | OpenError::Damaged { .. }, dir.path());
}

#[tokio::test]
async fn a_newer_format_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("meta.redb");
    create(&path).unwrap().close().await.unwrap();
    let database = Database::open(&path).unwrap();
    let txn = database.begin_write().unwrap();
    txn.open_table(TableDefinition::<&str, u64>::new("info")).unwrap().insert("format", 2).unwrap();
    txn.commit().unwrap();
    drop(database);
    let text = fails!(open(&path), OpenError::Version { .. }, path);
    assert!(text.contains("format 2"), "{text}");
}

#[tokio::test]
async fn a_truncated_file_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("meta.redb");
    let kv = create(&path).unwrap();
    for index in 0..200_u8 {
        set(&kv, &[index], &[index; 5000]).await.unwrap();
    }
    kv.close().await.unwrap();
    let contents = std::fs::read(&path).unwrap();
    for len in [10, 319, 320, 4096, 100_000, contents.len() / 2] {
        std::fs::write(&path, &contents[..len]).unwrap();
        fails!(open(&path), OpenError::Damaged { .. }, path);
    }
}

#[tokio::test]
async fn a_file_is_checked_and_compacted() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("meta.redb");
    let options = RedbOptions::default();
    let kv = create(&path).unwrap();
    for index in 0..100_u8 {
        set(&kv, &[index], &vec![index; 90_000]).await.unwrap();
    }
    kv.sync().await.unwrap();
    fails!(RedbKv::check_file(&path, &options), OpenError::InUse(_), path);
    fails!(RedbKv::compact_file(&path, &options), OpenError::InUse(_), path);
    for index in 1..100_u8 {
        set(&kv, &[index], b"small").await.unwrap();
    }
    kv.close().await.unwrap();
    assert!(RedbKv::check_file(&path, &options).unwrap());
    let len_before = path.metadata().unwrap().len();
    RedbKv::compact_file(&path, &options).unwrap();
    let len = path.metadata().unwrap().len();
    assert!(len < len_before / 2, "{len} bytes after {len_before}");
    assert!(RedbKv::check_file(&path, &options).unwrap());
    assert_eq!(get(&open(&path).unwrap(), b"\x07").await.unwrap(), Some(b"small".to_vec()));
}

/// Bytes that this thread had the disk read.
#[cfg(target_os = "linux")]
fn bytes_from_disk() -> u64 {
    let io = std::fs::read_to_string("/proc/thread-self/io").unwrap();
    let line = io.lines().find_map(|line| line.strip_prefix("read_bytes: ")).unwrap();
    line.parse().unwrap()
}

/// Has the kernel forget the file's contents.
#[cfg(target_os = "linux")]
fn forget(path: &Path) {
    let file = std::fs::File::open(path).unwrap();
    file.sync_all().unwrap();
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
}

/// Not below /tmp, which may be in memory.
#[cfg(target_os = "linux")]
#[tokio::test]
async fn opening_has_all_of_a_small_file_read() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = dir.path().join("meta.redb");
    let kv = create(&path).unwrap();
    for number in 0..=u8::MAX {
        set(&kv, &[number], &vec![number; 50_000]).await.unwrap();
    }
    kv.close().await.unwrap();
    drop(kv);
    forget(&path);
    let before = bytes_from_disk();
    std::fs::read(&path).unwrap();
    let whole = bytes_from_disk() - before;
    forget(&path);
    let before = bytes_from_disk();
    let kv = open(&path).unwrap();
    let read = bytes_from_disk() - before;
    kv.close().await.unwrap();
    assert!(read >= whole, "{read} of {whole} bytes were read");
}

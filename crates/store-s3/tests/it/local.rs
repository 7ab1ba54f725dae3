//! The local directory: what it refuses, what it leaves behind, and a full disk.

use std::fs::FileTimes;
use std::path::Path as FsPath;
use std::time::Duration;

use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, PutMode};
use rfs_store_s3::{
    DurableLocal, MissingDirectory, StoreError, StoreFailure, StoreOptions, classify, open_store,
};

async fn open(dir: &FsPath) -> DurableLocal {
    DurableLocal::open(dir, MissingDirectory::Fail).await.unwrap()
}

fn staged(dir: &FsPath) -> usize {
    std::fs::read_dir(dir.join(".rfs-uploads")).unwrap().count()
}

#[tokio::test]
async fn a_missing_directory_is_made_only_when_asked() {
    let dir = tempfile::tempdir().unwrap();
    let deep = dir.path().join("a/b/c");
    let url = format!("file://{}", deep.display());
    let error = open_store(&url, &StoreOptions::default()).await.unwrap_err();
    assert!(matches!(error, StoreError::NoDirectory { .. }), "{error}");
    assert_eq!(error.failure(), StoreFailure::NoBucket);
    assert!(!dir.path().join("a").exists());
    let options = StoreOptions { missing_directory: MissingDirectory::Create, ..StoreOptions::default() };
    let store = open_store(&url, &options).await.unwrap();
    store.put(&Path::from("x/y"), "z".into()).await.unwrap();
    assert_eq!(std::fs::read(deep.join("x/y")).unwrap(), b"z");
}

#[tokio::test]
async fn a_directory_that_vanishes_is_not_made_again() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("root");
    std::fs::create_dir(&root).unwrap();
    let store = open(&root).await;
    store.put(&Path::from("a/b"), "c".into()).await.unwrap();
    std::fs::remove_dir_all(&root).unwrap();
    let error = store.put(&Path::from("a/b"), "c".into()).await.unwrap_err();
    assert_eq!(classify(&error), StoreFailure::NoBucket, "{error}");
    assert!(!root.exists());
}

#[tokio::test]
async fn a_directory_below_the_root_that_vanishes_is_made_again() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path()).await;
    store.put(&Path::from("a/b/c"), "1".into()).await.unwrap();
    std::fs::remove_dir_all(dir.path().join("a")).unwrap();
    store.put(&Path::from("a/b/c"), "2".into()).await.unwrap();
    assert_eq!(std::fs::read(dir.path().join("a/b/c")).unwrap(), b"2");
}

#[tokio::test]
async fn a_file_is_no_store() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, "").unwrap();
    let error = DurableLocal::open(&file, MissingDirectory::Create).await.unwrap_err();
    assert!(error.to_string().contains("file"), "{error}");
    for url in ["file://relative", "file:///tmp?x=1", "ftp://x", "nonsense"] {
        let error = open_store(url, &StoreOptions::default()).await.unwrap_err();
        assert!(matches!(error, StoreError::InvalidUrl { .. }), "{url}: {error}");
    }
}

#[tokio::test]
async fn nothing_staged_stays() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path()).await;
    let path = Path::from("a");
    store.put(&path, "1".into()).await.unwrap();
    store.put_opts(&path, "2".into(), PutMode::Create.into()).await.unwrap_err();
    let mut upload = store.put_multipart(&path).await.unwrap();
    upload.put_part("3".into()).await.unwrap();
    assert_eq!(staged(dir.path()), 1);
    upload.complete().await.unwrap();
    assert!(upload.complete().await.is_err(), "completed twice");
    let mut upload = store.put_multipart(&path).await.unwrap();
    upload.put_part("4".into()).await.unwrap();
    upload.abort().await.unwrap();
    assert_eq!(staged(dir.path()), 0);
    assert_eq!(std::fs::read(dir.path().join("a")).unwrap(), b"3");
}

#[tokio::test]
async fn abandoned_uploads_are_swept_and_young_ones_are_not() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path()).await;
    let (old, young) = (dir.path().join(".rfs-uploads/#1"), dir.path().join(".rfs-uploads/#2"));
    let file = std::fs::File::create(&old).unwrap();
    std::fs::File::create(&young).unwrap();
    let two_hours_ago = file.metadata().unwrap().modified().unwrap() - Duration::from_hours(2);
    file.set_times(FileTimes::new().set_modified(two_hours_ago)).unwrap();
    drop(store);
    open(dir.path()).await;
    assert!(!old.exists() && young.exists());
}

#[tokio::test]
async fn tags_are_the_same_from_put_head_and_list() {
    use futures::TryStreamExt;
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path()).await;
    let path = Path::from("a");
    let put = store.put(&path, "1".into()).await.unwrap();
    let head = store.head(&path).await.unwrap();
    let list: Vec<_> = store.list(None).try_collect().await.unwrap();
    assert_eq!(put.e_tag, head.e_tag);
    assert_eq!(head, list[0]);
}

#[tokio::test]
async fn a_full_disk_is_told_as_such() {
    // A tiny file system of its own, where this user may mount one.
    let dir = tempfile::tempdir().unwrap();
    let mounted = std::process::Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=1m", "tmpfs"])
        .arg(dir.path())
        .output()
        .is_ok_and(|output| output.status.success());
    if !mounted {
        eprintln!("skipped: cannot mount a small tmpfs here");
        return;
    }
    let store = open(dir.path()).await;
    let error = store.put(&Path::from("big"), vec![7; 2 << 20].into()).await.unwrap_err();
    let mut upload = store.put_multipart(&Path::from("parts")).await.unwrap();
    let part = upload.put_part(vec![7; 2 << 20].into()).await;
    let aborted = upload.abort().await;
    let small = store.put(&Path::from("small"), "fits".into()).await;
    let unmounted = std::process::Command::new("umount").arg("-l").arg(dir.path()).status();
    assert_eq!(classify(&error), StoreFailure::Full, "{error}");
    assert_eq!(classify(&part.unwrap_err()), StoreFailure::Full);
    aborted.unwrap();
    small.unwrap();
    assert!(unmounted.unwrap().success());
}

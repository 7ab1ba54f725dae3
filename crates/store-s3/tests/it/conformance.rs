//! What rfs relies on in every store, as one function over the trait.

use std::collections::BTreeSet;
use std::sync::Arc;

use bytes::Bytes;
use futures::stream::{self, StreamExt, TryStreamExt};
use object_store::path::Path;
use object_store::{GetOptions, GetRange, ObjectStore, ObjectStoreExt, PutMode, PutPayload, UpdateVersion};
use rfs_store_s3::{StoreFailure, classify};

type Store = Arc<dyn ObjectStore>;

/// What a store need not be able to do.
#[derive(Clone, Copy)]
pub(crate) struct Abilities {
    /// `PutMode::Update` (If-Match).
    pub(crate) update: bool,
    /// `PutMode::Create` (If-None-Match).
    pub(crate) create: bool,
}

/// Bytes that differ everywhere.
pub(crate) fn pattern(len: usize, seed: u64) -> Bytes {
    rfs_testkit::noise(seed, len).into()
}

/// Runs all cases; each works below a prefix of its own.
pub(crate) async fn run(store: Store, abilities: Abilities) {
    writes_and_reads(&store).await;
    ranges(&store).await;
    missing_objects(&store).await;
    if abilities.create {
        creation_is_exclusive(&store).await;
        one_creator_wins(&store).await;
    }
    if abilities.update {
        update_is_conditional(&store).await;
    }
    conditional_reads(&store).await;
    parts(&store).await;
    aborted_upload(&store).await;
    listing(&store).await;
    deletes_many(&store).await;
    copies(&store).await;
    odd_names(&store).await;
}

async fn bytes_of(store: &Store, path: &Path) -> Bytes {
    store.get(path).await.unwrap().bytes().await.unwrap()
}

async fn names(store: &Store, prefix: &str) -> BTreeSet<String> {
    let prefix = Path::from(prefix);
    let list: Vec<String> =
        store.list(Some(&prefix)).map_ok(|meta| meta.location.to_string()).try_collect().await.unwrap();
    let set: BTreeSet<String> = list.iter().cloned().collect();
    assert_eq!(set.len(), list.len(), "a listing names an object twice");
    set
}

async fn writes_and_reads(store: &Store) {
    for len in [0, 1, 4096, 1 << 20, (5 << 20) + 3] {
        let path = Path::from(format!("rw/{len}"));
        let bytes = pattern(len, 1);
        // In pieces, as packs are.
        let payload: PutPayload =
            [bytes.slice(..len / 3), Bytes::new(), bytes.slice(len / 3..)].into_iter().collect();
        store.put(&path, payload).await.unwrap();
        assert_eq!(bytes_of(store, &path).await, bytes);
        let meta = store.head(&path).await.unwrap();
        assert_eq!((meta.size, &meta.location), (len as u64, &path));
    }
    let path = Path::from("rw/again");
    store.put(&path, "first, and longer".into()).await.unwrap();
    store.put(&path, "second".into()).await.unwrap();
    assert_eq!(bytes_of(store, &path).await, "second");
}

async fn ranges(store: &Store) {
    let path = Path::from("ranges/object");
    let bytes = pattern(3 << 20, 2);
    let size = bytes.len();
    store.put(&path, bytes.clone().into()).await.unwrap();
    for (begin, end) in [(0, 1), (0, size), (17, 4096), (size - 1, size), (1 << 20, 2 << 20)] {
        let got = store.get_range(&path, begin as u64..end as u64).await.unwrap();
        assert_eq!(got, bytes.slice(begin..end));
    }
    // An end beyond the object is cut, a beginning beyond it is an error.
    let end = size as u64;
    let got = store.get_opts(&path, GetOptions::new().with_range(Some(end - 10..end + 10))).await.unwrap();
    assert_eq!((got.range.clone(), got.meta.size), (end - 10..end, end));
    assert_eq!(got.bytes().await.unwrap(), bytes.slice(size - 10..));
    assert!(store.get_range(&path, end..end + 1).await.is_err());
    let suffix = GetOptions { range: Some(GetRange::Suffix(100)), ..GetOptions::default() };
    let got = store.get_opts(&path, suffix).await.unwrap().bytes().await.unwrap();
    assert_eq!(got, bytes.slice(size - 100..));
    let wanted = [5..10, 0..3, (2 << 20)..(2 << 20) + 7, 8..12];
    let got = store.get_ranges(&path, &wanted.clone()).await.unwrap();
    for (got, range) in got.iter().zip(wanted) {
        let range = usize::try_from(range.start).unwrap()..usize::try_from(range.end).unwrap();
        assert_eq!(*got, bytes.slice(range));
    }
}

async fn missing_objects(store: &Store) {
    let path = Path::from("missing/object");
    for result in [
        store.get(&path).await.map(|_| ()),
        store.head(&path).await.map(|_| ()),
        store.get_range(&path, 0..1).await.map(|_| ()),
    ] {
        assert_eq!(classify(&result.unwrap_err()), StoreFailure::NotFound);
    }
    // Deleting what is not there is no error.
    store.delete(&path).await.unwrap();
    assert!(names(store, "missing").await.is_empty());
}

async fn creation_is_exclusive(store: &Store) {
    let path = Path::from("create/object");
    store.put_opts(&path, "first".into(), PutMode::Create.into()).await.unwrap();
    let error = store.put_opts(&path, "second".into(), PutMode::Create.into()).await.unwrap_err();
    assert!(matches!(error, object_store::Error::AlreadyExists { .. }), "{error:?}");
    assert_eq!(classify(&error), StoreFailure::AlreadyExists);
    assert_eq!(bytes_of(store, &path).await, "first");
}

async fn one_creator_wins(store: &Store) {
    let path = Path::from("create/race");
    let attempts = (0..8).map(|i| {
        let (store, path) = (Arc::clone(store), path.clone());
        async move { store.put_opts(&path, format!("{i}").into(), PutMode::Create.into()).await.is_ok() }
    });
    let won = futures::future::join_all(attempts).await;
    assert_eq!(won.iter().filter(|won| **won).count(), 1, "{won:?}");
    let winner = won.iter().position(|won| *won).unwrap();
    assert_eq!(bytes_of(store, &path).await, format!("{winner}"));
}

async fn update_is_conditional(store: &Store) {
    let path = Path::from("update/object");
    let first = store.put(&path, "first".into()).await.unwrap();
    let stale: UpdateVersion = first.into();
    store.put_opts(&path, "second".into(), PutMode::Update(stale.clone()).into()).await.unwrap();
    let error = store.put_opts(&path, "third".into(), PutMode::Update(stale).into()).await.unwrap_err();
    assert!(matches!(error, object_store::Error::Precondition { .. }), "{error:?}");
    assert_eq!(bytes_of(store, &path).await, "second");
}

async fn conditional_reads(store: &Store) {
    let path = Path::from("conditional/object");
    store.put(&path, "content".into()).await.unwrap();
    let tag = store.head(&path).await.unwrap().e_tag.unwrap();
    let got = store.get_opts(&path, GetOptions::new().with_if_match(Some(tag.clone()))).await.unwrap();
    assert_eq!(got.bytes().await.unwrap(), "content");
    let error = store.get_opts(&path, GetOptions::new().with_if_match(Some("\"other\""))).await.unwrap_err();
    assert!(matches!(error, object_store::Error::Precondition { .. }), "{error:?}");
    let error = store.get_opts(&path, GetOptions::new().with_if_none_match(Some(tag))).await.unwrap_err();
    assert!(matches!(error, object_store::Error::NotModified { .. }), "{error:?}");
}

async fn parts(store: &Store) {
    let path = Path::from("parts/object");
    let bytes = pattern((5 << 20) * 3 + 1234, 3);
    let mut upload = store.put_multipart(&path).await.unwrap();
    let pending: Vec<_> =
        bytes.chunks(5 << 20).map(|part| upload.put_part(Bytes::copy_from_slice(part).into())).collect();
    assert!(names(store, "parts").await.is_empty(), "an unfinished upload is visible");
    // All at once, ending in any order.
    futures::future::try_join_all(pending).await.unwrap();
    upload.complete().await.unwrap();
    assert_eq!(bytes_of(store, &path).await, bytes);

    let empty = Path::from("parts/empty");
    store.put_multipart(&empty).await.unwrap().complete().await.unwrap();
    assert_eq!(bytes_of(store, &empty).await, "");
}

async fn aborted_upload(store: &Store) {
    let path = Path::from("aborted/object");
    let mut upload = store.put_multipart(&path).await.unwrap();
    upload.put_part(pattern(5 << 20, 4).into()).await.unwrap();
    upload.abort().await.unwrap();
    assert_eq!(classify(&store.head(&path).await.unwrap_err()), StoreFailure::NotFound);
    assert!(names(store, "aborted").await.is_empty());
}

async fn listing(store: &Store) {
    // '-' sorts before '/': servers disagree on which of these comes first.
    let all = ["list/a", "list/a-b", "list/a.b/x", "list/b/c", "list/b/d/e", "list/b-c", "listing"];
    for name in all {
        store.put(&Path::from(name), name.into()).await.unwrap();
    }
    let below: BTreeSet<String> = all[..6].iter().map(|s| (*s).to_owned()).collect();
    assert_eq!(names(store, "list").await, below);
    assert_eq!(names(store, "list/b").await, BTreeSet::from(["list/b/c".into(), "list/b/d/e".into()]));
    let metas: Vec<_> = store.list(Some(&Path::from("list"))).try_collect().await.unwrap();
    assert!(metas.iter().all(|meta| meta.size == meta.location.as_ref().len() as u64));

    for offset in ["list/a-b", "list/b", "list/b/c", "list/zzz"] {
        let after: BTreeSet<String> = store
            .list_with_offset(Some(&Path::from("list")), &Path::from(offset))
            .map_ok(|meta| meta.location.to_string())
            .try_collect()
            .await
            .unwrap();
        let expected: BTreeSet<String> =
            below.iter().filter(|name| name.as_str() > offset).cloned().collect();
        assert_eq!(after, expected, "after {offset}");
    }

    let level = store.list_with_delimiter(Some(&Path::from("list"))).await.unwrap();
    let objects: BTreeSet<&str> = level.objects.iter().map(|meta| meta.location.as_ref()).collect();
    let prefixes: BTreeSet<&str> = level.common_prefixes.iter().map(AsRef::as_ref).collect();
    assert_eq!(objects, BTreeSet::from(["list/a", "list/a-b", "list/b-c"]));
    assert_eq!(prefixes, BTreeSet::from(["list/a.b", "list/b"]));

    let root = store.list_with_delimiter(None).await.unwrap();
    let prefixes: BTreeSet<&str> = root.common_prefixes.iter().map(AsRef::as_ref).collect();
    assert!(prefixes.contains("list") && prefixes.iter().all(|name| !name.starts_with('.')), "{prefixes:?}");
}

async fn deletes_many(store: &Store) {
    // More than one page of a listing and one batch of deletions.
    let count = 1100;
    stream::iter(0..count)
        .map(|i| {
            let store = Arc::clone(store);
            async move { store.put(&Path::from(format!("many/{i:05}")), "x".into()).await.unwrap() }
        })
        .buffer_unordered(16)
        .collect::<Vec<_>>()
        .await;
    let found = names(store, "many").await;
    assert_eq!(found.len(), count);
    let paths: Vec<Path> = found.into_iter().map(Path::from).collect();
    let deleted: Vec<Path> =
        store.delete_stream(stream::iter(paths.clone()).map(Ok).boxed()).try_collect().await.unwrap();
    assert_eq!(deleted, paths);
    assert!(names(store, "many").await.is_empty());
}

async fn copies(store: &Store) {
    let (from, to, moved) = (Path::from("copy/from"), Path::from("copy/deep/to"), Path::from("copy/moved"));
    store.put(&from, "copied".into()).await.unwrap();
    store.copy(&from, &to).await.unwrap();
    assert_eq!(bytes_of(store, &to).await, "copied");
    store.rename(&to, &moved).await.unwrap();
    assert_eq!(bytes_of(store, &moved).await, "copied");
    assert_eq!(names(store, "copy").await, BTreeSet::from(["copy/from".into(), "copy/moved".into()]));
    let error = store.copy_if_not_exists(&from, &moved).await.unwrap_err();
    assert_eq!(classify(&error), StoreFailure::AlreadyExists);
    let missing = store.copy(&Path::from("copy/none"), &to).await.unwrap_err();
    assert_eq!(classify(&missing), StoreFailure::NotFound);
}

async fn odd_names(store: &Store) {
    let odd =
        ["odd/with space", "odd/plus+and&", "odd/ünïcode", "odd/percent%25", "odd/quote'\"", "odd/a=b?c"];
    for name in odd {
        let path = Path::parse(name).unwrap();
        store.put(&path, name.into()).await.unwrap();
        assert_eq!(bytes_of(store, &path).await, name);
    }
    let expected: BTreeSet<String> = odd.iter().map(|s| (*s).to_owned()).collect();
    assert_eq!(names(store, "odd").await, expected);
    let paths: Vec<_> = odd.iter().map(|name| Ok(Path::parse(name).unwrap())).collect();
    store.delete_stream(stream::iter(paths).boxed()).try_collect::<Vec<_>>().await.unwrap();
    assert!(names(store, "odd").await.is_empty());
}

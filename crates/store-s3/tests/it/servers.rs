//! The suite over memory, a local directory, and real S3 servers.

use std::sync::Arc;
use std::time::Duration;

use object_store::ObjectStore;
use rfs_store_s3::{
    Credentials, DurableLocal, MissingDirectory, S3Config, S3Store, StoreMetrics, StoreOptions, Verb,
    open_store,
};
use rfs_testkit::{S3Server, SeaweedFs, TestCertificate, Versitygw, VersitygwOptions, or_skip};

use crate::conformance::{Abilities, run};

/// Credentials of a test server's user.
pub(crate) fn credentials(server: &dyn S3Server) -> Credentials {
    Credentials::new(server.access_key(), server.secret_key(), None, None, "test")
}

/// Options for a store on `server`.
pub(crate) fn options(server: &dyn S3Server) -> StoreOptions {
    StoreOptions {
        credentials: Some(credentials(server)),
        io_timeout: Some(Duration::from_secs(30)),
        ..StoreOptions::default()
    }
}

#[tokio::test]
async fn memory_conforms() {
    let store = open_store("memory://", &StoreOptions::default()).await.unwrap();
    run(store, Abilities { update: true, create: true }).await;
}

#[tokio::test]
async fn local_directory_conforms() {
    let dir = tempfile::tempdir().unwrap();
    let store = DurableLocal::open(dir.path(), MissingDirectory::Fail).await.unwrap();
    run(Arc::new(store), Abilities { update: false, create: true }).await;
}

async fn server_conforms(server: &dyn S3Server, abilities: Abilities) {
    server.create_bucket("suite").unwrap();
    let options = options(server);
    let store = open_store(&server.store_url("suite", "some/prefix"), &options).await.unwrap();
    run(store, abilities).await;

    // Without a prefix the same objects are seen below it.
    let whole = open_store(&server.store_url("suite", ""), &options).await.unwrap();
    let level = whole.list_with_delimiter(None).await.unwrap();
    assert_eq!(level.common_prefixes, [object_store::path::Path::from("some")]);

    let snapshot = options.metrics.snapshot();
    assert!(snapshot.verb(Verb::Put).requests > 1100, "{snapshot:?}");
    assert!(snapshot.verb(Verb::PutPart).bytes > 15 << 20, "{snapshot:?}");
    assert!(snapshot.verb(Verb::List).requests > 2, "{snapshot:?}");
}

#[tokio::test]
async fn versitygw_conforms() {
    let Some(server) = or_skip(Versitygw::start()) else { return };
    server_conforms(&server, Abilities { update: true, create: true }).await;
}

#[tokio::test]
async fn seaweedfs_conforms() {
    let Some(server) = or_skip(SeaweedFs::start()) else { return };
    server_conforms(&server, Abilities { update: true, create: true }).await;
}

#[tokio::test]
async fn https_works_with_a_ca_bundle_and_not_without() {
    let Some(tls) = or_skip(TestCertificate::create()) else { return };
    let options_tls = VersitygwOptions { tls: Some(tls), ..VersitygwOptions::default() };
    let Some(server) = or_skip(Versitygw::start_with(options_tls)) else { return };
    server.create_bucket("suite").unwrap();
    let bundle = server.ca_bundle().unwrap().display().to_string();
    let url = format!("{}&ca_bundle={bundle}", server.store_url("suite", ""));
    let store = open_store(&url, &options(&server)).await.unwrap();
    rfs_store_s3::probe(&store).await.unwrap();

    let mut untrusting = options(&server);
    untrusting.io_timeout = Some(Duration::from_secs(3));
    let store = open_store(&server.store_url("suite", ""), &untrusting).await.unwrap();
    let error = rfs_store_s3::probe(&store).await.unwrap_err();
    assert!(error.to_string().to_lowercase().contains("certificate"), "{error}");
}

#[tokio::test]
async fn large_objects_are_streamed() {
    use futures::TryStreamExt;
    use object_store::ObjectStoreExt;
    let Some(server) = or_skip(Versitygw::start()) else { return };
    server.create_bucket("suite").unwrap();
    let mut config = S3Config::from_url(&server.store_url("suite", "")).unwrap();
    config.max_in_flight = 2;
    let store = S3Store::connect_as(config, Some(credentials(&server))).await.unwrap();
    let path = object_store::path::Path::from("large");
    let bytes = crate::conformance::pattern(40 << 20, 9);
    store.put(&path, bytes.clone().into()).await.unwrap();
    let chunks: Vec<bytes::Bytes> =
        store.get(&path).await.unwrap().into_stream().try_collect().await.unwrap();
    assert!(chunks.len() > 1, "40 MiB came in one piece");
    assert_eq!(chunks.concat(), bytes);
}

#[tokio::test]
async fn metrics_of_a_memory_store_count() {
    use object_store::ObjectStoreExt;
    let metrics = Arc::new(StoreMetrics::default());
    let options = StoreOptions { metrics: Arc::clone(&metrics), ..StoreOptions::default() };
    let store = open_store("memory://", &options).await.unwrap();
    let path = object_store::path::Path::from("a");
    store.put(&path, "12345".into()).await.unwrap();
    store.get_range(&path, 1..3).await.unwrap();
    store.get(&object_store::path::Path::from("b")).await.unwrap_err();
    let snapshot = metrics.snapshot();
    assert_eq!((snapshot.verb(Verb::Put).requests, snapshot.verb(Verb::Put).bytes), (1, 5));
    let get = snapshot.verb(Verb::Get);
    assert_eq!((get.requests, get.bytes, get.errors), (2, 2, 0));
}

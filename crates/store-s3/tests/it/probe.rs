//! The probe: what it says of good stores and of each way to be wrong.

use std::sync::Arc;
use std::time::Duration;

use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};
use rfs_store_s3::{
    Credentials, FaultPlan, FaultStore, MissingDirectory, Outage, ProbeError, ProbeReport, ProbeStep,
    StoreFailure, StoreOptions, open_store, probe, remedy,
};
use rfs_testkit::{S3Server, Versitygw, or_skip};

use crate::servers::options;

const GOOD: ProbeReport = ProbeReport { conditional_put: true, multipart: true };

async fn probe_url(url: &str, options: &StoreOptions) -> Result<ProbeReport, ProbeError> {
    probe(&open_store(url, options).await.unwrap()).await
}

#[tokio::test]
async fn good_stores_pass_and_nothing_stays() {
    use futures::TryStreamExt;
    let dir = tempfile::tempdir().unwrap();
    let options = StoreOptions { missing_directory: MissingDirectory::Create, ..StoreOptions::default() };
    for url in ["memory://".to_owned(), format!("file://{}/store", dir.path().display())] {
        let store = open_store(&url, &options).await.unwrap();
        assert_eq!(probe(&store).await.unwrap(), GOOD);
        let left: Vec<_> = store.list(None).try_collect().await.unwrap();
        assert!(left.is_empty(), "{left:?}");
    }
    // No directories, either.
    let left: Vec<_> = std::fs::read_dir(dir.path().join("store"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    assert_eq!(left, [".rfs-uploads"]);
}

#[tokio::test]
async fn wrong_settings_are_told_apart() {
    let Some(server) = or_skip(Versitygw::start()) else { return };
    server.create_bucket("suite").unwrap();
    let url = server.store_url("suite", "p");
    let mut options = options(&server);
    options.io_timeout = Some(Duration::from_secs(2));
    assert_eq!(probe_url(&url, &options).await.unwrap(), GOOD);

    let absent = open_store(&server.store_url("absent", "p"), &options).await.unwrap();
    let error = absent.get(&Path::from("object")).await.unwrap_err();
    assert!(remedy(&error, ProbeStep::RangeGet).unwrap().contains("no such bucket"), "{error}");
    let error = probe_url(&server.store_url("absent", "p"), &options).await.unwrap_err();
    assert_eq!(error.failure, StoreFailure::NoBucket, "{error}");
    assert!(error.to_string().contains("no such bucket"), "{error}");

    let mut wrong = options.clone();
    wrong.credentials = Some(Credentials::new(server.access_key(), "wrong", None, None, "test"));
    let error = probe_url(&url, &wrong).await.unwrap_err();
    assert_eq!(error.failure, StoreFailure::Credentials, "{error}");
    assert!(error.to_string().contains("AWS_SECRET_ACCESS_KEY"), "{error}");

    wrong.credentials = Some(Credentials::new("nobody", "wrong", None, None, "test"));
    let error = probe_url(&url, &wrong).await.unwrap_err();
    assert_eq!(error.failure, StoreFailure::Credentials, "{error}");

    let region = url.replace("us-east-1", "eu-west-1");
    let error = probe_url(&region, &options).await.unwrap_err();
    assert_eq!(error.failure, StoreFailure::NoBucket, "{error}");
    assert!(error.to_string().contains("region"), "{error}");

    let port = rfs_testkit::free_port().unwrap();
    let elsewhere = format!("s3://suite?endpoint=http://127.0.0.1:{port}&region=us-east-1");
    let error = probe_url(&elsewhere, &options).await.unwrap_err();
    assert_eq!(error.failure, StoreFailure::Unavailable, "{error}");
    assert!(error.to_string().contains("endpoint"), "{error}");
}

#[tokio::test]
async fn a_full_store_fails_the_probe() {
    let store = FaultStore::new(Arc::new(object_store::memory::InMemory::new()), 1, FaultPlan::default());
    store.set_outage(Outage::Full);
    let store: Arc<dyn ObjectStore> = Arc::new(store);
    let error = probe(&store).await.unwrap_err();
    assert_eq!(error.failure, StoreFailure::Full);
}

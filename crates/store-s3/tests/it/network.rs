//! A real server behind a network that fails: requests go through in the end, or fail in time.

use std::sync::Arc;
use std::time::Duration;

use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};
use rfs_store_s3::{StoreFailure, StoreOptions, Verb, classify, open_store};
use rfs_testkit::{Fault, FaultProxy, S3Server, Versitygw, or_skip, store_url};
use tokio::time::Instant;

use crate::conformance::pattern;
use crate::servers::options;

struct Setup {
    store: Arc<dyn ObjectStore>,
    options: StoreOptions,
    proxy: FaultProxy,
    server: Versitygw,
}

impl Setup {
    /// Waits until a request has failed, `retries` times having been counted before.
    async fn met_a_fault(&self, retries: u64) {
        while self.options.metrics.snapshot().retries == retries {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

/// A store behind a proxy that gives an attempt up after a second of silence.
async fn setup(io_timeout: Duration) -> Option<Setup> {
    let server = or_skip(Versitygw::start())?;
    server.create_bucket("suite").unwrap();
    let proxy = FaultProxy::start(server.address()).unwrap();
    let url = store_url(&proxy.endpoint(), server.region(), "suite", "p") + "&read_timeout=1s";
    let mut options = options(&server);
    options.io_timeout = Some(io_timeout);
    let store = open_store(&url, &options).await.unwrap();
    Some(Setup { store, options, proxy, server })
}

/// Whether `object` can be written and read.
async fn works(store: &Arc<dyn ObjectStore>, object: &str) {
    let path = Path::from(object);
    let bytes = pattern(300_000, 5);
    store.put(&path, bytes.clone().into()).await.unwrap();
    assert_eq!(store.get(&path).await.unwrap().bytes().await.unwrap(), bytes);
}

#[tokio::test]
async fn passing_faults_are_overcome() {
    let Some(setup) = setup(Duration::from_mins(1)).await else { return };
    works(&setup.store, "before").await;
    for (name, fault) in [
        ("status", Fault::Status(503)),
        ("internal", Fault::Status(500)),
        ("reset", Fault::Reset),
        ("hole", Fault::BlackHole),
        ("cut", Fault::Truncate(100)),
    ] {
        setup.proxy.set(fault);
        let retries = setup.options.metrics.snapshot().retries;
        let store = Arc::clone(&setup.store);
        let writer = tokio::spawn(async move { works(&store, name).await });
        setup.met_a_fault(retries).await;
        setup.proxy.set(Fault::None);
        writer.await.unwrap();
    }
    setup.proxy.set(Fault::Latency(Duration::from_millis(300)));
    works(&setup.store, "slow").await;
}

#[tokio::test]
async fn what_is_damaged_on_the_way_is_refused_and_sent_again() {
    let Some(setup) = setup(Duration::from_mins(1)).await else { return };
    setup.proxy.set(Fault::Damage);
    let store = Arc::clone(&setup.store);
    let writer = tokio::spawn(async move { works(&store, "whole").await });
    while setup.proxy.faults_injected() == 0 && !writer.is_finished() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_ne!(setup.proxy.faults_injected(), 0);
    setup.proxy.set(Fault::None);
    writer.await.unwrap();
}

#[tokio::test]
async fn flaky_connections_lose_nothing() {
    let Some(setup) = setup(Duration::from_mins(1)).await else { return };
    setup.proxy.set(Fault::Flaky(2));
    for i in 0..20 {
        works(&setup.store, &format!("flaky/{i}")).await;
        // Every further request meets a new connection.
        setup.proxy.set(Fault::Reset);
        setup.proxy.set(Fault::Flaky(2));
    }
    assert!(setup.proxy.faults_injected() > 0);
    let mut upload = setup.store.put_multipart(&Path::from("parts")).await.unwrap();
    let bytes = pattern(11 << 20, 6);
    let parts: Vec<_> = bytes.chunks(5 << 20).map(|part| upload.put_part(part.to_vec().into())).collect();
    setup.proxy.set(Fault::Reset);
    setup.proxy.set(Fault::Flaky(2));
    futures::future::try_join_all(parts).await.unwrap();
    upload.complete().await.unwrap();
    assert_eq!(setup.store.get(&Path::from("parts")).await.unwrap().bytes().await.unwrap(), bytes);
}

#[tokio::test]
async fn a_body_that_breaks_goes_on_where_it_broke() {
    use futures::TryStreamExt;
    let Some(setup) = setup(Duration::from_mins(1)).await else { return };
    let path = Path::from("large");
    let bytes = pattern(40 << 20, 7);
    setup.store.put(&path, bytes.clone().into()).await.unwrap();
    setup.proxy.set(Fault::Truncate(15 << 20));
    let stream = setup.store.get(&path).await.unwrap().into_stream();
    let reader = tokio::spawn(stream.try_collect::<Vec<bytes::Bytes>>());
    setup.met_a_fault(0).await;
    setup.proxy.set(Fault::None);
    let read = reader.await.unwrap().unwrap().concat();
    assert!(read == bytes, "{} bytes read", read.len());
    // Not from the beginning: what came before the break was not asked for again.
    let got = setup.options.metrics.snapshot().verb(Verb::Get).bytes;
    assert!(got < 80 << 20, "{got} bytes announced");
}

#[tokio::test]
async fn a_lasting_outage_fails_in_time_and_service_resumes() {
    let Some(mut setup) = setup(Duration::from_secs(3)).await else { return };
    for fault in [Fault::BlackHole, Fault::Status(503), Fault::Reset] {
        setup.proxy.set(fault);
        let begun = Instant::now();
        let error = setup.store.put(&Path::from("a"), "b".into()).await.unwrap_err();
        assert_eq!(classify(&error), StoreFailure::Unavailable, "{error}");
        assert!(begun.elapsed() < Duration::from_secs(10), "{fault:?} took {:?}", begun.elapsed());
    }
    setup.proxy.set(Fault::None);
    works(&setup.store, "after").await;

    setup.server.kill();
    let error = setup.store.head(&Path::from("after")).await.unwrap_err();
    assert_eq!(classify(&error), StoreFailure::Unavailable, "{error}");
    setup.server.restart().unwrap();
    works(&setup.store, "restarted").await;
}

//! The loop under virtual time, over memory with faults.

use std::sync::Arc;

use object_store::memory::InMemory;
use object_store::{ObjectStoreExt, UpdateVersion};

use super::*;
use crate::{FaultPlan, FaultStore, Outage, StoreFailure, classify};

type Faulty = FaultStore<Arc<InMemory>>;

fn faulty(plan: FaultPlan) -> (Faulty, Arc<InMemory>) {
    let memory = Arc::new(InMemory::new());
    (FaultStore::new(Arc::clone(&memory), 7, plan), memory)
}

fn retrying(store: &Faulty, config: RetryConfig) -> (Retrying<Faulty>, Arc<StoreMetrics>) {
    let metrics = Arc::new(StoreMetrics::default());
    (Retrying::new(store.clone(), RetryConfig { seed: Some(1), ..config }, Arc::clone(&metrics)), metrics)
}

fn path() -> Path {
    Path::from("object")
}

#[tokio::test(start_paused = true)]
async fn refusals_are_repeated_until_they_end() {
    let (store, memory) = faulty(FaultPlan { refuse: 0.7, lose_answer: 0.3, ..FaultPlan::default() });
    let (retrying, metrics) = retrying(&store, RetryConfig::default());
    for i in 0..50 {
        let path = Path::from(format!("{i}"));
        retrying.put(&path, "content".into()).await.unwrap();
        assert_eq!(retrying.get(&path).await.unwrap().bytes().await.unwrap(), "content");
    }
    assert!(metrics.snapshot().retries > 50);
    let paths: Vec<_> = (0..50).map(|i| Ok(Path::from(format!("{i}")))).collect();
    let deleted: Vec<_> = retrying.delete_stream(stream::iter(paths).boxed()).try_collect().await.unwrap();
    assert_eq!(deleted.len(), 50);
    assert_eq!(memory.list(None).count().await, 0);
}

#[tokio::test(start_paused = true)]
async fn a_refusal_for_good_is_told_at_once() {
    let (store, _) = faulty(FaultPlan::default());
    let (retrying, metrics) = retrying(&store, RetryConfig::default());
    let error = retrying.get(&path()).await.unwrap_err();
    assert!(matches!(error, object_store::Error::NotFound { .. }));
    store.set_outage(Outage::Full);
    let error = retrying.put(&path(), "x".into()).await.unwrap_err();
    assert_eq!(classify(&error), StoreFailure::Full);
    assert_eq!(metrics.snapshot().retries, 0);
}

#[tokio::test(start_paused = true)]
async fn the_total_time_is_kept() {
    for outage in [Outage::Refused, Outage::Silent] {
        let (store, _) = faulty(FaultPlan::default());
        store.set_outage(outage);
        let (retrying, _) = retrying(&store, RetryConfig::default());
        let begun = Instant::now();
        let error = retrying.put(&path(), "x".into()).await.unwrap_err();
        let took = begun.elapsed();
        assert!(took <= Duration::from_secs(301) && took > Duration::from_secs(290), "{took:?}");
        assert_eq!(classify(&error), StoreFailure::Unavailable);
        assert!(error.to_string().contains("gave up after"), "{error}");
    }
}

#[tokio::test(start_paused = true)]
async fn what_was_met_is_told_rather_than_that_time_is_up() {
    let (store, _) = faulty(FaultPlan::default());
    store.set_outage(Outage::Refused);
    let (retrying, _) = retrying(&store, RetryConfig::default());
    let put = tokio::spawn(async move { retrying.put(&path(), "x".into()).await });
    sleep(Duration::from_mins(4)).await;
    store.set_outage(Outage::Silent);
    let error = put.await.unwrap().unwrap_err();
    assert!(error.to_string().contains("connection refused"), "{error}");
}

#[tokio::test(start_paused = true)]
async fn zero_means_for_ever() {
    let (store, _) = faulty(FaultPlan::default());
    store.set_outage(Outage::Refused);
    let (retrying, _) =
        retrying(&store, RetryConfig { io_timeout: Duration::ZERO, ..RetryConfig::default() });
    let put = tokio::spawn({
        let retrying = retrying.clone();
        async move { retrying.put(&path(), "x".into()).await }
    });
    sleep(Duration::from_hours(10)).await;
    assert!(!put.is_finished());
    let ended = Instant::now();
    store.set_outage(Outage::None);
    put.await.unwrap().unwrap();
    assert!(ended.elapsed() <= Duration::from_secs(5), "service resumed after {:?}", ended.elapsed());
}

#[tokio::test(start_paused = true)]
async fn an_attempt_that_hangs_is_given_up() {
    let (store, _) = faulty(FaultPlan { hang: 0.5, ..FaultPlan::default() });
    let config = RetryConfig { attempt_timeout: Duration::from_secs(1), ..RetryConfig::default() };
    let (retrying, metrics) = retrying(&store, config);
    for _ in 0..20 {
        retrying.put(&path(), "x".into()).await.unwrap();
    }
    assert!(metrics.snapshot().retries > 5);
}

#[tokio::test(start_paused = true)]
async fn a_creation_whose_answer_was_lost_has_succeeded() {
    let (store, memory) = faulty(FaultPlan { lose_answer: 0.6, ..FaultPlan::default() });
    let (retrying, _) = retrying(&store, RetryConfig::default());
    for i in 0..30 {
        let path = Path::from(format!("{i}"));
        retrying.put_opts(&path, "mine".into(), PutMode::Create.into()).await.unwrap();
    }
    memory.put(&path(), "theirs".into()).await.unwrap();
    for _ in 0..30 {
        let error = retrying.put_opts(&path(), "mine".into(), PutMode::Create.into()).await.unwrap_err();
        assert!(matches!(error, object_store::Error::AlreadyExists { .. }));
    }
    assert_eq!(memory.get(&path()).await.unwrap().bytes().await.unwrap(), "theirs");
}

#[tokio::test(start_paused = true)]
async fn an_update_whose_answer_was_lost_has_succeeded() {
    let (store, memory) = faulty(FaultPlan { lose_answer: 0.6, ..FaultPlan::default() });
    let (retrying, _) = retrying(&store, RetryConfig::default());
    let mut version: UpdateVersion = memory.put(&path(), "0".into()).await.unwrap().into();
    for i in 1..30 {
        let mode = PutMode::Update(version);
        version = retrying.put_opts(&path(), format!("{i}").into(), mode.into()).await.unwrap().into();
    }
}

#[tokio::test(start_paused = true)]
async fn parts_are_repeated_one_by_one() {
    let (store, memory) = faulty(FaultPlan { refuse: 0.5, lose_answer: 0.3, ..FaultPlan::default() });
    let (retrying, _) = retrying(&store, RetryConfig::default());
    for i in 0..10 {
        let path = Path::from(format!("{i}"));
        let mut upload = retrying.put_multipart(&path).await.unwrap();
        let parts: Vec<_> = (0..5).map(|part| upload.put_part(format!("part {part},").into())).collect();
        futures::future::try_join_all(parts).await.unwrap();
        upload.complete().await.unwrap();
        let bytes = memory.get(&path).await.unwrap().bytes().await.unwrap();
        assert_eq!(bytes, "part 0,part 1,part 2,part 3,part 4,");
    }
}

#[tokio::test(start_paused = true)]
async fn pauses_grow_and_are_jittered() {
    let (store, _) = faulty(FaultPlan::default());
    let (retrying, _) = retrying(&store, RetryConfig::default());
    let config = RetryConfig::default();
    let mut longest = Duration::ZERO;
    for attempts in 1..12 {
        let mut budget = Budget::new(&config);
        budget.attempts = attempts;
        let bound = config.pause_first.saturating_mul(1 << (attempts - 1)).min(config.pause_max);
        let pauses: Vec<_> = (0..100).map(|_| retrying.shared.next_pause(&budget).unwrap()).collect();
        let max = *pauses.iter().max().unwrap();
        assert!(max <= bound && max >= bound / 2, "{attempts}: {max:?} of {bound:?}");
        assert!(*pauses.iter().min().unwrap() < bound / 4);
        longest = longest.max(max);
    }
    assert!(longest <= config.pause_max);
}

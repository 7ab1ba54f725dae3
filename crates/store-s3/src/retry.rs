//! The one retry loop over a store: exponential backoff with full jitter, up to a total time.
//!
//! Owns: which failures are repeated ([`is_transient`]), for how long, and what a second run of a request that may have
//! been carried out already means:
//!
//! | request | why a second run is harmless |
//! |---|---|
//! | put (overwrite), part, delete, copy (overwrite), abort | the same bytes under the same name, or gone |
//! | put (create), put (update) | if the condition fails at a later attempt, the object is read: if it holds the bytes that were to be written, an earlier attempt succeeded |
//! | copy (create) | it is not quite: the answer may be that the target exists, made by an earlier attempt |
//! | complete | if the upload is gone at a later attempt and the object is there, an earlier one succeeded |
//! | get, head, list | they change nothing |
//!
//! A body that breaks while it is streamed goes on where it broke, if the object is still the same (`ETag`).
//!
//! Bounds: at most one attempt at a time a request; the total time is [`RetryConfig::io_timeout`].

use std::error::Error;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::{self, BoxStream};
use futures::{StreamExt, TryStreamExt};
use object_store::multipart::PartId;
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetRange, GetResult, GetResultPayload, ListResult, MultipartId, MultipartUpload,
    ObjectMeta, ObjectStore, ObjectStoreExt, PutMode, PutMultipartOptions, PutOptions, PutPayload, PutResult,
    Result,
};
use parking_lot::Mutex;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use tokio::time::{Instant, sleep, timeout};

use crate::error::cause;
use crate::remote::{ListPage, Listing, PartsUpload, RemoteStore, list_all, list_one_level};
use crate::s3::DELETE_BATCH_MAX;
use crate::{Cause, RequestError, StoreMetrics, is_transient};

/// How requests are repeated.
#[derive(Debug, Clone, Copy)]
pub struct RetryConfig {
    /// How long a request is repeated in all before its failure is told (300 s); zero: for ever.
    pub io_timeout: Duration,
    /// How long one attempt may take (zero: no limit of this loop's own; [`S3Store`](crate::S3Store) has better ones).
    pub attempt_timeout: Duration,
    /// The longest first pause (50 ms). Each further one may be twice as long; a pause is drawn evenly from zero up.
    pub pause_first: Duration,
    /// The longest pause (5 s), so that service resumes soon after an outage.
    pub pause_max: Duration,
    /// Where the jitter's random numbers begin; `None`: anywhere.
    pub seed: Option<u64>,
}

impl Default for RetryConfig {
    fn default() -> RetryConfig {
        RetryConfig {
            io_timeout: Duration::from_mins(5),
            attempt_timeout: Duration::ZERO,
            pause_first: Duration::from_millis(50),
            pause_max: Duration::from_secs(5),
            seed: None,
        }
    }
}

/// Repeats what may succeed later. Cheap to clone.
pub struct Retrying<S> {
    shared: Arc<Shared<S>>,
}

struct Shared<S> {
    store: S,
    config: RetryConfig,
    rng: Mutex<SmallRng>,
    metrics: Arc<StoreMetrics>,
    /// When the store stopped answering, once that has been told.
    outage: Mutex<Option<Instant>>,
}

/// A request was given up.
#[derive(Debug, thiserror::Error)]
#[error("gave up after {attempts} attempts in {:.1} s: {source}", elapsed.as_secs_f64())]
struct GaveUp {
    attempts: u32,
    elapsed: Duration,
    source: Box<dyn Error + Send + Sync>,
}

/// Failed attempts of one request after which the log says so.
const ATTEMPTS_TOLD: u32 = 4;

impl<S> Clone for Retrying<S> {
    fn clone(&self) -> Self {
        Retrying { shared: Arc::clone(&self.shared) }
    }
}

impl<S: fmt::Debug> fmt::Debug for Retrying<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Retrying").field("store", &self.shared.store).finish_non_exhaustive()
    }
}

impl<S: fmt::Display> fmt::Display for Retrying<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.shared.store.fmt(f)
    }
}

impl<S: RemoteStore> Retrying<S> {
    /// Repeats the requests of `store`; `metrics` counts the repetitions.
    pub fn new(store: S, config: RetryConfig, metrics: Arc<StoreMetrics>) -> Retrying<S> {
        let rng = config.seed.map_or_else(SmallRng::from_os_rng, SmallRng::seed_from_u64);
        let shared = Shared { store, config, rng: Mutex::new(rng), metrics, outage: Mutex::new(None) };
        Retrying { shared: Arc::new(shared) }
    }

    fn store(&self) -> &S {
        &self.shared.store
    }

    /// Runs `request` until it succeeds, fails for good, or the time is up. The second value is the number of
    /// attempts made.
    async fn attempts<T, F>(
        &self,
        operation: &'static str,
        mut request: impl FnMut() -> F,
    ) -> (Result<T>, u32)
    where
        F: Future<Output = Result<T>>,
    {
        let mut budget = Budget::new(&self.shared.config);
        let mut met = None;
        loop {
            let error = match timeout(budget.attempt_limit(), request()).await {
                Ok(Ok(value)) => {
                    self.shared.answered(&budget);
                    return (Ok(value), budget.attempts + 1);
                }
                Ok(Err(error)) => error,
                // The total time cut this attempt short: what the one before it met says more.
                Err(_)
                    if budget.is_over()
                        && let Some(met) = met.take() =>
                {
                    met
                }
                Err(_) => RequestError::new(Cause::Timeout, operation, "no answer in time").at(self.store()),
            };
            budget.attempts += 1;
            if !is_transient(&error) {
                return (Err(error), budget.attempts);
            }
            let Some(pause) = self.shared.next_pause(&budget) else {
                return (Err(budget.give_up(error)), budget.attempts);
            };
            self.shared.failed(operation, &budget, &error, pause);
            met = Some(error);
            sleep(pause).await;
        }
    }

    async fn run<T, F>(&self, operation: &'static str, request: impl FnMut() -> F) -> Result<T>
    where
        F: Future<Output = Result<T>>,
    {
        self.attempts(operation, request).await.0
    }

    /// After a condition failed at a later attempt: whether an earlier one wrote `payload`.
    async fn written_before(&self, location: &Path, payload: &PutPayload) -> Result<Option<PutResult>> {
        let found = self.run("GetObject", || async {
            let result = self.store().get_opts(location, GetOptions::default()).await?;
            let meta = result.meta.clone();
            Ok((meta, result.bytes().await?))
        });
        let (meta, bytes) = match found.await {
            Ok(found) => found,
            Err(object_store::Error::NotFound { .. }) => return Ok(None),
            Err(error) => return Err(error),
        };
        let mut rest = &bytes[..];
        let same = payload.iter().all(|piece| {
            let begins = rest.starts_with(piece);
            rest = rest.get(piece.len()..).unwrap_or_default();
            begins
        });
        let same = same && bytes.len() == payload.content_length();
        Ok(same.then(|| put_result(meta)))
    }

    /// Deletes one batch; what failed for a passing reason is tried again.
    async fn delete_batch(&self, locations: Vec<Path>) -> Vec<Result<Path>> {
        let mut results: Vec<Option<Result<Path>>> = locations.iter().map(|_| None).collect();
        let mut left: Vec<usize> = (0..locations.len()).collect();
        let mut budget = Budget::new(&self.shared.config);
        loop {
            let batch: Vec<Result<Path>> = left.iter().map(|&i| Ok(locations[i].clone())).collect();
            let outcome = timeout(
                budget.attempt_limit(),
                self.store().delete_stream(stream::iter(batch).boxed()).collect::<Vec<_>>(),
            )
            .await;
            budget.attempts += 1;
            let outcome = outcome.unwrap_or_else(|_| {
                let late = |i: &usize| {
                    Err(RequestError::new(Cause::Timeout, "DeleteObjects", "no answer in time")
                        .at(&locations[*i]))
                };
                left.iter().map(late).collect()
            });
            let mut again = Vec::new();
            let pause = self.shared.next_pause(&budget);
            for (index, result) in left.iter().copied().zip(outcome) {
                match (result, pause) {
                    (Err(error), Some(pause)) if is_transient(&error) => {
                        if again.is_empty() {
                            self.shared.failed("DeleteObjects", &budget, &error, pause);
                        }
                        again.push(index);
                    }
                    (Err(error), None) if is_transient(&error) => {
                        results[index] = Some(Err(budget.give_up(error)));
                    }
                    (result, _) => results[index] = Some(result),
                }
            }
            match pause {
                Some(pause) if !again.is_empty() => sleep(pause).await,
                _ => {
                    self.shared.answered(&budget);
                    return results.into_iter().flatten().collect();
                }
            }
            left = again;
        }
    }

    /// The stream of a body that goes on where it broke.
    fn resuming(
        &self,
        location: &Path,
        options: GetOptions,
        e_tag: Option<String>,
        range: Range<u64>,
        body: BoxStream<'static, Result<Bytes>>,
    ) -> BoxStream<'static, Result<Bytes>> {
        let body =
            BrokenBody { store: self.clone(), location: location.clone(), options, e_tag, range, body };
        stream::try_unfold(body, |mut body| async move {
            let next = body.next().await?;
            Ok(next.map(|bytes| (bytes, body)))
        })
        .boxed()
    }
}

impl<S> Shared<S> {
    /// The pause before the next attempt, or `None` when the time is up.
    fn next_pause(&self, budget: &Budget<'_>) -> Option<Duration> {
        let longest = self
            .config
            .pause_first
            .saturating_mul(1 << budget.attempts.saturating_sub(1).min(16))
            .min(self.config.pause_max);
        let pause = longest.mul_f64(self.rng.lock().random_range(0.0..=1.0));
        match budget.left() {
            Some(left) if left <= pause => None,
            _ => Some(pause),
        }
    }

    fn failed(&self, operation: &str, budget: &Budget<'_>, error: &object_store::Error, pause: Duration) {
        self.metrics.count_retry();
        let attempts = budget.attempts;
        tracing::debug!(operation, attempts, ?pause, %error, "request to the store failed, trying again");
        if attempts < ATTEMPTS_TOLD {
            return;
        }
        let mut outage = self.outage.lock();
        if outage.is_none() {
            *outage = Some(budget.begun);
            let io_timeout_secs = self.config.io_timeout.as_secs();
            tracing::warn!(operation, attempts, %error, io_timeout_secs, "the object store fails; trying on");
        }
    }

    fn answered(&self, budget: &Budget<'_>) {
        // Only a request that was repeated can end an outage, so that the usual path takes no lock.
        if budget.attempts == 0 {
            return;
        }
        if let Some(begun) = self.outage.lock().take() {
            let outage_secs = begun.elapsed().as_secs();
            tracing::info!(outage_secs, "the object store answers again");
        }
    }
}

/// The time that one request has.
struct Budget<'a> {
    config: &'a RetryConfig,
    begun: Instant,
    attempts: u32,
}

impl Budget<'_> {
    fn new(config: &RetryConfig) -> Budget<'_> {
        Budget { config, begun: Instant::now(), attempts: 0 }
    }

    /// What is left of the total; `None`: no end.
    fn left(&self) -> Option<Duration> {
        let total = self.config.io_timeout;
        (!total.is_zero()).then(|| total.saturating_sub(self.begun.elapsed()))
    }

    fn is_over(&self) -> bool {
        self.left().is_some_and(|left| left.is_zero())
    }

    fn attempt_limit(&self) -> Duration {
        let own = self.config.attempt_timeout;
        let own = if own.is_zero() { Duration::MAX } else { own };
        self.left().map_or(own, |left| left.min(own))
    }

    fn give_up(&self, error: object_store::Error) -> object_store::Error {
        let source =
            GaveUp { attempts: self.attempts, elapsed: self.begun.elapsed(), source: Box::new(error) };
        object_store::Error::Generic { store: "object store", source: Box::new(source) }
    }
}

fn put_result(meta: ObjectMeta) -> PutResult {
    PutResult { e_tag: meta.e_tag, version: meta.version, extensions: object_store::Extensions::default() }
}

/// A body being streamed, and what is needed to ask for the rest of it.
struct BrokenBody<S> {
    store: Retrying<S>,
    location: Path,
    options: GetOptions,
    e_tag: Option<String>,
    /// What is still to come.
    range: Range<u64>,
    body: BoxStream<'static, Result<Bytes>>,
}

impl<S: RemoteStore> BrokenBody<S> {
    async fn next(&mut self) -> Result<Option<Bytes>> {
        loop {
            match self.body.next().await {
                None => return Ok(None),
                Some(Ok(bytes)) => {
                    self.range.start += bytes.len() as u64;
                    return Ok(Some(bytes));
                }
                Some(Err(error)) if is_transient(&error) && !self.range.is_empty() => self.reopen().await?,
                Some(Err(error)) => return Err(error),
            }
        }
    }

    async fn reopen(&mut self) -> Result<()> {
        let mut options = self.options.clone();
        options.range = Some(GetRange::Bounded(self.range.clone()));
        options.if_match = self.e_tag.clone().or(options.if_match);
        let (store, location) = (&self.store, &self.location);
        let result = store.run("GetObject", || store.store().get_opts(location, options.clone())).await?;
        self.body = result.into_stream();
        Ok(())
    }
}

#[async_trait]
impl<S: RemoteStore> ObjectStore for Retrying<S> {
    async fn put_opts(&self, location: &Path, payload: PutPayload, options: PutOptions) -> Result<PutResult> {
        let put = || self.store().put_opts(location, payload.clone(), options.clone());
        let (result, attempts) = self.attempts("PutObject", put).await;
        match result {
            Err(error) if attempts > 1 && options.mode != PutMode::Overwrite => {
                let unmet = matches!(
                    error,
                    object_store::Error::AlreadyExists { .. } | object_store::Error::Precondition { .. }
                );
                let before = if unmet { self.written_before(location, &payload).await? } else { None };
                before.ok_or(error)
            }
            result => result,
        }
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        Ok(Box::new(PartsUpload::begin(Arc::new(self.clone()), location, options).await?))
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        let get = || self.store().get_opts(location, options.clone());
        let mut result = self.run("GetObject", get).await?;
        result.payload = match result.payload {
            GetResultPayload::Stream(body) if !options.head => {
                let e_tag = result.meta.e_tag.clone();
                let range = result.range.clone();
                GetResultPayload::Stream(self.resuming(location, options, e_tag, range, body))
            }
            payload => payload,
        };
        Ok(result)
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        let store = self.clone();
        locations
            .try_chunks(DELETE_BATCH_MAX)
            .then(move |batch| {
                let store = store.clone();
                async move {
                    let (batch, broken) = match batch {
                        Ok(batch) => (batch, None),
                        Err(error) => (error.0, Some(Err(error.1))),
                    };
                    let mut results = store.delete_batch(batch).await;
                    results.extend(broken);
                    stream::iter(results)
                }
            })
            .flatten()
            .boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        list_all(Arc::new(self.clone()), prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        list_one_level(self, prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.run("CopyObject", || self.store().copy_opts(from, to, options.clone())).await
    }
}

#[async_trait]
impl<S: RemoteStore> RemoteStore for Retrying<S> {
    async fn create_multipart(&self, location: &Path, options: PutMultipartOptions) -> Result<MultipartId> {
        let create = || self.store().create_multipart(location, options.clone());
        self.run("CreateMultipartUpload", create).await
    }

    async fn put_part(
        &self,
        location: &Path,
        id: &MultipartId,
        index: usize,
        payload: PutPayload,
    ) -> Result<PartId> {
        self.run("UploadPart", || self.store().put_part(location, id, index, payload.clone())).await
    }

    async fn complete_multipart(
        &self,
        location: &Path,
        id: &MultipartId,
        parts: Vec<PartId>,
    ) -> Result<PutResult> {
        let complete = || self.store().complete_multipart(location, id, parts.clone());
        let (result, attempts) = self.attempts("CompleteMultipartUpload", complete).await;
        match result {
            Err(error) if attempts > 1 && cause(&error) == Some(Cause::NoUpload) => {
                let head = || self.store().head(location);
                match self.run("HeadObject", head).await {
                    Ok(meta) => Ok(put_result(meta)),
                    Err(_) => Err(error),
                }
            }
            result => result,
        }
    }

    async fn abort_multipart(&self, location: &Path, id: &MultipartId) -> Result<()> {
        self.run("AbortMultipartUpload", || self.store().abort_multipart(location, id)).await
    }

    async fn list_page(
        &self,
        prefix: Option<&Path>,
        listing: Listing,
        page: Option<String>,
    ) -> Result<ListPage> {
        self.run("ListObjectsV2", || self.store().list_page(prefix, listing, page.clone())).await
    }
}

#[cfg(test)]
mod tests;

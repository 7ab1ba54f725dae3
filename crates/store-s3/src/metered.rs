//! Counting requests, bytes and errors.
//!
//! A [`StoreMetrics`] is shared: whoever opens a store keeps one end and reads [`StoreMetrics::snapshot`]. Below
//! [`Retrying`](crate::Retrying), what is counted are the requests that really went out.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::BoxStream;
use futures::{FutureExt, StreamExt};
use object_store::multipart::PartId;
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartId, MultipartUpload, ObjectMeta, ObjectStore,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, RenameOptions, Result, UploadPart,
};

use crate::remote::{ListPage, Listing, RemoteStore};

/// What a request does; the label of the counters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Verb {
    /// A whole object is written.
    Put,
    /// A part of an upload is written.
    PutPart,
    /// An upload in parts is begun, completed or aborted.
    Multipart,
    /// An object or a range of it is read.
    Get,
    /// An object's size and tag are read.
    Head,
    /// A page of names is read (a whole listing where the store has no pages).
    List,
    /// An object is deleted (objects are counted, not requests).
    Delete,
    /// An object is copied or renamed within the store.
    Copy,
}

impl Verb {
    /// All verbs, in the order of [`StoreSnapshot::verbs`].
    pub const ALL: [Verb; 8] = [
        Verb::Put,
        Verb::PutPart,
        Verb::Multipart,
        Verb::Get,
        Verb::Head,
        Verb::List,
        Verb::Delete,
        Verb::Copy,
    ];

    /// The verb as a metric label.
    pub fn label(self) -> &'static str {
        match self {
            Verb::Put => "put",
            Verb::PutPart => "put_part",
            Verb::Multipart => "multipart",
            Verb::Get => "get",
            Verb::Head => "head",
            Verb::List => "list",
            Verb::Delete => "delete",
            Verb::Copy => "copy",
        }
    }
}

#[derive(Debug, Default)]
struct Counters {
    requests: AtomicU64,
    errors: AtomicU64,
    bytes: AtomicU64,
}

/// The counters of one store.
#[derive(Debug, Default)]
pub struct StoreMetrics {
    verbs: [Counters; Verb::ALL.len()],
    retries: AtomicU64,
}

/// The counters of one verb at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VerbSnapshot {
    /// Which verb.
    pub verb: Verb,
    /// Requests that have ended, well or not.
    pub requests: u64,
    /// Requests that failed. An object that is not there is an answer, not an error.
    pub errors: u64,
    /// Bytes of bodies sent or announced.
    pub bytes: u64,
}

/// All counters at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoreSnapshot {
    /// One entry a verb, in the order of [`Verb::ALL`].
    pub verbs: Vec<VerbSnapshot>,
    /// Attempts beyond a request's first.
    pub retries: u64,
}

impl StoreSnapshot {
    /// The counters of `verb`.
    pub fn verb(&self, verb: Verb) -> VerbSnapshot {
        self.verbs[verb as usize]
    }
}

impl StoreMetrics {
    /// The counters now. Each is exact; together they may be torn by what happens meanwhile.
    pub fn snapshot(&self) -> StoreSnapshot {
        let verbs = Verb::ALL
            .iter()
            .zip(&self.verbs)
            .map(|(&verb, counters)| VerbSnapshot {
                verb,
                requests: counters.requests.load(Ordering::Relaxed),
                errors: counters.errors.load(Ordering::Relaxed),
                bytes: counters.bytes.load(Ordering::Relaxed),
            })
            .collect();
        StoreSnapshot { verbs, retries: self.retries.load(Ordering::Relaxed) }
    }

    pub(crate) fn count_retry(&self) {
        self.retries.fetch_add(1, Ordering::Relaxed);
    }

    fn count<T>(&self, verb: Verb, result: &Result<T>, bytes: impl FnOnce(&T) -> u64) {
        let counters = &self.verbs[verb as usize];
        counters.requests.fetch_add(1, Ordering::Relaxed);
        match result {
            Ok(value) => {
                counters.bytes.fetch_add(bytes(value), Ordering::Relaxed);
            }
            Err(object_store::Error::NotFound { .. } | object_store::Error::NotModified { .. }) => {}
            Err(_) => {
                counters.errors.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
}

/// Counts what goes through it.
#[derive(Debug, Clone)]
pub struct Metered<S> {
    store: S,
    metrics: Arc<StoreMetrics>,
}

impl<S: ObjectStore> Metered<S> {
    /// Counts the requests to `store` in `metrics`.
    pub fn new(store: S, metrics: Arc<StoreMetrics>) -> Metered<S> {
        Metered { store, metrics }
    }

    /// The counters.
    pub fn metrics(&self) -> &Arc<StoreMetrics> {
        &self.metrics
    }
}

impl<S: fmt::Display> fmt::Display for Metered<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.store.fmt(f)
    }
}

#[async_trait]
impl<S: ObjectStore> ObjectStore for Metered<S> {
    async fn put_opts(&self, location: &Path, payload: PutPayload, options: PutOptions) -> Result<PutResult> {
        let bytes = payload.content_length() as u64;
        let result = self.store.put_opts(location, payload, options).await;
        self.metrics.count(Verb::Put, &result, |_| bytes);
        result
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        let result = self.store.put_multipart_opts(location, options).await;
        self.metrics.count(Verb::Multipart, &result, |_| 0);
        Ok(Box::new(MeteredUpload { upload: result?, metrics: Arc::clone(&self.metrics) }))
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        let verb = if options.head { Verb::Head } else { Verb::Get };
        let result = self.store.get_opts(location, options).await;
        self.metrics.count(verb, &result, |got| match verb {
            Verb::Head => 0,
            _ => got.range.end - got.range.start,
        });
        result
    }

    async fn get_ranges(&self, location: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        let result = self.store.get_ranges(location, ranges).await;
        self.metrics.count(Verb::Get, &result, |got| got.iter().map(|bytes| bytes.len() as u64).sum());
        result
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        let metrics = Arc::clone(&self.metrics);
        self.store
            .delete_stream(locations)
            .inspect(move |result| metrics.count(Verb::Delete, result, |_| 0))
            .boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.metrics.count(Verb::List, &Ok(()), |()| 0);
        self.store.list(prefix)
    }

    fn list_with_offset(
        &self,
        prefix: Option<&Path>,
        offset: &Path,
    ) -> BoxStream<'static, Result<ObjectMeta>> {
        self.metrics.count(Verb::List, &Ok(()), |()| 0);
        self.store.list_with_offset(prefix, offset)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        let result = self.store.list_with_delimiter(prefix).await;
        self.metrics.count(Verb::List, &result, |_| 0);
        result
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        let result = self.store.copy_opts(from, to, options).await;
        self.metrics.count(Verb::Copy, &result, |()| 0);
        result
    }

    async fn rename_opts(&self, from: &Path, to: &Path, options: RenameOptions) -> Result<()> {
        let result = self.store.rename_opts(from, to, options).await;
        self.metrics.count(Verb::Copy, &result, |()| 0);
        result
    }
}

#[derive(Debug)]
struct MeteredUpload {
    upload: Box<dyn MultipartUpload>,
    metrics: Arc<StoreMetrics>,
}

#[async_trait]
impl MultipartUpload for MeteredUpload {
    fn put_part(&mut self, payload: PutPayload) -> UploadPart {
        let bytes = payload.content_length() as u64;
        let metrics = Arc::clone(&self.metrics);
        self.upload
            .put_part(payload)
            .inspect(move |result| metrics.count(Verb::PutPart, result, |()| bytes))
            .boxed()
    }

    async fn complete(&mut self) -> Result<PutResult> {
        let result = self.upload.complete().await;
        self.metrics.count(Verb::Multipart, &result, |_| 0);
        result
    }

    async fn abort(&mut self) -> Result<()> {
        let result = self.upload.abort().await;
        self.metrics.count(Verb::Multipart, &result, |()| 0);
        result
    }
}

#[async_trait]
impl<S: RemoteStore> RemoteStore for Metered<S> {
    async fn create_multipart(&self, location: &Path, options: PutMultipartOptions) -> Result<MultipartId> {
        let result = self.store.create_multipart(location, options).await;
        self.metrics.count(Verb::Multipart, &result, |_| 0);
        result
    }

    async fn put_part(
        &self,
        location: &Path,
        id: &MultipartId,
        index: usize,
        payload: PutPayload,
    ) -> Result<PartId> {
        let bytes = payload.content_length() as u64;
        let result = self.store.put_part(location, id, index, payload).await;
        self.metrics.count(Verb::PutPart, &result, |_| bytes);
        result
    }

    async fn complete_multipart(
        &self,
        location: &Path,
        id: &MultipartId,
        parts: Vec<PartId>,
    ) -> Result<PutResult> {
        let result = self.store.complete_multipart(location, id, parts).await;
        self.metrics.count(Verb::Multipart, &result, |_| 0);
        result
    }

    async fn abort_multipart(&self, location: &Path, id: &MultipartId) -> Result<()> {
        let result = self.store.abort_multipart(location, id).await;
        self.metrics.count(Verb::Multipart, &result, |()| 0);
        result
    }

    async fn list_page(
        &self,
        prefix: Option<&Path>,
        listing: Listing,
        page: Option<String>,
    ) -> Result<ListPage> {
        let result = self.store.list_page(prefix, listing, page).await;
        self.metrics.count(Verb::List, &result, |_| 0);
        result
    }
}

//! A bound on the requests in flight; more wait in the order in which they came.
//!
//! A request holds its slot until its answer is there, a streamed body until it has been read or dropped. Below
//! [`Retrying`](crate::Retrying), so that the pause before another attempt holds none.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::{self, BoxStream};
use futures::{FutureExt, StreamExt};
use object_store::multipart::PartId;
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetResult, GetResultPayload, ListResult, MultipartId, MultipartUpload,
    ObjectMeta, ObjectStore, PutMultipartOptions, PutOptions, PutPayload, PutResult, RenameOptions, Result,
    UploadPart,
};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::remote::{ListPage, Listing, RemoteStore};
use crate::s3::DELETE_BATCH_MAX;

/// Lets a bounded number of requests through at once.
#[derive(Debug, Clone)]
pub struct Limited<S> {
    store: Arc<S>,
    slots: Arc<Semaphore>,
}

async fn slot(slots: &Arc<Semaphore>) -> OwnedSemaphorePermit {
    Arc::clone(slots).acquire_owned().await.expect("the semaphore is never closed")
}

impl<S: ObjectStore> Limited<S> {
    /// At most `max_in_flight` requests to `store` at once (at least one).
    pub fn new(store: S, max_in_flight: usize) -> Limited<S> {
        let slots = Semaphore::new(max_in_flight.clamp(1, Semaphore::MAX_PERMITS));
        Limited { store: Arc::new(store), slots: Arc::new(slots) }
    }

    /// Keeps the slot of a listing until it ends.
    fn with_slot<T: Send + 'static>(
        &self,
        list: impl FnOnce(&S) -> BoxStream<'static, T> + Send + 'static,
    ) -> BoxStream<'static, T> {
        let (store, slots) = (Arc::clone(&self.store), Arc::clone(&self.slots));
        stream::once(async move {
            let slot = slot(&slots).await;
            list(&store).inspect(move |_| {
                let _held = &slot;
            })
        })
        .flatten()
        .boxed()
    }
}

impl<S: fmt::Display> fmt::Display for Limited<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.store.fmt(f)
    }
}

#[async_trait]
impl<S: ObjectStore> ObjectStore for Limited<S> {
    async fn put_opts(&self, location: &Path, payload: PutPayload, options: PutOptions) -> Result<PutResult> {
        let _slot = slot(&self.slots).await;
        self.store.put_opts(location, payload, options).await
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        let _slot = slot(&self.slots).await;
        let upload = self.store.put_multipart_opts(location, options).await?;
        Ok(Box::new(LimitedUpload { upload, slots: Arc::clone(&self.slots) }))
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        let slot = slot(&self.slots).await;
        let mut result = self.store.get_opts(location, options).await?;
        result.payload = match result.payload {
            GetResultPayload::Stream(body) => {
                let held = move |_: &Result<Bytes>| {
                    let _held = &slot;
                };
                GetResultPayload::Stream(body.inspect(held).boxed())
            }
            payload @ GetResultPayload::File(..) => payload,
        };
        Ok(result)
    }

    async fn get_ranges(&self, location: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        let _slot = slot(&self.slots).await;
        self.store.get_ranges(location, ranges).await
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        let limited = Limited { store: Arc::clone(&self.store), slots: Arc::clone(&self.slots) };
        locations
            .chunks(DELETE_BATCH_MAX)
            .then(move |batch| {
                let limited =
                    Limited { store: Arc::clone(&limited.store), slots: Arc::clone(&limited.slots) };
                async move {
                    let _slot = slot(&limited.slots).await;
                    let results: Vec<_> =
                        limited.store.delete_stream(stream::iter(batch).boxed()).collect().await;
                    stream::iter(results)
                }
            })
            .flatten()
            .boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        let prefix = prefix.cloned();
        self.with_slot(move |store| store.list(prefix.as_ref()))
    }

    fn list_with_offset(
        &self,
        prefix: Option<&Path>,
        offset: &Path,
    ) -> BoxStream<'static, Result<ObjectMeta>> {
        let (prefix, offset) = (prefix.cloned(), offset.clone());
        self.with_slot(move |store| store.list_with_offset(prefix.as_ref(), &offset))
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        let _slot = slot(&self.slots).await;
        self.store.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        let _slot = slot(&self.slots).await;
        self.store.copy_opts(from, to, options).await
    }

    async fn rename_opts(&self, from: &Path, to: &Path, options: RenameOptions) -> Result<()> {
        let _slot = slot(&self.slots).await;
        self.store.rename_opts(from, to, options).await
    }
}

#[derive(Debug)]
struct LimitedUpload {
    upload: Box<dyn MultipartUpload>,
    slots: Arc<Semaphore>,
}

#[async_trait]
impl MultipartUpload for LimitedUpload {
    fn put_part(&mut self, payload: PutPayload) -> UploadPart {
        let slots = Arc::clone(&self.slots);
        let part = self.upload.put_part(payload);
        async move {
            let _slot = slot(&slots).await;
            part.await
        }
        .boxed()
    }

    async fn complete(&mut self) -> Result<PutResult> {
        let _slot = slot(&self.slots).await;
        self.upload.complete().await
    }

    async fn abort(&mut self) -> Result<()> {
        let _slot = slot(&self.slots).await;
        self.upload.abort().await
    }
}

#[async_trait]
impl<S: RemoteStore> RemoteStore for Limited<S> {
    async fn create_multipart(&self, location: &Path, options: PutMultipartOptions) -> Result<MultipartId> {
        let _slot = slot(&self.slots).await;
        self.store.create_multipart(location, options).await
    }

    async fn put_part(
        &self,
        location: &Path,
        id: &MultipartId,
        index: usize,
        payload: PutPayload,
    ) -> Result<PartId> {
        let _slot = slot(&self.slots).await;
        self.store.put_part(location, id, index, payload).await
    }

    async fn complete_multipart(
        &self,
        location: &Path,
        id: &MultipartId,
        parts: Vec<PartId>,
    ) -> Result<PutResult> {
        let _slot = slot(&self.slots).await;
        self.store.complete_multipart(location, id, parts).await
    }

    async fn abort_multipart(&self, location: &Path, id: &MultipartId) -> Result<()> {
        let _slot = slot(&self.slots).await;
        self.store.abort_multipart(location, id).await
    }

    async fn list_page(
        &self,
        prefix: Option<&Path>,
        listing: Listing,
        page: Option<String>,
    ) -> Result<ListPage> {
        let _slot = slot(&self.slots).await;
        self.store.list_page(prefix, listing, page).await
    }
}

//! The requests of a remote store one by one, so that each can be repeated by itself.
//!
//! `ObjectStore` hides single requests behind streams (listing) and numbered calls (the parts of an upload), which
//! cannot be repeated from outside: a second `put_part` is another part. [`Retrying`](crate::Retrying) needs them bare.

use std::sync::Arc;

use async_trait::async_trait;
use futures::stream::{self, BoxStream};
use futures::{FutureExt, StreamExt, TryStreamExt};
use object_store::memory::InMemory;
use object_store::multipart::{MultipartStore, PartId};
use object_store::path::Path;
use object_store::{
    Extensions, ListResult, MultipartId, MultipartUpload, ObjectMeta, ObjectStore, PutMultipartOptions,
    PutPayload, PutResult, Result, UploadPart,
};
use parking_lot::Mutex;

use crate::{Cause, RequestError};

/// What a listing returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Listing {
    /// All objects below the prefix.
    Recursive,
    /// The objects directly below the prefix, and the prefixes directly below it.
    OneLevel,
}

/// One page of a listing, in no particular order.
#[derive(Debug)]
pub struct ListPage {
    /// Objects found.
    pub objects: Vec<ObjectMeta>,
    /// Prefixes found ([`Listing::OneLevel`] only).
    pub common_prefixes: Vec<Path>,
    /// What to ask for the next page with; `None`: this was the last.
    pub next: Option<String>,
}

/// A store whose requests can be made, and repeated, one by one.
#[async_trait]
pub trait RemoteStore: ObjectStore {
    /// Begins an upload in parts.
    async fn create_multipart(&self, location: &Path, options: PutMultipartOptions) -> Result<MultipartId>;

    /// Stores the part with this index (from 0); storing one again replaces it.
    async fn put_part(
        &self,
        location: &Path,
        id: &MultipartId,
        index: usize,
        payload: PutPayload,
    ) -> Result<PartId>;

    /// Makes an object of the parts, in order.
    async fn complete_multipart(
        &self,
        location: &Path,
        id: &MultipartId,
        parts: Vec<PartId>,
    ) -> Result<PutResult>;

    /// Forgets an upload and its parts.
    async fn abort_multipart(&self, location: &Path, id: &MultipartId) -> Result<()>;

    /// One page below `prefix`: the first, or the one that `page` (from [`ListPage::next`]) stands for.
    async fn list_page(
        &self,
        prefix: Option<&Path>,
        listing: Listing,
        page: Option<String>,
    ) -> Result<ListPage>;
}

#[async_trait]
impl<S: RemoteStore> RemoteStore for Arc<S> {
    async fn create_multipart(&self, location: &Path, options: PutMultipartOptions) -> Result<MultipartId> {
        self.as_ref().create_multipart(location, options).await
    }

    async fn put_part(
        &self,
        location: &Path,
        id: &MultipartId,
        index: usize,
        payload: PutPayload,
    ) -> Result<PartId> {
        self.as_ref().put_part(location, id, index, payload).await
    }

    async fn complete_multipart(
        &self,
        location: &Path,
        id: &MultipartId,
        parts: Vec<PartId>,
    ) -> Result<PutResult> {
        self.as_ref().complete_multipart(location, id, parts).await
    }

    async fn abort_multipart(&self, location: &Path, id: &MultipartId) -> Result<()> {
        self.as_ref().abort_multipart(location, id).await
    }

    async fn list_page(
        &self,
        prefix: Option<&Path>,
        listing: Listing,
        page: Option<String>,
    ) -> Result<ListPage> {
        self.as_ref().list_page(prefix, listing, page).await
    }
}

#[async_trait]
impl RemoteStore for InMemory {
    async fn create_multipart(&self, location: &Path, options: PutMultipartOptions) -> Result<MultipartId> {
        MultipartStore::create_multipart_opts(self, location, options).await
    }

    async fn put_part(
        &self,
        location: &Path,
        id: &MultipartId,
        index: usize,
        payload: PutPayload,
    ) -> Result<PartId> {
        MultipartStore::put_part(self, location, id, index, payload).await
    }

    async fn complete_multipart(
        &self,
        location: &Path,
        id: &MultipartId,
        parts: Vec<PartId>,
    ) -> Result<PutResult> {
        MultipartStore::complete_multipart(self, location, id, parts).await.map_err(|error| {
            // The only thing that can be wrong with it here.
            RequestError::new(Cause::NoUpload, "complete", "no such upload").with_source(error).at(location)
        })
    }

    async fn abort_multipart(&self, location: &Path, id: &MultipartId) -> Result<()> {
        MultipartStore::abort_multipart(self, location, id).await
    }

    async fn list_page(
        &self,
        prefix: Option<&Path>,
        listing: Listing,
        _: Option<String>,
    ) -> Result<ListPage> {
        let (objects, common_prefixes) = match listing {
            Listing::Recursive => (self.list(prefix).try_collect().await?, Vec::new()),
            Listing::OneLevel => {
                let ListResult { objects, common_prefixes, .. } = self.list_with_delimiter(prefix).await?;
                (objects, common_prefixes)
            }
        };
        Ok(ListPage { objects, common_prefixes, next: None })
    }
}

/// Everything below `prefix`, page after page.
pub(crate) fn list_all<S: RemoteStore>(
    store: Arc<S>,
    prefix: Option<&Path>,
) -> BoxStream<'static, Result<ObjectMeta>> {
    let prefix = prefix.cloned();
    let first = Some(None);
    stream::try_unfold(first, move |page: Option<Option<String>>| {
        let (store, prefix) = (Arc::clone(&store), prefix.clone());
        async move {
            let Some(page) = page else { return Ok::<_, object_store::Error>(None) };
            let page = store.list_page(prefix.as_ref(), Listing::Recursive, page).await?;
            let following = page.next.map(Some);
            Ok(Some((stream::iter(page.objects.into_iter().map(Ok)), following)))
        }
    })
    .try_flatten()
    .boxed()
}

/// What is directly below `prefix`, all pages.
pub(crate) async fn list_one_level<S: RemoteStore>(store: &S, prefix: Option<&Path>) -> Result<ListResult> {
    let (mut objects, mut common_prefixes) = (Vec::new(), Vec::new());
    let mut next = None;
    loop {
        let page = store.list_page(prefix, Listing::OneLevel, next).await?;
        objects.extend(page.objects);
        common_prefixes.extend(page.common_prefixes);
        next = page.next;
        if next.is_none() {
            return Ok(ListResult { objects, common_prefixes, extensions: Extensions::default() });
        }
    }
}

/// An upload whose parts are sent independently of each other, over any [`RemoteStore`].
#[derive(Debug)]
pub(crate) struct PartsUpload<S> {
    store: Arc<S>,
    location: Path,
    id: MultipartId,
    /// One entry a part begun; `None` until it is stored.
    parts: Arc<Mutex<Vec<Option<PartId>>>>,
}

impl<S: RemoteStore> PartsUpload<S> {
    /// Begins an upload to `location`.
    pub(crate) async fn begin(store: Arc<S>, location: &Path, options: PutMultipartOptions) -> Result<Self> {
        let id = store.create_multipart(location, options).await?;
        Ok(PartsUpload { store, location: location.clone(), id, parts: Arc::default() })
    }
}

#[async_trait]
impl<S: RemoteStore> MultipartUpload for PartsUpload<S> {
    fn put_part(&mut self, payload: PutPayload) -> UploadPart {
        let index = {
            let mut parts = self.parts.lock();
            parts.push(None);
            parts.len() - 1
        };
        let (store, location, id) = (Arc::clone(&self.store), self.location.clone(), self.id.clone());
        let parts = Arc::clone(&self.parts);
        async move {
            let part = store.put_part(&location, &id, index, payload).await?;
            parts.lock()[index] = Some(part);
            Ok(())
        }
        .boxed()
    }

    async fn complete(&mut self) -> Result<PutResult> {
        if self.parts.lock().is_empty() {
            // S3 refuses an upload without parts; an empty object has one empty part.
            self.put_part(PutPayload::default()).await?;
        }
        let parts: Option<Vec<PartId>> = self.parts.lock().iter().cloned().collect();
        let parts = parts.ok_or_else(|| {
            let message = "completed before all its parts were stored";
            RequestError::new(Cause::Invalid, "CompleteMultipartUpload", message).at(&self.location)
        })?;
        self.store.complete_multipart(&self.location, &self.id, parts).await
    }

    async fn abort(&mut self) -> Result<()> {
        self.store.abort_multipart(&self.location, &self.id).await
    }
}

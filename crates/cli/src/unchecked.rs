//! A store that did not answer when its volume was opened: nothing is asked of it before it was seen to be the right one.
//!
//! A directory whose disk is not mounted, or a bucket that was made again, would otherwise take the staged bytes and answer
//! that everything else is missing.

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use futures::stream::{BoxStream, StreamExt, TryStreamExt};
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};
use rfs_core::meta;
use tokio::sync::OnceCell;

use crate::volume;

/// See the module.
#[derive(Debug, Clone)]
pub(crate) struct UncheckedStore {
    inner: Arc<dyn ObjectStore>,
    record: Arc<meta::Volume>,
    checked: Arc<OnceCell<()>>,
}

impl UncheckedStore {
    pub(crate) fn new(inner: Arc<dyn ObjectStore>, record: meta::Volume) -> UncheckedStore {
        UncheckedStore { inner, record: Arc::new(record), checked: Arc::default() }
    }

    /// Looks at the marker until it was seen once.
    async fn check(&self) -> Result<()> {
        let check = || async {
            volume::check_marker(&self.inner, &self.record).await.map_err(|failure| {
                object_store::Error::Generic { store: "rfs", source: failure.message().into() }
            })
        };
        self.checked.get_or_try_init(check).await.copied()
    }
}

impl fmt::Display for UncheckedStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

#[async_trait]
impl ObjectStore for UncheckedStore {
    async fn put_opts(&self, path: &Path, bytes: PutPayload, options: PutOptions) -> Result<PutResult> {
        self.check().await?;
        self.inner.put_opts(path, bytes, options).await
    }

    async fn put_multipart_opts(
        &self,
        path: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.check().await?;
        self.inner.put_multipart_opts(path, options).await
    }

    async fn get_opts(&self, path: &Path, options: GetOptions) -> Result<GetResult> {
        self.check().await?;
        self.inner.get_opts(path, options).await
    }

    async fn get_ranges(&self, path: &Path, ranges: &[std::ops::Range<u64>]) -> Result<Vec<bytes::Bytes>> {
        self.check().await?;
        self.inner.get_ranges(path, ranges).await
    }

    fn delete_stream(&self, paths: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        let store = self.clone();
        let checked = async move {
            store.check().await?;
            Ok::<_, object_store::Error>(store.inner.delete_stream(paths))
        };
        futures::stream::once(checked).try_flatten().boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        let (store, prefix) = (self.clone(), prefix.cloned());
        let checked = async move {
            store.check().await?;
            Ok::<_, object_store::Error>(store.inner.list(prefix.as_ref()))
        };
        futures::stream::once(checked).try_flatten().boxed()
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.check().await?;
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.check().await?;
        self.inner.copy_opts(from, to, options).await
    }
}

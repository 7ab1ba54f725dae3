//! A store that fails on purpose, for tests of everything above it.
//!
//! Faults are drawn from a seeded generator, so that one seed is one sequence (as long as the requests come in one
//! order), and an outage can be switched on and off while requests run.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use bytes::{Bytes, BytesMut};
use futures::stream::{self, BoxStream};
use futures::{FutureExt, StreamExt};
use object_store::multipart::PartId;
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetResult, GetResultPayload, ListResult, MultipartId, MultipartUpload,
    ObjectMeta, ObjectStore, PutMultipartOptions, PutOptions, PutPayload, PutResult, RenameOptions, Result,
    UploadPart,
};
use parking_lot::Mutex;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use tokio::sync::watch;

use crate::remote::{ListPage, Listing, RemoteStore};
use crate::{Cause, RequestError};

/// How often what goes wrong. Chances are from 0 (never) to 1 (always).
#[derive(Debug, Clone, Default, PartialEq)]
pub struct FaultPlan {
    /// The request is refused with 503 and not carried out.
    pub refuse: f64,
    /// The request is carried out, but its answer is lost.
    pub lose_answer: f64,
    /// The request is not carried out and never answered.
    pub hang: f64,
    /// One bit of what is read is wrong.
    pub corrupt_read: f64,
    /// Each request waits up to this long first.
    pub delay_max: Duration,
}

/// Whether the whole store is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Outage {
    /// It is not.
    #[default]
    None,
    /// Connections are refused.
    Refused,
    /// Nothing is answered. Requests that wait when the outage ends fail then.
    Silent,
    /// Every write is refused because the store is full; the rest works.
    Full,
}

/// Fails on purpose in front of another store. Clones share plan, outage and generator.
#[derive(Debug, Clone)]
pub struct FaultStore<S> {
    store: S,
    faults: Arc<Faults>,
}

#[derive(Debug)]
struct Faults {
    plan: Mutex<FaultPlan>,
    rng: Mutex<SmallRng>,
    outage: watch::Sender<Outage>,
    injected: AtomicU64,
}

/// What a request does, as far as a fault cares.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Access {
    Read,
    Write,
}

impl<S: ObjectStore> FaultStore<S> {
    /// In front of `store`, with the faults that `plan` and `seed` give.
    pub fn new(store: S, seed: u64, plan: FaultPlan) -> FaultStore<S> {
        let faults = Faults {
            plan: Mutex::new(plan),
            rng: Mutex::new(SmallRng::seed_from_u64(seed)),
            outage: watch::Sender::new(Outage::None),
            injected: AtomicU64::new(0),
        };
        FaultStore { store, faults: Arc::new(faults) }
    }

    /// Changes the faults from now on.
    pub fn set_plan(&self, plan: FaultPlan) {
        *self.faults.plan.lock() = plan;
    }

    /// Begins or ends an outage.
    pub fn set_outage(&self, outage: Outage) {
        self.faults.outage.send_replace(outage);
    }

    /// Faults injected so far.
    pub fn injected(&self) -> u64 {
        self.faults.injected.load(Ordering::Relaxed)
    }
}

impl Faults {
    fn chance(&self, of: impl Fn(&FaultPlan) -> f64) -> bool {
        let chance = of(&self.plan.lock()).clamp(0.0, 1.0);
        // The generator moves on only for faults that are possible, so that a plan's draws are its own.
        let hit = chance > 0.0 && self.rng.lock().random_bool(chance);
        if hit {
            self.injected.fetch_add(1, Ordering::Relaxed);
        }
        hit
    }

    fn error(cause: Cause, message: &str) -> object_store::Error {
        RequestError::new(cause, "injected", message).at("")
    }

    /// What happens before a request: nothing, a delay, or its failure.
    async fn before(&self, access: Access) -> Result<()> {
        let delay_max = self.plan.lock().delay_max;
        if !delay_max.is_zero() {
            let share = self.rng.lock().random_range(0.0..=1.0);
            tokio::time::sleep(delay_max.mul_f64(share)).await;
        }
        let outage = *self.outage.borrow();
        match outage {
            Outage::Refused => return Err(Self::error(Cause::Connection, "connection refused")),
            Outage::Silent => {
                let mut changes = self.outage.subscribe();
                // The sender lives as long as `self`.
                let _ = changes.wait_for(|outage| *outage != Outage::Silent).await;
                return Err(Self::error(Cause::Connection, "connection reset"));
            }
            Outage::Full if access == Access::Write => return Err(Self::error(Cause::Full, "no room left")),
            Outage::Full | Outage::None => {}
        }
        if self.chance(|plan| plan.hang) {
            return std::future::pending().await;
        }
        if self.chance(|plan| plan.refuse) {
            return Err(Self::error(Cause::Throttled, "SlowDown"));
        }
        Ok(())
    }

    /// What happens to an answer.
    fn after<T>(&self, result: Result<T>) -> Result<T> {
        match result {
            Ok(_) if self.chance(|plan| plan.lose_answer) => {
                Err(Self::error(Cause::Connection, "the answer was lost"))
            }
            result => result,
        }
    }

    fn maybe_corrupt(&self, bytes: Bytes) -> Bytes {
        if bytes.is_empty() || !self.chance(|plan| plan.corrupt_read) {
            return bytes;
        }
        let (at, bit) = {
            let mut rng = self.rng.lock();
            (rng.random_range(0..bytes.len()), rng.random_range(0..8))
        };
        let mut wrong = BytesMut::from(&bytes[..]);
        wrong[at] ^= 1 << bit;
        wrong.freeze()
    }
}

impl<S: fmt::Display> fmt::Display for FaultStore<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} with faults", self.store)
    }
}

#[async_trait]
impl<S: ObjectStore + Clone> ObjectStore for FaultStore<S> {
    async fn put_opts(&self, location: &Path, payload: PutPayload, options: PutOptions) -> Result<PutResult> {
        self.faults.before(Access::Write).await?;
        self.faults.after(self.store.put_opts(location, payload, options).await)
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.faults.before(Access::Write).await?;
        let upload = self.faults.after(self.store.put_multipart_opts(location, options).await)?;
        Ok(Box::new(FaultUpload { upload, faults: Arc::clone(&self.faults) }))
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        self.faults.before(Access::Read).await?;
        let mut result = self.faults.after(self.store.get_opts(location, options).await)?;
        if let GetResultPayload::Stream(body) = result.payload {
            let faults = Arc::clone(&self.faults);
            let body = body.map(move |bytes| bytes.map(|bytes| faults.maybe_corrupt(bytes)));
            result.payload = GetResultPayload::Stream(body.boxed());
        }
        Ok(result)
    }

    async fn get_ranges(&self, location: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        self.faults.before(Access::Read).await?;
        let result = self.faults.after(self.store.get_ranges(location, ranges).await)?;
        Ok(result.into_iter().map(|bytes| self.faults.maybe_corrupt(bytes)).collect())
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        let this = self.clone();
        locations
            .then(move |location| {
                let this = this.clone();
                async move {
                    this.faults.before(Access::Write).await?;
                    let one = stream::once(async { location }).boxed();
                    let deleted = this.store.delete_stream(one).next().await;
                    this.faults.after(deleted.unwrap_or_else(|| {
                        Err(Faults::error(Cause::Invalid, "the store did not tell of the deletion"))
                    }))
                }
            })
            .boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        let (this, prefix) = (self.clone(), prefix.cloned());
        stream::once(async move {
            match this.faults.before(Access::Read).await {
                Ok(()) => this.store.list(prefix.as_ref()),
                Err(error) => stream::once(async { Err(error) }).boxed(),
            }
        })
        .flatten()
        .boxed()
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.faults.before(Access::Read).await?;
        self.faults.after(self.store.list_with_delimiter(prefix).await)
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.faults.before(Access::Write).await?;
        self.faults.after(self.store.copy_opts(from, to, options).await)
    }

    async fn rename_opts(&self, from: &Path, to: &Path, options: RenameOptions) -> Result<()> {
        self.faults.before(Access::Write).await?;
        self.faults.after(self.store.rename_opts(from, to, options).await)
    }
}

#[derive(Debug)]
struct FaultUpload {
    upload: Box<dyn MultipartUpload>,
    faults: Arc<Faults>,
}

#[async_trait]
impl MultipartUpload for FaultUpload {
    fn put_part(&mut self, payload: PutPayload) -> UploadPart {
        let faults = Arc::clone(&self.faults);
        let part = self.upload.put_part(payload);
        async move {
            faults.before(Access::Write).await?;
            faults.after(part.await)
        }
        .boxed()
    }

    async fn complete(&mut self) -> Result<PutResult> {
        self.faults.before(Access::Write).await?;
        self.faults.after(self.upload.complete().await)
    }

    async fn abort(&mut self) -> Result<()> {
        self.faults.before(Access::Write).await?;
        self.faults.after(self.upload.abort().await)
    }
}

#[async_trait]
impl<S: RemoteStore + Clone> RemoteStore for FaultStore<S> {
    async fn create_multipart(&self, location: &Path, options: PutMultipartOptions) -> Result<MultipartId> {
        self.faults.before(Access::Write).await?;
        self.faults.after(self.store.create_multipart(location, options).await)
    }

    async fn put_part(
        &self,
        location: &Path,
        id: &MultipartId,
        index: usize,
        payload: PutPayload,
    ) -> Result<PartId> {
        self.faults.before(Access::Write).await?;
        self.faults.after(self.store.put_part(location, id, index, payload).await)
    }

    async fn complete_multipart(
        &self,
        location: &Path,
        id: &MultipartId,
        parts: Vec<PartId>,
    ) -> Result<PutResult> {
        self.faults.before(Access::Write).await?;
        self.faults.after(self.store.complete_multipart(location, id, parts).await)
    }

    async fn abort_multipart(&self, location: &Path, id: &MultipartId) -> Result<()> {
        self.faults.before(Access::Write).await?;
        self.faults.after(self.store.abort_multipart(location, id).await)
    }

    async fn list_page(
        &self,
        prefix: Option<&Path>,
        listing: Listing,
        page: Option<String>,
    ) -> Result<ListPage> {
        self.faults.before(Access::Read).await?;
        self.faults.after(self.store.list_page(prefix, listing, page).await)
    }
}

//! The filesystem as a whole, over a metadata store and an object store in memory.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures::StreamExt as _;
use futures::stream::BoxStream;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    PutMultipartOptions, PutOptions, PutPayload, PutResult,
};
use rfs_kv::{FaultKv, Faults, Kv, MemKv};

use super::*;
use crate::data::{Budget, DataOptions, OnLost, Resumed, StagingOptions, overlay};
use crate::meta::{FormatOptions, OpenOptions, VolumeLimits};
use crate::types::{
    Attr, CHUNK_BYTES, Caller, ChunkIndex, Clock, Ino, Kind, ManualClock, Name, SetAttr, Timestamp,
};

mod check;
mod concurrent;
mod differential;
mod early;
mod faults;
mod gc;
mod names;
mod readers;
mod staged;
mod unanswered;

const ROOT: Caller = Caller { uid: 0, gid: 0, pid: 1 };

/// An object store in memory that can be down.
#[derive(Debug, Default)]
struct Store {
    inner: InMemory,
    down: AtomicBool,
    /// Every so-manieth request fails; 0: none.
    flaky: AtomicU64,
    /// Requests panic.
    panics: Panics,
    requests: AtomicU64,
    /// What a GET takes.
    latency_millis: AtomicU64,
}

impl fmt::Display for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("test store")
    }
}

/// Where a request panics.
#[derive(Debug, Default)]
struct Panics {
    everywhere: AtomicBool,
    /// In the filesystem's own tasks; what a test calls itself goes on.
    in_tasks: AtomicBool,
}

impl Panics {
    fn meet(&self, text: &str) {
        let in_tasks = self.in_tasks.load(Ordering::SeqCst) && tokio::task::try_id().is_some();
        assert!(!in_tasks && !self.everywhere.load(Ordering::SeqCst), "{text}");
    }
}

impl Store {
    fn admit(&self) -> object_store::Result<()> {
        self.panics.meet("a mistake in a store");
        let request = self.requests.fetch_add(1, Ordering::SeqCst);
        let flaky = self.flaky.load(Ordering::SeqCst);
        if self.down.load(Ordering::SeqCst) || (flaky > 0 && request.is_multiple_of(flaky)) {
            return Err(object_store::Error::Generic { store: "test", source: "down".into() });
        }
        Ok(())
    }

    async fn objects(&self) -> usize {
        self.inner.list(None).count().await
    }
}

#[async_trait]
impl ObjectStore for Store {
    async fn put_opts(
        &self,
        path: &Path,
        bytes: PutPayload,
        options: PutOptions,
    ) -> object_store::Result<PutResult> {
        self.admit()?;
        self.inner.put_opts(path, bytes, options).await
    }

    async fn put_multipart_opts(
        &self,
        path: &Path,
        options: PutMultipartOptions,
    ) -> object_store::Result<Box<dyn MultipartUpload>> {
        self.admit()?;
        self.inner.put_multipart_opts(path, options).await
    }

    async fn get_opts(&self, path: &Path, options: GetOptions) -> object_store::Result<GetResult> {
        self.admit()?;
        let latency = self.latency_millis.load(Ordering::SeqCst);
        if latency > 0 {
            tokio::time::sleep(Duration::from_millis(latency)).await;
        }
        self.inner.get_opts(path, options).await
    }

    fn delete_stream(
        &self,
        paths: BoxStream<'static, object_store::Result<Path>>,
    ) -> BoxStream<'static, object_store::Result<Path>> {
        self.inner.delete_stream(paths)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, object_store::Result<ObjectMeta>> {
        self.inner.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> object_store::Result<ListResult> {
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> object_store::Result<()> {
        self.inner.copy_opts(from, to, options).await
    }
}

/// A metadata store in which a transaction can be made to panic.
struct Mined {
    inner: Arc<dyn Kv>,
    panics: Arc<Panics>,
}

#[async_trait]
impl Kv for Mined {
    fn limits(&self) -> rfs_kv::Limits {
        self.inner.limits()
    }

    async fn begin(&self) -> rfs_kv::Result<Arc<dyn rfs_kv::Txn>> {
        self.panics.meet("a mistake in a transaction");
        self.inner.begin().await
    }

    async fn sync(&self) -> rfs_kv::Result<()> {
        self.inner.sync().await
    }

    async fn watch(&self, key: &[u8]) -> rfs_kv::Result<rfs_kv::Watch> {
        self.inner.watch(key).await
    }

    async fn close(&self) -> rfs_kv::Result<()> {
        self.inner.close().await
    }
}

/// What outlives a mount.
struct World {
    kv: MemKv,
    kv_panics: Arc<Panics>,
    cluster: Arc<parking_lot::Mutex<unanswered::Cluster>>,
    faults: Faults,
    store: Arc<Store>,
    clock: Arc<ManualClock>,
    memory_bytes: u64,
    io_timeout: Duration,
    staging: Option<tempfile::TempDir>,
    options: VfsOptions,
}

impl World {
    async fn new() -> World {
        World::with_limits(VolumeLimits::default()).await
    }

    async fn with_limits(limits: VolumeLimits) -> World {
        let kv = MemKv::new();
        let clock = Arc::new(ManualClock::new(Timestamp { secs: 1_000_000, nanos: 0 }));
        let options = FormatOptions { limits, ..FormatOptions::default() };
        Meta::format(&kv, &options, clock.now()).await.unwrap();
        World {
            kv,
            kv_panics: Arc::default(),
            cluster: Arc::default(),
            faults: Faults::NONE,
            store: Arc::default(),
            clock,
            memory_bytes: 64 << 20,
            io_timeout: Duration::from_secs(30),
            staging: None,
            options: VfsOptions {
                flush_after: Duration::from_hours(1),
                gc_interval: Duration::from_hours(1),
                ..VfsOptions::default()
            },
        }
    }

    async fn mount(&self) -> Arc<Vfs> {
        let (vfs, resumed) = self.mount_with(OnLost::Refuse).await;
        assert_eq!(resumed.lost, []);
        vfs
    }

    async fn mount_with(&self, on_lost: OnLost) -> (Arc<Vfs>, Resumed) {
        let kv: Arc<dyn Kv> = Arc::new(self.kv.reopen());
        let kv = if self.faults == Faults::NONE { kv } else { Arc::new(FaultKv::new(kv, 1, self.faults)) };
        let kv: Arc<dyn Kv> = Arc::new(Mined { inner: kv, panics: Arc::clone(&self.kv_panics) });
        let kv: Arc<dyn Kv> = Arc::new(unanswered::Clustered::new(kv, Arc::clone(&self.cluster)));
        let clock = Arc::clone(&self.clock);
        let meta = Meta::open(kv, clock, &OpenOptions::default()).await.unwrap();
        let memory = Budget::new(self.memory_bytes);
        let session = meta.session_id().unwrap();
        let mut options = DataOptions::new(session, uuid::Uuid::nil(), Arc::clone(&memory));
        options.io_timeout = Some(self.io_timeout);
        options.block_bytes = meta.opened_volume().block_bytes;
        options.staging =
            self.staging.as_ref().map(|dir| StagingOptions::new(dir.path().to_owned(), 1 << 30));
        let data = loop {
            match Data::open(options.clone(), Arc::clone(&self.store) as Arc<dyn ObjectStore>).await {
                // What is left of the mount before lets go soon.
                Err(error) if error.kind == ErrorKind::Busy => tokio::task::yield_now().await,
                opened => break opened.unwrap(),
            }
        };
        let resumed = staging::resume(&meta, &data, on_lost).await.unwrap();
        (Vfs::mount(Arc::new(meta), Arc::new(data), memory, self.options.clone()), resumed)
    }

    fn cluster(&self, fares: unanswered::Cluster) {
        *self.cluster.lock() = fares;
    }

    /// Journals that are left.
    fn journals(&self) -> Vec<std::path::PathBuf> {
        let dir = self.staging.as_ref().unwrap().path().join(uuid::Uuid::nil().to_string());
        let files = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
        files.filter(|path| path.file_name().unwrap() != "lock").collect()
    }

    fn later(&self, secs: i64) -> Timestamp {
        let now = self.clock.now();
        let later = Timestamp { secs: now.secs + secs, ..now };
        self.clock.set(later);
        later
    }
}

/// Ends a mount as a crash does: nothing more is stored.
async fn crash(vfs: Arc<Vfs>) {
    vfs.tasks.end().await;
}

async fn unmount(vfs: Arc<Vfs>) {
    let report = vfs.shutdown().await;
    assert!(report.unsaved.is_empty() && report.errors.is_empty(), "{report:?}");
}

fn name(text: &str) -> Name {
    Name::new(text.as_bytes().to_vec()).unwrap()
}

fn flags(access: AccessMode) -> OpenFlags {
    OpenFlags::new(access)
}

fn node(name: &Name) -> NewNode<'_> {
    NewNode { caller: &ROOT, parent: Ino::ROOT, name, mode: 0o644 }
}

async fn create(vfs: &Vfs, text: &str) -> (Ino, Fh) {
    let (attr, opened) = vfs.create(node(&name(text)), flags(AccessMode::ReadWrite)).await.unwrap();
    (attr.ino, opened.fh)
}

async fn open(vfs: &Vfs, text: &str) -> (Ino, Fh) {
    let attr = vfs.lookup(Ino::ROOT, &name(text)).await.unwrap();
    let opened = vfs.open(attr.ino, flags(AccessMode::ReadWrite)).await.unwrap();
    (attr.ino, opened.fh)
}

async fn write(vfs: &Vfs, (ino, fh): (Ino, Fh), offset: u64, bytes: impl Into<Bytes>) -> Result<u32> {
    let origin = WriteOrigin::Process;
    vfs.write(WriteArgs { ino, fh, offset, bytes: bytes.into(), origin, kill_suid_sgid: false }).await
}

async fn read(vfs: &Vfs, (ino, fh): (Ino, Fh), offset: u64, len: u32) -> Bytes {
    vfs.read(ino, fh, offset, len).await.unwrap()
}

async fn fsync(vfs: &Vfs, (ino, fh): (Ino, Fh)) -> Result<()> {
    vfs.fsync(ino, Some(fh), FsyncMode::All).await
}

fn size(size: u64) -> SetAttr {
    SetAttr { size: Some(size), ..SetAttr::default() }
}

/// Numbers that look random.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, below: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z ^ (z >> 31)) % below
    }

    fn bytes(&mut self, len: u64) -> Vec<u8> {
        let mut bytes = Vec::new();
        while (bytes.len() as u64) < len {
            bytes.extend_from_slice(&self.roll(u64::MAX).to_le_bytes());
        }
        bytes.truncate(usize::try_from(len).unwrap());
        bytes
    }
}

/// What the metadata counts is what is there.
async fn check_accounts(vfs: &Vfs, inos: &[Ino]) {
    let mut total = 0;
    for ino in inos {
        let page = vfs.meta.chunks(*ino, ChunkIndex(0), 1000).await.unwrap();
        assert!(!page.more);
        let length = vfs.getattr(*ino).await.unwrap().size;
        let bytes: u64 = page.items.iter().map(|(_, groups)| overlay(groups).data_bytes()).sum();
        for (index, groups) in &page.items {
            let end = overlay(groups).extents().last().map_or(0, |extent| u64::from(extent.end()));
            assert!(end == 0 || index.start() + end <= length, "data beyond the end");
        }
        assert_eq!(vfs.getattr(*ino).await.unwrap().allocated, bytes, "inode {ino}");
        total += bytes;
    }
    assert_eq!(vfs.meta.statfs().await.unwrap().used_bytes, total);
    assert_eq!(vfs.reserved_bytes.load(Ordering::SeqCst), 0);
}

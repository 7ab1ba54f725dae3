//! The data layer as a whole, over stores that count, fail, hang and lie.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize};

use async_trait::async_trait;
use futures::stream::BoxStream;
use futures::{FutureExt, StreamExt};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStoreExt,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, UploadPart,
};
use proptest::prelude::*;
use xxhash_rust::xxh3::xxh3_64;

use super::*;
use crate::types::{SessionId, Slice};

mod ahead;
mod staging;

/// A store in memory whose requests are counted and can fail, be full, hang, or come back damaged.
#[derive(Debug, Default)]
struct TestStore {
    inner: InMemory,
    puts: AtomicUsize,
    uploads: AtomicUsize,
    parts: Arc<AtomicUsize>,
    gets: AtomicUsize,
    /// Requests that fail before one works again.
    failing: Arc<AtomicUsize>,
    full: AtomicBool,
    hanging: AtomicBool,
    /// GETs whose bytes come back damaged.
    damaging: AtomicUsize,
    /// Bytes of the PUTs that are under way.
    sending: AtomicUsize,
}

/// A PUT that is under way.
struct Sending<'a>(&'a AtomicUsize, usize);

impl<'a> Sending<'a> {
    fn new(counter: &'a AtomicUsize, bytes: usize) -> Sending<'a> {
        counter.fetch_add(bytes, Ordering::SeqCst);
        Sending(counter, bytes)
    }
}

impl Drop for Sending<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(self.1, Ordering::SeqCst);
    }
}

impl fmt::Display for TestStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("test store")
    }
}

fn take_one(counter: &AtomicUsize) -> bool {
    counter.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_ok()
}

fn weather() -> object_store::Error {
    object_store::Error::Generic { store: "test", source: "weather".into() }
}

impl TestStore {
    async fn admit(&self) -> object_store::Result<()> {
        if self.hanging.load(Ordering::SeqCst) {
            std::future::pending::<()>().await;
        }
        if self.full.load(Ordering::SeqCst) {
            let full = std::io::Error::from(std::io::ErrorKind::StorageFull);
            return Err(object_store::Error::Generic { store: "test", source: Box::new(full) });
        }
        if take_one(&self.failing) { Err(weather()) } else { Ok(()) }
    }

    fn count(counter: &AtomicUsize) -> usize {
        counter.load(Ordering::SeqCst)
    }

    async fn damage(&self, pack: PackId, change: impl FnOnce(&mut Vec<u8>)) {
        let path = objects::path_of(pack);
        let mut bytes = self.inner.get(&path).await.unwrap().bytes().await.unwrap().to_vec();
        change(&mut bytes);
        self.inner.put(&path, bytes.into()).await.unwrap();
    }
}

#[async_trait]
impl ObjectStore for TestStore {
    async fn put_opts(
        &self,
        path: &Path,
        bytes: PutPayload,
        options: PutOptions,
    ) -> object_store::Result<PutResult> {
        self.puts.fetch_add(1, Ordering::SeqCst);
        let _sending = Sending::new(&self.sending, bytes.content_length());
        self.admit().await?;
        self.inner.put_opts(path, bytes, options).await
    }

    async fn put_multipart_opts(
        &self,
        path: &Path,
        options: PutMultipartOptions,
    ) -> object_store::Result<Box<dyn MultipartUpload>> {
        self.uploads.fetch_add(1, Ordering::SeqCst);
        self.admit().await?;
        let inner = self.inner.put_multipart_opts(path, options).await?;
        Ok(Box::new(TestUpload { inner, parts: Arc::clone(&self.parts), failing: Arc::clone(&self.failing) }))
    }

    async fn get_opts(&self, path: &Path, options: GetOptions) -> object_store::Result<GetResult> {
        if options.head {
            return self.inner.get_opts(path, options).await;
        }
        self.gets.fetch_add(1, Ordering::SeqCst);
        self.admit().await?;
        let mut result = self.inner.get_opts(path, options).await?;
        if take_one(&self.damaging) {
            let (meta, range, attributes) =
                (result.meta.clone(), result.range.clone(), result.attributes.clone());
            let mut bytes = result.bytes().await?.to_vec();
            bytes[0] ^= 1;
            let stream = futures::stream::iter([Ok(Bytes::from(bytes))]).boxed();
            let payload = object_store::GetResultPayload::Stream(stream);
            result = GetResult {
                payload,
                meta,
                range,
                attributes,
                extensions: object_store::Extensions::default(),
            };
        }
        Ok(result)
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

#[derive(Debug)]
struct TestUpload {
    inner: Box<dyn MultipartUpload>,
    parts: Arc<AtomicUsize>,
    failing: Arc<AtomicUsize>,
}

#[async_trait]
impl MultipartUpload for TestUpload {
    fn put_part(&mut self, bytes: PutPayload) -> UploadPart {
        self.parts.fetch_add(1, Ordering::SeqCst);
        if take_one(&self.failing) {
            return Box::pin(async { Err(weather()) });
        }
        self.inner.put_part(bytes)
    }

    async fn complete(&mut self) -> object_store::Result<PutResult> {
        self.inner.complete().await
    }

    async fn abort(&mut self) -> object_store::Result<()> {
        self.inner.abort().await
    }
}

const VOLUME: Uuid = Uuid::from_u128(5);

fn options() -> DataOptions {
    DataOptions::new(SessionId(7), VOLUME, Budget::new(256 << 20))
}

async fn open(options: DataOptions) -> (Arc<TestStore>, Data) {
    let store = Arc::new(TestStore::default());
    let data = Data::open(options, Arc::clone(&store) as Arc<dyn ObjectStore>).await.unwrap();
    (store, data)
}

/// Another mount of the same volume, without anything in memory.
async fn reopen(store: &Arc<TestStore>, mut options: DataOptions) -> Data {
    options.session = SessionId(8);
    Data::open(options, Arc::clone(store) as Arc<dyn ObjectStore>).await.unwrap()
}

/// Bytes that LZ4 cannot shrink.
fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    for (at, word) in bytes.chunks_mut(8).enumerate() {
        let hash = xxh3_64(&(seed << 32 | at as u64).to_le_bytes()).to_le_bytes();
        word.copy_from_slice(&hash[..word.len()]);
    }
    bytes
}

/// Bytes that LZ4 shrinks.
fn text(seed: u64, len: usize) -> Vec<u8> {
    format!("line {seed} of a text that repeats itself, ")
        .into_bytes()
        .into_iter()
        .cycle()
        .take(len)
        .collect()
}

fn run_bytes(ino: u64, bytes: Vec<u8>) -> RunBytes {
    RunBytes { ino: Ino(ino), chunk: ChunkIndex(0), offset: 0, bytes: vec![bytes.into()] }
}

async fn append_one(data: &Data, lane: Lane, bytes: &[u8]) -> (Arc<PackedRun>, PackTicket) {
    let appended = data.append(lane, vec![run_bytes(1, bytes.to_vec())]).await.unwrap().pop().unwrap();
    (Arc::new(appended.run), appended.pack)
}

async fn read_all(data: &Data, run: &Arc<PackedRun>) -> Result<Bytes> {
    data.read(run, 0, run.plain_len, ReadHint::Normal).await
}

#[tokio::test]
async fn what_is_appended_is_read_from_memory_and_later_from_the_store() {
    let (store, data) = open(options()).await;
    let contents: Vec<Vec<u8>> =
        vec![text(1, 5), noise(2, 128 << 10), text(3, 300_001), noise(4, 1_000_000), text(5, 16 << 20)];
    let runs = contents.iter().zip(1..).map(|(bytes, ino)| run_bytes(ino, bytes.clone())).collect();
    let appended = data.append(Lane::Small, runs).await.unwrap();
    for (appended, bytes) in appended.iter().zip(&contents) {
        let run = Arc::new(appended.run.clone());
        assert_eq!(read_all(&data, &run).await.unwrap(), bytes);
        assert!(!appended.pack.is_stored());
    }
    assert_eq!(TestStore::count(&store.gets), 0);
    data.seal(Lane::Small);
    let stored = appended[0].pack.stored().await.unwrap();
    assert_eq!(data.uncommitted(), [stored.pack]);
    data.committed(stored.pack);
    assert_eq!(data.uncommitted(), []);
    assert_eq!(data.options.memory.used_bytes(), 0);

    let listed: Vec<_> = data.list_packs().map(Result::unwrap).collect().await;
    assert_eq!(listed, [stored]);
    let footer = data.pack_footer(stored.pack).await.unwrap();
    assert_eq!(footer.iter().map(|entry| entry.ino.0).collect::<Vec<_>>(), [1, 2, 3, 4, 5]);
    assert!(footer.iter().zip(&appended).all(|(entry, appended)| entry.run == appended.run));

    let fresh = reopen(&store, options()).await;
    for (appended, bytes) in appended.iter().zip(&contents) {
        fresh.verify(&appended.run).await.unwrap();
        let run = Arc::new(appended.run.clone());
        assert_eq!(read_all(&fresh, &run).await.unwrap(), bytes);
    }
    let gets = TestStore::count(&store.gets);
    let run = Arc::new(appended[2].run.clone());
    let part = fresh.read(&run, 131_000, 200, ReadHint::Normal).await.unwrap();
    assert_eq!(part, &contents[2][131_000..131_200], "across two blocks");
    assert_eq!(TestStore::count(&store.gets), gets, "from the cache");
    fresh.delete_packs(&[stored.pack, PackId(99)]).await.unwrap();
    assert_eq!(fresh.list_packs().count().await, 0);
    data.close().await.unwrap();
    assert_eq!(
        data.append(Lane::Small, vec![run_bytes(1, vec![1])]).await.unwrap_err().kind,
        ErrorKind::ReadOnly
    );
}

#[tokio::test]
async fn thousands_of_small_files_are_a_handful_of_objects() {
    let (store, data) = open(options()).await;
    let runs = (0..2048).map(|ino| run_bytes(ino, text(ino, 64 << 10))).collect();
    let appended = data.append(Lane::Small, runs).await.unwrap();
    data.seal_all();
    for appended in &appended {
        appended.pack.stored().await.unwrap();
    }
    let objects = TestStore::count(&store.puts) + TestStore::count(&store.uploads);
    assert!(objects <= 3, "{objects} objects");
    assert_eq!(TestStore::count(&store.parts), 0);

    // Neighbours come back together.
    let fresh = reopen(&store, options()).await;
    let ranges: Vec<ReadRange> = appended
        .iter()
        .map(|appended| ReadRange { run: Arc::new(appended.run.clone()), offset_in_run: 0, len: 64 << 10 })
        .collect();
    let read = fresh.read_many(&ranges, ReadHint::Normal).await.unwrap();
    for (pieces, ino) in read.into_iter().zip(0..) {
        assert_eq!(pieces.into_bytes(), text(ino, 64 << 10));
    }
    assert!(TestStore::count(&store.gets) <= 3, "{} GETs", TestStore::count(&store.gets));
    data.close().await.unwrap();
}

#[tokio::test]
async fn a_pack_of_a_large_file_is_sent_when_it_holds_enough() {
    let mut options = options();
    options.idle_seal = Duration::from_hours(1);
    let (store, data) = open(options).await;
    let (lane, other) = (Lane::Stream(Ino(1)), Lane::Stream(Ino(2)));
    let (_, first) = append_one(&data, lane, &noise(1, 3 << 20)).await;
    let (_, few) = append_one(&data, other, &noise(2, 3 << 20)).await;
    let (_, shared) = append_one(&data, Lane::Small, &noise(3, 5 << 20)).await;
    let (_, second) = append_one(&data, lane, &noise(4, 1 << 20)).await;
    assert_eq!(first.pack(), second.pack());
    second.stored().await.unwrap();
    let (_, next) = append_one(&data, lane, &noise(5, 8 << 20)).await;
    next.stored().await.unwrap();
    assert_ne!(next.pack(), second.pack());
    assert!(!few.is_stored() && !shared.is_stored());
    assert_eq!(TestStore::count(&store.puts), 2);
    data.close().await.unwrap();
}

#[tokio::test]
async fn incompressible_small_files_fill_packs_of_parts() {
    let mut options = options();
    options.pack_bytes = 8 << 20;
    options.part_bytes = 1 << 20;
    let (store, data) = open(options).await;
    for batch in 0..8 {
        let runs = (0..256).map(|ino| run_bytes(ino, noise(batch * 256 + ino, 8 << 10))).collect();
        data.append(Lane::Small, runs).await.unwrap();
    }
    data.close().await.unwrap();
    assert_eq!(TestStore::count(&store.uploads) + TestStore::count(&store.puts), 3);
    assert!(TestStore::count(&store.parts) <= 17);
    let sizes: Vec<u64> = data.list_packs().map(|pack| pack.unwrap().stored_bytes).collect().await;
    assert!(sizes.iter().all(|bytes| *bytes <= 8 << 20));
}

#[tokio::test]
async fn a_stream_is_uploaded_while_it_is_written() {
    let mut options = options();
    options.part_bytes = 1 << 20;
    options.pack_bytes = 8 << 20;
    let (store, data) = open(options.clone()).await;
    let lane = Lane::Stream(Ino(4));
    let (first, ticket) = append_one(&data, lane, &noise(1, 3 << 20)).await;
    while TestStore::count(&store.parts) < 3 {
        tokio::task::yield_now().await;
    }
    assert!(!ticket.is_stored());
    let (second, same) = append_one(&data, lane, &noise(2, 3 << 20)).await;
    assert_eq!((same.pack(), first.pack), (ticket.pack(), second.pack));
    let (third, next) = append_one(&data, lane, &noise(3, 3 << 20)).await;
    assert_ne!(next.pack(), ticket.pack(), "a run never spans packs");
    ticket.stored().await.unwrap();
    let (other, other_ticket) = append_one(&data, Lane::Stream(Ino(5)), &noise(4, 100)).await;
    assert_ne!(other_ticket.pack(), next.pack(), "lanes do not share packs");
    data.close().await.unwrap();
    let fresh = reopen(&store, options).await;
    for (run, seed) in [(first, 1), (second, 2), (third, 3)] {
        assert_eq!(read_all(&fresh, &run).await.unwrap(), noise(seed, 3 << 20));
    }
    assert_eq!(read_all(&fresh, &other).await.unwrap(), noise(4, 100));
}

#[tokio::test(start_paused = true)]
async fn a_forgotten_pack_is_closed_and_stored() {
    let (_, data) = open(options()).await;
    let (_, ticket) = append_one(&data, Lane::Small, b"nobody seals this").await;
    let began = tokio::time::Instant::now();
    ticket.stored().await.unwrap();
    assert!(began.elapsed() >= Duration::from_secs(1) && began.elapsed() < Duration::from_secs(2));
}

#[tokio::test(start_paused = true)]
async fn a_store_that_fails_for_a_while_loses_nothing() {
    let (store, data) = open(options()).await;
    store.failing.store(20, Ordering::SeqCst);
    let contents = noise(3, 18 << 20);
    let half = contents.len() / 2;
    let (first, ticket) = append_one(&data, Lane::Small, &contents[..half]).await;
    let (second, _) = append_one(&data, Lane::Small, &contents[half..]).await;
    data.seal(Lane::Small);
    ticket.stored().await.unwrap();
    assert!(data.stats().upload_failures > 3);
    let fresh = reopen(&store, options()).await;
    store.failing.store(3, Ordering::SeqCst);
    assert_eq!(read_all(&fresh, &first).await.unwrap(), &contents[..half]);
    assert_eq!(read_all(&fresh, &second).await.unwrap(), &contents[half..]);
    assert_eq!(fresh.stats().fetch_failures, 3);
}

#[tokio::test(start_paused = true)]
async fn waiters_are_told_after_the_timeout_and_later_ones_see_success() {
    let (store, data) = open(options()).await;
    store.failing.store(usize::MAX, Ordering::SeqCst);
    let (run, ticket) = append_one(&data, Lane::Small, b"precious").await;
    data.seal(Lane::Small);
    let began = tokio::time::Instant::now();
    let error = ticket.stored().await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::Io);
    assert!(error.to_string().contains("weather"), "{error}");
    assert!(began.elapsed() >= Duration::from_mins(5) && began.elapsed() < Duration::from_secs(310));
    assert_eq!(read_all(&data, &run).await.unwrap(), "precious", "still in memory");
    assert!(data.options.memory.used_bytes() > 0);

    store.failing.store(0, Ordering::SeqCst);
    let began = tokio::time::Instant::now();
    ticket.stored().await.unwrap();
    assert!(began.elapsed() < Duration::from_secs(1), "an attempt is made at once");
    assert_eq!(data.options.memory.used_bytes(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_full_store_is_told_at_once_and_recovers() {
    let (store, data) = open(options()).await;
    store.full.store(true, Ordering::SeqCst);
    let (_, ticket) = append_one(&data, Lane::Small, b"precious").await;
    data.seal(Lane::Small);
    for _ in 0..2 {
        let began = tokio::time::Instant::now();
        assert_eq!(ticket.stored().await.unwrap_err().kind, ErrorKind::NoSpace);
        assert!(began.elapsed() < Duration::from_secs(1));
    }
    store.full.store(false, Ordering::SeqCst);
    ticket.stored().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_store_that_hangs_is_an_error_after_the_timeout() {
    let (store, data) = open(options()).await;
    let (run, ticket) = append_one(&data, Lane::Small, b"precious").await;
    data.seal(Lane::Small);
    ticket.stored().await.unwrap();
    store.hanging.store(true, Ordering::SeqCst);
    let fresh = reopen(&store, options()).await;
    assert_eq!(read_all(&fresh, &run).await.unwrap_err().kind, ErrorKind::Io);
    let (_, ticket) = append_one(&fresh, Lane::Small, b"more").await;
    assert_eq!(fresh.close().await.unwrap_err().kind, ErrorKind::Io);
    assert_eq!(ticket.stored().await.unwrap_err().kind, ErrorKind::Io, "given up");
}

#[tokio::test]
async fn a_missing_pack_is_stale() {
    let (store, data) = open(options()).await;
    let (run, ticket) = append_one(&data, Lane::Small, b"soon gone").await;
    data.close().await.unwrap();
    let fresh = reopen(&store, options()).await;
    fresh.delete_packs(&[ticket.pack()]).await.unwrap();
    assert_eq!(read_all(&fresh, &run).await.unwrap_err().kind, ErrorKind::Stale);
    assert_eq!(fresh.verify(&run).await.unwrap_err().kind, ErrorKind::Stale);
    assert_eq!(fresh.pack_footer(ticket.pack()).await.unwrap_err().kind, ErrorKind::Stale);
}

#[tokio::test]
async fn one_changed_byte_anywhere_in_a_pack_is_never_read_as_data() {
    let mut options = options();
    options.block_bytes = 64;
    let (store, data) = open(options.clone()).await;
    let contents = [noise(1, 100), text(2, 200), text(3, 64)];
    let runs = contents.iter().zip(1..).map(|(bytes, ino)| run_bytes(ino, bytes.clone())).collect();
    let appended = data.append(Lane::Small, runs).await.unwrap();
    data.close().await.unwrap();
    let pack = appended[0].run.pack;
    let len = usize::try_from(data.list_packs().next().await.unwrap().unwrap().stored_bytes).unwrap();
    let runs: Vec<PackedRun> = appended.iter().map(|appended| appended.run.clone()).collect();
    for at in 0..len {
        store.damage(pack, |bytes| bytes[at] ^= 0x20).await;
        let fresh = reopen(&store, options.clone()).await;
        let verdicts = fresh.verify_many(&runs).await;
        let mut noticed = fresh.pack_footer(pack).await.is_err();
        for ((run, bytes), verdict) in runs.iter().zip(&contents).zip(verdicts) {
            match read_all(&fresh, &Arc::new(run.clone())).await {
                Ok(read) => assert!(read == bytes && verdict.is_ok(), "byte {at}"),
                Err(error) => {
                    assert_eq!((error.kind, verdict.unwrap_err().kind), (ErrorKind::Io, ErrorKind::Io));
                    noticed = true;
                }
            }
        }
        assert!(noticed, "byte {at} of {len}");
        store.damage(pack, |bytes| bytes[at] ^= 0x20).await;
    }
    // Cut anywhere within the blocks: an error at once, not after the timeout.
    let last = &runs[2];
    store.damage(pack, |bytes| bytes.truncate(last.pack_offset as usize + 1)).await;
    let fresh = reopen(&store, options).await;
    assert_eq!(read_all(&fresh, &Arc::new(last.clone())).await.unwrap_err().kind, ErrorKind::Io);
    assert_eq!(fresh.verify(last).await.unwrap_err().kind, ErrorKind::Io);
    assert_eq!(read_all(&fresh, &Arc::new(runs[0].clone())).await.unwrap(), contents[0]);
}

#[tokio::test]
async fn damage_on_the_way_is_repaired_by_asking_again() {
    let (store, data) = open(options()).await;
    let contents = noise(8, 500_000);
    let (run, _) = append_one(&data, Lane::Small, &contents).await;
    data.close().await.unwrap();
    let fresh = reopen(&store, options()).await;
    store.damaging.store(1, Ordering::SeqCst);
    assert_eq!(read_all(&fresh, &run).await.unwrap(), contents);
    assert_eq!(TestStore::count(&store.gets), 2);
}

#[tokio::test]
async fn readers_of_the_same_blocks_share_one_fetch() {
    let (store, data) = open(options()).await;
    let contents = text(8, 500_000);
    let (run, _) = append_one(&data, Lane::Small, &contents).await;
    data.close().await.unwrap();
    let fresh = reopen(&store, options()).await;
    // One that gives up before it is polled again must not take the others with it.
    let mut given_up = Box::pin(read_all(&fresh, &run));
    assert!(futures::poll!(&mut given_up).is_pending() || TestStore::count(&store.gets) == 1);
    let readers = future::join_all((0..50).map(|_| read_all(&fresh, &run)));
    drop(given_up);
    for read in readers.await {
        assert_eq!(read.unwrap(), contents);
    }
    assert!(TestStore::count(&store.gets) <= 2, "{}", TestStore::count(&store.gets));
    assert_eq!(format!("{:?}", fresh.reader).matches("Flights(0)").count(), 1);
}

#[tokio::test]
async fn distant_blocks_are_fetched_separately_and_near_ones_together() {
    let mut options = options();
    options.fetch_bytes_max = 1 << 20;
    let (store, data) = open(options.clone()).await;
    let (run, _) = append_one(&data, Lane::Small, &noise(1, 4 << 20)).await;
    data.close().await.unwrap();
    let read = async |offsets: &[u32]| {
        let fresh = reopen(&store, options.clone()).await;
        let before = TestStore::count(&store.gets);
        let range = |at: &u32| ReadRange { run: Arc::clone(&run), offset_in_run: *at, len: 10 };
        fresh.read_many(&offsets.iter().map(range).collect::<Vec<_>>(), ReadHint::Once).await.unwrap();
        TestStore::count(&store.gets) - before
    };
    assert_eq!(read(&[0, 130_000, 140_000]).await, 1);
    assert_eq!(read(&[0, 3 << 17]).await, 2, "two blocks lie between");
    assert_eq!(read(&(0..32).map(|block| block << 17).collect::<Vec<_>>()).await, 4, "1 MiB each");
}

#[tokio::test]
async fn small_files_read_one_after_another_come_many_at_a_time() {
    let (store, data) = open(options()).await;
    let runs = (0..1024).map(|ino| run_bytes(ino, noise(ino, 4500))).collect();
    let appended = data.append(Lane::Small, runs).await.unwrap();
    data.close().await.unwrap();
    let runs: Vec<_> = appended.into_iter().map(|appended| Arc::new(appended.run)).collect();

    let fresh = reopen(&store, options()).await;
    for (run, ino) in runs.iter().zip(0..) {
        assert_eq!(read_all(&fresh, run).await.unwrap(), noise(ino, 4500));
    }
    assert!(TestStore::count(&store.gets) <= 9, "{} GETs", TestStore::count(&store.gets));

    // Several at once share what is on the way.
    let fresh = reopen(&store, options()).await;
    let before = TestStore::count(&store.gets);
    let reads = futures::stream::iter(&runs).map(|run| read_all(&fresh, run)).buffered(8);
    let read: Vec<_> = reads.map(Result::unwrap).collect().await;
    assert!(read.iter().zip(0..).all(|(read, ino)| *read == noise(ino, 4500)));
    assert!(TestStore::count(&store.gets) - before <= 24, "{} GETs", TestStore::count(&store.gets) - before);

    // Here and there, nothing needless is fetched.
    let fresh = reopen(&store, options()).await;
    for at in 0..8 {
        read_all(&fresh, &runs[at * 389 % 1024]).await.unwrap();
    }
    assert_eq!(fresh.stats().fetched_bytes, 8 * 4500);
}

#[tokio::test]
async fn prefetched_blocks_are_there_without_a_request() {
    let (store, data) = open(options()).await;
    let contents = noise(1, 2 << 20);
    let (run, _) = append_one(&data, Lane::Small, &contents).await;
    data.close().await.unwrap();
    let fresh = reopen(&store, options()).await;
    fresh.prefetch(&[ReadRange { run: Arc::clone(&run), offset_in_run: 0, len: run.plain_len }]);
    while fresh.stats().memory_cache_bytes < 2 << 20 {
        tokio::task::yield_now().await;
    }
    let gets = TestStore::count(&store.gets);
    let read = read_all(&fresh, &run);
    assert_eq!(read.now_or_never().expect("ready at the first poll").unwrap(), contents);
    assert_eq!(TestStore::count(&store.gets), gets);
}

#[tokio::test]
async fn hints_and_options_decide_what_is_cached() {
    let mut options = options();
    let (store, data) = open(options.clone()).await;
    let (run, _) = append_one(&data, Lane::Small, &text(1, 400_000)).await;
    assert_eq!(data.stats().memory_cache_bytes, 0);
    data.close().await.unwrap();
    let fresh = reopen(&store, options.clone()).await;
    fresh.read(&run, 0, 400_000, ReadHint::Once).await.unwrap();
    assert_eq!(fresh.stats().memory_cache_bytes, 0);

    options.cache_writes = CacheWrites::Yes;
    let (_, data) = open(options).await;
    let (run, _) = append_one(&data, Lane::Small, &noise(1, 400_000)).await;
    assert!(data.stats().memory_cache_bytes >= 400_000);
    assert_eq!(read_all(&data, &run).await.unwrap(), noise(1, 400_000));
    assert_eq!(data.stats().memory_hits, 4);
}

fn disk_cache(dir: &std::path::Path, admission: Admission) -> DiskCacheOptions {
    DiskCacheOptions { dir: dir.to_owned(), bytes_max: 1 << 28, admission, unusable: Unusable::Fail }
}

#[tokio::test]
async fn the_disk_cache_serves_a_restart_and_its_damage_is_repaired_from_the_store() {
    let dir = tempfile::tempdir().unwrap();
    let (store, data) = open(options()).await;
    let contents = noise(1, 1 << 20);
    let (run, _) = append_one(&data, Lane::Small, &contents).await;
    data.close().await.unwrap();
    let mut options = options();
    options.disk_cache = Some(disk_cache(dir.path(), Admission::All));
    let gets = || TestStore::count(&store.gets);
    for (round, expected) in [(0, 1), (1, 1), (2, 2), (3, 2)] {
        let fresh = reopen(&store, options.clone()).await;
        if round > 0 {
            while fresh.stats().disk_cache_bytes < 1 << 20 {
                tokio::task::yield_now().await;
            }
        }
        assert_eq!(read_all(&fresh, &run).await.unwrap(), contents);
        assert_eq!(gets(), expected, "round {round}");
        fresh.close().await.unwrap();
        if round == 1 {
            let segment = std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().path());
            let segment = segment.filter(|path| path.to_string_lossy().contains("segment")).min().unwrap();
            let mut bytes = std::fs::read(&segment).unwrap();
            bytes[700_000] ^= 1;
            std::fs::write(&segment, bytes).unwrap();
        }
    }
}

/// Whether somebody fetches ahead of a reader.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FetchedAhead {
    No,
    Yes,
}

/// Bytes in a disk cache after a run of `len` bytes was read in pieces.
async fn cached_after(
    admission: Admission,
    len: usize,
    pieces: usize,
    hint: ReadHint,
    ahead: FetchedAhead,
) -> u64 {
    let dir = tempfile::tempdir().unwrap();
    let (store, data) = open(options()).await;
    let (run, _) = append_one(&data, Lane::Small, &noise(1, len)).await;
    data.close().await.unwrap();
    let mut options = options();
    options.disk_cache = Some(disk_cache(dir.path(), admission));
    let fresh = reopen(&store, options).await;
    if ahead == FetchedAhead::Yes {
        let whole = ReadRange { run: Arc::clone(&run), offset_in_run: 0, len: run.plain_len };
        assert!(fresh.prefetch(&[whole]));
    }
    let piece = u32::try_from(len / pieces).unwrap();
    for at in (0..run.plain_len).step_by(piece as usize) {
        fresh.read(&run, at, piece, hint).await.unwrap();
    }
    fresh.close().await.unwrap();
    fresh.stats().disk_cache_bytes
}

#[tokio::test]
async fn a_sparing_disk_cache_keeps_what_came_in_small_pieces() {
    const LEN: usize = 2 << 20;
    let whole = LEN as u64;
    let cached = |admission, pieces, hint, ahead| cached_after(admission, LEN, pieces, hint, ahead);
    for (pieces, ahead) in [(1, FetchedAhead::No), (1, FetchedAhead::Yes), (16, FetchedAhead::Yes)] {
        assert!(cached(Admission::All, pieces, ReadHint::Normal, ahead).await >= whole);
        assert_eq!(cached(Admission::Scattered, pieces, ReadHint::Normal, ahead).await, 0);
    }
    assert!(cached(Admission::Scattered, 16, ReadHint::Normal, FetchedAhead::No).await >= whole);
    assert_eq!(cached(Admission::All, 16, ReadHint::Once, FetchedAhead::No).await, 0);
}

#[tokio::test]
async fn a_run_that_is_read_here_and_there_comes_into_the_disk_cache() {
    let dir = tempfile::tempdir().unwrap();
    let (store, data) = open(options()).await;
    let contents = noise(1, 4 << 20);
    let (run, _) = append_one(&data, Lane::Small, &contents).await;
    data.close().await.unwrap();
    let mut options = options();
    options.disk_cache = Some(disk_cache(dir.path(), Admission::Scattered));
    options.cache_memory_bytes = 0;
    let fresh = reopen(&store, options).await;
    let read = async |block: u32| {
        let at = (block << 17) + 5000;
        let found = fresh.read(&run, at, 4096, ReadHint::Normal).await.unwrap();
        assert_eq!(found, contents[at as usize..][..4096]);
    };
    read(17).await;
    assert_eq!(TestStore::count(&store.gets), 1);
    assert!(fresh.stats().fetched_bytes < 1 << 20, "one read is no reason to fetch all");
    read(11).await;
    while fresh.stats().disk_cache_bytes < 4 << 20 {
        tokio::task::yield_now().await;
    }
    for block in 0..32 {
        read(block).await;
    }
    assert_eq!(TestStore::count(&store.gets), 3);
    fresh.close().await.unwrap();
}

#[tokio::test]
async fn pieces_of_blocks_come_from_the_disk_cache() {
    for contents in [noise(1, 400_000), text(1, 400_000)] {
        let dir = tempfile::tempdir().unwrap();
        let (store, data) = open(options()).await;
        let (run, _) = append_one(&data, Lane::Small, &contents).await;
        data.close().await.unwrap();
        let mut options = options();
        options.disk_cache = Some(disk_cache(dir.path(), Admission::All));
        let fresh = reopen(&store, options.clone()).await;
        read_all(&fresh, &run).await.unwrap();
        fresh.close().await.unwrap();
        let gets = TestStore::count(&store.gets);
        let fresh = reopen(&store, options).await;
        while fresh.stats().disk_cache_bytes == 0 {
            tokio::task::yield_now().await;
        }
        // Twice and thrice in one block, the second time before the first, and across blocks.
        let at = [300_000..300_010, 5000..5010, 70_000..70_100, 10..20, 5005..9000, 131_000..262_200];
        let range = |at: &Range<u32>| ReadRange {
            run: Arc::clone(&run),
            offset_in_run: at.start,
            len: at.end - at.start,
        };
        let ranges: Vec<_> = at.iter().map(range).collect();
        let read = fresh.read_many(&ranges, ReadHint::Normal).await.unwrap();
        for (at, read) in at.iter().zip(read) {
            assert_eq!(read.into_bytes(), contents[at.start as usize..at.end as usize], "{at:?}");
        }
        assert_eq!(TestStore::count(&store.gets), gets);
        fresh.close().await.unwrap();
    }
}

#[tokio::test]
async fn a_disk_cache_that_cannot_be_opened_is_done_without_if_told_so() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, "not a directory").unwrap();
    let store = Arc::new(TestStore::default());
    let mut options = options();
    for (unusable, opens) in [(Unusable::GoOn, true), (Unusable::Fail, false)] {
        options.disk_cache = Some(DiskCacheOptions { unusable, ..disk_cache(&file, Admission::All) });
        let opened = Data::open(options.clone(), Arc::clone(&store) as Arc<dyn ObjectStore>).await;
        assert_eq!(opened.is_ok_and(|data| data.disk_cache_dir().is_none()), opens);
    }
}

#[tokio::test]
async fn records_that_contradict_themselves_are_errors() {
    let (_, data) = open(options()).await;
    let (run, _) = append_one(&data, Lane::Small, &text(1, 300_000)).await;
    let broken = |change: fn(&mut PackedRun)| {
        let mut broken = (*run).clone();
        change(&mut broken);
        Arc::new(broken)
    };
    let changes: [fn(&mut PackedRun); 6] = [
        |run| run.block_bytes = 0,
        |run| run.plain_len = u32::MAX,
        |run| run.blocks.truncate(1),
        |run| run.blocks[0].stored_len = u32::MAX,
        |run| run.pack_offset = u32::MAX,
        |run| run.blocks[1].checksum ^= 1,
    ];
    for change in changes {
        let run = broken(change);
        assert_eq!(data.read(&run, 0, 300_000, ReadHint::Normal).await.unwrap_err().kind, ErrorKind::Io);
        assert_eq!(data.verify(&run).await.unwrap_err().kind, ErrorKind::Io);
    }
    assert_eq!(data.read(&run, 299_999, 2, ReadHint::Normal).await.unwrap_err().kind, ErrorKind::Invalid);
    assert_eq!(data.read(&run, u32::MAX, 2, ReadHint::Normal).await.unwrap_err().kind, ErrorKind::Invalid);
    let none = data.append(Lane::Small, vec![run_bytes(1, Vec::new())]).await;
    assert_eq!(none.unwrap_err().kind, ErrorKind::Invalid);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn many_writers_and_readers_at_once() {
    let mut options = options();
    options.part_bytes = 256 << 10;
    options.pack_bytes = 1 << 20;
    options.cache_memory_bytes = 1 << 20;
    let (store, data) = open(options.clone()).await;
    let data = Arc::new(data);
    store.failing.store(10, Ordering::SeqCst);
    let writers = (0..16u64).map(|task| {
        let data = Arc::clone(&data);
        tokio::spawn(async move {
            let lane = if task % 4 == 0 { Lane::Stream(Ino(task)) } else { Lane::Small };
            let mut mine = Vec::new();
            for turn in 0..10 {
                let seed = task * 100 + turn;
                let bytes = if turn % 2 == 0 { noise(seed, 70_000) } else { text(seed, 200_000) };
                let (run, ticket) = append_one(&data, lane, &bytes).await;
                assert_eq!(read_all(&data, &run).await.unwrap(), bytes);
                mine.push((run, bytes, ticket));
            }
            data.seal(lane);
            for (run, bytes, ticket) in &mine {
                ticket.stored().await.unwrap();
                data.committed(ticket.pack());
                assert_eq!(read_all(&data, run).await.unwrap(), bytes);
                assert!(data.stats().memory_cache_bytes <= 1 << 20);
            }
        })
    });
    for writer in writers.collect::<Vec<_>>() {
        writer.await.unwrap();
    }
    assert_eq!(data.uncommitted(), []);
    assert_eq!(data.options.memory.used_bytes(), 0);
    data.close().await.unwrap();
    let mut packs: Vec<StoredPack> = data.list_packs().map(Result::unwrap).collect().await;
    packs.sort_by_key(|pack| pack.pack);
    let mut runs = Vec::new();
    for pack in &packs {
        runs.extend(data.pack_footer(pack.pack).await.unwrap().into_iter().map(|entry| entry.run));
    }
    assert_eq!(runs.len(), 160);
    assert!(data.verify_many(&runs).await.into_iter().all(|verdict| verdict.is_ok()));
}

#[tokio::test]
async fn packs_in_a_local_directory() {
    let dir = tempfile::tempdir().unwrap();
    let store: Arc<dyn ObjectStore> =
        Arc::new(object_store::local::LocalFileSystem::new_with_prefix(dir.path()).unwrap());
    let mut options = options();
    options.part_bytes = 1 << 20;
    let data = Data::open(options.clone(), Arc::clone(&store)).await.unwrap();
    assert_eq!(data.list_packs().count().await, 0, "no directory yet");
    let contents = [text(1, 3 << 20), noise(2, 3 << 20)];
    let mut runs = Vec::new();
    for bytes in &contents {
        runs.push(append_one(&data, Lane::Small, bytes).await.0);
    }
    data.close().await.unwrap();
    options.session = SessionId(8);
    let fresh = Data::open(options, store).await.unwrap();
    for (run, bytes) in runs.iter().zip(&contents) {
        assert_eq!(read_all(&fresh, run).await.unwrap(), bytes);
    }
    let packs: Vec<StoredPack> = fresh.list_packs().map(Result::unwrap).collect().await;
    assert_eq!(packs.len(), 1);
    assert_eq!(fresh.pack_footer(packs[0].pack).await.unwrap().len(), 2);
    fresh.delete_packs(&[packs[0].pack, PackId(3)]).await.unwrap();
    assert_eq!(fresh.list_packs().count().await, 0);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    /// Runs cut into pieces anywhere, in packs of any size, are what they were; and so are parts of them, and slices
    /// of slices.
    #[test]
    fn any_run_comes_back(
        lens in prop::collection::vec(1..5000usize, 1..12),
        cut in 1..700usize,
        block_bytes in 1..600u32,
        part_bytes in 100..3000u32,
        from in any::<prop::sample::Index>(),
        to in any::<prop::sample::Index>(),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        runtime.block_on(async {
            let mut options = options();
            options.block_bytes = block_bytes;
            options.part_bytes = part_bytes;
            options.pack_bytes = part_bytes * 4;
            let (store, data) = open(options.clone()).await;
            let contents: Vec<Vec<u8>> = lens.iter().zip(0..).map(|(len, seed)| if seed % 2 == 0 { noise(seed, *len) } else { text(seed, *len) }).collect();
            let runs = contents.iter().zip(0..).map(|(bytes, ino)| RunBytes {
                bytes: bytes.chunks(cut).map(Bytes::copy_from_slice).collect(),
                ..run_bytes(ino, Vec::new())
            });
            let appended = data.append(Lane::Small, runs.collect()).await.unwrap();
            data.close().await.unwrap();
            let fresh = reopen(&store, options).await;
            for (appended, bytes) in appended.iter().zip(&contents) {
                let run = Arc::new(appended.run.clone());
                assert_eq!(read_all(&fresh, &run).await.unwrap(), bytes);
                let (from, to) = (from.index(bytes.len()), to.index(bytes.len()));
                let (from, to) = (from.min(to), from.max(to) + 1);
                let len = |len: usize| u32::try_from(len).unwrap();
                let part = fresh.read(&run, len(from), len(to - from), ReadHint::Once).await.unwrap();
                assert_eq!(part, &bytes[from..to]);

                let slice = Slice { offset: 10, len: run.plain_len, stored: crate::types::Stored::Packed((*run).clone()) };
                let trimmed = subslice(&slice, 10 + len(from)..10 + len(to)).unwrap();
                let crate::types::Stored::Packed(run) = trimmed.stored else { panic!("packed") };
                let part = fresh.read(&Arc::new(run.clone()), run.skip, trimmed.len, ReadHint::Normal).await.unwrap();
                assert_eq!(part, &bytes[from..to]);
            }
        });
    }
}

//! File contents: runs of bytes become compressed, checksummed blocks in packs, and come back verified.
//!
//! Owns the packs that are being filled and uploaded, the caches of blocks, and the requests to the object store. Knows
//! inodes only as labels in a pack's footer; does not know `meta`, names or files. What it returns about placed runs is
//! complete, so that metadata can name them without asking again.
//!
//! Invariants: a ticket is stored only after the store acknowledged the complete object; bytes appended are readable
//! from memory until then; bytes whose checksum does not fit are never returned; a pack's name is never reused.
//! Lock order: lanes before one pack before the budget; caches are leaves.

mod budget;
pub mod layout;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::stream::BoxStream;
use object_store::ObjectStore;
use uuid::Uuid;

pub use budget::{Budget, BudgetGuard, Pressure};
pub use layout::{Extent, Overlay, Source, overlay, subslice};

use crate::types::{ChunkIndex, ErrorKind, Ino, PackId, PackedRun, Result, SessionId};

/// Settings of the data layer.
#[derive(Debug, Clone)]
pub struct DataOptions {
    /// The session whose number the pack ids carry.
    pub session: SessionId,
    /// Sequence of the first pack that this session makes; larger than any it made before.
    pub first_pack_sequence: u32,
    /// The volume, as written into each pack and cache segment.
    pub volume: Uuid,
    /// Plain bytes a block, fixed at format.
    pub block_bytes: u32,
    /// A pack is closed before it would exceed this many bytes (a single run may).
    pub pack_bytes: u32,
    /// Bytes of one part of a multipart upload; packs up to this size are one PUT.
    pub part_bytes: u32,
    /// PUTs in flight.
    pub uploads_max: usize,
    /// GETs in flight.
    pub fetches_max: usize,
    /// Where appended bytes are charged until they are stored.
    pub memory: Arc<Budget>,
    /// Limit of the memory cache of plain blocks, in bytes; 0 turns it off.
    pub cache_memory_bytes: u64,
    /// Whether appended blocks enter the memory cache too.
    pub cache_writes: CacheWrites,
    /// The disk cache of stored blocks, if there is one.
    pub disk_cache: Option<DiskCacheOptions>,
    /// How long requests are tried before waiters are told; `None`: for ever.
    pub io_timeout: Option<Duration>,
    /// A pack to which nothing was appended for so long is closed, so that no waiter hangs on a forgotten lane.
    pub idle_seal: Duration,
    /// Blocks of one pack at most this many bytes apart are fetched by one GET.
    pub fetch_gap_bytes: u32,
    /// Largest GET in bytes (a single block may exceed it).
    pub fetch_bytes_max: u32,
}

impl DataOptions {
    /// The usual settings: 128 KiB blocks, 64 MiB packs, 8 MiB parts, 64 MiB of cache in memory, none on disk.
    pub fn new(session: SessionId, volume: Uuid, memory: Arc<Budget>) -> DataOptions {
        DataOptions {
            session,
            first_pack_sequence: 1,
            volume,
            block_bytes: 128 << 10,
            pack_bytes: 64 << 20,
            part_bytes: 8 << 20,
            uploads_max: 8,
            fetches_max: 32,
            memory,
            cache_memory_bytes: 64 << 20,
            cache_writes: CacheWrites::No,
            disk_cache: None,
            io_timeout: Some(Duration::from_mins(5)),
            idle_seal: Duration::from_secs(1),
            fetch_gap_bytes: 64 << 10,
            fetch_bytes_max: 4 << 20,
        }
    }
}

/// Whether blocks enter the memory cache when they are appended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CacheWrites {
    /// Only when they are read.
    No,
    /// When they are appended and when they are read.
    Yes,
}

/// Settings of the disk cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskCacheOptions {
    /// Its directory, used by one process at a time; made if missing.
    pub dir: PathBuf,
    /// Limit of its files, in bytes.
    pub bytes_max: u64,
}

/// Which pack a run goes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Lane {
    /// Packs that files share.
    Small,
    /// Packs of one large file, whose parts are uploaded while it is written.
    Stream(Ino),
}

/// Plain bytes to store as one run.
#[derive(Debug, Clone)]
pub struct RunBytes {
    /// The file, for the pack's footer.
    pub ino: Ino,
    /// The chunk, for the footer.
    pub chunk: ChunkIndex,
    /// Where in the chunk, for the footer.
    pub offset: u32,
    /// The bytes in order, however they are cut; at least one and at most a chunk's.
    pub bytes: Vec<Bytes>,
}

/// A run that has its place.
#[derive(Debug, Clone)]
pub struct Appended {
    /// What metadata records, and what [`Data::read`] reads at once.
    pub run: PackedRun,
    /// When the metadata may be committed.
    pub pack: PackTicket,
}

/// Tells when a pack is stored. Clones wait for the same pack.
#[derive(Debug, Clone)]
pub struct PackTicket {
    pack: PackId,
}

impl PackTicket {
    /// The pack.
    pub fn pack(&self) -> PackId {
        self.pack
    }

    /// Whether the store has acknowledged the pack.
    pub fn is_stored(&self) -> bool {
        false
    }

    /// Waits until the store has acknowledged the whole pack. Does not close it: somebody calls [`Data::seal`], or
    /// it is closed when it is full or has been idle.
    ///
    /// # Errors
    /// `NoSpace` when the store is full, `Io` when there was no progress for `io_timeout`. The upload goes on
    /// nevertheless, with its bytes kept, and a later call may succeed.
    #[expect(clippy::unused_async, reason = "shape of the interface")]
    pub async fn stored(&self) -> Result<StoredPack> {
        Err(ErrorKind::NotSupported.into())
    }
}

/// A pack as the store has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoredPack {
    /// The pack.
    pub pack: PackId,
    /// Bytes of the object.
    pub stored_bytes: u64,
}

/// What a pack says that one of its runs is, for fsck and recovery.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FooterEntry {
    /// The file when it was written.
    pub ino: Ino,
    /// The chunk.
    pub chunk: ChunkIndex,
    /// Where in the chunk.
    pub offset: u32,
    /// The run.
    pub run: PackedRun,
}

/// Part of a run to read.
#[derive(Debug, Clone)]
pub struct ReadRange {
    /// The run.
    pub run: Arc<PackedRun>,
    /// First byte, in plain bytes from the run's beginning (the slice's `skip` is not added: [`Source::Packed`] has
    /// it already).
    pub offset_in_run: u32,
    /// Length in bytes; `offset_in_run + len <= run.plain_len`.
    pub len: u32,
}

/// Whether what is read is likely to be read again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ReadHint {
    /// Keep it in the caches.
    #[default]
    Normal,
    /// Leave the caches to others, as for compaction and backup.
    Once,
}

/// Bytes in order, as they lie in the cached blocks.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Pieces(Vec<Bytes>);

impl Pieces {
    /// The pieces.
    pub fn iter(&self) -> impl Iterator<Item = &Bytes> {
        self.0.iter()
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.0.iter().map(Bytes::len).sum()
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(Bytes::is_empty)
    }

    /// One piece; copies only if there are several.
    pub fn into_bytes(mut self) -> Bytes {
        match self.0.len() {
            0 => Bytes::new(),
            1 => self.0.swap_remove(0),
            _ => self.0.concat().into(),
        }
    }

    /// Copies everything to the beginning of `to`, which is long enough.
    pub fn copy_to(&self, to: &mut [u8]) {
        let mut at = 0;
        for piece in &self.0 {
            to[at..at + piece.len()].copy_from_slice(piece);
            at += piece.len();
        }
    }
}

/// Counts since the data layer was opened, and sizes now.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DataStats {
    /// Plain bytes appended.
    pub appended_plain_bytes: u64,
    /// Stored bytes that they became.
    pub appended_stored_bytes: u64,
    /// Packs that the store has acknowledged.
    pub packs_stored: u64,
    /// Attempts to store a pack that failed.
    pub upload_failures: u64,
    /// GETs sent.
    pub fetches: u64,
    /// Bytes they returned.
    pub fetched_bytes: u64,
    /// GETs that failed or returned damaged bytes.
    pub fetch_failures: u64,
    /// Blocks found in the memory cache.
    pub memory_hits: u64,
    /// Blocks found in the disk cache.
    pub disk_hits: u64,
    /// Blocks found in neither.
    pub misses: u64,
    /// Bytes in the memory cache now.
    pub memory_cache_bytes: u64,
    /// Bytes in the disk cache's files now.
    pub disk_cache_bytes: u64,
    /// Packs that are not stored yet.
    pub packs_unstored: u64,
}

/// The data layer of one mount.
#[derive(Debug)]
pub struct Data {
    options: DataOptions,
    store: Arc<dyn ObjectStore>,
}

#[expect(clippy::unused_async, reason = "shape of the interface")]
impl Data {
    /// Opens the caches; does not ask the store for anything.
    ///
    /// # Errors
    /// `Busy` when another process uses the cache directory, `Io` when it cannot be used, `Invalid` for settings that
    /// contradict each other.
    pub async fn open(options: DataOptions, store: Arc<dyn ObjectStore>) -> Result<Data> {
        Ok(Data { options, store })
    }

    /// Closes all packs, waits until they are stored (or `io_timeout` has passed without progress) and ends all
    /// tasks. Appending afterwards is an error.
    ///
    /// # Errors
    /// `Io` or `NoSpace`, naming the packs that could not be stored; their bytes are lost.
    pub async fn close(&self) -> Result<()> {
        Err(ErrorKind::NotSupported.into())
    }

    /// Compresses and checksums the runs off the caller's thread and places them in order in the lane's open pack (or
    /// in the next, where one does not fit). Their places are final, and they can be read, when this returns. Dropped
    /// before that, it has placed nothing.
    ///
    /// # Errors
    /// `Invalid` for an empty run or one longer than a chunk; `ReadOnly` after [`Data::close`].
    pub async fn append(&self, lane: Lane, runs: Vec<RunBytes>) -> Result<Vec<Appended>> {
        let _ = (lane, runs, &self.store);
        Err(ErrorKind::NotSupported.into())
    }

    /// Closes the lane's open pack: nothing more is coming now.
    pub fn seal(&self, lane: Lane) {
        let _ = lane;
    }

    /// Closes all open packs.
    pub fn seal_all(&self) {}

    /// Metadata names the pack: it need not be listed as [`Data::uncommitted`] any longer. Harmless if said twice.
    pub fn committed(&self, pack: PackId) {
        let _ = pack;
    }

    /// Packs of this session that are open, being uploaded, or stored but not yet [`Data::committed`].
    pub fn uncommitted(&self) -> Vec<PackId> {
        Vec::new()
    }

    /// Reads `len` plain bytes of the run from `offset_in_run` on. Ready at once when they are in memory; no copy when
    /// they lie in one block.
    ///
    /// # Errors
    /// `Stale` when the pack is gone (it was compacted away: resolve the file again), `Io` when the store failed for
    /// `io_timeout` or returned damaged bytes, `Invalid` for a range outside of the run.
    pub async fn read(
        &self,
        run: &Arc<PackedRun>,
        offset_in_run: u32,
        len: u32,
        hint: ReadHint,
    ) -> Result<Bytes> {
        let range = ReadRange { run: Arc::clone(run), offset_in_run, len };
        let pieces = self.read_many(std::slice::from_ref(&range), hint).await?;
        Ok(pieces.into_iter().next().unwrap_or_default().into_bytes())
    }

    /// Reads several ranges, one [`Pieces`] each. Neighbouring blocks become one GET; packs are asked in parallel.
    ///
    /// # Errors
    /// As [`Data::read`]; one that fails fails all.
    pub async fn read_many(&self, ranges: &[ReadRange], hint: ReadHint) -> Result<Vec<Pieces>> {
        let _ = (ranges, hint);
        Err(ErrorKind::NotSupported.into())
    }

    /// Starts to bring ranges into the memory cache. Does nothing when too many such fetches are under way; errors
    /// show when the bytes are read.
    pub fn prefetch(&self, ranges: &[ReadRange]) {
        let _ = ranges;
    }

    /// Fetches every block of the run from the store, past the caches, and checks it.
    ///
    /// # Errors
    /// `Io` when it is damaged or the store failed, `Stale` when the pack is missing.
    pub async fn verify(&self, run: &PackedRun) -> Result<()> {
        let _ = run;
        Err(ErrorKind::NotSupported.into())
    }

    /// What the pack says is in it.
    ///
    /// # Errors
    /// `Io` when header or footer are damaged, of another volume or version; `Stale` when the pack is missing.
    pub async fn pack_footer(&self, pack: PackId) -> Result<Vec<FooterEntry>> {
        let _ = pack;
        Err(ErrorKind::NotSupported.into())
    }

    /// The packs in the store, in no particular order.
    pub fn list_packs(&self) -> BoxStream<'static, Result<StoredPack>> {
        let _ = &self.options;
        Box::pin(futures::stream::empty())
    }

    /// Deletes packs from the store; one that is gone already is deleted.
    ///
    /// # Errors
    /// `Io` when some could not be deleted; others may have been.
    pub async fn delete_packs(&self, packs: &[PackId]) -> Result<()> {
        let _ = packs;
        Err(ErrorKind::NotSupported.into())
    }

    /// Counts for people and metrics.
    pub fn stats(&self) -> DataStats {
        DataStats::default()
    }
}

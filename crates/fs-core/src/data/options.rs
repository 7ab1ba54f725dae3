//! Settings of the data layer, its disk cache and its staging directory.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use uuid::Uuid;

use super::budget::Budget;
use crate::types::SessionId;

/// A chunk's worth of blocks that do not shrink, with header and footer. One PUT a pack costs the store a fifth less than
/// parts of a larger pack, and its memory is free again as soon as that PUT is done (docs/decisions/0012).
const PACK_BYTES: u32 = (16 << 20) + (512 << 10);

/// A pack of one large file is closed once it holds so much: what is written together in order is one object, and one GET
/// (docs/decisions/0022).
const STREAM_PACK_BYTES: u32 = 4 << 20;

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
    /// A pack of one large file is closed as soon as it holds this many bytes.
    pub stream_pack_bytes: u32,
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
    /// Where packs are made durable before the store has them, if anywhere.
    pub staging: Option<StagingOptions>,
    /// How long those who wait for a pack wait without progress, and how long one request may take, in which the store
    /// repeats what may succeed later; `None`: for ever. Uploads go on for ever in any case.
    pub io_timeout: Option<Duration>,
    /// A pack to which nothing was appended for so long is closed, so that no waiter hangs on a forgotten lane.
    pub idle_seal: Duration,
    /// Blocks of one pack at most this many bytes apart are fetched by one GET.
    pub fetch_gap_bytes: u32,
    /// Largest GET in bytes (a single block may exceed it).
    pub fetch_bytes_max: u32,
    /// Bytes that all GETs in flight bring together; more wait.
    pub fetch_memory_bytes: u64,
    /// How much a GET brings, in bytes, of a pack whose small files are read one after another (half as much again where
    /// little else would be left to fetch); 0 turns it off.
    pub fetch_around_bytes: u32,
    /// Limit of what such GETs brought and nobody read, in bytes; and what is not fetched ahead below is theirs too.
    pub around_memory_bytes: u64,
    /// Limit of plain blocks that were fetched ahead of readers, in bytes, and what the above does not need is theirs too, and
    /// half of `memory` while nobody writes; 0 turns that off.
    pub readahead_memory_bytes: u64,
}

impl DataOptions {
    /// The usual settings: 128 KiB blocks, packs of one PUT each, 64 MiB of cache in memory, none on disk.
    pub fn new(session: SessionId, volume: Uuid, memory: Arc<Budget>) -> DataOptions {
        DataOptions {
            session,
            first_pack_sequence: 1,
            volume,
            block_bytes: 128 << 10,
            pack_bytes: PACK_BYTES,
            stream_pack_bytes: STREAM_PACK_BYTES,
            part_bytes: PACK_BYTES,
            uploads_max: 8,
            fetches_max: 32,
            memory,
            cache_memory_bytes: 64 << 20,
            cache_writes: CacheWrites::No,
            disk_cache: None,
            staging: None,
            io_timeout: Some(Duration::from_mins(5)),
            idle_seal: Duration::from_secs(1),
            fetch_gap_bytes: 64 << 10,
            fetch_bytes_max: 8 << 20,
            fetch_memory_bytes: 64 << 20,
            fetch_around_bytes: 8 << 20,
            around_memory_bytes: 32 << 20,
            readahead_memory_bytes: 32 << 20,
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
    /// What it keeps.
    pub admission: Admission,
    /// What to do when the directory cannot be used.
    pub unusable: Unusable,
}

/// What a disk cache keeps of what is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Admission {
    /// Everything.
    All,
    /// What came in small pieces and would take as many requests again. Large files that are read in order, and most of
    /// what lies together in packs, come in few requests: writing them to the disk would cost more than it saves.
    Scattered,
}

/// What to do about a disk cache that cannot be opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unusable {
    /// Fail.
    Fail,
    /// Go on without it, with a warning.
    GoOn,
}

/// Settings of the staging directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StagingOptions {
    /// The directory, on a disk that survives a crash; made if missing. Each volume has a directory of its own in it.
    pub dir: PathBuf,
    /// Limit of the journals, in bytes. 0: nothing is staged, but what an earlier mount staged is found.
    pub bytes_max: u64,
    /// A pack that files share stays open for the next fsync so long.
    pub seal_after: Duration,
}

impl StagingOptions {
    /// Staging in `dir`, with packs that stay open for 4 s.
    pub fn new(dir: PathBuf, bytes_max: u64) -> StagingOptions {
        StagingOptions { dir, bytes_max, seal_after: Duration::from_secs(4) }
    }
}

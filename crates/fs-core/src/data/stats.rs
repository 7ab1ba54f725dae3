//! What the data layer counts.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

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
    /// Bytes in the memory cache, and of what was fetched ahead, now.
    pub memory_cache_bytes: u64,
    /// Bytes in the disk cache's files now.
    pub disk_cache_bytes: u64,
    /// Packs that are not stored yet.
    pub packs_unstored: u64,
    /// Packs with a journal in the staging directory now.
    pub packs_staged: u64,
    /// Bytes of the journals.
    pub staged_bytes: u64,
    /// How long ago the oldest of them was begun, or found by this mount.
    pub staged_age: Option<Duration>,
    /// Whether the last attempt to stage failed: fsync waits for the store.
    pub staging_fails: bool,
}

/// The counts behind [`DataStats`].
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) appended_plain_bytes: AtomicU64,
    pub(super) appended_stored_bytes: AtomicU64,
    pub(super) packs_stored: AtomicU64,
    pub(super) upload_failures: AtomicU64,
    pub(super) fetches: AtomicU64,
    pub(super) fetched_bytes: AtomicU64,
    pub(super) fetch_failures: AtomicU64,
    pub(super) memory_hits: AtomicU64,
    pub(super) disk_hits: AtomicU64,
    pub(super) misses: AtomicU64,
}

impl Counters {
    pub(super) fn add(&self, counter: impl FnOnce(&Counters) -> &AtomicU64, by: u64) {
        counter(self).fetch_add(by, Ordering::Relaxed);
    }
}

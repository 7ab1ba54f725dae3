//! File contents: runs of bytes become compressed, checksummed blocks in packs, and come back verified.
//!
//! Owns the packs that are being filled and uploaded, the caches of blocks, and the requests to the object store. Knows
//! inodes only as labels in a pack's footer; does not know `meta`, names or files. What it returns about placed runs is
//! complete, so that metadata can name them without asking again.
//!
//! Invariants: a ticket is stored only after the store acknowledged the complete object, and durable not before that or
//! the staging journal; bytes appended are readable from here until they are stored; bytes whose
//! checksum does not fit are never returned; a pack's name is never reused.
//! Lock order: lanes, or the staging lock, before one pack before the budget; caches are leaves.

mod ahead;
mod around;
mod block;
mod budget;
mod cache;
mod disk_cache;
mod journal;
pub mod layout;
mod objects;
mod options;
mod pack;
mod pieces;
mod read;
mod retry;
mod scattered;
mod staging;
mod stats;
mod ticket;
mod unstored;
mod upload;

use std::borrow::Borrow;
use std::collections::HashSet;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures::future;
use futures::stream::BoxStream;
use object_store::ObjectStore;
use uuid::Uuid;

pub use ahead::Held;
pub use block::is_zero;
pub use budget::{Budget, BudgetGuard, Loan, Pressure};
pub use disk_cache::remove_disk_cache;
pub use layout::{Extent, Overlay, Source, overlay, subslice};
pub use options::{Admission, CacheWrites, DataOptions, DiskCacheOptions, StagingOptions, Unusable};
pub use pieces::Pieces;
pub use staging::{LostPack, OnLost, Resume, Resumed};
pub use stats::DataStats;
pub use ticket::{Appended, Durable, Lane, PackTicket, Place, RunBytes, StoredPack};

use self::disk_cache::DiskCache;
use self::objects::Objects;
use self::read::Reader;
use self::staging::Staging;
use self::stats::Counters;
use self::unstored::{Pack, Packs};
use self::upload::Uploader;
use crate::tasks::{Health, Tasks};
use crate::types::{CHUNK_BYTES, ChunkIndex, Error, ErrorKind, Ino, PackId, PackedRun, Result};

/// Largest pack that can be configured: offsets are 32 bits, and one run may exceed the limit.
const PACK_BYTES_MAX: u32 = 1 << 30;

/// While memory is short, what is staged is dropped from it so often.
const RELIEF_PAUSE: Duration = Duration::from_millis(50);

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

impl ReadRange {
    fn bytes(&self) -> Range<u32> {
        self.offset_in_run..self.offset_in_run.saturating_add(self.len)
    }
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

/// The data layer of one mount.
#[derive(Debug)]
pub struct Data {
    options: Arc<DataOptions>,
    objects: Objects,
    counters: Arc<Counters>,
    packs: Arc<Packs>,
    uploader: Arc<Uploader>,
    reader: Arc<Reader>,
    staging: Option<Arc<Staging>>,
    tasks: Arc<Tasks>,
}

impl Data {
    /// Opens the caches and the staging directory; does not ask the store for anything. What an earlier mount staged is
    /// not there before [`Data::resume`].
    ///
    /// # Errors
    /// `Busy` when another process uses one of the directories, `Io` when one cannot be used, `Invalid` for settings
    /// that contradict each other.
    pub async fn open(options: DataOptions, store: Arc<dyn ObjectStore>) -> Result<Data> {
        let sound = options.block_bytes > 0
            && u64::from(options.block_bytes) <= CHUNK_BYTES
            && options.part_bytes > 0
            && options.part_bytes <= options.pack_bytes
            && options.pack_bytes <= PACK_BYTES_MAX;
        if !sound {
            return Err(Error::new(ErrorKind::Invalid, "block, part and pack sizes contradict each other"));
        }
        let options = Arc::new(options);
        let disk = match options.disk_cache.clone().filter(|disk| disk.bytes_max > 0) {
            None => None,
            Some(disk) => open_disk_cache(disk, options.volume).await?,
        };
        let staging = match &options.staging {
            Some(staging) => Staging::open(staging, options.volume)?.map(Arc::new),
            None => None,
        };
        let objects = Objects::new(store, options.io_timeout);
        let counters = Arc::new(Counters::default());
        let tasks = Arc::new(Tasks::new(Arc::default()));
        let packs = Arc::new(Packs::default());
        let (shared, own, counts) =
            (|| Arc::clone(&options), || Arc::clone(&packs), || Arc::clone(&counters));
        let uploader = Arc::new(Uploader::new(shared(), objects.clone(), counts(), own(), staging.clone()));
        let (journals, ours) = (staging.clone(), Arc::clone(&tasks));
        let reader = Reader::new(shared(), objects.clone(), counts(), own(), disk, journals, ours);
        let reader = Arc::new(reader);
        tasks.spawn(Arc::clone(&reader.ahead).give_back_when_wanted(Arc::clone(&options.memory)));
        if let Some(staging) = staging.as_ref().filter(|staging| staging.is_on()) {
            tasks.spawn(relieve(Arc::clone(&options), own(), Arc::clone(&uploader), Arc::clone(staging)));
        }
        Ok(Data { options, objects, counters, packs, uploader, reader, staging, tasks })
    }

    /// Whether one of this layer's tasks has panicked; others of the mount note it here, too.
    pub(crate) fn health(&self) -> &Arc<Health> {
        self.tasks.health()
    }

    /// Nobody needs these packs: those that are not stored need not be.
    pub fn give_up(&self, packs: &[PackId]) {
        for pack in packs {
            self.packs.give_up(*pack);
        }
    }

    /// Closes all packs, waits until they are stored (or `io_timeout` has passed without progress) and ends all
    /// tasks. Appending afterwards is an error.
    ///
    /// # Errors
    /// `Io` or `NoSpace`, naming the packs that could not be stored; bytes of them that are not staged are lost.
    pub async fn close(&self) -> Result<()> {
        self.uploader.close();
        let packs = self.sent();
        let outcomes =
            future::join_all(packs.iter().map(|pack| pack.wait(self.options.io_timeout, None))).await;
        self.tasks.end().await;
        for pack in self.packs.all() {
            pack.abandon();
        }
        if let Some(disk) = self.reader.disk.clone() {
            let closing = tokio::task::spawn_blocking(move || disk.close());
            closing
                .await
                .map_err(|error| Error::new(ErrorKind::Io, "close the disk cache").with_source(error))?;
        }
        let mut failed =
            outcomes.into_iter().zip(&packs).filter_map(|(outcome, pack)| Some((outcome.err()?, pack)));
        let Some((error, first)) = failed.next() else { return Ok(()) };
        let describe = |pack: &Pack| match pack.journal() {
            Some(_) => format!("{} (staged)", pack.id()),
            None => pack.id().to_string(),
        };
        let lost = failed.fold(describe(first), |lost, (_, pack)| format!("{lost}, {}", describe(pack)));
        Err(Error::new(error.kind, format!("not stored: {lost}")).with_source(error))
    }

    /// Closes all packs and waits until those that exist now are stored.
    ///
    /// # Errors
    /// `Io` or `NoSpace`: the first failure; the others are waited for nevertheless.
    pub async fn store_all(&self) -> Result<()> {
        self.store_all_but(&HashSet::new()).await
    }

    /// As [`Data::store_all`], without waiting for packs that nobody needs, unless they are staged.
    ///
    /// # Errors
    /// See there.
    pub async fn store_all_but(&self, needless: &HashSet<PackId>) -> Result<()> {
        self.seal_all();
        let mut packs = self.sent();
        packs.retain(|pack| pack.journal().is_some() || !needless.contains(&pack.id()));
        let outcomes = future::join_all(packs.iter().map(|pack| pack.wait(self.options.io_timeout, None)));
        outcomes.await.into_iter().find_map(Result::err).map_or(Ok(()), Err)
    }

    /// The packs that are being sent, or were.
    fn sent(&self) -> Vec<Arc<Pack>> {
        let mut packs = self.packs.all();
        packs.retain(|pack| pack.is_sent());
        packs
    }

    /// Sees that the runs become durable as soon as they can: in the staging directory, or, where that is not possible, by
    /// closing their packs. Returns when they are staged, or only the store is left to wait for.
    pub async fn hasten(&self, tickets: &[PackTicket]) {
        let mut packs: Vec<Arc<Pack>> = tickets.iter().map(|ticket| Arc::clone(&ticket.pack)).collect();
        packs.sort_unstable_by_key(|pack| pack.id());
        packs.dedup_by_key(|pack| pack.id());
        match self.staging.as_ref().filter(|staging| staging.is_on()) {
            Some(staging) => staging.stage(packs).await,
            None => {
                for pack in packs {
                    pack.want_sealed();
                }
            }
        }
    }

    /// Whether [`Data::hasten`] stages.
    pub fn stages(&self) -> bool {
        self.staging.as_ref().is_some_and(|staging| staging.is_on())
    }

    /// The directory with the volume's journals, if there is one.
    pub fn staging_dir(&self) -> Option<&Path> {
        self.staging.as_ref().map(|staging| staging.dir())
    }

    /// Takes over what an earlier mount staged: `staged` are the packs that metadata names as staged, with the bytes that
    /// it relies on. Their bytes are readable when this returns; with [`Resume::Send`] they are sent in the
    /// background, oldest first, and the journals of other packs are deleted. If any are lost, nothing is done with
    /// [`OnLost::Refuse`].
    ///
    /// # Errors
    /// `Io` when the staging directory cannot be read.
    pub async fn resume(&self, staged: &[Durable], on_lost: OnLost, resume: Resume) -> Result<Resumed> {
        let mut resumed = Resumed::default();
        let mut found = Vec::with_capacity(staged.len());
        for expected in staged {
            let pack = expected.pack;
            let replayed = match &self.staging {
                Some(staging) => staging.replay(pack).await,
                None => Err("there is no staging directory".to_owned()),
            };
            let (bytes, why) = match replayed {
                Ok(replayed) => {
                    let bytes = u64::from(replayed.pack_len);
                    found.push((pack, replayed));
                    if bytes >= expected.bytes {
                        continue;
                    }
                    (
                        bytes,
                        format!("its journal is damaged or cut after {bytes} of {} bytes", expected.bytes),
                    )
                }
                Err(why) => (0, why),
            };
            match self.objects.len(pack).await {
                Some(stored_bytes) if stored_bytes >= expected.bytes => {
                    found.retain(|(found, _)| *found != pack);
                    resumed.stored.push(StoredPack { pack, stored_bytes });
                }
                _ => resumed.lost.push(LostPack { pack, bytes, why }),
            }
        }
        if on_lost == OnLost::Refuse && !resumed.lost.is_empty() {
            return Ok(resumed);
        }
        if let Some(staging) = self.staging.as_ref().filter(|_| resume == Resume::Send) {
            staging.remove_others(found.iter().map(|(pack, _)| *pack).collect()).await?;
        }
        for (pack, replayed) in found {
            resumed.packs += 1;
            resumed.bytes += replayed.file_len;
            let header = unstored::header_of(self.options.volume, pack);
            let pack = Arc::new(Pack::replayed(pack, header, replayed, &self.options.memory, resume));
            self.packs.insert(Arc::clone(&pack));
            if resume == Resume::Send {
                self.uploader.send(&self.tasks, pack);
            }
        }
        Ok(resumed)
    }

    /// The directory of the disk cache, if there is one.
    pub fn disk_cache_dir(&self) -> Option<&Path> {
        self.reader.disk.as_ref().map(|disk| disk.dir())
    }

    /// How much of a pack that is named as staged can be read: header and blocks up to there. A pack that the store has
    /// already is whole.
    pub async fn staged_bytes(&self, pack: PackId) -> u64 {
        match self.packs.all().into_iter().find(|known| known.id() == pack) {
            Some(known) => known.stored_bytes().unwrap_or_else(|| known.staged_bytes()),
            None => self.objects.len(pack).await.unwrap_or(0),
        }
    }

    /// Waits until a pack that has a journal is stored.
    pub async fn staged_pack_stored(&self) {
        match &self.staging {
            Some(staging) => staging.stored.notified().await,
            None => future::pending().await,
        }
    }

    /// The packs that are stored and still have a journal.
    pub fn stored_with_journal(&self) -> Vec<StoredPack> {
        let packs = self.packs.all();
        let stored = packs.iter().filter(|pack| pack.journal().is_some());
        stored
            .filter_map(|pack| Some(StoredPack { pack: pack.id(), stored_bytes: pack.stored_bytes()? }))
            .collect()
    }

    /// Metadata says, durably, that these packs are stored: their journals are deleted.
    pub async fn forget_journals(&self, packs: &[PackId]) {
        let mut stored = self.packs.all();
        stored.retain(|pack| packs.contains(&pack.id()) && pack.is_stored());
        if let Some(staging) = &self.staging {
            staging.remove(stored).await;
        }
        for pack in packs {
            self.packs.committed(*pack);
        }
    }

    /// Compresses and checksums the runs off the caller's thread and places them in order in the lane's open pack (or
    /// in the next, where one does not fit). Their places are final, and they can be read, when this returns. Dropped
    /// before that, it has placed nothing.
    ///
    /// # Errors
    /// `Invalid` for a run that is empty or leaves its chunk; `ReadOnly` after [`Data::close`].
    pub async fn append(&self, lane: Lane, runs: Vec<RunBytes>) -> Result<Vec<Appended>> {
        let plain = match self.options.cache_writes {
            CacheWrites::No => Vec::new(),
            CacheWrites::Yes => runs.iter().map(|run| Pieces::from(run.bytes.clone())).collect(),
        };
        let appended = self.uploader.append(&self.tasks, lane, runs).await?;
        for (appended, plain) in appended.iter().zip(plain) {
            self.reader.cache(&appended.run, &plain.into_bytes());
        }
        Ok(appended)
    }

    /// Closes the lane's open pack: nothing more is coming now.
    pub fn seal(&self, lane: Lane) {
        self.uploader.seal(lane);
    }

    /// Closes all open packs.
    pub fn seal_all(&self) {
        self.uploader.seal_all();
    }

    /// Bytes in memory of packs that are closed and not stored: on their way to the store.
    pub fn closed_bytes(&self) -> u64 {
        self.packs.closed_bytes()
    }

    /// Metadata names the pack, which is stored, or never will: it is not listed as [`Data::uncommitted`] any longer.
    /// Harmless if said twice.
    pub fn committed(&self, pack: PackId) {
        self.packs.committed(pack);
    }

    /// Packs that are open, staged, being uploaded, or stored but not yet [`Data::committed`]; ascending.
    pub fn uncommitted(&self) -> Vec<PackId> {
        self.packs.all().iter().map(|pack| pack.id()).collect()
    }

    /// Reads `len` plain bytes of the run from `offset_in_run` on. Ready at once when they are in memory; no copy when
    /// one fetch brought them.
    ///
    /// # Errors
    /// `Stale` when the pack is gone (it was compacted away: resolve the file again), `Io` when the store failed or
    /// returned damaged bytes twice, `Invalid` for a range outside of the run.
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
        self.reader.read_many(ranges, hint).await
    }

    /// Starts to bring ranges into memory ahead of a reader; false when there is no room for (all of) them now. Errors
    /// show when the bytes are read.
    pub fn prefetch(&self, ranges: &[ReadRange]) -> bool {
        self.reader.prefetch(ranges)
    }

    /// As [`Data::prefetch`], for who reads backward or leaves something out: what it brings stays in memory until what is
    /// returned is dropped. Without it, blocks are gone when their last byte was read.
    pub fn prefetch_held(&self, ranges: &[ReadRange]) -> Option<Held> {
        self.reader.prefetch_held(ranges)
    }

    /// Bytes that [`Data::prefetch`] may hold now for all readers together, if nobody reads small files meanwhile.
    pub fn readahead_bytes_max(&self) -> u64 {
        let lent = self.options.memory.lendable_bytes();
        self.options.readahead_memory_bytes + self.options.around_memory_bytes + lent
    }

    /// [`Data::verify_many`] for one run.
    #[cfg(test)]
    async fn verify(&self, run: &PackedRun) -> Result<()> {
        let verdicts = self.verify_many(&[run]).await;
        verdicts.into_iter().collect()
    }

    /// Fetches every block of the runs from the store, past the caches, and checks it; one answer each. Those that lie
    /// close together in their pack share a GET. A pack that is not stored yet is checked in memory.
    ///
    /// # Errors
    /// `Io` when a run is damaged or the store failed, `Stale` when the pack is missing.
    pub async fn verify_many<R: Borrow<PackedRun>>(&self, runs: &[R]) -> Vec<Result<()>> {
        self.reader.verify_many(runs).await
    }

    /// What the pack says is in it.
    ///
    /// # Errors
    /// `Io` when header or footer are damaged, of another volume or version; `Stale` when the pack is missing.
    pub async fn pack_footer(&self, pack: PackId) -> Result<Vec<FooterEntry>> {
        self.objects.footer(pack, self.options.volume).await
    }

    /// The packs in the store, in no particular order.
    pub fn list_packs(&self) -> BoxStream<'static, Result<StoredPack>> {
        self.objects.list()
    }

    /// Deletes packs from the store; one that is gone already is deleted.
    ///
    /// # Errors
    /// `Io` when some could not be deleted; others may have been.
    pub async fn delete_packs(&self, packs: &[PackId]) -> Result<()> {
        self.objects.delete(packs).await
    }

    /// Counts for people and metrics.
    pub fn stats(&self) -> DataStats {
        let counters = &self.counters;
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let packs = self.packs.all();
        let journals: Vec<_> = packs.iter().filter_map(|pack| pack.journal()).collect();
        DataStats {
            appended_plain_bytes: get(&counters.appended_plain_bytes),
            appended_stored_bytes: get(&counters.appended_stored_bytes),
            packs_stored: get(&counters.packs_stored),
            upload_failures: get(&counters.upload_failures),
            fetches: get(&counters.fetches),
            fetched_bytes: get(&counters.fetched_bytes),
            fetch_failures: get(&counters.fetch_failures),
            memory_hits: get(&counters.memory_hits),
            disk_hits: get(&counters.disk_hits),
            misses: get(&counters.misses),
            memory_cache_bytes: self.reader.memory_bytes(),
            disk_cache_bytes: self.reader.disk.as_ref().map_or(0, |disk| disk.bytes()),
            packs_unstored: packs.iter().filter(|pack| !pack.is_stored()).count() as u64,
            packs_staged: journals.len() as u64,
            staged_bytes: journals.iter().map(|journal| journal.file_bytes).sum(),
            staged_age: journals.iter().map(|journal| journal.since.elapsed()).max(),
            staging_fails: self.staging.as_ref().is_some_and(|staging| staging.is_failing()),
        }
    }
}

async fn open_disk_cache(options: DiskCacheOptions, volume: Uuid) -> Result<Option<DiskCache>> {
    let unusable = options.unusable;
    let opened = tokio::task::spawn_blocking(move || DiskCache::open(&options, volume)).await;
    let opened =
        opened.map_err(|error| Error::new(ErrorKind::Io, "open the disk cache").with_source(error))?;
    match (opened, unusable) {
        (Err(error), Unusable::GoOn) => {
            tracing::warn!(%error, "going on without a disk cache");
            Ok(None)
        }
        (opened, _) => opened.map(Some),
    }
}

/// While memory is short, drops from it what is staged, and stages what a slow or absent store does not take, also
/// what is being sent to it.
async fn relieve(
    options: Arc<DataOptions>,
    packs: Arc<Packs>,
    uploader: Arc<Uploader>,
    staging: Arc<Staging>,
) {
    let mut pressure = options.memory.subscribe();
    // The sender lives in the budget, which the options hold.
    while pressure.wait_for(|pressure| *pressure == Pressure::High).await.is_ok() {
        let mut unstored = packs.all();
        unstored.retain(|pack| !pack.is_stored());
        if uploader.is_stuck() {
            staging.stage(unstored.clone()).await;
        }
        for pack in &unstored {
            pack.release();
        }
        if uploader.is_away() && options.memory.pressure() == Pressure::High {
            // One at a time and the youngest first: if the store is only slow, little is sent twice.
            let _ = unstored.iter().rev().find(|pack| pack.recall());
        }
        tokio::time::sleep(RELIEF_PAUSE).await;
    }
}

impl Drop for Data {
    /// Nobody waits for a pack whose task ends here.
    fn drop(&mut self) {
        for pack in self.packs.all() {
            pack.abandon();
        }
    }
}

#[cfg(test)]
mod tests;

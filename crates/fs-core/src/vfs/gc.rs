//! What nobody needs any more: orphans that nobody knows, packs without live bytes, packs that no metadata ever named,
//! space in packs that are mostly dead, and small packs where fewer large ones do.
//!
//! Nothing is decided by the clock. An orphan is reaped when the kernel has forgotten it and no handle is left. A pack's
//! object is deleted after its record was removed in a transaction that read its live bytes as 0, and never while a
//! batch pins it (a batch may be about to name it) or the data layer still fills it. A reader that meets a deleted pack
//! resolves its file again. Packs without a record are garbage if their session has ended.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures::stream::{self, StreamExt as _, TryStreamExt as _};
use parking_lot::Mutex;
use tokio::sync::Notify;

use super::Vfs;
use super::handle::{InodeRef, Reach};
use super::inode::Chunk;
use super::request::GcReport;
use crate::data::Lane;
use crate::meta::{PackInfo, PackState};
use crate::types::{ChunkIndex, ErrorKind, Ino, PackId, Result};

/// Orphans that are reaped together.
const REAP_PAGE: usize = 128;
/// Records of packs that are read at a time.
const PACKS_PAGE: usize = 1024;
/// How often, and how long each time, a caller waits for what removed files give back before it is told that the volume
/// is full: the kernel says a moment after a removal or a close that it has forgotten the file.
const ROOM_TRIES: u32 = 20;
const ROOM_WAIT: Duration = Duration::from_millis(25);
/// Pause before a round that is due because the store is full.
const FULL_PAUSE: Duration = Duration::from_secs(1);
/// A pack is mostly dead when less than one part in so many is alive.
const LIVE_PART: u64 = 4;
/// Mostly dead packs that one round rewrites; more wait for the next.
const REWRITES_MAX: usize = 4;
/// Packs below these sizes are small. Those of one class are merged when there are so many, so that a byte is moved once a
/// class at most, give or take. A large file's are larger.
const SMALL_PACK_BYTES: [u64; 3] = [64 << 10, 1 << 20, 4 << 20];
const MERGE_PACKS_MIN: usize = 16;
/// Small packs that one round merges, and live bytes in them; more wait for the next.
const MERGE_PACKS_MAX: usize = 256;
const MERGE_BYTES_MAX: u64 = 64 << 20;
/// Footers that are fetched at a time.
const FOOTERS_MAX: usize = 8;
/// Chunks that are taken from the queue and compacted together.
const COMPACTIONS_PAGE: usize = 64;
/// Chunks that wait to be compacted; more are found again when they are read.
const COMPACTIONS_MAX: usize = 4096;

/// Work for the background.
#[derive(Debug)]
pub(super) struct Collector {
    orphans: Mutex<Vec<Ino>>,
    /// Held by whoever reaps, so that who comes second finds it done.
    reaping: tokio::sync::Mutex<()>,
    garbage: Mutex<Garbage>,
    chunks: Mutex<Chunks>,
    wake: Notify,
    /// Told when an orphan can be reaped.
    forgotten: Notify,
    /// Told when the store has no room: dead packs may be what fills it.
    store_full: Notify,
    /// Held by a round of collection, so that there is one at a time.
    round: tokio::sync::Mutex<Round>,
}

/// What rounds of collection remember.
#[derive(Debug, Default)]
struct Round {
    /// The last mostly dead pack that was rewritten.
    rewritten_last: Option<PackId>,
    /// Small packs that were merged and are still there: their footers do not tell where their bytes are named.
    merged: HashSet<PackId>,
}

/// Packs of this session that were stored for nothing.
#[derive(Debug, Default)]
struct Garbage {
    fresh: Vec<PackId>,
    /// Known since the last round.
    ripe: Vec<PackId>,
}

#[derive(Debug, Default)]
struct Chunks {
    queue: VecDeque<(Ino, ChunkIndex)>,
    queued: HashSet<(Ino, ChunkIndex)>,
}

impl Collector {
    pub(super) fn new() -> Collector {
        Collector {
            orphans: Mutex::default(),
            reaping: tokio::sync::Mutex::default(),
            garbage: Mutex::default(),
            chunks: Mutex::default(),
            wake: Notify::new(),
            forgotten: Notify::new(),
            store_full: Notify::new(),
            round: tokio::sync::Mutex::default(),
        }
    }

    /// Nobody knows this orphan any more.
    pub(super) fn reap_later(&self, ino: Ino) {
        self.orphans.lock().push(ino);
        self.wake.notify_one();
        self.forgotten.notify_waiters();
    }

    /// These packs were never named, and nothing is about to name them.
    pub(super) fn delete_later(&self, packs: Vec<PackId>) {
        self.garbage.lock().fresh.extend(packs);
    }

    /// Something did not fit into the store.
    pub(super) fn store_is_full(&self) {
        self.store_full.notify_one();
    }

    /// Waits for that, and a moment: what did not fit is tried again all the time.
    async fn store_is_full_again(&self) {
        self.store_full.notified().await;
        tokio::time::sleep(FULL_PAUSE).await;
    }

    fn compact_later(&self, ino: Ino, chunk: ChunkIndex) {
        let mut chunks = self.chunks.lock();
        if chunks.queue.len() < COMPACTIONS_MAX && chunks.queued.insert((ino, chunk)) {
            chunks.queue.push_back((ino, chunk));
            self.wake.notify_one();
        }
    }

    fn next_chunks(&self) -> Vec<(Ino, ChunkIndex)> {
        let mut chunks = self.chunks.lock();
        let count = chunks.queue.len().min(COMPACTIONS_PAGE);
        let next: Vec<_> = chunks.queue.drain(..count).collect();
        for chunk in &next {
            chunks.queued.remove(chunk);
        }
        next
    }
}

impl Vfs {
    /// Starts the task that collects garbage; it begins with what a crash left behind.
    pub(super) fn start_collector(self: &Arc<Vfs>) {
        let vfs = Arc::downgrade(self);
        let interval = self.options.gc_interval;
        self.tasks.spawn(async move {
            if let Some(vfs) = vfs.upgrade()
                && let Err(error) = vfs.reap_left_behind().await
            {
                tracing::warn!(%error, "could not remove what an earlier session left behind");
            }
            let mut rounds = tokio::time::interval(interval);
            rounds.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
            // The first tick comes at once.
            rounds.tick().await;
            // The store is listed once, for what a crash left in it.
            let mut thoroughness = Thoroughness::Everything;
            loop {
                let Some(vfs) = vfs.upgrade() else { return };
                let due = tokio::select! {
                    () = vfs.collector.wake.notified() => None,
                    _ = rounds.tick() => Some(thoroughness),
                    () = vfs.collector.store_is_full_again() => Some(Thoroughness::DeadPacks),
                };
                vfs.reap_closed().await;
                vfs.compact_queued().await;
                let Some(due) = due.filter(|_| !vfs.is_read_only()) else { continue };
                vfs.sweep_inodes();
                vfs.delete_garbage().await;
                match vfs.collect(due).await {
                    Ok(_) if due == Thoroughness::Everything => thoroughness = Thoroughness::Routine,
                    Ok(_) => {}
                    Err(error) => tracing::warn!(%error, "could not collect garbage, will try again"),
                }
            }
        });
    }

    /// Collects everything that can be collected now, what earlier sessions left in the store included.
    ///
    /// # Errors
    /// `Io` when a store failed; what was done stays done.
    pub async fn gc(&self) -> Result<GcReport> {
        self.check_writable()?;
        let reaped = self.reap_closed().await + self.reap_left_behind().await?;
        self.delete_garbage().await;
        let mut report = self.collect(Thoroughness::Everything).await?;
        report.orphans_reaped = reaped;
        Ok(report)
    }

    /// Whether a change that did not fit is worth another try: removed files gave back what they took, or are about to.
    /// `tries` counts the calls for one change, which are bounded.
    pub(super) async fn more_room(&self, tries: &mut u32) -> bool {
        *tries += 1;
        if *tries > ROOM_TRIES {
            return false;
        }
        let forgotten = self.collector.forgotten.notified();
        // The first time, the collector may have made room just after the change was refused.
        if self.reap_closed().await > 0 || *tries == 1 {
            return true;
        }
        if !self.known.has_orphans() {
            return false;
        }
        // In time or not: what matters is whether the next try fits.
        let _ = tokio::time::timeout(ROOM_WAIT, forgotten).await;
        true
    }

    /// Reaps orphans that nobody knows any more; returns how many.
    pub(super) async fn reap_closed(&self) -> u64 {
        let _reaping = self.collector.reaping.lock().await;
        let mut reaped = 0;
        loop {
            let inos: Vec<Ino> = {
                let mut orphans = self.collector.orphans.lock();
                let count = orphans.len().min(REAP_PAGE);
                orphans.drain(..count).collect()
            };
            if inos.is_empty() {
                return reaped;
            }
            let mut unknown = Vec::with_capacity(inos.len());
            for ino in inos {
                // Somebody may have found it just before it lost its name; then it is reaped when that is over.
                if self.known.is_known(ino) && self.known.orphaned(ino) == Reach::Known {
                    continue;
                }
                if let Some(inode) = self.inodes.get(ino) {
                    self.discard(&inode).await;
                }
                unknown.push(ino);
            }
            match self.meta.reap(&unknown).await {
                Ok(done) => reaped += done.inodes,
                Err(error) => {
                    tracing::warn!(%error, "could not remove unlinked files, will try again");
                    self.collector.orphans.lock().extend(unknown);
                    return reaped;
                }
            }
            self.counters.orphans_reaped.fetch_add(unknown.len() as u64, Ordering::Relaxed);
        }
    }

    /// Reaps orphans that ended sessions referred to.
    async fn reap_left_behind(&self) -> Result<u64> {
        let mut reaped = 0;
        let mut after = None;
        loop {
            let page = self.meta.orphans(after, REAP_PAGE).await?;
            let inos: Vec<Ino> =
                page.items.iter().copied().filter(|ino| !self.known.is_known(*ino)).collect();
            reaped += self.meta.reap(&inos).await?.inodes;
            after = page.items.last().copied();
            if !page.more || after.is_none() {
                return Ok(reaped);
            }
        }
    }

    /// Drops the state of inodes that nobody uses and that was kept by a race.
    fn sweep_inodes(&self) {
        drop(self.inodes.all());
    }

    /// Deletes packs of this session that were stored for nothing. Each waits one round, so that whoever was just given
    /// a place in it has pinned it.
    async fn delete_garbage(&self) {
        let garbage = {
            let mut garbage = self.collector.garbage.lock();
            let ripe = std::mem::take(&mut garbage.ripe);
            garbage.ripe = std::mem::take(&mut garbage.fresh);
            ripe
        };
        for pack in &garbage {
            // Nobody will name it; from here on it is not listed as waiting for that if it is stored.
            if !self.flusher.is_pinned(*pack) {
                self.data.committed(*pack);
            }
        }
        let uncommitted: HashSet<PackId> = self.data.uncommitted().into_iter().collect();
        let (waiting, deletable): (Vec<PackId>, Vec<PackId>) = garbage
            .into_iter()
            .filter(|pack| !self.flusher.is_pinned(*pack))
            .partition(|pack| uncommitted.contains(pack));
        self.collector.garbage.lock().fresh.extend(waiting);
        if let Err(error) = self.delete_unnamed(&deletable).await {
            tracing::warn!(%error, "could not delete packs, a later session will");
        }
    }

    /// Packs that batches have let go of and that the metadata did not name then.
    pub(super) fn garbage(&self) -> Vec<PackId> {
        let mut garbage = {
            let garbage = self.collector.garbage.lock();
            [garbage.ripe.as_slice(), &garbage.fresh].concat()
        };
        garbage.retain(|pack| !self.flusher.is_pinned(*pack));
        garbage
    }

    /// Gives up packs that nobody needs any more and that are not stored yet, so that the end of the mount does not wait for
    /// them. Nothing may be appended or flushed any more.
    pub(super) async fn give_up_garbage(&self) -> Result<()> {
        let garbage = self.garbage();
        if garbage.is_empty() {
            return Ok(());
        }
        // What one file gave up may hold another's bytes.
        let unnamed = self.meta.drop_packs(&garbage).await?;
        self.data.give_up(&unnamed);
        Ok(())
    }

    /// Deletes those of `packs` that the metadata does not name. A pack that one file gave up may hold another's bytes,
    /// placed there a moment later and committed since.
    async fn delete_unnamed(&self, packs: &[PackId]) -> Result<()> {
        if packs.is_empty() {
            return Ok(());
        }
        let unnamed = self.meta.drop_packs(packs).await?;
        self.delete_packs(&unnamed).await
    }

    async fn delete_packs(&self, packs: &[PackId]) -> Result<()> {
        if packs.is_empty() {
            return Ok(());
        }
        self.data.delete_packs(packs).await?;
        self.counters.packs_deleted.fetch_add(packs.len() as u64, Ordering::Relaxed);
        Ok(())
    }

    /// Deletes dead packs, rewrites mostly dead ones and merges small ones.
    async fn collect(&self, thoroughness: Thoroughness) -> Result<GcReport> {
        let mut round = self.collector.round.lock().await;
        let mut report = GcReport::default();
        let unnamed = match thoroughness {
            Thoroughness::DeadPacks | Thoroughness::Routine => Vec::new(),
            // Listed before the records are read: what is named meanwhile is found there.
            Thoroughness::Everything => self.packs_of_ended_sessions().await?,
        };
        let mut named = HashSet::new();
        let mut rewrites = Rewrites::default();
        let mut after = None;
        loop {
            let page = self.meta.packs(after, PACKS_PAGE).await?;
            self.drop_dead(&page.items, &mut report).await?;
            rewrites.extend(&page.items);
            if thoroughness == Thoroughness::Everything {
                named.extend(page.items.iter().map(|pack| pack.pack));
            }
            after = page.items.last().map(|pack| pack.pack);
            if !page.more || after.is_none() {
                break;
            }
        }
        let garbage: Vec<PackId> = unnamed.into_iter().filter(|pack| !named.contains(pack)).collect();
        self.delete_packs(&garbage).await?;
        report.packs_unnamed = garbage.len() as u64;
        if thoroughness == Thoroughness::DeadPacks {
            return Ok(report);
        }
        let in_use: HashSet<PackId> = self.data.uncommitted().into_iter().collect();
        rewrites.retain(|pack| !in_use.contains(&pack) && !self.flusher.is_pinned(pack));
        report.chunks_rewritten = self.rewrite_packs(&rewrites.choose(&mut round)).await?;
        Ok(report)
    }

    /// Deletes those of `packs` that hold nothing alive.
    async fn drop_dead(&self, packs: &[PackInfo], report: &mut GcReport) -> Result<()> {
        let uncommitted: HashSet<PackId> = self.data.uncommitted().into_iter().collect();
        let dead = |pack: &&PackInfo| {
            pack.live_bytes <= 0 && !uncommitted.contains(&pack.pack) && !self.flusher.is_pinned(pack.pack)
        };
        let dead: Vec<PackInfo> = packs.iter().filter(dead).copied().collect();
        let ids: Vec<PackId> = dead.iter().map(|pack| pack.pack).collect();
        if ids.is_empty() {
            return Ok(());
        }
        let dropped = self.meta.drop_packs(&ids).await?;
        self.delete_packs(&dropped).await?;
        report.packs_deleted += dropped.len() as u64;
        let freed = dead.iter().filter(|pack| dropped.contains(&pack.pack));
        report.bytes_freed += freed.map(|pack| pack.stored_bytes).sum::<u64>();
        Ok(())
    }

    async fn packs_of_ended_sessions(&self) -> Result<Vec<PackId>> {
        let live: HashSet<_> = self.meta.sessions().await?.into_iter().map(|session| session.id).collect();
        let own = self.meta.session_id();
        self.data
            .list_packs()
            .try_filter_map(|pack| {
                let session = pack.pack.session();
                let ended = !live.contains(&session) && own != Some(session);
                futures::future::ready(Ok(ended.then_some(pack.pack)))
            })
            .try_collect()
            .await
    }

    /// Moves what is alive in packs elsewhere, as far as their footers tell where that is; returns chunks rewritten.
    async fn rewrite_packs(&self, packs: &HashSet<PackId>) -> Result<u64> {
        let mut chunks: Vec<(Ino, ChunkIndex)> = Vec::new();
        let ids: Vec<PackId> = packs.iter().copied().collect();
        let mut footers =
            stream::iter(ids).map(|pack| self.data.pack_footer(pack)).buffer_unordered(FOOTERS_MAX);
        while let Some(footer) = footers.next().await {
            match footer {
                Ok(entries) => chunks.extend(entries.iter().map(|entry| (entry.ino, entry.chunk))),
                Err(error) if error.kind == ErrorKind::Stale => {}
                Err(error) => return Err(error),
            }
        }
        chunks.sort_unstable();
        chunks.dedup();
        self.compact_chunks(&chunks, packs, Lane::Compaction).await
    }

    /// Has a chunk compacted if it is made of too many slices.
    pub(super) fn compact_if_many(&self, inode: &InodeRef, index: ChunkIndex, chunk: &Chunk) {
        if chunk.groups >= self.options.compact_groups.max(2) && !self.is_read_only() {
            self.collector.compact_later(inode.ino, index);
        }
    }

    async fn compact_queued(&self) {
        // A file that is fsynced all the time is compacted often: a pack each time would be many.
        let lane = if self.data.stages() { Lane::Small } else { Lane::Compaction };
        loop {
            let chunks = self.collector.next_chunks();
            if chunks.is_empty() {
                return;
            }
            if let Err(error) = self.compact_chunks(&chunks, &HashSet::new(), lane).await {
                tracing::warn!(chunks = chunks.len(), %error, "could not compact chunks");
                return;
            }
            self.reap_closed().await;
        }
    }
}

/// How much a round of collection looks at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Thoroughness {
    /// The records of dead packs: the store has no room for what is rewritten.
    DeadPacks,
    /// The records of packs.
    Routine,
    /// The objects in the store too.
    Everything,
}

fn is_mostly_dead(pack: &PackInfo) -> bool {
    u64::try_from(pack.live_bytes).is_ok_and(|live| live > 0 && live < pack.stored_bytes / LIVE_PART)
}

/// Packs whose live bytes had better be elsewhere, ascending.
#[derive(Debug, Default)]
struct Rewrites {
    mostly_dead: Vec<PackInfo>,
    /// By class of [`SMALL_PACK_BYTES`].
    small: [Vec<PackInfo>; SMALL_PACK_BYTES.len()],
}

impl Rewrites {
    fn extend(&mut self, packs: &[PackInfo]) {
        for pack in packs.iter().filter(|pack| pack.state == PackState::Stored && pack.live_bytes > 0) {
            if is_mostly_dead(pack) {
                self.mostly_dead.push(*pack);
            } else if let Some(class) = SMALL_PACK_BYTES.iter().position(|max| pack.stored_bytes < *max) {
                self.small[class].push(*pack);
            }
        }
    }

    fn retain(&mut self, keep: impl Fn(PackId) -> bool) {
        self.mostly_dead.retain(|pack| keep(pack.pack));
        for class in &mut self.small {
            class.retain(|pack| keep(pack.pack));
        }
    }

    /// The packs of one round.
    fn choose(mut self, round: &mut Round) -> HashSet<PackId> {
        let mostly_dead = self.mostly_dead.iter().map(|pack| pack.pack).collect();
        let mut chosen = in_turn(mostly_dead, round.rewritten_last);
        round.rewritten_last = chosen.last().copied().or(round.rewritten_last);
        let small: HashSet<PackId> = self.small.iter().flatten().map(|pack| pack.pack).collect();
        round.merged.retain(|pack| small.contains(pack));
        self.retain(|pack| !round.merged.contains(&pack));
        let (mut packs, mut bytes) = (0, 0);
        for class in self.small.iter().filter(|class| class.len() >= MERGE_PACKS_MIN) {
            for pack in class {
                packs += 1;
                bytes += u64::try_from(pack.live_bytes).unwrap_or(0);
                if packs <= MERGE_PACKS_MAX && bytes <= MERGE_BYTES_MAX {
                    chosen.push(pack.pack);
                    round.merged.insert(pack.pack);
                }
            }
        }
        chosen.into_iter().collect()
    }
}

/// Which of `packs` (ascending) a round rewrites: the next few after `last`, and then from the beginning. Some cannot be
/// rewritten, because their footers do not tell which files were cloned from them, and must not keep others waiting.
fn in_turn(mut packs: Vec<PackId>, last: Option<PackId>) -> Vec<PackId> {
    let next = packs.partition_point(|pack| Some(*pack) <= last);
    packs.rotate_left(next);
    packs.truncate(REWRITES_MAX);
    packs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_packs_of_a_size_are_merged_once_there_are_many() {
        let pack = |id: u64, stored_bytes: u64| PackInfo {
            pack: PackId(id),
            stored_bytes,
            live_bytes: i64::try_from(stored_bytes).unwrap(),
            state: PackState::Stored,
        };
        let choose = |packs: &[PackInfo], round: &mut Round| {
            let mut rewrites = Rewrites::default();
            rewrites.extend(packs);
            let mut chosen: Vec<u64> = rewrites.choose(round).into_iter().map(|pack| pack.0).collect();
            chosen.sort_unstable();
            chosen
        };
        let mut round = Round::default();
        let mut packs: Vec<PackInfo> = (0..15).map(|id| pack(id, 10_000)).collect();
        packs.extend((100..115).map(|id| pack(id, 500_000)));
        assert_eq!(choose(&packs, &mut round), []);
        packs.push(pack(15, 60_000));
        packs.push(PackInfo { state: PackState::Staged, ..pack(99, 500_000) });
        packs.push(pack(200, 64 << 20));
        assert_eq!(choose(&packs, &mut round), (0..16).collect::<Vec<_>>());
        assert_eq!(choose(&packs, &mut round), [], "what could not be moved is not tried for ever");
        packs.retain(|pack| pack.pack.0 >= 16);
        packs.push(pack(116, 900_000));
        assert_eq!(choose(&packs, &mut round), (100..115).chain([116]).collect::<Vec<_>>());
        let many: Vec<PackInfo> = (1000..2000).map(|id| pack(id, 3 << 20)).collect();
        assert_eq!(choose(&many, &mut Round::default()).len(), 21, "64 MiB a round");
        let parts: Vec<PackInfo> = (1000..2000).map(|id| pack(id, 4 << 20)).collect();
        assert_eq!(choose(&parts, &mut Round::default()), [], "parts of large files stay");
    }

    #[test]
    fn every_mostly_dead_pack_has_its_turn() {
        let packs = |ids: &[u64]| ids.iter().copied().map(PackId).collect::<Vec<_>>();
        let all = packs(&[1, 2, 3, 5, 6, 7]);
        assert_eq!(in_turn(all.clone(), None), packs(&[1, 2, 3, 5]));
        assert_eq!(in_turn(all.clone(), Some(PackId(5))), packs(&[6, 7, 1, 2]));
        assert_eq!(in_turn(all.clone(), Some(PackId(4))), packs(&[5, 6, 7, 1]));
        assert_eq!(in_turn(all, Some(PackId(9))), packs(&[1, 2, 3, 5]));
        assert_eq!(in_turn(Vec::new(), None), Vec::new());
    }
}

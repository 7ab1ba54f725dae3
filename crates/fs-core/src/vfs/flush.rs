//! Write-back: dirty bytes go to the store, then the metadata names them.
//!
//! A few workers take jobs from a queue, many files at a time: they take what is dirty as a batch a file, place all of
//! them in packs by one `append` (long sequential files in packs of their own), wait until the packs are stored, and
//! commit many files in one transaction. Jobs come from the list of dirty files when they are old enough, from the memory
//! budget when it is short, and from fsync, which waits. Fsync has a queue and workers of its own, so that it need not
//! wait for a slow store when there is a staging directory. Several fsyncs that wait share packs and transactions.
//!
//! While memory is short, small files are sent on. Of large ones that are being written, parts are cut short only as far as
//! less than a third of the memory is on its way to the store, since that costs their readers requests.
//!
//! Batches of a file are placed in order (`append_gate`) and committed in order (see `commit`). What
//! fails stays where it is and is tried again by the next flush; who waits is told, and so is the next close.
//! Lock order: the list of dirty files, the state of one; the queues and the table of packs are leaves.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Notify, OwnedMutexGuard, oneshot};
use tokio::time::Instant;

use super::Vfs;
use super::dirty::Piece;
use super::handle::InodeRef;
use super::inode::{Failure, Life, within};
use super::request::{Fh, FsyncMode};
use crate::data::{Lane, PackTicket, Place, Pressure, RunBytes};
use crate::types::{CHUNK_BYTES, ChunkIndex, Error, ErrorKind, Ino, PackId, PackedRun, Result};

/// Files up to this length keep their bytes in the slice record.
pub(super) const INLINE_BYTES_MAX: u64 = 4 << 10;
/// What is written in order is sent on in parts of the file that end at multiples of this, each a pack.
pub(super) const UNIT_BYTES: u64 = CHUNK_BYTES / 2;
/// So many bytes that follow each other have packs of the file's own.
pub(super) const STREAM_BYTES_MIN: u64 = UNIT_BYTES / 2;
/// So many bytes that were written in order are taken for the beginning of a large file.
const IN_ORDER_BYTES: u64 = 1 << 20;
/// Aligned windows of zeros of this size become holes.
const ZERO_WINDOW_BYTES: u64 = 128 << 10;
/// Batches that are uploaded at a time, and as many more for which somebody waits.
const WORKERS: usize = 4;
/// Jobs that one worker takes together, and bytes.
const JOBS_MAX: usize = 1024;
const JOB_BYTES_MAX: u64 = 64 << 20;
/// Bytes that are handed to `append` together.
const APPEND_BYTES_MAX: u64 = 16 << 20;
/// While memory is short, it is looked so often whether more is to be sent on.
const RELIEF_PAUSE: Duration = Duration::from_millis(10);
/// While memory is short, small files that take one part in so many of it are sent on each time.
const RELIEF_PART: u64 = 4;
/// And one part in so many is left to what is on its way to the store: the rest of the usual memory is what eight writers of
/// large files need to fill their parts.
const GOING_PART: u64 = 3;
/// How often, and after how long each time, whoever stores everything looks whether staging is over.
const SETTLE_TRIES: u32 = 40;
const SETTLE_PAUSE: Duration = Duration::from_millis(25);
/// So many bytes of closed files are sent on without waiting while nothing is being sent, twice as many the next time,
/// until they fill a pack; after a pause it begins anew.
const EARLY_BYTES_MIN: u64 = 4 << 20;
const EARLY_BYTES_MAX: u64 = 16 << 20;
/// Pause before what failed is tried again without being asked.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// How much of a file a job is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Want {
    /// Long sequential ranges, sent on without waiting for them.
    Stream,
    /// Everything, until it is committed.
    All,
    /// The same, and somebody waits for it to be durable: it is staged if possible.
    Urgent,
}

/// What is done with files that have no name any more. Most are temporary: they need the store only if memory is short.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Orphans {
    Flush,
    Postpone,
}

type Done = oneshot::Sender<std::result::Result<(), Failure>>;

#[derive(Debug)]
struct Job {
    inode: InodeRef,
    want: Want,
    /// Bytes that were dirty when it was made.
    bytes: u64,
    done: Option<Done>,
}

impl Job {
    fn new(inode: InodeRef, want: Want, done: Option<Done>) -> Job {
        let bytes = inode.state().dirty.data_bytes();
        Job { inode, want, bytes, done }
    }
}

/// Queue, lists and packs of the write-back.
#[derive(Debug)]
pub(super) struct Flusher {
    queue: Queue,
    urgent: Queue,
    /// Dirty files, the one that became so first in front.
    dirty: Mutex<VecDeque<(Instant, InodeRef)>>,
    early: Mutex<Early>,
    /// Bytes of jobs that wait for a worker or are being placed in packs.
    placing: AtomicU64,
    /// Workers that are storing files.
    busy: AtomicUsize,
    packs: Mutex<HashMap<PackId, PackUse>>,
}

/// When closed files are sent on before they are old.
#[derive(Debug, Default)]
struct Early {
    /// Of files that were closed since files were sent on, and when the first was: what is old is sent in any case.
    bytes: u64,
    first: Option<Instant>,
    /// How many were needed, and when.
    last: Option<(u64, Instant)>,
}

impl Early {
    fn closed(&mut self, bytes: u64, pause: Duration) {
        if self.first.is_none_or(|first| first.elapsed() >= pause) {
            self.first = Some(Instant::now());
            self.bytes = 0;
        }
        self.bytes += bytes;
    }

    /// How many bytes to send on now that a file was closed and nothing is being sent.
    fn due(&mut self, pause: Duration) -> Option<u64> {
        let enough = match self.last {
            Some((bytes, since)) if since.elapsed() < pause => (2 * bytes).min(EARLY_BYTES_MAX),
            _ => EARLY_BYTES_MIN,
        };
        if self.bytes < enough {
            return None;
        }
        self.last = Some((enough, Instant::now()));
        self.first = None;
        Some(std::mem::take(&mut self.bytes))
    }
}

/// Jobs that wait for a worker.
#[derive(Debug, Default)]
struct Queue {
    jobs: Mutex<VecDeque<Job>>,
    queued: Notify,
}

/// A pack that batches refer to.
#[derive(Debug, Default)]
struct PackUse {
    /// Batches that name it.
    pins: usize,
    /// The metadata has a record of it, which says that it is there.
    named: Option<Place>,
}

impl Queue {
    fn push(&self, job: Job) {
        self.jobs.lock().push_back(job);
        self.queued.notify_one();
    }

    /// Takes jobs for one worker, waiting until there are some.
    async fn take(&self) -> Vec<Job> {
        loop {
            {
                let mut queue = self.jobs.lock();
                let mut jobs = Vec::new();
                let mut bytes = 0;
                while jobs.len() < JOBS_MAX
                    && bytes < JOB_BYTES_MAX
                    && let Some(job) = queue.pop_front()
                {
                    bytes += job.bytes;
                    jobs.push(job);
                }
                if !queue.is_empty() {
                    self.queued.notify_one();
                }
                if !jobs.is_empty() {
                    return jobs;
                }
            }
            self.queued.notified().await;
        }
    }
}

impl Flusher {
    pub(super) fn new() -> Flusher {
        Flusher {
            queue: Queue::default(),
            urgent: Queue::default(),
            dirty: Mutex::default(),
            early: Mutex::default(),
            placing: AtomicU64::new(0),
            busy: AtomicUsize::new(0),
            packs: Mutex::default(),
        }
    }

    /// Adds a file to the dirty ones; the caller has set its `listed`.
    pub(super) fn list(&self, inode: InodeRef) {
        self.dirty.lock().push_back((Instant::now(), inode));
    }

    /// Sends on what was written sequentially.
    pub(super) fn stream(&self, inode: InodeRef) {
        self.push(Job::new(inode, Want::Stream, None));
    }

    /// Whether files are being stored.
    pub(super) fn is_busy(&self) -> bool {
        self.busy.load(Ordering::Relaxed) > 0
    }

    fn push(&self, job: Job) {
        self.placing.fetch_add(job.bytes, Ordering::Relaxed);
        match job.want {
            Want::Urgent => self.urgent.push(job),
            Want::Stream | Want::All => self.queue.push(job),
        }
    }

    /// Takes files that became dirty before `since` off the list, or the oldest ones that hold `bytes` at least.
    fn take_listed(&self, since: Instant, bytes: u64) -> Vec<InodeRef> {
        let mut taken = Vec::new();
        let mut held = 0;
        let mut dirty = self.dirty.lock();
        while let Some((listed, _)) = dirty.front()
            && (*listed <= since || held < bytes)
            && let Some((_, inode)) = dirty.pop_front()
        {
            held += inode.state().dirty.data_bytes();
            taken.push(inode);
        }
        taken
    }

    /// Takes files off the list: the oldest that hold `bytes` together, without those that are being written in order, and
    /// of these only so many that all hold `excess`, the largest first.
    fn take_for_room(&self, bytes: u64, excess: u64) -> Vec<InodeRef> {
        let enough = bytes.max(excess);
        let mut taken = Vec::new();
        let mut held = 0;
        let mut streams: Vec<(u64, InodeRef)> = Vec::new();
        let mut dirty = self.dirty.lock();
        dirty.retain(|(_, inode)| {
            if held >= enough {
                return true;
            }
            let state = inode.state();
            let bytes = state.dirty.data_bytes();
            let in_order = state.stream.bytes() >= IN_ORDER_BYTES;
            if in_order {
                streams.push((bytes, inode.clone()));
            } else {
                held += bytes;
                taken.push(inode.clone());
            }
            in_order
        });
        if held >= excess {
            return taken;
        }
        streams.sort_unstable_by_key(|(bytes, inode)| (*bytes, inode.ino));
        // What is too little for packs of its own fills one with others.
        let own = streams.last().is_some_and(|(bytes, _)| *bytes >= STREAM_BYTES_MIN);
        let enough = if own { excess } else { excess.max(APPEND_BYTES_MAX) };
        let mut chosen = HashSet::new();
        while held < enough
            && let Some((bytes, inode)) = streams.pop()
        {
            held += bytes;
            chosen.insert(inode.ino);
            taken.push(inode);
        }
        dirty.retain(|(_, inode)| !chosen.contains(&inode.ino));
        taken
    }

    /// Keeps a pack from being collected until it is unpinned. `named`: the metadata has a record of it.
    pub(super) fn pin(&self, pack: PackId, named: bool) {
        let mut packs = self.packs.lock();
        let pack = packs.entry(pack).or_default();
        pack.pins += 1;
        if named {
            pack.named = pack.named.max(Some(Place::Staging));
        }
    }

    /// Whether a batch refers to a pack.
    pub(super) fn is_pinned(&self, pack: PackId) -> bool {
        self.packs.lock().contains_key(&pack)
    }

    /// Returns packs that nothing refers to any more and that the metadata never named.
    fn unpin(&self, pins: &[PackId]) -> Vec<PackId> {
        let mut garbage = Vec::new();
        let mut packs = self.packs.lock();
        for pack in pins {
            if let Some(used) = packs.get_mut(pack) {
                used.pins -= 1;
                if used.pins == 0 {
                    if used.named.is_none() {
                        garbage.push(*pack);
                    }
                    packs.remove(pack);
                }
            }
        }
        garbage
    }

    /// Whether a commit that relies on the pack in `place` must write its record: it grows with what is staged, and is
    /// final once the pack is stored.
    pub(super) fn must_name(&self, pack: PackId, place: Place) -> bool {
        place == Place::Staging
            || self.packs.lock().get(&pack).is_none_or(|pack| pack.named != Some(Place::Store))
    }

    /// The metadata has a record of the pack.
    pub(super) fn named(&self, pack: PackId, place: Place) {
        if let Some(pack) = self.packs.lock().get_mut(&pack) {
            pack.named = pack.named.max(Some(place));
        }
    }
}

impl Vfs {
    /// Starts the workers, the timer and the watch on memory.
    pub(super) fn start_flusher(self: &Arc<Vfs>) {
        for worker in 0..2 * WORKERS {
            let vfs = Arc::downgrade(self);
            self.tasks.spawn(async move {
                while let Some(vfs) = vfs.upgrade() {
                    let queue = if worker < WORKERS { &vfs.flusher.queue } else { &vfs.flusher.urgent };
                    let jobs = queue.take().await;
                    vfs.flusher.busy.fetch_add(1, Ordering::Relaxed);
                    vfs.run_jobs(jobs).await;
                    vfs.flusher.busy.fetch_sub(1, Ordering::Relaxed);
                }
            });
        }
        let vfs = Arc::downgrade(self);
        let flush_after = self.options.flush_after;
        let tick = (flush_after / 10).clamp(Duration::from_millis(5), Duration::from_millis(500));
        self.tasks.spawn(async move {
            let mut ticks = tokio::time::interval(tick);
            ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
            loop {
                ticks.tick().await;
                let Some(vfs) = vfs.upgrade() else { return };
                if let Some(since) = Instant::now().checked_sub(flush_after) {
                    vfs.flush_listed(vfs.flusher.take_listed(since, 0), Orphans::Postpone);
                }
            }
        });
        let vfs = Arc::downgrade(self);
        let mut pressure = self.memory.subscribe();
        self.tasks.spawn(async move {
            while pressure.wait_for(|pressure| *pressure == Pressure::High).await.is_ok() {
                let Some(vfs) = vfs.upgrade() else { return };
                vfs.relieve();
                drop(vfs);
                // What was started now has to take effect before more is.
                tokio::time::sleep(RELIEF_PAUSE).await;
            }
        });
    }

    /// A file was closed that has so many dirty bytes. They will be sent when they are old, or with many others; while the
    /// store has nothing to do, as soon as they are enough for a pack that is not small.
    pub(super) fn closed_dirty(&self, bytes: u64) {
        let due = {
            let mut early = self.flusher.early.lock();
            early.closed(bytes, self.options.flush_after);
            if self.flusher.is_busy() { None } else { early.due(self.options.flush_after) }
        };
        if let Some(bytes) = due {
            let now = Instant::now();
            let since = now.checked_sub(self.options.flush_after).unwrap_or(now);
            self.flush_listed(self.flusher.take_listed(since, bytes), Orphans::Flush);
        }
    }

    /// Memory is short: sends on what makes room.
    pub(super) fn relieve(&self) {
        // What is being placed is counted twice while it is compressed.
        let going = 2 * self.flusher.placing.load(Ordering::Relaxed) + self.data.closed_bytes();
        let resting = self.memory.used_bytes().saturating_sub(going);
        let bytes_max = self.memory.bytes_max();
        let mut excess = resting.saturating_sub(bytes_max - bytes_max / GOING_PART);
        if going == 0 && self.memory.is_waited_for() {
            // Nothing else will make room.
            excess = excess.max(1);
        }
        let files = self.flusher.take_for_room(bytes_max / RELIEF_PART, excess);
        let flushed = self.flush_listed(files, Orphans::Flush);
        if flushed < excess {
            // Packs that are being filled hold memory, too.
            self.data.seal_all();
        }
    }

    /// Starts to flush files that were taken off the list; returns how many bytes of them are dirty.
    fn flush_listed(&self, files: Vec<InodeRef>, orphans: Orphans) -> u64 {
        let mut bytes = 0;
        for inode in files {
            let (needed, postponed) = {
                let mut state = inode.state();
                let needed = state.needs_flush();
                let postponed = needed && state.life == Life::Orphan && orphans == Orphans::Postpone;
                state.listed = postponed;
                (needed, postponed)
            };
            if postponed {
                self.flusher.list(inode);
            } else if needed {
                let job = Job::new(inode, Want::All, None);
                bytes += job.bytes;
                self.flusher.push(job);
            }
        }
        bytes
    }

    /// Makes durable what is dirty in a file, staged or stored, and commits it.
    pub(super) async fn flush_inode(&self, inode: &InodeRef) -> Result<()> {
        self.data.health().check()?;
        if !inode.state().needs_flush() {
            return Ok(());
        }
        let (done, finished) = oneshot::channel();
        self.flusher.push(Job::new(inode.clone(), Want::Urgent, Some(done)));
        self.finished(finished).await
    }

    /// Waits for a job, as long as there are workers.
    async fn finished(&self, finished: oneshot::Receiver<std::result::Result<(), Failure>>) -> Result<()> {
        tokio::select! {
            biased;
            // A worker that panics lets go of its jobs; all tasks are ended a moment later.
            Ok(result) = finished => Ok(result?),
            () = self.tasks.cancelled() => {
                self.data.health().check()?;
                Err(Error::new(ErrorKind::Io, "the tasks that store files have ended"))
            }
        }
    }

    /// Stores and commits everything that is dirty now; the metadata need not be durable then.
    ///
    /// # Errors
    /// The first failure; the rest is tried nevertheless.
    pub(super) async fn flush_everything(&self) -> Result<()> {
        let mut dirty = self.inodes.all();
        dirty.retain(|inode| inode.state().needs_flush());
        // Inodes of a directory are numbered close together: its files come to lie side by side in packs.
        dirty.sort_unstable_by_key(|inode| inode.ino);
        let mut waiting = Vec::with_capacity(dirty.len());
        for inode in dirty {
            let (done, finished) = oneshot::channel();
            self.flusher.push(Job::new(inode, Want::All, Some(done)));
            waiting.push(finished);
        }
        let mut outcome = Ok(());
        for finished in waiting {
            outcome = outcome.and(self.finished(finished).await);
        }
        outcome
    }

    /// Stores everything: nothing is only staged afterwards.
    ///
    /// # Errors
    /// The first failure; the rest is stored nevertheless.
    pub async fn sync_all(&self) -> Result<()> {
        self.data.health().check()?;
        let flushed = self.flush_everything().await;
        let stored = self.data.store_all_but(&self.garbage().into_iter().collect()).await;
        // What a batch still pins is settled when that is committed, which others may be about to do.
        let mut tries = 0;
        while !self.settle_staged().await? && tries < SETTLE_TRIES {
            tries += 1;
            tokio::time::sleep(SETTLE_PAUSE).await;
        }
        self.meta.sync().await?;
        flushed.and(stored)
    }

    /// Makes a file durable, with every change of names before (fsync(2), fdatasync(2)).
    ///
    /// # Errors
    /// `Io`, `NoSpace`: not everything could be stored; the bytes are kept, and a later fsync may succeed.
    pub async fn fsync(&self, ino: Ino, fh: Option<Fh>, mode: FsyncMode) -> Result<()> {
        // Both modes commit length and times with the data: there is nothing to leave out.
        let (FsyncMode::Data | FsyncMode::All) = mode;
        let Some(fh) = fh else {
            return match self.inodes.get(ino) {
                Some(inode) => self.fsync_inode(&inode).await,
                None => self.sync_metadata().await,
            };
        };
        let handle = self.handles.file(fh)?;
        let before = handle.inode.state().failures;
        let result = self.fsync_inode(&handle.inode).await;
        // Who was told by fsync need not be told again by close, nor of what is made good by now.
        let told = if result.is_ok() { before } else { handle.inode.state().failures };
        handle.failures_told.fetch_max(told, Ordering::Relaxed);
        result
    }

    pub(super) async fn fsync_inode(&self, inode: &InodeRef) -> Result<()> {
        self.flush_inode(inode).await?;
        self.sync_metadata().await
    }

    /// Makes every change of names and attributes durable that has returned.
    pub(super) async fn sync_metadata(&self) -> Result<()> {
        if self.meta.session_id().is_none() {
            return Ok(());
        }
        self.data.health().check()?;
        self.meta.sync().await
    }

    /// Flushes the files of `jobs` together and tells who waits.
    async fn run_jobs(self: &Arc<Vfs>, jobs: Vec<Job>) {
        let mut files: BTreeMap<Ino, (InodeRef, Want)> = BTreeMap::new();
        for job in &jobs {
            let entry = files.entry(job.inode.ino).or_insert_with(|| (job.inode.clone(), job.want));
            entry.1 = entry.1.max(job.want);
        }
        let files: Vec<(InodeRef, Want)> = files.into_values().collect();
        let mut failures = HashMap::new();
        let tickets = self.place(&files, &mut failures).await;
        self.flusher.placing.fetch_sub(jobs.iter().map(|job| job.bytes).sum(), Ordering::Relaxed);
        let mut whole = Vec::new();
        let mut urgent = Vec::new();
        for (inode, want) in files {
            match want {
                Want::Stream => self.follow(inode),
                Want::All => whole.push(inode),
                Want::Urgent => {
                    urgent.extend(tickets.get(&inode.ino).into_iter().flatten().cloned());
                    whole.push(inode);
                }
            }
        }
        if !urgent.is_empty() {
            self.data.hasten(&urgent).await;
        }
        for (ino, failure) in self.commit(&whole, &tickets).await {
            failures.entry(ino).or_insert(failure);
        }
        for inode in &whole {
            self.settle(inode, failures.get(&inode.ino));
        }
        if let Some((ino, failure)) = failures.iter().next() {
            let (ino, files, error) = (ino.0, failures.len(), &failure.text);
            tracing::warn!(ino, files, %error, "could not store files, their bytes are kept");
        }
        for job in jobs {
            if let Some(done) = job.done {
                let result = failures.get(&job.inode.ino).cloned().map_or(Ok(()), Err);
                // Who has given up waiting need not be told.
                let _ = done.send(result);
            }
        }
    }

    /// Notes how a flush went, and sees that what is left is tried again.
    fn settle(&self, inode: &InodeRef, failure: Option<&Failure>) {
        let newly = {
            let mut state = inode.state();
            if let Some(failure) = failure {
                state.failures += 1;
                state.failure = Some(failure.clone());
            } else if !state.needs_flush() || state.batches.is_empty() {
                state.failure = None;
            }
            state.needs_flush() && !std::mem::replace(&mut state.listed, true)
        };
        if newly {
            self.flusher.list(inode.clone());
        }
        if let Some(failure) = failure {
            self.counters.flush_failures.fetch_add(1, Ordering::Relaxed);
            if failure.kind == ErrorKind::NoSpace {
                self.collector.store_is_full();
            }
        }
    }

    /// Takes what is dirty and gives it places in packs. Returns the packs that each file then waits for, those of earlier
    /// batches included.
    async fn place(
        &self,
        files: &[(InodeRef, Want)],
        failures: &mut HashMap<Ino, Failure>,
    ) -> HashMap<Ino, Vec<PackTicket>> {
        let mut gates: Vec<OwnedMutexGuard<()>> = Vec::with_capacity(files.len());
        for (inode, _) in files {
            gates.push(Arc::clone(&inode.append_gate).lock_owned().await);
        }
        let mut shared = Vec::new();
        let mut seal_small = false;
        for (inode, want) in files {
            let runs = self.take_dirty(inode, *want);
            // What is staged leaves its pack open for the next.
            seal_small |= *want == Want::All || (*want == Want::Urgent && !self.data.stages());
            let own_packs = *want == Want::Stream || runs.iter().any(|run| run.run.len >= STREAM_BYTES_MIN);
            let runs = runs.into_iter().map(|run| (inode, run));
            let lane = Lane::Stream(inode.ino);
            if own_packs {
                self.append(lane, runs.collect(), failures).await;
            } else {
                shared.extend(runs);
            }
            if *want != Want::Stream {
                self.data.seal(lane);
            }
        }
        self.append(Lane::Small, shared, failures).await;
        if seal_small {
            self.data.seal(Lane::Small);
        }
        let tickets = |inode: &InodeRef| {
            let state = inode.state();
            state.batches.iter().flat_map(|batch| batch.tickets.iter().cloned()).collect()
        };
        files.iter().map(|(inode, _)| (inode.ino, tickets(inode))).collect()
    }

    /// Makes a batch of what is dirty; returns everything of the file that has no place yet.
    fn take_dirty(&self, inode: &InodeRef, want: Want) -> Vec<Unplaced> {
        let mut state = inode.state();
        let state = &mut *state;
        if state.life == Life::Dead {
            return Vec::new();
        }
        let taken = match want {
            Want::All | Want::Urgent => state.dirty.take(),
            Want::Stream => state.dirty.take_long(STREAM_BYTES_MIN, UNIT_BYTES),
        };
        if !taken.is_empty() {
            let grow_to = match want {
                Want::All | Want::Urgent => state.length,
                Want::Stream => taken.end(),
            };
            state.push_taken(taken, grow_to);
            state.hold(None);
        }
        let inline = state.length <= INLINE_BYTES_MAX;
        let mut runs = Vec::new();
        for batch in state.batches.iter_mut().filter(|batch| !batch.placed) {
            batch.pieces.zeros_to_holes(ZERO_WINDOW_BYTES);
            let unplaced = if inline { Vec::new() } else { batch.pieces.runs(UNIT_BYTES) };
            if unplaced.is_empty() {
                batch.placed = true;
                batch.guard = None;
            }
            runs.extend(unplaced.into_iter().map(|run| Unplaced { batch: batch.id, run }));
        }
        self.account(state, 0);
        runs
    }

    /// Appends runs to a lane and notes their places.
    async fn append(
        &self,
        lane: Lane,
        unplaced: Vec<(&InodeRef, Unplaced)>,
        failures: &mut HashMap<Ino, Failure>,
    ) {
        let mut unplaced = VecDeque::from(unplaced);
        while !unplaced.is_empty() {
            let mut group = Vec::new();
            let mut bytes = 0;
            while let Some((_, next)) = unplaced.front()
                && (bytes == 0 || bytes + next.run.len <= APPEND_BYTES_MAX)
                && let Some(next) = unplaced.pop_front()
            {
                bytes += next.1.run.len;
                group.push(next);
            }
            let runs = group
                .iter_mut()
                .map(|(inode, unplaced)| {
                    let chunk = ChunkIndex::of(unplaced.run.offset);
                    let offset = within(chunk, unplaced.run.offset);
                    RunBytes {
                        ino: inode.ino,
                        chunk,
                        offset,
                        bytes: std::mem::take(&mut unplaced.run.pieces),
                    }
                })
                .collect();
            match self.data.append(lane, runs).await {
                Ok(appended) => {
                    for ((inode, unplaced), appended) in group.iter().zip(appended) {
                        self.placed(inode, unplaced, &Arc::new(appended.run), &appended.pack);
                    }
                    let same_batch =
                        |(a, left): &(&InodeRef, Unplaced), (b, right): &(&InodeRef, Unplaced)| {
                            a.ino == b.ino && left.batch == right.batch
                        };
                    for of_batch in group.chunk_by(same_batch) {
                        if let Some((inode, unplaced)) = of_batch.first() {
                            note_placed(inode, unplaced.batch);
                        }
                    }
                }
                Err(error) => {
                    let failure = Failure::from(&error);
                    for (inode, _) in group {
                        failures.insert(inode.ino, failure.clone());
                    }
                }
            }
        }
    }

    /// A run has its place: its batch names it from now on.
    fn placed(&self, inode: &InodeRef, unplaced: &Unplaced, run: &Arc<PackedRun>, ticket: &PackTicket) {
        let mut state = inode.state();
        let Some(batch) = state.batches.iter_mut().find(|batch| batch.id == unplaced.batch) else { return };
        batch.pieces.placed(unplaced.run.offset, run);
        if let Some(known) = batch.tickets.iter_mut().find(|known| known.pack() == ticket.pack()) {
            known.merge(ticket);
        } else {
            self.flusher.pin(ticket.pack(), false);
            batch.tickets.push(ticket.clone());
            batch.pins.push(ticket.pack());
        }
    }

    /// Commits a streamed file's packs as they are stored, in a task of its own.
    fn follow(self: &Arc<Vfs>, inode: InodeRef) {
        if std::mem::replace(&mut inode.state().following, true) {
            return;
        }
        let vfs = Arc::downgrade(self);
        self.tasks.spawn(async move {
            loop {
                let Some(vfs) = vfs.upgrade() else { return };
                let failure = vfs.commit_oldest(&inode).await;
                vfs.settle(&inode, failure.as_ref());
                if let Some(failure) = &failure {
                    tracing::warn!(ino = inode.ino.0, error = %failure.text, "could not store a file, its bytes are kept");
                }
                {
                    let mut state = inode.state();
                    // One that has no place yet needs a flush, which commits the rest too.
                    if !state.batches.front().is_some_and(|batch| batch.placed) {
                        state.following = false;
                        return;
                    }
                }
                drop(vfs);
                if failure.is_some() {
                    tokio::time::sleep(RETRY_AFTER).await;
                }
            }
        });
    }

    /// Lets go of packs; those that the metadata never named are garbage.
    pub(super) fn unpin(&self, pins: &[PackId]) {
        let garbage = self.flusher.unpin(pins);
        self.collector.delete_later(garbage);
    }

    /// Drops everything that is not committed of a file that nobody can reach.
    pub(super) async fn discard(&self, inode: &InodeRef) {
        let _append = inode.append_gate.lock().await;
        let _gate = inode.flush_gate.lock().await;
        let mut pins = Vec::new();
        {
            let mut state = inode.state();
            state.life = Life::Dead;
            state.punch(&(0..u64::MAX));
            for mut batch in std::mem::take(&mut state.batches) {
                pins.append(&mut batch.pins);
            }
            state.mtime = None;
            state.atime = None;
            state.failure = None;
            self.account(&mut state, 0);
        }
        self.unpin(&pins);
    }
}

/// Notes that every run of a batch has its place, if that is so. Looks at all of them, so once for many that were placed.
fn note_placed(inode: &InodeRef, batch: u64) {
    let mut state = inode.state();
    let Some(batch) = state.batches.iter_mut().find(|known| known.id == batch) else { return };
    if !batch.pieces.iter().any(|(_, piece)| matches!(piece, Piece::Fixed(_))) {
        batch.placed = true;
        batch.guard = None;
    }
}

/// A run of a batch that has no place.
struct Unplaced {
    batch: u64,
    run: super::dirty::Run,
}

//! Write-back: dirty bytes go to the store, then the metadata names them.
//!
//! A few workers take jobs from a queue, many files at a time: they take what is dirty as a batch a file, place all of
//! them in packs by one `append` (long sequential files in packs of their own), wait until the packs are stored, and
//! commit many files in one transaction. Jobs come from the list of dirty files when they are old enough, from the memory
//! budget when it is short, and from fsync, which waits. Several fsyncs that wait share packs and transactions.
//!
//! Batches of a file are placed in order (`append_gate`) and committed in order (oldest first, under `flush_gate`). What
//! fails stays where it is and is tried again by the next flush; who waits is told, and so is the next close.
//! Lock order: queue and lists are leaves; the table of packs is a leaf.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Notify, OwnedMutexGuard, oneshot};
use tokio::time::Instant;

use super::Vfs;
use super::dirty::{Piece, PieceMap};
use super::handle::InodeRef;
use super::inode::{Failure, Fresh, InodeState, Life, within};
use super::request::{Fh, FsyncMode};
use crate::data::{Extent, Lane, PackTicket, Pressure, RunBytes, Source, StoredPack};
use crate::meta::{FileCommit, NewPack};
use crate::types::{
    Block, CHUNK_BYTES, ChunkIndex, Error, ErrorKind, Ino, PackId, PackedRun, Result, Slice, Stored,
    Timestamp,
};

/// Files up to this length keep their bytes in the slice record.
const INLINE_BYTES_MAX: u64 = 4 << 10;
/// A sequential write of so many bytes is sent on at once, in packs of the file's own.
pub(super) const STREAM_BYTES_MIN: u64 = 8 << 20;
/// Aligned windows of zeros of this size become holes.
const ZERO_WINDOW_BYTES: u64 = 128 << 10;
/// Batches that are uploaded at a time.
const WORKERS: usize = 4;
/// Jobs that one worker takes together, and bytes.
const JOBS_MAX: usize = 1024;
const JOB_BYTES_MAX: u64 = 64 << 20;
/// Bytes that are handed to `append` together.
const APPEND_BYTES_MAX: u64 = 16 << 20;
/// Files and bytes of records in one transaction.
const COMMIT_FILES_MAX: usize = 256;
const COMMIT_BYTES_MAX: usize = 400_000;
/// Records of one file in one transaction, in bytes.
const FILE_COMMIT_BYTES_MAX: usize = 300_000;
/// While memory is short, open packs are closed so often.
const SEAL_PAUSE: Duration = Duration::from_millis(250);
/// Pause before what failed is tried again without being asked.
const RETRY_AFTER: Duration = Duration::from_secs(1);
/// A hole over more chunks than this is committed only where there are chunks.
const HOLE_CHUNKS_MAX: u64 = 64;

/// How much of a file a job is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Want {
    /// Long sequential ranges, sent on without waiting for them.
    Stream,
    /// Everything, until it is committed.
    All,
}

type Done = oneshot::Sender<std::result::Result<(), Failure>>;

#[derive(Debug)]
struct Job {
    inode: InodeRef,
    want: Want,
    done: Option<Done>,
}

/// Queue, lists and packs of the write-back.
#[derive(Debug)]
pub(super) struct Flusher {
    queue: Mutex<VecDeque<Job>>,
    queued: Notify,
    /// Dirty files, the one that became so first in front.
    dirty: Mutex<VecDeque<(Instant, InodeRef)>>,
    hurry: Notify,
    packs: Mutex<HashMap<PackId, PackUse>>,
}

/// A pack that batches refer to.
#[derive(Debug, Default)]
struct PackUse {
    /// Batches that name it.
    pins: usize,
    /// Whether the metadata has a record of it.
    named: bool,
}

impl Flusher {
    pub(super) fn new() -> Flusher {
        Flusher {
            queue: Mutex::default(),
            queued: Notify::new(),
            dirty: Mutex::default(),
            hurry: Notify::new(),
            packs: Mutex::default(),
        }
    }

    /// Adds a file to the dirty ones; the caller has set its `listed`.
    pub(super) fn list(&self, inode: InodeRef) {
        self.dirty.lock().push_back((Instant::now(), inode));
    }

    /// Sends on what was written sequentially.
    pub(super) fn stream(&self, inode: InodeRef) {
        self.push(Job { inode, want: Want::Stream, done: None });
    }

    /// Memory is short.
    pub(super) fn hurry(&self) {
        self.hurry.notify_one();
    }

    fn push(&self, job: Job) {
        self.queue.lock().push_back(job);
        self.queued.notify_one();
    }

    /// Takes jobs for one worker, waiting until there are some.
    async fn take(&self) -> Vec<Job> {
        loop {
            {
                let mut queue = self.queue.lock();
                let mut jobs = Vec::new();
                let mut bytes = 0;
                while jobs.len() < JOBS_MAX
                    && bytes < JOB_BYTES_MAX
                    && let Some(job) = queue.pop_front()
                {
                    bytes += job.inode.state().dirty.data_bytes();
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

    /// Keeps a pack from being collected until it is unpinned.
    pub(super) fn pin(&self, pack: PackId, named: bool) {
        let mut packs = self.packs.lock();
        let pack = packs.entry(pack).or_default();
        pack.pins += 1;
        pack.named |= named;
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
                    if !used.named {
                        garbage.push(*pack);
                    }
                    packs.remove(pack);
                }
            }
        }
        garbage
    }

    fn is_named(&self, pack: PackId) -> bool {
        self.packs.lock().get(&pack).is_some_and(|pack| pack.named)
    }

    /// The metadata has a record of the pack.
    pub(super) fn named(&self, pack: PackId) {
        if let Some(pack) = self.packs.lock().get_mut(&pack) {
            pack.named = true;
        }
    }
}

/// What a file's commit takes away from its batches.
struct Prepared {
    inode: InodeRef,
    commit: FileCommit,
    /// Ranges of batches that are committed with it.
    taken: Vec<(u64, Range<u64>)>,
    /// Batches of which nothing is left then.
    complete: Vec<u64>,
    packs: HashSet<PackId>,
    bytes: usize,
    mtime: Option<Timestamp>,
}

impl Vfs {
    /// Starts the workers, the timer and the watch on memory.
    pub(super) fn start_flusher(self: &Arc<Vfs>) {
        for _ in 0..WORKERS {
            let vfs = Arc::downgrade(self);
            self.tasks.spawn(async move {
                while let Some(vfs) = vfs.upgrade() {
                    let jobs = vfs.flusher.take().await;
                    vfs.run_jobs(jobs).await;
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
                    vfs.flush_listed(since, 0);
                }
            }
        });
        let vfs = Arc::downgrade(self);
        let mut pressure = self.memory.subscribe();
        self.tasks.spawn(async move {
            let mut sealed = Instant::now();
            loop {
                let Some(vfs) = vfs.upgrade() else { return };
                let waiting = vfs.flusher.hurry.notified();
                let short = pressure.wait_for(|pressure| *pressure == Pressure::High);
                tokio::select! {
                    () = waiting => {}
                    short = short => if short.is_err() { return },
                }
                vfs.relieve();
                // Packs that are being filled hold memory too, but closing them all the time would make them tiny.
                if sealed.elapsed() >= SEAL_PAUSE {
                    vfs.data.seal_all();
                    sealed = Instant::now();
                }
                // What was started now has to take effect before more is.
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        });
    }

    /// Starts to flush the oldest dirty files, about a quarter of the budget.
    fn relieve(&self) {
        let now = Instant::now();
        let since = now.checked_sub(self.options.flush_after).unwrap_or(now);
        self.flush_listed(since, (self.memory.bytes_max() / 4).max(1));
    }

    fn flush_listed(&self, since: Instant, bytes: u64) {
        for inode in self.flusher.take_listed(since, bytes) {
            let (needed, postponed) = {
                let mut state = inode.state();
                state.listed = false;
                let needed = state.needs_flush();
                // Most files that are unlinked while open are temporary: they need the store only if memory is short.
                let postponed = needed && state.life == Life::Orphan && bytes == 0;
                state.listed = postponed;
                (needed, postponed)
            };
            if postponed {
                self.flusher.list(inode);
            } else if needed {
                self.flusher.push(Job { inode, want: Want::All, done: None });
            }
        }
    }

    /// Stores what is dirty in a file and commits it.
    pub(super) async fn flush_inode(&self, inode: &InodeRef) -> Result<()> {
        if !inode.state().needs_flush() {
            return Ok(());
        }
        let (done, finished) = oneshot::channel();
        self.flusher.push(Job { inode: inode.clone(), want: Want::All, done: Some(done) });
        match finished.await {
            Ok(result) => Ok(result?),
            Err(_) => Err(Error::new(ErrorKind::Io, "the filesystem is being shut down")),
        }
    }

    /// Stores and commits everything that is dirty now; the metadata need not be durable then.
    ///
    /// # Errors
    /// The first failure; the rest is tried nevertheless.
    pub(super) async fn flush_everything(&self) -> Result<()> {
        let dirty: Vec<InodeRef> =
            self.inodes.all().into_iter().filter(|inode| inode.state().needs_flush()).collect();
        let mut waiting = Vec::with_capacity(dirty.len());
        for inode in dirty {
            let (done, finished) = oneshot::channel();
            self.flusher.push(Job { inode, want: Want::All, done: Some(done) });
            waiting.push(finished);
        }
        let mut failure = None;
        for finished in waiting {
            match finished.await {
                Ok(Ok(())) => {}
                Ok(Err(failed)) => failure = failure.or(Some(failed.into())),
                Err(_) => {
                    failure =
                        failure.or(Some(Error::new(ErrorKind::Io, "the filesystem is being shut down")));
                }
            }
        }
        failure.map_or(Ok(()), Err)
    }

    /// Makes everything durable (sync(2)).
    ///
    /// # Errors
    /// The first failure; the rest is stored nevertheless.
    pub async fn sync_all(&self) -> Result<()> {
        let flushed = self.flush_everything().await;
        self.meta.sync().await?;
        flushed
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
        let result = self.fsync_inode(&handle.inode).await;
        // Who was told by fsync need not be told again by close.
        let failures = handle.inode.state().failures;
        handle.failures_told.store(failures, Ordering::Relaxed);
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
        let mut whole = Vec::new();
        for (inode, want) in files {
            match want {
                Want::Stream => self.follow(inode),
                Want::All => whole.push(inode),
            }
        }
        for (ino, failure) in self.commit(&whole, &tickets).await {
            failures.entry(ino).or_insert(failure);
        }
        for inode in &whole {
            self.settle(inode, failures.get(&inode.ino));
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
            tracing::warn!(ino = inode.ino.0, error = %failure.text, "could not store a file, its bytes are kept");
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
            let (lane, runs) = self.take_dirty(inode, *want);
            seal_small |= *want == Want::All;
            if lane == Lane::Small {
                shared.extend(runs.into_iter().map(|run| (inode, run)));
                continue;
            }
            let runs = runs.into_iter().map(|run| (inode, run)).collect();
            self.append(lane, runs, failures).await;
            if *want == Want::All {
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
    fn take_dirty(&self, inode: &InodeRef, want: Want) -> (Lane, Vec<Unplaced>) {
        let mut state = inode.state();
        let state = &mut *state;
        if state.life == Life::Dead {
            return (Lane::Small, Vec::new());
        }
        let taken = match want {
            Want::All => state.dirty.take(),
            Want::Stream => state.dirty.take_long(STREAM_BYTES_MIN / 2),
        };
        if !taken.is_empty() {
            let grow_to = match want {
                Want::All => state.length,
                Want::Stream => taken.end(),
            };
            state.push_taken(taken, grow_to);
            state.hold(None);
        }
        let inline = state.length <= INLINE_BYTES_MAX;
        let mut runs = Vec::new();
        for batch in state.batches.iter_mut().filter(|batch| !batch.placed) {
            batch.pieces.zeros_to_holes(ZERO_WINDOW_BYTES);
            let unplaced = if inline { Vec::new() } else { batch.pieces.runs() };
            if unplaced.is_empty() {
                batch.placed = true;
                batch.guard = None;
            }
            runs.extend(unplaced.into_iter().map(|run| Unplaced { batch: batch.id, run }));
        }
        self.account(state, 0);
        let streams =
            want == Want::Stream || runs.iter().any(|unplaced| unplaced.run.len >= STREAM_BYTES_MIN);
        state.stream.lane |= streams;
        let lane = if state.stream.lane { Lane::Stream(inode.ino) } else { Lane::Small };
        if want == Want::All {
            state.stream.lane = false;
        }
        (lane, runs)
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
        if !batch.tickets.iter().any(|known| known.pack() == ticket.pack()) {
            self.flusher.pin(ticket.pack(), false);
            batch.tickets.push(ticket.clone());
            batch.pins.push(ticket.pack());
        }
        if !batch.pieces.iter().any(|(_, piece)| matches!(piece, Piece::Fixed(_))) {
            batch.placed = true;
            batch.guard = None;
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

    /// Commits the oldest placed batch of a file once its packs are stored.
    async fn commit_oldest(&self, inode: &InodeRef) -> Option<Failure> {
        let tickets: Vec<PackTicket> = {
            let state = inode.state();
            state.batches.front().filter(|batch| batch.placed)?.tickets.clone()
        };
        let mut stored = HashMap::new();
        for ticket in tickets {
            match ticket.stored().await {
                Ok(pack) => stored.insert(pack.pack, pack),
                Err(error) => return Some(Failure::from(&error)),
            };
        }
        self.commit_stored(std::slice::from_ref(inode), &stored).await.remove(&inode.ino)
    }

    /// Waits until what the files have placed is stored, and commits it.
    async fn commit(
        &self,
        files: &[InodeRef],
        tickets: &HashMap<Ino, Vec<PackTicket>>,
    ) -> HashMap<Ino, Failure> {
        let mut failures = HashMap::new();
        let mut stored: HashMap<PackId, StoredPack> = HashMap::new();
        let mut failed: HashMap<PackId, Failure> = HashMap::new();
        for inode in files {
            for ticket in tickets.get(&inode.ino).into_iter().flatten() {
                let pack = ticket.pack();
                if !stored.contains_key(&pack) && !failed.contains_key(&pack) {
                    match ticket.stored().await {
                        Ok(done) => drop(stored.insert(pack, done)),
                        Err(error) => drop(failed.insert(pack, Failure::from(&error))),
                    }
                }
                if let Some(failure) = failed.get(&pack) {
                    failures.insert(inode.ino, failure.clone());
                }
            }
        }
        for (ino, failure) in self.commit_stored(files, &stored).await {
            failures.entry(ino).or_insert(failure);
        }
        for inode in files {
            if let Err(error) = self.commit_atime(inode).await {
                failures.entry(inode.ino).or_insert(Failure::from(&error));
            }
        }
        failures
    }

    /// Commits the oldest batches of each file whose packs are all among `stored`. The files are in ascending order.
    pub(super) async fn commit_stored(
        &self,
        files: &[InodeRef],
        stored: &HashMap<PackId, StoredPack>,
    ) -> HashMap<Ino, Failure> {
        let mut failures = HashMap::new();
        let mut rest = files;
        while !rest.is_empty() {
            let mut gates = Vec::new();
            let mut prepared = Vec::new();
            let mut bytes = 0;
            let mut taken = 0;
            for inode in rest.iter().take(COMMIT_FILES_MAX) {
                if bytes >= COMMIT_BYTES_MAX {
                    break;
                }
                gates.push(inode.flush_gate.lock().await);
                match self.prepare(inode, stored).await {
                    // A file with more than fits one transaction stays for the next round.
                    Ok(Some((file, more))) => {
                        bytes += file.bytes;
                        prepared.push(file);
                        if more {
                            break;
                        }
                        taken += 1;
                    }
                    Ok(None) => taken += 1,
                    Err(error) => {
                        failures.insert(inode.ino, Failure::from(&error));
                        taken += 1;
                    }
                }
            }
            let before = failures.len();
            self.commit_prepared(prepared, stored, &mut failures).await;
            if taken == 0 && failures.len() > before {
                // The file that needs several transactions failed.
                taken = 1;
            }
            rest = &rest[taken..];
        }
        failures
    }

    /// Commits files together, or one by one if that fails for some.
    async fn commit_prepared(
        &self,
        prepared: Vec<Prepared>,
        stored: &HashMap<PackId, StoredPack>,
        failures: &mut HashMap<Ino, Failure>,
    ) {
        if prepared.is_empty() {
            return;
        }
        match self.commit_together(&prepared, stored).await {
            Ok(()) => {}
            Err(error) if prepared.len() == 1 => {
                failures.insert(prepared[0].inode.ino, Failure::from(&error));
            }
            Err(_) => {
                for file in prepared {
                    if let Err(error) = self.commit_together(std::slice::from_ref(&file), stored).await {
                        failures.insert(file.inode.ino, Failure::from(&error));
                    }
                }
            }
        }
    }

    async fn commit_together(
        &self,
        prepared: &[Prepared],
        stored: &HashMap<PackId, StoredPack>,
    ) -> Result<()> {
        let packs: HashSet<PackId> = prepared.iter().flat_map(|file| file.packs.iter().copied()).collect();
        let new_packs: Vec<NewPack> = packs
            .iter()
            .filter(|pack| !self.flusher.is_named(**pack))
            .filter_map(|pack| stored.get(pack))
            .map(|pack| NewPack { pack: pack.pack, stored_bytes: pack.stored_bytes })
            .collect();
        let commits: Vec<FileCommit> = prepared.iter().map(|file| file.commit.clone()).collect();
        self.meta.commit(&commits, &new_packs).await?;
        for pack in &new_packs {
            self.flusher.named(pack.pack);
            self.data.committed(pack.pack);
        }
        for file in prepared {
            self.committed(file);
        }
        Ok(())
    }

    /// What a commit has taken over is no longer this side's.
    fn committed(&self, file: &Prepared) {
        let mut pins = Vec::new();
        {
            let mut guard = file.inode.state();
            let state = &mut *guard;
            for (id, range) in &file.taken {
                if let Some(batch) = state.batches.iter_mut().find(|batch| batch.id == *id) {
                    batch.pieces.punch(range.clone());
                }
            }
            state.batches.retain_mut(|batch| {
                let complete = file.complete.contains(&batch.id);
                if complete {
                    pins.append(&mut batch.pins);
                }
                !complete
            });
            if let Some(length) = file.commit.grow_to {
                state.committed_length = state.committed_length.max(length);
            }
            state.chunks_changed(file.commit.chunks.iter().map(|(chunk, _)| *chunk));
            if let (Some(committed), Some(mtime)) = (file.mtime, &mut state.mtime)
                && mtime.time == committed
            {
                mtime.committed = true;
            }
            self.account(state, 0);
        }
        self.unpin(&pins);
    }

    /// Lets go of packs; those that the metadata never named are garbage.
    pub(super) fn unpin(&self, pins: &[PackId]) {
        let garbage = self.flusher.unpin(pins);
        self.collector.delete_later(garbage);
    }

    async fn commit_atime(&self, inode: &InodeRef) -> Result<()> {
        let due = inode.state().atime.filter(|atime| !atime.committed);
        let Some(atime) = due else { return Ok(()) };
        match self.meta.touch_atime(inode.ino, atime.time).await {
            Ok(()) => {}
            Err(error) if error.kind == ErrorKind::Stale => {}
            Err(error) => return Err(error),
        }
        let mut state = inode.state();
        if let Some(now) = &mut state.atime
            && now.time == atime.time
        {
            now.committed = true;
        }
        Ok(())
    }

    /// What one transaction can commit of a file, and whether there is more. Under the file's `flush_gate`.
    async fn prepare(
        &self,
        inode: &InodeRef,
        stored: &HashMap<PackId, StoredPack>,
    ) -> Result<Option<(Prepared, bool)>> {
        let Some(mut gathered) = gather(&inode.state(), stored) else { return Ok(None) };
        let holes = std::mem::take(&mut gathered.holes);
        let mut chunks = gathered.chunks;
        for (order, range) in holes {
            self.add_hole(inode, &mut chunks, order, range, gathered.data_end).await?;
        }
        let mut commit_chunks = Vec::with_capacity(chunks.len());
        let mut delta = 0;
        for (index, mut slices) in chunks {
            slices.sort_by_key(|(order, _)| *order);
            let slices: Vec<Slice> = slices.into_iter().map(|(_, slice)| slice).collect();
            let base = self.load_chunk(inode, index).await?;
            let (covers, data) = measure(&slices);
            let replaced: u64 = covers.into_iter().map(|range| base.overlay.data_bytes_in(range)).sum();
            delta += i64::try_from(data).unwrap_or(0) - i64::try_from(replaced).unwrap_or(0);
            commit_chunks.push((index, slices));
        }
        let bytes =
            commit_chunks.iter().flat_map(|(_, slices)| slices).map(record_bytes).sum::<usize>() + 200;
        let commit = FileCommit {
            ino: inode.ino,
            chunks: commit_chunks,
            grow_to: gathered.grow_to,
            mtime: gathered.mtime,
            allocated_delta: delta,
        };
        let prepared = Prepared {
            inode: inode.clone(),
            commit,
            taken: gathered.taken,
            complete: gathered.complete,
            packs: gathered.packs,
            bytes,
            mtime: gathered.mtime,
        };
        Ok(Some((prepared, gathered.more)))
    }

    /// Adds the slices of a hole, in chunks that hold something.
    async fn add_hole(
        &self,
        inode: &InodeRef,
        chunks: &mut BTreeMap<ChunkIndex, Vec<(usize, Slice)>>,
        order: usize,
        hole: Range<u64>,
        data_end: u64,
    ) -> Result<()> {
        let end = hole.end.min(data_end.max(inode.state().committed_length));
        if hole.start >= end {
            return Ok(());
        }
        let (first, last) = (ChunkIndex::of(hole.start), ChunkIndex::of(end - 1));
        let mut indices: Vec<ChunkIndex> = if last.0 - first.0 < HOLE_CHUNKS_MAX {
            (first.0..=last.0).map(ChunkIndex).collect()
        } else {
            let mut indices: Vec<ChunkIndex> = chunks.range(first..=last).map(|(index, _)| *index).collect();
            indices.extend(self.chunks_between(inode, first, last).await?);
            indices
        };
        indices.sort_unstable();
        indices.dedup();
        for index in indices {
            let from = within(index, hole.start.max(index.start()));
            let to = within(index, end.min(index.start() + CHUNK_BYTES));
            let covers_new = chunks.contains_key(&index);
            if covers_new || self.load_chunk(inode, index).await?.overlay.data_bytes_in(from..to) > 0 {
                let slice = Slice { offset: from, len: to - from, stored: Stored::Hole };
                chunks.entry(index).or_default().push((order, slice));
            }
        }
        Ok(())
    }

    /// Chunks of a file that the metadata has, from `first` to `last`.
    async fn chunks_between(
        &self,
        inode: &InodeRef,
        first: ChunkIndex,
        last: ChunkIndex,
    ) -> Result<Vec<ChunkIndex>> {
        let mut indices = Vec::new();
        let mut from = first;
        loop {
            let page = self.meta.chunks(inode.ino, from, 256).await?;
            indices.extend(page.items.iter().map(|(index, _)| *index).take_while(|index| *index <= last));
            match page.items.last() {
                Some((index, _)) if page.more && *index < last => from = ChunkIndex(index.0 + 1),
                _ => return Ok(indices),
            }
        }
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

/// A run of a batch that has no place.
struct Unplaced {
    batch: u64,
    run: super::dirty::Run,
}

/// What can be committed of a file now, seen at one moment.
#[derive(Default)]
struct Gathered {
    /// Slices with their order; holes are added later, for they need to know what is there.
    chunks: BTreeMap<ChunkIndex, Vec<(usize, Slice)>>,
    holes: Vec<(usize, Range<u64>)>,
    taken: Vec<(u64, Range<u64>)>,
    complete: Vec<u64>,
    packs: HashSet<PackId>,
    grow_to: Option<u64>,
    data_end: u64,
    mtime: Option<Timestamp>,
    more: bool,
}

/// The oldest batches that are placed and stored, as far as one transaction holds them.
fn gather(state: &InodeState, stored: &HashMap<PackId, StoredPack>) -> Option<Gathered> {
    if state.life == Life::Dead {
        return None;
    }
    let mut gathered = Gathered {
        mtime: state.mtime.filter(|mtime: &Fresh| !mtime.committed).map(|mtime| mtime.time),
        ..Gathered::default()
    };
    let mut order = 0;
    let mut bytes = 0;
    let ready = |batch: &&super::inode::Batch| {
        batch.placed && batch.tickets.iter().all(|ticket| stored.contains_key(&ticket.pack()))
    };
    'batches: for batch in state.batches.iter().take_while(ready) {
        for (start, piece) in batch.pieces.iter() {
            if bytes >= FILE_COMMIT_BYTES_MAX {
                gathered.more = true;
                break 'batches;
            }
            let end = start + piece.len();
            add_piece(&mut gathered, order, start, piece, &mut bytes);
            order += 1;
            gathered.taken.push((batch.id, start..end));
            gathered.grow_to = gathered.grow_to.max(Some(end.min(batch.grow_to)));
        }
        gathered.complete.push(batch.id);
        gathered.packs.extend(batch.tickets.iter().map(PackTicket::pack));
        gathered.grow_to = gathered.grow_to.max(Some(batch.grow_to));
    }
    if gathered.more
        && let Some(partial) = state.batches.get(gathered.complete.len())
    {
        gathered.packs.extend(partial.tickets.iter().map(PackTicket::pack));
    }
    gathered.grow_to = gathered.grow_to.filter(|length| *length > state.committed_length);
    let nothing = gathered.taken.is_empty() && gathered.complete.is_empty() && gathered.mtime.is_none();
    (!nothing).then_some(gathered)
}

fn add_piece(gathered: &mut Gathered, order: usize, start: u64, piece: &Piece, bytes: &mut usize) {
    let end = start + piece.len();
    if let Piece::Hole(_) = piece {
        gathered.holes.push((order, start..end));
        *bytes += 32;
        return;
    }
    gathered.data_end = gathered.data_end.max(end);
    // Placed pieces lie within one chunk; inline ones are at the beginning of the file.
    let index = ChunkIndex::of(start);
    let offset = within(index, start);
    let len = u32::try_from(piece.len()).unwrap_or(0);
    let slice = match piece {
        Piece::Packed(part) => {
            let source = Source::Packed { run: Arc::clone(&part.run), offset_in_run: part.offset_in_run };
            Extent { offset, len, source }.to_slice()
        }
        Piece::Fixed(bytes) => Slice { offset, len, stored: Stored::Inline(bytes.clone()) },
        Piece::Growing(bytes) => {
            Slice { offset, len, stored: Stored::Inline(bytes::Bytes::copy_from_slice(bytes)) }
        }
        Piece::Hole(_) => return,
    };
    *bytes += record_bytes(&slice);
    gathered.chunks.entry(index).or_default().push((order, slice));
}

/// About how long the record of a slice is, in bytes.
fn record_bytes(slice: &Slice) -> usize {
    32 + match &slice.stored {
        Stored::Hole => 0,
        Stored::Inline(bytes) => bytes.len(),
        Stored::Packed(run) => run.blocks.len() * (size_of::<Block>() - 2),
    }
}

/// The ranges that slices cover, without overlaps, and the data bytes that they hold when laid over each other.
fn measure(slices: &[Slice]) -> (Vec<Range<u32>>, u64) {
    let mut covers: Vec<Range<u32>> = slices.iter().map(|s| s.offset..s.offset + s.len).collect();
    if covers.is_sorted_by(|a, b| a.end <= b.start) {
        let data = slices.iter().filter(|slice| slice.stored != Stored::Hole);
        let data = data.map(|slice| u64::from(slice.len)).sum();
        return (covers, data);
    }
    // From the newest to the oldest: each counts where nothing newer covers it.
    let mut newer = PieceMap::default();
    let mut data = 0;
    for slice in slices.iter().rev().filter(|slice| slice.len > 0) {
        let range = u64::from(slice.offset)..u64::from(slice.offset + slice.len);
        if slice.stored != Stored::Hole {
            let shown = newer.read(vec![range.clone()], &mut Vec::new());
            data += shown.into_iter().map(|range| range.end - range.start).sum::<u64>();
        }
        newer.put(range.start, Piece::Hole(range.end - range.start));
    }
    covers.sort_unstable_by_key(|range| range.start);
    covers.dedup_by(|next, last| {
        let joins = next.start <= last.end;
        if joins {
            last.end = last.end.max(next.end);
        }
        joins
    });
    (covers, data)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlapping_slices_are_measured_once() {
        let slice = |offset, len, stored| Slice { offset, len, stored };
        let data = || Stored::Inline(bytes::Bytes::new());
        let slices = [
            slice(0, 100, data()),
            slice(50, 100, data()),
            slice(20, 10, Stored::Hole),
            slice(300, 10, data()),
        ];
        assert_eq!(measure(&slices), (vec![0..150, 300..310], 150));
        assert_eq!(measure(&slices[3..]), (vec![300..310; 1], 10));
    }
}

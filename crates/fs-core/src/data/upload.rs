//! Packs from the first run to the store's acknowledgement.
//!
//! A lane has at most one open pack. Runs are compressed on the blocking pool, at most one job a core, because that
//! keeps the async threads answering, and because tokio's virtual time stands still while such a job runs. The
//! compressed bytes are not copied again: a pack is a list of them, and a part is a list of slices of them.
//!
//! Each pack has a task from its opening on. It sends parts as they fill and the rest when the pack is closed, starts
//! over after a failure (a multipart upload cannot replace one part), for ever, and closes a pack that was forgotten. All
//! bytes stay in memory, charged to the budget, until the store has acknowledged the whole object.
//! Lock order: lanes, registry, one pack.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use futures::future;
use hashbrown::HashMap;
use object_store::{MultipartUpload, ObjectStoreExt, PutPayload};
use parking_lot::Mutex;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::block::Encoder;
use super::objects::{Objects, path_of};
use super::pack::{self, FooterWriter, HEADER_BYTES};
use super::retry::{Backoff, Failure, GRACE, bounded};
use super::{Appended, BudgetGuard, Counters, DataOptions, Lane, PackTicket, RunBytes, StoredPack, Tasks};
use crate::types::{Block, CHUNK_BYTES, Error, ErrorKind, PackId, PackedRun, Result};

/// Runs of one append that are together no larger than this are compressed where they are: a thread switch costs more.
const INLINE_BYTES: usize = 32 << 10;
/// Plain bytes that one compression job takes, about 2 ms.
const JOB_BYTES: usize = 1 << 20;

/// A pack that this process writes, as long as its bytes are needed.
#[derive(Debug)]
pub(super) struct Pack {
    id: PackId,
    state: Mutex<PackState>,
    /// The task is told of new bytes and of closing.
    changed: Notify,
    /// The task is told that somebody who waits would like another attempt now.
    nudged: Notify,
    status: watch::Sender<Status>,
}

#[derive(Debug, Default)]
struct PackState {
    /// Consecutive; a block never spans two.
    segments: Vec<Segment>,
    len: u32,
    sealed: bool,
    memory: Vec<BudgetGuard>,
}

#[derive(Debug)]
struct Segment {
    offset: u32,
    bytes: Bytes,
}

#[derive(Debug, Clone, Default)]
struct Status {
    outcome: Outcome,
    /// Grows whenever something was appended or acknowledged.
    progress: u64,
    /// Attempts that failed, and how the last one did.
    failures: u64,
    failure: Option<Failure>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Outcome {
    #[default]
    Pending,
    Stored(StoredPack),
    /// The data layer was closed before the pack was stored.
    Abandoned,
}

impl Pack {
    fn new(id: PackId) -> Pack {
        Pack {
            id,
            state: Mutex::default(),
            changed: Notify::new(),
            nudged: Notify::new(),
            status: watch::Sender::new(Status::default()),
        }
    }

    pub(super) fn id(&self) -> PackId {
        self.id
    }

    /// Stored bytes that are still in memory.
    pub(super) fn bytes(&self, offset: u32, len: u32) -> Option<Bytes> {
        let state = self.state.lock();
        let index = state.segments.partition_point(|segment| segment.offset <= offset).checked_sub(1)?;
        let segment = &state.segments[index];
        let from = (offset - segment.offset) as usize;
        let to = from.checked_add(len as usize)?;
        (to <= segment.bytes.len()).then(|| segment.bytes.slice(from..to))
    }

    pub(super) fn is_stored(&self) -> bool {
        matches!(self.status.borrow().outcome, Outcome::Stored(_))
    }

    fn push(&self, bytes: impl IntoIterator<Item = Bytes>, memory: BudgetGuard) {
        let mut state = self.state.lock();
        for bytes in bytes {
            let offset = state.len;
            state.len += u32::try_from(bytes.len()).expect("a pack is far below 4 GiB");
            state.segments.push(Segment { offset, bytes });
        }
        match state.memory.first_mut() {
            Some(first) => first.merge(memory),
            None => state.memory.push(memory),
        }
        drop(state);
        self.progress();
        self.changed.notify_one();
    }

    fn seal(&self, footer: Vec<u8>, memory: BudgetGuard) {
        self.push([footer.into()], memory);
        self.state.lock().sealed = true;
        self.changed.notify_one();
    }

    fn progress(&self) {
        self.status.send_modify(|status| status.progress += 1);
    }

    /// Bytes so far, if there are at least `bytes`, or the pack is closed.
    fn ready(&self, bytes: u32) -> Option<Ready> {
        let state = self.state.lock();
        (state.sealed || state.len >= bytes).then_some(Ready { len: state.len, sealed: state.sealed })
    }

    /// Waits for `bytes` bytes or the end. `idle` is called when nothing happened for `after`.
    async fn wait_ready(&self, bytes: u32, after: std::time::Duration, idle: impl Fn()) -> Ready {
        loop {
            if let Some(ready) = self.ready(bytes) {
                return ready;
            }
            if tokio::time::timeout(after, self.changed.notified()).await.is_err() {
                idle();
            }
        }
    }

    fn payload(&self, range: Range<u32>) -> PutPayload {
        let state = self.state.lock();
        let first = state.segments.partition_point(|segment| segment.offset <= range.start).saturating_sub(1);
        let touched = state.segments[first..].iter().take_while(|segment| segment.offset < range.end);
        let slices = touched.map(|segment| {
            let from = range.start.saturating_sub(segment.offset) as usize;
            let to = ((range.end - segment.offset) as usize).min(segment.bytes.len());
            segment.bytes.slice(from..to)
        });
        slices.collect()
    }

    fn finish(&self, outcome: Outcome) {
        let memory = {
            let mut state = self.state.lock();
            state.segments = Vec::new();
            std::mem::take(&mut state.memory)
        };
        drop(memory);
        self.status.send_modify(|status| status.outcome = outcome);
    }

    /// Ends the waiting of those who wait for a pack that will not be stored any more.
    pub(super) fn abandon(&self) {
        if !self.is_stored() {
            self.finish(Outcome::Abandoned);
        }
    }

    /// See [`PackTicket::stored`].
    pub(super) async fn stored(&self, io_timeout: Option<std::time::Duration>) -> Result<StoredPack> {
        let mut status = self.status.subscribe();
        let (mut progress, failures_before) = {
            let now = status.borrow_and_update();
            (now.progress, now.failures)
        };
        if failures_before > 0 {
            self.nudged.notify_one();
        }
        let mut since = Instant::now();
        loop {
            {
                let now = status.borrow_and_update();
                match now.outcome {
                    Outcome::Stored(stored) => return Ok(stored),
                    Outcome::Abandoned => {
                        return Err(Error::new(ErrorKind::Io, format!("pack {} was given up", self.id)));
                    }
                    Outcome::Pending => {}
                }
                if let Some(failure) = &now.failure
                    && failure.kind == ErrorKind::NoSpace
                    && now.failures > failures_before
                {
                    return Err(self.not_stored(Some(failure)));
                }
                if now.progress != progress {
                    progress = now.progress;
                    since = Instant::now();
                }
            }
            let Some(limit) = io_timeout else {
                // The sender lives in this pack.
                let _ = status.changed().await;
                continue;
            };
            // A store that insists for as long by itself is about to say why it failed.
            let patience = if status.borrow().failure.is_some() { limit } else { limit + 2 * GRACE };
            if tokio::time::timeout_at(since + patience, status.changed()).await.is_err() {
                return Err(self.not_stored(status.borrow().failure.as_ref()));
            }
        }
    }

    fn not_stored(&self, failure: Option<&Failure>) -> Error {
        match failure {
            Some(Failure { kind, text }) => {
                Error::new(*kind, format!("pack {} is not stored yet: {text}", self.id))
            }
            None => Error::new(ErrorKind::Io, format!("pack {} is not stored yet: no answer", self.id)),
        }
    }
}

#[derive(Debug, Clone, Copy)]
struct Ready {
    len: u32,
    sealed: bool,
}

/// The packs of this process that are not both stored and committed.
#[derive(Debug, Default)]
pub(super) struct Packs {
    packs: Mutex<HashMap<PackId, Arc<Pack>>>,
}

impl Packs {
    /// Stored bytes of a pack that is not in the store yet.
    pub(super) fn bytes(&self, pack: PackId, offset: u32, len: u32) -> Option<Bytes> {
        let pack = Arc::clone(self.packs.lock().get(&pack)?);
        pack.bytes(offset, len)
    }

    pub(super) fn all(&self) -> Vec<Arc<Pack>> {
        let mut packs: Vec<_> = self.packs.lock().values().cloned().collect();
        packs.sort_unstable_by_key(|pack| pack.id);
        packs
    }
}

/// What fills packs and sends them.
#[derive(Debug)]
pub(super) struct Uploader {
    options: Arc<DataOptions>,
    objects: Objects,
    counters: Arc<Counters>,
    packs: Arc<Packs>,
    lanes: Mutex<Lanes>,
    /// Compression jobs that may run.
    compute: Arc<Semaphore>,
    /// PUTs that may be in flight.
    requests: Arc<Semaphore>,
    /// The store fails: told once, and once when it is over.
    outage: AtomicBool,
}

#[derive(Debug)]
struct Lanes {
    open: HashMap<Lane, OpenPack>,
    next_sequence: u32,
    closed: bool,
}

#[derive(Debug)]
struct OpenPack {
    pack: Arc<Pack>,
    footer: FooterWriter,
    len: u32,
}

/// A run after compression.
struct Encoded {
    run: RunBytes,
    plain_len: u32,
    blocks: Vec<Block>,
    stored: Vec<Bytes>,
    memory: BudgetGuard,
}

impl Encoded {
    fn stored_len(&self) -> usize {
        self.stored.iter().map(Bytes::len).sum()
    }
}

impl Uploader {
    pub(super) fn new(
        options: Arc<DataOptions>,
        objects: Objects,
        counters: Arc<Counters>,
        packs: Arc<Packs>,
    ) -> Uploader {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Uploader {
            objects,
            counters,
            packs,
            lanes: Mutex::new(Lanes {
                open: HashMap::new(),
                next_sequence: options.first_pack_sequence,
                closed: false,
            }),
            compute: Arc::new(Semaphore::new(cores)),
            requests: Arc::new(Semaphore::new(options.uploads_max.max(1))),
            outage: AtomicBool::new(false),
            options,
        }
    }

    /// See [`super::Data::append`].
    pub(super) async fn append(
        self: &Arc<Uploader>,
        tasks: &Tasks,
        lane: Lane,
        runs: Vec<RunBytes>,
    ) -> Result<Vec<Appended>> {
        for run in &runs {
            let len: u64 = run.bytes.iter().map(|bytes| bytes.len() as u64).sum();
            if len == 0 || u64::from(run.offset) + len > CHUNK_BYTES {
                return Err(Error::new(ErrorKind::Invalid, "a run that is empty or longer than its chunk"));
            }
        }
        let encoded = self.encode(runs).await?;
        self.place(tasks, lane, encoded)
    }

    /// Compresses all runs, in jobs of whole blocks.
    async fn encode(&self, runs: Vec<RunBytes>) -> Result<Vec<Encoded>> {
        let block_bytes = self.options.block_bytes as usize;
        let jobs = cut_jobs(&runs, block_bytes);
        let total: usize = runs.iter().flat_map(|run| &run.bytes).map(Bytes::len).sum();
        let outputs = if total <= INLINE_BYTES {
            jobs.into_iter().map(|job| run_job(job, block_bytes)).collect()
        } else {
            future::try_join_all(jobs.into_iter().map(|job| self.spawn_job(job, block_bytes))).await?
        };
        let mut encoded: Vec<Encoded> = runs
            .into_iter()
            .map(|run| Encoded {
                plain_len: u32::try_from(run.bytes.iter().map(Bytes::len).sum::<usize>())
                    .expect("no longer than a chunk"),
                run,
                blocks: Vec::new(),
                stored: Vec::new(),
                memory: self.options.memory.charge(0),
            })
            .collect();
        for part in outputs.into_iter().flatten() {
            let whole = &mut encoded[part.run];
            whole.memory.merge(self.options.memory.charge(part.stored.len() as u64));
            whole.blocks.extend(part.blocks);
            whole.stored.push(part.stored);
        }
        Ok(encoded)
    }

    async fn spawn_job(&self, job: Job, block_bytes: usize) -> Result<Vec<JobOutput>> {
        let permit = Arc::clone(&self.compute).acquire_owned().await.expect("never closed");
        let done = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            run_job(job, block_bytes)
        });
        done.await.map_err(|error| Error::new(ErrorKind::Io, "compress").with_source(error))
    }

    /// Gives every run its place, in order, and wakes the packs' tasks.
    fn place(
        self: &Arc<Uploader>,
        tasks: &Tasks,
        lane: Lane,
        encoded: Vec<Encoded>,
    ) -> Result<Vec<Appended>> {
        let mut lanes = self.lanes.lock();
        if lanes.closed {
            return Err(Error::new(ErrorKind::ReadOnly, "the data layer is closed"));
        }
        let mut appended = Vec::with_capacity(encoded.len());
        for run in encoded {
            let needed = run.stored_len() + FooterWriter::entry_bytes(run.blocks.len());
            let open = lanes.open.get(&lane).map(|open| open.len as usize + open.footer.len() + needed);
            if open.is_some_and(|len| len > self.options.pack_bytes as usize)
                && let Some(full) = lanes.open.remove(&lane)
            {
                self.seal_open(full);
            }
            if !lanes.open.contains_key(&lane) {
                let open = self.open_pack(tasks, lane, &mut lanes)?;
                lanes.open.insert(lane, open);
            }
            let open = lanes.open.get_mut(&lane).expect("inserted above");
            appended.push(self.place_run(open, run));
        }
        Ok(appended)
    }

    fn place_run(&self, open: &mut OpenPack, encoded: Encoded) -> Appended {
        let stored_len = encoded.stored_len();
        let Encoded { run: RunBytes { ino, chunk, offset, .. }, plain_len, blocks, stored, memory } = encoded;
        let run = PackedRun {
            pack: open.pack.id,
            pack_offset: open.len,
            block_bytes: self.options.block_bytes,
            plain_len,
            skip: 0,
            blocks,
        };
        open.footer.push(ino, chunk, offset, &run);
        open.len += u32::try_from(stored_len).expect("a run is no longer than a chunk");
        open.pack.push(stored, memory);
        self.counters.add(|counters| &counters.appended_plain_bytes, u64::from(plain_len));
        self.counters.add(|counters| &counters.appended_stored_bytes, stored_len as u64);
        Appended { run, pack: PackTicket::new(Arc::clone(&open.pack), self.options.io_timeout) }
    }

    fn open_pack(self: &Arc<Uploader>, tasks: &Tasks, lane: Lane, lanes: &mut Lanes) -> Result<OpenPack> {
        let sequence = lanes.next_sequence;
        let next = sequence.checked_add(1);
        lanes.next_sequence =
            next.ok_or_else(|| Error::new(ErrorKind::Io, "this session has no pack ids left"))?;
        let pack = Arc::new(Pack::new(PackId::new(self.options.session, sequence)));
        let header = pack::header(self.options.volume, pack.id);
        pack.push([Bytes::copy_from_slice(&header)], self.options.memory.charge(u64::from(HEADER_BYTES)));
        self.packs.packs.lock().insert(pack.id, Arc::clone(&pack));
        tasks.spawn(Arc::clone(self).upload(lane, Arc::clone(&pack)));
        Ok(OpenPack { pack, footer: FooterWriter::default(), len: HEADER_BYTES })
    }

    fn seal_open(&self, open: OpenPack) {
        let footer = open.footer.finish(open.pack.id, open.len);
        let memory = self.options.memory.charge(footer.len() as u64);
        open.pack.seal(footer, memory);
    }

    /// Closes the lane's open pack.
    pub(super) fn seal(&self, lane: Lane) {
        let mut lanes = self.lanes.lock();
        if let Some(open) = lanes.open.remove(&lane) {
            self.seal_open(open);
        }
    }

    /// Closes all open packs.
    pub(super) fn seal_all(&self) {
        let mut lanes = self.lanes.lock();
        for (_, open) in lanes.open.drain() {
            self.seal_open(open);
        }
    }

    /// Closes all open packs for good.
    pub(super) fn close(&self) {
        self.lanes.lock().closed = true;
        self.seal_all();
    }

    fn seal_forgotten(&self, lane: Lane, pack: PackId) {
        let mut lanes = self.lanes.lock();
        if lanes.open.get(&lane).is_some_and(|open| open.pack.id == pack)
            && let Some(open) = lanes.open.remove(&lane)
        {
            self.seal_open(open);
        }
    }

    /// See [`super::Data::committed`].
    pub(super) fn committed(&self, pack: PackId) {
        let mut packs = self.packs.packs.lock();
        if packs.get(&pack).is_some_and(|pack| pack.is_stored()) {
            packs.remove(&pack);
        }
    }

    /// A pack's task.
    async fn upload(self: Arc<Uploader>, lane: Lane, pack: Arc<Pack>) {
        let mut backoff = Backoff::new(pack.id.0);
        loop {
            match self.attempt(lane, &pack).await {
                Ok(stored_bytes) => {
                    if self.outage.swap(false, Ordering::Relaxed) {
                        tracing::info!(pack = %pack.id, "the object store accepts data again");
                    }
                    self.counters.add(|counters| &counters.packs_stored, 1);
                    pack.finish(Outcome::Stored(StoredPack { pack: pack.id, stored_bytes }));
                    return;
                }
                Err(failure) => self.note_failure(&pack, failure),
            }
            // A waiter that comes now does not sit out a long pause.
            let _ = tokio::time::timeout(backoff.pause(), pack.nudged.notified()).await;
        }
    }

    fn note_failure(&self, pack: &Pack, failure: Failure) {
        self.counters.add(|counters| &counters.upload_failures, 1);
        if self.outage.swap(true, Ordering::Relaxed) {
            tracing::debug!(pack = %pack.id, error = %failure.text, "upload failed");
        } else {
            let text = "the object store does not accept data; it stays in memory and is tried again";
            tracing::warn!(pack = %pack.id, error = %failure.text, "{text}");
        }
        pack.status.send_modify(|status| {
            status.failures += 1;
            status.failure = Some(failure);
        });
    }

    /// One attempt to store the whole pack: one PUT if it is closed before a part is full, else parts as they fill.
    /// Returns the object's length.
    async fn attempt(&self, lane: Lane, pack: &Arc<Pack>) -> Result<u64, Failure> {
        let part_bytes = self.options.part_bytes;
        let first = self.wait_ready(lane, pack, part_bytes).await;
        if first.sealed && first.len <= part_bytes {
            let _permit = self.request_permit().await;
            self.objects.put(pack.id, pack.payload(0..first.len)).await?;
            return Ok(u64::from(first.len));
        }
        let limit = self.objects.io_timeout();
        let path = path_of(pack.id);
        let mut upload = bounded("begin an upload", limit, self.objects.store().put_multipart(&path)).await?;
        let done = self.send_parts(lane, pack, &mut *upload).await;
        if done.is_err() {
            // Best effort: the store's own rules clean up what this leaves.
            let _ = bounded("abort an upload", limit, upload.abort()).await;
        }
        done
    }

    async fn send_parts(
        &self,
        lane: Lane,
        pack: &Arc<Pack>,
        upload: &mut dyn MultipartUpload,
    ) -> Result<u64, Failure> {
        let part_bytes = self.options.part_bytes;
        let limit = self.objects.io_timeout();
        let mut parts: JoinSet<Result<(), Failure>> = JoinSet::new();
        let mut sent = 0;
        let len = loop {
            let next = async {
                let ready = self.wait_ready(lane, pack, sent + part_bytes).await;
                (ready, self.request_permit().await)
            };
            tokio::select! {
                biased;
                Some(done) = parts.join_next() => part_done(pack, done)?,
                (ready, permit) = next => {
                    let end = ready.len.min(sent + part_bytes);
                    if end > sent {
                        let part = upload.put_part(pack.payload(sent..end));
                        sent = end;
                        parts.spawn(async move {
                            let _permit = permit;
                            bounded("PUT a part", limit, part).await
                        });
                    }
                    if ready.sealed && sent == ready.len {
                        break ready.len;
                    }
                }
            }
        };
        while let Some(done) = parts.join_next().await {
            part_done(pack, done)?;
        }
        bounded("complete an upload", limit, upload.complete()).await?;
        Ok(u64::from(len))
    }

    async fn wait_ready(&self, lane: Lane, pack: &Pack, bytes: u32) -> Ready {
        pack.wait_ready(bytes, self.options.idle_seal, || self.seal_forgotten(lane, pack.id)).await
    }

    async fn request_permit(&self) -> OwnedSemaphorePermit {
        Arc::clone(&self.requests).acquire_owned().await.expect("never closed")
    }
}

fn part_done(pack: &Pack, done: Result<Result<(), Failure>, tokio::task::JoinError>) -> Result<(), Failure> {
    done.map_err(|error| Failure::new(ErrorKind::Io, format!("PUT a part: {error}")))??;
    pack.progress();
    Ok(())
}

/// Whole blocks of one or several runs.
type Job = Vec<JobPart>;

struct JobPart {
    run: usize,
    plain: Vec<Bytes>,
}

struct JobOutput {
    run: usize,
    blocks: Vec<Block>,
    stored: Bytes,
}

/// Cuts runs at block boundaries into jobs of about [`JOB_BYTES`]; small runs share one.
fn cut_jobs(runs: &[RunBytes], block_bytes: usize) -> Vec<Job> {
    let part_max = (JOB_BYTES / block_bytes).max(1) * block_bytes;
    let mut jobs = Vec::new();
    let mut job = Vec::new();
    let mut room = JOB_BYTES;
    for (run, source) in runs.iter().enumerate() {
        let mut pieces = source.bytes.iter().filter(|bytes| !bytes.is_empty()).cloned();
        let mut rest = pieces.next();
        while rest.is_some() {
            let (plain, len) = take_bytes(&mut rest, &mut pieces, part_max);
            if len > room && !job.is_empty() {
                jobs.push(std::mem::take(&mut job));
                room = JOB_BYTES;
            }
            room = room.saturating_sub(len);
            job.push(JobPart { run, plain });
        }
    }
    jobs.push(job);
    jobs
}

/// Takes `len` bytes, or what there is, from `rest` and then from `pieces`.
fn take_bytes(
    rest: &mut Option<Bytes>,
    pieces: &mut impl Iterator<Item = Bytes>,
    len: usize,
) -> (Vec<Bytes>, usize) {
    let mut taken = Vec::new();
    let mut left = len;
    while left > 0
        && let Some(bytes) = rest
    {
        if bytes.len() > left {
            taken.push(bytes.split_to(left));
            left = 0;
        } else {
            left -= bytes.len();
            taken.extend(std::mem::replace(rest, pieces.next()));
        }
    }
    (taken, len - left)
}

fn run_job(job: Job, block_bytes: usize) -> Vec<JobOutput> {
    let mut gathered = Vec::new();
    let mut outputs = Vec::with_capacity(job.len());
    let mut encoder = Encoder::new();
    for JobPart { run, plain } in job {
        encoder.reserve(plain.iter().map(Bytes::len).sum());
        let mut pieces = plain.into_iter();
        let mut rest = pieces.next();
        while rest.is_some() {
            let (block, _) = take_bytes(&mut rest, &mut pieces, block_bytes);
            if let [whole] = block.as_slice() {
                encoder.push(whole);
            } else {
                gathered.clear();
                for piece in &block {
                    gathered.extend_from_slice(piece);
                }
                encoder.push(&gathered);
            }
        }
        let (blocks, stored) = encoder.take();
        outputs.push(JobOutput { run, blocks, stored });
    }
    outputs
}

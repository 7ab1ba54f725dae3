//! Packs from the first run to the store's acknowledgement.
//!
//! A lane has at most one open pack. Runs are compressed on the blocking pool, at most one job a core, because that
//! keeps the async threads answering, and because tokio's virtual time stands still while such a job runs. The
//! compressed bytes are not copied again: a pack is a list of them, and a part is a list of slices of them.
//!
//! Each pack has a task from its opening on. It sends parts as they fill and the rest when the pack is closed, starts
//! over after a failure (a multipart upload cannot replace one part), for ever, and closes a pack that was forgotten or,
//! where packs stay open for the next fsync, is old enough. Where the bytes are meanwhile: see `unstored`.
//! Lock order: lanes, registry, one pack.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures::future;
use hashbrown::HashMap;
use object_store::{MultipartUpload, ObjectStoreExt, PutPayload};
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::block::Encoder;
use super::objects::{Objects, path_of};
use super::pack::FooterWriter;
use super::retry::{Backoff, Failure, bounded};
use super::staging::Staging;
use super::unstored::{Held, Pack, Packs, Part, Patience, Ready, header_of};
use super::{Appended, BudgetGuard, Counters, DataOptions, Lane, PackTicket, RunBytes};
use crate::tasks::Tasks;
use crate::types::{Block, CHUNK_BYTES, Error, ErrorKind, PackId, PackedRun, Result};

/// Runs of one append that are together no larger than this are compressed where they are: a thread switch costs more.
const INLINE_BYTES: usize = 32 << 10;
/// Plain bytes that one compression job takes, about 2 ms.
const JOB_BYTES: usize = 1 << 20;
/// Of the budget, requests may hold one part in so many as bytes that were read from journals, or else one request may.
const JOURNAL_BODIES_PART: u64 = 2;
/// A store that acknowledged nothing for so long, while packs wait, is slow or away.
const STUCK_AFTER: Duration = Duration::from_secs(2);
/// And after so long it is taken to be away: what was sent to it by then is not worth the memory.
const AWAY_AFTER: Duration = Duration::from_secs(10);

/// What fills packs and sends them.
#[derive(Debug)]
pub(super) struct Uploader {
    options: Arc<DataOptions>,
    objects: Objects,
    counters: Arc<Counters>,
    packs: Arc<Packs>,
    staging: Option<Arc<Staging>>,
    lanes: Mutex<Lanes>,
    /// Compression jobs that may run.
    compute: Arc<Semaphore>,
    /// Encoders that are not in use, at most one a job.
    encoders: Arc<Mutex<Vec<Encoder>>>,
    /// PUTs that may be in flight.
    requests: Arc<Semaphore>,
    /// Those of them that may hold bytes which were read from journals: memory that the budget does not count, since
    /// writers, who have what they write staged, need not wait for it.
    journal_bodies: Arc<Semaphore>,
    /// The store fails: told once, and once when it is over.
    outage: AtomicBool,
    /// When the store last acknowledged something, or had nothing to do.
    acknowledged: Mutex<Instant>,
}

#[derive(Debug)]
struct Lanes {
    open: HashMap<Lane, Arc<Pack>>,
    next_sequence: u32,
    closed: bool,
}

/// What a request sends.
struct Body {
    payload: PutPayload,
    account: BodyAccount,
}

/// Kept until the request ends.
struct BodyAccount {
    _held: Held,
    _journal: Option<OwnedSemaphorePermit>,
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
        staging: Option<Arc<Staging>>,
    ) -> Uploader {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let journal_bodies = options.memory.bytes_max() / JOURNAL_BODIES_PART / u64::from(options.part_bytes);
        let journal_bodies = usize::try_from(journal_bodies).unwrap_or(usize::MAX);
        let uploads_max = options.uploads_max.max(1);
        Uploader {
            objects,
            counters,
            packs,
            staging,
            lanes: Mutex::new(Lanes {
                open: HashMap::new(),
                next_sequence: options.first_pack_sequence,
                closed: false,
            }),
            compute: Arc::new(Semaphore::new(cores)),
            encoders: Arc::default(),
            requests: Arc::new(Semaphore::new(uploads_max)),
            journal_bodies: Arc::new(Semaphore::new(journal_bodies.clamp(1, uploads_max))),
            outage: AtomicBool::new(false),
            acknowledged: Mutex::new(Instant::now()),
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
            let mut encoder = Encoder::new();
            jobs.into_iter().map(|job| run_job(&mut encoder, job, block_bytes)).collect()
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
            let stored_len = part.stored.iter().map(|bytes| bytes.len() as u64).sum();
            whole.memory.merge(self.options.memory.charge(stored_len));
            whole.blocks.extend(part.blocks);
            whole.stored.extend(part.stored);
        }
        Ok(encoded)
    }

    async fn spawn_job(&self, job: Job, block_bytes: usize) -> Result<Vec<JobOutput>> {
        let permit = Arc::clone(&self.compute).acquire_owned().await.expect("never closed");
        let encoders = Arc::clone(&self.encoders);
        let done = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            let kept = encoders.lock().pop();
            let mut encoder = kept.unwrap_or_else(Encoder::new);
            let outputs = run_job(&mut encoder, job, block_bytes);
            encoders.lock().push(encoder);
            outputs
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
            let open = lanes.open.get(&lane);
            if open.is_some_and(|open| open.len_with(needed) > self.options.pack_bytes as usize)
                && let Some(full) = lanes.open.remove(&lane)
            {
                full.seal(&self.options.memory);
            }
            if !lanes.open.contains_key(&lane) {
                let open = self.open_pack(tasks, lane, &mut lanes)?;
                lanes.open.insert(lane, open);
            }
            let open = lanes.open.get(&lane).expect("inserted above");
            appended.push(self.place_run(open, run));
            if matches!(lane, Lane::Stream(_))
                && open.len_with(0) >= self.options.stream_pack_bytes as usize
                && let Some(full) = lanes.open.remove(&lane)
            {
                full.seal(&self.options.memory);
            }
        }
        Ok(appended)
    }

    fn place_run(&self, open: &Arc<Pack>, encoded: Encoded) -> Appended {
        let stored_len = encoded.stored_len();
        let Encoded { run: from, plain_len, blocks, stored, memory } = encoded;
        let mut run = PackedRun {
            pack: open.id(),
            pack_offset: 0,
            block_bytes: self.options.block_bytes,
            plain_len,
            skip: 0,
            blocks,
        };
        let end = open.append(&from, &mut run, stored, memory);
        self.counters.add(|counters| &counters.appended_plain_bytes, u64::from(plain_len));
        self.counters.add(|counters| &counters.appended_stored_bytes, stored_len as u64);
        Appended {
            run,
            pack: PackTicket { pack: Arc::clone(open), end, io_timeout: self.options.io_timeout },
        }
    }

    fn open_pack(self: &Arc<Uploader>, tasks: &Tasks, lane: Lane, lanes: &mut Lanes) -> Result<Arc<Pack>> {
        let sequence = lanes.next_sequence;
        let next = sequence.checked_add(1);
        lanes.next_sequence =
            next.ok_or_else(|| Error::new(ErrorKind::Io, "this session has no pack ids left"))?;
        let id = PackId::new(self.options.session, sequence);
        let header = header_of(self.options.volume, id);
        let memory = self.options.memory.charge(header.len() as u64);
        let pack = Arc::new(Pack::new(id, lane, header, memory));
        self.packs.insert(Arc::clone(&pack));
        self.send(tasks, Arc::clone(&pack));
        Ok(pack)
    }

    /// Starts a pack's task.
    pub(super) fn send(self: &Arc<Uploader>, tasks: &Tasks, pack: Arc<Pack>) {
        let ended = EndOfTask(Arc::clone(&pack));
        let upload = Arc::clone(self).upload(pack);
        tasks.spawn(async move {
            upload.await;
            drop(ended);
        });
    }

    /// Closes the lane's open pack.
    pub(super) fn seal(&self, lane: Lane) {
        let mut lanes = self.lanes.lock();
        if let Some(open) = lanes.open.remove(&lane) {
            open.seal(&self.options.memory);
        }
    }

    /// Closes all open packs.
    pub(super) fn seal_all(&self) {
        let mut lanes = self.lanes.lock();
        for (_, open) in lanes.open.drain() {
            open.seal(&self.options.memory);
        }
    }

    /// Closes all open packs for good.
    pub(super) fn close(&self) {
        self.lanes.lock().closed = true;
        self.seal_all();
    }

    /// Closes a pack if it is open.
    fn seal_pack(&self, pack: &Pack) {
        let mut lanes = self.lanes.lock();
        if lanes.open.get(&pack.lane()).is_some_and(|open| open.id() == pack.id())
            && let Some(open) = lanes.open.remove(&pack.lane())
        {
            open.seal(&self.options.memory);
        }
    }

    /// Whether packs wait for a store that makes no progress.
    pub(super) fn is_stuck(&self) -> bool {
        self.outage.load(Ordering::Relaxed) || self.acknowledged.lock().elapsed() >= STUCK_AFTER
    }

    /// Whether requests that are under way wait for a store that is likely not to answer.
    pub(super) fn is_away(&self) -> bool {
        self.acknowledged.lock().elapsed() >= AWAY_AFTER
    }

    /// The store acknowledged something.
    fn acknowledge(&self, pack: &Pack) {
        *self.acknowledged.lock() = Instant::now();
        pack.progress();
    }

    /// A pack's task.
    async fn upload(self: Arc<Uploader>, pack: Arc<Pack>) {
        let mut backoff = Backoff::new(pack.id().0);
        loop {
            match self.attempt(&pack).await {
                Ok(stored_bytes) => {
                    if self.outage.swap(false, Ordering::Relaxed) {
                        tracing::info!(pack = %pack.id(), "the object store accepts data again");
                    }
                    self.acknowledge(&pack);
                    self.counters.add(|counters| &counters.packs_stored, 1);
                    pack.finish_stored(stored_bytes);
                    if let Some(staging) = self.staging.as_ref().filter(|_| pack.journal().is_some()) {
                        staging.stored.notify_one();
                    }
                    return;
                }
                Err(failure) => self.note_failure(&pack, failure),
            }
            pack.wait_retry(backoff.pause()).await;
        }
    }

    fn note_failure(&self, pack: &Pack, failure: Failure) {
        self.counters.add(|counters| &counters.upload_failures, 1);
        if self.outage.swap(true, Ordering::Relaxed) {
            tracing::debug!(pack = %pack.id(), error = %failure.text, "upload failed");
        } else {
            let text = "the object store does not accept data; it is kept and tried again";
            tracing::warn!(pack = %pack.id(), error = %failure.text, "{text}");
        }
        pack.attempt_failed(failure);
    }

    /// One attempt to store the whole pack: one PUT if it is closed before a part is full, else parts as they fill.
    /// Returns the object's length.
    async fn attempt(&self, pack: &Arc<Pack>) -> Result<u64, Failure> {
        let part_bytes = self.options.part_bytes;
        let first = self.wait_ready(pack, part_bytes).await;
        if first.sealed && first.len <= part_bytes {
            let put = async {
                let _permit = self.request_permit().await;
                let Body { payload, account: _account } = self.body(pack, 0..first.len).await?;
                self.objects.put(pack.id(), payload).await
            };
            unless_recalled(pack, put).await?;
            return Ok(u64::from(first.len));
        }
        let limit = self.objects.io_timeout();
        let path = path_of(pack.id());
        let mut upload = bounded("begin an upload", limit, self.objects.store().put_multipart(&path)).await?;
        let done = unless_recalled(pack, self.send_parts(pack, &mut *upload)).await;
        if done.is_err() {
            // Best effort: the store's own rules clean up what this leaves.
            let _ = bounded("abort an upload", limit, upload.abort()).await;
        }
        done
    }

    async fn send_parts(&self, pack: &Arc<Pack>, upload: &mut dyn MultipartUpload) -> Result<u64, Failure> {
        let part_bytes = self.options.part_bytes;
        let limit = self.objects.io_timeout();
        let mut parts: JoinSet<Result<(), Failure>> = JoinSet::new();
        let mut sent = 0;
        let len = loop {
            let next = async {
                let ready = self.wait_ready(pack, sent + part_bytes).await;
                let end = ready.len.min(sent + part_bytes);
                let permit = self.request_permit().await;
                (ready, permit, end, self.body(pack, sent..end).await)
            };
            tokio::select! {
                biased;
                Some(done) = parts.join_next() => self.part_done(pack, done)?,
                (ready, permit, end, body) = next => {
                    if end > sent {
                        let Body { payload, account } = body?;
                        let part = upload.put_part(payload);
                        sent = end;
                        parts.spawn(async move {
                            let _kept = (permit, account);
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
            self.part_done(pack, done)?;
        }
        bounded("complete an upload", limit, upload.complete()).await?;
        Ok(u64::from(len))
    }

    fn part_done(
        &self,
        pack: &Pack,
        done: Result<Result<(), Failure>, tokio::task::JoinError>,
    ) -> Result<(), Failure> {
        done.map_err(|error| Failure::new(ErrorKind::Io, format!("PUT a part: {error}")))??;
        self.acknowledge(pack);
        Ok(())
    }

    /// A range of a pack, read from its journal where it is not in memory.
    async fn body(&self, pack: &Arc<Pack>, range: Range<u32>) -> Result<Body, Failure> {
        let held = pack.hold(range.clone());
        let parts = pack.parts(range);
        let journal = if parts.iter().any(|part| matches!(part, Part::Journal(_))) {
            Some(Arc::clone(&self.journal_bodies).acquire_owned().await.expect("never closed"))
        } else {
            None
        };
        let mut bytes: Vec<Bytes> = Vec::new();
        for part in parts {
            match (part, &self.staging) {
                (Part::Memory(part), _) => bytes.push(part),
                (Part::Journal(at), Some(staging)) => {
                    bytes.push(staging.read_for_upload(pack.id(), at).await?);
                }
                (Part::Journal(_), None) => {
                    return Err(Failure::new(ErrorKind::Io, "a journal without a staging directory"));
                }
            }
        }
        Ok(Body {
            payload: bytes.into_iter().collect(),
            account: BodyAccount { _held: held, _journal: journal },
        })
    }

    async fn wait_ready(&self, pack: &Pack, bytes: u32) -> Ready {
        let idle = self.options.idle_seal;
        let patience = match (pack.lane(), self.staging_options()) {
            // Nobody waits for it: who needs it soon has it staged.
            (Lane::Small, Some(seal_after)) => Patience { idle: seal_after, age: Some(seal_after) },
            (Lane::Small | Lane::Stream(_) | Lane::Compaction, _) => Patience { idle, age: None },
        };
        pack.wait_ready(bytes, patience, || self.seal_pack(pack)).await
    }

    /// How long packs stay open for the next fsync, if anything is staged.
    fn staging_options(&self) -> Option<Duration> {
        let on = self.staging.as_ref().is_some_and(|staging| staging.is_on());
        self.options.staging.as_ref().filter(|_| on).map(|staging| staging.seal_after)
    }

    async fn request_permit(&self) -> OwnedSemaphorePermit {
        if self.requests.available_permits() >= self.options.uploads_max {
            *self.acknowledged.lock() = Instant::now();
        }
        Arc::clone(&self.requests).acquire_owned().await.expect("never closed")
    }
}

/// Does what sends a pack, unless its memory is needed meanwhile: then the journal has it, and the next attempt reads it there.
async fn unless_recalled<T>(
    pack: &Pack,
    sending: impl Future<Output = Result<T, Failure>>,
) -> Result<T, Failure> {
    tokio::select! {
        biased;
        () = pack.wait_recalled() => {
            Err(Failure::new(ErrorKind::Io, "it acknowledges nothing, and memory is needed"))
        }
        sent = sending => sent,
    }
}

/// When a pack's task is gone, for whatever reason, nobody waits for it in vain.
struct EndOfTask(Arc<Pack>);

impl Drop for EndOfTask {
    fn drop(&mut self) {
        self.0.task_ended();
    }
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
    stored: Vec<Bytes>,
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

fn run_job(encoder: &mut Encoder, job: Job, block_bytes: usize) -> Vec<JobOutput> {
    let mut outputs = Vec::with_capacity(job.len());
    for JobPart { run, plain } in job {
        let mut pieces = plain.into_iter();
        let mut rest = pieces.next();
        while rest.is_some() {
            let (mut block, _) = take_bytes(&mut rest, &mut pieces, block_bytes);
            match (block.pop(), block.is_empty()) {
                (Some(whole), true) => encoder.push(whole),
                (last, _) => {
                    block.extend(last);
                    encoder.push(block.concat().into());
                }
            }
        }
        let (blocks, stored) = encoder.take();
        outputs.push(JobOutput { run, blocks, stored });
    }
    outputs
}

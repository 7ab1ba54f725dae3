//! Packs that the store has not acknowledged: where their bytes are, and who waits for them.
//!
//! A pack's bytes are in memory, charged to the budget, until the store has the whole object. What the staging journal
//! has as well can be dropped from memory, unless a request holds it; it is read from the file then. Bytes are never
//! anywhere else.
//! Lock order: registry, one pack; the status is a leaf.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hashbrown::HashMap;
use parking_lot::Mutex;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use super::journal::{Batch, Piece, Replayed};
use super::pack::{self, FooterWriter, HEADER_BYTES};
use super::retry::{Failure, GRACE};
use super::{Budget, BudgetGuard, Durable, Lane, Place, Resume, RunBytes};
use crate::types::{Error, ErrorKind, PackId, PackedRun, Result};

/// A pack that this process sends, as long as its bytes are needed.
#[derive(Debug)]
pub(super) struct Pack {
    id: PackId,
    lane: Lane,
    opened: Instant,
    /// Whether it has a task that sends it.
    sent: bool,
    state: Mutex<PackState>,
    /// The task is told of new bytes and of closing.
    changed: Notify,
    /// The task is told that somebody who waits would like another attempt now.
    nudged: Notify,
    /// The task is told that the memory which its requests hold is needed.
    recalled: Notify,
    status: watch::Sender<Status>,
}

#[derive(Debug, Default)]
struct PackState {
    /// What is in memory, ascending; a block never spans two.
    segments: Vec<Segment>,
    /// What requests hold: in memory as long as they last.
    held: Vec<Range<u32>>,
    /// Names the runs.
    footer: FooterWriter,
    /// Bytes of header and blocks, and of the footer once it is closed.
    len: u32,
    /// Bytes of header and blocks.
    blocks_end: u32,
    closing: Closing,
    /// Nobody needs the bytes any more.
    finished: bool,
    memory: Option<BudgetGuard>,
    journal: Journaled,
}

#[derive(Debug)]
struct Segment {
    offset: u32,
    bytes: Bytes,
}

/// Whether more is coming.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Closing {
    #[default]
    Open,
    /// Somebody waits for the store: nothing more should come.
    Wanted,
    Closed,
}

/// What the journal has of a pack.
#[derive(Debug, Default)]
struct Journaled {
    /// In order and without gaps, from the pack's header on.
    pieces: Vec<Piece>,
    /// Runs, and bytes of their entries in the footer.
    runs: u32,
    entries_len: usize,
    /// Bytes of the file; 0: there is none.
    file_bytes: u64,
    since: Option<Instant>,
    /// Nothing can be added to it.
    failed: bool,
}

impl PackState {
    fn push(&mut self, bytes: impl IntoIterator<Item = Bytes>, memory: BudgetGuard) {
        for bytes in bytes {
            let offset = self.len;
            self.len += u32::try_from(bytes.len()).expect("a pack is far below 4 GiB");
            self.segments.push(Segment { offset, bytes });
        }
        match &mut self.memory {
            Some(held) => held.merge(memory),
            None => self.memory = Some(memory),
        }
    }

    /// Whether the segment could be dropped, because the journal has it.
    fn is_staged(&self, segment: &Segment) -> bool {
        (HEADER_BYTES..self.journal.end()).contains(&segment.offset)
    }

    /// Whether a request holds the segment.
    fn is_held(&self, segment: &Segment) -> bool {
        let end = segment.offset as usize + segment.bytes.len();
        self.held.iter().any(|held| segment.offset < held.end && (held.start as usize) < end)
    }
}

impl Journaled {
    /// Header and blocks up to here are durable.
    fn end(&self) -> u32 {
        self.pieces.last().map_or(HEADER_BYTES, Piece::end)
    }

    /// The piece that holds `offset`.
    fn piece(&self, offset: u32) -> Option<&Piece> {
        let index = self.pieces.partition_point(|piece| piece.offset <= offset).checked_sub(1)?;
        Some(&self.pieces[index]).filter(|piece| offset < piece.end())
    }
}

/// A journal that exists.
#[derive(Debug, Clone, Copy)]
pub(super) struct JournalFacts {
    pub(super) file_bytes: u64,
    pub(super) since: Instant,
}

/// Bytes of a pack that a request holds.
#[derive(Debug)]
pub(super) struct Held {
    pack: Arc<Pack>,
    range: Range<u32>,
}

impl Drop for Held {
    fn drop(&mut self) {
        let held = &mut self.pack.state.lock().held;
        if let Some(index) = held.iter().position(|range| *range == self.range) {
            held.swap_remove(index);
        }
    }
}

/// A part of a pack, where it is.
#[derive(Debug)]
pub(super) enum Part {
    Memory(Bytes),
    /// A range of the journal's file.
    Journal(Range<u64>),
}

#[derive(Debug, Clone, Default)]
struct Status {
    outcome: Outcome,
    /// Header and blocks up to here are durable in the journal.
    staged: u32,
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
    /// The store has it, so many bytes.
    Stored(u64),
    /// The data layer was closed before the pack was stored.
    Abandoned,
}

/// How far a pack is.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ready {
    pub(super) len: u32,
    pub(super) sealed: bool,
}

/// When a pack is closed without being told to.
#[derive(Debug, Clone, Copy)]
pub(super) struct Patience {
    /// Nothing was appended for so long.
    pub(super) idle: Duration,
    /// It was opened so long ago.
    pub(super) age: Option<Duration>,
}

impl Pack {
    /// A pack that is being filled; holds its header.
    pub(super) fn new(id: PackId, lane: Lane, header: Bytes, memory: BudgetGuard) -> Pack {
        let mut state = PackState::default();
        state.push([header], memory);
        state.blocks_end = state.len;
        Pack::with_state(id, lane, state)
    }

    /// A pack that an earlier mount filled, as its journal has it: complete.
    pub(super) fn replayed(
        id: PackId,
        header: Bytes,
        replayed: Replayed,
        budget: &Arc<Budget>,
        resume: Resume,
    ) -> Pack {
        let Replayed { pack_len, pieces, footer, file_len } = replayed;
        let trailer = Bytes::from(footer.finish(id, pack_len));
        let len = pack_len + u32::try_from(trailer.len()).expect("a footer is far below 4 GiB");
        let memory = budget.charge((header.len() + trailer.len()) as u64);
        let (entries, runs) = footer.entries();
        let journal = Journaled {
            pieces,
            runs,
            entries_len: entries.len(),
            file_bytes: file_len,
            since: Some(Instant::now()),
            failed: false,
        };
        let state = PackState {
            segments: vec![
                Segment { offset: 0, bytes: header },
                Segment { offset: pack_len, bytes: trailer },
            ],
            held: Vec::new(),
            footer,
            len,
            blocks_end: pack_len,
            closing: Closing::Closed,
            finished: false,
            memory: Some(memory),
            journal,
        };
        let mut pack = Pack::with_state(id, Lane::Small, state);
        pack.sent = resume == Resume::Send;
        pack.status.send_modify(|status| status.staged = pack_len);
        pack
    }

    fn with_state(id: PackId, lane: Lane, state: PackState) -> Pack {
        Pack {
            id,
            lane,
            opened: Instant::now(),
            sent: true,
            state: Mutex::new(state),
            changed: Notify::new(),
            nudged: Notify::new(),
            recalled: Notify::new(),
            status: watch::Sender::new(Status::default()),
        }
    }

    pub(super) fn id(&self) -> PackId {
        self.id
    }

    pub(super) fn lane(&self) -> Lane {
        self.lane
    }

    /// Bytes that are in memory.
    fn bytes(&self, offset: u32, len: u32) -> Option<Bytes> {
        let state = self.state.lock();
        let index = state.segments.partition_point(|segment| segment.offset <= offset).checked_sub(1)?;
        let segment = &state.segments[index];
        let from = (offset - segment.offset) as usize;
        let to = from.checked_add(len as usize)?;
        (to <= segment.bytes.len()).then(|| segment.bytes.slice(from..to))
    }

    /// Where in the journal's file bytes are.
    fn journal_place(&self, offset: u32, len: u32) -> Option<u64> {
        let state = self.state.lock();
        let piece = state.journal.piece(offset).filter(|_| !state.finished)?;
        let whole = offset.checked_add(len).is_some_and(|end| end <= piece.end());
        whole.then(|| piece.at + u64::from(offset - piece.offset))
    }

    pub(super) fn is_sent(&self) -> bool {
        self.sent
    }

    pub(super) fn is_stored(&self) -> bool {
        matches!(self.status.borrow().outcome, Outcome::Stored(_))
    }

    /// What the store has, if it has acknowledged the pack.
    pub(super) fn stored_bytes(&self) -> Option<u64> {
        match self.status.borrow().outcome {
            Outcome::Stored(bytes) => Some(bytes),
            Outcome::Pending | Outcome::Abandoned => None,
        }
    }

    /// Header and blocks up to here are durable in the journal.
    pub(super) fn staged_bytes(&self) -> u64 {
        self.status.borrow().staged.into()
    }

    /// Bytes that the object would have if a run that takes `needed` bytes in blocks and footer were appended.
    pub(super) fn len_with(&self, needed: usize) -> usize {
        let state = self.state.lock();
        state.blocks_end as usize + state.footer.len() + needed
    }

    /// Appends a run, whose place in the pack is filled in; returns where its blocks end.
    pub(super) fn append(
        &self,
        from: &RunBytes,
        run: &mut PackedRun,
        blocks: Vec<Bytes>,
        memory: BudgetGuard,
    ) -> u32 {
        let end = {
            let mut state = self.state.lock();
            run.pack_offset = state.blocks_end;
            state.footer.push(from.ino, from.chunk, from.offset, run);
            state.push(blocks, memory);
            state.blocks_end = state.len;
            state.blocks_end
        };
        self.grown();
        end
    }

    /// Bytes in memory, if nothing more is coming.
    fn closed_bytes(&self) -> u64 {
        let state = self.state.lock();
        let memory = state.memory.as_ref().filter(|_| state.closing == Closing::Closed);
        memory.map_or(0, BudgetGuard::bytes)
    }

    /// Appends the footer: nothing more is coming.
    pub(super) fn seal(&self, budget: &Arc<Budget>) {
        {
            let mut state = self.state.lock();
            let footer = state.footer.finish(self.id, state.blocks_end);
            let memory = budget.charge(footer.len() as u64);
            state.push([footer.into()], memory);
            state.closing = Closing::Closed;
        }
        self.grown();
    }

    fn grown(&self) {
        self.progress();
        self.changed.notify_one();
    }

    /// Has its task close it soon.
    pub(super) fn want_sealed(&self) {
        let mut state = self.state.lock();
        if state.closing == Closing::Open {
            state.closing = Closing::Wanted;
            self.changed.notify_one();
        }
    }

    /// Something of it was acknowledged.
    pub(super) fn progress(&self) {
        self.status.send_modify(|status| status.progress += 1);
    }

    /// Bytes so far, if there are at least `bytes`, or the pack is closed.
    fn ready(&self, bytes: u32) -> Option<Ready> {
        let state = self.state.lock();
        let sealed = state.closing == Closing::Closed;
        (sealed || state.len >= bytes).then_some(Ready { len: state.len, sealed })
    }

    /// Waits for `bytes` bytes or the end. Calls `close` when it should be closed.
    pub(super) async fn wait_ready(&self, bytes: u32, patience: Patience, close: impl Fn()) -> Ready {
        loop {
            if let Some(ready) = self.ready(bytes) {
                return ready;
            }
            let wanted = self.state.lock().closing == Closing::Wanted;
            let left = patience.age.map(|age| (self.opened + age).saturating_duration_since(Instant::now()));
            let pause = left.map_or(patience.idle, |left| left.min(patience.idle));
            if wanted || tokio::time::timeout(pause, self.changed.notified()).await.is_err() {
                close();
            }
        }
    }

    /// Waits until it is time for another attempt.
    pub(super) async fn wait_retry(&self, pause: Duration) {
        // A waiter that comes now does not sit out a long pause.
        let _ = tokio::time::timeout(pause, self.nudged.notified()).await;
    }

    /// What is in memory of a range stays there, and in the budget, until the answer is dropped.
    pub(super) fn hold(self: &Arc<Pack>, range: Range<u32>) -> Held {
        self.state.lock().held.push(range.clone());
        Held { pack: Arc::clone(self), range }
    }

    /// Has the task give up its requests, if that gains memory; whether it does.
    pub(super) fn recall(&self) -> bool {
        let gains = {
            let state = self.state.lock();
            state.segments.iter().any(|segment| state.is_staged(segment) && state.is_held(segment))
        };
        if gains {
            self.recalled.notify_one();
        }
        gains
    }

    /// Waits until [`Pack::recall`].
    pub(super) async fn wait_recalled(&self) {
        self.recalled.notified().await;
    }

    /// Where the bytes of a range are, in order.
    pub(super) fn parts(&self, range: Range<u32>) -> Vec<Part> {
        let state = self.state.lock();
        let mut parts = Vec::new();
        let mut at = range.start;
        while at < range.end {
            let index = state.segments.partition_point(|segment| segment.offset <= at);
            let segment = index.checked_sub(1).map(|index| &state.segments[index]);
            let in_memory = segment.and_then(|segment| {
                let from = (at - segment.offset) as usize;
                let to = ((range.end - segment.offset) as usize).min(segment.bytes.len());
                (from < to).then(|| segment.bytes.slice(from..to))
            });
            if let Some(bytes) = in_memory {
                at += u32::try_from(bytes.len()).expect("it lies within the pack");
                parts.push(Part::Memory(bytes));
            } else if let Some(piece) = state.journal.piece(at) {
                let end = piece.end().min(range.end);
                let file_at = piece.at + u64::from(at - piece.offset);
                parts.push(Part::Journal(file_at..file_at + u64::from(end - at)));
                at = end;
            } else {
                // Finished meanwhile: nobody needs them.
                break;
            }
        }
        parts
    }

    /// What the journal does not have yet, and where it ends.
    pub(super) fn unstaged(&self) -> Option<Batch> {
        let state = self.state.lock();
        let pack_offset = state.journal.end();
        if state.finished || state.journal.failed || pack_offset >= state.blocks_end {
            return None;
        }
        let first = state.segments.partition_point(|segment| segment.offset < pack_offset);
        let fresh = state.segments[first..].iter().take_while(|segment| segment.offset < state.blocks_end);
        let blocks = fresh.map(|segment| segment.bytes.clone()).collect();
        let (entries, runs) = state.footer.entries();
        let entries = entries[state.journal.entries_len..].to_vec();
        Some(Batch { pack_offset, runs: runs - state.journal.runs, entries, blocks })
    }

    /// A journal of `file_bytes` bytes is about to be made; false: nobody needs it any more.
    pub(super) fn journal_begins(&self, file_bytes: u64) -> bool {
        let mut state = self.state.lock();
        if !state.finished {
            state.journal.file_bytes = file_bytes;
        }
        !state.finished
    }

    /// The journal has a batch durably, at `piece`.
    pub(super) fn staged(&self, batch: &Batch, piece: Piece) {
        {
            let mut state = self.state.lock();
            let journal = &mut state.journal;
            journal.pieces.push(piece);
            journal.runs += batch.runs;
            journal.entries_len += batch.entries.len();
            journal.file_bytes = piece.at + u64::from(piece.len);
            journal.since.get_or_insert_with(Instant::now);
        }
        self.status.send_modify(|status| status.staged = piece.end());
    }

    /// Nothing can be added to the journal: who waits needs the store.
    pub(super) fn staging_failed(&self) {
        self.state.lock().journal.failed = true;
        self.want_sealed();
    }

    /// Whether the journal has all there will ever be.
    pub(super) fn is_wholly_staged(&self) -> bool {
        let state = self.state.lock();
        state.finished || (state.closing == Closing::Closed && state.journal.end() == state.blocks_end)
    }

    /// The journal's file, if there is one.
    pub(super) fn journal(&self) -> Option<JournalFacts> {
        let state = self.state.lock();
        let since = state.journal.since.unwrap_or(self.opened);
        let file_bytes = state.journal.file_bytes;
        (file_bytes > 0).then_some(JournalFacts { file_bytes, since })
    }

    /// The journal's file is gone; returns how many bytes it had.
    pub(super) fn journal_removed(&self) -> u64 {
        std::mem::take(&mut self.state.lock().journal.file_bytes)
    }

    /// Drops from memory what the journal has, too, and no request holds.
    pub(super) fn release(&self) {
        let _given_back = {
            let mut state = self.state.lock();
            let mut segments = std::mem::take(&mut state.segments);
            let mut released = 0;
            segments.retain(|segment| {
                let keep = !state.is_staged(segment) || state.is_held(segment);
                released += if keep { 0 } else { segment.bytes.len() as u64 };
                keep
            });
            state.segments = segments;
            state.memory.as_mut().map(|memory| memory.split(released))
        };
    }

    /// An attempt failed.
    pub(super) fn attempt_failed(&self, failure: Failure) {
        self.status.send_modify(|status| {
            status.failures += 1;
            status.failure = Some(failure);
        });
    }

    /// The store has all of it.
    pub(super) fn finish_stored(&self, bytes: u64) {
        self.finish(Outcome::Stored(bytes));
    }

    fn finish(&self, outcome: Outcome) {
        let memory = {
            let mut state = self.state.lock();
            state.segments = Vec::new();
            state.footer = FooterWriter::default();
            state.finished = true;
            state.memory.take()
        };
        drop(memory);
        self.status.send_modify(|status| status.outcome = outcome);
    }

    /// Nothing sends it any more. Its bytes stay readable.
    pub(super) fn task_ended(&self) {
        self.status.send_if_modified(|status| {
            let pending = status.outcome == Outcome::Pending;
            if pending {
                status.outcome = Outcome::Abandoned;
            }
            pending
        });
    }

    /// Ends the waiting of those who wait for a pack that will not be stored any more.
    pub(super) fn abandon(&self) {
        if !self.is_stored() {
            self.finish(Outcome::Abandoned);
        }
    }

    /// Waits until the store has all of it, or the journal everything up to `enough`. See [`super::PackTicket::stored`].
    pub(super) async fn wait(&self, io_timeout: Option<Duration>, enough: Option<u32>) -> Result<Durable> {
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
                if let Outcome::Stored(bytes) = now.outcome {
                    return Ok(Durable { pack: self.id, bytes, place: Place::Store });
                }
                if enough.is_some_and(|enough| enough <= now.staged) {
                    let bytes = u64::from(now.staged);
                    return Ok(Durable { pack: self.id, bytes, place: Place::Staging });
                }
                if now.outcome == Outcome::Abandoned {
                    return Err(Error::new(ErrorKind::Io, format!("pack {} was given up", self.id)));
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

/// The packs of this process that are needed: not stored, or not committed, or with a journal.
#[derive(Debug, Default)]
pub(super) struct Packs {
    packs: Mutex<HashMap<PackId, Arc<Pack>>>,
}

impl Packs {
    pub(super) fn insert(&self, pack: Arc<Pack>) {
        self.packs.lock().insert(pack.id, pack);
    }

    fn get(&self, pack: PackId) -> Option<Arc<Pack>> {
        self.packs.lock().get(&pack).cloned()
    }

    /// Stored bytes of a pack that are in memory.
    pub(super) fn bytes(&self, pack: PackId, offset: u32, len: u32) -> Option<Bytes> {
        self.get(pack)?.bytes(offset, len)
    }

    /// Where in its journal's file bytes of a pack are.
    pub(super) fn journal_place(&self, pack: PackId, offset: u32, len: u32) -> Option<u64> {
        self.get(pack)?.journal_place(offset, len)
    }

    /// Metadata names the pack, or never will.
    pub(super) fn committed(&self, pack: PackId) {
        let mut packs = self.packs.lock();
        if packs.get(&pack).is_some_and(|pack| pack.is_stored() && pack.journal().is_none()) {
            packs.remove(&pack);
        }
    }

    /// Nobody needs the pack, unless it is stored or has a journal to look after.
    pub(super) fn give_up(&self, pack: PackId) {
        let given_up = {
            let mut packs = self.packs.lock();
            let needless = packs.get(&pack).is_some_and(|pack| !pack.is_stored() && pack.journal().is_none());
            if needless { packs.remove(&pack) } else { None }
        };
        if let Some(pack) = given_up {
            pack.abandon();
        }
    }

    /// Bytes in memory of the packs that are closed and not stored.
    pub(super) fn closed_bytes(&self) -> u64 {
        self.packs.lock().values().map(|pack| pack.closed_bytes()).sum()
    }

    pub(super) fn all(&self) -> Vec<Arc<Pack>> {
        let mut packs: Vec<_> = self.packs.lock().values().cloned().collect();
        packs.sort_unstable_by_key(|pack| pack.id);
        packs
    }
}

/// The header of a new pack.
pub(super) fn header_of(volume: uuid::Uuid, pack: PackId) -> Bytes {
    Bytes::copy_from_slice(&pack::header(volume, pack))
}

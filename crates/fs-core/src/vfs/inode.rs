//! State of one file that is open or holds bytes which are not committed.
//!
//! Owns: the length, what is dirty, what a flush has taken but not committed (batches, oldest first), the resolved
//! extents of committed chunks, time stamps that are newer than the metadata. A reader looks at dirty bytes, then at
//! batches from the newest to the oldest, then at committed extents, all under one lock, so that it sees one moment; a
//! commit moves a batch's bytes to the committed side under the same lock.
//!
//! Two gates order what has to wait. `append_gate`: batches get their place in packs in order. `flush_gate`: the file's
//! record changes by one commit, truncate, clone or compaction at a time. Lock order: `append_gate`s, then `flush_gate`s,
//! each in ascending inode number, then the state's lock, which is never held across an await.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};

use super::dirty::{PackedPart, Part, PieceMap};
use crate::data::{BudgetGuard, Overlay, PackTicket, Source};
use crate::meta::NotAnswered;
use crate::types::{Attr, CHUNK_BYTES, ChunkIndex, Error, ErrorKind, Ino, PackId, Timestamp};

/// Chunks of one file whose extents are kept.
const CHUNKS_CACHED_MAX: usize = 512;

/// A failed flush, as it is told to everybody who asks.
#[derive(Debug, Clone)]
pub(super) struct Failure {
    pub(super) kind: ErrorKind,
    pub(super) text: Arc<str>,
}

impl From<&Error> for Failure {
    fn from(error: &Error) -> Failure {
        Failure { kind: error.kind, text: error.to_string().into() }
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Error {
        Error::new(failure.kind, failure.text.to_string())
    }
}

/// One file.
#[derive(Debug)]
pub(super) struct Inode {
    pub(super) ino: Ino,
    pub(super) append_gate: Arc<tokio::sync::Mutex<()>>,
    pub(super) flush_gate: Arc<tokio::sync::Mutex<()>>,
    state: Mutex<InodeState>,
}

impl Inode {
    pub(super) fn new(attr: &Attr) -> Inode {
        let state = InodeState {
            length: attr.size,
            committed_length: attr.size,
            unsure: None,
            dirty: PieceMap::default(),
            dirty_guard: None,
            batches: VecDeque::new(),
            batch_next: 0,
            chunks: HashMap::new(),
            version: 0,
            mtime: None,
            atime: None,
            atime_due_at: i64::MIN,
            xattrs: Xattrs::Perhaps,
            set_ids: if attr.mode & 0o6000 == 0 { SetIds::None } else { SetIds::Perhaps },
            reserved: 0,
            listed: false,
            following: false,
            stream: Stream::default(),
            failure: None,
            failures: 0,
            life: Life::Named,
        };
        Inode {
            ino: attr.ino,
            append_gate: Arc::default(),
            flush_gate: Arc::default(),
            state: Mutex::new(state),
        }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, InodeState> {
        self.state.lock()
    }
}

/// A time stamp that is at least as new as the metadata's.
#[derive(Debug, Clone, Copy)]
pub(super) struct Fresh {
    pub(super) time: Timestamp,
    pub(super) committed: bool,
}

/// Whether a write may have to drop set-id bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SetIds {
    None,
    Perhaps,
}

/// Whether the file has extended attributes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Xattrs {
    None,
    Perhaps,
}

/// Whether the file can still be reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Life {
    /// It has a name, as far as is known.
    Named,
    /// It lost its last name: only who has it open needs its bytes.
    Orphan,
    /// Nobody can reach it: its bytes are dropped.
    Dead,
}

/// Detection of long sequential writes.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Stream {
    next: u64,
    bytes: u64,
}

impl Stream {
    /// How many bytes were written in order, up to the last write.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Notes a write; returns whether it reaches the end of a part of `unit` bytes of the file, after `enough` sequential
    /// bytes.
    pub(super) fn advance(&mut self, offset: u64, len: u64, enough: u64, unit: u64) -> bool {
        self.bytes = if offset == self.next { self.bytes + len } else { len };
        self.next = offset + len;
        self.bytes >= enough && self.next / unit > offset / unit
    }
}

/// Contents that are on their way to the metadata.
#[derive(Debug)]
pub(super) struct Batch {
    pub(super) id: u64,
    pub(super) pieces: PieceMap,
    /// The file is at least this long after the batch.
    pub(super) grow_to: u64,
    /// Whether every piece has its place.
    pub(super) placed: bool,
    /// Packs that must be stored before the batch is committed.
    pub(super) tickets: Vec<PackTicket>,
    /// Packs that must not be collected before the batch is committed, one entry a pin.
    pub(super) pins: Vec<PackId>,
    /// Memory of the pieces until they are placed.
    pub(super) guard: Option<BudgetGuard>,
}

/// A committed chunk, resolved.
#[derive(Debug)]
pub(super) struct Chunk {
    pub(super) overlay: Overlay,
    pub(super) groups: usize,
}

#[derive(Debug)]
pub(super) struct InodeState {
    pub(super) length: u64,
    /// Length in the metadata; nothing committed lies beyond it.
    pub(super) committed_length: u64,
    /// A change of the metadata was not answered, so that what is known here of what is committed may be wrong.
    pub(super) unsure: Option<NotAnswered>,
    pub(super) dirty: PieceMap,
    dirty_guard: Option<BudgetGuard>,
    pub(super) batches: VecDeque<Batch>,
    batch_next: u64,
    chunks: HashMap<ChunkIndex, Arc<Chunk>>,
    /// Counts changes of what is committed, so that a slow reader does not cache what is old.
    pub(super) version: u64,
    pub(super) mtime: Option<Fresh>,
    pub(super) atime: Option<Fresh>,
    /// Before this time, in seconds since 1970, a read need not look whether it changes atime.
    pub(super) atime_due_at: i64,
    pub(super) set_ids: SetIds,
    pub(super) xattrs: Xattrs,
    /// Bytes of this file counted against the capacity although they are not committed.
    pub(super) reserved: u64,
    /// Whether the file is in the list of dirty files.
    pub(super) listed: bool,
    /// Whether a task commits streamed packs as they are stored.
    pub(super) following: bool,
    pub(super) stream: Stream,
    /// Why bytes are still not committed, if a flush failed.
    pub(super) failure: Option<Failure>,
    /// Counts failures, so that each handle tells one once.
    pub(super) failures: u64,
    pub(super) life: Life,
}

impl InodeState {
    /// Whether the metadata says everything about the file that is known here.
    pub(super) fn is_clean(&self) -> bool {
        let committed = |fresh: &Option<Fresh>| fresh.is_none_or(|fresh| fresh.committed);
        self.dirty.is_empty()
            && self.batches.is_empty()
            && committed(&self.mtime)
            && committed(&self.atime)
            && !self.listed
            && !self.following
    }

    /// Whether a flush has something to do.
    pub(super) fn needs_flush(&self) -> bool {
        let uncommitted = |fresh: &Option<Fresh>| fresh.is_some_and(|fresh| !fresh.committed);
        self.life != Life::Dead
            && (!self.dirty.is_empty()
                || !self.batches.is_empty()
                || uncommitted(&self.mtime)
                || uncommitted(&self.atime))
    }

    /// Bytes that are not committed.
    pub(super) fn unsaved_bytes(&self) -> u64 {
        self.dirty.data_bytes() + self.batches.iter().map(|batch| batch.pieces.data_bytes()).sum::<u64>()
    }

    pub(super) fn written_at(&mut self, time: Timestamp) {
        self.mtime = Some(Fresh { time, committed: false });
        self.atime_due_at = i64::MIN;
    }

    /// Adds memory for dirty bytes and gives back what is too much.
    pub(super) fn hold(&mut self, guard: Option<BudgetGuard>) {
        match (&mut self.dirty_guard, guard) {
            (Some(held), Some(more)) => held.merge(more),
            (held @ None, more) => *held = more,
            (Some(_), None) => {}
        }
        let needed = self.dirty.data_bytes();
        if let Some(held) = &mut self.dirty_guard
            && held.bytes() > needed
        {
            drop(held.split(held.bytes() - needed));
        }
    }

    /// Makes `pieces`, taken from the dirty map, the newest batch.
    pub(super) fn push_taken(&mut self, pieces: PieceMap, grow_to: u64) {
        let bytes = pieces.data_bytes();
        let guard = self.dirty_guard.as_mut().map(|held| held.split(bytes));
        self.push_batch(Batch {
            id: 0,
            pieces,
            grow_to,
            placed: false,
            tickets: Vec::new(),
            pins: Vec::new(),
            guard,
        });
    }

    /// Makes `batch` the newest; gives it its number.
    pub(super) fn push_batch(&mut self, mut batch: Batch) {
        batch.id = self.batch_next;
        self.batch_next += 1;
        self.batches.push_back(batch);
    }

    /// Forgets everything in `range` that is not committed, because something newer covers it.
    pub(super) fn punch(&mut self, range: &Range<u64>) {
        self.dirty.punch(range.clone());
        for batch in &mut self.batches {
            batch.pieces.punch(range.clone());
        }
        self.hold(None);
    }

    /// The metadata now has `length`; what lies beyond is gone.
    pub(super) fn truncated(&mut self, length: u64) {
        self.punch(&(length..u64::MAX));
        for batch in &mut self.batches {
            batch.grow_to = batch.grow_to.min(length);
        }
        self.length = length;
        self.committed_length = length;
        self.committed_changed();
    }

    /// The metadata has `length`, whatever was thought before. What is not committed lies over that.
    pub(super) fn found(&mut self, length: u64) {
        let grow_to = self.batches.iter().map(|batch| batch.grow_to).max().unwrap_or(0);
        self.length = length.max(grow_to).max(self.dirty.end());
        self.committed_length = length;
        self.committed_changed();
    }

    /// Committed extents may differ from now on.
    pub(super) fn committed_changed(&mut self) {
        self.version += 1;
        self.chunks.clear();
    }

    /// Committed extents of these chunks may differ from now on.
    pub(super) fn chunks_changed(&mut self, chunks: impl Iterator<Item = ChunkIndex>) {
        self.version += 1;
        for chunk in chunks {
            self.chunks.remove(&chunk);
        }
    }

    pub(super) fn chunk(&self, chunk: ChunkIndex) -> Option<Arc<Chunk>> {
        self.chunks.get(&chunk).cloned()
    }

    /// Keeps a resolved chunk, unless it was read before `version`.
    pub(super) fn cache_chunk(&mut self, index: ChunkIndex, chunk: Arc<Chunk>, version: u64) -> bool {
        if self.version != version {
            return false;
        }
        if self.chunks.len() >= CHUNKS_CACHED_MAX {
            self.chunks.clear();
        }
        self.chunks.insert(index, chunk);
        true
    }

    /// What lies in `range`, in order and without gaps. `Err` names a chunk whose extents must be loaded first.
    pub(super) fn parts(&self, range: Range<u64>) -> Result<Vec<(u64, Part)>, ChunkIndex> {
        let mut found = Vec::new();
        let mut missing = self.dirty.read(vec![range], &mut found);
        for batch in self.batches.iter().rev() {
            if missing.is_empty() {
                break;
            }
            missing = batch.pieces.read(missing, &mut found);
        }
        for gap in missing {
            self.committed_parts(gap, &mut found)?;
        }
        found.sort_unstable_by_key(|(offset, _)| *offset);
        Ok(found)
    }

    fn committed_parts(&self, gap: Range<u64>, found: &mut Vec<(u64, Part)>) -> Result<(), ChunkIndex> {
        let mut offset = gap.start;
        while offset < gap.end.min(self.committed_length) {
            let index = ChunkIndex::of(offset);
            let chunk = self.chunks.get(&index).ok_or(index)?;
            let end = gap.end.min(index.start() + CHUNK_BYTES).min(self.committed_length);
            for tile in chunk.overlay.tiles(within(index, offset)..within(index, end)) {
                let part = match tile.source {
                    Source::Hole => Part::Zeros(u64::from(tile.len)),
                    Source::Inline(bytes) => Part::Bytes(bytes),
                    Source::Packed { run, offset_in_run } => {
                        Part::Packed(PackedPart { run, offset_in_run, len: tile.len })
                    }
                };
                found.push((index.start() + u64::from(tile.offset), part));
            }
            offset = end;
        }
        if offset < gap.end {
            found.push((offset, Part::Zeros(gap.end - offset)));
        }
        Ok(())
    }

    /// Brings attributes that the metadata returned up to date.
    pub(super) fn refresh(&self, attr: &mut Attr) {
        attr.size = self.length;
        if let Some(mtime) = self.mtime {
            attr.mtime = mtime.time;
            if !mtime.committed {
                attr.ctime = attr.ctime.max(mtime.time);
            }
        }
        if let Some(atime) = self.atime {
            attr.atime = atime.time;
        }
        let unsaved = self.unsaved_bytes();
        if unsaved > 0 {
            let most = attr.allocated.max(self.length);
            attr.allocated = (attr.allocated + unsaved).min(most);
        }
    }
}

/// Position of a file offset within a chunk that it lies in, or that it ends.
pub(super) fn within(chunk: ChunkIndex, offset: u64) -> u32 {
    u32::try_from(offset - chunk.start()).expect("the offset lies in the chunk")
}

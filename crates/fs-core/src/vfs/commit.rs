//! Commits: the metadata names what is durable.
//!
//! Of each file, the oldest batches whose packs are durable, staged or stored, become slices; many files share a transaction, a file with
//! more than fits one takes several. Under the file's `flush_gate`, so that the change of allocated bytes is computed
//! against what the commit then covers.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

use super::Vfs;
use super::dirty::{Piece, PieceMap};
use super::handle::InodeRef;
use super::inode::{Batch, Failure, Fresh, InodeState, Life, within};
use crate::data::{Durable, Extent, PackTicket, Place, Source};
use crate::meta::{FileCommit, NewPack, PackState};
use crate::types::{
    Block, CHUNK_BYTES, ChunkIndex, Error, ErrorKind, Ino, PackId, Result, Slice, Stored, Timestamp,
};

/// Files and bytes of records in one transaction.
const COMMIT_FILES_MAX: usize = 256;
const COMMIT_BYTES_MAX: usize = 400_000;
/// Records of one file in one transaction, in bytes.
const FILE_COMMIT_BYTES_MAX: usize = 300_000;
/// A hole over more chunks than this is committed only where there are chunks.
const HOLE_CHUNKS_MAX: u64 = 64;

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
    /// Commits the oldest placed batch of a file once its packs are durable.
    pub(super) async fn commit_oldest(&self, inode: &InodeRef) -> Option<Failure> {
        let tickets: Vec<PackTicket> = {
            let state = inode.state();
            state.batches.front().filter(|batch| batch.placed)?.tickets.clone()
        };
        let mut durable = HashMap::new();
        for ticket in tickets {
            match ticket.durable().await {
                Ok(pack) => durable.insert(pack.pack, pack),
                Err(error) => return Some(Failure::from(&error)),
            };
        }
        self.commit_durable(std::slice::from_ref(inode), &durable).await.remove(&inode.ino)
    }

    /// Waits until what the files have placed is durable, and commits it.
    pub(super) async fn commit(
        &self,
        files: &[InodeRef],
        tickets: &HashMap<Ino, Vec<PackTicket>>,
    ) -> HashMap<Ino, Failure> {
        let mut failures = HashMap::new();
        let mut durable: HashMap<PackId, Durable> = HashMap::new();
        let mut failed: HashMap<PackId, Failure> = HashMap::new();
        for inode in files {
            for ticket in tickets.get(&inode.ino).into_iter().flatten() {
                let pack = ticket.pack();
                let waits = durable.get(&pack).is_none_or(|durable| !ticket.is_within(durable));
                if waits && !failed.contains_key(&pack) {
                    match ticket.durable().await {
                        Ok(done) => drop(durable.insert(pack, done)),
                        Err(error) => drop(failed.insert(pack, Failure::from(&error))),
                    }
                }
                if let Some(failure) = failed.get(&pack) {
                    failures.insert(inode.ino, failure.clone());
                }
            }
        }
        for (ino, failure) in self.commit_durable(files, &durable).await {
            failures.entry(ino).or_insert(failure);
        }
        for inode in files {
            if let Err(error) = self.commit_atime(inode).await {
                failures.entry(inode.ino).or_insert(Failure::from(&error));
            }
        }
        failures
    }

    /// Commits the oldest batches of each file that are all within `durable`. The files are in ascending order.
    async fn commit_durable(
        &self,
        files: &[InodeRef],
        durable: &HashMap<PackId, Durable>,
    ) -> HashMap<Ino, Failure> {
        let mut failures = HashMap::new();
        let mut rest = files;
        while !rest.is_empty() {
            match self.commit_first(rest, durable, &mut failures).await {
                Ok(done) => rest = &rest[done..],
                Err(error) => {
                    let failure = Failure::from(&error);
                    failures.extend(rest.iter().map(|inode| (inode.ino, failure.clone())));
                    rest = &[];
                }
            }
        }
        failures
    }

    /// Commits the first of `files`, as many as a transaction takes. Returns how many are done with, well or not.
    ///
    /// # Errors
    /// The metadata store does not answer, which took a while to find out and is so for the other files too.
    async fn commit_first(
        &self,
        files: &[InodeRef],
        durable: &HashMap<PackId, Durable>,
        failures: &mut HashMap<Ino, Failure>,
    ) -> Result<usize> {
        let mut gates = Vec::new();
        let mut prepared = Vec::new();
        let mut bytes = 0;
        let mut done = 0;
        for inode in files.iter().take(COMMIT_FILES_MAX) {
            if bytes >= COMMIT_BYTES_MAX {
                break;
            }
            gates.push(inode.flush_gate.lock().await);
            self.make_sure(inode).await?;
            match self.prepare(inode, durable).await {
                // A file with more than fits one transaction stays for the next round.
                Ok(Some((file, more))) => {
                    bytes += file.bytes;
                    prepared.push(file);
                    if more {
                        break;
                    }
                    done += 1;
                }
                Ok(None) => done += 1,
                Err(error) => {
                    failures.insert(inode.ino, Failure::from(&error));
                    done += 1;
                }
            }
        }
        self.commit_prepared(&prepared, durable, failures).await?;
        if files.get(done).is_some_and(|inode| failures.contains_key(&inode.ino)) {
            // The file that needs several transactions failed.
            done += 1;
        }
        Ok(done)
    }

    /// Commits files together, or one by one if that fails: it may be the fault of one. Under their `flush_gate`s.
    ///
    /// # Errors
    /// As `commit_first`.
    async fn commit_prepared(
        &self,
        prepared: &[Prepared],
        durable: &HashMap<PackId, Durable>,
        failures: &mut HashMap<Ino, Failure>,
    ) -> Result<()> {
        if prepared.is_empty() {
            return Ok(());
        }
        let Err(error) = self.commit_together(prepared, durable).await else { return Ok(()) };
        if let [file] = prepared {
            failures.insert(file.inode.ino, Failure::from(&error));
            return Ok(());
        }
        for Prepared { inode, .. } in prepared {
            // If there was no answer, some of it may be committed.
            self.make_sure(inode).await?;
            let outcome = match self.prepare(inode, durable).await {
                Ok(Some((file, _))) => self.commit_together(std::slice::from_ref(&file), durable).await,
                Ok(None) => Ok(()),
                Err(error) => Err(error),
            };
            if let Err(error) = outcome {
                failures.insert(inode.ino, Failure::from(&error));
            }
        }
        Ok(())
    }

    async fn commit_together(&self, prepared: &[Prepared], durable: &HashMap<PackId, Durable>) -> Result<()> {
        let packs: HashSet<PackId> = prepared.iter().flat_map(|file| file.packs.iter().copied()).collect();
        let named: Vec<Durable> = packs
            .iter()
            .filter_map(|pack| durable.get(pack))
            .filter(|pack| self.flusher.must_name(pack.pack, pack.place))
            .copied()
            .collect();
        let new_packs: Vec<NewPack> = named.iter().map(new_pack).collect();
        let commits: Vec<FileCommit> = prepared.iter().map(|file| file.commit.clone()).collect();
        let outcome = self.meta.commit(&commits, &new_packs).await;
        if outcome.as_ref().is_err_and(Error::unanswered) {
            for file in prepared {
                file.inode.state().unsure = Some(self.meta.not_answered());
            }
        }
        outcome?;
        self.packs_named(&named);
        for file in prepared {
            self.committed(file);
        }
        Ok(())
    }

    /// The metadata has records of these packs.
    pub(super) fn packs_named(&self, packs: &[Durable]) {
        for pack in packs {
            self.flusher.named(pack.pack, pack.place);
            self.data.committed(pack.pack);
        }
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

    /// What one transaction can commit of a file, and whether there is more. Under the file's `flush_gate`, when it is sure
    /// what the metadata has.
    async fn prepare(
        &self,
        inode: &InodeRef,
        durable: &HashMap<PackId, Durable>,
    ) -> Result<Option<(Prepared, bool)>> {
        let Some(mut gathered) = gather(&inode.state(), durable) else { return Ok(None) };
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
}

/// The record of a pack that is durable.
pub(super) fn new_pack(pack: &Durable) -> NewPack {
    let state = match pack.place {
        Place::Staging => PackState::Staged,
        Place::Store => PackState::Stored,
    };
    NewPack { pack: pack.pack, bytes: pack.bytes, state }
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

/// The oldest batches that are placed and durable, as far as one transaction holds them.
fn gather(state: &InodeState, durable: &HashMap<PackId, Durable>) -> Option<Gathered> {
    if state.life == Life::Dead {
        return None;
    }
    let mut gathered = Gathered {
        mtime: state.mtime.filter(|mtime: &Fresh| !mtime.committed).map(|mtime| mtime.time),
        ..Gathered::default()
    };
    let mut order = 0;
    let mut bytes = 0;
    let ready = |batch: &&Batch| {
        let within =
            |ticket: &PackTicket| durable.get(&ticket.pack()).is_some_and(|pack| ticket.is_within(pack));
        batch.placed && batch.tickets.iter().all(within)
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

//! Compaction of a chunk: many slices become few, without anybody noticing.
//!
//! What was committed while the bytes were read and stored again stays on top, since the merged slices take the place
//! of those that were seen. Large extents keep their place in their packs; only small neighbours are written anew, those
//! of many chunks in one pack.

use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;

use super::Vfs;
use super::commit::new_pack;
use crate::data::{
    Appended, Durable, Extent, Lane, PackTicket, ReadHint, ReadRange, RunBytes, Source, overlay,
};
use crate::meta::{NewPack, ReplaceArgs};
use crate::types::{ChunkIndex, ErrorKind, Ino, Kind, PackId, Result, Slice, SliceStamp, Stored};

/// Extents below this size are written together with their neighbours.
const SMALL_BYTES: u32 = 512 << 10;
/// Plain bytes, and chunks, that are moved before their pack is closed and waited for.
const ROUND_BYTES: u64 = 16 << 20;
const ROUND_CHUNKS: usize = 256;

/// A chunk whose bytes have their new place, in packs that are pinned.
struct Compaction {
    ino: Ino,
    index: ChunkIndex,
    /// The groups that it is made of, and what they amount to.
    seen: Vec<SliceStamp>,
    extents: Vec<Extent>,
    /// Ranges of extents, and the run that each becomes.
    moves: Vec<Range<usize>>,
    placed: Vec<Appended>,
    pins: Vec<PackId>,
    /// Plain bytes that are moved.
    bytes: u64,
}

impl Vfs {
    /// Merges the slices of chunks. Every extent in one of the packs `leaving` is written anew. What is written shares
    /// packs of `lane`: with [`Lane::Small`] it is staged like what is fsynced, which is quick, otherwise a pack is closed
    /// after about [`ROUND_BYTES`]. Returns how many chunks were changed; one that changes meanwhile
    /// is left for another time.
    ///
    /// # Errors
    /// `Io`; `NoSpace`.
    pub(super) async fn compact_chunks(
        &self,
        chunks: &[(Ino, ChunkIndex)],
        leaving: &HashSet<PackId>,
        lane: Lane,
    ) -> Result<u64> {
        let mut changed = 0;
        let mut rest = chunks.iter();
        while !rest.as_slice().is_empty() {
            let mut begun = Vec::new();
            let mut outcome = Ok(());
            let mut bytes = 0;
            while bytes < ROUND_BYTES
                && begun.len() < ROUND_CHUNKS
                && outcome.is_ok()
                && let Some((ino, index)) = rest.next()
            {
                match self.begin_compaction((*ino, *index), leaving, lane).await {
                    Ok(Some(compaction)) => {
                        bytes += compaction.bytes;
                        begun.push(compaction);
                    }
                    Ok(None) => {}
                    // The file is gone, or changes: it is found again if there is still something to do.
                    Err(error) if error.kind == ErrorKind::Stale => {}
                    Err(error) => outcome = Err(error),
                }
            }
            if lane == Lane::Small {
                let placed = begun.iter().flat_map(|compaction| &compaction.placed);
                let tickets: Vec<PackTicket> = placed.map(|run| run.pack.clone()).collect();
                self.data.hasten(&tickets).await;
            } else {
                self.data.seal(lane);
            }
            for compaction in begun {
                match self.end_compaction(compaction).await {
                    Ok(()) => changed += 1,
                    Err(error) if error.kind == ErrorKind::Stale => {}
                    Err(error) => outcome = outcome.and(Err(error)),
                }
            }
            outcome?;
        }
        self.counters.chunks_compacted.fetch_add(changed, Ordering::Relaxed);
        Ok(changed)
    }

    /// Reads what is to be moved in a chunk, and gives it its new place. `None`: there is nothing to do.
    async fn begin_compaction(
        &self,
        (ino, index): (Ino, ChunkIndex),
        leaving: &HashSet<PackId>,
        lane: Lane,
    ) -> Result<Option<Compaction>> {
        let attr = self.meta.getattr(ino).await?;
        if attr.kind != Kind::File {
            return Ok(None);
        }
        let groups = self.meta.chunk(ino, index).await?;
        let extents = overlay(&groups).extents().to_vec();
        let moves = ranges_to_move(&extents, leaving);
        if groups.is_empty() || (groups.len() < 2 && moves.is_empty()) {
            return Ok(None);
        }
        let bytes: u64 =
            moves.iter().flat_map(|range| &extents[range.clone()]).map(|e| u64::from(e.len)).sum();
        let _memory = self.memory.acquire(bytes).await;
        let mut runs = Vec::with_capacity(moves.len());
        for range in &moves {
            let neighbours = &extents[range.clone()];
            let bytes = self.bytes_of(neighbours).await?;
            runs.push(RunBytes { ino, chunk: index, offset: neighbours[0].offset, bytes });
        }
        let placed = if runs.is_empty() { Vec::new() } else { self.data.append(lane, runs).await? };
        let mut pins: Vec<PackId> = placed.iter().map(|run| run.pack.pack()).collect();
        pins.sort_unstable();
        pins.dedup();
        for pack in &pins {
            self.flusher.pin(*pack, false);
        }
        let seen = groups.iter().map(|group| group.stamp).collect();
        Ok(Some(Compaction { ino, index, seen, extents, moves, placed, pins, bytes }))
    }

    /// Waits until what was moved is durable, and puts it in place.
    async fn end_compaction(&self, compaction: Compaction) -> Result<()> {
        let Compaction { ino, index, seen, extents, moves, placed, pins, .. } = compaction;
        let result = async {
            let mut durable: Vec<Durable> = Vec::new();
            // The last run of a pack says most about it.
            for run in placed.iter().rev() {
                if durable.iter().all(|pack| pack.pack != run.pack.pack()) {
                    durable.push(run.pack.durable().await?);
                }
            }
            let mut merged = Vec::with_capacity(extents.len());
            let mut next = 0;
            for (range, run) in moves.iter().zip(placed) {
                merged.extend(extents[next..range.start].iter().map(Extent::to_slice));
                let len = run.run.plain_len;
                merged.push(Slice {
                    offset: extents[range.start].offset,
                    len,
                    stored: Stored::Packed(run.run),
                });
                next = range.end;
            }
            merged.extend(extents[next..].iter().map(Extent::to_slice));
            self.replace(ino, index, &seen, &merged, &durable).await
        }
        .await;
        self.unpin(&pins);
        result
    }

    async fn replace(
        &self,
        ino: Ino,
        chunk: ChunkIndex,
        seen: &[SliceStamp],
        merged: &[Slice],
        durable: &[Durable],
    ) -> Result<()> {
        let inode = self.inode(ino).await?;
        let _gate = inode.flush_gate.lock().await;
        let new_packs: Vec<NewPack> = durable.iter().map(new_pack).collect();
        let args = ReplaceArgs { ino, chunk, seen, merged, new_packs: &new_packs };
        self.meta.replace_groups(args).await?;
        self.packs_named(durable);
        inode.state().chunks_changed(std::iter::once(chunk));
        Ok(())
    }

    /// The bytes of extents, in order.
    async fn bytes_of(&self, extents: &[Extent]) -> Result<Vec<Bytes>> {
        let ranges: Vec<ReadRange> = extents
            .iter()
            .filter_map(|extent| match &extent.source {
                Source::Packed { run, offset_in_run } => {
                    Some(ReadRange { run: Arc::clone(run), offset_in_run: *offset_in_run, len: extent.len })
                }
                Source::Inline(_) | Source::Hole => None,
            })
            .collect();
        let mut packed = self.data.read_many(&ranges, ReadHint::Once).await?.into_iter();
        let mut bytes = Vec::with_capacity(extents.len());
        for extent in extents {
            match &extent.source {
                Source::Inline(inline) => bytes.push(inline.clone()),
                Source::Packed { .. } => {
                    let pieces = packed.next().ok_or(ErrorKind::Io)?;
                    bytes.extend(pieces.iter());
                }
                Source::Hole => {}
            }
        }
        Ok(bytes)
    }
}

/// Neighbouring extents (by index) that are to be written anew as one run: two or more small ones, or any that lie in
/// one of `leaving`.
fn ranges_to_move(extents: &[Extent], leaving: &HashSet<PackId>) -> Vec<Range<usize>> {
    let leaves = |extent: &Extent| match &extent.source {
        Source::Packed { run, .. } => leaving.contains(&run.pack),
        Source::Inline(_) | Source::Hole => false,
    };
    let small = |extent: &Extent| extent.len < SMALL_BYTES;
    let mut ranges: Vec<Range<usize>> = Vec::new();
    for (index, extent) in extents.iter().enumerate() {
        if !small(extent) && !leaves(extent) {
            continue;
        }
        match ranges.last_mut() {
            Some(last) if last.end == index && extents[index - 1].end() == extent.offset => last.end += 1,
            _ => ranges.push(index..index + 1),
        }
    }
    ranges.retain(|range| range.len() > 1 || extents[range.clone()].iter().any(leaves));
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::PackedRun;

    fn extent(offset: u32, len: u32, pack: u64) -> Extent {
        let run = PackedRun {
            pack: PackId(pack),
            pack_offset: 0,
            block_bytes: 4096,
            plain_len: len,
            skip: 0,
            blocks: Vec::new(),
        };
        Extent { offset, len, source: Source::Packed { run: Arc::new(run), offset_in_run: 0 } }
    }

    #[test]
    fn small_neighbours_move_together_and_large_ones_stay() {
        let extents = [
            extent(0, 100, 1),
            extent(100, 100, 2),
            extent(200, SMALL_BYTES, 3),
            extent(200 + SMALL_BYTES, 100, 4),
            extent(1000 + SMALL_BYTES, 100, 5),
        ];
        assert_eq!(ranges_to_move(&extents, &HashSet::new()), vec![0..2; 1]);
        assert_eq!(ranges_to_move(&extents, &HashSet::from([PackId(3)])), vec![0..4; 1]);
        assert_eq!(ranges_to_move(&extents, &HashSet::from([PackId(5)])), [0..2, 4..5]);
    }
}

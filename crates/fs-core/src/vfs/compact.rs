//! Compaction of a chunk: many slices become few, without anybody noticing.
//!
//! What was committed while the bytes were read and stored again stays on top, since the merged slices take the place
//! of those that were seen. Large extents keep their place in their packs; only small neighbours are written anew.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;

use super::Vfs;
use super::commit::new_pack;
use crate::data::{Durable, Extent, Lane, PackTicket, ReadHint, ReadRange, RunBytes, Source, overlay};
use crate::meta::{NewPack, ReplaceArgs};
use crate::types::{ChunkIndex, ErrorKind, Ino, Kind, PackId, Result, Slice, SliceStamp, Stored};

/// Extents below this size are written together with their neighbours.
const SMALL_BYTES: u32 = 512 << 10;

impl Vfs {
    /// Merges the slices of a chunk. With `leaving`, every extent in that pack is written anew. Returns whether
    /// anything was changed.
    ///
    /// # Errors
    /// `Stale` when the chunk changed meanwhile; `Io`; `NoSpace`.
    pub(super) async fn compact_chunk(
        &self,
        ino: Ino,
        index: ChunkIndex,
        leaving: Option<PackId>,
    ) -> Result<bool> {
        let attr = self.meta.getattr(ino).await?;
        if attr.kind != Kind::File {
            return Ok(false);
        }
        let groups = self.meta.chunk(ino, index).await?;
        let overlay = overlay(&groups);
        let extents = overlay.extents();
        let moves = ranges_to_move(extents, leaving);
        if groups.is_empty() || (groups.len() < 2 && moves.is_empty()) {
            return Ok(false);
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
        let appended = if runs.is_empty() { Vec::new() } else { self.data.append(Lane::Small, runs).await? };
        let mut pins: Vec<PackId> = appended.iter().map(|run| run.pack.pack()).collect();
        pins.sort_unstable();
        pins.dedup();
        for pack in &pins {
            self.flusher.pin(*pack, false);
        }
        let result = async {
            let tickets: Vec<PackTicket> = appended.iter().map(|run| run.pack.clone()).collect();
            self.data.hasten(&tickets).await;
            let mut durable: Vec<Durable> = Vec::new();
            // The last run of a pack says most about it.
            for run in appended.iter().rev() {
                if durable.iter().all(|pack| pack.pack != run.pack.pack()) {
                    durable.push(run.pack.durable().await?);
                }
            }
            let mut merged = Vec::with_capacity(extents.len());
            let mut next = 0;
            for (range, run) in moves.iter().zip(appended) {
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
            let seen: Vec<SliceStamp> = groups.iter().map(|group| group.stamp).collect();
            self.replace(ino, index, &seen, &merged, &durable).await
        }
        .await;
        self.unpin(&pins);
        result?;
        self.counters.chunks_compacted.fetch_add(1, Ordering::Relaxed);
        Ok(true)
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
                    bytes.extend(pieces.iter().cloned());
                }
                Source::Hole => {}
            }
        }
        Ok(bytes)
    }
}

/// Neighbouring extents (by index) that are to be written anew as one run: two or more small ones, or any that lie in
/// `leaving`.
fn ranges_to_move(extents: &[Extent], leaving: Option<PackId>) -> Vec<Range<usize>> {
    let leaves = |extent: &Extent| match &extent.source {
        Source::Packed { run, .. } => leaving == Some(run.pack),
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
        assert_eq!(ranges_to_move(&extents, None), vec![0..2; 1]);
        assert_eq!(ranges_to_move(&extents, Some(PackId(3))), vec![0..4; 1]);
        assert_eq!(ranges_to_move(&extents, Some(PackId(5))), [0..2, 4..5]);
    }
}

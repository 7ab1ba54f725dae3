//! Which stored bytes a chunk's bytes are: slices laid over each other, later ones on top.
//!
//! Pure arithmetic, no I/O, no state. Positions are bytes within the chunk. Holes (bytes that no slice covers, or
//! that a hole slice covers) are what lies between the extents. `n` slices take O(n log n); slices that already
//! stand in order without overlap, as a chunk written once has, take O(n).

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;

use crate::types::{Block, PackedRun, Slice, SliceGroup, Stored};

/// Where an extent's bytes are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// Nowhere: zeros. Only in [`Overlay::tiles`].
    Hole,
    /// Here.
    Inline(Bytes),
    /// In a pack, from plain byte `offset_in_run` of the run on (the slice's `skip` is already in it).
    Packed {
        /// The whole run that the bytes are part of.
        run: Arc<PackedRun>,
        /// Plain bytes of the run before the extent's first.
        offset_in_run: u32,
    },
}

impl Source {
    /// The source of the bytes that come `by` later.
    fn advanced(&self, by: u32, len: u32) -> Source {
        match self {
            Source::Hole => Source::Hole,
            Source::Inline(bytes) => Source::Inline(bytes.slice(by as usize..(by + len) as usize)),
            Source::Packed { run, offset_in_run } => {
                Source::Packed { run: Arc::clone(run), offset_in_run: offset_in_run + by }
            }
        }
    }
}

/// Consecutive bytes of a chunk that are stored together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Extent {
    /// First byte within the chunk.
    pub offset: u32,
    /// Length in bytes, never 0.
    pub len: u32,
    /// The bytes.
    pub source: Source,
}

impl Extent {
    /// The byte after the last.
    pub fn end(&self) -> u32 {
        self.offset + self.len
    }

    /// The extent as a slice at the same place that names no more blocks than it needs, as for cloning and compaction.
    pub fn to_slice(&self) -> Slice {
        let stored = match &self.source {
            Source::Hole => Stored::Hole,
            Source::Inline(bytes) => Stored::Inline(bytes.clone()),
            Source::Packed { run, offset_in_run } => Stored::Packed(trim(run, *offset_in_run, self.len)),
        };
        Slice { offset: self.offset, len: self.len, stored }
    }

    /// The part inside `range`, if there is any.
    fn clip(&self, range: &Range<u32>) -> Option<Extent> {
        let start = self.offset.max(range.start);
        let end = self.end().min(range.end);
        (start < end).then(|| Extent {
            offset: start,
            len: end - start,
            source: self.source.advanced(start - self.offset, end - start),
        })
    }
}

/// A chunk's extents, ready to be read.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Overlay {
    extents: Vec<Extent>,
}

impl Overlay {
    /// The extents that hold data: ascending, not overlapping, no holes among them.
    pub fn extents(&self) -> &[Extent] {
        &self.extents
    }

    /// Data bytes of the whole chunk.
    pub fn data_bytes(&self) -> u64 {
        self.extents.iter().map(|extent| u64::from(extent.len)).sum()
    }

    /// Data bytes within `range`: what a write there replaces, what a hole there frees.
    pub fn data_bytes_in(&self, range: Range<u32>) -> u64 {
        self.touching(&range)
            .map(|extent| u64::from(extent.end().min(range.end) - extent.offset.max(range.start)))
            .sum()
    }

    /// The parts of extents that lie within `range`, without holes.
    pub fn data_in(&self, range: Range<u32>) -> impl Iterator<Item = Extent> + '_ {
        self.touching(&range).filter_map(move |extent| extent.clip(&range))
    }

    /// `range` without gaps: what is not data is a [`Source::Hole`].
    pub fn tiles(&self, range: Range<u32>) -> Vec<Extent> {
        let mut tiles = Vec::new();
        let mut next = range.start;
        for extent in self.data_in(range.clone()) {
            if extent.offset > next {
                tiles.push(Extent { offset: next, len: extent.offset - next, source: Source::Hole });
            }
            next = extent.end();
            tiles.push(extent);
        }
        if next < range.end {
            tiles.push(Extent { offset: next, len: range.end - next, source: Source::Hole });
        }
        tiles
    }

    /// The first data byte at or after `offset`.
    pub fn next_data(&self, offset: u32) -> Option<u32> {
        self.touching(&(offset..u32::MAX)).next().map(|extent| extent.offset.max(offset))
    }

    /// The extents that have a byte in `range`.
    fn touching(&self, range: &Range<u32>) -> impl Iterator<Item = &Extent> + use<'_> {
        let first = self.extents.partition_point(|extent| extent.end() <= range.start);
        let end = range.end;
        self.extents[first..].iter().take_while(move |extent| extent.offset < end)
    }
}

/// Lays the slices of `groups` (ascending by stamp) over each other.
pub fn overlay(groups: &[SliceGroup]) -> Overlay {
    let extents = if in_order(groups) {
        slices(groups)
            .filter_map(|slice| extent_of(slice, &(slice.offset..slice.offset + slice.len)))
            .collect()
    } else {
        sweep(groups)
    };
    Overlay { extents }
}

/// The part of `slice` within `range` (chunk positions), at the same place and naming no more blocks than it needs.
/// Nothing if they have no byte in common.
pub fn subslice(slice: &Slice, range: Range<u32>) -> Option<Slice> {
    let start = slice.offset.max(range.start);
    let end = (slice.offset + slice.len).min(range.end);
    if start >= end {
        return None;
    }
    let (by, len) = (start - slice.offset, end - start);
    let stored = match &slice.stored {
        Stored::Hole => Stored::Hole,
        Stored::Inline(bytes) => Stored::Inline(bytes.slice(by as usize..(by + len) as usize)),
        Stored::Packed(run) => Stored::Packed(trim(run, run.skip + by, len)),
    };
    Some(Slice { offset: start, len, stored })
}

/// Plain bytes of the run's block number `index`.
pub fn block_plain_len(run: &PackedRun, index: usize) -> u32 {
    let before = u64::from(run.block_bytes) * index as u64;
    let left = u64::from(run.plain_len).saturating_sub(before);
    u32::try_from(left.min(u64::from(run.block_bytes))).expect("no more than block_bytes")
}

/// `run` without the blocks that hold none of the `len` plain bytes from `offset_in_run` on.
fn trim(run: &PackedRun, offset_in_run: u32, len: u32) -> PackedRun {
    debug_assert!(u64::from(offset_in_run) + u64::from(len) <= u64::from(run.plain_len) && len > 0);
    let first = (offset_in_run / run.block_bytes) as usize;
    let last = ((offset_in_run + len - 1) / run.block_bytes) as usize;
    let before: u32 = run.blocks[..first].iter().map(|block: &Block| block.stored_len).sum();
    let skipped = offset_in_run / run.block_bytes * run.block_bytes;
    let end = (offset_in_run + len).next_multiple_of(run.block_bytes).min(run.plain_len);
    PackedRun {
        pack: run.pack,
        pack_offset: run.pack_offset + before,
        block_bytes: run.block_bytes,
        plain_len: end - skipped,
        skip: offset_in_run - skipped,
        blocks: run.blocks[first..=last].to_vec(),
    }
}

fn slices(groups: &[SliceGroup]) -> impl DoubleEndedIterator<Item = &Slice> {
    groups.iter().flat_map(|group| &group.slices)
}

fn in_order(groups: &[SliceGroup]) -> bool {
    let mut end = 0;
    slices(groups).all(|slice| {
        let follows = slice.offset >= end;
        end = slice.offset + slice.len;
        follows
    })
}

/// The part of a slice that is visible in `range`, unless it is a hole or empty.
fn extent_of(slice: &Slice, range: &Range<u32>) -> Option<Extent> {
    let source = match &slice.stored {
        Stored::Hole => return None,
        Stored::Inline(bytes) => Source::Inline(bytes.clone()),
        Stored::Packed(run) => Source::Packed { run: Arc::new(run.clone()), offset_in_run: run.skip },
    };
    Extent { offset: slice.offset, len: slice.len, source }.clip(range)
}

/// From the newest slice to the oldest: each shows where nothing newer covers it. The covered ranges are kept merged,
/// so each is taken out at most once.
fn sweep(groups: &[SliceGroup]) -> Vec<Extent> {
    let mut covered: BTreeMap<u32, u32> = BTreeMap::new();
    let mut extents = Vec::new();
    for slice in slices(groups).rev().filter(|slice| slice.len > 0) {
        let (start, end) = (slice.offset, slice.offset + slice.len);
        let mut merged = start..end;
        if let Some((&before, &before_end)) = covered.range(..start).next_back()
            && before_end >= start
        {
            merged = before..end.max(before_end);
        }
        let mut visible = Vec::new();
        let mut next = start;
        while let Some((&other, &other_end)) = covered.range(merged.start..=merged.end).next() {
            if other > next {
                visible.push(next..other.min(end));
            }
            next = next.max(other_end);
            merged.end = merged.end.max(other_end);
            covered.remove(&other);
        }
        if next < end {
            visible.push(next..end);
        }
        covered.insert(merged.start, merged.end);
        show(slice, &visible, &mut extents);
    }
    extents.sort_unstable_by_key(|extent| extent.offset);
    extents
}

/// Appends the visible parts of a slice; they share one copy of its run.
fn show(slice: &Slice, visible: &[Range<u32>], extents: &mut Vec<Extent>) {
    let Some(first) = visible.first() else { return };
    let Some(whole) = extent_of(slice, &(slice.offset..slice.offset + slice.len)) else { return };
    if visible.len() == 1 && *first == (whole.offset..whole.end()) {
        extents.push(whole);
        return;
    }
    extents.extend(visible.iter().filter_map(|range| whole.clip(range)));
}

#[cfg(test)]
mod tests;

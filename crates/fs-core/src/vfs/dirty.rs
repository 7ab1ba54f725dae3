//! Ranges of one file whose contents are newer than the committed metadata: what was written and not yet taken by a
//! flush, and what a flush has taken and not yet committed.
//!
//! Pure: no I/O, no locks, no clock. A [`PieceMap`] maps file ranges to pieces that never overlap. Large writes are kept
//! as they came, small ones are collected in growing buffers, so that a byte is copied once however it arrives.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};

use crate::data::is_zero;
use crate::types::PackedRun;

/// Writes of at least this many bytes are kept as they came; smaller ones are collected. Remainders of overwritten
/// pieces below it are copied, so that they do not keep the rest in memory.
const KEEP_WHOLE_BYTES: usize = 64 << 10;
/// A growing buffer grows up to this many bytes.
const GROWING_BYTES_MAX: usize = 1 << 20;

/// Part of a run in a pack.
#[derive(Debug, Clone)]
pub(crate) struct PackedPart {
    pub(crate) run: Arc<PackedRun>,
    pub(crate) offset_in_run: u32,
    pub(crate) len: u32,
}

/// Contents of a range.
#[derive(Debug, Clone)]
pub(crate) enum Piece {
    /// Zeros that are stored nowhere; length in bytes.
    Hole(u64),
    /// Bytes to which more may be appended.
    Growing(BytesMut),
    /// Bytes as they came.
    Fixed(Bytes),
    /// Bytes that have their place in a pack.
    Packed(PackedPart),
}

impl Piece {
    pub(crate) fn len(&self) -> u64 {
        match self {
            Piece::Hole(len) => *len,
            Piece::Growing(bytes) => bytes.len() as u64,
            Piece::Fixed(bytes) => bytes.len() as u64,
            Piece::Packed(part) => u64::from(part.len),
        }
    }

    /// Bytes that take space in the volume.
    fn data_len(&self) -> u64 {
        match self {
            Piece::Hole(_) => 0,
            _ => self.len(),
        }
    }

    /// Keeps the first `at` bytes and returns the rest; `0 < at < len`.
    fn split_off(&mut self, at: u64) -> Piece {
        match self {
            Piece::Hole(len) => {
                let rest = *len - at;
                *len = at;
                Piece::Hole(rest)
            }
            Piece::Growing(bytes) => {
                let rest = bytes.split_off(index(at));
                if rest.len() < KEEP_WHOLE_BYTES {
                    return Piece::Growing(BytesMut::from(&rest[..]));
                }
                Piece::Growing(rest)
            }
            Piece::Fixed(bytes) => {
                let rest = bytes.split_off(index(at));
                if bytes.len() < KEEP_WHOLE_BYTES {
                    *bytes = Bytes::copy_from_slice(bytes);
                }
                if rest.len() < KEEP_WHOLE_BYTES {
                    return Piece::Fixed(Bytes::copy_from_slice(&rest));
                }
                Piece::Fixed(rest)
            }
            Piece::Packed(part) => {
                let at = u32::try_from(at).expect("a packed part is shorter than a chunk");
                let rest = PackedPart {
                    run: Arc::clone(&part.run),
                    offset_in_run: part.offset_in_run + at,
                    len: part.len - at,
                };
                part.len = at;
                Piece::Packed(rest)
            }
        }
    }

    /// `len` bytes from `by` on, for a reader.
    fn view(&self, by: u64, len: u64) -> Part {
        match self {
            Piece::Hole(_) => Part::Zeros(len),
            Piece::Growing(bytes) => Part::Bytes(Bytes::copy_from_slice(&bytes[index(by)..index(by + len)])),
            Piece::Fixed(bytes) => Part::Bytes(bytes.slice(index(by)..index(by + len))),
            Piece::Packed(part) => Part::Packed(PackedPart {
                run: Arc::clone(&part.run),
                offset_in_run: part.offset_in_run + u32::try_from(by).expect("within a packed part"),
                len: u32::try_from(len).expect("within a packed part"),
            }),
        }
    }
}

/// What a reader gets for a range.
#[derive(Debug, Clone)]
pub(crate) enum Part {
    /// So many zeros.
    Zeros(u64),
    /// These bytes.
    Bytes(Bytes),
    /// Bytes in a pack.
    Packed(PackedPart),
}

impl Part {
    pub(crate) fn len(&self) -> u64 {
        match self {
            Part::Zeros(len) => *len,
            Part::Bytes(bytes) => bytes.len() as u64,
            Part::Packed(part) => u64::from(part.len),
        }
    }
}

/// Consecutive bytes of one chunk on their way to a pack.
#[derive(Debug)]
pub(crate) struct Run {
    /// First byte in the file.
    pub(crate) offset: u64,
    pub(crate) len: u64,
    pub(crate) pieces: Vec<Bytes>,
}

/// File ranges and their contents; ranges never overlap.
#[derive(Debug, Default)]
pub(crate) struct PieceMap {
    pieces: BTreeMap<u64, Piece>,
    data_bytes: u64,
}

impl PieceMap {
    pub(crate) fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// Bytes that are not holes.
    pub(crate) fn data_bytes(&self) -> u64 {
        self.data_bytes
    }

    #[cfg(test)]
    pub(crate) fn count(&self) -> usize {
        self.pieces.len()
    }

    /// The byte after the last piece, 0 if there is none.
    pub(crate) fn end(&self) -> u64 {
        self.pieces.last_key_value().map_or(0, |(start, piece)| start + piece.len())
    }

    /// Covers what lies at `offset` with `bytes` (not empty). Returns by how much [`PieceMap::data_bytes`] grew.
    pub(crate) fn write(&mut self, offset: u64, bytes: Bytes) -> u64 {
        let before = self.data_bytes;
        if bytes.len() >= KEEP_WHOLE_BYTES {
            self.put(offset, Piece::Fixed(bytes));
        } else if !self.write_into(offset, &bytes) {
            self.put(offset, Piece::Growing(into_mut(bytes)));
        }
        // Covering data with data never shrinks the sum.
        self.data_bytes - before
    }

    /// Copies `bytes` into the buffer that holds the byte before or at `offset`, if there is one that can take them.
    fn write_into(&mut self, offset: u64, bytes: &[u8]) -> bool {
        let end = offset + bytes.len() as u64;
        let Some((&start, piece)) = self.pieces.range_mut(..=offset).next_back() else { return false };
        let piece_end = start + piece.len();
        if offset > piece_end || (offset == piece_end && !matches!(piece, Piece::Growing(_))) {
            return false;
        }
        let at = index(offset - start);
        if end <= piece_end {
            let Some(buffer) = piece.make_growing() else { return false };
            buffer[at..at + bytes.len()].copy_from_slice(bytes);
            return true;
        }
        if !matches!(piece, Piece::Growing(_)) || at + bytes.len() > GROWING_BYTES_MAX {
            return false;
        }
        self.punch(piece_end..end);
        let Some(Piece::Growing(buffer)) = self.pieces.get_mut(&start) else { return false };
        let inside = buffer.len() - at;
        buffer[at..].copy_from_slice(&bytes[..inside]);
        buffer.extend_from_slice(&bytes[inside..]);
        self.data_bytes += (bytes.len() - inside) as u64;
        true
    }

    /// Covers what lies at `offset` with `piece` (not empty).
    pub(crate) fn put(&mut self, offset: u64, piece: Piece) {
        debug_assert!(piece.len() > 0);
        self.punch(offset..offset + piece.len());
        self.data_bytes += piece.data_len();
        self.pieces.insert(offset, piece);
    }

    /// Forgets what lies in `range`.
    pub(crate) fn punch(&mut self, range: Range<u64>) {
        if range.is_empty() || self.pieces.is_empty() {
            return;
        }
        self.cut(range.start);
        self.cut(range.end);
        while let Some((&start, piece)) = self.pieces.range(range.clone()).next() {
            self.data_bytes -= piece.data_len();
            self.pieces.remove(&start);
        }
    }

    /// Makes a piece begin at `offset` if one lies across it.
    fn cut(&mut self, offset: u64) {
        if let Some((&start, piece)) = self.pieces.range_mut(..offset).next_back()
            && start + piece.len() > offset
        {
            let rest = piece.split_off(offset - start);
            self.pieces.insert(offset, rest);
        }
    }

    /// Serves `wanted` (ascending, disjoint) as far as possible: parts go to `found` with their file offset, what is
    /// not here is returned.
    pub(crate) fn read(&self, wanted: Vec<Range<u64>>, found: &mut Vec<(u64, Part)>) -> Vec<Range<u64>> {
        if self.pieces.is_empty() {
            return wanted;
        }
        let mut missing = Vec::with_capacity(wanted.len());
        for range in wanted {
            let mut next = range.start;
            for (start, piece) in self.touching(&range) {
                let from = start.max(range.start);
                let to = (start + piece.len()).min(range.end);
                if from > next {
                    missing.push(next..from);
                }
                found.push((from, piece.view(from - start, to - from)));
                next = to;
            }
            if next < range.end {
                missing.push(next..range.end);
            }
        }
        missing
    }

    fn touching(&self, range: &Range<u64>) -> impl Iterator<Item = (u64, &Piece)> + use<'_> {
        let first = self
            .pieces
            .range(..=range.start)
            .next_back()
            .filter(|(start, piece)| **start + piece.len() > range.start)
            .map_or(range.start, |(start, _)| *start);
        self.pieces.range(first..range.end.max(first)).map(|(start, piece)| (*start, piece))
    }

    /// All pieces in order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u64, &Piece)> {
        self.pieces.iter().map(|(start, piece)| (*start, piece))
    }

    /// Moves everything out, buffers frozen.
    pub(crate) fn take(&mut self) -> PieceMap {
        let mut taken = std::mem::take(self);
        for piece in taken.pieces.values_mut() {
            piece.freeze();
        }
        taken
    }

    /// Moves out consecutive ranges of at least `len_min` bytes that end at a multiple of `unit`, buffers frozen. What
    /// comes after that stays: more is expected to follow.
    pub(crate) fn take_long(&mut self, len_min: u64, unit: u64) -> PieceMap {
        let mut consecutive: Vec<Range<u64>> = Vec::new();
        for (start, piece) in &self.pieces {
            let end = start + piece.len();
            match consecutive.last_mut() {
                Some(last) if last.end == *start => last.end = end,
                _ => consecutive.push(*start..end),
            }
        }
        let whole = consecutive.into_iter().map(|range| range.start..range.end - range.end % unit);
        let long: Vec<_> = whole.filter(|range| range.end >= range.start + len_min).collect();
        let mut taken = PieceMap::default();
        for range in long {
            self.cut(range.end);
            while let Some(start) = self.pieces.range(range.clone()).next().map(|(start, _)| *start)
                && let Some(mut piece) = self.pieces.remove(&start)
            {
                self.data_bytes -= piece.data_len();
                taken.data_bytes += piece.data_len();
                piece.freeze();
                taken.pieces.insert(start, piece);
            }
        }
        taken
    }

    /// Turns bytes that are all zero into holes: whole pieces, and windows of `window_bytes` aligned in the file.
    pub(crate) fn zeros_to_holes(&mut self, window_bytes: u64) {
        let mut holes: Vec<Range<u64>> = Vec::new();
        for (start, piece) in &self.pieces {
            let Piece::Fixed(bytes) = piece else { continue };
            let end = start + piece.len();
            if is_zero(bytes) {
                holes.push(*start..end);
                continue;
            }
            let mut window = start.next_multiple_of(window_bytes);
            while window + window_bytes <= end {
                let at = index(window - start);
                if is_zero(&bytes[at..at + index(window_bytes)]) {
                    match holes.last_mut() {
                        Some(last) if last.end == window => last.end += window_bytes,
                        _ => holes.push(window..window + window_bytes),
                    }
                }
                window += window_bytes;
            }
        }
        for hole in holes {
            self.put(hole.start, Piece::Hole(hole.end - hole.start));
        }
    }

    /// The bytes that have no place in a pack yet, as runs that do not cross multiples of `unit`, which chunks are of.
    pub(crate) fn runs(&self, unit: u64) -> Vec<Run> {
        let mut runs: Vec<Run> = Vec::new();
        for (start, piece) in &self.pieces {
            let Piece::Fixed(bytes) = piece else { continue };
            let mut offset = *start;
            let mut bytes = bytes.clone();
            while !bytes.is_empty() {
                let room = unit - offset % unit;
                let part = bytes.split_to(bytes.len().min(index(room)));
                let len = part.len() as u64;
                match runs.last_mut() {
                    Some(run) if run.offset + run.len == offset && run.offset / unit == offset / unit => {
                        run.len += len;
                        run.pieces.push(part);
                    }
                    _ => runs.push(Run { offset, len, pieces: vec![part] }),
                }
                offset += len;
            }
        }
        runs
    }

    /// What is left of the bytes of a run that was at `offset` is now in a pack as `run`.
    pub(crate) fn placed(&mut self, offset: u64, run: &Arc<PackedRun>) {
        let range = offset..offset + u64::from(run.plain_len);
        self.cut(range.start);
        self.cut(range.end);
        let mut merged: Vec<(u64, PackedPart)> = Vec::new();
        for (start, piece) in self.pieces.range(range.clone()) {
            if !matches!(piece, Piece::Fixed(_)) {
                continue;
            }
            let offset_in_run = u32::try_from(start - offset).expect("within a run");
            let len = u32::try_from(piece.len()).expect("within a run");
            match merged.last_mut() {
                Some((at, last)) if *at + u64::from(last.len) == *start => last.len += len,
                _ => merged.push((*start, PackedPart { run: Arc::clone(run), offset_in_run, len })),
            }
        }
        for (start, part) in merged {
            self.put(start, Piece::Packed(part));
        }
    }

    /// The first byte at or after `offset` that is here and not a hole.
    pub(crate) fn next_data(&self, offset: u64) -> Option<u64> {
        let before = self.pieces.range(..offset).next_back();
        let across = before.filter(|(start, piece)| **start + piece.len() > offset);
        across
            .into_iter()
            .chain(self.pieces.range(offset..))
            .find(|(_, piece)| !matches!(piece, Piece::Hole(_)))
            .map(|(start, _)| (*start).max(offset))
    }
}

impl Piece {
    fn freeze(&mut self) {
        if let Piece::Growing(bytes) = self {
            *self = Piece::Fixed(std::mem::take(bytes).freeze());
        }
    }

    /// The bytes to write into, copied first if somebody else reads them.
    fn make_growing(&mut self) -> Option<&mut BytesMut> {
        if let Piece::Fixed(bytes) = self {
            let bytes = std::mem::take(bytes);
            *self = Piece::Growing(into_mut(bytes));
        }
        match self {
            Piece::Growing(bytes) => Some(bytes),
            _ => None,
        }
    }
}

/// The same buffer if nobody else reads it, otherwise a copy.
fn into_mut(bytes: Bytes) -> BytesMut {
    bytes.try_into_mut().unwrap_or_else(|shared| BytesMut::from(&shared[..]))
}

/// A length or position within one buffer.
fn index(bytes: u64) -> usize {
    usize::try_from(bytes).expect("a buffer in memory is not longer than the address space")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::types::CHUNK_BYTES;

    /// The bytes of `range`, `None` where nothing is.
    fn contents(map: &PieceMap, range: Range<u64>) -> Vec<Option<u8>> {
        let mut found = Vec::new();
        let missing = map.read(vec![range.clone()], &mut found);
        let mut bytes = vec![None; index(range.end - range.start)];
        for (offset, part) in found {
            let at = index(offset - range.start);
            for i in 0..index(part.len()) {
                let byte = match &part {
                    Part::Zeros(_) => 0,
                    Part::Bytes(bytes) => bytes[i],
                    Part::Packed(_) => 255,
                };
                assert_eq!(bytes[at + i].replace(byte), None, "parts overlap");
            }
        }
        for gap in missing {
            assert!(
                bytes[index(gap.start - range.start)..index(gap.end - range.start)]
                    .iter()
                    .all(Option::is_none)
            );
        }
        bytes
    }

    #[derive(Debug, Clone)]
    enum Op {
        Write(u64, usize, u8),
        Punch(u64, u64),
        Hole(u64, u64),
        TakeLong(u64, u64),
    }

    fn op() -> impl Strategy<Value = Op> {
        let size = prop_oneof![1usize..100, 60_000usize..140_000];
        prop_oneof![
            4 => (0u64..300_000, size, 1u8..=200).prop_map(|(at, len, byte)| Op::Write(at, len, byte)),
            1 => (0u64..300_000, 1u64..100_000).prop_map(|(at, len)| Op::Punch(at, len)),
            1 => (0u64..300_000, 1u64..100_000).prop_map(|(at, len)| Op::Hole(at, len)),
            1 => (1u64..200_000, 1u64..100_000).prop_map(|(len, unit)| Op::TakeLong(len, unit)),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn behaves_like_an_array_of_optional_bytes(ops in proptest::collection::vec(op(), 1..40)) {
            let mut map = PieceMap::default();
            let mut model: Vec<Option<u8>> = vec![None; 500_000];
            for op in ops {
                match op {
                    Op::Write(at, len, byte) => {
                        let before = map.data_bytes();
                        let added = map.write(at, vec![byte; len].into());
                        assert_eq!(map.data_bytes(), before + added);
                        model[index(at)..index(at) + len].fill(Some(byte));
                    }
                    Op::Punch(at, len) => {
                        map.punch(at..at + len);
                        model[index(at)..index(at + len)].fill(None);
                    }
                    Op::Hole(at, len) => {
                        map.put(at, Piece::Hole(len));
                        model[index(at)..index(at + len)].fill(Some(0));
                    }
                    Op::TakeLong(len, unit) => {
                        let taken = map.take_long(len, unit);
                        prop_assert!(taken.is_empty() || taken.end().is_multiple_of(unit));
                        for (start, piece) in taken.iter() {
                            let range = index(start)..index(start + piece.len());
                            assert_eq!(contents(&taken, start..start + piece.len()), &model[range.clone()]);
                            model[range].fill(None);
                        }
                    }
                }
                assert_eq!(map.data_bytes(), model.iter().filter(|byte| byte.is_some_and(|b| b > 0)).count() as u64);
            }
            assert!(contents(&map, 0..500_000) == model);
        }
    }

    #[test]
    fn sequential_small_writes_share_a_buffer() {
        let mut map = PieceMap::default();
        for i in 0..256u64 {
            map.write(i * 4096, vec![1; 4096].into());
        }
        assert_eq!(map.count(), 1);
        map.write(1 << 20, vec![1; 4096].into());
        assert_eq!(map.count(), 2);
    }

    #[test]
    fn runs_are_cut_at_units_and_joined_within() {
        const UNIT: u64 = CHUNK_BYTES / 2;
        let mut map = PieceMap::default();
        map.write(UNIT - (1 << 20), vec![1; 2 << 20].into());
        map.write(UNIT + (1 << 20), vec![1; 1 << 20].into());
        let map = map.take();
        let runs: Vec<_> = map.runs(UNIT).iter().map(|run| (run.offset, run.len, run.pieces.len())).collect();
        assert_eq!(runs, [(UNIT - (1 << 20), 1 << 20, 1), (UNIT, 2 << 20, 2)]);
    }

    #[test]
    fn what_was_punched_meanwhile_is_not_placed() {
        let mut map = PieceMap::default();
        map.write(100, vec![1; 1000].into());
        let mut map = map.take();
        map.punch(300..400);
        let run = Arc::new(PackedRun {
            pack: crate::types::PackId(1),
            pack_offset: 0,
            block_bytes: 4096,
            plain_len: 1000,
            skip: 0,
            blocks: Vec::new(),
        });
        map.placed(100, &run);
        let parts: Vec<_> = map
            .iter()
            .map(|(start, piece)| match piece {
                Piece::Packed(part) => (start, part.offset_in_run, part.len),
                other => panic!("not placed: {other:?}"),
            })
            .collect();
        assert_eq!(parts, [(100, 0, 200), (400, 300, 700)]);
    }

    #[test]
    fn zero_windows_become_holes() {
        let mut map = PieceMap::default();
        let mut bytes = vec![0u8; 512 << 10];
        bytes[0] = 1;
        map.write(0, bytes.into());
        map.write(1 << 20, vec![0; 10].into());
        let mut map = map.take();
        map.zeros_to_holes(128 << 10);
        assert_eq!(map.data_bytes(), 128 << 10);
        assert_eq!(contents(&map, (1 << 20)..(1 << 20) + 10), vec![Some(0); 10]);
        assert_eq!(map.runs(CHUNK_BYTES).len(), 1);
    }
}

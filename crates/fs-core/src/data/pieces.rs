//! Plain bytes as they lie in what was fetched.
//!
//! A fetch brings many blocks in one buffer, and a read takes several of them. Parts of a buffer that follow each other
//! are one part again, so that a read is answered without a copy if one fetch brought all of it.

use std::ops::Range;

use bytes::Bytes;

/// A part of a buffer that others may have parts of, too.
#[derive(Debug, Clone)]
pub(super) struct Part {
    whole: Bytes,
    range: Range<usize>,
}

impl Part {
    /// All of a buffer.
    pub(super) fn all(whole: Bytes) -> Part {
        let range = 0..whole.len();
        Part { whole, range }
    }

    /// The part of this one at `range`, which lies within it.
    pub(super) fn part(&self, range: Range<usize>) -> Part {
        assert!(range.start <= range.end && range.end <= self.len(), "{range:?} of {}", self.len());
        let from = self.range.start;
        Part { whole: self.whole.clone(), range: from + range.start..from + range.end }
    }

    pub(super) fn len(&self) -> usize {
        self.range.len()
    }

    pub(super) fn as_slice(&self) -> &[u8] {
        &self.whole[self.range.clone()]
    }

    /// The bytes, without a copy.
    pub(super) fn bytes(&self) -> Bytes {
        self.whole.slice(self.range.clone())
    }

    /// Whether `next` begins in the same buffer where this ends.
    fn goes_on_with(&self, next: &Part) -> bool {
        self.whole.as_ptr() == next.whole.as_ptr()
            && self.whole.len() == next.whole.len()
            && self.range.end == next.range.start
    }
}

/// Bytes in order, in as few pieces as they lie in memory.
#[derive(Debug, Clone, Default)]
pub struct Pieces(Vec<Part>);

impl Pieces {
    pub(super) fn push_part(&mut self, next: Part) {
        match self.0.last_mut() {
            Some(last) if last.goes_on_with(&next) => last.range.end = next.range.end,
            _ => self.0.push(next),
        }
    }

    /// Adds bytes at the end.
    pub fn push(&mut self, bytes: Bytes) {
        self.push_part(Part::all(bytes));
    }

    /// Adds what `others` has at the end.
    pub fn append(&mut self, others: Pieces) {
        for part in others.0 {
            self.push_part(part);
        }
    }

    /// The pieces.
    pub fn iter(&self) -> impl Iterator<Item = Bytes> {
        self.0.iter().map(Part::bytes)
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.0.iter().map(Part::len).sum()
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// One piece; copies only if there are several.
    pub fn into_bytes(self) -> Bytes {
        match self.0.as_slice() {
            [] => Bytes::new(),
            [part] => part.bytes(),
            parts => {
                let mut bytes = Vec::with_capacity(self.len());
                for part in parts {
                    bytes.extend_from_slice(part.as_slice());
                }
                bytes.into()
            }
        }
    }
}

impl From<Vec<Bytes>> for Pieces {
    fn from(bytes: Vec<Bytes>) -> Pieces {
        let mut pieces = Pieces::default();
        for bytes in bytes {
            pieces.push(bytes);
        }
        pieces
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_in_one_buffer_are_one_piece_without_a_copy() {
        let whole = Bytes::from((0..100).collect::<Vec<u8>>());
        let fetched = Part::all(whole.clone()).part(10..90);
        let mut pieces = Pieces::default();
        for at in [0..20, 20..21, 21..80] {
            pieces.push_part(fetched.part(at));
        }
        assert_eq!(pieces.0.len(), 1);
        let bytes = pieces.into_bytes();
        assert_eq!((bytes.as_ptr(), bytes.len()), (whole[10..].as_ptr(), 80));
    }

    #[test]
    fn everything_else_is_put_together() {
        let whole = Bytes::from((0..100).collect::<Vec<u8>>());
        let part = Part::all(whole.clone());
        let (mut pieces, mut rest) = (Pieces::default(), Pieces::default());
        pieces.push_part(part.part(50..60));
        // Not where it ended, and another buffer with the same bytes.
        pieces.push_part(part.part(70..80));
        rest.push(Bytes::from(whole[80..].to_vec()));
        rest.push(Bytes::new());
        pieces.append(rest);
        assert_eq!(pieces.iter().map(|piece| piece.len()).collect::<Vec<_>>(), [10, 10, 20, 0]);
        assert_eq!((pieces.len(), pieces.is_empty()), (40, false));
        assert_eq!(pieces.into_bytes(), [&whole[50..60], &whole[70..]].concat());
        assert!(Pieces::default().is_empty() && Pieces::default().into_bytes().is_empty());
    }
}

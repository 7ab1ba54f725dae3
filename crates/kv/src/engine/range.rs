//! One page of a range, merged from layers and from the transaction's own writes.
//!
//! Layers are read in chunks that double in size, so that a short read stays short and no lock is held for long.

use std::collections::VecDeque;

use bytes::{BufMut, Bytes, BytesMut};
use parking_lot::Mutex;

use super::buffer::{Change, Own, TxnBuffer};
use crate::{Direction, Isolation, RangePage, RangeQuery, Result};

/// A piece of a layer.
#[derive(Debug, Default)]
pub struct Chunk {
    /// In the order asked for; `None` hides the key in older layers.
    pub entries: Vec<Change>,
    /// Whether the layer holds nothing more in the range asked for.
    pub exhausted: bool,
}

/// An ordered layer, as the reading transaction sees it.
pub trait Source {
    /// At most `limit` entries of `[begin, end)`, in the order of `direction`.
    fn scan(&self, begin: &[u8], end: &[u8], direction: Direction, limit: usize) -> Result<Chunk>;
}

/// Smallest and largest number of entries read from a layer at once.
const CHUNK_MIN: usize = 8;
const CHUNK_MAX: usize = 1024;

struct Cursor<'a> {
    source: &'a dyn Source,
    head: VecDeque<Change>,
    exhausted: bool,
    begin: Bytes,
    end: Bytes,
    direction: Direction,
    chunk: usize,
}

impl Cursor<'_> {
    fn peek(&mut self) -> Result<Option<&Bytes>> {
        if self.head.is_empty() && !self.exhausted {
            let chunk = self.source.scan(&self.begin, &self.end, self.direction, self.chunk)?;
            self.exhausted = chunk.exhausted;
            self.chunk = (self.chunk * 2).min(CHUNK_MAX);
            if let Some((last, _)) = chunk.entries.last() {
                match self.direction {
                    Direction::Forward => self.begin = key_after(last),
                    Direction::Reverse => self.end = last.clone(),
                }
            }
            self.head = chunk.entries.into();
        }
        Ok(self.head.front().map(|(key, _)| key))
    }
}

/// The smallest key greater than `key`.
fn key_after(key: &[u8]) -> Bytes {
    let mut after = BytesMut::with_capacity(key.len() + 1);
    after.put_slice(key);
    after.put_u8(0);
    after.freeze()
}

/// The layers merged: the first layer that knows a key decides.
struct Merge<'a> {
    cursors: Vec<Cursor<'a>>,
    direction: Direction,
}

impl Merge<'_> {
    fn next(&mut self) -> Result<Option<(Bytes, Bytes)>> {
        loop {
            let mut first: Option<(usize, Bytes)> = None;
            for (index, cursor) in self.cursors.iter_mut().enumerate() {
                if let Some(key) = cursor.peek()?
                    && first.as_ref().is_none_or(|(_, best)| precedes(self.direction, key, best))
                {
                    first = Some((index, key.clone()));
                }
            }
            let Some((winner, key)) = first else {
                return Ok(None);
            };
            let mut value = None;
            for (index, cursor) in self.cursors.iter_mut().enumerate().skip(winner) {
                if cursor.head.front().is_some_and(|(head, _)| *head == key) {
                    let entry = cursor.head.pop_front();
                    if index == winner {
                        value = entry.and_then(|(_, value)| value);
                    }
                }
            }
            if let Some(value) = value {
                return Ok(Some((key, value)));
            }
        }
    }
}

fn precedes(direction: Direction, one: &Bytes, other: &Bytes) -> bool {
    match direction {
        Direction::Forward => one < other,
        Direction::Reverse => one > other,
    }
}

/// Reads a page of `query` from `sources` (newest layer first) under the transaction's own writes, and notes the part
/// that was read for conflict detection.
pub fn read_range(
    buffer: &Mutex<TxnBuffer>,
    sources: &[&dyn Source],
    query: &RangeQuery,
) -> Result<RangePage> {
    let limit = query.limit.max(1);
    let mut page = RangePage::default();
    if query.begin >= query.end {
        return Ok(page);
    }
    let direction = query.direction;
    let cursor = |source| Cursor {
        source,
        head: VecDeque::new(),
        exhausted: false,
        begin: query.begin.clone(),
        end: query.end.clone(),
        direction,
        chunk: limit.saturating_add(1).clamp(CHUNK_MIN, CHUNK_MAX),
    };
    let mut merge = Merge { cursors: sources.iter().map(|source| cursor(*source)).collect(), direction };
    let mut own: VecDeque<Bytes> = buffer.lock().written_keys(&query.begin, &query.end).into();
    if direction == Direction::Reverse {
        own.make_contiguous().reverse();
    }
    let mut stored = merge.next()?;
    while page.entries.len() <= limit {
        let own_first = match (own.front(), &stored) {
            (None, None) => break,
            (Some(_), None) => true,
            (None, Some(_)) => false,
            (Some(own), Some((key, _))) => own == key || precedes(direction, own, key),
        };
        if own_first {
            let Some(key) = own.pop_front() else { break };
            let stored_value = match &stored {
                Some((stored_key, _)) if *stored_key == key => {
                    let value = stored.take().map(|(_, value)| value);
                    stored = merge.next()?;
                    value
                }
                _ => None,
            };
            if let Some(value) = buffer.lock().on_top(&key, stored_value) {
                page.entries.push((key, value));
            }
        } else if let Some((key, value)) = stored.take() {
            if !buffer.lock().is_cleared(&key, 0) {
                page.entries.push((key, value));
            }
            stored = merge.next()?;
        }
    }
    page.more = page.entries.len() > limit;
    page.entries.truncate(limit);
    if query.isolation == Isolation::Serializable {
        note_read(&mut buffer.lock(), query, &page);
    }
    Ok(page)
}

fn note_read(buffer: &mut TxnBuffer, query: &RangeQuery, page: &RangePage) {
    let (mut begin, mut end) = (query.begin.clone(), query.end.clone());
    if let (true, Some((last, _))) = (page.more, page.entries.last()) {
        match query.direction {
            Direction::Forward => end = key_after(last),
            Direction::Reverse => begin = last.clone(),
        }
    }
    buffer.add_read_range(begin, end);
}

/// Reads one key through `stored` under the transaction's own writes, and notes it for conflict detection.
pub fn read_key(
    buffer: &Mutex<TxnBuffer>,
    key: &[u8],
    isolation: Isolation,
    stored: impl FnOnce() -> Result<Option<Bytes>>,
) -> Result<Option<Bytes>> {
    let own = buffer.lock().read(key, isolation);
    match own {
        Own::Known(value) => Ok(value),
        Own::Stored => stored(),
        Own::OnTop => {
            let stored = stored()?;
            Ok(buffer.lock().on_top(key, stored))
        }
    }
}

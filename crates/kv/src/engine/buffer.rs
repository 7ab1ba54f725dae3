//! What one transaction has written and read so far, and how that becomes changes at commit.
//!
//! Invariants: `writes` holds one entry a key, applied after every range in `cleared`; a key written after its range
//! was cleared starts from "absent", not from the stored value. Sizes are counted as FoundationDB counts them.

use std::collections::BTreeMap;
use std::ops::Bound;

use bytes::{BufMut, Bytes, BytesMut};

use super::memtable::ReadSet;
use crate::{Isolation, KvError, Limits, Result, Versionstamp};

/// A change of one key: its new value, or `None` when it is removed.
pub type Change = (Bytes, Option<Bytes>);

/// One write of one key.
#[derive(Debug, Clone)]
pub enum WriteOp {
    /// Adds to a little-endian i64.
    Add(i64),
    /// Takes the greater of two little-endian unsigned integers.
    Max(Bytes),
    /// Becomes prefix, versionstamp, suffix.
    Stamped {
        /// Before the versionstamp.
        prefix: Bytes,
        /// After the versionstamp.
        suffix: Bytes,
    },
}

impl WriteOp {
    /// The value after this write of a key that held `before`. Without a stamp (before the commit) a versionstamped
    /// write leaves the value alone.
    fn apply(&self, before: Option<Bytes>, stamp: Option<Versionstamp>) -> Option<Bytes> {
        match self {
            WriteOp::Add(delta) => Some(add(before.as_deref(), *delta)),
            WriteOp::Max(value) => Some(max(before.as_deref(), value)),
            WriteOp::Stamped { prefix, suffix } => match stamp {
                None => before,
                Some(stamp) => Some(concat(&[prefix, &stamp.0, suffix])),
            },
        }
    }
}

fn add(before: Option<&[u8]>, delta: i64) -> Bytes {
    let mut number = [0; 8];
    if let Some(before) = before {
        let len = before.len().min(8);
        number[..len].copy_from_slice(&before[..len]);
    }
    Bytes::copy_from_slice(&i64::from_le_bytes(number).wrapping_add(delta).to_le_bytes())
}

/// As FoundationDB: `before` is cut or filled with zeros to the length of `value`.
fn max(before: Option<&[u8]>, value: &Bytes) -> Bytes {
    let Some(before) = before else {
        return value.clone();
    };
    let byte_of_before = |index: usize| before.get(index).copied().unwrap_or(0);
    for index in (0..value.len()).rev() {
        let (old, new) = (byte_of_before(index), value[index]);
        if old > new {
            return (0..value.len()).map(byte_of_before).collect();
        }
        if old < new {
            break;
        }
    }
    value.clone()
}

fn concat(parts: &[&[u8]]) -> Bytes {
    let mut out = BytesMut::with_capacity(parts.iter().map(|part| part.len()).sum());
    for part in parts {
        out.put_slice(part);
    }
    out.freeze()
}

/// What the ops of one key start from.
#[derive(Debug)]
enum Base {
    Stored,
    Known(Option<Bytes>),
}

#[derive(Debug)]
struct Pending {
    base: Base,
    ops: Vec<WriteOp>,
}

impl Pending {
    fn push(&mut self, op: WriteOp) {
        if self.ops.is_empty()
            && !matches!(op, WriteOp::Stamped { .. })
            && let Base::Known(value) = &mut self.base
        {
            *value = op.apply(value.take(), None);
            return;
        }
        if let (Some(WriteOp::Add(sum)), WriteOp::Add(delta)) = (self.ops.last_mut(), &op) {
            *sum = sum.wrapping_add(*delta);
            return;
        }
        self.ops.push(op);
    }

    fn fold(&self, start: Option<Bytes>, stamp: Option<Versionstamp>) -> Option<Bytes> {
        self.ops.iter().fold(start, |value, op| op.apply(value, stamp))
    }
}

#[derive(Debug)]
struct StampedKey {
    prefix: Bytes,
    order: u16,
    suffix: Bytes,
    value: Bytes,
    /// Ranges cleared before this write; later ones remove it.
    cleared_before: usize,
}

/// What a transaction knows about a key before it asks the store.
#[derive(Debug)]
pub enum Own {
    /// Its own writes decide.
    Known(Option<Bytes>),
    /// The stored value decides.
    Stored,
    /// Its own writes go on top of the stored value: see [`TxnBuffer::on_top`].
    OnTop,
}

/// Reads and writes of one transaction until its commit.
#[derive(Debug, Default)]
pub struct TxnBuffer {
    writes: BTreeMap<Bytes, Pending>,
    cleared: Vec<(Bytes, Bytes)>,
    stamped: Vec<StampedKey>,
    reads: ReadSet,
    bytes: usize,
    /// The first key or value beyond the limits, as text for the commit.
    oversize: Option<String>,
    taken: bool,
}

impl TxnBuffer {
    /// Notes a read of `key` and says what the transaction itself knows of it.
    pub fn read(&mut self, key: &[u8], isolation: Isolation) -> Own {
        let own = match self.writes.get(key) {
            Some(pending) => match &pending.base {
                Base::Known(value) => Own::Known(pending.fold(value.clone(), None)),
                Base::Stored => Own::OnTop,
            },
            None if self.is_cleared(key, 0) => Own::Known(None),
            None => Own::Stored,
        };
        if isolation == Isolation::Serializable && !matches!(own, Own::Known(_)) {
            self.bytes += 2 * key.len() + 1;
            self.reads.add_key(key);
        }
        own
    }

    /// The value of `key` with this transaction's writes on top of the stored one.
    pub fn on_top(&self, key: &[u8], stored: Option<Bytes>) -> Option<Bytes> {
        match self.writes.get(key) {
            None => stored,
            Some(pending) => match &pending.base {
                Base::Known(value) => pending.fold(value.clone(), None),
                Base::Stored => pending.fold(stored, None),
            },
        }
    }

    /// Notes that `[begin, end)` was read, or is to conflict as if it had been.
    pub fn add_read_range(&mut self, begin: Bytes, end: Bytes) {
        if begin < end {
            self.bytes += begin.len() + end.len();
            self.reads.add_range(begin, end);
        }
    }

    /// Keys of `[begin, end)` that this transaction wrote, ascending.
    pub(super) fn written_keys(&self, begin: &[u8], end: &[u8]) -> Vec<Bytes> {
        if begin >= end || self.writes.is_empty() {
            return Vec::new();
        }
        let range = (Bound::Included(begin), Bound::Excluded(end));
        self.writes.range::<[u8], _>(range).map(|(key, _)| key.clone()).collect()
    }

    /// Whether `key` lies in a cleared range, leaving out the first `skip` of them.
    pub(super) fn is_cleared(&self, key: &[u8], skip: usize) -> bool {
        self.cleared[skip..].iter().any(|(begin, end)| begin[..] <= *key && *key < end[..])
    }

    /// [`crate::Txn::set`].
    pub fn set(&mut self, key: &[u8], value: &[u8]) {
        self.count(key.len(), value.len());
        let base = Base::Known(Some(Bytes::copy_from_slice(value)));
        self.writes.insert(Bytes::copy_from_slice(key), Pending { base, ops: Vec::new() });
    }

    /// [`crate::Txn::clear`].
    pub fn clear(&mut self, key: &[u8]) {
        self.count(key.len(), 0);
        let base = Base::Known(None);
        self.writes.insert(Bytes::copy_from_slice(key), Pending { base, ops: Vec::new() });
    }

    /// [`crate::Txn::clear_range`]; an empty or inverted range clears nothing.
    pub fn clear_range(&mut self, begin: &[u8], end: &[u8]) {
        if begin >= end {
            return;
        }
        self.count(begin.len(), end.len());
        for key in self.written_keys(begin, end) {
            self.writes.remove(&key);
        }
        self.cleared.push((Bytes::copy_from_slice(begin), Bytes::copy_from_slice(end)));
    }

    /// [`crate::Txn::add`].
    pub fn add(&mut self, key: &[u8], delta: i64) {
        self.count(key.len(), 8);
        self.push(key, WriteOp::Add(delta));
    }

    /// [`crate::Txn::max`].
    pub fn max(&mut self, key: &[u8], value: &[u8]) {
        self.count(key.len(), value.len());
        self.push(key, WriteOp::Max(Bytes::copy_from_slice(value)));
    }

    /// [`crate::Txn::set_versionstamped_value`].
    pub fn set_versionstamped_value(&mut self, key: &[u8], prefix: &[u8], suffix: &[u8]) {
        self.count(key.len(), prefix.len() + 10 + suffix.len());
        let (prefix, suffix) = (Bytes::copy_from_slice(prefix), Bytes::copy_from_slice(suffix));
        self.push(key, WriteOp::Stamped { prefix, suffix });
    }

    /// [`crate::Txn::set_versionstamped_key`].
    pub fn set_versionstamped_key(&mut self, prefix: &[u8], order: u16, suffix: &[u8], value: &[u8]) {
        self.count(prefix.len() + 12 + suffix.len(), value.len());
        self.stamped.push(StampedKey {
            prefix: Bytes::copy_from_slice(prefix),
            order,
            suffix: Bytes::copy_from_slice(suffix),
            value: Bytes::copy_from_slice(value),
            cleared_before: self.cleared.len(),
        });
    }

    fn push(&mut self, key: &[u8], op: WriteOp) {
        if let Some(pending) = self.writes.get_mut(key) {
            pending.push(op);
            return;
        }
        let base = if self.is_cleared(key, 0) { Base::Known(None) } else { Base::Stored };
        let mut pending = Pending { base, ops: Vec::new() };
        pending.push(op);
        self.writes.insert(Bytes::copy_from_slice(key), pending);
    }

    /// Counts a write as FoundationDB does: the mutation and its conflict range.
    fn count(&mut self, key_len: usize, value_len: usize) {
        let limits = &Limits::STRICTEST;
        self.bytes += 3 * key_len + 1 + value_len;
        if self.oversize.is_some() {
            return;
        }
        if key_len > limits.key_bytes_max {
            self.oversize = Some(format!("key of {key_len} bytes, at most {}", limits.key_bytes_max));
        } else if value_len > limits.value_bytes_max {
            self.oversize = Some(format!("value of {value_len} bytes, at most {}", limits.value_bytes_max));
        }
    }

    /// Ends the transaction: what is to be committed, or `None` when nothing was written.
    ///
    /// # Errors
    /// `TooLarge` beyond [`Limits::STRICTEST`]; `Unavailable` when called twice.
    pub fn take(&mut self) -> Result<Option<Commit>> {
        if self.taken {
            return Err(KvError::Unavailable("the transaction was already committed".into()));
        }
        self.taken = true;
        let buffer = std::mem::take(self);
        self.taken = true;
        if let Some(text) = buffer.oversize {
            return Err(KvError::TooLarge(text));
        }
        if buffer.writes.is_empty() && buffer.cleared.is_empty() && buffer.stamped.is_empty() {
            return Ok(None);
        }
        let bytes_max = Limits::STRICTEST.txn_bytes_max;
        if buffer.bytes > bytes_max {
            let text = format!("transaction of {} bytes, at most {bytes_max}", buffer.bytes);
            return Err(KvError::TooLarge(text));
        }
        Ok(Some(Commit { buffer }))
    }
}

/// The state that a commit is applied to.
pub trait CurrentState {
    /// The newest value of `key`.
    fn get(&self, key: &[u8]) -> Result<Option<Bytes>>;
    /// All keys in `[begin, end)` that have a value.
    fn keys(&self, begin: &[u8], end: &[u8]) -> Result<Vec<Bytes>>;
}

/// A transaction that is about to be committed.
#[derive(Debug)]
pub struct Commit {
    buffer: TxnBuffer,
}

impl Commit {
    /// What it read.
    pub fn reads(&self) -> &ReadSet {
        &self.buffer.reads
    }

    /// Ranges that it cleared.
    pub fn cleared(&self) -> &[(Bytes, Bytes)] {
        &self.buffer.cleared
    }

    /// Keys whose new value depends on the stored one.
    pub fn keys_on_top(&self) -> impl Iterator<Item = &Bytes> {
        let writes = self.buffer.writes.iter();
        writes.filter(|(_, pending)| matches!(pending.base, Base::Stored)).map(|(key, _)| key)
    }

    /// Works out the changes of this commit on top of `current`, each key once.
    pub fn resolve(self, stamp: Versionstamp, current: &impl CurrentState) -> Result<Vec<Change>> {
        let mut buffer = self.buffer;
        let mut changes = Vec::with_capacity(buffer.writes.len() + buffer.stamped.len());
        let stamped_changes: Vec<Change> = std::mem::take(&mut buffer.stamped)
            .into_iter()
            .filter_map(|stamped| {
                let order = stamped.order.to_be_bytes();
                let key = concat(&[&stamped.prefix, &stamp.0, &order, &stamped.suffix]);
                let dropped = buffer.is_cleared(&key, stamped.cleared_before);
                (!dropped).then_some((key, Some(stamped.value)))
            })
            .collect();
        for (index, (begin, end)) in buffer.cleared.iter().enumerate() {
            for key in current.keys(begin, end)? {
                let cleared_earlier =
                    buffer.cleared[..index].iter().any(|(begin, end)| *begin <= key && key < *end);
                if !cleared_earlier && !buffer.writes.contains_key(&key) {
                    changes.push((key, None));
                }
            }
        }
        for (key, mut pending) in buffer.writes {
            let start = match &mut pending.base {
                Base::Known(value) => value.take(),
                Base::Stored => current.get(&key)?,
            };
            let value = pending.fold(start, Some(stamp));
            changes.push((key, value));
        }
        changes.extend(stamped_changes);
        Ok(changes)
    }
}

//! Recent versions of keys in memory, and whether they conflict with what a transaction read.
//!
//! Invariants: versions are applied in ascending order; a removed key stays as a tombstone, so that its removal is
//! found by validation and hides older layers; ranges that were cleared are kept beside the keys, because clearing an
//! empty range conflicts with reading it.

use std::collections::BTreeMap;
use std::ops::Bound;

use bytes::Bytes;

use super::buffer::Change;
use super::range::Chunk;
use crate::Direction;

/// What a transaction read, for validation.
#[derive(Debug, Default)]
pub struct ReadSet {
    keys: Vec<Bytes>,
    ranges: Vec<(Bytes, Bytes)>,
}

impl ReadSet {
    /// Adds a read of one key.
    pub fn add_key(&mut self, key: &[u8]) {
        if self.keys.last().is_none_or(|last| last[..] != *key) {
            self.keys.push(Bytes::copy_from_slice(key));
        }
    }

    /// Adds a read of `[begin, end)`.
    pub fn add_range(&mut self, begin: Bytes, end: Bytes) {
        self.ranges.push((begin, end));
    }

    /// Whether nothing was read.
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty() && self.ranges.is_empty()
    }

    fn overlaps(&self, begin: &[u8], end: &[u8]) -> bool {
        self.keys.iter().any(|key| *begin <= key[..] && key[..] < *end)
            || self.ranges.iter().any(|range| range.0[..] < *end && *begin < range.1[..])
    }
}

/// One key's versions, the newest apart because it is the one that is read.
#[derive(Debug)]
struct Versions {
    version: u64,
    value: Option<Bytes>,
    /// Ascending, all below `version`.
    older: Vec<(u64, Option<Bytes>)>,
}

impl Versions {
    fn at(&self, version: u64) -> Lookup {
        if self.version <= version {
            return Lookup::Found(self.value.clone());
        }
        let older = self.older.iter().rev().find(|(of, _)| *of <= version);
        older.map_or(Lookup::Missing, |(_, value)| Lookup::Found(value.clone()))
    }

    /// Drops versions that no reader at `oldest` or later can see; returns what they took.
    fn prune(&mut self, oldest: u64) -> usize {
        let count = if self.version <= oldest {
            self.older.len()
        } else {
            self.older.partition_point(|(of, _)| *of <= oldest).saturating_sub(1)
        };
        self.older.drain(..count).map(|(_, value)| value_len(value.as_ref()) + VERSION_OVERHEAD).sum()
    }
}

/// What a memtable knows of a key at a version.
#[derive(Debug, PartialEq, Eq)]
pub enum Lookup {
    /// Nothing: an older layer decides.
    Missing,
    /// Its value, or that it was removed.
    Found(Option<Bytes>),
}

/// Bytes that an entry costs beside its key and value.
const ENTRY_OVERHEAD: usize = 128;

/// Bytes that an older version costs beside its value.
const VERSION_OVERHEAD: usize = 48;

fn value_len(value: Option<&Bytes>) -> usize {
    value.map_or(0, Bytes::len)
}

/// Recent versions of keys.
#[derive(Debug, Default)]
pub struct Memtable {
    keys: BTreeMap<Bytes, Versions>,
    cleared: Vec<(u64, Bytes, Bytes)>,
    version_last: u64,
    bytes: usize,
}

impl Memtable {
    /// The version of the last change, 0 without one.
    pub fn version_last(&self) -> u64 {
        self.version_last
    }

    /// About how much memory it takes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Number of keys, removed ones included.
    pub fn len(&self) -> usize {
        self.keys.len()
    }

    /// Whether it holds nothing.
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty() && self.cleared.is_empty()
    }

    /// The value of `key` at `version`.
    pub fn get(&self, key: &[u8], version: u64) -> Lookup {
        self.keys.get(key).map_or(Lookup::Missing, |versions| versions.at(version))
    }

    /// Newest values in ascending order of keys; `None` for removed keys.
    pub fn iter_newest(&self) -> impl Iterator<Item = (&Bytes, Option<&Bytes>)> {
        self.keys.iter().map(|(key, versions)| (key, versions.value.as_ref()))
    }

    /// Entries of `[begin, end)` at `version`, removed keys included, at most `limit`.
    pub fn scan(&self, begin: &[u8], end: &[u8], direction: Direction, limit: usize, version: u64) -> Chunk {
        let mut chunk = Chunk { entries: Vec::new(), exhausted: true };
        if begin >= end {
            return chunk;
        }
        let range = self.keys.range::<[u8], _>((Bound::Included(begin), Bound::Excluded(end)));
        let visible = |(key, versions): (&Bytes, &Versions)| match versions.at(version) {
            Lookup::Missing => None,
            Lookup::Found(value) => Some((key.clone(), value)),
        };
        match direction {
            Direction::Forward => chunk.entries.extend(range.filter_map(visible).take(limit)),
            Direction::Reverse => chunk.entries.extend(range.rev().filter_map(visible).take(limit)),
        }
        chunk.exhausted = chunk.entries.len() < limit;
        chunk
    }

    /// Whether anything in `reads` changed after `version`.
    pub fn conflicts(&self, reads: &ReadSet, version: u64) -> bool {
        if self.version_last <= version || reads.is_empty() {
            return false;
        }
        let mut cleared = self.cleared.iter().rev().take_while(|(of, ..)| *of > version);
        reads.keys.iter().any(|key| self.keys.get(key).is_some_and(|versions| versions.version > version))
            || cleared.any(|(_, begin, end)| reads.overlaps(begin, end))
            || reads.ranges.iter().any(|(begin, end)| {
                let range = (Bound::Included(&begin[..]), Bound::Excluded(&end[..]));
                self.keys.range::<[u8], _>(range).any(|(_, versions)| versions.version > version)
            })
    }

    /// Applies one commit. Versions that only readers before `oldest` could see are dropped.
    pub fn apply(&mut self, version: u64, changes: Vec<Change>, cleared: &[(Bytes, Bytes)], oldest: u64) {
        for (key, value) in changes {
            self.bytes += value_len(value.as_ref());
            let Some(versions) = self.keys.get_mut(&key) else {
                self.bytes += key.len() + ENTRY_OVERHEAD;
                self.keys.insert(key, Versions { version, value, older: Vec::new() });
                continue;
            };
            let before = std::mem::replace(&mut versions.value, value);
            if versions.version == version {
                self.bytes -= value_len(before.as_ref());
            } else {
                self.bytes += VERSION_OVERHEAD;
                versions.older.push((versions.version, before));
                versions.version = version;
                self.bytes -= versions.prune(oldest);
            }
        }
        for (begin, end) in cleared {
            self.bytes += begin.len() + end.len() + ENTRY_OVERHEAD;
            self.cleared.push((version, begin.clone(), end.clone()));
        }
        self.version_last = version;
    }

    /// Drops what no reader at `oldest` or later can see of `key`, and the key if it was removed by then. Only for a
    /// lowest layer: a tombstone that hides another layer must stay.
    pub fn prune_key(&mut self, key: &[u8], oldest: u64) {
        let Some(versions) = self.keys.get_mut(key) else {
            return;
        };
        self.bytes -= versions.prune(oldest);
        if versions.value.is_none() && versions.older.is_empty() && versions.version <= oldest {
            self.bytes -= key.len() + ENTRY_OVERHEAD;
            self.keys.remove(key);
        }
    }

    /// Forgets ranges cleared at or before `oldest`.
    pub fn prune_cleared(&mut self, oldest: u64) {
        let count = self.cleared.partition_point(|(version, ..)| *version <= oldest);
        for (_, begin, end) in self.cleared.drain(..count) {
            self.bytes -= begin.len() + end.len() + ENTRY_OVERHEAD;
        }
    }
}

//! What a transaction reads from: layers of recent commits in memory, above redb.
//!
//! Invariants: a layer is written only while it is the active one; versions in a layer are greater than those in all
//! layers before it; `next` leads from a layer to the one that became active after it, which is how an old
//! transaction finds what it must be validated against. A transaction keeps its layers alive; those that it would keep
//! for too long are emptied under it.

use std::fmt;
use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use parking_lot::RwLock;
use redb::{Database, ReadOnlyTable, ReadableDatabase, StorageError};
use rfs_kv::engine::{Change, Chunk, Lookup, Memtable, ReadSet, Source};
use rfs_kv::{Direction, KvError, Result};

use crate::open::{DATA, guarded};

/// Recent commits.
#[derive(Debug, Default)]
pub(crate) struct Layer {
    /// `None` once it was emptied.
    table: RwLock<Option<Memtable>>,
    next: OnceLock<Arc<Layer>>,
}

impl Layer {
    pub(crate) fn new() -> Self {
        Self { table: RwLock::new(Some(Memtable::default())), next: OnceLock::new() }
    }

    pub(crate) fn with<T>(&self, read: impl FnOnce(&Memtable) -> T) -> Result<T> {
        self.table.read().as_ref().map(read).ok_or(KvError::Conflict)
    }

    /// Applies a commit to the active layer; returns the bytes that it takes now.
    pub(crate) fn apply(&self, version: u64, changes: Vec<Change>, cleared: &[(Bytes, Bytes)]) -> usize {
        let mut table = self.table.write();
        let table = table.get_or_insert_default();
        table.apply(version, changes, cleared, 0);
        table.bytes()
    }

    /// Makes `next` the layer after this one, once.
    pub(crate) fn set_next(&self, next: Arc<Layer>) {
        let again = self.next.set(next).is_err();
        debug_assert!(!again, "a layer is frozen once");
    }

    /// Empties it: transactions that still need it conflict.
    pub(crate) fn expire(&self) {
        self.table.write().take();
    }

    /// Whether `reads` at `version` conflict with this layer or a later one.
    pub(crate) fn conflicts(&self, reads: &ReadSet, version: u64) -> Result<bool> {
        let mut layer = self;
        loop {
            if layer.with(|table| table.conflicts(reads, version))? {
                return Ok(true);
            }
            match layer.next.get() {
                Some(next) => layer = next,
                None => return Ok(false),
            }
        }
    }
}

/// Drops a chain of layers one after the other: a long one must not recurse.
impl Drop for Layer {
    fn drop(&mut self) {
        let mut next = self.next.take();
        while let Some(mut layer) = next.and_then(Arc::into_inner) {
            next = layer.next.take();
        }
    }
}

type Table = ReadOnlyTable<&'static [u8], &'static [u8]>;

enum BaseState {
    Open(Table),
    /// Kept for too long by a transaction.
    Expired,
    /// The file cannot be read.
    Broken(String),
}

/// One state of the redb file.
pub(crate) struct Base(RwLock<BaseState>);

impl fmt::Debug for Base {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Base")
    }
}

impl Base {
    /// The state that was committed last.
    pub(crate) fn newest(database: &Database) -> Self {
        let opened =
            guarded(|| -> Result<Table, redb::Error> { Ok(database.begin_read()?.open_table(DATA)?) });
        match opened {
            Ok(Ok(table)) => Self(RwLock::new(BaseState::Open(table))),
            Ok(Err(error)) => Self::broken(read_failed_text(&error)),
            Err(damage) => Self::broken(read_failed_text(&damage)),
        }
    }

    pub(crate) fn broken(text: String) -> Self {
        Self(RwLock::new(BaseState::Broken(text)))
    }

    /// Lets go of the file: transactions that still need it conflict.
    pub(crate) fn expire(&self) {
        *self.0.write() = BaseState::Expired;
    }

    /// Lets go of the file for good.
    pub(crate) fn break_off(&self, text: &str) {
        *self.0.write() = BaseState::Broken(text.into());
    }

    fn with<T>(&self, read: impl FnOnce(&Table) -> Result<T, StorageError>) -> Result<T> {
        match &*self.0.read() {
            BaseState::Open(table) => match guarded(|| read(table)) {
                Ok(Ok(found)) => Ok(found),
                Ok(Err(error)) => Err(read_failed(&error)),
                Err(damage) => Err(read_failed(&damage)),
            },
            BaseState::Expired => Err(KvError::Conflict),
            BaseState::Broken(text) => Err(KvError::Unavailable(text.clone())),
        }
    }

    pub(crate) fn get(&self, key: &[u8]) -> Result<Option<Bytes>> {
        self.with(|table| Ok(table.get(key)?.map(|value| Bytes::copy_from_slice(value.value()))))
    }
}

fn read_failed_text(error: &dyn fmt::Display) -> String {
    format!("cannot read the metadata file: {error}; unmount, and restore it from a backup if that stays so")
}

fn read_failed(error: &dyn fmt::Display) -> KvError {
    KvError::Unavailable(read_failed_text(error))
}

impl Source for Base {
    fn scan(&self, begin: &[u8], end: &[u8], direction: Direction, limit: usize) -> Result<Chunk> {
        if begin >= end {
            return Ok(Chunk { entries: Vec::new(), exhausted: true });
        }
        self.with(|table| {
            let mut range = table.range::<&[u8]>(begin..end)?;
            let mut entries = Vec::new();
            while entries.len() < limit {
                let entry = match direction {
                    Direction::Forward => range.next(),
                    Direction::Reverse => range.next_back(),
                };
                let Some(entry) = entry else { break };
                let (key, value) = entry?;
                let value = Bytes::copy_from_slice(value.value());
                entries.push((Bytes::copy_from_slice(key.value()), Some(value)));
            }
            let exhausted = entries.len() < limit;
            Ok(Chunk { entries, exhausted })
        })
    }
}

/// The layers of one moment.
#[derive(Debug)]
pub(crate) struct View {
    pub(crate) active: Arc<Layer>,
    pub(crate) frozen: Option<Arc<Layer>>,
    pub(crate) base: Arc<Base>,
}

impl View {
    /// Layers in memory, newest first.
    pub(crate) fn layers(&self) -> impl Iterator<Item = &Arc<Layer>> {
        std::iter::once(&self.active).chain(&self.frozen)
    }

    /// The value of `key` at `version` as far as memory knows it.
    pub(crate) fn lookup(&self, key: &[u8], version: u64) -> Result<Lookup> {
        for layer in self.layers() {
            let found = layer.with(|table| table.get(key, version))?;
            if found != Lookup::Missing {
                return Ok(found);
            }
        }
        Ok(Lookup::Missing)
    }

    pub(crate) fn get(&self, key: &[u8], version: u64) -> Result<Option<Bytes>> {
        match self.lookup(key, version)? {
            Lookup::Found(value) => Ok(value),
            Lookup::Missing => self.base.get(key),
        }
    }
}

/// A layer as a transaction at `version` sees it.
pub(crate) struct LayerAt<'a> {
    pub(crate) layer: &'a Layer,
    pub(crate) version: u64,
}

impl Source for LayerAt<'_> {
    fn scan(&self, begin: &[u8], end: &[u8], direction: Direction, limit: usize) -> Result<Chunk> {
        self.layer.with(|table| table.scan(begin, end, direction, limit, self.version))
    }
}

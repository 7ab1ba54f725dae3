//! One transaction.
//!
//! The bindings' `commit` consumes the transaction, ours takes `&self`: the transaction sits in an `Option` under a lock
//! that is held only while a call is handed over, never while it is awaited.

use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use foundationdb::options::{ConflictRangeType, MutationType, StreamingMode};
use foundationdb::{FdbError, RangeOption, Transaction};
use parking_lot::{Mutex, RwLock};
use rfs_kv::{Direction, Isolation, KvError, Limits, RangePage, RangeQuery, Result, Txn, Versionstamp};

use crate::awaited::awaited;
use crate::{Open, told, told_of_commit};

/// Where the versionstamp goes: the server fills in these ten bytes.
const STAMP_PLACE: [u8; 10] = [0xff; 10];

pub(crate) struct FdbTxn {
    inner: RwLock<Option<Transaction>>,
    prefix: Arc<[u8]>,
    open: Arc<Open>,
    written: Mutex<Written>,
}

/// What was written so far, for the limits.
#[derive(Default)]
struct Written {
    bytes: usize,
    any: bool,
    too_large: Option<String>,
}

impl FdbTxn {
    pub(crate) fn new(inner: Transaction, prefix: Arc<[u8]>, open: Arc<Open>) -> FdbTxn {
        FdbTxn { inner: RwLock::new(Some(inner)), prefix, open, written: Mutex::default() }
    }

    fn full(&self, key: &[u8]) -> Vec<u8> {
        [&self.prefix, key].concat()
    }

    /// Hands a call to the transaction.
    fn with<T>(&self, call: impl FnOnce(&Transaction) -> T) -> Result<T> {
        self.inner.read().as_ref().map(call).ok_or_else(used_after_commit)
    }

    /// Hands a write to the transaction and counts it.
    fn write(&self, key: &[u8], value_len: usize, call: impl FnOnce(&Transaction, &[u8])) {
        let limits = Limits::STRICTEST;
        {
            let mut written = self.written.lock();
            written.any = true;
            written.bytes += key.len() + value_len;
            if key.len() > limits.key_bytes_max {
                written.too_large = Some(format!("key of {} bytes", key.len()));
            } else if value_len > limits.value_bytes_max {
                written.too_large = Some(format!("value of {value_len} bytes"));
            } else if written.bytes > limits.txn_bytes_max {
                written.too_large = Some(format!("transaction of {} bytes", written.bytes));
            }
            if written.too_large.is_some() {
                return;
            }
        }
        let full = self.full(key);
        // After `commit` there is nothing to write to; the contract calls commit once and last.
        let handed = self.with(|txn| call(txn, &full));
        debug_assert!(handed.is_ok(), "write after commit");
    }

    async fn read(&self, key: &[u8], isolation: Isolation) -> Result<Option<Bytes>> {
        let full = self.full(key);
        let reading = self.with(|txn| txn.get(&full, isolation == Isolation::Snapshot))?;
        let value = awaited(reading).await.map_err(told)?;
        Ok(value.map(|value| Bytes::copy_from_slice(&value)))
    }

    /// The first `limit` entries between two full keys, without conflict.
    async fn entries(
        &self,
        begin: &[u8],
        end: &[u8],
        limit: usize,
        direction: Direction,
    ) -> Result<Vec<(Bytes, Bytes)>> {
        let mut next = Some(RangeOption {
            limit: Some(limit),
            mode: StreamingMode::WantAll,
            reverse: direction == Direction::Reverse,
            ..RangeOption::from((begin, end))
        });
        let mut entries = Vec::new();
        let mut iteration = 1;
        while let Some(option) = next {
            let reading = self.with(|txn| txn.get_range(&option, iteration, true))?;
            let values = awaited(reading).await.map_err(told)?;
            entries.extend(values.iter().map(|pair| {
                let key = Bytes::copy_from_slice(&pair.key()[self.prefix.len()..]);
                (key, Bytes::copy_from_slice(pair.value()))
            }));
            next = option.next_range(&values);
            iteration += 1;
        }
        Ok(entries)
    }
}

fn used_after_commit() -> KvError {
    KvError::Unavailable("transaction used after its commit".to_owned())
}

#[async_trait]
impl Txn for FdbTxn {
    async fn get(&self, key: &[u8]) -> Result<Option<Bytes>> {
        self.read(key, Isolation::Serializable).await
    }

    async fn snapshot_get(&self, key: &[u8]) -> Result<Option<Bytes>> {
        self.read(key, Isolation::Snapshot).await
    }

    async fn range(&self, query: RangeQuery) -> Result<RangePage> {
        let (begin, end) = (self.full(&query.begin), self.full(&query.end));
        if begin >= end {
            return Ok(RangePage::default());
        }
        // FoundationDB does not tell whether there is more when the limit is reached: one entry more tells. It must not
        // conflict, so what was read is marked here instead of by the read.
        let wanted = query.limit.saturating_add(1);
        let mut entries = self.entries(&begin, &end, wanted, query.direction).await?;
        let more = entries.len() > query.limit;
        entries.truncate(query.limit);
        if query.isolation == Isolation::Serializable {
            let last = entries.last().filter(|_| more).map(|(key, _)| key);
            match (last, query.direction) {
                (None, _) => self.add_read_conflict(&query.begin, &query.end),
                (Some(last), Direction::Forward) => {
                    self.add_read_conflict(&query.begin, &[last, &b"\0"[..]].concat());
                }
                (Some(last), Direction::Reverse) => self.add_read_conflict(last, &query.end),
            }
        }
        Ok(RangePage { entries, more })
    }

    fn set(&self, key: &[u8], value: &[u8]) {
        self.write(key, value.len(), |txn, full| txn.set(full, value));
    }

    fn clear(&self, key: &[u8]) {
        self.write(key, 0, Transaction::clear);
    }

    fn clear_range(&self, begin: &[u8], end: &[u8]) {
        if begin < end {
            let full_end = self.full(end);
            self.write(begin, end.len(), |txn, full| txn.clear_range(full, &full_end));
        }
    }

    fn add(&self, key: &[u8], delta: i64) {
        self.write(key, 8, |txn, full| txn.atomic_op(full, &delta.to_le_bytes(), MutationType::Add));
    }

    fn max(&self, key: &[u8], value: &[u8]) {
        self.write(key, value.len(), |txn, full| txn.atomic_op(full, value, MutationType::Max));
    }

    fn set_versionstamped_key(&self, prefix: &[u8], order: u16, suffix: &[u8], value: &[u8]) {
        let stamp_at = offset_bytes(self.prefix.len() + prefix.len());
        let template = [prefix, &STAMP_PLACE, &order.to_be_bytes(), suffix].concat();
        self.write(&template, value.len(), |txn, full| {
            let full = [full, &stamp_at].concat();
            txn.atomic_op(&full, value, MutationType::SetVersionstampedKey);
        });
    }

    fn set_versionstamped_value(&self, key: &[u8], prefix: &[u8], suffix: &[u8]) {
        let stamp_at = offset_bytes(prefix.len());
        let template = [prefix, &STAMP_PLACE, suffix, &stamp_at].concat();
        let value_len = template.len() - stamp_at.len();
        self.write(key, value_len, |txn, full| {
            txn.atomic_op(full, &template, MutationType::SetVersionstampedValue);
        });
    }

    fn add_read_conflict(&self, begin: &[u8], end: &[u8]) {
        let (begin, end) = (self.full(begin), self.full(end));
        let added = self.with(|txn| txn.add_conflict_range(&begin, &end, ConflictRangeType::Read));
        debug_assert!(matches!(added, Ok(Ok(()))), "a conflict range was refused");
    }

    async fn commit(&self) -> Result<Versionstamp> {
        let txn = self.inner.write().take().ok_or_else(used_after_commit)?;
        self.open.check()?;
        let any = {
            let written = self.written.lock();
            if let Some(what) = &written.too_large {
                return Err(KvError::TooLarge(what.clone()));
            }
            written.any
        };
        let stamp = any.then(|| txn.get_versionstamp());
        let failed = |error: FdbError| {
            self.open.failed();
            told_of_commit(error)
        };
        let committed = awaited(txn.commit()).await.map_err(|e| failed(e.into()))?;
        let Some(stamp) = stamp else { return Ok(Versionstamp::default()) };
        self.open.committed(committed.committed_version().map_err(failed)?);
        let stamp = awaited(stamp).await.map_err(failed)?;
        drop(committed);
        let bytes = <[u8; 10]>::try_from(&*stamp).map_err(|_| {
            KvError::Unavailable("FoundationDB returned a versionstamp of a wrong size".to_owned())
        })?;
        Ok(Versionstamp(bytes))
    }
}

/// Where the stamp goes, as FoundationDB wants it at the end of a template: little-endian u32.
fn offset_bytes(offset: usize) -> [u8; 4] {
    u32::try_from(offset).expect("keys and values are far below 4 GiB").to_le_bytes()
}

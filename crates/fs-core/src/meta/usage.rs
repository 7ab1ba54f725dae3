//! How much of its limits a volume uses.
//!
//! The truth is in counters that every transaction adds to, one shard a session. This client also keeps the totals in
//! memory, so that the limits are checked without reading: a change is reserved before its transaction, and becomes part
//! of the totals or is given back after it. Totals that are read again leave alone what is reserved.

use std::ops::{Add, AddAssign, SubAssign};
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use rfs_kv::{Direction, Isolation, RangeQuery, Txn};

use crate::types::{ErrorKind, Result, SessionId};

use super::key::Counter;
use super::{Meta, VolumeLimits, key, record};

/// A change of what the volume holds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Change {
    pub(super) bytes: i64,
    pub(super) inodes: i64,
}

impl Change {
    pub(super) const ONE_INODE: Change = Change { bytes: 0, inodes: 1 };

    pub(super) fn bytes(bytes: i64) -> Change {
        Change { bytes, inodes: 0 }
    }
}

/// Wraps as the counters in the store do: what is damaged there must not end the process.
impl Add for Change {
    type Output = Change;

    fn add(self, other: Change) -> Change {
        Change { bytes: self.bytes.wrapping_add(other.bytes), inodes: self.inodes.wrapping_add(other.inodes) }
    }
}

impl AddAssign for Change {
    fn add_assign(&mut self, other: Change) {
        *self = *self + other;
    }
}

impl SubAssign for Change {
    fn sub_assign(&mut self, other: Change) {
        *self = Change {
            bytes: self.bytes.wrapping_sub(other.bytes),
            inodes: self.inodes.wrapping_sub(other.inodes),
        };
    }
}

const UNLIMITED: u64 = u64::MAX;

/// Totals in memory.
pub(super) struct Usage {
    capacity: AtomicU64,
    inodes_max: AtomicU64,
    sums: Mutex<Sums>,
}

#[derive(Debug, Default)]
struct Sums {
    committed: Change,
    /// In transactions that have not ended.
    reserved: Change,
}

impl Sums {
    fn taken(&self) -> Change {
        self.committed + self.reserved
    }
}

impl Usage {
    pub(super) fn new(limits: VolumeLimits) -> Usage {
        let usage = Usage {
            capacity: AtomicU64::new(UNLIMITED),
            inodes_max: AtomicU64::new(UNLIMITED),
            sums: Mutex::default(),
        };
        usage.set_limits(limits);
        usage
    }

    pub(super) fn limits(&self) -> VolumeLimits {
        let limit = |value: &AtomicU64| Some(value.load(Ordering::Relaxed)).filter(|&v| v != UNLIMITED);
        VolumeLimits { capacity: limit(&self.capacity), inodes: limit(&self.inodes_max) }
    }

    pub(super) fn set_limits(&self, limits: VolumeLimits) {
        self.capacity.store(limits.capacity.unwrap_or(UNLIMITED), Ordering::Relaxed);
        self.inodes_max.store(limits.inodes.unwrap_or(UNLIMITED), Ordering::Relaxed);
    }

    fn set_totals(&self, totals: Change) {
        self.sums.lock().committed = totals;
    }

    /// Takes `change` off what is left; it is given back unless the reservation is kept.
    ///
    /// # Errors
    /// `NoSpace` when a limit would be exceeded. A change that frees never fails.
    pub(super) fn reserve(&self, change: Change) -> Result<Reservation<'_>> {
        let mut sums = self.sums.lock();
        let Change { bytes, inodes } = sums.taken() + change;
        let exceeds = |total: i64, limit: &AtomicU64| {
            u64::try_from(total).is_ok_and(|total| total > limit.load(Ordering::Relaxed))
        };
        let full = (change.bytes > 0 && exceeds(bytes, &self.capacity))
            || (change.inodes > 0 && exceeds(inodes, &self.inodes_max));
        if full {
            return Err(ErrorKind::NoSpace.into());
        }
        sums.reserved += change;
        Ok(Reservation { usage: self, change })
    }

    /// Counts a change that was committed without reservation.
    pub(super) fn account(&self, change: Change) {
        self.sums.lock().committed += change;
    }

    fn bytes_left(&self) -> Option<u64> {
        let capacity = self.limits().capacity?;
        let used = u64::try_from(self.sums.lock().taken().bytes).unwrap_or(0);
        Some(capacity.saturating_sub(used))
    }
}

/// A change that was taken off what is left; given back when dropped.
pub(super) struct Reservation<'a> {
    usage: &'a Usage,
    change: Change,
}

impl Reservation<'_> {
    /// The change was committed.
    pub(super) fn keep(mut self) {
        let change = std::mem::take(&mut self.change);
        let mut sums = self.usage.sums.lock();
        sums.reserved -= change;
        sums.committed += change;
    }
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        self.usage.sums.lock().reserved -= self.change;
    }
}

/// Adds `change` to the session's shard.
pub(super) fn add_in(txn: &dyn Txn, session: SessionId, change: Change) {
    if change.bytes != 0 {
        txn.add(&key::usage(Counter::Bytes, session), change.bytes);
    }
    if change.inodes != 0 {
        txn.add(&key::usage(Counter::Inodes, session), change.inodes);
    }
}

/// The totals of all shards.
pub(super) async fn totals_in(txn: &dyn Txn) -> Result<Change> {
    let range = key::usages();
    let query = RangeQuery {
        begin: range.begin,
        end: range.end,
        limit: 2 * 256 + 1,
        direction: Direction::Forward,
        isolation: Isolation::Snapshot,
    };
    let mut totals = Change::default();
    for (key, value) in txn.range(query).await?.entries {
        let value = record::decode_counter(&value)?;
        match record::parsed(key::parse_usage(&key), "usage")? {
            Counter::Bytes => totals.bytes += value,
            Counter::Inodes => totals.inodes += value,
        }
    }
    Ok(totals)
}

impl Meta {
    /// Allocated bytes that still fit the volume's capacity; `None` without a capacity.
    pub fn bytes_left(&self) -> Option<u64> {
        self.usage.bytes_left()
    }

    pub(super) async fn refresh_usage(&self) -> Result<()> {
        let totals = self.read(|txn| async move { totals_in(&*txn).await }).await?;
        self.usage.set_totals(totals);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reservations_stop_at_the_limit_and_come_back() {
        let usage = Usage::new(VolumeLimits { capacity: Some(100), inodes: Some(1) });
        usage.reserve(Change::bytes(60)).unwrap().keep();
        assert_eq!(usage.reserve(Change::bytes(41)).err().unwrap().kind, ErrorKind::NoSpace);
        let held = usage.reserve(Change::bytes(40)).unwrap();
        assert_eq!(usage.bytes_left(), Some(0));
        drop(held);
        assert_eq!(usage.bytes_left(), Some(40));
        let first = usage.reserve(Change::ONE_INODE).unwrap();
        assert!(usage.reserve(Change::ONE_INODE).is_err());
        drop(first);
        assert!(usage.reserve(Change::ONE_INODE).is_ok());
    }

    #[test]
    fn totals_that_are_read_again_leave_reservations_alone() {
        let usage = Usage::new(VolumeLimits { capacity: Some(100), inodes: None });
        let failing = usage.reserve(Change::bytes(30)).unwrap();
        let committed = usage.reserve(Change::bytes(20)).unwrap();
        usage.set_totals(Change::bytes(10));
        assert_eq!(usage.bytes_left(), Some(40));
        drop(failing);
        assert_eq!(usage.bytes_left(), Some(70));
        committed.keep();
        assert_eq!(usage.bytes_left(), Some(70));
    }
}

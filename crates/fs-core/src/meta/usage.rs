//! How much of its limits a volume uses.
//!
//! The truth is in counters that every transaction adds to, one shard a session. This client also keeps the totals in
//! memory, so that the limits are checked without reading: a change is reserved before its transaction, and becomes part
//! of the totals or is given back after it. What was given back because there was no answer may have come about: the
//! totals are read again then, while no change is under way.

use std::ops::{Add, AddAssign, SubAssign};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use rfs_kv::{Direction, Isolation, RangeQuery, Txn};
use tokio::sync::{RwLock, RwLockReadGuard};

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
/// So long changes wait at most for totals that are read again, and these for them.
const RECOUNT_MAX: Duration = Duration::from_millis(500);

/// Totals in memory.
pub(super) struct Usage {
    capacity: AtomicU64,
    inodes_max: AtomicU64,
    sums: Mutex<Sums>,
    /// A change was not answered: the store may count it.
    unsure: AtomicBool,
    /// Shared by changes, from before their transactions until they are counted here.
    changing: RwLock<()>,
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
            unsure: AtomicBool::new(false),
            changing: RwLock::default(),
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
    pub(super) async fn reserve(&self, change: Change) -> Result<Reservation<'_>> {
        let changing = self.changing.read().await;
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
        Ok(Reservation { usage: self, change, _changing: changing })
    }

    /// A transaction was not answered, which may have changed what the store counts.
    pub(super) fn not_answered(&self) {
        self.unsure.store(true, Ordering::Relaxed);
    }

    /// Takes over what `totals` reads if a change was not answered, once no change is under way.
    async fn recount(&self, totals: impl Future<Output = Result<Change>>) -> Result<()> {
        if !self.unsure.load(Ordering::Relaxed) {
            return Ok(());
        }
        let _alone = self.changing.write().await;
        let totals = totals.await?;
        self.set_totals(totals);
        self.unsure.store(false, Ordering::Relaxed);
        Ok(())
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
    _changing: RwLockReadGuard<'a, ()>,
}

impl Reservation<'_> {
    /// The change was committed.
    pub(super) fn keep(self) {
        let change = self.change;
        self.keep_as(change);
    }

    /// What was committed is `change`.
    pub(super) fn keep_as(mut self, change: Change) {
        let reserved = std::mem::take(&mut self.change);
        let mut sums = self.usage.sums.lock();
        sums.reserved -= reserved;
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
        self.usage.set_totals(self.totals().await?);
        Ok(())
    }

    /// Reads again what the volume holds if a change was not answered: it may have come about nevertheless. Leaves that to
    /// the next call where other changes take long.
    ///
    /// # Errors
    /// The metadata store does not answer.
    pub async fn recount(&self) -> Result<()> {
        let totals = async {
            self.fence(self.not_answered()).await?;
            self.totals().await
        };
        let recounted = tokio::time::timeout(RECOUNT_MAX, self.usage.recount(totals)).await;
        recounted.unwrap_or(Ok(()))
    }

    pub(super) async fn totals(&self) -> Result<Change> {
        self.read(|txn| async move { totals_in(&*txn).await }).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn reservations_stop_at_the_limit_and_come_back() {
        let usage = Usage::new(VolumeLimits { capacity: Some(100), inodes: Some(1) });
        usage.reserve(Change::bytes(60)).await.unwrap().keep();
        assert_eq!(usage.reserve(Change::bytes(41)).await.err().unwrap().kind, ErrorKind::NoSpace);
        let held = usage.reserve(Change::bytes(40)).await.unwrap();
        assert_eq!(usage.bytes_left(), Some(0));
        drop(held);
        assert_eq!(usage.bytes_left(), Some(40));
        let first = usage.reserve(Change::ONE_INODE).await.unwrap();
        assert!(usage.reserve(Change::ONE_INODE).await.is_err());
        drop(first);
        assert!(usage.reserve(Change::ONE_INODE).await.is_ok());
    }

    #[tokio::test]
    async fn totals_that_are_read_again_leave_reservations_alone() {
        let usage = Usage::new(VolumeLimits { capacity: Some(100), inodes: None });
        let failing = usage.reserve(Change::bytes(30)).await.unwrap();
        let committed = usage.reserve(Change::bytes(20)).await.unwrap();
        usage.set_totals(Change::bytes(10));
        assert_eq!(usage.bytes_left(), Some(40));
        drop(failing);
        assert_eq!(usage.bytes_left(), Some(70));
        committed.keep();
        assert_eq!(usage.bytes_left(), Some(70));
    }

    #[tokio::test]
    async fn totals_are_recounted_once_no_change_is_under_way() {
        let usage = Usage::new(VolumeLimits { capacity: Some(100), inodes: None });
        usage.recount(async { panic!("all is known") }).await.unwrap();
        usage.not_answered();
        let committed = usage.reserve(Change::bytes(20)).await.unwrap();
        let mut recount = std::pin::pin!(usage.recount(async { Ok(Change::bytes(30)) }));
        assert!(futures::poll!(&mut recount).is_pending());
        // The store counts it by now.
        committed.keep();
        recount.await.unwrap();
        assert_eq!(usage.bytes_left(), Some(70));
        usage.recount(async { panic!("all is known") }).await.unwrap();
    }
}

//! Reading here and there in large files: when to fetch all of a run.
//!
//! A short read brings one block, and its request costs the store and its reader about as much as one for several MiB. Where
//! such reads keep falling into one pack, all of the run that is read there is fetched for the disk cache, once, and the
//! next of them are found there. As reads need not come back to where others were, such fetches are paid for with what is
//! found in the disk cache: however files are read, a bounded number of them is for nothing.
//! Lock order: the counts are a leaf.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::types::PackId;

/// So many short fetches from one pack make more of them likely: one of all that a large file has in it takes as long as five.
const FETCHES: u32 = 2;
/// So many blocks that are found in the disk cache pay for fetching a run: the requests that they would have been.
const PRICE: u32 = 8;
/// Runs that are fetched before anything was found, which is also the most that can be saved.
const UNPAID: u32 = 128;
/// Runs that are fetched at a time: those who read share the line with them.
const AT_ONCE: usize = 2;
/// Packs that are counted; when there are more, counting begins anew.
const PACKS_MAX: usize = 4096;

/// Counts of short fetches.
#[derive(Debug)]
pub(super) struct Scattered {
    state: Mutex<State>,
    credit: AtomicU32,
    turns: Arc<Semaphore>,
}

#[derive(Debug, Default)]
struct State {
    fetches: HashMap<PackId, u32>,
    /// Packs of which somebody has a turn.
    under_way: HashSet<PackId>,
}

/// A turn to fetch a run; dropped when it is in the disk cache.
#[derive(Debug)]
pub(super) struct Turn {
    scattered: Arc<Scattered>,
    pack: PackId,
    _permit: OwnedSemaphorePermit,
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.scattered.state.lock().under_way.remove(&self.pack);
    }
}

impl Default for Scattered {
    fn default() -> Scattered {
        Scattered {
            state: Mutex::default(),
            credit: AtomicU32::new(UNPAID * PRICE),
            turns: Arc::new(Semaphore::new(AT_ONCE)),
        }
    }
}

impl Scattered {
    /// A short piece of a large file was fetched from the pack.
    pub(super) fn fetched(&self, pack: PackId) {
        let mut state = self.state.lock();
        if state.under_way.contains(&pack) {
            return;
        }
        if state.fetches.len() >= PACKS_MAX {
            state.fetches.clear();
        }
        *state.fetches.entry(pack).or_default() += 1;
    }

    /// A block was found in the disk cache.
    pub(super) fn found(&self) {
        // What is lost when several threads do it at once does not matter.
        let credit = self.credit.load(Ordering::Relaxed);
        if credit < UNPAID * PRICE {
            self.credit.store(credit + 1, Ordering::Relaxed);
        }
    }

    /// Whether to fetch what is being read of the pack, and it seems that there is a turn.
    pub(super) fn is_due(&self, pack: PackId) -> bool {
        let may_be = self.turns.available_permits() > 0 && self.credit.load(Ordering::Relaxed) >= PRICE;
        may_be && self.state.lock().is_due(pack)
    }

    /// A turn to fetch what is being read of the pack, if that is due and paid for.
    pub(super) fn turn(self: &Arc<Scattered>, pack: PackId) -> Option<Turn> {
        let mut state = self.state.lock();
        if !state.is_due(pack) {
            return None;
        }
        let permit = Arc::clone(&self.turns).try_acquire_owned().ok()?;
        let pay = |credit: u32| credit.checked_sub(PRICE);
        self.credit.fetch_update(Ordering::Relaxed, Ordering::Relaxed, pay).ok()?;
        state.fetches.remove(&pack);
        state.under_way.insert(pack);
        Some(Turn { scattered: Arc::clone(self), pack, _permit: permit })
    }
}

impl State {
    fn is_due(&self, pack: PackId) -> bool {
        self.fetches.get(&pack).is_some_and(|fetches| *fetches >= FETCHES)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_often(scattered: &Arc<Scattered>, pack: u64) -> Option<Turn> {
        for _ in 0..FETCHES {
            assert!(scattered.turn(PackId(pack)).is_none());
            scattered.fetched(PackId(pack));
        }
        scattered.turn(PackId(pack))
    }

    #[test]
    fn a_run_is_fetched_once_some_of_it_was() {
        let scattered = Arc::new(Scattered::default());
        let turn = read_often(&scattered, 1).unwrap();
        assert!(read_often(&scattered, 1).is_none() && !scattered.is_due(PackId(1)), "it is on its way");
        drop(turn);
        assert!(scattered.turn(PackId(1)).is_none(), "it was");
        assert!(read_often(&scattered, 1).is_some(), "but not all of it");
    }

    #[test]
    fn few_are_fetched_at_a_time() {
        let scattered = Arc::new(Scattered::default());
        let turns: Vec<_> = (0..AT_ONCE as u64).map(|pack| read_often(&scattered, pack).unwrap()).collect();
        assert!(read_often(&scattered, 100).is_none() && !scattered.is_due(PackId(100)));
        drop(turns);
        assert!(scattered.is_due(PackId(100)));
        assert!(scattered.turn(PackId(100)).is_some(), "still due");
    }

    #[test]
    fn what_is_found_pays_for_more() {
        let scattered = Arc::new(Scattered::default());
        let fetched = (0..10 * u64::from(UNPAID)).filter(|pack| read_often(&scattered, *pack).is_some());
        assert_eq!(fetched.count(), UNPAID as usize);
        (0..PRICE).for_each(|_| scattered.found());
        assert!(read_often(&scattered, 5000).is_some());
        assert!(read_often(&scattered, 5001).is_none());
    }
}

//! One budget of memory for everything that holds bytes which are not yet in the store.
//!
//! Owns a count and a queue, not the memory. Whoever brings new bytes in [`acquire`](Budget::acquire)s and waits, first
//! come first served; whoever moves bytes on towards the store [`charge`](Budget::charge)s and never waits, since a
//! flush that waits for memory which only a flush can give back would wait for ever. So dirty data alone never
//! exceeds the limit, and the total exceeds it by no more than what is being compressed at the moment.
//! Lock order: the state's lock is a leaf.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::{oneshot, watch};

/// Whether memory is short.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pressure {
    /// Below the low watermark since it was last above the high one.
    Normal,
    /// The high watermark was reached: flush until the low one is.
    High,
}

/// A limit on bytes in memory, shared by everybody who holds some.
#[derive(Debug)]
pub struct Budget {
    bytes_max: u64,
    bytes_high: u64,
    bytes_low: u64,
    state: Mutex<State>,
    pressure: watch::Sender<Pressure>,
}

#[derive(Debug, Default)]
struct State {
    used: u64,
    waiting: VecDeque<Waiter>,
}

#[derive(Debug)]
struct Waiter {
    bytes: u64,
    granted: oneshot::Sender<BudgetGuard>,
}

impl Budget {
    /// A budget of `bytes_max`, with watermarks at three quarters and at half of it.
    pub fn new(bytes_max: u64) -> Arc<Budget> {
        Budget::with_watermarks(bytes_max, bytes_max / 4 * 3, bytes_max / 2)
    }

    /// A budget of `bytes_max` whose pressure is [`Pressure::High`] from `bytes_high` used until `bytes_low` used.
    pub fn with_watermarks(bytes_max: u64, bytes_high: u64, bytes_low: u64) -> Arc<Budget> {
        Arc::new(Budget {
            bytes_max,
            bytes_high,
            bytes_low: bytes_low.min(bytes_high),
            state: Mutex::default(),
            pressure: watch::Sender::new(Pressure::Normal),
        })
    }

    /// Waits until `bytes` are free and takes them, after everybody who came before. A request for more than the
    /// whole budget is granted when nothing else is in use. Dropping the future gives up the place in the queue.
    pub async fn acquire(self: &Arc<Budget>, bytes: u64) -> BudgetGuard {
        let granted = {
            let mut state = self.state.lock();
            if state.waiting.is_empty() && self.fits(&state, bytes) {
                return self.take(&mut state, bytes);
            }
            let (granted, answer) = oneshot::channel();
            state.waiting.push_back(Waiter { bytes, granted });
            answer
        };
        granted
            .await
            .expect("a waiter leaves the queue only with an answer, and the budget outlives this call")
    }

    /// Takes `bytes` if they are free and nobody waits.
    pub fn try_acquire(self: &Arc<Budget>, bytes: u64) -> Option<BudgetGuard> {
        let mut state = self.state.lock();
        (state.waiting.is_empty() && self.fits(&state, bytes)).then(|| self.take(&mut state, bytes))
    }

    /// Takes `bytes` at once even beyond the limit: only for moving bytes on, after which others are given back.
    pub fn charge(self: &Arc<Budget>, bytes: u64) -> BudgetGuard {
        self.take(&mut self.state.lock(), bytes)
    }

    /// Bytes in use.
    pub fn used_bytes(&self) -> u64 {
        self.state.lock().used
    }

    /// The limit in bytes.
    pub fn bytes_max(&self) -> u64 {
        self.bytes_max
    }

    /// Whether memory is short now.
    pub fn pressure(&self) -> Pressure {
        *self.pressure.borrow()
    }

    /// Tells when memory becomes short and when it no longer is.
    pub fn subscribe(&self) -> watch::Receiver<Pressure> {
        self.pressure.subscribe()
    }

    fn fits(&self, state: &State, bytes: u64) -> bool {
        state.used == 0 || state.used.saturating_add(bytes) <= self.bytes_max
    }

    fn take(self: &Arc<Budget>, state: &mut State, bytes: u64) -> BudgetGuard {
        state.used += bytes;
        self.mark(state);
        BudgetGuard { budget: Arc::clone(self), bytes }
    }

    fn give_back(self: &Arc<Budget>, bytes: u64) {
        let mut state = self.state.lock();
        state.used -= bytes;
        while let Some(first) = state.waiting.front() {
            if !first.granted.is_closed() && !self.fits(&state, first.bytes) {
                break;
            }
            let Some(waiter) = state.waiting.pop_front() else { break };
            let guard = self.take(&mut state, waiter.bytes);
            if let Err(mut unwanted) = waiter.granted.send(guard) {
                state.used -= unwanted.bytes;
                unwanted.bytes = 0;
            }
        }
        self.mark(&state);
    }

    fn mark(&self, state: &State) {
        let used = state.used;
        self.pressure.send_if_modified(|pressure| {
            let now = match *pressure {
                Pressure::Normal if used >= self.bytes_high => Pressure::High,
                Pressure::High if used <= self.bytes_low => Pressure::Normal,
                same => same,
            };
            std::mem::replace(pressure, now) != now
        });
    }
}

/// Bytes taken from a [`Budget`]; dropping it gives them back.
#[derive(Debug)]
pub struct BudgetGuard {
    budget: Arc<Budget>,
    bytes: u64,
}

impl BudgetGuard {
    /// Bytes held.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Moves `bytes` (at most what is held) into a guard of their own.
    #[must_use]
    pub fn split(&mut self, bytes: u64) -> BudgetGuard {
        let bytes = bytes.min(self.bytes);
        self.bytes -= bytes;
        BudgetGuard { budget: Arc::clone(&self.budget), bytes }
    }

    /// Adds the other guard's bytes, which are of the same budget.
    pub fn merge(&mut self, mut other: BudgetGuard) {
        assert!(Arc::ptr_eq(&self.budget, &other.budget), "guards of one budget");
        self.bytes += std::mem::take(&mut other.bytes);
    }
}

impl Drop for BudgetGuard {
    fn drop(&mut self) {
        if self.bytes > 0 {
            self.budget.give_back(self.bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn waiters_are_served_in_order_and_within_the_limit() {
        let budget = Budget::new(100);
        let mut first = budget.acquire(80).await;
        assert!(budget.try_acquire(30).is_none());
        let large = tokio::spawn({
            let budget = Arc::clone(&budget);
            async move { budget.acquire(50).await }
        });
        tokio::task::yield_now().await;
        assert!(budget.try_acquire(10).is_none(), "a small request must not overtake a large one for ever");
        drop(first.split(40));
        let large = large.await.unwrap();
        assert_eq!(budget.used_bytes(), 90);
        drop((first, large));
        assert_eq!(budget.used_bytes(), 0);
    }

    #[tokio::test]
    async fn a_cancelled_waiter_gives_up_its_place() {
        let budget = Budget::new(100);
        let held = budget.acquire(100).await;
        let mut waiting = Box::pin(budget.acquire(60));
        assert!(futures::poll!(&mut waiting).is_pending());
        let mut behind = Box::pin(budget.acquire(70));
        assert!(futures::poll!(&mut behind).is_pending());
        drop(waiting);
        drop(held);
        assert_eq!(behind.await.bytes(), 70);
        assert_eq!(budget.used_bytes(), 0);
    }

    #[tokio::test]
    async fn granted_but_never_looked_at_is_given_back() {
        let budget = Budget::new(100);
        let held = budget.acquire(100).await;
        let mut waiting = Box::pin(budget.acquire(60));
        assert!(futures::poll!(&mut waiting).is_pending());
        drop(held);
        assert_eq!(budget.used_bytes(), 60);
        drop(waiting);
        assert_eq!(budget.used_bytes(), 0);
    }

    #[tokio::test]
    async fn more_than_the_budget_is_granted_alone_and_charges_never_wait() {
        let budget = Budget::new(100);
        let small = budget.acquire(1).await;
        let mut huge = Box::pin(budget.acquire(1000));
        assert!(futures::poll!(&mut huge).is_pending());
        drop(small);
        let huge = huge.await;
        let moved = budget.charge(500);
        assert_eq!(budget.used_bytes(), 1500);
        drop((huge, moved));
    }

    #[tokio::test]
    async fn pressure_has_two_watermarks() {
        let budget = Budget::with_watermarks(100, 80, 40);
        let mut pressure = budget.subscribe();
        let mut guard = budget.acquire(79).await;
        assert_eq!(budget.pressure(), Pressure::Normal);
        guard.merge(budget.acquire(1).await);
        pressure.changed().await.unwrap();
        assert_eq!(*pressure.borrow_and_update(), Pressure::High);
        drop(guard.split(39));
        assert_eq!(budget.pressure(), Pressure::High);
        drop(guard.split(1));
        pressure.changed().await.unwrap();
        assert_eq!(*pressure.borrow_and_update(), Pressure::Normal);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn the_limit_holds_under_concurrency() {
        let budget = Budget::new(1000);
        let tasks: Vec<_> = (0..64u64)
            .map(|task| {
                let budget = Arc::clone(&budget);
                tokio::spawn(async move {
                    for turn in 0..100 {
                        let guard = budget.acquire(1 + (task * 31 + turn * 17) % 400).await;
                        assert!(budget.used_bytes() <= 1000);
                        tokio::task::yield_now().await;
                        drop(guard);
                    }
                })
            })
            .collect();
        for task in tasks {
            task.await.unwrap();
        }
        assert_eq!(budget.used_bytes(), 0);
    }
}

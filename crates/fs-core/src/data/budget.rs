//! One budget of memory for everything that holds bytes which are not yet in the store.
//!
//! Owns a count and a queue, not the memory. Whoever brings new bytes in [`acquire`](Budget::acquire)s and waits, first
//! come first served; whoever moves bytes on towards the store [`charge`](Budget::charge)s and never waits, since a
//! flush that waits for memory which only a flush can give back would wait for ever. So dirty data alone never
//! exceeds the limit, and the total exceeds it by no more than what is being compressed at the moment.
//!
//! While nobody brings bytes in, a part of the budget is lent to those who can give it up at any time: a [`Loan`]
//! counts like bytes in use, and is wanted back as soon as memory becomes short or somebody waits.
//! Lock order: the state's lock is a leaf.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot, watch};

/// Nothing is lent while more than this part of the budget is in use: somebody writes.
const LENDING_USED_PART: u64 = 16;

/// Whether memory is short.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pressure {
    /// Below the low watermark since it was last above the high one.
    Normal,
    /// The high watermark was reached, or somebody waits: flush until nobody does and the low one is reached.
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
    wanted_back: Notify,
}

#[derive(Debug, Default)]
struct State {
    used: u64,
    lent: u64,
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
            wanted_back: Notify::new(),
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
            self.mark(&state);
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

    /// Takes `bytes` for something that is given up when they are wanted back, if nobody needs them for anything else now.
    pub fn try_lend(self: &Arc<Budget>, bytes: u64) -> Option<Loan> {
        let mut state = self.state.lock();
        if state.lent.saturating_add(bytes) > self.lendable(&state) {
            return None;
        }
        state.lent += bytes;
        Some(Loan { budget: Arc::clone(self), bytes })
    }

    /// Most bytes that all loans together may have now.
    pub fn lendable_bytes(&self) -> u64 {
        self.lendable(&self.state.lock())
    }

    /// Waits until loans are wanted back. For one task, which sees to it.
    pub async fn wanted_back(&self) {
        self.wanted_back.notified().await;
    }

    /// Bytes in use, without those that are lent.
    pub fn used_bytes(&self) -> u64 {
        self.state.lock().used
    }

    /// Whether somebody waits for bytes.
    pub fn is_waited_for(&self) -> bool {
        !self.state.lock().waiting.is_empty()
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
        let taken = state.used + state.lent;
        taken == 0 || taken.saturating_add(bytes) <= self.bytes_max
    }

    fn lendable(&self, state: &State) -> u64 {
        if self.pressure() == Pressure::High || state.used > self.bytes_max / LENDING_USED_PART {
            return 0;
        }
        self.bytes_low.saturating_sub(state.used)
    }

    fn take(self: &Arc<Budget>, state: &mut State, bytes: u64) -> BudgetGuard {
        state.used += bytes;
        self.mark(state);
        BudgetGuard { budget: Arc::clone(self), bytes }
    }

    fn give_back(self: &Arc<Budget>, bytes: u64) {
        let mut state = self.state.lock();
        state.used -= bytes;
        self.serve(&mut state);
    }

    /// Something was given back: others may have it.
    fn serve(self: &Arc<Budget>, state: &mut State) {
        while let Some(first) = state.waiting.front() {
            if !first.granted.is_closed() && !self.fits(state, first.bytes) {
                break;
            }
            let Some(waiter) = state.waiting.pop_front() else { break };
            let guard = self.take(state, waiter.bytes);
            if let Err(mut unwanted) = waiter.granted.send(guard) {
                state.used -= unwanted.bytes;
                unwanted.bytes = 0;
            }
        }
        self.mark(state);
    }

    /// Notes whether memory is short, and asks for loans if it is.
    fn mark(&self, state: &State) {
        let used = state.used + state.lent;
        let waited_for = !state.waiting.is_empty();
        self.pressure.send_if_modified(|pressure| {
            let now = match *pressure {
                Pressure::Normal if waited_for || used >= self.bytes_high => Pressure::High,
                Pressure::High if !waited_for && used <= self.bytes_low => Pressure::Normal,
                same => same,
            };
            std::mem::replace(pressure, now) != now
        });
        if state.lent > 0 && self.pressure() == Pressure::High {
            self.wanted_back.notify_one();
        }
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

/// Bytes lent by a [`Budget`]; dropping it gives them back.
#[derive(Debug)]
pub struct Loan {
    budget: Arc<Budget>,
    bytes: u64,
}

impl Loan {
    /// Whether to give it back now.
    pub fn is_wanted_back(&self) -> bool {
        self.budget.pressure() == Pressure::High
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        let mut state = self.budget.state.lock();
        state.lent -= self.bytes;
        self.budget.serve(&mut state);
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

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

    #[tokio::test]
    async fn memory_is_short_as_long_as_somebody_waits() {
        let budget = Budget::with_watermarks(100, 80, 40);
        let mut held = budget.acquire(50).await;
        let mut waiting = Box::pin(budget.acquire(90));
        assert!(futures::poll!(&mut waiting).is_pending());
        assert_eq!((budget.pressure(), budget.is_waited_for()), (Pressure::High, true));
        drop(held.split(35));
        assert_eq!(budget.pressure(), Pressure::High);
        drop(waiting);
        drop(held);
        assert_eq!((budget.pressure(), budget.is_waited_for()), (Pressure::Normal, false));
    }

    #[tokio::test]
    async fn half_is_lent_while_nobody_writes() {
        let budget = Budget::new(160);
        assert_eq!(budget.lendable_bytes(), 80);
        let loan = budget.try_lend(80).unwrap();
        assert!(budget.try_lend(1).is_none() && !loan.is_wanted_back());
        assert_eq!((budget.used_bytes(), budget.pressure()), (0, Pressure::Normal));
        drop(loan);
        let a_little = budget.acquire(10).await;
        assert_eq!(budget.lendable_bytes(), 70);
        let more = budget.acquire(1).await;
        assert!(budget.try_lend(1).is_none(), "somebody writes");
        drop((a_little, more));
        assert_eq!(budget.lendable_bytes(), 80);
    }

    #[tokio::test]
    async fn loans_are_wanted_back_when_memory_is_short_or_somebody_waits() {
        let budget = Budget::new(160);
        let loan = budget.try_lend(80).unwrap();
        let written = budget.acquire(39).await;
        assert!(budget.wanted_back().now_or_never().is_none() && !loan.is_wanted_back());
        let more = budget.acquire(1).await;
        assert!(budget.wanted_back().now_or_never().is_some() && loan.is_wanted_back());
        assert_eq!(budget.pressure(), Pressure::High);
        drop(loan);
        assert_eq!(budget.pressure(), Pressure::Normal);
        drop((written, more));

        let loan = budget.try_lend(80).unwrap();
        let mut large = Box::pin(budget.acquire(100));
        assert!(futures::poll!(&mut large).is_pending());
        assert!(budget.wanted_back().now_or_never().is_some() && loan.is_wanted_back());
        assert!(budget.try_lend(1).is_none());
        drop(loan);
        assert_eq!(large.await.bytes(), 100);
    }

    fn taken(budget: &Budget) -> u64 {
        let state = budget.state.lock();
        state.used + state.lent
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn the_limit_holds_under_concurrency() {
        let budget = Budget::new(1000);
        let tasks: Vec<_> = (0..64u64)
            .map(|task| {
                let budget = Arc::clone(&budget);
                tokio::spawn(async move {
                    for turn in 0..100 {
                        let bytes = 1 + (task * 31 + turn * 17) % 400;
                        if task % 4 == 0 {
                            let loan = budget.try_lend(bytes);
                            tokio::task::yield_now().await;
                            drop(loan);
                            continue;
                        }
                        let guard = budget.acquire(bytes).await;
                        assert!(taken(&budget) <= 1000);
                        tokio::task::yield_now().await;
                        drop(guard);
                    }
                })
            })
            .collect();
        for task in tasks {
            task.await.unwrap();
        }
        assert_eq!(taken(&budget), 0);
    }
}

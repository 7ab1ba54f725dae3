//! Blocks that were fetched ahead of a reader, until it comes for them.
//!
//! They are kept apart from the cache: there, blocks that nobody has read yet are the first to go, and a stream that is
//! read once would push out what is read often. Who reads a block to its end takes it; the kernel has its bytes then.
//! Room is claimed before a fetch begins, and who finds none does not read ahead. Blocks that one fetch brought lie in one
//! buffer, so their room is free again when the last of them is gone. What nobody came for makes room after a while.
//! Who reads backward, or leaves something out, *holds* blocks instead: they stay until that is dropped, however they are read.
//!
//! Room beyond the limit is borrowed from the budget of what is on its way to the store, and given back when that is
//! wanted: the blocks are dropped, and their readers fetch them again.
//! Lock order: the state before the budget's.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use hashbrown::HashMap;
use parking_lot::Mutex;
use tokio::time::Instant;

use super::budget::{Budget, Loan};
use super::cache::BlockKey;
use super::pieces::Part;

/// A block that nobody came for in this time gives up its room.
const STALE_AFTER: Duration = Duration::from_secs(5);

/// Plain blocks up to a limit of bytes, those on their way included.
#[derive(Debug, Default)]
pub(super) struct Ahead {
    state: Mutex<State>,
    /// Bytes of all rooms that are not borrowed. Grows under the lock only.
    claimed: Arc<AtomicU64>,
}

#[derive(Debug, Default)]
struct State {
    blocks: HashMap<BlockKey, Waiting>,
    /// In the order in which they came; those that were taken are still in it for a while.
    order: VecDeque<(BlockKey, Instant)>,
    bytes: u64,
}

/// A block that waits for its reader.
#[derive(Debug)]
struct Waiting {
    plain: Part,
    since: Instant,
    room: Arc<Room>,
}

/// Room for the blocks of a fetch; kept by each of them, and given back when it is dropped.
#[derive(Debug)]
pub(super) struct Room {
    space: Space,
    /// Whether who [holds](Held) the blocks has let them go, if somebody does.
    let_go: Option<Arc<AtomicBool>>,
}

#[derive(Debug)]
enum Space {
    Own { claimed: Arc<AtomicU64>, bytes: u64 },
    Borrowed(Loan),
}

impl Room {
    fn is_wanted_back(&self) -> bool {
        let by_lender = match &self.space {
            Space::Own { .. } => false,
            Space::Borrowed(loan) => loan.is_wanted_back(),
        };
        by_lender || self.let_go.as_ref().is_some_and(|let_go| let_go.load(Ordering::Relaxed))
    }

    /// Whether the blocks stay when they are read to their end.
    pub(super) fn is_held(&self) -> bool {
        self.let_go.is_some()
    }

    /// For blocks at `keys`, which stay until what is returned is dropped.
    pub(super) fn hold(mut self, ahead: &Arc<Ahead>, keys: Vec<BlockKey>) -> (Room, Held) {
        let let_go = Arc::default();
        self.let_go = Some(Arc::clone(&let_go));
        (self, Held { ahead: Arc::clone(ahead), keys, let_go })
    }
}

impl Drop for Space {
    fn drop(&mut self) {
        if let Space::Own { claimed, bytes } = self {
            claimed.fetch_sub(*bytes, Ordering::Relaxed);
        }
    }
}

/// Keeps blocks that were fetched ahead of a reader, as far as their room is not wanted back, until it is dropped.
#[derive(Debug)]
pub struct Held {
    ahead: Arc<Ahead>,
    keys: Vec<BlockKey>,
    let_go: Arc<AtomicBool>,
}

impl Drop for Held {
    fn drop(&mut self) {
        let mut state = self.ahead.state.lock();
        // What is on its way finds no room any more.
        self.let_go.store(true, Ordering::Relaxed);
        for key in &self.keys {
            if state.blocks.get(key).is_some_and(|block| block.room.is_wanted_back()) {
                state.remove(*key);
            }
        }
    }
}

impl Ahead {
    /// Room for `bytes`, if `bytes_max` leave some or `lender` has some.
    pub(super) fn claim(&self, bytes: u64, bytes_max: u64, lender: &Arc<Budget>) -> Option<Room> {
        let mut state = self.state.lock();
        loop {
            if self.bytes_in_use() + bytes <= bytes_max {
                self.claimed.fetch_add(bytes, Ordering::Relaxed);
                let space = Space::Own { claimed: Arc::clone(&self.claimed), bytes };
                return Some(Room { space, let_go: None });
            }
            if let Some(loan) = lender.try_lend(bytes) {
                return Some(Room { space: Space::Borrowed(loan), let_go: None });
            }
            if !state.drop_stale() {
                return None;
            }
        }
    }

    /// Drops the blocks in borrowed room.
    fn give_back(&self) {
        let mut state = self.state.lock();
        let State { blocks, bytes, .. } = &mut *state;
        blocks.retain(|_, block| {
            let stays = matches!(block.room.space, Space::Own { .. });
            *bytes -= if stays { 0 } else { block.plain.len() as u64 };
            stays
        });
    }

    /// As [`Ahead::give_back`], each time when `lender` wants it. For one task.
    pub(super) async fn give_back_when_wanted(self: Arc<Ahead>, lender: Arc<Budget>) {
        loop {
            lender.wanted_back().await;
            self.give_back();
        }
    }

    /// Keeps a block for whoever reads it, unless its room is wanted back.
    pub(super) fn put(&self, key: BlockKey, plain: Part, room: &Arc<Room>) {
        let mut state = self.state.lock();
        if room.is_wanted_back() {
            return;
        }
        let now = Instant::now();
        state.remove(key);
        state.bytes += plain.len() as u64;
        state.blocks.insert(key, Waiting { plain, since: now, room: Arc::clone(room) });
        state.order.push_back((key, now));
        if state.order.len() > 2 * state.blocks.len() + 64 {
            let State { blocks, order, .. } = &mut *state;
            order.retain(|(key, at)| blocks.get(key).is_some_and(|block| block.since == *at));
        }
    }

    /// Whether the block is here, and as long as expected.
    pub(super) fn has(&self, key: BlockKey, plain_len: u32) -> bool {
        self.state.lock().blocks.get(&key).is_some_and(|block| block.plain.len() == plain_len as usize)
    }

    /// The block, if it is here and as long as expected. It is gone afterwards if it is read up to its end, which is
    /// `read_to`, and nobody holds it.
    pub(super) fn get(&self, key: BlockKey, plain_len: u32, read_to: u32) -> Option<Part> {
        let mut state = self.state.lock();
        let plain = state.blocks.get(&key)?.plain.clone();
        if plain.len() != plain_len as usize {
            return None;
        }
        if read_to >= plain_len {
            state.was_read(key);
        }
        Some(plain)
    }

    /// Somebody has read the block to its end.
    pub(super) fn was_read(&self, key: BlockKey) {
        self.state.lock().was_read(key);
    }

    /// Bytes of the blocks that are here or on their way, without those in borrowed room.
    pub(super) fn bytes_in_use(&self) -> u64 {
        self.claimed.load(Ordering::Relaxed)
    }

    /// Bytes of the blocks that are here.
    pub(super) fn bytes(&self) -> u64 {
        self.state.lock().bytes
    }
}

impl State {
    fn was_read(&mut self, key: BlockKey) {
        if self.blocks.get(&key).is_some_and(|block| !block.room.is_held()) {
            self.remove(key);
        }
    }

    fn remove(&mut self, key: BlockKey) {
        if let Some(block) = self.blocks.remove(&key) {
            self.bytes -= block.plain.len() as u64;
        }
    }

    /// Drops the oldest block if it is stale; whether there was one.
    fn drop_stale(&mut self) -> bool {
        while let Some((key, at)) = self.order.front().copied() {
            let here = self.blocks.get(&key).is_some_and(|block| block.since == at);
            if here && at.elapsed() < STALE_AFTER {
                return false;
            }
            self.order.pop_front();
            if here {
                self.remove(key);
                return true;
            }
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::Pressure;
    use crate::types::PackId;

    const LEN: u32 = 1000;

    fn key(number: u32) -> BlockKey {
        (PackId(1), number * LEN)
    }

    fn put(ahead: &Ahead, number: u32, room: &Arc<Room>) {
        ahead.put(key(number), Part::all(vec![7; LEN as usize].into()), room);
    }

    fn room(ahead: &Ahead, blocks: u64) -> Option<Arc<Room>> {
        ahead.claim(blocks * u64::from(LEN), 10_000, &Budget::new(0)).map(Arc::new)
    }

    #[tokio::test(start_paused = true)]
    async fn blocks_stay_until_they_are_read_to_their_end() {
        let ahead = Ahead::default();
        let room = room(&ahead, 2).unwrap();
        put(&ahead, 1, &room);
        assert!(ahead.has(key(1), LEN) && !ahead.has(key(1), LEN - 1));
        assert_eq!(ahead.get(key(1), LEN, LEN / 2).unwrap().len(), 1000);
        assert_eq!(ahead.get(key(1), LEN, LEN).unwrap().len(), 1000);
        assert!(ahead.get(key(1), LEN, LEN).is_none());
        put(&ahead, 2, &room);
        ahead.was_read(key(2));
        assert_eq!((ahead.bytes(), ahead.has(key(2), LEN)), (0, false));
    }

    #[tokio::test(start_paused = true)]
    async fn blocks_that_are_held_stay_until_they_are_let_go() {
        let ahead = Arc::new(Ahead::default());
        let claimed = ahead.claim(2000, 2000, &Budget::new(0)).expect("there is some");
        let (room, held) = claimed.hold(&ahead, vec![key(1), key(2)]);
        let room = Arc::new(room);
        put(&ahead, 1, &room);
        assert!(ahead.get(key(1), LEN, LEN).is_some());
        ahead.was_read(key(1));
        assert!(ahead.has(key(1), LEN), "its first half is read later");
        drop(held);
        assert!(!ahead.has(key(1), LEN));
        put(&ahead, 2, &room);
        assert!(!ahead.has(key(2), LEN), "it came too late");
        drop(room);
        assert_eq!((ahead.bytes(), ahead.bytes_in_use()), (0, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn room_is_bounded_and_comes_back_from_readers_and_after_a_while() {
        let ahead = Ahead::default();
        for fetch in 0..5 {
            let room = room(&ahead, 2).expect("there is some");
            (0..2).for_each(|block| put(&ahead, 2 * fetch + block, &room));
        }
        assert!(room(&ahead, 1).is_none());
        ahead.was_read(key(3));
        assert!(room(&ahead, 1).is_none(), "its neighbour keeps it in memory");
        ahead.was_read(key(2));
        let claimed = room(&ahead, 2).expect("a fetch's room");
        assert!(room(&ahead, 1).is_none());
        drop(claimed);
        tokio::time::advance(STALE_AFTER).await;
        assert!(room(&ahead, 6).is_some());
        assert_eq!(ahead.bytes(), 4000, "no more is dropped than needed");
        assert!(!ahead.has(key(1), LEN) && ahead.has(key(9), LEN));
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_borrowed_is_given_back_when_it_is_wanted() {
        let ahead = Ahead::default();
        let budget = Budget::new(16_000);
        let claim = |blocks: u64| ahead.claim(blocks * u64::from(LEN), 2000, &budget).map(Arc::new);
        let own = claim(2).expect("within the limit");
        let first = claim(4).expect("borrowed");
        let second = claim(4).expect("borrowed");
        assert!(claim(1).is_none());
        put(&ahead, 0, &own);
        put(&ahead, 1, &first);
        drop((own, first));
        let written = budget.acquire(5000).await;
        assert_eq!(budget.pressure(), Pressure::High);
        budget.wanted_back().await;
        ahead.give_back();
        assert!(ahead.has(key(0), LEN) && !ahead.has(key(1), LEN));
        assert_eq!(ahead.bytes(), 1000);
        // What was on its way has no room any more.
        put(&ahead, 2, &second);
        drop(second);
        assert!(!ahead.has(key(2), LEN) && claim(1).is_none());
        assert_eq!((budget.pressure(), budget.used_bytes()), (Pressure::Normal, 5000));
        drop(written);
        assert!(claim(8).is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn what_was_read_is_forgotten() {
        let ahead = Ahead::default();
        for number in 0..10_000 {
            put(&ahead, number, &room(&ahead, 1).unwrap());
            ahead.was_read(key(number));
        }
        assert!(ahead.state.lock().order.len() <= 64);
        assert_eq!(ahead.bytes_in_use(), 0);
    }
}

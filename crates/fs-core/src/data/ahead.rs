//! Blocks that were fetched ahead of a reader, until it comes for them.
//!
//! They are kept apart from the cache: there, blocks that nobody has read yet are the first to go, and a stream that is
//! read once would push out what is read often. Who reads a block to its end takes it; the kernel has its bytes then.
//! Room is claimed before a fetch begins, and who finds none does not read ahead. What nobody came for makes room after
//! a while.
//! Lock order: the state is a leaf.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hashbrown::HashMap;
use parking_lot::Mutex;
use tokio::time::Instant;

use super::cache::BlockKey;

/// A block that nobody came for in this time gives up its room.
const STALE_AFTER: Duration = Duration::from_secs(5);

/// Plain blocks up to a limit of bytes, those on their way included.
#[derive(Debug, Default)]
pub(super) struct Ahead {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    blocks: HashMap<BlockKey, (Bytes, Instant)>,
    /// In the order in which they came; those that were taken are still in it for a while.
    order: VecDeque<(BlockKey, Instant)>,
    bytes: u64,
    /// Claimed for blocks that are on their way.
    claimed: u64,
}

/// Room for a fetch; given back when it is dropped, when what was fetched counts by itself.
#[derive(Debug)]
pub(super) struct Room {
    ahead: Arc<Ahead>,
    bytes: u64,
}

impl Drop for Room {
    fn drop(&mut self) {
        self.ahead.state.lock().claimed -= self.bytes;
    }
}

impl Ahead {
    /// Room for `bytes`, if `bytes_max` leave some.
    pub(super) fn claim(self: &Arc<Ahead>, bytes: u64, bytes_max: u64) -> Option<Room> {
        let mut state = self.state.lock();
        while state.bytes + state.claimed + bytes > bytes_max {
            if !state.drop_stale() {
                return None;
            }
        }
        state.claimed += bytes;
        Some(Room { ahead: Arc::clone(self), bytes })
    }

    /// Keeps a block for whoever reads it.
    pub(super) fn put(&self, key: BlockKey, plain: Bytes) {
        let mut state = self.state.lock();
        let now = Instant::now();
        state.bytes += plain.len() as u64;
        if let Some((old, _)) = state.blocks.insert(key, (plain, now)) {
            state.bytes -= old.len() as u64;
        }
        state.order.push_back((key, now));
        if state.order.len() > 2 * state.blocks.len() + 64 {
            let State { blocks, order, .. } = &mut *state;
            order.retain(|(key, at)| blocks.get(key).is_some_and(|(_, put_at)| put_at == at));
        }
    }

    /// Whether the block is here, and as long as expected.
    pub(super) fn has(&self, key: BlockKey, plain_len: u32) -> bool {
        self.state.lock().blocks.get(&key).is_some_and(|(plain, _)| plain.len() == plain_len as usize)
    }

    /// The block, if it is here and as long as expected. It is gone afterwards if it is read up to its end, which is
    /// `read_to`.
    pub(super) fn get(&self, key: BlockKey, plain_len: u32, read_to: u32) -> Option<Bytes> {
        let mut state = self.state.lock();
        let plain = state.blocks.get(&key)?.0.clone();
        if plain.len() != plain_len as usize {
            return None;
        }
        if read_to >= plain_len {
            state.remove(key);
        }
        Some(plain)
    }

    /// Somebody has read the block to its end.
    pub(super) fn was_read(&self, key: BlockKey) {
        self.state.lock().remove(key);
    }

    /// Bytes of the blocks that are here or on their way.
    pub(super) fn bytes_in_use(&self) -> u64 {
        let state = self.state.lock();
        state.bytes + state.claimed
    }

    /// Bytes of the blocks that are here.
    pub(super) fn bytes(&self) -> u64 {
        self.state.lock().bytes
    }
}

impl State {
    fn remove(&mut self, key: BlockKey) {
        if let Some((plain, _)) = self.blocks.remove(&key) {
            self.bytes -= plain.len() as u64;
        }
    }

    /// Drops the oldest block if it is stale; whether there was one.
    fn drop_stale(&mut self) -> bool {
        while let Some((key, at)) = self.order.front().copied() {
            let here = self.blocks.get(&key).is_some_and(|(_, put_at)| *put_at == at);
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
    use crate::types::PackId;

    const LEN: u32 = 1000;

    fn key(number: u32) -> BlockKey {
        (PackId(1), number * LEN)
    }

    fn put(ahead: &Ahead, number: u32) {
        ahead.put(key(number), Bytes::from(vec![7; LEN as usize]));
    }

    #[tokio::test(start_paused = true)]
    async fn blocks_stay_until_they_are_read_to_their_end() {
        let ahead = Ahead::default();
        put(&ahead, 1);
        assert!(ahead.has(key(1), LEN) && !ahead.has(key(1), LEN - 1));
        assert_eq!(ahead.get(key(1), LEN, LEN / 2).unwrap().len(), 1000);
        assert_eq!(ahead.get(key(1), LEN, LEN).unwrap().len(), 1000);
        assert_eq!(ahead.get(key(1), LEN, LEN), None);
        put(&ahead, 2);
        ahead.was_read(key(2));
        assert_eq!((ahead.bytes(), ahead.has(key(2), LEN)), (0, false));
    }

    #[tokio::test(start_paused = true)]
    async fn room_is_bounded_and_comes_back_from_readers_and_after_a_while() {
        let ahead = Arc::new(Ahead::default());
        let room = ahead.claim(10_000, 10_000).expect("all of it");
        assert!(ahead.claim(1, 10_000).is_none());
        (0..10).for_each(|number| put(&ahead, number));
        drop(room);
        assert!(ahead.claim(1, 10_000).is_none());
        ahead.was_read(key(3));
        let room = ahead.claim(1000, 10_000).expect("a block's room");
        assert!(ahead.claim(1, 10_000).is_none());
        drop(room);
        tokio::time::advance(STALE_AFTER).await;
        assert!(ahead.claim(5000, 10_000).is_some());
        assert_eq!(ahead.bytes(), 5000, "no more is dropped than needed");
        assert!(!ahead.has(key(0), LEN) && ahead.has(key(9), LEN));
    }

    #[tokio::test(start_paused = true)]
    async fn what_was_read_is_forgotten() {
        let ahead = Ahead::default();
        for number in 0..10_000 {
            put(&ahead, number);
            ahead.was_read(key(number));
        }
        assert!(ahead.state.lock().order.len() <= 64);
    }
}

//! The memory cache of plain blocks.
//!
//! A block is its pack and where it begins there: packs never change, so nothing is ever invalidated. Cached bytes own
//! their memory exactly (nothing pins a larger buffer), so the limit is what is really used.

use bytes::Bytes;
use quick_cache::sync::{Cache, DefaultLifecycle};
use quick_cache::{DefaultHashBuilder, OptionsBuilder, Weighter};

use crate::types::PackId;

/// Which block: its pack and its first byte there.
pub(super) type BlockKey = (PackId, u32);

/// What an entry costs besides its bytes: key, handle, hash table, allocation.
const ENTRY_BYTES: u64 = 128;
/// A shard holds at least this many blocks, so that no block is too heavy for it.
const SHARD_BLOCKS_MIN: u64 = 32;

#[derive(Debug, Clone)]
struct BlockWeighter;

impl Weighter<BlockKey, Bytes> for BlockWeighter {
    fn weight(&self, _: &BlockKey, plain: &Bytes) -> u64 {
        plain.len() as u64 + ENTRY_BYTES
    }
}

/// Plain blocks up to a limit of bytes; old and rarely read ones make room.
#[derive(Debug)]
pub(super) struct MemoryCache {
    /// Nothing when the limit is 0.
    blocks: Option<Cache<BlockKey, Bytes, BlockWeighter>>,
}

impl MemoryCache {
    /// A cache of at most `bytes_max` for blocks of at most `block_bytes`.
    pub(super) fn new(bytes_max: u64, block_bytes: u32) -> MemoryCache {
        if bytes_max == 0 {
            return MemoryCache { blocks: None };
        }
        let block_bytes = u64::from(block_bytes) + ENTRY_BYTES;
        let shards = (bytes_max / (SHARD_BLOCKS_MIN * block_bytes)).clamp(1, 64);
        // Rounded down to the power of two that the cache would round up to, and the limit to a multiple of it.
        let shards = 1 << shards.ilog2();
        let bytes_max = bytes_max / shards * shards;
        // Blocks of small files are far below the full size: the estimate serves the number of shards and of ghosts.
        let items = (bytes_max / block_bytes * 4).max(SHARD_BLOCKS_MIN * shards);
        let options = OptionsBuilder::new()
            .shards(usize::try_from(shards).expect("at most 64"))
            .estimated_items_capacity(usize::try_from(items).unwrap_or(usize::MAX))
            .weight_capacity(bytes_max)
            .build()
            .expect("items and weight are given");
        let blocks = Cache::with_options(
            options,
            BlockWeighter,
            DefaultHashBuilder::default(),
            DefaultLifecycle::default(),
        );
        MemoryCache { blocks: Some(blocks) }
    }

    /// Whether anything can be kept at all.
    pub(super) fn is_on(&self) -> bool {
        self.blocks.is_some()
    }

    /// The block, if it is here and as long as expected.
    pub(super) fn get(&self, key: BlockKey, plain_len: u32) -> Option<Bytes> {
        self.blocks.as_ref()?.get(&key).filter(|plain| plain.len() == plain_len as usize)
    }

    /// Keeps a block whose bytes are nobody else's.
    pub(super) fn insert_owned(&self, key: BlockKey, plain: Bytes) {
        if let Some(blocks) = &self.blocks {
            blocks.insert(key, plain);
        }
    }

    /// Keeps a copy of a block that is part of something larger.
    pub(super) fn insert_copy(&self, key: BlockKey, plain: &[u8]) {
        if let Some(blocks) = &self.blocks {
            blocks.insert(key, Bytes::copy_from_slice(plain));
        }
    }

    /// Bytes in use, entries included.
    pub(super) fn bytes(&self) -> u64 {
        self.blocks.as_ref().map_or(0, Cache::weight)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn the_limit_is_exact_while_many_threads_insert() {
        for limit in [40_000u64, 1 << 20, 10_000_000] {
            let cache = Arc::new(MemoryCache::new(limit, 4096));
            std::thread::scope(|scope| {
                for thread in 0..4u64 {
                    let cache = &cache;
                    scope.spawn(move || {
                        for number in 0..3000u32 {
                            let len = 1 + (number as usize * 37) % 4096;
                            cache.insert_copy((PackId(thread), number), &vec![1; len]);
                            assert!(cache.bytes() <= limit);
                            cache.get((PackId(thread), number / 2), 1);
                        }
                    });
                }
            });
            assert!(cache.bytes() > limit / 2, "the room is used: {} of {limit}", cache.bytes());
        }
    }

    #[test]
    fn what_is_kept_comes_back_without_a_copy_and_a_wrong_length_does_not() {
        let cache = MemoryCache::new(1 << 20, 4096);
        let plain = Bytes::from(vec![7; 100]);
        cache.insert_owned((PackId(1), 64), plain.clone());
        assert_eq!(cache.get((PackId(1), 64), 100).unwrap().as_ptr(), plain.as_ptr());
        assert_eq!(cache.get((PackId(1), 64), 99), None);
        let off = MemoryCache::new(0, 4096);
        off.insert_owned((PackId(1), 64), plain);
        assert_eq!(off.get((PackId(1), 64), 100), None);
    }
}

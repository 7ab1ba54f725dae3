//! Memory for the bytes of large writes, used again and again.
//!
//! The kernel clears every page that a process touches for the first time, and the allocator gives large blocks back as
//! soon as they are free. At a GiB of writes a second that costs as much as copying them, so blocks of the size of the
//! largest write are kept here. Bound: as many as are in use, which the memory budget bounds, and [`IDLE_MAX`] at least.

use std::sync::Arc;

use bytes::Bytes;
use parking_lot::Mutex;

/// Capacity of a block: the largest write.
const BLOCK_BYTES: usize = 1 << 20;
/// Smaller writes would waste more than half of a block.
const POOLED_BYTES_MIN: usize = BLOCK_BYTES / 2;
/// Blocks that are kept while nobody writes.
const IDLE_MAX: usize = 32;

#[derive(Debug, Default)]
struct Pool {
    free: Vec<Vec<u8>>,
    /// Blocks in use.
    used: usize,
}

/// Copies bytes out of requests.
#[derive(Debug, Default)]
pub(crate) struct Buffers {
    pool: Arc<Mutex<Pool>>,
}

impl Buffers {
    /// A copy of `data`.
    pub(crate) fn copy(&self, data: &[u8]) -> Bytes {
        if !(POOLED_BYTES_MIN..=BLOCK_BYTES).contains(&data.len()) {
            return Bytes::copy_from_slice(data);
        }
        let kept = {
            let mut pool = self.pool.lock();
            pool.used += 1;
            pool.free.pop()
        };
        let mut block = kept.unwrap_or_else(|| Vec::with_capacity(BLOCK_BYTES));
        block.extend_from_slice(data);
        Bytes::from_owner(Block { block, pool: Arc::clone(&self.pool) })
    }
}

/// A block in use; goes back when the last part of it is dropped.
struct Block {
    block: Vec<u8>,
    pool: Arc<Mutex<Pool>>,
}

impl AsRef<[u8]> for Block {
    fn as_ref(&self) -> &[u8] {
        &self.block
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        let mut block = std::mem::take(&mut self.block);
        block.clear();
        let mut pool = self.pool.lock();
        pool.free.push(block);
        pool.used -= 1;
        let kept = pool.used.max(IDLE_MAX).min(pool.free.len());
        let surplus = pool.free.split_off(kept);
        drop(pool);
        drop(surplus);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_used_again_when_its_last_part_is_dropped() {
        let buffers = Buffers::default();
        let first = buffers.copy(&vec![1; BLOCK_BYTES]);
        let at = first.as_ptr();
        let part = first.slice(5..9);
        drop(first);
        let second = buffers.copy(&vec![2; BLOCK_BYTES]);
        assert_ne!(second.as_ptr(), at);
        assert_eq!(part, [1; 4].as_slice());
        drop(part);
        let third = buffers.copy(&vec![3; POOLED_BYTES_MIN]);
        assert_eq!((third.as_ptr(), third.len()), (at, POOLED_BYTES_MIN));
        assert!(third.iter().all(|byte| *byte == 3));
    }

    #[test]
    fn small_writes_take_no_block_and_few_blocks_are_kept_when_all_are_free() {
        let buffers = Buffers::default();
        drop(buffers.copy(&[1; 4096]));
        assert!(buffers.pool.lock().free.is_empty());
        let data = vec![7; POOLED_BYTES_MIN];
        let copies = || -> Vec<Bytes> { (0..IDLE_MAX + 3).map(|_| buffers.copy(&data)).collect() };
        let (many, others) = (copies(), copies());
        drop(many);
        assert_eq!(buffers.pool.lock().free.len(), IDLE_MAX + 3);
        drop(others);
        assert_eq!(buffers.pool.lock().free.len(), IDLE_MAX);
    }
}

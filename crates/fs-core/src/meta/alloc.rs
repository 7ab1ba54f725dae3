//! Inode numbers.
//!
//! A session reserves blocks of numbers from the volume's allocator and hands them out in runs, one run a directory at a
//! time, so that the inodes of one directory lie close together and readdirplus reads them as one range. A directory's
//! next run is twice as long as its last one. Numbers that are reserved and not used are lost; there are 2^64.

use hashbrown::HashMap;
use parking_lot::Mutex;
use rfs_kv::{Kv, transact};

use crate::types::{Error, ErrorKind, Ino, Result};

use super::{key, record};

/// Numbers that a session reserves at a time.
const BLOCK: u64 = 1 << 16;
/// Length of a directory's first run, and of its longest.
const RUN_MIN: u64 = 16;
const RUN_MAX: u64 = 1024;
/// Directories whose runs are remembered; beyond, all runs are forgotten and their rest is lost.
const DIRECTORIES_MAX: usize = 16 << 10;

/// Numbers that are not yet used: `next..end`.
#[derive(Debug, Default, Clone, Copy)]
struct Run {
    next: u64,
    end: u64,
}

impl Run {
    fn left(self) -> u64 {
        self.end - self.next
    }
}

#[derive(Default)]
struct State {
    block: Run,
    /// The open run of a directory, and how long it was at first.
    directories: HashMap<Ino, (Run, u64)>,
}

impl State {
    /// The next number for a child of `dir`; `None` when a new block must be reserved first.
    fn take(&mut self, dir: Ino) -> Option<Ino> {
        let last_len = match self.directories.get_mut(&dir) {
            Some((run, _)) if run.left() > 0 => {
                run.next += 1;
                return Some(Ino(run.next - 1));
            }
            Some((_, len)) => *len,
            None => 0,
        };
        let len = (last_len * 2).clamp(RUN_MIN, RUN_MAX);
        if self.block.left() < len {
            return None;
        }
        if self.directories.len() >= DIRECTORIES_MAX && last_len == 0 {
            self.directories.clear();
        }
        let first = self.block.next;
        self.block.next += len;
        self.directories.insert(dir, (Run { next: first + 1, end: first + len }, len));
        Some(Ino(first))
    }
}

/// The inode numbers that this session has reserved.
#[derive(Default)]
pub(super) struct InodeNumbers {
    state: Mutex<State>,
    /// Held while a block is reserved, so that one caller does it and the others wait for it.
    reserving: tokio::sync::Mutex<()>,
}

impl InodeNumbers {
    /// A number that was never used, for a child of `dir`.
    pub(super) async fn take(&self, kv: &dyn Kv, dir: Ino) -> Result<Ino> {
        loop {
            if let Some(ino) = self.state.lock().take(dir) {
                return Ok(ino);
            }
            let _reserving = self.reserving.lock().await;
            if let Some(ino) = self.state.lock().take(dir) {
                return Ok(ino);
            }
            let block = reserve(kv).await?;
            self.state.lock().block = block;
        }
    }
}

/// Reserves a block. Replay-safe: a second run reserves another one.
async fn reserve(kv: &dyn Kv) -> Result<Run> {
    transact(kv, |txn, _| async move {
        let value = txn.get(&key::NEXT_INO).await?;
        let next = value.as_deref().map(record::decode_next).transpose()?;
        let next = next.ok_or_else(|| Error::new(ErrorKind::Io, "damaged metadata: no inode allocator"))?;
        let end = next
            .checked_add(BLOCK)
            .ok_or_else(|| Error::new(ErrorKind::NoSpace, "all inode numbers were used"))?;
        txn.set(&key::NEXT_INO, &record::encode_next(end));
        Ok::<_, Error>(Run { next, end })
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_directory_gets_runs_of_its_own_that_grow() {
        let mut state = State { block: Run { next: 100, end: 100_000 }, ..State::default() };
        let a: Vec<u64> = (0..16).map(|_| state.take(Ino(1)).unwrap().0).collect();
        assert_eq!(a, (100..116).collect::<Vec<_>>());
        assert_eq!(state.take(Ino(2)), Some(Ino(116)));
        let a: Vec<u64> = (0..32).map(|_| state.take(Ino(1)).unwrap().0).collect();
        assert_eq!(a, (132..164).collect::<Vec<_>>());
        assert_eq!(state.take(Ino(2)), Some(Ino(117)));
    }

    #[test]
    fn an_empty_block_asks_for_another() {
        let mut state = State::default();
        assert_eq!(state.take(Ino(1)), None);
    }
}

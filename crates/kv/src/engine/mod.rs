//! Parts that engines in this process are built from: what a transaction remembers until its commit
//! ([`TxnBuffer`]), the transaction around it ([`BufferedTxn`]), recent versions of keys with conflict detection
//! ([`Memtable`]), merged range reads ([`read_range`]) and watches ([`Watches`]).
//!
//! Knows nothing of files, threads or time: the engine brings those. Nothing here waits.

mod buffer;
mod memtable;
mod range;
mod txn;
mod watches;

pub use buffer::{Change, Commit, CurrentState, Own, TxnBuffer, WriteOp};
pub use memtable::{Lookup, Memtable, ReadSet};
pub use range::{Chunk, Source, read_key, read_range};
pub use txn::{BufferedTxn, Snapshot};
pub use watches::Watches;

use crate::Versionstamp;

/// The versionstamp of the commit that got `version`.
pub fn stamp_of(version: u64) -> Versionstamp {
    let mut stamp = [0; 10];
    stamp[..8].copy_from_slice(&version.to_be_bytes());
    Versionstamp(stamp)
}

#[cfg(test)]
mod tests;

//! statfs.

use crate::meta::Meta;
use crate::types::Result;

/// What the volume holds and may hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Statfs {
    /// Most allocated bytes; `None` without limit.
    pub capacity: Option<u64>,
    /// Allocated bytes of all files, those unlinked but still open included.
    pub used_bytes: u64,
    /// Most inodes; `None` without limit.
    pub inodes_max: Option<u64>,
    /// Inodes, those unlinked but still open included.
    pub inodes_used: u64,
}

impl Meta {
    /// What the volume holds, as it is stored: bytes that wait in memory to be written are not in it.
    pub async fn statfs(&self) -> Result<Statfs> {
        let totals = self.totals().await?;
        let limits = self.usage.limits();
        Ok(Statfs {
            capacity: limits.capacity,
            used_bytes: u64::try_from(totals.bytes).unwrap_or(0),
            inodes_max: limits.inodes,
            inodes_used: u64::try_from(totals.inodes).unwrap_or(0),
        })
    }
}

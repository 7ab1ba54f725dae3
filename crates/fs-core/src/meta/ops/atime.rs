//! Access times.

use rfs_kv::Txn;

use crate::meta::inode::get_inode;
use crate::meta::key::Field;
use crate::meta::{Meta, key, record};
use crate::types::{ErrorKind, Ino, Result, Timestamp};

impl Meta {
    /// Sets the access time after a read; the caller has decided that it is due (relatime). Does not change ctime.
    ///
    /// Reads the inode's record, so it conflicts with its removal. Replay-safe: sets. Writes 1 key.
    ///
    /// # Errors
    /// `Stale`.
    pub async fn touch_atime(&self, ino: Ino, atime: Timestamp) -> Result<()> {
        self.mutate(|txn| async move { touch_atime_in(&*txn, ino, atime).await }).await
    }
}

pub(in crate::meta) async fn touch_atime_in(txn: &dyn Txn, ino: Ino, atime: Timestamp) -> Result<()> {
    get_inode(txn, ino).await?.ok_or(ErrorKind::Stale)?;
    txn.set(&key::inode(ino, Field::Atime), &record::encode_atime(atime));
    Ok(())
}

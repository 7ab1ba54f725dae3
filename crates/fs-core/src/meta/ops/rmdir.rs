//! rmdir.

use rfs_kv::Txn;

use crate::meta::inode::{
    Entry, check_empty, check_flags, directory, drop_name, get_dentry, load, named, touch_directory,
};
use crate::meta::key::Field;
use crate::meta::{Meta, Unlinked, key};
use crate::types::{ErrorKind, Ino, Kind, Name, Result, SessionId, Timestamp};

impl Meta {
    /// Removes an empty directory (rmdir(2)). It becomes an orphan of this session: whoever has it open can still stat
    /// it and read its emptiness, until [`Meta::reap`].
    ///
    /// Reads the range of its dentries and writes its record, which every creation in it reads: a creation and a
    /// removal at the same time cannot both succeed. Writes 6 keys.
    ///
    /// # Errors
    /// `NotFound`; `NotDirectory`; `NotEmpty`; `NotPermitted` where flags forbid it.
    pub async fn rmdir(&self, parent: Ino, name: &Name) -> Result<Unlinked> {
        let now = self.now();
        let session = self.session()?.id();
        self.mutate(|txn| async move { rmdir_in(&*txn, parent, name, now, session).await }).await
    }
}

pub(in crate::meta) async fn rmdir_in(
    txn: &dyn Txn,
    parent: Ino,
    name: &Name,
    now: Timestamp,
    session: SessionId,
) -> Result<Unlinked> {
    let (_, dentry) =
        futures::try_join!(directory(txn, parent, Entry::Remove), get_dentry(txn, parent, name))?;
    let dentry = dentry.ok_or(ErrorKind::NotFound)?;
    if dentry.kind != Kind::Directory {
        return Err(ErrorKind::NotDirectory.into());
    }
    let (node, empty) = futures::join!(load(txn, dentry.ino), check_empty(txn, dentry.ino));
    let node = named(node?, dentry.ino)?;
    check_flags(&node.inode)?;
    empty?;
    txn.clear(&key::dentry(parent, name));
    txn.add(&key::inode(parent, Field::Subdirectories), -1);
    touch_directory(txn, parent, now);
    Ok(drop_name(txn, node, now, session))
}

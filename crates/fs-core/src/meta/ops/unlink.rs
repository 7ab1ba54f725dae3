//! unlink.

use rfs_kv::Txn;

use crate::meta::inode::{
    Entry, check_flags, directory, drop_name, get_dentry, load, named, touch_directory,
};
use crate::meta::{Meta, Unlinked, key};
use crate::types::{ErrorKind, Ino, Kind, Name, Result, SessionId, Timestamp};

impl Meta {
    /// Removes a name that is not a directory's (unlink(2)). An inode that loses its last name becomes an orphan of
    /// this session: it stays usable until [`Meta::reap`].
    ///
    /// Reads the directory's record, the dentry and the inode, so it conflicts with other changes of that name and that
    /// inode's attributes. Writes 4 keys, 5 for the last name.
    ///
    /// # Errors
    /// `NotFound`; `IsDirectory`; `NotPermitted` where flags forbid it.
    pub async fn unlink(&self, parent: Ino, name: &Name) -> Result<Unlinked> {
        let now = self.now();
        let session = self.session()?.id();
        self.mutate(|txn| async move { unlink_in(&*txn, parent, name, now, session).await }).await
    }
}

pub(in crate::meta) async fn unlink_in(
    txn: &dyn Txn,
    parent: Ino,
    name: &Name,
    now: Timestamp,
    session: SessionId,
) -> Result<Unlinked> {
    let (_, dentry) =
        futures::try_join!(directory(txn, parent, Entry::Remove), get_dentry(txn, parent, name))?;
    let dentry = dentry.ok_or(ErrorKind::NotFound)?;
    if dentry.kind == Kind::Directory {
        return Err(ErrorKind::IsDirectory.into());
    }
    let node = named(load(txn, dentry.ino).await?, dentry.ino)?;
    check_flags(&node.inode)?;
    txn.clear(&key::dentry(parent, name));
    touch_directory(txn, parent, now);
    Ok(drop_name(txn, node, now, session))
}

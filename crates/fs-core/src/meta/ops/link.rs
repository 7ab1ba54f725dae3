//! link.

use rfs_kv::Txn;

use crate::meta::inode::{Entry, check_flags, directory, get_dentry, known, load, touch_directory};
use crate::meta::record::DentryRecord;
use crate::meta::{LINKS_MAX, Meta, key};
use crate::types::{Attr, ErrorKind, Ino, Kind, Name, Result, Timestamp};

/// What to give another name.
#[derive(Debug, Clone, Copy)]
pub struct LinkArgs<'a> {
    /// The inode.
    pub ino: Ino,
    /// The directory of the new name.
    pub parent: Ino,
    /// The new name.
    pub name: &'a Name,
}

impl Meta {
    /// Gives an inode another name (link(2)).
    ///
    /// Reads the inode, the directory's record and the dentry, so it conflicts with other changes of the inode's
    /// attributes, rmdir of the directory, and what makes the same name. Writes 4 keys.
    ///
    /// # Errors
    /// `Exists`; `NotPermitted` for a directory, and where flags forbid it; `TooManyLinks`; `NotFound` when the inode has
    /// no name any more or the directory was removed; `NotDirectory`; `Stale`.
    pub async fn link(&self, args: LinkArgs<'_>) -> Result<Attr> {
        let now = self.now();
        let args = &args;
        self.mutate(|txn| async move { link_in(&*txn, args, now).await }).await
    }
}

pub(in crate::meta) async fn link_in(txn: &dyn Txn, args: &LinkArgs<'_>, now: Timestamp) -> Result<Attr> {
    let (_, dentry, node) = futures::try_join!(
        directory(txn, args.parent, Entry::Add),
        get_dentry(txn, args.parent, args.name),
        load(txn, args.ino)
    )?;
    let mut node = known(node)?;
    if dentry.is_some() {
        return Err(ErrorKind::Exists.into());
    }
    if node.inode.kind == Kind::Directory {
        return Err(ErrorKind::NotPermitted.into());
    }
    check_flags(&node.inode)?;
    if node.inode.nlink == 0 {
        return Err(ErrorKind::NotFound.into());
    }
    if node.inode.nlink >= LINKS_MAX {
        return Err(ErrorKind::TooManyLinks.into());
    }
    node.inode.nlink += 1;
    node.times.ctime = now;
    node.store_inode(txn);
    node.store_times(txn);
    let record = DentryRecord { ino: args.ino, kind: node.inode.kind };
    txn.set(&key::dentry(args.parent, args.name), &record.encode());
    touch_directory(txn, args.parent, now);
    Ok(node.attr())
}

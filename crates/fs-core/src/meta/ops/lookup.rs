//! lookup and getattr.

use rfs_kv::Txn;

use crate::meta::inode::{known, named, peek};
use crate::meta::record::DentryRecord;
use crate::meta::{Meta, key};
use crate::types::{Attr, ErrorKind, Ino, Kind, Name, Result};

impl Meta {
    /// The inode that `name` in `parent` leads to. Two reads, no conflicts.
    ///
    /// # Errors
    /// `NotFound`.
    pub async fn lookup(&self, parent: Ino, name: &Name) -> Result<Attr> {
        self.read(|txn| async move { lookup_in(&*txn, parent, name).await }).await
    }

    /// The attributes of the directory `dir`, and where `..` leads to in it, which of a removed directory may be gone. One
    /// read, no conflicts.
    ///
    /// # Errors
    /// `Stale` without such an inode; `NotDirectory`.
    pub async fn getattr_and_parent(&self, dir: Ino) -> Result<(Attr, Ino)> {
        self.read(|txn| async move {
            let node = known(peek(&*txn, dir).await?)?;
            if node.inode.kind != Kind::Directory {
                return Err(ErrorKind::NotDirectory.into());
            }
            Ok((node.attr(), node.inode.parent))
        })
        .await
    }

    /// The attributes of `ino`. One read, no conflicts.
    ///
    /// # Errors
    /// `Stale` when there is no such inode (any more).
    pub async fn getattr(&self, ino: Ino) -> Result<Attr> {
        self.read(|txn| async move { Ok(known(peek(&*txn, ino).await?)?.attr()) }).await
    }
}

async fn lookup_in(txn: &dyn Txn, parent: Ino, name: &Name) -> Result<Attr> {
    let value = txn.snapshot_get(&key::dentry(parent, name)).await?.ok_or(ErrorKind::NotFound)?;
    let dentry = DentryRecord::decode(&value)?;
    Ok(named(peek(txn, dentry.ino).await?, dentry.ino)?.attr())
}

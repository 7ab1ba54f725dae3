//! Extended attributes.

use bytes::Bytes;
use rfs_kv::{Direction, Isolation, RangeQuery, Txn};

use crate::meta::inode::{check_flags, known, load, peek};
use crate::meta::{Meta, XATTR_BYTES_MAX, XATTR_LIST_BYTES_MAX, key, record};
use crate::types::{Error, ErrorKind, Ino, Kind, Result, Timestamp};

/// Longest name, in bytes (`XATTR_NAME_MAX`).
const NAME_BYTES_MAX: usize = 255;
/// Attributes that are read at a time: values are up to 64 KiB.
const PAGE: usize = 32;
/// Namespaces that are stored. ACLs (`system.posix_acl_*`) are not supported yet.
const NAMESPACES: [&[u8]; 3] = [b"user.", b"trusted.", b"security."];

/// What setxattr does with what is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum XattrMode {
    /// Creates or replaces.
    Either,
    /// Fails when it exists (`XATTR_CREATE`).
    Create,
    /// Fails unless it exists (`XATTR_REPLACE`).
    Replace,
}

impl Meta {
    /// The value of an extended attribute (getxattr(2)). One read, no conflicts.
    ///
    /// # Errors
    /// `NoAttribute`; `NotSupported` outside `user.`, `trusted.` and `security.`; `BufferTooSmall` (ERANGE) for a name longer
    /// than 255 bytes; `Invalid` for a namespace without a name.
    pub async fn getxattr(&self, ino: Ino, name: &[u8]) -> Result<Bytes> {
        Meta::check_xattr_name(name)?;
        let key = key::xattr(ino, name);
        let key = &key;
        self.read(|txn| async move {
            let value = txn.snapshot_get(key).await?.ok_or(ErrorKind::NoAttribute)?;
            record::decode_bytes(&value)
        })
        .await
    }

    /// Whether an extended attribute can have this name.
    ///
    /// # Errors
    /// As [`Meta::getxattr`], but for `NoAttribute`.
    pub fn check_xattr_name(name: &[u8]) -> Result<()> {
        if name.len() > NAME_BYTES_MAX {
            return Err(ErrorKind::BufferTooSmall.into());
        }
        let namespace = NAMESPACES.into_iter().find(|namespace| name.starts_with(namespace));
        match namespace {
            None => Err(ErrorKind::NotSupported.into()),
            Some(namespace) if namespace.len() == name.len() => {
                Err(Error::new(ErrorKind::Invalid, "an extended attribute needs a name after its namespace"))
            }
            Some(_) => Ok(()),
        }
    }

    /// The names of all extended attributes, in order (listxattr(2)).
    pub async fn listxattr(&self, ino: Ino) -> Result<Vec<Bytes>> {
        self.read(|txn| async move { list_in(&*txn, ino, Isolation::Snapshot).await }).await
    }

    /// Sets an extended attribute (setxattr(2)) and the inode's ctime.
    ///
    /// Reads the inode's record and times, and the attribute; a new name reads all names, and so conflicts with
    /// other new names of the inode. Writes 2 keys.
    ///
    /// # Errors
    /// As [`Meta::getxattr`]; `Exists` (`Create`); `NoAttribute` (`Replace`); `ArgumentTooLarge` value above 64 KiB; `NoSpace`
    /// names above 64 KiB altogether; `NotPermitted` where flags forbid it, and for `user.` on anything but files and
    /// directories; `Stale`.
    pub async fn setxattr(&self, ino: Ino, name: &[u8], value: &[u8], mode: XattrMode) -> Result<()> {
        Meta::check_xattr_name(name)?;
        if value.len() > XATTR_BYTES_MAX {
            return Err(ErrorKind::ArgumentTooLarge.into());
        }
        let now = self.now();
        self.mutate(|txn| async move { set_in(&*txn, ino, name, value, mode, now).await }).await
    }

    /// Removes an extended attribute (removexattr(2)) and sets the inode's ctime. Writes 2 keys.
    ///
    /// # Errors
    /// As [`Meta::getxattr`]; `NotPermitted` where flags forbid it; `Stale`.
    pub async fn removexattr(&self, ino: Ino, name: &[u8]) -> Result<()> {
        Meta::check_xattr_name(name)?;
        let now = self.now();
        self.mutate(|txn| async move { remove_in(&*txn, ino, name, now).await }).await
    }
}

async fn set_in(
    txn: &dyn Txn,
    ino: Ino,
    name: &[u8],
    value: &[u8],
    mode: XattrMode,
    now: Timestamp,
) -> Result<()> {
    let key = key::xattr(ino, name);
    let (node, existing) = futures::join!(load(txn, ino), txn.get(&key));
    let mut node = known(node?)?;
    check_flags(&node.inode)?;
    if name.starts_with(b"user.") && !matches!(node.inode.kind, Kind::File | Kind::Directory) {
        return Err(ErrorKind::NotPermitted.into());
    }
    match (mode, existing?) {
        (XattrMode::Create, Some(_)) => return Err(ErrorKind::Exists.into()),
        (XattrMode::Replace, None) => return Err(ErrorKind::NoAttribute.into()),
        (_, None) => {
            let names = list_in(txn, ino, Isolation::Serializable).await?;
            let listed: usize = names.iter().map(|name| name.len() + 1).sum();
            if listed + name.len() + 1 > XATTR_LIST_BYTES_MAX {
                return Err(ErrorKind::NoSpace.into());
            }
        }
        (_, Some(_)) => {}
    }
    txn.set(&key, &record::encode_bytes(value));
    node.times.ctime = now;
    node.store_times(txn);
    Ok(())
}

async fn remove_in(txn: &dyn Txn, ino: Ino, name: &[u8], now: Timestamp) -> Result<()> {
    let key = key::xattr(ino, name);
    let mut node = known(load(txn, ino).await?)?;
    check_flags(&node.inode)?;
    txn.get(&key).await?.ok_or(ErrorKind::NoAttribute)?;
    txn.clear(&key);
    node.times.ctime = now;
    node.store_times(txn);
    Ok(())
}

async fn list_in(txn: &dyn Txn, ino: Ino, isolation: Isolation) -> Result<Vec<Bytes>> {
    let mut range = key::xattrs(ino);
    let mut names = Vec::new();
    loop {
        let query = RangeQuery {
            begin: range.begin.clone(),
            end: range.end.clone(),
            limit: PAGE,
            direction: Direction::Forward,
            isolation,
        };
        let page = txn.range(query).await?;
        for (key, _) in &page.entries {
            names.push(record::parsed(key::parse_xattr(key), "attribute key")?.1);
        }
        match page.entries.last() {
            Some((last, _)) if page.more => range = range.after(last),
            _ => break,
        }
    }
    if names.is_empty() && peek(txn, ino).await?.is_none() {
        return Err(ErrorKind::Stale.into());
    }
    Ok(names)
}

//! Extended attributes: the metadata's business; here only what a mount decides, and that files which were just made have
//! none: before the first write the kernel asks each for its `security.capability`.

use std::sync::atomic::Ordering;

use bytes::{Bytes, BytesMut};

use super::Vfs;
use super::inode::Xattrs;
use super::request::XattrMode;
use crate::meta::Meta;
use crate::types::{ErrorKind, Ino, Result};

impl Vfs {
    /// The value of an extended attribute (getxattr(2)).
    ///
    /// # Errors
    /// `NoAttribute`; `NotSupported` outside `user.`, `trusted.` and `security.`; `Stale`.
    pub async fn getxattr(&self, ino: Ino, name: &[u8]) -> Result<Bytes> {
        if self.inodes.get(ino).is_some_and(|inode| inode.state().xattrs == Xattrs::None) {
            Meta::check_xattr_name(name)?;
            return Err(ErrorKind::NoAttribute.into());
        }
        self.meta.getxattr(ino, name).await
    }

    /// Sets an extended attribute (setxattr(2)).
    ///
    /// # Errors
    /// `ReadOnly`; `Exists`, `NoAttribute` as `mode` says; `ArgumentTooLarge`; `NoSpace`; `NotPermitted`; `NotSupported`.
    pub async fn setxattr(&self, ino: Ino, name: &[u8], value: &[u8], mode: XattrMode) -> Result<()> {
        self.check_writable()?;
        Meta::check_xattr_name(name)?;
        self.xattrs_set.fetch_add(1, Ordering::SeqCst);
        if let Some(inode) = self.inodes.get(ino) {
            inode.state().xattrs = Xattrs::Perhaps;
        }
        self.meta.setxattr(ino, name, value, mode).await
    }

    /// The names, each followed by a NUL, as listxattr(2) returns them.
    ///
    /// # Errors
    /// `Stale`.
    pub async fn listxattr(&self, ino: Ino) -> Result<Bytes> {
        let names = self.meta.listxattr(ino).await?;
        let mut list = BytesMut::with_capacity(names.iter().map(|name| name.len() + 1).sum());
        for name in names {
            list.extend_from_slice(&name);
            list.extend_from_slice(&[0]);
        }
        Ok(list.freeze())
    }

    /// Removes an extended attribute (removexattr(2)).
    ///
    /// # Errors
    /// `ReadOnly`; `NoAttribute`; `NotPermitted`; `NotSupported`.
    pub async fn removexattr(&self, ino: Ino, name: &[u8]) -> Result<()> {
        self.check_writable()?;
        self.meta.removexattr(ino, name).await
    }
}

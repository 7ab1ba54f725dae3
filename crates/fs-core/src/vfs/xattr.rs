//! Extended attributes: the metadata's business; here only what a mount decides.

use bytes::{Bytes, BytesMut};

use super::Vfs;
use super::request::XattrMode;
use crate::types::{Ino, Result};

impl Vfs {
    /// The value of an extended attribute (getxattr(2)).
    ///
    /// # Errors
    /// `NoAttribute`; `NotSupported` outside `user.`, `trusted.` and `security.`; `Stale`.
    pub async fn getxattr(&self, ino: Ino, name: &[u8]) -> Result<Bytes> {
        self.meta.getxattr(ino, name).await
    }

    /// Sets an extended attribute (setxattr(2)).
    ///
    /// # Errors
    /// `ReadOnly`; `Exists`, `NoAttribute` as `mode` says; `ArgumentTooLarge`; `NoSpace`; `NotPermitted`; `NotSupported`.
    pub async fn setxattr(&self, ino: Ino, name: &[u8], value: &[u8], mode: XattrMode) -> Result<()> {
        self.check_writable()?;
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

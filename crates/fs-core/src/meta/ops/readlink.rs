//! readlink.

use bytes::Bytes;

use crate::meta::Meta;
use crate::meta::inode::{known, peek};
use crate::types::{Error, ErrorKind, Ino, Kind, Result};

impl Meta {
    /// The target of a symbolic link. One read, no conflicts.
    ///
    /// # Errors
    /// `Invalid` for anything else; `Stale`.
    pub async fn readlink(&self, ino: Ino) -> Result<Bytes> {
        self.read(|txn| async move {
            let node = known(peek(&*txn, ino).await?)?;
            if node.inode.kind != Kind::Symlink {
                return Err(ErrorKind::Invalid.into());
            }
            node.target.ok_or_else(|| {
                Error::new(ErrorKind::Io, format!("damaged metadata: symbolic link {ino} has no target"))
            })
        })
        .await
    }
}

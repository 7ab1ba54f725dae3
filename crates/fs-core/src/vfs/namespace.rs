//! Names: what changes them, and how orphans come to be.
//!
//! Each operation is one transaction of the metadata; here it is decided what the kernel now knows, what must be stored
//! before (a rename over a file), and who is left without a name.

use std::sync::atomic::Ordering;

use bytes::Bytes;

use super::Vfs;
use super::handle::{Found, InodeRef, Reach, ToldBy};
use super::inode::{Life, Xattrs};
use super::request::{NewNode, NodeKind, OpenFlags, Opened, RenameArgs, RenameMode};
use crate::meta::{self, LinkArgs, MakeArgs, Unlinked};
use crate::types::{Attr, ErrorKind, Ino, Kind, Name, Result};

impl Vfs {
    /// The inode that `name` in `parent` leads to. Counts as one lookup.
    ///
    /// # Errors
    /// `NotFound`.
    pub async fn lookup(&self, parent: Ino, name: &Name) -> Result<Attr> {
        let retired = self.inodes.retired();
        let attr = self.meta.lookup(parent, name).await?;
        self.known.looked_up(attr.ino);
        self.counted(attr, retired).await
    }

    /// Attributes of an inode whose lookup was counted; taken back on an error.
    async fn counted(&self, attr: Attr, retired: u64) -> Result<Attr> {
        let ino = attr.ino;
        let current = self.current(attr, retired).await;
        if current.is_err() {
            self.forget(ino, 1);
        }
        current
    }

    /// Makes a file that is neither a directory nor a symbolic link (mknod(2)). Counts as one lookup.
    ///
    /// # Errors
    /// `ReadOnly`; `Exists`; `NotFound` when the directory was removed; `NotPermitted`; `NoSpace`.
    pub async fn mknod(&self, node: NewNode<'_>, kind: NodeKind) -> Result<Attr> {
        if matches!(kind.kind, Kind::Directory | Kind::Symlink) {
            return Err(ErrorKind::Invalid.into());
        }
        self.make(node, kind, None).await
    }

    /// Makes a directory (mkdir(2)). Counts as one lookup.
    ///
    /// # Errors
    /// As [`Vfs::mknod`].
    pub async fn mkdir(&self, node: NewNode<'_>) -> Result<Attr> {
        self.make(node, NodeKind { kind: Kind::Directory, rdev: 0 }, None).await
    }

    /// Makes a symbolic link (symlink(2)). Counts as one lookup.
    ///
    /// # Errors
    /// As [`Vfs::mknod`]; `NameTooLong` for a long target.
    pub async fn symlink(&self, node: NewNode<'_>, target: &[u8]) -> Result<Attr> {
        let node = NewNode { mode: 0o777, ..node };
        self.make(node, NodeKind { kind: Kind::Symlink, rdev: 0 }, Some(target)).await
    }

    async fn make(&self, node: NewNode<'_>, kind: NodeKind, target: Option<&[u8]>) -> Result<Attr> {
        self.check_writable()?;
        let ino = self.meta.new_ino(node.parent).await?;
        self.make_with(ino, node, kind, target).await
    }

    async fn make_with(
        &self,
        ino: Ino,
        node: NewNode<'_>,
        kind: NodeKind,
        target: Option<&[u8]>,
    ) -> Result<Attr> {
        let args = MakeArgs {
            parent: node.parent,
            name: node.name,
            kind: kind.kind,
            mode: node.mode,
            rdev: kind.rdev,
            target,
            caller: node.caller,
        };
        let mut tries = 0;
        let attr = loop {
            match self.meta.make_with(ino, args).await {
                Err(error) if error.kind == ErrorKind::NoSpace && self.more_room(&mut tries).await => {}
                made => break made?,
            }
        };
        self.known.looked_up(attr.ino);
        Ok(attr)
    }

    /// Makes a regular file and opens it (`O_CREAT | O_EXCL`). Counts as one lookup.
    ///
    /// # Errors
    /// As [`Vfs::mknod`].
    pub async fn create(&self, node: NewNode<'_>, flags: OpenFlags) -> Result<(Attr, Opened)> {
        self.check_writable()?;
        let ino = self.meta.new_ino(node.parent).await?;
        // Asked before there is such an inode: unless somebody uses it meanwhile, its attributes need not be read again.
        let found = self.inodes.find(ino);
        let xattrs_set = self.xattrs_set.load(Ordering::SeqCst);
        let attr = self.make_with(ino, node, NodeKind { kind: Kind::File, rdev: 0 }, None).await?;
        let made = match found {
            Found::Absent(absent) => self.inodes.insert(&attr, absent),
            Found::Here(_) => None,
        };
        let inode = match made {
            Some(inode) => Ok(inode),
            None => self.inode(ino).await,
        };
        if let Ok(inode) = &inode {
            // Somebody who found the name may have set one before there was state to note it in.
            let mut state = inode.state();
            if self.xattrs_set.load(Ordering::SeqCst) == xattrs_set {
                state.xattrs = Xattrs::None;
            }
        }
        match inode {
            // Nothing is stored yet that could have failed, and most new files are closed before anything is.
            Ok(inode) => Ok((attr, self.open_state(inode, flags, ToldBy::NextWrite))),
            Err(error) => {
                self.forget(attr.ino, 1);
                Err(error)
            }
        }
    }

    /// Gives an inode another name (link(2)). Counts as one lookup.
    ///
    /// # Errors
    /// `ReadOnly`; `Exists`; `NotPermitted` for a directory; `TooManyLinks`; `NotFound`.
    pub async fn link(&self, ino: Ino, parent: Ino, name: &Name) -> Result<Attr> {
        self.check_writable()?;
        let retired = self.inodes.retired();
        let attr = self.meta.link(LinkArgs { ino, parent, name }).await?;
        self.known.looked_up(ino);
        self.counted(attr, retired).await
    }

    /// Removes a name that is not a directory's (unlink(2)).
    ///
    /// # Errors
    /// `ReadOnly`; `NotFound`; `IsDirectory`; `NotPermitted`.
    pub async fn unlink(&self, parent: Ino, name: &Name) -> Result<()> {
        self.check_writable()?;
        self.places.removed(parent, name);
        let unlinked = self.meta.unlink(parent, name).await?;
        self.lost_name(&unlinked);
        Ok(())
    }

    /// Removes an empty directory (rmdir(2)).
    ///
    /// # Errors
    /// `ReadOnly`; `NotFound`; `NotDirectory`; `NotEmpty`; `NotPermitted`.
    pub async fn rmdir(&self, parent: Ino, name: &Name) -> Result<()> {
        self.check_writable()?;
        self.places.removed(parent, name);
        let unlinked = self.meta.rmdir(parent, name).await?;
        self.lost_name(&unlinked);
        Ok(())
    }

    /// Moves or swaps names atomically (renameat2(2)). Before a file takes the place of another, its contents are stored:
    /// after a crash the name has the old contents or the new. Files that swap names are both stored before.
    ///
    /// # Errors
    /// `ReadOnly`; `NotFound`; `Exists` (`NoReplace`); `IsDirectory`, `NotDirectory`, `NotEmpty`; `Invalid` for a directory
    /// into itself; `NotPermitted`; `Io` when the contents could not be stored.
    pub async fn rename(&self, args: RenameArgs<'_>) -> Result<()> {
        self.check_writable()?;
        match args.mode {
            RenameMode::NoReplace => {}
            RenameMode::Replace => self.store_before_replace(&args).await?,
            RenameMode::Exchange => {
                // Each takes the other's place.
                self.store_named(args.parent, args.name).await?;
                self.store_named(args.new_parent, args.new_name).await?;
            }
        }
        if args.mode != RenameMode::Exchange {
            self.places.removed(args.parent, args.name);
        }
        let renamed = self
            .meta
            .rename(meta::RenameArgs {
                parent: args.parent,
                name: args.name,
                new_parent: args.new_parent,
                new_name: args.new_name,
                mode: args.mode,
            })
            .await?;
        if let Some(replaced) = renamed.replaced {
            self.lost_name(&replaced);
        }
        Ok(())
    }

    /// Stores the source's contents if its name is to replace one that exists. Commits are durable in order, so what is
    /// committed before the rename survives whenever the rename does.
    async fn store_before_replace(&self, args: &RenameArgs<'_>) -> Result<()> {
        let Some(source) = self.unsaved(args.parent, args.name).await else { return Ok(()) };
        let replaces = match self.meta.lookup(args.new_parent, args.new_name).await {
            Ok(target) => target.kind == Kind::File && target.ino != source.ino,
            Err(error) if error.kind == ErrorKind::NotFound => false,
            Err(error) => return Err(error),
        };
        if replaces { self.flush_inode(&source).await } else { Ok(()) }
    }

    async fn store_named(&self, parent: Ino, name: &Name) -> Result<()> {
        match self.unsaved(parent, name).await {
            Some(inode) => self.flush_inode(&inode).await,
            None => Ok(()),
        }
    }

    /// The file of that name, if some of it is not committed. Without such a name there is nothing to store.
    async fn unsaved(&self, parent: Ino, name: &Name) -> Option<InodeRef> {
        let attr = self.meta.lookup(parent, name).await.ok()?;
        self.inodes.get(attr.ino).filter(|inode| inode.state().needs_flush())
    }

    /// An inode lost a name. If it was the last, it waits until nobody knows it any more.
    fn lost_name(&self, unlinked: &Unlinked) {
        if !unlinked.orphaned {
            return;
        }
        if let Some(inode) = self.inodes.get(unlinked.ino) {
            let mut state = inode.state();
            if state.life == Life::Named {
                state.life = Life::Orphan;
            }
        }
        if self.known.orphaned(unlinked.ino) == Reach::Unreachable {
            self.collector.reap_later(unlinked.ino);
        }
    }

    /// The target of a symbolic link (readlink(2)).
    ///
    /// # Errors
    /// `Invalid` for anything else; `Stale`.
    pub async fn readlink(&self, ino: Ino) -> Result<Bytes> {
        let (target, attr) = futures::try_join!(self.meta.readlink(ino), self.meta.getattr(ino))?;
        self.accessed_other(&attr).await?;
        Ok(target)
    }
}

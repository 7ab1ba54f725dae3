//! mknod, create, mkdir and symlink.

use bytes::Bytes;
use rfs_kv::Txn;

use crate::meta::inode::{Entry, Node, directory, get_dentry, touch_directory};
use crate::meta::key::Field;
use crate::meta::record::{self, DentryRecord, Inode};
use crate::meta::usage::{self, Change};
use crate::meta::{Meta, TARGET_BYTES_MAX, key};
use crate::types::{Attr, Caller, Error, ErrorKind, Ino, Kind, Name, Result, SessionId, Timestamp};

/// Bit of a directory's mode: what is made in it inherits its group.
const S_ISGID: u16 = 0o2000;

/// What to make.
#[derive(Debug, Clone, Copy)]
pub struct MakeArgs<'a> {
    /// The directory to make it in.
    pub parent: Ino,
    /// Its name there.
    pub name: &'a Name,
    /// What it shall be.
    pub kind: Kind,
    /// Permission, set-id and sticky bits, umask already applied.
    pub mode: u16,
    /// Device number of device files.
    pub rdev: u32,
    /// Target of a symbolic link: 1 to 4095 bytes.
    pub target: Option<&'a [u8]>,
    /// Whose it shall be.
    pub caller: &'a Caller,
}

impl Meta {
    /// Makes an inode with a name: mknod(2), mkdir(2), symlink(2), and the creating part of open(2).
    ///
    /// In a directory with the set-group-id bit it gets the directory's group, and a directory gets the bit too. (The
    /// kernel has already taken that bit from files whose caller is not in the group.)
    ///
    /// Reads the directory's record and the dentry, so it conflicts with rmdir, chmod and move of the directory and with
    /// anything that makes the same name, and not with other names in it. Writes 4 keys for a file, 5 for a
    /// directory, a symbolic link; < 300 bytes plus names and target.
    ///
    /// # Errors
    /// `Exists`; `NotFound` when the directory was removed; `NotDirectory`; `NotPermitted` when it is immutable; `NoSpace`
    /// at the volume's limit of inodes; `NameTooLong` for a long target, `Invalid` for one that is missing or empty.
    pub async fn make(&self, args: MakeArgs<'_>) -> Result<Attr> {
        let ino = self.new_ino(args.parent).await?;
        self.make_with(ino, args).await
    }

    /// A number for an inode that is going to be made in `parent`. One that is not used is lost; there are 2^64.
    pub async fn new_ino(&self, parent: Ino) -> Result<Ino> {
        self.session()?;
        self.numbers.take(&*self.kv, parent).await
    }

    /// As [`Meta::make`], with a number from [`Meta::new_ino`].
    pub async fn make_with(&self, ino: Ino, args: MakeArgs<'_>) -> Result<Attr> {
        let target = args.target.unwrap_or_default();
        if target.len() > TARGET_BYTES_MAX {
            return Err(ErrorKind::NameTooLong.into());
        }
        if (args.kind == Kind::Symlink) == target.is_empty() {
            return Err(Error::new(ErrorKind::Invalid, "a symbolic link, and nothing else, has a target"));
        }
        let session = self.session()?.id();
        let reservation = self.usage.reserve(Change::ONE_INODE).await?;
        let now = self.now();
        let args = &args;
        let attr = self.mutate(|txn| async move { make_in(&*txn, args, ino, now, session).await }).await?;
        reservation.keep();
        Ok(attr)
    }
}

pub(in crate::meta) async fn make_in(
    txn: &dyn Txn,
    args: &MakeArgs<'_>,
    ino: Ino,
    now: Timestamp,
    session: SessionId,
) -> Result<Attr> {
    let (parent, dentry) =
        futures::try_join!(directory(txn, args.parent, Entry::Add), get_dentry(txn, args.parent, args.name))?;
    if dentry.is_some() {
        return Err(ErrorKind::Exists.into());
    }
    let inherits = parent.mode & S_ISGID != 0;
    let mut mode = args.mode & 0o7777;
    if inherits && args.kind == Kind::Directory {
        mode |= S_ISGID;
    }
    let inode = Inode {
        kind: args.kind,
        mode: if args.kind == Kind::Symlink { 0o777 } else { mode },
        nlink: if args.kind == Kind::Directory { 2 } else { 1 },
        uid: args.caller.uid,
        gid: if inherits { parent.gid } else { args.caller.gid },
        rdev: if matches!(args.kind, Kind::CharDevice | Kind::BlockDevice) { args.rdev } else { 0 },
        flags: 0,
        generation: 0,
        parent: args.parent,
        crtime: now,
    };
    let mut node = Node::new(ino, inode);
    node.store_inode(txn);
    if let Some(target) = args.target {
        txn.set(&key::inode(ino, Field::Target), &record::encode_bytes(target));
        node.target = Some(Bytes::copy_from_slice(target));
    }
    txn.set(&key::dentry(args.parent, args.name), &DentryRecord { ino, kind: args.kind }.encode());
    touch_directory(txn, args.parent, now);
    if args.kind == Kind::Directory {
        txn.add(&key::inode(args.parent, Field::Subdirectories), 1);
    }
    usage::add_in(txn, session, Change::ONE_INODE);
    Ok(node.attr())
}

//! setattr: everything but the length.

use rfs_kv::Txn;

use crate::meta::inode::{Node, known, load};
use crate::meta::key::Field;
use crate::meta::record::{self, Inode};
use crate::meta::{FLAG_APPEND, FLAG_IMMUTABLE, Meta, key};
use crate::types::{Attr, Caller, Error, ErrorKind, Ino, Kind, Result, SetAttr, SetTime, Timestamp};

const S_ISUID: u16 = 0o4000;
const S_ISGID: u16 = 0o2000;
const S_IXGRP: u16 = 0o0010;

/// What is known about the groups of a caller besides its effective one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Membership<'a> {
    /// The kernel knows them and has already taken the set-group-id bit from the mode of a caller outside the
    /// file's group (`default_permissions`).
    CheckedByKernel,
    /// These.
    Groups(&'a [u32]),
}

/// What to change.
#[derive(Debug, Clone, Copy)]
pub struct SetattrArgs<'a> {
    /// The inode.
    pub ino: Ino,
    /// The changes; `size` must be `None`: see [`Meta::truncate`].
    pub set: &'a SetAttr,
    /// Who asks.
    pub caller: &'a Caller,
    /// The caller's groups.
    pub membership: Membership<'a>,
    /// When the file was written, if that is not stored yet: becomes its mtime unless `set` has one. No flag forbids
    /// it, for the write was allowed.
    pub written: Option<Timestamp>,
}

impl Meta {
    /// Changes mode, owner, times or flags (chmod(2), chown(2), utimensat(2), `FS_IOC_SETFLAGS`).
    ///
    /// As Linux does: a change of the owner takes the set-user-id bit, and the set-group-id bit of what the group may
    /// execute or of a caller outside the group, from anything but a directory, even for root. Permission to make the
    /// change is the kernel's business, but not the immutable and append-only flags, which it does not know.
    ///
    /// Reads the inode's record and times, so it conflicts with other changes of them. Writes 1 to 3 keys; none when
    /// nothing is asked for.
    ///
    /// # Errors
    /// `NotPermitted` when the inode's flags forbid it; `Stale`.
    pub async fn setattr(&self, args: SetattrArgs<'_>) -> Result<Attr> {
        if args.set.size.is_some() {
            return Err(Error::new(ErrorKind::Invalid, "the length is changed by truncate"));
        }
        let now = self.now();
        let args = &args;
        self.mutate(|txn| async move { setattr_in(&*txn, args, now).await }).await
    }
}

pub(in crate::meta) async fn setattr_in(
    txn: &dyn Txn,
    args: &SetattrArgs<'_>,
    now: Timestamp,
) -> Result<Attr> {
    let set = args.set;
    let mut node = known(load(txn, args.ino).await?)?;
    if *set == SetAttr::default() && args.written.is_none() {
        return Ok(node.attr());
    }
    check_flags_allow(node.inode.flags, set)?;
    let before = node.inode;
    change_owner_and_mode(&mut node.inode, args);
    if let Some(flags) = set.flags {
        node.inode.flags = flags;
    }
    if node.inode != before {
        node.store_inode(txn);
    }
    change_times(txn, &mut node, args, now);
    Ok(node.attr())
}

/// Immutable inodes keep all attributes, append-only ones all but times that are set to now.
fn check_flags_allow(flags: u32, set: &SetAttr) -> Result<()> {
    let explicit = |time: Option<SetTime>| matches!(time, Some(SetTime::To(_)));
    let owner_or_mode = set.mode.is_some() || set.uid.is_some() || set.gid.is_some();
    let times_to = explicit(set.atime) || explicit(set.mtime);
    let times = set.atime.is_some() || set.mtime.is_some();
    let immutable = flags & FLAG_IMMUTABLE != 0 && (owner_or_mode || times);
    let append = flags & FLAG_APPEND != 0 && (owner_or_mode || times_to);
    if immutable || append { Err(ErrorKind::NotPermitted.into()) } else { Ok(()) }
}

fn change_owner_and_mode(inode: &mut Inode, args: &SetattrArgs<'_>) {
    let set = args.set;
    let chown = set.uid.is_some() || set.gid.is_some();
    if inode.kind != Kind::Directory && (chown || set.kill_suid_sgid) {
        let keeps_sgid = chown && !set.kill_suid_sgid && is_member(args, inode.gid);
        kill_set_ids(inode, keeps_sgid);
    }
    inode.uid = set.uid.unwrap_or(inode.uid);
    inode.gid = set.gid.unwrap_or(inode.gid);
    if let Some(mode) = set.mode {
        inode.mode = mode & 0o7777;
        let unchecked = args.membership != Membership::CheckedByKernel;
        if unchecked && inode.kind != Kind::Directory && !is_member(args, inode.gid) {
            inode.mode &= !S_ISGID;
        }
    }
}

/// Takes the set-user-id bit, and the set-group-id bit unless it means mandatory locking (the group may not execute)
/// and `keeps_locking_bit`.
fn kill_set_ids(inode: &mut Inode, keeps_locking_bit: bool) {
    inode.mode &= !S_ISUID;
    if inode.mode & S_IXGRP != 0 || !keeps_locking_bit {
        inode.mode &= !S_ISGID;
    }
}

/// Takes the set-id bits that a write or truncate by an unprivileged caller takes.
pub(in crate::meta) fn kill_set_ids_of_written(inode: &mut Inode) {
    kill_set_ids(inode, true);
}

fn is_member(args: &SetattrArgs<'_>, gid: u32) -> bool {
    let others: &[u32] = match args.membership {
        Membership::CheckedByKernel => &[],
        Membership::Groups(groups) => groups,
    };
    args.caller.uid == 0 || args.caller.gid == gid || others.contains(&gid)
}

fn change_times(txn: &dyn Txn, node: &mut Node, args: &SetattrArgs<'_>, now: Timestamp) {
    let set = args.set;
    let resolve = |time: SetTime| match time {
        SetTime::Now => now,
        SetTime::To(time) => time,
    };
    if let Some(atime) = set.atime.map(resolve) {
        node.atime = atime;
        txn.set(&key::inode(node.ino, Field::Atime), &record::encode_atime(atime));
    }
    if let Some(mtime) = set.mtime.map(resolve).or(args.written) {
        node.times.mtime = mtime;
    }
    node.times.ctime = set.ctime.unwrap_or(now);
    node.store_times(txn);
}

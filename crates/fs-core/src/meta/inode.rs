//! What operations share: reading an inode's keys, and the rules that every change of a directory keeps.

use bytes::Bytes;
use rfs_kv::{Direction, Isolation, RangeQuery, Txn};

use crate::types::{Attr, Error, ErrorKind, Ino, Kind, Name, Result, SessionId, Timestamp};

use super::key::Field;
use super::record::{DentryRecord, Inode, Times, Truncation};
use super::{FLAG_APPEND, FLAG_IMMUTABLE, Unlinked, key, record};

/// Size that stat shows for a directory.
const DIRECTORY_BYTES: u64 = 4096;

/// All keys of an inode that make up its attributes.
#[derive(Debug, Clone)]
pub(super) struct Node {
    pub(super) ino: Ino,
    pub(super) inode: Inode,
    pub(super) times: Times,
    pub(super) atime: Timestamp,
    pub(super) length: u64,
    pub(super) subdirectories: i64,
    pub(super) allocated: i64,
    pub(super) truncation: Truncation,
    pub(super) target: Option<Bytes>,
}

impl Node {
    /// A new inode that has nothing but its record.
    pub(super) fn new(ino: Ino, inode: Inode) -> Node {
        Node {
            ino,
            inode,
            times: Times::both(inode.crtime),
            atime: inode.crtime,
            length: 0,
            subdirectories: 0,
            allocated: 0,
            truncation: Truncation::default(),
            target: None,
        }
    }

    pub(super) fn attr(&self) -> Attr {
        let inode = &self.inode;
        let size = match inode.kind {
            Kind::Directory => DIRECTORY_BYTES,
            Kind::Symlink => self.target.as_ref().map_or(0, |target| target.len() as u64),
            _ => self.length,
        };
        let subdirectories = u32::try_from(self.subdirectories).unwrap_or(0);
        let nlink = match inode.kind {
            Kind::Directory if inode.nlink > 0 => inode.nlink.saturating_add(subdirectories),
            _ => inode.nlink,
        };
        Attr {
            ino: self.ino,
            kind: inode.kind,
            mode: inode.mode,
            nlink,
            uid: inode.uid,
            gid: inode.gid,
            rdev: inode.rdev,
            size,
            allocated: u64::try_from(self.allocated).unwrap_or(0),
            atime: self.atime,
            mtime: self.times.mtime,
            ctime: self.times.ctime,
            crtime: inode.crtime,
            generation: inode.generation,
            flags: inode.flags,
        }
    }

    /// Sets the inode record.
    pub(super) fn store_inode(&self, txn: &dyn Txn) {
        txn.set(&key::inode(self.ino, Field::Inode), &self.inode.encode());
    }

    /// Sets mtime and ctime.
    pub(super) fn store_times(&self, txn: &dyn Txn) {
        txn.set(&key::inode(self.ino, Field::Times), &self.times.encode());
    }
}

/// Puts nodes together from the keys of a range read, which come in order.
#[derive(Default)]
pub(super) struct NodeReader {
    open: Option<Node>,
}

impl NodeReader {
    /// Takes the next key. Returns the node before it when it is complete. Keys of an inode without record are skipped.
    pub(super) fn push(&mut self, key: &[u8], value: &Bytes) -> Result<Option<Node>> {
        let (ino, field) = record::parsed(key::parse_inode(key), "inode key")?;
        if field == Some(Field::Inode) {
            return Ok(self.open.replace(Node::new(ino, Inode::decode(value)?)));
        }
        let complete = self.open.take_if(|node| node.ino != ino);
        if let (Some(node), Some(field)) = (&mut self.open, field) {
            match field {
                Field::Inode => {}
                Field::Times => node.times = Times::decode(value)?,
                Field::Length => node.length = record::decode_length(value)?,
                Field::Subdirectories => node.subdirectories = record::decode_counter(value)?,
                Field::Allocated => node.allocated = record::decode_counter(value)?,
                Field::Truncation => node.truncation = Truncation::decode(value)?,
                Field::Atime => node.atime = record::decode_atime(value)?,
                Field::Target => node.target = Some(record::decode_bytes(value)?),
            }
        }
        Ok(complete)
    }

    /// The last node.
    pub(super) fn finish(self) -> Option<Node> {
        self.open
    }
}

/// Most keys of one inode.
const FIELDS_MAX: usize = 16;

/// Reads an inode without conflict.
pub(super) async fn peek(txn: &dyn Txn, ino: Ino) -> Result<Option<Node>> {
    let range = key::inodes(ino, ino);
    let query = RangeQuery {
        begin: range.begin,
        end: range.end,
        limit: FIELDS_MAX,
        direction: Direction::Forward,
        isolation: Isolation::Snapshot,
    };
    let mut reader = NodeReader::default();
    for (key, value) in txn.range(query).await?.entries {
        reader.push(&key, &value)?;
    }
    Ok(reader.finish())
}

/// Reads an inode that the caller is going to change: conflicts with changes of its record and its times, not of
/// its counters and its length.
pub(super) async fn load(txn: &dyn Txn, ino: Ino) -> Result<Option<Node>> {
    txn.add_read_conflict(&key::inode(ino, Field::Inode), &key::inode(ino, Field::Length));
    peek(txn, ino).await
}

/// Reads an inode that a request names: `Stale` when there is none, because the kernel had it once.
pub(super) fn known(node: Option<Node>) -> Result<Node> {
    node.ok_or_else(|| ErrorKind::Stale.into())
}

/// Reads an inode that a dentry names: damage when there is none.
pub(super) fn named(node: Option<Node>, ino: Ino) -> Result<Node> {
    node.ok_or_else(|| {
        Error::new(ErrorKind::Io, format!("damaged metadata: a dentry names inode {ino}, which is missing"))
    })
}

/// The record of an inode, with conflict.
pub(super) async fn get_inode(txn: &dyn Txn, ino: Ino) -> Result<Option<Inode>> {
    let value = txn.get(&key::inode(ino, Field::Inode)).await?;
    value.as_deref().map(Inode::decode).transpose()
}

/// The dentry `name` of `dir`, with conflict.
pub(super) async fn get_dentry(txn: &dyn Txn, dir: Ino, name: &Name) -> Result<Option<DentryRecord>> {
    let value = txn.get(&key::dentry(dir, name)).await?;
    value.as_deref().map(DentryRecord::decode).transpose()
}

/// What is going to be done in a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Entry {
    /// A name is added.
    Add,
    /// A name is removed or replaced.
    Remove,
}

/// Reads a directory that is going to be changed. Conflicts with rmdir, chmod, chown and moving of it, not with other
/// changes of its entries.
///
/// # Errors
/// `NotFound` when it was removed; `NotDirectory`; `NotPermitted` when its flags forbid the change.
pub(super) async fn directory(txn: &dyn Txn, dir: Ino, entry: Entry) -> Result<Inode> {
    let inode = get_inode(txn, dir).await?.ok_or(ErrorKind::NotFound)?;
    if inode.kind != Kind::Directory {
        return Err(ErrorKind::NotDirectory.into());
    }
    if inode.nlink == 0 {
        return Err(ErrorKind::NotFound.into());
    }
    check_entry(&inode, entry)?;
    Ok(inode)
}

/// Fails with `NotPermitted` where a directory's flags forbid the change.
pub(super) fn check_entry(dir: &Inode, entry: Entry) -> Result<()> {
    let forbidden = match entry {
        Entry::Add => FLAG_IMMUTABLE,
        Entry::Remove => FLAG_IMMUTABLE | FLAG_APPEND,
    };
    if dir.flags & forbidden != 0 { Err(ErrorKind::NotPermitted.into()) } else { Ok(()) }
}

/// Whether flags forbid to remove, rename or link an inode, or to change its attributes.
pub(super) fn check_flags(inode: &Inode) -> Result<()> {
    if inode.flags & (FLAG_IMMUTABLE | FLAG_APPEND) != 0 {
        return Err(ErrorKind::NotPermitted.into());
    }
    Ok(())
}

/// The entries of a directory changed. Blind: does not conflict with other changes.
pub(super) fn touch_directory(txn: &dyn Txn, dir: Ino, now: Timestamp) {
    txn.set(&key::inode(dir, Field::Times), &Times::both(now).encode());
}

/// Fails with `NotEmpty` unless `dir` has no entries; conflicts with the creation of one.
pub(super) async fn check_empty(txn: &dyn Txn, dir: Ino) -> Result<()> {
    let range = key::dentries(dir, None);
    let query = RangeQuery {
        begin: range.begin,
        end: range.end,
        limit: 1,
        direction: Direction::Forward,
        isolation: Isolation::Serializable,
    };
    if txn.range(query).await?.entries.is_empty() { Ok(()) } else { Err(ErrorKind::NotEmpty.into()) }
}

/// Takes a name away from an inode that is not a directory, or its only one from a directory. Without names it
/// becomes an orphan of `session`.
pub(super) fn drop_name(txn: &dyn Txn, mut node: Node, now: Timestamp, session: SessionId) -> Unlinked {
    node.inode.nlink = match node.inode.kind {
        Kind::Directory => 0,
        _ => node.inode.nlink.saturating_sub(1),
    };
    node.times.ctime = now;
    node.store_inode(txn);
    node.store_times(txn);
    let orphaned = node.inode.nlink == 0;
    if orphaned {
        txn.set(&key::orphan(node.ino, session), &record::encode_orphan());
    }
    Unlinked { ino: node.ino, attr: node.attr(), orphaned }
}

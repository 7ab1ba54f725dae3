//! Paged scans of everything that is stored.

use bytes::Bytes;
use rfs_kv::{Direction, Isolation, RangePage, RangeQuery, Txn};

use crate::meta::inode::{Node, NodeReader};
use crate::meta::key::{Field, KeyRange};
use crate::meta::ops::chunks::groups_in;
use crate::meta::record::{self, DentryRecord};
use crate::meta::session::live_in;
use crate::meta::{Dentry, Meta, Page, key};
use crate::types::{Attr, ChunkIndex, Ino, Name, Result, SessionId, SliceGroup, SliceStamp};

/// Keys of one inode, on average: decides how many keys are read for a number of inodes.
const KEYS_PER_INODE: usize = 4;
/// More than all keys of one inode.
const KEYS_MIN: usize = 64;
/// Extended attributes that are read at a time: values are up to 64 KiB.
const XATTRS_PAGE: usize = 64;

/// An inode as it is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InodeInfo {
    /// Its attributes, as stat shows them.
    pub attr: Attr,
    /// Directories: the parent.
    pub parent: Ino,
    /// Allocated bytes as they are counted; unlike in `attr`, wrong ones may be negative.
    pub allocated: i64,
    /// Whether chunks beyond its end are still to be removed.
    pub trimming: bool,
}

/// A dentry and where it lies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DentryInfo {
    /// Its directory.
    pub dir: Ino,
    /// The dentry.
    pub dentry: Dentry,
}

/// A slice group and where it lies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SliceInfo {
    /// Its file.
    pub ino: Ino,
    /// Its chunk.
    pub chunk: ChunkIndex,
    /// The group.
    pub group: SliceGroup,
}

/// An orphan record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OrphanInfo {
    /// The inode without a name.
    pub ino: Ino,
    /// The session that refers to it.
    pub session: SessionId,
    /// Whether that session is alive.
    pub alive: bool,
}

/// A page of inodes.
#[derive(Debug, Default)]
pub(super) struct NodePage {
    pub(super) nodes: Vec<Node>,
    /// Numbers that have attributes and no record.
    pub(super) strays: Vec<Ino>,
    /// Where the next page begins.
    pub(super) next: Option<Ino>,
}

impl Meta {
    /// All inodes after `after`, in order of their numbers, at most `limit` (at least 1).
    pub async fn scan_inodes(&self, after: Option<Ino>, limit: usize) -> Result<Page<InodeInfo>> {
        self.read(|txn| async move {
            let mut after = after;
            loop {
                let page = nodes_in(&*txn, after, limit).await?;
                if page.nodes.is_empty() && page.next.is_some() {
                    after = page.next;
                    continue;
                }
                let items = page.nodes.iter().map(info).collect();
                return Ok(Page { items, more: page.next.is_some() });
            }
        })
        .await
    }

    /// All dentries after `after`, in order of directory and name, at most `limit`.
    pub async fn scan_dentries(&self, after: Option<(Ino, &Name)>, limit: usize) -> Result<Page<DentryInfo>> {
        self.read(|txn| async move {
            let page = page_of(&*txn, &key::all_dentries(after), limit).await?;
            let dentry = |(key, value): &(Bytes, Bytes)| {
                let (dir, name) = record::parsed(key::parse_dentry(key), "dentry key")?;
                let DentryRecord { ino, kind } = DentryRecord::decode(value)?;
                Ok(DentryInfo { dir, dentry: Dentry { name, ino, kind } })
            };
            let items = page.entries.iter().map(dentry).collect::<Result<_>>()?;
            Ok(Page { items, more: page.more })
        })
        .await
    }

    /// All slice groups after `after`, in order of file, chunk and stamp, at most `limit`; each may have 90 kB.
    pub async fn scan_slices(
        &self,
        after: Option<(Ino, ChunkIndex, SliceStamp)>,
        limit: usize,
    ) -> Result<Page<SliceInfo>> {
        self.read(|txn| async move {
            let page = groups_in(&*txn, &key::all_chunks(after), Isolation::Snapshot, limit).await?;
            let info = |(ino, chunk, group)| SliceInfo { ino, chunk, group };
            Ok(Page { items: page.items.into_iter().map(info).collect(), more: page.more })
        })
        .await
    }

    /// All orphan records after `after`, at most `limit`.
    pub async fn scan_orphans(
        &self,
        after: Option<(Ino, SessionId)>,
        limit: usize,
    ) -> Result<Page<OrphanInfo>> {
        self.read(|txn| async move {
            let live = live_in(&*txn).await?;
            let mut range = key::all_orphans(None);
            if let Some((ino, session)) = after {
                range = range.after(&key::orphan(ino, session));
            }
            let page = page_of(&*txn, &range, limit).await?;
            let orphan = |(key, _): &(Bytes, Bytes)| {
                let (ino, session) = record::parsed(key::parse_orphan(key), "orphan key")?;
                let alive = live.iter().any(|live| live.id == session);
                Ok(OrphanInfo { ino, session, alive })
            };
            let items = page.entries.iter().map(orphan).collect::<Result<_>>()?;
            Ok(Page { items, more: page.more })
        })
        .await
    }
}

fn info(node: &Node) -> InodeInfo {
    InodeInfo {
        attr: node.attr(),
        parent: node.inode.parent,
        allocated: node.allocated,
        trimming: node.truncation.trim_from.is_some(),
    }
}

pub(super) async fn page_of(txn: &dyn Txn, range: &KeyRange, limit: usize) -> Result<RangePage> {
    let query = RangeQuery {
        begin: range.begin.clone(),
        end: range.end.clone(),
        limit,
        direction: Direction::Forward,
        isolation: Isolation::Snapshot,
    };
    Ok(txn.range(query).await?)
}

/// Complete inodes after `after`, at most `limit`.
pub(super) async fn nodes_in(txn: &dyn Txn, after: Option<Ino>, limit: usize) -> Result<NodePage> {
    let limit = limit.max(1);
    let keys = limit.saturating_mul(KEYS_PER_INODE).max(KEYS_MIN);
    let page = page_of(txn, &key::all_inodes(after), keys).await?;
    let ino_of = |key: &[u8]| record::parsed(key::parse_inode(key), "inode key");
    // The keys of the last inode may go on beyond the page.
    let cut = match page.entries.last() {
        Some((key, _)) if page.more => Some(ino_of(key)?.0),
        _ => None,
    };
    let mut reader = NodeReader::default();
    let mut found = NodePage::default();
    let mut record_of = None;
    let mut last_ino = None;
    let mut records = 0;
    for (key, value) in &page.entries {
        let (ino, field) = ino_of(key)?;
        let ended = cut == Some(ino) || (records >= limit && last_ino != Some(ino));
        if ended {
            found.next = last_ino;
            break;
        }
        if field == Some(Field::Inode) {
            record_of = Some(ino);
            records += 1;
        } else if record_of != Some(ino) && found.strays.last() != Some(&ino) {
            found.strays.push(ino);
        }
        found.nodes.extend(reader.push(key, value)?);
        last_ino = Some(ino);
    }
    found.nodes.extend(reader.finish());
    Ok(found)
}

/// Names of extended attributes after `after`.
pub(super) async fn xattrs_in(txn: &dyn Txn, after: Option<&(Ino, Bytes)>) -> Result<Page<(Ino, Bytes)>> {
    let range = key::all_xattrs(after.map(|(ino, name)| (*ino, name.as_ref())));
    let page = page_of(txn, &range, XATTRS_PAGE).await?;
    let name = |(key, _): &(Bytes, Bytes)| record::parsed(key::parse_xattr(key), "attribute key");
    let items = page.entries.iter().map(name).collect::<Result<_>>()?;
    Ok(Page { items, more: page.more })
}

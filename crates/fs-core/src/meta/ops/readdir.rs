//! readdir and readdirplus.

use bytes::Bytes;
use hashbrown::HashMap;
use rfs_kv::{Direction, Isolation, RangeQuery, Txn};

use crate::meta::inode::{Node, NodeReader};
use crate::meta::record::{self, DentryRecord};
use crate::meta::{Dentry, Meta, Page, key};
use crate::types::{Attr, Ino, Name, Result};

/// Inodes whose numbers differ by at most this are read in one range: what lies between is cheaper to skip than to
/// ask again.
const GAP_MAX: u64 = 8;
/// Keys of inodes that are read at a time.
const KEYS_PAGE: usize = 4096;

impl Meta {
    /// Entries of `dir` after the name `after`, ordered by name, at most `limit`. Entries that come and go meanwhile
    /// do not disturb the others. A removed directory has none. One range read, no conflicts.
    pub async fn readdir(&self, dir: Ino, after: Option<&Name>, limit: usize) -> Result<Page<Dentry>> {
        self.read(|txn| async move { readdir_in(&*txn, dir, after, limit).await }).await
    }

    /// As [`Meta::readdir`], with attributes. `None` instead of them: the inode is missing, which is damage.
    ///
    /// One range read for the names and one for each run of near inode numbers: one in most directories.
    pub async fn readdirplus(
        &self,
        dir: Ino,
        after: Option<&Name>,
        limit: usize,
    ) -> Result<Page<(Dentry, Option<Attr>)>> {
        self.read(|txn| async move {
            let Page { items: dentries, more } = readdir_in(&*txn, dir, after, limit).await?;
            let attrs = attrs_in(&*txn, &dentries).await?;
            let with_attr = |dentry: Dentry| {
                let attr = attrs.get(&dentry.ino).copied();
                (dentry, attr)
            };
            Ok(Page { items: dentries.into_iter().map(with_attr).collect(), more })
        })
        .await
    }
}

async fn readdir_in(txn: &dyn Txn, dir: Ino, after: Option<&Name>, limit: usize) -> Result<Page<Dentry>> {
    let range = key::dentries(dir, after);
    let query = RangeQuery {
        begin: range.begin,
        end: range.end,
        limit,
        direction: Direction::Forward,
        isolation: Isolation::Snapshot,
    };
    let page = txn.range(query).await?;
    let items = page.entries.iter().map(|(key, value)| dentry(key, value)).collect::<Result<_>>()?;
    Ok(Page { items, more: page.more })
}

fn dentry(key: &Bytes, value: &[u8]) -> Result<Dentry> {
    let (_, name) = record::parsed(key::parse_dentry(key), "dentry key")?;
    let DentryRecord { ino, kind } = DentryRecord::decode(value)?;
    Ok(Dentry { name, ino, kind })
}

async fn attrs_in(txn: &dyn Txn, dentries: &[Dentry]) -> Result<HashMap<Ino, Attr>> {
    let mut inos: Vec<Ino> = dentries.iter().map(|dentry| dentry.ino).collect();
    inos.sort_unstable();
    inos.dedup();
    let mut attrs = HashMap::with_capacity(inos.len());
    for run in inos.chunk_by(|a, b| b.0 - a.0 <= GAP_MAX) {
        if let (Some(first), Some(last)) = (run.first(), run.last()) {
            read_run(txn, *first, *last, &mut |node| {
                attrs.insert(node.ino, node.attr());
            })
            .await?;
        }
    }
    Ok(attrs)
}

async fn read_run(txn: &dyn Txn, first: Ino, last: Ino, found: &mut (dyn FnMut(&Node) + Send)) -> Result<()> {
    let mut range = key::inodes(first, last);
    let mut reader = NodeReader::default();
    loop {
        let query = RangeQuery {
            begin: range.begin.clone(),
            end: range.end.clone(),
            limit: KEYS_PAGE,
            direction: Direction::Forward,
            isolation: Isolation::Snapshot,
        };
        let page = txn.range(query).await?;
        for (key, value) in &page.entries {
            if let Some(node) = reader.push(key, value)? {
                found(&node);
            }
        }
        match page.entries.last() {
            Some((last, _)) if page.more => range = range.after(last),
            _ => break,
        }
    }
    if let Some(node) = reader.finish() {
        found(&node);
    }
    Ok(())
}

//! Reading what files are made of, and what operations on slices share.

use std::collections::BTreeMap;

use bytes::Bytes;
use rfs_kv::{Direction, Isolation, RangeQuery, Txn};

use crate::meta::key::KeyRange;
use crate::meta::{Meta, Page, key, record};
use crate::types::{ChunkIndex, ErrorKind, Ino, PackId, Result, Slice, SliceGroup, Stored};

/// Slice groups that are read at a time; each is up to 90 kB, most are some hundred bytes.
const GROUPS_PAGE: usize = 256;

impl Meta {
    /// The slice groups of one chunk, oldest first: later ones cover earlier ones. No conflicts.
    ///
    /// What lies beyond the file's length is not part of the file, whatever is stored there.
    pub async fn chunk(&self, ino: Ino, chunk: ChunkIndex) -> Result<Vec<SliceGroup>> {
        self.read(|txn| async move { chunk_in(&*txn, ino, chunk).await }).await
    }

    /// The chunks of a file from `from` on that have slices, at most `limit`, each with all its groups.
    pub async fn chunks(
        &self,
        ino: Ino,
        from: ChunkIndex,
        limit: usize,
    ) -> Result<Page<(ChunkIndex, Vec<SliceGroup>)>> {
        self.read(|txn| async move { chunks_in(&*txn, ino, from, limit).await }).await
    }
}

async fn chunk_in(txn: &dyn Txn, ino: Ino, chunk: ChunkIndex) -> Result<Vec<SliceGroup>> {
    let mut range = key::chunk(ino, chunk);
    let mut groups = Vec::new();
    loop {
        let page = groups_in(txn, &range, Isolation::Snapshot, GROUPS_PAGE).await?;
        let last = page.items.last().map(|group| key::slice_group(ino, chunk, group.2.stamp));
        groups.extend(page.items.into_iter().map(|(_, _, group)| group));
        match last {
            Some(last) if page.more => range = range.after(&last),
            _ => return Ok(groups),
        }
    }
}

async fn chunks_in(
    txn: &dyn Txn,
    ino: Ino,
    from: ChunkIndex,
    limit: usize,
) -> Result<Page<(ChunkIndex, Vec<SliceGroup>)>> {
    let mut range = key::chunks_from(ino, from);
    let mut chunks: Vec<(ChunkIndex, Vec<SliceGroup>)> = Vec::new();
    loop {
        let page = groups_in(txn, &range, Isolation::Snapshot, GROUPS_PAGE).await?;
        let mut last = None;
        for (_, chunk, group) in page.items {
            last = Some(key::slice_group(ino, chunk, group.stamp));
            let full = chunks.len() == limit;
            match chunks.last_mut() {
                Some((index, groups)) if *index == chunk => groups.push(group),
                _ if full => return Ok(Page { items: chunks, more: true }),
                _ => chunks.push((chunk, vec![group])),
            }
        }
        match last {
            Some(last) if page.more => range = range.after(&last),
            _ => return Ok(Page { items: chunks, more: false }),
        }
    }
}

/// A page of slice groups of any files.
pub(in crate::meta) async fn groups_in(
    txn: &dyn Txn,
    range: &KeyRange,
    isolation: Isolation,
    limit: usize,
) -> Result<Page<(Ino, ChunkIndex, SliceGroup)>> {
    let query = RangeQuery {
        begin: range.begin.clone(),
        end: range.end.clone(),
        limit,
        direction: Direction::Forward,
        isolation,
    };
    let page = txn.range(query).await?;
    let items = page.entries.iter().map(|(key, value)| group(key, value)).collect::<Result<_>>()?;
    Ok(Page { items, more: page.more })
}

pub(in crate::meta) fn group(key: &[u8], value: &Bytes) -> Result<(Ino, ChunkIndex, SliceGroup)> {
    let (ino, chunk, stamp) = record::parsed(key::parse_slice_group(key), "slice key")?;
    Ok((ino, chunk, SliceGroup { stamp, slices: record::decode_group(value)? }))
}

/// Changes of packs' live bytes that a transaction adds up.
///
/// Every slice record counts all blocks of the run it names, whether it uses them in full or not, so the sum is 0
/// exactly when nothing names the pack.
#[derive(Debug, Default)]
pub(in crate::meta) struct LiveBytes(BTreeMap<PackId, i64>);

impl LiveBytes {
    pub(in crate::meta) fn gain(&mut self, slices: &[Slice]) {
        self.count(slices, 1);
    }

    pub(in crate::meta) fn lose(&mut self, slices: &[Slice]) {
        self.count(slices, -1);
    }

    pub(in crate::meta) fn merge(&mut self, other: &LiveBytes) {
        for (pack, delta) in &other.0 {
            *self.0.entry(*pack).or_default() += delta;
        }
    }

    fn count(&mut self, slices: &[Slice], sign: i64) {
        for slice in slices {
            if let Stored::Packed(run) = &slice.stored {
                let stored = i64::try_from(run.stored_bytes())
                    .expect("blocks are 31 bits long, at most 65,535 of them");
                *self.0.entry(run.pack).or_default() += sign * stored;
            }
        }
    }

    pub(in crate::meta) fn packs(&self) -> impl Iterator<Item = PackId> {
        self.0.keys().copied()
    }

    pub(in crate::meta) fn iter(&self) -> impl Iterator<Item = (PackId, i64)> {
        self.0.iter().map(|(pack, live)| (*pack, *live))
    }

    /// Adds the changes to the packs' counters.
    pub(in crate::meta) fn store(&self, txn: &dyn Txn) {
        for (pack, delta) in self.iter().filter(|(_, delta)| *delta != 0) {
            txn.add(&key::pack_live(pack), delta);
        }
    }
}

/// Adds slices to a chunk as groups that cover what is there. `order` tells groups of one transaction apart.
pub(in crate::meta) fn append_slices(
    txn: &dyn Txn,
    ino: Ino,
    chunk: ChunkIndex,
    slices: &[Slice],
    order: &mut u16,
) -> Result<()> {
    for value in record::encode_groups(slices)? {
        txn.set_versionstamped_key(&key::chunk_prefix(ino, chunk), *order, &[], &value);
        *order = order.checked_add(1).ok_or(ErrorKind::ArgumentTooLarge)?;
    }
    Ok(())
}

/// Removes up to `limit` groups of the range. Returns how many, and whether there are more.
pub(in crate::meta) async fn clear_groups(
    txn: &dyn Txn,
    range: &KeyRange,
    limit: usize,
    live: &mut LiveBytes,
) -> Result<(usize, bool)> {
    let page = groups_in(txn, range, Isolation::Serializable, limit).await?;
    for (_, _, group) in &page.items {
        live.lose(&group.slices);
    }
    if let (Some((ino, chunk, group)), true) = (page.items.last(), page.more) {
        let last = key::slice_group(*ino, *chunk, group.stamp);
        txn.clear_range(&range.begin, &key::successor(&last));
    } else if !page.items.is_empty() {
        txn.clear_range(&range.begin, &range.end);
    }
    Ok((page.items.len(), page.more))
}

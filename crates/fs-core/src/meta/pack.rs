//! The account of packs: how large each is, and how much of it is still named by slices.

use std::collections::BTreeMap;

use rfs_kv::{Direction, Isolation, RangeQuery, Txn};

use crate::types::{PackId, Result};

use super::record::PackRecord;
use super::{Meta, NewPack, Page, key, record};

/// Where the bytes of a pack are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PackState {
    /// In a journal on the disk of the client that wrote it.
    Staged,
    /// In the object store.
    Stored,
}

/// A pack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PackInfo {
    /// Its id.
    pub pack: PackId,
    /// Bytes of the object; of a staged pack, those of its journal that are relied on.
    pub stored_bytes: u64,
    /// Bytes of blocks that slices name; blocks that several slices name count several times, so it may exceed
    /// `stored_bytes`. 0 = garbage.
    pub live_bytes: i64,
    /// Where it is.
    pub state: PackState,
}

impl Meta {
    /// Packs after `after`, ordered by id, at most `limit`. No conflicts.
    pub async fn packs(&self, after: Option<PackId>, limit: usize) -> Result<Page<PackInfo>> {
        self.read(|txn| async move { packs_in(&*txn, after, limit).await }).await
    }

    /// The packs that are staged, ordered by id.
    pub async fn staged_packs(&self) -> Result<Vec<PackInfo>> {
        let mut staged = Vec::new();
        let mut after = None;
        loop {
            let page = self.packs(after, 4096).await?;
            after = page.items.last().map(|pack| pack.pack);
            staged.extend(page.items.into_iter().filter(|pack| pack.state == PackState::Staged));
            if !page.more || after.is_none() {
                return Ok(staged);
            }
        }
    }

    /// Notes that packs are stored; one without a record stays so. Durable at return: their journals may be deleted.
    ///
    /// Reads each record, so it conflicts with whatever names the pack or removes it.
    pub async fn packs_stored(&self, packs: &[NewPack]) -> Result<()> {
        for page in packs.chunks(256) {
            self.mutate(|txn| async move { packs_stored_in(&*txn, page).await }).await?;
        }
        self.sync().await
    }

    /// Removes the records of packs that no slice names; returns those that were removed (or had no record). Their
    /// objects may be deleted from the store when nobody can still be reading them.
    ///
    /// Reads each pack's live bytes, so it conflicts with whatever names it again. The caller leaves out packs that it
    /// has written and not yet committed in full: a commit that names a pack as new would bring its record back.
    ///
    /// Everything is durable at return: otherwise a crash could bring back a file whose bytes were deleted.
    pub async fn drop_packs(&self, packs: &[PackId]) -> Result<Vec<PackId>> {
        let mut dropped = Vec::new();
        for page in packs.chunks(256) {
            dropped.extend(self.mutate(|txn| async move { drop_packs_in(&*txn, page).await }).await?);
        }
        if !dropped.is_empty() {
            self.sync().await?;
        }
        Ok(dropped)
    }
}

fn page_of(range: key::KeyRange, limit: usize) -> RangeQuery {
    RangeQuery {
        begin: range.begin,
        end: range.end,
        limit,
        direction: Direction::Forward,
        isolation: Isolation::Snapshot,
    }
}

async fn packs_in(txn: &dyn Txn, after: Option<PackId>, limit: usize) -> Result<Page<PackInfo>> {
    let (records, live) = futures::try_join!(
        txn.range(page_of(key::packs(after), limit)),
        txn.range(page_of(key::packs_live(after), limit))
    )?;
    let mut live_bytes = BTreeMap::new();
    for (key, value) in &live.entries {
        let pack = record::parsed(key::parse_pack(key), "pack key")?;
        live_bytes.insert(pack, record::decode_counter(value)?);
    }
    let mut items = Vec::with_capacity(records.entries.len());
    for (key, value) in &records.entries {
        let pack = record::parsed(key::parse_pack(key), "pack key")?;
        let PackRecord { bytes: stored_bytes, state } = PackRecord::decode(value)?;
        let live_bytes = match live_bytes.get(&pack) {
            Some(live) => *live,
            None => live_in(txn, pack).await?,
        };
        items.push(PackInfo { pack, stored_bytes, live_bytes, state });
    }
    Ok(Page { items, more: records.more })
}

async fn live_in(txn: &dyn Txn, pack: PackId) -> Result<i64> {
    let value = txn.snapshot_get(&key::pack_live(pack)).await?;
    Ok(value.as_deref().map(record::decode_counter).transpose()?.unwrap_or(0))
}

async fn packs_stored_in(txn: &dyn Txn, packs: &[NewPack]) -> Result<()> {
    let reads = packs.iter().map(|pack| async move { txn.get(&key::pack(pack.pack)).await });
    let found = futures::future::try_join_all(reads).await?;
    for (pack, record) in packs.iter().zip(found) {
        if record.is_some() {
            pack.store(txn);
        }
    }
    Ok(())
}

async fn drop_packs_in(txn: &dyn Txn, packs: &[PackId]) -> Result<Vec<PackId>> {
    let reads = packs.iter().map(|pack| async move { txn.get(&key::pack_live(*pack)).await });
    let live = futures::future::try_join_all(reads).await?;
    let mut dropped = Vec::new();
    for (pack, live) in packs.iter().zip(live) {
        if live.as_deref().map(record::decode_counter).transpose()?.unwrap_or(0) == 0 {
            txn.clear(&key::pack(*pack));
            txn.clear(&key::pack_live(*pack));
            dropped.push(*pack);
        }
    }
    Ok(dropped)
}

//! reap: inodes that nobody can reach any more are removed with all that belongs to them.

use std::collections::BTreeSet;

use rfs_kv::{Direction, Isolation, RangeQuery, Txn};

use crate::meta::inode::peek;
use crate::meta::key::Field;
use crate::meta::session::live_in;
use crate::meta::usage::{self, Change};
use crate::meta::{Meta, Page, key, record};
use crate::types::{ChunkIndex, Ino, PackId, Result, SessionId};

use super::chunks::{LiveBytes, clear_groups};

/// Slice groups that one transaction removes.
const GROUPS_PAGE: usize = 512;
/// Inodes that one transaction removes.
const INODES_PAGE: usize = 128;
/// Inodes whose slices are read at a time; they share [`GROUPS_PAGE`].
const CONCURRENT: usize = 16;
/// Sessions that refer to one orphan; more than can be mounted.
const REFERRERS_MAX: usize = 10_000;

/// What a reap did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Reaped {
    /// Inodes that were removed.
    pub inodes: u64,
    /// Packs that lost live bytes.
    pub packs: BTreeSet<PackId>,
}

impl Meta {
    /// Removes orphans that this session does not refer to any more: their attributes, extended attributes and slices.
    /// Those that another live session refers to, or that have a name, stay. May be called with inodes that are gone.
    ///
    /// One transaction removes at most 128 inodes and 512 slice groups; an inode with more takes several and
    /// stays an orphan until the last. Reads what it removes, with conflicts.
    pub async fn reap(&self, inos: &[Ino]) -> Result<Reaped> {
        let session = self.session()?.id();
        let mut reaped = Reaped::default();
        // Those of one transaction are looked at together, so none may be there twice.
        let mut inos = inos.to_vec();
        inos.sort_unstable();
        inos.dedup();
        let mut rest = &inos[..];
        let mut inodes_max = INODES_PAGE;
        while !rest.is_empty() {
            let batch = &rest[..rest.len().min(inodes_max)];
            // What is freed is known when it is.
            let reservation = self.usage.reserve(Change::default()).await?;
            let page = self.mutate(|txn| async move { reap_in(&*txn, batch, session).await }).await?;
            reservation.keep_as(page.change);
            reaped.inodes += page.change.inodes.unsigned_abs();
            reaped.packs.extend(page.packs);
            rest = &rest[page.done..];
            // One that takes several transactions gets them for itself.
            inodes_max = if page.done == 0 { 1 } else { INODES_PAGE };
        }
        Ok(reaped)
    }

    /// Orphans after `after` that only dead sessions refer to: what a crash left behind. At most `limit`.
    pub async fn orphans(&self, after: Option<Ino>, limit: usize) -> Result<Page<Ino>> {
        self.read(|txn| async move { orphans_in(&*txn, after, limit).await }).await
    }
}

/// What one transaction did.
#[derive(Debug, Clone, Default)]
pub(in crate::meta) struct Reap {
    /// Inodes from the beginning of the batch that are done with.
    done: usize,
    /// Whether one of them has more slices than fit the transaction.
    stopped: bool,
    /// Slice groups that were removed.
    groups: usize,
    change: Change,
    packs: Vec<PackId>,
}

pub(in crate::meta) async fn reap_in(txn: &dyn Txn, inos: &[Ino], session: SessionId) -> Result<Reap> {
    let mut reap = Reap::default();
    let mut live = LiveBytes::default();
    let found = inos.iter().map(|ino| find_unused(txn, *ino, session));
    let found = futures::future::try_join_all(found).await?;
    for batch in found.chunks(CONCURRENT) {
        let groups_max = GROUPS_PAGE / batch.len();
        let clearing = batch.iter().map(|unused| clear_slices(txn, unused.as_ref(), groups_max));
        let cleared = futures::future::try_join_all(clearing).await?;
        for (unused, slices) in batch.iter().zip(&cleared) {
            live.merge(&slices.live);
            // Those after the first that is not done keep their records for the next transaction.
            if slices.more || reap.stopped {
                reap.stopped = true;
            } else {
                if let Some(unused) = unused {
                    remove_inode(txn, unused.ino);
                    reap.change.bytes -= unused.allocated;
                    reap.change.inodes -= 1;
                }
                reap.done += 1;
            }
        }
        reap.groups += cleared.iter().map(|slices| slices.count).sum::<usize>();
        if reap.stopped || reap.groups >= GROUPS_PAGE {
            break;
        }
    }
    live.store(txn);
    usage::add_in(txn, session, reap.change);
    reap.packs = live.packs().collect();
    Ok(reap)
}

/// An inode that may be removed.
struct Unused {
    ino: Ino,
    allocated: i64,
}

/// Looks whether an inode may be removed. Removes this session's reference, and those of dead ones.
async fn find_unused(txn: &dyn Txn, ino: Ino, session: SessionId) -> Result<Option<Unused>> {
    let record = key::inode(ino, Field::Inode);
    let allocated = key::inode(ino, Field::Allocated);
    for key in [record, allocated] {
        txn.add_read_conflict(&key, &key::successor(&key));
    }
    let (referrers, node) = futures::try_join!(referrers_in(txn, ino), peek(txn, ino))?;
    txn.clear(&key::orphan(ino, session));
    let others: Vec<SessionId> = referrers.into_iter().filter(|other| *other != session).collect();
    if !others.is_empty() {
        let live = live_in(txn).await?;
        let is_live = |id: &SessionId| live.iter().any(|session| session.id == *id);
        if others.iter().any(is_live) {
            return Ok(None);
        }
        for dead in &others {
            txn.clear(&key::orphan(ino, *dead));
        }
    }
    let Some(node) = node.filter(|node| node.inode.nlink == 0) else { return Ok(None) };
    // A paged removal must be found again after a crash.
    txn.set(&key::orphan(ino, session), &record::encode_orphan());
    Ok(Some(Unused { ino, allocated: node.allocated }))
}

/// Slices that were removed from one inode.
#[derive(Default)]
struct Cleared {
    live: LiveBytes,
    count: usize,
    more: bool,
}

async fn clear_slices(txn: &dyn Txn, unused: Option<&Unused>, groups_max: usize) -> Result<Cleared> {
    let mut cleared = Cleared::default();
    if let Some(unused) = unused {
        let range = key::chunks_from(unused.ino, ChunkIndex(0));
        (cleared.count, cleared.more) = clear_groups(txn, &range, groups_max, &mut cleared.live).await?;
    }
    Ok(cleared)
}

async fn referrers_in(txn: &dyn Txn, ino: Ino) -> Result<Vec<SessionId>> {
    let range = key::orphans_of(ino);
    let query = RangeQuery {
        begin: range.begin,
        end: range.end,
        limit: REFERRERS_MAX,
        direction: Direction::Forward,
        isolation: Isolation::Serializable,
    };
    let page = txn.range(query).await?;
    page.entries.iter().map(|(key, _)| Ok(record::parsed(key::parse_orphan(key), "orphan key")?.1)).collect()
}

/// Removes all keys of an inode but its slices.
fn remove_inode(txn: &dyn Txn, ino: Ino) {
    for range in [key::inodes(ino, ino), key::xattrs(ino), key::orphans_of(ino)] {
        txn.clear_range(&range.begin, &range.end);
    }
}

async fn orphans_in(txn: &dyn Txn, after: Option<Ino>, limit: usize) -> Result<Page<Ino>> {
    let live = live_in(txn).await?;
    let is_live = |id: SessionId| live.iter().any(|session| session.id == id);
    let mut range = key::all_orphans(after);
    let mut inos: Vec<(Ino, bool)> = Vec::new();
    loop {
        let query = RangeQuery {
            begin: range.begin.clone(),
            end: range.end.clone(),
            limit: limit.max(256),
            direction: Direction::Forward,
            isolation: Isolation::Snapshot,
        };
        let page = txn.range(query).await?;
        for (key, _) in &page.entries {
            let (ino, session) = record::parsed(key::parse_orphan(key), "orphan key")?;
            match inos.last_mut() {
                Some((last, wanted)) if *last == ino => *wanted |= is_live(session),
                _ => inos.push((ino, is_live(session))),
            }
        }
        // The last inode may have more referrers on the next page, so there must be one beyond the limit.
        let dead = || inos.iter().filter(|(_, wanted)| !wanted).map(|(ino, _)| *ino);
        match page.entries.last() {
            Some((last, _)) if page.more && dead().count() <= limit => range = range.after(last),
            _ => {
                let more = page.more || dead().count() > limit;
                return Ok(Page { items: dead().take(limit).collect(), more });
            }
        }
    }
}

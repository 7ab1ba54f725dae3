//! commit: slices whose bytes are durable become part of their files.

use std::collections::BTreeSet;

use rfs_kv::Txn;

use crate::meta::inode::get_inode;
use crate::meta::key::Field;
use crate::meta::record::{self, PackRecord, Times, Truncation};
use crate::meta::usage::{self, Change};
use crate::meta::{FILE_BYTES_MAX, Meta, PackState, key};
use crate::types::{ChunkIndex, Error, ErrorKind, Ino, PackId, Result, SessionId, Slice, Stored, Timestamp};

use super::chunks::{LiveBytes, append_slices};

/// A pack that is durable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NewPack {
    /// Its id.
    pub pack: PackId,
    /// Bytes of the object; of a staged pack, those that are in its journal.
    pub bytes: u64,
    /// Where they are.
    pub state: PackState,
}

impl NewPack {
    /// Writes the pack's record, unless there is one that says more. Blindly.
    pub(in crate::meta) fn store(&self, txn: &dyn Txn) {
        let record = PackRecord { bytes: self.bytes, state: self.state };
        txn.max(&key::pack(self.pack), &record.encode());
        txn.add(&key::pack_live(self.pack), 0);
    }
}

/// What changes in one file.
#[derive(Debug, Clone)]
pub struct FileCommit {
    /// The file.
    pub ino: Ino,
    /// Slices by chunk, each chunk at most once; later ones cover earlier ones and all that is stored.
    pub chunks: Vec<(ChunkIndex, Vec<Slice>)>,
    /// The file is at least this long afterwards.
    pub grow_to: Option<u64>,
    /// When it was written; ctime becomes at least that.
    pub mtime: Option<Timestamp>,
    /// Change of the bytes that are not holes.
    pub allocated_delta: i64,
}

/// What a commit did.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Committed {
    /// Files that do not exist any more; their slices were dropped.
    pub missing: Vec<Ino>,
}

impl Meta {
    /// Makes slices part of their files, all of them or none. Bytes they name must be durable.
    ///
    /// `new_packs` are packs that may have no record yet, or one that says less; any other pack that a slice names must have one (`Stale`:
    /// it was deleted meanwhile; read the source of the copy again).
    ///
    /// The caller keeps one call below 1 MB. Reads each file's record, its truncations and, with `mtime`, its times, so
    /// it conflicts with truncate, with changes of the inode's attributes and with its removal; the slices
    /// themselves, the length and all counters are written blindly.
    ///
    /// # Errors
    /// `Stale`; `NoSpace` at the volume's capacity; `FileTooLarge`; `ArgumentTooLarge` above the store's limits.
    pub async fn commit(&self, files: &[FileCommit], new_packs: &[NewPack]) -> Result<Committed> {
        if files.iter().filter_map(|file| file.grow_to).any(|length| length > FILE_BYTES_MAX) {
            return Err(ErrorKind::FileTooLarge.into());
        }
        let session = self.session()?.id();
        let change = Change::bytes(files.iter().map(|file| file.allocated_delta).sum());
        let reservation = self.usage.reserve(change).await?;
        loop {
            let outcome =
                self.mutate(|txn| async move { commit_in(&*txn, files, new_packs, session).await }).await?;
            match outcome {
                Outcome::Done(committed) if committed.missing.is_empty() => {
                    reservation.keep();
                    return Ok(committed);
                }
                Outcome::Done(committed) => {
                    let missing = |file: &&FileCommit| committed.missing.contains(&file.ino);
                    let done = files.iter().filter(|file| !missing(file));
                    let change = Change::bytes(done.map(|file| file.allocated_delta).sum());
                    reservation.keep_as(change);
                    return Ok(committed);
                }
                Outcome::TrimFirst(inos) => {
                    for ino in inos {
                        self.trim(ino).await?;
                    }
                }
            }
        }
    }
}

#[derive(Debug, Clone)]
pub(in crate::meta) enum Outcome {
    Done(Committed),
    /// Nothing was changed: chunks beyond the end of these files must be removed first.
    TrimFirst(Vec<Ino>),
}

/// What a commit reads of a file.
struct Found {
    exists: bool,
    trim: bool,
    times: Option<Times>,
}

pub(in crate::meta) async fn commit_in(
    txn: &dyn Txn,
    files: &[FileCommit],
    new_packs: &[NewPack],
    session: SessionId,
) -> Result<Outcome> {
    let reads = files.iter().map(|file| find(txn, file));
    let (found, ()) =
        futures::try_join!(futures::future::try_join_all(reads), check_packs(txn, files, new_packs))?;
    let with_files = || files.iter().zip(&found);
    let to_trim: Vec<Ino> = with_files().filter(|(_, found)| found.trim).map(|(file, _)| file.ino).collect();
    if !to_trim.is_empty() {
        return Ok(Outcome::TrimFirst(to_trim));
    }
    for pack in new_packs {
        pack.store(txn);
    }
    let mut live = LiveBytes::default();
    let mut order = 0;
    let mut bytes = 0;
    for (file, found) in with_files().filter(|(_, found)| found.exists) {
        store_file(txn, file, found, &mut order)?;
        for (_, slices) in &file.chunks {
            live.gain(slices);
        }
        bytes += file.allocated_delta;
    }
    live.store(txn);
    usage::add_in(txn, session, Change::bytes(bytes));
    let missing = with_files().filter(|(_, found)| !found.exists).map(|(file, _)| file.ino).collect();
    Ok(Outcome::Done(Committed { missing }))
}

async fn find(txn: &dyn Txn, file: &FileCommit) -> Result<Found> {
    let times = async {
        match file.mtime {
            Some(_) => Ok(txn.get(&key::inode(file.ino, Field::Times)).await?),
            None => Ok(None),
        }
    };
    let truncation = async { Ok(txn.get(&key::inode(file.ino, Field::Truncation)).await?) };
    let (inode, times, truncation) = futures::try_join!(get_inode(txn, file.ino), times, truncation)?;
    let truncation = truncation.as_deref().map(Truncation::decode).transpose()?.unwrap_or_default();
    let exists = inode.is_some();
    let times = match (times, inode) {
        (Some(value), _) => Some(Times::decode(&value)?),
        (None, inode) => inode.map(|inode| Times::both(inode.crtime)),
    };
    Ok(Found { exists, trim: exists && truncation.trim_from.is_some(), times })
}

/// Every pack that slices name has a record, or gets one.
async fn check_packs(txn: &dyn Txn, files: &[FileCommit], new_packs: &[NewPack]) -> Result<()> {
    let slices = files.iter().flat_map(|file| &file.chunks).flat_map(|(_, slices)| slices);
    check_packs_of(txn, slices, new_packs).await
}

/// See [`check_packs`].
pub(in crate::meta) async fn check_packs_of<'a>(
    txn: &dyn Txn,
    slices: impl Iterator<Item = &'a Slice>,
    new_packs: &[NewPack],
) -> Result<()> {
    let mut packs = BTreeSet::new();
    for slice in slices {
        match &slice.stored {
            Stored::Packed(run) => packs.insert(run.pack),
            Stored::Hole | Stored::Inline(_) => continue,
        };
    }
    for new in new_packs {
        packs.remove(&new.pack);
    }
    let checks = packs.into_iter().map(|pack| async move {
        match txn.get(&key::pack(pack)).await? {
            Some(_) => Ok(()),
            None => Err(Error::new(ErrorKind::Stale, format!("pack {pack} was deleted meanwhile"))),
        }
    });
    futures::future::try_join_all(checks).await?;
    Ok(())
}

fn store_file(txn: &dyn Txn, file: &FileCommit, found: &Found, order: &mut u16) -> Result<()> {
    for (chunk, slices) in &file.chunks {
        append_slices(txn, file.ino, *chunk, slices, order)?;
    }
    if let Some(length) = file.grow_to {
        txn.max(&key::inode(file.ino, Field::Length), &record::encode_length(length));
    }
    if let (Some(mtime), Some(times)) = (file.mtime, found.times) {
        let times = Times { mtime, ctime: times.ctime.max(mtime) };
        txn.set(&key::inode(file.ino, Field::Times), &times.encode());
    }
    if file.allocated_delta != 0 {
        txn.add(&key::inode(file.ino, Field::Allocated), file.allocated_delta);
    }
    Ok(())
}

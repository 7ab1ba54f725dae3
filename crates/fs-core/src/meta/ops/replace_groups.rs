//! Compaction of a chunk: few slices take the place of many.

use rfs_kv::Txn;

use crate::meta::{Meta, key, record};
use crate::types::{ChunkIndex, Error, ErrorKind, Ino, Result, Slice, SliceStamp};

use super::chunks::LiveBytes;
use super::commit::{NewPack, check_packs_of};

/// What to replace in a chunk.
#[derive(Debug, Clone, Copy)]
pub struct ReplaceArgs<'a> {
    /// The file.
    pub ino: Ino,
    /// The chunk.
    pub chunk: ChunkIndex,
    /// Stamps of the groups to replace, oldest first: neighbours, with no other group between them.
    pub seen: &'a [SliceStamp],
    /// What they amount to: slices that do not overlap.
    pub merged: &'a [Slice],
    /// Packs that may have no record yet.
    pub new_packs: &'a [NewPack],
}

impl Meta {
    /// Puts `merged` in the place of the groups `seen`. What was committed after them still covers it.
    ///
    /// Reads each group that it replaces, so that it conflicts with truncate and another compaction. The merged
    /// groups take the stamps of the last ones that were seen.
    ///
    /// # Errors
    /// `Stale` when a group is gone, or a pack: look at the chunk again; `ArgumentTooLarge` when `merged` needs more
    /// records than it replaces.
    pub async fn replace_groups(&self, args: ReplaceArgs<'_>) -> Result<()> {
        let values = record::encode_groups(args.merged)?;
        if values.len() > args.seen.len() {
            let text = "the merged slices need more records than they replace";
            return Err(Error::new(ErrorKind::ArgumentTooLarge, text));
        }
        let (args, values) = (&args, &values);
        self.mutate(|txn| async move { replace_groups_in(&*txn, args, values).await }).await
    }
}

pub(in crate::meta) async fn replace_groups_in(
    txn: &dyn Txn,
    args: &ReplaceArgs<'_>,
    values: &[Vec<u8>],
) -> Result<()> {
    let keys: Vec<[u8; 29]> =
        args.seen.iter().map(|stamp| key::slice_group(args.ino, args.chunk, *stamp)).collect();
    let reads = keys.iter().map(|key| txn.get(key));
    let found = futures::future::try_join_all(reads).await?;
    check_packs_of(txn, args.merged.iter(), args.new_packs).await?;
    let mut live = LiveBytes::default();
    for value in found {
        let value = value.ok_or(ErrorKind::Stale)?;
        live.lose(&record::decode_group(&value)?);
    }
    live.gain(args.merged);
    for pack in args.new_packs {
        pack.store(txn);
    }
    live.store(txn);
    let kept_from = keys.len() - values.len();
    for key in &keys[..kept_from] {
        txn.clear(key);
    }
    for (key, value) in keys[kept_from..].iter().zip(values) {
        txn.set(key, value);
    }
    Ok(())
}

//! Making a volume, and its record.

use std::path::{Path, PathBuf};

use rfs_kv::{Kv, Txn, transact};

use crate::meta::inode::Node;
use crate::meta::key::Counter;
use crate::meta::record::{self, Inode};
use crate::meta::{CLIENT_VERSION, FormatOptions, Meta, Volume, VolumeLimits, key, read};
use crate::types::{Error, ErrorKind, Ino, Kind, Result, SessionId, Timestamp};

/// The first number that is given to a new inode; smaller ones are reserved.
const FIRST_INO: u64 = 1024;
const BLOCK_BYTES_MIN: u32 = 4 << 10;
const BLOCK_BYTES_MAX: u32 = 4 << 20;

/// See [`Meta::format`].
pub(in crate::meta) async fn format(kv: &dyn Kv, options: &FormatOptions, now: Timestamp) -> Result<Volume> {
    let size = options.block_bytes;
    if !size.is_power_of_two() || !(BLOCK_BYTES_MIN..=BLOCK_BYTES_MAX).contains(&size) {
        return Err(Error::new(
            ErrorKind::Invalid,
            "the block size must be a power of two from 4 KiB to 4 MiB",
        ));
    }
    let volume = Volume {
        uuid: options.uuid,
        features_required: 0,
        client_version_min: CLIENT_VERSION,
        client_version_max: u32::MAX,
        block_bytes: size,
        codec: options.codec,
        limits: options.limits,
        created: now,
        store_url: options.store_url.clone(),
    };
    let (options, made) = (&options, &volume);
    transact(kv, |txn, attempt| async move {
        if let Some(found) = volume_in(&*txn).await? {
            let ours = attempt.maybe_committed && found.uuid == made.uuid;
            return if ours { Ok(()) } else { Err(Error::from(ErrorKind::Exists)) };
        }
        format_in(&*txn, options, made, now);
        Ok(())
    })
    .await?;
    Ok(volume)
}

fn format_in(txn: &dyn Txn, options: &FormatOptions, volume: &Volume, now: Timestamp) {
    txn.set(&key::VOLUME, &record::encode_volume(volume));
    txn.set(&key::NEXT_INO, &record::encode_next(FIRST_INO));
    txn.set(&key::NEXT_SESSION, &record::encode_next(1));
    let root = Inode {
        kind: Kind::Directory,
        mode: options.root_mode & 0o7777,
        nlink: 2,
        uid: options.root_uid,
        gid: options.root_gid,
        rdev: 0,
        flags: 0,
        generation: 0,
        parent: Ino::ROOT,
        crtime: now,
    };
    Node::new(Ino::ROOT, root).store_inode(txn);
    txn.add(&key::usage(Counter::Inodes, SessionId(0)), 1);
}

async fn volume_in(txn: &dyn Txn) -> Result<Option<Volume>> {
    let value = txn.get(&key::VOLUME).await?;
    value.as_deref().map(record::decode_volume).transpose()
}

/// See [`Meta::volume`].
pub(in crate::meta) async fn volume(kv: &dyn Kv) -> Result<Option<Volume>> {
    read(kv, |txn| async move { volume_in(&*txn).await }).await
}

/// See [`Meta::staging_dir`].
pub(in crate::meta) async fn staging_dir(kv: &dyn Kv) -> Result<Option<PathBuf>> {
    read(kv, |txn| async move {
        let value = txn.get(&key::STAGING).await?;
        value.as_deref().map(record::decode_staging).transpose()
    })
    .await
}

/// See [`Meta::update_volume`]. Replay-safe: sets.
pub(in crate::meta) async fn update_volume(kv: &dyn Kv, limits: VolumeLimits) -> Result<Volume> {
    transact(kv, |txn, _| async move {
        let mut volume = volume_in(&*txn).await?.ok_or(ErrorKind::NotFound)?;
        volume.limits = limits;
        txn.set(&key::VOLUME, &record::encode_volume(&volume));
        Ok(volume)
    })
    .await
}

impl Meta {
    /// Says where this mount stages, for those who come after it; `None`: beside the metadata. Durable at return.
    ///
    /// Replay-safe: sets. Conflicts with nothing.
    pub async fn set_staging_dir(&self, dir: Option<&Path>) -> Result<()> {
        self.mutate(|txn| async move {
            match dir {
                Some(dir) => txn.set(&key::STAGING, &record::encode_staging(dir)),
                None => txn.clear(&key::STAGING),
            }
            Ok(())
        })
        .await?;
        self.sync().await
    }

    /// Changes the limits of the volume; they hold at once on this mount.
    pub async fn set_limits(&self, limits: VolumeLimits) -> Result<()> {
        self.session()?;
        update_volume(&*self.kv, limits).await?;
        self.usage.set_limits(limits);
        Ok(())
    }
}

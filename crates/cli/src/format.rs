//! `rfs format`: makes a volume.

#![expect(clippy::doc_markdown, reason = "doc comments of arguments are the help text, shown as it is")]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use clap::ValueEnum;
use object_store::ObjectStore;
use rfs_core::meta::{Codec, FormatOptions, VolumeLimits};
use rfs_kv::Kv;
use rfs_store_s3::StoreMetrics;
use serde::Serialize;
use uuid::Uuid;

use crate::engine::{self, Missing, StoreSettings};
use crate::exit::{Exit, Failure, Result, ResultExt};
use crate::settings::{Size, Span};
use crate::url::{MetaUrl, StoreUrl};
use crate::{destroy, output, volume};

/// Make a volume
///
/// The store is tried out first: writing, reading, listing, deleting. Credentials come from the usual AWS places
/// (environment, ~/.aws, instance) and are stored nowhere.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Where names and attributes go: redb:///path/meta.redb or fdb:///etc/foundationdb/fdb.cluster?prefix=rfs
    meta_url: MetaUrl,
    /// Where contents go: s3://bucket/prefix?endpoint=…&region=… or file:///path
    store_url: StoreUrl,
    /// Most bytes that files may take (10GiB); can be changed later
    #[arg(long, value_name = "SIZE")]
    capacity: Option<Size>,
    /// Most inodes; can be changed later
    #[arg(long, value_name = "COUNT")]
    inodes: Option<u64>,
    /// Unit of compression and checksums: a power of two from 4KiB to 4MiB
    #[arg(long, value_name = "SIZE", default_value = "128KiB")]
    block_size: Size,
    /// Compression of blocks
    #[arg(long, value_enum, value_name = "CODEC", default_value = "lz4")]
    compression: Compression,
    /// How long to try to reach the store
    #[arg(long, value_name = "TIME", default_value = "30s")]
    io_timeout: Span,
    /// Give up what META_URL and STORE_URL hold now, unless META_URL's volume is mounted, on this machine or another. Whether
    /// STORE_URL belongs to yet another volume, which is mounted, cannot be seen
    #[arg(long)]
    force: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Compression {
    Lz4,
    None,
}

#[derive(Serialize)]
struct Formatted {
    uuid: String,
    meta_url: String,
    store_url: String,
    block_bytes: u32,
    capacity_bytes: Option<u64>,
    inodes_max: Option<u64>,
    conditional_put: bool,
    multipart: bool,
}

pub(crate) fn run(args: &Args) -> Result<Exit> {
    let block_bytes = u32::try_from(args.block_size.0)
        .ok()
        .filter(|bytes| bytes.is_power_of_two() && (4 << 10..=4 << 20).contains(bytes));
    let block_bytes =
        block_bytes.ok_or_else(|| Failure::usage("--block-size must be a power of two from 4KiB to 4MiB"))?;
    let limits = VolumeLimits { capacity: args.capacity.map(|size| size.0), inodes: args.inodes };
    if limits.capacity == Some(0) || limits.inodes == Some(0) {
        return Err(Failure::usage("a limit of 0 would leave no room for anything: leave it out for none"));
    }
    let codec = match args.compression {
        Compression::Lz4 => Codec::Lz4,
        Compression::None => Codec::None,
    };
    let plan = Plan {
        meta: args.meta_url.canonical(),
        store: args.store_url.clone(),
        block_bytes,
        codec,
        limits,
        io_timeout: args.io_timeout.0,
        force: args.force,
    };
    engine::check_store_url(&plan.store)?;
    volume::refuse_mounted(&plan.meta)?;
    let formatted = crate::runtime::block_on(plan.format())?;
    if args.json {
        output::json(&formatted)?;
    } else {
        output::line(format_args!(
            "made volume {}\n  metadata    {}\n  store       {}\nmount it with: rfs mount {} DIRECTORY",
            formatted.uuid, formatted.meta_url, formatted.store_url, formatted.meta_url
        ))?;
    }
    Ok(Exit::Ok)
}

/// Makes the embedded default volume below `directory`, unless it is there.
pub(crate) async fn embedded(directory: &Path) -> Result<MetaUrl> {
    std::fs::create_dir_all(directory).doing(format!("making {}", directory.display()))?;
    let directory = crate::url::canonical(directory);
    let path = directory.join("meta.redb");
    let meta = MetaUrl::Redb(path.clone());
    // Making it may have been interrupted between the file and the volume in it: the store was free then.
    let interrupted = path.exists();
    if interrupted {
        volume::refuse_mounted(&meta)?;
        if holds_volume(&meta).await? {
            return Ok(meta);
        }
    }
    let plan = Plan {
        meta: meta.clone(),
        store: StoreUrl::File(directory.join("store")),
        block_bytes: 128 << 10,
        codec: Codec::Lz4,
        limits: VolumeLimits::default(),
        io_timeout: Duration::from_secs(30),
        force: interrupted,
    };
    plan.format().await?;
    tracing::info!(volume = %meta, "made the embedded volume");
    Ok(meta)
}

async fn holds_volume(meta: &MetaUrl) -> Result<bool> {
    let kv = engine::open_kv(meta, Missing::Fail).await?;
    let found = volume::read_record(&*kv).await;
    kv.close().await.exit(Exit::MetadataDown, "closing the metadata store")?;
    Ok(found?.is_some())
}

/// What is at META_URL before.
#[derive(Debug)]
enum Held {
    /// Nothing that matters.
    NoVolume,
    /// Something that is to be cleared away; of a volume, if it can be read, the places where it may have staged bytes.
    GivenUp(Option<Vec<PathBuf>>),
}

/// Everything that formatting needs to know.
struct Plan {
    meta: MetaUrl,
    store: StoreUrl,
    block_bytes: u32,
    codec: Codec,
    limits: VolumeLimits,
    io_timeout: Duration,
    force: bool,
}

impl Plan {
    async fn format(self) -> Result<Formatted> {
        let held = self.look_at_metadata().await?;
        let settings = StoreSettings {
            io_timeout: self.io_timeout,
            missing: Missing::Create,
            metrics: Arc::new(StoreMetrics::default()),
        };
        let store = engine::open_store(&self.store, &settings).await?;
        let probed = engine::probe(&store).await?;
        // Only now is anything given up: a mistake in the store's URL must not cost the old volume.
        if self.force {
            self.clear(held, &store).await?;
        } else {
            volume::check_store_is_free(&store, &self.store).await?;
        }
        let kv = engine::open_kv(&self.meta, Missing::Create).await?;
        let made = self.make(&*kv, &store).await;
        let closed = kv.close().await.exit(Exit::MetadataDown, "closing the metadata store");
        let uuid = made?;
        closed?;
        Ok(Formatted {
            uuid: uuid.to_string(),
            meta_url: self.meta.to_string(),
            store_url: self.store.to_string(),
            block_bytes: self.block_bytes,
            capacity_bytes: self.limits.capacity,
            inodes_max: self.limits.inodes,
            conditional_put: probed.conditional_put,
            multipart: probed.multipart,
        })
    }

    /// What META_URL holds. Refuses a volume unless it is to be given up, and what somebody uses in any case.
    async fn look_at_metadata(&self) -> Result<Held> {
        if let MetaUrl::Redb(path) = &self.meta
            && !path.exists()
        {
            return match path.parent().filter(|directory| directory.is_dir()) {
                Some(_) => Ok(Held::NoVolume),
                None => Err(Failure::new(
                    Exit::Error,
                    format!("the directory of {} does not exist", path.display()),
                )
                .hint("make it first, on a disk that survives a reboot")),
            };
        }
        let kv = match engine::open_kv(&self.meta, Missing::Fail).await {
            Ok(kv) => kv,
            // What cannot be read is given up, too; what somebody uses is not.
            Err(failure) if self.force && matches!(failure.exit, Exit::Damage | Exit::Version) => {
                return Ok(Held::GivenUp(None));
            }
            Err(failure) => return Err(failure),
        };
        let found = volume::read_record(&*kv).await;
        let mut staged = None;
        if let Ok(Some(record)) = &found {
            // What cannot be read is given up, too.
            staged = Some(volume::staging_places(&*kv, &self.meta, record).await.unwrap_or_default());
        }
        kv.close().await.exit(Exit::MetadataDown, "closing the metadata store")?;
        if self.force {
            return Ok(Held::GivenUp(staged));
        }
        match found? {
            None => Ok(Held::NoVolume),
            Some(record) => Err(Failure::new(
                Exit::Error,
                format!("{} is already formatted: it holds volume {}", self.meta, record.uuid),
            )
            .hint(format!(
                "mount it with: rfs mount {} DIRECTORY; to give it up: rfs destroy, or rfs format --force",
                self.meta
            ))),
        }
    }

    /// Clears away what STORE_URL and META_URL hold, unless somebody has it mounted.
    async fn clear(&self, held: Held, store: &Arc<dyn ObjectStore>) -> Result<()> {
        let mut silent = |_| {};
        let erase = volume::erase_store(store, &mut silent);
        let Held::GivenUp(staged) = held else { return erase.await.map(drop) };
        match engine::open_kv(&self.meta, Missing::Fail).await {
            Ok(kv) => {
                let cleared = async {
                    match &staged {
                        Some(_) => volume::alone(&self.meta, &kv, erase).await?,
                        // What cannot be read as a volume says nothing of mounts either.
                        None => erase.await?,
                    };
                    if self.meta.is_exclusive() { Ok(()) } else { engine::wipe(&*kv).await }
                };
                let cleared = cleared.await;
                kv.close().await.exit(Exit::MetadataDown, "closing the metadata store")?;
                cleared?;
            }
            // What cannot be opened, nobody has mounted.
            Err(failure) if matches!(failure.exit, Exit::Damage | Exit::Version) => drop(erase.await?),
            Err(failure) => return Err(failure),
        }
        remove_metadata(&self.meta)?;
        destroy::remove_staged(&staged.unwrap_or_default())?;
        destroy::remove_cache(&self.meta)
    }

    async fn make(&self, kv: &dyn Kv, store: &Arc<dyn ObjectStore>) -> Result<Uuid> {
        let options = FormatOptions {
            uuid: Uuid::new_v4(),
            block_bytes: self.block_bytes,
            codec: self.codec,
            store_url: self.store.to_string(),
            limits: self.limits,
            root_uid: rustix::process::geteuid().as_raw(),
            root_gid: rustix::process::getegid().as_raw(),
            root_mode: 0o755,
        };
        volume::format(kv, store, &options).await.map(|volume| volume.uuid)
    }
}

/// Removes the file of a redb volume; other engines have been emptied already.
pub(crate) fn remove_metadata(url: &MetaUrl) -> Result<()> {
    let MetaUrl::Redb(path) = url else { return Ok(()) };
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).doing(format!("removing {}", path.display()))
        }
        _ => Ok(()),
    }
}

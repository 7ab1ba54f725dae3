//! The concrete engines, and what their errors mean as exit codes. Nothing else in rfs names an engine.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use object_store::ObjectStore;
use rfs_kv::Kv;
use rfs_meta_fdb::{FdbKv, FdbOptions};
use rfs_meta_redb::{OpenError, RedbKv, RedbOptions};
use rfs_store_s3::{
    MissingDirectory, ProbeStep, S3Config, StoreError, StoreFailure, StoreMetrics, StoreOptions,
};

use crate::exit::{Exit, Failure, Result, ResultExt};
use crate::url::{MetaUrl, StoreUrl};

/// What to do when the metadata is not there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Missing {
    /// Make it (when a volume is made).
    Create,
    /// Say that there is no volume.
    Fail,
}

/// What a check of a metadata file found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FileHealth {
    /// Nothing wrong.
    Sound,
    /// Something that was put right.
    Repaired,
}

/// How to open a store.
#[derive(Debug, Clone)]
pub(crate) struct StoreSettings {
    /// How long a request is tried; zero: for ever.
    pub(crate) io_timeout: Duration,
    /// What to do when a local directory is not there.
    pub(crate) missing: Missing,
    /// Where requests are counted.
    pub(crate) metrics: Arc<StoreMetrics>,
}

/// Opens the metadata store.
pub(crate) async fn open_kv(url: &MetaUrl, missing: Missing) -> Result<Arc<dyn Kv>> {
    match url {
        MetaUrl::Redb(path) => open_redb(path, missing),
        MetaUrl::Fdb { cluster_file, prefix } => {
            let options = FdbOptions {
                cluster_file: Some(cluster_file.clone()),
                prefix: prefix.clone().into_bytes(),
                ..FdbOptions::default()
            };
            let kv = FdbKv::connect(options).await.map_err(|error| {
                let exit = match &error {
                    rfs_meta_fdb::OpenError::Prefix(_) => Exit::Usage,
                    _ => Exit::MetadataDown,
                };
                let hint = matches!(error, rfs_meta_fdb::OpenError::ClusterFile(..))
                    .then(|| "the URL names it: fdb:///etc/foundationdb/fdb.cluster?prefix=NAME".to_owned());
                Failure { exit, error: error.into(), hint }
            })?;
            Ok(Arc::new(kv))
        }
    }
}

/// Opens the object store; sends nothing yet.
pub(crate) async fn open_store(url: &StoreUrl, settings: &StoreSettings) -> Result<Arc<dyn ObjectStore>> {
    let options = StoreOptions {
        io_timeout: Some(settings.io_timeout),
        missing_directory: match settings.missing {
            Missing::Create => MissingDirectory::Create,
            Missing::Fail => MissingDirectory::Fail,
        },
        metrics: Arc::clone(&settings.metrics),
        ..StoreOptions::default()
    };
    rfs_store_s3::open_store(&url.to_string(), &options).await.map_err(|error| {
        let exit = match &error {
            StoreError::InvalidUrl { .. } | StoreError::Config(_) => Exit::Usage,
            _ => store_exit(error.failure()),
        };
        Failure { exit, error: error.into(), hint: None }
    })
}

/// Reads the settings of a store's URL, without opening anything.
pub(crate) fn check_store_url(url: &StoreUrl) -> Result<()> {
    match url {
        StoreUrl::File(_) => Ok(()),
        StoreUrl::S3(text) => S3Config::from_url(text).map(|_| ()).map_err(Failure::usage),
    }
}

/// Makes every kind of request that rfs needs once.
pub(crate) async fn probe(store: &Arc<dyn ObjectStore>) -> Result<rfs_store_s3::ProbeReport> {
    let probed = rfs_store_s3::probe(store).await;
    probed.map_err(|error| Failure::new(store_exit(error.failure), error))
}

/// A failed request of the store, of the kind that `step` makes.
pub(crate) fn store_failure(error: object_store::Error, step: ProbeStep, doing: &str) -> Failure {
    let exit = store_exit(rfs_store_s3::classify(&error));
    let hint = rfs_store_s3::remedy(&error, step).map(str::to_owned);
    Failure { exit, error: anyhow::Error::new(error).context(doing.to_owned()), hint }
}

/// Whether the request failed because there is no such object.
pub(crate) fn is_not_found(error: &object_store::Error) -> bool {
    rfs_store_s3::classify(error) == StoreFailure::NotFound
}

fn store_exit(failure: StoreFailure) -> Exit {
    match failure {
        StoreFailure::Credentials => Exit::Credentials,
        StoreFailure::NoBucket => Exit::NoBucket,
        StoreFailure::Unavailable => Exit::StoreDown,
        StoreFailure::NotFound | StoreFailure::AlreadyExists | StoreFailure::Full | StoreFailure::Other => {
            Exit::Error
        }
    }
}

/// Removes everything that a shared metadata store holds of the volume.
pub(crate) async fn wipe(kv: &dyn Kv) -> Result<()> {
    let cleared = rfs_kv::transact(kv, |txn, _| async move {
        // All keys of a volume begin with a letter.
        txn.clear_range(&[0], &[0xff]);
        Ok::<_, rfs_kv::KvError>(())
    });
    cleared.await.map_err(|e| Failure { exit: Exit::MetadataDown, error: e.into(), hint: None })
}

/// Reads all of a local metadata file and checks its structure and checksums; `None` where the metadata is elsewhere. Takes
/// seconds a gigabyte.
///
/// # Errors
/// `Damage` when it is beyond repair.
pub(crate) async fn check_file(url: &MetaUrl) -> Result<Option<FileHealth>> {
    let MetaUrl::Redb(path) = url else { return Ok(None) };
    let file = path.clone();
    let checking = tokio::task::spawn_blocking(move || RedbKv::check_file(file, &RedbOptions::default()));
    let sound = checking.await?.map_err(|error| redb_failure(path, error))?;
    Ok(Some(if sound { FileHealth::Sound } else { FileHealth::Repaired }))
}

/// Makes a local metadata file as small as it can be; returns the bytes given back. Takes seconds a gigabyte.
pub(crate) async fn compact_file(url: &MetaUrl) -> Result<u64> {
    let MetaUrl::Redb(path) = url else { return Ok(0) };
    let file = path.clone();
    let len =
        || std::fs::metadata(path).doing(format!("looking at {}", path.display())).map(|file| file.len());
    let before = len()?;
    let compacting = tokio::task::spawn_blocking(move || RedbKv::compact_file(file, &RedbOptions::default()));
    compacting.await?.map_err(|error| redb_failure(path, error))?;
    Ok(before.saturating_sub(len()?))
}

/// Opens a redb file. The messages of its errors say what to do.
fn open_redb(path: &Path, missing: Missing) -> Result<Arc<dyn Kv>> {
    let options = RedbOptions::default();
    let opened = match missing {
        Missing::Create if !path.exists() => RedbKv::create(path, options),
        Missing::Create | Missing::Fail => RedbKv::open(path, options),
    };
    match opened {
        Ok(kv) => Ok(Arc::new(kv)),
        Err(error) => Err(redb_failure(path, error)),
    }
}

fn redb_failure(path: &Path, error: OpenError) -> Failure {
    let exit = match &error {
        OpenError::NotFound(_) => Exit::NotFormatted,
        OpenError::InUse(_) => return in_use(path, error),
        OpenError::Damaged { .. } => Exit::Damage,
        OpenError::Version { .. } => Exit::Version,
        OpenError::Io { .. } => Exit::MetadataDown,
        OpenError::Exists(_) => Exit::Error,
    };
    Failure { exit, error: error.into(), hint: None }
}

/// Another process has the file open. If that is a mount that cannot be asked (another user's), the mount table tells where.
fn in_use(path: &Path, error: OpenError) -> Failure {
    let source = MetaUrl::Redb(path.to_owned()).to_string();
    let mounts = rfs_fuse::mounts().unwrap_or_default();
    match mounts
        .into_iter()
        .find(|mounted| mounted.fs_type == rfs_fuse::FILESYSTEM_TYPE && mounted.source == source)
    {
        Some(mounted) => Failure::new(
            Exit::MountedElsewhere,
            format!("{source} is mounted at {}", mounted.mountpoint.display()),
        ),
        None => Failure { exit: Exit::Busy, error: error.into(), hint: None },
    }
}

/// Stops what engines run for the whole process; call at its end.
pub(crate) fn shut_down() {
    rfs_meta_fdb::stop_network();
}

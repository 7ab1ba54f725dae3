//! A volume that this process has open: metadata and store together, with or without a mount.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use object_store::path::Path as ObjectPath;
use object_store::{ObjectStore, ObjectStoreExt};
use rfs_core::data::{
    Admission, Budget, Data, DataOptions, DiskCacheOptions, LostPack, OnLost, StagingOptions, Unusable,
};
use rfs_core::meta::{self, FormatOptions, Meta, OpenOptions, Sharing};
use rfs_core::types::{Clock, ErrorKind, SessionId, SystemClock};
use rfs_core::vfs::{StoreRoom, staging};
use rfs_kv::Kv;
use rfs_store_s3::{ProbeStep, StoreMetrics};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::control::{Client, Request};
use crate::engine::{self, Missing, StoreSettings};
use crate::exit::{Exit, Failure, Result, ResultExt, meta_failure};
use crate::settings::{LocalDir, Size};
use crate::unchecked::UncheckedStore;
use crate::url::{MetaUrl, StoreUrl};

/// The object that says whose store this is. Without it, a volume could be mounted over an empty directory whose disk is
/// not mounted, and two volumes could share a prefix and delete each other's packs.
const MARKER: &str = "rfs-volume.json";

/// Where the data layer keeps its objects. Nothing else below the store's prefix is ours to delete.
const PACKS: &str = "packs";

/// How long to wait for the store before going on with what is staged.
const MARKER_PATIENCE: Duration = Duration::from_secs(2);

/// Contents of the marker.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Marker {
    format: u32,
    uuid: String,
}

/// How to open a volume.
#[derive(Debug, Clone)]
pub(crate) struct OpenSettings {
    /// Where it will be mounted; shown to others.
    pub(crate) mountpoint: PathBuf,
    /// Whether nothing may be changed.
    pub(crate) read_only: bool,
    /// Memory for dirty data and caches.
    pub(crate) memory: Size,
    /// Where contents are cached; `None`: beside the metadata, if that is a place and the store is not as near.
    pub(crate) cache: Option<LocalDir>,
    /// Most bytes that are cached there; 0: none.
    pub(crate) cache_max: Size,
    /// How long a request to the store is tried; zero: for ever.
    pub(crate) io_timeout: Duration,
    /// Where to stage; `None`: where the volume says, else where the metadata is, if that is a place.
    pub(crate) staging: Option<LocalDir>,
    /// Most bytes that are staged; 0: none, but what is staged is found.
    pub(crate) staging_max: Size,
    /// Most bytes of a pack; `None`: as many as one request sends.
    pub(crate) pack_size: Option<Size>,
    /// What to do when staged bytes are not there.
    pub(crate) on_lost: OnLost,
}

/// Default of `--memory`; program, threads and metadata take up to 96 MiB more.
pub(crate) const MEMORY_DEFAULT: Size = Size(192 << 20);
/// Default of `--io-timeout`.
pub(crate) const IO_TIMEOUT_DEFAULT: Duration = Duration::from_mins(5);

impl Default for OpenSettings {
    fn default() -> OpenSettings {
        OpenSettings {
            mountpoint: PathBuf::new(),
            read_only: false,
            memory: MEMORY_DEFAULT,
            cache: None,
            cache_max: Size(0),
            io_timeout: IO_TIMEOUT_DEFAULT,
            staging: None,
            staging_max: Size(0),
            pack_size: None,
            on_lost: OnLost::Refuse,
        }
    }
}

impl OpenSettings {
    /// To look at a volume without changing anything.
    pub(crate) fn look() -> OpenSettings {
        OpenSettings { read_only: true, on_lost: OnLost::Accept, ..OpenSettings::default() }
    }

    fn cache_options(&self, url: &MetaUrl, record: &meta::Volume) -> Option<DiskCacheOptions> {
        let usual = |dir: PathBuf| DiskCacheOptions {
            dir,
            bytes_max: self.cache_max.0,
            admission: Admission::Scattered,
            unusable: Unusable::GoOn,
        };
        match &self.cache {
            Some(LocalDir::Off) => None,
            // Somebody has a disk for it.
            Some(LocalDir::Dir(dir)) => Some(DiskCacheOptions {
                admission: Admission::All,
                unusable: Unusable::Fail,
                ..usual(dir.clone())
            }),
            None => match record.store_url.parse() {
                Ok(StoreUrl::S3(_)) => url.cache_dir().map(usual),
                _ => None,
            },
        }
    }

    /// `recorded`: where mounts of the volume stage, if not beside its metadata.
    fn staging_options(&self, url: &MetaUrl, recorded: Option<&Path>) -> Option<StagingOptions> {
        let wanted = if self.read_only { 0 } else { self.staging_max.0 };
        if let Some(LocalDir::Dir(dir)) = &self.staging {
            return Some(StagingOptions::new(dir.clone(), wanted));
        }
        let dir = recorded.map(Path::to_owned).or_else(|| url.staging_dir())?;
        let wanted = if self.staging == Some(LocalDir::Off) { 0 } else { wanted };
        // Nobody asks for this directory now: a volume is usable where only its file can be written.
        if wanted > 0
            && let Err(error) = std::fs::create_dir_all(&dir)
        {
            tracing::warn!(dir = %dir.display(), %error, "fsync waits for the store: the staging directory cannot be made");
            return None;
        }
        Some(StagingOptions::new(dir, wanted))
    }
}

/// An open volume.
pub(crate) struct Volume {
    /// Its metadata URL.
    pub(crate) url: MetaUrl,
    /// What it is.
    pub(crate) record: meta::Volume,
    /// Names and attributes.
    pub(crate) meta: Arc<Meta>,
    /// Contents.
    pub(crate) data: Arc<Data>,
    /// Memory for what is waiting to be stored.
    pub(crate) memory: Arc<Budget>,
    kv: Arc<dyn Kv>,
}

impl Volume {
    /// Opens the volume at `url` and checks that its store is the right one.
    ///
    /// # Errors
    /// `NotFormatted`, `Version`, `MetadataDown`, `Damage`, `Busy`; for the store `Credentials`, `NoBucket`, `StoreDown`.
    pub(crate) async fn open(url: &MetaUrl, settings: &OpenSettings) -> Result<Volume> {
        let kv = engine::open_kv(url, Missing::Fail).await?;
        match Volume::open_over(url, settings, &kv).await {
            Ok(volume) => Ok(volume),
            Err(failure) => {
                close_after_failure(&*kv).await;
                Err(failure)
            }
        }
    }

    async fn open_over(url: &MetaUrl, settings: &OpenSettings, kv: &Arc<dyn Kv>) -> Result<Volume> {
        let record = read_record(&**kv).await?.ok_or_else(|| not_formatted(url))?;
        let metrics = Arc::new(StoreMetrics::default());
        let store = open_store_of(&record, settings.io_timeout, &metrics).await?;
        let store = checked_store(url, kv, store, &record).await?;

        let meta = Arc::new(open_meta(url, kv, settings).await?);

        let recorded = recorded_staging_dir(&**kv).await?;
        let staging = settings.staging_options(url, recorded.as_deref());
        // Half for what is on its way to the store (and lent to readers meanwhile), the rest for what was read, is being
        // read, and is going to be. See docs/decisions/0015.
        let part = settings.memory.0 / 12;
        let memory = Budget::new(6 * part);
        let session = meta.session_id().unwrap_or(SessionId(0));
        let usual = DataOptions::new(session, record.uuid, Arc::clone(&memory));
        let pack_bytes = settings.pack_size.and_then(|Size(bytes)| u32::try_from(bytes).ok());
        // The usual one is what holds a chunk, with header and footer.
        let pack_bytes = pack_bytes.map(|bytes| bytes.max(usual.pack_bytes));
        let options = DataOptions {
            pack_bytes: pack_bytes.unwrap_or(usual.pack_bytes),
            stream_pack_bytes: pack_bytes.unwrap_or(usual.stream_pack_bytes),
            block_bytes: record.block_bytes,
            cache_memory_bytes: part,
            readahead_memory_bytes: 2 * part,
            fetch_memory_bytes: part,
            around_memory_bytes: 2 * part,
            disk_cache: settings.cache_options(url, &record),
            io_timeout: Some(settings.io_timeout).filter(|timeout| !timeout.is_zero()),
            staging: staging.clone(),
            ..usual
        };
        let data = Data::open(options, store).await;
        let data = Arc::new(data.map_err(|e| meta_failure(e, "opening the data layer"))?);
        let resumed = staging::resume(&meta, &data, settings.on_lost).await;
        let resumed = resumed.map_err(|e| meta_failure(e, "looking for staged bytes"))?;
        if settings.on_lost == OnLost::Refuse && !resumed.lost.is_empty() {
            return Err(staging_lost(url, &data, &resumed.lost));
        }
        if let Some(staging) = staging.filter(|staging| staging.bytes_max > 0) {
            let elsewhere = Some(staging.dir).filter(|dir| Some(dir) != url.staging_dir().as_ref());
            if elsewhere != recorded {
                let noted = meta.set_staging_dir(elsewhere.as_deref()).await;
                noted.map_err(|e| meta_failure(e, "noting where bytes are staged"))?;
            }
        }
        if resumed.packs > 0 {
            let (packs, bytes) = (resumed.packs, resumed.bytes);
            tracing::info!(packs, bytes, "found what an earlier mount staged and did not send");
        }
        Ok(Volume { url: url.clone(), record, meta, data, memory, kv: Arc::clone(kv) })
    }

    /// Closes what `open` opened, in order. The data's errors are the most important ones; all parts are closed anyway.
    pub(crate) async fn close(&self) -> Result<()> {
        let data = self.data.close().await.map_err(|e| store_error(e, "storing what was left"));
        let meta = self.meta.close().await.map_err(|e| meta_failure(e, "ending the session"));
        data.and(meta).and(self.release().await)
    }

    /// Closes the engine, after a `Vfs` has closed the rest.
    pub(crate) async fn release(&self) -> Result<()> {
        self.kv.close().await.exit(Exit::MetadataDown, "closing the metadata store")
    }

    /// How much more the store can take, if it is a local directory.
    pub(crate) fn store_room(&self) -> Option<Arc<dyn StoreRoom>> {
        match self.record.store_url.parse() {
            Ok(StoreUrl::File(directory)) => Some(Arc::new(DiskOf(directory))),
            _ => None,
        }
    }
}

/// Opens the metadata, with a session unless it is to be read only.
async fn open_meta(url: &MetaUrl, kv: &Arc<dyn Kv>, settings: &OpenSettings) -> Result<Meta> {
    let clock: Arc<dyn Clock> = Arc::new(SystemClock);
    let options = OpenOptions {
        hostname: rustix::system::uname().nodename().to_string_lossy().into_owned(),
        pid: std::process::id(),
        mountpoint: settings.mountpoint.display().to_string(),
        read_only: settings.read_only,
        sharing: if url.is_exclusive() { Sharing::Exclusive } else { Sharing::Leased },
    };
    Meta::open(Arc::clone(kv), clock, &options).await.map_err(|error| match error.kind {
        ErrorKind::Busy => Failure::new(Exit::MountedElsewhere, format!("{url} is {error}"))
            .hint("unmount it there first; a machine that is gone is given up a few seconds after its end"),
        _ => meta_failure(error, "opening the volume"),
    })
}

/// Does `work`, which deletes the volume's contents, while no machine has it mounted. The session that keeps others out is
/// left behind after success, to be deleted with the rest of the metadata.
///
/// # Errors
/// `MountedElsewhere` while a mount gives signs of life; those of `work`.
pub(crate) async fn alone<T>(
    url: &MetaUrl,
    kv: &Arc<dyn Kv>,
    work: impl Future<Output = Result<T>>,
) -> Result<T> {
    if url.is_exclusive() {
        // The engine has let nobody else in since it was opened.
        return work.await;
    }
    let meta = open_meta(url, kv, &OpenSettings::default()).await?;
    let lost = async {
        loop {
            tokio::time::sleep(meta::HEARTBEAT).await;
            if let Err(error) = meta.heartbeat().await {
                return meta_failure(error, "keeping others out of the volume");
            }
        }
    };
    let done = tokio::select! {
        done = work => done,
        failure = lost => Err(failure),
    };
    if done.is_err()
        && let Err(error) = meta.close().await
    {
        tracing::warn!(%error, "ending the session");
    }
    done
}

/// The disk that a directory is on.
#[derive(Debug)]
struct DiskOf(PathBuf);

impl StoreRoom for DiskOf {
    fn bytes_free(&self) -> Option<u64> {
        let disk = rustix::fs::statvfs(&self.0).ok()?;
        disk.f_bavail.checked_mul(disk.f_frsize)
    }
}

async fn recorded_staging_dir(kv: &dyn Kv) -> Result<Option<PathBuf>> {
    let recorded = Meta::staging_dir(kv).await;
    recorded.map_err(|e| meta_failure(e, "looking where bytes are staged"))
}

/// Where mounts of a volume may have left staged bytes: directories of its own.
pub(crate) async fn staging_places(
    kv: &dyn Kv,
    url: &MetaUrl,
    record: &meta::Volume,
) -> Result<Vec<PathBuf>> {
    let recorded = recorded_staging_dir(kv).await?;
    let own = |dir: PathBuf| dir.join(record.uuid.to_string());
    Ok(recorded.into_iter().chain(url.staging_dir()).map(own).collect())
}

/// What to say when staged bytes are not there.
fn staging_lost(url: &MetaUrl, data: &Data, lost: &[LostPack]) -> Failure {
    let place = match data.staging_dir() {
        Some(dir) => format!("are not in {}", dir.display()),
        None => "are not on this machine".to_owned(),
    };
    let first = lost.first().map_or_else(String::new, |lost| format!(": pack {}, {}", lost.pack, lost.why));
    let text =
        format!("bytes of {} packs that were fsynced and only staged so far {place}{first}", lost.len());
    Failure::new(Exit::StagingLost, text).hint(format!(
        "bring that directory back (--staging=DIR if it is elsewhere now) and mount again. To see which files lose what \
         without it: rfs fsck {url}; to give that up: rfs fsck --repair {url}"
    ))
}

/// The store, after it was seen to be this volume's. A volume with staged bytes is useful without its store, so there the
/// check is put off until the store answers.
async fn checked_store(
    url: &MetaUrl,
    kv: &Arc<dyn Kv>,
    store: Arc<dyn ObjectStore>,
    record: &meta::Volume,
) -> Result<Arc<dyn ObjectStore>> {
    let mut patience = None;
    if url.staging_dir().is_some() {
        let look = OpenOptions { read_only: true, ..OpenOptions::default() };
        let meta = Meta::open(Arc::clone(kv), Arc::new(SystemClock), &look).await;
        let staged = match meta {
            Ok(meta) => meta.staged_packs().await,
            Err(error) => Err(error),
        };
        let staged = staged.map_err(|e| meta_failure(e, "looking for staged bytes"))?;
        patience = (!staged.is_empty()).then_some(MARKER_PATIENCE);
    }
    let Some(patience) = patience else {
        check_marker(&store, record).await?;
        return Ok(store);
    };
    match tokio::time::timeout(patience, check_marker(&store, record)).await {
        Ok(Ok(())) => return Ok(store),
        Ok(Err(failure)) if failure.exit != Exit::StoreDown => return Err(failure),
        Ok(Err(failure)) => {
            tracing::warn!(error = %failure.message(), "going on without the store, with what is staged");
        }
        Err(_) => tracing::warn!("the store does not answer; going on without it, with what is staged"),
    }
    Ok(Arc::new(UncheckedStore::new(store, record.clone())))
}

/// A failure of the data layer.
pub(crate) fn store_error(error: rfs_core::types::Error, doing: &str) -> Failure {
    let exit = if error.kind == ErrorKind::Io { Exit::StoreDown } else { Exit::Error };
    Failure { exit, error: anyhow::Error::new(error).context(doing.to_owned()), hint: None }
}

/// Releases a store that is of no use; its error would hide the one that matters.
pub(crate) async fn close_after_failure(kv: &dyn Kv) {
    if let Err(error) = kv.close().await {
        tracing::warn!(%error, "closing the metadata store");
    }
}

/// The volume record, if there is one.
///
/// # Errors
/// `Version` when it was written by a version that this one does not understand.
pub(crate) async fn read_record(kv: &dyn Kv) -> Result<Option<meta::Volume>> {
    Meta::volume(kv).await.map_err(|error| match error.kind {
        ErrorKind::NotSupported => {
            Failure { exit: Exit::Version, error: error.into(), hint: Some("install a newer rfs".to_owned()) }
        }
        _ => meta_failure(error, "reading the volume record"),
    })
}

/// What to say when a metadata URL holds no volume.
pub(crate) fn not_formatted(url: &MetaUrl) -> Failure {
    Failure::new(Exit::NotFormatted, format!("{url} holds no volume"))
        .hint(format!("make one with: rfs format {url} STORE_URL"))
}

/// Opens the store that a volume's record names.
pub(crate) async fn open_store_of(
    record: &meta::Volume,
    io_timeout: Duration,
    metrics: &Arc<StoreMetrics>,
) -> Result<Arc<dyn ObjectStore>> {
    let url: StoreUrl = record.store_url.parse().map_err(|e| {
        Failure::new(Exit::Error, format!("the volume names a store that this version cannot open: {e}"))
    })?;
    let settings = StoreSettings { io_timeout, missing: Missing::Fail, metrics: Arc::clone(metrics) };
    engine::open_store(&url, &settings).await
}

/// Makes sure that the store holds this volume's contents and no other's.
pub(crate) async fn check_marker(store: &Arc<dyn ObjectStore>, record: &meta::Volume) -> Result<()> {
    match read_marker(store, &record.store_url).await? {
        Some(marker) if marker.uuid == record.uuid.to_string() => Ok(()),
        Some(marker) => Err(Failure::new(
            Exit::Error,
            format!("{} holds another volume ({} instead of {})", record.store_url, marker.uuid, record.uuid),
        )
        .hint("was the store replaced, or the metadata file restored from another volume?")),
        None => Err(Failure::new(
            Exit::StoreDown,
            format!("{} answers, but does not hold this volume: {MARKER} is missing", record.store_url),
        )
        .hint("is its disk mounted, and does the bucket still have its contents?")),
    }
}

async fn read_marker(store: &Arc<dyn ObjectStore>, url: &str) -> Result<Option<Marker>> {
    let doing = format!("reading the volume marker of {url}");
    let bytes = match store.get(&ObjectPath::from(MARKER)).await {
        Ok(found) => {
            found.bytes().await.map_err(|e| engine::store_failure(e, ProbeStep::RangeGet, &doing))?
        }
        Err(error) if engine::is_not_found(&error) => return Ok(None),
        Err(error) => return Err(engine::store_failure(error, ProbeStep::RangeGet, &doing)),
    };
    serde_json::from_slice(&bytes).exit(Exit::Damage, format!("{MARKER} in the store is damaged")).map(Some)
}

/// Refuses a store that belongs to a volume. One without packs may be in use all the same: small files need none, and a
/// mount may be about to store its first.
pub(crate) async fn check_store_is_free(store: &Arc<dyn ObjectStore>, url: &StoreUrl) -> Result<()> {
    use futures::TryStreamExt;
    let marker = read_marker(store, &url.to_string()).await?;
    let mut packs = store.list(Some(&ObjectPath::from(PACKS)));
    let pack =
        packs.try_next().await.map_err(|e| engine::store_failure(e, ProbeStep::List, "listing the store"))?;
    let held = match (marker, pack) {
        (None, None) => return Ok(()),
        (Some(marker), _) => format!("{url} belongs to volume {}", marker.uuid),
        (None, Some(_)) => format!("{url} holds the contents of a volume"),
    };
    Err(Failure::new(Exit::Error, held)
        .hint("give the new volume a prefix or directory of its own; --force gives up what is there"))
}

/// Says in the store whose it is.
pub(crate) async fn write_marker(store: &Arc<dyn ObjectStore>, uuid: Uuid) -> Result<()> {
    let marker = serde_json::to_vec(&Marker { format: 1, uuid: uuid.to_string() })?;
    let put = store.put(&ObjectPath::from(MARKER), Bytes::from(marker).into()).await;
    put.map(|_| ()).map_err(|e| engine::store_failure(e, ProbeStep::Put, "writing the store's volume marker"))
}

/// Deletes the volume's objects in the store, the marker last; calls `progress` with the number of objects deleted.
pub(crate) async fn erase_store(store: &Arc<dyn ObjectStore>, progress: &mut dyn FnMut(u64)) -> Result<u64> {
    use futures::{StreamExt, TryStreamExt};
    let packs = store.list(Some(&ObjectPath::from(PACKS)));
    let objects = packs.map_ok(|object| object.location).boxed();
    let mut deleted = store.delete_stream(objects);
    let mut count = 0;
    while let Some(result) = deleted.next().await {
        match result {
            Ok(_) => count += 1,
            Err(error) if engine::is_not_found(&error) => {}
            Err(error) => {
                return Err(engine::store_failure(
                    error,
                    ProbeStep::Delete,
                    "deleting the volume's contents",
                ));
            }
        }
        progress(count);
    }
    match store.delete(&ObjectPath::from(MARKER)).await {
        Err(error) if !engine::is_not_found(&error) => {
            Err(engine::store_failure(error, ProbeStep::Delete, "deleting the store's volume marker"))
        }
        _ => Ok(count),
    }
}

/// Makes a volume: the marker first, so that metadata never names a store that is not ready.
pub(crate) async fn format(
    kv: &dyn Kv,
    store: &Arc<dyn ObjectStore>,
    options: &FormatOptions,
) -> Result<meta::Volume> {
    write_marker(store, options.uuid).await?;
    let volume = write_record(kv, options).await;
    if volume.is_err() {
        // Otherwise the store would belong to a volume that never was. If this fails too, `--force` gives it up.
        let _ = store.delete(&ObjectPath::from(MARKER)).await;
    }
    volume
}

async fn write_record(kv: &dyn Kv, options: &FormatOptions) -> Result<meta::Volume> {
    let volume = Meta::format(kv, options, SystemClock.now()).await;
    let volume = volume.map_err(|e| meta_failure(e, "writing the volume record"))?;
    kv.sync().await.exit(Exit::MetadataDown, "making the new volume durable")?;
    Ok(volume)
}

/// Refuses to go on while a mount on this machine has the volume open.
///
/// # Errors
/// `MountedElsewhere`, saying where.
pub(crate) fn refuse_mounted(url: &MetaUrl) -> Result<()> {
    let Some(mut client) = Client::of_volume(url)? else { return Ok(()) };
    let status: Result<crate::status::Report> = client.call(Request::Status, &mut |_| {});
    let place = status.ok().and_then(|status| status.mount).map(|mount| mount.mountpoint);
    let place = place.unwrap_or_else(|| "another directory".to_owned());
    Err(Failure::new(Exit::MountedElsewhere, format!("{url} is mounted at {place}"))
        .hint(format!("unmount it first: rfs umount {place}")))
}

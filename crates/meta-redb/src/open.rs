//! Making and opening the file, and what can be wrong with it.

use std::fs::{File, OpenOptions, TryLockError};
use std::io;
#[cfg(target_os = "linux")]
use std::num::NonZeroU64;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use redb::{
    Database, DatabaseError, ReadableDatabase, ReadableTable, StorageBackend, StorageError, TableDefinition,
    TableError,
};

use crate::RedbOptions;
use crate::backend::{FileBackend, NotedBackend};

/// Keys and values.
pub(crate) const DATA: TableDefinition<'static, &[u8], &[u8]> = TableDefinition::new("kv");
/// What is known of the store itself: [`FORMAT`] and [`VERSION`].
pub(crate) const INFO: TableDefinition<'static, &str, u64> = TableDefinition::new("info");
/// Version of the tables' layout.
const FORMAT: &str = "format";
/// Version of the last commit that was written.
pub(crate) const VERSION: &str = "version";
const FORMAT_CURRENT: u64 = 1;

/// Versions skipped at each opening, more than can ever be lost in memory: a versionstamp that was seen before a
/// crash is not given out again.
const VERSIONS_SKIPPED: u64 = 1 << 20;

/// Gives the storage of a store, again after it failed.
pub type BackendOpener = Box<dyn Fn() -> io::Result<Box<dyn StorageBackend>> + Send>;

/// Largest file that is read at once when it is opened, about 250,000 inodes: faster than a wait for the disk at every
/// other page of it. Of a larger one only what is asked for.
const READ_AT_ONCE_BYTES_MAX: u64 = 64 << 20;

/// Why a store could not be opened or made.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// There is no file.
    #[error("no metadata file at {}: check the path, or make a volume there with `rfs format`", .0.display())]
    NotFound(PathBuf),
    /// There is a file already, which is not replaced.
    #[error("{} exists already: choose another path, or remove the volume with `rfs destroy` first", .0.display())]
    Exists(PathBuf),
    /// Another process, or another store of this one, has it open.
    #[error(
        "{} is in use by another process (is the volume mounted already?): unmount it there first with `rfs umount`",
        .0.display()
    )]
    InUse(PathBuf),
    /// It is not a store, or it was damaged.
    #[error(
        "{} is damaged or is not a metadata file of rfs ({reason}): restore it from a backup",
        path.display()
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// It was written by another version of rfs.
    #[error("{} was written by another version of rfs ({reason}): use that version or a newer one", path.display())]
    Version {
        /// The file.
        path: PathBuf,
        /// Which version.
        reason: String,
    },
    /// The operating system refused.
    #[error("cannot open the metadata file {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// An open database and the version that its contents have.
pub(crate) struct Opened {
    pub(crate) database: Database,
    pub(crate) version: u64,
    pub(crate) sync_failed: Arc<AtomicBool>,
}

impl Opened {
    /// The version that the next run of the store continues from.
    pub(crate) fn version_next(&self) -> u64 {
        self.version + VERSIONS_SKIPPED
    }
}

fn io_error(path: &Path, source: io::Error) -> OpenError {
    match source.kind() {
        io::ErrorKind::NotFound => OpenError::NotFound(path.to_owned()),
        io::ErrorKind::AlreadyExists => OpenError::Exists(path.to_owned()),
        io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof => {
            OpenError::Damaged { path: path.to_owned(), reason: source.to_string() }
        }
        _ => OpenError::Io { path: path.to_owned(), source },
    }
}

fn database_error(path: &Path, error: DatabaseError) -> OpenError {
    match error {
        DatabaseError::DatabaseAlreadyOpen => OpenError::InUse(path.to_owned()),
        DatabaseError::UpgradeRequired(version) => {
            OpenError::Version { path: path.to_owned(), reason: format!("redb file format {version}") }
        }
        DatabaseError::Storage(StorageError::Io(source)) => io_error(path, source),
        other => OpenError::Damaged { path: path.to_owned(), reason: other.to_string() },
    }
}

fn redb_error(path: &Path, error: impl Into<redb::Error>) -> OpenError {
    match error.into() {
        redb::Error::Io(source) => io_error(path, source),
        other => OpenError::Damaged { path: path.to_owned(), reason: other.to_string() },
    }
}

fn lock(path: &Path, file: &File) -> Result<(), OpenError> {
    file.try_lock().map_err(|error| match error {
        TryLockError::WouldBlock => OpenError::InUse(path.to_owned()),
        TryLockError::Error(source) => io_error(path, source),
    })
}

fn opener_of(file: File) -> BackendOpener {
    let backend = FileBackend(Arc::new(file));
    Box::new(move || Ok(Box::new(backend.clone())))
}

/// Opens and locks the file at `path`.
pub(crate) fn open_file(path: &Path) -> Result<BackendOpener, OpenError> {
    let file =
        OpenOptions::new().read(true).write(true).open(path).map_err(|source| io_error(path, source))?;
    let metadata = file.metadata().map_err(|source| io_error(path, source))?;
    if !metadata.is_file() || metadata.len() == 0 {
        let reason = if metadata.is_file() { "it is empty" } else { "it is not a regular file" };
        return Err(OpenError::Damaged { path: path.to_owned(), reason: reason.into() });
    }
    lock(path, &file)?;
    if metadata.len() <= READ_AT_ONCE_BYTES_MAX {
        read_at_once(&file, metadata.len());
    }
    Ok(opener_of(file))
}

/// Has the kernel begin to read so many bytes. Does not wait for them.
#[cfg(target_os = "linux")]
fn read_at_once(file: &File, len: u64) {
    // Of a longer range the kernel may read only the beginning, as much as it reads ahead.
    const STEP: usize = 128 << 10;
    for offset in (0..len).step_by(STEP) {
        let step = NonZeroU64::new(STEP as u64);
        if let Err(error) = rustix::fs::fadvise(file, offset, step, rustix::fs::Advice::WillNeed) {
            tracing::debug!(%error, "the metadata file is not read ahead");
            return;
        }
    }
}

#[cfg(not(target_os = "linux"))]
fn read_at_once(_file: &File, _len: u64) {}

/// Makes the file under another name first, so that a crash never leaves half a store at `path`.
pub(crate) fn create_file(path: &Path, options: &RedbOptions) -> Result<BackendOpener, OpenError> {
    if path.symlink_metadata().is_ok() {
        return Err(OpenError::Exists(path.to_owned()));
    }
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".new-{}", std::process::id()));
    let temporary = path.with_file_name(name);
    let created = create_at(path, &temporary, options);
    if created.is_err() {
        // Nothing was promised of it yet; a leftover does no harm.
        let _ = std::fs::remove_file(&temporary);
    }
    created
}

fn create_at(path: &Path, temporary: &Path, options: &RedbOptions) -> Result<BackendOpener, OpenError> {
    let fail = |source| io_error(path, source);
    let mut open = OpenOptions::new();
    open.read(true).write(true).create(true).truncate(true);
    std::os::unix::fs::OpenOptionsExt::mode(&mut open, 0o600);
    let file = open.open(temporary).map_err(fail)?;
    lock(path, &file)?;
    let opener = opener_of(file);
    initialize(path, &opener, options)?;
    // A link, unlike a rename, does not replace a file that somebody else made in the meantime.
    match std::fs::hard_link(temporary, path) {
        Ok(()) => std::fs::remove_file(temporary).map_err(fail)?,
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Err(fail(error)),
        Err(_) => std::fs::rename(temporary, path).map_err(fail)?,
    }
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(parent).and_then(|directory| directory.sync_all()).map_err(fail)?;
    Ok(opener)
}

fn open_backend(
    path: &Path,
    opener: &BackendOpener,
    options: &RedbOptions,
) -> Result<(Database, Arc<AtomicBool>), OpenError> {
    let sync_failed = Arc::new(AtomicBool::new(false));
    let inner = opener().map_err(|source| io_error(path, source))?;
    let backend = NotedBackend { inner, sync_failed: Arc::clone(&sync_failed) };
    let mut builder = Database::builder();
    builder.set_cache_size(options.cache_bytes);
    let database = builder.create_with_backend(backend).map_err(|error| database_error(path, error))?;
    Ok((database, sync_failed))
}

/// Runs `call` into redb, which checks what it reads; a damaged page can still trip an assertion in it.
pub(crate) fn guarded<T>(call: impl FnOnce() -> T) -> Result<T, Inconsistent> {
    catch_unwind(AssertUnwindSafe(call)).map_err(|_| Inconsistent)
}

/// redb found its file in a state that it takes for impossible.
#[derive(Debug, thiserror::Error)]
#[error("its structure is inconsistent")]
pub(crate) struct Inconsistent;

impl Inconsistent {
    fn at(&self, path: &Path) -> OpenError {
        OpenError::Damaged { path: path.to_owned(), reason: self.to_string() }
    }
}

/// Makes the tables in an empty storage, durably; leaves a store that is there already alone.
pub(crate) fn initialize(
    path: &Path,
    opener: &BackendOpener,
    options: &RedbOptions,
) -> Result<(), OpenError> {
    guarded(|| initialize_checked(path, opener, options)).unwrap_or_else(|damage| Err(damage.at(path)))
}

fn initialize_checked(path: &Path, opener: &BackendOpener, options: &RedbOptions) -> Result<(), OpenError> {
    let fail = |error: redb::Error| redb_error(path, error);
    let (database, _) = open_backend(path, opener, options)?;
    let mut txn = database.begin_write().map_err(|error| fail(error.into()))?;
    txn.set_quick_repair(true);
    {
        txn.open_table(DATA).map_err(|error| fail(error.into()))?;
        let mut info = txn.open_table(INFO).map_err(|error| fail(error.into()))?;
        if info.get(FORMAT).map_err(|error| fail(error.into()))?.is_some() {
            return Ok(());
        }
        info.insert(FORMAT, FORMAT_CURRENT).map_err(|error| fail(error.into()))?;
        info.insert(VERSION, 0).map_err(|error| fail(error.into()))?;
    }
    txn.commit().map_err(|error| fail(error.into()))
}

/// Opens a store that was initialized.
pub(crate) fn open_database(
    path: &Path,
    opener: &BackendOpener,
    options: &RedbOptions,
) -> Result<Opened, OpenError> {
    guarded(|| open_checked(path, opener, options)).unwrap_or_else(|damage| Err(damage.at(path)))
}

fn open_checked(path: &Path, opener: &BackendOpener, options: &RedbOptions) -> Result<Opened, OpenError> {
    let (database, sync_failed) = open_backend(path, opener, options)?;
    let txn = database.begin_read().map_err(|error| redb_error(path, error))?;
    let info = match txn.open_table(INFO) {
        Ok(info) => info,
        Err(TableError::TableDoesNotExist(_)) => {
            let reason = "a redb file, but not of rfs".into();
            return Err(OpenError::Damaged { path: path.to_owned(), reason });
        }
        Err(error) => return Err(redb_error(path, error)),
    };
    let number = |name: &str| -> Result<u64, OpenError> {
        let value = info.get(name).map_err(|error| redb_error(path, error))?;
        value.map(|value| value.value()).ok_or_else(|| OpenError::Damaged {
            path: path.to_owned(),
            reason: format!("its {name} is missing"),
        })
    };
    let format = number(FORMAT)?;
    if format != FORMAT_CURRENT {
        let reason = format!("table format {format}, this one knows {FORMAT_CURRENT}");
        return Err(OpenError::Version { path: path.to_owned(), reason });
    }
    let version = number(VERSION)?;
    drop(info);
    drop(txn);
    Ok(Opened { database, version, sync_failed })
}

/// Checks the structure of a file that nobody has open; false if something was repaired.
pub(crate) fn check_file(path: &Path, options: &RedbOptions) -> Result<bool, OpenError> {
    let opener = open_file(path)?;
    let mut store = open_database(path, &opener, options)?;
    guarded(|| store.database.check_integrity())
        .map_err(|damage| damage.at(path))?
        .map_err(|error| database_error(path, error))
}

/// Makes a file that nobody has open as small as it can be.
pub(crate) fn compact_file(path: &Path, options: &RedbOptions) -> Result<(), OpenError> {
    let opener = open_file(path)?;
    let mut store = open_database(path, &opener, options)?;
    let compacted = guarded(|| store.database.compact()).map_err(|damage| damage.at(path))?;
    compacted.map(drop).map_err(|error| redb_error(path, error))
}

//! The staging directory: journals of packs that are durable here before the store has them.
//!
//! Owns the directory (one process at a time), the open journals and the account of their bytes. Whoever wants packs
//! staged takes the one lock and writes for all who wait by then; the others find it done. Files are written on the
//! blocking pool. A journal is deleted only when told to.
//!
//! Order: a record, fdatasync, and for a new file fsync of the directory, before anybody is told. After an error nothing
//! is added to that journal; what it has stays good. Lock order: the writers' lock before one pack.

use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use bytes::Bytes;
use hashbrown::{HashMap, HashSet};
use tokio::sync::{Mutex, Notify};
use uuid::Uuid;

use super::journal::{self, Batch, Piece, Replayed, Writer};
use super::retry::Failure;
use super::unstored::Pack;
use super::{StagingOptions, StoredPack};
use crate::types::{Error, ErrorKind, PackId, Result};

/// One part in so many of the disk is left to others.
const RESERVED_PART: u64 = 10;

/// The journals that are written to.
type Writers = HashMap<PackId, (Arc<Pack>, Writer)>;

/// What is left of a pack that should be staged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LostPack {
    /// The pack.
    pub pack: PackId,
    /// Header and blocks up to here are there; 0: the journal is missing.
    pub bytes: u64,
    /// What is wrong.
    pub why: String,
}

/// What came of packs that should be staged.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Resumed {
    /// Packs that are readable, and their bytes.
    pub packs: u64,
    /// Bytes of their journals.
    pub bytes: u64,
    /// Packs without a complete journal that the store has, though metadata does not know it.
    pub stored: Vec<StoredPack>,
    /// Packs without a complete journal that the store does not have.
    pub lost: Vec<LostPack>,
}

/// What to do about staged packs whose journals are missing or damaged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnLost {
    /// Change nothing; the caller refuses to go on.
    Refuse,
    /// Go on with what is there.
    Accept,
}

/// Whether packs that were found staged are sent to the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resume {
    /// Yes, oldest first.
    Send,
    /// No, they are only read.
    ReadOnly,
}

/// The staging directory of a volume.
#[derive(Debug)]
pub(super) struct Staging {
    dir: PathBuf,
    volume: Uuid,
    bytes_max: u64,
    /// Bytes of all journals.
    used: AtomicU64,
    writers: Arc<Mutex<Writers>>,
    /// Staging fails: told once, and once when it is over.
    failing: AtomicBool,
    /// A pack with a journal was stored.
    pub(super) stored: Notify,
    _lock: File,
}

impl Staging {
    /// Opens the volume's part of the directory; makes it if anything is to be staged there. `None`: there is none, and
    /// none is needed.
    pub(super) fn open(options: &StagingOptions, volume: Uuid) -> Result<Option<Staging>> {
        let dir = options.dir.join(volume.to_string());
        let failed = |error: io::Error| {
            let what = format!("open the staging directory {}", dir.display());
            Error::new(ErrorKind::Io, what).with_source(error)
        };
        if options.bytes_max == 0 && !dir.exists() {
            return Ok(None);
        }
        DirBuilder::new().recursive(true).mode(0o700).create(&dir).map_err(failed)?;
        for made in [dir.parent(), options.dir.parent()].into_iter().flatten() {
            File::open(made).and_then(|made| made.sync_all()).map_err(failed)?;
        }
        let lock =
            OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(dir.join("lock"));
        let lock = lock.map_err(failed)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let what = format!("another process uses the staging directory {}", dir.display());
                return Err(Error::new(ErrorKind::Busy, what));
            }
            Err(TryLockError::Error(error)) => return Err(failed(error)),
        }
        Ok(Some(Staging {
            dir,
            volume,
            bytes_max: options.bytes_max,
            used: AtomicU64::new(0),
            writers: Arc::default(),
            failing: AtomicBool::new(false),
            stored: Notify::new(),
            _lock: lock,
        }))
    }

    /// Whether anything is staged here, or only read.
    pub(super) fn is_on(&self) -> bool {
        self.bytes_max > 0
    }

    pub(super) fn dir(&self) -> &Path {
        &self.dir
    }

    fn path(&self, pack: PackId) -> PathBuf {
        self.dir.join(pack.to_string())
    }

    /// Whether the last attempt failed.
    pub(super) fn is_failing(&self) -> bool {
        self.failing.load(Ordering::Relaxed)
    }

    /// Makes what the packs hold now durable, as far as it is not. Those for which that fails know it.
    pub(super) async fn stage(self: &Arc<Staging>, packs: Vec<Arc<Pack>>) {
        let mut writers = Arc::clone(&self.writers).lock_owned().await;
        // Others may have done it while this waited.
        let packs: Vec<Arc<Pack>> = packs.into_iter().filter(|pack| pack.unstaged().is_some()).collect();
        if packs.is_empty() {
            return;
        }
        let staging = Arc::clone(self);
        let written = tokio::task::spawn_blocking(move || staging.write(&mut writers, &packs)).await;
        // Any other error means that the runtime ends, and with it whoever waits.
        if let Err(error) = written
            && error.is_panic()
        {
            std::panic::resume_unwind(error.into_panic());
        }
    }

    fn write(&self, writers: &mut Writers, packs: &[Arc<Pack>]) {
        // What is closed and complete here is not written to again.
        writers.retain(|_, (pack, _)| !pack.is_wholly_staged());
        let mut written: Vec<(&Arc<Pack>, Batch, Piece)> = Vec::with_capacity(packs.len());
        let mut made = false;
        for pack in packs {
            let Some(batch) = pack.unstaged() else { continue };
            if !writers.contains_key(&pack.id()) {
                if !pack.journal_begins(Writer::EMPTY_LEN) {
                    continue;
                }
                self.used.fetch_add(Writer::EMPTY_LEN, Ordering::Relaxed);
                match Writer::create(&self.path(pack.id()), self.volume, pack.id()) {
                    Ok(writer) => drop(writers.insert(pack.id(), (Arc::clone(pack), writer))),
                    Err(error) => {
                        self.failed(writers, pack, &error);
                        continue;
                    }
                }
                made = true;
            }
            let Some((_, writer)) = writers.get_mut(&pack.id()) else { continue };
            let pending: u64 = written.iter().map(|(_, batch, _)| batch.record_len()).sum();
            match self.check_room(pending + batch.record_len()).and_then(|()| writer.append(&batch)) {
                Ok(piece) => written.push((pack, batch, piece)),
                Err(error) => self.failed(writers, pack, &error),
            }
        }
        let listed = if made { File::open(&self.dir).and_then(|dir| dir.sync_all()) } else { Ok(()) };
        for (pack, batch, piece) in written {
            let synced = match (&listed, writers.get(&pack.id())) {
                (Ok(()), Some((_, writer))) => writer.sync(),
                (Err(error), _) => Err(error.kind().into()),
                (Ok(()), None) => Err(io::ErrorKind::NotFound.into()),
            };
            match synced {
                Ok(()) => {
                    pack.staged(&batch, piece);
                    self.used.fetch_add(batch.record_len(), Ordering::Relaxed);
                    if self.failing.swap(false, Ordering::Relaxed) {
                        tracing::info!("staging works again");
                    }
                }
                Err(error) => self.failed(writers, pack, &error),
            }
        }
    }

    /// Whether so many more bytes may be written.
    fn check_room(&self, bytes: u64) -> io::Result<()> {
        let full = |why: String| Err(io::Error::new(io::ErrorKind::StorageFull, why));
        if self.used.load(Ordering::Relaxed) + bytes > self.bytes_max {
            return full(format!("the limit of {} bytes is reached", self.bytes_max));
        }
        let disk = rustix::fs::statvfs(&self.dir)?;
        // As df(1) counts: what the disk keeps for itself or for root is not among them.
        let usable = disk.f_blocks.saturating_sub(disk.f_bfree).saturating_add(disk.f_bavail);
        let left = disk.f_bavail.saturating_mul(disk.f_frsize).saturating_sub(bytes);
        if left < usable.saturating_mul(disk.f_frsize) / RESERVED_PART {
            return full("the last tenth of the disk is left to others".to_owned());
        }
        Ok(())
    }

    /// Staging the pack goes no further.
    fn failed(&self, writers: &mut Writers, pack: &Pack, error: &io::Error) {
        // Part of a record may be in the file: it is cut off, and nothing may follow where it was.
        let whole = pack.journal().map_or(0, |journal| journal.file_bytes);
        if let Some((_, writer)) = writers.remove(&pack.id()) {
            writer.cut(whole);
        }
        if !self.failing.swap(true, Ordering::Relaxed) {
            let dir = self.dir.display();
            tracing::warn!(%dir, %error, "cannot stage; fsync waits for the object store until that is over");
        }
        pack.staging_failed();
    }

    /// Reads parts of journals: file and offset, length. A part whose file is gone is `NotFound`.
    pub(super) async fn read(&self, parts: Vec<(PackId, u64, u32)>) -> Vec<io::Result<Bytes>> {
        let paths: Vec<PathBuf> = parts.iter().map(|(pack, ..)| self.path(*pack)).collect();
        let count = parts.len();
        let reading = tokio::task::spawn_blocking(move || {
            let read = paths.iter().zip(parts).map(|(path, (_, at, len))| {
                let mut bytes = vec![0; len as usize];
                File::open(path)?.read_exact_at(&mut bytes, at)?;
                Ok(Bytes::from(bytes))
            });
            read.collect()
        });
        reading.await.unwrap_or_else(|_| (0..count).map(|_| Err(io::ErrorKind::Interrupted.into())).collect())
    }

    /// Reads part of a pack's journal for sending it.
    pub(super) async fn read_for_upload(&self, pack: PackId, at: Range<u64>) -> Result<Bytes, Failure> {
        let len = u32::try_from(at.end - at.start).expect("a pack is far below 4 GiB");
        let read = self.read(vec![(pack, at.start, len)]).await.pop();
        read.unwrap_or_else(|| Err(io::ErrorKind::NotFound.into())).map_err(|error| {
            Failure::new(ErrorKind::Io, format!("the journal {}: {error}", self.path(pack).display()))
        })
    }

    /// Deletes the journals of packs.
    pub(super) async fn remove(self: &Arc<Staging>, packs: Vec<Arc<Pack>>) {
        let mut writers = Arc::clone(&self.writers).lock_owned().await;
        let staging = Arc::clone(self);
        let removing = tokio::task::spawn_blocking(move || {
            for pack in packs {
                writers.remove(&pack.id());
                match fs::remove_file(staging.path(pack.id())) {
                    Err(error) if error.kind() != io::ErrorKind::NotFound => {
                        // The next mount knows that it is of no use, and tries again.
                        tracing::warn!(pack = %pack.id(), %error, "cannot delete the journal of a stored pack");
                    }
                    _ => drop(staging.used.fetch_sub(pack.journal_removed(), Ordering::Relaxed)),
                }
            }
        });
        // An error means that the runtime ends.
        let _ = removing.await;
    }

    /// Reads a pack's journal, and counts it; the error is for people.
    pub(super) async fn replay(&self, pack: PackId) -> Result<Replayed, String> {
        let (path, volume) = (self.path(pack), self.volume);
        let shown = path.display().to_string();
        let reading = tokio::task::spawn_blocking(move || journal::replay(&path, volume, pack));
        let replayed = reading.await.map_err(io::Error::other).and_then(|replayed| replayed);
        let replayed = replayed.map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => format!("its journal {shown} is missing"),
            _ => format!("its journal {shown} cannot be read: {error}"),
        })?;
        self.used.fetch_add(replayed.file_len, Ordering::Relaxed);
        Ok(replayed)
    }

    /// Deletes the journals that are not `needed`.
    pub(super) async fn remove_others(&self, needed: HashSet<PackId>) -> Result<()> {
        let dir = self.dir.clone();
        let removing = tokio::task::spawn_blocking(move || {
            for entry in fs::read_dir(&dir)? {
                let entry = entry?;
                let name = entry.file_name();
                let name = name.to_str().filter(|name| name.len() == 16);
                let pack = name.and_then(|name| u64::from_str_radix(name, 16).ok()).map(PackId);
                if pack.is_some_and(|pack| !needed.contains(&pack)) {
                    fs::remove_file(entry.path())?;
                }
            }
            Ok(())
        });
        removing.await.map_err(io::Error::other).and_then(|removed| removed).map_err(|error| {
            Error::new(ErrorKind::Io, format!("clean the staging directory {}", self.dir.display()))
                .with_source(error)
        })
    }
}

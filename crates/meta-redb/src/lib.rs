//! The metadata store of one user on one machine: [`Kv`] over a redb file.
//!
//! A commit is validated and applied in memory on the caller's thread and never waits for the disk. One committer
//! thread writes what has gathered into redb, in one durable transaction, once a second, when somebody waits in
//! [`Kv::sync`], or when much has gathered. A crash therefore leaves a prefix of the commits, in their order, that
//! holds everything from before the last `sync`.
//!
//! Readers see, newest first: the active layer (recent commits), the frozen layer (on its way into redb), and redb.
//! Each transaction keeps the layers of its beginning, so that flushes do not disturb it.
//!
//! Owns the file and its lock. Knows nothing of what keys and values mean.
//!
//! Lock order: a transaction's buffer; the engine's state; a layer's table; a base's table; watches.

mod backend;
mod committer;
mod engine;
mod layer;
mod open;
mod txn;

use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use async_trait::async_trait;
use parking_lot::Mutex;
use rfs_kv::engine::BufferedTxn;
use rfs_kv::{Kv, KvError, Limits, Result, Txn, Watch};

use crate::engine::Engine;
pub use crate::open::{BackendOpener, OpenError};

/// How the store uses memory and disk.
#[derive(Debug, Clone)]
pub struct RedbOptions {
    /// Bytes of redb's page cache (64 MiB).
    pub cache_bytes: usize,
    /// Longest time that a commit stays in memory only (1 s).
    pub durable_interval: Duration,
    /// Bytes of commits in memory from which on they are written out before their time (16 MiB).
    pub flush_bytes: usize,
    /// Bytes of commits in memory at which further commits wait for the disk (64 MiB).
    pub memory_bytes_max: usize,
    /// Transactions older than this conflict (5 s).
    pub txn_age_max: Duration,
}

impl Default for RedbOptions {
    fn default() -> Self {
        Self {
            cache_bytes: 64 << 20,
            durable_interval: Duration::from_secs(1),
            flush_bytes: 16 << 20,
            memory_bytes_max: 64 << 20,
            txn_age_max: Duration::from_secs(5),
        }
    }
}

/// A redb file, open in this process alone.
///
/// Dropping it without [`Kv::close`] writes out what is in memory and waits for that, because losing the last second
/// silently would be worse; errors are then only logged.
#[derive(Debug)]
pub struct RedbKv {
    engine: Arc<Engine>,
    committer: Mutex<Option<JoinHandle<()>>>,
}

impl RedbKv {
    /// Opens the existing file at `path`. The kernel then begins to read all of it, if it is not larger than 64 MiB.
    ///
    /// # Errors
    /// See [`OpenError`]; its text says what to do.
    pub fn open(path: impl AsRef<Path>, options: RedbOptions) -> Result<Self, OpenError> {
        let opener = open::open_file(path.as_ref())?;
        Self::start(path.as_ref(), opener, options)
    }

    /// Makes a new, empty store at `path`, durably, and opens it. Never replaces a file.
    ///
    /// # Errors
    /// `Exists` if there is one already; otherwise see [`OpenError`].
    pub fn create(path: impl AsRef<Path>, options: RedbOptions) -> Result<Self, OpenError> {
        let opener = open::create_file(path.as_ref(), &options)?;
        Self::start(path.as_ref(), opener, options)
    }

    /// Opens whatever storage `opener` gives, creating the store if it is empty. `opener` is called again after the
    /// storage failed. The caller sees to it that nobody else uses that storage; tests bring storage that fails.
    ///
    /// # Errors
    /// As [`RedbKv::open`].
    pub fn open_with_backend(opener: BackendOpener, options: RedbOptions) -> Result<Self, OpenError> {
        let path = Path::new("(a custom backend)");
        open::initialize(path, &opener, &options)?;
        Self::start(path, opener, options)
    }

    /// Reads all of the file at `path`, which nobody may have open, and checks its structure and checksums. Returns
    /// false if redb found and repaired something: the volume's own checks should follow. Takes seconds a gigabyte.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn check_file(path: impl AsRef<Path>, options: &RedbOptions) -> Result<bool, OpenError> {
        open::check_file(path.as_ref(), options)
    }

    /// Makes the file at `path`, which nobody may have open, as small as it can be. Takes seconds a gigabyte.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn compact_file(path: impl AsRef<Path>, options: &RedbOptions) -> Result<(), OpenError> {
        open::compact_file(path.as_ref(), options)
    }

    fn start(path: &Path, opener: BackendOpener, options: RedbOptions) -> Result<Self, OpenError> {
        let store = open::open_database(path, &opener, &options)?;
        let engine = Arc::new(Engine::new(options, &store));
        let committer = committer::Committer::new(Arc::clone(&engine), path, opener, store);
        let thread = std::thread::Builder::new()
            .name("redb-committer".into())
            .spawn({
                let engine = Arc::clone(&engine);
                move || {
                    // What panics was logged; nobody may wait for a thread that is gone.
                    if open::guarded(|| committer.run()).is_err() {
                        engine.has_stopped(Err("the metadata store's committer panicked".into()));
                    }
                }
            })
            .map_err(|source| OpenError::Io { path: path.to_owned(), source })?;
        Ok(Self { engine, committer: Mutex::new(Some(thread)) })
    }

    /// Bytes of commits that are in memory only.
    pub fn pending_bytes(&self) -> usize {
        self.engine.pending_bytes()
    }

    fn join(&self) {
        if let Some(thread) = self.committer.lock().take() {
            // It does not panic: see `start`.
            let _ = thread.join();
        }
    }
}

impl Drop for RedbKv {
    fn drop(&mut self) {
        self.engine.ask_to_stop();
        self.join();
    }
}

#[async_trait]
impl Kv for RedbKv {
    fn limits(&self) -> Limits {
        Limits { commit_may_be_unknown: false, commit_is_durable: false, ..Limits::STRICTEST }
    }

    async fn begin(&self) -> Result<Arc<dyn Txn>> {
        Ok(Arc::new(BufferedTxn::new(txn::RedbSnapshot::begin(&self.engine)?)))
    }

    async fn sync(&self) -> Result<()> {
        self.engine.sync().await
    }

    async fn watch(&self, key: &[u8]) -> Result<Watch> {
        self.engine.watch(key)
    }

    /// Also fails with `Unavailable` when the disk does not take what is in memory; the store then stays open, and
    /// closing may be tried again.
    async fn close(&self) -> Result<()> {
        self.engine.sync().await?;
        if !self.engine.ask_to_stop() {
            return Err(engine::closed());
        }
        let stopped = self.engine.stopped().await;
        self.join();
        stopped.map_err(KvError::Unavailable)
    }
}

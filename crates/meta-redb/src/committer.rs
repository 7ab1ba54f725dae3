//! The thread that writes layers into redb.
//!
//! One redb transaction a layer: the last value of every key, in order, and the version of the last commit, so that
//! the file always holds a prefix of the commits. Durable and with quick repair, so that opening after a crash takes
//! milliseconds. redb refuses everything after an I/O error, so the database is then opened again on the same locked
//! file, and the layer is written again. After a failed sync that is no use: the kernel may have dropped what it could
//! not write, so the store stays refused until it is opened anew.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use redb::Database;

use crate::engine::{Engine, Task, WriteFailure};
use crate::layer::{Base, Layer};
use crate::open::{BackendOpener, DATA, INFO, OpenError, Opened, VERSION, guarded, open_database};

pub(crate) struct Committer {
    engine: Arc<Engine>,
    path: PathBuf,
    opener: BackendOpener,
    /// `None` while the file cannot be opened.
    database: Option<Database>,
    sync_failed: Arc<AtomicBool>,
    /// Version that the file must at least have.
    durable: u64,
}

impl Committer {
    pub(crate) fn new(engine: Arc<Engine>, path: &Path, opener: BackendOpener, store: Opened) -> Self {
        Self {
            engine,
            path: path.to_owned(),
            opener,
            durable: store.version,
            database: Some(store.database),
            sync_failed: store.sync_failed,
        }
    }

    pub(crate) fn run(mut self) {
        let outcome = loop {
            match self.engine.next_task() {
                Task::Stop => break Ok(()),
                Task::Flush(layer) => {
                    if let Err((text, stopping)) = self.flush_or_recover(&layer) {
                        if stopping {
                            break Err(text);
                        }
                        self.engine.wait_to_retry();
                    }
                }
            }
        };
        if let Err(text) = &outcome {
            tracing::error!(error = text, "the metadata store ends with changes that could not be written");
        }
        self.engine.release_bases(|base| base.break_off("the metadata store was closed"));
        self.close_database();
        self.engine.has_stopped(outcome);
    }

    /// Writes `layer`; on failure makes the file readable again if possible. The error says whether the store is
    /// stopping, so that this was the last attempt.
    fn flush_or_recover(&mut self, layer: &Layer) -> Result<(), (String, bool)> {
        match self.flush(layer) {
            Ok((version, base)) => {
                self.durable = version;
                self.engine.flushed(version, Arc::new(base));
                Ok(())
            }
            Err(WriteFailure { full, text }) => {
                let text = format!("cannot write the metadata file {}: {text}", self.path.display());
                let base = self.reopen(&text);
                self.engine.flush_failed(WriteFailure { full, text: text.clone() }, Arc::new(base));
                Err((text, self.engine.is_stopping()))
            }
        }
    }

    fn flush(&mut self, layer: &Layer) -> Result<(u64, Base), WriteFailure> {
        let failure = |text: String| WriteFailure { full: false, text };
        if self.sync_failed.load(Ordering::Acquire) {
            return Err(failure(SYNC_FAILED.into()));
        }
        if self.database.is_none() {
            self.open_again()?;
        }
        let Some(database) = &self.database else {
            return Err(failure("it is not open".into()));
        };
        match guarded(|| write(database, layer)) {
            Ok(Ok(done)) => Ok(done),
            Ok(Err(error)) if self.sync_failed.load(Ordering::Acquire) => {
                Err(failure(format!("{error}; {SYNC_FAILED}")))
            }
            Ok(Err(error)) => {
                let full = matches!(&error, redb::Error::Io(error) if is_full(error));
                Err(WriteFailure { full, text: error.to_string() })
            }
            Err(damage) => Err(failure(format!("{damage}; restore it from a backup"))),
        }
    }

    /// Opens the file again after an error, because redb refuses everything then; returns what can be read.
    fn reopen(&mut self, text: &str) -> Base {
        if self.sync_failed.load(Ordering::Acquire) {
            self.engine.release_bases(|base| base.break_off(text));
            self.close_database();
            return Base::broken(text.into());
        }
        self.engine.release_bases(Base::expire);
        self.close_database();
        match self.open_again() {
            Ok(()) => self.database.as_ref().map_or_else(|| Base::broken(text.into()), Base::newest),
            Err(failure) => Base::broken(failure.text),
        }
    }

    fn open_again(&mut self) -> Result<(), WriteFailure> {
        let opened = open_database(&self.path, &self.opener, &self.engine.options);
        let store = opened.map_err(|error| {
            let full = matches!(&error, OpenError::Io { source, .. } if is_full(source));
            WriteFailure { full, text: error.to_string() }
        })?;
        if store.version < self.durable {
            self.sync_failed.store(true, Ordering::Release);
            return Err(WriteFailure { full: false, text: SYNC_FAILED.into() });
        }
        self.sync_failed = store.sync_failed;
        self.database = Some(store.database);
        Ok(())
    }

    /// Closing writes, too, so that it can fail like a flush. What matters was committed before, or is told already.
    fn close_database(&mut self) {
        let database = self.database.take();
        if let Err(damage) = guarded(|| drop(database)) {
            tracing::error!(%damage, path = %self.path.display(), "closing the metadata file failed");
        }
    }
}

const SYNC_FAILED: &str =
    "the disk failed to keep what was written; unmount, check the disk, and mount again";

/// Whether there is no room on the disk, or none for this user.
fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

fn write(database: &Database, layer: &Layer) -> Result<(u64, Base), redb::Error> {
    let mut txn = database.begin_write()?;
    txn.set_quick_repair(true);
    let written = layer.with(|memtable| -> Result<u64, redb::Error> {
        let mut table = txn.open_table(DATA)?;
        for (key, value) in memtable.iter_newest() {
            match value {
                Some(value) => drop(table.insert(&key[..], &value[..])?),
                None => drop(table.remove(&key[..])?),
            }
        }
        let version = memtable.version_last();
        txn.open_table(INFO)?.insert(VERSION, version)?;
        Ok(version)
    });
    let version = match written {
        Ok(result) => result?,
        // Only retired layers are emptied.
        Err(_) => return Err(redb::Error::Corrupted("a layer was emptied before it was written".into())),
    };
    txn.commit()?;
    Ok((version, Base::newest(database)))
}

//! The thread that writes layers into redb.
//!
//! One redb transaction a layer: the last value of every key, in order, and the version of the last commit, so that
//! the file always holds a prefix of the commits. Durable and with quick repair, so that opening after a crash takes
//! milliseconds. redb refuses everything after an I/O error, so the database is then opened again on the same locked
//! file, and the layer is written again. After a failed sync that is no use: the kernel may have dropped what it could
//! not write, so the store stays refused until it is opened anew.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use redb::Database;

use crate::engine::{Engine, Task};
use crate::layer::{Base, Layer};
use crate::open::{BackendOpener, DATA, INFO, Opened, VERSION, open_database};

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
        self.database = None;
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
            Err(text) => {
                let text = format!("cannot write the metadata file {}: {text}", self.path.display());
                let base = self.reopen(&text);
                self.engine.flush_failed(text.clone(), Arc::new(base));
                Err((text, self.engine.is_stopping()))
            }
        }
    }

    fn flush(&mut self, layer: &Layer) -> Result<(u64, Base), String> {
        if self.sync_failed.load(Ordering::Acquire) {
            return Err(SYNC_FAILED.into());
        }
        let Some(database) = &self.database else {
            // The last attempt to open it failed; `reopen` tries again after this.
            return Err("it could not be opened again after an error".into());
        };
        let written = catch_unwind(AssertUnwindSafe(|| write(database, layer)));
        match written {
            Ok(Ok(done)) => Ok(done),
            Ok(Err(error)) if self.sync_failed.load(Ordering::Acquire) => {
                Err(format!("{error}; {SYNC_FAILED}"))
            }
            Ok(Err(error)) => Err(error.to_string()),
            Err(_) => Err("its structure is damaged; restore it from a backup".into()),
        }
    }

    /// Opens the file again after an error; returns what can be read.
    fn reopen(&mut self, text: &str) -> Base {
        if self.sync_failed.load(Ordering::Acquire) {
            self.engine.release_bases(|base| base.break_off(text));
            self.database = None;
            return Base::broken(text.into());
        }
        self.engine.release_bases(Base::expire);
        self.database = None;
        let opened = match open_database(&self.path, &self.opener, &self.engine.options) {
            Ok(opened) => opened,
            Err(error) => return Base::broken(error.to_string()),
        };
        if opened.version < self.durable {
            let text = format!("{} lost changes that had been written", self.path.display());
            self.sync_failed.store(true, Ordering::Release);
            return Base::broken(text);
        }
        self.sync_failed = opened.sync_failed;
        let base = Base::newest(&opened.database).unwrap_or_else(|error| Base::broken(error.to_string()));
        self.database = Some(opened.database);
        base
    }
}

const SYNC_FAILED: &str =
    "the disk failed to keep what was written; unmount, check the disk, and mount again";

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
    Ok((version, Base::newest(database)?))
}

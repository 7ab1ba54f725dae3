//! The key-value contract over FoundationDB.
//!
//! Thin on purpose: FoundationDB has the contract's semantics, so this engine translates calls and errors, puts all
//! keys below a prefix, and counts bytes so that the limits are told in the same words as elsewhere. The client library
//! is opened when the first `fdb://` volume is (see `rfs-fdb-dlopen`). Retries are the caller's (`rfs_kv::transact`).

mod awaited;
mod network;
mod txn;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use foundationdb::options::TransactionOption;
use foundationdb::{Database, FdbError};
use futures::FutureExt;
use futures::future::BoxFuture;
use parking_lot::Mutex;
use rfs_kv::{Kv, KvError, Limits, RECENT, Result, Txn, Watch};
use tokio::time::Instant;

use awaited::awaited;
pub use network::stop_network;
use txn::FdbTxn;

/// Longest prefix. With its terminator it fills what the contract's longest key leaves of FoundationDB's.
pub const PREFIX_BYTES_MAX: usize = 99;

/// How to reach a cluster.
#[derive(Debug, Clone)]
pub struct FdbOptions {
    /// The cluster file; `None` is FoundationDB's default place.
    pub cluster_file: Option<PathBuf>,
    /// All keys of the volume start with these bytes, at most [`PREFIX_BYTES_MAX`]; volumes of one cluster need different
    /// prefixes.
    pub prefix: Vec<u8>,
    /// A transaction that takes longer fails.
    pub timeout: Duration,
    /// The client library; `None` is `$RFS_FDB_LIBRARY`, then the system's.
    pub library: Option<PathBuf>,
}

impl Default for FdbOptions {
    fn default() -> FdbOptions {
        FdbOptions {
            cluster_file: None,
            prefix: b"rfs".to_vec(),
            timeout: Duration::from_secs(10),
            library: None,
        }
    }
}

/// Why a cluster cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The client library is missing or unusable.
    #[error(transparent)]
    Library(#[from] rfs_fdb_dlopen::LoadError),
    /// The prefix is too long.
    #[error("a prefix of {0} bytes is too long: {PREFIX_BYTES_MAX} are allowed")]
    Prefix(usize),
    /// The cluster file is missing or not text.
    #[error("cluster file {0}: {1}")]
    ClusterFile(PathBuf, String),
    /// The library refused.
    #[error("FoundationDB client: {0}")]
    Client(String),
    /// Nobody answered in time.
    #[error(
        "no answer from the FoundationDB cluster within {0:?}: is it running, and is the cluster file right?"
    )]
    NoAnswer(Duration),
}

/// A FoundationDB cluster, seen through one prefix.
pub struct FdbKv {
    database: Arc<Database>,
    prefix: Arc<[u8]>,
    timeout: Duration,
    open: Arc<Open>,
}

/// What the store and its transactions share.
#[derive(Debug, Default)]
struct Open {
    /// Whether the store was closed. The client library itself keeps its connections until the process ends.
    closed: AtomicBool,
    latest: Mutex<Option<Latest>>,
    /// When a commit last failed: it may have become a version that is newer than the latest one that was asked for before.
    failed: Mutex<Option<Instant>>,
}

/// The newest version that is known.
#[derive(Debug, Clone, Copy)]
struct Latest {
    version: i64,
    /// When the cluster was asked for it, or for one before it. The answers to commits do not count: a cluster that has
    /// too much to do holds back the answers to this question, and who never asks is never held back.
    asked: Instant,
}

impl Open {
    /// A version that was asked for.
    fn answered(&self, version: i64, asked: Instant) {
        let mut latest = self.latest.lock();
        let known = latest.get_or_insert(Latest { version, asked });
        // Each holds for all that is newer, too.
        known.version = known.version.max(version);
        known.asked = known.asked.max(asked);
    }

    /// A version that a commit of this store has become.
    fn committed(&self, version: i64) {
        if let Some(latest) = self.latest.lock().as_mut() {
            latest.version = latest.version.max(version);
        }
    }

    /// A commit of this store did not succeed, as far as is known.
    fn failed(&self) {
        *self.failed.lock() = Some(Instant::now());
    }

    fn recent(&self) -> Option<i64> {
        let latest = (*self.latest.lock())?;
        let since_failure = (*self.failed.lock()).is_none_or(|failed| failed < latest.asked);
        (since_failure && latest.asked.elapsed() < RECENT).then_some(latest.version)
    }

    fn check(&self) -> Result<()> {
        if self.closed.load(Ordering::Acquire) {
            return Err(KvError::Unavailable("the metadata store was closed".to_owned()));
        }
        Ok(())
    }
}

impl FdbKv {
    /// Loads the client library, starts its network thread (once a process), and checks that the cluster answers.
    ///
    /// # Errors
    /// [`OpenError`]; the text says what to do.
    pub async fn connect(options: FdbOptions) -> Result<FdbKv, OpenError> {
        let FdbOptions { cluster_file, mut prefix, timeout, library } = options;
        if prefix.len() > PREFIX_BYTES_MAX {
            return Err(OpenError::Prefix(prefix.len()));
        }
        if let Some(file) = &cluster_file {
            std::fs::metadata(file).map_err(|e| OpenError::ClusterFile(file.clone(), e.to_string()))?;
        }
        rfs_fdb_dlopen::load(library.as_deref())?;
        network::start()?;
        let path = match &cluster_file {
            Some(file) => Some(
                file.to_str().ok_or_else(|| OpenError::ClusterFile(file.clone(), "not UTF-8".to_owned()))?,
            ),
            None => None,
        };
        let database = Database::new(path).map_err(|e| OpenError::Client(e.to_string()))?;
        // The terminator keeps prefix "a" out of prefix "ab".
        prefix.push(0);
        let open = Arc::default();
        let kv = FdbKv { database: Arc::new(database), prefix: prefix.into(), timeout, open };
        let answered = async { kv.begin().await?.get(b"").await };
        match tokio::time::timeout(timeout, answered).await {
            Ok(Ok(_)) => Ok(kv),
            Ok(Err(KvError::Unavailable(text))) if !text.contains("timed out") => {
                Err(OpenError::Client(text))
            }
            Ok(Err(_)) | Err(_) => Err(OpenError::NoAnswer(timeout)),
        }
    }

    fn transaction(&self) -> Result<foundationdb::Transaction> {
        self.open.check()?;
        let txn = self.database.create_trx().map_err(told)?;
        let timeout_ms = i32::try_from(self.timeout.as_millis()).unwrap_or(i32::MAX);
        txn.set_option(TransactionOption::Timeout(timeout_ms)).map_err(told)?;
        Ok(txn)
    }

    fn begun(&self, txn: foundationdb::Transaction) -> Arc<dyn Txn> {
        Arc::new(FdbTxn::new(txn, Arc::clone(&self.prefix), Arc::clone(&self.open)))
    }
}

#[async_trait]
impl Kv for FdbKv {
    fn limits(&self) -> Limits {
        Limits::STRICTEST
    }

    async fn begin(&self) -> Result<Arc<dyn Txn>> {
        let txn = self.transaction()?;
        // The read version is needed by the first read or by the commit anyway; asking for it here makes the
        // transaction's place in the order of commits the one that the contract promises, at no further round trip.
        let asked = Instant::now();
        let version = awaited(txn.get_read_version()).await.map_err(told)?;
        self.open.answered(version, asked);
        Ok(self.begun(txn))
    }

    fn begin_recent(&self) -> BoxFuture<'_, Result<Arc<dyn Txn>>> {
        let Some(version) = self.open.recent() else { return self.begin() };
        let begun = self.transaction().map(|txn| {
            txn.set_read_version(version);
            self.begun(txn)
        });
        std::future::ready(begun).boxed()
    }

    async fn sync(&self) -> Result<()> {
        // A commit that returned is durable on the cluster.
        Ok(())
    }

    async fn watch(&self, key: &[u8]) -> Result<Watch> {
        let full = [&self.prefix, key].concat();
        let txn = self.transaction()?;
        let changed = txn.watch(&full);
        // A watch lives on after its transaction, and only if that commits.
        awaited(txn.commit()).await.map_err(|e| told(e.into()))?;
        Ok(awaited(changed).map(|end| end.map_err(told)).boxed())
    }

    async fn close(&self) -> Result<()> {
        self.open.closed.store(true, Ordering::Release);
        Ok(())
    }
}

/// FoundationDB's error codes that have a meaning of their own in the contract.
mod code {
    pub(crate) const TIMED_OUT: i32 = 1031;
    pub(crate) const TRANSACTION_TOO_LARGE: i32 = 2101;
    pub(crate) const KEY_TOO_LARGE: i32 = 2102;
    pub(crate) const VALUE_TOO_LARGE: i32 = 2103;
}

/// What a failed call means to a caller of the contract.
fn told(error: FdbError) -> KvError {
    match error.code() {
        code::TRANSACTION_TOO_LARGE | code::KEY_TOO_LARGE | code::VALUE_TOO_LARGE => {
            KvError::TooLarge(error.message().to_owned())
        }
        _ if error.is_maybe_committed() => KvError::MaybeCommitted,
        _ if error.is_retryable() => KvError::Conflict,
        code => KvError::Unavailable(format!("FoundationDB: {} ({code})", describe(error))),
    }
}

/// What a failed commit means: as [`told`], but a commit that ran out of time may have been applied.
fn told_of_commit(error: FdbError) -> KvError {
    if error.code() == code::TIMED_OUT { KvError::MaybeCommitted } else { told(error) }
}

fn describe(error: FdbError) -> &'static str {
    if error.code() == code::TIMED_OUT { "timed out" } else { error.message() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn after_a_commit_that_failed_the_cluster_is_asked_what_is_recent() {
        let open = Open::default();
        let asked = Instant::now();
        open.answered(1, asked);
        open.failed();
        assert_eq!(open.recent(), None);
        open.answered(2, asked);
        assert_eq!(open.recent(), None, "asked before");
        // As if it were a little later.
        open.answered(3, Instant::now() + Duration::from_millis(1));
        assert_eq!(open.recent(), Some(3));
    }
}

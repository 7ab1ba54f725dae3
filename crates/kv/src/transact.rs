//! The one retry loop.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use crate::{Kv, KvError, Txn};

/// What a run of a transaction's closure may want to know about the runs before it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Attempt {
    /// 0 for the first run.
    pub index: u32,
    /// Whether an earlier run may have been committed.
    pub maybe_committed: bool,
}

/// Most runs of one closure before the last error is returned.
const RUNS_MAX: u32 = 100;

/// Runs `body` in a transaction and commits it, again after `Conflict` and `MaybeCommitted`, with growing pauses.
///
/// `body` may run many times, and once more after it already committed: see [`Attempt`].
///
/// # Errors
/// What `body` returns; `Conflict`/`MaybeCommitted` after 100 runs; `TooLarge`, `Full` and `Unavailable` at once.
pub async fn transact<T, E, F, Fut>(kv: &dyn Kv, body: F) -> Result<T, E>
where
    F: Fn(Arc<dyn Txn>, Attempt) -> Fut,
    Fut: Future<Output = Result<T, E>>,
    E: From<KvError> + RetryClass,
{
    run(kv, Beginning::Now, body).await
}

/// As [`transact`], for who has reason to believe that nobody else commits: the first run begins with
/// [`Kv::begin_recent`]. If it fails because somebody has, the next one sees that.
///
/// # Errors
/// As [`transact`].
pub async fn transact_recent<T, E, F, Fut>(kv: &dyn Kv, body: F) -> Result<T, E>
where
    F: Fn(Arc<dyn Txn>, Attempt) -> Fut,
    Fut: Future<Output = Result<T, E>>,
    E: From<KvError> + RetryClass,
{
    run(kv, Beginning::Recent, body).await
}

/// How the first run begins.
#[derive(Debug, Clone, Copy)]
enum Beginning {
    Now,
    Recent,
}

async fn run<T, E, F, Fut>(kv: &dyn Kv, first: Beginning, body: F) -> Result<T, E>
where
    F: Fn(Arc<dyn Txn>, Attempt) -> Fut,
    Fut: Future<Output = Result<T, E>>,
    E: From<KvError> + RetryClass,
{
    let mut attempt = Attempt::default();
    loop {
        let beginning = if attempt.index == 0 { first } else { Beginning::Now };
        let failure = match run_once(kv, beginning, &body, attempt).await {
            Ok(value) => return Ok(value),
            Err(failure) => failure,
        };
        match failure.class() {
            Some(Retry::Again) => {}
            Some(Retry::MaybeCommitted) => attempt.maybe_committed = true,
            None => return Err(failure),
        }
        attempt.index += 1;
        if attempt.index >= RUNS_MAX {
            return Err(failure);
        }
        pause(attempt.index).await;
    }
}

async fn run_once<T, E, F, Fut>(kv: &dyn Kv, beginning: Beginning, body: &F, attempt: Attempt) -> Result<T, E>
where
    F: Fn(Arc<dyn Txn>, Attempt) -> Fut,
    Fut: Future<Output = Result<T, E>>,
    E: From<KvError>,
{
    let txn = match beginning {
        Beginning::Now => kv.begin().await?,
        Beginning::Recent => kv.begin_recent().await?,
    };
    let value = body(Arc::clone(&txn), attempt).await?;
    txn.commit().await?;
    Ok(value)
}

/// The first two retries go at once (most conflicts are short), later ones wait 1 ms doubled up to 64 ms.
async fn pause(index: u32) {
    if index <= 2 {
        tokio::task::yield_now().await;
    } else {
        tokio::time::sleep(Duration::from_millis(1 << (index - 3).min(6))).await;
    }
}

/// How an error looks to the retry loop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Retry {
    /// Nothing was committed: run again.
    Again,
    /// It may have been committed: run again and say so.
    MaybeCommitted,
}

/// Lets errors that wrap a [`KvError`] pass through the retry loop.
pub trait RetryClass {
    /// `None` when running again is of no use.
    fn class(&self) -> Option<Retry>;
}

impl RetryClass for KvError {
    fn class(&self) -> Option<Retry> {
        match self {
            KvError::Conflict => Some(Retry::Again),
            KvError::MaybeCommitted => Some(Retry::MaybeCommitted),
            KvError::TooLarge(_) | KvError::Full(_) | KvError::Unavailable(_) => None,
        }
    }
}

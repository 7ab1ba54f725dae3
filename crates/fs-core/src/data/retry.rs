//! How long to wait between attempts, and what an object store's error means to a caller.

use std::error::Error as _;
use std::io;
use std::time::Duration;

use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::types::{Error, ErrorKind};

const FIRST: Duration = Duration::from_millis(100);
const LONGEST: Duration = Duration::from_secs(10);
/// A store repeats what may succeed later by itself for `io_timeout`, and then says why it failed. Only a store that
/// says nothing at all is given up here.
pub(super) const GRACE: Duration = Duration::from_secs(5);

/// Pauses that double from 0.1 s to 10 s, each shortened by up to a half so that failures do not march in step. The
/// jitter comes from `seed`, so that a simulation repeats itself.
#[derive(Debug)]
pub(super) struct Backoff {
    seed: u64,
    attempt: u32,
}

impl Backoff {
    pub(super) fn new(seed: u64) -> Backoff {
        Backoff { seed, attempt: 0 }
    }

    /// The next pause.
    pub(super) fn pause(&mut self) -> Duration {
        let full = FIRST.saturating_mul(1 << self.attempt.min(10)).min(LONGEST);
        let jitter = xxh3_64_with_seed(&self.attempt.to_le_bytes(), self.seed) % 512;
        self.attempt = self.attempt.saturating_add(1);
        full * (1024 - u32::try_from(jitter).expect("below 512")) / 1024
    }
}

/// A failure that several waiters are told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Failure {
    pub(super) kind: ErrorKind,
    pub(super) text: String,
}

impl Failure {
    pub(super) fn new(kind: ErrorKind, text: impl Into<String>) -> Failure {
        Failure { kind, text: text.into() }
    }

    /// What `error` means: `Stale` for a missing object, `NoSpace` for a full store, else `Io`.
    pub(super) fn of_store(what: &str, error: &object_store::Error) -> Failure {
        let kind = match error {
            object_store::Error::NotFound { .. } => ErrorKind::Stale,
            error if is_full(error) => ErrorKind::NoSpace,
            _ => ErrorKind::Io,
        };
        Failure { kind, text: format!("{what}: {error}") }
    }

    /// No answer within `limit`.
    pub(super) fn timeout(what: &str, limit: Duration) -> Failure {
        Failure { kind: ErrorKind::Io, text: format!("{what}: no answer for {} s", limit.as_secs()) }
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Error {
        Error::new(failure.kind, failure.text)
    }
}

/// The trait has no kind of its own for a full store. Stores say so by an operating system's error among the causes.
fn is_full(error: &object_store::Error) -> bool {
    let mut cause = error.source();
    while let Some(error) = cause {
        if let Some(error) = error.downcast_ref::<io::Error>() {
            return matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded);
        }
        cause = error.source();
    }
    false
}

/// Waits for `request`, at most `limit` and [`GRACE`].
pub(super) async fn bounded<T>(
    what: &str,
    limit: Option<Duration>,
    request: impl Future<Output = object_store::Result<T>>,
) -> Result<T, Failure> {
    let answer = match limit {
        None => request.await,
        Some(limit) => match tokio::time::timeout(limit + GRACE, request).await {
            Ok(answer) => answer,
            Err(_) => return Err(Failure::timeout(what, limit)),
        },
    };
    answer.map_err(|error| Failure::of_store(what, &error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_a_bound_and_repeat_for_a_seed() {
        let pauses = |seed| {
            let mut backoff = Backoff::new(seed);
            (0..40).map(|_| backoff.pause()).collect::<Vec<_>>()
        };
        assert_eq!(pauses(1), pauses(1));
        assert_ne!(pauses(1), pauses(2));
        assert!(pauses(1)[0] >= FIRST / 2 && pauses(1)[0] <= FIRST);
        assert!(pauses(3).iter().skip(10).all(|pause| *pause >= LONGEST / 2 && *pause <= LONGEST));
    }

    #[test]
    fn a_full_disk_below_the_local_store_is_no_space() {
        let full = io::Error::from(io::ErrorKind::StorageFull);
        let error = object_store::Error::Generic { store: "local", source: Box::new(full) };
        assert_eq!(Failure::of_store("put", &error).kind, ErrorKind::NoSpace);
        let other = object_store::Error::Generic { store: "local", source: "weather".into() };
        assert_eq!(Failure::of_store("put", &other).kind, ErrorKind::Io);
    }
}

//! What went wrong, decided once.
//!
//! `object_store::Error` says little about why a request failed, so errors made here carry a [`RequestError`] with a
//! [`Cause`] as their source. [`is_transient`] (for the retry loop) and [`classify`] (for people and exit codes) are
//! the only code that looks for it, or for the `io::Error` of a local disk.

use std::error::Error;
use std::io;

/// Why a request to a store failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Cause {
    /// No answer in time; the request may have been carried out.
    Timeout,
    /// No connection, or it broke; the request may have been carried out.
    Connection,
    /// The store asks for fewer requests (503 `SlowDown`, 429).
    Throttled,
    /// The store failed inside (5xx).
    Server,
    /// No credentials were found, or the store does not know them.
    Credentials,
    /// The credentials were good once; new ones are expected.
    ExpiredCredentials,
    /// This machine's clock differs too much from the store's.
    ClockSkew,
    /// The credentials are known, but this is not allowed to them.
    Forbidden,
    /// The bucket does not exist.
    NoBucket,
    /// The bucket exists in another region, or the signature names another region than the store's.
    WrongRegion,
    /// The store has no room left.
    Full,
    /// No such object.
    NotFound,
    /// No such multipart upload: never begun, aborted, or completed already.
    NoUpload,
    /// An object of that name exists, and the request said that it must not.
    AlreadyExists,
    /// Another condition of the request does not hold.
    Precondition,
    /// The object is what the caller has already.
    NotModified,
    /// The store cannot do this at all.
    Unsupported,
    /// The request or the answer makes no sense.
    Invalid,
    /// Anything else.
    Other,
}

impl Cause {
    /// Whether the same request may succeed later, without anybody changing anything.
    pub fn is_transient(self) -> bool {
        match self {
            Cause::Timeout
            | Cause::Connection
            | Cause::Throttled
            | Cause::Server
            | Cause::ExpiredCredentials => true,
            Cause::Credentials
            | Cause::ClockSkew
            | Cause::Forbidden
            | Cause::NoBucket
            | Cause::WrongRegion
            | Cause::Full
            | Cause::NotFound
            | Cause::NoUpload
            | Cause::AlreadyExists
            | Cause::Precondition
            | Cause::NotModified
            | Cause::Unsupported
            | Cause::Invalid
            | Cause::Other => false,
        }
    }

    fn failure(self) -> StoreFailure {
        match self {
            Cause::Timeout | Cause::Connection | Cause::Throttled | Cause::Server => {
                StoreFailure::Unavailable
            }
            Cause::Credentials | Cause::ExpiredCredentials | Cause::ClockSkew | Cause::Forbidden => {
                StoreFailure::Credentials
            }
            Cause::NoBucket | Cause::WrongRegion => StoreFailure::NoBucket,
            Cause::Full => StoreFailure::Full,
            Cause::NotFound => StoreFailure::NotFound,
            Cause::AlreadyExists => StoreFailure::AlreadyExists,
            Cause::NoUpload
            | Cause::Precondition
            | Cause::NotModified
            | Cause::Unsupported
            | Cause::Invalid
            | Cause::Other => StoreFailure::Other,
        }
    }
}

/// A failed request: its [`Cause`] for deciding, the rest for reading.
#[derive(Debug, thiserror::Error)]
#[error("{operation}: {message}")]
pub struct RequestError {
    cause: Cause,
    operation: &'static str,
    message: String,
    source: Option<Box<dyn Error + Send + Sync>>,
}

impl RequestError {
    /// An error of `operation` (S3's name for it, or a verb).
    pub fn new(cause: Cause, operation: &'static str, message: impl Into<String>) -> RequestError {
        RequestError { cause, operation, message: message.into(), source: None }
    }

    /// With the error that led to it.
    #[must_use]
    pub fn with_source(mut self, source: impl Into<Box<dyn Error + Send + Sync>>) -> RequestError {
        self.source = Some(source.into());
        self
    }

    /// Why it failed.
    pub fn cause(&self) -> Cause {
        self.cause
    }

    /// With an `io::Error` at its root, which is how a full disk tells those who do not know this crate.
    fn with_storage_full(mut self) -> RequestError {
        let source = self.source.take().unwrap_or_else(|| self.message.clone().into());
        self.source = Some(Box::new(io::Error::new(io::ErrorKind::StorageFull, source)));
        self
    }

    /// As the trait's error, about the object or prefix at `path`.
    pub fn at(self, path: &(impl ToString + ?Sized)) -> object_store::Error {
        let path = path.to_string();
        let cause = self.cause;
        let source = Box::new(if cause == Cause::Full { self.with_storage_full() } else { self });
        match cause {
            Cause::NotFound => object_store::Error::NotFound { path, source },
            Cause::AlreadyExists => object_store::Error::AlreadyExists { path, source },
            Cause::Precondition => object_store::Error::Precondition { path, source },
            Cause::NotModified => object_store::Error::NotModified { path, source },
            Cause::Credentials | Cause::ExpiredCredentials | Cause::ClockSkew => {
                object_store::Error::Unauthenticated { path, source }
            }
            Cause::Forbidden => object_store::Error::PermissionDenied { path, source },
            Cause::Unsupported => object_store::Error::NotSupported { source },
            Cause::Timeout
            | Cause::Connection
            | Cause::Throttled
            | Cause::Server
            | Cause::NoBucket
            | Cause::WrongRegion
            | Cause::Full
            | Cause::NoUpload
            | Cause::Invalid
            | Cause::Other => object_store::Error::Generic { store: "object store", source },
        }
    }
}

/// What a failure of a store means to whoever has to act on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StoreFailure {
    /// No such object.
    NotFound,
    /// The object exists and must not.
    AlreadyExists,
    /// Wrong, missing or expired credentials, missing permission, or a clock that makes them look wrong.
    Credentials,
    /// The bucket or directory does not exist, or is elsewhere.
    NoBucket,
    /// No room left, in the store or on the local disk.
    Full,
    /// The store does not answer, or fails inside: waiting may help.
    Unavailable,
    /// Anything else.
    Other,
}

/// The errors from `error` inwards, following `source`.
pub(crate) fn chain<'a>(error: &'a (dyn Error + 'static)) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    std::iter::successors(Some(error), |error| (**error).source())
}

/// The cause that a request failed for, if this crate made the error.
pub(crate) fn cause(error: &(dyn Error + 'static)) -> Option<Cause> {
    chain(error).find_map(|e| e.downcast_ref::<RequestError>()).map(RequestError::cause)
}

/// Whether the request that gave `error` may succeed later, without anybody changing anything.
pub fn is_transient(error: &object_store::Error) -> bool {
    cause(error).is_some_and(Cause::is_transient)
}

/// What `error` means to whoever has to act on it, whichever store it came from.
pub fn classify(error: &object_store::Error) -> StoreFailure {
    if let Some(cause) = cause(error) {
        return cause.failure();
    }
    match error {
        object_store::Error::NotFound { .. } => return StoreFailure::NotFound,
        object_store::Error::AlreadyExists { .. } => return StoreFailure::AlreadyExists,
        object_store::Error::Unauthenticated { .. } => return StoreFailure::Credentials,
        _ => {}
    }
    chain(error).find_map(|e| e.downcast_ref::<io::Error>()).map_or(StoreFailure::Other, classify_io)
}

fn classify_io(error: &io::Error) -> StoreFailure {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => StoreFailure::Full,
        io::ErrorKind::TimedOut
        | io::ErrorKind::StaleNetworkFileHandle
        | io::ErrorKind::HostUnreachable
        | io::ErrorKind::NetworkUnreachable
        | io::ErrorKind::NetworkDown => StoreFailure::Unavailable,
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => StoreFailure::NoBucket,
        _ => StoreFailure::Other,
    }
}

/// Why a store could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The URL is not one of a store; the text says what is wrong with it.
    #[error("store URL {url}: {reason}")]
    InvalidUrl {
        /// The URL as given.
        url: String,
        /// What is wrong, and what would be right.
        reason: String,
    },
    /// A setting besides the URL cannot be used, for instance a CA bundle that does not parse.
    #[error("{0}")]
    Config(String),
    /// The directory of a `file://` store is not there.
    #[error("the store's directory {path} does not exist: is its disk mounted?")]
    NoDirectory {
        /// The directory.
        path: String,
    },
    /// The local directory cannot be used.
    #[error("the store's directory {path}: {source}")]
    Directory {
        /// The directory.
        path: String,
        /// What the system said.
        source: io::Error,
    },
}

impl StoreError {
    /// What this means to whoever has to act on it.
    pub fn failure(&self) -> StoreFailure {
        match self {
            StoreError::InvalidUrl { .. } | StoreError::Config(_) => StoreFailure::Other,
            StoreError::NoDirectory { .. } => StoreFailure::NoBucket,
            StoreError::Directory { source, .. } => classify_io(source),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_is_found_through_other_errors() {
        let inner = RequestError::new(Cause::Throttled, "PutObject", "SlowDown").at("a");
        let outer = object_store::Error::Generic { store: "x", source: Box::new(inner) };
        assert!(is_transient(&outer));
        assert_eq!(classify(&outer), StoreFailure::Unavailable);
    }

    #[test]
    fn a_full_disk_is_recognised() {
        for kind in [io::ErrorKind::StorageFull, io::ErrorKind::QuotaExceeded] {
            let error = object_store::Error::Generic { store: "x", source: Box::new(io::Error::from(kind)) };
            assert_eq!(classify(&error), StoreFailure::Full);
            assert!(!is_transient(&error));
        }
        let remote = RequestError::new(Cause::Full, "PutObject", "QuotaExceeded").at("a");
        let local = chain(&remote).find_map(|e| e.downcast_ref::<io::Error>()).map(io::Error::kind);
        assert_eq!(local, Some(io::ErrorKind::StorageFull));
    }

    #[test]
    fn refusals_are_not_transient() {
        for cause in [Cause::Credentials, Cause::Forbidden, Cause::NotFound, Cause::Precondition, Cause::Full]
        {
            assert!(!is_transient(&RequestError::new(cause, "GetObject", "no").at("a")));
        }
    }
}

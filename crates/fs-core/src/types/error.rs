//! What can go wrong, one kind per errno.

use std::fmt;

use rfs_kv::{KvError, Retry, RetryClass};

/// Shorthand for results of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The closed set of reasons; `fs-fuse` maps each to its errno.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// ENOENT
    NotFound,
    /// EEXIST
    Exists,
    /// ENOTDIR
    NotDirectory,
    /// EISDIR
    IsDirectory,
    /// ENOTEMPTY
    NotEmpty,
    /// EINVAL
    Invalid,
    /// ENAMETOOLONG
    NameTooLong,
    /// EPERM
    NotPermitted,
    /// EACCES
    AccessDenied,
    /// ENOSPC
    NoSpace,
    /// EDQUOT
    QuotaExceeded,
    /// EFBIG
    FileTooLarge,
    /// EMLINK
    TooManyLinks,
    /// ENODATA
    NoAttribute,
    /// E2BIG
    ArgumentTooLarge,
    /// ERANGE
    BufferTooSmall,
    /// EOPNOTSUPP
    NotSupported,
    /// EBADF
    BadHandle,
    /// EAGAIN
    WouldBlock,
    /// EDEADLK
    Deadlock,
    /// ENOLCK
    NoLocks,
    /// EINTR
    Interrupted,
    /// ESTALE
    Stale,
    /// EROFS
    ReadOnly,
    /// ENXIO
    NoSuchAddress,
    /// EXDEV
    CrossDevice,
    /// EBUSY
    Busy,
    /// ENOMEM
    NoMemory,
    /// EIO: a store failed, or bytes are damaged
    Io,
}

/// An error: `kind` is for deciding, the rest is for reading.
#[derive(Debug)]
pub struct Error {
    /// What a caller branches on.
    pub kind: ErrorKind,
    context: String,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
    retry: Option<Retry>,
}

impl Error {
    /// An error with a sentence for the reader.
    pub fn new(kind: ErrorKind, context: impl Into<String>) -> Error {
        Error { kind, context: context.into(), source: None, retry: None }
    }

    /// Adds the cause.
    #[must_use]
    pub fn with_source(mut self, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
        self.source = Some(source.into());
        self
    }

    /// Whether the metadata store gave no answer: what was asked of it may have come about.
    pub fn unanswered(&self) -> bool {
        let cause = self.source.as_deref().and_then(|source| source.downcast_ref());
        // Before a conflict that stays there may have been an attempt whose outcome is unknown.
        matches!(cause, Some(KvError::Conflict | KvError::MaybeCommitted | KvError::Unavailable(_)))
    }

    /// The sentence for the reader.
    pub fn context(&self) -> &str {
        &self.context
    }
}

impl From<ErrorKind> for Error {
    /// An error that is an answer rather than an incident needs no sentence (and no allocation).
    fn from(kind: ErrorKind) -> Error {
        Error { kind, context: String::new(), source: None, retry: None }
    }
}

impl From<KvError> for Error {
    fn from(source: KvError) -> Error {
        let (kind, context) = match &source {
            KvError::Conflict | KvError::MaybeCommitted => (ErrorKind::Io, "transaction did not get through"),
            KvError::TooLarge(_) => (ErrorKind::ArgumentTooLarge, "change too large for one transaction"),
            KvError::Full(_) => (ErrorKind::NoSpace, "metadata store"),
            KvError::Unavailable(_) => (ErrorKind::Io, "metadata store"),
        };
        let retry = source.class();
        Error { kind, context: context.to_owned(), source: Some(Box::new(source)), retry }
    }
}

impl RetryClass for Error {
    fn class(&self) -> Option<Retry> {
        self.retry
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.context.is_empty() {
            write!(f, "{:?}", self.kind)?;
        } else {
            f.write_str(&self.context)?;
        }
        match &self.source {
            Some(source) => write!(f, ": {source}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_deref().map(|source| source as _)
    }
}

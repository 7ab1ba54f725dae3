//! From the closed set of error kinds to errno numbers: the only place that knows both.

use fuser::Errno;
use rfs_core::types::ErrorKind;

/// The errno that a system call fails with.
pub(crate) fn errno(kind: ErrorKind) -> Errno {
    match kind {
        ErrorKind::NotFound => Errno::ENOENT,
        ErrorKind::Exists => Errno::EEXIST,
        ErrorKind::NotDirectory => Errno::ENOTDIR,
        ErrorKind::IsDirectory => Errno::EISDIR,
        ErrorKind::NotEmpty => Errno::ENOTEMPTY,
        ErrorKind::Invalid => Errno::EINVAL,
        ErrorKind::NameTooLong => Errno::ENAMETOOLONG,
        ErrorKind::NotPermitted => Errno::EPERM,
        ErrorKind::AccessDenied => Errno::EACCES,
        ErrorKind::NoSpace => Errno::ENOSPC,
        ErrorKind::QuotaExceeded => Errno::EDQUOT,
        ErrorKind::FileTooLarge => Errno::EFBIG,
        ErrorKind::TooManyLinks => Errno::EMLINK,
        ErrorKind::NoAttribute => Errno::NO_XATTR,
        ErrorKind::ArgumentTooLarge => Errno::E2BIG,
        ErrorKind::BufferTooSmall => Errno::ERANGE,
        ErrorKind::NotSupported => Errno::EOPNOTSUPP,
        ErrorKind::BadHandle => Errno::EBADF,
        ErrorKind::WouldBlock => Errno::EAGAIN,
        ErrorKind::Deadlock => Errno::EDEADLK,
        ErrorKind::NoLocks => Errno::ENOLCK,
        ErrorKind::Interrupted => Errno::EINTR,
        ErrorKind::Stale => Errno::ESTALE,
        ErrorKind::ReadOnly => Errno::EROFS,
        ErrorKind::NoSuchAddress => Errno::ENXIO,
        ErrorKind::CrossDevice => Errno::EXDEV,
        ErrorKind::Busy => Errno::EBUSY,
        ErrorKind::NoMemory => Errno::ENOMEM,
        ErrorKind::Io => Errno::EIO,
    }
}

/// Whether an error is something for the operator to hear about, rather than an answer to a question.
pub(crate) fn is_incident(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::Io | ErrorKind::NoMemory)
}

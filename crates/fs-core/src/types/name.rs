//! Names of directory entries.

use std::fmt;

use bytes::Bytes;

use super::{Error, ErrorKind, Result};

/// Longest name of a directory entry, in bytes (`NAME_MAX`).
pub const NAME_BYTES_MAX: usize = 255;

/// A valid name of a directory entry: 1 to 255 bytes, no `/`, no NUL, neither `.` nor `..`.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name(Bytes);

impl Name {
    /// Checks `bytes`.
    ///
    /// # Errors
    /// `NameTooLong` above 255 bytes; `Invalid` otherwise.
    pub fn new(bytes: impl Into<Bytes>) -> Result<Name> {
        let bytes = bytes.into();
        if bytes.len() > NAME_BYTES_MAX {
            return Err(Error::new(ErrorKind::NameTooLong, "name longer than 255 bytes"));
        }
        let reserved = bytes.is_empty() || bytes.as_ref() == b"." || bytes.as_ref() == b"..";
        if reserved || bytes.contains(&b'/') || bytes.contains(&0) {
            return Err(Error::new(ErrorKind::Invalid, "not a name of a directory entry"));
        }
        Ok(Name(bytes))
    }

    /// The bytes of the name.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{}\"", self.0.escape_ascii())
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.escape_ascii().fmt(f)
    }
}

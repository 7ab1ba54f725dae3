//! Exit codes, and the error type that carries one.
//!
//! Scripts branch on the code, people read the message and the hint. Nothing below `cli` knows these numbers.

use std::fmt;
use std::process::ExitCode;

use rfs_core::types::ErrorKind;

/// What a command tells its caller. The numbers are documented and stable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Exit {
    /// The command did what it was asked to.
    Ok,
    /// Something failed that has no code of its own.
    Error,
    /// The command line is wrong.
    Usage,
    /// The store does not accept the credentials, or there are none.
    Credentials,
    /// The bucket (or the store's directory) does not exist.
    NoBucket,
    /// The metadata URL holds no volume.
    NotFormatted,
    /// The volume was written by a version that this one does not understand.
    Version,
    /// The metadata store does not answer.
    MetadataDown,
    /// The object store does not answer.
    StoreDown,
    /// Bytes that were staged on a local disk are not there.
    StagingLost,
    /// Something is in use: files on the mount, or the metadata file.
    Busy,
    /// The volume is mounted elsewhere.
    MountedElsewhere,
    /// The volume is damaged.
    Damage,
    /// The volume was damaged and has been repaired.
    Repaired,
}

/// All codes in the order of their numbers.
pub(crate) const ALL: [Exit; 14] = [
    Exit::Ok,
    Exit::Error,
    Exit::Usage,
    Exit::Credentials,
    Exit::NoBucket,
    Exit::NotFormatted,
    Exit::Version,
    Exit::MetadataDown,
    Exit::StoreDown,
    Exit::StagingLost,
    Exit::Busy,
    Exit::MountedElsewhere,
    Exit::Damage,
    Exit::Repaired,
];

/// The list of codes, for the help text and the manual page.
pub(crate) const HELP: &str = "Exit codes:
  0   done
  1   error
  2   wrong usage
  10  credentials missing or refused
  11  bucket or store directory does not exist
  12  not formatted
  13  volume of another version
  20  metadata store does not answer
  21  object store does not answer
  22  staged bytes are not in the staging directory
  30  busy
  31  mounted elsewhere
  40  damage found
  41  damage found and repaired";

impl Exit {
    /// The number that the process exits with.
    pub(crate) fn code(self) -> u8 {
        match self {
            Exit::Ok => 0,
            Exit::Error => 1,
            Exit::Usage => 2,
            Exit::Credentials => 10,
            Exit::NoBucket => 11,
            Exit::NotFormatted => 12,
            Exit::Version => 13,
            Exit::MetadataDown => 20,
            Exit::StoreDown => 21,
            Exit::StagingLost => 22,
            Exit::Busy => 30,
            Exit::MountedElsewhere => 31,
            Exit::Damage => 40,
            Exit::Repaired => 41,
        }
    }

    /// The meaning of a number that another process sent; unknown numbers are plain errors.
    pub(crate) fn from_code(code: u8) -> Exit {
        ALL.into_iter().find(|exit| exit.code() == code).unwrap_or(Exit::Error)
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> ExitCode {
        ExitCode::from(exit.code())
    }
}

/// Why a command did not succeed: the code for scripts, the error for people, and what to do about it.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) exit: Exit,
    pub(crate) error: anyhow::Error,
    pub(crate) hint: Option<String>,
}

/// Shorthand for results of this crate.
pub(crate) type Result<T, E = Failure> = std::result::Result<T, E>;

impl Failure {
    /// A failure that is described by one sentence.
    pub(crate) fn new(exit: Exit, message: impl fmt::Display) -> Failure {
        Failure { exit, error: anyhow::Error::msg(message.to_string()), hint: None }
    }

    /// A mistake on the command line that clap cannot see.
    pub(crate) fn usage(message: impl fmt::Display) -> Failure {
        Failure::new(Exit::Usage, message)
    }

    /// Adds what the reader can do.
    #[must_use]
    pub(crate) fn hint(mut self, hint: impl fmt::Display) -> Failure {
        self.hint = Some(hint.to_string());
        self
    }

    /// Puts a sentence in front of the error.
    #[must_use]
    pub(crate) fn context(mut self, context: impl fmt::Display + Send + Sync + 'static) -> Failure {
        self.error = self.error.context(context);
        self
    }

    /// The message in one line, without the hint.
    pub(crate) fn message(&self) -> String {
        let mut message = String::new();
        for cause in self.error.chain() {
            let cause = cause.to_string();
            let cause = without_number(&cause);
            // Many errors already print their source.
            if message.ends_with(cause) {
                continue;
            }
            if !message.is_empty() {
                message.push_str(": ");
            }
            message.push_str(cause);
        }
        message
    }
}

/// An error's text without the system's number for it, which tells people nothing.
fn without_number(text: &str) -> &str {
    let is_number = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    match text.rsplit_once(" (os error ") {
        Some((before, number)) if number.strip_suffix(')').is_some_and(is_number) => before,
        _ => text,
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message())?;
        match &self.hint {
            Some(hint) => write!(f, "\n  {hint}"),
            None => Ok(()),
        }
    }
}

impl<E: Into<anyhow::Error>> From<E> for Failure {
    fn from(error: E) -> Failure {
        Failure { exit: Exit::Error, error: error.into(), hint: None }
    }
}

/// Gives errors of other crates an exit code and a sentence.
pub(crate) trait ResultExt<T> {
    /// The exit code and what was being done.
    fn exit(self, exit: Exit, context: impl fmt::Display + Send + Sync + 'static) -> Result<T>;

    /// What was being done; the exit code is `Error`.
    fn doing(self, context: impl fmt::Display + Send + Sync + 'static) -> Result<T>;
}

impl<T, E: Into<anyhow::Error>> ResultExt<T> for std::result::Result<T, E> {
    fn exit(self, exit: Exit, context: impl fmt::Display + Send + Sync + 'static) -> Result<T> {
        self.map_err(|error| Failure { exit, error: error.into().context(context), hint: None })
    }

    fn doing(self, context: impl fmt::Display + Send + Sync + 'static) -> Result<T> {
        self.exit(Exit::Error, context)
    }
}

/// The exit code of an error that a metadata operation returned.
pub(crate) fn meta_failure(error: rfs_core::types::Error, doing: &str) -> Failure {
    use std::error::Error as _;
    let exit = match error.kind {
        // Without a cause outside, the store answered, and what it said makes no sense.
        ErrorKind::Io if error.source().is_none() => Exit::Damage,
        ErrorKind::Io => Exit::MetadataDown,
        ErrorKind::Busy => Exit::Busy,
        _ => Exit::Error,
    };
    Failure { exit, error: anyhow::Error::new(error).context(doing.to_owned()), hint: None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_is_in_the_help_and_maps_back() {
        for exit in ALL {
            assert_eq!(Exit::from_code(exit.code()), exit);
            assert!(HELP.contains(&format!("\n  {:<4}", exit.code())), "{exit:?} is not in the help");
        }
        assert_eq!(Exit::from_code(99), Exit::Error);
    }

    #[test]
    fn message_names_each_cause_once() {
        let inner = std::io::Error::other("disk on fire");
        let failure = Failure::from(inner).context("writing the log");
        assert_eq!(failure.message(), "writing the log: disk on fire");
        assert_eq!(failure.hint("use water").to_string(), "writing the log: disk on fire\n  use water");
        let missing = Failure::from(std::io::Error::from_raw_os_error(2)).context("opening the log");
        assert_eq!(missing.message(), "opening the log: No such file or directory");
    }
}

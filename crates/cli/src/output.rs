//! Standard output: results only. A reader that went away (`rfs … | head`) is an error like any other, not a panic.

use std::fmt;
use std::io::Write;

use serde::Serialize;

use crate::exit::{Result, ResultExt};

/// One line of text.
pub(crate) fn line(text: fmt::Arguments<'_>) -> Result<()> {
    writeln!(std::io::stdout().lock(), "{text}").doing("writing to standard output")
}

/// `value` as indented JSON.
pub(crate) fn json<T: Serialize>(value: &T) -> Result<()> {
    line(format_args!("{}", serde_json::to_string_pretty(value)?))
}

/// Bytes as they are.
pub(crate) fn bytes(bytes: &[u8]) -> Result<()> {
    std::io::stdout().lock().write_all(bytes).doing("writing to standard output")
}

/// A message for people, besides the result.
pub(crate) fn note(text: fmt::Arguments<'_>) {
    // Nobody can be told that standard error is closed.
    let _ = writeln!(std::io::stderr().lock(), "{text}");
}

//! Directories of the user that the command line uses, as the XDG base directory specification names them.

use std::path::PathBuf;

use crate::exit::{Exit, Failure, Result};

/// Where the embedded default volume is: `$XDG_DATA_HOME/rfs`, usually `~/.local/share/rfs`.
pub(crate) fn data_dir() -> Result<PathBuf> {
    base("XDG_DATA_HOME", ".local/share")
}

/// Where a mount in the background logs, unless told otherwise: `$XDG_STATE_HOME/rfs`, usually `~/.local/state/rfs`.
pub(crate) fn state_dir() -> Result<PathBuf> {
    base("XDG_STATE_HOME", ".local/state")
}

fn base(variable: &str, below_home: &str) -> Result<PathBuf> {
    // Relative paths in this variable are to be ignored (XDG base directory specification).
    let base = std::env::var_os(variable).map(PathBuf::from).filter(|path| path.is_absolute());
    let base = base.or_else(|| std::env::home_dir().map(|home| home.join(below_home)));
    base.map(|base| base.join("rfs")).ok_or_else(|| {
        Failure::new(Exit::Error, "this user has no home directory").hint(format!("set HOME or {variable}"))
    })
}

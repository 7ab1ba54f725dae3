//! `rfs man`: manual pages.

use std::path::PathBuf;

use clap::CommandFactory;

use crate::Cli;
use crate::exit::{Exit, Result, ResultExt};

/// Write manual pages (rfs.1, rfs-mount.1, …) into a directory
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Where to, for instance ~/.local/share/man/man1; made if missing
    directory: PathBuf,
}

pub(crate) fn run(args: &Args) -> Result<Exit> {
    let shown = args.directory.display();
    std::fs::create_dir_all(&args.directory).doing(format!("making {shown}"))?;
    clap_mangen::generate_to(Cli::command(), &args.directory).doing(format!("writing into {shown}"))?;
    Ok(Exit::Ok)
}

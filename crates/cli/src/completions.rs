//! `rfs completions`: a completion script for a shell.

use clap::CommandFactory;
use clap_complete::Shell;

use crate::Cli;
use crate::exit::{Exit, Result};

/// Print a completion script for a shell
///
/// For bash: rfs completions bash > ~/.local/share/bash-completion/completions/rfs
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The shell
    shell: Shell,
}

pub(crate) fn run(args: &Args) -> Result<Exit> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "rfs", &mut script);
    crate::output::bytes(&script)?;
    Ok(Exit::Ok)
}

//! `rfs`: the command line of the filesystem.
//!
//! Parses arguments, calls one subcommand, prints its failure and exits with its code. Called as `mount.rfs` or
//! `mount.fuse.rfs` it is the helper that mount(8) runs. Knows no engine (see [`engine`]) and decides nothing.

#[cfg(all(target_os = "linux", target_env = "gnu"))]
mod allocator;
mod completions;
mod config;
mod control;
mod daemon;
mod destroy;
mod engine;
mod exit;
mod flush;
mod format;
mod fsck;
mod gc;
mod info;
mod install_helpers;
mod logging;
mod man;
mod mount;
mod mount_helper;
mod output;
mod paths;
mod progress;
mod runtime;
mod serve;
mod settings;
mod status;
mod umount;
mod unchecked;
mod url;
mod version;
mod volume;

use std::path::Path;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::exit::{Exit, Result};

/// A POSIX filesystem over object storage
///
/// Names and attributes live in a transactional store (a local redb file, or FoundationDB), file contents live in
/// packs in S3-compatible storage or a local directory. Without a volume of your own, `rfs mount DIRECTORY` makes one.
#[derive(Debug, Parser)]
#[command(name = "rfs", version, after_help = exit::HELP)]
pub(crate) struct Cli {
    #[command(flatten)]
    log: logging::LogArgs,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Format(format::Args),
    Mount(mount::Args),
    Umount(umount::Args),
    Status(status::Args),
    Info(info::Args),
    Fsck(fsck::Args),
    Gc(gc::Args),
    Flush(flush::Args),
    Config(config::Args),
    Destroy(destroy::Args),
    Version(version::Args),
    Completions(completions::Args),
    Man(man::Args),
    InstallHelpers(install_helpers::Args),
}

fn main() -> ExitCode {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    allocator::tune();
    let called_as = std::env::args_os().next();
    let helper =
        called_as.as_deref().map(Path::new).and_then(Path::file_name).is_some_and(mount_helper::is_name);
    let result = if helper { mount_helper::main() } else { run(Cli::parse()) };
    engine::shut_down();
    match result {
        Ok(exit) => exit.into(),
        Err(failure) => {
            if daemon::is_child() {
                daemon::report(&failure);
            } else {
                eprintln!("rfs: {failure}");
            }
            failure.exit.into()
        }
    }
}

fn run(cli: Cli) -> Result<Exit> {
    let Cli { log, command } = cli;
    // A mount in the background logs elsewhere.
    if !matches!(command, Command::Mount(_)) {
        logging::start(&log)?;
    }
    match command {
        Command::Format(args) => format::run(&args),
        Command::Mount(args) => mount::run(&args, &log),
        Command::Status(args) => status::run(&args),
        Command::Info(args) => info::run(&args),
        Command::Fsck(args) => fsck::run(&args),
        Command::Gc(args) => gc::run(&args),
        Command::Flush(args) => flush::run(&args),
        Command::Config(args) => config::run(&args),
        Command::Destroy(args) => destroy::run(&args),
        Command::Umount(args) => umount::run(&args),
        Command::Version(args) => version::run(&args),
        Command::Completions(args) => completions::run(&args),
        Command::Man(args) => man::run(&args),
        Command::InstallHelpers(args) => install_helpers::run(&args),
    }
}

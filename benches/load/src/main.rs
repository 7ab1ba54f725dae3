//! `rfs-load`: puts load on a directory, as the published benchmarks do, and prints one JSON object a run.
//!
//! Knows nothing of the filesystem below the directory. Phases that need cold caches are separate commands, so that the
//! testbed can drop caches or mount again in between. Rates are of the whole phase: all threads begin together.
#![expect(clippy::disallowed_methods, reason = "a benchmark measures real time")]

mod files;
mod mdtest;
#[cfg(target_os = "linux")]
mod null;
mod parallel;
mod proxy;

use std::path::PathBuf;

use clap::{Parser, Subcommand};

/// Puts load on a directory.
#[derive(Parser)]
#[command(version)]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Directories and empty files made, looked at, opened and removed (mdtest's phases).
    Mdtest {
        /// Where; made if missing.
        dir: PathBuf,
        /// Items of each kind a thread.
        #[arg(long, default_value_t = 10_000)]
        items: u32,
        /// Threads, each in a directory of its own.
        #[arg(long, default_value_t = 1)]
        threads: u32,
    },
    /// Writes files: `dirs` directories of `files` files of `size` bytes.
    Write(files::FilesArgs),
    /// Reads what `write` wrote, and checks it.
    Read(files::FilesArgs),
    /// Forwards a port with a delay for each answer and a limit on bytes a second, until killed.
    Proxy(proxy::ProxyArgs),
    /// Mounts a filesystem that keeps names in memory and no contents, until it is unmounted.
    #[cfg(target_os = "linux")]
    Null {
        /// Where; an empty directory.
        mount_point: PathBuf,
    },
}

fn main() -> anyhow::Result<()> {
    let report = match Args::parse().command {
        Command::Mdtest { dir, items, threads } => mdtest::run(&dir, items, threads)?,
        Command::Write(args) => files::write(&args)?,
        Command::Read(args) => files::read(&args)?,
        Command::Proxy(args) => return proxy::run(&args),
        #[cfg(target_os = "linux")]
        Command::Null { mount_point } => return null::run(&mount_point),
    };
    println!("{report}");
    Ok(())
}

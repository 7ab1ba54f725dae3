//! The helper that mount(8) runs: `mount.rfs SPEC DIR [-sfnv] [-o OPTIONS]`, for `mount -t rfs`, fstab, and
//! `mount -o remount,…`.
//!
//! A remount concerns the kernel's side only: it is handed back to the kernel, and the mount is told whether writing is
//! allowed now.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use clap::Parser;
use rfs_fuse::MountOptions;

use crate::control::{self, Client, Request};
use crate::exit::{Exit, Result, ResultExt};
use crate::mount;

/// Names under which this program is the helper. The kernel shows our mounts as `fuse.rfs`, so a remount looks for the
/// second.
pub(crate) const NAMES: [&str; 2] = ["mount.rfs", "mount.fuse.rfs"];

/// Whether the program was called by one of the helper's names.
pub(crate) fn is_name(name: &OsStr) -> bool {
    NAMES.iter().any(|known| name == *known)
}

/// Mounts an rfs volume; called by mount(8).
#[derive(Debug, Parser)]
#[command(name = "mount.rfs", version)]
#[expect(clippy::struct_excessive_bools, reason = "mount(8) passes them")]
struct Args {
    /// The volume's metadata URL
    spec: String,
    /// Where to
    directory: PathBuf,
    /// Ignore unknown options
    #[arg(short)]
    sloppy: bool,
    /// Check only
    #[arg(short)]
    fake: bool,
    /// Do not write to the mount table (there is none)
    #[arg(short)]
    no_mtab: bool,
    /// Say more
    #[arg(short)]
    verbose: bool,
    /// Mount namespace
    #[arg(short = 'N', value_name = "NAMESPACE")]
    namespace: Option<String>,
    /// File system type
    #[arg(short = 't', value_name = "TYPE")]
    fs_type: Option<String>,
    /// Mount options
    #[arg(short, value_name = "OPTIONS", default_value = "")]
    options: Vec<String>,
}

/// Runs the helper.
pub(crate) fn main() -> Result<Exit> {
    let args = Args::parse();
    let options = args.options.join(",");
    if args.fake {
        return Ok(Exit::Ok);
    }
    if options.split(',').any(|option| option == "remount") {
        return remount(&args.directory, &options);
    }
    mount::run_for_mount(&args.spec, &args.directory, &options)
}

/// Changes flags of a mount in the kernel, and tells its process whether writing is allowed now. Options of rfs itself
/// cannot change while it is mounted; mount(8) passes them again, and they are ignored.
fn remount(directory: &Path, options: &str) -> Result<Exit> {
    let shown = directory.display();
    let mut parsed = MountOptions::default();
    let own = |name: &str, _: Option<&str>| mount::is_own_option(name);
    parsed.apply(options, own).exit(Exit::Usage, format!("-o {options}"))?;
    rfs_fuse::remount(directory, &parsed).doing(format!("remounting {shown}"))?;
    if let Some(mut client) = Client::of_mount(&control::mount_at(directory)?)? {
        client.call::<serde_json::Value>(Request::ReadOnly { on: parsed.read_only }, &mut |_| {})?;
    }
    Ok(Exit::Ok)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_helpers_names_make_it_the_helper() {
        assert!(is_name(OsStr::new("mount.rfs")) && is_name(OsStr::new("mount.fuse.rfs")));
        assert!(!is_name(OsStr::new("rfs")));
    }
}

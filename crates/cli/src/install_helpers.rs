//! `rfs install-helpers`: what mount(8) and fstab need.

use std::ffi::OsStr;
use std::io::{self, ErrorKind};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use crate::exit::{Exit, Failure, Result, ResultExt};
use crate::mount_helper::NAMES;
use crate::output;

/// Name of this program's file; what leads elsewhere was not made here.
const PROGRAM: &str = "rfs";

/// Let mount(8) and /etc/fstab mount rfs: links /sbin/mount.rfs and /sbin/mount.fuse.rfs to this program
///
/// Afterwards a line of fstab such as `redb:///srv/meta.redb /mnt rfs defaults 0 0` and `mount -o remount,ro /mnt` work.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Root of the system to install into
    #[arg(long, default_value = "/", value_name = "DIR")]
    prefix: PathBuf,
    /// Remove the links instead
    #[arg(long)]
    remove: bool,
}

pub(crate) fn run(args: &Args) -> Result<Exit> {
    install(args).map_err(|failure| match failure.error.root_cause().downcast_ref::<io::Error>() {
        Some(error) if error.kind() == ErrorKind::PermissionDenied => {
            failure.hint("run this as root, or give --prefix a directory that you may write to")
        }
        _ => failure,
    })
}

fn install(args: &Args) -> Result<Exit> {
    let program = std::env::current_exe().doing("finding the rfs program")?;
    let directory = args.prefix.join("sbin");
    if !args.remove {
        std::fs::create_dir_all(&directory).doing(format!("making {}", directory.display()))?;
    }
    for name in NAMES {
        let link = directory.join(name);
        remove_link(&link)?;
        if args.remove {
            continue;
        }
        symlink(&program, &link).doing(format!("linking {}", link.display()))?;
        output::line(format_args!("{} -> {}", link.display(), program.display()))?;
    }
    Ok(Exit::Ok)
}

/// Removes a link of ours; refuses to remove anything else.
fn remove_link(link: &Path) -> Result<()> {
    let shown = link.display();
    let target = match std::fs::read_link(link) {
        Ok(target) => target,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(error) if error.kind() == ErrorKind::InvalidInput => {
            return Err(foreign(format!("{shown} exists and is no link")));
        }
        Err(error) => return Err(error).doing(format!("looking at {shown}")),
    };
    if target.file_name() != Some(OsStr::new(PROGRAM)) {
        return Err(foreign(format!("{shown} leads to {}, which is not rfs", target.display())));
    }
    std::fs::remove_file(link).doing(format!("removing the old link {shown}"))
}

fn foreign(message: String) -> Failure {
    Failure::new(Exit::Error, message).hint("another program put it there; remove it first")
}

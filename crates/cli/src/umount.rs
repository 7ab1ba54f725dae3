//! `rfs umount`: stores what is waiting and unmounts; clears away mounts whose process died.

use std::path::PathBuf;

use rfs_fuse::{State, UnmountMode};

use crate::control::{self, Client, Request};
use crate::exit::{Exit, Failure, Result, ResultExt};
use crate::output;
use crate::progress::Bar;

/// Store everything that is waiting, and unmount
///
/// Returns when the process behind the mount has ended. A mount whose process died is cleared away.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Where the volume is mounted
    mountpoint: PathBuf,
    /// Unmount even though files are in use or something cannot be stored (what was not stored is lost)
    #[arg(short, long)]
    force: bool,
    /// Take the mount out of sight at once; it ends when nobody uses it any more
    #[arg(short, long, conflicts_with = "force")]
    lazy: bool,
}

/// What a mount says when it has ended.
#[derive(Debug, Default, serde::Serialize, serde::Deserialize)]
pub(crate) struct Unmounted {
    /// What could not be stored, for people.
    pub(crate) lost: Vec<String>,
}

pub(crate) fn run(args: &Args) -> Result<Exit> {
    let mount = control::mount_at(&args.mountpoint)?;
    let shown = mount.mountpoint.display().to_string();
    if args.lazy {
        rfs_fuse::unmount(&mount.mountpoint, UnmountMode::Detach)?;
        return Ok(Exit::Ok);
    }
    let Some(mut client) = Client::of_mount(&mount)? else {
        return clear_dead(&mount.mountpoint);
    };
    let mut bar = Bar::new();
    let unmounted: Result<Unmounted> =
        client.call(Request::Shutdown { force: args.force }, &mut |now| bar.show(now));
    drop(bar);
    let unmounted = unmounted.map_err(|failure| failure.context(format!("{shown} stays mounted")))?;
    client.wait_closed();
    if unmounted.lost.is_empty() {
        return Ok(Exit::Ok);
    }
    for lost in &unmounted.lost {
        output::note(format_args!("not stored: {lost}"));
    }
    Err(Failure::new(Exit::StoreDown, format!("{shown} is unmounted, but not everything could be stored")))
}

/// Unmounts what nobody serves any more.
fn clear_dead(mountpoint: &std::path::Path) -> Result<Exit> {
    let shown = mountpoint.display();
    match rfs_fuse::state(mountpoint).doing(format!("looking at {shown}"))? {
        State::Dead(_) => {
            rfs_fuse::unmount(mountpoint, UnmountMode::Detach)?;
            output::note(format_args!("{shown} was dead and has been cleared away"));
            Ok(Exit::Ok)
        }
        // It ended between two looks.
        State::NotMounted => Ok(Exit::Ok),
        // Only a mount that is really dead may be cut: one of another user, whose socket is out of reach, still works.
        State::Alive(_) | State::Foreign(_) => {
            Err(Failure::new(Exit::Error, format!("{shown} works, but its process cannot be asked"))
                .hint("run this as the user who mounted it, or use --lazy"))
        }
    }
}

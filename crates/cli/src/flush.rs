//! `rfs flush`: stores everything that is waiting, or only staged.

use std::path::PathBuf;

use crate::control::{self, Request};
use crate::exit::{Exit, Failure, Result};
use crate::progress::Bar;

/// Store everything that is waiting in a mount, or staged on the local disk, and wait until that is done
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Where the volume is mounted
    mountpoint: PathBuf,
}

pub(crate) fn run(args: &Args) -> Result<Exit> {
    let path = crate::url::absolute(&args.mountpoint).map_err(Failure::usage)?;
    let mut client = control::of_mountpoint(&path)?;
    let mut bar = Bar::new();
    client.call::<serde_json::Value>(Request::Flush, &mut |now| bar.show(now))?;
    Ok(Exit::Ok)
}

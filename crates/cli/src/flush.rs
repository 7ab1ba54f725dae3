//! `rfs flush`: stores everything that is waiting, or only staged.

use crate::control::{self, Found, Request};
use crate::exit::{Exit, Failure, Result};
use crate::progress::Bar;
use crate::url::Target;

/// Store everything that is waiting in a mount, or staged on the local disk, and wait until that is done
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Mount point or metadata URL
    target: Target,
}

pub(crate) fn run(args: &Args) -> Result<Exit> {
    let mut client = match control::find(&args.target)? {
        Found::Mounted(client) => client,
        Found::NotMounted(url) => {
            return Err(Failure::new(Exit::Error, format!("{url} is not mounted on this machine")).hint(
                "only a mount has anything to store; what an earlier one left staged, the next one sends",
            ));
        }
    };
    let mut bar = Bar::new();
    client.call::<serde_json::Value>(Request::Flush, &mut |now| bar.show(now))?;
    Ok(Exit::Ok)
}

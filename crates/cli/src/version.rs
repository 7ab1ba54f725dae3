//! `rfs version`.

use serde::Serialize;

use crate::control::PROTOCOL;
use crate::exit::{Exit, Result};
use crate::output;

/// Print the version
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Version {
    #[serde(rename = "version")]
    rfs: &'static str,
    target: &'static str,
    control_protocol: u32,
}

pub(crate) fn run(args: &Args) -> Result<Exit> {
    let version = env!("CARGO_PKG_VERSION");
    if args.json {
        output::json(&Version { rfs: version, target: std::env::consts::ARCH, control_protocol: PROTOCOL })?;
    } else {
        output::line(format_args!("rfs {version}"))?;
    }
    Ok(Exit::Ok)
}

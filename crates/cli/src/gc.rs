//! `rfs gc`: deletes garbage now instead of in the background.

use std::sync::Arc;

use rfs_core::vfs::{GcReport, Vfs, VfsOptions};
use serde::{Deserialize, Serialize};

use crate::control::{self, Found, Request};
use crate::exit::{Exit, Result, meta_failure};
use crate::progress::Bar;
use crate::settings::Size;
use crate::url::{MetaUrl, Target};
use crate::volume::{OpenSettings, Volume};
use crate::{engine, output};

/// Delete garbage now: removed files, empty packs, packs that a crash left without a name
///
/// Mounts do this by themselves in the background. The metadata file of a volume that is not mounted is made as small as it
/// can be, too.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Mount point or metadata URL
    target: Target,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// What was deleted.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Report {
    orphans_reaped: u64,
    packs_deleted: u64,
    packs_unnamed: u64,
    chunks_rewritten: u64,
    bytes_freed: u64,
    /// By making the metadata file smaller.
    metadata_bytes_freed: u64,
}

impl From<GcReport> for Report {
    fn from(report: GcReport) -> Report {
        let GcReport { orphans_reaped, packs_deleted, packs_unnamed, chunks_rewritten, bytes_freed } = report;
        Report {
            orphans_reaped,
            packs_deleted,
            packs_unnamed,
            chunks_rewritten,
            bytes_freed,
            metadata_bytes_freed: 0,
        }
    }
}

pub(crate) fn run(args: &Args) -> Result<Exit> {
    let report = match control::find(&args.target)? {
        Found::Mounted(mut client) => {
            let mut bar = Bar::new();
            client.call(Request::Gc, &mut |now| bar.show(now))?
        }
        Found::NotMounted(url) => crate::runtime::block_on(unmounted(&url))?,
    };
    if args.json {
        output::json(&report)?;
    } else {
        output::line(format_args!(
            "freed {}: {} packs deleted, {} of them never named; {} removed files reaped; {} chunks rewritten",
            Size(report.bytes_freed),
            report.packs_deleted,
            report.packs_unnamed,
            report.orphans_reaped,
            report.chunks_rewritten
        ))?;
        if report.metadata_bytes_freed > 0 {
            output::line(format_args!(
                "made the metadata file smaller by {}",
                Size(report.metadata_bytes_freed)
            ))?;
        }
    }
    Ok(Exit::Ok)
}

async fn unmounted(url: &MetaUrl) -> Result<Report> {
    let volume = Volume::open(url, &OpenSettings::default()).await?;
    let (meta, data) = (Arc::clone(&volume.meta), Arc::clone(&volume.data));
    let vfs = Vfs::mount(
        meta,
        data,
        Arc::clone(&volume.memory),
        VfsOptions { heartbeat: !url.is_exclusive(), ..VfsOptions::default() },
    );
    let collected = vfs.gc().await.map_err(|e| meta_failure(e, "collecting garbage"));
    let shutdown = vfs.shutdown().await;
    let released = volume.release().await;
    let report = collected?;
    if let Some(error) = shutdown.errors.into_iter().next() {
        return Err(meta_failure(error, "ending the session"));
    }
    released?;
    // Garbage is collected already; the file is made smaller the next time.
    let metadata_bytes_freed = engine::compact_file(url).await.unwrap_or_else(|failure| {
        output::note(format_args!("the metadata file was not made smaller: {failure}"));
        0
    });
    Ok(Report { metadata_bytes_freed, ..report.into() })
}

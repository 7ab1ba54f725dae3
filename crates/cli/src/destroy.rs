//! `rfs destroy`: deletes a volume with everything in it.

use std::io::{BufRead, IsTerminal, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use rfs_kv::Kv;
use rfs_store_s3::StoreMetrics;

use crate::control::Progress;
use crate::engine::{self, Missing};
use crate::exit::{Exit, Failure, Result, ResultExt};
use crate::progress::Bar;
use crate::url::MetaUrl;
use crate::{format, output, volume};

/// Delete a volume with everything in it
///
/// Refused while it is mounted, on this machine or another. (A read-only mount of another machine is not seen.)
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The volume
    meta_url: MetaUrl,
    /// Do not ask
    #[arg(long)]
    yes: bool,
}

pub(crate) fn run(args: &Args) -> Result<Exit> {
    let url = args.meta_url.canonical();
    volume::refuse_mounted(&url)?;
    crate::runtime::block_on(destroy(&url, args.yes))?;
    Ok(Exit::Ok)
}

async fn destroy(url: &MetaUrl, yes: bool) -> Result<()> {
    let kv = engine::open_kv(url, Missing::Fail).await?;
    let emptied = empty(&kv, url, yes).await;
    let closed = kv.close().await.exit(Exit::MetadataDown, "closing the metadata store");
    let deleted = emptied?;
    closed?;
    format::remove_metadata(url)?;
    output::note(format_args!("deleted {url} and {deleted} objects"));
    Ok(())
}

/// Deletes the contents, and what a shared metadata store holds; returns the number of objects.
async fn empty(kv: &Arc<dyn Kv>, url: &MetaUrl, yes: bool) -> Result<u64> {
    let record = volume::read_record(&**kv).await?.ok_or_else(|| volume::not_formatted(url))?;
    if !yes {
        confirm(url, &record.store_url)?;
    }
    let staged = volume::staging_places(&**kv, url, &record).await?;
    let metrics = Arc::new(StoreMetrics::default());
    let store = volume::open_store_of(&record, Duration::from_mins(1), &metrics).await?;
    volume::check_marker(&store, &record).await?;
    let mut bar = Bar::new();
    let mut show = |done| bar.show(&Progress { stage: "deleting contents".to_owned(), done, total: None });
    let contents = async {
        let deleted = volume::erase_store(&store, &mut show).await?;
        remove_staged(&staged)?;
        remove_cache(url)?;
        Ok(deleted)
    };
    let deleted = volume::alone(url, kv, contents).await?;
    // The metadata last: it says where the contents are, so an interrupted command can be run again.
    if !url.is_exclusive() {
        engine::wipe(&**kv).await?;
    }
    Ok(deleted)
}

/// Deletes what is staged: directories of the volume's own, and those that they are in if nothing is left in them.
pub(crate) fn remove_staged(places: &[PathBuf]) -> Result<()> {
    for own in places {
        match std::fs::remove_dir_all(own) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(error).doing(format!("deleting {}", own.display()));
            }
            _ => {}
        }
        if let Some(dir) = own.parent() {
            // Other volumes may have told theirs to be there, too.
            let _ = std::fs::remove_dir(dir);
        }
    }
    Ok(())
}

/// Deletes what is cached where mounts cache unless told otherwise.
pub(crate) fn remove_cache(url: &MetaUrl) -> Result<()> {
    let Some(dir) = url.cache_dir() else { return Ok(()) };
    rfs_core::data::remove_disk_cache(&dir).doing(format!("deleting {}", dir.display()))
}

/// Asks whether this is meant.
fn confirm(url: &MetaUrl, store: &str) -> Result<()> {
    if !std::io::stdin().is_terminal() {
        return Err(
            Failure::usage("destroy asks before it deletes, and nobody is there to answer").hint("say --yes")
        );
    }
    let mut stderr = std::io::stderr().lock();
    write!(stderr, "This deletes all files in {url}\nand everything below {store}.\nType yes to go on: ")?;
    stderr.flush()?;
    let mut answer = String::new();
    std::io::stdin().lock().read_line(&mut answer).doing("reading the answer")?;
    if answer.trim() == "yes" {
        return Ok(());
    }
    Err(Failure::new(Exit::Error, "nothing was deleted"))
}

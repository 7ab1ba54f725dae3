//! `rfs fsck`: checks a volume, and mends it.

use rfs_core::vfs::fsck::{self, Problem, Report};

use crate::control::{self, Found, Progress, Request};
use crate::engine::{self, FileHealth};
use crate::exit::{Exit, Result, meta_failure};
use crate::output;
use crate::progress::Bar;
use crate::settings::{LocalDir, Size};
use crate::url::{MetaUrl, Target};
use crate::volume::{OpenSettings, Volume};

/// Check a volume
///
/// Checks that names, inodes, slices and counts agree; of a volume that is not mounted also every page of its metadata file,
/// if it has one. What redb can mend of that file itself, as after a crash, it mends also without --repair.
/// Works on a mounted volume, too. Exits with 40 when it found damage and with 41 when it repaired all of
/// it.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Metadata URL or mount point
    target: Target,
    /// Also read and check every block, and compare the packs in the store with the metadata
    #[arg(long)]
    data: bool,
    /// Mend what can be mended, and give up what cannot; the volume must not be mounted
    #[arg(long)]
    repair: bool,
    /// Where contents are staged, if not where the last mount staged them
    #[arg(long, value_name = "DIR")]
    staging: Option<LocalDir>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl From<fsck::Progress> for Progress {
    fn from(now: fsck::Progress) -> Progress {
        Progress { stage: now.stage.to_string(), done: now.done, total: now.total }
    }
}

pub(crate) fn run(args: &Args) -> Result<Exit> {
    let report: Report = match control::find(&args.target)? {
        Found::Mounted(mut client) => {
            let mut bar = Bar::new();
            let request = Request::Fsck { data: args.data, repair: args.repair };
            client.call(request, &mut |now| bar.show(now))?
        }
        Found::NotMounted(url) => crate::runtime::block_on(unmounted(&url, args))?,
    };
    if args.json {
        output::json(&report)?;
    } else {
        print(&report)?;
    }
    Ok(match (report.problems.is_empty(), report.is_clean()) {
        (true, _) => Exit::Ok,
        (false, true) => Exit::Repaired,
        (false, false) => Exit::Damage,
    })
}

async fn unmounted(url: &MetaUrl, args: &Args) -> Result<Report> {
    let settings =
        OpenSettings { read_only: !args.repair, staging: args.staging.clone(), ..OpenSettings::look() };
    let bar = parking_lot::Mutex::new(Bar::new());
    // The engine's own checksums: what they tell, nothing that is built on the file can see.
    bar.lock().show(&Progress { stage: "checking the file".to_owned(), done: 0, total: None });
    let file = engine::check_file(url).await?;
    let volume = Volume::open(url, &settings).await?;
    let options = fsck::Options { data: args.data, repair: args.repair };
    let progress = |now: fsck::Progress| bar.lock().show(&now.into());
    let report = fsck::check(&volume.meta, &volume.data, &options, &progress).await;
    drop(bar);
    let closed = volume.close().await;
    let mut report = report.map_err(|e| meta_failure(e, "checking the volume"))?;
    closed?;
    if file == Some(FileHealth::Repaired) {
        let what = "the metadata file's own accounts of its pages were wrong, and were made anew";
        let problem = Problem { path: None, ino: None, what: what.to_owned(), repaired: true };
        report.problems.insert(0, problem);
    }
    Ok(report)
}

fn print(report: &Report) -> Result<()> {
    for problem in &report.problems {
        let place = problem.path.as_deref().map(|path| format!("{path}: ")).unwrap_or_default();
        let mended = if problem.repaired { " (repaired)" } else { "" };
        output::line(format_args!("{place}{}{mended}", problem.what))?;
    }
    if report.problems_left_out > 0 {
        output::line(format_args!("… and {} more", report.problems_left_out))?;
    }
    for note in &report.notes {
        output::line(format_args!("note: {note}"))?;
    }
    output::line(format_args!(
        "{} inodes, {} names, {} groups of slices, {} packs",
        report.inodes, report.names, report.slice_groups, report.packs
    ))?;
    if report.blocks_checked > 0 {
        output::line(format_args!(
            "{} blocks read and checked ({})",
            report.blocks_checked,
            Size(report.bytes_checked)
        ))?;
    }
    let all = report.problems.len() as u64 + report.problems_left_out;
    match (all, report.is_clean()) {
        (0, _) => output::line(format_args!("clean")),
        (count, true) => output::line(format_args!("{count} problems, all repaired")),
        (count, false) => output::line(format_args!("{count} problems")),
    }
}

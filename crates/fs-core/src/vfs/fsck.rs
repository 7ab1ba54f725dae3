//! Checks a volume: that metadata agrees with itself, and that the store holds the bytes that it names.
//!
//! Works beside a live mount: what looks wrong is looked at a second time, since it may have changed between two reads.
//! Repairs are the metadata's own; bytes that the store lost cannot be mended, only named.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::error::Error as _;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures::TryStreamExt;
use serde::{Deserialize, Serialize};

use super::paths::paths_of;
use super::staging;
use crate::data::{Data, StoredPack, overlay};
use crate::meta::{CheckProgress, Dentry, Finding, Meta, PackInfo, PackState};
use crate::types::{
    ChunkIndex, Error, ErrorKind, Ino, Kind, Name, PackId, PackedRun, Result, SliceGroup, Stored,
};

/// Runs that are verified together: in the order of packs, so that small files that were written together cost a GET
/// together.
const BATCH_RUNS: usize = 4096;
/// The same in stored bytes, so that progress is seen.
const BATCH_BYTES: u64 = 256 << 20;
/// Entries of a list that are read at a time.
const PAGE: usize = 256;
/// Problems that are told one by one; all are counted.
const PROBLEMS_MAX: usize = 1000;

/// What to check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Options {
    /// Compare the packs in the store with the metadata, and read and check every block.
    pub data: bool,
    /// Mend what can be mended. Nobody else may have the volume open.
    pub repair: bool,
}

/// What is being checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// Names, inodes, counts.
    Metadata,
    /// What files are made of.
    Files,
    /// The list of packs.
    Packs,
    /// Every block.
    Blocks,
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Stage::Metadata => "checking metadata",
            Stage::Files => "checking files",
            Stage::Packs => "comparing packs",
            Stage::Blocks => "reading blocks",
        })
    }
}

/// How far a check is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// What is being checked.
    pub stage: Stage,
    /// Items done.
    pub done: u64,
    /// Items in all, if known.
    pub total: Option<u64>,
}

/// What a check found.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// Inodes looked at.
    pub inodes: u64,
    /// Directory entries looked at.
    pub names: u64,
    /// Groups of slices looked at.
    pub slice_groups: u64,
    /// Packs that the metadata knows.
    pub packs: u64,
    /// Blocks that were read and are what they should be.
    pub blocks_checked: u64,
    /// Their bytes in the store.
    pub bytes_checked: u64,
    /// What is wrong; at most 1,000.
    pub problems: Vec<Problem>,
    /// Problems that are not in the list.
    pub problems_left_out: u64,
    /// What is worth knowing and no damage.
    pub notes: Vec<String>,
}

/// Something that is wrong.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Problem {
    /// The file, from the root of the volume, if there is one.
    pub path: Option<String>,
    /// Its inode, if there is one.
    pub ino: Option<u64>,
    /// What is wrong.
    pub what: String,
    /// Whether it has been mended.
    pub repaired: bool,
}

impl Report {
    /// Whether nothing is wrong, or not any more.
    pub fn is_clean(&self) -> bool {
        self.problems_left_out == 0 && self.problems.iter().all(|problem| problem.repaired)
    }

    fn add(&mut self, problem: Problem) {
        if self.problems.len() < PROBLEMS_MAX {
            self.problems.push(problem);
        } else {
            self.problems_left_out += 1;
        }
    }
}

/// Told how far the check is, often; must be quick.
pub type OnProgress<'a> = &'a (dyn Fn(Progress) + Send + Sync);

/// Checks the volume.
///
/// # Errors
/// The metadata store or the object store does not answer. Damage is no error but part of the report.
pub async fn check(meta: &Meta, data: &Data, options: &Options, progress: OnProgress<'_>) -> Result<Report> {
    let mut report = Report::default();
    metadata(meta, options, progress, &mut report).await?;
    staged(meta, data, options, progress, &mut report).await?;
    if options.data {
        let missing = packs(meta, data, progress, &mut report).await?;
        blocks(meta, data, progress, &missing, &mut report).await?;
    }
    Ok(report)
}

/// How often progress is told while the metadata is read.
const TICK: Duration = Duration::from_millis(200);

/// Checks names, inodes and counts, and mends them if that is wanted.
async fn metadata(
    meta: &Meta,
    options: &Options,
    progress: OnProgress<'_>,
    report: &mut Report,
) -> Result<()> {
    let read = CheckProgress::default();
    let mut checking = std::pin::pin!(meta.check(&read));
    let mut tick = tokio::time::interval(TICK);
    let mut checked = loop {
        tokio::select! {
            checked = &mut checking => break checked?,
            _ = tick.tick() => progress(Progress { stage: Stage::Metadata, done: read.records(), total: None }),
        }
    };
    report.inodes = checked.inodes;
    report.names = checked.dentries;
    report.slice_groups = checked.slice_groups;
    report.packs = checked.packs;
    let readable = !checked.findings.iter().any(|finding| matches!(finding, Finding::Undecodable { .. }));
    if readable {
        allocated(meta, progress, &mut checked.findings).await?;
    }
    let described: Vec<_> = checked.findings.iter().map(describe).collect();
    let paths = if readable {
        let wanted = described.iter().filter_map(|(ino, _)| *ino).collect();
        paths_of(meta, &wanted).await?
    } else {
        HashMap::new()
    };
    let mut mended = HashSet::new();
    if options.repair && !checked.findings.is_empty() {
        let repaired = meta.repair(&checked.findings).await?;
        mended.extend(repaired.mended.into_iter().chain(repaired.outdated));
    }
    for (finding, (ino, what)) in checked.findings.iter().zip(described) {
        let path = ino.and_then(|ino| paths.get(&ino).cloned());
        let ino = ino.map(|ino| ino.0);
        report.add(Problem { path, ino, what, repaired: mended.contains(finding) });
    }
    Ok(())
}

/// Compares each file's allocated bytes with what its slices say, which takes knowing how slices cover each other.
async fn allocated(meta: &Meta, progress: OnProgress<'_>, findings: &mut Vec<Finding>) -> Result<()> {
    let mut after = None;
    let mut done = 0;
    loop {
        let page = meta.scan_inodes(after, PAGE).await?;
        for info in page.items.iter().filter(|info| info.attr.kind == Kind::File && !info.trimming) {
            let ino = info.attr.ino;
            let Some(mut seen) = bytes_of(meta, ino, info.allocated).await? else { continue };
            // The two were not read at one moment. What is really wrong stays as it is.
            while seen.stored != seen.counted {
                let before = seen;
                let again = meta.scan_inodes(ino.0.checked_sub(1).map(Ino), 1).await?;
                let Some(now) = again.items.first().filter(|now| now.attr.ino == ino && !now.trimming) else {
                    break;
                };
                let Some(now) = bytes_of(meta, ino, now.allocated).await? else { break };
                if now == before {
                    findings.push(Finding::WrongAllocated { ino, stored: now.stored, counted: now.counted });
                    break;
                }
                seen = now;
            }
        }
        done += page.items.len() as u64;
        progress(Progress { stage: Stage::Files, done, total: None });
        after = page.items.last().map(|info| info.attr.ino);
        if !page.more || after.is_none() {
            return Ok(());
        }
    }
}

/// Allocated bytes of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Allocated {
    stored: i64,
    counted: i64,
}

async fn bytes_of(meta: &Meta, ino: Ino, stored: i64) -> Result<Option<Allocated>> {
    let mut counted: u64 = 0;
    let mut from = ChunkIndex(0);
    loop {
        let Some(page) = unless_gone(meta.chunks(ino, from, PAGE).await)? else { return Ok(None) };
        counted += page.items.iter().map(|(_, groups)| overlay(groups).data_bytes()).sum::<u64>();
        match page.items.last() {
            Some((last, _)) if page.more => from = ChunkIndex(last.0 + 1),
            _ => return Ok(Some(Allocated { stored, counted: i64::try_from(counted).unwrap_or(i64::MAX) })),
        }
    }
}

/// A broken invariant in words, and the inode that it is about.
fn describe(finding: &Finding) -> (Option<Ino>, String) {
    match finding {
        Finding::Undecodable { ino, error } => (*ino, error.clone()),
        Finding::RootMissing => (Some(Ino::ROOT), "the root directory is missing".to_owned()),
        Finding::DanglingDentry { dir, name, ino } => {
            (Some(*dir), format!("directory {dir} has an entry {name} for inode {ino}, which does not exist"))
        }
        Finding::DentryOutsideDirectory { dir, name, ino } => {
            (Some(*dir), format!("inode {dir} is no directory, but has an entry {name} for inode {ino}"))
        }
        Finding::WrongKind { dir, name, ino, actual } => (
            Some(*ino),
            format!("directory {dir} calls {name} another kind than inode {ino} is ({actual:?})"),
        ),
        Finding::SecondName { dir, name, ino } => {
            (Some(*ino), format!("directory {ino} has a second name: {name} in directory {dir}"))
        }
        Finding::WrongParent { ino, stored, actual } => {
            (Some(*ino), format!("directory {ino} calls {stored} its parent, but lies in {actual}"))
        }
        Finding::Unreachable { ino, kind } => (Some(*ino), format!("inode {ino} ({kind:?}) has no name")),
        Finding::WrongNlink { ino, stored, counted } => {
            (Some(*ino), format!("inode {ino} has {counted} links, but says {stored}"))
        }
        Finding::WrongSubdirectories { ino, stored, counted } => {
            (Some(*ino), format!("directory {ino} has {counted} subdirectories, but says {stored}"))
        }
        Finding::OrphanWithoutRecord { ino } => {
            (Some(*ino), format!("inode {ino} has no links, and nothing would remove it"))
        }
        Finding::StaleOrphanRecord { ino, session } => {
            (Some(*ino), format!("inode {ino} is noted for removal by session {}, wrongly", session.0))
        }
        Finding::StrayAttributes { ino } => {
            (Some(*ino), format!("attributes of inode {ino}, which does not exist"))
        }
        Finding::StrayXattrs { ino } => {
            (Some(*ino), format!("extended attributes of inode {ino}, which does not exist"))
        }
        Finding::StraySlices { ino } => (Some(*ino), format!("slices of inode {ino}, which is no file")),
        Finding::SlicesBeyondEnd { ino, from } => {
            (Some(*ino), format!("inode {ino} has slices beyond its end, from chunk {} on", from.0))
        }
        Finding::WrongAllocated { ino, stored, counted } => {
            (Some(*ino), format!("inode {ino} has {counted} allocated bytes, but says {stored}"))
        }
        Finding::WrongPackLive { pack, stored, counted } => {
            (None, format!("{counted} bytes are named in pack {pack}, but it says {stored}"))
        }
        Finding::PackWithoutRecord { pack, live } => {
            (None, format!("{live} bytes are named in pack {pack}, which has no record"))
        }
        Finding::WrongInodesUsed { stored, counted } => {
            (None, format!("the volume has {counted} inodes, but says {stored}"))
        }
        Finding::WrongBytesUsed { stored, counted } => {
            (None, format!("the volume has {counted} allocated bytes, but says {stored}"))
        }
    }
}

/// Checks that what the metadata relies on in journals is there. What is not can only be given up: then its bytes are
/// missing like those of a pack that the store lost, and the rest of the volume can be used.
async fn staged(
    meta: &Meta,
    data: &Data,
    options: &Options,
    progress: OnProgress<'_>,
    report: &mut Report,
) -> Result<()> {
    let mut lost = BTreeMap::new();
    for info in meta.staged_packs().await? {
        let there = data.staged_bytes(info.pack).await;
        if there < info.stored_bytes {
            lost.insert(info.pack, there);
            let pack = info.pack;
            let (live, relied) = (info.live_bytes, info.stored_bytes);
            let dir = data.staging_dir().map_or_else(String::new, |dir| format!(" in {}", dir.display()));
            report.add(Problem {
                path: None,
                ino: None,
                what: format!(
                    "pack {pack} was staged{dir}, but only {there} of {relied} bytes are there; {live} bytes are named in it"
                ),
                repaired: options.repair,
            });
        }
    }
    if lost.is_empty() {
        return Ok(());
    }
    // Reading the blocks names the files, too.
    if !options.data {
        let mut files = Files::new(meta, progress);
        while let Some((path, ino)) = files.next(report).await? {
            let runs = runs_of(meta, ino, &path).await?.into_iter();
            let gone = |wanted: &Wanted| {
                let end = u64::from(wanted.run.pack_offset) + wanted.run.stored_bytes();
                lost.get(&wanted.run.pack).is_some_and(|there| *there < end)
            };
            let bytes: u64 = runs.filter(gone).map(|wanted| u64::from(wanted.run.plain_len)).sum();
            if bytes > 0 {
                let what = format!("about {bytes} bytes were only staged, and are lost");
                let (path, ino) = (Some(path.to_string()), Some(ino.0));
                report.add(Problem { path, ino, what, repaired: options.repair });
            }
        }
    }
    if options.repair {
        // What is left of their journals goes to the store before nothing asks for it any more.
        data.store_all().await?;
        staging::settle(meta, data, |_| false).await?;
        let given_up = lost.iter().map(|(pack, there)| StoredPack { pack: *pack, stored_bytes: *there });
        staging::note_stored(meta, &given_up.collect::<Vec<_>>()).await?;
    }
    Ok(())
}

/// Compares the packs that metadata names with those in the store. Returns those that are missing.
async fn packs(
    meta: &Meta,
    data: &Data,
    progress: OnProgress<'_>,
    report: &mut Report,
) -> Result<HashSet<PackId>> {
    // Named packs first: what is stored later cannot be missing then.
    let mut named = BTreeMap::new();
    let mut after = None;
    loop {
        let page = meta.packs(after, PAGE).await?;
        after = page.items.last().map(|info| info.pack);
        named.extend(page.items.iter().map(|info| (info.pack, *info)));
        if !page.more || after.is_none() {
            break;
        }
    }
    report.packs = named.len() as u64;
    // What is staged need not be in the store.
    let staged: HashSet<PackId> =
        named.values().filter(|info| info.state == PackState::Staged).map(|info| info.pack).collect();
    let mut missing: BTreeMap<PackId, PackInfo> =
        named.into_iter().filter(|(_, info)| info.state == PackState::Stored).collect();
    let mut unnamed = Vec::new();
    let mut listed = 0;
    let mut in_store = data.list_packs();
    while let Some(stored) = in_store.try_next().await? {
        listed += 1;
        progress(Progress { stage: Stage::Packs, done: listed, total: Some(report.packs) });
        match missing.remove(&stored.pack) {
            Some(info) if info.stored_bytes != stored.stored_bytes => {
                let (pack, is, should) = (stored.pack, stored.stored_bytes, info.stored_bytes);
                report.add(Problem {
                    path: None,
                    ino: None,
                    what: format!("pack {pack} has {is} bytes in the store instead of {should}"),
                    repaired: false,
                });
            }
            Some(_) => {}
            None if staged.contains(&stored.pack) => {}
            None => unnamed.push(stored),
        }
    }
    let mut lost = HashSet::new();
    for info in missing.into_values().filter(|info| info.live_bytes != 0) {
        if is_named(meta, info.pack).await? {
            lost.insert(info.pack);
            let (pack, live) = (info.pack, info.live_bytes);
            report.add(Problem {
                path: None,
                ino: None,
                what: format!("pack {pack} is missing in the store; {live} bytes are named in it"),
                repaired: false,
            });
        }
    }
    note_unnamed(meta, data, &unnamed, report).await?;
    Ok(lost)
}

/// Tells about packs that a crash left without a name.
async fn note_unnamed(
    meta: &Meta,
    data: &Data,
    unnamed: &[crate::data::StoredPack],
    report: &mut Report,
) -> Result<()> {
    let uncommitted: HashSet<PackId> = data.uncommitted().into_iter().collect();
    let alive: HashSet<_> = meta.sessions().await?.into_iter().map(|session| session.id).collect();
    let garbage = unnamed
        .iter()
        .filter(|stored| !alive.contains(&stored.pack.session()) && !uncommitted.contains(&stored.pack));
    let (count, bytes) =
        garbage.fold((0_u64, 0), |(count, bytes), stored| (count + 1, bytes + stored.stored_bytes));
    if count > 0 {
        report.notes.push(format!(
            "{count} packs ({bytes} bytes) in the store are named by nothing, as a crash leaves them: gc deletes them"
        ));
    }
    Ok(())
}

/// Whether metadata names bytes of the pack now.
async fn is_named(meta: &Meta, pack: PackId) -> Result<bool> {
    let before = pack.0.checked_sub(1).map(PackId);
    let page = meta.packs(before, 1).await?;
    Ok(page.items.first().is_some_and(|info| info.pack == pack && info.live_bytes != 0))
}

/// A run of a file that is to be read.
struct Wanted {
    path: Arc<str>,
    ino: Ino,
    chunk: ChunkIndex,
    run: PackedRun,
}

/// Walks through all files and reads every block once.
async fn blocks(
    meta: &Meta,
    data: &Data,
    progress: OnProgress<'_>,
    missing: &HashSet<PackId>,
    report: &mut Report,
) -> Result<()> {
    let mut seen = HashSet::new();
    let mut batch = Vec::new();
    let mut batch_bytes = 0;
    let mut files = Files::new(meta, progress);
    while let Some((path, ino)) = files.next(report).await? {
        let runs = runs_of(meta, ino, &path).await;
        for wanted in unless_damaged(runs, ino, &path, report)?.unwrap_or_default() {
            if !seen.insert((wanted.run.pack, wanted.run.pack_offset)) {
                continue;
            }
            if missing.contains(&wanted.run.pack) {
                let pack = wanted.run.pack;
                let lost = Error::new(ErrorKind::Stale, format!("pack {pack} is missing in the store"));
                account(meta, wanted, Err(lost), report).await?;
                continue;
            }
            batch_bytes += wanted.run.stored_bytes();
            batch.push(wanted);
            if batch.len() >= BATCH_RUNS || batch_bytes >= BATCH_BYTES {
                verify(meta, data, std::mem::take(&mut batch), report).await?;
                batch_bytes = 0;
            }
        }
    }
    verify(meta, data, batch, report).await
}

/// Reads and checks the blocks of these runs.
async fn verify(meta: &Meta, data: &Data, batch: Vec<Wanted>, report: &mut Report) -> Result<()> {
    let runs: Vec<&PackedRun> = batch.iter().map(|wanted| &wanted.run).collect();
    let verdicts = data.verify_many(&runs).await;
    for (wanted, verdict) in batch.into_iter().zip(verdicts) {
        account(meta, wanted, verdict, report).await?;
    }
    Ok(())
}

/// All files of the volume, directory by directory.
struct Files<'a> {
    meta: &'a Meta,
    progress: OnProgress<'a>,
    done: u64,
    total: Option<u64>,
    /// Directories to read, and after which name.
    directories: Vec<(Ino, String, Option<Name>)>,
    /// Files of the page that was read last.
    found: Vec<(Arc<str>, Ino)>,
}

impl<'a> Files<'a> {
    fn new(meta: &'a Meta, progress: OnProgress<'a>) -> Files<'a> {
        let directories = vec![(Ino::ROOT, String::new(), None)];
        Files { meta, progress, done: 0, total: None, directories, found: Vec::new() }
    }

    /// The next file. Directories that cannot be read because of damage become problems.
    async fn next(&mut self, report: &mut Report) -> Result<Option<(Arc<str>, Ino)>> {
        let total = match self.total {
            Some(total) => total,
            None => *self.total.insert(self.meta.statfs().await?.inodes_used),
        };
        loop {
            if let Some(file) = self.found.pop() {
                return Ok(Some(file));
            }
            let Some((dir, dir_path, after)) = self.directories.pop() else { return Ok(None) };
            let listed = self.meta.readdir(dir, after.as_ref(), PAGE).await;
            let Some(page) = unless_damaged(listed, dir, &dir_path, report)? else { continue };
            let last = page.items.last().map(|dentry| dentry.name.clone()).filter(|_| page.more);
            if last.is_some() {
                self.directories.push((dir, dir_path.clone(), last));
            }
            for Dentry { name, ino, kind } in page.items {
                self.done += 1;
                let path = format!("{dir_path}/{name}");
                match kind {
                    Kind::Directory => self.directories.push((ino, path, None)),
                    Kind::File => self.found.push((path.into(), ino)),
                    _ => {}
                }
            }
            let total = Some(total.max(self.done));
            (self.progress)(Progress { stage: Stage::Blocks, done: self.done, total });
        }
    }
}

/// The packed runs that a file names.
async fn runs_of(meta: &Meta, ino: Ino, path: &Arc<str>) -> Result<Vec<Wanted>> {
    let mut wanted = Vec::new();
    let mut from = ChunkIndex(0);
    loop {
        let Some(page) = unless_gone(meta.chunks(ino, from, PAGE).await)? else { return Ok(wanted) };
        for (chunk, groups) in &page.items {
            for run in packed(groups) {
                wanted.push(Wanted { path: Arc::clone(path), ino, chunk: *chunk, run: run.clone() });
            }
        }
        match page.items.last() {
            Some((last, _)) if page.more => from = ChunkIndex(last.0 + 1),
            _ => return Ok(wanted),
        }
    }
}

fn packed(groups: &[SliceGroup]) -> impl Iterator<Item = &PackedRun> {
    groups.iter().flat_map(|group| &group.slices).filter_map(|slice| match &slice.stored {
        Stored::Packed(run) => Some(run),
        Stored::Hole | Stored::Inline(_) => None,
    })
}

/// What a file that vanished between two reads looks like.
fn unless_gone<T>(result: Result<T>) -> Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if matches!(error.kind, ErrorKind::NotFound | ErrorKind::NotDirectory) => Ok(None),
        Err(error) => Err(error),
    }
}

/// As [`unless_gone`]; a record that does not decode becomes a problem.
fn unless_damaged<T>(result: Result<T>, ino: Ino, path: &str, report: &mut Report) -> Result<Option<T>> {
    match unless_gone(result) {
        // Without a cause outside, the metadata store answered, and what it said makes no sense.
        Err(error) if error.kind == ErrorKind::Io && error.source().is_none() => {
            let path = if path.is_empty() { "/" } else { path };
            report.add(Problem {
                path: Some(path.to_owned()),
                ino: Some(ino.0),
                what: format!("cannot be read: {error}"),
                repaired: false,
            });
            Ok(None)
        }
        result => result,
    }
}

/// Counts a run that was read; one that is bad is a problem if the file still names it.
async fn account(meta: &Meta, wanted: Wanted, verdict: Result<()>, report: &mut Report) -> Result<()> {
    let error = match verdict {
        Ok(()) => {
            report.blocks_checked += wanted.run.blocks.len() as u64;
            report.bytes_checked += wanted.run.stored_bytes();
            return Ok(());
        }
        Err(error) => error,
    };
    let Some(groups) = unless_gone(meta.chunk(wanted.ino, wanted.chunk).await)? else { return Ok(()) };
    let same = |run: &PackedRun| (run.pack, run.pack_offset) == (wanted.run.pack, wanted.run.pack_offset);
    if !packed(&groups).any(same) {
        return Ok(());
    }
    report.add(Problem {
        path: Some(wanted.path.to_string()),
        ino: Some(wanted.ino.0),
        what: format!("bytes of chunk {} cannot be read: {error}", wanted.chunk.0),
        repaired: false,
    });
    Ok(())
}

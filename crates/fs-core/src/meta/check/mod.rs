//! Checking the metadata's invariants, and repairing them.
//!
//! `scan` reads everything in pages, each page on one state of the store; `check` compares; `undecodable` looks for what
//! cannot be read, if `check` stumbled over some; `repair` mends one finding a transaction, and only where the store is still as the finding saw it. On a volume that is in use, changes
//! between two pages look like damage: so what a first pass finds must be found by a second one too.
//!
//! The invariants:
//! - a dentry lies in a directory, names an inode of its kind, and each inode but the root has one;
//! - a directory has one name, in the directory that its record calls its parent, and its ancestors end at the root;
//! - the links of a file are its names; the subdirectories of a directory are counted right;
//! - an inode without links has an orphan record, and only those have one;
//! - attributes, extended attributes and slices belong to an inode, slices to a file, and none begins beyond its end
//!   unless a trim is under way;
//! - a pack's live bytes are what slices name, and the volume's use is what inodes say.

mod inodes;
mod repair;
mod scan;
mod undecodable;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use hashbrown::HashSet;

use crate::types::{ChunkIndex, Ino, Kind, Name, PackId, Result, SessionId};

use super::ops::chunks::LiveBytes;
use super::usage::{Change, totals_in};
use super::{Meta, Page};
use inodes::{Directory, Inodes, Known, Walk};

pub use repair::Repaired;
pub use scan::{DentryInfo, InodeInfo, OrphanInfo, SliceInfo};

/// Records that are read at a time.
const PAGE: usize = 2048;

/// A broken invariant.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Finding {
    /// A record does not decode. Nothing else is looked for then: whatever refers to it would look broken.
    Undecodable {
        /// The inode that it belongs to, unless it belongs to none.
        ino: Option<Ino>,
        /// What does not decode.
        error: String,
    },
    /// The root directory's record is missing.
    RootMissing,
    /// A dentry names an inode that does not exist.
    DanglingDentry {
        /// Its directory.
        dir: Ino,
        /// Its name.
        name: Name,
        /// What it names.
        ino: Ino,
    },
    /// A dentry lies in something that is not a directory, or does not exist.
    DentryOutsideDirectory {
        /// Where it lies.
        dir: Ino,
        /// Its name.
        name: Name,
        /// What it names.
        ino: Ino,
    },
    /// A dentry tells the wrong kind.
    WrongKind {
        /// Its directory.
        dir: Ino,
        /// Its name.
        name: Name,
        /// What it names.
        ino: Ino,
        /// The inode's kind.
        actual: Kind,
    },
    /// A directory has a second name.
    SecondName {
        /// Where the second name lies.
        dir: Ino,
        /// The second name.
        name: Name,
        /// The directory.
        ino: Ino,
    },
    /// A directory's record calls another directory its parent than the one that holds its name.
    WrongParent {
        /// The directory.
        ino: Ino,
        /// What its record says.
        stored: Ino,
        /// Where its name lies.
        actual: Ino,
    },
    /// An inode with links has no name, or the names of a directory form a loop.
    Unreachable {
        /// The inode.
        ino: Ino,
        /// Its kind.
        kind: Kind,
    },
    /// The number of links is not the number of names.
    WrongNlink {
        /// The inode.
        ino: Ino,
        /// What its record says.
        stored: u32,
        /// What it should say (2 for a directory with a name).
        counted: u32,
    },
    /// The number of subdirectories is wrong.
    WrongSubdirectories {
        /// The directory.
        ino: Ino,
        /// What the counter says.
        stored: i64,
        /// How many there are.
        counted: i64,
    },
    /// An inode without links has no orphan record: nobody would ever remove it.
    OrphanWithoutRecord {
        /// The inode.
        ino: Ino,
    },
    /// An orphan record for an inode that has links, or does not exist.
    StaleOrphanRecord {
        /// The inode.
        ino: Ino,
        /// The record's session.
        session: SessionId,
    },
    /// Attributes without an inode record.
    StrayAttributes {
        /// Their inode.
        ino: Ino,
    },
    /// Extended attributes without an inode.
    StrayXattrs {
        /// Their inode.
        ino: Ino,
    },
    /// Slices of something that is not a file, or does not exist.
    StraySlices {
        /// Their inode.
        ino: Ino,
    },
    /// Slices in chunks that begin beyond the end of the file.
    SlicesBeyondEnd {
        /// The file.
        ino: Ino,
        /// The first chunk beyond the end.
        from: ChunkIndex,
    },
    /// The bytes of a file that are not holes are counted wrong. Found by whoever can resolve slices, not here.
    WrongAllocated {
        /// The file.
        ino: Ino,
        /// What the counter says.
        stored: i64,
        /// What the slices say.
        counted: i64,
    },
    /// The live bytes of a pack are counted wrong.
    WrongPackLive {
        /// The pack.
        pack: PackId,
        /// What the counter says.
        stored: i64,
        /// What slices name.
        counted: i64,
    },
    /// Slices name a pack that has no record.
    PackWithoutRecord {
        /// The pack.
        pack: PackId,
        /// What slices name, in bytes.
        live: i64,
    },
    /// The volume's inodes are counted wrong.
    WrongInodesUsed {
        /// What the counters say.
        stored: i64,
        /// How many there are.
        counted: i64,
    },
    /// The volume's allocated bytes are counted wrong.
    WrongBytesUsed {
        /// What the counters say.
        stored: i64,
        /// What the inodes say.
        counted: i64,
    },
}

/// What a check read and found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CheckReport {
    /// Broken invariants.
    pub findings: Vec<Finding>,
    /// Inodes that were read.
    pub inodes: u64,
    /// Dentries that were read.
    pub dentries: u64,
    /// Slice groups that were read.
    pub slice_groups: u64,
    /// Packs that were read.
    pub packs: u64,
}

/// How far a check is; written by the check, read by whoever shows it.
#[derive(Debug, Default)]
pub struct CheckProgress {
    records: AtomicU64,
}

impl CheckProgress {
    /// Records that were read, of all passes.
    pub fn records(&self) -> u64 {
        self.records.load(Ordering::Relaxed)
    }

    fn add(&self, count: usize) {
        self.records.fetch_add(count as u64, Ordering::Relaxed);
    }
}

impl Meta {
    /// Reads all metadata and compares. 24 bytes of memory for each inode, 100 for a directory; works
    /// without a session.
    ///
    /// # Errors
    /// `Io` when the store does not answer.
    pub async fn check(&self, progress: &CheckProgress) -> Result<CheckReport> {
        let mut report = match self.check_once(progress).await {
            Ok(report) => report,
            Err(error) => {
                let findings = self.undecodable(progress).await?;
                if findings.is_empty() {
                    return Err(error);
                }
                return Ok(CheckReport { findings, ..CheckReport::default() });
            }
        };
        if !report.findings.is_empty() {
            let again = self.check_once(progress).await?;
            let confirmed: HashSet<Finding> = again.findings.into_iter().collect();
            report.findings.retain(|finding| confirmed.contains(finding));
        }
        Ok(report)
    }

    async fn check_once(&self, progress: &CheckProgress) -> Result<CheckReport> {
        let mut pass = Pass {
            meta: self,
            progress,
            known: Inodes::default(),
            allocated: 0,
            misplaced: Vec::new(),
            report: CheckReport::default(),
        };
        pass.inodes().await?;
        if !pass.known.contains(Ino::ROOT) {
            // Without it everything looks lost: what else there is shows when it is back.
            pass.report.findings = vec![Finding::RootMissing];
            return Ok(pass.report);
        }
        pass.dentries().await?;
        pass.misplaced();
        pass.reachability();
        pass.orphans().await?;
        pass.links();
        pass.xattrs().await?;
        let live = pass.slices().await?;
        pass.packs(live).await?;
        pass.usage().await?;
        Ok(pass.report)
    }
}

struct Pass<'a> {
    meta: &'a Meta,
    progress: &'a CheckProgress,
    known: Inodes,
    /// Allocated bytes of all inodes.
    allocated: i64,
    /// Names of directories that do not lie where the directory's record says.
    misplaced: Vec<(Ino, Name, Ino)>,
    report: CheckReport,
}

impl Pass<'_> {
    fn found(&mut self, finding: Finding) {
        self.report.findings.push(finding);
    }

    async fn inodes(&mut self) -> Result<()> {
        let mut after = None;
        loop {
            let page = self.meta.read(|txn| async move { scan::nodes_in(&*txn, after, PAGE).await }).await?;
            self.progress.add(page.nodes.len());
            for node in &page.nodes {
                self.known.push(node);
                self.allocated += node.allocated;
            }
            self.report.findings.extend(page.strays.into_iter().map(|ino| Finding::StrayAttributes { ino }));
            match page.next {
                Some(next) => after = Some(next),
                None => break,
            }
        }
        self.report.inodes = self.known.len() as u64;
        Ok(())
    }

    async fn dentries(&mut self) -> Result<()> {
        let mut after: Option<(Ino, Name)> = None;
        loop {
            let cursor = after.as_ref().map(|(dir, name)| (*dir, name));
            let page = self.meta.scan_dentries(cursor, PAGE).await?;
            self.progress.add(page.items.len());
            self.report.dentries += page.items.len() as u64;
            after = page.items.last().map(|last| (last.dir, last.dentry.name.clone()));
            for item in page.items {
                self.dentry(item);
            }
            if !page.more {
                return Ok(());
            }
        }
    }

    fn dentry(&mut self, DentryInfo { dir, dentry }: DentryInfo) {
        let super::Dentry { name, ino, kind } = dentry;
        if !self.known.directories.contains_key(&dir) {
            return self.found(Finding::DentryOutsideDirectory { dir, name, ino });
        }
        let actual = match self.known.get_mut(ino) {
            None => return self.found(Finding::DanglingDentry { dir, name, ino }),
            Some(Known::Directory(known)) => {
                if known.parent != dir || known.named_in.is_some() {
                    self.misplaced.push((dir, name.clone(), ino));
                } else {
                    known.names += 1;
                    known.named_in = Some(dir);
                }
                Kind::Directory
            }
            Some(Known::Other(known)) => {
                known.names += 1;
                known.kind
            }
        };
        if actual != kind {
            self.found(Finding::WrongKind { dir, name, ino, actual });
        }
        if let Some(known) = self.known.directories.get_mut(&dir) {
            known.has_entries = true;
        }
    }

    /// Names of directories outside the directory that they call their parent: the only name counts, others do not.
    fn misplaced(&mut self) {
        for (dir, name, ino) in std::mem::take(&mut self.misplaced) {
            let Some(known) = self.known.directories.get_mut(&ino) else { continue };
            if known.named_in.is_some() {
                self.found(Finding::SecondName { dir, name, ino });
            } else {
                known.named_in = Some(dir);
                known.names = 1;
            }
        }
    }

    /// Directories whose ancestors do not end at the root; their subdirectories are counted on the way.
    fn reachability(&mut self) {
        let directories: Vec<(Ino, Option<Ino>)> =
            self.known.directories.iter().map(|(ino, known)| (*ino, known.named_in)).collect();
        for (_, named_in) in &directories {
            if let Some(parent) = named_in.and_then(|dir| self.known.directories.get_mut(&dir)) {
                parent.subdirectories += 1;
            }
        }
        for (ino, _) in directories {
            self.walk_up(ino);
        }
    }

    fn walk_up(&mut self, from: Ino) {
        let mut path = Vec::new();
        let mut at = from;
        let looped = loop {
            let Some(known) = self.known.directories.get_mut(&at) else { break false };
            match known.walk {
                Walk::Done => break false,
                Walk::Open => break true,
                Walk::New => known.walk = Walk::Open,
            }
            path.push(at);
            match known.named_in {
                Some(dir) if at != Ino::ROOT => at = dir,
                _ => break false,
            }
        };
        for ino in &path {
            if let Some(known) = self.known.directories.get_mut(ino) {
                known.walk = Walk::Done;
            }
        }
        if looped {
            let start = path.iter().position(|ino| *ino == at).unwrap_or(0);
            let ino = path[start..].iter().min().copied().unwrap_or(at);
            self.found(Finding::Unreachable { ino, kind: Kind::Directory });
        }
    }

    async fn orphans(&mut self) -> Result<()> {
        let mut after = None;
        loop {
            let page: Page<OrphanInfo> = self.meta.scan_orphans(after, PAGE).await?;
            self.progress.add(page.items.len());
            after = page.items.last().map(|last| (last.ino, last.session));
            for OrphanInfo { ino, session, .. } in page.items {
                match self.known.get_mut(ino) {
                    Some(Known::Directory(known)) if known.nlink == 0 && known.names == 0 => {
                        known.is_orphan = true;
                    }
                    Some(Known::Other(known)) if known.nlink == 0 && known.names == 0 => {
                        known.is_orphan = true;
                    }
                    _ => self.found(Finding::StaleOrphanRecord { ino, session }),
                }
            }
            if !page.more {
                return Ok(());
            }
        }
    }

    fn links(&mut self) {
        let mut findings = Vec::new();
        for known in self.known.others() {
            let (ino, stored, counted) = (known.ino, known.nlink, known.names);
            if counted == 0 && stored == 0 {
                if !known.is_orphan {
                    findings.push(Finding::OrphanWithoutRecord { ino });
                }
            } else if counted == 0 {
                findings.push(Finding::Unreachable { ino, kind: known.kind });
            } else if stored != counted {
                findings.push(Finding::WrongNlink { ino, stored, counted });
            }
        }
        for (&ino, known) in &self.known.directories {
            directory_links(ino, known, &mut findings);
        }
        self.report.findings.append(&mut findings);
    }

    async fn xattrs(&mut self) -> Result<()> {
        let mut after = None;
        let mut strays = HashSet::new();
        loop {
            let cursor = &after;
            let page: Page<(Ino, bytes::Bytes)> =
                self.meta.read(|txn| async move { scan::xattrs_in(&*txn, cursor.as_ref()).await }).await?;
            self.progress.add(page.items.len());
            strays.extend(page.items.iter().map(|(ino, _)| *ino).filter(|ino| !self.known.contains(*ino)));
            after = page.items.into_iter().last();
            if !page.more {
                break;
            }
        }
        self.report.findings.extend(strays.into_iter().map(|ino| Finding::StrayXattrs { ino }));
        Ok(())
    }

    async fn slices(&mut self) -> Result<LiveBytes> {
        let mut after = None;
        let mut live = LiveBytes::default();
        let mut findings = HashSet::new();
        loop {
            let page: Page<SliceInfo> = self.meta.scan_slices(after, PAGE / 8).await?;
            self.progress.add(page.items.len());
            self.report.slice_groups += page.items.len() as u64;
            after = page.items.last().map(|last| (last.ino, last.chunk, last.group.stamp));
            for SliceInfo { ino, chunk, group } in &page.items {
                live.gain(&group.slices);
                match self.known.other(*ino).filter(|known| known.kind == Kind::File) {
                    Some(known) => {
                        if let Some(from) = known.beyond().filter(|from| chunk >= from) {
                            findings.insert(Finding::SlicesBeyondEnd { ino: *ino, from });
                        }
                    }
                    None => {
                        findings.insert(Finding::StraySlices { ino: *ino });
                    }
                }
            }
            if !page.more {
                break;
            }
        }
        self.report.findings.extend(findings);
        Ok(live)
    }

    async fn packs(&mut self, live: LiveBytes) -> Result<()> {
        let mut counted: BTreeMap<PackId, i64> = live.iter().collect();
        let mut after = None;
        loop {
            let page = self.meta.packs(after, PAGE).await?;
            self.progress.add(page.items.len());
            self.report.packs += page.items.len() as u64;
            after = page.items.last().map(|last| last.pack);
            for info in page.items {
                let counted = counted.remove(&info.pack).unwrap_or(0);
                let (pack, stored) = (info.pack, info.live_bytes);
                if counted != stored {
                    self.found(Finding::WrongPackLive { pack, stored, counted });
                }
            }
            if !page.more {
                break;
            }
        }
        for (pack, live) in counted {
            self.found(Finding::PackWithoutRecord { pack, live });
        }
        Ok(())
    }

    async fn usage(&mut self) -> Result<()> {
        let stored: Change = self.meta.read(|txn| async move { totals_in(&*txn).await }).await?;
        let inodes = i64::try_from(self.known.len()).unwrap_or(i64::MAX);
        if stored.inodes != inodes {
            self.found(Finding::WrongInodesUsed { stored: stored.inodes, counted: inodes });
        }
        let bytes = self.allocated;
        if stored.bytes != bytes {
            self.found(Finding::WrongBytesUsed { stored: stored.bytes, counted: bytes });
        }
        Ok(())
    }
}

/// The names and subdirectories of a directory.
fn directory_links(ino: Ino, known: &Directory, findings: &mut Vec<Finding>) {
    let is_root = ino == Ino::ROOT;
    let named = known.names > 0 || is_root;
    if !named && known.nlink == 0 && !known.has_entries {
        if !known.is_orphan {
            findings.push(Finding::OrphanWithoutRecord { ino });
        }
    } else if !named {
        findings.push(Finding::Unreachable { ino, kind: Kind::Directory });
    } else if known.nlink != 2 {
        findings.push(Finding::WrongNlink { ino, stored: known.nlink, counted: 2 });
    }
    let (stored, counted) = (known.subdirectories_stored, known.subdirectories);
    if stored != counted {
        findings.push(Finding::WrongSubdirectories { ino, stored, counted });
    }
    let actual = if is_root { Some(Ino::ROOT) } else { known.named_in };
    if let Some(actual) = actual.filter(|actual| *actual != known.parent) {
        findings.push(Finding::WrongParent { ino, stored: known.parent, actual });
    }
}

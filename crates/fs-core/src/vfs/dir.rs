//! Directory listings with cookies that stay good while entries come and go.
//!
//! A handle remembers the names it has shown, in order: cookie `n` means "after the `n`-th". Going on after a name is
//! one range read of the metadata, so nothing is skipped or repeated, whatever happened to that name. Names that appear
//! in a part that was listed before are not shown until the listing is rewound, so that cookies keep their meaning.
//! Above 16 MiB of names the oldest are forgotten but for every 1024th, and a hash of each: going back there begins after
//! the nearest, and the hashes tell which names have been shown.

use xxhash_rust::xxh3::xxh3_64;

use super::Vfs;
use super::handle::{DirHandle, Reach};
use super::request::{DirEntry, DirSink, Fh, Opened, ReaddirArgs, ReaddirMode};
use crate::meta::Dentry;
use crate::types::{Attr, ErrorKind, Ino, Kind, Name, Result};

/// Bytes of names that a handle remembers.
const NAMES_BYTES_MAX: usize = 16 << 20;
/// Of older names, every so-manieth is kept.
const CHECKPOINT_EVERY: u64 = 1024;
/// Entries that are read at a time.
const PAGE_MIN: usize = 16;
const PAGE_MAX: usize = 1024;

/// Cookies of `.` and `..`; the first name has the next one.
const COOKIE_DOT: u64 = 1;
const COOKIE_DOT_DOT: u64 = 2;

/// Names that were shown, in ascending order; numbered from 0.
#[derive(Debug, Default)]
pub(super) struct DirCursor {
    /// Hashes of the forgotten names, those before the ones in `ends`.
    forgotten: Vec<u32>,
    bytes: Vec<u8>,
    ends: Vec<usize>,
    checkpoints: Vec<Name>,
}

/// Where a listing goes on.
struct Resume {
    /// After this name.
    after: Option<Name>,
    /// Number of the next name that is to be shown.
    next: u64,
}

impl DirCursor {
    /// Number of the first name that is not forgotten.
    fn first(&self) -> u64 {
        self.forgotten.len() as u64
    }

    fn count(&self) -> u64 {
        self.first() + self.ends.len() as u64
    }

    fn bytes_of(&self, number: u64) -> Option<&[u8]> {
        let index = usize::try_from(number.checked_sub(self.first())?).ok()?;
        let end = *self.ends.get(index)?;
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        Some(&self.bytes[start..end])
    }

    fn push(&mut self, name: &Name) {
        if self.count().is_multiple_of(CHECKPOINT_EVERY) {
            self.checkpoints.push(name.clone());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.ends.push(self.bytes.len());
        if self.bytes.len() > NAMES_BYTES_MAX {
            self.forget();
        }
    }

    /// Forgets the older half of the names.
    fn forget(&mut self) {
        let half = self.ends.len() / 2;
        let cut = self.ends[half - 1];
        let mut start = 0;
        for end in self.ends.drain(..half) {
            self.forgotten.push(hash(&self.bytes[start..end]));
            start = end;
        }
        self.bytes.drain(..cut);
        for end in &mut self.ends {
            *end -= cut;
        }
    }

    /// Where to go on after the name number `last`.
    fn resume(&self, last: u64) -> Option<Resume> {
        if last >= self.count() {
            return None;
        }
        if let Some(bytes) = self.bytes_of(last) {
            let after = Name::new(bytes.to_vec()).ok();
            return Some(Resume { after, next: last + 1 });
        }
        let checkpoint = last / CHECKPOINT_EVERY;
        let after = self.checkpoints.get(usize::try_from(checkpoint).ok()?)?.clone();
        Some(Resume { after: Some(after), next: last + 1 })
    }

    /// The number of `name` if that is `next` or later; `None` if it was shown before, or appeared in a part that was
    /// listed before.
    fn number(&mut self, name: &Name, next: u64) -> Option<u64> {
        if next == self.count() {
            self.push(name);
            return Some(next);
        }
        if next < self.first()
            && let Some(number) = self.forgotten_number(name, next)
        {
            return Some(number);
        }
        let next = next.max(self.first());
        if self.bytes_of(next) == Some(name.as_bytes()) {
            return Some(next);
        }
        let (mut low, mut high) = (next, self.count());
        while low < high {
            let middle = low + (high - low) / 2;
            if self.bytes_of(middle)? < name.as_bytes() {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        if low == self.count() {
            self.push(name);
            return Some(low);
        }
        (self.bytes_of(low) == Some(name.as_bytes())).then_some(low)
    }

    /// The number of a forgotten name, which lies between two checkpoints.
    fn forgotten_number(&self, name: &Name, next: u64) -> Option<u64> {
        let checkpoints = self.checkpoints.partition_point(|checkpoint| checkpoint <= name) as u64;
        let begin = checkpoints.checked_sub(1)? * CHECKPOINT_EVERY;
        let end = (begin + CHECKPOINT_EVERY).min(self.first());
        let wanted = hash(name.as_bytes());
        let is_it = |number: &u64| usize::try_from(*number).is_ok_and(|at| self.forgotten[at] == wanted);
        (begin.max(next)..end).find(is_it)
    }
}

/// Short enough to be kept for millions of names; two of one thousand have the same once in thousands of listings.
fn hash(name: &[u8]) -> u32 {
    (xxh3_64(name) >> 32) as u32
}

impl Vfs {
    /// Opens a directory (opendir(3)).
    ///
    /// # Errors
    /// `NotDirectory`; `Stale`.
    pub async fn opendir(&self, ino: Ino) -> Result<Opened> {
        let attr = self.meta.getattr(ino).await?;
        if attr.kind != Kind::Directory {
            return Err(ErrorKind::NotDirectory.into());
        }
        self.known.opened(ino);
        let fh =
            self.handles.add_dir(DirHandle { ino, cursor: tokio::sync::Mutex::new(DirCursor::default()) });
        Ok(Opened { fh, keep_cache: true, direct_io: false, no_flush: true })
    }

    /// Lists entries after a cookie until the sink is full (readdir(3)): `.` and `..` first, then names in order. Every
    /// entry that is there during the whole listing comes exactly once. A removed directory is empty.
    ///
    /// # Errors
    /// `BadHandle`; `Invalid` for a cookie that this handle has not given out; `Io`.
    pub async fn readdir(&self, args: ReaddirArgs, sink: DirSink<'_>) -> Result<()> {
        let handle = self.handles.dir(args.fh)?;
        let mut cursor = handle.cursor.lock().await;
        if args.cookie < COOKIE_DOT_DOT && !self.list_dots(&handle, args.cookie, sink).await? {
            return Ok(());
        }
        let mut resume = if args.cookie <= COOKIE_DOT_DOT {
            if args.cookie == 0 {
                *cursor = DirCursor::default();
            }
            Resume { after: None, next: 0 }
        } else {
            cursor.resume(args.cookie - COOKIE_DOT_DOT - 1).ok_or(ErrorKind::Invalid)?
        };
        let limit = args.entries_max.clamp(PAGE_MIN, PAGE_MAX);
        loop {
            let retired = self.inodes.retired();
            let page = match args.mode {
                ReaddirMode::Plus => self.meta.readdirplus(handle.ino, resume.after.as_ref(), limit).await?,
                ReaddirMode::Names => {
                    let page = self.meta.readdir(handle.ino, resume.after.as_ref(), limit).await?;
                    crate::meta::Page {
                        items: page.items.into_iter().map(|dentry| (dentry, None)).collect(),
                        more: page.more,
                    }
                }
            };
            resume.after = page.items.last().map(|(dentry, _)| dentry.name.clone());
            for (dentry, attr) in page.items {
                let Some(number) = cursor.number(&dentry.name, resume.next) else { continue };
                resume.next = number + 1;
                let attr = match attr {
                    Some(attr) => self.current(attr, retired).await.ok(),
                    None => None,
                };
                if args.mode == ReaddirMode::Plus && attr.is_none() {
                    // The inode is gone: the name is about to be.
                    continue;
                }
                if !self.show(&dentry, attr.as_ref(), number, sink) {
                    return Ok(());
                }
            }
            if !page.more {
                return Ok(());
            }
        }
    }

    /// Passes an entry on; whether it was taken.
    fn show(&self, dentry: &Dentry, attr: Option<&Attr>, number: u64, sink: DirSink<'_>) -> bool {
        let entry = DirEntry {
            ino: dentry.ino,
            cookie: number + COOKIE_DOT_DOT + 1,
            kind: dentry.kind,
            name: dentry.name.as_bytes(),
            attr,
        };
        let taken = sink(&entry).is_continue();
        if taken && attr.is_some() {
            self.known.looked_up(dentry.ino);
        }
        taken
    }

    /// Lists `.` and `..` as far as they come after `cookie`; whether the sink has room left.
    async fn list_dots(&self, handle: &DirHandle, cookie: u64, sink: DirSink<'_>) -> Result<bool> {
        let attr = self.meta.getattr(handle.ino).await?;
        if attr.nlink == 0 {
            return Ok(false);
        }
        if cookie == 0 {
            self.accessed_other(&attr).await?;
            let dot = DirEntry {
                ino: handle.ino,
                cookie: COOKIE_DOT,
                kind: Kind::Directory,
                name: b".",
                attr: None,
            };
            if sink(&dot).is_break() {
                return Ok(false);
            }
        }
        let parent = match self.meta.lookup_parent(handle.ino).await {
            Ok(parent) => parent.ino,
            Err(error) if matches!(error.kind, ErrorKind::NotFound | ErrorKind::Stale) => handle.ino,
            Err(error) => return Err(error),
        };
        let dot_dot =
            DirEntry { ino: parent, cookie: COOKIE_DOT_DOT, kind: Kind::Directory, name: b"..", attr: None };
        Ok(sink(&dot_dot).is_continue())
    }

    /// Closes a directory.
    ///
    /// # Errors
    /// `BadHandle`.
    #[expect(clippy::unused_async, reason = "as the release of a file")]
    pub async fn releasedir(&self, fh: Fh) -> Result<()> {
        let handle = self.handles.remove_dir(fh)?;
        if self.known.closed(handle.ino) == Reach::Unreachable {
            self.collector.reap_later(handle.ino);
        }
        Ok(())
    }

    /// Makes every change of names durable that has returned, in this directory and in all others.
    ///
    /// # Errors
    /// `Io`.
    pub async fn fsyncdir(&self, ino: Ino) -> Result<()> {
        let _ = ino;
        self.sync_metadata().await
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn name(number: u64) -> Name {
        Name::new(format!("{number:0>200}").into_bytes()).unwrap()
    }

    /// What a listing of `names` shows from after the name number `last` on, with its number.
    fn listing(cursor: &mut DirCursor, names: &BTreeSet<u64>, last: u64) -> Vec<(u64, u64)> {
        let Resume { after, mut next } = cursor.resume(last).unwrap();
        let mut shown = Vec::new();
        for wanted in names {
            let name = name(*wanted);
            if after.as_ref().is_none_or(|after| name > *after)
                && let Some(number) = cursor.number(&name, next)
            {
                next = number + 1;
                shown.push((number, *wanted));
            }
        }
        shown
    }

    #[test]
    fn going_back_to_forgotten_names_skips_and_repeats_nothing_whatever_was_removed() {
        // Even numbers, so that there is room between them.
        let count = 150_000_u64;
        let mut names: BTreeSet<u64> = (0..count).map(|number| 2 * number).collect();
        let mut cursor = DirCursor::default();
        for (next, wanted) in (0..).zip(&names) {
            assert_eq!(cursor.number(&name(*wanted), next), Some(next));
        }
        assert!(cursor.first() > 10_000 && cursor.first() < count, "{} forgotten", cursor.first());
        for removed in [10_300, 10_400, 10_499, 10_500, 10_501, 10_900, cursor.first() - 1, cursor.first()] {
            assert!(names.remove(&(2 * removed)));
        }
        names.extend([2 * 10_240 + 1, 2 * 10_499 + 1, 2 * 10_700 + 1, 2 * cursor.first() + 1, 2 * count]);
        for last in [10_239, 10_240, 10_450, 10_499, 10_500, 10_600, 11_000, cursor.first() - 2] {
            let shown = listing(&mut cursor, &names, last);
            let expected: Vec<(u64, u64)> = names
                .range(2 * last + 1..)
                .filter(|name| **name % 2 == 0)
                .map(|name| (name / 2, *name))
                .collect();
            assert_eq!(shown, expected, "after {last}");
        }
    }
}

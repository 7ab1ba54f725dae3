//! Directory listings with cookies that stay good while entries come and go (see `places`).
//!
//! A listing needs no handle: it is in the order of names, and a cookie leads to the name that it goes on after. Going on
//! is one range read of the metadata, so nothing is skipped or repeated, whatever happened to that name.

use super::Vfs;
use super::places::{COOKIE_DOT, COOKIE_DOT_DOT, cookie_of};
use super::request::{DirEntry, DirSink, ReaddirArgs, ReaddirMode};
use crate::meta::{Dentry, Page};
use crate::types::{Attr, ErrorKind, Ino, Kind, Name, Result};

/// Entries that are read at a time.
const PAGE_MIN: usize = 16;
const PAGE_MAX: usize = 1024;
/// Places where pages ended last after which an unknown one is looked for, before all names are.
const STOPS_SEARCHED: usize = 16;

impl Vfs {
    /// Lists entries after a cookie until the sink is full (readdir(3)): `.` and `..` first, then names in order. Every
    /// entry that is there during the whole listing comes exactly once. A removed directory is empty.
    ///
    /// # Errors
    /// `NotDirectory`; `Stale`; `Invalid` for a cookie that no listing of this directory has given out, or whose name was
    /// removed before a hundred thousand others; `Io`.
    pub async fn readdir(&self, args: ReaddirArgs, sink: DirSink<'_>) -> Result<()> {
        let dir = args.dir;
        if args.cookie < COOKIE_DOT_DOT && !self.list_dots(dir, args.cookie, sink).await? {
            return Ok(());
        }
        let mut after = match args.cookie {
            ..=COOKIE_DOT_DOT => None,
            cookie => Some(self.name_at(dir, cookie).await?),
        };
        let limit = args.entries_max.clamp(PAGE_MIN, PAGE_MAX);
        let mut shown = None;
        loop {
            let retired = self.inodes.retired();
            let page = self.page(dir, after.as_ref(), limit, args.mode).await?;
            after = page.items.last().map(|(dentry, _)| dentry.name.clone());
            let mut full = false;
            for (dentry, attr) in page.items {
                let attr = match attr {
                    Some(attr) => self.current(attr, retired).await.ok(),
                    None => None,
                };
                if args.mode == ReaddirMode::Plus && attr.is_none() {
                    // The inode is gone: the name is about to be.
                    continue;
                }
                full = !self.show(&dentry, attr.as_ref(), sink);
                if full {
                    break;
                }
                shown = Some(dentry.name);
            }
            if full || !page.more {
                break;
            }
        }
        if let Some(name) = shown {
            self.places.stopped_at(dir, name);
        }
        Ok(())
    }

    async fn page(
        &self,
        dir: Ino,
        after: Option<&Name>,
        limit: usize,
        mode: ReaddirMode,
    ) -> Result<Page<(Dentry, Option<Attr>)>> {
        match mode {
            ReaddirMode::Plus => self.meta.readdirplus(dir, after, limit).await,
            ReaddirMode::Names => {
                let Page { items, more } = self.meta.readdir(dir, after, limit).await?;
                Ok(Page { items: items.into_iter().map(|dentry| (dentry, None)).collect(), more })
            }
        }
    }

    /// The name in `dir` that `cookie` stands for.
    async fn name_at(&self, dir: Ino, cookie: u64) -> Result<Name> {
        if let Some(name) = self.places.name(dir, cookie) {
            return Ok(name);
        }
        // Who took only a part of a page goes on in the middle of one: after a place that an earlier page ended with.
        for stop in self.places.stops(dir).into_iter().take(STOPS_SEARCHED) {
            let page = self.meta.readdir(dir, Some(&stop), PAGE_MAX).await?;
            if let Some(name) = named(page.items, cookie) {
                self.places.stopped_at(dir, name.clone());
                return Ok(name);
            }
        }
        let mut after = None;
        loop {
            let page = self.meta.readdir(dir, after.as_ref(), PAGE_MAX).await?;
            after = page.items.last().map(|dentry| dentry.name.clone());
            if let Some(name) = named(page.items, cookie) {
                self.places.stopped_at(dir, name.clone());
                return Ok(name);
            }
            if !page.more {
                return Err(ErrorKind::Invalid.into());
            }
        }
    }

    /// Passes an entry on; whether it was taken.
    fn show(&self, dentry: &Dentry, attr: Option<&Attr>, sink: DirSink<'_>) -> bool {
        let entry = DirEntry {
            ino: dentry.ino,
            cookie: cookie_of(&dentry.name),
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
    async fn list_dots(&self, dir: Ino, cookie: u64, sink: DirSink<'_>) -> Result<bool> {
        let (attr, parent) = self.meta.getattr_and_parent(dir).await?;
        if attr.nlink == 0 {
            return Ok(false);
        }
        if cookie == 0 {
            self.accessed_other(&attr).await?;
            let dot =
                DirEntry { ino: dir, cookie: COOKIE_DOT, kind: Kind::Directory, name: b".", attr: None };
            if sink(&dot).is_break() {
                return Ok(false);
            }
        }
        let dot_dot =
            DirEntry { ino: parent, cookie: COOKIE_DOT_DOT, kind: Kind::Directory, name: b"..", attr: None };
        Ok(sink(&dot_dot).is_continue())
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

/// The entry that `cookie` stands for.
fn named(dentries: Vec<Dentry>, cookie: u64) -> Option<Name> {
    dentries.into_iter().map(|dentry| dentry.name).find(|name| cookie_of(name) == cookie)
}

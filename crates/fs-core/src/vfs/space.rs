//! Length and holes: truncate and fallocate.
//!
//! A truncate changes the metadata at once, under the file's `flush_gate`, and then drops what memory holds beyond the
//! new end. Punching and zeroing wait for nothing: they are a batch that holds a hole, ordered like any write.

use std::ops::Range;
use std::sync::atomic::Ordering;

use super::Vfs;
use super::dirty::{Piece, PieceMap};
use super::handle::InodeRef;
use super::inode::{Batch, Fresh, InodeState, SetIds, within};
use super::request::{FallocateMode, Fh};
use crate::data::overlay;
use crate::meta::{FILE_BYTES_MAX, FLAG_APPEND, TruncateArgs};
use crate::types::{
    Attr, CHUNK_BYTES, ChunkIndex, Error, ErrorKind, Ino, Result, SetAttr, SetTime, Slice, Stored,
};

/// Chunks whose slices are read at a time when a file is cut.
const CHUNKS_PAGE: usize = 64;

impl Vfs {
    /// Sets a file's length. Of `set`, only the times and `kill_suid_sgid` are looked at.
    ///
    /// # Errors
    /// `FileTooLarge` above 2^57 bytes; `NotPermitted` where inode flags forbid it; `Stale`.
    pub(super) async fn truncate(&self, inode: &InodeRef, size: u64, set: &SetAttr) -> Result<Attr> {
        if size > FILE_BYTES_MAX {
            return Err(ErrorKind::FileTooLarge.into());
        }
        let _gate = inode.flush_gate.lock().await;
        self.make_sure(inode).await?;
        let (cut, freed) = self.bytes_beyond(inode, size).await?;
        let length = inode.state().length;
        let pending_mtime = inode.state().mtime.filter(|mtime| !mtime.committed).map(|mtime| mtime.time);
        let now = self.now();
        let mtime = match set.mtime {
            Some(SetTime::To(time)) => Some(time),
            Some(SetTime::Now) => Some(now),
            None if size != length => Some(set.ctime.unwrap_or(now)),
            None => pending_mtime,
        };
        let args = TruncateArgs {
            ino: inode.ino,
            size,
            allocated_delta: i64::try_from(freed).map_or(i64::MIN, |freed| -freed),
            cut,
            mtime,
            ctime: set.ctime,
            kill_suid_sgid: set.kill_suid_sgid,
        };
        let truncated = self.meta.truncate(&args).await;
        if truncated.as_ref().is_err_and(Error::unanswered) {
            inode.state().unsure = Some(self.meta.not_answered());
        }
        let mut attr = truncated?;
        let mut state = inode.state();
        state.truncated(size);
        state.mtime = Some(Fresh { time: attr.mtime, committed: true });
        state.atime_due_at = i64::MIN;
        if set.kill_suid_sgid {
            state.set_ids = SetIds::None;
        }
        self.account(&mut state, 0);
        state.refresh(&mut attr);
        Ok(attr)
    }

    /// Reads what the metadata has of a file after a change that was not answered. Under the file's `flush_gate`.
    ///
    /// # Errors
    /// The metadata store still does not answer, or has no room; `Stale` when the session was declared dead.
    pub(super) async fn make_sure(&self, inode: &InodeRef) -> Result<()> {
        let Some(change) = inode.state().unsure else { return Ok(()) };
        self.meta.fence(change).await?;
        let found = match self.meta.getattr(inode.ino).await {
            Err(error) if error.unanswered() => return Err(error),
            found => found,
        };
        let mut state = inode.state();
        state.unsure = None;
        // A file that is gone, or whose record is damaged, is what the next change meets.
        if let Ok(attr) = found {
            state.found(attr.size);
        }
        Ok(())
    }

    /// The hole over what the last chunk has beyond `size`, and the committed data bytes beyond it altogether.
    async fn bytes_beyond(
        &self,
        inode: &InodeRef,
        size: u64,
    ) -> Result<(Option<(ChunkIndex, Vec<Slice>)>, u64)> {
        let committed = inode.state().committed_length;
        if size >= committed {
            return Ok((None, 0));
        }
        let mut freed = 0;
        let mut cut = None;
        let last = ChunkIndex::of(size);
        let mut from = last;
        if size > last.start() {
            let chunk = self.load_chunk(inode, last).await?;
            let beyond = within(last, size)..within(last, last.start() + CHUNK_BYTES);
            freed += chunk.overlay.data_bytes_in(beyond.clone());
            // Slices that lie below others count too: a hole hides them whether they show or not.
            if chunk.groups > 0 {
                let hole =
                    Slice { offset: beyond.start, len: beyond.end - beyond.start, stored: Stored::Hole };
                cut = Some((last, vec![hole]));
            }
            from = ChunkIndex(last.0 + 1);
        }
        loop {
            let page = self.meta.chunks(inode.ino, from, CHUNKS_PAGE).await?;
            freed += page.items.iter().map(|(_, groups)| overlay(groups).data_bytes()).sum::<u64>();
            match page.items.last() {
                Some((index, _)) if page.more => from = ChunkIndex(index.0 + 1),
                _ => return Ok((cut, freed)),
            }
        }
    }

    /// Makes room, holes or zeros (fallocate(2)).
    ///
    /// Room is not set aside: it is checked against the capacity now, and again by the write that fills it.
    ///
    /// # Errors
    /// `BadHandle` unless open for writing; `ReadOnly`; `Invalid` for an empty range; `FileTooLarge`; `NoSpace`; `NotPermitted`
    /// for holes in an append-only file; `NotSupported` for collapse, insert and unshare.
    pub async fn fallocate(
        &self,
        ino: Ino,
        fh: Fh,
        mode: FallocateMode,
        offset: u64,
        len: u64,
    ) -> Result<()> {
        self.check_writable()?;
        let handle = self.handles.file(fh)?;
        if !handle.flags.access.writes() || handle.inode.ino != ino {
            return Err(ErrorKind::BadHandle.into());
        }
        if len == 0 {
            return Err(ErrorKind::Invalid.into());
        }
        let end = offset.checked_add(len).filter(|end| *end <= FILE_BYTES_MAX);
        let range = offset..end.ok_or(ErrorKind::FileTooLarge)?;
        let inode = &handle.inode;
        match mode {
            FallocateMode::Allocate => {
                self.check_room(inode, &range).await?;
                self.change_space(inode, |state| extend(state, range.end));
            }
            FallocateMode::AllocateKeepSize => self.check_room(inode, &range).await?,
            FallocateMode::PunchHole | FallocateMode::ZeroRangeKeepSize => {
                self.check_may_overwrite(ino).await?;
                self.change_space(inode, |state| make_hole(state, range.start..range.end.min(state.length)));
            }
            FallocateMode::ZeroRange => {
                self.check_may_overwrite(ino).await?;
                self.change_space(inode, |state| {
                    make_hole(state, range.start..range.end.min(state.length));
                    extend(state, range.end);
                });
            }
            FallocateMode::CollapseRange | FallocateMode::InsertRange | FallocateMode::UnshareRange => {
                return Err(ErrorKind::NotSupported.into());
            }
        }
        Ok(())
    }

    async fn check_may_overwrite(&self, ino: Ino) -> Result<()> {
        let attr = self.meta.getattr(ino).await?;
        if attr.flags & FLAG_APPEND == 0 { Ok(()) } else { Err(ErrorKind::NotPermitted.into()) }
    }

    async fn check_room(&self, inode: &InodeRef, range: &Range<u64>) -> Result<()> {
        let len = range.end - range.start;
        self.claim_space(inode, range.clone(), len).await?;
        self.reserved_bytes.fetch_sub(len, Ordering::Relaxed);
        Ok(())
    }

    /// Changes a file's contents in memory as a write does.
    pub(super) fn change_space(&self, inode: &InodeRef, change: impl FnOnce(&mut InodeState)) {
        let newly = {
            let mut state = inode.state();
            change(&mut state);
            state.written_at(self.now());
            self.account(&mut state, 0);
            !std::mem::replace(&mut state.listed, true)
        };
        if newly {
            self.flusher.list(inode.clone());
        }
    }
}

/// Makes what is dirty a batch, so that the next one comes after it.
pub(super) fn close_dirty(state: &mut InodeState) {
    if !state.dirty.is_empty() {
        let taken = state.dirty.take();
        let grow_to = state.length;
        state.push_taken(taken, grow_to);
    }
}

fn extend(state: &mut InodeState, end: u64) {
    if end <= state.length {
        return;
    }
    close_dirty(state);
    state.length = end;
    state.push_batch(settled(PieceMap::default(), end));
}

fn make_hole(state: &mut InodeState, range: Range<u64>) {
    if range.is_empty() {
        return;
    }
    state.punch(&range);
    close_dirty(state);
    let mut pieces = PieceMap::default();
    pieces.put(range.start, Piece::Hole(range.end - range.start));
    // What was dirty may have made the file as long as it is, and be gone.
    state.push_batch(settled(pieces, state.length));
}

/// A batch that needs no place.
pub(super) fn settled(pieces: PieceMap, grow_to: u64) -> Batch {
    Batch { id: 0, pieces, grow_to, placed: true, tickets: Vec::new(), pins: Vec::new(), guard: None }
}

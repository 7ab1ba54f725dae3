//! Reading: dirty bytes over batches over committed extents, zeros where nothing is, up to the length.

use std::ops::Range;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;

use bytes::{Bytes, BytesMut};

use super::Vfs;
use super::dirty::{PackedPart, Part};
use super::handle::{FileHandle, InodeRef};
use super::inode::{Chunk, within};
use super::readahead::{Next, Share, Wish};
use super::request::{AccessMode, Fh, Whence};
use crate::data::{Pieces, Pressure, ReadHint, ReadRange, overlay};
use crate::types::{CHUNK_BYTES, ChunkIndex, Error, ErrorKind, Ino, Result};

/// A reader's share of the memory for reading ahead, however many there are: some of them may be idle.
const READAHEAD_SHARE_MIN: u64 = 2 << 20;
/// Times that a reader resolves a file again because its packs were compacted away.
const RESOLVES_MAX: u32 = 3;

impl Vfs {
    /// Reads up to `len` bytes (pread(2)); fewer only at the end of the file. No copy when the bytes lie
    /// in one block, or one fetch brought them.
    ///
    /// # Errors
    /// `BadHandle` unless open for reading; `Io` when bytes could not be fetched or are damaged.
    pub async fn read(&self, ino: Ino, fh: Fh, offset: u64, len: u32) -> Result<Bytes> {
        let handle = self.handles.file(fh)?;
        if handle.inode.ino != ino {
            return Err(ErrorKind::BadHandle.into());
        }
        // A kernel that caches writes reads through descriptors that are open for writing only, to fill pages.
        if handle.flags.access == AccessMode::Write && !self.options.kernel_caches_writes {
            return Err(ErrorKind::BadHandle.into());
        }
        self.accessed_file(&handle.inode).await?;
        let len = u64::from(len);
        let mut reading = pin!(self.read_range(&handle.inode, offset, len, ReadHint::Normal));
        // What is here is taken first: its room serves what comes next.
        let read = futures::poll!(reading.as_mut());
        if let Err(error) = self.read_ahead(&handle, offset, len).await {
            // Whoever comes to those bytes is told.
            tracing::debug!(%ino, %error, "could not read ahead");
        }
        match read {
            Poll::Ready(read) => read,
            Poll::Pending => reading.await,
        }
    }

    /// Notes for the access time that a file was opened to be read, for a caller whose own cache may serve the reads. Tells
    /// whether the access time moved.
    ///
    /// # Errors
    /// `BadHandle`; `Io`.
    pub async fn opened_for_reading(&self, fh: Fh) -> Result<bool> {
        let handle = self.handles.file(fh)?;
        self.accessed_file(&handle.inode).await
    }

    /// Bytes of a file, up to its length.
    pub(super) async fn read_range(
        &self,
        inode: &InodeRef,
        offset: u64,
        len: u64,
        hint: ReadHint,
    ) -> Result<Bytes> {
        let mut resolves = 0;
        loop {
            let parts = self.resolve(inode, offset, len).await?;
            match self.fetch(parts, hint).await {
                Err(error) if error.kind == ErrorKind::Stale => {
                    resolves += 1;
                    if resolves > RESOLVES_MAX {
                        let text = format!("a pack of inode {} at byte {offset} is missing", inode.ino);
                        return Err(Error::new(ErrorKind::Io, text).with_source(error));
                    }
                    inode.state().committed_changed();
                }
                result => return result,
            }
        }
    }

    /// What the bytes of a range are, at one moment; the range ends at the file's length.
    async fn resolve(&self, inode: &InodeRef, offset: u64, len: u64) -> Result<Vec<(u64, Part)>> {
        loop {
            let missing = {
                let state = inode.state();
                let end = offset.saturating_add(len).min(state.length);
                if offset >= end {
                    return Ok(Vec::new());
                }
                match state.parts(offset..end) {
                    Ok(parts) => return Ok(parts),
                    Err(missing) => missing,
                }
            };
            self.load_chunk(inode, missing).await?;
        }
    }

    /// The resolved extents of a committed chunk, from memory or the metadata.
    pub(super) async fn load_chunk(&self, inode: &InodeRef, index: ChunkIndex) -> Result<Arc<Chunk>> {
        loop {
            let version = {
                let state = inode.state();
                if let Some(chunk) = state.chunk(index) {
                    return Ok(chunk);
                }
                if index.start() >= state.committed_length {
                    return Ok(Arc::new(Chunk { overlay: overlay(&[]), groups: 0 }));
                }
                state.version
            };
            let groups = self.meta.chunk(inode.ino, index).await?;
            let chunk = Arc::new(Chunk { overlay: overlay(&groups), groups: groups.len() });
            if inode.state().cache_chunk(index, Arc::clone(&chunk), version) {
                self.compact_if_many(inode, index, &chunk);
                return Ok(chunk);
            }
        }
    }

    /// Brings the bytes of parts that follow each other together.
    async fn fetch(&self, mut parts: Vec<(u64, Part)>, hint: ReadHint) -> Result<Bytes> {
        if parts.len() <= 1 {
            return match parts.pop() {
                None => Ok(Bytes::new()),
                Some((_, Part::Bytes(bytes))) => Ok(bytes),
                Some((_, Part::Packed(PackedPart { run, offset_in_run, len }))) => {
                    self.data.read(&run, offset_in_run, len, hint).await
                }
                Some((_, Part::Zeros(len))) => Ok(BytesMut::zeroed(buffer_len(len)?).freeze()),
            };
        }
        let ranges = packed_ranges(&parts);
        let mut fetched = if ranges.is_empty() {
            Vec::new().into_iter()
        } else {
            self.data.read_many(&ranges, hint).await?.into_iter()
        };
        let mut pieces = Pieces::default();
        for (_, part) in parts {
            match part {
                Part::Zeros(len) => pieces.push(BytesMut::zeroed(buffer_len(len)?).freeze()),
                Part::Bytes(bytes) => pieces.push(bytes),
                Part::Packed(_) => pieces.append(fetched.next().ok_or(ErrorKind::Io)?),
            }
        }
        Ok(pieces.into_bytes())
    }

    /// The window of one of those who are read ahead of now. A quarter of the memory is left for what somebody has asked
    /// for and not taken: without it, who comes last would find none.
    fn readahead_share(&self) -> Share {
        let streams = Arc::strong_count(&self.readers_ahead).saturating_sub(1).max(1);
        let window = self.data.readahead_bytes_max() / 4 * 3 / streams as u64;
        let window_max = match self.memory.pressure() {
            Pressure::Normal => window.max(READAHEAD_SHARE_MIN).min(self.options.readahead_bytes_max),
            Pressure::High => 0,
        };
        Share { window_max, streams }
    }

    /// Starts to fetch what a reader will ask for who goes through the file in some order.
    async fn read_ahead(&self, handle: &FileHandle, offset: u64, len: u64) -> Result<()> {
        let share = self.readahead_share();
        let next = handle.readahead.lock().advance(offset, len, share);
        match next {
            None => Ok(()),
            Some(Next::Window(wish)) => self.fetch_window(handle, &wish).await,
            Some(Next::Slots(slots)) => self.fetch_slots(handle, &slots).await,
        }
    }

    async fn fetch_slots(&self, handle: &FileHandle, slots: &[Range<u64>]) -> Result<()> {
        for slot in slots {
            let parts = self.resolve(&handle.inode, slot.start, slot.end - slot.start).await?;
            let ranges = packed_ranges(&parts);
            if ranges.is_empty() {
                continue;
            }
            handle.read_ahead_of.get_or_init(|| Arc::clone(&self.readers_ahead));
            let Some(held) = self.data.prefetch_held(&ranges) else {
                handle.readahead.lock().strides().refused(slot);
                break;
            };
            handle.readahead.lock().strides().fetched(slot, held);
        }
        Ok(())
    }

    async fn fetch_window(&self, handle: &FileHandle, wish: &Wish) -> Result<()> {
        let view = wish.view();
        let parts = self.resolve(&handle.inode, view.start, view.end - view.start).await?;
        let ends = if parts.is_empty() { Vec::new() } else { wish.fetches(&piece_ends(&parts, view.end)) };
        handle.readahead.lock().asked(wish, &ends);
        let mut start = view.start;
        for end in &ends {
            let parts = self.resolve(&handle.inode, start, end - start).await?;
            let ranges = packed_ranges(&parts);
            if !ranges.is_empty() {
                handle.read_ahead_of.get_or_init(|| Arc::clone(&self.readers_ahead));
                if !self.data.prefetch(&ranges) {
                    handle.readahead.lock().refused(&(start..ends[ends.len() - 1]));
                    break;
                }
            }
            start = *end;
        }
        Ok(())
    }

    /// Data bytes of the committed chunks within `range`.
    pub(super) async fn committed_bytes_in(&self, inode: &InodeRef, range: Range<u64>) -> Result<u64> {
        let committed = inode.state().committed_length;
        let range = range.start..range.end.min(committed);
        let mut bytes = 0;
        let mut offset = range.start;
        while offset < range.end {
            let index = ChunkIndex::of(offset);
            let end = range.end.min(index.start() + CHUNK_BYTES);
            let chunk = self.load_chunk(inode, index).await?;
            bytes += chunk.overlay.data_bytes_in(within(index, offset)..within(index, end));
            offset = end;
        }
        Ok(bytes)
    }

    /// The next data or hole at or after `offset` (lseek(2) with `SEEK_DATA`, `SEEK_HOLE`). Bytes that are written and
    /// not stored yet are data.
    ///
    /// # Errors
    /// `NoSuchAddress` (ENXIO) at or beyond the end, and for data when only a hole follows.
    pub async fn lseek(&self, ino: Ino, fh: Fh, offset: u64, whence: Whence) -> Result<u64> {
        let handle = self.handles.file(fh)?;
        let inode = &handle.inode;
        if inode.ino != ino {
            return Err(ErrorKind::BadHandle.into());
        }
        let length = inode.state().length;
        if offset >= length {
            return Err(ErrorKind::NoSuchAddress.into());
        }
        let mut position = offset;
        while position < length {
            let index = ChunkIndex::of(position);
            let end = (index.start() + CHUNK_BYTES).min(length);
            for (start, part) in self.resolve(inode, position, end - position).await? {
                let is_data = !matches!(part, Part::Zeros(_));
                if is_data == (whence == Whence::Data) {
                    return Ok(start);
                }
            }
            position = self.next_touched(inode, end).await?;
            if whence == Whence::Hole && position > end {
                return Ok(end);
            }
        }
        match whence {
            Whence::Data => Err(ErrorKind::NoSuchAddress.into()),
            Whence::Hole => Ok(length),
        }
    }

    /// Where the next chunk begins that may hold data, at or after the chunk boundary `from`: skips the empty ones of
    /// a sparse file.
    async fn next_touched(&self, inode: &InodeRef, from: u64) -> Result<u64> {
        let uncommitted = {
            let state = inode.state();
            let batches = state.batches.iter().map(|batch| &batch.pieces);
            let next = |pieces: &super::dirty::PieceMap| pieces.next_data(from);
            std::iter::once(&state.dirty).chain(batches).filter_map(next).min()
        };
        let page = self.meta.chunks(inode.ino, ChunkIndex::of(from), 1).await?;
        let committed = page.items.first().map(|(index, _)| index.start());
        let next = [uncommitted, committed].into_iter().flatten().min();
        Ok(next.map_or(u64::MAX, |next| ChunkIndex::of(next.max(from)).start().max(from)))
    }
}

/// What of the parts is in packs.
fn packed_ranges(parts: &[(u64, Part)]) -> Vec<ReadRange> {
    let range = |part: &Part| match part {
        Part::Packed(PackedPart { run, offset_in_run, len }) => {
            Some(ReadRange { run: Arc::clone(run), offset_in_run: *offset_in_run, len: *len })
        }
        Part::Zeros(_) | Part::Bytes(_) => None,
    };
    parts.iter().filter_map(|(_, part)| range(part)).collect()
}

/// Where what one pack has in one piece ends, as far as that is before `view_end`.
fn piece_ends(parts: &[(u64, Part)], view_end: u64) -> Vec<u64> {
    let mut ends = Vec::new();
    let mut pack = None;
    for (start, part) in parts {
        let Part::Packed(packed) = part else { continue };
        if pack.replace(packed.run.pack).is_some_and(|before| before != packed.run.pack) {
            ends.push(*start);
        }
    }
    let end = parts.last().map(|(start, part)| start + part.len());
    ends.extend(end.filter(|end| *end < view_end));
    ends
}

fn buffer_len(bytes: u64) -> Result<usize> {
    usize::try_from(bytes).map_err(|_| ErrorKind::NoMemory.into())
}

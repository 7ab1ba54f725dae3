//! A file being written: large runs go past the page cache.
//!
//! What is written here is synced at once and read back, if at all, through rfs's own cache. Copying it into the page
//! cache first costs most of a large PUT's CPU, so runs of whole blocks are written with `O_DIRECT` from a few buffers
//! that are used again and again; the odd bytes before and after them, and everything where a file system does not know
//! `O_DIRECT`, go the usual way. The two never touch the same block.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::{Buf, Bytes};
use object_store::PutPayload;
use parking_lot::Mutex;

/// What offsets, lengths and addresses of direct writes must be multiples of: the largest usual block.
const BLOCK: usize = 4096;

/// Shorter writes are not worth a second descriptor (256 KiB).
const DIRECT_MIN: usize = 256 << 10;

/// One direct write (1 MiB).
const BUFFER_BYTES: usize = 1 << 20;

/// Buffers kept for the next write.
const BUFFERS_KEPT: usize = 8;

/// Memory whose usable part begins at a multiple of [`BLOCK`].
#[derive(Debug)]
struct Buffer {
    bytes: Vec<u8>,
    begin: usize,
}

impl Buffer {
    fn new() -> Buffer {
        let bytes = vec![0; BUFFER_BYTES + BLOCK];
        let begin = bytes.as_ptr().align_offset(BLOCK);
        Buffer { bytes, begin }
    }

    fn get(&mut self, len: usize) -> &mut [u8] {
        &mut self.bytes[self.begin..self.begin + len]
    }
}

/// The buffers that the writes of one store share.
#[derive(Debug, Default)]
pub(super) struct Buffers(Mutex<Vec<Buffer>>);

impl Buffers {
    fn with<T>(&self, use_it: impl FnOnce(&mut Buffer) -> T) -> T {
        let kept = self.0.lock().pop();
        let mut buffer = kept.unwrap_or_else(Buffer::new);
        let result = use_it(&mut buffer);
        let mut kept = self.0.lock();
        if kept.len() < BUFFERS_KEPT {
            kept.push(buffer);
        }
        result
    }
}

/// A file under its temporary name.
#[derive(Debug)]
pub(super) struct Staged {
    plain: File,
    path: PathBuf,
    /// The second descriptor; `None` until a write is worth it, and where there is no such thing.
    direct: Mutex<Direct>,
    buffers: Arc<Buffers>,
}

#[derive(Debug, Clone, Default)]
enum Direct {
    #[default]
    Untried,
    Open(Arc<File>),
    Impossible,
}

impl Staged {
    pub(super) fn new(plain: File, path: PathBuf, buffers: Arc<Buffers>) -> Staged {
        Staged { plain, path, direct: Mutex::default(), buffers }
    }

    pub(super) fn file(&self) -> &File {
        &self.plain
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Writes `payload` at `offset`. Several may run at once if they do not overlap.
    pub(super) fn write(&self, payload: &PutPayload, offset: u64) -> io::Result<()> {
        let len = payload.content_length();
        if let Some(direct) = self.direct_file(len) {
            return self.write_direct(&direct, Pieces::new(payload), len, offset);
        }
        let mut at = offset;
        for piece in payload {
            self.plain.write_all_at(piece, at)?;
            at += piece.len() as u64;
        }
        Ok(())
    }

    fn write_direct(&self, direct: &File, mut pieces: Pieces, len: usize, offset: u64) -> io::Result<()> {
        self.reserve(offset, len as u64)?;
        self.buffers.with(|buffer| {
            let (mut at, mut left) = (offset, len);
            while left > 0 {
                // `at` modulo a block fits whatever the platform's word is.
                let into_block = usize::try_from(at % BLOCK as u64).unwrap_or(0);
                let (file, count) = if into_block > 0 {
                    (&self.plain, left.min(BLOCK - into_block))
                } else if left < BLOCK {
                    (&self.plain, left)
                } else {
                    (direct, (left - left % BLOCK).min(BUFFER_BYTES))
                };
                let bytes = buffer.get(count);
                pieces.fill(bytes);
                match file.write_all_at(bytes, at) {
                    // The device has larger blocks.
                    Err(e) if e.kind() == io::ErrorKind::InvalidInput => self.plain.write_all_at(bytes, at),
                    result => result,
                }?;
                at += count as u64;
                left -= count;
            }
            Ok(())
        })
    }

    /// Takes the room first: a full disk is known at once, and the file lies in one piece.
    #[cfg(target_os = "linux")]
    fn reserve(&self, offset: u64, len: u64) -> io::Result<()> {
        use rustix::fs::{FallocateFlags, fallocate};
        match fallocate(&self.plain, FallocateFlags::empty(), offset, len) {
            Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS) => Ok(()),
            result => Ok(result?),
        }
    }

    #[cfg(not(target_os = "linux"))]
    #[expect(clippy::unused_self, clippy::unnecessary_wraps, reason = "the same as on Linux")]
    fn reserve(&self, _: u64, _: u64) -> io::Result<()> {
        Ok(())
    }

    #[cfg(target_os = "linux")]
    fn direct_file(&self, len: usize) -> Option<Arc<File>> {
        use std::os::unix::fs::OpenOptionsExt;
        if len < DIRECT_MIN {
            return None;
        }
        let mut direct = self.direct.lock();
        if matches!(*direct, Direct::Untried) {
            let opened = File::options().write(true).custom_flags(libc::O_DIRECT).open(&self.path);
            *direct = opened.map_or(Direct::Impossible, |file| Direct::Open(Arc::new(file)));
        }
        match &*direct {
            Direct::Open(file) => Some(Arc::clone(file)),
            Direct::Untried | Direct::Impossible => None,
        }
    }

    #[cfg(not(target_os = "linux"))]
    #[expect(clippy::unused_self, reason = "the same as on Linux")]
    fn direct_file(&self, _: usize) -> Option<Arc<File>> {
        None
    }
}

/// The bytes of a payload, taken in order.
struct Pieces {
    /// The next last.
    left: Vec<Bytes>,
}

impl Pieces {
    fn new(payload: &PutPayload) -> Pieces {
        let mut left: Vec<Bytes> = payload.iter().cloned().collect();
        left.reverse();
        Pieces { left }
    }

    /// Fills `to`; there must be as much left.
    fn fill(&mut self, to: &mut [u8]) {
        let mut filled = 0;
        while filled < to.len() {
            let piece = self.left.last_mut().expect("asked for no more than the payload's length");
            let count = piece.len().min(to.len() - filled);
            piece.copy_to_slice(&mut to[filled..filled + count]);
            filled += count;
            if piece.is_empty() {
                self.left.pop();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writes runs of odd lengths at odd offsets and reads the file back.
    #[test]
    fn every_byte_arrives() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let plain = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
        let staged = Staged::new(plain, path.clone(), Arc::default());
        let mut expected: Vec<u8> = Vec::new();
        for (run, len) in [DIRECT_MIN, 1, DIRECT_MIN + 4097, 4095, 3 * BUFFER_BYTES + 17, 2 * BUFFER_BYTES, 0]
            .into_iter()
            .enumerate()
        {
            let bytes: Vec<u8> =
                (0..len).map(|i| ((i * 31 + run * 7 + i / 4096) % 251).to_le_bytes()[0]).collect();
            let cut = len / 3;
            let payload: PutPayload =
                [Bytes::copy_from_slice(&bytes[..cut]), Bytes::new(), Bytes::copy_from_slice(&bytes[cut..])]
                    .into_iter()
                    .collect();
            staged.write(&payload, expected.len() as u64).unwrap();
            expected.extend(bytes);
        }
        assert!(std::fs::read(&path).unwrap() == expected);
    }
}

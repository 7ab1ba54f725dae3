//! The disk cache of stored blocks: a log of segment files, the oldest of which makes room.
//!
//! Owns a directory (locked, one process at a time), an index in memory, and one named thread that writes. Offering is
//! never waited for: when the thread cannot keep up, blocks are not cached. Everything read is checked, and what does
//! not fit is forgotten; so a torn write, a changed file or an old directory of another volume cost a fetch, no more.
//! A disk that is full or fails ends the writing with one warning.
//!
//! The files together never exceed the limit. Dropping a segment first moves out what was read from it since, at most
//! a quarter of a segment. Blocks are stored as in their pack:
//!
//! ```text
//! segment header, 32 bytes: "RFSCACH1", volume uuid, XXH3-64 of the 24 bytes before
//! entry header, 32 bytes:   pack id, offset in the pack (4), length (4), XXH3-64 of the block, XXH3-64 of the 24 bytes before
//! the block
//! ```
//!
//! Lock order: the index is a leaf, held for a lookup and never while reading or writing a file (except at its creation
//! and removal).

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

use bytes::Bytes;
use hashbrown::HashMap;
use parking_lot::Mutex;
use uuid::Uuid;
use xxhash_rust::xxh3::xxh3_64;

use super::DiskCacheOptions;
use super::cache::BlockKey;
use crate::types::{Error, ErrorKind, PackId, Result};

const MAGIC: &[u8; 8] = b"RFSCACH1";
const HEADER_LEN: usize = 32;
const HEADER_BYTES: u64 = HEADER_LEN as u64;
const ENTRY_HEADER_BYTES: usize = 32;
const SEGMENT_BYTES_MAX: u64 = 32 << 20;
/// Offers waiting for the thread; more are shed.
const QUEUE_MAX: usize = 256;
/// Bytes waiting for the thread; more are shed.
const QUEUE_BYTES_MAX: u64 = 16 << 20;

/// Stored blocks on a local disk.
#[derive(Debug)]
pub(super) struct DiskCache {
    shared: Arc<Shared>,
    offers: Mutex<Option<SyncSender<Message>>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug)]
struct Shared {
    index: Mutex<Index>,
    queued_bytes: AtomicU64,
    /// Files' bytes, for the statistics.
    bytes: AtomicU64,
    writing: AtomicBool,
}

enum Message {
    Offer(Vec<(BlockKey, Bytes)>),
    #[cfg(test)]
    Sync(SyncSender<()>),
}

#[derive(Debug, Default)]
struct Index {
    places: HashMap<BlockKey, Place>,
    segments: BTreeMap<u64, Segment>,
}

#[derive(Debug, Clone, Copy)]
struct Place {
    segment: u64,
    offset: u64,
    len: u32,
    /// Read since it was written (or moved).
    used: bool,
}

#[derive(Debug)]
struct Segment {
    file: Arc<File>,
    len: u64,
    keys: Vec<BlockKey>,
}

impl DiskCache {
    /// Locks and opens the directory. What is in it becomes readable little by little.
    ///
    /// # Errors
    /// `Busy` when another process uses it, `Io` when it cannot be made or used.
    pub(super) fn open(options: &DiskCacheOptions, volume: Uuid) -> Result<DiskCache> {
        let fail = |what: &str, error: io::Error| {
            Error::new(ErrorKind::Io, format!("{what} the cache directory {}", options.dir.display()))
                .with_source(error)
        };
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&options.dir)
            .map_err(|error| fail("make", error))?;
        let lock = open_options()
            .create(true)
            .truncate(false)
            .open(options.dir.join("LOCK"))
            .map_err(|error| fail("open", error))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let text =
                    format!("the cache directory {} is in use by another process", options.dir.display());
                return Err(Error::new(ErrorKind::Busy, text));
            }
            Err(TryLockError::Error(error)) => return Err(fail("lock", error)),
        }
        let shared = Arc::new(Shared {
            index: Mutex::default(),
            queued_bytes: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            writing: AtomicBool::new(true),
        });
        let mut writer = Writer {
            shared: Arc::clone(&shared),
            dir: options.dir.clone(),
            volume,
            bytes_max: options.bytes_max,
            segment_bytes: (options.bytes_max / 8).min(SEGMENT_BYTES_MAX),
            current: None,
            next_segment: 1,
            total_bytes: 0,
            _lock: lock,
        };
        let (offers, messages) = sync_channel(QUEUE_MAX);
        let thread = std::thread::Builder::new()
            .name("rfs-disk-cache".to_owned())
            .spawn(move || writer.run(&messages))
            .map_err(|error| fail("start the thread of", error))?;
        Ok(DiskCache { shared, offers: Mutex::new(Some(offers)), thread: Mutex::new(Some(thread)) })
    }

    /// The stored bytes of each block that is here and undamaged. Reads files: not for an async thread.
    pub(super) fn get(&self, keys: &[BlockKey]) -> Vec<Option<Bytes>> {
        keys.iter().map(|key| self.get_one(*key)).collect()
    }

    /// Whether any of the blocks is here, without reading.
    pub(super) fn has_any(&self, keys: impl IntoIterator<Item = BlockKey>) -> bool {
        let index = self.shared.index.lock();
        !index.places.is_empty() && keys.into_iter().any(|key| index.places.contains_key(&key))
    }

    /// Offers stored blocks; sheds them when the writing thread is behind. They keep what they are slices of in
    /// memory until they are written.
    pub(super) fn offer(&self, blocks: Vec<(BlockKey, Bytes)>) {
        let bytes: u64 = blocks.iter().map(|(_, stored)| stored.len() as u64).sum();
        if bytes == 0 || !self.shared.writing.load(Ordering::Relaxed) {
            return;
        }
        if self.shared.queued_bytes.fetch_add(bytes, Ordering::Relaxed) + bytes > QUEUE_BYTES_MAX {
            self.shared.queued_bytes.fetch_sub(bytes, Ordering::Relaxed);
            return;
        }
        let sent = self.offers.lock().as_ref().is_some_and(|to| to.try_send(Message::Offer(blocks)).is_ok());
        if !sent {
            self.shared.queued_bytes.fetch_sub(bytes, Ordering::Relaxed);
        }
    }

    /// Drops a block that turned out not to be what its pack has.
    pub(super) fn forget(&self, key: BlockKey) {
        self.shared.index.lock().places.remove(&key);
    }

    /// Bytes of the files.
    pub(super) fn bytes(&self) -> u64 {
        self.shared.bytes.load(Ordering::Relaxed)
    }

    /// Writes what was offered and ends the thread. Waits for it: not for an async thread.
    pub(super) fn close(&self) {
        self.offers.lock().take();
        let thread = self.thread.lock().take();
        if let Some(thread) = thread
            && thread.join().is_err()
        {
            tracing::error!("the disk cache's thread panicked");
        }
    }

    fn get_one(&self, key: BlockKey) -> Option<Bytes> {
        let (file, place) = {
            let mut index = self.shared.index.lock();
            let place = index.places.get_mut(&key)?;
            place.used = true;
            let place = *place;
            (Arc::clone(&index.segments.get(&place.segment)?.file), place)
        };
        let stored = read_entry(&file, key, place);
        if stored.is_none() {
            tracing::debug!(pack = %key.0, offset = key.1, "damaged entry in the disk cache");
            self.forget(key);
        }
        stored
    }

    #[cfg(test)]
    fn sync(&self) {
        let (done, wait) = sync_channel(0);
        let sender = self.offers.lock().clone().expect("open");
        sender.send(Message::Sync(done)).expect("the thread lives");
        wait.recv().expect("the thread answers");
    }
}

/// What the thread owns.
struct Writer {
    shared: Arc<Shared>,
    dir: PathBuf,
    volume: Uuid,
    bytes_max: u64,
    segment_bytes: u64,
    /// The segment that is being written.
    current: Option<u64>,
    next_segment: u64,
    total_bytes: u64,
    _lock: File,
}

impl Writer {
    fn run(&mut self, messages: &Receiver<Message>) {
        if let Err(error) = self.rebuild() {
            self.stop(&error);
        }
        while let Ok(message) = messages.recv() {
            match message {
                Message::Offer(blocks) => {
                    for (key, stored) in blocks {
                        self.write(key, &stored);
                        self.shared.queued_bytes.fetch_sub(stored.len() as u64, Ordering::Relaxed);
                    }
                }
                #[cfg(test)]
                Message::Sync(done) => drop(done.send(())),
            }
        }
    }

    fn write(&mut self, key: BlockKey, stored: &Bytes) {
        let writing = self.shared.writing.load(Ordering::Relaxed);
        if !writing || self.shared.index.lock().places.contains_key(&key) {
            return;
        }
        if let Err(error) = self.append(key, stored) {
            self.stop(&error);
        }
    }

    /// The cache goes on without writing: what is there stays readable.
    fn stop(&self, error: &io::Error) {
        if self.shared.writing.swap(false, Ordering::Relaxed) {
            tracing::warn!(dir = %self.dir.display(), %error, "the disk cache is no longer written to");
        }
    }

    /// Writes one block, and moves what was read from the segments that made room for it as far as there is room.
    fn append(&mut self, key: BlockKey, stored: &[u8]) -> io::Result<()> {
        let entry_bytes = |stored: &[u8]| (ENTRY_HEADER_BYTES + stored.len()) as u64;
        if HEADER_BYTES + entry_bytes(stored) > self.segment_bytes {
            return Ok(());
        }
        let survivors = self.make_room(HEADER_BYTES + entry_bytes(stored))?;
        self.write_entry(key, stored, entry_bytes(stored))?;
        for (key, stored) in survivors {
            if self.total_bytes + HEADER_BYTES + entry_bytes(&stored) > self.bytes_max {
                break;
            }
            self.write_entry(key, &stored, entry_bytes(&stored))?;
        }
        Ok(())
    }

    /// Writes one block; there is room for it and for the header of a new segment.
    fn write_entry(&mut self, key: BlockKey, stored: &[u8], entry_bytes: u64) -> io::Result<()> {
        let (number, file, offset) = self.segment_for(entry_bytes)?;
        let mut bytes = Vec::with_capacity(ENTRY_HEADER_BYTES + stored.len());
        bytes.extend_from_slice(&entry_header(key, stored));
        bytes.extend_from_slice(stored);
        if let Err(error) = file.write_all_at(&bytes, offset) {
            // The limit counts what is on disk; nothing is written after this.
            let _ = file.set_len(offset);
            return Err(error);
        }
        self.add_bytes(entry_bytes);
        let len = u32::try_from(stored.len()).map_err(io::Error::other)?;
        let mut index = self.shared.index.lock();
        if let Some(segment) = index.segments.get_mut(&number) {
            segment.len += entry_bytes;
            segment.keys.push(key);
            index.places.insert(key, Place { segment: number, offset, len, used: false });
        }
        Ok(())
    }

    /// The segment that takes `bytes` more, its file and its end: the current one, or a new one when that is full.
    fn segment_for(&mut self, bytes: u64) -> io::Result<(u64, Arc<File>, u64)> {
        if let Some(number) = self.current
            && let Some(segment) = self.shared.index.lock().segments.get(&number)
            && segment.len + bytes <= self.segment_bytes
        {
            return Ok((number, Arc::clone(&segment.file), segment.len));
        }
        let number = self.next_segment;
        let file = Arc::new(open_options().create_new(true).open(segment_path(&self.dir, number))?);
        file.write_all_at(&segment_header(self.volume), 0)?;
        self.next_segment += 1;
        self.current = Some(number);
        self.add_bytes(HEADER_BYTES);
        let segment = Segment { file: Arc::clone(&file), len: HEADER_BYTES, keys: Vec::new() };
        self.shared.index.lock().segments.insert(number, segment);
        Ok((number, file, HEADER_BYTES))
    }

    /// Drops the oldest segments until `bytes` more fit; returns what was read from them.
    fn make_room(&mut self, bytes: u64) -> io::Result<Vec<(BlockKey, Bytes)>> {
        let mut survivors = Vec::new();
        while self.total_bytes + bytes > self.bytes_max {
            let oldest = self.shared.index.lock().segments.first_key_value().map(|(number, _)| *number);
            let Some(oldest) = oldest else { break };
            survivors = self.drop_segment(oldest)?;
        }
        Ok(survivors)
    }

    /// Drops a segment; returns what was read from it, up to a quarter of a segment.
    fn drop_segment(&mut self, number: u64) -> io::Result<Vec<(BlockKey, Bytes)>> {
        if self.current == Some(number) {
            self.current = None;
        }
        let mut used = Vec::new();
        let segment = {
            let mut index = self.shared.index.lock();
            let Some(segment) = index.segments.remove(&number) else { return Ok(Vec::new()) };
            for key in &segment.keys {
                if index.places.get(key).is_some_and(|place| place.segment == number)
                    && let Some(place) = index.places.remove(key)
                    && place.used
                {
                    used.push((*key, place));
                }
            }
            segment
        };
        let survivors = read_survivors(&segment.file, &used, self.segment_bytes / 4);
        fs::remove_file(segment_path(&self.dir, number))?;
        self.total_bytes -= segment.len;
        self.shared.bytes.store(self.total_bytes, Ordering::Relaxed);
        Ok(survivors)
    }

    fn add_bytes(&mut self, bytes: u64) {
        self.total_bytes += bytes;
        self.shared.bytes.store(self.total_bytes, Ordering::Relaxed);
    }

    /// Reads the entry headers of all segments, oldest first. Files that are not ours to read are removed.
    fn rebuild(&mut self) -> io::Result<()> {
        let mut numbers = Vec::new();
        for entry in fs::read_dir(&self.dir)? {
            let name = entry?.file_name();
            if let Some(number) = segment_number(&name) {
                numbers.push(number);
            }
        }
        numbers.sort_unstable();
        for number in numbers {
            self.next_segment = self.next_segment.max(number.saturating_add(1));
            if let Err(error) = self.rebuild_segment(number) {
                tracing::debug!(number, %error, "dropped a segment of the disk cache");
                fs::remove_file(segment_path(&self.dir, number))?;
            }
        }
        self.make_room(0).map(drop)
    }

    fn rebuild_segment(&mut self, number: u64) -> io::Result<()> {
        let file = open_options().open(segment_path(&self.dir, number))?;
        let file_len = file.metadata()?.len();
        let mut header = [0; HEADER_LEN];
        file.read_exact_at(&mut header, 0)?;
        if header != segment_header(self.volume) {
            return Err(io::Error::other("another volume's or another version's"));
        }
        let mut found = Vec::new();
        let mut offset = HEADER_BYTES;
        while let Some((key, len)) = scan_entry(&file, offset, file_len) {
            found.push((key, Place { segment: number, offset, len, used: false }));
            offset += ENTRY_HEADER_BYTES as u64 + u64::from(len);
        }
        if offset < file_len {
            file.set_len(offset)?;
        }
        self.add_bytes(offset);
        let keys = found.iter().map(|(key, _)| *key).collect();
        let mut index = self.shared.index.lock();
        index.segments.insert(number, Segment { file: Arc::new(file), len: offset, keys });
        index.places.extend(found);
        Ok(())
    }
}

fn open_options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.read(true).write(true).mode(0o600);
    options
}

fn segment_path(dir: &Path, number: u64) -> PathBuf {
    dir.join(format!("segment-{number:016x}"))
}

fn segment_number(name: &std::ffi::OsStr) -> Option<u64> {
    let digits = name.to_str()?.strip_prefix("segment-").filter(|digits| digits.len() == 16)?;
    u64::from_str_radix(digits, 16).ok()
}

fn segment_header(volume: Uuid) -> [u8; HEADER_LEN] {
    let mut header = [0; HEADER_LEN];
    header[..8].copy_from_slice(MAGIC);
    header[8..24].copy_from_slice(volume.as_bytes());
    let sum = xxh3_64(&header[..24]);
    header[24..].copy_from_slice(&sum.to_le_bytes());
    header
}

fn entry_header(key: BlockKey, stored: &[u8]) -> [u8; ENTRY_HEADER_BYTES] {
    let mut header = [0; ENTRY_HEADER_BYTES];
    let len = u32::try_from(stored.len()).expect("a block is no longer than a chunk");
    header[..8].copy_from_slice(&key.0.0.to_le_bytes());
    header[8..12].copy_from_slice(&key.1.to_le_bytes());
    header[12..16].copy_from_slice(&len.to_le_bytes());
    header[16..24].copy_from_slice(&xxh3_64(stored).to_le_bytes());
    let sum = xxh3_64(&header[..24]);
    header[24..].copy_from_slice(&sum.to_le_bytes());
    header
}

/// The entry at `offset`, if its header is sound and its block lies within the file.
fn scan_entry(file: &File, offset: u64, file_len: u64) -> Option<(BlockKey, u32)> {
    let mut header = [0; ENTRY_HEADER_BYTES];
    file.read_exact_at(&mut header, offset).ok()?;
    let (fields, sum) = header.split_at(24);
    if sum != xxh3_64(fields).to_le_bytes() {
        return None;
    }
    let (pack, rest) = fields.split_first_chunk()?;
    let (pack_offset, rest) = rest.split_first_chunk()?;
    let (len, _) = rest.split_first_chunk()?;
    let len = u32::from_le_bytes(*len);
    let end = offset + ENTRY_HEADER_BYTES as u64 + u64::from(len);
    (end <= file_len).then_some(((PackId(u64::from_le_bytes(*pack)), u32::from_le_bytes(*pack_offset)), len))
}

/// The block, if the entry is that block's and undamaged.
fn read_entry(file: &File, key: BlockKey, place: Place) -> Option<Bytes> {
    let mut bytes = vec![0; ENTRY_HEADER_BYTES + place.len as usize];
    file.read_exact_at(&mut bytes, place.offset).ok()?;
    let bytes = Bytes::from(bytes);
    let stored = bytes.slice(ENTRY_HEADER_BYTES..);
    (bytes[..ENTRY_HEADER_BYTES] == entry_header(key, &stored)).then_some(stored)
}

fn read_survivors(file: &File, used: &[(BlockKey, Place)], bytes_max: u64) -> Vec<(BlockKey, Bytes)> {
    let mut left = bytes_max;
    let mut survivors = Vec::new();
    // The last written first: what does not fit is the oldest.
    for (key, place) in used.iter().rev() {
        let bytes = ENTRY_HEADER_BYTES as u64 + u64::from(place.len);
        if bytes > left {
            break;
        }
        left -= bytes;
        survivors.extend(read_entry(file, *key, *place).map(|stored| (*key, stored)));
    }
    survivors.reverse();
    survivors
}

#[cfg(test)]
mod tests;

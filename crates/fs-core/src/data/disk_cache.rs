//! The disk cache of stored blocks: a log of segment files, the oldest of which makes room.
//!
//! Owns a directory (locked, one process at a time), an index in memory, and one named thread that writes. Offering is
//! never waited for: when the thread cannot keep up, blocks are not cached. Everything read is checked, and what does
//! not fit is forgotten; so a torn write, a changed file or an old directory of another volume cost a fetch, no more.
//! A disk that fails ends the writing with one warning.
//!
//! The files together never exceed the limit, and the last tenth of the disk is left to others: they get back what they
//! need of it, the oldest segments first. Dropping a segment first moves out what was read from it since, at most
//! a quarter of a segment. A segment is a header of 32 bytes ("RFSCACH2", volume uuid, XXH3-64 of the 24 bytes before) and
//! [entries](entry), whose blocks are stored as in their pack and can be read in part.
//!
//! What the kernel has in memory is read on the caller's thread. Where it has not, the disk is read in *windows*: a disk
//! brings a MiB in about the time of sixteen single blocks, and what was written together is often read together. As
//! that is not always so, windows are paid for with hits: whatever is read, they at most double what the disk does, and
//! read half a GiB more.
//!
//! Lock order: the index and what is queued are leaves; the index is held for a lookup and never while reading or writing
//! a file (except at its creation and removal).

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io;
use std::mem;
use std::ops::Range;
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use bytes::Bytes;
use hashbrown::HashMap;
use parking_lot::Mutex;
use uuid::Uuid;
use xxhash_rust::xxh3::xxh3_64;

use super::cache::BlockKey;
use super::{Admission, DiskCacheOptions};
use crate::types::{Error, ErrorKind, Result};

mod entry;

const MAGIC: &[u8; 8] = b"RFSCACH2";
const HEADER_LEN: usize = 32;
const HEADER_BYTES: u64 = HEADER_LEN as u64;
const SEGMENT_BYTES_MAX: u64 = 32 << 20;
const LOCK_NAME: &str = "LOCK";
/// Blocks of a cache that nobody asked for: an entry of the index takes some 70 bytes of memory.
const SCATTERED_BLOCKS_MAX: usize = 512 << 10;
/// Messages to the thread; one is enough to say that there are blocks.
const MESSAGES_MAX: usize = 2;
/// Bytes waiting for the thread; more are shed.
const QUEUE_BYTES_MAX: u64 = 24 << 20;
/// Blocks come one by one, the thread takes them together.
const GATHER: Duration = Duration::from_millis(if cfg!(test) { 0 } else { 10 });
/// So many are written at once: somebody may come for them soon.
const GATHERED_BYTES: u64 = 1 << 20;
/// One part in so many of the disk is left to others.
const RESERVED_PART: u64 = 10;
/// How often others are looked after while nothing is written.
const LOOK_EVERY: Duration = Duration::from_secs(10);
/// Bytes written between two looks at how full the disk is.
const LOOK_BYTES: u64 = 1 << 20;
/// What is read together where the kernel has nothing in memory.
const WINDOW_BYTES: u64 = 1 << 20;
/// A window takes a disk as long as so many single blocks: so many hits pay for one.
const WINDOW_HITS: u32 = 16;
/// Windows that may be read before they have been paid for: half a GiB.
const WINDOWS_UNPAID: u32 = 512;

/// Stored blocks on a local disk.
#[derive(Debug)]
pub(super) struct DiskCache {
    dir: PathBuf,
    shared: Arc<Shared>,
    messages: Mutex<Option<SyncSender<Message>>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug)]
struct Shared {
    index: Mutex<Index>,
    queued: Mutex<Queued>,
    /// Hits that pay for windows.
    credit: AtomicU32,
    /// Files' bytes, for the statistics.
    bytes: AtomicU64,
    writing: AtomicBool,
    closing: AtomicBool,
}

/// Blocks that wait for the thread.
#[derive(Debug, Default)]
struct Queued {
    blocks: Vec<(BlockKey, Bytes)>,
    /// Of these and of those that the thread is writing.
    bytes: u64,
}

enum Message {
    Queued,
    #[cfg(test)]
    Sync(SyncSender<()>),
}

/// What can be said of a block without waiting.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Now {
    Here(Bytes),
    Absent,
    /// The disk has to be asked.
    OnDisk,
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
        DiskCache::open_on(options, volume, disk_of)
    }

    fn open_on(
        options: &DiskCacheOptions,
        volume: Uuid,
        disk: fn(&Path) -> io::Result<Disk>,
    ) -> Result<DiskCache> {
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
            .open(options.dir.join(LOCK_NAME))
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
            queued: Mutex::default(),
            credit: AtomicU32::new(WINDOWS_UNPAID * WINDOW_HITS),
            bytes: AtomicU64::new(0),
            writing: AtomicBool::new(true),
            closing: AtomicBool::new(false),
        });
        let mut writer = Writer {
            shared: Arc::clone(&shared),
            dir: options.dir.clone(),
            volume,
            bytes_max: options.bytes_max,
            blocks_max: match options.admission {
                Admission::All => usize::MAX,
                Admission::Scattered => SCATTERED_BLOCKS_MAX,
            },
            segment_bytes: (options.bytes_max / 8).min(SEGMENT_BYTES_MAX),
            current: None,
            next_segment: 1,
            total_bytes: 0,
            unlooked_bytes: u64::MAX,
            disk,
            _lock: lock,
        };
        let (sender, messages) = sync_channel(MESSAGES_MAX);
        let thread = std::thread::Builder::new()
            .name("rfs-disk-cache".to_owned())
            .spawn(move || writer.run(&messages))
            .map_err(|error| fail("start the thread of", error))?;
        Ok(DiskCache {
            dir: options.dir.clone(),
            shared,
            messages: Mutex::new(Some(sender)),
            thread: Mutex::new(Some(thread)),
        })
    }

    pub(super) fn dir(&self) -> &Path {
        &self.dir
    }

    /// The stored bytes at `range` of a block, whose XXH3-64 is `checksum`, if the kernel has them in memory.
    pub(super) fn get_now(&self, key: BlockKey, checksum: u64, range: Range<u32>) -> Now {
        let Some((file, place)) = self.find(key) else { return Now::Absent };
        if range.end > place.len {
            return Now::Absent;
        }
        let read = |bytes: &mut [u8], offset| read_in_memory(&file, bytes, offset);
        match read_range(key, place, Some(checksum), range, read) {
            Read::Sound(stored) => {
                self.shared.earn();
                Now::Here(stored)
            }
            Read::Damaged => {
                self.drop_damaged(key);
                Now::Absent
            }
            Read::Not => Now::OnDisk,
        }
    }

    /// The stored bytes of each block, given with its XXH3-64, that is here and undamaged. Reads files: not for an
    /// async thread.
    pub(super) fn get(&self, blocks: &[(BlockKey, u64)]) -> Vec<Option<Bytes>> {
        blocks.iter().map(|(key, checksum)| self.get_one(*key, *checksum)).collect()
    }

    /// Whether any of the blocks is here, without reading.
    pub(super) fn has_any(&self, keys: impl IntoIterator<Item = BlockKey>) -> bool {
        let index = self.shared.index.lock();
        !index.places.is_empty() && keys.into_iter().any(|key| index.places.contains_key(&key))
    }

    /// Offers stored blocks; sheds them when the writing thread is behind. They keep what they are slices of in
    /// memory until they are written.
    pub(super) fn offer(&self, blocks: impl IntoIterator<Item = (BlockKey, Bytes)>) {
        if !self.shared.writing.load(Ordering::Relaxed) {
            return;
        }
        let mut queued = self.shared.queued.lock();
        let was_empty = queued.blocks.is_empty();
        for (key, stored) in blocks {
            let bytes = queued.bytes + stored.len() as u64;
            if bytes <= QUEUE_BYTES_MAX {
                queued.bytes = bytes;
                queued.blocks.push((key, stored));
            } else {
                tracing::debug!(pack = %key.0, offset = key.1, "not cached: too much waits to be written");
            }
        }
        let wake = was_empty && !queued.blocks.is_empty();
        drop(queued);
        if wake && let Some(messages) = &*self.messages.lock() {
            // Full: it is going to look anyway.
            let _ = messages.try_send(Message::Queued);
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
        self.shared.closing.store(true, Ordering::Relaxed);
        self.messages.lock().take();
        let thread = self.thread.lock().take();
        if let Some(thread) = thread
            && thread.join().is_err()
        {
            tracing::error!("the disk cache's thread panicked");
        }
    }

    fn get_one(&self, key: BlockKey, checksum: u64) -> Option<Bytes> {
        let (file, place) = self.find(key)?;
        if self.shared.pay_for_window() {
            read_ahead(&file, place.offset - place.offset % WINDOW_BYTES);
        }
        match read_whole(&file, key, place, Some(checksum)) {
            Read::Sound(stored) => Some(stored),
            // A file that is too short is damaged as well.
            Read::Damaged | Read::Not => {
                self.drop_damaged(key);
                None
            }
        }
    }

    fn find(&self, key: BlockKey) -> Option<(Arc<File>, Place)> {
        let mut index = self.shared.index.lock();
        let place = index.places.get_mut(&key)?;
        place.used = true;
        let place = *place;
        Some((Arc::clone(&index.segments.get(&place.segment)?.file), place))
    }

    fn drop_damaged(&self, key: BlockKey) {
        tracing::debug!(pack = %key.0, offset = key.1, "damaged entry in the disk cache");
        self.forget(key);
    }

    #[cfg(test)]
    fn sync(&self) {
        let (done, wait) = sync_channel(0);
        let sender = self.messages.lock().clone().expect("open");
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
    blocks_max: usize,
    segment_bytes: u64,
    /// The segment that is being written.
    current: Option<u64>,
    next_segment: u64,
    total_bytes: u64,
    /// Written since the last look at how full the disk is.
    unlooked_bytes: u64,
    /// How full the disk of a directory is.
    disk: fn(&Path) -> io::Result<Disk>,
    _lock: File,
}

/// How full a disk is, in bytes as df(1) counts: what it keeps for itself or for root is not among them.
#[derive(Debug, Clone, Copy)]
struct Disk {
    size: u64,
    free: u64,
}

impl Shared {
    /// A block was in the kernel's memory.
    fn earn(&self) {
        // What is lost when several threads do it at once does not matter.
        let credit = self.credit.load(Ordering::Relaxed);
        if credit < WINDOWS_UNPAID * WINDOW_HITS {
            self.credit.store(credit + 1, Ordering::Relaxed);
        }
    }

    fn pay_for_window(&self) -> bool {
        let pay = |credit: u32| credit.checked_sub(WINDOW_HITS);
        self.credit.fetch_update(Ordering::Relaxed, Ordering::Relaxed, pay).is_ok()
    }
}

impl Writer {
    fn run(&mut self, messages: &Receiver<Message>) {
        if let Err(error) = self.rebuild() {
            self.stop(&error);
        }
        loop {
            match messages.recv_timeout(LOOK_EVERY) {
                Ok(Message::Queued) => {
                    if self.shared.queued.lock().bytes < GATHERED_BYTES {
                        gather();
                    }
                    self.write_queued();
                }
                #[cfg(test)]
                Ok(Message::Sync(done)) => {
                    self.write_queued();
                    let _ = done.send(());
                }
                Err(RecvTimeoutError::Timeout) => {
                    if let Err(error) = self.leave_reserve() {
                        self.stop(&error);
                    }
                }
                Err(RecvTimeoutError::Disconnected) => {
                    self.write_queued();
                    return;
                }
            }
        }
    }

    fn write_queued(&mut self) {
        let blocks = mem::take(&mut self.shared.queued.lock().blocks);
        for (key, stored) in blocks {
            self.write(key, &stored);
            self.shared.queued.lock().bytes -= stored.len() as u64;
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
        let entry = entry::encode(key, stored);
        let bytes = entry.len() as u64;
        if HEADER_BYTES + bytes > self.segment_bytes {
            return Ok(());
        }
        self.unlooked_bytes = self.unlooked_bytes.saturating_add(bytes);
        if self.unlooked_bytes > LOOK_BYTES && !self.leave_reserve()? {
            return Ok(());
        }
        let survivors = self.make_room(HEADER_BYTES + bytes)?;
        self.write_entry(key, &entry, stored.len())?;
        for (key, stored) in survivors {
            let entry = entry::encode(key, &stored);
            if self.total_bytes + HEADER_BYTES + entry.len() as u64 > self.bytes_max {
                break;
            }
            self.write_entry(key, &entry, stored.len())?;
        }
        Ok(())
    }

    /// Writes one block's entry; there is room for it and for the header of a new segment.
    fn write_entry(&mut self, key: BlockKey, entry: &[u8], block_len: usize) -> io::Result<()> {
        let entry_bytes = entry.len() as u64;
        let (number, file, offset) = self.segment_for(entry_bytes)?;
        if let Err(error) = file.write_all_at(entry, offset) {
            // The limit counts what is on disk; nothing is written after this.
            let _ = file.set_len(offset);
            return Err(error);
        }
        self.add_bytes(entry_bytes);
        let len = u32::try_from(block_len).map_err(io::Error::other)?;
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
        loop {
            let oldest = {
                let index = self.shared.index.lock();
                if self.total_bytes + bytes <= self.bytes_max && index.places.len() < self.blocks_max {
                    break;
                }
                index.segments.first_key_value().map(|(number, _)| *number)
            };
            let Some(oldest) = oldest else { break };
            survivors = self.drop_segment(oldest)?;
        }
        Ok(survivors)
    }

    /// Gives back what others need of the disk, the oldest segments first. Whether there is more than they need.
    fn leave_reserve(&mut self) -> io::Result<bool> {
        loop {
            let disk = (self.disk)(&self.dir)?;
            if disk.free > disk.size / RESERVED_PART + LOOK_BYTES {
                self.unlooked_bytes = 0;
                return Ok(true);
            }
            let oldest = self.shared.index.lock().segments.first_key_value().map(|(number, _)| *number);
            let Some(oldest) = oldest else { return Ok(false) };
            self.drop_segment(oldest)?;
        }
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
            if self.shared.closing.load(Ordering::Relaxed) {
                // What has not been read does not count for the limit.
                self.shared.writing.store(false, Ordering::Relaxed);
                return Ok(());
            }
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
        while let Some((key, len)) = entry::scan(&file, offset, file_len) {
            found.push((key, Place { segment: number, offset, len, used: false }));
            offset += entry::entry_bytes(len);
        }
        if offset < file_len {
            file.set_len(offset)?;
        }
        let keys = found.iter().map(|(key, _)| *key).collect();
        {
            let mut index = self.shared.index.lock();
            index.segments.insert(number, Segment { file: Arc::new(file), len: offset, keys });
            index.places.extend(found);
        }
        // What is counted can be read.
        self.add_bytes(offset);
        Ok(())
    }
}

#[expect(
    clippy::disallowed_methods,
    reason = "there is no event: more blocks may come, and need not be waited for"
)]
fn gather() {
    std::thread::sleep(GATHER);
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

/// What reading stored bytes of a block came to.
enum Read {
    Sound(Bytes),
    /// They are another's, or changed.
    Damaged,
    Not,
}

/// The bytes at `range` of a block, by `read`, which fills a buffer from an offset on and says whether it could.
fn read_range(
    key: BlockKey,
    place: Place,
    checksum: Option<u64>,
    range: Range<u32>,
    read: impl Fn(&mut [u8], u64) -> bool,
) -> Read {
    let pages = entry::pages_of(&range, place.len);
    let mut head = vec![0; entry::head_bytes(place.len)];
    let mut bytes = vec![0; pages.len()];
    let block_at = place.offset + head.len() as u64;
    if !read(&mut head, place.offset) || !read(&mut bytes, block_at + u64::from(pages.start)) {
        return Read::Not;
    }
    if !entry::is_sound(&head, (key, place.len, checksum), &pages, &bytes) {
        return Read::Damaged;
    }
    let from = (range.start - pages.start) as usize;
    Read::Sound(Bytes::from(bytes).slice(from..from + range.len()))
}

/// All of a block. Waits for the disk.
fn read_whole(file: &File, key: BlockKey, place: Place, checksum: Option<u64>) -> Read {
    let read = |bytes: &mut [u8], offset| file.read_exact_at(bytes, offset).is_ok();
    read_range(key, place, checksum, 0..place.len, read)
}

/// Fills `bytes` from the file if the kernel has all of them in memory.
#[cfg(target_os = "linux")]
fn read_in_memory(file: &File, bytes: &mut [u8], offset: u64) -> bool {
    use rustix::io::{IoSliceMut, ReadWriteFlags, preadv2};
    let len = bytes.len();
    // An error is also the answer of a filesystem that cannot tell.
    let read = preadv2(file, &mut [IoSliceMut::new(bytes)], offset, ReadWriteFlags::NOWAIT);
    read.is_ok_and(|read| read == len)
}

#[cfg(not(target_os = "linux"))]
fn read_in_memory(_: &File, _: &mut [u8], _: u64) -> bool {
    false
}

/// Tells the kernel to read a window.
#[cfg(target_os = "linux")]
fn read_ahead(file: &File, offset: u64) {
    let advice = rustix::fs::Advice::WillNeed;
    // Only advice: the block is read in any case.
    let _ = rustix::fs::fadvise(file, offset, std::num::NonZeroU64::new(WINDOW_BYTES), advice);
}

#[cfg(not(target_os = "linux"))]
fn read_ahead(_: &File, _: u64) {}

fn disk_of(dir: &Path) -> io::Result<Disk> {
    let disk = rustix::fs::statvfs(dir)?;
    let bytes = |blocks: u64| blocks.saturating_mul(disk.f_frsize);
    let used = disk.f_blocks.saturating_sub(disk.f_bfree);
    Ok(Disk { size: bytes(used.saturating_add(disk.f_bavail)), free: bytes(disk.f_bavail) })
}

/// Deletes a cache that no process uses, and its directory unless there is something else in it.
///
/// # Errors
/// Those of the operating system; that there is none is no error.
pub fn remove_disk_cache(dir: &Path) -> io::Result<()> {
    let entries = match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    for entry in entries {
        let entry = entry?;
        let name = entry.file_name();
        if name == LOCK_NAME || segment_number(&name).is_some() {
            fs::remove_file(entry.path())?;
        }
    }
    match fs::remove_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => Ok(()),
        removed => removed,
    }
}

fn read_survivors(file: &File, used: &[(BlockKey, Place)], bytes_max: u64) -> Vec<(BlockKey, Bytes)> {
    let mut left = bytes_max;
    let mut survivors = Vec::new();
    // The last written first: what does not fit is the oldest.
    for (key, place) in used.iter().rev() {
        let bytes = entry::entry_bytes(place.len);
        if bytes > left {
            break;
        }
        left -= bytes;
        if let Read::Sound(stored) = read_whole(file, *key, *place, None) {
            survivors.push((*key, stored));
        }
    }
    survivors.reverse();
    survivors
}

#[cfg(test)]
mod tests;

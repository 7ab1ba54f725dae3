//! Every value of the metadata store, byte by byte.
//!
//! Values are little-endian and begin with a format byte and the epoch they were written in (0 until snapshots exist).
//! Exceptions: counters that are changed by `add` are a bare i64, and the request slot is a bare pair of numbers that
//! dies with its session. Decoding checks lengths and tags and never panics; what does not decode is damage (`Io`).

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use bytes::{Buf, BufMut, Bytes};
use uuid::Uuid;

use crate::types::{
    Block, CHUNK_BYTES, Error, ErrorKind, Ino, Kind, PackId, PackedRun, Result, Slice, Stored, Timestamp,
};

use super::pack::PackState;
use super::volume::{Codec, Volume, VolumeLimits};

/// Format of all values that this version writes.
const FORMAT: u8 = 1;
/// The epoch until snapshots exist.
const EPOCH: u32 = 0;
const HEADER_BYTES: usize = 5;
const TIME_BYTES: usize = 12;

/// Largest value that is written for a slice group; the store refuses 100 kB.
pub(super) const GROUP_BYTES_MAX: usize = 90_000;

fn damaged(what: &str) -> Error {
    Error::new(ErrorKind::Io, format!("damaged metadata: {what} record does not decode"))
}

fn put_header(out: &mut impl BufMut) {
    out.put_u8(FORMAT);
    out.put_u32_le(EPOCH);
}

fn put_time(out: &mut impl BufMut, time: Timestamp) {
    out.put_i64_le(time.secs);
    out.put_u32_le(time.nanos);
}

/// Reads fields in order; every read checks that the bytes are there.
struct Reader<'a> {
    rest: &'a [u8],
    what: &'static str,
}

macro_rules! read_number {
    ($name:ident, $type:ty, $get:ident) => {
        fn $name(&mut self) -> Result<$type> {
            if self.rest.len() < size_of::<$type>() {
                return Err(damaged(self.what));
            }
            Ok(self.rest.$get())
        }
    };
}

impl<'a> Reader<'a> {
    /// Checks the header.
    fn new(value: &'a [u8], what: &'static str) -> Result<Reader<'a>> {
        let mut reader = Reader { rest: value, what };
        let format = reader.u8()?;
        if format != FORMAT {
            let text = format!("{what} record has format {format}: written by a newer version, or damaged");
            return Err(Error::new(ErrorKind::Io, text));
        }
        reader.u32()?;
        Ok(reader)
    }

    read_number!(u8, u8, get_u8);
    read_number!(u16, u16, get_u16_le);
    read_number!(u32, u32, get_u32_le);
    read_number!(u64, u64, get_u64_le);
    read_number!(i64, i64, get_i64_le);

    fn time(&mut self) -> Result<Timestamp> {
        let time = Timestamp { secs: self.i64()?, nanos: self.u32()? };
        if time.nanos >= 1_000_000_000 {
            return Err(damaged(self.what));
        }
        Ok(time)
    }

    fn bytes(&mut self, len: usize) -> Result<&'a [u8]> {
        if self.rest.len() < len {
            return Err(damaged(self.what));
        }
        let (bytes, rest) = self.rest.split_at(len);
        self.rest = rest;
        Ok(bytes)
    }

    fn kind(&mut self) -> Result<Kind> {
        kind_from_byte(self.u8()?).ok_or_else(|| damaged(self.what))
    }

    fn text(&mut self) -> Result<String> {
        let len = usize::from(self.u16()?);
        String::from_utf8(self.bytes(len)?.to_vec()).map_err(|_| damaged(self.what))
    }

    /// Checks that nothing is left.
    fn end(self) -> Result<()> {
        if self.rest.is_empty() { Ok(()) } else { Err(damaged(self.what)) }
    }
}

fn kind_byte(kind: Kind) -> u8 {
    match kind {
        Kind::File => 1,
        Kind::Directory => 2,
        Kind::Symlink => 3,
        Kind::Fifo => 4,
        Kind::Socket => 5,
        Kind::CharDevice => 6,
        Kind::BlockDevice => 7,
    }
}

fn kind_from_byte(byte: u8) -> Option<Kind> {
    Some(match byte {
        1 => Kind::File,
        2 => Kind::Directory,
        3 => Kind::Symlink,
        4 => Kind::Fifo,
        5 => Kind::Socket,
        6 => Kind::CharDevice,
        7 => Kind::BlockDevice,
        _ => return None,
    })
}

/// A counter that is changed by `add`.
pub(super) fn decode_counter(value: &[u8]) -> Result<i64> {
    let bytes = value.try_into().map_err(|_| damaged("counter"))?;
    Ok(i64::from_le_bytes(bytes))
}

/// `I ino 0`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Inode {
    pub(super) kind: Kind,
    /// Permission, set-id and sticky bits.
    pub(super) mode: u16,
    /// Names; of a directory 2 while it has a name (its subdirectories are counted apart), 0 afterwards.
    pub(super) nlink: u32,
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) rdev: u32,
    pub(super) flags: u32,
    pub(super) generation: u32,
    /// Directories: where `..` leads. Others: the directory they were made in.
    pub(super) parent: Ino,
    pub(super) crtime: Timestamp,
}

impl Inode {
    const BYTES: usize = HEADER_BYTES + 1 + 2 + 6 * 4 + 8 + TIME_BYTES;

    pub(super) fn encode(&self) -> [u8; Self::BYTES] {
        let mut value = [0; Self::BYTES];
        let mut out = value.as_mut_slice();
        put_header(&mut out);
        out.put_u8(kind_byte(self.kind));
        out.put_u16_le(self.mode);
        out.put_u32_le(self.nlink);
        out.put_u32_le(self.uid);
        out.put_u32_le(self.gid);
        out.put_u32_le(self.rdev);
        out.put_u32_le(self.flags);
        out.put_u32_le(self.generation);
        out.put_u64_le(self.parent.0);
        put_time(&mut out, self.crtime);
        value
    }

    pub(super) fn decode(value: &[u8]) -> Result<Inode> {
        let mut reader = Reader::new(value, "inode")?;
        let inode = Inode {
            kind: reader.kind()?,
            mode: reader.u16()?,
            nlink: reader.u32()?,
            uid: reader.u32()?,
            gid: reader.u32()?,
            rdev: reader.u32()?,
            flags: reader.u32()?,
            generation: reader.u32()?,
            parent: Ino(reader.u64()?),
            crtime: reader.time()?,
        };
        reader.end()?;
        Ok(inode)
    }
}

/// `I ino 1`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Times {
    pub(super) mtime: Timestamp,
    pub(super) ctime: Timestamp,
}

impl Times {
    const BYTES: usize = HEADER_BYTES + 2 * TIME_BYTES;

    /// Both at `now`.
    pub(super) fn both(now: Timestamp) -> Times {
        Times { mtime: now, ctime: now }
    }

    pub(super) fn encode(&self) -> [u8; Self::BYTES] {
        let mut value = [0; Self::BYTES];
        let mut out = value.as_mut_slice();
        put_header(&mut out);
        put_time(&mut out, self.mtime);
        put_time(&mut out, self.ctime);
        value
    }

    pub(super) fn decode(value: &[u8]) -> Result<Times> {
        let mut reader = Reader::new(value, "times")?;
        let times = Times { mtime: reader.time()?, ctime: reader.time()? };
        reader.end()?;
        Ok(times)
    }
}

/// `I ino 2`. The length comes last, so that `max` compares it first.
pub(super) fn encode_length(length: u64) -> [u8; HEADER_BYTES + 8] {
    let mut value = [0; HEADER_BYTES + 8];
    let mut out = value.as_mut_slice();
    put_header(&mut out);
    out.put_u64_le(length);
    value
}

pub(super) fn decode_length(value: &[u8]) -> Result<u64> {
    let mut reader = Reader::new(value, "length")?;
    let length = reader.u64()?;
    reader.end()?;
    Ok(length)
}

/// `I ino 5`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Truncation {
    /// How often the file was made shorter: commits read it, so that they conflict with truncate.
    pub(super) count: u64,
    /// Chunks from this one on lie beyond the end and are still to be removed.
    pub(super) trim_from: Option<u64>,
}

impl Truncation {
    const BYTES: usize = HEADER_BYTES + 8 + 1 + 8;

    pub(super) fn encode(&self) -> [u8; Self::BYTES] {
        let mut value = [0; Self::BYTES];
        let mut out = value.as_mut_slice();
        put_header(&mut out);
        out.put_u64_le(self.count);
        out.put_u8(u8::from(self.trim_from.is_some()));
        out.put_u64_le(self.trim_from.unwrap_or(0));
        value
    }

    pub(super) fn decode(value: &[u8]) -> Result<Truncation> {
        let mut reader = Reader::new(value, "truncation")?;
        let count = reader.u64()?;
        let pending = reader.u8()? != 0;
        let from = reader.u64()?;
        reader.end()?;
        Ok(Truncation { count, trim_from: pending.then_some(from) })
    }
}

/// `I ino 7`.
pub(super) fn encode_atime(atime: Timestamp) -> [u8; HEADER_BYTES + TIME_BYTES] {
    let mut value = [0; HEADER_BYTES + TIME_BYTES];
    let mut out = value.as_mut_slice();
    put_header(&mut out);
    put_time(&mut out, atime);
    value
}

pub(super) fn decode_atime(value: &[u8]) -> Result<Timestamp> {
    let mut reader = Reader::new(value, "atime")?;
    let atime = reader.time()?;
    reader.end()?;
    Ok(atime)
}

/// `I ino 8` and `X ino name`: bytes after the header.
pub(super) fn encode_bytes(bytes: &[u8]) -> Vec<u8> {
    let mut value = Vec::with_capacity(HEADER_BYTES + bytes.len());
    put_header(&mut value);
    value.extend_from_slice(bytes);
    value
}

pub(super) fn decode_bytes(value: &Bytes) -> Result<Bytes> {
    Reader::new(value, "bytes")?;
    Ok(value.slice(HEADER_BYTES..))
}

/// `D dir name`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct DentryRecord {
    pub(super) ino: Ino,
    pub(super) kind: Kind,
}

impl DentryRecord {
    const BYTES: usize = HEADER_BYTES + 1 + 8;

    pub(super) fn encode(&self) -> [u8; Self::BYTES] {
        let mut value = [0; Self::BYTES];
        let mut out = value.as_mut_slice();
        put_header(&mut out);
        out.put_u8(kind_byte(self.kind));
        out.put_u64_le(self.ino.0);
        value
    }

    pub(super) fn decode(value: &[u8]) -> Result<DentryRecord> {
        let mut reader = Reader::new(value, "dentry")?;
        let kind = reader.kind()?;
        let ino = Ino(reader.u64()?);
        reader.end()?;
        Ok(DentryRecord { ino, kind })
    }
}

const SLICE_HOLE: u8 = 0;
const SLICE_INLINE: u8 = 1;
const SLICE_PACKED: u8 = 2;
const BLOCK_RAW: u32 = 1 << 31;

/// `C …`: the slices as values, each at most [`GROUP_BYTES_MAX`], in order.
///
/// # Errors
/// `ArgumentTooLarge` when one slice alone does not fit, or a count or length exceeds its field.
pub(super) fn encode_groups(slices: &[Slice]) -> Result<Vec<Vec<u8>>> {
    let mut groups = Vec::with_capacity(1);
    let mut open: Option<(Vec<u8>, u16)> = None;
    for slice in slices {
        let encoded = encode_slice(slice)?;
        let fits = open.as_ref().is_some_and(|(value, count)| {
            value.len() + encoded.len() <= GROUP_BYTES_MAX && *count < u16::MAX
        });
        if !fits {
            groups.extend(open.take().map(close_group));
        }
        let (value, count) = open.get_or_insert_with(|| {
            let mut value = Vec::with_capacity(HEADER_BYTES + 2 + encoded.len());
            put_header(&mut value);
            value.put_u16_le(0);
            (value, 0)
        });
        value.extend_from_slice(&encoded);
        *count += 1;
    }
    groups.extend(open.map(close_group));
    Ok(groups)
}

fn close_group((mut value, count): (Vec<u8>, u16)) -> Vec<u8> {
    value[HEADER_BYTES..HEADER_BYTES + 2].copy_from_slice(&count.to_le_bytes());
    value
}

fn encode_slice(slice: &Slice) -> Result<Vec<u8>> {
    let too_large = || Error::new(ErrorKind::ArgumentTooLarge, "slice does not fit a record");
    let mut out = Vec::with_capacity(64);
    out.put_u32_le(slice.offset);
    out.put_u32_le(slice.len);
    match &slice.stored {
        Stored::Hole => out.put_u8(SLICE_HOLE),
        Stored::Inline(bytes) => {
            if u32::try_from(bytes.len()).ok() != Some(slice.len) {
                return Err(Error::new(ErrorKind::Invalid, "inline slice whose length is not its bytes'"));
            }
            out.put_u8(SLICE_INLINE);
            out.put_slice(bytes);
        }
        Stored::Packed(run) => {
            out.put_u8(SLICE_PACKED);
            out.put_u64_le(run.pack.0);
            out.put_u32_le(run.pack_offset);
            out.put_u32_le(run.block_bytes);
            out.put_u32_le(run.plain_len);
            out.put_u32_le(run.skip);
            out.put_u16_le(u16::try_from(run.blocks.len()).map_err(|_| too_large())?);
            for block in &run.blocks {
                if block.stored_len & BLOCK_RAW != 0 {
                    return Err(too_large());
                }
                out.put_u32_le(block.stored_len | if block.raw { BLOCK_RAW } else { 0 });
                out.put_u64_le(block.checksum);
            }
        }
    }
    if out.len() + HEADER_BYTES + 2 > GROUP_BYTES_MAX {
        return Err(too_large());
    }
    Ok(out)
}

/// The slices of a `C …` value; inline bytes share its memory.
pub(super) fn decode_group(value: &Bytes) -> Result<Vec<Slice>> {
    let mut reader = Reader::new(value, "slice")?;
    let count = reader.u16()?;
    let mut slices = Vec::with_capacity(usize::from(count));
    for _ in 0..count {
        let offset = reader.u32()?;
        let len = reader.u32()?;
        if u64::from(offset) + u64::from(len) > CHUNK_BYTES {
            return Err(damaged("slice"));
        }
        let stored = match reader.u8()? {
            SLICE_HOLE => Stored::Hole,
            SLICE_INLINE => {
                let len = usize::try_from(len).map_err(|_| damaged("slice"))?;
                Stored::Inline(value.slice_ref(reader.bytes(len)?))
            }
            SLICE_PACKED => Stored::Packed(decode_run(&mut reader, len)?),
            _ => return Err(damaged("slice")),
        };
        slices.push(Slice { offset, len, stored });
    }
    reader.end()?;
    Ok(slices)
}

/// A run of which a slice uses `len` bytes. What reads it relies on its numbers to fit each other.
fn decode_run(reader: &mut Reader<'_>, len: u32) -> Result<PackedRun> {
    let pack = PackId(reader.u64()?);
    let pack_offset = reader.u32()?;
    let block_bytes = reader.u32()?;
    let plain_len = reader.u32()?;
    let skip = reader.u32()?;
    let count = reader.u16()?;
    let fits = block_bytes > 0
        && u64::from(plain_len) <= CHUNK_BYTES
        && u64::from(skip) + u64::from(len) <= u64::from(plain_len)
        && u32::from(count) == plain_len.div_ceil(block_bytes);
    if !fits {
        return Err(damaged("slice"));
    }
    let mut end = u64::from(pack_offset);
    let mut blocks = Vec::with_capacity(usize::from(count));
    for _ in 0..count {
        let stored_len = reader.u32()?;
        let checksum = reader.u64()?;
        let raw = stored_len & BLOCK_RAW != 0;
        let stored_len = stored_len & !BLOCK_RAW;
        end += u64::from(stored_len);
        blocks.push(Block { stored_len, raw, checksum });
    }
    if u32::try_from(end).is_err() {
        return Err(damaged("slice"));
    }
    Ok(PackedRun { pack, pack_offset, block_bytes, plain_len, skip, blocks })
}

/// `P pack`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PackRecord {
    pub(super) bytes: u64,
    pub(super) state: PackState,
}

impl PackRecord {
    /// As one little-endian number, the state on top: `max` keeps the record that says most.
    pub(super) fn encode(self) -> [u8; HEADER_BYTES + 9] {
        let mut value = [0; HEADER_BYTES + 9];
        let mut out = value.as_mut_slice();
        put_header(&mut out);
        out.put_u64_le(self.bytes);
        out.put_u8(match self.state {
            PackState::Staged => 1,
            PackState::Stored => 2,
        });
        value
    }

    pub(super) fn decode(value: &[u8]) -> Result<PackRecord> {
        let mut reader = Reader::new(value, "pack")?;
        let bytes = reader.u64()?;
        let state = match reader.rest {
            [1] => PackState::Staged,
            // Records had no state before there was staging.
            [2] | [] => PackState::Stored,
            _ => return Err(damaged("pack")),
        };
        Ok(PackRecord { bytes, state })
    }
}

/// `O ino session`: the header only.
pub(super) fn encode_orphan() -> [u8; HEADER_BYTES] {
    let mut value = [0; HEADER_BYTES];
    put_header(&mut value.as_mut_slice());
    value
}

/// `A name`: the next number.
pub(super) fn encode_next(next: u64) -> [u8; HEADER_BYTES + 8] {
    encode_length(next)
}

pub(super) fn decode_next(value: &[u8]) -> Result<u64> {
    let mut reader = Reader::new(value, "allocator")?;
    let next = reader.u64()?;
    reader.end()?;
    Ok(next)
}

/// `S 0 session`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SessionRecord {
    pub(super) hostname: String,
    pub(super) pid: u32,
    pub(super) mountpoint: String,
    pub(super) started: Timestamp,
}

impl SessionRecord {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(64);
        put_header(&mut out);
        out.put_u32_le(self.pid);
        put_time(&mut out, self.started);
        put_text(&mut out, &self.hostname);
        put_text(&mut out, &self.mountpoint);
        out
    }

    pub(super) fn decode(value: &[u8]) -> Result<SessionRecord> {
        let mut reader = Reader::new(value, "session")?;
        let pid = reader.u32()?;
        let started = reader.time()?;
        let hostname = reader.text()?;
        let mountpoint = reader.text()?;
        reader.end()?;
        Ok(SessionRecord { hostname, pid, mountpoint, started })
    }
}

/// `S 1 session`.
pub(super) fn encode_heartbeat(now: Timestamp) -> [u8; HEADER_BYTES + TIME_BYTES] {
    encode_atime(now)
}

/// `S 2 session slot`: which request, and which run of it, was committed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SlotRecord {
    pub(super) request: u64,
    pub(super) attempt: u32,
}

impl SlotRecord {
    pub(super) fn encode(self) -> [u8; 12] {
        let mut value = [0; 12];
        let mut out = value.as_mut_slice();
        out.put_u64_le(self.request);
        out.put_u32_le(self.attempt);
        value
    }

    pub(super) fn decode(value: &[u8]) -> Result<SlotRecord> {
        let mut reader = Reader { rest: value, what: "request slot" };
        let slot = SlotRecord { request: reader.u64()?, attempt: reader.u32()? };
        reader.end()?;
        Ok(slot)
    }
}

/// Longest text of a record.
const TEXT_BYTES_MAX: usize = 4096;

/// Text, cut at [`TEXT_BYTES_MAX`] bytes.
fn put_text(out: &mut Vec<u8>, text: &str) {
    let mut len = text.len().min(TEXT_BYTES_MAX);
    while !text.is_char_boundary(len) {
        len -= 1;
    }
    out.put_u16_le(u16::try_from(len).expect("TEXT_BYTES_MAX fits u16"));
    out.put_slice(&text.as_bytes()[..len]);
}

/// `Z`.
pub(super) fn encode_volume(volume: &Volume) -> Vec<u8> {
    let mut out = Vec::with_capacity(128);
    put_header(&mut out);
    out.put_slice(volume.uuid.as_bytes());
    out.put_u64_le(volume.features_required);
    out.put_u32_le(volume.client_version_min);
    out.put_u32_le(volume.client_version_max);
    out.put_u32_le(volume.block_bytes);
    out.put_u8(match volume.codec {
        Codec::None => 0,
        Codec::Lz4 => 1,
    });
    put_limit(&mut out, volume.limits.capacity);
    put_limit(&mut out, volume.limits.inodes);
    put_time(&mut out, volume.created);
    put_text(&mut out, &volume.store_url);
    out
}

/// Reads what every version can read: the fields up to the client versions come first.
pub(super) fn decode_volume(value: &[u8]) -> Result<Volume> {
    let mut reader = Reader::new(value, "volume")?;
    let uuid = Uuid::from_slice(reader.bytes(16)?).map_err(|_| damaged("volume"))?;
    let features_required = reader.u64()?;
    let client_version_min = reader.u32()?;
    let client_version_max = reader.u32()?;
    super::volume::check_version(features_required, client_version_min, client_version_max)?;
    let block_bytes = reader.u32()?;
    let codec = match reader.u8()? {
        0 => Codec::None,
        1 => Codec::Lz4,
        _ => return Err(damaged("volume")),
    };
    let limits = VolumeLimits { capacity: get_limit(&mut reader)?, inodes: get_limit(&mut reader)? };
    let created = reader.time()?;
    let store_url = reader.text()?;
    reader.end()?;
    Ok(Volume {
        uuid,
        features_required,
        client_version_min,
        client_version_max,
        block_bytes,
        codec,
        limits,
        created,
        store_url,
    })
}

/// `Zs`.
pub(super) fn encode_staging(dir: &Path) -> Vec<u8> {
    let mut out = Vec::new();
    put_header(&mut out);
    out.put_slice(dir.as_os_str().as_bytes());
    out
}

pub(super) fn decode_staging(value: &[u8]) -> Result<PathBuf> {
    let reader = Reader::new(value, "staging directory")?;
    Ok(OsStr::from_bytes(reader.rest).into())
}

fn put_limit(out: &mut Vec<u8>, limit: Option<u64>) {
    out.put_u64_le(limit.unwrap_or(u64::MAX));
}

fn get_limit(reader: &mut Reader<'_>) -> Result<Option<u64>> {
    let limit = reader.u64()?;
    Ok((limit != u64::MAX).then_some(limit))
}

/// A key that does not parse is damage.
pub(super) fn parsed<T>(parsed: Option<T>, what: &'static str) -> Result<T> {
    parsed.ok_or_else(|| damaged(what))
}

#[cfg(test)]
mod tests;

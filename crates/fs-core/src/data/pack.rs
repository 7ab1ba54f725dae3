//! The format of a pack: header, blocks, footer.
//!
//! Pure: bytes in, bytes out. All integers are little-endian.
//!
//! ```text
//! header, 64 bytes
//!   0   8  "RFSPACK1"                 the last character is the format's version
//!   8  16  volume uuid
//!  24   8  pack id
//!  32  24  zeros
//!  56   8  XXH3-64 of the 56 bytes before
//! blocks, one run after another
//! footer: for each run
//!       8  inode        8  chunk          4  offset in the chunk
//!       4  plain bytes  4  plain bytes a block
//!       4  where the first block is in the pack                 4  number of blocks
//!      12  for each block: stored length (top bit: stored raw), XXH3-64 of the stored bytes
//! trailer, 40 bytes
//!   0   8  pack id
//!   8   4  bytes of the footer        12   4  number of runs
//!  16   8  bytes of the whole pack
//!  24   8  XXH3-64 of the footer and the 24 bytes before
//!  32   8  "RFSPEND1"
//! ```
//!
//! Reading believes nothing: lengths are checked against what is there before anything is allocated.

use uuid::Uuid;
use xxhash_rust::xxh3::xxh3_64;

use super::FooterEntry;
use crate::types::{Block, CHUNK_BYTES, ChunkIndex, Ino, PackId, PackedRun};

/// Bytes before the first block.
pub(super) const HEADER_BYTES: u32 = 64;
/// Bytes after the footer's entries.
pub(super) const TRAILER_BYTES: u32 = 40;

/// A footer that says it is larger is damaged: ten times what the largest pack of small blocks needs.
const FOOTER_BYTES_MAX: u64 = 256 << 20;

const HEADER_MAGIC: &[u8; 8] = b"RFSPACK1";
const TRAILER_MAGIC: &[u8; 8] = b"RFSPEND1";
const RUN_BYTES: usize = 36;
const BLOCK_BYTES: usize = 12;
const RAW_BIT: u32 = 1 << 31;

/// Why a pack cannot be understood.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum BadPack {
    #[error("it is too short")]
    TooShort,
    #[error("it is no pack, or one of a later version")]
    Magic,
    #[error("it belongs to another volume ({0})")]
    Volume(Uuid),
    #[error("it says that it is pack {0}")]
    Id(PackId),
    #[error("the checksum of its {0} does not fit")]
    Checksum(&'static str),
    #[error("its footer contradicts itself: {0}")]
    Footer(&'static str),
}

/// The first bytes of a pack.
pub(super) fn header(volume: Uuid, pack: PackId) -> [u8; HEADER_BYTES as usize] {
    let mut header = [0; HEADER_BYTES as usize];
    header[..8].copy_from_slice(HEADER_MAGIC);
    header[8..24].copy_from_slice(volume.as_bytes());
    header[24..32].copy_from_slice(&pack.0.to_le_bytes());
    let sum = xxh3_64(&header[..56]);
    header[56..].copy_from_slice(&sum.to_le_bytes());
    header
}

/// Checks the first bytes of a pack.
pub(super) fn check_header(bytes: &[u8], volume: Uuid, pack: PackId) -> Result<(), BadPack> {
    let mut fields = Fields(bytes);
    let magic = fields.take(8)?;
    let found_volume = Uuid::from_bytes(fields.array()?);
    let found_pack = PackId(fields.u64()?);
    fields.take(24)?;
    let sum = fields.u64()?;
    if magic != HEADER_MAGIC {
        return Err(BadPack::Magic);
    }
    if sum != xxh3_64(&bytes[..56]) {
        return Err(BadPack::Checksum("header"));
    }
    if found_volume != volume {
        return Err(BadPack::Volume(found_volume));
    }
    if found_pack != pack {
        return Err(BadPack::Id(found_pack));
    }
    Ok(())
}

/// A footer that grows with its pack.
#[derive(Debug, Default)]
pub(super) struct FooterWriter {
    entries: Vec<u8>,
    runs: u32,
}

impl FooterWriter {
    /// Bytes that a run of `blocks` blocks adds.
    pub(super) fn entry_bytes(blocks: usize) -> usize {
        RUN_BYTES + BLOCK_BYTES * blocks
    }

    /// Bytes that footer and trailer would take now.
    pub(super) fn len(&self) -> usize {
        self.entries.len() + TRAILER_BYTES as usize
    }

    /// Names one more run.
    pub(super) fn push(&mut self, ino: Ino, chunk: ChunkIndex, offset: u32, run: &PackedRun) {
        let to = &mut self.entries;
        to.extend_from_slice(&ino.0.to_le_bytes());
        to.extend_from_slice(&chunk.0.to_le_bytes());
        let blocks = u32::try_from(run.blocks.len()).expect("a chunk has fewer than 2^32 blocks");
        for field in [offset, run.plain_len, run.block_bytes, run.pack_offset, blocks] {
            to.extend_from_slice(&field.to_le_bytes());
        }
        for block in &run.blocks {
            let raw = if block.raw { RAW_BIT } else { 0 };
            to.extend_from_slice(&(block.stored_len | raw).to_le_bytes());
            to.extend_from_slice(&block.checksum.to_le_bytes());
        }
        self.runs += 1;
    }

    /// The entries so far, as the footer will hold them, and how many.
    pub(super) fn entries(&self) -> (&[u8], u32) {
        (&self.entries, self.runs)
    }

    /// Appends entries that another writer made of the same pack.
    pub(super) fn extend(&mut self, entries: &[u8], runs: u32) {
        self.entries.extend_from_slice(entries);
        self.runs += runs;
    }

    /// Footer and trailer of `pack`, whose header and blocks are `len` bytes.
    pub(super) fn finish(&self, pack: PackId, len: u32) -> Vec<u8> {
        let entries_len = self.entries.len();
        let mut bytes = Vec::with_capacity(self.len());
        bytes.extend_from_slice(&self.entries);
        let whole = u64::from(len) + entries_len as u64 + u64::from(TRAILER_BYTES);
        bytes.extend_from_slice(&pack.0.to_le_bytes());
        let entries_len =
            u32::try_from(entries_len).expect("a pack's runs fill far less than 4 GiB of footer");
        bytes.extend_from_slice(&entries_len.to_le_bytes());
        bytes.extend_from_slice(&self.runs.to_le_bytes());
        bytes.extend_from_slice(&whole.to_le_bytes());
        let sum = xxh3_64(&bytes);
        bytes.extend_from_slice(&sum.to_le_bytes());
        bytes.extend_from_slice(TRAILER_MAGIC);
        bytes
    }
}

/// How many bytes from the end footer and trailer are, according to the last bytes of an object of `object_len`
/// bytes. Never more than the object has besides its header, nor than 256 MiB.
pub(super) fn footer_len(tail: &[u8], object_len: u64) -> Result<usize, BadPack> {
    let at = tail.len().checked_sub(TRAILER_BYTES as usize).ok_or(BadPack::TooShort)?;
    let mut fields = Fields(&tail[at..]);
    fields.take(8)?;
    let entries_len = u64::from(fields.u32()?);
    fields.take(4)?;
    let whole = fields.u64()?;
    fields.take(8)?;
    if fields.take(8)? != TRAILER_MAGIC {
        return Err(BadPack::Magic);
    }
    if whole != object_len {
        return Err(BadPack::Footer("length of the pack"));
    }
    let len = entries_len + u64::from(TRAILER_BYTES);
    if len + u64::from(HEADER_BYTES) > object_len || len > FOOTER_BYTES_MAX {
        return Err(BadPack::Footer("its own length"));
    }
    usize::try_from(len).map_err(|_| BadPack::Footer("its own length"))
}

/// The runs that footer and trailer (exactly [`footer_len`] bytes) name.
pub(super) fn read_footer(bytes: &[u8], pack: PackId, object_len: u64) -> Result<Vec<FooterEntry>, BadPack> {
    if footer_len(bytes, object_len)? != bytes.len() {
        return Err(BadPack::TooShort);
    }
    let entries_len = bytes.len() - TRAILER_BYTES as usize;
    let mut trailer = Fields(&bytes[entries_len..]);
    let found = PackId(trailer.u64()?);
    trailer.take(4)?;
    let runs = trailer.u32()?;
    trailer.take(8)?;
    if trailer.u64()? != xxh3_64(&bytes[..entries_len + 24]) {
        return Err(BadPack::Checksum("footer"));
    }
    if found != pack {
        return Err(BadPack::Id(found));
    }
    read_entries(&bytes[..entries_len], runs, pack, object_len - bytes.len() as u64)
}

/// The `runs` runs that `bytes` name, all of which end at `blocks_end` at most.
pub(super) fn read_entries(
    bytes: &[u8],
    runs: u32,
    pack: PackId,
    blocks_end: u64,
) -> Result<Vec<FooterEntry>, BadPack> {
    let mut fields = Fields(bytes);
    let mut entries = Vec::new();
    while !fields.0.is_empty() {
        entries.push(read_entry(&mut fields, pack, blocks_end)?);
    }
    if entries.len() as u64 != u64::from(runs) {
        return Err(BadPack::Footer("number of runs"));
    }
    Ok(entries)
}

fn read_entry(fields: &mut Fields<'_>, pack: PackId, blocks_end: u64) -> Result<FooterEntry, BadPack> {
    let ino = Ino(fields.u64()?);
    let chunk = ChunkIndex(fields.u64()?);
    let offset = fields.u32()?;
    let plain_len = fields.u32()?;
    let block_bytes = fields.u32()?;
    let pack_offset = fields.u32()?;
    let count = fields.u32()?;
    if u64::from(offset) + u64::from(plain_len) > CHUNK_BYTES || plain_len == 0 || block_bytes == 0 {
        return Err(BadPack::Footer("place of a run"));
    }
    if count != plain_len.div_ceil(block_bytes) {
        return Err(BadPack::Footer("number of blocks"));
    }
    let bytes = fields.take((count as usize).checked_mul(BLOCK_BYTES).ok_or(BadPack::TooShort)?)?;
    let mut fields = Fields(bytes);
    let mut blocks = Vec::with_capacity(bytes.len() / BLOCK_BYTES);
    let mut end = u64::from(pack_offset);
    while !fields.0.is_empty() {
        let len = fields.u32()?;
        let block = Block { stored_len: len & !RAW_BIT, raw: len & RAW_BIT != 0, checksum: fields.u64()? };
        end += u64::from(block.stored_len);
        blocks.push(block);
    }
    if pack_offset < HEADER_BYTES || end > blocks_end {
        return Err(BadPack::Footer("place of the blocks"));
    }
    let run = PackedRun { pack, pack_offset, block_bytes, plain_len, skip: 0, blocks };
    Ok(FooterEntry { ino, chunk, offset, run })
}

/// Bytes that are read from the front.
pub(super) struct Fields<'a>(pub(super) &'a [u8]);

impl<'a> Fields<'a> {
    pub(super) fn take(&mut self, len: usize) -> Result<&'a [u8], BadPack> {
        let (head, rest) = self.0.split_at_checked(len).ok_or(BadPack::TooShort)?;
        self.0 = rest;
        Ok(head)
    }

    pub(super) fn array<const N: usize>(&mut self) -> Result<[u8; N], BadPack> {
        let (head, rest) = self.0.split_first_chunk().ok_or(BadPack::TooShort)?;
        self.0 = rest;
        Ok(*head)
    }

    pub(super) fn u32(&mut self) -> Result<u32, BadPack> {
        self.array().map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self) -> Result<u64, BadPack> {
        self.array().map(u64::from_le_bytes)
    }
}

#[cfg(test)]
mod tests;

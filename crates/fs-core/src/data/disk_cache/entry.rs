//! One entry of a segment: a block as in its pack, and sums by which any few of its pages can be checked.
//!
//! Pure but for [`scan`]. Layout, all numbers little-endian:
//!
//! ```text
//! header, 40 bytes: pack id (8), offset in the pack (4), length (4), XXH3-64 of the block, XXH3-64 of the sums,
//!                   XXH3-64 of the 32 bytes before
//! sums:             XXH3-64 of each page, which is 4 KiB of the block (the last one may be shorter)
//! the block
//! ```

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use xxhash_rust::xxh3::xxh3_64;

use super::super::cache::BlockKey;
use crate::types::{CHUNK_BYTES, PackId};

const PAGE_BYTES: u32 = 4 << 10;
const FIELDS_BYTES: usize = 32;
const SUM_BYTES: usize = 8;
const HEADER_BYTES: usize = FIELDS_BYTES + SUM_BYTES;

/// Bytes before a block of `len` bytes.
pub(super) fn head_bytes(len: u32) -> usize {
    HEADER_BYTES + len.div_ceil(PAGE_BYTES) as usize * SUM_BYTES
}

/// Bytes of the entry of a block of `len` bytes.
pub(super) fn entry_bytes(len: u32) -> u64 {
    head_bytes(len) as u64 + u64::from(len)
}

/// What is written for a block.
pub(super) fn encode(key: BlockKey, block: &[u8]) -> Vec<u8> {
    let len = u32::try_from(block.len()).expect("a block is no longer than a chunk");
    let mut entry = Vec::with_capacity(head_bytes(len) + block.len());
    entry.extend_from_slice(&[0; HEADER_BYTES]);
    for page in block.chunks(PAGE_BYTES as usize) {
        entry.extend_from_slice(&xxh3_64(page).to_le_bytes());
    }
    let header = header(key, len, xxh3_64(block), xxh3_64(&entry[HEADER_BYTES..]));
    entry[..HEADER_BYTES].copy_from_slice(&header);
    entry.extend_from_slice(block);
    entry
}

pub(super) fn header(key: BlockKey, len: u32, checksum: u64, sums_checksum: u64) -> [u8; HEADER_BYTES] {
    let mut header = [0; HEADER_BYTES];
    header[..8].copy_from_slice(&key.0.0.to_le_bytes());
    header[8..12].copy_from_slice(&key.1.to_le_bytes());
    header[12..16].copy_from_slice(&len.to_le_bytes());
    header[16..24].copy_from_slice(&checksum.to_le_bytes());
    header[24..32].copy_from_slice(&sums_checksum.to_le_bytes());
    let sum = xxh3_64(&header[..FIELDS_BYTES]);
    header[FIELDS_BYTES..].copy_from_slice(&sum.to_le_bytes());
    header
}

/// The block and its length, if the header at `offset` is sound and the entry lies within the file.
pub(super) fn scan(file: &File, offset: u64, file_len: u64) -> Option<(BlockKey, u32)> {
    let mut header = [0; HEADER_BYTES];
    file.read_exact_at(&mut header, offset).ok()?;
    let (fields, sum) = header.split_at(FIELDS_BYTES);
    if sum != xxh3_64(fields).to_le_bytes() {
        return None;
    }
    let (pack, rest) = fields.split_first_chunk()?;
    let (pack_offset, rest) = rest.split_first_chunk()?;
    let (len, _) = rest.split_first_chunk()?;
    let len = u32::from_le_bytes(*len);
    let key = (PackId(u64::from_le_bytes(*pack)), u32::from_le_bytes(*pack_offset));
    (u64::from(len) <= CHUNK_BYTES && offset + entry_bytes(len) <= file_len).then_some((key, len))
}

/// The pages that bytes of a block of `len` bytes lie in, as a range of its bytes.
pub(super) fn pages_of(range: &Range<u32>, len: u32) -> Range<u32> {
    range.start / PAGE_BYTES * PAGE_BYTES..range.end.next_multiple_of(PAGE_BYTES).min(len)
}

/// Whether a head is that of the block, whose XXH3-64 is `checksum` if that is known, and `bytes` are its pages at `pages`,
/// undamaged.
pub(super) fn is_sound(
    head: &[u8],
    (key, len, checksum): (BlockKey, u32, Option<u64>),
    pages: &Range<u32>,
    bytes: &[u8],
) -> bool {
    let (header_found, sums) = head.split_at(HEADER_BYTES);
    let checksum_found = header_found[16..24].try_into().map(u64::from_le_bytes).expect("eight bytes");
    let first = (pages.start / PAGE_BYTES) as usize;
    header_found == header(key, len, checksum_found, xxh3_64(sums))
        && checksum.is_none_or(|wanted| wanted == checksum_found)
        && bytes
            .chunks(PAGE_BYTES as usize)
            .zip(sums.chunks(SUM_BYTES).skip(first))
            .all(|(page, sum)| xxh3_64(page).to_le_bytes() == sum)
}

//! What a file's contents are made of.
//!
//! A file is cut into chunks. A slice is an immutable run of bytes inside one chunk; later slices cover earlier ones.
//! Slices that were written together form a group, which is the unit of the metadata record.

use bytes::Bytes;

use super::PackId;

/// One block of a packed run: the unit of compression, checksum and encryption.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Block {
    /// Bytes in the pack.
    pub stored_len: u32,
    /// Whether the bytes are stored as they are (compression did not help).
    pub raw: bool,
    /// XXH3-64 of the stored bytes.
    pub checksum: u64,
}

/// Bytes in a pack: consecutive blocks, the first at `pack_offset`. Each block but the last holds `block_bytes` plain
/// bytes. A slice may use only a part of the run (`skip` bytes in, `Slice::len` long), as after cloning a range.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PackedRun {
    /// The object.
    pub pack: PackId,
    /// Where the first block starts in the object, in bytes.
    pub pack_offset: u32,
    /// Plain bytes per block.
    pub block_bytes: u32,
    /// Plain bytes of the whole run; the last block holds what is left.
    pub plain_len: u32,
    /// Plain bytes at the run's beginning that the slice does not use.
    pub skip: u32,
    /// The blocks in order.
    pub blocks: Vec<Block>,
}

impl PackedRun {
    /// Bytes that the run takes in its pack.
    pub fn stored_bytes(&self) -> u64 {
        self.blocks.iter().map(|block| u64::from(block.stored_len)).sum()
    }
}

/// Where a slice's bytes are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Stored {
    /// Nowhere: zeros.
    Hole,
    /// In the record itself.
    Inline(Bytes),
    /// In a pack.
    Packed(PackedRun),
}

/// An immutable run of bytes inside one chunk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slice {
    /// First byte within the chunk.
    pub offset: u32,
    /// Length in bytes; `offset + len <= CHUNK_BYTES`.
    pub len: u32,
    /// The bytes.
    pub stored: Stored,
}

/// Place of a group among its chunk's groups: versionstamp and order within its transaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SliceStamp(pub [u8; 12]);

/// Slices of one chunk that were committed together; later ones cover earlier ones.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SliceGroup {
    /// Groups with a greater stamp cover this one.
    pub stamp: SliceStamp,
    /// The slices.
    pub slices: Vec<Slice>,
}

//! What an inode is made of, for people who want to know: attributes, chunks, slices, packs.
//!
//! Reads metadata only. What is still in memory is not in it; sizes are those that are stored.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::meta::Meta;
use crate::types::{CHUNK_BYTES, ChunkIndex, Ino, Kind, Result, SliceGroup, Stored};

/// Most slices that are listed one by one; all are counted.
const SLICES_LISTED_MAX: usize = 1000;
/// Chunks that are read at a time.
const CHUNKS_PAGE: usize = 64;

/// An inode and what it is made of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Description {
    /// Inode number.
    pub ino: u64,
    /// Kind of file: `file`, `directory`, `symlink`, …
    pub kind: String,
    /// Permission bits.
    pub mode: u16,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Number of names.
    pub nlink: u32,
    /// Length in bytes.
    pub size: u64,
    /// Bytes that are not holes.
    pub allocated_bytes: u64,
    /// Last change of the contents, in seconds since 1970.
    pub mtime_secs: i64,
    /// Last change of contents or attributes, in seconds since 1970.
    pub ctime_secs: i64,
    /// Chunks that have slices.
    pub chunks: u64,
    /// Groups of slices: changes that were stored together and are not compacted yet.
    pub groups: u64,
    /// All slices.
    pub slices: u64,
    /// Bytes that live in the metadata itself.
    pub inline_bytes: u64,
    /// Bytes in packs, compressed.
    pub stored_bytes: u64,
    /// Packs that hold bytes of the file, with how many.
    pub packs: Vec<PackUse>,
    /// The slices, oldest first within a chunk; at most 1,000.
    pub slice_list: Vec<SliceDescription>,
    /// Whether `slice_list` is all of them.
    pub slice_list_complete: bool,
}

/// How much of an inode is in a pack.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PackUse {
    /// Its id, as in the name of its object.
    pub pack: String,
    /// Runs of the inode in it.
    pub runs: u64,
    /// Their bytes, compressed.
    pub stored_bytes: u64,
}

/// One slice.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SliceDescription {
    /// The chunk.
    pub chunk: u64,
    /// First byte in the file.
    pub offset: u64,
    /// Length in bytes.
    pub len: u32,
    /// Where its bytes are.
    pub place: Place,
}

/// Where a slice's bytes are.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "in", rename_all = "kebab-case")]
pub enum Place {
    /// Nowhere: zeros.
    Hole,
    /// In the metadata.
    Metadata,
    /// In a pack.
    Pack {
        /// Its id.
        pack: String,
        /// Where the run begins in the object.
        pack_offset: u32,
        /// Bytes of the run in the object.
        stored_bytes: u64,
        /// Blocks of the run.
        blocks: u64,
        /// Those that compression did not help.
        raw_blocks: u64,
    },
}

/// Describes an inode.
///
/// # Errors
/// `NotFound`; errors of the metadata store.
pub async fn describe(meta: &Meta, ino: Ino) -> Result<Description> {
    let attr = meta.getattr(ino).await?;
    let mut description = Description {
        ino: ino.0,
        kind: kind_name(attr.kind).to_owned(),
        mode: attr.mode,
        uid: attr.uid,
        gid: attr.gid,
        nlink: attr.nlink,
        size: attr.size,
        allocated_bytes: attr.allocated,
        mtime_secs: attr.mtime.secs,
        ctime_secs: attr.ctime.secs,
        chunks: 0,
        groups: 0,
        slices: 0,
        inline_bytes: 0,
        stored_bytes: 0,
        packs: Vec::new(),
        slice_list: Vec::new(),
        slice_list_complete: true,
    };
    let mut packs = BTreeMap::new();
    let mut from = ChunkIndex(0);
    loop {
        let page = meta.chunks(ino, from, CHUNKS_PAGE).await?;
        let last = page.items.last().map(|(chunk, _)| *chunk);
        for (chunk, groups) in &page.items {
            description.add_chunk(*chunk, groups, &mut packs);
        }
        match last {
            Some(ChunkIndex(last)) if page.more => from = ChunkIndex(last + 1),
            _ => break,
        }
    }
    description.packs = packs.into_values().collect();
    Ok(description)
}

impl Description {
    fn add_chunk(&mut self, chunk: ChunkIndex, groups: &[SliceGroup], packs: &mut BTreeMap<u64, PackUse>) {
        self.chunks += 1;
        for slice in groups.iter().flat_map(|group| &group.slices) {
            self.slices += 1;
            let place = match &slice.stored {
                Stored::Hole => Place::Hole,
                Stored::Inline(bytes) => {
                    self.inline_bytes += bytes.len() as u64;
                    Place::Metadata
                }
                Stored::Packed(run) => {
                    let stored_bytes = run.stored_bytes();
                    self.stored_bytes += stored_bytes;
                    let pack = run.pack.to_string();
                    let entry = packs.entry(run.pack.0);
                    let used =
                        entry.or_insert_with(|| PackUse { pack: pack.clone(), runs: 0, stored_bytes: 0 });
                    used.runs += 1;
                    used.stored_bytes += stored_bytes;
                    Place::Pack {
                        pack,
                        pack_offset: run.pack_offset,
                        stored_bytes,
                        blocks: run.blocks.len() as u64,
                        raw_blocks: run.blocks.iter().filter(|block| block.raw).count() as u64,
                    }
                }
            };
            if self.slice_list.len() == SLICES_LISTED_MAX {
                self.slice_list_complete = false;
                continue;
            }
            let offset = chunk.0.saturating_mul(CHUNK_BYTES).saturating_add(u64::from(slice.offset));
            self.slice_list.push(SliceDescription { chunk: chunk.0, offset, len: slice.len, place });
        }
        self.groups += groups.len() as u64;
    }
}

/// The kind in words.
fn kind_name(kind: Kind) -> &'static str {
    match kind {
        Kind::File => "file",
        Kind::Directory => "directory",
        Kind::Symlink => "symlink",
        Kind::Fifo => "fifo",
        Kind::Socket => "socket",
        Kind::CharDevice => "character device",
        Kind::BlockDevice => "block device",
    }
}

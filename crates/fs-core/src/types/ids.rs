//! Identifiers, each its own type so that they cannot be mixed up.

use std::fmt;

/// Bytes of a file that one chunk covers (16 MiB); slices never cross a chunk's end.
pub const CHUNK_BYTES: u64 = 16 << 20;

/// An inode number. Never reused within a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ino(pub u64);

impl Ino {
    /// The root directory.
    pub const ROOT: Ino = Ino(1);
}

impl fmt::Display for Ino {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Which 16 MiB window of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChunkIndex(pub u64);

impl ChunkIndex {
    /// The chunk that holds byte `offset`.
    pub fn of(offset: u64) -> ChunkIndex {
        ChunkIndex(offset / CHUNK_BYTES)
    }

    /// First byte of the chunk within the file.
    pub fn start(self) -> u64 {
        self.0 * CHUNK_BYTES
    }
}

/// One live client of a volume; never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionId(pub u32);

/// One object in the store that holds many blocks: the session that wrote it (upper half) and that session's count
/// (lower half), so that ids are unique without asking anybody and never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PackId(pub u64);

impl PackId {
    /// The `sequence`-th pack of `session`.
    pub fn new(session: SessionId, sequence: u32) -> PackId {
        PackId(u64::from(session.0) << 32 | u64::from(sequence))
    }

    /// The session that wrote the pack.
    pub fn session(self) -> SessionId {
        SessionId(u32::try_from(self.0 >> 32).expect("the upper half of a u64 is a u32"))
    }
}

impl fmt::Display for PackId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

//! What goes into packs, and what tells when it is durable.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

#[cfg(doc)]
use super::Data;
use super::unstored::Pack;
use crate::types::{ChunkIndex, Ino, PackId, PackedRun, Result};

/// Which pack a run goes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Lane {
    /// Packs that files share.
    Small,
    /// Packs of one large file, whose parts are uploaded while it is written.
    Stream(Ino),
    /// Packs of what is moved out of other packs.
    Compaction,
}

/// Plain bytes to store as one run.
#[derive(Debug, Clone)]
pub struct RunBytes {
    /// The file, for the pack's footer.
    pub ino: Ino,
    /// The chunk, for the footer.
    pub chunk: ChunkIndex,
    /// Where in the chunk, for the footer.
    pub offset: u32,
    /// The bytes in order, however they are cut; at least one and at most a chunk's.
    pub bytes: Vec<Bytes>,
}

/// A run that has its place.
#[derive(Debug, Clone)]
pub struct Appended {
    /// What metadata records, and what [`Data::read`] reads at once.
    pub run: PackedRun,
    /// When the metadata may be committed.
    pub pack: PackTicket,
}

/// Tells when a run's bytes are durable. Clones wait for the same.
#[derive(Debug, Clone)]
pub struct PackTicket {
    pub(super) pack: Arc<Pack>,
    /// Where the run's blocks end in the pack.
    pub(super) end: u32,
    pub(super) io_timeout: Option<Duration>,
}

impl PackTicket {
    /// The pack.
    pub fn pack(&self) -> PackId {
        self.pack.id()
    }

    /// Whether the store has acknowledged the pack.
    pub fn is_stored(&self) -> bool {
        self.pack.is_stored()
    }

    /// Waits until the store has acknowledged the whole pack. Does not close it: somebody calls [`Data::seal`], or
    /// it is closed when it is full or has been idle. Whoever comes after a failure causes an attempt at once.
    ///
    /// # Errors
    /// `NoSpace` when the store says so, `Io` when there was no progress for `io_timeout` or [`Data::close`] gave up.
    /// In the first two cases the upload goes on with its bytes kept, and a later call may succeed.
    pub async fn stored(&self) -> Result<StoredPack> {
        let Durable { pack, bytes, .. } = self.pack.wait(self.io_timeout, None).await?;
        Ok(StoredPack { pack, stored_bytes: bytes })
    }

    /// Waits until the run is durable in either place. Causes neither: see [`Data::hasten`].
    ///
    /// # Errors
    /// As [`PackTicket::stored`].
    pub async fn durable(&self) -> Result<Durable> {
        self.pack.wait(self.io_timeout, Some(self.end)).await
    }

    /// Whether what is durable of the pack includes the run.
    pub fn is_within(&self, durable: &Durable) -> bool {
        durable.pack == self.pack() && (durable.place == Place::Store || u64::from(self.end) <= durable.bytes)
    }

    /// The ticket for both runs, which are of one pack.
    pub fn merge(&mut self, other: &PackTicket) {
        self.end = self.end.max(other.end);
    }
}

/// Where bytes are durable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    /// In the staging directory.
    Staging,
    /// In the object store.
    Store,
}

/// What is durable of a pack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Durable {
    /// The pack.
    pub pack: PackId,
    /// In the store: bytes of the object. Staged: header and blocks up to here.
    pub bytes: u64,
    /// Where.
    pub place: Place,
}

/// A pack as the store has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoredPack {
    /// The pack.
    pub pack: PackId,
    /// Bytes of the object.
    pub stored_bytes: u64,
}

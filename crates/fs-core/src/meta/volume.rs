//! The volume record: what a volume is, fixed at format but for its limits.

use uuid::Uuid;

use crate::types::{Error, ErrorKind, Result, Timestamp};

/// Version of this client; a volume says which ones may mount it.
pub const CLIENT_VERSION: u32 = 1;

/// Features that this client knows. A volume with others needs a newer one.
const FEATURES_KNOWN: u64 = 0;

/// How blocks are compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Codec {
    /// Not at all.
    None,
    /// LZ4.
    #[default]
    Lz4,
}

/// How much a volume may hold; `None` = no limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct VolumeLimits {
    /// Allocated bytes of all files.
    pub capacity: Option<u64>,
    /// Inodes.
    pub inodes: Option<u64>,
}

/// A volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Volume {
    /// Identity of the volume; also in the header of every pack.
    pub uuid: Uuid,
    /// Bits of features without which it cannot be mounted.
    pub features_required: u64,
    /// Oldest client that may mount it.
    pub client_version_min: u32,
    /// Newest client that may mount it.
    pub client_version_max: u32,
    /// Plain bytes of a block.
    pub block_bytes: u32,
    /// Compression of blocks.
    pub codec: Codec,
    /// How much it may hold.
    pub limits: VolumeLimits,
    /// When it was formatted.
    pub created: Timestamp,
    /// Where its packs are; without credentials.
    pub store_url: String,
}

/// What `format` decides.
#[derive(Debug, Clone)]
pub struct FormatOptions {
    /// Identity of the new volume.
    pub uuid: Uuid,
    /// Plain bytes of a block: a power of two from 4 KiB to 4 MiB.
    pub block_bytes: u32,
    /// Compression of blocks.
    pub codec: Codec,
    /// Where packs will be; without credentials.
    pub store_url: String,
    /// Limits.
    pub limits: VolumeLimits,
    /// Owner of the root directory.
    pub root_uid: u32,
    /// Group of the root directory.
    pub root_gid: u32,
    /// Permission bits of the root directory.
    pub root_mode: u16,
}

impl Default for FormatOptions {
    fn default() -> Self {
        Self {
            uuid: Uuid::nil(),
            block_bytes: 128 << 10,
            codec: Codec::Lz4,
            store_url: String::new(),
            limits: VolumeLimits::default(),
            root_uid: 0,
            root_gid: 0,
            root_mode: 0o755,
        }
    }
}

/// Whether this client may mount a volume.
///
/// # Errors
/// `NotSupported` with a sentence that says what is missing.
pub(super) fn check_version(features_required: u64, min: u32, max: u32) -> Result<()> {
    let unknown = features_required & !FEATURES_KNOWN;
    if unknown != 0 {
        let text = format!("the volume uses features that this version of rfs does not know ({unknown:#x})");
        return Err(Error::new(ErrorKind::NotSupported, text));
    }
    if !(min..=max).contains(&CLIENT_VERSION) {
        let text =
            format!("the volume needs a client of version {min} to {max}, this is version {CLIENT_VERSION}");
        return Err(Error::new(ErrorKind::NotSupported, text));
    }
    Ok(())
}

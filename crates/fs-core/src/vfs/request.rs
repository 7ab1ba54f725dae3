//! What callers of [`Vfs`](super::Vfs) pass in and get back: plain data, no behaviour.

use std::fmt;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

pub use crate::meta::{RenameMode, XattrMode};
use crate::types::{Attr, Caller, Error, Ino, Kind, Name};

/// An open file or directory of one mount.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Fh(pub u64);

/// What an open file may be used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AccessMode {
    /// `O_RDONLY` (also `O_EXEC`).
    Read,
    /// `O_WRONLY`.
    Write,
    /// `O_RDWR`.
    ReadWrite,
}

impl AccessMode {
    /// Whether writing is allowed.
    pub fn writes(self) -> bool {
        self != AccessMode::Read
    }
}

/// When a write is durable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SyncMode {
    /// At the next fsync, or a few seconds later.
    #[default]
    Later,
    /// When `write` returns (`O_DSYNC`, `O_SYNC`).
    EveryWrite,
}

/// How a file is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpenFlags {
    /// Reading, writing or both.
    pub access: AccessMode,
    /// `O_APPEND`: writes go to the end, whatever their offset says (unless the kernel caches writes and has placed
    /// them already, see [`VfsOptions::kernel_caches_writes`]).
    pub append: bool,
    /// `O_SYNC`, `O_DSYNC`.
    pub sync: SyncMode,
}

impl OpenFlags {
    /// Only the access mode, everything else off.
    pub fn new(access: AccessMode) -> OpenFlags {
        OpenFlags { access, append: false, sync: SyncMode::Later }
    }
}

/// A newly opened file or directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Opened {
    /// The handle, valid until it is released.
    pub fh: Fh,
    /// Whether pages that the kernel has of the file are still good.
    pub keep_cache: bool,
    /// Whether the kernel should bypass its page cache.
    pub direct_io: bool,
    /// Whether the kernel need not send a flush at close.
    pub no_flush: bool,
}

/// What `mknod`, `mkdir`, `symlink` and `create` have in common.
#[derive(Debug, Clone)]
pub struct NewNode<'a> {
    /// Who asks.
    pub caller: &'a Caller,
    /// The directory.
    pub parent: Ino,
    /// The new name in it.
    pub name: &'a Name,
    /// Permission bits (`0o7777`) with the umask taken off; without meaning for symlinks.
    pub mode: u16,
}

/// Which file `mknod` makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NodeKind {
    /// Any kind but directory and symlink.
    pub kind: Kind,
    /// Device number of device files, otherwise 0.
    pub rdev: u32,
}

/// A rename.
#[derive(Debug, Clone, Copy)]
pub struct RenameArgs<'a> {
    /// Directory of the old name.
    pub parent: Ino,
    /// The old name.
    pub name: &'a Name,
    /// Directory of the new name.
    pub new_parent: Ino,
    /// The new name.
    pub new_name: &'a Name,
    /// What happens to a file of that name.
    pub mode: RenameMode,
}

/// Who sent the bytes of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum WriteOrigin {
    /// A process, through write(2): sets mtime and ctime, appends with `O_APPEND`.
    #[default]
    Process,
    /// The kernel's cache (`FUSE_WRITE_CACHE`): the kernel has placed the bytes and sends the times itself.
    KernelCache,
}

/// A write.
#[derive(Debug, Clone)]
pub struct WriteArgs {
    /// The file.
    pub ino: Ino,
    /// The handle it comes through.
    pub fh: Fh,
    /// First byte in the file; ignored with `O_APPEND`.
    pub offset: u64,
    /// The bytes.
    pub bytes: Bytes,
    /// Who sent them.
    pub origin: WriteOrigin,
    /// Whether set-user-id and set-group-id bits are to be dropped (`FUSE_WRITE_KILL_SUIDGID`).
    pub kill_suid_sgid: bool,
}

/// What `fallocate` does with the range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FallocateMode {
    /// Mode 0: the file reaches to the end of the range at least.
    Allocate,
    /// `FALLOC_FL_KEEP_SIZE`: room only (checked against the capacity).
    AllocateKeepSize,
    /// `FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE`.
    PunchHole,
    /// `FALLOC_FL_ZERO_RANGE`.
    ZeroRange,
    /// `FALLOC_FL_ZERO_RANGE | FALLOC_FL_KEEP_SIZE`.
    ZeroRangeKeepSize,
    /// `FALLOC_FL_COLLAPSE_RANGE`: `NotSupported`.
    CollapseRange,
    /// `FALLOC_FL_INSERT_RANGE`: `NotSupported`.
    InsertRange,
    /// `FALLOC_FL_UNSHARE_RANGE`: `NotSupported`.
    UnshareRange,
}

/// What `lseek` looks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Whence {
    /// `SEEK_DATA`
    Data,
    /// `SEEK_HOLE`
    Hole,
}

/// A copy within the filesystem.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CopyArgs {
    /// The file read from.
    pub from: Ino,
    /// First byte there.
    pub from_offset: u64,
    /// The file written to.
    pub to: Ino,
    /// First byte there.
    pub to_offset: u64,
    /// Bytes to copy at most; fewer when the source ends.
    pub len: u64,
}

/// One directory entry on its way to the caller.
#[derive(Debug, Clone, Copy)]
pub struct DirEntry<'a> {
    /// The inode.
    pub ino: Ino,
    /// Where to go on after this entry.
    pub cookie: u64,
    /// Kind of file.
    pub kind: Kind,
    /// The name.
    pub name: &'a [u8],
    /// Attributes, with [`ReaddirMode::Plus`], except of `.` and `..`.
    pub attr: Option<&'a Attr>,
}

/// Takes entries until it is full: `Break` means that this entry did not fit and was not taken.
pub type DirSink<'a> = &'a mut (dyn FnMut(&DirEntry<'_>) -> ControlFlow<()> + Send);

/// Whether a listing looks up what it lists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReaddirMode {
    /// Names, inode numbers and kinds.
    Names,
    /// Attributes too; each entry taken but `.` and `..` counts as a lookup.
    Plus,
}

/// A piece of a directory listing.
#[derive(Debug, Clone, Copy)]
pub struct ReaddirArgs {
    /// The directory.
    pub dir: Ino,
    /// 0 from the beginning, otherwise the cookie of the last entry seen.
    pub cookie: u64,
    /// Names only, or attributes too.
    pub mode: ReaddirMode,
    /// Most entries that the sink can take; only for sizing the read.
    pub entries_max: usize,
}

/// How much of the metadata an fsync must make durable. Both make everything durable here; kept for the record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FsyncMode {
    /// `fdatasync`
    Data,
    /// `fsync`
    All,
}

/// Sizes of the volume, in bytes and inodes. Without a limit, `total` is what is used plus what the store can take, or a
/// very large number if that is not known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Statfs {
    /// Bytes of a block, for `f_bsize`.
    pub block_bytes: u32,
    /// Bytes that the volume may hold.
    pub bytes_total: u64,
    /// Bytes that are left.
    pub bytes_free: u64,
    /// Inodes that the volume may hold.
    pub inodes_total: u64,
    /// Inodes that are left.
    pub inodes_free: u64,
    /// Longest name in bytes.
    pub name_bytes_max: u32,
}

/// When reading updates the access time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AtimeMode {
    /// When it is not after mtime and ctime, or older than a day.
    #[default]
    Relatime,
    /// Never.
    Noatime,
}

/// Whether the mount may change anything.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum WriteAccess {
    /// Yes.
    #[default]
    ReadWrite,
    /// No: `ReadOnly` (EROFS).
    ReadOnly,
}

/// Tells how much more a store can take.
pub trait StoreRoom: fmt::Debug + Send + Sync {
    /// Free bytes; `None` when they cannot be told now. Asked at every statfs(2): must be quick.
    fn bytes_free(&self) -> Option<u64>;
}

/// Settings of a mount.
#[derive(Debug, Clone)]
pub struct VfsOptions {
    /// Whether it may change anything; see [`Vfs::set_read_only`](super::Vfs::set_read_only).
    pub access: WriteAccess,
    /// Whether the kernel caches writes (and thus knows size and mtime better; it places appends itself).
    pub kernel_caches_writes: bool,
    /// Whether the kernel keeps what is written in its page cache. If not, files that are opened for writing alone bypass it.
    pub kernel_keeps_written: bool,
    /// When access times change.
    pub atime: AtimeMode,
    /// How long a write waits for memory while nothing can be stored; `None`: for ever.
    pub io_timeout: Option<Duration>,
    /// Longest time that written bytes stay only in memory.
    pub flush_after: Duration,
    /// Readahead window at most, in bytes; 0 turns it off.
    pub readahead_bytes_max: u64,
    /// Slice groups in a chunk from which on it is compacted.
    pub compact_groups: usize,
    /// Time between two rounds of the collector of dead packs.
    pub gc_interval: Duration,
    /// Whether the session must give signs of life (`Sharing::Leased`).
    pub heartbeat: bool,
    /// How much the store can still take; `None` where nobody knows, as with S3.
    pub store_room: Option<Arc<dyn StoreRoom>>,
}

impl Default for VfsOptions {
    fn default() -> VfsOptions {
        VfsOptions {
            access: WriteAccess::ReadWrite,
            kernel_caches_writes: false,
            kernel_keeps_written: true,
            atime: AtimeMode::Relatime,
            io_timeout: Some(Duration::from_mins(5)),
            flush_after: Duration::from_secs(5),
            readahead_bytes_max: 32 << 20,
            compact_groups: 32,
            gc_interval: Duration::from_mins(1),
            heartbeat: false,
            store_room: None,
        }
    }
}

/// A file whose contents could not be stored before the end.
#[derive(Debug)]
pub struct Unsaved {
    /// The file.
    pub ino: Ino,
    /// Its path from the root of the volume (one of them), unless it has no name any more.
    pub path: Option<String>,
    /// Bytes lost.
    pub bytes: u64,
}

/// How the end of a mount went.
#[derive(Debug, Default)]
pub struct ShutdownReport {
    /// Files with bytes that are not stored; empty when everything is.
    pub unsaved: Vec<Unsaved>,
    /// What went wrong with the stores, if anything.
    pub errors: Vec<Error>,
}

/// Counts and sizes, for people and metrics.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct VfsStats {
    /// Bytes written that are only in memory.
    pub dirty_bytes: u64,
    /// Bytes handed to the store whose metadata is not committed.
    pub pending_bytes: u64,
    /// Open files.
    pub files_open: u64,
    /// Inodes that the kernel knows.
    pub inodes_known: u64,
    /// Inodes with state in memory.
    pub inodes_active: u64,
    /// Flushes that failed.
    pub flush_failures: u64,
    /// Chunks compacted.
    pub chunks_compacted: u64,
    /// Orphans reaped.
    pub orphans_reaped: u64,
    /// Packs deleted.
    pub packs_deleted: u64,
}

/// What a collection of garbage did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GcReport {
    /// Orphans deleted.
    pub orphans_reaped: u64,
    /// Packs without live bytes that were deleted.
    pub packs_deleted: u64,
    /// Packs of ended sessions that no metadata ever named.
    pub packs_unnamed: u64,
    /// Chunks rewritten out of mostly dead packs.
    pub chunks_rewritten: u64,
    /// Bytes given back to the store.
    pub bytes_freed: u64,
}

//! Attributes of an inode.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::Ino;

/// What sort of file an inode is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Regular file.
    File,
    /// Directory.
    Directory,
    /// Symbolic link.
    Symlink,
    /// Named pipe.
    Fifo,
    /// Unix-domain socket.
    Socket,
    /// Character device.
    CharDevice,
    /// Block device.
    BlockDevice,
}

/// A point in time: seconds since 1970 (negative before) plus nanoseconds in `0..1_000_000_000`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Timestamp {
    /// Seconds since the epoch, rounded towards minus infinity.
    pub secs: i64,
    /// Nanoseconds after `secs`.
    pub nanos: u32,
}

impl From<SystemTime> for Timestamp {
    fn from(time: SystemTime) -> Timestamp {
        let secs_of = |d: Duration| i64::try_from(d.as_secs()).unwrap_or(i64::MAX);
        match time.duration_since(UNIX_EPOCH) {
            Ok(after) => Timestamp { secs: secs_of(after), nanos: after.subsec_nanos() },
            Err(e) => {
                let before = e.duration();
                match before.subsec_nanos() {
                    0 => Timestamp { secs: -secs_of(before), nanos: 0 },
                    nanos => Timestamp { secs: -secs_of(before) - 1, nanos: 1_000_000_000 - nanos },
                }
            }
        }
    }
}

impl From<Timestamp> for SystemTime {
    fn from(time: Timestamp) -> SystemTime {
        let nanos = Duration::from_nanos(u64::from(time.nanos));
        match u64::try_from(time.secs) {
            Ok(secs) => UNIX_EPOCH + Duration::from_secs(secs) + nanos,
            Err(_) => UNIX_EPOCH - Duration::from_secs(time.secs.unsigned_abs()) + nanos,
        }
    }
}

/// Attributes of an inode, as stat(2) shows them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attr {
    /// Inode number.
    pub ino: Ino,
    /// Kind of file.
    pub kind: Kind,
    /// Permission, set-id and sticky bits (`0o7777`).
    pub mode: u16,
    /// Number of names; directories: 2 + subdirectories.
    pub nlink: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Device number of device files.
    pub rdev: u32,
    /// Length in bytes.
    pub size: u64,
    /// Bytes of the file that are not holes (`st_blocks` × 512).
    pub allocated: u64,
    /// Last access (relatime).
    pub atime: Timestamp,
    /// Last change of the contents.
    pub mtime: Timestamp,
    /// Last change of contents or attributes.
    pub ctime: Timestamp,
    /// Creation.
    pub crtime: Timestamp,
    /// Tells apart two inodes of one number; always 0 while numbers are not reused.
    pub generation: u32,
    /// Inode flags (`FS_IMMUTABLE_FL`, `FS_APPEND_FL`).
    pub flags: u32,
}

/// Who asks: the identity that the kernel passes with a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Caller {
    /// Effective (filesystem) user.
    pub uid: u32,
    /// Effective (filesystem) group.
    pub gid: u32,
    /// Process (thread group) id, for supplementary groups and for logs.
    pub pid: u32,
}

/// A new value for a time stamp.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SetTime {
    /// The time of the operation (`UTIME_NOW`).
    Now,
    /// This time.
    To(Timestamp),
}

/// Attributes to change; `None` leaves one as it is (`UTIME_OMIT`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SetAttr {
    /// New permission bits (`0o7777`).
    pub mode: Option<u16>,
    /// New owner.
    pub uid: Option<u32>,
    /// New group.
    pub gid: Option<u32>,
    /// New length.
    pub size: Option<u64>,
    /// New access time.
    pub atime: Option<SetTime>,
    /// New modification time.
    pub mtime: Option<SetTime>,
    /// New change time, sent by a kernel that caches writes; otherwise every change sets it to now.
    pub ctime: Option<Timestamp>,
    /// New inode flags.
    pub flags: Option<u32>,
    /// Whether the kernel asks to drop set-user-id and set-group-id bits with this change (`HANDLE_KILLPRIV_V2`).
    pub kill_suid_sgid: bool,
}

//! Between the filesystem's types and the protocol's. Pure; knows no requests.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use fuser::{FileAttr, FileType, INodeNo, RenameFlags, TimeOrNow};
use rfs_core::types::{Attr, Caller, Ino, Kind, Name, Result, SetTime, Timestamp};
use rfs_core::vfs::{AccessMode, FallocateMode, OpenFlags, RenameMode, SyncMode, Whence, XattrMode};

/// `st_blksize`: what stdio and tools take as the size of a good read or write, in bytes.
const PREFERRED_IO_BYTES: u32 = 4096;

pub(crate) fn ino(number: INodeNo) -> Ino {
    Ino(number.0)
}

pub(crate) fn name(name: &OsStr) -> Result<Name> {
    Name::new(Bytes::copy_from_slice(name.as_bytes()))
}

pub(crate) fn caller(request: &fuser::Request) -> Caller {
    Caller { uid: request.uid(), gid: request.gid(), pid: request.pid() }
}

pub(crate) fn file_type(kind: Kind) -> FileType {
    match kind {
        Kind::File => FileType::RegularFile,
        Kind::Directory => FileType::Directory,
        Kind::Symlink => FileType::Symlink,
        Kind::Fifo => FileType::NamedPipe,
        Kind::Socket => FileType::Socket,
        Kind::CharDevice => FileType::CharDevice,
        Kind::BlockDevice => FileType::BlockDevice,
    }
}

/// The kind that the type bits of a `mode_t` name; no bits mean a regular file, as for mknod(2).
pub(crate) fn kind_of_mode(mode: u32) -> Option<Kind> {
    #[expect(clippy::allow_attributes, reason = "the type of `S_IFMT` differs between platforms")]
    #[allow(clippy::useless_conversion, reason = "`mode_t` is 16 bits wide on macOS")]
    let is = |bits: libc::mode_t| mode & u32::from(libc::S_IFMT) == u32::from(bits);
    [
        (libc::S_IFREG, Kind::File),
        (0, Kind::File),
        (libc::S_IFDIR, Kind::Directory),
        (libc::S_IFLNK, Kind::Symlink),
        (libc::S_IFIFO, Kind::Fifo),
        (libc::S_IFSOCK, Kind::Socket),
        (libc::S_IFCHR, Kind::CharDevice),
        (libc::S_IFBLK, Kind::BlockDevice),
    ]
    .into_iter()
    .find_map(|(bits, kind)| is(bits).then_some(kind))
}

/// Permission, set-id and sticky bits of a `mode_t`.
pub(crate) fn permissions(mode: u32) -> u16 {
    u16::try_from(mode & 0o7777).expect("twelve bits")
}

/// Attributes as the kernel wants them.
pub(crate) fn file_attr(attr: &Attr) -> FileAttr {
    FileAttr {
        ino: INodeNo(attr.ino.0),
        size: attr.size,
        blocks: attr.allocated.div_ceil(512),
        atime: attr.atime.into(),
        mtime: attr.mtime.into(),
        ctime: attr.ctime.into(),
        crtime: attr.crtime.into(),
        kind: file_type(attr.kind),
        perm: attr.mode,
        nlink: attr.nlink,
        uid: attr.uid,
        gid: attr.gid,
        rdev: attr.rdev,
        blksize: PREFERRED_IO_BYTES,
        flags: 0,
    }
}

/// Attributes of nothing. As the answer to a lookup, inode number 0 says "no such name, and you may remember that".
pub(crate) fn no_attr() -> FileAttr {
    FileAttr {
        ino: INodeNo(0),
        size: 0,
        blocks: 0,
        atime: UNIX_EPOCH,
        mtime: UNIX_EPOCH,
        ctime: UNIX_EPOCH,
        crtime: UNIX_EPOCH,
        kind: FileType::RegularFile,
        perm: 0,
        nlink: 0,
        uid: 0,
        gid: 0,
        rdev: 0,
        blksize: PREFERRED_IO_BYTES,
        flags: 0,
    }
}

/// A point in time as fuser decoded it.
///
/// The protocol has seconds (signed) and nanoseconds that count forwards; for seconds before 1970, fuser 0.18 counts the
/// nanoseconds backwards too, which this undoes: its distance from 1970 still holds the two numbers of the request.
pub(crate) fn timestamp(time: SystemTime) -> Timestamp {
    match time.duration_since(UNIX_EPOCH) {
        Ok(_) => Timestamp::from(time),
        Err(before) => {
            let distance = before.duration();
            let secs = 0i64.saturating_sub_unsigned(distance.as_secs());
            Timestamp { secs, nanos: distance.subsec_nanos() }
        }
    }
}

pub(crate) fn set_time(time: TimeOrNow) -> SetTime {
    match time {
        TimeOrNow::Now => SetTime::Now,
        TimeOrNow::SpecificTime(time) => SetTime::To(timestamp(time)),
    }
}

/// Pairs of one inode flag: `FS_*_FL` (chattr(1)) and `FS_XFLAG_*` (`struct fsxattr`) of `linux/fs.h`.
const INODE_FLAGS: [(u32, u32); 5] = [
    (0x08, 0x20), // SYNC
    (0x10, 0x08), // IMMUTABLE
    (0x20, 0x10), // APPEND
    (0x40, 0x80), // NODUMP
    (0x80, 0x40), // NOATIME
];

/// `struct fsxattr` with these inode flags and nothing else.
pub(crate) fn fsxattr(flags: u32) -> [u8; 28] {
    let xflags =
        INODE_FLAGS.iter().filter(|(flag, _)| flags & flag != 0).fold(0, |all, (_, xflag)| all | xflag);
    let mut encoded = [0; 28];
    encoded[..4].copy_from_slice(&xflags.to_ne_bytes());
    encoded
}

/// Inode flags of the first member of a `struct fsxattr`; `None` if some have no counterpart.
pub(crate) fn flags_of_fsxattr(xflags: u32) -> Option<u32> {
    let known = INODE_FLAGS.iter().fold(0, |all, (_, xflag)| all | xflag);
    let flags =
        INODE_FLAGS.iter().filter(|(_, xflag)| xflags & xflag != 0).fold(0, |all, (flag, _)| all | flag);
    (xflags & !known == 0).then_some(flags)
}

pub(crate) fn open_flags(flags: fuser::OpenFlags) -> OpenFlags {
    let has = |bit: i32| flags.0 & bit != 0;
    OpenFlags {
        access: match flags.0 & libc::O_ACCMODE {
            libc::O_WRONLY => AccessMode::Write,
            libc::O_RDWR => AccessMode::ReadWrite,
            _ => AccessMode::Read,
        },
        append: has(libc::O_APPEND),
        // O_SYNC contains O_DSYNC.
        sync: if has(libc::O_DSYNC) { SyncMode::EveryWrite } else { SyncMode::Later },
    }
}

/// `None` for flags that do not go together or are not known (renameat2(2): EINVAL).
pub(crate) fn rename_mode(flags: RenameFlags) -> Option<RenameMode> {
    /// `RENAME_NOREPLACE` and `RENAME_EXCHANGE` of `linux/fs.h`, which exist on Linux only.
    const NOREPLACE: u32 = 1;
    const EXCHANGE: u32 = 2;
    match flags.bits() {
        0 => Some(RenameMode::Replace),
        NOREPLACE => Some(RenameMode::NoReplace),
        EXCHANGE => Some(RenameMode::Exchange),
        _ => None,
    }
}

/// `None` for flags that do not go together or are not known (setxattr(2): EINVAL).
pub(crate) fn xattr_mode(flags: i32) -> Option<XattrMode> {
    match flags {
        0 => Some(XattrMode::Either),
        libc::XATTR_CREATE => Some(XattrMode::Create),
        libc::XATTR_REPLACE => Some(XattrMode::Replace),
        _ => None,
    }
}

/// `None` for combinations that fallocate(2) does not have.
pub(crate) fn fallocate_mode(mode: i32) -> Option<FallocateMode> {
    /// `FALLOC_FL_*` of `linux/falloc.h`, which exist on Linux only.
    const KEEP_SIZE: i32 = 0x01;
    const PUNCH_HOLE: i32 = 0x02;
    const COLLAPSE_RANGE: i32 = 0x08;
    const ZERO_RANGE: i32 = 0x10;
    const INSERT_RANGE: i32 = 0x20;
    const UNSHARE_RANGE: i32 = 0x40;
    const PUNCH_HOLE_KEEP_SIZE: i32 = PUNCH_HOLE | KEEP_SIZE;
    const ZERO_RANGE_KEEP_SIZE: i32 = ZERO_RANGE | KEEP_SIZE;
    match mode {
        0 => Some(FallocateMode::Allocate),
        KEEP_SIZE => Some(FallocateMode::AllocateKeepSize),
        PUNCH_HOLE_KEEP_SIZE => Some(FallocateMode::PunchHole),
        ZERO_RANGE => Some(FallocateMode::ZeroRange),
        ZERO_RANGE_KEEP_SIZE => Some(FallocateMode::ZeroRangeKeepSize),
        COLLAPSE_RANGE => Some(FallocateMode::CollapseRange),
        INSERT_RANGE => Some(FallocateMode::InsertRange),
        UNSHARE_RANGE => Some(FallocateMode::UnshareRange),
        _ => None,
    }
}

/// `None` for what the kernel answers itself.
pub(crate) fn whence(whence: i32) -> Option<Whence> {
    match whence {
        libc::SEEK_DATA => Some(Whence::Data),
        libc::SEEK_HOLE => Some(Whence::Hole),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn times_before_1970_keep_their_nanoseconds() {
        // What fuser makes of the request's (-4, 7).
        let decoded = UNIX_EPOCH - Duration::new(4, 7);
        assert_eq!(timestamp(decoded), Timestamp { secs: -4, nanos: 7 });
        // And what it sends for that: the right pair.
        let sent = SystemTime::from(timestamp(decoded));
        assert_eq!(sent, UNIX_EPOCH - Duration::from_secs(4) + Duration::from_nanos(7));
        assert_eq!(timestamp(UNIX_EPOCH + Duration::new(5, 9)), Timestamp { secs: 5, nanos: 9 });
    }

    #[test]
    fn inode_flags_have_two_forms() {
        assert_eq!(fsxattr(0x10 | 0x20)[..4], 0x18_u32.to_ne_bytes());
        assert_eq!(flags_of_fsxattr(0x18), Some(0x30));
        assert_eq!(flags_of_fsxattr(0x8000_0000), None);
    }

    #[test]
    fn mode_bits_name_the_kind() {
        assert_eq!(kind_of_mode(0o100_644), Some(Kind::File));
        assert_eq!(kind_of_mode(0o644), Some(Kind::File));
        assert_eq!(kind_of_mode(0o020_600), Some(Kind::CharDevice));
        assert_eq!(kind_of_mode(0o060_600), Some(Kind::BlockDevice));
        assert_eq!(kind_of_mode(0o140_777), Some(Kind::Socket));
        assert_eq!(kind_of_mode(0o160_777), None);
        assert_eq!(permissions(0o104_755), 0o4755);
    }
}

//! How results become replies of the protocol. fuser has a type for each, and no trait that they share.

use std::time::Duration;

use bytes::Bytes;
use fuser::{
    Errno, FileHandle, FopenFlags, Generation, ReplyAttr, ReplyCreate, ReplyData, ReplyEmpty, ReplyEntry,
    ReplyIoctl, ReplyLseek, ReplyOpen, ReplyStatfs, ReplyWrite, ReplyXattr,
};
use rfs_core::types::Attr;
use rfs_core::vfs::{Opened, Statfs};

use crate::convert;
use crate::given::{Created, Entry, OpenFile};

/// A reply that carries a `T`.
pub(crate) trait Answer<T>: Send + 'static {
    /// Sends it. `ttl`: how long the kernel may believe names and attributes.
    fn give(self, value: T, ttl: Duration);

    /// Sends an error in its place.
    fn fail(self, errno: Errno, ttl: Duration);
}

macro_rules! answers {
    ($($reply:ident: $value:ty => |$self:ident, $given:pat_param, $ttl:pat_param| $send:expr;)*) => {$(
        impl Answer<$value> for $reply {
            fn give($self, $given: $value, $ttl: Duration) {
                $send
            }

            fn fail(self, errno: Errno, _ttl: Duration) {
                self.error(errno);
            }
        }
    )*};
}

answers! {
    ReplyEmpty: () => |self, (), _| self.ok();
    ReplyData: Bytes => |self, bytes, _| self.data(&bytes);
    ReplyWrite: u32 => |self, written, _| self.written(written);
    ReplyLseek: u64 => |self, found, _| self.offset(i64::try_from(found).unwrap_or(i64::MAX));
    ReplyIoctl: Vec<u8> => |self, encoded, _| self.ioctl(0, &encoded);
    ReplyAttr: Attr => |self, attr, ttl| self.attr(&ttl, &convert::file_attr(&attr));
    ReplyEntry: Entry => |self, Entry { attr, .. }, ttl| {
        self.entry(&ttl, &convert::file_attr(&attr), generation(&attr));
    };
    ReplyOpen: OpenFile => |self, file, _| {
        file.is_told();
        self.opened(FileHandle(file.opened.fh.0), fopen_flags(&file.opened));
    };
    ReplyCreate: Created => |self, Created { attr, file }, ttl| {
        file.is_told();
        let (fh, flags) = (FileHandle(file.opened.fh.0), fopen_flags(&file.opened));
        self.created(&ttl, &convert::file_attr(&attr), generation(&attr), fh, flags);
    };
    ReplyStatfs: Statfs => |self, statfs, _| {
        let block_bytes = u64::from(statfs.block_bytes.max(1));
        let free = statfs.bytes_free / block_bytes;
        self.statfs(
            statfs.bytes_total / block_bytes,
            free,
            free,
            statfs.inodes_total,
            statfs.inodes_free,
            statfs.block_bytes,
            statfs.name_bytes_max,
            statfs.block_bytes,
        );
    };
}

/// The reply to a lookup: that there is no such name is something to remember, too.
pub(crate) struct LookupReply(pub(crate) ReplyEntry);

impl Answer<Entry> for LookupReply {
    fn give(self, entry: Entry, ttl: Duration) {
        self.0.give(entry, ttl);
    }

    fn fail(self, errno: Errno, ttl: Duration) {
        match errno {
            Errno::ENOENT => self.0.entry(&ttl, &convert::no_attr(), Generation(0)),
            errno => self.0.error(errno),
        }
    }
}

/// The reply with an extended attribute or the list of them, of which `size` 0 asks for the size alone.
pub(crate) struct XattrReply {
    pub(crate) reply: ReplyXattr,
    pub(crate) size: u32,
}

impl Answer<Bytes> for XattrReply {
    fn give(self, value: Bytes, _ttl: Duration) {
        match u32::try_from(value.len()) {
            Ok(len) if self.size == 0 => self.reply.size(len),
            Ok(len) if len <= self.size => self.reply.data(&value),
            Ok(_) | Err(_) => self.reply.error(Errno::ERANGE),
        }
    }

    fn fail(self, errno: Errno, _ttl: Duration) {
        self.reply.error(errno);
    }
}

pub(crate) fn generation(attr: &Attr) -> Generation {
    Generation(u64::from(attr.generation))
}

/// What the kernel may do with an open file.
fn fopen_flags(opened: &Opened) -> FopenFlags {
    let mut flags = FopenFlags::empty();
    flags.set(FopenFlags::FOPEN_KEEP_CACHE, opened.keep_cache);
    flags.set(FopenFlags::FOPEN_DIRECT_IO, opened.direct_io);
    flags.set(FopenFlags::FOPEN_NOFLUSH, opened.no_flush);
    flags
}

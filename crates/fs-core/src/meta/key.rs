//! Every key of the metadata store. No other file concatenates key bytes.
//!
//! Numbers are big-endian, so that the order of keys is the order of numbers. One concern a key, so that unrelated
//! operations do not conflict. The keys of an inode's attributes share a prefix: getattr is one short range read, and
//! readdirplus is two, because the inode numbers of one directory are allocated close together.
//!
//! | key | value | written |
//! |---|---|---|
//! | `A name` | next number of an allocator (`i` inodes, `s` sessions) | get and set |
//! | `C ino chunk stamp order` | slice group: slices of one chunk that were committed together | versionstamped |
//! | `D dir name` | dentry: ino and kind | set |
//! | `I ino 0` | inode: kind, mode, uid, gid, nlink, rdev, flags, generation, parent, creation time | get and set |
//! | `I ino 1` | mtime and ctime; absent = creation time | set; blindly for directories |
//! | `I ino 2` | length; absent = 0 | `max` when growing, set by truncate |
//! | `I ino 3` | subdirectories of a directory; absent = 0 | `add` |
//! | `I ino 4` | allocated bytes; absent = 0 | `add` |
//! | `I ino 5` | number of truncations, chunks that are still to be removed; absent = none | get and set |
//! | `I ino 6` | POSIX ACL | reserved |
//! | `I ino 7` | atime; absent = creation time | set |
//! | `I ino 8` | target of a symbolic link | set once |
//! | `O ino session` | orphan: inode without a name that the session still refers to | set |
//! | `P pack` | pack: bytes, and whether they are staged or stored | `max` |
//! | `p pack` | live bytes of the pack | `add` |
//! | `S 0 session` | session: who it is; absent = dead | set once |
//! | `S 1 session` | heartbeat | set |
//! | `S 2 session slot` | last request of the slot that was committed | set |
//! | `U counter shard` | usage: `b` allocated bytes, `i` inodes | `add` |
//! | `X ino name` | extended attribute | get and set |
//! | `Z` | volume record | get and set |
//! | `Zs` | staging directory, if it is not beside the metadata | set |
//!
//! Reserved for what comes: `G` change log, `K` file locks, `Q` quotas. There is no `V dir` (alive/move version): `I 0` of
//! a directory is read by everything that adds a name to it and written by rmdir, by moving it and by chmod, and by
//! nothing that happens often.

use bytes::Bytes;

use crate::types::{ChunkIndex, Ino, Name, PackId, SessionId, SliceStamp};

/// A range of keys: first included, last excluded.
#[derive(Debug, Clone)]
pub(super) struct KeyRange {
    pub(super) begin: Bytes,
    pub(super) end: Bytes,
}

impl KeyRange {
    fn new(begin: &[u8], end: &[u8]) -> KeyRange {
        KeyRange { begin: Bytes::copy_from_slice(begin), end: Bytes::copy_from_slice(end) }
    }

    /// All keys that begin with `prefix`, which does not end with 0xFF bytes only.
    fn prefix(prefix: &[u8]) -> KeyRange {
        let mut end = prefix.to_vec();
        while end.last() == Some(&0xFF) {
            end.pop();
        }
        if let Some(last) = end.last_mut() {
            *last += 1;
        }
        KeyRange { begin: Bytes::copy_from_slice(prefix), end: Bytes::from(end) }
    }

    /// The keys of the range after `key`.
    #[must_use]
    pub(super) fn after(mut self, key: &[u8]) -> KeyRange {
        self.begin = successor(key);
        self
    }
}

/// The least key greater than `key`.
pub(super) fn successor(key: &[u8]) -> Bytes {
    let mut next = Vec::with_capacity(key.len() + 1);
    next.extend_from_slice(key);
    next.push(0);
    Bytes::from(next)
}

const ALLOCATOR: u8 = b'A';
const CHUNK: u8 = b'C';
const DENTRY: u8 = b'D';
const INODE: u8 = b'I';
const ORPHAN: u8 = b'O';
const PACK: u8 = b'P';
const PACK_LIVE: u8 = b'p';
const SESSION: u8 = b'S';
const USAGE: u8 = b'U';
const XATTR: u8 = b'X';

/// The volume record.
pub(super) const VOLUME: [u8; 1] = *b"Z";
/// The directory that the volume's mounts stage in.
pub(super) const STAGING: [u8; 2] = *b"Zs";
/// The next inode number that no session has reserved.
pub(super) const NEXT_INO: [u8; 2] = [ALLOCATOR, b'i'];
/// The next session's id.
pub(super) const NEXT_SESSION: [u8; 2] = [ALLOCATOR, b's'];

/// The part of an inode that a key holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub(super) enum Field {
    Inode = 0,
    Times = 1,
    Length = 2,
    Subdirectories = 3,
    Allocated = 4,
    Truncation = 5,
    Atime = 7,
    Target = 8,
}

impl Field {
    fn from_byte(byte: u8) -> Option<Field> {
        Some(match byte {
            0 => Field::Inode,
            1 => Field::Times,
            2 => Field::Length,
            3 => Field::Subdirectories,
            4 => Field::Allocated,
            5 => Field::Truncation,
            7 => Field::Atime,
            8 => Field::Target,
            _ => return None,
        })
    }
}

/// One key of an inode.
pub(super) fn inode(ino: Ino, field: Field) -> [u8; 10] {
    inode_byte(ino, field as u8)
}

fn inode_byte(ino: Ino, field: u8) -> [u8; 10] {
    let mut key = [0; 10];
    key[0] = INODE;
    key[1..9].copy_from_slice(&ino.0.to_be_bytes());
    key[9] = field;
    key
}

/// All keys of the inodes from `first` to `last`, both included.
pub(super) fn inodes(first: Ino, last: Ino) -> KeyRange {
    KeyRange::new(&inode_byte(first, 0), &inode_byte(last, 0xFF))
}

/// All keys of all inodes after `after`.
pub(super) fn all_inodes(after: Option<Ino>) -> KeyRange {
    match after {
        None => KeyRange::prefix(&[INODE]),
        Some(ino) => KeyRange::new(&inode_byte(ino, 0xFF), &[INODE + 1]),
    }
}

/// The inode of an `I` key, and the part that it holds (`None`: reserved).
pub(super) fn parse_inode(key: &[u8]) -> Option<(Ino, Option<Field>)> {
    let rest: [u8; 9] = key.strip_prefix(&[INODE])?.try_into().ok()?;
    Some((Ino(be_u64(&rest[..8])?), Field::from_byte(rest[8])))
}

/// Longest key of a dentry or an extended attribute.
const NAMED_BYTES_MAX: usize = 9 + 255;

/// A key that ends with a name, without allocation.
pub(super) struct NamedKey {
    bytes: [u8; NAMED_BYTES_MAX],
    len: usize,
}

impl NamedKey {
    fn new(prefix: u8, ino: Ino, name: &[u8]) -> NamedKey {
        let len = 9 + name.len();
        let mut bytes = [0; NAMED_BYTES_MAX];
        bytes[0] = prefix;
        bytes[1..9].copy_from_slice(&ino.0.to_be_bytes());
        bytes[9..len].copy_from_slice(name);
        NamedKey { bytes, len }
    }
}

impl std::ops::Deref for NamedKey {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

/// The dentry `name` of `dir`.
pub(super) fn dentry(dir: Ino, name: &Name) -> NamedKey {
    NamedKey::new(DENTRY, dir, name.as_bytes())
}

/// The dentries of `dir` after `after`.
pub(super) fn dentries(dir: Ino, after: Option<&Name>) -> KeyRange {
    let range = KeyRange::prefix(&ino_prefix(DENTRY, dir));
    match after {
        None => range,
        Some(name) => range.after(&dentry(dir, name)),
    }
}

/// The dentries of all directories after `after`.
pub(super) fn all_dentries(after: Option<(Ino, &Name)>) -> KeyRange {
    let range = KeyRange::prefix(&[DENTRY]);
    match after {
        None => range,
        Some((dir, name)) => range.after(&dentry(dir, name)),
    }
}

/// Directory and name of a `D` key.
pub(super) fn parse_dentry(key: &Bytes) -> Option<(Ino, Name)> {
    let (dir, name) = parse_named(DENTRY, key)?;
    Some((dir, Name::new(name).ok()?))
}

/// The extended attribute `name` (at most 255 bytes) of `ino`.
pub(super) fn xattr(ino: Ino, name: &[u8]) -> NamedKey {
    NamedKey::new(XATTR, ino, name)
}

/// The extended attributes of `ino`.
pub(super) fn xattrs(ino: Ino) -> KeyRange {
    KeyRange::prefix(&ino_prefix(XATTR, ino))
}

/// The extended attributes of all inodes after `after`.
pub(super) fn all_xattrs(after: Option<(Ino, &[u8])>) -> KeyRange {
    let range = KeyRange::prefix(&[XATTR]);
    match after {
        None => range,
        Some((ino, name)) => range.after(&xattr(ino, name)),
    }
}

/// Inode and name of an `X` key.
pub(super) fn parse_xattr(key: &Bytes) -> Option<(Ino, Bytes)> {
    parse_named(XATTR, key)
}

fn parse_named(prefix: u8, key: &Bytes) -> Option<(Ino, Bytes)> {
    if key.len() < 9 || key[0] != prefix {
        return None;
    }
    Some((Ino(be_u64(&key[1..9])?), key.slice(9..)))
}

/// What a versionstamp is appended to for a slice group of a chunk.
pub(super) fn chunk_prefix(ino: Ino, chunk: ChunkIndex) -> [u8; 17] {
    let mut key = [0; 17];
    key[0] = CHUNK;
    key[1..9].copy_from_slice(&ino.0.to_be_bytes());
    key[9..].copy_from_slice(&chunk.0.to_be_bytes());
    key
}

/// One slice group.
pub(super) fn slice_group(ino: Ino, chunk: ChunkIndex, stamp: SliceStamp) -> [u8; 29] {
    let mut key = [0; 29];
    key[..17].copy_from_slice(&chunk_prefix(ino, chunk));
    key[17..].copy_from_slice(&stamp.0);
    key
}

/// The slice groups of one chunk.
pub(super) fn chunk(ino: Ino, chunk: ChunkIndex) -> KeyRange {
    KeyRange::prefix(&chunk_prefix(ino, chunk))
}

/// The slice groups of a file from chunk `from` on.
pub(super) fn chunks_from(ino: Ino, from: ChunkIndex) -> KeyRange {
    let end = KeyRange::prefix(&ino_prefix(CHUNK, ino)).end;
    KeyRange { begin: Bytes::copy_from_slice(&chunk_prefix(ino, from)), end }
}

/// The slice groups of all files after `after`.
pub(super) fn all_chunks(after: Option<(Ino, ChunkIndex, SliceStamp)>) -> KeyRange {
    let range = KeyRange::prefix(&[CHUNK]);
    match after {
        None => range,
        Some((ino, chunk, stamp)) => range.after(&slice_group(ino, chunk, stamp)),
    }
}

/// File, chunk and stamp of a `C` key.
pub(super) fn parse_slice_group(key: &[u8]) -> Option<(Ino, ChunkIndex, SliceStamp)> {
    let rest: [u8; 28] = key.strip_prefix(&[CHUNK])?.try_into().ok()?;
    let stamp = SliceStamp(rest[16..].try_into().ok()?);
    Some((Ino(be_u64(&rest[..8])?), ChunkIndex(be_u64(&rest[8..16])?), stamp))
}

/// The record that `session` refers to an inode without a name.
pub(super) fn orphan(ino: Ino, session: SessionId) -> [u8; 13] {
    let mut key = [0; 13];
    key[..9].copy_from_slice(&ino_prefix(ORPHAN, ino));
    key[9..].copy_from_slice(&session.0.to_be_bytes());
    key
}

/// All orphan records of one inode.
pub(super) fn orphans_of(ino: Ino) -> KeyRange {
    KeyRange::prefix(&ino_prefix(ORPHAN, ino))
}

/// All orphan records of inodes after `after`.
pub(super) fn all_orphans(after: Option<Ino>) -> KeyRange {
    match after {
        None => KeyRange::prefix(&[ORPHAN]),
        Some(ino) => KeyRange { begin: orphans_of(ino).end, end: Bytes::copy_from_slice(&[ORPHAN + 1]) },
    }
}

/// Inode and session of an `O` key.
pub(super) fn parse_orphan(key: &[u8]) -> Option<(Ino, SessionId)> {
    let rest: [u8; 12] = key.strip_prefix(&[ORPHAN])?.try_into().ok()?;
    Some((Ino(be_u64(&rest[..8])?), SessionId(u32::from_be_bytes(rest[8..].try_into().ok()?))))
}

/// The record of a pack.
pub(super) fn pack(pack: PackId) -> [u8; 9] {
    pack_key(PACK, pack)
}

/// The live bytes of a pack.
pub(super) fn pack_live(pack: PackId) -> [u8; 9] {
    pack_key(PACK_LIVE, pack)
}

fn pack_key(prefix: u8, pack: PackId) -> [u8; 9] {
    ino_prefix(prefix, Ino(pack.0))
}

/// The records of all packs after `after`.
pub(super) fn packs(after: Option<PackId>) -> KeyRange {
    all_packs(PACK, after)
}

/// The live bytes of all packs after `after`.
pub(super) fn packs_live(after: Option<PackId>) -> KeyRange {
    all_packs(PACK_LIVE, after)
}

fn all_packs(prefix: u8, after: Option<PackId>) -> KeyRange {
    let range = KeyRange::prefix(&[prefix]);
    match after {
        None => range,
        Some(pack) => range.after(&pack_key(prefix, pack)),
    }
}

/// The pack of a `P` or `p` key.
pub(super) fn parse_pack(key: &[u8]) -> Option<PackId> {
    if key.len() != 9 || (key[0] != PACK && key[0] != PACK_LIVE) {
        return None;
    }
    Some(PackId(be_u64(&key[1..])?))
}

const SESSION_ALIVE: u8 = 0;
const SESSION_HEARTBEAT: u8 = 1;
const SESSION_SLOT: u8 = 2;

/// The record of a session; a session without it is dead.
pub(super) fn session(session: SessionId) -> [u8; 6] {
    session_key(SESSION_ALIVE, session)
}

/// The last sign of life of a session.
pub(super) fn session_heartbeat(session: SessionId) -> [u8; 6] {
    session_key(SESSION_HEARTBEAT, session)
}

fn session_key(part: u8, session: SessionId) -> [u8; 6] {
    let mut key = [0; 6];
    key[0] = SESSION;
    key[1] = part;
    key[2..].copy_from_slice(&session.0.to_be_bytes());
    key
}

/// The last request of a slot.
pub(super) fn session_slot(session: SessionId, slot: u16) -> [u8; 8] {
    let mut key = [0; 8];
    key[..6].copy_from_slice(&session_key(SESSION_SLOT, session));
    key[6..].copy_from_slice(&slot.to_be_bytes());
    key
}

/// All request slots of a session.
pub(super) fn session_slots(session: SessionId) -> KeyRange {
    KeyRange::prefix(&session_key(SESSION_SLOT, session))
}

/// The records of all sessions.
pub(super) fn sessions() -> KeyRange {
    KeyRange::prefix(&[SESSION, SESSION_ALIVE])
}

/// The session of an `S 0` key.
pub(super) fn parse_session(key: &[u8]) -> Option<SessionId> {
    let rest: [u8; 4] = key.strip_prefix(&[SESSION, SESSION_ALIVE])?.try_into().ok()?;
    Some(SessionId(u32::from_be_bytes(rest)))
}

/// A counter of what the volume holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Counter {
    Bytes,
    Inodes,
}

/// One shard of a usage counter. A session always adds to the same one.
pub(super) fn usage(counter: Counter, session: SessionId) -> [u8; 3] {
    let shard = session.0.to_be_bytes()[3];
    let counter = match counter {
        Counter::Bytes => b'b',
        Counter::Inodes => b'i',
    };
    [USAGE, counter, shard]
}

/// All shards of all usage counters.
pub(super) fn usages() -> KeyRange {
    KeyRange::prefix(&[USAGE])
}

/// The counter of a `U` key.
pub(super) fn parse_usage(key: &[u8]) -> Option<Counter> {
    match key {
        [USAGE, b'b', _] => Some(Counter::Bytes),
        [USAGE, b'i', _] => Some(Counter::Inodes),
        _ => None,
    }
}

fn ino_prefix(prefix: u8, ino: Ino) -> [u8; 9] {
    let mut key = [0; 9];
    key[0] = prefix;
    key[1..].copy_from_slice(&ino.0.to_be_bytes());
    key
}

fn be_u64(bytes: &[u8]) -> Option<u64> {
    Some(u64::from_be_bytes(bytes.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_parse_back() {
        let name = Name::new("name").unwrap();
        let key = Bytes::copy_from_slice(&dentry(Ino(7), &name));
        assert_eq!(parse_dentry(&key), Some((Ino(7), name)));
        assert_eq!(parse_inode(&inode(Ino(3), Field::Atime)), Some((Ino(3), Some(Field::Atime))));
        let stamp = SliceStamp([5; 12]);
        let group = slice_group(Ino(1), ChunkIndex(2), stamp);
        assert_eq!(parse_slice_group(&group), Some((Ino(1), ChunkIndex(2), stamp)));
        assert_eq!(parse_orphan(&orphan(Ino(9), SessionId(4))), Some((Ino(9), SessionId(4))));
        assert_eq!(parse_session(&session(SessionId(4))), Some(SessionId(4)));
        assert_eq!(parse_pack(&pack(PackId(8))), Some(PackId(8)));
    }

    #[test]
    fn ranges_end_where_the_next_number_begins() {
        let range = dentries(Ino(0xFF), None);
        assert!(range.end.as_ref() <= ino_prefix(DENTRY, Ino(0x100)).as_slice());
        assert!(range.end.as_ref() > dentry(Ino(0xFF), &Name::new(vec![0xFF; 255]).unwrap()).as_ref());
        let all = all_inodes(Some(Ino(5)));
        assert!(all.begin.as_ref() > inode(Ino(5), Field::Target).as_slice());
        assert!(all.begin.as_ref() < inode(Ino(6), Field::Inode).as_slice());
    }

    #[test]
    fn layout_is_frozen() {
        assert_eq!(inode(Ino(0x0102), Field::Length), *b"I\0\0\0\0\0\0\x01\x02\x02");
        assert_eq!(&*dentry(Ino(1), &Name::new("a").unwrap()), b"D\0\0\0\0\0\0\0\x01a");
        assert_eq!(chunk_prefix(Ino(1), ChunkIndex(2)), *b"C\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0\x02");
        assert_eq!(orphan(Ino(1), SessionId(2)), *b"O\0\0\0\0\0\0\0\x01\0\0\0\x02");
        assert_eq!(pack_live(PackId(1 << 32)), *b"p\0\0\0\x01\0\0\0\0");
        assert_eq!(session_slot(SessionId(1), 2), *b"S\x02\0\0\0\x01\0\x02");
        assert_eq!(usage(Counter::Bytes, SessionId(0x0102)), *b"Ub\x02");
    }
}

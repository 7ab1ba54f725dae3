//! The journal of one pack: the bytes of it that were made durable before the store had them.
//!
//! ```text
//! header, 64 bytes
//!   0   8  "RFSSTAG1"                 the last character is the format's version
//!   8  16  volume uuid
//!  24   8  pack id
//!  32  24  zeros
//!  56   8  XXH3-64 of the 56 bytes before
//! records, one after another, each
//!   0   4  number, from 0
//!   4   4  where its blocks are in the pack: where those of the record before end
//!   8   4  number of runs             12   4  bytes of their entries in the pack's footer
//!  16   4  bytes of their blocks      20   4  zeros
//!  24   8  XXH3-64 of the 24 bytes before, the entries and the blocks, seeded with that of volume and pack
//!      entries, then blocks
//! ```
//!
//! All integers are little-endian. Reading believes nothing and stops at the first record that is not whole: what lies
//! behind it was never relied on, or is lost. The caller knows which.

use std::fs::{File, OpenOptions};
use std::io::{self, BufReader, IoSlice, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use bytes::Bytes;
use uuid::Uuid;
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use super::pack::{Fields, FooterWriter, HEADER_BYTES, read_entries};
use crate::types::PackId;

const MAGIC: &[u8; 8] = b"RFSSTAG1";
const FILE_HEADER_BYTES: usize = 64;
const RECORD_HEADER_BYTES: usize = 32;

/// What a pack gained since its last record.
#[derive(Debug)]
pub(super) struct Batch {
    /// Where its blocks are in the pack.
    pub(super) pack_offset: u32,
    /// Number of runs.
    pub(super) runs: u32,
    /// Their entries in the footer.
    pub(super) entries: Vec<u8>,
    /// Their blocks.
    pub(super) blocks: Vec<Bytes>,
}

impl Batch {
    pub(super) fn blocks_len(&self) -> u32 {
        let len: usize = self.blocks.iter().map(Bytes::len).sum();
        u32::try_from(len).expect("a pack is far below 4 GiB")
    }

    /// Bytes of its record.
    pub(super) fn record_len(&self) -> u64 {
        RECORD_HEADER_BYTES as u64 + self.entries.len() as u64 + u64::from(self.blocks_len())
    }
}

/// Blocks of a pack that are in its journal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Piece {
    /// Where in the pack.
    pub(super) offset: u32,
    /// How many bytes.
    pub(super) len: u32,
    /// Where in the file.
    pub(super) at: u64,
}

impl Piece {
    pub(super) fn end(&self) -> u32 {
        self.offset + self.len
    }
}

/// A journal that grows.
#[derive(Debug)]
pub(super) struct Writer {
    file: File,
    len: u64,
    next: u32,
    seed: u64,
}

impl Writer {
    /// Bytes of a journal without records.
    pub(super) const EMPTY_LEN: u64 = FILE_HEADER_BYTES as u64;

    /// Makes the file; neither it nor its name are durable yet. An old file of this name is replaced.
    pub(super) fn create(path: &Path, volume: Uuid, pack: PackId) -> io::Result<Writer> {
        let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path)?;
        file.write_all(&file_header(volume, pack))?;
        Ok(Writer { file, len: Self::EMPTY_LEN, next: 0, seed: seed_of(volume, pack) })
    }

    /// Appends a record; not durable before [`Writer::sync`]. After an error the file must not be appended to again.
    pub(super) fn append(&mut self, batch: &Batch) -> io::Result<Piece> {
        let blocks_len = batch.blocks_len();
        let mut header = [0; RECORD_HEADER_BYTES];
        let entries_len = u32::try_from(batch.entries.len()).map_err(io::Error::other)?;
        for (at, field) in
            [self.next, batch.pack_offset, batch.runs, entries_len, blocks_len].iter().enumerate()
        {
            header[at * 4..at * 4 + 4].copy_from_slice(&field.to_le_bytes());
        }
        let mut sum = Xxh3::with_seed(self.seed);
        sum.update(&header[..24]);
        sum.update(&batch.entries);
        batch.blocks.iter().for_each(|bytes| sum.update(bytes));
        header[24..].copy_from_slice(&sum.digest().to_le_bytes());
        let parts =
            [header.as_slice(), &batch.entries].into_iter().chain(batch.blocks.iter().map(|b| &b[..]));
        let mut slices: Vec<IoSlice<'_>> = parts.map(IoSlice::new).collect();
        write_all_vectored(&mut self.file, &mut slices)?;
        let at = self.len + RECORD_HEADER_BYTES as u64 + batch.entries.len() as u64;
        self.len = at + u64::from(blocks_len);
        self.next += 1;
        Ok(Piece { offset: batch.pack_offset, len: blocks_len, at })
    }

    /// Makes all records durable.
    pub(super) fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    /// Takes off what follows the first `len` bytes, as far as that works: reading stops there in any case.
    pub(super) fn cut(self, len: u64) {
        let _ = self.file.set_len(len);
    }
}

fn write_all_vectored(file: &mut File, mut slices: &mut [IoSlice<'_>]) -> io::Result<()> {
    while !slices.is_empty() {
        match file.write_vectored(slices) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => IoSlice::advance_slices(&mut slices, written),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn file_header(volume: Uuid, pack: PackId) -> [u8; FILE_HEADER_BYTES] {
    let mut header = [0; FILE_HEADER_BYTES];
    header[..8].copy_from_slice(MAGIC);
    header[8..24].copy_from_slice(volume.as_bytes());
    header[24..32].copy_from_slice(&pack.0.to_le_bytes());
    let sum = xxh3_64(&header[..56]);
    header[56..].copy_from_slice(&sum.to_le_bytes());
    header
}

fn seed_of(volume: Uuid, pack: PackId) -> u64 {
    let mut sum = Xxh3::new();
    sum.update(volume.as_bytes());
    sum.update(&pack.0.to_le_bytes());
    sum.digest()
}

/// What a journal holds.
#[derive(Debug)]
pub(super) struct Replayed {
    /// Header and blocks of the pack up to here are there.
    pub(super) pack_len: u32,
    /// The blocks, in order and without gaps.
    pub(super) pieces: Vec<Piece>,
    /// Names their runs.
    pub(super) footer: FooterWriter,
    /// Bytes of the file.
    pub(super) file_len: u64,
}

/// Reads a journal as far as it is whole.
///
/// # Errors
/// The file cannot be read, or it is not the journal of this pack (`InvalidData`).
pub(super) fn replay(path: &Path, volume: Uuid, pack: PackId) -> io::Result<Replayed> {
    let file = File::open(path)?;
    let file_len = file.metadata()?.len();
    let mut file = BufReader::with_capacity(1 << 20, file);
    let mut header = [0; FILE_HEADER_BYTES];
    match file.read_exact(&mut header) {
        Ok(()) if header == file_header(volume, pack) => {}
        Err(error) if error.kind() != io::ErrorKind::UnexpectedEof => return Err(error),
        Ok(()) | Err(_) => return Err(io::Error::new(io::ErrorKind::InvalidData, "no journal of this pack")),
    }
    let mut replayed =
        Replayed { pack_len: HEADER_BYTES, pieces: Vec::new(), footer: FooterWriter::default(), file_len };
    let seed = seed_of(volume, pack);
    let mut at = FILE_HEADER_BYTES as u64;
    while let Some(end) = read_record(&mut file, at, pack, seed, &mut replayed)? {
        at = end;
    }
    Ok(replayed)
}

/// Adds the record at `at`, if there is a whole one; returns where it ends.
fn read_record(
    file: &mut impl Read,
    at: u64,
    pack: PackId,
    seed: u64,
    replayed: &mut Replayed,
) -> io::Result<Option<u64>> {
    let mut header = [0; RECORD_HEADER_BYTES];
    if read_up_to(file, &mut header)? < RECORD_HEADER_BYTES {
        return Ok(None);
    }
    let mut fields = Fields(&header);
    let mut next = || fields.u32().map_err(io::Error::other);
    let (number, offset, runs, entries_len, blocks_len) = (next()?, next()?, next()?, next()?, next()?);
    let blocks_at = at + RECORD_HEADER_BYTES as u64 + u64::from(entries_len);
    let end = blocks_at + u64::from(blocks_len);
    let follows = number as usize == replayed.pieces.len() && offset == replayed.pack_len;
    let pack_end = offset.checked_add(blocks_len);
    let (true, true, Some(pack_end)) = (follows, end <= replayed.file_len, pack_end) else { return Ok(None) };
    let mut sum = Xxh3::with_seed(seed);
    sum.update(&header[..24]);
    let mut entries = vec![0; entries_len as usize];
    file.read_exact(&mut entries)?;
    sum.update(&entries);
    let mut left = blocks_len as usize;
    let mut buffer = vec![0; left.min(1 << 20)];
    while left > 0 {
        let part = left.min(buffer.len());
        file.read_exact(&mut buffer[..part])?;
        sum.update(&buffer[..part]);
        left -= part;
    }
    if header[24..] != sum.digest().to_le_bytes()
        || read_entries(&entries, runs, pack, u64::from(pack_end)).is_err()
    {
        return Ok(None);
    }
    replayed.pieces.push(Piece { offset, len: blocks_len, at: blocks_at });
    replayed.footer.extend(&entries, runs);
    replayed.pack_len = pack_end;
    Ok(Some(end))
}

/// Reads until `to` is full or the file ends; returns how much it read.
fn read_up_to(file: &mut impl Read, to: &mut [u8]) -> io::Result<usize> {
    let mut read = 0;
    while read < to.len() {
        match file.read(&mut to[read..]) {
            Ok(0) => break,
            Ok(part) => read += part,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(read)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::block::Encoder;
    use crate::types::{ChunkIndex, Ino, PackedRun};

    const VOLUME: Uuid = Uuid::from_u128(7);
    const PACK: PackId = PackId(0x1_0000_0002);

    /// `count` batches of two runs each.
    fn batches(count: u8) -> Vec<Batch> {
        let mut pack_offset = HEADER_BYTES;
        let mut made = Vec::new();
        for number in 0..count {
            let mut footer = FooterWriter::default();
            let begin = pack_offset;
            let mut blocks = Vec::new();
            for run in 0..2u8 {
                let plain: Vec<u8> =
                    (0..3000u16).map(|at| at.to_le_bytes()[0].wrapping_mul(number * 2 + run + 1)).collect();
                let mut encoder = Encoder::new();
                encoder.push(plain.into());
                let (list, stored) = encoder.take();
                let stored = Bytes::from(stored.concat());
                let run = PackedRun {
                    pack: PACK,
                    pack_offset,
                    block_bytes: 4096,
                    plain_len: 3000,
                    skip: 0,
                    blocks: list,
                };
                footer.push(Ino(5), ChunkIndex(0), 0, &run);
                pack_offset += u32::try_from(stored.len()).unwrap();
                blocks.push(stored);
            }
            let (entries, runs) = footer.entries();
            made.push(Batch { pack_offset: begin, runs, entries: entries.to_vec(), blocks });
        }
        made
    }

    fn write(path: &Path, batches: &[Batch]) -> Vec<Piece> {
        let mut writer = Writer::create(path, VOLUME, PACK).unwrap();
        let pieces = batches.iter().map(|batch| writer.append(batch).unwrap()).collect();
        writer.sync().unwrap();
        pieces
    }

    #[test]
    fn what_was_written_is_read_with_its_places() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal");
        let batches = batches(3);
        let pieces = write(&path, &batches);
        let replayed = replay(&path, VOLUME, PACK).unwrap();
        assert_eq!(replayed.pieces, pieces);
        let bytes = std::fs::read(&path).unwrap();
        assert_eq!(replayed.file_len, bytes.len() as u64);
        let records: u64 = batches.iter().map(Batch::record_len).sum();
        assert_eq!(bytes.len() as u64, Writer::EMPTY_LEN + records);
        for (piece, batch) in pieces.iter().zip(&batches) {
            let at = usize::try_from(piece.at).unwrap();
            assert_eq!(bytes[at..at + piece.len as usize], batch.blocks.concat());
        }
        assert_eq!(replayed.footer.entries().1, 6);
        assert_eq!(replayed.pack_len, pieces[2].end());
    }

    #[test]
    fn a_torn_or_damaged_record_ends_the_journal_before_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal");
        let pieces = write(&path, &batches(3));
        let bytes = std::fs::read(&path).unwrap();
        let second = usize::try_from(pieces[0].at).unwrap() + pieces[0].len as usize;
        for cut in [second, second + 1, second + 31, second + 40, bytes.len() - 1] {
            std::fs::write(&path, &bytes[..cut]).unwrap();
            let replayed = replay(&path, VOLUME, PACK).unwrap();
            assert_eq!(replayed.pieces, pieces[..if cut == bytes.len() - 1 { 2 } else { 1 }], "cut at {cut}");
        }
        for at in (FILE_HEADER_BYTES..bytes.len()).step_by(7) {
            let mut damaged = bytes.clone();
            damaged[at] ^= 0x10;
            std::fs::write(&path, &damaged).unwrap();
            let whole =
                pieces.iter().take_while(|piece| piece.at + u64::from(piece.len) <= at as u64).count();
            assert_eq!(replay(&path, VOLUME, PACK).unwrap().pieces, pieces[..whole], "damaged at {at}");
        }
    }

    #[test]
    fn records_of_another_pack_or_another_place_are_none() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal");
        let pieces = write(&path, &batches(2));
        let bytes = std::fs::read(&path).unwrap();
        assert_eq!(replay(&path, VOLUME, PackId(3)).unwrap_err().kind(), io::ErrorKind::InvalidData);
        assert_eq!(replay(&path, Uuid::nil(), PACK).unwrap_err().kind(), io::ErrorKind::InvalidData);
        // The rest of an older file behind the header of a newer one.
        let mut stale = bytes.clone();
        stale[..FILE_HEADER_BYTES].copy_from_slice(&file_header(VOLUME, PackId(3)));
        std::fs::write(&path, &stale).unwrap();
        assert_eq!(replay(&path, VOLUME, PackId(3)).unwrap().pieces, []);
        // The first record once more in the place of the second.
        let end = usize::try_from(pieces[0].at).unwrap() + pieces[0].len as usize;
        let twice = [&bytes[..end], &bytes[FILE_HEADER_BYTES..end]].concat();
        std::fs::write(&path, twice).unwrap();
        assert_eq!(replay(&path, VOLUME, PACK).unwrap().pieces, pieces[..1]);
    }
}

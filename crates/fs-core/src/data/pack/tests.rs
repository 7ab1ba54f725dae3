//! The pack format: its golden file, its way back, and hostile bytes.

use proptest::prelude::*;

use super::*;
use crate::types::SessionId;

const VOLUME: Uuid = Uuid::from_u128(0x0011_2233_4455_6677_8899_aabb_ccdd_eeff);

fn pack_id() -> PackId {
    PackId::new(SessionId(3), 9)
}

fn entry(number: u32, pack_offset: u32, lens: &[u32]) -> FooterEntry {
    let blocks = lens.iter().map(|&len| Block {
        stored_len: len,
        raw: len % 2 == 1,
        checksum: u64::from(len) << 40 | 5,
    });
    let run = PackedRun {
        pack: pack_id(),
        pack_offset,
        block_bytes: 64,
        plain_len: u32::try_from(lens.len()).unwrap() * 64 - 10,
        skip: 0,
        blocks: blocks.collect(),
    };
    FooterEntry {
        ino: Ino(u64::from(number) + 100),
        chunk: ChunkIndex(u64::from(number) << 33),
        offset: number * 11,
        run,
    }
}

/// A pack whose blocks are filled with their run's number, and what its footer should say.
fn sample() -> (Vec<u8>, Vec<FooterEntry>) {
    let entries = vec![entry(1, 64, &[20, 31, 9]), entry(2, 124, &[64])];
    let mut bytes = header(VOLUME, pack_id()).to_vec();
    let mut footer = FooterWriter::default();
    for (entry, fill) in entries.iter().zip(1..) {
        assert_eq!(bytes.len(), entry.run.pack_offset as usize);
        bytes.resize(bytes.len() + usize::try_from(entry.run.stored_bytes()).unwrap(), fill);
        let before = footer.len();
        footer.push(entry.ino, entry.chunk, entry.offset, &entry.run);
        assert_eq!(footer.len() - before, FooterWriter::entry_bytes(entry.run.blocks.len()));
    }
    let len = u32::try_from(bytes.len()).unwrap();
    let expected = footer.len();
    let end = footer.finish(pack_id(), len);
    assert_eq!(end.len(), expected);
    bytes.extend(end);
    (bytes, entries)
}

fn read(bytes: &[u8]) -> Result<Vec<FooterEntry>, BadPack> {
    check_header(bytes, VOLUME, pack_id())?;
    let len = footer_len(bytes, bytes.len() as u64)?;
    read_footer(&bytes[bytes.len() - len..], pack_id(), bytes.len() as u64)
}

#[test]
fn a_pack_of_this_version_stays_readable() {
    let (bytes, entries) = sample();
    let golden = include_bytes!("golden-pack-1.bin");
    assert_eq!(bytes, golden, "the format may not change without a new version");
    assert_eq!(read(golden).unwrap(), entries);
}

#[test]
fn an_empty_pack_is_a_pack() {
    let mut bytes = header(VOLUME, pack_id()).to_vec();
    bytes.extend(FooterWriter::default().finish(pack_id(), HEADER_BYTES));
    assert_eq!(read(&bytes).unwrap(), []);
}

#[test]
fn another_volume_or_pack_is_told_apart() {
    let header = header(VOLUME, pack_id());
    assert_eq!(check_header(&header, Uuid::nil(), pack_id()), Err(BadPack::Volume(VOLUME)));
    assert_eq!(check_header(&header, VOLUME, PackId(1)), Err(BadPack::Id(pack_id())));
}

#[test]
fn any_changed_or_missing_byte_outside_of_the_blocks_is_noticed() {
    let (bytes, entries) = sample();
    let blocks = 64..188;
    for at in 0..bytes.len() {
        let mut changed = bytes.clone();
        changed[at] ^= 0x41;
        match read(&changed) {
            Ok(found) => assert!(blocks.contains(&at) && found == entries, "byte {at}"),
            Err(_) => assert!(!blocks.contains(&at), "byte {at}"),
        }
        assert!(read(&bytes[..at]).is_err(), "cut to {at}");
    }
}

/// Trailers that fit their footers, so that the entries themselves are put to the test.
fn with_trailer(entries: &[u8], runs: u32, object_len: u64) -> Vec<u8> {
    let mut bytes = entries.to_vec();
    bytes.extend(pack_id().0.to_le_bytes());
    bytes.extend(u32::try_from(entries.len()).unwrap().to_le_bytes());
    bytes.extend(runs.to_le_bytes());
    bytes.extend(object_len.to_le_bytes());
    let sum = xxh3_64(&bytes);
    bytes.extend(sum.to_le_bytes());
    bytes.extend(TRAILER_MAGIC);
    bytes
}

proptest! {
    #[test]
    fn garbage_is_refused_without_panic(bytes in prop::collection::vec(any::<u8>(), 0..400), len in 0..u64::MAX) {
        prop_assert!(check_header(&bytes, VOLUME, pack_id()).is_err());
        prop_assert!(footer_len(&bytes, len).is_err());
        prop_assert!(read_footer(&bytes, pack_id(), len).is_err());
    }

    #[test]
    fn hostile_entries_with_a_fitting_checksum_name_only_what_is_there(
        mut entries in prop::collection::vec(prop_oneof![4 => Just(0u8), 1 => any::<u8>()], 0..300),
        runs in 0..4u32,
        slack in 0..2000u64,
    ) {
        // Plausible blocks make the deeper checks reachable.
        if entries.len() >= 36 {
            entries[20..36].copy_from_slice(&[200, 0, 0, 0, 64, 0, 0, 0, 64, 0, 0, 0, 4, 0, 0, 0]);
        }
        let object_len = entries.len() as u64 + 104 + slack;
        let bytes = with_trailer(&entries, runs, object_len);
        if let Ok(found) = read_footer(&bytes, pack_id(), object_len) {
            prop_assert_eq!(found.len(), runs as usize);
            for entry in found {
                let end = u64::from(entry.run.pack_offset) + entry.run.stored_bytes();
                prop_assert!(end <= object_len - bytes.len() as u64);
            }
        }
    }
}

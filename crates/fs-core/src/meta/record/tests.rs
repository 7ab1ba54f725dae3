//! Golden values: a change of these bytes is a change of the format.

use super::*;

fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").unwrap();
        text
    })
}

fn time(secs: i64, nanos: u32) -> Timestamp {
    Timestamp { secs, nanos }
}

#[test]
fn inode_is_frozen() {
    let inode = Inode {
        kind: Kind::Directory,
        mode: 0o2755,
        nlink: 2,
        uid: 1000,
        gid: 100,
        rdev: 7,
        flags: 0x10,
        generation: 1,
        parent: Ino(1),
        crtime: time(-2, 5),
    };
    let value = inode.encode();
    assert_eq!(
        hex(&value),
        "010000000002ed0502000000e80300006400000007000000100000000100000001000000000000\
         00feffffffffffffff05000000"
    );
    assert_eq!(Inode::decode(&value).unwrap(), inode);
}

#[test]
fn times_and_lengths_are_frozen() {
    let times = Times { mtime: time(1, 2), ctime: time(3, 4) };
    let value = times.encode();
    assert_eq!(hex(&value), "0100000000010000000000000002000000030000000000000004000000");
    assert_eq!(Times::decode(&value).unwrap(), times);
    assert_eq!(hex(&encode_length(0x0102)), "01000000000201000000000000");
    assert_eq!(decode_length(&encode_length(u64::MAX)).unwrap(), u64::MAX);
    let truncation = Truncation { count: 3, trim_from: Some(9) };
    let value = truncation.encode();
    assert_eq!(hex(&value), "01000000000300000000000000010900000000000000");
    assert_eq!(Truncation::decode(&value).unwrap(), truncation);
    let atime = time(i64::MIN, 999_999_999);
    assert_eq!(decode_atime(&encode_atime(atime)).unwrap(), atime);
}

#[test]
fn lengths_compare_as_little_endian_numbers() {
    // `max` compares the last byte first.
    let reversed = |length| encode_length(length).iter().rev().copied().collect::<Vec<_>>();
    assert!(reversed(0x100) > reversed(0xFF));
    assert!(reversed(1 << 56) > reversed((1 << 56) - 1));
}

#[test]
fn dentry_is_frozen() {
    let dentry = DentryRecord { ino: Ino(0x0102), kind: Kind::Symlink };
    let value = dentry.encode();
    assert_eq!(hex(&value), "0100000000030201000000000000");
    assert_eq!(DentryRecord::decode(&value).unwrap(), dentry);
}

fn packed(pack: u64, blocks: usize) -> Stored {
    let block = Block { stored_len: 100, raw: true, checksum: 0x1122 };
    Stored::Packed(PackedRun {
        pack: PackId(pack),
        pack_offset: 64,
        block_bytes: 4096,
        plain_len: u32::try_from(blocks).unwrap() * 4096,
        skip: 1,
        blocks: vec![block; blocks],
    })
}

#[test]
fn slices_are_frozen() {
    let slices = vec![
        Slice { offset: 1, len: 2, stored: Stored::Hole },
        Slice { offset: 3, len: 2, stored: Stored::Inline(Bytes::from_static(b"hi")) },
        Slice { offset: 5, len: 4000, stored: packed(1 << 32, 1) },
    ];
    let values = encode_groups(&slices).unwrap();
    assert_eq!(values.len(), 1);
    assert_eq!(
        hex(&values[0]),
        "0100000000030001000000020000000003000000020000000168690500\
         0000a00f0000020000000001000000400000000010000000100000010000\
         000100640000802211000000000000"
    );
    assert_eq!(decode_group(&Bytes::from(values[0].clone())).unwrap(), slices);
}

#[test]
fn many_slices_become_several_values_in_order() {
    let slices: Vec<Slice> =
        (0..200).map(|i| Slice { offset: i * 4096, len: 4096, stored: packed(u64::from(i), 100) }).collect();
    let values = encode_groups(&slices).unwrap();
    assert!(values.len() > 1);
    assert!(values.iter().all(|value| value.len() <= GROUP_BYTES_MAX));
    let decoded: Vec<Slice> =
        values.into_iter().flat_map(|value| decode_group(&Bytes::from(value)).unwrap()).collect();
    assert_eq!(decoded, slices);
    assert!(encode_groups(&[]).unwrap().is_empty());
}

#[test]
fn a_slice_that_fits_no_value_is_refused() {
    let slices = [Slice { offset: 0, len: 1, stored: packed(1, 10_000) }];
    assert_eq!(encode_groups(&slices).unwrap_err().kind, ErrorKind::ArgumentTooLarge);
}

#[test]
fn volume_is_frozen() {
    let volume = Volume {
        uuid: Uuid::from_bytes([7; 16]),
        features_required: 0,
        client_version_min: 1,
        client_version_max: u32::MAX,
        block_bytes: 128 << 10,
        codec: Codec::Lz4,
        limits: VolumeLimits { capacity: Some(1 << 30), inodes: None },
        created: time(1, 0),
        store_url: "file:///x".to_owned(),
    };
    let value = encode_volume(&volume);
    assert_eq!(
        hex(&value),
        "01000000000707070707070707070707070707070700000000000000000100\
         0000ffffffff0000020001000000400000\
         0000ffffffffffffffff0100000000000000000000000900\
         66696c653a2f2f2f78"
    );
    assert_eq!(decode_volume(&value).unwrap(), volume);
    let newer = Volume { features_required: 1 << 40, ..volume.clone() };
    assert_eq!(decode_volume(&encode_volume(&newer)).unwrap_err().kind, ErrorKind::NotSupported);
    let newer = Volume { client_version_min: 99, ..volume };
    assert_eq!(decode_volume(&encode_volume(&newer)).unwrap_err().kind, ErrorKind::NotSupported);
}

#[test]
fn session_packs_and_slots_read_back() {
    let session =
        SessionRecord { hostname: "host".into(), pid: 42, mountpoint: "/mnt/ä".into(), started: time(5, 6) };
    assert_eq!(SessionRecord::decode(&session.encode()).unwrap(), session);
    for state in [PackState::Staged, PackState::Stored] {
        let pack = PackRecord { bytes: 99, state };
        assert_eq!(PackRecord::decode(&pack.encode()).unwrap(), pack);
    }
    let slot = SlotRecord { request: 1 << 40, attempt: 3 };
    assert_eq!(SlotRecord::decode(&slot.encode()).unwrap(), slot);
}

#[test]
fn damage_is_an_error_and_never_a_panic() {
    let good = Inode {
        kind: Kind::File,
        mode: 0,
        nlink: 1,
        uid: 0,
        gid: 0,
        rdev: 0,
        flags: 0,
        generation: 0,
        parent: Ino(1),
        crtime: time(0, 0),
    }
    .encode();
    for len in 0..good.len() {
        assert_eq!(Inode::decode(&good[..len]).unwrap_err().kind, ErrorKind::Io);
    }
    let slices = [Slice { offset: 5, len: 4000, stored: packed(1, 2) }];
    let group = encode_groups(&slices).unwrap().remove(0);
    for len in 0..group.len() {
        assert!(decode_group(&Bytes::copy_from_slice(&group[..len])).is_err());
    }
    for index in 0..group.len() {
        for wrong in [0, 1, 0x7F, 0x80, 0xFF] {
            let mut bytes = group.clone();
            bytes[index] = wrong;
            if let Ok(slices) = decode_group(&Bytes::from(bytes)) {
                slices.iter().for_each(assert_fits);
            }
        }
    }
    assert!(decode_counter(b"1234567").is_err());
}

/// What the layers above take for granted of a slice.
fn assert_fits(slice: &Slice) {
    assert!(u64::from(slice.offset) + u64::from(slice.len) <= CHUNK_BYTES, "{slice:?}");
    let Stored::Packed(run) = &slice.stored else { return };
    assert!(run.block_bytes > 0 && u64::from(run.plain_len) <= CHUNK_BYTES, "{run:?}");
    assert!(u64::from(run.skip) + u64::from(slice.len) <= u64::from(run.plain_len), "{run:?}");
    assert_eq!(run.blocks.len(), run.plain_len.div_ceil(run.block_bytes) as usize, "{run:?}");
    assert!(u32::try_from(u64::from(run.pack_offset) + run.stored_bytes()).is_ok(), "{run:?}");
}

#[test]
fn slices_whose_numbers_do_not_fit_each_other_are_damage() {
    let group = |slice: Slice| Bytes::from(encode_groups(&[slice]).unwrap().remove(0));
    let run = |change: fn(&mut PackedRun)| {
        let Stored::Packed(mut run) = packed(1, 2) else { unreachable!("it is packed") };
        change(&mut run);
        group(Slice { offset: 0, len: 4000, stored: Stored::Packed(run) })
    };
    decode_group(&run(|_| {})).unwrap();
    for damaged in [
        group(Slice { offset: u32::MAX, len: u32::MAX, stored: Stored::Hole }),
        run(|run| run.block_bytes = 0),
        run(|run| run.plain_len = 4096),
        run(|run| run.plain_len = u32::MAX),
        run(|run| run.skip = u32::MAX),
        run(|run| run.blocks.truncate(1)),
        run(|run| run.pack_offset = u32::MAX),
    ] {
        assert_eq!(decode_group(&damaged).unwrap_err().kind, ErrorKind::Io);
    }
}

//! The disk cache's limit, its survival of restarts and damage, its lock.

use xxhash_rust::xxh3::xxh3_64;

use super::*;
use crate::data::{Admission, Unusable};
use crate::types::PackId;

const VOLUME: Uuid = Uuid::from_u128(77);

fn options(dir: &Path, bytes_max: u64) -> DiskCacheOptions {
    DiskCacheOptions { dir: dir.to_owned(), bytes_max, admission: Admission::All, unusable: Unusable::Fail }
}

/// A cache on a disk with enough room, whatever the real one has.
fn open(options: &DiskCacheOptions, volume: Uuid) -> Result<DiskCache> {
    DiskCache::open_on(options, volume, |_| Ok(Disk { size: 1 << 40, free: 1 << 39 }))
}

fn block(number: u32) -> (BlockKey, Bytes) {
    let fill = number.to_le_bytes()[0];
    ((PackId(u64::from(number / 100)), number), Bytes::from(vec![fill; 1000 + number as usize % 50]))
}

fn files_bytes(dir: &Path) -> u64 {
    fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().metadata().unwrap().len()).sum()
}

fn get(cache: &DiskCache, number: u32) -> bool {
    let (key, stored) = block(number);
    match cache.get(&[(key, xxh3_64(&stored))]).pop().unwrap() {
        Some(found) => {
            assert_eq!(found, stored, "wrong bytes are never returned");
            true
        }
        None => false,
    }
}

#[test]
fn the_files_never_exceed_the_limit_and_what_is_read_stays() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open(&options(dir.path(), 200_000), VOLUME).unwrap();
    for number in 0..2000 {
        cache.offer(vec![block(number)]);
        cache.sync();
        assert!(files_bytes(dir.path()) <= 200_000);
        assert_eq!(cache.bytes(), files_bytes(dir.path()));
        assert!(get(&cache, 0), "block 0 is read all the time ({number})");
    }
    assert!(cache.bytes() > 150_000, "the room is used");
    assert!(get(&cache, 1999) && !get(&cache, 100));
    cache.close();
}

#[test]
fn blocks_survive_a_restart_but_not_another_volume() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open(&options(dir.path(), 1 << 20), VOLUME).unwrap();
    cache.offer((0..50).map(block));
    cache.close();
    drop(cache);
    let cache = open(&options(dir.path(), 1 << 20), VOLUME).unwrap();
    cache.sync();
    assert!((0..50).all(|number| get(&cache, number)));
    cache.offer(vec![block(60)]);
    cache.close();
    assert!(get(&cache, 60), "readable even after closing");
    drop(cache);
    let cache = open(&options(dir.path(), 30_000), VOLUME).unwrap();
    cache.sync();
    assert!(files_bytes(dir.path()) <= 30_000, "a lowered limit is kept from the start");
    cache.close();
    drop(cache);
    let cache = open(&options(dir.path(), 1 << 20), Uuid::nil()).unwrap();
    cache.sync();
    assert_eq!(cache.bytes(), 0);
    assert!(!(0..61).any(|number| get(&cache, number)));
    cache.close();
}

#[test]
fn damage_anywhere_costs_entries_but_never_gives_wrong_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open(&options(dir.path(), 1 << 20), VOLUME).unwrap();
    cache.offer((0..4).map(block));
    cache.close();
    drop(cache);
    let path = segment_path(dir.path(), 1);
    let sound = fs::read(&path).unwrap();
    for at in (0..sound.len()).step_by(13) {
        for cut in [false, true] {
            let mut damaged = sound.clone();
            if cut {
                damaged.truncate(at);
            } else {
                damaged[at] ^= 0x10;
            }
            fs::write(&path, &damaged).unwrap();
            let cache = open(&options(dir.path(), 1 << 20), VOLUME).unwrap();
            cache.sync();
            let found = (0..4).filter(|number| get(&cache, *number)).count();
            assert!(found < 4);
            assert_eq!((0..4).filter(|number| get(&cache, *number)).count(), found);
            cache.offer((0..4).map(block));
            cache.close();
            assert_eq!(
                (0..4).filter(|number| get(&cache, *number)).count(),
                4,
                "fetched again, cached again"
            );
            drop(cache);
            for entry in fs::read_dir(dir.path()).unwrap() {
                fs::remove_file(entry.unwrap().path()).unwrap();
            }
        }
    }
}

#[test]
fn a_header_that_says_more_than_a_block_can_be_ends_its_segment() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("segment");
    for (len, is_entry) in [(1000, true), (16 << 20, true), ((16 << 20) + 1, false), (u32::MAX, false)] {
        let header = entry::header((PackId(1), 64), len, 1, 2);
        fs::write(&path, header).unwrap();
        let file = open_options().open(&path).unwrap();
        assert_eq!(entry::scan(&file, 0, u64::MAX).is_some(), is_entry, "{len}");
        assert!(entry::scan(&file, 0, header.len() as u64).is_none(), "the block is not there");
    }
}

#[test]
fn damage_under_a_running_cache_is_noticed() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open(&options(dir.path(), 1 << 20), VOLUME).unwrap();
    cache.offer(vec![block(3)]);
    cache.sync();
    let file = open_options().open(segment_path(dir.path(), 1)).unwrap();
    file.write_all_at(&[0xff], 200).unwrap();
    assert!(!get(&cache, 3));
    cache.offer(vec![block(3)]);
    cache.sync();
    assert!(get(&cache, 3));
    cache.close();
}

#[test]
fn a_directory_has_one_user() {
    let dir = tempfile::tempdir().unwrap();
    let first = open(&options(dir.path(), 1 << 20), VOLUME).unwrap();
    let second = open(&options(dir.path(), 1 << 20), VOLUME).unwrap_err();
    assert_eq!(second.kind, ErrorKind::Busy);
    first.close();
    open(&options(dir.path(), 1 << 20), VOLUME).unwrap().close();
}

#[test]
fn a_disk_that_fails_ends_the_writing_only() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open(&options(dir.path(), 100_000), VOLUME).unwrap();
    cache.offer(vec![block(1)]);
    cache.sync();
    // The next segment cannot be made.
    fs::create_dir(segment_path(dir.path(), 2)).unwrap();
    for number in 2..40 {
        cache.offer(vec![block(number)]);
        cache.sync();
    }
    assert!(get(&cache, 1) && !get(&cache, 30));
    assert!(!cache.shared.writing.load(Ordering::Relaxed));
    cache.close();
}

#[test]
fn readers_and_the_writer_do_not_disturb_each_other() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open(&options(dir.path(), 100_000), VOLUME).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                for round in 0..3000 {
                    get(&cache, round % 400);
                    assert!(cache.bytes() <= 100_000);
                }
            });
        }
        for number in 0..400 {
            cache.offer(vec![block(number)]);
        }
    });
    cache.close();
    assert!(cache.bytes() <= 100_000 && files_bytes(dir.path()) <= 100_000);
}

/// What is asked for without waiting. (A filesystem that cannot tell what is in memory leaves it to the other way.)
fn is_now(cache: &DiskCache, key: BlockKey, checksum: u64, range: Range<u32>, expected: &Now) {
    let now = cache.get_now(key, checksum, range);
    assert!(
        now == *expected || now == Now::OnDisk && !cfg!(target_os = "linux"),
        "{now:?}, not {expected:?}"
    );
}

#[test]
fn what_is_in_memory_is_read_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open(&options(dir.path(), 1 << 20), VOLUME).unwrap();
    let (key, stored) = block(7);
    let len = u32::try_from(stored.len()).unwrap();
    let checksum = xxh3_64(&stored);
    is_now(&cache, key, checksum, 0..len, &Now::Absent);
    cache.offer([(key, stored.clone())]);
    cache.sync();
    // It was written just now.
    is_now(&cache, key, checksum, 0..len, &Now::Here(stored.clone()));
    is_now(&cache, key, checksum, 5..len, &Now::Here(stored.slice(5..)));
    is_now(&cache, key, checksum, 0..len + 1, &Now::Absent);
    let file = open_options().open(segment_path(dir.path(), 1)).unwrap();
    file.write_all_at(&[0xff], 200).unwrap();
    is_now(&cache, key, checksum, 0..len, &Now::Absent);
    cache.offer([(key, stored)]);
    cache.sync();
    is_now(&cache, key, checksum ^ 1, 0..len, &Now::Absent);
    cache.close();
}

#[test]
fn a_few_pages_are_checked_by_themselves() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open(&options(dir.path(), 8 << 20), VOLUME).unwrap();
    let stored = Bytes::from((0..30_000u32).flat_map(u32::to_le_bytes).collect::<Vec<u8>>());
    let (key, len) = ((PackId(1), 64), 120_000);
    let checksum = xxh3_64(&stored);
    cache.offer([(key, stored.clone())]);
    cache.sync();
    let ranges = [0..1, 4095..4097, 8192..12_288, 5000..50_000, 117_000..120_000, 119_999..120_000, 70..70];
    for range in ranges {
        let bytes = stored.slice(range.start as usize..range.end as usize);
        is_now(&cache, key, checksum, range, &Now::Here(bytes));
    }
    let file = open_options().open(segment_path(dir.path(), 1)).unwrap();
    let block_at = HEADER_BYTES + entry::head_bytes(len) as u64;
    // One bit of the page from 8192 on.
    let at = 10_000;
    file.write_all_at(&[stored[at] ^ 4], block_at + at as u64).unwrap();
    is_now(&cache, key, checksum, 0..8192, &Now::Here(stored.slice(..8192)));
    is_now(&cache, key, checksum, 12_288..len, &Now::Here(stored.slice(12_288..)));
    is_now(&cache, key, checksum, 8000..8300, &Now::Absent);
    is_now(&cache, key, checksum, 0..8192, &Now::Absent);

    // A sum that fits to other bytes is damage of the sums.
    cache.offer([(key, stored.clone())]);
    cache.sync();
    let second = HEADER_BYTES + entry::entry_bytes(len);
    let mut page = stored[8192..12_288].to_vec();
    page[0] ^= 4;
    file.write_all_at(&page, second + entry::head_bytes(len) as u64 + 8192).unwrap();
    file.write_all_at(&xxh3_64(&page).to_le_bytes(), second + (entry::head_bytes(0) + 2 * 8) as u64).unwrap();
    is_now(&cache, key, checksum, 8192..12_288, &Now::Absent);
    cache.close();
}

#[test]
fn windows_are_paid_for() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open(&options(dir.path(), 1 << 20), VOLUME).unwrap();
    let shared = &cache.shared;
    assert_eq!((0..1000).filter(|_| shared.pay_for_window()).count(), WINDOWS_UNPAID as usize);
    (0..15).for_each(|_| shared.earn());
    assert!(!shared.pay_for_window());
    shared.earn();
    assert!(shared.pay_for_window() && !shared.pay_for_window());
    (0..100_000).for_each(|_| shared.earn());
    assert_eq!(
        (0..1000).filter(|_| shared.pay_for_window()).count(),
        WINDOWS_UNPAID as usize,
        "no more than at the beginning"
    );
    cache.close();
}

#[test]
fn the_last_tenth_of_the_disk_is_left_to_others() {
    static FREE: AtomicU64 = AtomicU64::new(1 << 29);
    let disk = |_: &Path| Ok(Disk { size: 1 << 30, free: FREE.load(Ordering::Relaxed) });
    let dir = tempfile::tempdir().unwrap();
    let cache = DiskCache::open_on(&options(dir.path(), 100 << 20), VOLUME, disk).unwrap();
    let offer = |numbers: std::ops::Range<u32>| {
        cache.offer(numbers.map(|number| (block(number).0, Bytes::from(vec![1; 100_000]))));
        cache.sync();
    };
    offer(0..60);
    assert!(cache.bytes() > 6_000_000);
    FREE.store((1 << 30) / 10, Ordering::Relaxed);
    offer(100..120);
    assert_eq!(cache.bytes(), 0, "others need the room");
    assert_eq!(files_bytes(dir.path()), 0);
    FREE.store(1 << 29, Ordering::Relaxed);
    offer(200..220);
    assert!(cache.bytes() > 2_000_000, "and no longer");
    cache.close();
    assert!(cache.shared.writing.load(Ordering::Relaxed));
}

#[test]
fn a_cache_is_removed_but_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().join("cache");
    let fill = || {
        let cache = open(&options(&place, 1 << 20), VOLUME).unwrap();
        cache.offer([block(1)]);
        cache.close();
    };
    fill();
    remove_disk_cache(&place).unwrap();
    assert!(!place.exists());
    remove_disk_cache(&place).unwrap();
    fill();
    fs::write(place.join("thesis"), "mine").unwrap();
    remove_disk_cache(&place).unwrap();
    assert_eq!(fs::read_dir(&place).unwrap().count(), 1);
}

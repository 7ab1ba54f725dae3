//! What is fetched ahead of readers who do not go forward through all of a file.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::time::Duration;

use rfs_e2e::{Backend, Mount, MountOptions, Volume};
use rfs_testkit::{noise, wait_until};

const LIMIT: Duration = Duration::from_mins(1);
const FILE_BYTES: usize = 48 << 20;
const BLOCK: usize = 128 << 10;

/// A volume with one file, not in any cache.
struct Cold {
    volume: Volume,
    contents: Vec<u8>,
}

impl Cold {
    fn new() -> Option<Cold> {
        let volume = Volume::format(Backend::LocalDirectory)?;
        let contents = noise(1, FILE_BYTES);
        let mount = volume.mount();
        fs::write(mount.path().join("f"), &contents).unwrap();
        mount.unmount();
        Some(Cold { volume, contents })
    }

    fn mount(&self) -> Mount {
        self.volume.mount_with(&MountOptions::args(&["--cache-dir", "off"]))
    }

    /// Reads `len` bytes at each of the offsets.
    fn read(&self, file: &File, len: usize, offsets: impl IntoIterator<Item = usize>) {
        let mut bytes = vec![0; len];
        for offset in offsets {
            file.read_exact_at(&mut bytes, offset as u64).unwrap();
            assert!(bytes == self.contents[offset..offset + len], "at {offset}");
        }
    }

    fn count(&self, mount: &Mount, what: &str) -> usize {
        let status = self.volume.run(&["status", "--json", mount.path().to_str().unwrap()]);
        let status: serde_json::Value = serde_json::from_str(&status.stdout).unwrap();
        status["mount"][what].as_u64().unwrap_or_else(|| panic!("no {what} in {status}")) as usize
    }

    /// Bytes that the store has sent, when it sends no more.
    fn fetched_bytes(&self, mount: &Mount) -> usize {
        let (mut fetched, mut times) = (0, 0);
        let settled = wait_until(LIMIT, || {
            let now = self.count(mount, "fetched_bytes");
            times = if now == fetched { times + 1 } else { 0 };
            fetched = now;
            times == 20
        });
        assert!(settled, "{fetched}");
        fetched
    }
}

#[test]
fn backward_and_strided_readers_find_what_comes_next_in_memory() {
    let Some(cold) = Cold::new() else { return };
    let mib = 1 << 20;
    let backward = |step: usize| -> Vec<usize> { (0..FILE_BYTES / step).rev().map(|i| i * step).collect() };
    let patterns: [(&str, usize, Vec<usize>); 4] = [
        ("back by MiBs", mib, backward(mib)),
        ("back by blocks", BLOCK, backward(BLOCK)),
        ("a block of each MiB", BLOCK, (1..FILE_BYTES / mib).map(|i| i * mib).collect()),
        ("a block of each MiB, backward", BLOCK, backward(mib)),
    ];
    for (name, len, offsets) in patterns {
        let mount = cold.mount();
        let file = File::open(mount.path().join("f")).unwrap();
        let (first, next) = offsets[..16].split_at(12);
        cold.read(&file, len, first.iter().copied());
        let ahead = cold.fetched_bytes(&mount) - first.len() * len;
        assert!(ahead >= next.len() * len, "{name}: {ahead} bytes ahead");
        let found = cold.count(&mount, "memory_cache_hits");
        cold.read(&file, len, next.iter().copied());
        let found = cold.count(&mount, "memory_cache_hits") - found;
        assert_eq!(found, next.len() * (len / BLOCK), "{name}");
        drop(file);
        mount.unmount();
    }
}

#[test]
fn nothing_is_fetched_ahead_of_random_reads() {
    let Some(cold) = Cold::new() else { return };
    let mount = cold.mount();
    let file = File::open(mount.path().join("f")).unwrap();
    let blocks = FILE_BYTES / BLOCK;
    let mut seen = vec![false; blocks];
    let mut random = 1_u64;
    for _ in 0..300 {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let block = (random >> 33) as usize % (blocks - 1) + 1;
        // What is read twice might be the kernel's.
        if !std::mem::replace(&mut seen[block], true) {
            cold.read(&file, 4096, [block * BLOCK + (random >> 20) as usize % 31 * 4096]);
        }
    }
    let read = seen.iter().filter(|seen| **seen).count();
    assert_eq!(cold.fetched_bytes(&mount), read * BLOCK);
    drop(file);
    mount.unmount();
}

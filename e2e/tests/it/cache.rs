//! The disk cache: where it is, what it keeps, and that nothing depends on it.

use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rfs_e2e::{Backend, Mount, MountOptions, Volume, run};
use rfs_testkit::{noise, wait_until};

const LIMIT: Duration = Duration::from_mins(1);
const FILE_BYTES: usize = 24 << 20;

fn cache_dir(volume: &Volume) -> PathBuf {
    volume.dir.path().join("meta.redb.cache")
}

fn segments(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).into_iter().flatten().map(|entry| entry.unwrap().path());
    entries.filter(|path| path.file_name().unwrap() != "LOCK").collect()
}

/// A volume over S3 that holds one file.
fn volume_with_file(contents: &[u8]) -> Option<Volume> {
    let volume = Volume::format(Backend::S3)?;
    let mount = volume.mount_with(&MountOptions::args(&["--cache-dir", "off"]));
    fs::write(mount.path().join("f"), contents).unwrap();
    mount.unmount();
    assert!(!cache_dir(&volume).exists());
    Some(volume)
}

/// Reads pieces of the file here and there, in an order in which nobody reads ahead: what is fetched is what is read.
fn read_scattered(mount: &Mount, contents: &[u8]) {
    let file = fs::File::open(mount.path().join("f")).unwrap();
    for step in 0..32_usize {
        let at = step * (step + 1) / 2 % 32 * (768 << 10);
        let mut piece = [0; 4096];
        file.read_exact_at(&mut piece, at as u64 + 8192).unwrap();
        assert!(piece == contents[at + 8192..at + 8192 + 4096], "at {at}");
    }
}

fn status(volume: &Volume, mount: &Mount) -> serde_json::Value {
    let status = volume.run(&["status", "--json", mount.path().to_str().unwrap()]);
    serde_json::from_str::<serde_json::Value>(&status.stdout).unwrap()["mount"].take()
}

fn count(status: &serde_json::Value, what: &str) -> u64 {
    status[what].as_u64().unwrap_or_else(|| panic!("no {what} in {status}"))
}

/// Waits until the cache has read what an earlier mount left.
fn cache_is_read(volume: &Volume, mount: &Mount) {
    let kept = || segments(&cache_dir(volume)).iter().map(|path| path.metadata().unwrap().len()).sum::<u64>();
    let is_read = |bytes: u64| bytes > 1 << 20 && bytes == kept();
    assert!(wait_until(LIMIT, || is_read(count(&status(volume, mount), "disk_cache_bytes"))));
}

#[test]
fn what_was_read_in_pieces_is_kept_beside_the_metadata() {
    let contents = noise(1, FILE_BYTES);
    let Some(volume) = volume_with_file(&contents) else { return };
    let mount = volume.mount();
    read_scattered(&mount, &contents);
    let seen = status(&volume, &mount);
    assert_eq!(seen["disk_cache_dir"].as_str(), cache_dir(&volume).to_str());
    assert!(count(&seen, "fetched_bytes") > 1 << 20 && count(&seen, "cache_misses") > 0, "{seen}");
    assert_eq!(fs::metadata(cache_dir(&volume)).unwrap().mode() & 0o077, 0, "nobody else can read it");
    mount.unmount();
    assert!(!segments(&cache_dir(&volume)).is_empty(), "it is kept");

    let mount = volume.mount();
    cache_is_read(&volume, &mount);
    read_scattered(&mount, &contents);
    let seen = status(&volume, &mount);
    assert!(count(&seen, "disk_cache_hits") > 0, "{seen}");
    assert_eq!(count(&seen, "fetched_bytes"), 0, "{seen}");
    let text = volume.run(&["status", mount.path().to_str().unwrap()]).stdout;
    assert!(text.contains(cache_dir(&volume).to_str().unwrap()), "{text}");

    // What is read in order comes in few requests.
    let before = count(&status(&volume, &mount), "disk_cache_bytes");
    assert!(fs::read(mount.path().join("f")).unwrap() == contents);
    mount.unmount();
    let after: u64 = segments(&cache_dir(&volume)).iter().map(|path| path.metadata().unwrap().len()).sum();
    assert!(after - before < FILE_BYTES as u64 / 2, "{before} bytes became {after}");
    volume.assert_clean();

    let destroyed = volume.run(&["destroy", "--yes", &volume.meta_url]);
    assert!(destroyed.success(), "{destroyed:?}");
    assert!(!cache_dir(&volume).exists());
}

#[test]
fn what_is_read_here_and_there_again_and_again_comes_as_a_whole() {
    const PART: usize = 8 << 20;
    let contents = noise(1, FILE_BYTES);
    let Some(volume) = volume_with_file(&contents) else { return };
    let mount = volume.mount();
    let file = fs::File::open(mount.path().join("f")).unwrap();
    let read = |at: usize| {
        let mut piece = [0; 4096];
        file.read_exact_at(&mut piece, at as u64).unwrap();
        assert!(piece == contents[at..at + 4096], "at {at}");
    };
    for at in [5 << 20, 1 << 20, 7 << 20, 3 << 20] {
        read(at);
    }
    assert!(wait_until(LIMIT, || count(&status(&volume, &mount), "disk_cache_bytes") > PART as u64));
    let before = count(&status(&volume, &mount), "fetched_bytes");
    assert!(before < 2 * PART as u64, "the rest of the file is not read");
    // In an order in which nobody reads ahead.
    for step in 0..64 {
        read(step * (step + 1) / 2 % 64 * (128 << 10) + 40_960);
    }
    let after = status(&volume, &mount);
    assert_eq!(count(&after, "fetched_bytes"), before, "{after}");
    drop(file);
    mount.unmount();
    volume.assert_clean();
}

#[test]
fn a_cache_can_be_elsewhere_or_off() {
    let contents = noise(1, FILE_BYTES);
    let Some(volume) = volume_with_file(&contents) else { return };
    let elsewhere = volume.dir.path().join("elsewhere");
    let mount = volume.mount_with(&MountOptions::args(&["--cache-dir", elsewhere.to_str().unwrap()]));
    assert!(fs::read(mount.path().join("f")).unwrap() == contents);
    mount.unmount();
    let kept: u64 = segments(&elsewhere).iter().map(|path| path.metadata().unwrap().len()).sum();
    assert!(kept > FILE_BYTES as u64 / 2, "a directory that was named takes everything: {kept}");
    for off in [["--cache-dir", "off"], ["-o", "cache-dir=off"]] {
        let mount = volume.mount_with(&MountOptions::args(&off));
        read_scattered(&mount, &contents);
        assert!(status(&volume, &mount)["disk_cache_dir"].is_null());
        mount.unmount();
    }
    assert!(!cache_dir(&volume).exists());

    let local = Volume::format(Backend::LocalDirectory).expect("needs no server");
    let mount = local.mount();
    assert!(status(&local, &mount)["disk_cache_dir"].is_null(), "the store is a local disk itself");
    mount.unmount();
    assert!(!cache_dir(&local).exists());
}

#[test]
fn a_cache_that_cannot_be_used_is_gone_without_unless_it_was_named() {
    let contents = noise(1, FILE_BYTES);
    let Some(volume) = volume_with_file(&contents) else { return };
    let dir = cache_dir(&volume);
    let named = |volume: &Volume| {
        let target = volume.dir.path().join("mnt");
        let _ = fs::create_dir(&target);
        let mut command = volume.rfs(&["mount", "--cache-dir"]);
        run(command.arg(&dir).arg(&volume.meta_url).arg(&target), LIMIT)
    };
    let works_without = || {
        let mount = volume.mount();
        read_scattered(&mount, &contents);
        assert!(status(&volume, &mount)["disk_cache_dir"].is_null());
        let log = mount.log();
        assert!(log.contains("going on without a disk cache"), "{log}");
        mount.unmount();
    };
    fs::write(&dir, "not a directory").unwrap();
    works_without();
    let refused = named(&volume);
    assert!(!refused.success() && refused.stderr.contains(dir.to_str().unwrap()), "{refused:?}");

    fs::remove_file(&dir).unwrap();
    fs::create_dir(&dir).unwrap();
    let lock = fs::File::create(dir.join("LOCK")).unwrap();
    lock.lock().unwrap();
    works_without();
    let refused = named(&volume);
    assert!(!refused.success() && refused.stderr.contains("another process"), "{refused:?}");
}

#[test]
fn a_damaged_cache_is_fetched_again() {
    let contents = noise(1, FILE_BYTES);
    let Some(volume) = volume_with_file(&contents) else { return };
    let mount = volume.mount();
    read_scattered(&mount, &contents);
    mount.unmount();
    for path in segments(&cache_dir(&volume)) {
        let mut bytes = fs::read(&path).unwrap();
        // In every page of every block, and not in the heads between them.
        let entry = 296 + (128 << 10);
        assert_eq!((bytes.len() - 32) % entry, 0, "all blocks are of one length");
        for block in bytes[32..].chunks_mut(entry) {
            block.iter_mut().skip(296).step_by(4096).for_each(|byte| *byte ^= 1);
        }
        fs::write(&path, bytes).unwrap();
    }
    let mount = volume.mount();
    cache_is_read(&volume, &mount);
    read_scattered(&mount, &contents);
    assert!(count(&status(&volume, &mount), "fetched_bytes") > 1 << 20);
    mount.unmount();
    volume.assert_clean();
}

#[test]
fn a_read_only_mount_has_a_cache_too() {
    let contents = noise(1, FILE_BYTES);
    let Some(volume) = volume_with_file(&contents) else { return };
    for fetches in [true, false] {
        let mount = volume.mount_with(&MountOptions::args(&["--read-only"]));
        if !fetches {
            cache_is_read(&volume, &mount);
        }
        read_scattered(&mount, &contents);
        let seen = status(&volume, &mount);
        assert_eq!(count(&seen, "fetched_bytes") > 0, fetches, "{seen}");
        mount.unmount();
    }
}

//! What a mount does unasked: sends files early, makes few packs of many, and one slice of many.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use rfs_e2e::{Backend, MountOptions, Volume, run_ok};
use rfs_testkit::{noise, wait_until};

const LIMIT: Duration = Duration::from_mins(1);

/// Objects in the store of a volume over a local directory, and their bytes.
fn stored(volume: &Volume) -> (usize, u64) {
    fn add(dir: &Path, sum: &mut (usize, u64)) {
        for entry in fs::read_dir(dir).unwrap().map(Result::unwrap) {
            // What is there for a moment may be gone.
            match entry.metadata() {
                Ok(meta) if meta.is_dir() => add(&entry.path(), sum),
                Ok(meta) => *sum = (sum.0 + 1, sum.1 + meta.len()),
                Err(_) => {}
            }
        }
    }
    let mut sum = (0, 0);
    add(&volume.dir.path().join("store"), &mut sum);
    sum
}

/// Files that are closed are sent when they are 5 s old (`VfsOptions::flush_after`), unless many are.
const OLD: Duration = Duration::from_secs(5);

/// Whether `count` files of 1 MiB each are in the store before the first of them is old.
fn sent_early(volume: &Volume, dir: &Path, count: u64) -> bool {
    let (_, before) = stored(volume);
    #[expect(clippy::disallowed_methods, reason = "the promise is about real time")]
    let begin = Instant::now();
    for i in 0..count {
        fs::write(dir.join(format!("{i}")), noise(i, 1 << 20)).unwrap();
    }
    let all = before + (count << 20);
    wait_until(OLD.saturating_sub(begin.elapsed()), || stored(volume).1 >= all) && begin.elapsed() < OLD
}

#[test]
fn many_files_that_were_closed_are_sent_before_they_are_old() {
    let volume = Volume::format(Backend::LocalDirectory).expect("needs no server");
    // After a pause 4 MiB are enough; a busy machine may need a second try.
    let early = (0..3).any(|_| {
        let mount = volume.mount();
        let early = sent_early(&volume, mount.path(), 4);
        mount.unmount();
        early
    });
    assert!(early, "4 MiB that were closed are not sent until they are old");
    // It is not just that everything is sent at once.
    let mount = volume.mount();
    assert!(!sent_early(&volume, mount.path(), 3), "3 MiB are not worth a pack of their own");
    mount.unmount();
    volume.assert_clean();
}

#[test]
fn many_small_packs_become_few() {
    const FILES: u64 = 150;
    let volume = Volume::format(Backend::LocalDirectory).expect("needs no server");
    // Each fsync waits for a pack of its own.
    let mount = volume.mount_with(&MountOptions::args(&["--staging", "off"]));
    let name = |i| format!("f{i}");
    for i in 0..FILES {
        fs::write(mount.path().join(name(i)), noise(i, 20_000)).unwrap();
        fs::File::open(mount.path().join(name(i))).unwrap().sync_all().unwrap();
    }
    let (before, _) = stored(&volume);
    assert!(before >= FILES as usize, "{before} objects for {FILES} fsyncs");
    // What a mount does every minute; one round merges, the next deletes what is empty then.
    for _ in 0..2 {
        run_ok(volume.rfs(&["gc"]).arg(mount.path()), LIMIT);
    }
    let (after, _) = stored(&volume);
    assert!(after <= 10, "{after} of {before} objects are left");
    mount.unmount();
    let mount = volume.mount();
    for i in 0..FILES {
        assert!(fs::read(mount.path().join(name(i))).unwrap() == noise(i, 20_000), "{i}");
    }
    mount.unmount();
    volume.assert_clean();
}

#[test]
fn a_chunk_written_here_and_there_does_not_stay_in_pieces() {
    const CHANGES: u64 = 300;
    let volume = Volume::format(Backend::LocalDirectory).expect("needs no server");
    let mount = volume.mount();
    let path = mount.path().join("f");
    let ask = |command: &str, place: &Path| -> serde_json::Value {
        let answer = run_ok(volume.rfs(&[command, "--json"]).arg(place), LIMIT).stdout;
        serde_json::from_str(&answer).unwrap()
    };
    let slices = || ask("info", &path)["slices"].as_u64().unwrap();
    let mut contents = noise(0, 4 << 20);
    fs::write(&path, &contents).unwrap();
    let file = fs::OpenOptions::new().read(true).write(true).open(&path).unwrap();
    let mut random = SmallRng::seed_from_u64(1);
    for i in 1..=CHANGES {
        let at = random.random_range(0..contents.len() - 8192);
        let piece = noise(i, random.random_range(4096..8192));
        contents[at..at + piece.len()].copy_from_slice(&piece);
        file.write_all_at(&piece, at as u64).unwrap();
        file.sync_data().unwrap();
    }
    drop(file);
    assert!(wait_until(LIMIT, || slices() < CHANGES / 3), "{} slices of {CHANGES} changes", slices());
    assert!(ask("status", mount.path())["mount"]["chunks_compacted"].as_u64().unwrap() > 0);
    assert!(fs::read(&path).unwrap() == contents);
    mount.unmount();
    let mount = volume.mount();
    assert!(fs::read(mount.path().join("f")).unwrap() == contents);
    mount.unmount();
    volume.assert_clean();
}

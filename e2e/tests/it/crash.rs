//! kill -9 under load: what was fsynced is there, what was replaced is the old or the new, and the volume is clean.

use std::fs;
use std::io::{self, Write};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rand::rngs::SmallRng;
use rand::{Rng, RngCore, SeedableRng};
use rfs_e2e::{Backend, MountOptions, Volume, on_each_backend};
use xxhash_rust::xxh3::xxh3_64;

on_each_backend! {
    fn what_was_fsynced_survives_kill_9;
    fn a_file_replaced_without_fsync_is_the_old_or_the_new;
    fn what_was_closed_is_stored_within_seconds_unasked;
}

#[test]
fn what_was_fsynced_survives_kill_9_without_staging() {
    survive_kill_9(Backend::LocalDirectory, &MountOptions::args(&["--staging", "off"]));
}

/// A promise: the file `name` holds at least these bytes in front.
struct Promise {
    name: String,
    len: usize,
    hash: u64,
}

fn what_was_fsynced_survives_kill_9(backend: Backend) {
    survive_kill_9(backend, &MountOptions::default());
}

fn survive_kill_9(backend: Backend, options: &MountOptions) {
    let Some(volume) = Volume::format(backend) else { return };
    let rounds = if crate::long() { 20 } else { 4 };
    for round in 0..rounds {
        let mount = volume.mount_with(options);
        let promises = Mutex::new(Vec::new());
        let stop = AtomicBool::new(false);
        let base = mount.path().join(format!("round{round}"));
        fs::create_dir(&base).unwrap();
        let mut mount = Some(mount);
        std::thread::scope(|scope| {
            for worker in 0..3 {
                let (base, promises, stop) = (&base, &promises, &stop);
                scope.spawn(move || work(base, worker, promises, stop));
            }
            // A kill in the middle of the work: after a number of promises that differs from round to round.
            let wanted = 20 + round * 7;
            rfs_testkit::wait_until(Duration::from_mins(1), || promises.lock().unwrap().len() >= wanted);
            mount.take().unwrap().kill();
            stop.store(true, Ordering::Relaxed);
        });
        drop(mount);
        let promises = promises.into_inner().unwrap();
        assert!(promises.len() >= 20, "only {} promises were made", promises.len());

        #[expect(clippy::disallowed_methods, reason = "the promise is about real time")]
        let begin = Instant::now();
        let mount = volume.mount_with(options);
        assert!(
            begin.elapsed() < Duration::from_secs(5),
            "mounting after a crash took {:?}",
            begin.elapsed()
        );
        let base = mount.path().join(format!("round{round}"));
        for promise in &promises {
            let bytes =
                fs::read(base.join(&promise.name)).unwrap_or_else(|e| panic!("{}: {e}", promise.name));
            assert!(bytes.len() >= promise.len, "{}: {} of {} bytes", promise.name, bytes.len(), promise.len);
            assert_eq!(xxh3_64(&bytes[..promise.len]), promise.hash, "{}: other bytes", promise.name);
        }
        mount.unmount();
        volume.assert_clean();
    }
}

/// Appends to a log and replaces files by rename, fsyncs each, and writes down what it may then rely on.
fn work(base: &Path, worker: u64, promises: &Mutex<Vec<Promise>>, stop: &AtomicBool) {
    let mut random = SmallRng::seed_from_u64(worker);
    let log_name = format!("log{worker}");
    let Ok(mut log) = fs::File::create(base.join(&log_name)) else { return };
    let mut logged = Vec::new();
    for i in 0.. {
        if stop.load(Ordering::Relaxed) {
            return;
        }
        let mut bytes = vec![0; random.random_range(1..80_000)];
        random.fill_bytes(&mut bytes);
        // Any failure means that the mount is gone.
        if log.write_all(&bytes).and_then(|()| log.sync_all()).is_err() {
            return;
        }
        logged.extend_from_slice(&bytes);
        promises.lock().unwrap().push(Promise {
            name: log_name.clone(),
            len: logged.len(),
            hash: xxh3_64(&logged),
        });
        let (temporary, name) = (base.join(format!("tmp{worker}")), format!("f{worker}.{i}"));
        let replaced = fs::File::create(&temporary)
            .and_then(|mut file| file.write_all(&bytes).and_then(|()| file.sync_all()))
            .and_then(|()| fs::rename(&temporary, base.join(&name)))
            .and_then(|()| fs::File::open(base)?.sync_all());
        if replaced.is_err() {
            return;
        }
        promises.lock().unwrap().push(Promise { name, len: bytes.len(), hash: xxh3_64(&bytes) });
    }
}

/// Files that are replaced all the time, each by a writer of its own.
const REPLACED: u64 = 3;

fn a_file_replaced_without_fsync_is_the_old_or_the_new(backend: Backend) {
    let Some(volume) = Volume::format(backend) else { return };
    let rounds: usize = if crate::long() { 20 } else { 4 };
    let mount = volume.mount();
    for file in 0..REPLACED {
        replace(mount.path(), file, 0).unwrap();
    }
    mount.unmount();
    let mut oldest = [0; REPLACED as usize];
    for round in 0..rounds {
        let mount = volume.mount();
        let base = mount.path().to_owned();
        let counts: Vec<AtomicU64> = oldest.iter().map(|version| AtomicU64::new(*version)).collect();
        let mut mount = Some(mount);
        std::thread::scope(|scope| {
            for (file, count) in (0u64..).zip(&counts) {
                let base = &base;
                scope.spawn(move || {
                    // An error means that the mount is gone.
                    while replace(base, file, count.load(Ordering::Relaxed) + 1).is_ok() {
                        count.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
            let done = || {
                counts
                    .iter()
                    .zip(oldest)
                    .all(|(count, from)| count.load(Ordering::Relaxed) >= from + 3 + round as u64)
            };
            assert!(rfs_testkit::wait_until(Duration::from_mins(1), done), "replacing files takes too long");
            mount.take().unwrap().kill();
        });
        drop(mount);

        let mount = volume.mount();
        for (file, count) in (0u64..).zip(&counts) {
            let bytes = fs::read(mount.path().join(format!("replaced{file}"))).unwrap();
            let version = bytes.first_chunk().copied().map_or(u64::MAX, u64::from_le_bytes);
            assert!(
                bytes == content(file, version),
                "file {file} is of {} bytes, and neither old nor new",
                bytes.len()
            );
            let newest = count.load(Ordering::Relaxed) + 1;
            let from = oldest[file as usize];
            assert!((from..=newest).contains(&version), "file {file}: {version} is not in {from}..={newest}");
            oldest[file as usize] = version;
        }
        mount.unmount();
        volume.assert_clean();
    }
}

/// Writes a new version beside the file and renames it over, without fsync, as many editors do.
fn replace(base: &Path, file: u64, version: u64) -> io::Result<()> {
    let temporary = base.join(format!("new{file}"));
    fs::write(&temporary, content(file, version))?;
    fs::rename(&temporary, base.join(format!("replaced{file}")))
}

/// What a version of a file holds: its number over and over, of a length that changes.
fn content(file: u64, version: u64) -> Vec<u8> {
    let words = 1 + version.wrapping_mul(7919) % 9000 * (file + 1);
    version.to_le_bytes().repeat(words as usize)
}

fn what_was_closed_is_stored_within_seconds_unasked(backend: Backend) {
    let Some(volume) = Volume::format(backend) else { return };
    let mount = volume.mount();
    let bytes = content(1, 5000);
    fs::create_dir(mount.path().join("dir")).unwrap();
    fs::write(mount.path().join("dir/file"), &bytes).unwrap();
    let waiting = || {
        let status = volume.run(&["status", "--json", mount.path().to_str().expect("UTF-8")]).stdout;
        let status: serde_json::Value = serde_json::from_str(&status).unwrap();
        let bytes = |name: &str| status["mount"][name].as_u64().unwrap();
        bytes("dirty_bytes") + bytes("pending_bytes")
    };
    // 5 s, and time for a busy machine; then a second until the names are durable, too.
    assert!(
        rfs_testkit::wait_until(Duration::from_secs(20), || waiting() == 0),
        "still waiting: {}",
        waiting()
    );
    rfs_testkit::wait_until(Duration::from_millis(1500), || false);
    mount.kill();
    let mount = volume.mount();
    assert_eq!(fs::read(mount.path().join("dir/file")).unwrap(), bytes);
    mount.unmount();
    volume.assert_clean();
}

//! kill -9 under load: what was fsynced is there, and the volume is clean.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rand::rngs::SmallRng;
use rand::{Rng, RngCore, SeedableRng};
use rfs_e2e::{Backend, MountOptions, Volume, on_each_backend};
use xxhash_rust::xxh3::xxh3_64;

on_each_backend! {
    fn what_was_fsynced_survives_kill_9;
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

//! The metadata gives no answer in the middle of writes, truncates, fsyncs and changes of names: each call
//! may be tried again until it succeeds, nothing is stuck, and what succeeded and was fsynced is there after `kill -9`.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use rfs_e2e::{Backend, Mount, MountOptions, Volume};
use rfs_testkit::{noise, wait_until};

const LIMIT: Duration = Duration::from_mins(1);
const EIO: i32 = 5;

#[test]
fn what_is_fsynced_after_foundationdb_did_not_answer_is_there() {
    let Some(volume) = Volume::format(Backend::FoundationDb) else { return };
    let server = volume.fdb.as_ref().expect("the volume has a server");
    let work = Work::default();
    survive(&volume, &work, || {
        server.suspend();
        work.wait_until_each("fails", &work.failures, [1; 3]);
        server.resume();
    });
}

/// Lets the workers work before, during and after `trouble`, ends the mount without warning, and looks at what is left.
fn survive(volume: &Volume, work: &Work, trouble: impl FnOnce()) {
    // With the kernel's write-back cache the kernel forgets what could not be written.
    let options = MountOptions::default().with_default("--writeback-cache");
    let mount = volume.mount_with(&options);
    let found = std::thread::scope(|scope| {
        let path = |name: &str| mount.path().join(name);
        let (grown, cut, names) = (path("grown"), path("cut"), path("names"));
        let grown = scope.spawn(move || work.grow(&grown));
        let cut = scope.spawn(move || work.cut(&cut));
        let names = scope.spawn(move || work.name(&names));
        work.wait_until_each("works", &work.steps, [3; 3]);
        trouble();
        let steps = work.steps.each_ref().map(|steps| steps.load(Ordering::Relaxed));
        work.wait_until_each("goes on", &work.steps, steps.map(|steps| steps + 3));
        work.enough.store(true, Ordering::Relaxed);
        (grown.join(), cut.join(), names.join())
    });
    let (Ok(grown), Ok(cut), Ok(names)) = found else { panic!("see above; log:\n{}", mount.log()) };
    mount.kill();
    let mount = volume.mount_with(&options);
    assert!(fs::read(mount.path().join("grown")).unwrap() == grown, "what was appended");
    assert!(fs::read(mount.path().join("cut")).unwrap() == cut, "what was written and cut");
    assert_eq!(names_in(&mount), names);
    mount.unmount();
    volume.assert_clean();
}

fn names_in(mount: &Mount) -> BTreeSet<String> {
    let listed = fs::read_dir(mount.path().join("names")).unwrap();
    listed.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

/// Three workers, each with a file or directory of its own, and how far they are.
#[derive(Default)]
struct Work {
    enough: AtomicBool,
    /// Somebody is stuck: nobody tries again.
    given_up: AtomicBool,
    steps: [AtomicU64; 3],
    failures: [AtomicU64; 3],
}

const GROW: usize = 0;
const CUT: usize = 1;
const NAME: usize = 2;

impl Work {
    fn wait_until_each(&self, what: &str, counts: &[AtomicU64; 3], least: [u64; 3]) {
        let counts = || counts.each_ref().map(|count| count.load(Ordering::Relaxed));
        let all = wait_until(2 * LIMIT, || counts().iter().zip(least).all(|(count, least)| *count >= least));
        self.enough.fetch_or(!all, Ordering::Relaxed);
        self.given_up.fetch_or(!all, Ordering::Relaxed);
        assert!(all, "not everybody {what}: {:?} of {least:?}", counts());
    }

    /// Does a step until it is enough.
    fn steps(&self, worker: usize, mut step: impl FnMut(u64)) {
        for number in 0.. {
            if self.enough.load(Ordering::Relaxed) {
                return;
            }
            step(number);
            self.steps[worker].fetch_add(1, Ordering::Relaxed);
        }
    }

    fn failed(&self, worker: usize, what: &str, error: &io::Error) {
        assert_eq!(error.raw_os_error(), Some(EIO), "{what}: {error}");
        self.failures[worker].fetch_add(1, Ordering::Relaxed);
    }

    /// Calls until it succeeds. `call` is told whether it failed before, and may have come about.
    fn insist<T>(&self, worker: usize, what: &str, mut call: impl FnMut(bool) -> io::Result<T>) -> T {
        let mut done = None;
        let mut failed = false;
        wait_until(LIMIT, || {
            match call(failed) {
                Ok(value) => done = Some(value),
                Err(error) => self.failed(worker, what, &error),
            }
            failed = true;
            done.is_some() || self.given_up.load(Ordering::Relaxed)
        });
        done.unwrap_or_else(|| panic!("{what} still fails"))
    }

    fn create(&self, worker: usize, path: &Path) -> File {
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(false);
        self.insist(worker, "create", |_| options.open(path))
    }

    /// Writes at an offset, and has it durable.
    fn write(&self, worker: usize, file: &File, offset: usize, bytes: &[u8]) {
        self.insist(worker, "write", |_| file.write_all_at(bytes, offset as u64));
        self.insist(worker, "fsync", |_| file.sync_all());
    }

    /// Appends to a file. Returns what it holds.
    fn grow(&self, path: &Path) -> Vec<u8> {
        let file = self.create(GROW, path);
        let mut random = SmallRng::seed_from_u64(1);
        let mut expected = Vec::new();
        self.steps(GROW, |number| {
            let bytes = noise(number, random.random_range(1..50_000));
            self.write(GROW, &file, expected.len(), &bytes);
            expected.extend(bytes);
        });
        expected
    }

    /// Makes a file longer and shorter. Returns what it holds.
    fn cut(&self, path: &Path) -> Vec<u8> {
        const LONG: usize = 2_000_000;
        let file = self.create(CUT, path);
        let mut random = SmallRng::seed_from_u64(2);
        let mut expected: Vec<u8> = Vec::new();
        self.steps(CUT, |number| {
            let bytes = noise(number, random.random_range(1..300_000));
            self.write(CUT, &file, expected.len(), &bytes);
            expected.extend(bytes);
            let size = if expected.len() > LONG { 0 } else { random.random_range(0..expected.len()) };
            match file.set_len(size as u64) {
                Ok(()) => {
                    expected.truncate(size);
                    self.insist(CUT, "fsync", |_| file.sync_all());
                }
                Err(error) => {
                    self.failed(CUT, "truncate", &error);
                    self.look_after_failed_cut(&file, &mut expected, size);
                }
            }
        });
        expected
    }

    /// A cut to `size` failed. It came about or not: what is appended is there, what was beyond is as before or zeros.
    fn look_after_failed_cut(&self, file: &File, expected: &mut Vec<u8>, size: usize) {
        let end = expected.len();
        let bytes = noise(0, 10_000);
        self.write(CUT, file, end, &bytes);
        let mut found = vec![0; end + bytes.len()];
        self.insist(CUT, "read", |_| file.read_exact_at(&mut found, 0));
        assert_eq!(file.metadata().unwrap().len(), found.len() as u64);
        assert!(found[..size] == expected[..size], "what was before the cut");
        assert!(found[end..] == bytes, "what was fsynced after it");
        let cut = found[size..end].iter().all(|byte| *byte == 0);
        assert!(cut || found[size..end] == expected[size..], "neither cut nor not");
        // The kernel may still have what was cut: from here on it is the same for all.
        let over = noise(1, end - size);
        self.write(CUT, file, size, &over);
        *expected = [&found[..size], &over, &bytes].concat();
    }

    /// Makes, renames and removes names that are long. Returns those that are there.
    fn name(&self, dir: &Path) -> BTreeSet<String> {
        self.insist(NAME, "mkdir", |failed| match fs::create_dir(dir) {
            Err(error) if failed && error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            made => made,
        });
        let mut expected = BTreeSet::new();
        self.steps(NAME, |number| {
            for part in 0..16 {
                let name = format!("{number}.{part:0>200}");
                let path = dir.join(&name);
                self.create(NAME, &path);
                match part % 8 {
                    0 => self.insist(NAME, "unlink", |failed| match fs::remove_file(&path) {
                        Err(error) if failed && error.kind() == io::ErrorKind::NotFound => Ok(()),
                        removed => removed,
                    }),
                    1 => {
                        let renamed = format!("renamed.{name}");
                        self.insist(NAME, "rename", |failed| match fs::rename(&path, dir.join(&renamed)) {
                            Err(error) if failed && error.kind() == io::ErrorKind::NotFound => Ok(()),
                            moved => moved,
                        });
                        expected.insert(renamed);
                    }
                    _ => drop(expected.insert(name)),
                }
            }
            self.insist(NAME, "fsync", |_| File::open(dir)?.sync_all());
        });
        expected
    }
}

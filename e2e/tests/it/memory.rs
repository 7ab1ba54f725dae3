//! Memory stays within bounds, however many files are written and read at once, and whatever the store does.

use std::fs;
use std::io::Read;
use std::path::Path;
use std::time::Duration;

use rfs_e2e::{Backend, MountOptions, Volume, run_ok};
use rfs_testkit::{Fault, FaultProxy, S3Server, noise, store_url};

const MEMORY_MIB: u64 = 64;
/// What a mount takes besides: its program, the metadata's cache, threads, and what an allocator cannot give back.
const BESIDES_MIB: u64 = 96;
const WORKERS: u64 = 16;
const FILE_BYTES: usize = 12 << 20;

fn write(dir: &Path, worker: u64) {
    let bytes = noise(worker, FILE_BYTES);
    fs::write(dir.join(format!("large{worker}")), &bytes).unwrap();
    for (number, small) in bytes.chunks(64 << 10).enumerate() {
        fs::write(dir.join(format!("small{worker}-{number}")), small).unwrap();
    }
}

fn read(dir: &Path, worker: u64) {
    let bytes = noise(worker, FILE_BYTES);
    let mut file = fs::File::open(dir.join(format!("large{worker}"))).unwrap();
    let mut buffer = vec![0; 1 << 20];
    for expected in bytes.chunks(1 << 20) {
        file.read_exact(&mut buffer).unwrap();
        assert!(buffer == expected, "worker {worker}");
    }
    for (number, small) in bytes.chunks(64 << 10).enumerate() {
        assert!(fs::read(dir.join(format!("small{worker}-{number}"))).unwrap() == small, "worker {worker}");
    }
}

fn side_by_side(work: impl Fn(u64) + Sync) {
    let work = &work;
    std::thread::scope(|scope| {
        for worker in 0..WORKERS {
            scope.spawn(move || work(worker));
        }
    });
}

fn peak_mib(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() / 1024
}

#[test]
fn sixteen_writers_and_readers_stay_within_the_memory_they_were_given() {
    let Some(volume) = Volume::format(Backend::S3) else { return };
    let options = MountOptions::args(&["--memory", &format!("{MEMORY_MIB}MiB")]);
    let mount = volume.mount_with(&options);
    side_by_side(|worker| write(mount.path(), worker));
    let written = peak_mib(mount.pid());
    mount.unmount();

    // Half of the workers write again what the others read.
    let mount = volume.mount_with(&options);
    side_by_side(
        |worker| if worker % 2 == 0 { read(mount.path(), worker) } else { write(mount.path(), worker) },
    );
    let both = peak_mib(mount.pid());
    mount.unmount();
    let bound = MEMORY_MIB + BESIDES_MIB;
    assert!(
        written <= bound && both <= bound,
        "{written} MiB writing, {both} MiB reading too; bound {bound}"
    );
    volume.assert_clean();
}

#[test]
fn a_store_that_never_answers_takes_no_more_memory() {
    let Some(mut volume) = Volume::unformatted(Backend::S3) else { return };
    let server = volume.s3.as_ref().expect("the volume has a server");
    let proxy = FaultProxy::start(server.address()).unwrap();
    volume.store_url = store_url(&proxy.endpoint(), server.region(), "bucket", "volume");
    let limit = Duration::from_mins(2);
    run_ok(&mut volume.rfs(&["format", &volume.meta_url, &volume.store_url]), limit);
    // What is written goes into the staging directory: without it writes would wait for the store.
    let options = MountOptions::args(&["--memory", &format!("{MEMORY_MIB}MiB")]);
    let mount = volume.mount_with(&options.with_default("--staging"));
    proxy.set(Fault::BlackHole);
    for worker in 0..40 {
        fs::write(mount.path().join(worker.to_string()), noise(worker, FILE_BYTES)).unwrap();
    }
    let (peak, bound) = (peak_mib(mount.pid()), MEMORY_MIB + BESIDES_MIB / 2);
    assert!(peak <= bound, "{peak} MiB, bound {bound}; log:\n{}", mount.log());
    proxy.set(Fault::None);
    run_ok(volume.rfs(&["flush"]).arg(mount.path()), limit);
    mount.unmount();
    let mount = volume.mount();
    for worker in 0..40 {
        assert!(
            fs::read(mount.path().join(worker.to_string())).unwrap() == noise(worker, FILE_BYTES),
            "{worker}"
        );
    }
    mount.unmount();
    volume.assert_clean();
}

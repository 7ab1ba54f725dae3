//! Memory stays within bounds, however many files are written and read at once, and whatever the store does.

use std::fs;
use std::io::Read;
use std::path::Path;
use std::time::Duration;

use rfs_e2e::{Backend, Mount, MountOptions, Volume, run_ok};
use rfs_testkit::{Fault, FaultProxy, S3Server, noise, store_url};

const MEMORY_MIB: u64 = 64;
/// What a mount takes besides, as the help of `--memory` says: its program, the metadata's cache, threads, and what an
/// allocator cannot give back. It does not grow with `--memory`.
const BESIDES_MIB: u64 = 96;
const WORKERS: u64 = 16;
const FILE_BYTES: usize = 8 << 20;
const LIMIT: Duration = Duration::from_mins(2);

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

fn side_by_side(workers: u64, work: impl Fn(u64) + Sync) {
    let work = &work;
    std::thread::scope(|scope| {
        for worker in 0..workers {
            scope.spawn(move || work(worker));
        }
    });
}

fn peak_mib(mount: &Mount) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", mount.pid())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() / 1024
}

/// A volume on S3 whose network can be made to fail.
fn volume_behind_a_proxy() -> Option<(Volume, FaultProxy)> {
    let mut volume = Volume::unformatted(Backend::S3)?;
    let server = volume.s3.as_ref().expect("the volume has a server");
    let proxy = FaultProxy::start(server.address()).unwrap();
    volume.store_url = store_url(&proxy.endpoint(), server.region(), "bucket", "volume");
    run_ok(&mut volume.rfs(&["format", &volume.meta_url, &volume.store_url]), LIMIT);
    Some((volume, proxy))
}

fn given(memory_mib: u64) -> MountOptions {
    MountOptions::args(&["--memory", &format!("{memory_mib}MiB")])
}

/// Has sixteen write, and then sixteen read that while sixteen others write; returns the peaks.
fn write_and_read(fault: Fault, memory_mib: u64) -> Option<(u64, u64)> {
    let (volume, proxy) = volume_behind_a_proxy()?;
    proxy.set(fault);
    let mount = volume.mount_with(&given(memory_mib));
    side_by_side(WORKERS, |worker| write(mount.path(), worker));
    let writing = peak_mib(&mount);
    mount.unmount();
    let mount = volume.mount_with(&given(memory_mib));
    side_by_side(2 * WORKERS, |worker| match worker {
        ..WORKERS => read(mount.path(), worker),
        WORKERS.. => write(mount.path(), worker),
    });
    let both = peak_mib(&mount);
    mount.unmount();
    proxy.set(Fault::None);
    volume.assert_clean();
    Some((writing, both))
}

#[test]
fn sixteen_writers_and_readers_stay_within_the_memory_they_were_given() {
    let memories: &[u64] = if crate::long() { &[MEMORY_MIB, 4 * MEMORY_MIB] } else { &[MEMORY_MIB] };
    for &memory in memories {
        for fault in [Fault::None, Fault::Latency(Duration::from_millis(100))] {
            let Some((writing, both)) = write_and_read(fault, memory) else { return };
            let bound = memory + BESIDES_MIB;
            assert!(
                writing <= bound && both <= bound,
                "{fault:?}: {writing} MiB writing, {both} MiB reading too; bound {bound}"
            );
        }
    }
}

#[test]
fn a_store_that_never_answers_takes_no_more_memory() {
    let Some((volume, proxy)) = volume_behind_a_proxy() else { return };
    // What is written goes into the staging directory: without it writes would wait for the store.
    let mount = volume.mount_with(&given(MEMORY_MIB).with_default("--staging"));
    proxy.set(Fault::BlackHole);
    for worker in 0..40 {
        fs::write(mount.path().join(worker.to_string()), noise(worker, FILE_BYTES)).unwrap();
    }
    let (peak, bound) = (peak_mib(&mount), MEMORY_MIB + BESIDES_MIB / 2);
    assert!(peak <= bound, "{peak} MiB, bound {bound}; log:\n{}", mount.log());
    proxy.set(Fault::None);
    run_ok(volume.rfs(&["flush"]).arg(mount.path()), LIMIT);
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

//! The store, or the metadata, goes away and comes back: nothing is lost, and no new mount is needed.

use std::fs;
use std::io::Write;
use std::process::Command;
use std::time::Duration;

use rfs_e2e::{Backend, MountOptions, Volume, on_each_backend, run, run_ok};
use rfs_testkit::S3Server;

on_each_backend! {
    fn ending_with_bytes_that_cannot_be_stored_names_the_files;
    fn who_made_a_file_is_told_by_the_next_write_that_it_cannot_be_stored;
}

#[test]
fn an_outage_ends_without_a_new_mount() {
    let Some(mut volume) = Volume::format(Backend::S3) else { return };
    let mount = volume.mount_with(&MountOptions::args(&["--io-timeout", "3s", "--staging", "off"]));
    let body: Vec<u8> = (0..2_000_000u32).map(|i| (i ^ (i >> 9)) as u8).collect();
    let server = volume.s3.as_mut().expect("the volume has a server");
    server.kill();
    let mut file = fs::File::create(mount.path().join("f")).unwrap();
    file.write_all(&body).unwrap();
    assert!(file.sync_all().is_err(), "nothing can be stored while the server is away");
    assert_eq!(fs::read(mount.path().join("f")).unwrap(), body, "what was written is there to read");
    server.restart().unwrap();
    // The error was told; the bytes stayed, and are stored once the server answers.
    let stored = rfs_testkit::wait_until(Duration::from_mins(1), || file.sync_all().is_ok());
    assert!(stored, "the store is back, but fsync still fails; log:\n{}", mount.log());
    drop(file);
    mount.unmount();
    let mount = volume.mount();
    assert_eq!(fs::read(mount.path().join("f")).unwrap(), body);
    mount.unmount();
    volume.assert_clean();
}

#[test]
fn an_outage_of_foundationdb_ends_without_a_new_mount() {
    let Some(mut volume) = Volume::format(Backend::FoundationDb) else { return };
    let mount = volume.mount();
    let body: Vec<u8> = (0..2_000_000u32).map(|i| (i ^ (i >> 7)) as u8).collect();
    let mut file = fs::File::create(mount.path().join("f")).unwrap();
    file.write_all(&body).unwrap();
    volume.fdb.as_mut().expect("the volume has a server").kill();
    // Each is told within the time that a transaction may take, or twice that.
    let error = fs::File::create(mount.path().join("g")).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(5), "{error}");
    assert!(file.sync_all().is_err(), "nothing can be committed while the server is away");
    let refused = volume.run(&["fsck", &volume.meta_url.replace("prefix=volume", "prefix=other")]);
    assert_eq!(refused.code(), Some(20), "{}", refused.stderr);
    assert!(refused.stderr.contains("no answer from the FoundationDB cluster"), "{}", refused.stderr);
    volume.fdb.as_mut().expect("the volume has a server").restart().unwrap();
    let stored = rfs_testkit::wait_until(Duration::from_mins(1), || file.sync_all().is_ok());
    assert!(stored, "the server is back, but fsync still fails; log:\n{}", mount.log());
    fs::write(mount.path().join("g"), "works again").unwrap();
    drop(file);
    mount.unmount();
    let mount = volume.mount();
    assert_eq!(fs::read(mount.path().join("f")).unwrap(), body);
    assert_eq!(fs::read(mount.path().join("g")).unwrap(), b"works again");
    mount.unmount();
    volume.assert_clean();
}

fn ending_with_bytes_that_cannot_be_stored_names_the_files(backend: Backend) {
    let Some(mut volume) = Volume::format(backend) else { return };
    let mount = volume.mount_with(&MountOptions::args(&["--io-timeout", "3s", "--staging", "off"]));
    let dir = mount.path().join("some dir");
    fs::create_dir(&dir).unwrap();
    fs::write(dir.join("before"), vec![1; 300_000]).unwrap();
    run_ok(volume.rfs(&["flush"]).arg(mount.path()), LIMIT);
    volume.take_store_away();
    fs::write(dir.join("after"), vec![2; 300_000]).unwrap();

    // `rfs umount` refuses, and the mount goes on.
    let refused = run(volume.rfs(&["umount"]).arg(mount.path()), LIMIT);
    assert_eq!(refused.code(), Some(21), "{}{}", refused.stdout, refused.stderr);
    assert!(refused.stderr.contains("stays mounted"), "{}", refused.stderr);
    assert_eq!(fs::read(dir.join("after")).unwrap(), vec![2; 300_000]);

    // Told to end, it ends, and says what is lost.
    run_ok(Command::new("kill").arg(mount.pid().to_string()), LIMIT);
    let ended = mount.wait();
    let log = fs::read_to_string(volume.dir.path().join("mount.log")).unwrap();
    assert_eq!(ended.code(), Some(21), "{log}");
    assert!(log.contains("not stored: /some dir/after"), "the file is not named:\n{log}");
    assert!(!log.contains("not stored: /some dir/before"), "a file that is stored is named:\n{log}");

    volume.bring_store_back();
    let mount = volume.mount();
    assert_eq!(fs::read(mount.path().join("some dir/before")).unwrap(), vec![1; 300_000]);
    mount.unmount();
    volume.assert_clean();
}

fn who_made_a_file_is_told_by_the_next_write_that_it_cannot_be_stored(backend: Backend) {
    let Some(mut volume) = Volume::format(backend) else { return };
    let options = MountOptions::args(&["--io-timeout", "3s", "--staging", "off"]);
    // With the kernel's write-back cache a write does not reach rfs before it is sent.
    let mount = volume.mount_with(&options.with_default("--writeback-cache"));
    let path = mount.path().join("f");
    let mut maker = fs::File::create(&path).unwrap();
    maker.write_all(&vec![1; 300_000]).unwrap();
    volume.take_store_away();
    let other = fs::OpenOptions::new().write(true).open(&path).unwrap();
    assert!(other.sync_all().is_err(), "nothing can be stored while the store is away");
    let error = maker.write(&vec![2; 300_000]).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(5), "{error}");
    assert_eq!(fs::read(&path).unwrap(), vec![1; 300_000], "what failed was not written");
    maker.write_all(&vec![3; 300_000]).expect("told once");
    volume.bring_store_back();
    let stored = rfs_testkit::wait_until(Duration::from_mins(1), || maker.sync_all().is_ok());
    assert!(stored, "the store is back, but fsync still fails; log:\n{}", mount.log());
    drop((maker, other));
    mount.unmount();
    let mount = volume.mount();
    assert_eq!(fs::read(mount.path().join("f")).unwrap(), [vec![1; 300_000], vec![3; 300_000]].concat());
    mount.unmount();
    volume.assert_clean();
}

const LIMIT: Duration = Duration::from_mins(1);

//! What a user does on the first day.

use std::fs;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt, symlink};
use std::path::Path;
use std::process::{Child, Command};
use std::time::Duration;

use rfs_e2e::{Backend, MountOptions, Volume, on_each_backend, run, run_ok, set_xattr, tool};
use rfs_testkit::wait_until;

on_each_backend! {
    fn files_survive_a_remount;
    fn a_large_sparse_file_keeps_its_holes;
    fn a_removed_open_file_stays_usable;
    fn a_full_volume_says_so_and_loses_nothing;
    fn read_only_mounts_refuse_changes;
    fn info_and_status_tell_what_is_there;
    fn locks_hold_between_processes;
    fn a_running_program_cannot_be_emptied;
    fn what_is_not_carried_is_refused;
    fn a_listing_finds_what_stays_once_while_names_change;
}

fn files_survive_a_remount(backend: Backend) {
    let Some(volume) = Volume::format(backend) else { return };
    let mount = volume.mount();
    let dir = mount.path().join("a/b c/\u{e9}");
    fs::create_dir_all(&dir).unwrap();
    let sizes = [0usize, 1, 4095, 4096, 4097, 131_071, 131_072, 131_073, 5 << 20, (17 << 20) + 3];
    let body = |size: usize| (0..size).map(|i| (i * 31 + i / 4096 + size) as u8).collect::<Vec<u8>>();
    for size in sizes {
        fs::write(dir.join(format!("f{size}")), body(size)).unwrap();
    }
    symlink("../target", dir.join("link")).unwrap();
    fs::hard_link(dir.join("f1"), dir.join("hard")).unwrap();
    fs::set_permissions(dir.join("f1"), fs::Permissions::from_mode(0o640)).unwrap();
    mount.unmount();

    let mount = volume.mount();
    let dir = mount.path().join("a/b c/\u{e9}");
    for size in sizes {
        assert_eq!(fs::read(dir.join(format!("f{size}"))).unwrap(), body(size), "{size} bytes");
    }
    assert_eq!(fs::read_link(dir.join("link")).unwrap().to_str(), Some("../target"));
    let meta = fs::metadata(dir.join("hard")).unwrap();
    assert_eq!((meta.nlink(), meta.mode() & 0o7777, meta.len()), (2, 0o640, 1));
    fs::remove_dir_all(mount.path().join("a")).unwrap();
    assert_eq!(fs::read_dir(mount.path()).unwrap().count(), 0);
    mount.unmount();
    volume.assert_clean();
}

fn a_large_sparse_file_keeps_its_holes(backend: Backend) {
    let Some(volume) = Volume::format(backend) else { return };
    let mount = volume.mount();
    let path = mount.path().join("sparse");
    let file = fs::File::create(&path).unwrap();
    let far = 1u64 << 45;
    file.write_all_at(b"begin", 0).unwrap();
    file.write_all_at(b"end", far).unwrap();
    file.sync_all().unwrap();
    drop(file);
    mount.unmount();
    let mount = volume.mount();
    let path = mount.path().join("sparse");
    let mut file = fs::File::open(&path).unwrap();
    let meta = file.metadata().unwrap();
    assert_eq!(meta.len(), far + 3);
    assert!(meta.blocks() * 512 < 1 << 20, "{} blocks", meta.blocks());
    let mut bytes = [1; 16];
    file.read_exact_at(&mut bytes, far - 13).unwrap();
    assert_eq!(&bytes, b"\0\0\0\0\0\0\0\0\0\0\0\0\0end");
    file.seek(SeekFrom::Start(3)).unwrap();
    file.read_exact(&mut bytes[..4]).unwrap();
    assert_eq!(&bytes[..4], b"in\0\0");
    drop(file);
    mount.unmount();
    volume.assert_clean();
}

/// A child that ends with the test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn a_running_program_cannot_be_emptied(backend: Backend) {
    let Some(volume) = Volume::format(backend) else { return };
    let mount = volume.mount();
    let program = mount.path().join("sleep");
    // Not by this process: a child that another thread starts meanwhile would have it open for writing, too.
    run_ok(Command::new("cp").arg("/bin/sleep").arg(&program), Duration::from_mins(1));
    let len = fs::metadata(&program).unwrap().len();
    let mut running = Running(Command::new(&program).arg("1000").spawn().unwrap());
    for (write, flags) in [(false, libc::O_TRUNC), (true, libc::O_TRUNC), (true, 0)] {
        let refused = fs::OpenOptions::new().read(true).write(write).custom_flags(flags).open(&program);
        assert_eq!(refused.unwrap_err().raw_os_error(), Some(libc::ETXTBSY), "write {write}, flags {flags}");
        assert_eq!(fs::metadata(&program).unwrap().len(), len);
    }
    assert_eq!(running.0.try_wait().unwrap(), None);
    drop(running);
    assert_eq!(fs::read(&program).unwrap(), fs::read("/bin/sleep").unwrap());
    fs::OpenOptions::new().read(true).write(true).truncate(true).open(&program).unwrap();
    assert_eq!(fs::metadata(&program).unwrap().len(), 0);
    mount.unmount();
    volume.assert_clean();
}

fn a_removed_open_file_stays_usable(backend: Backend) {
    let Some(volume) = Volume::format(backend) else { return };
    let mount = volume.mount();
    let path = mount.path().join("gone");
    let mut file = fs::OpenOptions::new().create_new(true).read(true).write(true).open(&path).unwrap();
    file.write_all(&vec![7; 100_000]).unwrap();
    fs::remove_file(&path).unwrap();
    assert!(!path.exists());
    file.write_all(&vec![8; 100_000]).unwrap();
    file.sync_all().unwrap();
    file.rewind().unwrap();
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes).unwrap();
    assert_eq!(bytes, [vec![7; 100_000], vec![8; 100_000]].concat());
    assert_eq!(file.metadata().unwrap().nlink(), 0);
    drop(file);
    mount.unmount();
    volume.assert_clean();
}

fn a_full_volume_says_so_and_loses_nothing(backend: Backend) {
    let Some(volume) = Volume::format_with(backend, &["--capacity", "8MiB", "--inodes", "100"]) else {
        return;
    };
    // What the kernel collects it has promised before anybody can say that it does not fit.
    let mount = volume.mount_with(&MountOptions::default().with_default("--writeback-cache"));
    fs::write(mount.path().join("kept"), vec![3; 4 << 20]).unwrap();
    let full = fs::File::create(mount.path().join("full")).unwrap();
    // Random bytes, so that compression cannot make room.
    let chunk: Vec<u8> = (0u32..1 << 20).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    let error = (0..16).find_map(|i| full.write_all_at(&chunk, i << 20).err()).or(full.sync_all().err());
    assert_eq!(error.expect("8 MiB cannot hold 20 MiB").raw_os_error(), Some(libc_enospc()));
    drop(full);
    assert_eq!(fs::read(mount.path().join("kept")).unwrap(), vec![3; 4 << 20]);
    fs::remove_file(mount.path().join("full")).unwrap();
    fs::write(mount.path().join("fits"), [1; 1000]).unwrap();
    let error = (0..200).find_map(|i| fs::File::create(mount.path().join(format!("i{i}"))).err());
    assert_eq!(error.expect("100 inodes cannot hold 200").raw_os_error(), Some(libc_enospc()));
    mount.unmount();
    volume.assert_clean();
}

fn libc_enospc() -> i32 {
    28
}

fn read_only_mounts_refuse_changes(backend: Backend) {
    let Some(volume) = Volume::format(backend) else { return };
    let mount = volume.mount();
    fs::write(mount.path().join("f"), "text").unwrap();
    mount.unmount();
    let mount = volume.mount_with(&MountOptions::args(&["-o", "ro"]));
    assert_eq!(fs::read(mount.path().join("f")).unwrap(), b"text");
    let error = fs::write(mount.path().join("g"), "text").unwrap_err();
    assert_eq!(error.raw_os_error(), Some(30), "{error}");
    mount.unmount();
    volume.assert_clean();
}

fn info_and_status_tell_what_is_there(backend: Backend) {
    let Some(volume) = Volume::format(backend) else { return };
    let mount = volume.mount();
    let path = mount.path().join("f");
    let mut file = fs::OpenOptions::new().create_new(true).write(true).mode(0o600).open(&path).unwrap();
    file.write_all(&vec![9; 3 << 20]).unwrap();
    let limit = Duration::from_secs(30);
    let info = run_ok(volume.rfs(&["info", "--json"]).arg(&path), limit).stdout;
    let info: serde_json::Value = serde_json::from_str(&info).unwrap();
    // Not fsynced: to be told of, it is stored first.
    assert_eq!(
        (info["size"].as_u64(), info["allocated_bytes"].as_u64()),
        (Some(3 << 20), Some(3 << 20)),
        "{info}"
    );
    assert!(info["slices"].as_u64() > Some(0), "{info}");
    let status = run_ok(volume.rfs(&["status", "--json"]).arg(mount.path()), limit).stdout;
    let status: serde_json::Value = serde_json::from_str(&status).unwrap();
    assert!(status.is_object(), "{status}");
    let fsck = run(volume.rfs(&["fsck", "--data"]).arg(mount.path()), limit);
    assert!(fsck.success(), "fsck of a mounted volume: {}{}", fsck.stdout, fsck.stderr);
    let free = |path: &Path| {
        let df = run_ok(Command::new("df").args(["--block-size=1", "--output=avail"]).arg(path), limit);
        df.stdout.lines().nth(1).expect("a line below the heading").trim().parse::<u64>().unwrap()
    };
    match backend {
        // Others use the disk meanwhile.
        Backend::LocalDirectory => {
            let (shown, disk) = (free(mount.path()), free(&volume.dir.path().join("store")));
            assert!(shown.abs_diff(disk) < 8 << 30, "{shown} bytes free, {disk} on the store's disk");
        }
        Backend::S3 | Backend::FoundationDb => assert!(free(mount.path()) > 0),
    }
    drop(file);
    mount.unmount();
}

fn locks_hold_between_processes(backend: Backend) {
    let Some(flock) = tool("flock", "apt install util-linux") else { return };
    let Some(volume) = Volume::format(backend) else { return };
    let mount = volume.mount();
    let path = mount.path().join("f");
    let file = fs::File::create(&path).unwrap();
    let other = |args: &[&str]| {
        let mut command = Command::new(&flock);
        run(command.args(args).arg(&path).arg("true"), Duration::from_secs(30)).code()
    };
    file.lock().unwrap();
    assert_eq!(other(&["--nonblock"]), Some(1), "flock(2) of another process got an exclusive lock");
    file.unlock().unwrap();
    file.lock_shared().unwrap();
    assert_eq!(other(&["--nonblock", "--shared"]), Some(0));
    assert_eq!(other(&["--nonblock"]), Some(1), "flock(2) of another process got a shared lock");
    file.unlock().unwrap();

    let again = fs::File::options().write(true).open(&path).unwrap();
    lock_record(&file, 0, 10).unwrap();
    let error = lock_record(&again, 9, 1).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EAGAIN), "{error}");
    lock_record(&again, 10, 1).unwrap();
    drop(file);
    // A child that another test is starting has the file open as well until its exec, since O_CLOEXEC closes only then; while
    // children are started, one lock in a thousand outlives its file's close so on ext4, too, and otherwise none.
    assert!(
        wait_until(Duration::from_mins(1), || lock_record(&again, 0, 10).is_ok()),
        "a closed file keeps its lock"
    );
    drop(again);
    mount.unmount();
}

/// A record lock of the open file (fcntl(2), `F_OFD_SETLK`).
#[expect(unsafe_code, reason = "std has no record locks")]
fn lock_record(file: &fs::File, offset: i64, len: i64) -> std::io::Result<()> {
    // SAFETY: all zeros are a valid `flock`.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    (lock.l_type, lock.l_start, lock.l_len) = (libc::F_WRLCK as i16, offset, len);
    // SAFETY: the descriptor is open and the pointer valid during the call.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) };
    if result == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

fn what_is_not_carried_is_refused(backend: Backend) {
    let Some(volume) = Volume::format(backend) else { return };
    let mount = volume.mount();
    let path = mount.path().join("f");
    fs::write(&path, vec![5; 20_000]).unwrap();
    let unnamed = fs::File::options().write(true).custom_flags(libc::O_TMPFILE).open(mount.path());
    assert_eq!(unnamed.unwrap_err().raw_os_error(), Some(libc::EOPNOTSUPP));
    let acl = set_xattr(&path, c"system.posix_acl_access", b"\x02\0\0\0");
    assert_eq!(acl.unwrap_err().raw_os_error(), Some(libc::EOPNOTSUPP));
    let file = fs::File::options().write(true).open(&path).unwrap();
    for mode in [libc::FALLOC_FL_COLLAPSE_RANGE, libc::FALLOC_FL_INSERT_RANGE] {
        assert_eq!(fallocate(&file, mode).unwrap_err().raw_os_error(), Some(libc::EOPNOTSUPP));
    }
    drop(file);
    assert_eq!(fs::read(&path).unwrap(), vec![5; 20_000]);
    mount.unmount();
}

#[expect(unsafe_code, reason = "std has no fallocate(2)")]
fn fallocate(file: &fs::File, mode: i32) -> std::io::Result<()> {
    // SAFETY: the descriptor is open during the call.
    let result = unsafe { libc::fallocate(file.as_raw_fd(), mode, 4096, 4096) };
    if result == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

#[test]
fn larger_packs_are_sent_in_parts() {
    let Some(volume) = Volume::format(Backend::S3) else { return };
    let mount = volume.mount_with(&MountOptions::args(&["--pack-size", "64MiB", "--memory", "1GiB"]));
    let mut state = 1_u64;
    let words = (0..(100 << 20) / 8).flat_map(|_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state ^ (state >> 29)).to_le_bytes()
    });
    let bytes: Vec<u8> = words.collect();
    fs::write(mount.path().join("large"), &bytes).unwrap();
    mount.unmount();
    let bucket = volume.s3.as_ref().expect("the volume has a server").bucket_dir("bucket");
    let found = Command::new("find").arg(bucket).args(["-type", "f", "-size", "+17M"]).output().unwrap();
    let large = String::from_utf8(found.stdout).unwrap().lines().count();
    assert!(large >= 1, "no object is larger than what one request sends");
    let mount = volume.mount();
    assert!(fs::read(mount.path().join("large")).unwrap() == bytes);
    mount.unmount();
    volume.assert_clean();
}

fn a_listing_finds_what_stays_once_while_names_change(backend: Backend) {
    let Some(volume) = Volume::format(backend) else { return };
    let mount = volume.mount();
    let dir = mount.path().join("d");
    fs::create_dir(&dir).unwrap();
    let stays = |number: usize| number.is_multiple_of(5);
    for number in 0..2000 {
        fs::write(dir.join(format!("f{number:04}")), b"").unwrap();
    }
    // What is listed in full may be kept by the kernel, and must not be shown when names have changed.
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 2000);
    let name = |entry: std::io::Result<fs::DirEntry>| entry.unwrap().file_name().into_string().unwrap();
    let mut listing = fs::read_dir(&dir).unwrap();
    let mut found: Vec<String> = listing.by_ref().take(300).map(name).collect();
    for number in (0..2000).filter(|number| !stays(*number)) {
        fs::remove_file(dir.join(format!("f{number:04}"))).unwrap();
    }
    fs::write(dir.join("new"), b"").unwrap();
    found.extend(listing.map(name));
    for number in (0..2000).filter(|number| stays(*number)) {
        let wanted = format!("f{number:04}");
        assert_eq!(found.iter().filter(|found| **found == wanted).count(), 1, "{wanted}");
    }
    let now: Vec<String> = fs::read_dir(&dir).unwrap().map(name).collect();
    assert_eq!(now.len(), 401);
    assert!(now.contains(&"new".to_owned()));
    mount.unmount();
    volume.assert_clean();
}

#[test]
fn a_listing_brings_the_attributes_too() {
    const FILES: usize = 1000;
    let volume = Volume::format(Backend::LocalDirectory).expect("needs no server");
    let mount = volume.mount();
    fs::create_dir(mount.path().join("dir")).unwrap();
    for i in 0..FILES {
        fs::write(mount.path().join(format!("dir/{i}")), "").unwrap();
    }
    mount.unmount();
    let requests = |program: &[&str]| {
        // Each request that reaches rfs is a line in the log.
        let mount = volume.mount_with(&MountOptions::args(&["--log-level", "rfs_fuse=trace"]));
        let before = mount.log().len();
        let mut command = Command::new(program[0]);
        command.args(&program[1..]).current_dir(mount.path().join("dir"));
        assert_eq!(run_ok(&mut command, Duration::from_mins(1)).stdout.lines().count(), FILES + 1);
        let log = mount.log()[before..].to_owned();
        mount.unmount();
        log.lines().filter(|line| line.ends_with(": asked")).map(str::to_owned).collect::<Vec<_>>()
    };
    let find = requests(&["find", ".", "-printf", "%s %T@ %p\\n"]);
    assert!(find.iter().any(|line| line.contains("readdirplus")), "{find:#?}");
    assert!(find.len() < FILES / 10, "{} requests of find: {find:#?}", find.len());
    // `ls` asks for a label of each file besides, which the kernel does not keep.
    let mut ls = requests(&["ls", "-l"]);
    ls.retain(|line| !line.contains("getxattr"));
    assert!(ls.len() < FILES / 10, "{} requests of ls: {ls:#?}", ls.len());
    volume.assert_clean();
}

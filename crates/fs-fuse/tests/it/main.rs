//! Mounts for real, with everything in memory behind it. Says "skipped" where this machine or user cannot mount.

mod gate;
#[expect(clippy::unwrap_used, reason = "what fails to mount fails its test")]
mod mounted;

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read as _, Write as _};
use std::os::unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use rfs_fuse::{MountError, MountOptions, State, Stopped, UnmountError, UnmountMode};
use rustix::fs::{AtFlags, RenameFlags, SeekFrom, Timespec, Timestamps};

use gate::Gate;
use mounted::{Mounted, can_mount};

#[test]
fn files_are_there_until_unmounted() {
    let Some(mounted) = Mounted::new("") else { return };
    let path = mounted.path("file");
    fs::write(&path, b"contents").unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"contents");
    assert!(matches!(rfs_fuse::state(mounted.mountpoint()).unwrap(), State::Alive(_)));
    mounted.unmount();
    assert!(!path.exists());
}

#[test]
fn what_the_kernel_remembers_follows_what_happens() {
    let Some(mounted) = Mounted::new("") else { return };
    let (one, two, sub) = (mounted.path("one"), mounted.path("two"), mounted.path("sub"));
    // A name that is not there is remembered as not there, until it is made.
    assert_eq!(fs::metadata(&one).unwrap_err().kind(), ErrorKind::NotFound);
    fs::write(&one, b"1").unwrap();
    assert_eq!(fs::metadata(&one).unwrap().len(), 1);
    // Links of one file.
    fs::hard_link(&one, &two).unwrap();
    assert_eq!(fs::metadata(&one).unwrap().nlink(), 2);
    fs::remove_file(&two).unwrap();
    assert_eq!(fs::metadata(&one).unwrap().nlink(), 1);
    // Directories: links, times, listings.
    let before = fs::metadata(mounted.mountpoint()).unwrap();
    fs::create_dir(&sub).unwrap();
    let after = fs::metadata(mounted.mountpoint()).unwrap();
    assert_eq!(after.nlink(), before.nlink() + 1);
    assert!((after.mtime(), after.mtime_nsec()) > (before.mtime(), before.mtime_nsec()));
    assert_eq!(mounted.list(""), ["one", "sub"]);
    fs::rename(&one, sub.join("moved")).unwrap();
    assert_eq!((mounted.list(""), mounted.list("sub")), (vec!["sub".to_owned()], vec!["moved".to_owned()]));
}

#[test]
fn a_seek_for_data_finds_what_the_kernel_has_not_sent() {
    for options in ["writeback", "nowriteback"] {
        let Some(mounted) = Mounted::new(options) else { return };
        let file =
            OpenOptions::new().read(true).write(true).create_new(true).open(mounted.path("sparse")).unwrap();
        file.write_all_at(b"data", 1 << 20).unwrap();
        assert_eq!(rustix::fs::seek(&file, SeekFrom::Data(0)).unwrap(), 1 << 20, "{options}");
        assert_eq!(rustix::fs::seek(&file, SeekFrom::Hole(1 << 20)).unwrap(), (1 << 20) + 4, "{options}");
    }
}

#[test]
fn a_file_that_replaces_another_brings_what_the_kernel_has_not_sent() {
    let Some(mounted) = Mounted::new("writeback") else { return };
    fs::write(mounted.path("name"), b"old").unwrap();
    let mut file = File::create(mounted.path("new")).unwrap();
    file.write_all(b"new contents").unwrap();
    fs::rename(mounted.path("new"), mounted.path("name")).unwrap();
    // The file is still open, yet the filesystem knows its contents, not only the kernel.
    assert_eq!(mounted.size_behind_the_kernel(file.metadata().unwrap().ino()), 12);
    drop(file);
    assert_eq!(fs::read(mounted.path("name")).unwrap(), b"new contents");
}

#[test]
fn files_that_swap_names_bring_what_the_kernel_has_not_sent() {
    let Some(mounted) = Mounted::new("writeback") else { return };
    let files = ["one", "two"].map(|name| {
        let mut file = File::create(mounted.path(name)).unwrap();
        file.write_all(name.repeat(5).as_bytes()).unwrap();
        file
    });
    let directory = File::open(mounted.mountpoint()).unwrap();
    rustix::fs::renameat_with(&directory, "one", &directory, "two", RenameFlags::EXCHANGE).unwrap();
    for file in &files {
        assert_eq!(mounted.size_behind_the_kernel(file.metadata().unwrap().ino()), 15);
    }
    drop((files, directory));
    assert_eq!(fs::read(mounted.path("one")).unwrap(), b"two".repeat(5));
}

#[test]
fn reading_moves_the_access_time_wherever_the_pages_are() {
    for options in ["writeback", "nowriteback"] {
        let Some(mounted) = Mounted::new(options) else { return };
        let path = mounted.path("read");
        fs::write(&path, b"1").unwrap();
        let long_ago = Timespec { tv_sec: 1, tv_nsec: 0 };
        let times = Timestamps { last_access: long_ago, last_modification: long_ago };
        rustix::fs::utimensat(rustix::fs::CWD, &path, &times, AtFlags::empty()).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().atime(), 1);
        fs::read(&path).unwrap();
        // The kernel is told by another thread.
        let mut looks = 0;
        while fs::metadata(&path).unwrap().atime() == 1 {
            looks += 1;
            assert!(looks < 100_000, "{options}: the access time has not moved");
            std::thread::yield_now();
        }
    }
}

#[test]
fn times_before_1970_come_back() {
    let Some(mounted) = Mounted::new("") else { return };
    let path = mounted.path("old");
    fs::write(&path, b"").unwrap();
    for (secs, nanos) in [(-4, 7), (-1, 999_999_999), (i64::MIN / 2, 5)] {
        let time = Timespec { tv_sec: secs, tv_nsec: nanos };
        let times = Timestamps { last_access: time, last_modification: time };
        rustix::fs::utimensat(rustix::fs::CWD, &path, &times, AtFlags::empty()).unwrap();
        let metadata = fs::metadata(&path).unwrap();
        assert_eq!((metadata.mtime(), metadata.mtime_nsec()), (secs, nanos));
    }
    // The smallest time there is: fuser must survive decoding it.
    let time = Timespec { tv_sec: i64::MIN, tv_nsec: 0 };
    let times = Timestamps { last_access: time, last_modification: time };
    let _ = rustix::fs::utimensat(rustix::fs::CWD, &path, &times, AtFlags::empty());
    assert!(fs::metadata(&path).is_ok());
}

#[test]
fn inode_flags_are_set_and_shown() {
    use rustix::fs::IFlags;
    let Some(mounted) = Mounted::new("") else { return };
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let path = mounted.path("log");
    let file = File::create(&path).unwrap();
    rustix::fs::ioctl_setflags(&file, IFlags::APPEND).unwrap();
    assert!(rustix::fs::ioctl_getflags(&file).unwrap().contains(IFlags::APPEND));
    assert_eq!(fs::remove_file(&path).unwrap_err().kind(), ErrorKind::PermissionDenied);
    rustix::fs::ioctl_setflags(&file, IFlags::empty()).unwrap();
    fs::remove_file(&path).unwrap();
}

#[test]
fn programs_run_and_large_files_come_back_whole() {
    let Some(mounted) = Mounted::new("nowriteback") else { return };
    let script = mounted.path("script");
    fs::write(&script, "#!/bin/sh\necho ran\n").unwrap();
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
    assert_eq!(Command::new(&script).output().unwrap().stdout, b"ran\n");
    let pattern: Vec<u8> = (0..9_000_000_u32).map(|index| index.to_le_bytes()[1]).collect();
    let path = mounted.path("large");
    File::create(&path).unwrap().write_all(&pattern).unwrap();
    let mut back = Vec::new();
    File::open(&path).unwrap().read_to_end(&mut back).unwrap();
    assert!(back == pattern);
}

#[test]
fn a_mount_that_is_in_use_is_detached() {
    let Some(mounted) = Mounted::new("") else { return };
    fs::write(mounted.path("file"), b"still here").unwrap();
    let mut file = File::open(mounted.path("file")).unwrap();
    let refused = mounted.runtime().block_on(mounted.handle().unmount(UnmountMode::Orderly));
    assert!(matches!(refused, Err(UnmountError::Busy(_))), "{refused:?}");
    assert_eq!(mounted.runtime().block_on(mounted.handle().stop()).unwrap(), Stopped::Detached);
    let mut text = String::new();
    file.read_to_string(&mut text).unwrap();
    assert_eq!(text, "still here");
    drop(file);
    mounted.runtime().block_on(mounted.handle().wait()).unwrap();
}

#[test]
fn wrong_mount_points_are_refused_with_a_reason() {
    if !can_mount() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let missing = Mounted::at(&dir.path().join("missing"), "").unwrap_err();
    assert!(matches!(missing, MountError::MountpointMissing(_)), "{missing}");
    let file = dir.path().join("file");
    fs::write(&file, b"").unwrap();
    let not_directory = Mounted::at(&file, "").unwrap_err();
    assert!(matches!(not_directory, MountError::MountpointNotDirectory(_)), "{not_directory}");
    let not_empty = Mounted::at(dir.path(), "").unwrap_err();
    assert!(matches!(not_empty, MountError::MountpointNotEmpty(_)), "{not_empty}");
    let Some(mounted) = Mounted::new("") else { return };
    let second = Mounted::at(mounted.mountpoint(), "").unwrap_err();
    assert!(matches!(second, MountError::AlreadyMounted { .. }), "{second}");
}

#[test]
fn a_remount_makes_it_read_only_and_back() {
    let Some(mounted) = Mounted::new("") else { return };
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let options = |list| MountOptions::parse(list).unwrap();
    rfs_fuse::remount(mounted.mountpoint(), &options("remount,ro")).unwrap();
    let refused = fs::write(mounted.path("file"), b"").unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::ReadOnlyFilesystem);
    rfs_fuse::remount(mounted.mountpoint(), &options("remount,rw")).unwrap();
    fs::write(mounted.path("file"), b"").unwrap();
}

/// Waits until `now` says `expected`.
#[expect(clippy::disallowed_methods, reason = "what is waited for happens in real time")]
fn settles<T: PartialEq + Debug>(now: impl Fn() -> T, expected: &T, what: &str) {
    let begun = Instant::now();
    while now() != *expected {
        assert!(begun.elapsed() < Duration::from_mins(1), "{what}: {:?} instead of {expected:?}", now());
        std::thread::yield_now();
    }
}

/// Waits until the filesystem has so many files open and knows so many inodes of the kernel's.
fn settles_at(mounted: &Mounted, expected: (u64, u64), what: &str) {
    let now = || {
        let stats = mounted.stats();
        (stats.files_open, stats.inodes_known)
    };
    settles(now, &expected, what);
}

/// Removes everything: what the kernel was given once too often stays known.
fn nothing_is_left(mounted: &Mounted) {
    for name in mounted.list("") {
        mounted.remove(&name);
    }
    settles_at(mounted, (0, 0), "when all is removed");
}

#[test]
fn a_listing_tells_the_kernel_of_all_entries() {
    let Some(mounted) = Mounted::new("") else { return };
    let names: Vec<String> = (0..1000).map(|number| format!("file{number:03}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    mounted.make_behind_the_kernel("large", &names);
    assert_eq!(mounted.list("large"), names);
    let known = mounted.stats().inodes_known;
    assert!(known > 1000, "the kernel knows {known} inodes, and has to ask for each of the others");
}

#[test]
fn a_file_that_the_kernel_takes_for_absent_is_opened_all_the_same() {
    let Some(mounted) = Mounted::new("") else { return };
    for name in ["any", "new"] {
        assert_eq!(fs::metadata(mounted.path(name)).unwrap_err().kind(), ErrorKind::NotFound);
        mounted.make_file_behind_the_kernel(name);
    }
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true).open(mounted.path("any")).unwrap();
    let error = options.create_new(true).open(mounted.path("new")).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::AlreadyExists);
}

/// As if the change that failed had come about.
#[test]
fn a_name_whose_change_was_not_answered_is_looked_up_again() {
    let Some(mounted) = Mounted::new("") else { return };
    let fails = |transactions, call: Call, path: &Path| {
        // The kernel does not have to ask for the directory's attributes before it calls.
        fs::metadata(mounted.path("")).unwrap();
        mounted.gate().turn(Gate::Passes(transactions));
        assert_eq!(call(path.to_owned()).unwrap_err().raw_os_error(), Some(libc::EIO), "{}", path.display());
        mounted.gate().turn(Gate::Open);
    };
    let created = mounted.path("created");
    assert!(!created.exists());
    mounted.make_file_behind_the_kernel("created");
    fails(0, |path| File::create(path).map(drop), &created);
    settles(|| created.exists(), &true, "the file that was created is there");

    let removed = mounted.path("removed");
    fs::write(&removed, b"").unwrap();
    mounted.remove_file_behind_the_kernel("removed");
    fails(0, fs::remove_file, &removed);
    settles(|| removed.exists(), &false, "the file that was removed is there");

    let renamed = mounted.path("renamed");
    fs::write(&renamed, b"").unwrap();
    mounted.remove_file_behind_the_kernel("renamed");
    // The kernel asks for the new name first.
    fails(1, |path| fs::rename(&path, path.with_extension("new")), &renamed);
    settles(|| renamed.exists(), &false, "the file that was renamed is there");
}

/// Names in a directory, sorted, with nothing asked of the filesystem.
fn listed_by_the_kernel(mounted: &Mounted, name: &str) -> Vec<String> {
    // Its access time, which the last listing may have moved.
    let _ = fs::metadata(mounted.path(name));
    mounted.gate().turn(Gate::Passes(0));
    let names = mounted.list(name);
    mounted.gate().turn(Gate::Open);
    names
}

#[test]
fn a_listing_that_the_kernel_keeps_follows_every_change() {
    use rustix::fs::{CWD, renameat_with};
    let Some(mounted) = Mounted::new("") else { return };
    let files: Vec<String> = (0..1000).map(|number| format!("file{number:03}")).collect();
    let files: Vec<&str> = files.iter().map(String::as_str).collect();
    mounted.make_behind_the_kernel("d", &files);
    mounted.make_behind_the_kernel("other", &["x"]);
    let changes: [Call; 9] = [
        |d| File::create_new(d.join("new")).map(drop),
        |d| fs::create_dir(d.join("dir")),
        |d| std::os::unix::fs::symlink("to", d.join("symlink")),
        |d| fs::hard_link(d.join("new"), d.join("link")),
        |d| fs::remove_file(d.join("file500")),
        |d| fs::remove_dir(d.join("dir")),
        |d| fs::rename(d.join("file000"), d.join("../other/file000")),
        |d| fs::rename(d.join("../other/file000"), d.join("file999")),
        |d| Ok(renameat_with(CWD, d.join("../other/x"), CWD, d.join("new"), RenameFlags::EXCHANGE)?),
    ];
    let mut expected: BTreeSet<String> = files.iter().map(|name| (*name).to_owned()).collect();
    let (d, other) = (mounted.path("d"), mounted.path("other"));
    for (number, change) in changes.into_iter().enumerate() {
        assert!(mounted.list("d").iter().eq(&expected), "before change {number}");
        mounted.list("other");
        assert!(listed_by_the_kernel(&mounted, "d").iter().eq(&expected), "kept before change {number}");
        // One who is in the middle, and finds every entry that stays, once.
        let mut listing = fs::read_dir(&d).unwrap();
        let mut found: Vec<String> = Vec::new();
        let mut take = |listing: &mut fs::ReadDir, count| {
            found.extend(listing.take(count).map(|entry| entry.unwrap().file_name().into_string().unwrap()));
        };
        take(&mut listing, 100);
        change(d.clone()).unwrap();
        let after: BTreeSet<String> = fs::read_dir(&d)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        take(&mut listing, usize::MAX);
        let once: BTreeSet<String> = found.iter().cloned().collect();
        assert_eq!(once.len(), found.len(), "entries came twice at change {number}");
        assert!(expected.intersection(&after).all(|name| once.contains(name)), "missed at change {number}");
        assert!(number == 7 || number == 8 || after != expected, "nothing seen of change {number}");
        expected = after;
    }
    let ends = ["link", "new", "symlink"].map(str::to_owned);
    let left = (1..1000).filter(|number| *number != 500).map(|number| format!("file{number:03}"));
    assert!(expected.iter().eq(&left.chain(ends).collect::<BTreeSet<_>>()));
    assert_eq!(fs::read_dir(other).unwrap().count(), 1);
}

type Call = fn(PathBuf) -> std::io::Result<()>;

#[test]
fn what_came_too_late_is_taken_back() {
    let Some(mounted) = Mounted::answering_within(Duration::from_millis(200), "") else { return };
    fs::create_dir(mounted.path("dir")).unwrap();
    fs::write(mounted.path("file"), b"1").unwrap();
    mounted.make_behind_the_kernel("unseen", &[]);
    for absent in ["made", "node", "copy"] {
        // So that the kernel need not look when it is made.
        assert_eq!(fs::metadata(mounted.path(absent)).unwrap_err().kind(), ErrorKind::NotFound);
    }
    let calls: [(&str, Call); 6] = [
        ("unseen", |path| fs::metadata(path).map(drop)),
        ("made", |path| File::create_new(path).map(drop)),
        ("node", |path| fs::create_dir(path)),
        ("copy", |path| fs::hard_link(path.with_file_name("file"), path)),
        ("file", |path| OpenOptions::new().append(true).open(path).map(drop)),
        ("dir", |path| fs::read_dir(path)?.next().map_or(Ok(()), |entry| entry.map(drop))),
    ];
    // The kernel does not forget what is open.
    let open = ["file", "dir"].map(|name| File::open(mounted.path(name)).unwrap());
    settles_at(&mounted, (1, 2), "before");
    mounted.gate().turn(Gate::Shut);
    for (name, call) in calls {
        let failed = call(mounted.path(name)).unwrap_err();
        assert_eq!(failed.raw_os_error(), Some(libc::EIO), "{name}: {failed}");
    }
    // Each goes on in a task of its own, which ends when its result is there.
    let tasks = || mounted.runtime().metrics().num_alive_tasks();
    let others = tasks() - calls.len();
    mounted.gate().turn(Gate::Open);
    settles(|| tasks() <= others, &true, "when the late results are there");
    settles_at(&mounted, (1, 2), "after");
    drop(open);
    // What came too late has happened all the same.
    assert!(fs::metadata(mounted.path("unseen")).unwrap().is_dir());
    nothing_is_left(&mounted);
}

#[test]
fn what_fails_half_way_is_taken_back() {
    let Some(mounted) = Mounted::new("dirsync") else { return };
    // The kernel does not forget what is open.
    let open = File::create(mounted.path("file")).unwrap();
    let names: Vec<String> = (0..200).map(|index| format!("f{index}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let calls: [(&str, Call); 6] = [
        ("made", |path| File::create_new(path).map(drop)),
        ("node", |path| fs::create_dir(path)),
        ("symlink", |path| std::os::unix::fs::symlink("to", path)),
        ("link", |path| fs::hard_link(path.with_file_name("file"), path)),
        ("fifo", |path| {
            let mode = rustix::fs::Mode::RUSR;
            Ok(rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, mode, 0)?)
        }),
        // One answer holds all, and what it holds is read in two pieces.
        ("list", |path| fs::read_dir(path)?.next().map_or(Ok(()), |entry| entry.map(drop))),
    ];
    for (name, call) in calls {
        let mut failures = 0;
        for passes in 0.. {
            let name = format!("{name}{passes}");
            let list = name.starts_with("list").then(|| {
                mounted.make_behind_the_kernel(&name, &names);
                File::open(mounted.path(&name)).unwrap()
            });
            let listed = u64::from(list.is_some());
            settles_at(&mounted, (1, 1 + listed), &name);
            mounted.gate().turn(Gate::Passes(passes));
            let done = call(mounted.path(&name));
            mounted.gate().turn(Gate::Open);
            if let Err(failed) = &done {
                assert_eq!(failed.raw_os_error(), Some(libc::EIO), "{name}: {failed}");
                settles_at(&mounted, (1, 1 + listed), &name);
                failures += 1;
            }
            drop(list);
            if done.is_ok() || listed > 0 {
                mounted.remove(&name);
            }
            if done.is_ok() {
                break;
            }
        }
        assert!(failures > 1, "{name} failed only {failures} times");
    }
    drop(open);
    nothing_is_left(&mounted);
}

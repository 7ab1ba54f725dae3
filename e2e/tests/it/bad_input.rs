//! Wrong use and broken surroundings: a clear message, the documented exit code, no panic, no hang, nothing lost.

use std::fs;
use std::process::Command;
use std::time::Duration;

use rfs_e2e::{Backend, Finished, Volume, run, tool};
use rfs_testkit::S3Server;

/// Most time that a refusal may take.
const LIMIT: Duration = Duration::from_mins(1);

fn assert_refused(finished: &Finished, code: i32, words: &[&str]) {
    let text = format!("{}{}", finished.stdout, finished.stderr);
    assert_eq!(finished.code(), Some(code), "{text}");
    assert!(!text.contains("panicked"), "{text}");
    for word in words {
        assert!(text.to_lowercase().contains(&word.to_lowercase()), "no {word:?} in: {text}");
    }
}

/// Formatted volumes over redb: with a local directory, and with an S3 server if there is one.
fn on_each_store(test: impl Fn(Volume)) {
    for backend in [Backend::LocalDirectory, Backend::S3] {
        if let Some(volume) = Volume::format(backend) {
            test(volume);
        }
    }
}

/// `rfs mount` of the volume at a directory below the volume's own, as `change` has it.
fn try_to_mount(volume: &Volume, change: impl FnOnce(&mut Command)) -> Finished {
    let target = volume.dir.path().join("mnt");
    fs::create_dir_all(&target).unwrap();
    let mut command = volume.rfs(&["mount", "--io-timeout", "3s", &volume.meta_url]);
    change(command.arg(&target));
    run(&mut command, LIMIT)
}

#[test]
fn wrong_credentials_are_told() {
    let Some(volume) = Volume::unformatted(Backend::S3) else { return };
    let mut command = volume.rfs(&["format", &volume.meta_url, &volume.store_url]);
    command.env("AWS_SECRET_ACCESS_KEY", "wrong");
    assert_refused(&run(&mut command, LIMIT), 10, &["credentials"]);
    assert!(volume.run(&["format", &volume.meta_url, &volume.store_url]).success());
    let finished = try_to_mount(&volume, |rfs| {
        rfs.env("AWS_SECRET_ACCESS_KEY", "wrong");
    });
    assert_refused(&finished, 10, &["credentials", "set AWS_ACCESS_KEY_ID"]);
    volume.mount().unmount();
}

#[test]
fn a_store_that_is_gone_is_told_and_nothing_is_made_in_its_place() {
    let mut volume = Volume::format(Backend::LocalDirectory).expect("needs no server");
    volume.take_store_away();
    assert_refused(&try_to_mount(&volume, |_| {}), 11, &["store"]);
    assert!(!volume.dir.path().join("store").exists());
    volume.bring_store_back();
    volume.mount().unmount();

    let Some(mut volume) = Volume::format(Backend::S3) else { return };
    volume.take_store_away();
    assert_refused(&try_to_mount(&volume, |_| {}), 21, &["127.0.0.1"]);
    volume.bring_store_back();
    volume.mount().unmount();

    let server = volume.s3.as_ref().expect("the volume has a server");
    fs::rename(server.bucket_dir("bucket"), server.bucket_dir("other")).unwrap();
    assert_refused(&try_to_mount(&volume, |_| {}), 11, &["no such bucket"]);
}

#[test]
fn a_missing_fuse_device_is_told() {
    let Some(unshare) = tool("unshare", "apt install util-linux") else { return };
    on_each_store(|volume| {
        let target = volume.dir.path().join("mnt");
        fs::create_dir(&target).unwrap();
        let rfs = volume.rfs(&["mount", &volume.meta_url]);
        // A /dev of its own, without fuse.
        let mut command = Command::new(&unshare);
        command.args(["--mount", "sh", "-c"]);
        command.arg("mount -t tmpfs none /dev && mknod -m 666 /dev/null c 1 3 && exec \"$@\"");
        command.arg("sh").arg(rfs.get_program()).args(rfs.get_args()).arg(&target);
        command.envs(rfs.get_envs().filter_map(|(name, value)| Some((name, value?))));
        let finished = run(&mut command, LIMIT);
        if finished.stderr.contains("unshare failed") {
            return eprintln!("skipped: only root can hide /dev/fuse ({})", finished.stderr.trim());
        }
        assert_refused(&finished, 1, &["/dev/fuse"]);
        volume.mount().unmount();
    });
}

#[test]
fn a_missing_bucket_is_told() {
    let Some(volume) = Volume::unformatted(Backend::S3) else { return };
    let url = volume.store_url.replace("s3://bucket/", "s3://other-bucket/");
    assert_refused(&volume.run(&["format", &volume.meta_url, &url]), 11, &["other-bucket"]);
}

#[test]
fn an_endpoint_that_does_not_answer_is_told() {
    let Some(mut volume) = Volume::unformatted(Backend::S3) else { return };
    volume.s3.as_mut().expect("the volume has a server").kill();
    let mut command = volume.rfs(&["format", "--io-timeout", "3s", &volume.meta_url, &volume.store_url]);
    assert_refused(&run(&mut command, LIMIT), 21, &["127.0.0.1"]);
}

#[test]
fn a_volume_that_is_not_formatted_is_told() {
    let volume = Volume::unformatted(Backend::LocalDirectory).expect("needs no server");
    let target = volume.dir.path().join("mnt");
    fs::create_dir(&target).unwrap();
    let finished = run(volume.rfs(&["mount", &volume.meta_url]).arg(&target), LIMIT);
    assert_refused(&finished, 12, &["rfs format"]);
}

#[test]
fn formatting_twice_is_refused() {
    let volume = Volume::format(Backend::LocalDirectory).expect("needs no server");
    let finished = volume.run(&["format", &volume.meta_url, &volume.store_url]);
    assert_ne!(finished.code(), Some(0));
    assert!(finished.stderr.contains("already"), "{}", finished.stderr);
}

#[test]
fn a_damaged_metadata_file_is_told_and_left_alone() {
    on_each_store(|volume| {
        let path = volume.dir.path().join("meta.redb");
        let mut bytes = fs::read(&path).unwrap();
        bytes[..4096].fill(0x5a);
        fs::write(&path, &bytes).unwrap();
        assert_refused(&try_to_mount(&volume, |_| {}), 40, &["meta.redb"]);
        assert_eq!(fs::read(&path).unwrap(), bytes);
    });
}

#[test]
fn a_second_mount_is_refused_and_says_where_the_first_is() {
    on_each_store(|volume| {
        let mount = volume.mount();
        let first = mount.path().to_str().expect("a temporary path is UTF-8");
        assert_refused(&try_to_mount(&volume, |_| {}), 31, &[first]);
        fs::write(mount.path().join("f"), "still works").unwrap();
        mount.unmount();
    });
}

#[test]
#[expect(clippy::disallowed_methods, reason = "the real time of a mount is what is promised")]
fn a_second_mount_on_foundationdb_is_refused_while_the_first_one_lives() {
    let Some(volume) = Volume::format(Backend::FoundationDb) else { return };
    let mount = volume.mount();
    let target = volume.dir.path().join("mnt");
    fs::create_dir(&target).unwrap();
    let finished = run(volume.rfs(&["mount", &volume.meta_url]).arg(&target), LIMIT);
    assert_refused(&finished, 31, &[mount.path().to_str().expect("a temporary path is UTF-8")]);
    fs::write(mount.path().join("f"), "still works").unwrap();
    mount.unmount();
    let begin = std::time::Instant::now();
    let mount = volume.mount();
    assert!(begin.elapsed() < Duration::from_secs(3), "nobody waits for a session that ended");
    assert_eq!(fs::read(mount.path().join("f")).unwrap(), b"still works");
    mount.unmount();
}

#[test]
fn a_volume_that_another_machine_has_mounted_is_not_deleted() {
    let Some(volume) = Volume::format(Backend::FoundationDb) else { return };
    let mount = volume.mount();
    fs::write(mount.path().join("f"), "kept").unwrap();
    let destroy = ["destroy", "--yes", &volume.meta_url];
    for args in [&destroy[..], &["format", "--force", &volume.meta_url, &volume.store_url]] {
        let mut command = volume.rfs(args);
        // Another machine has no socket to ask the mount over.
        command.env("RFS_RUNTIME_DIR", volume.dir.path().join("elsewhere"));
        let place = mount.path().to_str().expect("a temporary path is UTF-8");
        assert_refused(&run(&mut command, LIMIT), 31, &[place, "unmount it there"]);
    }
    assert_eq!(fs::read(mount.path().join("f")).unwrap(), b"kept");
    // One that is gone keeps nobody out for long.
    mount.kill();
    let destroyed = volume.run(&destroy);
    assert!(destroyed.success(), "{destroyed:?}");
    assert_refused(&volume.run(&["status", &volume.meta_url]), 12, &["holds no volume"]);
}

#[test]
fn a_mount_point_that_cannot_serve_is_told() {
    on_each_store(|volume| {
        let target = volume.dir.path().join("missing");
        let mut mount = volume.rfs(&["mount", &volume.meta_url]);
        assert_refused(&run(mount.arg(&target), LIMIT), 1, &["missing"]);
        fs::create_dir(&target).unwrap();
        fs::write(target.join("file"), "kept").unwrap();
        let mut mount = volume.rfs(&["mount", &volume.meta_url]);
        assert_refused(&run(mount.arg(&target), LIMIT), 1, &["not empty"]);
        assert_eq!(fs::read(target.join("file")).unwrap(), b"kept");
    });
}

#[test]
fn wrong_arguments_are_a_usage_error() {
    let volume = Volume::unformatted(Backend::LocalDirectory).expect("needs no server");
    assert_eq!(volume.run(&["mount"]).code(), Some(2));
    assert_eq!(volume.run(&["format", "redb:///tmp/x", "gopher://x"]).code(), Some(2));
    assert_eq!(volume.run(&["no-such-command"]).code(), Some(2));
    let both = ["mount", "--writeback-cache", "on", "--cache-written", "off", "/mnt"];
    assert_refused(&volume.run(&both), 2, &["--cache-written", "--writeback-cache"]);
}

#[test]
fn a_name_of_256_bytes_is_refused_and_255_work() {
    on_each_store(|volume| {
        let mount = volume.mount();
        fs::write(mount.path().join("x".repeat(255)), "").unwrap();
        let error = fs::write(mount.path().join("x".repeat(256)), "").unwrap_err();
        assert_eq!(error.raw_os_error(), Some(36), "{error}");
        mount.unmount();
    });
}

#[test]
fn a_dead_mount_is_cleaned_up() {
    let volume = Volume::format(Backend::LocalDirectory).expect("needs no server");
    let mount = volume.mount();
    let path = mount.path().to_owned();
    let mut reader = Command::new("tail").arg("-f").arg("/dev/null").current_dir(&path).spawn().unwrap();
    mount_kill_without_cleanup(mount.pid());
    // Whoever uses the dead mount gets an error at once instead of hanging.
    rfs_testkit::wait_until(LIMIT, || fs::read_dir(&path).is_err());
    let error = fs::read_dir(&path).unwrap_err();
    assert!(matches!(error.raw_os_error(), Some(107 | 103 | 5)), "{error}");
    assert!(volume.run(&["umount", path.to_str().expect("UTF-8")]).success());
    assert!(fs::read_dir(&path).is_ok(), "the mount point is a plain directory again");
    reader.kill().unwrap();
    reader.wait().unwrap();
    drop(mount);
    volume.mount().unmount();
}

fn mount_kill_without_cleanup(pid: u32) {
    assert!(Command::new("kill").arg("-9").arg(pid.to_string()).status().unwrap().success());
}

#[test]
fn foundationdb_without_its_library_is_told() {
    let volume = Volume::unformatted(Backend::LocalDirectory).expect("needs no server");
    let cluster = volume.dir.path().join("fdb.cluster");
    fs::write(&cluster, "a:b@127.0.0.1:1\n").unwrap();
    let url = format!("fdb://{}?prefix=x", cluster.display());
    let mut command = volume.rfs(&["format", &url, &volume.store_url]);
    command.env("RFS_FDB_LIBRARY", "/nonexistent/libfdb_c.so");
    assert_refused(&run(&mut command, LIMIT), 20, &["client library", "RFS_FDB_LIBRARY"]);
}

#[test]
fn a_foundationdb_url_that_cannot_work_is_told() {
    let volume = Volume::unformatted(Backend::LocalDirectory).expect("needs no server");
    let missing = volume.dir.path().join("missing.cluster");
    let url = format!("fdb://{}?prefix=x", missing.display());
    assert_refused(
        &volume.run(&["format", &url, &volume.store_url]),
        20,
        &["cluster file", "missing.cluster", "the URL names it"],
    );
    let url = format!("fdb://{}?prefix={}", missing.display(), "x".repeat(100));
    assert_refused(&volume.run(&["format", &url, &volume.store_url]), 2, &["prefix of 100 bytes"]);
}

#[test]
fn a_lost_store_object_is_an_error_and_not_zeros() {
    let volume = Volume::format(Backend::LocalDirectory).expect("needs no server");
    let mount = volume.mount();
    fs::write(mount.path().join("f"), vec![5; 300_000]).unwrap();
    mount.unmount();
    let mut damaged = 0;
    for entry in walk(&volume.dir.path().join("store")) {
        let mut bytes = fs::read(&entry).unwrap();
        if bytes.len() > 200 {
            let middle = 100;
            bytes[middle] ^= 0xff;
            fs::write(&entry, bytes).unwrap();
            damaged += 1;
        }
    }
    assert!(damaged > 0, "the store holds the file's bytes");
    let mount = volume.mount();
    let error = fs::read(mount.path().join("f")).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(5), "{error}");
    mount.unmount();
    assert_refused(&volume.run(&["fsck", "--data", &volume.meta_url]), 40, &["/f"]);
}

fn walk(dir: &std::path::Path) -> Vec<std::path::PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() { files.extend(walk(&path)) } else { files.push(path) }
    }
    files
}

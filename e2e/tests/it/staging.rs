//! fsync into the staging directory: through outages and crashes, when it is full, lost or damaged.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use rfs_e2e::{Backend, Finished, Mount, MountOptions, Volume, run};
use rfs_testkit::{S3Server, noise, wait_until};

const LIMIT: Duration = Duration::from_mins(1);

fn staging_dir(volume: &Volume) -> PathBuf {
    volume.dir.path().join("meta.redb.staging")
}

/// The journals of all volumes in a staging directory.
fn journals(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).into_iter().flatten() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(journals(&path));
        } else if path.file_name().unwrap() != "lock" {
            found.push(path);
        }
    }
    found
}

fn write_durably(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let mut file = fs::File::create(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

fn rfs_flush(volume: &Volume, mount: &Mount) -> Finished {
    run(volume.rfs(&["flush"]).arg(mount.path()), LIMIT)
}

/// Mounts with staging, also where other tests are run without.
fn mount_staging(volume: &Volume, args: &[&str]) -> Mount {
    volume.mount_with(&MountOptions::args(args).with_default("--staging"))
}

fn try_to_mount(volume: &Volume, args: &[&str]) -> Finished {
    let target = volume.dir.path().join("mnt");
    let _ = fs::create_dir(&target);
    run(volume.rfs(&["mount"]).args(args).arg(&volume.meta_url).arg(&target), LIMIT)
}

#[test]
fn fsynced_bytes_survive_a_crash_while_the_store_is_away() {
    let Some(mut volume) = Volume::format(Backend::S3) else { return };
    let impatient = ["--io-timeout", "5s"];
    let mount = mount_staging(&volume, &impatient);
    let (small, large) = (noise(1, 50_000), noise(2, 20_000_000));
    write_durably(&mount.path().join("before"), &small).unwrap();
    assert!(rfs_flush(&volume, &mount).success());
    volume.s3.as_mut().expect("the volume has a server").kill();
    write_durably(&mount.path().join("small"), &small).unwrap();
    write_durably(&mount.path().join("large"), &large).unwrap();
    let status = volume.run(&["status", "--json", mount.path().to_str().unwrap()]);
    let status: serde_json::Value = serde_json::from_str(&status.stdout).unwrap();
    assert!(status["mount"]["staged_bytes"].as_u64().unwrap() > 20_000_000, "{status}");
    assert!(status["mount"]["staged_oldest_secs"].is_u64(), "{status}");
    assert!(!rfs_flush(&volume, &mount).success(), "nothing can be stored");
    mount.kill();

    // Still away: what was staged is there, the rest is an error.
    let mount = mount_staging(&volume, &impatient);
    assert_eq!(fs::read(mount.path().join("small")).unwrap(), small);
    assert_eq!(fs::read(mount.path().join("large")).unwrap(), large);
    assert!(fs::read(mount.path().join("before")).is_err());
    write_durably(&mount.path().join("after"), &small).unwrap();
    mount.kill();
    let mount = mount_staging(&volume, &impatient);
    volume.s3.as_mut().expect("the volume has a server").restart().unwrap();
    let flushed = wait_until(LIMIT, || rfs_flush(&volume, &mount).success());
    assert!(flushed, "the store is back, but rfs flush fails; log:\n{}", mount.log());
    assert_eq!(journals(&staging_dir(&volume)), [] as [PathBuf; 0]);
    for (name, bytes) in [("before", &small), ("small", &small), ("large", &large), ("after", &small)] {
        assert!(fs::read(mount.path().join(name)).unwrap() == *bytes, "{name}");
    }
    mount.unmount();
    volume.assert_clean();
}

#[test]
fn a_full_staging_directory_leaves_the_store_to_wait_for() {
    let volume = Volume::format(Backend::LocalDirectory).expect("needs no server");
    let mount = mount_staging(&volume, &["--staging-max", "1MiB"]);
    for i in 0..20 {
        write_durably(&mount.path().join(format!("f{i}")), &noise(i, 300_000)).unwrap();
        let staged: u64 =
            journals(&staging_dir(&volume)).iter().filter_map(|path| Some(path.metadata().ok()?.len())).sum();
        assert!(staged <= 1 << 20, "{staged} bytes are staged");
    }
    assert!(mount.log().contains("cannot stage"), "{}", mount.log());
    mount.kill();
    let mount = mount_staging(&volume, &[]);
    for i in 0..20 {
        assert_eq!(fs::read(mount.path().join(format!("f{i}"))).unwrap(), noise(i, 300_000));
    }
    mount.unmount();
    volume.assert_clean();
}

/// A volume that crashed with `gone` staged and `kept` stored.
fn crashed() -> Option<Volume> {
    let mut volume = Volume::format(Backend::S3)?;
    let mount = mount_staging(&volume, &["--io-timeout", "5s"]);
    write_durably(&mount.path().join("kept"), &noise(1, 50_000)).unwrap();
    assert!(rfs_flush(&volume, &mount).success());
    volume.s3.as_mut().expect("the volume has a server").kill();
    write_durably(&mount.path().join("gone"), &noise(2, 50_000)).unwrap();
    mount.kill();
    volume.s3.as_mut().expect("the volume has a server").restart().unwrap();
    Some(volume)
}

#[test]
fn a_staging_directory_elsewhere_is_remembered() {
    let Some(mut volume) = Volume::format(Backend::S3) else { return };
    let elsewhere = volume.dir.path().join("elsewhere");
    let args = ["--io-timeout", "5s", "--staging", elsewhere.to_str().unwrap()];
    let mount = mount_staging(&volume, &args);
    volume.s3.as_mut().expect("the volume has a server").kill();
    write_durably(&mount.path().join("f"), &noise(1, 50_000)).unwrap();
    mount.kill();
    volume.s3.as_mut().expect("the volume has a server").restart().unwrap();
    assert_ne!(journals(&elsewhere), [] as [PathBuf; 0]);
    // Nobody has to say again where it is: neither to check, nor to mount, nor to destroy.
    let checked = volume.run(&["fsck", "--data", &volume.meta_url]);
    assert_eq!(checked.code(), Some(0), "{}", checked.stdout);
    let mount = mount_staging(&volume, &[]);
    assert_eq!(fs::read(mount.path().join("f")).unwrap(), noise(1, 50_000));
    volume.s3.as_mut().expect("the volume has a server").kill();
    write_durably(&mount.path().join("g"), &noise(2, 50_000)).unwrap();
    assert_ne!(journals(&elsewhere), [] as [PathBuf; 0], "it is staged there again");
    mount.kill();
    volume.s3.as_mut().expect("the volume has a server").restart().unwrap();
    let destroyed = volume.run(&["destroy", "--yes", &volume.meta_url]);
    assert_eq!(destroyed.code(), Some(0), "{}", destroyed.stderr);
    assert!(!elsewhere.exists());
}

#[test]
fn a_lost_staging_directory_is_refused_and_says_the_way_out() {
    let Some(volume) = crashed() else { return };
    let (dir, aside) = (staging_dir(&volume), volume.dir.path().join("aside"));
    fs::rename(&dir, &aside).unwrap();
    let refused = try_to_mount(&volume, &[]);
    assert_eq!(refused.code(), Some(22), "{}", refused.stderr);
    for words in [dir.to_str().unwrap(), "--staging=DIR", "rfs fsck --repair"] {
        assert!(refused.stderr.contains(words), "no {words:?} in: {}", refused.stderr);
    }
    // The first way out: say where it is now.
    let place = aside.to_str().unwrap();
    let mount = mount_staging(&volume, &["--staging", place]);
    assert_eq!(fs::read(mount.path().join("gone")).unwrap(), noise(2, 50_000));
    mount.unmount();
    assert_eq!(journals(&aside), [] as [PathBuf; 0]);
    volume.assert_clean();
}

#[test]
fn a_lost_staging_directory_can_be_given_up() {
    let Some(volume) = crashed() else { return };
    fs::remove_dir_all(staging_dir(&volume)).unwrap();
    assert_eq!(try_to_mount(&volume, &[]).code(), Some(22));
    let found = volume.run(&["fsck", &volume.meta_url]);
    assert_eq!(found.code(), Some(40), "{}", found.stdout);
    assert!(found.stdout.contains("/gone") && !found.stdout.contains("/kept"), "{}", found.stdout);
    assert_eq!(volume.run(&["fsck", "--repair", &volume.meta_url]).code(), Some(41));
    let mount = mount_staging(&volume, &[]);
    assert_eq!(fs::read(mount.path().join("kept")).unwrap(), noise(1, 50_000));
    let error = fs::read(mount.path().join("gone")).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(5), "{error}");
    fs::remove_file(mount.path().join("gone")).unwrap();
    mount.unmount();
    volume.assert_clean();
}

#[test]
fn a_damaged_journal_is_refused() {
    let Some(volume) = crashed() else { return };
    let journal = &journals(&staging_dir(&volume))[0];
    let good = fs::read(journal).unwrap();
    let mut damaged = good.clone();
    let middle = damaged.len() / 2;
    damaged[middle] ^= 0x40;
    fs::write(journal, &damaged).unwrap();
    let refused = try_to_mount(&volume, &[]);
    assert_eq!(refused.code(), Some(22), "{}", refused.stderr);
    assert!(refused.stderr.contains("damaged"), "{}", refused.stderr);
    fs::write(journal, &good).unwrap();
    let mount = mount_staging(&volume, &[]);
    assert_eq!(fs::read(mount.path().join("gone")).unwrap(), noise(2, 50_000));
    mount.unmount();
    volume.assert_clean();
}

#[test]
fn many_small_fsyncs_make_few_packs() {
    let volume = Volume::format(Backend::LocalDirectory).expect("needs no server");
    let mount = mount_staging(&volume, &[]);
    let mut log = fs::File::create(mount.path().join("log")).unwrap();
    let mut written = Vec::new();
    for i in 0..1000 {
        let line = noise(i, 4096);
        log.write_all(&line).unwrap();
        log.sync_data().unwrap();
        written.extend(line);
    }
    drop(log);
    assert!(rfs_flush(&volume, &mount).success());
    let objects =
        Command::new("find").arg(volume.dir.path().join("store")).args(["-type", "f"]).output().unwrap();
    let objects = String::from_utf8(objects.stdout).unwrap().lines().count();
    assert!(objects < 50, "{objects} objects for 1000 fsyncs");
    assert_eq!(fs::read(mount.path().join("log")).unwrap(), written);
    mount.unmount();
    volume.assert_clean();
}

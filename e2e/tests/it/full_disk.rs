//! A disk that is really full: below the store, and below the metadata file. Programs are told, nothing is lost, and work
//! goes on once there is space.

use std::fs;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use rfs_e2e::{Backend, Mount, MountOptions, Volume, run, run_ok, tool};
use rfs_testkit::{noise, wait_until};
use tempfile::TempDir;

const LIMIT: Duration = Duration::from_mins(1);
const ENOSPC: Option<i32> = Some(28);

/// A small disk of its own; unmounted when dropped.
struct Disk(TempDir);

impl Disk {
    /// In memory. `None` (after a line that says so) without the right to mount.
    fn of(size: &str) -> Option<Disk> {
        Disk::mount(&["-t", "tmpfs", "-o", &format!("size={size}"), "none"])
    }

    /// In a file, with ext4 on it. `None` (after a line that says so) without the right to mount.
    fn ext4(size: &str) -> Option<Disk> {
        let mkfs = tool("mkfs.ext4", "apt install e2fsprogs")?;
        let files = TempDir::with_prefix("rfs-disk-image-").unwrap();
        let image = files.path().join("image");
        run_ok(Command::new(mkfs).args(["-q", "-m", "0"]).arg(&image).arg(size), LIMIT);
        // The loop device keeps the file when its name is gone.
        Disk::mount(&["-o", "loop", image.to_str().expect("a name in UTF-8")])
    }

    fn mount(args: &[&str]) -> Option<Disk> {
        let mount = tool("mount", "apt install mount")?;
        let mut dir = TempDir::with_prefix("rfs-disk-").unwrap();
        let mounted = run(Command::new(mount).args(args).arg(dir.path()), LIMIT);
        if !mounted.success() {
            eprintln!("skipped: a small disk can be mounted by root only ({})", mounted.stderr.trim());
            return None;
        }
        dir.disable_cleanup(true);
        Some(Disk(dir))
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    /// Takes all space but `left` bytes; removing the file gives it back.
    fn fill(&self, left: u64) -> PathBuf {
        let path = self.path().join("filler");
        let mut filler = fs::File::create(&path).unwrap();
        while filler.write_all(&[0; 4096]).is_ok() {}
        let len = filler.metadata().unwrap().len();
        filler.set_len(len - left).unwrap();
        path
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        run(Command::new("umount").arg("-l").arg(self.path()), LIMIT);
        let _ = fs::remove_dir(self.path());
    }
}

/// A volume whose store is on a disk of 48 MiB.
fn volume_on(disk: &Disk) -> Volume {
    let mut volume = Volume::unformatted(Backend::LocalDirectory).expect("needs no server");
    volume.store_url = format!("file://{}", disk.path().join("store").display());
    run_ok(&mut volume.rfs(&["format", &volume.meta_url, &volume.store_url]), LIMIT);
    volume
}

/// Without staging, so that fsync waits for the store.
fn unstaged(volume: &Volume) -> Mount {
    volume.mount_with(&MountOptions::args(&["--staging", "off"]))
}

#[test]
fn a_full_disk_below_the_store_is_told_and_loses_nothing() {
    let Some(disk) = Disk::of("48m") else { return };
    let volume = volume_on(&disk);
    let mount = unstaged(&volume);
    let (kept, waiting) = (noise(1, 5 << 20), noise(1, 10 << 20));
    fs::write(mount.path().join("kept"), &kept).unwrap();
    run_ok(volume.rfs(&["flush"]).arg(mount.path()), LIMIT);
    let filler = disk.fill(4 << 20);

    let mut file = fs::File::create(mount.path().join("waiting")).unwrap();
    let error =
        file.write_all(&waiting).and_then(|()| file.sync_all()).expect_err("4 MiB cannot hold 10 MiB");
    assert_eq!(error.raw_os_error(), ENOSPC, "{error}");
    assert_eq!(fs::read(mount.path().join("kept")).unwrap(), kept);
    assert_eq!(fs::read(mount.path().join("waiting")).unwrap(), waiting, "what was written is there to read");

    fs::remove_file(filler).unwrap();
    assert!(
        wait_until(LIMIT, || file.sync_all().is_ok()),
        "there is space, but fsync still fails; log:\n{}",
        mount.log()
    );
    drop(file);
    mount.unmount();
    let mount = volume.mount();
    assert_eq!(fs::read(mount.path().join("kept")).unwrap(), kept);
    assert_eq!(fs::read(mount.path().join("waiting")).unwrap(), waiting);
    mount.unmount();
    volume.assert_clean();
}

#[test]
fn a_full_disk_below_the_store_is_no_matter_for_what_is_staged() {
    let Some(disk) = Disk::of("48m") else { return };
    let volume = volume_on(&disk);
    let mount = volume.mount_with(&MountOptions::default().with_default("--staging"));
    let filler = disk.fill(4 << 20);
    let bytes = noise(1, 10 << 20);
    let mut file = fs::File::create(mount.path().join("f")).unwrap();
    file.write_all(&bytes).and_then(|()| file.sync_all()).unwrap();
    drop(file);
    assert!(!run(volume.rfs(&["flush"]).arg(mount.path()), LIMIT).success(), "4 MiB cannot hold 10 MiB");
    mount.kill();
    fs::remove_file(filler).unwrap();
    let mount = volume.mount();
    assert_eq!(fs::read(mount.path().join("f")).unwrap(), bytes);
    mount.unmount();
    volume.assert_clean();
}

#[test]
fn a_full_disk_below_the_staging_directory_leaves_the_store_to_wait_for() {
    let Some(disk) = Disk::of("8m") else { return };
    let volume = Volume::format(Backend::LocalDirectory).expect("needs no server");
    let dir = disk.path().join("staging");
    let mount = volume.mount_with(&MountOptions::args(&["--staging", dir.to_str().unwrap()]));
    let store = |name: &str, seed, len| {
        let mut file = fs::File::create(mount.path().join(name)).unwrap();
        file.write_all(&noise(seed, len)).and_then(|()| file.sync_all()).unwrap();
    };
    // Several at once, each more than a part of the disk; one that is more than all of it; and then there is no space at all.
    std::thread::scope(|scope| {
        for i in 0..8 {
            scope.spawn(move || store(&format!("many{i}"), i, 5 << 20));
        }
    });
    store("large", 8, 40 << 20);
    // Journals that are sent would give back what is filled now.
    run_ok(volume.rfs(&["flush"]).arg(mount.path()), LIMIT);
    let _filler = disk.fill(0);
    for i in 0..8 {
        store(&format!("none{i}"), i, 1 << 20);
    }
    let place = mount.path().to_str().unwrap();
    let told = volume.run(&["status", place]).stdout;
    assert!(told.contains("fsync waits for the store"), "{told}");
    let status = volume.run(&["status", "--json", place]).stdout;
    let status: serde_json::Value = serde_json::from_str(&status).unwrap();
    let bytes = |name: &str| status["mount"][name].as_u64().unwrap();
    assert!(mount.log().contains("cannot stage"), "{}", mount.log());
    assert!(bytes("staged_bytes") < 8 << 20, "{status}");
    assert_eq!(bytes("dirty_bytes") + bytes("pending_bytes"), 0, "{status}");
    mount.kill();

    let mount = volume.mount();
    for i in 0..8 {
        assert!(fs::read(mount.path().join(format!("many{i}"))).unwrap() == noise(i, 5 << 20), "{i}");
        assert!(fs::read(mount.path().join(format!("none{i}"))).unwrap() == noise(i, 1 << 20), "{i}");
    }
    assert!(fs::read(mount.path().join("large")).unwrap() == noise(8, 40 << 20));
    mount.unmount();
    volume.assert_clean();
}

#[test]
fn removing_what_did_not_fit_makes_room_below_the_store() {
    let Some(disk) = Disk::of("48m") else { return };
    let volume = volume_on(&disk);
    let mount = unstaged(&volume);
    let large = fs::File::create(mount.path().join("too large")).unwrap();
    let bytes = noise(1, 1 << 20);
    let error = (0..64).find_map(|i| large.write_all_at(&bytes, i << 20).err()).or(large.sync_all().err());
    assert_eq!(error.expect("48 MiB cannot hold 64 MiB").raw_os_error(), ENOSPC);
    drop(large);
    fs::remove_file(mount.path().join("too large")).unwrap();
    let small = fs::File::create(mount.path().join("fits")).unwrap();
    small.write_all_at(&noise(1, 20 << 20), 0).unwrap();
    assert!(
        wait_until(Duration::from_secs(20), || small.sync_all().is_ok()),
        "the large file is gone, but there is no space; log:\n{}",
        mount.log()
    );
    drop(small);
    mount.unmount();
    let mount = volume.mount();
    assert_eq!(fs::read(mount.path().join("fits")).unwrap(), noise(1, 20 << 20));
    mount.unmount();
    volume.assert_clean();
}

#[test]
fn a_full_disk_below_the_metadata_is_told_and_loses_nothing() {
    let Some(disk) = Disk::of("16m") else { return };
    fill_below_the_metadata(&disk);
}

#[test]
fn a_full_ext4_below_the_metadata_is_told_and_loses_nothing() {
    let Some(disk) = Disk::ext4("24M") else { return };
    fill_below_the_metadata(&disk);
}

/// Makes files on a volume whose metadata file and staging directory are on a disk that fills up, and gives it space again.
fn fill_below_the_metadata(disk: &Disk) {
    let mut volume = Volume::unformatted(Backend::LocalDirectory).expect("needs no server");
    volume.meta_url = format!("redb://{}", disk.path().join("meta.redb").display());
    run_ok(&mut volume.rfs(&["format", &volume.meta_url, &volume.store_url]), LIMIT);
    let mount = volume.mount();
    let path = |name: &str| mount.path().join(name);
    fs::write(path("kept"), "kept").unwrap();
    fs::File::open(path("kept")).unwrap().sync_all().unwrap();
    let filler = disk.fill(64 << 10);

    // Names alone, until one of the syncs in between says that they cannot be kept.
    let sync = || fs::File::open(mount.path()).unwrap().sync_all();
    let mut made = Vec::new();
    let error = (0..20_000).find_map(|i| {
        let name = format!("{i:0>200}");
        match fs::File::create(path(&name)) {
            Ok(_) => made.push(name),
            Err(error) => return Some(error),
        }
        if i % 500 == 499 { sync().err() } else { None }
    });
    let error = error.expect("64 KiB cannot hold 4 MB of names");
    assert_eq!(error.raw_os_error(), ENOSPC, "{error}");
    // From now on all changes are refused, and what was made before can be read.
    let refused = fs::File::create(path("refused")).expect_err("the disk is full");
    assert_eq!(refused.raw_os_error(), ENOSPC, "{refused}");
    assert_eq!(fs::read(path("kept")).unwrap(), b"kept");
    let bytes = noise(1, 300_000);
    let written = fs::OpenOptions::new().write(true).open(path("kept")).unwrap();
    written.write_all_at(&bytes, 0).unwrap();
    let error = written.sync_all().expect_err("the disk is full");
    assert_eq!(error.raw_os_error(), ENOSPC, "{error}");

    fs::remove_file(filler).unwrap();
    assert!(
        wait_until(LIMIT, || sync().is_ok()),
        "there is space, but fsync still fails; log:\n{}",
        mount.log()
    );
    written.sync_all().unwrap();
    fs::write(path("after"), "after").unwrap();
    fs::File::open(path("after")).unwrap().sync_all().unwrap();
    drop(written);
    mount.kill();
    let mount = volume.mount();
    let path = |name: &str| mount.path().join(name);
    for name in &made {
        assert!(path(name).exists(), "{name} was made, and is gone");
    }
    assert_eq!(fs::read(path("kept")).unwrap(), bytes);
    assert_eq!(fs::read(path("after")).unwrap(), b"after");
    mount.unmount();
    volume.assert_clean();
}

#[test]
fn the_disk_cache_leaves_a_tenth_of_its_disk_free() {
    const SIZE: u64 = 48 << 20;
    let Some(disk) = Disk::of("48m") else { return };
    let volume = Volume::format(Backend::LocalDirectory).expect("needs no server");
    let contents = noise(1, 80 << 20);
    let dir = disk.path().join("cache");
    // Of segments that are small beside the disk.
    let args = ["--cache-dir", dir.to_str().unwrap(), "--cache-size", "64MiB"];
    let mount = volume.mount();
    fs::write(mount.path().join("f"), &contents).unwrap();
    mount.unmount();
    let used = || -> u64 {
        let files = fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().metadata().unwrap().len());
        files.sum()
    };
    for others in [0, 3 << 20] {
        if others > 0 {
            fs::write(disk.path().join("others"), vec![1; others as usize]).unwrap();
        }
        let mount = volume.mount_with(&MountOptions::args(&args));
        assert!(fs::read(mount.path().join("f")).unwrap() == contents);
        mount.unmount();
        assert!(used() > (4 << 20) && used() + others < SIZE / 10 * 9, "{} beside {others}", used());
    }
}

//! Suites that others wrote: pjdfstest and fsx.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use rfs_e2e::{Backend, Mount, MountOptions, Volume, on_each_backend, run, run_ok, tool};

on_each_backend! {
    fn pjdfstest_finds_no_failure;
    fn fsx_finds_no_difference;
}

fn pjdfstest_finds_no_failure(backend: Backend) {
    let Some(pjdfstest) = tool("pjdfstest", "cargo install pjdfstest --version 0.2.2") else { return };
    let Some(volume) = Volume::format(backend) else { return };
    let mount = volume.mount();
    fs::set_permissions(mount.path(), std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
    let nobody = run_ok(Command::new("id").args(["-gn", "nobody"]), Duration::from_secs(10)).stdout;
    let config = volume.dir.path().join("pjdfstest.toml");
    let features = "[features]\nposix_fallocate = {}\nrename_ctime = {}\nutime_now = {}\nutimensat = {}\n";
    let settings = "[settings]\nnaptime = 0.05\nallow_remount = false\n";
    let users =
        format!("[dummy_auth]\nentries = [[\"nobody\", \"{}\"], [\"daemon\", \"daemon\"]]\n", nobody.trim());
    fs::write(&config, [features, settings, &users].concat()).unwrap();
    let second = tempfile::TempDir::with_prefix("rfs-second-").unwrap();
    let mut command = Command::new(pjdfstest);
    command.arg("-c").arg(&config).arg("-p").arg(mount.path()).arg("-s").arg(second.path());
    let finished = run(&mut command, Duration::from_mins(20));
    let failed: Vec<&str> = finished.stdout.lines().filter(|line| line.contains("FAILED")).collect();
    let passed = finished.stdout.lines().filter(|line| line.trim_end().ends_with("ok")).count();
    assert!(failed.is_empty(), "{} cases failed:\n{}\n{}", failed.len(), failed.join("\n"), finished.stdout);
    assert!(passed >= 300, "only {passed} cases ran:\n{}{}", finished.stdout, finished.stderr);
    mount.unmount();
    volume.assert_clean();
}

fn fsx_finds_no_difference(backend: Backend) {
    let Some(fsx) = tool("fsx", "cargo install fsx --version 0.3.2") else { return };
    let Some(volume) = Volume::format(backend) else { return };
    // The kernel's write-back cache decides which way writes and memory maps take.
    for cache in ["off", "on"] {
        let mount = volume.mount_with(&MountOptions::args(&["--writeback-cache", cache]));
        run_fsx(&fsx, &volume, &mount);
        mount.unmount();
        volume.assert_clean();
    }
}

fn run_fsx(fsx: &Path, volume: &Volume, mount: &Mount) {
    let everything =
        "mapread = 10\nmapwrite = 10\nposix_fallocate = 1\npunch_hole = 3\ncopy_file_range = 3\n";
    let no_mapping = "mapread = 0\nmapwrite = 0\nposix_fallocate = 1\npunch_hole = 3\ncopy_file_range = 3\n";
    let (operations, seeds) = if crate::long() { (100_000, 10) } else { (4_000, 1) };
    for (name, weights, length, largest) in [
        ("small", everything, 1 << 20, 131_072),
        ("plain", no_mapping, 1 << 20, 131_072),
        ("chunks", everything, 40 << 20, 4 << 20),
    ] {
        let config = volume.dir.path().join(format!("{name}.toml"));
        let common =
            "close_open = 1\nread = 10\nwrite = 10\ninvalidate = 1\ntruncate = 5\nfsync = 1\nfdatasync = 1\n";
        let text = format!(
            "flen = {length}\n[opsize]\nmax = {largest}\nmin = 1\nalign = 1\n[weights]\n{common}{weights}"
        );
        fs::write(&config, text).unwrap();
        let count = if length > 1 << 20 { operations / 20 } else { operations };
        for seed in 7..7 + seeds {
            let mut command = Command::new(fsx);
            command
                .args(["-q", "-q", "-S", &seed.to_string(), "-N", &count.to_string()])
                .arg("-f")
                .arg(&config);
            command.arg("-P").arg(volume.dir.path()).arg(mount.path().join(name));
            run_ok(&mut command, Duration::from_mins(30));
        }
    }
}

//! Programs that are killed in the middle of a call leave nothing behind for others.

use std::os::fd::AsRawFd;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rfs_e2e::{Backend, MountOptions, Volume, run_ok};

const LIMIT: Duration = Duration::from_mins(1);
const PROGRAMS: usize = 6;
const ROUNDS: usize = 5;
/// Names the file of [`change_a_file_until_killed`].
const FILE: &str = "RFS_E2E_CHANGED_FILE";

/// A program that is killed in the end, also when the test fails.
struct Changing(Child);

impl Changing {
    fn start(file: &Path) -> Changing {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--ignored", "--exact", "signals::change_a_file_until_killed"]).env(FILE, file);
        Changing(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap())
    }
}

impl Drop for Changing {
    fn drop(&mut self) {
        self.0.kill().expect("an own child can be killed");
        self.0.wait().expect("an own child can be waited for");
    }
}

#[test]
#[ignore = "runs for ever; started by a_killed_program_leaves_no_write_error"]
#[expect(unsafe_code, reason = "std has no fallocate(2)")]
fn change_a_file_until_killed() {
    let file = std::fs::File::create(std::env::var_os(FILE).unwrap()).unwrap();
    // SAFETY: the descriptor is open during the call.
    while unsafe { libc::fallocate(file.as_raw_fd(), libc::FALLOC_FL_KEEP_SIZE, 0, 4096) } == 0 {}
}

/// Where the kernel caches writes, programs that change files by fallocate(2) are killed while `rfs` does not answer, so that some of them are about to have
/// the times of their file sent. sync(1) then asks the kernel for write errors of the mount; nothing failed to be written.
#[test]
fn a_killed_program_leaves_no_write_error() {
    let volume = Volume::format(Backend::LocalDirectory).expect("needs no server");
    let mount = volume.mount_with(&MountOptions::args(&["--writeback-cache", "on"]));
    let pid = mount.pid().to_string();
    let signal = |name: &str| run_ok(Command::new("kill").args([name, &pid]), LIMIT);
    for round in 0..ROUNDS {
        let path = |i| mount.path().join(format!("f{round}.{i}"));
        let mut programs: Vec<Changing> = (0..PROGRAMS).map(|i| Changing::start(&path(i))).collect();
        let started = || (0..PROGRAMS).all(|i| path(i).exists());
        assert!(rfs_testkit::wait_until(LIMIT, started), "the programs do not make their files");
        signal("-STOP");
        for program in &mut programs {
            program.0.kill().unwrap();
        }
        signal("-CONT");
        drop(programs);
        run_ok(Command::new("sync").arg("--file-system").arg(mount.path()), LIMIT);
    }
    mount.unmount();
    volume.assert_clean();
}

//! Volumes over each kind of store, and their mounts.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use rfs_testkit::{FdbServer, S3Server, Versitygw, or_skip, wait_until};
use tempfile::TempDir;

use crate::command::{Finished, run, run_ok};

/// How long `rfs mount` may take until it answers.
const MOUNT_TIMEOUT: Duration = Duration::from_secs(30);
/// How long any other `rfs` command may take.
const COMMAND_TIMEOUT: Duration = Duration::from_mins(5);

/// Where a test volume keeps names and contents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backend {
    /// redb, and a local directory.
    LocalDirectory,
    /// redb, and a real S3 server.
    S3,
    /// A real FoundationDB, and a local directory.
    FoundationDb,
}

/// The `rfs` that was built with these tests.
///
/// # Panics
/// When it was not built.
pub fn rfs_binary() -> PathBuf {
    if let Some(path) = std::env::var_os("RFS_BIN") {
        return path.into();
    }
    let test = std::env::current_exe().expect("the test knows its own path");
    let found = test.ancestors().skip(1).map(|dir| dir.join("rfs")).find(|file| file.is_file());
    found.expect("no rfs beside the tests: run `cargo build -p rfs` first, or set RFS_BIN")
}

/// A formatted volume with the servers that it needs.
pub struct Volume {
    /// The metadata URL.
    pub meta_url: String,
    /// The store URL.
    pub store_url: String,
    /// A directory for whatever belongs to the volume.
    pub dir: TempDir,
    /// The S3 server, if the volume has one.
    pub s3: Option<Versitygw>,
    /// The FoundationDB server, if the volume has one.
    pub fdb: Option<FdbServer>,
    env: Vec<(&'static str, String)>,
}

impl Volume {
    /// Formats a volume; `None` (after a line that says so) when its server is not installed.
    ///
    /// # Panics
    /// When formatting fails.
    pub fn format(backend: Backend) -> Option<Volume> {
        Volume::format_with(backend, &[])
    }

    /// As [`Volume::format`], with further arguments for `rfs format`.
    ///
    /// # Panics
    /// When formatting fails.
    pub fn format_with(backend: Backend, args: &[&str]) -> Option<Volume> {
        let volume = Volume::unformatted(backend)?;
        let mut command = volume.rfs(&["format"]);
        command.args(args).arg(&volume.meta_url).arg(&volume.store_url);
        run_ok(&mut command, COMMAND_TIMEOUT);
        Some(volume)
    }

    /// The servers and URLs of a volume that is not formatted yet.
    ///
    /// # Panics
    /// When a server that is installed does not start.
    pub fn unformatted(backend: Backend) -> Option<Volume> {
        let dir = TempDir::with_prefix("rfs-e2e-").expect("a temporary directory can be made");
        let mut env = vec![("XDG_DATA_HOME", dir.path().join("data").display().to_string())];
        let mut meta_url = format!("redb://{}", dir.path().join("meta.redb").display());
        let mut store_url = format!("file://{}", dir.path().join("store").display());
        let (mut s3, mut fdb) = (None, None);
        match backend {
            Backend::LocalDirectory => {}
            Backend::S3 => {
                let server = or_skip(Versitygw::start())?;
                server.create_bucket("bucket").expect("a new server takes a bucket");
                store_url = server.store_url("bucket", "volume");
                env.extend(server.credentials_env());
                s3 = Some(server);
            }
            Backend::FoundationDb => {
                let server = or_skip(FdbServer::start())?;
                meta_url = server.meta_url("volume");
                env.extend(server.env());
                fdb = Some(server);
            }
        }
        Some(Volume { meta_url, store_url, dir, s3, fdb, env })
    }

    /// `rfs` with `args` and the volume's environment.
    pub fn rfs(&self, args: &[&str]) -> Command {
        let mut command = Command::new(rfs_binary());
        command.args(args).envs(self.env.iter().cloned()).env("RUST_BACKTRACE", "1");
        command
    }

    /// Runs `rfs` with `args`.
    pub fn run(&self, args: &[&str]) -> Finished {
        run(&mut self.rfs(args), COMMAND_TIMEOUT)
    }

    /// Mounts the volume.
    ///
    /// # Panics
    /// When it does not come up within 30 s.
    pub fn mount(&self) -> Mount {
        self.mount_with(&MountOptions::default())
    }

    /// Mounts the volume as `options` say.
    ///
    /// # Panics
    /// When it does not come up within 30 s.
    pub fn mount_with(&self, options: &MountOptions) -> Mount {
        let mut target = TempDir::with_prefix("rfs-mnt-").expect("a temporary directory can be made");
        target.disable_cleanup(true);
        let path = target.path().to_owned();
        let log = self.dir.path().join("mount.log");
        let output =
            std::fs::File::options().create(true).append(true).open(&log).expect("the log can be opened");
        let mut command = self.rfs(&["mount"]);
        command.args(options.all_args()).arg(&self.meta_url).arg(&path);
        command.stdin(Stdio::null()).stdout(output.try_clone().expect("a file can be cloned")).stderr(output);
        let child = command.spawn().expect("rfs can be started");
        let mut mount = Mount { path, child: Some(child), log };
        let mut ended = None;
        let up = wait_until(MOUNT_TIMEOUT, || {
            ended = mount.child.as_mut().and_then(|child| child.try_wait().ok().flatten());
            ended.is_some() || is_mounted(&mount.path)
        });
        let log = std::fs::read_to_string(&mount.log).unwrap_or_default();
        assert!(up && ended.is_none(), "rfs mount did not come up ({ended:?}); its log:\n{log}");
        mount
    }

    /// Takes the store away: the server ends, the directory is moved.
    ///
    /// # Panics
    /// When that fails.
    pub fn take_store_away(&mut self) {
        match &mut self.s3 {
            Some(server) => server.kill(),
            None => std::fs::rename(self.store_dir(), self.dir.path().join("away")).expect("it can be moved"),
        }
    }

    /// Ends [`Volume::take_store_away`].
    ///
    /// # Panics
    /// When the server does not come up.
    pub fn bring_store_back(&mut self) {
        match &mut self.s3 {
            Some(server) => server.restart().expect("it was up before"),
            None => std::fs::rename(self.dir.path().join("away"), self.store_dir()).expect("it can be moved"),
        }
    }

    fn store_dir(&self) -> PathBuf {
        self.dir.path().join("store")
    }

    /// Checks the unmounted volume, every block of it included.
    ///
    /// # Panics
    /// When `rfs fsck --data` finds anything.
    pub fn assert_clean(&self) {
        run_ok(&mut self.rfs(&["fsck", "--data", &self.meta_url]), COMMAND_TIMEOUT);
    }
}

/// Variable of the environment with options of every mount, each with its value: `--staging off --writeback-cache on`.
const EVERY_MOUNT: &str = "RFS_E2E_MOUNT_ARGS";

/// How to mount.
#[derive(Debug, Clone, Default)]
pub struct MountOptions {
    args: Vec<String>,
    own: Option<&'static str>,
}

impl MountOptions {
    /// Further arguments of `rfs mount`. They win over those of `RFS_E2E_MOUNT_ARGS`.
    pub fn args(args: &[&str]) -> MountOptions {
        MountOptions { args: args.iter().map(|&arg| arg.to_owned()).collect(), own: None }
    }

    /// The test is about the default of `option`: it stays, whatever `RFS_E2E_MOUNT_ARGS` says.
    #[must_use]
    pub fn with_default(self, option: &'static str) -> MountOptions {
        MountOptions { own: Some(option), ..self }
    }

    fn all_args(&self) -> Vec<String> {
        let every = std::env::var(EVERY_MOUNT).unwrap_or_default();
        let words: Vec<&str> = every.split_whitespace().collect();
        let mut args = self.args.clone();
        for option in words.chunks(2) {
            assert!(
                option.len() == 2 && option[0].starts_with("--"),
                "{EVERY_MOUNT}={every:?}: --NAME VALUE …"
            );
            if self.own != Some(option[0]) && self.args.iter().all(|arg| arg != option[0]) {
                args.extend(option.iter().map(|&word| word.to_owned()));
            }
        }
        args
    }
}

/// A mounted volume; dropped, it is unmounted whatever state it is in.
pub struct Mount {
    path: PathBuf,
    child: Option<Child>,
    log: PathBuf,
}

impl Mount {
    /// The mount point.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The process that serves the mount.
    ///
    /// # Panics
    /// After it was ended.
    pub fn pid(&self) -> u32 {
        self.child.as_ref().expect("the mount has not been ended").id()
    }

    /// What `rfs mount` printed so far.
    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Unmounts as a user does, and expects that everything was stored.
    ///
    /// # Panics
    /// When `rfs umount` or the mount's own exit code says otherwise.
    pub fn unmount(self) {
        let log = self.log.clone();
        let log = || std::fs::read_to_string(&log).unwrap_or_default();
        let mut command = Command::new(rfs_binary());
        let unmounted = run(command.arg("umount").arg(&self.path), COMMAND_TIMEOUT);
        assert!(unmounted.success(), "{unmounted:?}; the mount's log:\n{}", log());
        let status = self.wait();
        assert!(status.success(), "rfs mount ended with {status:?}; its log:\n{}", log());
    }

    /// Waits until the process behind the mount has ended by itself.
    ///
    /// # Panics
    /// When it does not.
    pub fn wait(mut self) -> ExitStatus {
        let mut child = self.child.take().expect("the mount has not been ended");
        let mut status = None;
        wait_until(COMMAND_TIMEOUT, || {
            status = child.try_wait().ok().flatten();
            status.is_some()
        });
        status.unwrap_or_else(|| panic!("rfs mount does not end; its log:\n{}", self.log()))
    }

    /// Ends the process without warning.
    ///
    /// # Panics
    /// When it cannot be killed.
    pub fn kill(mut self) {
        let mut child = self.child.take().expect("the mount has not been ended");
        child.kill().expect("an own child can be killed");
        child.wait().expect("an own child can be waited for");
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            // It may have ended already.
            let _ = child.kill();
            let _ = child.wait();
        }
        if is_mounted(&self.path) {
            run(Command::new("umount").arg("-l").arg(&self.path), Duration::from_secs(20));
        }
        if !is_mounted(&self.path) {
            let _ = std::fs::remove_dir(&self.path);
        }
    }
}

/// Whether something is mounted at `path`, without asking the mount itself (it may be dead).
fn is_mounted(path: &Path) -> bool {
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let target = path.display().to_string();
    mounts.lines().any(|line| line.split(' ').nth(4) == Some(&target))
}

//! A FoundationDB server of one process, found on `PATH` or below `FDB_HOME`.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use tempfile::TempDir;

use crate::StartError;
use crate::process::{ServerProcess, answers, find_program, free_port, wait_until};

/// How long the new database may take until it accepts commits.
const CONFIGURE_TIMEOUT: Duration = Duration::from_mins(1);

/// A running `fdbserver` with an empty database in memory-first storage; ends when dropped.
#[derive(Debug)]
pub struct FdbServer {
    library: PathBuf,
    cluster_file: PathBuf,
    // Dropped before the directory that it writes to.
    _process: ServerProcess,
    _dir: TempDir,
}

impl FdbServer {
    /// Starts a server on a free loopback port and makes an empty database.
    ///
    /// # Errors
    /// `NotInstalled` without `fdbserver`, `fdbcli` and `libfdb_c.so`; `Failed` with the end of its log.
    pub fn start() -> Result<FdbServer, StartError> {
        let server = find("fdbserver")?;
        let cli = find("fdbcli")?;
        let library = find_library()?;
        let dir = TempDir::with_prefix("rfs-fdb-")?;
        let port = free_port()?;
        let cluster_file = dir.path().join("fdb.cluster");
        std::fs::write(&cluster_file, format!("test:test@127.0.0.1:{port}\n"))?;
        let mut command = Command::new(server);
        command
            .arg("-p")
            .arg(format!("127.0.0.1:{port}"))
            .arg("-C")
            .arg(&cluster_file)
            .arg("-d")
            .arg(dir.path().join("data"))
            .arg("-L")
            .arg(dir.path())
            .args(["--memory", "4GiB"]);
        let address = ([127, 0, 0, 1], port).into();
        let process = ServerProcess::start(command, &dir.path().join("log"), || answers(address))?;
        let configured = wait_until(CONFIGURE_TIMEOUT, || {
            fdbcli(&cli, &cluster_file, "configure new single ssd")
                || fdbcli(&cli, &cluster_file, "get \\x00")
        });
        if !configured {
            return Err(StartError::Failed("fdbserver did not accept `configure new single ssd`".to_owned()));
        }
        Ok(FdbServer { library, cluster_file, _process: process, _dir: dir })
    }

    /// The cluster file that clients need.
    pub fn cluster_file(&self) -> &Path {
        &self.cluster_file
    }

    /// The client library that fits the server.
    pub fn library(&self) -> &Path {
        &self.library
    }

    /// The URL that `rfs format` takes for a volume below `prefix`.
    pub fn meta_url(&self, prefix: &str) -> String {
        format!("fdb://{}?prefix={prefix}", self.cluster_file.display())
    }

    /// The environment variables by which rfs finds the client library.
    pub fn env(&self) -> Vec<(&'static str, String)> {
        vec![("RFS_FDB_LIBRARY", self.library.display().to_string())]
    }
}

fn fdbcli(cli: &Path, cluster_file: &Path, line: &str) -> bool {
    Command::new(cli)
        .arg("-C")
        .arg(cluster_file)
        .args(["--timeout", "10", "--exec", line])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

fn find(program: &'static str) -> Result<PathBuf, StartError> {
    match home() {
        Some(home) => [home.join("bin").join(program), home.join("sbin").join(program), home.join(program)]
            .into_iter()
            .find(|file| file.is_file())
            .ok_or(StartError::NotInstalled { program }),
        None => find_program(program),
    }
}

fn find_library() -> Result<PathBuf, StartError> {
    let beside = home().into_iter().flat_map(|home| [home.join("lib"), home]);
    let system = ["/usr/lib", "/usr/local/lib", "/usr/lib/x86_64-linux-gnu"].map(PathBuf::from);
    beside
        .chain(system)
        .map(|dir| dir.join("libfdb_c.so"))
        .find(|file| file.is_file())
        .ok_or(StartError::NotInstalled { program: "libfdb_c.so" })
}

fn home() -> Option<PathBuf> {
    std::env::var_os("FDB_HOME").map(PathBuf::from)
}

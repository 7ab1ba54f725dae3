//! A FoundationDB server of one process, found on `PATH` or below `FDB_HOME`.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use tempfile::TempDir;

use crate::StartError;
use crate::process::{ServerProcess, answers, find_program, free_port, wait_until};

/// How long the new database may take until it accepts commits.
const CONFIGURE_TIMEOUT: Duration = Duration::from_mins(1);

/// A running `fdbserver` with a database of its own in a temporary directory; ends when dropped.
#[derive(Debug)]
pub struct FdbServer {
    program: PathBuf,
    library: PathBuf,
    cluster_file: PathBuf,
    port: u16,
    // Dropped before the directory that it writes to.
    process: Option<ServerProcess>,
    dir: TempDir,
}

impl FdbServer {
    /// Starts a server on a free loopback port and makes an empty database.
    ///
    /// # Errors
    /// `NotInstalled` without `fdbserver`, `fdbcli` and `libfdb_c.so`; `Failed` with the end of its log.
    pub fn start() -> Result<FdbServer, StartError> {
        let program = find("fdbserver")?;
        let cli = find("fdbcli")?;
        let library = find_library()?;
        let dir = TempDir::with_prefix("rfs-fdb-")?;
        let port = free_port()?;
        let cluster_file = dir.path().join("fdb.cluster");
        std::fs::write(&cluster_file, format!("test:test@127.0.0.1:{port}\n"))?;
        let mut server = FdbServer { program, library, cluster_file, port, process: None, dir };
        server.restart()?;
        let configured = wait_until(CONFIGURE_TIMEOUT, || {
            fdbcli(&cli, &server.cluster_file, "configure new single ssd")
                || fdbcli(&cli, &server.cluster_file, "get \\x00")
        });
        if !configured {
            return Err(StartError::Failed("fdbserver did not accept `configure new single ssd`".to_owned()));
        }
        Ok(server)
    }

    /// Ends the server at once (SIGKILL), as a crash would. Its files stay.
    pub fn kill(&mut self) {
        self.process = None;
    }

    /// Lets the server answer nothing (SIGSTOP), until [`FdbServer::resume`].
    ///
    /// # Panics
    /// When it is not running.
    pub fn suspend(&self) {
        self.signal("STOP");
    }

    /// Lets the server go on where it was (SIGCONT).
    ///
    /// # Panics
    /// When it is not running.
    pub fn resume(&self) {
        self.signal("CONT");
    }

    fn signal(&self, signal: &str) {
        self.process.as_ref().expect("the server runs").signal(signal);
    }

    /// Starts the server on its port and files, and waits until it takes connections.
    ///
    /// # Errors
    /// It did not come up.
    pub fn restart(&mut self) -> Result<(), StartError> {
        self.kill();
        let mut command = Command::new(&self.program);
        command
            .arg("-p")
            .arg(format!("127.0.0.1:{}", self.port))
            .arg("-C")
            .arg(&self.cluster_file)
            .arg("-d")
            .arg(self.dir.path().join("data"))
            .arg("-L")
            .arg(self.dir.path())
            .args(["--memory", "4GiB"]);
        let address = ([127, 0, 0, 1], self.port).into();
        self.process =
            Some(ServerProcess::start(command, &self.dir.path().join("log"), || answers(address))?);
        Ok(())
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

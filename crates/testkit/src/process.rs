//! Child processes of tests: finding the program, waiting until it answers, ending it.
//!
//! Invariant: a [`ServerProcess`] that is dropped has no process left behind.

use std::fs::File;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// How long a server may take until it answers.
const START_TIMEOUT: Duration = Duration::from_mins(1);

/// Why a server did not start.
#[derive(Debug)]
pub enum StartError {
    /// The program is neither on `PATH` nor in the usual directories.
    NotInstalled {
        /// The program's name.
        program: &'static str,
    },
    /// The program is there but did not come up; the text holds the end of its log.
    Failed(String),
}

impl std::fmt::Display for StartError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            StartError::NotInstalled { program } => write!(f, "no {program} found on PATH or in ~/go/bin"),
            StartError::Failed(why) => f.write_str(why),
        }
    }
}

impl std::error::Error for StartError {}

impl From<std::io::Error> for StartError {
    fn from(error: std::io::Error) -> Self {
        StartError::Failed(error.to_string())
    }
}

/// The started thing, or `None` after one line that says the test is skipped.
///
/// # Panics
/// When the program is there but fails to start, and when it is missing under `RFS_REQUIRE_SERVERS=1`
/// (FoundationDB: `RFS_REQUIRE_FDB=1`).
pub fn or_skip<T>(started: Result<T, StartError>) -> Option<T> {
    match started {
        Ok(value) => Some(value),
        Err(missing @ StartError::NotInstalled { program }) => {
            // No package registry has FoundationDB, so it is required only by a name of its own.
            let foundationdb = program.contains("fdb");
            let variable = if foundationdb { "RFS_REQUIRE_FDB" } else { "RFS_REQUIRE_SERVERS" };
            let required = std::env::var(variable).is_ok_and(|v| v != "0" && !v.is_empty());
            assert!(!required, "{variable} is set, but {missing}");
            let what = if foundationdb { "no FoundationDB found: " } else { "" };
            eprintln!("skipped, {what}{missing}");
            None
        }
        Err(failed @ StartError::Failed(_)) => panic!("{failed}"),
    }
}

/// Finds `program` on `PATH`, then in `~/go/bin`, `/usr/local/bin` and `/usr/sbin`.
///
/// # Errors
/// [`StartError::NotInstalled`].
pub fn find_program(program: &'static str) -> Result<PathBuf, StartError> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let home = std::env::var_os("HOME").map(PathBuf::from).unwrap_or_default();
    std::env::split_paths(&path)
        .chain([home.join("go/bin"), PathBuf::from("/usr/local/bin"), PathBuf::from("/usr/sbin")])
        .map(|dir| dir.join(program))
        .find(|file| file.is_file())
        .ok_or(StartError::NotInstalled { program })
}

/// A loopback port that nobody listens on at the moment.
///
/// # Errors
/// The machine has no port left.
pub fn free_port() -> std::io::Result<u16> {
    let [port] = free_ports()?;
    Ok(port)
}

/// `N` different ports as of [`free_port`].
pub(crate) fn free_ports<const N: usize>() -> std::io::Result<[u16; N]> {
    // All are held until all are known, so that none comes twice.
    let mut listeners = Vec::with_capacity(N);
    let mut ports = [0; N];
    for port in &mut ports {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        *port = listener.local_addr()?.port();
        listeners.push(listener);
    }
    Ok(ports)
}

/// Waits until `ready` says yes, asking every 20 ms; `false` after `timeout`.
///
/// For what happens in other processes, where there is no event to await.
pub fn wait_until(timeout: Duration, mut ready: impl FnMut() -> bool) -> bool {
    const STEP: Duration = Duration::from_millis(20);
    let mut waited = Duration::ZERO;
    loop {
        if ready() {
            return true;
        }
        if waited >= timeout {
            return false;
        }
        pause(STEP);
        waited += STEP;
    }
}

/// Sleeps; only where another process offers nothing to wait for.
#[expect(clippy::disallowed_methods, reason = "another process offers no event to await")]
pub(crate) fn pause(duration: Duration) {
    std::thread::sleep(duration);
}

/// Whether somebody accepts connections at `address`.
pub(crate) fn answers(address: SocketAddr) -> bool {
    TcpStream::connect_timeout(&address, Duration::from_millis(500)).is_ok()
}

/// One server process with its log, killed when dropped.
#[derive(Debug)]
pub(crate) struct ServerProcess {
    child: Child,
    log: PathBuf,
}

impl ServerProcess {
    /// Starts `command` with its output in `log`, and waits until `ready`.
    pub(crate) fn start(
        mut command: Command,
        log: &Path,
        mut ready: impl FnMut() -> bool,
    ) -> Result<ServerProcess, StartError> {
        let out = File::options().create(true).append(true).open(log)?;
        let err = out.try_clone()?;
        command.stdin(Stdio::null()).stdout(out).stderr(err);
        let child = command.spawn()?;
        let mut server = ServerProcess { child, log: log.to_owned() };
        let mut exited = None;
        let up = wait_until(START_TIMEOUT, || {
            exited = server.child.try_wait().ok().flatten();
            exited.is_some() || ready()
        });
        match exited {
            Some(status) => Err(server.failure(&format!("ended at once with {status}"))),
            None if !up => Err(server.failure("did not answer")),
            None => Ok(server),
        }
    }

    /// Sends a signal, named without `SIG`.
    pub(crate) fn signal(&self, signal: &str) {
        let pid = self.child.id().to_string();
        let sent = Command::new("kill").args(["-s", signal, &pid]).status();
        assert!(sent.is_ok_and(|status| status.success()), "SIG{signal} cannot be sent to {pid}");
    }

    fn failure(&self, what: &str) -> StartError {
        let log = std::fs::read_to_string(&self.log).unwrap_or_default();
        let tail: Vec<&str> = log.lines().rev().take(20).collect();
        let tail: Vec<&str> = tail.into_iter().rev().collect();
        StartError::Failed(format!("the server {what}; its log ends:\n{}", tail.join("\n")))
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        // Errors mean that it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

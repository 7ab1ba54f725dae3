//! Running programs with a limit on time.

use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

use rfs_testkit::{find_program, wait_until};

/// What a program did.
#[derive(Debug)]
pub struct Finished {
    /// How it ended; `None` when it was killed for taking too long.
    pub status: Option<ExitStatus>,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

impl Finished {
    /// Whether it ended with 0.
    pub fn success(&self) -> bool {
        self.status.is_some_and(|status| status.success())
    }

    /// Its exit code, if it exited.
    pub fn code(&self) -> Option<i32> {
        self.status.and_then(|status| status.code())
    }
}

/// Runs `command` in a process group of its own, at most `limit`; then the whole group is killed.
///
/// # Panics
/// When it cannot be started.
pub fn run(command: &mut Command, limit: Duration) -> Finished {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    let mut child = command.spawn().unwrap_or_else(|e| panic!("cannot start {command:?}: {e}"));
    let group = i32::try_from(child.id()).expect("process ids are small");
    let stdout = drain(child.stdout.take().expect("it is piped"));
    let stderr = drain(child.stderr.take().expect("it is piped"));
    let mut status = None;
    wait_until(limit, || {
        status = child.try_wait().expect("waiting for an own child works");
        status.is_some()
    });
    kill_group(group);
    if status.is_none() {
        // Killed above; a process stuck in the kernel is left behind rather than waited for.
        wait_until(Duration::from_secs(10), || child.try_wait().is_ok_and(|status| status.is_some()));
    }
    let text = |reader: std::thread::JoinHandle<Vec<u8>>| {
        let bytes = reader.join().expect("the reader does not panic");
        String::from_utf8_lossy(&bytes).into_owned()
    };
    Finished { status, stdout: text(stdout), stderr: text(stderr) }
}

/// As [`run`], but anything except success fails the test with the output.
///
/// # Panics
/// See above.
pub fn run_ok(command: &mut Command, limit: Duration) -> Finished {
    let finished = run(command, limit);
    assert!(
        finished.success(),
        "{command:?}: {:?}\n--- stdout\n{}\n--- stderr\n{}",
        finished.status,
        tail(&finished.stdout),
        tail(&finished.stderr)
    );
    finished
}

/// The path of an outside program, or `None` after a line that says the test is skipped.
///
/// # Panics
/// When it is missing and `RFS_REQUIRE_SERVERS=1`.
pub fn tool(program: &'static str, install: &str) -> Option<PathBuf> {
    let cargo_bin = std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cargo/bin").join(program));
    if let Some(found) = find_program(program).ok().or(cargo_bin.filter(|file| file.is_file())) {
        return Some(found);
    }
    let required = std::env::var("RFS_REQUIRE_SERVERS").is_ok_and(|v| v != "0" && !v.is_empty());
    assert!(!required, "RFS_REQUIRE_SERVERS is set, but there is no {program}: {install}");
    eprintln!("skipped: no {program} found ({install})");
    None
}

fn tail(text: &str) -> &str {
    let mut start = text.len().saturating_sub(6000);
    while !text.is_char_boundary(start) {
        start += 1;
    }
    &text[start..]
}

fn drain(mut pipe: impl Read + Send + 'static) -> std::thread::JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        // An error ends the output as an end does.
        let _ = pipe.read_to_end(&mut bytes);
        bytes
    })
}

#[expect(unsafe_code, reason = "std has no kill for process groups")]
fn kill_group(group: i32) {
    // SAFETY: a plain system call; the worst it can do is to find nobody.
    unsafe { libc::kill(-group, libc::SIGKILL) };
}

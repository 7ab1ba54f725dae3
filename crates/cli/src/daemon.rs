//! Mounting in the background: the command starts itself again, detached, and waits until the mount answers.
//!
//! Nothing is forked: the second process is a fresh one, so no thread, lock or runtime is inherited. It tells the first
//! how mounting went as one line on its standard output, which is a pipe, and from then on belongs to nobody: own
//! session, standard streams on `/dev/null`, working directory `/`.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use serde::{Deserialize, Serialize};

use crate::exit::{Exit, Failure, Result, ResultExt};

/// Set in the environment of the process that stays.
const MARK: &str = "RFS_DAEMON";

/// How mounting went, as told to the waiting command.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Outcome {
    Ready,
    Failed { exit: u8, message: String, hint: Option<String> },
}

/// Whether this process is the one that stays.
pub(crate) fn is_child() -> bool {
    std::env::var_os(MARK).is_some()
}

/// Starts this command again in the background and waits until it is ready.
///
/// # Errors
/// The failure of the started process, with its exit code.
pub(crate) fn spawn() -> Result<()> {
    let program = std::env::current_exe().doing("finding the rfs program")?;
    let mut arguments = std::env::args_os();
    let name = arguments.next().unwrap_or_else(|| program.clone().into_os_string());
    let mut command = Command::new(&program);
    // mount(8) hands on an empty environment, and credentials are looked for below the home directory.
    if let Some(home) = std::env::home_dir() {
        command.env("HOME", home);
    }
    let mut child = command
        .arg0(name)
        .args(arguments)
        .env(MARK, "1")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        // Warnings of the start are shown; `detach` closes it.
        .stderr(Stdio::inherit())
        .spawn()
        .doing(format!("starting {}", program.display()))?;
    let stdout = child.stdout.take().expect("it was asked for");
    let mut line = String::new();
    BufReader::new(stdout).read_line(&mut line).doing("waiting for the mount")?;
    match serde_json::from_str(&line) {
        Ok(Outcome::Ready) => Ok(()),
        Ok(Outcome::Failed { exit, message, hint }) => {
            child.wait()?;
            Err(Failure { hint, ..Failure::new(Exit::from_code(exit), message) })
        }
        Err(_) => {
            let status = child.wait()?;
            Err(Failure::new(
                Exit::Error,
                format!("the background process ended before the mount answered ({status})"),
            ))
        }
    }
}

/// Leaves the terminal's session; call before any thread starts.
pub(crate) fn leave_session() {
    // Fails only for a process group leader's group of a session it already leads: then there is nothing to leave.
    let _ = rustix::process::setsid();
}

/// Tells the waiting command that the mount answers, and lets go of everything inherited from it.
pub(crate) fn detach() -> Result<()> {
    tell(&Outcome::Ready)?;
    let null = std::fs::OpenOptions::new().read(true).write(true).open("/dev/null")?;
    rustix::stdio::dup2_stdout(&null)?;
    rustix::stdio::dup2_stderr(&null)?;
    std::env::set_current_dir("/")?;
    Ok(())
}

/// Tells the waiting command why there is no mount. Later, nobody waits any more: the log is what is left.
pub(crate) fn report(failure: &Failure) {
    let hint = failure.hint.clone();
    let outcome = Outcome::Failed { exit: failure.exit.code(), message: failure.message(), hint };
    tracing::error!("{failure}");
    if let Err(error) = tell(&outcome) {
        tracing::debug!(%error, "the command that started this process is gone");
    }
}

fn tell(outcome: &Outcome) -> Result<()> {
    let mut line = serde_json::to_vec(outcome)?;
    line.push(b'\n');
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(&line)?;
    stdout.flush()?;
    Ok(())
}

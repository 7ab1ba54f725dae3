//! Forgets the write error that a killed process leaves behind.
//!
//! While the kernel caches writes, it sends us the times of a file that fallocate(2) or `copy_file_range(2)` changed. If the
//! process is killed while that request waits in the kernel's queue, the kernel notes `EINTR` as write error of the whole
//! mount (`fuse_flush_time_update` in its fs/fuse/file.c), although every byte has arrived; the next syncfs(2) of anybody
//! would fail with it. A process that was killed closes its files, and does not end before we have answered that: this is
//! when we have the kernel tell the error to us instead.

use std::io;
use std::path::Path;
use std::sync::Arc;

use tracing::{debug, warn};

use crate::device;

/// Set in the flags of a process that a signal killed (`PF_SIGNALED` of the kernel's linux/sched.h).
const SIGNALED: u64 = 0x400;

/// Whether a signal has killed the process (or thread) `pid`, and it is on its way out.
pub(crate) fn is_killed(pid: u32) -> bool {
    // The flags are the seventh field after the name, which is in parentheses and may hold anything.
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let fields = stat.rsplit_once(") ").map_or("", |(_, fields)| fields);
    fields
        .split(' ')
        .nth(6)
        .and_then(|flags| flags.parse::<u64>().ok())
        .is_some_and(|flags| flags & SIGNALED != 0)
}

/// Has the kernel tell its write error, if there is one.
pub(crate) async fn forget_error(mountpoint: Arc<Path>) {
    let written = tokio::task::spawn_blocking(move || device::sync(&mountpoint)).await;
    match written.map_err(io::Error::other).flatten() {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::Interrupted => {
            debug!("a process was killed while the kernel sent the times of its file");
        }
        // Whoever has the file open is told by fsync and close.
        Err(error) => warn!(%error, "the kernel could not write everything back"),
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};

    use super::*;

    #[test]
    fn a_killed_process_is_known_as_one() {
        assert!(!is_killed(std::process::id()));
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        assert!(!is_killed(child.id()));
        child.kill().unwrap();
        // Nobody takes its status, so it stays to be looked at.
        let id = WaitId::Pid(Pid::from_child(&child));
        waitid(id, WaitIdOptions::EXITED | WaitIdOptions::NOWAIT).unwrap();
        assert!(is_killed(child.id()));
        child.wait().unwrap();
        assert!(!is_killed(child.id()));
    }
}

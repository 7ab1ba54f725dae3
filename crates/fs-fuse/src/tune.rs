//! Kernel settings of a mount that only exist once it is mounted: its backing device's read-ahead and its share of dirty
//! pages. They are an improvement, not a need: without the right to set them (only root has it) the mount is slower.

use std::fs;

use tracing::debug;

use crate::mount_table::Mounted;

/// Read-ahead of the kernel, in KiB. FUSE's default of 128 KiB costs a third of sequential read throughput.
const READ_AHEAD_KIB: u32 = 4096;

/// Largest share, in percent, that this mount's dirty pages may take of what the machine allows for all. FUSE's default of
/// 1 makes every writer wait for the store.
const DIRTY_SHARE_MAX_PERCENT: u32 = 50;

/// What to set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Caching {
    /// The kernel only caches what it read.
    Reads,
    /// The kernel also collects writes.
    Writes,
}

/// Sets what can be set.
pub(crate) fn tune(mounted: &Mounted, caching: Caching) {
    set(mounted, "read_ahead_kb", READ_AHEAD_KIB);
    if caching == Caching::Writes {
        set(mounted, "max_ratio", DIRTY_SHARE_MAX_PERCENT);
    }
}

fn set(mounted: &Mounted, setting: &str, value: u32) {
    let path = format!("/sys/class/bdi/{}/{setting}", mounted.device);
    match fs::write(&path, value.to_string()) {
        Ok(()) => debug!(path, value, "kernel setting"),
        Err(error) => debug!(path, value, %error, "kernel setting left as it is"),
    }
}

//! Tests on real mounts, over redb with a local directory, redb with a real S3 server, and a real FoundationDB.
//!
//! They need root or fusermount3, and `rfs` built beside them. Suites and servers that are not installed are skipped with a
//! line that says so, or fail with `RFS_REQUIRE_SERVERS=1`. `RFS_E2E_LONG=1` runs the long versions.
//! `RFS_E2E_MOUNT_ARGS='--staging off --writeback-cache on'` gives each mount these options, unless the test is about them.
#![allow(clippy::unwrap_used, reason = "in a test a failed unwrap is a failed test")]
#![allow(clippy::cast_possible_truncation, reason = "test patterns are cut to bytes on purpose")]
#![allow(clippy::needless_pass_by_value, reason = "the macro that makes a test a backend passes it by value")]

mod background;
mod bad_input;
mod basics;
mod cache;
mod crash;
mod differential;
mod full_disk;
mod memory;
mod outage;
mod page_cache;
mod programs;
mod read_order;
mod staging;
mod suites;
mod unanswered;

/// Whether the long versions were asked for.
fn long() -> bool {
    std::env::var("RFS_E2E_LONG").is_ok_and(|value| value != "0" && !value.is_empty())
}

//! Volumes and mounts for tests that use `rfs` as a user does: through its command line and the kernel.
//!
//! Owns: making volumes over each kind of store ([`Volume`]), mounting them ([`Mount`]), running programs with a time limit
//! ([`run`]). Knows no crate of the filesystem. Invariants: whatever a test mounts is unmounted when its guard is dropped,
//! also when the test panics; nothing waits without a limit.

mod command;
mod tree;
mod volume;
mod xattr;

pub use command::{Finished, run, run_ok, tool};
pub use tree::{TreeOptions, copy_with_cp, snapshot_tree};
pub use volume::{Backend, Mount, MountOptions, Volume, rfs_binary};
pub use xattr::{set_xattr, xattrs};

/// Makes one test a backend out of `fn name(backend: Backend)`. Backends whose server is not installed are skipped
/// with a line that says so.
#[macro_export]
macro_rules! on_each_backend {
    ($($(#[$meta:meta])* fn $name:ident;)*) => {$(
        mod $name {
            use $crate::Backend;

            $(#[$meta])*
            #[test]
            fn local_directory() {
                super::$name(Backend::LocalDirectory);
            }

            $(#[$meta])*
            #[test]
            fn s3() {
                super::$name(Backend::S3);
            }

            $(#[$meta])*
            #[test]
            fn foundationdb() {
                super::$name(Backend::FoundationDb);
            }
        }
    )*};
}

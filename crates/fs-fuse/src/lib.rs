//! The FUSE front end: shows a [`Vfs`](rfs_core::vfs::Vfs) in the directory tree of this machine.
//!
//! A request comes in on one of fuser's threads, is decoded in `adapter`, crosses to async code in `bridge`, and its answer
//! (`answer`, `listing`) goes out from wherever the work ended; `given` is what the kernel gives back one day. `notify`
//! tells the kernel what it must forget; `mount`, `device` and `mount_table` come before and after. `options` is what `-o` means. fuser carries the protocol; nothing outside this
//! crate knows it, so that another transport (FUSE over `io_uring`) can take its place.
//!
//! Knows no engine, no store and no command line.

mod adapter;
mod answer;
mod bridge;
mod buffers;
mod convert;
#[cfg(target_os = "linux")]
mod device;
mod errno;
mod given;
mod listing;
mod mount;
mod mount_table;
mod notify;
mod options;
mod tune;
mod writers;

pub use mount::{
    MountError, MountHandle, MountSettings, Sharing, State, Stopped, UnmountError, UnmountMode, mount,
    remount, state, unmount,
};
pub use mount_table::{FILESYSTEM_TYPE, Mounted, mount_at, mounts, resolve};
pub use options::{Access, MountOptions, OptionsError};

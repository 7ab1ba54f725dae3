//! The operations, one file each. `<operation>_in` is the part inside the transaction.

pub(super) mod atime;
pub(super) mod chunks;
pub(super) mod commit;
pub(super) mod format;
pub(super) mod link;
pub(super) mod lookup;
pub(super) mod make;
pub(super) mod readdir;
pub(super) mod readlink;
pub(super) mod reap;
pub(super) mod rename;
pub(super) mod replace_groups;
pub(super) mod rmdir;
pub(super) mod setattr;
pub(super) mod statfs;
pub(super) mod truncate;
pub(super) mod unlink;
pub(super) mod xattr;

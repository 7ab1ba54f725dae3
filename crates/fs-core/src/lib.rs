//! The filesystem itself, over two contracts: a transactional key-value store (`rfs-kv`) for names and attributes and
//! an object store for file contents.
//!
//! Arrows: `vfs` calls `meta` and `data`; these two do not know each other; all of them speak [`types`]. Nothing here
//! knows FUSE, a concrete engine or the command line.

pub mod data;
pub mod meta;
mod tasks;
pub mod types;
pub mod vfs;

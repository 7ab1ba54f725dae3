//! Comparing directory trees: names, kinds, modes, owners, times, links, contents, extended attributes.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::command::run_ok;
use crate::xattr::xattrs;

/// What a comparison looks at beside names, kinds, modes, owners, sizes and contents.
#[derive(Debug, Clone, Copy)]
pub struct TreeOptions {
    /// Modification times, to the nanosecond.
    pub mtimes: bool,
    /// Extended attributes.
    pub xattrs: bool,
}

/// One line an entry, by relative path; two trees are the same when their maps are.
///
/// # Panics
/// When the tree cannot be read.
pub fn snapshot_tree(root: &Path, options: TreeOptions) -> BTreeMap<PathBuf, String> {
    let mut entries = BTreeMap::new();
    let mut first_name: HashMap<u64, PathBuf> = HashMap::new();
    let mut pending = vec![PathBuf::new()];
    while let Some(relative) = pending.pop() {
        let path = root.join(&relative);
        let meta = fs::symlink_metadata(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        // Writing to a String cannot fail.
        let mut line = format!("{:o} {}:{}", meta.mode(), meta.uid(), meta.gid());
        if options.mtimes {
            let _ = write!(line, " {}.{:09}", meta.mtime(), meta.mtime_nsec());
        }
        if meta.is_dir() {
            let listing = fs::read_dir(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
            pending.extend(listing.map(|entry| relative.join(entry.expect("a listing goes on").file_name())));
        } else if meta.is_symlink() {
            let target = fs::read_link(&path).expect("a link can be read");
            let _ = write!(line, " -> {}", target.as_os_str().as_bytes().escape_ascii());
        } else {
            let _ = write!(line, " {} nlink {} rdev {}", meta.size(), meta.nlink(), meta.rdev());
            if meta.is_file() {
                let bytes = fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
                let _ = write!(line, " {:016x}", xxhash_rust::xxh3::xxh3_64(&bytes));
            }
            if meta.nlink() > 1 {
                // Which names are one file; the first name in order of visit stands for it.
                let first = first_name.entry(meta.ino()).or_insert_with(|| relative.clone());
                let _ = write!(line, " linked {}", usize::from(*first != relative));
            }
        }
        if options.xattrs {
            for (name, value) in xattrs(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display())) {
                let _ = write!(line, " {}={}", name.to_bytes().escape_ascii(), value.escape_ascii());
            }
        }
        entries.insert(relative, line);
    }
    entries
}

/// Copies `from` to `to` with `cp -a`.
///
/// # Panics
/// When cp fails.
pub fn copy_with_cp(from: &Path, to: &Path, limit: Duration) {
    run_ok(Command::new("cp").arg("-a").arg(from).arg(to), limit);
}

//! What is mounted where, read from `/proc/self/mountinfo` (proc(5)).
//!
//! Reading the table touches no filesystem, so that it answers even when a mount hangs or is dead.

#[cfg(any(target_os = "linux", test))]
use std::ffi::OsString;
use std::io;
#[cfg(any(target_os = "linux", test))]
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};

/// Filesystem type that the kernel shows for an rfs mount on Linux.
pub const FILESYSTEM_TYPE: &str = "fuse.rfs";

/// One line of the mount table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mounted {
    /// Device number, `major:minor`.
    pub device: String,
    /// Where it is mounted.
    pub mountpoint: PathBuf,
    /// Filesystem type; [`FILESYSTEM_TYPE`] for rfs.
    pub fs_type: String,
    /// What is mounted; for rfs, the metadata URL.
    pub source: String,
    /// Whether it is read-only.
    pub read_only: bool,
}

/// The topmost mount at exactly `mountpoint`.
///
/// # Errors
/// The mount table cannot be read, or `mountpoint` has a parent that cannot be resolved.
pub fn mount_at(mountpoint: &Path) -> io::Result<Option<Mounted>> {
    let mountpoint = resolve(mountpoint)?;
    Ok(mounts()?.into_iter().rev().find(|mounted| mounted.mountpoint == mountpoint))
}

/// All mounts, in the order of the table.
///
/// # Errors
/// The mount table cannot be read.
#[cfg(target_os = "linux")]
pub fn mounts() -> io::Result<Vec<Mounted>> {
    let table = std::fs::read("/proc/self/mountinfo")?;
    Ok(table.split(|byte| *byte == b'\n').filter_map(parse_line).collect())
}

/// All mounts: not known on this platform.
///
/// # Errors
/// None.
#[cfg(not(target_os = "linux"))]
pub fn mounts() -> io::Result<Vec<Mounted>> {
    Ok(Vec::new())
}

/// The absolute path of `mountpoint` without looking at the mount point itself, which may be dead.
///
/// # Errors
/// The directory that holds it cannot be resolved.
pub fn resolve(mountpoint: &Path) -> io::Result<PathBuf> {
    match (mountpoint.parent(), mountpoint.file_name()) {
        (Some(parent), Some(name)) => {
            let parent = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
            let path = parent.canonicalize()?.join(name);
            match path.read_link() {
                Ok(_) => path.canonicalize(),
                Err(_) => Ok(path),
            }
        }
        // `/`, or a path that ends in `..`.
        _ => mountpoint.canonicalize(),
    }
}

#[cfg(any(target_os = "linux", test))]
fn parse_line(line: &[u8]) -> Option<Mounted> {
    let mut fields = line.split(|byte| *byte == b' ');
    let device = fields.nth(2)?;
    let mountpoint = fields.nth(1)?;
    let mount_options = fields.next()?;
    // Optional fields end with a lone `-`.
    fields.by_ref().find(|field| *field == b"-")?;
    let fs_type = fields.next()?;
    let source = fields.next()?;
    let super_options = fields.next().unwrap_or_default();
    let has_ro = |options: &[u8]| options.split(|byte| *byte == b',').any(|option| option == b"ro");
    let text = |bytes: &[u8]| String::from_utf8_lossy(&unescape(bytes)).into_owned();
    Some(Mounted {
        device: text(device),
        mountpoint: PathBuf::from(OsString::from_vec(unescape(mountpoint))),
        fs_type: text(fs_type),
        source: text(source),
        read_only: has_ro(mount_options) || has_ro(super_options),
    })
}

/// Undoes the table's escapes: a backslash and three octal digits.
#[cfg(any(target_os = "linux", test))]
fn unescape(field: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&first, tail)) = rest.split_first() {
        let octal = (first == b'\\').then(|| tail.get(..3)).flatten();
        let escaped = octal.and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 8).ok());
        out.push(escaped.unwrap_or(first));
        rest = if escaped.is_some() { &tail[3..] } else { tail };
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_the_table_is_understood() {
        let line = b"36 35 0:52 / /mnt/a\\040b rw,nosuid,relatime shared:1 - fuse.rfs redb:///x rw,user_id=0";
        let mounted = parse_line(line).unwrap();
        assert_eq!(mounted.device, "0:52");
        assert_eq!(mounted.mountpoint, Path::new("/mnt/a b"));
        assert_eq!(mounted.fs_type, FILESYSTEM_TYPE);
        assert_eq!(mounted.source, "redb:///x");
        assert!(!mounted.read_only);
        assert!(parse_line(b"36 35 0:52 / /m ro - fuse.rfs s rw").unwrap().read_only);
        assert_eq!(parse_line(b""), None);
    }

    #[test]
    fn a_trailing_slash_and_a_relative_path_resolve() {
        let dir = tempfile::tempdir().unwrap();
        let real = dir.path().canonicalize().unwrap();
        let with_slash = PathBuf::from(format!("{}/", dir.path().display()));
        assert_eq!(resolve(&with_slash).unwrap(), real);
        assert_eq!(resolve(&real.join("missing")).unwrap(), real.join("missing"));
        assert!(resolve(&real.join("missing/deeper")).is_err());
    }
}

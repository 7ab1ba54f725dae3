//! Extended attributes, which std does not know.

use std::ffi::{CStr, CString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

fn c_path(path: &Path) -> CString {
    CString::new(path.as_os_str().as_bytes()).expect("a path has no NUL")
}

/// A call that fills a buffer, with one of the right size.
fn filled(call: impl Fn(*mut libc::c_void, usize) -> isize) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; 64 << 10];
    let len = usize::try_from(call(bytes.as_mut_ptr().cast(), bytes.len()));
    bytes.truncate(len.map_err(|_| io::Error::last_os_error())?);
    Ok(bytes)
}

/// Sets an attribute of `path` itself.
///
/// # Errors
/// What the system says.
#[expect(unsafe_code, reason = "std has no extended attributes")]
pub fn set_xattr(path: &Path, name: &CStr, value: &[u8]) -> io::Result<()> {
    let path = c_path(path);
    // SAFETY: the pointers are to NUL-terminated strings and to a value of that length, which outlive the call.
    let result =
        unsafe { libc::lsetxattr(path.as_ptr(), name.as_ptr(), value.as_ptr().cast(), value.len(), 0) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Names and values of `path` itself, in order.
///
/// # Errors
/// What the system says.
#[expect(unsafe_code, reason = "std has no extended attributes")]
pub fn xattrs(path: &Path) -> io::Result<Vec<(CString, Vec<u8>)>> {
    let path = c_path(path);
    // SAFETY: the buffer has that many bytes; the path is NUL-terminated; both outlive the call.
    let list = filled(|buffer, len| unsafe { libc::llistxattr(path.as_ptr(), buffer.cast(), len) })?;
    let names = list.split_inclusive(|byte| *byte == 0).map(CStr::from_bytes_with_nul);
    let mut found = Vec::new();
    for name in names {
        let name = name.map_err(io::Error::other)?;
        // SAFETY: as above, and the name is NUL-terminated.
        let value =
            filled(|buffer, len| unsafe { libc::lgetxattr(path.as_ptr(), name.as_ptr(), buffer, len) })?;
        found.push((name.to_owned(), value));
    }
    found.sort();
    Ok(found)
}

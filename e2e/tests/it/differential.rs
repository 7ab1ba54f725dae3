//! The same random operations on the mount and on a local directory: same results, same errnos, same trees.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use rand::rngs::SmallRng;
use rand::{Rng, RngCore, SeedableRng};
use rfs_e2e::{Backend, TreeOptions, Volume, on_each_backend, snapshot_tree};

on_each_backend! {
    fn random_operations_do_as_the_local_filesystem;
}

/// One operation, with arguments that mean the same on both sides.
#[derive(Debug, Clone)]
enum Op {
    Create { path: String, mode: u32, exclusive: bool },
    Mkdir { path: String },
    Rmdir { path: String },
    Unlink { path: String },
    Rename { from: String, to: String, flags: u32 },
    Link { from: String, to: String },
    Symlink { target: String, path: String },
    Readlink { path: String },
    Write { path: String, offset: u64, len: usize, seed: u64, append: bool },
    Read { path: String, offset: u64, len: usize },
    Truncate { path: String, len: u64 },
    Chmod { path: String, mode: u32 },
    Stat { path: String },
    List { path: String },
    Punch { path: String, offset: u64, len: u64, mode: i32 },
    CopyRange { from: String, from_offset: u64, to: String, to_offset: u64, len: usize },
    Utimes { path: String, secs: i64, nanos: i64 },
}

fn random_operations_do_as_the_local_filesystem(backend: Backend) {
    let Some(volume) = Volume::format(backend) else { return };
    let operations = if crate::long() { 50_000 } else { 10_000 };
    let reference = tempfile::TempDir::with_prefix("rfs-reference-").unwrap();
    let mut mount = volume.mount();
    let seed = std::env::var("RFS_E2E_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1);
    let mut random = SmallRng::seed_from_u64(seed);
    fs::create_dir(mount.path().join("tree")).unwrap();
    let local = reference.path().join("tree");
    fs::create_dir(&local).unwrap();
    let options = TreeOptions { mtimes: false, xattrs: false };
    for step in 0..operations {
        let op = random_op(&mut random);
        let expected = apply(&local, &op);
        let found = apply(&mount.path().join("tree"), &op);
        assert_eq!(expected, found, "seed {seed}, step {step}, {op:?}");
        if step % 1000 == 999 {
            compare_trees(&local, &mount.path().join("tree"), options, step);
        }
        if step % 4000 == 3999 {
            mount.unmount();
            mount = volume.mount();
            compare_trees(&local, &mount.path().join("tree"), options, step);
        }
    }
    mount.unmount();
    volume.assert_clean();
}

fn compare_trees(local: &Path, mounted: &Path, options: TreeOptions, step: usize) {
    let strip = |root: &Path| -> BTreeMap<PathBuf, String> { snapshot_tree(root, options) };
    let (expected, found) = (strip(local), strip(mounted));
    for (path, line) in &expected {
        assert_eq!(Some(line), found.get(path), "{} after step {step}", path.display());
    }
    assert_eq!(expected.len(), found.len(), "after step {step}");
}

fn random_path(random: &mut SmallRng) -> String {
    let depth = random.random_range(1..=3);
    (0..depth).map(|_| format!("n{}", random.random_range(0..5))).collect::<Vec<_>>().join("/")
}

fn random_offset(random: &mut SmallRng) -> u64 {
    // Borders of pages, blocks and chunks are where mistakes are.
    let border = [0u64, 4096, 65_536, 131_072, 1 << 20, 16 << 20][random.random_range(0..6)];
    (border + random.random_range(0..5)).saturating_sub(2)
        + if random.random_bool(0.3) { random.random_range(0..50_000) } else { 0 }
}

fn random_op(random: &mut SmallRng) -> Op {
    let path = random_path(random);
    let other = random_path(random);
    let len = match random.random_range(0..4) {
        0 => random.random_range(0..10),
        1 => random.random_range(0..5000),
        2 => random.random_range(0..70_000),
        _ => random.random_range(0..300_000),
    };
    let offset = random_offset(random);
    match random.random_range(0..34) {
        0..=3 => Op::Create {
            path,
            mode: [0o644, 0o600, 0o755][random.random_range(0..3)],
            exclusive: random.random(),
        },
        4..=6 => Op::Mkdir { path },
        7 => Op::Rmdir { path },
        8..=9 => Op::Unlink { path },
        10..=12 => Op::Rename { from: path, to: other, flags: [0, 0, 1, 2][random.random_range(0..4)] },
        13 => Op::Link { from: path, to: other },
        14 => Op::Symlink { target: other, path },
        15 => Op::Readlink { path },
        16..=20 => Op::Write { path, offset, len, seed: random.next_u64(), append: random.random_bool(0.2) },
        21..=24 => Op::Read { path, offset, len },
        25..=26 => Op::Truncate { path, len: offset },
        27 => Op::Chmod { path, mode: random.random_range(0..0o1000) | 0o600 },
        28 => Op::Stat { path },
        29 => Op::List { path },
        30..=31 => {
            let keep = libc::FALLOC_FL_KEEP_SIZE;
            let modes = [0, keep, keep | libc::FALLOC_FL_PUNCH_HOLE, libc::FALLOC_FL_ZERO_RANGE];
            Op::Punch { path, offset, len: len as u64, mode: modes[random.random_range(0..4)] }
        }
        32 => Op::CopyRange {
            from: path,
            from_offset: offset,
            to: other,
            to_offset: random_offset(random),
            len,
        },
        _ => Op::Utimes {
            path,
            secs: random.random_range(-2_000_000_000..9_000_000_000),
            nanos: random.random_range(0..1_000_000_000),
        },
    }
}

/// What an operation gave: text that must be equal on both sides, or the errno.
fn apply(root: &Path, op: &Op) -> Result<String, i32> {
    let at = |path: &str| root.join(path);
    let outcome = match op {
        Op::Create { path, mode, exclusive } => {
            let mut options = fs::OpenOptions::new();
            options.write(true).create(true).create_new(*exclusive).mode(*mode);
            options.open(at(path)).map(|_| String::new())
        }
        Op::Mkdir { path } => fs::create_dir(at(path)).map(|()| String::new()),
        Op::Rmdir { path } => fs::remove_dir(at(path)).map(|()| String::new()),
        Op::Unlink { path } => unlink(&at(path)),
        Op::Rename { from, to, flags } => rename(&at(from), &at(to), *flags),
        Op::Link { from, to } => fs::hard_link(at(from), at(to)).map(|()| String::new()),
        Op::Symlink { target, path } => symlink(target, at(path)).map(|()| String::new()),
        Op::Readlink { path } => fs::read_link(at(path)).map(|target| target.display().to_string()),
        Op::Write { path, offset, len, seed, append } => write(&at(path), *offset, *len, *seed, *append),
        Op::Read { path, offset, len } => read(&at(path), *offset, *len),
        Op::Truncate { path, len } => fs::OpenOptions::new()
            .write(true)
            .open(at(path))
            .and_then(|file| file.set_len(*len))
            .map(|()| String::new()),
        Op::Chmod { path, mode } => chmod(&at(path), *mode),
        Op::Stat { path } => fs::symlink_metadata(at(path)).map(|meta| {
            let size = if meta.is_file() { meta.len() } else { 0 };
            format!("{:o} {} {size}", meta.mode(), meta.nlink())
        }),
        Op::List { path } => list(&at(path)),
        Op::Punch { path, offset, len, mode } => fallocate(&at(path), *mode, *offset, *len),
        Op::CopyRange { from, from_offset, to, to_offset, len } => {
            copy_range(&at(from), *from_offset, &at(to), *to_offset, *len)
        }
        Op::Utimes { path, secs, nanos } => utimes(&at(path), *secs, *nanos),
    };
    // POSIX leaves the choice between these two to the filesystem.
    outcome.map_err(|e| match e.raw_os_error().unwrap_or(-1) {
        libc::EEXIST => libc::ENOTEMPTY,
        errno => errno,
    })
}

fn write(path: &Path, offset: u64, len: usize, seed: u64, append: bool) -> io::Result<String> {
    let mut bytes = vec![0; len];
    SmallRng::seed_from_u64(seed).fill_bytes(&mut bytes);
    let file = fs::OpenOptions::new().append(append).write(!append).open(path)?;
    file.write_all_at(&bytes, offset)?;
    Ok(file.metadata()?.len().to_string())
}

fn read(path: &Path, offset: u64, len: usize) -> io::Result<String> {
    let mut bytes = vec![0; len];
    let file = fs::File::open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::from_raw_os_error(libc::EISDIR));
    }
    let mut done = 0;
    while done < len {
        match file.read_at(&mut bytes[done..], offset + done as u64)? {
            0 => break,
            n => done += n,
        }
    }
    Ok(format!("{done} {:016x}", xxhash_rust::xxh3::xxh3_64(&bytes[..done])))
}

fn list(path: &Path) -> io::Result<String> {
    let mut names = Vec::new();
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        names.push(format!("{}:{:?}", entry.file_name().display(), entry.file_type()?));
    }
    names.sort_unstable();
    Ok(names.join(" "))
}

fn chmod(path: &Path, mode: u32) -> io::Result<String> {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).map(|()| String::new())
}

fn path_argument(path: &Path) -> CString {
    CString::new(path.as_os_str().as_bytes()).unwrap()
}

fn told(result: libc::c_long) -> io::Result<String> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result.to_string()) }
}

/// unlink(2): `remove_file` differs for directories between platforms.
#[expect(unsafe_code, reason = "std has no plain unlink(2)")]
fn unlink(path: &Path) -> io::Result<String> {
    let path = path_argument(path);
    // SAFETY: the pointer is a NUL-terminated string that outlives the call.
    told(unsafe { libc::unlink(path.as_ptr()) }.into())
}

#[expect(unsafe_code, reason = "std has no renameat2(2)")]
fn rename(from: &Path, to: &Path, flags: u32) -> io::Result<String> {
    let (from, to) = (path_argument(from), path_argument(to));
    // SAFETY: both pointers are NUL-terminated strings that outlive the call.
    told(unsafe {
        libc::syscall(libc::SYS_renameat2, libc::AT_FDCWD, from.as_ptr(), libc::AT_FDCWD, to.as_ptr(), flags)
    })
}

#[expect(unsafe_code, reason = "std has no fallocate(2)")]
fn fallocate(path: &Path, mode: i32, offset: u64, len: u64) -> io::Result<String> {
    use std::os::fd::AsRawFd;
    let file = fs::OpenOptions::new().write(true).open(path)?;
    let (offset, len) = (offset.cast_signed(), len.cast_signed());
    // SAFETY: the descriptor is open during the call.
    told(unsafe { libc::fallocate(file.as_raw_fd(), mode, offset, len) }.into())
}

#[expect(unsafe_code, reason = "std has no copy_file_range(2) with offsets")]
fn copy_range(from: &Path, from_offset: u64, to: &Path, to_offset: u64, len: usize) -> io::Result<String> {
    use std::os::fd::AsRawFd;
    let source = fs::File::open(from)?;
    let target = fs::OpenOptions::new().write(true).open(to)?;
    let (mut from_offset, mut to_offset) = (from_offset.cast_signed(), to_offset.cast_signed());
    let mut copied = 0;
    // A filesystem may copy less than asked for; the sum must agree.
    loop {
        // SAFETY: descriptors and offsets live through the call.
        let result = unsafe {
            libc::copy_file_range(
                source.as_raw_fd(),
                &raw mut from_offset,
                target.as_raw_fd(),
                &raw mut to_offset,
                len - copied,
                0,
            )
        };
        match usize::try_from(result) {
            Err(_) => return Err(io::Error::last_os_error()),
            Ok(0) => return Ok(copied.to_string()),
            Ok(n) => copied += n,
        }
    }
}

#[expect(unsafe_code, reason = "std cannot set times before 1970 of a path")]
fn utimes(path: &Path, secs: i64, nanos: i64) -> io::Result<String> {
    let c_path = path_argument(path);
    let times = [libc::timespec { tv_sec: secs, tv_nsec: nanos }; 2];
    // SAFETY: the pointers live through the call.
    told(unsafe { libc::utimensat(libc::AT_FDCWD, c_path.as_ptr(), times.as_ptr(), 0) }.into())?;
    let meta = fs::metadata(path)?;
    Ok(format!("{}.{:09}", meta.mtime(), meta.mtime_nsec()))
}

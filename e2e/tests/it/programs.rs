//! Real programs and real trees on the mount.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};

use rfs_e2e::{
    Backend, TreeOptions, Volume, copy_with_cp, on_each_backend, run_ok, set_xattr, snapshot_tree, tool,
};

on_each_backend! {
    fn a_real_tree_comes_back_unchanged;
    fn git_works_on_the_mount;
    fn sqlite_keeps_its_integrity;
}

const LIMIT: Duration = Duration::from_mins(15);

/// Entries that the tree has at least.
const ENTRIES: usize = 20_000;

/// How many of them are small files on FoundationDB, at least.
const SMALL_FILES: usize = 1000;

/// Makes a tree at `root`: the documentation of the Rust toolchain that built this test (all of the toolchain for the long
/// version), a directory of everything that is unusual, and small files, until there are enough. On FoundationDB there are
/// not many more: each change waits there for a disk, and a file is some five of them.
fn make_tree(root: &Path, backend: Backend) {
    let output = Command::new("rustc").args(["--print", "sysroot"]).output().unwrap();
    let sysroot = PathBuf::from(String::from_utf8(output.stdout).unwrap().trim());
    let real = if crate::long() { sysroot } else { sysroot.join("share") };
    fs::create_dir(root).unwrap();
    copy_with_cp(&real, &root.join("real"), LIMIT);
    if backend == Backend::FoundationDb {
        thin_out(&root.join("real"), ENTRIES - SMALL_FILES);
    }
    let unusual = root.join("unusual");
    fs::create_dir(&unusual).unwrap();
    make_unusual(&unusual);
    let options = TreeOptions { mtimes: false, xattrs: false };
    for i in snapshot_tree(root, options).len()..ENTRIES {
        let dir = root.join(format!("small/{}/{}", i % 7, i % 101));
        fs::create_dir_all(&dir).unwrap();
        let path = dir.join(format!("{i}"));
        fs::write(&path, format!("{i} ").repeat(i % 1500)).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode([0o644, 0o600, 0o755, 0o4711][i % 4])).unwrap();
        if i % 10 == 0 {
            set_xattr(&path, c"user.number", i.to_string().as_bytes()).unwrap();
        }
    }
}

/// Removes files from all over the tree at `root`, so that at most `entries` are left of it.
fn thin_out(root: &Path, entries: usize) {
    let tree = snapshot_tree(root, TreeOptions { mtimes: false, xattrs: false });
    let surplus = tree.len().saturating_sub(entries);
    let files: Vec<PathBuf> = tree.keys().map(|path| root.join(path)).filter(|path| !path.is_dir()).collect();
    for (i, file) in files.iter().enumerate() {
        if (i + 1) * surplus / files.len() > i * surplus / files.len() {
            fs::remove_file(file).unwrap();
        }
    }
}

fn make_unusual(dir: &Path) {
    let file = |name: &[u8], bytes: &[u8]| {
        let path = dir.join(OsStr::from_bytes(name));
        fs::write(&path, bytes).unwrap();
        path
    };
    file(b"not \xff\xfe UTF-8\n", b"odd name");
    file("x".repeat(255).as_bytes(), b"long name");
    file(b"empty", b"");
    let linked = file(b"linked", &[7; 5000]);
    fs::create_dir(dir.join("sub")).unwrap();
    fs::hard_link(&linked, dir.join("sub/second name")).unwrap();
    symlink("sub/../linked", dir.join("symlink")).unwrap();
    symlink("x".repeat(4000), dir.join("dangling")).unwrap();
    run_ok(Command::new("mkfifo").arg(dir.join("fifo")), LIMIT);
    let sparse = fs::File::create(dir.join("sparse")).unwrap();
    sparse.write_all_at(b"end", 64 << 20).unwrap();
    let attributes = file(b"attributes", b"with attributes");
    set_xattr(&attributes, c"user.empty", b"").unwrap();
    set_xattr(&attributes, c"user.large", &[0xa5; 3000]).unwrap();
    set_xattr(&dir.join("sub"), c"user.directory", b"\0binary\xff").unwrap();
    for (name, secs, nanos) in [("before", -1_000_000_000_i64, 1), ("after", 5_000_000_000, 999_999_999)] {
        let path = file(name.as_bytes(), b"time");
        let time = if secs < 0 {
            SystemTime::UNIX_EPOCH - Duration::new(secs.unsigned_abs(), 0) + Duration::new(0, nanos)
        } else {
            SystemTime::UNIX_EPOCH + Duration::new(secs.unsigned_abs(), nanos)
        };
        fs::File::options().write(true).open(path).unwrap().set_modified(time).unwrap();
    }
    fs::set_permissions(dir.join("sub"), fs::Permissions::from_mode(0o2775)).unwrap();
    fs::set_permissions(file(b"unreadable", b"secret"), fs::Permissions::from_mode(0o000)).unwrap();
}

fn a_real_tree_comes_back_unchanged(backend: Backend) {
    let Some(volume) = Volume::format(backend) else { return };
    let source = volume.dir.path().join("source");
    make_tree(&source, backend);
    let options = TreeOptions { mtimes: true, xattrs: true };
    let expected = snapshot_tree(&source, options);
    assert!(expected.len() >= ENTRIES, "only {} entries", expected.len());
    let mount = volume.mount();
    copy_with_cp(&source, &mount.path().join("cp"), LIMIT);
    let rsync = tool("rsync", "apt install rsync");
    if let Some(rsync) = &rsync {
        let mut from = source.clone().into_os_string();
        from.push("/");
        run_ok(Command::new(rsync).arg("-aHAX").arg(from).arg(mount.path().join("rsync")), LIMIT);
    }
    mount.unmount();
    let mount = volume.mount();
    assert_same(&expected, &mount.path().join("cp"), options);
    if rsync.is_some() {
        assert_same(&expected, &mount.path().join("rsync"), options);
    }
    run_ok(Command::new("rm").arg("-rf").arg(mount.path().join("cp")), LIMIT);
    mount.unmount();
    volume.assert_clean();
}

fn assert_same(expected: &std::collections::BTreeMap<PathBuf, String>, root: &Path, options: TreeOptions) {
    let found = snapshot_tree(root, options);
    for (path, line) in expected {
        assert_eq!(Some(line), found.get(path), "{}", path.display());
    }
    assert_eq!(expected.len(), found.len(), "there are entries that were not copied");
}

fn git_works_on_the_mount(backend: Backend) {
    let Some(git) = tool("git", "apt install git") else { return };
    let Some(volume) = Volume::format(backend) else { return };
    let mount = volume.mount();
    let repo = mount.path().join("repo");
    let in_repo = |args: &[&str]| {
        let identity = ["-c", "user.name=t", "-c", "user.email=t@example.invalid", "-c", "gc.auto=0"];
        run_ok(Command::new(&git).arg("-C").arg(&repo).args(identity).args(args), LIMIT)
    };
    fs::create_dir(&repo).unwrap();
    in_repo(&["init", "-q"]);
    for round in 0..5 {
        for i in 0..100 {
            let path = repo.join(format!("d{}/f{i}", i % 7));
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, format!("{round} {i}\n").repeat(i + 1)).unwrap();
        }
        in_repo(&["add", "-A"]);
        in_repo(&["commit", "-qm", &format!("round {round}")]);
    }
    in_repo(&["repack", "-adq"]);
    let clone = mount.path().join("clone");
    run_ok(Command::new(&git).arg("clone").arg("-q").arg(&repo).arg(&clone), LIMIT);
    mount.unmount();
    let mount = volume.mount();
    for name in ["repo", "clone"] {
        let at = mount.path().join(name);
        run_ok(Command::new(&git).arg("-C").arg(&at).args(["fsck", "--full", "--strict"]), LIMIT);
        let status = run_ok(Command::new(&git).arg("-C").arg(&at).args(["status", "--porcelain"]), LIMIT);
        assert_eq!(status.stdout, "");
    }
    mount.unmount();
    volume.assert_clean();
}

fn sqlite_keeps_its_integrity(backend: Backend) {
    let Some(sqlite) = tool("sqlite3", "apt install sqlite3") else { return };
    let Some(volume) = Volume::format(backend) else { return };
    let mount = volume.mount();
    for mode in ["delete", "truncate", "persist", "wal"] {
        let file = mount.path().join(format!("{mode}.db"));
        let script = format!(
            "pragma journal_mode={mode}; create table t(a integer primary key, b text);
             begin; with recursive n(i) as (select 1 union all select i+1 from n where i<5000)
             insert into t select i, hex(randomblob(100)) from n; commit;
             update t set b = hex(randomblob(50)) where a % 3 = 0; delete from t where a % 5 = 0; vacuum;"
        );
        run_ok(Command::new(&sqlite).arg(&file).arg(script), LIMIT);
    }
    mount.unmount();
    let mount = volume.mount();
    for mode in ["delete", "truncate", "persist", "wal"] {
        let file = mount.path().join(format!("{mode}.db"));
        let query = "pragma integrity_check; select count(*) from t;";
        let checked = run_ok(Command::new(&sqlite).arg(&file).arg(query), LIMIT);
        assert_eq!(checked.stdout, "ok\n4000\n", "{mode}");
    }
    mount.unmount();
    volume.assert_clean();
}

#[test]
fn cargo_builds_a_crate_on_the_mount() {
    let volume = Volume::format(Backend::LocalDirectory).expect("needs no server");
    let mount = volume.mount();
    let dir = mount.path().join("hello");
    let cargo = |args: &[&str]| {
        let mut command = Command::new("cargo");
        command.args(args).current_dir(mount.path()).env_remove("CARGO_TARGET_DIR");
        run_ok(&mut command, LIMIT)
    };
    cargo(&["new", "--quiet", "--vcs", "none", "hello"]);
    cargo(&["build", "--quiet", "--offline", "--manifest-path", "hello/Cargo.toml"]);
    let output = run_ok(&mut Command::new(dir.join("target/debug/hello")), LIMIT);
    assert_eq!(output.stdout, "Hello, world!\n");
    // Nothing changed, so nothing is built again: time stamps are what cargo thinks they are.
    let again = cargo(&["build", "--offline", "--manifest-path", "hello/Cargo.toml"]);
    assert!(!again.stderr.contains("Compiling"), "{}", again.stderr);
    mount.unmount();
    volume.assert_clean();
}

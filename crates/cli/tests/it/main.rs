//! The built `rfs`, as a shell sees it: output, messages, exit codes. Nothing is mounted here; that is e2e's.
#![allow(clippy::unwrap_used, reason = "in a test a failed unwrap is a failed test")]

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use rfs_meta_redb::{RedbKv, RedbOptions};
use tempfile::TempDir;

/// A place for a volume, and `rfs` in an environment of its own.
struct Place {
    dir: TempDir,
}

impl Place {
    fn new() -> Place {
        Place { dir: TempDir::new().unwrap() }
    }

    /// A formatted volume over a local directory.
    fn formatted() -> Place {
        let place = Place::new();
        let made = place.rfs(&["format", &place.meta(), &place.store()]);
        assert_eq!(code(&made), 0, "{}", text(&made));
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn meta(&self) -> String {
        format!("redb://{}", self.path("meta.redb").display())
    }

    fn store(&self) -> String {
        format!("file://{}", self.path("store").display())
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_rfs"));
        command.args(args).env("RFS_RUNTIME_DIR", self.path("run"));
        command.env("XDG_DATA_HOME", self.path("data")).env("XDG_STATE_HOME", self.path("state"));
        command
    }

    fn rfs(&self, args: &[&str]) -> Output {
        self.command(args).output().unwrap()
    }

    fn json(&self, args: &[&str]) -> serde_json::Value {
        let output = self.rfs(args);
        assert_eq!(code(&output), 0, "{args:?}: {}", text(&output));
        serde_json::from_slice(&output.stdout).unwrap()
    }
}

fn code(output: &Output) -> i32 {
    output.status.code().unwrap()
}

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

fn assert_refused(output: &Output, expected: i32, words: &[&str]) {
    let text = text(output);
    assert_eq!(code(output), expected, "{text}");
    for word in words {
        assert!(text.contains(word), "no {word:?} in {text}");
    }
}

#[test]
fn a_new_volume_has_a_status_and_is_clean() {
    let place = Place::formatted();
    let status = place.json(&["status", "--json", &place.meta()]);
    assert_eq!(status["volume"]["meta_url"], place.meta());
    assert_eq!(status["volume"]["store_url"], place.store());
    assert_eq!(status["volume"]["block_bytes"], 131_072);
    assert_eq!(status["volume"]["inodes_used"], 1);
    assert!(status["mount"].is_null());
    let report = place.json(&["fsck", "--data", "--json", &place.meta()]);
    assert_eq!(report["problems"], serde_json::json!([]));
    assert_eq!(report["inodes"], 1);
    // The plain path of the metadata file is as good as the URL.
    let path = place.path("meta.redb");
    assert_eq!(code(&place.rfs(&["fsck", path.to_str().unwrap()])), 0);
    let shown = text(&place.rfs(&["status", &place.meta()]));
    assert!(shown.contains("not mounted") && shown.contains("128 KiB, lz4"), "{shown}");
}

#[test]
fn format_options_reach_the_volume_and_config_changes_limits() {
    let place = Place::new();
    let options = ["--capacity", "10GiB", "--inodes", "1000", "--block-size", "64KiB", "--json"];
    let (meta, store) = (place.meta(), place.store());
    let mut args = vec!["format", &meta, &store];
    args.extend(options);
    let made = place.json(&args);
    assert_eq!(made["capacity_bytes"], 10_u64 << 30);
    let status = place.json(&["status", "--json", &place.meta()]);
    assert_eq!(status["volume"]["block_bytes"], 65_536);
    assert_eq!(status["volume"]["inodes_max"], 1000);
    let config = place.json(&["config", "--json", "--capacity", "none", &place.meta()]);
    assert_eq!(config, serde_json::json!({"capacity_bytes": null, "inodes_max": 1000}));
    assert_eq!(place.json(&["config", "--json", &place.meta()]), config);
}

#[test]
fn a_volume_is_not_formatted_over() {
    let place = Place::formatted();
    let again = place.rfs(&["format", &place.meta(), &place.store()]);
    assert_refused(&again, 1, &["already formatted", "rfs mount"]);
    let before = place.json(&["status", "--json", &place.meta()]);
    let staged = place.path("meta.redb.staging").join(before["volume"]["uuid"].as_str().unwrap());
    fs::create_dir_all(&staged).unwrap();
    fs::write(staged.join("journal"), "bytes of the first volume").unwrap();
    let forced = place.rfs(&["format", "--force", &place.meta(), &place.store()]);
    assert_eq!(code(&forced), 0, "{}", text(&forced));
    assert!(!staged.exists());
    let after = place.json(&["status", "--json", &place.meta()]);
    assert_ne!(before["volume"]["uuid"], after["volume"]["uuid"]);
}

#[test]
fn a_store_belongs_to_one_volume() {
    let place = Place::formatted();
    fs::create_dir_all(place.path("store/packs/00000001")).unwrap();
    fs::write(place.path("store/packs/00000001/0000000100000001"), "bytes of the first volume").unwrap();
    let other = format!("redb://{}", place.path("other.redb").display());
    let refused = place.rfs(&["format", &other, &place.store()]);
    assert_refused(&refused, 1, &["belongs to volume", "prefix"]);
    // Metadata that names a store which another volume has taken does not open.
    let forced = place.rfs(&["format", "--force", &other, &place.store()]);
    assert_eq!(code(&forced), 0, "{}", text(&forced));
    assert_refused(&place.rfs(&["fsck", &place.meta()]), 1, &["holds another volume"]);
}

#[test]
fn a_store_without_packs_may_be_in_use_too() {
    let place = Place::formatted();
    let other = format!("redb://{}", place.path("other.redb").display());
    assert_refused(&place.rfs(&["format", &other, &place.store()]), 1, &["belongs to volume", "--force"]);
    assert!(!place.path("other.redb").exists());
    // Packs whose marker is gone are somebody's, too.
    fs::remove_file(place.path("store/rfs-volume.json")).unwrap();
    fs::create_dir_all(place.path("store/packs/00000001")).unwrap();
    fs::write(place.path("store/packs/00000001/0000000100000001"), "bytes").unwrap();
    assert_refused(&place.rfs(&["format", &other, &place.store()]), 1, &["holds the contents of a volume"]);
}

#[test]
fn a_mistake_in_the_store_does_not_cost_the_old_volume() {
    let place = Place::formatted();
    let before = place.json(&["status", "--json", &place.meta()]);
    let file = place.path("file");
    fs::write(&file, "not a directory").unwrap();
    let nowhere = format!("file://{}/store", file.display());
    let forced = place.rfs(&["format", "--force", &place.meta(), &nowhere]);
    assert_ne!(code(&forced), 0, "{}", text(&forced));
    assert_eq!(place.json(&["status", "--json", &place.meta()]), before);
}

/// A mount of another user could claim to have root's volume open, and answer for it.
#[test]
fn only_the_owner_of_a_volume_answers_for_it() {
    use std::os::unix::fs::chown;
    use std::os::unix::net::UnixListener;

    const STRANGER: u32 = 12_345;
    let place = Place::formatted();
    let meta = format!("redb://{}", fs::canonicalize(place.path("meta.redb")).unwrap().display());
    let sockets = place.path(&format!("tmp/rfs-{STRANGER}"));
    fs::create_dir_all(&sockets).unwrap();
    let volume = xxhash_rust::xxh3::xxh3_64(meta.as_bytes());
    let listener = UnixListener::bind(sockets.join(format!("{volume:016x}-{:016x}.sock", 0))).unwrap();
    if chown(&sockets, Some(STRANGER), None).is_err() {
        eprintln!("skipped: only root looks for other users' mounts");
        return;
    }
    listener.set_nonblocking(true).unwrap();
    let status = || {
        let mut command = place.command(&["status", &meta]);
        command.env("TMPDIR", place.path("tmp")).output().unwrap()
    };
    let output = status();
    assert_eq!(code(&output), 0, "{}", text(&output));
    assert!(text(&output).contains("not mounted"), "{}", text(&output));
    assert!(listener.accept().is_err(), "the stranger was asked");
    // Who owns the volume is asked.
    drop(listener);
    chown(place.path("meta.redb"), Some(STRANGER), None).unwrap();
    fs::remove_file(sockets.join(format!("{volume:016x}-{:016x}.sock", 0))).unwrap();
    let listener = UnixListener::bind(sockets.join(format!("{volume:016x}-{:016x}.sock", 0))).unwrap();
    let asked = std::thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        let mut request = String::new();
        BufReader::new(stream).read_line(&mut request).unwrap();
        request
    });
    assert_refused(&status(), 1, &["the mount ended before it answered"]);
    assert!(asked.join().unwrap().contains("status"));
}

#[test]
fn the_directory_of_sockets_is_no_link() {
    let place = Place::formatted();
    let (precious, mountpoint) = (place.path("precious"), place.path("mnt"));
    fs::create_dir(&mountpoint).unwrap();
    fs::create_dir(&precious).unwrap();
    let mode = || std::os::unix::fs::MetadataExt::mode(&fs::metadata(&precious).unwrap());
    let before = mode();
    std::os::unix::fs::symlink(&precious, place.path("run")).unwrap();
    let mounted = place.rfs(&["mount", &place.meta(), mountpoint.to_str().unwrap()]);
    assert_refused(&mounted, 1, &["is not a directory", "RFS_RUNTIME_DIR"]);
    assert_eq!(mode(), before);
}

#[test]
fn an_embedded_volume_whose_making_was_interrupted_is_made_again() {
    // A store that is marked, and a metadata file without a volume in it.
    let place = Place::formatted();
    let data = place.path("data/rfs");
    fs::create_dir_all(data.join("store")).unwrap();
    fs::copy(place.path("store/rfs-volume.json"), data.join("store/rfs-volume.json")).unwrap();
    drop(RedbKv::create(data.join("meta.redb"), RedbOptions::default()).unwrap());
    let meta = format!("redb://{}", data.join("meta.redb").display());
    assert_refused(&place.rfs(&["status", &meta]), 12, &["holds no volume"]);
    let missing = place.path("no-such-directory");
    let mount =
        || assert_refused(&place.rfs(&["mount", missing.to_str().unwrap()]), 1, &["no-such-directory"]);
    mount();
    let made = place.json(&["status", "--json", &meta]);
    mount();
    assert_eq!(place.json(&["status", "--json", &meta]), made, "it is made once");
}

#[test]
fn missing_things_have_their_own_codes() {
    let place = Place::new();
    let mountpoint = place.path("mnt");
    fs::create_dir(&mountpoint).unwrap();
    let mountpoint = mountpoint.to_str().unwrap();
    for args in [
        vec!["status", &*place.meta()],
        vec!["fsck", &place.meta()],
        vec!["gc", &place.meta()],
        vec!["mount", &place.meta(), mountpoint],
        vec!["destroy", "--yes", &place.meta()],
    ] {
        assert_refused(&place.rfs(&args), 12, &["rfs format"]);
    }
    let place = Place::formatted();
    fs::remove_dir_all(place.path("store")).unwrap();
    assert_refused(&place.rfs(&["status", &place.meta()]), 11, &["store", "does not exist"]);
    fs::create_dir(place.path("store")).unwrap();
    assert_refused(&place.rfs(&["status", &place.meta()]), 21, &["rfs-volume.json", "is its disk mounted"]);
}

#[test]
fn a_damaged_metadata_file_is_told_and_left_alone() {
    let place = Place::formatted();
    let path = place.path("meta.redb");
    let mut bytes = fs::read(&path).unwrap();
    bytes[..4096].fill(0x5a);
    fs::write(&path, &bytes).unwrap();
    assert_refused(&place.rfs(&["fsck", &place.meta()]), 40, &["meta.redb"]);
    assert_refused(&place.rfs(&["format", &place.meta(), &place.store()]), 40, &["meta.redb"]);
    assert_eq!(fs::read(&path).unwrap(), bytes);
}

#[test]
fn a_byte_that_changed_in_the_metadata_file_is_found_by_fsck() {
    let place = Place::formatted();
    let path = place.path("meta.redb");
    let mut bytes = fs::read(&path).unwrap();
    let url = place.store().into_bytes();
    let found: Vec<usize> =
        (0..bytes.len() - url.len()).filter(|at| bytes[*at..].starts_with(&url)).collect();
    assert!(!found.is_empty());
    for at in found {
        // The volume record has the time of the format before the store's URL and its length.
        bytes[at - 8] ^= 1;
    }
    fs::write(&path, &bytes).unwrap();
    assert_eq!(code(&place.rfs(&["status", &place.meta()])), 0, "nothing else can see it");
    assert_refused(&place.rfs(&["fsck", &place.meta()]), 40, &["meta.redb", "damaged", "from a backup"]);
}

#[tokio::test]
async fn gc_makes_the_metadata_file_smaller() {
    let place = Place::formatted();
    let path = place.path("meta.redb");
    let kv = RedbKv::open(&path, RedbOptions::default()).unwrap();
    for round in 0..2 {
        rfs_kv::transact(&kv, |txn, _| async move {
            for number in 0..90_u8 {
                match round {
                    0 => txn.set(&[b'~', number], &vec![number; 90_000]),
                    _ => txn.clear(&[b'~', number]),
                }
            }
            Ok::<_, rfs_kv::KvError>(())
        })
        .await
        .unwrap();
        rfs_kv::Kv::sync(&kv).await.unwrap();
    }
    rfs_kv::Kv::close(&kv).await.unwrap();
    let before = path.metadata().unwrap().len();
    let report = place.json(&["gc", "--json", &place.meta()]);
    let after = path.metadata().unwrap().len();
    assert!(after < before / 2, "{before} bytes became {after}");
    // Opening and closing the file change its size, too.
    assert!(report["metadata_bytes_freed"].as_u64().unwrap() > 0, "{report}");
    assert_eq!(code(&place.rfs(&["fsck", &place.meta()])), 0);
}

#[test]
fn wrong_usage_is_explained() {
    let place = Place::new();
    for (args, words) in [
        (vec!["mount"], vec!["MOUNTPOINT"]),
        (vec!["frobnicate"], vec!["frobnicate"]),
        (vec!["format", "redb://a/b", "file:///s"], vec!["redb:///a/b"]),
        (vec!["format", "redb:///a/b", "gopher://x"], vec!["unknown store scheme"]),
        (vec!["format", "redb:///a/b", "s3://k:s@bucket"], vec!["AWS_ACCESS_KEY_ID"]),
        (vec!["format", "redb:///a/b", "file:///s", "--block-size", "1000"], vec!["power of two"]),
        (vec!["format", "redb:///a/b", "file:///s", "--capacity", "much"], vec!["10GiB"]),
        (vec!["format", "redb:///a/b", "file:///s", "--capacity", "0"], vec!["leave it out"]),
        (vec!["config", "redb:///a/b", "--inodes", "0"], vec!["write none"]),
        (vec!["mount", "-o", "nosiud", "redb:///a/b", "/mnt"], vec!["nosiud"]),
        (vec!["mount", "-o", "memory=lots", "redb:///a/b", "/mnt"], vec!["lots"]),
        (vec!["mount", "--memory", "1M", "redb:///a/b", "/mnt"], vec!["32 MiB"]),
        (vec!["mount", "--pack-size", "128M", "redb:///a/b", "/mnt"], vec!["16 MiB to 64 MiB"]),
        (
            vec!["mount", "--cache-dir", "off", "--cache-size", "1G", "redb:///a/b", "/mnt"],
            vec!["--cache-dir"],
        ),
        (vec!["mount", "-o", "cache-dir=", "redb:///a/b", "/mnt"], vec!["off"]),
    ] {
        let args: Vec<&str> = args.into_iter().collect();
        assert_refused(&place.rfs(&args), 2, &words);
    }
}

#[test]
fn directories_that_are_no_mounts_are_told() {
    let place = Place::new();
    let dir = place.dir.path().to_str().unwrap();
    let file = place.path("file");
    fs::write(&file, "").unwrap();
    assert_refused(&place.rfs(&["umount", dir]), 1, &["is not a mount point of rfs"]);
    assert_refused(&place.rfs(&["status", dir]), 1, &["is not a mount point of rfs"]);
    assert_refused(&place.rfs(&["flush", dir]), 1, &["is not a mount point of rfs"]);
    assert_refused(&place.rfs(&["umount", "/no/such/place"]), 1, &["does not exist"]);
    assert_refused(&place.rfs(&["info", file.to_str().unwrap()]), 1, &["not on a mount of rfs", "--volume"]);
    let volume = Place::formatted();
    assert_refused(&volume.rfs(&["flush", &volume.meta()]), 1, &["is not mounted", "the next one sends"]);
    assert_refused(&volume.rfs(&["mount", &volume.meta()]), 2, &["where", &volume.meta(), "DIRECTORY"]);
    let unknown = volume.rfs(&["mount", "-o", "nosiud", &volume.meta(), dir]);
    assert_refused(&unknown, 2, &["nosiud", "rfs help mount"]);
}

#[test]
fn a_mount_that_cannot_be_is_reported_by_the_background_process() {
    let place = Place::formatted();
    let missing = place.path("no-such-directory");
    let missing = missing.to_str().unwrap();
    for args in [vec!["mount", &*place.meta(), missing], vec!["mount", "-d", &place.meta(), missing]] {
        assert_refused(&place.rfs(&args), 1, &["no-such-directory", "does not exist"]);
    }
    // Nothing keeps the volume open.
    assert_eq!(code(&place.rfs(&["fsck", &place.meta()])), 0);
}

#[test]
fn the_inside_of_a_volume_can_be_described_without_a_mount() {
    let place = Place::formatted();
    let info = place.json(&["info", "--json", "--volume", &place.meta(), "/"]);
    assert_eq!((&info["ino"], &info["kind"]), (&1.into(), &"directory".into()));
    assert_refused(&place.rfs(&["info", "--volume", &place.meta(), "/no/such"]), 1, &["following the path"]);
}

#[test]
fn destroy_asks_and_leaves_nothing_of_the_volume() {
    let place = Place::formatted();
    fs::write(place.path("store/not-ours.txt"), "stays").unwrap();
    assert_refused(&place.rfs(&["destroy", &place.meta()]), 2, &["--yes"]);
    let report = place.json(&["gc", "--json", &place.meta()]);
    assert_eq!(report["packs_deleted"], 0);
    let destroyed = place.rfs(&["destroy", "--yes", &place.meta()]);
    assert_eq!(code(&destroyed), 0, "{}", text(&destroyed));
    assert!(!place.path("meta.redb").exists());
    assert!(!place.path("store/rfs-volume.json").exists());
    assert!(place.path("store/not-ours.txt").exists());
}

#[test]
fn completions_manual_pages_and_version_are_there() {
    let place = Place::new();
    for shell in ["bash", "zsh", "fish"] {
        assert!(text(&place.rfs(&["completions", shell])).contains("umount"));
    }
    let man = place.path("man");
    assert_eq!(code(&place.rfs(&["man", man.to_str().unwrap()])), 0);
    assert!(man.join("rfs.1").exists() && man.join("rfs-mount.1").exists());
    assert!(fs::read_to_string(man.join("rfs.1")).unwrap().contains("mounted elsewhere"));
    let version = place.json(&["version", "--json"]);
    assert_eq!(version["version"], env!("CARGO_PKG_VERSION"));
}

#[test]
fn helpers_for_mount_are_links_to_the_program() {
    let place = Place::new();
    let prefix = place.dir.path().to_str().unwrap();
    assert_eq!(code(&place.rfs(&["install-helpers", "--prefix", prefix])), 0);
    for name in ["mount.rfs", "mount.fuse.rfs"] {
        let helper = place.path("sbin").join(name);
        assert_eq!(fs::read_link(&helper).unwrap(), Path::new(env!("CARGO_BIN_EXE_rfs")));
        // It is the helper now: it does not know subcommands.
        let output =
            Command::new(&helper).args(["redb:///no/such.redb", "/no/such/dir", "-f"]).output().unwrap();
        assert_eq!(code(&output), 0, "{}", text(&output));
    }
    assert_eq!(code(&place.rfs(&["install-helpers", "--remove", "--prefix", prefix])), 0);
    assert!(!place.path("sbin/mount.rfs").exists());
    // What is not ours stays, and is told.
    std::os::unix::fs::symlink("/usr/bin/other", place.path("sbin/mount.rfs")).unwrap();
    for arguments in [vec!["--remove"], vec![]] {
        let output =
            place.command(&["install-helpers", "--prefix", prefix]).args(arguments).output().unwrap();
        assert_refused(&output, 1, &["/usr/bin/other", "is not rfs"]);
    }
    assert!(fs::read_link(place.path("sbin/mount.rfs")).is_ok());
}

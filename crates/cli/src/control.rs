//! How commands talk to a running mount: JSON lines over a Unix socket.
//!
//! A mount owns its volume's metadata (redb lets one process in), so commands ask it instead of opening the file. One
//! connection carries one request; the answer is any number of `progress` and `working` events and then one `done` or
//! `failed`. Sockets lie in a directory that only their user can enter, named by hashes of the volume and the mount
//! point; a socket that nobody listens on belongs to a mount that died and counts as absent.
//!
//! Owns the protocol, the sockets' names and the client. The server is `serve`.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rfs_fuse::Mounted;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use crate::exit::{Exit, Failure, Result, ResultExt};
use crate::url::{MetaUrl, Target};

/// Changes when requests or answers change in a way that an older partner would misread.
pub(crate) const PROTOCOL: u32 = 1;
/// How often a busy mount says that it is alive.
pub(crate) const WORKING_EVERY: Duration = Duration::from_secs(2);
/// How long the client waits for any sign of life.
const SILENCE_MAX: Duration = Duration::from_secs(30);
/// Name of a user's socket directory in the temporary directory; the user's number follows.
const TMP_PREFIX: &str = "rfs-";
/// Longest request that the server reads, in bytes.
pub(crate) const REQUEST_BYTES_MAX: u64 = 64 * 1024;

/// A request with the version of its protocol.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Envelope {
    pub(crate) protocol: u32,
    #[serde(flatten)]
    pub(crate) request: Request,
}

/// What a command wants of a mount.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "kebab-case")]
pub(crate) enum Request {
    /// What is mounted where, how full it is, what is waiting.
    Status,
    /// One inode in detail.
    Info {
        /// Its number.
        ino: u64,
    },
    /// Check the volume.
    Fsck {
        /// Read and check every block, too.
        data: bool,
        /// Mend what can be mended.
        repair: bool,
    },
    /// Delete garbage now.
    Gc,
    /// Store everything that is waiting.
    Flush,
    /// Change the volume's limits (`None`: leave as it is) and tell them.
    Config {
        /// Bytes; 0 removes the limit.
        capacity: Option<u64>,
        /// Count; 0 removes the limit.
        inodes: Option<u64>,
    },
    /// Store everything, unmount, end.
    Shutdown {
        /// Unmount even though files are open or something cannot be stored.
        force: bool,
    },
    /// A remount changed whether writing is allowed.
    ReadOnly {
        /// Whether it is read-only now.
        on: bool,
    },
}

/// What a mount answers.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub(crate) enum Event {
    /// Still at it.
    Working,
    /// How far the work is.
    Progress(Progress),
    /// Done, with the result.
    Done {
        /// What the request asks for.
        value: serde_json::Value,
    },
    /// Not done.
    Failed {
        /// Exit code for the command.
        exit: u8,
        /// Why.
        message: String,
        /// What to do.
        hint: Option<String>,
    },
}

impl From<Result<serde_json::Value>> for Event {
    fn from(result: Result<serde_json::Value>) -> Event {
        match result {
            Ok(value) => Event::Done { value },
            Err(failure) => {
                Event::Failed { exit: failure.exit.code(), message: failure.message(), hint: failure.hint }
            }
        }
    }
}

/// How far long work is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Progress {
    /// What is being done.
    pub(crate) stage: String,
    /// Items done.
    pub(crate) done: u64,
    /// Items in all, if known.
    pub(crate) total: Option<u64>,
}

/// A running mount that listens.
#[derive(Debug)]
pub(crate) struct Client {
    stream: UnixStream,
}

impl Client {
    /// Connects to the socket at `path`; `None` when nobody listens there.
    fn connect(path: &Path) -> Result<Option<Client>> {
        match UnixStream::connect(path) {
            Ok(stream) => {
                stream.set_read_timeout(Some(SILENCE_MAX))?;
                stream.set_write_timeout(Some(SILENCE_MAX))?;
                Ok(Some(Client { stream }))
            }
            Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused) => Ok(None),
            Err(e) => Err(e).doing(format!("connecting to the mount at {}", path.display())),
        }
    }

    /// Finds the mount that has `volume` open on this machine.
    pub(crate) fn of_volume(volume: &MetaUrl) -> Result<Option<Client>> {
        let wanted = format!("{}-", volume_hash(volume));
        let own_uid = rustix::process::geteuid().as_raw();
        let owner = owner_of(volume);
        for (_, dir) in runtime_dirs().into_iter().filter(|(uid, _)| *uid == own_uid || Some(*uid) == owner) {
            let Ok(entries) = std::fs::read_dir(&dir) else { continue };
            for entry in entries {
                let entry = entry.doing(format!("reading {}", dir.display()))?;
                let is_wanted = entry.file_name().as_bytes().starts_with(wanted.as_bytes());
                if is_wanted && let Some(client) = Client::connect(&entry.path())? {
                    return Ok(Some(client));
                }
            }
        }
        Ok(None)
    }

    /// Finds the process behind `mount`; `None` when it died or belongs to a user whose sockets are out of reach.
    pub(crate) fn of_mount(mount: &Mounted) -> Result<Option<Client>> {
        let Ok(volume) = mount.source.parse::<MetaUrl>() else { return Ok(None) };
        let name = socket_name(&volume, &mount.mountpoint);
        for (_, dir) in runtime_dirs() {
            if let Some(client) = Client::connect(&dir.join(&name))? {
                return Ok(Some(client));
            }
        }
        Ok(None)
    }

    /// Sends `request` and waits for its result, calling `progress` on the way.
    ///
    /// # Errors
    /// The mount's own failure with its exit code; `Error` when it stops answering.
    pub(crate) fn call<T: DeserializeOwned>(
        &mut self,
        request: Request,
        progress: &mut dyn FnMut(&Progress),
    ) -> Result<T> {
        let mut line = serde_json::to_vec(&Envelope { protocol: PROTOCOL, request })?;
        line.push(b'\n');
        self.stream.write_all(&line).doing("asking the mount")?;
        let mut reader = BufReader::new(&self.stream);
        let mut line = String::new();
        loop {
            line.clear();
            let read = match reader.read_line(&mut line) {
                Err(e) if e.kind() == ErrorKind::WouldBlock => {
                    let silent = SILENCE_MAX.as_secs();
                    return Err(Failure::new(
                        Exit::Error,
                        format!("the mount did not answer for {silent} s"),
                    ));
                }
                read => read.doing("waiting for the mount")?,
            };
            if read == 0 {
                return Err(Failure::new(Exit::Error, "the mount ended before it answered")
                    .hint("its log says why; see --log-file of rfs mount"));
            }
            match serde_json::from_str(&line).doing("reading the mount's answer")? {
                Event::Working => {}
                Event::Progress(now) => progress(&now),
                Event::Done { value } => {
                    return serde_json::from_value(value)
                        .doing("reading the mount's answer (is it another version?)");
                }
                Event::Failed { exit, message, hint } => {
                    let failure = Failure::new(Exit::from_code(exit), message);
                    return Err(Failure { hint, ..failure });
                }
            }
        }
    }

    /// Waits until the mount's process has closed the connection, that is, has ended.
    pub(crate) fn wait_closed(mut self) {
        // Nothing follows a result but the end; a time-out is as good as the end here.
        let mut rest = [0; 64];
        while matches!(std::io::Read::read(&mut self.stream, &mut rest), Ok(1..)) {}
    }
}

/// What a command found for its target.
#[derive(Debug)]
pub(crate) enum Found {
    /// A mount that answers.
    Mounted(Client),
    /// No mount on this machine has the volume open.
    NotMounted(MetaUrl),
}

/// Finds who is in charge of `target`.
///
/// # Errors
/// `Error` when a mount point shows no mount of rfs, or one whose process died.
pub(crate) fn find(target: &Target) -> Result<Found> {
    match target {
        Target::Meta(volume) => {
            let volume = volume.canonical();
            Ok(match Client::of_volume(&volume)? {
                Some(client) => Found::Mounted(client),
                None => Found::NotMounted(volume),
            })
        }
        Target::Mountpoint(path) => of_mountpoint(path).map(Found::Mounted),
    }
}

/// All mounts of rfs that this process can see.
pub(crate) fn mounts() -> Result<Vec<Mounted>> {
    let mounts = rfs_fuse::mounts().doing("reading the mount table")?;
    Ok(mounts.into_iter().filter(|mounted| mounted.fs_type == rfs_fuse::FILESYSTEM_TYPE).collect())
}

/// The mount of rfs at exactly `path`, dead or alive.
pub(crate) fn mount_at(path: &Path) -> Result<Mounted> {
    let found = rfs_fuse::mount_at(path).ok().flatten();
    found.filter(|mounted| mounted.fs_type == rfs_fuse::FILESYSTEM_TYPE).ok_or_else(|| {
        let missing = std::fs::symlink_metadata(path).is_err();
        let what = if missing { "does not exist" } else { "is not a mount point of rfs" };
        Failure::new(Exit::Error, format!("{} {what}", path.display()))
            .hint("rfs status lists the mount points")
    })
}

/// The process behind the mount at `path`.
fn of_mountpoint(path: &Path) -> Result<Client> {
    let mount = mount_at(path).map_err(|failure| {
        failure.hint(
            "name a mount point (rfs status lists them), or a metadata URL such as redb:///path/meta.redb",
        )
    })?;
    Client::of_mount(&mount)?.ok_or_else(|| {
        let shown = mount.mountpoint.display();
        let what = format!("the process behind {shown} does not answer: it died, or belongs to another user");
        Failure::new(Exit::Error, what).hint(format!("if it died, clean up with: rfs umount {shown}"))
    })
}

/// Name of the socket of one mount.
pub(crate) fn socket_name(volume: &MetaUrl, mountpoint: &Path) -> String {
    let place = xxh3_64(mountpoint.as_os_str().as_bytes());
    format!("{}-{place:016x}.sock", volume_hash(volume))
}

fn volume_hash(volume: &MetaUrl) -> String {
    format!("{:016x}", xxh3_64(volume.canonical().to_string().as_bytes()))
}

/// The directory of this user's sockets: `$RFS_RUNTIME_DIR`, or `/run/rfs` for root, or `$XDG_RUNTIME_DIR/rfs`, or a
/// private directory in the temporary directory.
fn runtime_dir() -> PathBuf {
    let from_env = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    if let Some(dir) = from_env("RFS_RUNTIME_DIR") {
        return dir;
    }
    let uid = rustix::process::geteuid();
    if uid.is_root() && cfg!(target_os = "linux") {
        return PathBuf::from("/run/rfs");
    }
    match from_env("XDG_RUNTIME_DIR") {
        Some(dir) => dir.join("rfs"),
        None => std::env::temp_dir().join(format!("{TMP_PREFIX}{}", uid.as_raw())),
    }
}

/// The user whose mount has the volume open, if not one of the own: whoever owns its file. A socket of that name which
/// somebody else made is a trap.
fn owner_of(volume: &MetaUrl) -> Option<u32> {
    match volume {
        MetaUrl::Redb(path) => std::fs::metadata(path).ok().map(|found| found.uid()),
        MetaUrl::Fdb { .. } => None,
    }
}

/// Where the sockets of the mounts that this user may ask can be, with their users: the own ones, and for root
/// everybody's.
fn runtime_dirs() -> Vec<(u32, PathBuf)> {
    let own_uid = rustix::process::geteuid();
    let mut dirs = vec![(own_uid.as_raw(), runtime_dir())];
    if own_uid.is_root() {
        let uid_of = |name: &OsStr, prefix: &str| name.to_str()?.strip_prefix(prefix)?.parse::<u32>().ok();
        let of_logins = entries_of(Path::new("/run/user"))
            .filter_map(|(name, path)| Some((uid_of(&name, "")?, path.join("rfs"))));
        let in_tmp = entries_of(&std::env::temp_dir())
            .filter_map(|(name, path)| Some((uid_of(&name, TMP_PREFIX)?, path)));
        dirs.extend(of_logins.chain(in_tmp));
    }
    // A directory of that name that somebody else made is a trap.
    let is_theirs = |uid: u32, dir: &Path| std::fs::metadata(dir).is_ok_and(|found| found.uid() == uid);
    dirs.retain(|(uid, dir)| is_theirs(*uid, dir));
    dirs
}

/// Names and paths of a directory's entries; none if it cannot be read.
fn entries_of(dir: &Path) -> impl Iterator<Item = (std::ffi::OsString, PathBuf)> + use<> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().filter_map(std::result::Result::ok);
    entries.map(|entry| (entry.file_name(), entry.path()))
}

/// Makes the directory of this user's sockets, closed to others.
pub(crate) fn make_runtime_dir() -> Result<PathBuf> {
    let dir = runtime_dir();
    let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&dir);
    made.doing(format!("making the directory for control sockets, {}", dir.display()))?;
    // A link may be another user's, and lead to a directory that is not meant to be closed.
    let found = std::fs::symlink_metadata(&dir)?;
    let own = found.uid() == rustix::process::geteuid().as_raw();
    if !own || !found.is_dir() {
        let what = if own { "is not a directory" } else { "belongs to another user" };
        return Err(Failure::new(Exit::Error, format!("{} {what}", dir.display()))
            .hint("set RFS_RUNTIME_DIR to a directory of your own"));
    }
    if found.mode() & 0o077 != 0 {
        std::fs::set_permissions(&dir, std::fs::Permissions::from_mode(0o700))?;
    }
    Ok(dir)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_keep_their_form() {
        let text = |request| {
            serde_json::to_string(&Envelope { protocol: PROTOCOL, request }).expect("it is plain data")
        };
        assert_eq!(text(Request::Status), r#"{"protocol":1,"op":"status"}"#);
        let fsck = Request::Fsck { data: true, repair: false };
        assert_eq!(text(fsck.clone()), r#"{"protocol":1,"op":"fsck","data":true,"repair":false}"#);
        let back: Envelope = serde_json::from_str(&text(fsck.clone())).expect("it was written so");
        assert_eq!(back.request, fsck);
    }

    #[test]
    fn failures_travel_with_code_and_hint() {
        let event = Event::from(Err(Failure::new(Exit::Busy, "in use").hint("close the files")));
        let text = serde_json::to_string(&event).expect("it is plain data");
        assert_eq!(text, r#"{"event":"failed","exit":30,"message":"in use","hint":"close the files"}"#);
    }

    #[test]
    fn a_socket_is_named_by_volume_and_place() {
        let volume = |text: &str| text.parse::<MetaUrl>().expect("it is valid");
        let name = socket_name(&volume("redb:///v/a.redb"), Path::new("/mnt"));
        assert_eq!(name, socket_name(&volume("/v/x/../a.redb"), Path::new("/mnt")));
        assert_ne!(name, socket_name(&volume("redb:///v/b.redb"), Path::new("/mnt")));
        assert_ne!(name, socket_name(&volume("redb:///v/a.redb"), Path::new("/other")));
    }
}

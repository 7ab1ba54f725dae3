//! Mounting, unmounting, and what can be said before and after.
//!
//! Owns the threads of a mount. Decides nothing about files.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use fuser::{Config, Session, SessionACL};
use rfs_core::vfs::Vfs;
use rustix::io::Errno;
use thiserror::Error;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tracing::{debug, info};

use crate::adapter::{Adapter, AdapterOptions};
use crate::bridge::Bridge;
use crate::mount_table::{self, FILESYSTEM_TYPE};
use crate::notify;
use crate::options::{Access, MountOptions};
use crate::tune::{self, Caching};

/// Most threads that read requests; more only move work between processors.
const THREADS_MAX: usize = 8;

/// How many clients may have the volume mounted, which decides what the kernel may remember.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sharing {
    /// This mount alone: names, attributes and pages stay in the kernel's caches for long.
    Exclusive,
    /// Several clients: the kernel asks again after a second.
    Shared,
}

/// What to mount where.
#[derive(Debug, Clone)]
pub struct MountSettings {
    /// An existing directory.
    pub mountpoint: PathBuf,
    /// What the mount table shows as mounted: the metadata URL.
    pub source: String,
    /// From `-o`.
    pub options: MountOptions,
    /// How many clients the volume has.
    pub sharing: Sharing,
    /// Threads that read requests; `None`: one a processor, at most 8.
    pub threads: Option<usize>,
    /// The longest that a request may take before its caller gets EIO; `None` is for ever. More than the store's time-out.
    pub answer_within: Option<Duration>,
    /// Whether a dead mount at the mount point is cleared away first.
    pub replace_dead: bool,
}

/// Why mounting failed. Every message says what to do.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum MountError {
    /// No `/dev/fuse`.
    #[error(
        "FUSE is not available: /dev/fuse is missing. Load the kernel module (`modprobe fuse`); in a container, start it \
         with `--device /dev/fuse --cap-add SYS_ADMIN`; on macOS, install macFUSE"
    )]
    FuseMissing,
    /// `/dev/fuse` is not for everybody.
    #[error(
        "/dev/fuse may only be used by root here: root must make it usable (`chmod 666 /dev/fuse`), or mount"
    )]
    FuseForbidden,
    /// Not root, and no `fusermount3`.
    #[error(
        "fusermount3 is not installed, which mounting as a user other than root needs. Install it: `apt install fuse3` \
         (Debian, Ubuntu), `dnf install fuse3` (Fedora)"
    )]
    HelperMissing,
    /// Root without the right to mount.
    #[error(
        "mounting is not permitted here. In a container, start it with `--device /dev/fuse --cap-add SYS_ADMIN`"
    )]
    NotAllowed,
    /// `allow_other` by a user, not permitted by the administrator.
    #[error(
        "allow_other is not permitted: root must add the line `user_allow_other` to /etc/fuse.conf, or mount without it"
    )]
    AllowOtherForbidden,
    /// No such directory.
    #[error("mount point {0} does not exist: create it (`mkdir -p`)")]
    MountpointMissing(PathBuf),
    /// Something else.
    #[error("mount point {0} is not a directory: name an empty one")]
    MountpointNotDirectory(PathBuf),
    /// Holds files, which the mount would hide.
    #[error("mount point {0} is not empty: use an empty directory, or `-o nonempty` to hide what is in it")]
    MountpointNotEmpty(PathBuf),
    /// The mount point cannot be looked at.
    #[error("mount point {mountpoint} cannot be read: {source}")]
    MountpointUnreadable {
        /// The mount point.
        mountpoint: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A mount whose process is gone.
    #[error(
        "{0} is a dead mount, left by a process that ended without unmounting: clear it with `rfs umount {0}`"
    )]
    DeadMount(PathBuf),
    /// An rfs mount that lives.
    #[error("{mountpoint} is already a mount of {mounted}")]
    AlreadyMounted {
        /// The mount point.
        mountpoint: PathBuf,
        /// What is mounted.
        mounted: String,
    },
    /// A dead mount could not be cleared away.
    #[error("dead mount could not be cleared: {0}")]
    NotCleared(#[from] UnmountError),
    /// The FUSE device or its helper failed.
    #[error("FUSE device: {0}")]
    Device(io::Error),
    /// The kernel or the helper refused.
    #[error("mounting at {mountpoint} failed: {source}")]
    Mount {
        /// The mount point.
        mountpoint: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Kernel and rfs could not agree on a protocol.
    #[error("the kernel does not speak a FUSE protocol that rfs understands: {0}")]
    Protocol(io::Error),
    /// No thread could be started.
    #[error("threads could not be started: {0}")]
    Threads(io::Error),
}

/// How to unmount.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UnmountMode {
    /// Only if nobody uses it.
    Orderly,
    /// Out of the namespace at once; open files work on until they are closed.
    Detach,
    /// Out of the namespace, and requests under way fail. What the kernel holds and did not send is lost.
    Force,
}

/// Why unmounting failed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum UnmountError {
    /// Somebody has a file open or stands in it.
    #[error("{0} is in use: `fuser -vm {0}` shows by whom; `rfs umount --lazy {0}` detaches it regardless")]
    Busy(PathBuf),
    /// Nothing is mounted there.
    #[error("nothing is mounted at {0}")]
    NotMounted(PathBuf),
    /// Not root, and no `fusermount3`.
    #[error(
        "fusermount3 is not installed, which unmounting as a user other than root needs: `apt install fuse3`"
    )]
    HelperMissing,
    /// The kernel or the helper refused.
    #[error("unmounting {mountpoint} failed: {source}")]
    Failed {
        /// The mount point.
        mountpoint: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// How a mount ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stopped {
    /// Unmounted.
    Unmounted,
    /// Detached: nothing new can be opened, but files that are open are still served, until the process ends.
    Detached,
}

/// State of a mountpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum State {
    /// Nothing is mounted there.
    NotMounted,
    /// A filesystem that is not rfs.
    Foreign(mount_table::Mounted),
    /// An rfs mount that answers.
    Alive(mount_table::Mounted),
    /// An rfs mount whose process is gone.
    Dead(mount_table::Mounted),
}

/// What is mounted at `mountpoint`, and whether it lives. Blocks as long as the mount takes to answer.
///
/// # Errors
/// The mount table cannot be read.
pub fn state(mountpoint: &Path) -> io::Result<State> {
    let Some(mounted) = mount_table::mount_at(mountpoint)? else {
        return Ok(State::NotMounted);
    };
    if mounted.fs_type != FILESYSTEM_TYPE {
        return Ok(State::Foreign(mounted));
    }
    Ok(if is_dead(&mounted.mountpoint) { State::Dead(mounted) } else { State::Alive(mounted) })
}

/// Asks for something that the kernel never remembers; attributes of a dead mount it may still know.
fn is_dead(mountpoint: &Path) -> bool {
    let answer = rustix::fs::statvfs(mountpoint);
    matches!(answer, Err(Errno::NOTCONN | Errno::CONNABORTED))
}

/// Unmounts `mountpoint`, dead or alive. A dead mount goes even if somebody is still in it.
///
/// # Errors
/// See [`UnmountError`].
pub fn unmount(mountpoint: &Path, mode: UnmountMode) -> Result<(), UnmountError> {
    let resolved = mount_table::resolve(mountpoint)
        .map_err(|source| UnmountError::Failed { mountpoint: mountpoint.to_owned(), source })?;
    match platform::unmount(&resolved, mode) {
        Err(UnmountError::Busy(_)) if is_dead(&resolved) => platform::unmount(&resolved, UnmountMode::Detach),
        result => result,
    }
}

/// Applies `options` to an existing mount (`mount -o remount`), which needs root. The kernel enforces read-only itself.
///
/// Options that are not given fall back to their defaults; mount(8) passes the present ones along.
///
/// # Errors
/// The kernel refuses, as with `EBUSY` for read-only while files are open for writing.
pub fn remount(mountpoint: &Path, options: &MountOptions) -> io::Result<()> {
    platform::remount(&mount_table::resolve(mountpoint)?, options)
}

/// A mount that is being served. Dropping it leaves it mounted and served.
#[derive(Debug)]
pub struct MountHandle {
    mountpoint: PathBuf,
    bridge: Bridge,
    ended: watch::Receiver<Ended>,
}

#[derive(Debug, Clone)]
enum Ended {
    NotYet,
    Orderly,
    Failed(Arc<io::Error>),
}

/// Mounts `vfs` and returns when the kernel knows it. Requests that wait do so on `runtime`.
///
/// Blocks for a moment; not for a thread of the runtime.
///
/// # Errors
/// See [`MountError`]. Nothing stays mounted after an error.
pub fn mount(vfs: Arc<Vfs>, runtime: &Handle, settings: &MountSettings) -> Result<MountHandle, MountError> {
    let mountpoint = check_mountpoint(settings)?;
    let caching = if vfs.options().kernel_caches_writes { Caching::Writes } else { Caching::Reads };
    let bridge = Bridge::new(runtime.clone(), settings.answer_within);
    let (notices, queue) = notify::queue();
    let adapter = Adapter::new(
        vfs,
        bridge.clone(),
        notices,
        AdapterOptions {
            sharing: settings.sharing,
            caching,
            sync_names: settings.options.dirsync || settings.options.sync,
        },
    );
    let session = platform::session(adapter, &mountpoint, settings)?;
    queue.start(session.notifier()).map_err(MountError::Threads)?;
    let ended = serve(session, &mountpoint)?;
    if let Ok(Some(mounted)) = mount_table::mount_at(&mountpoint) {
        tune::tune(&mounted, caching);
    }
    info!(mountpoint = %mountpoint.display(), source = settings.source, ?caching, "mounted");
    Ok(MountHandle { mountpoint, bridge, ended })
}

/// Runs the session's threads under one that waits for them.
fn serve(session: Session<Adapter>, mountpoint: &Path) -> Result<watch::Receiver<Ended>, MountError> {
    let (tell, ended) = watch::channel(Ended::NotYet);
    let started = thread::Builder::new().name("rfs-fuse".to_owned()).spawn(move || {
        let end = match session.run() {
            Ok(()) => Ended::Orderly,
            Err(e) => Ended::Failed(Arc::new(e)),
        };
        debug!(?end, "mount has ended");
        tell.send_replace(end);
    });
    match started {
        Ok(_) => Ok(ended),
        Err(e) => {
            // The session went with the closure and its device with it; only the name is left.
            if let Err(left) = platform::unmount(mountpoint, UnmountMode::Detach) {
                debug!(%left, "mount point was not cleared");
            }
            Err(MountError::Threads(e))
        }
    }
}

fn check_mountpoint(settings: &MountSettings) -> Result<PathBuf, MountError> {
    let given = &settings.mountpoint;
    let unreadable = |source| MountError::MountpointUnreadable { mountpoint: given.clone(), source };
    let missing = |e: io::Error| match e.kind() {
        io::ErrorKind::NotFound => MountError::MountpointMissing(given.clone()),
        _ => unreadable(e),
    };
    match state(given).map_err(missing)? {
        State::NotMounted | State::Foreign(_) => {}
        State::Alive(mounted) => {
            return Err(MountError::AlreadyMounted { mountpoint: given.clone(), mounted: mounted.source });
        }
        State::Dead(_) if settings.replace_dead => unmount(given, UnmountMode::Detach)?,
        State::Dead(_) => return Err(MountError::DeadMount(given.clone())),
    }
    let metadata = std::fs::metadata(given).map_err(missing)?;
    if !metadata.is_dir() {
        return Err(MountError::MountpointNotDirectory(given.clone()));
    }
    let mountpoint = given.canonicalize().map_err(unreadable)?;
    if !settings.options.nonempty && std::fs::read_dir(&mountpoint).map_err(unreadable)?.next().is_some() {
        return Err(MountError::MountpointNotEmpty(mountpoint));
    }
    Ok(mountpoint)
}

fn everyone(options: &MountOptions) -> bool {
    match options.access {
        Access::Everyone => true,
        Access::Owner => false,
        Access::ByMounter => rustix::process::geteuid().is_root(),
    }
}

fn config(settings: &MountSettings) -> Config {
    let mut config = Config::default();
    let processors = thread::available_parallelism().map_or(1, usize::from);
    let threads = settings.threads.unwrap_or(processors).clamp(1, THREADS_MAX);
    config.n_threads = Some(if cfg!(target_os = "linux") { threads } else { 1 });
    config.clone_fd = cfg!(target_os = "linux") && threads > 1;
    // Who may come in is the kernel's check; fuser's own would also refuse requests that the kernel makes for root.
    config.acl = SessionACL::All;
    config
}

impl MountHandle {
    /// Where it is mounted: absolute, resolved.
    pub fn mountpoint(&self) -> &Path {
        &self.mountpoint
    }

    /// Waits until the filesystem is unmounted, by whomever, and the last request is answered.
    ///
    /// # Errors
    /// The connection to the kernel failed.
    pub async fn wait(&self) -> io::Result<()> {
        let mut ended = self.ended.clone();
        let end = ended.wait_for(|ended| !matches!(ended, Ended::NotYet)).await;
        let end = end
            .map_or(Ended::Failed(Arc::new(io::Error::other("thread of the mount panicked"))), |end| {
                end.clone()
            });
        self.bridge.drained().await;
        match end {
            Ended::NotYet | Ended::Orderly => Ok(()),
            Ended::Failed(e) => Err(io::Error::new(e.kind(), e)),
        }
    }

    /// Has the kernel write back what it holds of the mount's files.
    ///
    /// # Errors
    /// A write failed.
    pub async fn write_back(&self) -> io::Result<()> {
        if !matches!(*self.ended.borrow(), Ended::NotYet) {
            return Ok(());
        }
        let mountpoint = self.mountpoint.clone();
        blocking(move || platform::write_back(&mountpoint)).await?
    }

    /// Ends the mount: what the kernel holds is written back, then it is unmounted, or, if it is in use, detached.
    ///
    /// # Errors
    /// It could not even be detached.
    pub async fn stop(&self) -> Result<Stopped, UnmountError> {
        if let Err(error) = self.write_back().await {
            debug!(%error, "kernel could not write everything back");
        }
        match self.unmount(UnmountMode::Orderly).await {
            Err(UnmountError::Busy(_)) => {
                self.unmount(UnmountMode::Detach).await?;
                Ok(Stopped::Detached)
            }
            Ok(()) | Err(UnmountError::NotMounted(_)) => Ok(Stopped::Unmounted),
            Err(e) => Err(e),
        }
    }

    /// Unmounts; [`MountHandle::wait`] then returns, with `Detach` when the last file is closed.
    ///
    /// # Errors
    /// See [`UnmountError`].
    pub async fn unmount(&self, mode: UnmountMode) -> Result<(), UnmountError> {
        if !matches!(*self.ended.borrow(), Ended::NotYet) {
            return Ok(());
        }
        let mountpoint = self.mountpoint.clone();
        let failed = |source| UnmountError::Failed { mountpoint: self.mountpoint.clone(), source };
        blocking(move || platform::unmount(&mountpoint, mode)).await.map_err(failed)?
    }
}

/// Runs what blocks (and what this very mount may have to answer) beside the runtime's threads.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> io::Result<T> {
    tokio::task::spawn_blocking(work).await.map_err(io::Error::other)
}

#[cfg(target_os = "linux")]
mod platform {
    use super::{
        Adapter, FILESYSTEM_TYPE, MountError, MountSettings, Path, Session, SessionACL, UnmountMode, config,
        everyone,
    };
    use crate::device::Attach;
    pub(super) use crate::device::{remount, unmount, write_back};

    /// Mounts and shakes hands with the kernel.
    pub(super) fn session(
        adapter: Adapter,
        mountpoint: &Path,
        settings: &MountSettings,
    ) -> Result<Session<Adapter>, MountError> {
        let attach = Attach {
            mountpoint,
            source: &settings.source,
            options: &settings.options,
            everyone: everyone(&settings.options),
        };
        let device = attach.attach()?;
        Session::from_fd(adapter, device, SessionACL::All, config(settings)).map_err(|e| {
            if let Err(left) = unmount(mountpoint, UnmountMode::Detach) {
                tracing::debug!(%left, fs_type = FILESYSTEM_TYPE, "mount point was not cleared");
            }
            MountError::Protocol(e)
        })
    }
}

#[cfg(not(target_os = "linux"))]
mod platform {
    use std::process::Command;

    use fuser::MountOption;

    use super::{
        Adapter, MountError, MountOptions, MountSettings, Path, Session, SessionACL, UnmountError,
        UnmountMode, config, everyone, io,
    };

    /// Mounts through the platform's FUSE library.
    pub(super) fn session(
        adapter: Adapter,
        mountpoint: &Path,
        settings: &MountSettings,
    ) -> Result<Session<Adapter>, MountError> {
        let options = &settings.options;
        let mut config = config(settings);
        config.acl = if everyone(options) { SessionACL::All } else { SessionACL::Owner };
        config.mount_options = vec![
            MountOption::FSName(settings.source.clone()),
            MountOption::Subtype("rfs".to_owned()),
            MountOption::DefaultPermissions,
        ];
        let chosen = [
            (options.read_only, MountOption::RO),
            (options.nodev, MountOption::NoDev),
            (options.nosuid, MountOption::NoSuid),
            (options.noexec, MountOption::NoExec),
            (options.sync, MountOption::Sync),
        ];
        config.mount_options.extend(chosen.into_iter().filter_map(|(on, option)| on.then_some(option)));
        Session::new(adapter, mountpoint, &config)
            .map_err(|source| MountError::Mount { mountpoint: mountpoint.to_owned(), source })
    }

    pub(super) fn unmount(mountpoint: &Path, mode: UnmountMode) -> Result<(), UnmountError> {
        let failed = |source: io::Error| UnmountError::Failed { mountpoint: mountpoint.to_owned(), source };
        let mut command = Command::new("/sbin/umount");
        if mode != UnmountMode::Orderly {
            command.arg("-f");
        }
        let output = command.arg(mountpoint).output().map_err(failed)?;
        let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        match output.status.success() {
            true => Ok(()),
            false if said.contains("busy") => Err(UnmountError::Busy(mountpoint.to_owned())),
            false if said.contains("not currently mounted") => {
                Err(UnmountError::NotMounted(mountpoint.to_owned()))
            }
            false => Err(failed(io::Error::other(said))),
        }
    }

    pub(super) fn remount(_mountpoint: &Path, _options: &MountOptions) -> io::Result<()> {
        Err(io::Error::new(
            io::ErrorKind::Unsupported,
            "remounting is not supported on this platform: unmount first",
        ))
    }

    pub(super) fn write_back(mountpoint: &Path) -> io::Result<()> {
        std::fs::metadata(mountpoint)?;
        rustix::fs::sync();
        Ok(())
    }
}

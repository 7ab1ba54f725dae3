//! Attaching a FUSE device to a directory on Linux: mount(2) as root, `fusermount3` for everybody else; and taking it
//! away again.
//!
//! fuser could mount by itself, but then also unmounts by itself when its session is dropped, by path, even after somebody
//! else has mounted something else there. So the mount is made here and fuser only gets the device.

use std::ffi::{CString, OsStr};
use std::io::{self, IoSliceMut, Read as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rfs_core::vfs::AtimeMode;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};

use crate::mount::{MountError, UnmountError, UnmountMode};
use crate::mount_table::FILESYSTEM_TYPE;
use crate::options::MountOptions;

const DEVICE: &str = "/dev/fuse";
const HELPER: &str = "fusermount3";

/// What to attach where.
pub(crate) struct Attach<'a> {
    /// Absolute, resolved path of a directory.
    pub(crate) mountpoint: &'a Path,
    /// What the mount table shows as mounted.
    pub(crate) source: &'a str,
    pub(crate) options: &'a MountOptions,
    pub(crate) everyone: bool,
}

impl Attach<'_> {
    /// Mounts; the answer is the connection to the kernel.
    pub(crate) fn attach(&self) -> Result<OwnedFd, MountError> {
        let opened = rustix::fs::open(DEVICE, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty());
        let root = rustix::process::geteuid().is_root();
        match opened {
            Err(Errno::NOENT | Errno::NODEV | Errno::NXIO) => return Err(MountError::FuseMissing),
            Err(Errno::ACCESS | Errno::PERM) if !root => return Err(MountError::FuseForbidden),
            Err(e) => return Err(MountError::Device(e.into())),
            Ok(device) if root => match self.mount(&device) {
                Ok(()) => return Ok(device),
                // Root without CAP_SYS_ADMIN, as in a container: the helper can do no more, but if it is there, it may say
                // why.
                Err(Errno::PERM) if find_helper().is_some() => {}
                Err(Errno::PERM) => return Err(MountError::NotAllowed),
                Err(e) => return Err(self.failed(e.into())),
            },
            Ok(_) => {}
        }
        self.mount_with_helper()
    }

    fn failed(&self, source: io::Error) -> MountError {
        MountError::Mount { mountpoint: self.mountpoint.to_owned(), source }
    }

    fn mount(&self, device: &OwnedFd) -> Result<(), Errno> {
        let mut data = format!(
            "fd={},rootmode=40000,user_id={},group_id={},default_permissions",
            device.as_raw_fd(),
            rustix::process::getuid().as_raw(),
            rustix::process::getgid().as_raw(),
        );
        if self.everyone {
            data.push_str(",allow_other");
        }
        let data = CString::new(data).map_err(|_| Errno::INVAL)?;
        let flags = flags(self.options);
        rustix::mount::mount(self.source, self.mountpoint, FILESYSTEM_TYPE, flags, data.as_c_str())
    }

    /// Has the set-uid helper mount, which sends the device back over a socket: its standard input, because that needs no
    /// file descriptor to be kept open across exec.
    fn mount_with_helper(&self) -> Result<OwnedFd, MountError> {
        let helper = find_helper().ok_or(MountError::HelperMissing)?;
        let (ours, theirs) = UnixStream::pair().map_err(MountError::Device)?;
        let mut child = Command::new(&helper)
            .arg("-o")
            .arg(self.helper_options())
            .arg("--")
            .arg(self.mountpoint)
            .env("_FUSE_COMMFD", "0")
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(MountError::Device)?;
        let received = receive_device(&ours);
        let mut said = String::new();
        if let Some(mut stderr) = child.stderr.take() {
            // What it says only makes the message better.
            let _ = stderr.read_to_string(&mut said);
        }
        let status = child.wait().map_err(MountError::Device)?;
        match received {
            Ok(Some(device)) => Ok(device),
            Ok(None) => Err(self.refused(said.trim(), status.code())),
            Err(e) => Err(MountError::Device(e)),
        }
    }

    fn refused(&self, said: &str, code: Option<i32>) -> MountError {
        if said.contains("user_allow_other") {
            MountError::AllowOtherForbidden
        } else if said.is_empty() {
            self.failed(io::Error::other(format!("{HELPER} failed with exit code {code:?} and said nothing")))
        } else {
            self.failed(io::Error::other(said.to_owned()))
        }
    }

    fn helper_options(&self) -> String {
        let escape = |text: &str| text.replace('\\', "\\\\").replace(',', "\\,");
        let mut list = format!("fsname={},subtype=rfs,default_permissions", escape(self.source));
        let mut add = |on: bool, word: &str| {
            if on {
                list.push(',');
                list.push_str(word);
            }
        };
        let options = self.options;
        add(self.everyone, "allow_other");
        add(options.read_only, "ro");
        add(options.nodev, "nodev");
        add(options.nosuid, "nosuid");
        add(options.noexec, "noexec");
        add(options.sync, "sync");
        add(options.dirsync, "dirsync");
        add(options.atime == AtimeMode::Noatime, "noatime");
        list
    }
}

fn flags(options: &MountOptions) -> MountFlags {
    let mut flags = MountFlags::empty();
    flags.set(MountFlags::RDONLY, options.read_only);
    flags.set(MountFlags::NODEV, options.nodev);
    flags.set(MountFlags::NOSUID, options.nosuid);
    flags.set(MountFlags::NOEXEC, options.noexec);
    flags.set(MountFlags::SYNCHRONOUS, options.sync);
    flags.set(MountFlags::DIRSYNC, options.dirsync);
    flags.set(MountFlags::NODIRATIME, options.nodiratime);
    match options.atime {
        AtimeMode::Relatime => flags.insert(MountFlags::RELATIME),
        AtimeMode::Noatime => flags.insert(MountFlags::NOATIME),
    }
    flags
}

fn receive_device(socket: &UnixStream) -> io::Result<Option<OwnedFd>> {
    let mut byte = [0u8];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC;
    rustix::io::retry_on_intr(|| {
        rustix::net::recvmsg(socket, &mut [IoSliceMut::new(&mut byte)], &mut control, flags)
    })?;
    Ok(control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut devices) => devices.next(),
        _ => None,
    }))
}

/// The set-uid helper, from `PATH` or where distributions put it.
fn find_helper() -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let known =
        ["/usr/bin", "/bin", "/usr/local/bin", "/usr/sbin", "/sbin", "/run/wrappers/bin"].map(PathBuf::from);
    std::env::split_paths(&path)
        .chain(known)
        .map(|dir| dir.join(HELPER))
        .find(|candidate| candidate.is_file())
}

/// Changes the options of an existing mount. The kernel keeps the read-only state of FUSE mounts itself.
pub(crate) fn remount(mountpoint: &Path, options: &MountOptions) -> io::Result<()> {
    Ok(rustix::mount::mount_remount(mountpoint, flags(options), c"")?)
}

pub(crate) fn unmount(mountpoint: &Path, mode: UnmountMode) -> Result<(), UnmountError> {
    let failed = |source: io::Error| UnmountError::Failed { mountpoint: mountpoint.to_owned(), source };
    let flags = UnmountFlags::NOFOLLOW
        | match mode {
            UnmountMode::Orderly => UnmountFlags::empty(),
            UnmountMode::Detach => UnmountFlags::DETACH,
            UnmountMode::Force => UnmountFlags::DETACH | UnmountFlags::FORCE,
        };
    match rustix::mount::unmount(mountpoint, flags) {
        Ok(()) => Ok(()),
        Err(Errno::BUSY) => Err(UnmountError::Busy(mountpoint.to_owned())),
        Err(Errno::INVAL | Errno::NOENT) => Err(UnmountError::NotMounted(mountpoint.to_owned())),
        Err(Errno::PERM) => unmount_with_helper(mountpoint, mode),
        Err(e) => Err(failed(e.into())),
    }
}

fn unmount_with_helper(mountpoint: &Path, mode: UnmountMode) -> Result<(), UnmountError> {
    let failed = |source: io::Error| UnmountError::Failed { mountpoint: mountpoint.to_owned(), source };
    let helper = find_helper().ok_or(UnmountError::HelperMissing)?;
    let mut command = Command::new(helper);
    command.arg("-u");
    if mode != UnmountMode::Orderly {
        command.arg("-z");
    }
    let output = command
        .arg("--")
        .arg(OsStr::from_bytes(mountpoint.as_os_str().as_bytes()))
        .output()
        .map_err(failed)?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    if said.contains("busy") {
        Err(UnmountError::Busy(mountpoint.to_owned()))
    } else if said.contains("not found in") || said.contains("not mounted") {
        Err(UnmountError::NotMounted(mountpoint.to_owned()))
    } else {
        Err(failed(io::Error::other(said)))
    }
}

/// Writes back what the kernel holds of the mount's files. Blocks; needs the mount to answer.
pub(crate) fn write_back(mountpoint: &Path) -> io::Result<()> {
    let root = rustix::fs::open(
        mountpoint,
        OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW,
        Mode::empty(),
    )?;
    match rustix::fs::syncfs(&root) {
        // Left by a process that was killed while the kernel sent the times of its file, with the cache for writes
        // (`fuse_flush_time_update` in the kernel): no byte failed to be written, and the kernel tells it once.
        Err(Errno::INTR) => Ok(rustix::fs::syncfs(&root)?),
        written => Ok(written?),
    }
}

//! A mount for a test, gone at its end.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use object_store::memory::InMemory;
use rfs_core::data::{Budget, Data, DataOptions};
use rfs_core::meta::{FormatOptions, Meta, OpenOptions};
use rfs_core::types::{Caller, Clock, Ino, Kind, Name, SystemClock};
use rfs_core::vfs::{NewNode, NodeKind, Vfs, VfsOptions, VfsStats};
use rfs_fuse::{MountError, MountHandle, MountOptions, MountSettings, Sharing, UnmountMode};
use rfs_kv::{Kv, MemKv};
use tempfile::TempDir;
use tokio::runtime::{Builder, Runtime};

use crate::gate::{GatedKv, Gatekeeper};

/// Whether this user may mount here; says so if not.
pub(crate) fn can_mount() -> bool {
    let usable =
        rustix::fs::access("/dev/fuse", rustix::fs::Access::READ_OK | rustix::fs::Access::WRITE_OK).is_ok();
    let user = rustix::process::geteuid().is_root() || Path::new("/usr/bin/fusermount3").exists();
    if !usable || !user {
        eprintln!("skipped: this machine or user cannot mount");
    }
    usable && user
}

/// A filesystem in memory, mounted.
#[derive(Debug)]
pub(crate) struct Mounted {
    handle: MountHandle,
    vfs: Arc<Vfs>,
    runtime: Runtime,
    gate: Gatekeeper,
    directory: Option<TempDir>,
}

impl Mounted {
    /// Mounts in a new directory; `None` where that cannot be done.
    pub(crate) fn new(options: &str) -> Option<Mounted> {
        Mounted::answering_within(Duration::from_mins(1), options)
    }

    /// The same, and no request takes longer than this.
    pub(crate) fn answering_within(limit: Duration, options: &str) -> Option<Mounted> {
        if !can_mount() {
            return None;
        }
        let directory = tempfile::tempdir().unwrap();
        let mut mounted = Mounted::mount(directory.path(), limit, options).unwrap();
        mounted.directory = Some(directory);
        Some(mounted)
    }

    /// Mounts at `mountpoint`.
    pub(crate) fn at(mountpoint: &Path, options: &str) -> Result<Mounted, MountError> {
        Mounted::mount(mountpoint, Duration::from_mins(1), options)
    }

    fn mount(mountpoint: &Path, limit: Duration, options: &str) -> Result<Mounted, MountError> {
        let options = MountOptions::parse(options).unwrap();
        let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let gate = Gatekeeper::new();
        let vfs = runtime.block_on(open(&gate, options.writeback.unwrap_or(true)));
        let settings = MountSettings {
            mountpoint: mountpoint.to_owned(),
            source: "memory".to_owned(),
            options,
            sharing: Sharing::Exclusive,
            threads: Some(2),
            answer_within: Some(limit),
            replace_dead: false,
        };
        let handle = rfs_fuse::mount(Arc::clone(&vfs), runtime.handle(), &settings)?;
        Ok(Mounted { handle, vfs, runtime, gate, directory: None })
    }

    pub(crate) fn mountpoint(&self) -> &Path {
        self.handle.mountpoint()
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.mountpoint().join(name)
    }

    pub(crate) fn handle(&self) -> &MountHandle {
        &self.handle
    }

    /// What the metadata store stands behind.
    pub(crate) fn gate(&self) -> &Gatekeeper {
        &self.gate
    }

    pub(crate) fn stats(&self) -> VfsStats {
        self.vfs.stats()
    }

    /// Makes a directory with files in it, of which the kernel knows nothing.
    pub(crate) fn make_behind_the_kernel(&self, name: &str, files: &[&str]) {
        let caller = Caller { uid: 0, gid: 0, pid: 0 };
        self.runtime.block_on(async {
            let name = name_of(name);
            let node = NewNode { caller: &caller, parent: Ino::ROOT, name: &name, mode: 0o755 };
            let parent = self.vfs.mkdir(node).await.unwrap().ino;
            for file in files {
                self.make_file(parent, file).await;
            }
            self.vfs.forget(parent, 1);
        });
    }

    /// Makes a file of which the kernel knows nothing.
    pub(crate) fn make_file_behind_the_kernel(&self, name: &str) {
        self.runtime.block_on(self.make_file(Ino::ROOT, name));
    }

    /// Removes a file that the kernel goes on to take for there.
    pub(crate) fn remove_file_behind_the_kernel(&self, name: &str) {
        self.runtime.block_on(self.vfs.unlink(Ino::ROOT, &name_of(name))).unwrap();
    }

    async fn make_file(&self, parent: Ino, name: &str) {
        let (caller, name) = (Caller { uid: 0, gid: 0, pid: 0 }, name_of(name));
        let node = NewNode { caller: &caller, parent, name: &name, mode: 0o644 };
        let kind = NodeKind { kind: Kind::File, rdev: 0 };
        let made = self.vfs.mknod(node, kind).await.unwrap().ino;
        self.vfs.forget(made, 1);
    }

    pub(crate) fn runtime(&self) -> &Runtime {
        &self.runtime
    }

    /// Names in a directory, sorted.
    pub(crate) fn list(&self, name: &str) -> Vec<String> {
        let entries = std::fs::read_dir(self.path(name)).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// Removes a file, or a directory with all that is in it.
    pub(crate) fn remove(&self, name: &str) {
        let path = self.path(name);
        let is_directory = path.symlink_metadata().unwrap().is_dir();
        if is_directory { std::fs::remove_dir_all(path) } else { std::fs::remove_file(path) }.unwrap();
    }

    /// Length of a file as the filesystem knows it.
    pub(crate) fn size_behind_the_kernel(&self, ino: u64) -> u64 {
        self.runtime.block_on(self.vfs.getattr(Ino(ino))).unwrap().size
    }

    /// Unmounts and checks that everything was stored.
    pub(crate) fn unmount(&self) {
        self.runtime.block_on(async {
            self.handle.unmount(UnmountMode::Orderly).await.unwrap();
            self.handle.wait().await.unwrap();
            let report = self.vfs.shutdown().await;
            assert!(report.unsaved.is_empty() && report.errors.is_empty(), "{report:?}");
        });
    }
}

impl Drop for Mounted {
    /// However the test ended, no mount stays.
    fn drop(&mut self) {
        let _ = self.runtime.block_on(self.handle.unmount(UnmountMode::Force));
    }
}

async fn open(gate: &Gatekeeper, kernel_caches_writes: bool) -> Arc<Vfs> {
    let kv: Arc<dyn Kv> = Arc::new(GatedKv { inner: MemKv::new(), keeper: gate.clone() });
    let clock: Arc<dyn Clock> = Arc::new(SystemClock);
    Meta::format(&*kv, &FormatOptions::default(), clock.now()).await.unwrap();
    let meta = Arc::new(Meta::open(kv, clock, &OpenOptions::default()).await.unwrap());
    let memory = Budget::new(64 << 20);
    let (session, volume) = (meta.session_id().unwrap(), meta.opened_volume());
    let data = DataOptions {
        block_bytes: volume.block_bytes,
        ..DataOptions::new(session, volume.uuid, Arc::clone(&memory))
    };
    let data = Arc::new(Data::open(data, Arc::new(InMemory::new())).await.unwrap());
    Vfs::mount(meta, data, memory, VfsOptions { kernel_caches_writes, ..VfsOptions::default() })
}

fn name_of(name: &str) -> Name {
    Name::new(name.as_bytes().to_vec()).unwrap()
}

//! Mounts a filesystem without any set-up, for trying things by hand.
//!
//!     cargo run -p rfs-fuse --example memfs -- MOUNTPOINT [OPTIONS [DIRECTORY]]
//!
//! OPTIONS is what `mount -o` takes. Without DIRECTORY everything is in memory and gone at the end; with it, the metadata
//! are in `DIRECTORY/meta.redb`, the packs in `DIRECTORY/packs`, and a second run finds them. Ends at unmount or Ctrl-C.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use object_store::ObjectStore;
use object_store::local::LocalFileSystem;
use object_store::memory::InMemory;
use rfs_core::data::{Budget, Data, DataOptions};
use rfs_core::meta::{FormatOptions, Meta, OpenOptions};
use rfs_core::types::{Clock, SessionId, SystemClock};
use rfs_core::vfs::{Vfs, VfsOptions, WriteAccess};
use rfs_fuse::{MountOptions, MountSettings, Sharing};
use rfs_kv::{Kv, MemKv};
use rfs_meta_redb::{RedbKv, RedbOptions};
use tokio::runtime::Builder;
use tokio::signal;
use tracing_subscriber::EnvFilter;
use uuid::Uuid;

/// Bytes of file contents in memory that are not stored.
const MEMORY_BYTES: u64 = 256 << 20;

fn main() -> Result<()> {
    tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info")))
        .with_writer(std::io::stderr)
        .init();
    let mut arguments = std::env::args_os().skip(1);
    let mountpoint =
        PathBuf::from(arguments.next().context("usage: memfs MOUNTPOINT [OPTIONS [DIRECTORY]]")?);
    let options = arguments.next().unwrap_or_default();
    let options = MountOptions::parse(options.to_str().context("options are not text")?)?;
    let directory = arguments.next().map(PathBuf::from);

    let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let vfs = runtime.block_on(open(&mountpoint, &options, directory.as_deref()))?;
    let settings = MountSettings {
        mountpoint,
        source: directory.map_or_else(|| "memory".to_owned(), |dir| format!("redb://{}", dir.display())),
        options,
        sharing: Sharing::Exclusive,
        threads: None,
        answer_within: Some(Duration::from_mins(6)),
        replace_dead: false,
    };
    let mount = rfs_fuse::mount(Arc::clone(&vfs), runtime.handle(), &settings)?;
    runtime.block_on(async {
        tokio::select! {
            ended = mount.wait() => ended?,
            interrupted = signal::ctrl_c() => {
                interrupted?;
                println!("{:?}", mount.stop().await?);
            }
        }
        let report = vfs.shutdown().await;
        ensure!(
            report.unsaved.is_empty() && report.errors.is_empty(),
            "not everything was stored: {report:?}"
        );
        Ok(())
    })
}

/// Opens the volume, formatting it first if it is new.
async fn open(mountpoint: &Path, options: &MountOptions, directory: Option<&Path>) -> Result<Arc<Vfs>> {
    let clock: Arc<dyn Clock> = Arc::new(SystemClock);
    let (kv, store): (Arc<dyn Kv>, Arc<dyn ObjectStore>) = match directory {
        None => (Arc::new(MemKv::new()), Arc::new(InMemory::new())),
        Some(directory) => {
            let packs = directory.join("packs");
            std::fs::create_dir_all(&packs)?;
            let file = directory.join("meta.redb");
            let options = RedbOptions::default();
            let redb =
                if file.exists() { RedbKv::open(file, options) } else { RedbKv::create(file, options) };
            (Arc::new(redb?), Arc::new(LocalFileSystem::new_with_prefix(packs)?))
        }
    };
    if Meta::volume(&*kv).await?.is_none() {
        let format = FormatOptions { uuid: Uuid::new_v4(), ..FormatOptions::default() };
        Meta::format(&*kv, &format, clock.now()).await?;
    }
    let open = OpenOptions {
        mountpoint: mountpoint.display().to_string(),
        pid: std::process::id(),
        read_only: options.read_only,
        ..OpenOptions::default()
    };
    let meta = Arc::new(Meta::open(kv, clock, &open).await?);
    let memory = Budget::new(MEMORY_BYTES);
    let volume = meta.opened_volume();
    let session = meta.session_id().unwrap_or(SessionId(0));
    let data = DataOptions {
        block_bytes: volume.block_bytes,
        ..DataOptions::new(session, volume.uuid, Arc::clone(&memory))
    };
    let data = Arc::new(Data::open(data, store).await?);
    let vfs = VfsOptions {
        access: if options.read_only { WriteAccess::ReadOnly } else { WriteAccess::ReadWrite },
        kernel_caches_writes: options.writeback.unwrap_or(cfg!(target_os = "linux")),
        atime: options.atime,
        ..VfsOptions::default()
    };
    Ok(Vfs::mount(meta, data, memory, vfs))
}

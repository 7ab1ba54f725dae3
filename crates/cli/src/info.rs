//! `rfs info`: what a file is made of.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rfs_core::meta::Meta;
use rfs_core::types::{Ino, Name};
use rfs_core::vfs::info::{self, Description, Place};
use rfs_fuse::Mounted;

use crate::control::{self, Client, Found, Request};
use crate::exit::{Exit, Failure, Result, ResultExt, meta_failure};
use crate::output;
use crate::settings::Size;
use crate::status::timestamp;
use crate::url::{MetaUrl, Target};
use crate::volume::{OpenSettings, Volume};

/// Tell what a file is made of: inode, chunks, slices, packs
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// A file or directory on a mount; with --volume, its path in that volume
    path: PathBuf,
    /// Look into this volume instead of a mount
    #[arg(long, value_name = "META_URL")]
    volume: Option<MetaUrl>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> Result<Exit> {
    let description = match &args.volume {
        None => {
            let (mut client, ino) = on_mount(&args.path)?;
            client.call(Request::Info { ino }, &mut |_| {})?
        }
        Some(volume) => match control::find(&Target::Meta(volume.clone()))? {
            Found::Mounted(_) => {
                return Err(Failure::new(Exit::MountedElsewhere, format!("{volume} is mounted"))
                    .hint("give the path on the mount, without --volume"));
            }
            Found::NotMounted(url) => crate::runtime::block_on(in_volume(&url, &args.path))?,
        },
    };
    if args.json {
        output::json(&description)?;
    } else {
        print(&args.path, &description)?;
    }
    Ok(Exit::Ok)
}

/// Has what is waiting of a file stored: what is only in memory has no place yet that could be told.
fn store(path: &Path) -> std::io::Result<()> {
    std::fs::File::open(path)?.sync_all()
}

/// The mount that `path` is on, and its inode number.
fn on_mount(path: &Path) -> Result<(Client, u64)> {
    let shown = path.display();
    let found = std::fs::symlink_metadata(path).doing(format!("looking at {shown}"))?;
    if found.is_file()
        && let Err(error) = store(path)
    {
        output::note(format_args!("{shown} is shown as it is stored: what is waiting could not be: {error}"));
    }
    let device = found.dev();
    let device = format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
    let mount: Option<Mounted> = control::mounts()?.into_iter().find(|mounted| mounted.device == device);
    let mount = mount.ok_or_else(|| {
        Failure::new(Exit::Error, format!("{shown} is not on a mount of rfs"))
            .hint("rfs status lists the mounts; --volume META_URL looks into a volume that is not mounted")
    })?;
    let client = Client::of_mount(&mount)?;
    let client = client.ok_or_else(|| {
        let place = mount.mountpoint.display();
        Failure::new(Exit::Error, format!("the process behind {place} cannot be asked"))
            .hint("run this as the user who mounted it")
    })?;
    Ok((client, found.ino()))
}

async fn in_volume(url: &MetaUrl, path: &Path) -> Result<Description> {
    let settings = OpenSettings::look();
    let volume = Volume::open(url, &settings).await?;
    let described = describe_path(&volume.meta, path).await;
    volume.close().await?;
    described
}

async fn describe_path(meta: &Meta, path: &Path) -> Result<Description> {
    use std::os::unix::ffi::OsStrExt;
    let mut ino = Ino::ROOT;
    for component in path.as_os_str().as_bytes().split(|byte| *byte == b'/').filter(|name| !name.is_empty()) {
        let found = async { meta.lookup(ino, &Name::new(component.to_vec())?).await }.await;
        ino = found.map_err(|e| meta_failure(e, "following the path"))?.ino;
    }
    info::describe(meta, ino).await.map_err(|e| meta_failure(e, "describing the inode"))
}

fn print(path: &Path, description: &Description) -> Result<()> {
    let it = description;
    output::line(format_args!("{}", path.display()))?;
    let rows = [
        ("inode", format!("{} ({}, {} names)", it.ino, it.kind, it.nlink)),
        ("mode", format!("{:04o}, owner {}:{}", it.mode, it.uid, it.gid)),
        ("modified", timestamp(it.mtime_secs)),
        ("size", format!("{} bytes ({})", it.size, Size(it.size))),
        ("allocated", Size(it.allocated_bytes).to_string()),
        ("chunks", it.chunks.to_string()),
        ("slices", format!("{} in {} groups", it.slices, it.groups)),
        ("inline", Size(it.inline_bytes).to_string()),
        ("stored", format!("{} in {} packs", Size(it.stored_bytes), it.packs.len())),
    ];
    for (name, value) in rows {
        output::line(format_args!("  {name:<11} {value}"))?;
    }
    for pack in &it.packs {
        output::line(format_args!(
            "  pack {}: {} in {} runs",
            pack.pack,
            Size(pack.stored_bytes),
            pack.runs
        ))?;
    }
    for slice in &it.slice_list {
        let place = match &slice.place {
            Place::Hole => "hole".to_owned(),
            Place::Metadata => "in the metadata".to_owned(),
            Place::Pack { pack, pack_offset, stored_bytes, blocks, raw_blocks } => format!(
                "pack {pack} at {pack_offset}, {} in {blocks} blocks ({raw_blocks} not compressed)",
                Size(*stored_bytes)
            ),
        };
        output::line(format_args!("  slice {:>12} + {:<9} {place}", slice.offset, slice.len))?;
    }
    if !it.slice_list_complete {
        output::line(format_args!("  … {} slices in all", it.slices))?;
    }
    Ok(())
}

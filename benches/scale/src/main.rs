//! `rfs-scale`: fills a volume's metadata with very many empty files, faster than a mount could.
//!
//! Goes through the operations that a mount calls, so the result is what a mount would have made, and prints one JSON object.
//! `benches/scaling` uses it to see how costs grow with the number of inodes.
#![expect(clippy::disallowed_methods, reason = "a benchmark measures real time")]

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result};
use clap::Parser;
use rfs_core::meta::{MakeArgs, Meta, OpenOptions};
use rfs_core::types::{Attr, Caller, Ino, Kind, Name, SystemClock};
use rfs_kv::Kv;
use rfs_meta_redb::{RedbKv, RedbOptions};

/// Fills the metadata of a formatted volume that is not mounted.
#[derive(Parser)]
#[command(version)]
struct Args {
    /// The redb file that `rfs format` made.
    meta: PathBuf,
    /// Directories to make in the root.
    #[arg(long, default_value_t = 1)]
    dirs: u64,
    /// Number of the first directory: `d000000` and so on.
    #[arg(long, default_value_t = 0)]
    first_dir: u64,
    /// Empty files to make in each directory: `f0000000` and so on.
    #[arg(long)]
    files: u64,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let begin = Instant::now();
    runtime.block_on(fill(&args))?;
    let inodes = args.dirs * (args.files + 1);
    let seconds = begin.elapsed().as_secs_f64();
    println!("{}", serde_json::json!({ "inodes": inodes, "seconds": seconds }));
    Ok(())
}

async fn fill(args: &Args) -> Result<()> {
    let kv: Arc<dyn Kv> = Arc::new(RedbKv::open(&args.meta, RedbOptions::default())?);
    let meta = Meta::open(Arc::clone(&kv), Arc::new(SystemClock), &OpenOptions::default()).await?;
    for dir in args.first_dir..args.first_dir + args.dirs {
        let dir = make(&meta, Ino::ROOT, &format!("d{dir:06}"), Kind::Directory).await?.ino;
        for file in 0..args.files {
            make(&meta, dir, &format!("f{file:07}"), Kind::File).await?;
        }
    }
    meta.close().await?;
    kv.close().await?;
    Ok(())
}

async fn make(meta: &Meta, parent: Ino, name: &str, kind: Kind) -> Result<Attr> {
    let caller = Caller { uid: 0, gid: 0, pid: std::process::id() };
    let path = Name::new(name.to_owned())?;
    let args = MakeArgs { parent, name: &path, kind, mode: 0o755, rdev: 0, target: None, caller: &caller };
    meta.make(args).await.with_context(|| format!("making {name}"))
}

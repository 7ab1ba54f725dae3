//! `rfs-engine`: what a metadata operation costs over each engine, without FUSE and without contents.
//!
//! Prints one JSON object: operations a second by operation. `--at-once` keeps several operations in flight, which tells
//! what an engine across a network can do. Engines are asked through [`Meta`], as the filesystem asks them.
#![expect(clippy::disallowed_methods, reason = "a benchmark measures real time")]

mod operations;

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use clap::{Parser, ValueEnum};
use rfs_core::meta::{FormatOptions, Meta, OpenOptions};
use rfs_core::types::{Clock, SystemClock};
use rfs_kv::{Kv, MemKv};
use rfs_meta_fdb::{FdbKv, FdbOptions};
use rfs_meta_redb::{RedbKv, RedbOptions};
use rfs_testkit::FdbServer;
use serde_json::json;

/// Measures metadata operations over one engine.
#[derive(Parser)]
#[command(version)]
struct Args {
    /// What stores the metadata.
    #[arg(long, value_enum, default_value = "redb")]
    engine: Engine,
    /// Operations of each kind.
    #[arg(long, default_value_t = 10_000)]
    count: u32,
    /// Operations in flight.
    #[arg(long, default_value_t = 1)]
    at_once: usize,
    /// Directory for redb's file.
    #[arg(long, default_value = "/tmp")]
    dir: PathBuf,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Engine {
    /// A local redb file.
    Redb,
    /// The reference engine, in memory.
    Mem,
    /// A `FoundationDB` of one process, started for this, from `FDB_HOME` or PATH.
    Fdb,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let rates = runtime.block_on(run(&args));
    if matches!(args.engine, Engine::Fdb) {
        rfs_meta_fdb::stop_network();
    }
    println!("{}", json!({ "engine": format!("{:?}", args.engine).to_lowercase(), "per_second": rates? }));
    Ok(())
}

async fn run(args: &Args) -> Result<operations::Rates> {
    if args.count == 0 || args.at_once == 0 {
        bail!("--count and --at-once are at least 1");
    }
    let dir = tempfile::Builder::new().prefix("rfs-engine-").tempdir_in(&args.dir)?;
    // Ends after the engine that uses it.
    let server = match args.engine {
        Engine::Fdb => Some(FdbServer::start().context("FoundationDB")?),
        Engine::Redb | Engine::Mem => None,
    };
    let kv: Arc<dyn Kv> = match &server {
        Some(server) => {
            let options = FdbOptions {
                cluster_file: Some(server.cluster_file().to_owned()),
                library: Some(server.library().to_owned()),
                ..FdbOptions::default()
            };
            Arc::new(FdbKv::connect(options).await?)
        }
        None if matches!(args.engine, Engine::Mem) => Arc::new(MemKv::new()),
        None => Arc::new(RedbKv::create(dir.path().join("meta.redb"), RedbOptions::default())?),
    };
    Meta::format(&*kv, &FormatOptions::default(), SystemClock.now()).await?;
    let meta = Meta::open(kv, Arc::new(SystemClock), &OpenOptions::default()).await?;
    let rates = operations::measure(&meta, args.count, args.at_once).await?;
    meta.close().await?;
    Ok(rates)
}

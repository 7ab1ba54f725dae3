//! Times what the filesystem does most: `cargo run --release -p rfs-meta-redb --example timing [DIRECTORY]`.
//!
//! Prints nanoseconds an operation on one thread, and how long `sync` takes after one commit.

use std::future::Future;
use std::path::PathBuf;

use rfs_kv::{Direction, Isolation, Kv, RangeQuery, Result};
use rfs_meta_redb::{RedbKv, RedbOptions};
use tokio::time::Instant;

const COUNT: u64 = 200_000;

fn key(kind: u8, number: u64) -> [u8; 9] {
    let mut key = [kind; 9];
    key[1..].copy_from_slice(&number.to_be_bytes());
    key
}

async fn time<Fut: Future<Output = Result<()>>>(
    name: &str,
    count: u64,
    run: impl Fn(u64) -> Fut,
) -> Result<()> {
    let start = Instant::now();
    for index in 0..count {
        run(index).await?;
    }
    println!("{name:<44} {:>9} ns", start.elapsed().as_nanos() / u128::from(count));
    Ok(())
}

/// What a create does: two checks, an entry, an inode, times and a counter of the directory.
async fn create(kv: &RedbKv, index: u64) -> Result<()> {
    let txn = kv.begin().await?;
    txn.get(&key(b'V', 1)).await?;
    txn.get(&key(b'D', index)).await?;
    txn.set(&key(b'D', index), &[0; 9]);
    txn.set(&key(b'I', index), &[0; 60]);
    txn.set(&key(b'T', 1), &[0; 24]);
    txn.add(&key(b'N', 1), 1);
    txn.commit().await?;
    Ok(())
}

async fn get(kv: &RedbKv, index: u64) -> Result<()> {
    let txn = kv.begin().await?;
    txn.snapshot_get(&key(b'I', index.wrapping_mul(0x9e37_79b9) % COUNT)).await?;
    Ok(())
}

async fn blind(kv: &RedbKv, index: u64) -> Result<()> {
    let txn = kv.begin().await?;
    for part in 0..4 {
        txn.set(&key(b'B', index * 4 + part), &[0; 40]);
    }
    txn.commit().await?;
    Ok(())
}

async fn sync(kv: &RedbKv, index: u64) -> Result<()> {
    create(kv, index).await?;
    kv.sync().await
}

async fn page(kv: &RedbKv, index: u64) -> Result<()> {
    let txn = kv.begin().await?;
    let begin = index.wrapping_mul(0x9e37_79b9) % COUNT;
    txn.range(RangeQuery {
        begin: key(b'I', begin).to_vec().into(),
        end: key(b'I', COUNT).to_vec().into(),
        limit: 100,
        direction: Direction::Forward,
        isolation: Isolation::Snapshot,
    })
    .await?;
    Ok(())
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let parent = std::env::args_os().nth(1).map_or_else(std::env::temp_dir, PathBuf::from);
    let dir = tempfile::tempdir_in(parent)?;
    let kv = RedbKv::create(dir.path().join("meta.redb"), RedbOptions::default())?;
    time("create: 2 gets, 3 sets, 1 add, commit", COUNT, |index| create(&kv, index)).await?;
    time("begin, get, recent or in redb", COUNT, |index| get(&kv, index)).await?;
    let start = Instant::now();
    kv.sync().await?;
    println!("{:<44} {:>9} ns", "sync of what is left", start.elapsed().as_nanos());
    time("begin, get, all in redb", COUNT, |index| get(&kv, index)).await?;
    time("begin, range of 100 in redb", COUNT / 20, |index| page(&kv, index)).await?;
    time("begin, 4 blind sets, commit", COUNT, |index| blind(&kv, index)).await?;
    kv.sync().await?;
    time("create and sync", 200, |index| sync(&kv, index)).await?;
    kv.close().await?;
    Ok(())
}

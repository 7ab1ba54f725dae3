//! Measures what large requests cost: CPU seconds of this process a GiB, and MiB/s.
//!
//!     cargo run --release -p rfs-store-s3 --example throughput -- URL [TOTAL_MIB [PART_MIB [IN_FLIGHT]]]
//!
//! URL is any store URL; without one, a versitygw is started on a temporary directory. Parts are PUT as objects of their
//! own, then as one upload, then read back as ranges; everything is deleted again.
#![expect(
    clippy::print_stdout,
    clippy::disallowed_methods,
    reason = "a measurement prints, and reads the clock"
)]

use std::error::Error;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use futures::stream::{self, StreamExt, TryStreamExt};
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};
use rfs_store_s3::{Credentials, MissingDirectory, StoreOptions, open_store};
use rfs_testkit::{S3Server, Versitygw};

type Failure = Box<dyn Error + Send + Sync>;

/// User and system CPU seconds of this process so far.
fn cpu_seconds() -> Result<f64, Failure> {
    let stat = std::fs::read_to_string("/proc/self/stat")?;
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or("").split_whitespace().collect();
    let ticks = |index: usize| fields.get(index).and_then(|f| f.parse::<u32>().ok()).map(f64::from);
    // utime and stime are fields 14 and 15, that is 12 and 13 after the name; 100 ticks a second on Linux.
    Ok((ticks(11).ok_or("no utime")? + ticks(12).ok_or("no stime")?) / 100.0)
}

async fn measure<F>(name: &str, total_mib: u32, work: F) -> Result<(), Failure>
where
    F: Future<Output = Result<(), object_store::Error>>,
{
    let (begun, cpu) = (Instant::now(), cpu_seconds()?);
    work.await?;
    let (took, cpu) = (begun.elapsed().as_secs_f64(), cpu_seconds()? - cpu);
    let gib = f64::from(total_mib) / 1024.0;
    println!("{name:<22} {:8.0} MiB/s {:7.2} CPU s/GiB", f64::from(total_mib) / took, cpu / gib);
    Ok(())
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> Result<(), Failure> {
    let mut args = std::env::args().skip(1);
    let url = args.next();
    let mut number = |default: u32| args.next().map_or(Ok(default), |arg| arg.parse());
    let (total_mib, part_mib, in_flight) = (number(1024)?, number(8)?, usize::try_from(number(8)?)?);
    let mut options = StoreOptions { missing_directory: MissingDirectory::Create, ..StoreOptions::default() };
    let server = if url.is_none() { Some(Versitygw::start()?) } else { None };
    let url = match (&server, url) {
        (Some(server), _) => {
            server.create_bucket("throughput")?;
            let (key, secret) = (server.access_key(), server.secret_key());
            options.credentials = Some(Credentials::new(key, secret, None, None, "test"));
            server.store_url("throughput", "")
        }
        (None, url) => url.unwrap_or_default(),
    };
    let store: Arc<dyn ObjectStore> = open_store(&url, &options).await?;
    let parts = total_mib.div_ceil(part_mib);
    let part_bytes = u64::from(part_mib) << 20;
    let part = Bytes::from(vec![0x5a; usize::try_from(part_bytes)?]);
    println!("{store}: {parts} parts of {part_mib} MiB, {in_flight} in flight");

    let name = |i: u32| Path::from(format!("throughput/{i}"));
    let each = |i: u32| {
        let (store, part) = (Arc::clone(&store), part.clone());
        async move { store.put(&name(i), part.into()).await.map(|_| ()) }
    };
    let puts = stream::iter(0..parts).map(each).buffer_unordered(in_flight).try_collect::<()>();
    measure("PUT objects", total_mib, puts).await?;

    let gets = stream::iter(0..parts)
        .map(|i| {
            let store = Arc::clone(&store);
            async move { store.get(&name(i)).await?.bytes().await.map(|_| ()) }
        })
        .buffer_unordered(in_flight)
        .try_collect::<()>();
    measure("GET objects", total_mib, gets).await?;

    let large = Path::from("throughput/large");
    let upload = async {
        let mut upload = store.put_multipart(&large).await?;
        let puts: Vec<_> = (0..parts).map(|_| upload.put_part(part.clone().into())).collect();
        stream::iter(puts).buffer_unordered(in_flight).try_collect::<()>().await?;
        upload.complete().await.map(|_| ())
    };
    measure("upload in parts", total_mib, upload).await?;

    let ranges = stream::iter(0..parts)
        .map(|i| {
            let (store, large) = (Arc::clone(&store), large.clone());
            let begin = u64::from(i) * part_bytes;
            async move { store.get_range(&large, begin..begin + part_bytes).await.map(|_| ()) }
        })
        .buffer_unordered(in_flight)
        .try_collect::<()>();
    measure("GET ranges", total_mib, ranges).await?;

    let small = total_mib.saturating_mul(4);
    let begun = (Instant::now(), cpu_seconds()?);
    stream::iter(0..small)
        .map(|i| {
            let (store, part) = (Arc::clone(&store), part.slice(..4096));
            async move { store.put(&Path::from(format!("throughput/small/{i}")), part.into()).await.map(|_| ()) }
        })
        .buffer_unordered(in_flight)
        .try_collect::<()>()
        .await?;
    let (took, cpu) = (begun.0.elapsed().as_secs_f64(), cpu_seconds()? - begun.1);
    let (rate, micros) = (f64::from(small) / took, cpu * 1e6 / f64::from(small));
    println!("{:<22} {rate:8.0} /s    {micros:7.0} CPU µs each", "PUT 4 KiB");

    let all = store.list(Some(&Path::from("throughput"))).map_ok(|meta| meta.location).boxed();
    store.delete_stream(all).try_collect::<Vec<_>>().await?;
    Ok(())
}

//! Reading large files from a store that takes its time.

use futures::future;

use super::*;

const MIB: u32 = 1 << 20;
const FILE_MIBS: u32 = 48;

/// A world with eight large files in its store, which answers GETs after 20 ms.
async fn with_files() -> (World, Vec<u8>) {
    let mut world = World::new().await;
    world.memory_bytes = 96 << 20;
    let contents = Dice(1).bytes(u64::from(MIB));
    let vfs = world.mount().await;
    for number in 0..8 {
        let file = create(&vfs, &format!("f{number}")).await;
        for at in 0..u64::from(FILE_MIBS) {
            write(&vfs, file, at << 20, contents.clone()).await.unwrap();
        }
        fsync(&vfs, file).await.unwrap();
    }
    unmount(vfs).await;
    world.store.latency_millis.store(20, Ordering::SeqCst);
    (world, contents)
}

/// Reads a file as the kernel does for a process that reads it in order: four requests at a time.
async fn read_in_order(vfs: &Vfs, number: u64, contents: &[u8]) {
    let file = open(vfs, &format!("f{number}")).await;
    for at in (0..FILE_MIBS).step_by(4) {
        let four = [0, 2, 1, 3].map(|next| read(vfs, file, u64::from(at + next) << 20, MIB));
        for bytes in future::join_all(four).await {
            assert!(bytes == contents);
        }
    }
    vfs.release(file.1).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn large_files_are_read_in_few_requests_by_one_and_by_eight() {
    let (world, contents) = with_files().await;
    for (readers, gets_max, millis_max) in [(1, 10, 60), (8, 8 * 10, 140)] {
        let vfs = world.mount().await;
        let (gets, began) = (vfs.data.stats().fetches, tokio::time::Instant::now());
        future::join_all((0..readers).map(|number| read_in_order(&vfs, number, &contents))).await;
        let (gets, took) = (vfs.data.stats().fetches - gets, began.elapsed().as_millis());
        assert!(gets <= gets_max && took <= millis_max, "{readers} readers: {gets} GETs, {took} ms");
        unmount(vfs).await;
    }
}

//! Checking all blocks of a volume.

use super::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn small_files_that_were_written_together_are_checked_together() {
    let world = World::new().await;
    let vfs = world.mount().await;
    for i in 0..300u64 {
        let file = create(&vfs, &format!("file {i}")).await;
        write(&vfs, file, 0, Dice(i).bytes(8000)).await.unwrap();
    }
    unmount(vfs).await;

    let vfs = world.mount().await;
    let options = fsck::Options { data: true, repair: false };
    let report = fsck::check(&vfs.meta, &vfs.data, &options, &|_| ()).await.unwrap();
    assert!(report.is_clean(), "{report:?}");
    assert_eq!((report.blocks_checked, report.inodes), (300, 301));
    // How many packs they are in depends on the time that writing took.
    let (requests, packs) = (vfs.data.stats().fetches, world.store.objects().await as u64);
    assert!((1..=2 * packs + 8).contains(&requests), "{requests} requests for {packs} packs");
    unmount(vfs).await;
}

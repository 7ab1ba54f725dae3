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
    let requests = vfs.data.stats().fetches;
    assert!((1..30).contains(&requests), "{requests}");
    unmount(vfs).await;
}

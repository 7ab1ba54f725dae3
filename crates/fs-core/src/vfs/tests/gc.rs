//! What background collection must leave alone.

use super::*;
use crate::data::{Lane, RunBytes};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pack_that_was_given_up_and_named_since_is_kept() {
    let world = World::new().await;
    let vfs = world.mount().await;
    let file = create(&vfs, "f").await;
    let bytes = Dice(1).bytes(300_000);
    write(&vfs, file, 0, bytes.clone()).await.unwrap();
    fsync(&vfs, file).await.unwrap();
    let packs: Vec<_> =
        vfs.meta.packs(None, 10).await.unwrap().items.into_iter().map(|info| info.pack).collect();
    assert_eq!(packs.len(), 1);
    // As when a temporary file had the pack's first pin and was removed before this one had its own.
    vfs.collector.delete_later(packs);
    for _ in 0..3 {
        vfs.gc().await.unwrap();
    }
    assert_eq!(world.store.objects().await, 1);
    unmount(vfs).await;
    let vfs = world.mount().await;
    let file = open(&vfs, "f").await;
    assert_eq!(read(&vfs, file, 0, 300_000).await, bytes);
    unmount(vfs).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pack_that_nothing_names_is_deleted() {
    let world = World::new().await;
    let vfs = world.mount().await;
    let bytes = vec![Dice(1).bytes(100_000).into()];
    let run = RunBytes { ino: Ino(7), chunk: ChunkIndex(0), offset: 0, bytes };
    let appended = vfs.data.append(Lane::Small, vec![run]).await.unwrap();
    let ticket = &appended[0].pack;
    vfs.flusher.pin(ticket.pack(), false);
    vfs.data.seal(Lane::Small);
    ticket.stored().await.unwrap();
    vfs.gc().await.unwrap();
    assert_eq!(world.store.objects().await, 1, "somebody may be about to name it");
    vfs.unpin(&[ticket.pack()]);
    // One round passes before.
    vfs.gc().await.unwrap();
    assert_eq!(world.store.objects().await, 1);
    vfs.gc().await.unwrap();
    assert_eq!(world.store.objects().await, 0);
    unmount(vfs).await;
}

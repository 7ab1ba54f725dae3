//! Closed files are sent while the store has nothing else to do.

use super::*;

const FILE: u64 = 128 << 10;

/// Writes and closes files of 128 KiB.
async fn write_files(vfs: &Vfs, numbers: std::ops::Range<u32>) {
    for number in numbers {
        let file = create(vfs, &format!("f{number}")).await;
        write(vfs, file, 0, Dice(number.into()).bytes(FILE)).await.unwrap();
        vfs.release(file.1).await.unwrap();
    }
}

/// Waits until everything that is written is stored, and all that stored it is at rest.
async fn sent(vfs: &Vfs) {
    let all_sent = async {
        while vfs.reserved_bytes.load(Ordering::SeqCst) > 0 || vfs.flusher.is_busy() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_mins(1), all_sent).await.expect("it is sent unasked");
}

#[tokio::test]
async fn closed_files_that_fill_a_pack_are_sent_while_the_store_is_idle() {
    let world = World::new().await;
    let vfs = world.mount().await;
    let open = create(&vfs, "open").await;
    write(&vfs, open, 0, vec![1; 100]).await.unwrap();
    // Each time what fills a larger pack.
    let mut number = 0;
    for count in [32, 64, 128, 128] {
        let objects = world.store.objects().await;
        write_files(&vfs, number..number + count - 1).await;
        for _ in 0..1000 {
            tokio::task::yield_now().await;
        }
        let waiting = vfs.stats().dirty_bytes;
        assert!(waiting >= u64::from(count - 1) * FILE, "{waiting} bytes wait, too few to send");
        assert_eq!(world.store.objects().await, objects);
        write_files(&vfs, number + count - 1..number + count).await;
        sent(&vfs).await;
        assert_eq!(world.store.objects().await, objects + 1);
        number += count;
    }
    unmount(vfs).await;
}

#[tokio::test]
async fn tiny_files_and_open_ones_wait() {
    let world = World::new().await;
    let vfs = world.mount().await;
    let open = create(&vfs, "open").await;
    write(&vfs, open, 0, Dice(1).bytes(7 << 20)).await.unwrap();
    for number in 0..2000 {
        let file = create(&vfs, &format!("f{number}")).await;
        write(&vfs, file, 0, vec![1; 4 << 10]).await.unwrap();
        vfs.release(file.1).await.unwrap();
    }
    for _ in 0..1000 {
        tokio::task::yield_now().await;
    }
    assert_eq!(vfs.stats().dirty_bytes, (7 << 20) + (2000 << 12));
    assert_eq!(world.store.objects().await, 0);
    unmount(vfs).await;
}

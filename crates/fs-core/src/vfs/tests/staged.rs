//! fsync into a staging directory: without the store, through crashes, and until it has sent everything.

use std::collections::HashSet;

use super::unanswered::Cluster;
use super::*;
use crate::data::{Lane, Place};
use crate::meta::PackState;

async fn world() -> World {
    let mut world = World::new().await;
    world.staging = Some(tempfile::tempdir().unwrap());
    world
}

async fn assert_clean(vfs: &Vfs) {
    let options = fsck::Options { data: true, repair: false };
    let report = fsck::check(&vfs.meta, &vfs.data, &options, &|_| ()).await.unwrap();
    assert!(report.is_clean() && report.notes.is_empty(), "{report:?}");
}

async fn settled(vfs: &Vfs) {
    vfs.sync_all().await.unwrap();
    // What was just fsynced may be compacted now, and that is staged, too.
    for _ in 0..20 {
        if vfs.data.stats().packs_staged > 0 {
            vfs.sync_all().await.unwrap();
        }
    }
    assert_eq!(vfs.data.stats().packs_staged, 0);
    assert_eq!(vfs.meta.staged_packs().await.unwrap(), []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fsync_needs_no_store_and_a_crash_loses_nothing() {
    let world = world().await;
    let vfs = world.mount().await;
    let file = create(&vfs, "f").await;
    let bytes = Dice(1).bytes(300_000);
    world.store.down.store(true, Ordering::SeqCst);
    write(&vfs, file, 0, bytes.clone()).await.unwrap();
    fsync(&vfs, file).await.unwrap();
    let more = Dice(2).bytes(5000);
    write(&vfs, file, 300_000, more.clone()).await.unwrap();
    fsync(&vfs, file).await.unwrap();
    write(&vfs, file, 400_000, vec![1; 10_000]).await.unwrap();
    let staged = vfs.meta.staged_packs().await.unwrap();
    assert_eq!((staged.len(), staged[0].state), (1, PackState::Staged));
    crash(vfs).await;

    let vfs = world.mount().await;
    let file = open(&vfs, "f").await;
    assert_eq!(read(&vfs, file, 0, 1 << 20).await, [bytes.clone(), more.clone()].concat());
    assert_clean(&vfs).await;
    // What is staged is neither garbage nor missing.
    assert_eq!(vfs.gc().await.unwrap().packs_deleted, 0);
    world.store.down.store(false, Ordering::SeqCst);
    settled(&vfs).await;
    assert_eq!(world.journals(), [] as [std::path::PathBuf; 0]);
    assert_eq!(world.store.objects().await, 1);
    assert_clean(&vfs).await;
    crash(vfs).await;

    let vfs = world.mount().await;
    let file = open(&vfs, "f").await;
    assert_eq!(read(&vfs, file, 0, 1 << 20).await, [bytes, more].concat());
    unmount(vfs).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_small_fsyncs_make_one_pack() {
    let world = world().await;
    let vfs = world.mount().await;
    let file = create(&vfs, "log").await;
    let mut expected = Vec::new();
    for i in 0..300u64 {
        let bytes = Dice(i).bytes(4096);
        write(&vfs, file, i * 4096, bytes.clone()).await.unwrap();
        fsync(&vfs, file).await.unwrap();
        expected.extend(bytes);
    }
    assert!(vfs.meta.staged_packs().await.unwrap().len() <= 2);
    settled(&vfs).await;
    assert!(world.store.objects().await <= 2, "{} objects", world.store.objects().await);
    assert_eq!(read(&vfs, file, 0, 1 << 21).await, expected);
    assert_clean(&vfs).await;
    unmount(vfs).await;
}

#[tokio::test(start_paused = true)]
async fn files_that_wait_for_the_store_do_not_hold_up_fsync() {
    let mut world = world().await;
    world.options.flush_after = Duration::from_millis(5);
    let vfs = world.mount().await;
    world.store.down.store(true, Ordering::SeqCst);
    for i in 0..20 {
        let file = create(&vfs, &format!("slow{i}")).await;
        write(&vfs, file, 0, Dice(i).bytes(50_000)).await.unwrap();
        // Long enough that each is a flush of its own, of which all workers would wait.
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let file = create(&vfs, "urgent").await;
    write(&vfs, file, 0, Dice(99).bytes(50_000)).await.unwrap();
    tokio::time::timeout(Duration::from_secs(10), fsync(&vfs, file)).await.expect("in time").unwrap();
    world.store.down.store(false, Ordering::SeqCst);
    settled(&vfs).await;
    unmount(vfs).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn work_goes_on_beyond_memory_while_the_store_is_away() {
    let mut world = world().await;
    world.memory_bytes = 4 << 20;
    let vfs = world.mount().await;
    world.store.down.store(true, Ordering::SeqCst);
    let file = create(&vfs, "f").await;
    let mut expected = Vec::new();
    for i in 0..48u64 {
        let bytes = Dice(i).bytes(1 << 20);
        write(&vfs, file, i << 20, bytes.clone()).await.unwrap();
        expected.extend(bytes);
    }
    fsync(&vfs, file).await.unwrap();
    assert!(vfs.memory.used_bytes() <= 6 << 20, "{} bytes in memory", vfs.memory.used_bytes());
    for i in 0..48u32 {
        let at = (i as usize) << 20;
        assert_eq!(read(&vfs, file, u64::from(i) << 20, 1 << 20).await, expected[at..at + (1 << 20)]);
    }
    crash(vfs).await;
    let vfs = world.mount().await;
    world.store.down.store(false, Ordering::SeqCst);
    settled(&vfs).await;
    assert_clean(&vfs).await;
    let file = open(&vfs, "f").await;
    assert_eq!(read(&vfs, file, 0, 48 << 20).await, expected);
    unmount(vfs).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pack_that_was_stored_is_not_overwritten_from_an_older_journal() {
    let world = world().await;
    let vfs = world.mount().await;
    let (first, second) = (create(&vfs, "first").await, create(&vfs, "second").await);
    write(&vfs, first, 0, Dice(1).bytes(50_000)).await.unwrap();
    fsync(&vfs, first).await.unwrap();
    // In the same pack, but never staged: committed when the store has it.
    write(&vfs, second, 0, Dice(2).bytes(50_000)).await.unwrap();
    vfs.flush_everything().await.unwrap();
    assert_eq!(world.store.objects().await, 1);
    crash(vfs).await;
    let vfs = world.mount().await;
    settled(&vfs).await;
    assert_clean(&vfs).await;
    let second = open(&vfs, "second").await;
    assert_eq!(read(&vfs, second, 0, 50_000).await, Dice(2).bytes(50_000));
    unmount(vfs).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_journal_is_refused_named_and_given_up_only_when_told() {
    let world = world().await;
    let vfs = world.mount().await;
    let kept = create(&vfs, "kept").await;
    write(&vfs, kept, 0, Dice(1).bytes(50_000)).await.unwrap();
    fsync(&vfs, kept).await.unwrap();
    settled(&vfs).await;
    world.store.down.store(true, Ordering::SeqCst);
    let gone = create(&vfs, "gone").await;
    write(&vfs, gone, 0, Dice(2).bytes(50_000)).await.unwrap();
    fsync(&vfs, gone).await.unwrap();
    crash(vfs).await;
    std::fs::remove_file(&world.journals()[0]).unwrap();
    world.store.down.store(false, Ordering::SeqCst);

    let (vfs, resumed) = world.mount_with(OnLost::Refuse).await;
    assert_eq!(resumed.lost.len(), 1);
    assert_eq!(vfs.meta.staged_packs().await.unwrap().len(), 1, "nothing was changed");
    crash(vfs).await;
    let (vfs, _) = world.mount_with(OnLost::Accept).await;
    let check = async |repair| {
        fsck::check(&vfs.meta, &vfs.data, &fsck::Options { data: false, repair }, &|_| ()).await.unwrap()
    };
    let report = check(false).await;
    assert_eq!(report.problems.len(), 2, "{report:?}");
    assert!(!report.is_clean());
    assert_eq!(report.problems[1].path.as_deref(), Some("/gone"));
    let report = check(true).await;
    assert!(report.problems.len() == 2 && report.is_clean(), "{report:?}");
    assert!(check(false).await.problems.is_empty());
    crash(vfs).await;

    let vfs = world.mount().await;
    let (kept, gone) = (open(&vfs, "kept").await, open(&vfs, "gone").await);
    assert_eq!(read(&vfs, kept, 0, 50_000).await, Dice(1).bytes(50_000));
    assert_eq!(vfs.read(gone.0, gone.1, 0, 50_000).await.unwrap_err().kind, ErrorKind::Io);
    unmount(vfs).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_end_of_a_mount_says_what_is_only_staged() {
    let mut world = world().await;
    world.io_timeout = Duration::from_millis(100);
    let vfs = world.mount().await;
    let file = create(&vfs, "f").await;
    world.store.down.store(true, Ordering::SeqCst);
    write(&vfs, file, 0, Dice(1).bytes(100_000)).await.unwrap();
    fsync(&vfs, file).await.unwrap();
    let report = vfs.shutdown().await;
    assert!(report.unsaved.is_empty());
    assert!(report.errors.iter().any(|error| error.to_string().contains("(staged)")), "{report:?}");
    drop(vfs);
    world.store.down.store(false, Ordering::SeqCst);
    let vfs = world.mount().await;
    let file = open(&vfs, "f").await;
    assert_eq!(read(&vfs, file, 0, 100_000).await, Dice(1).bytes(100_000));
    unmount(vfs).await;
    assert_eq!(world.journals(), [] as [std::path::PathBuf; 0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_staged_is_compacted_into_what_is_stored() {
    let world = world().await;
    let vfs = world.mount().await;
    let file = create(&vfs, "f").await;
    let mut expected = Vec::new();
    for i in 0..20u64 {
        write(&vfs, file, i * 5000, Dice(i).bytes(5000)).await.unwrap();
        fsync(&vfs, file).await.unwrap();
        expected.extend(Dice(i).bytes(5000));
    }
    let changed =
        vfs.compact_chunks(&[(file.0, ChunkIndex(0))], &HashSet::new(), Lane::Compaction).await.unwrap();
    assert_eq!((changed, vfs.meta.chunk(file.0, ChunkIndex(0)).await.unwrap().len()), (1, 1));
    assert_eq!(read(&vfs, file, 0, 1 << 20).await, expected);
    crash(vfs).await;
    let vfs = world.mount().await;
    assert_clean(&vfs).await;
    settled(&vfs).await;
    vfs.gc().await.unwrap();
    assert_clean(&vfs).await;
    let file = open(&vfs, "f").await;
    assert_eq!(read(&vfs, file, 0, 1 << 20).await, expected);
    unmount(vfs).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_record_grows_with_what_is_staged_and_ends_as_stored() {
    let world = world().await;
    let vfs = world.mount().await;
    let file = create(&vfs, "f").await;
    world.store.down.store(true, Ordering::SeqCst);
    let mut bytes = Vec::new();
    for i in 0..3u64 {
        write(&vfs, file, i * 50_000, Dice(i).bytes(50_000)).await.unwrap();
        fsync(&vfs, file).await.unwrap();
        bytes.push(vfs.meta.staged_packs().await.unwrap()[0].stored_bytes);
    }
    assert!(bytes.is_sorted() && bytes[0] < bytes[2], "{bytes:?}");
    assert!(vfs.flusher.must_name(vfs.data.uncommitted()[0], Place::Staging));
    world.store.down.store(false, Ordering::SeqCst);
    settled(&vfs).await;
    let packs = vfs.meta.packs(None, 10).await.unwrap().items;
    assert_eq!((packs.len(), packs[0].state), (1, PackState::Stored));
    assert!(packs[0].stored_bytes > bytes[2], "the object has a footer");
    unmount(vfs).await;
}

/// The source's first half is staged, its second waits in the same pack for the store.
#[tokio::test(start_paused = true)]
async fn a_copy_is_durable_when_all_its_bytes_are() {
    let mut world = world().await;
    world.options.flush_after = Duration::from_millis(50);
    let vfs = world.mount().await;
    let (from, to) = (create(&vfs, "from").await, create(&vfs, "to").await);
    world.store.down.store(true, Ordering::SeqCst);
    write(&vfs, from, 0, Dice(1).bytes(100_000)).await.unwrap();
    world.cluster(Cluster::Away(u32::MAX));
    assert_eq!(fsync(&vfs, from).await.unwrap_err().kind, ErrorKind::Io);
    write(&vfs, from, 100_000, Dice(2).bytes(100_000)).await.unwrap();
    let inode = vfs.inodes.get(from.0).unwrap();
    let placed = || {
        let state = inode.state();
        state.dirty.is_empty() && state.batches.iter().all(|batch| batch.placed)
    };
    tokio::time::sleep(2 * world.options.flush_after).await;
    assert!(placed());
    world.cluster(Cluster::Up);
    let args = CopyArgs { from: from.0, from_offset: 0, to: to.0, to_offset: 0, len: 200_000 };
    assert_eq!(vfs.copy_file_range(args).await.unwrap(), 200_000);
    // Nobody asks the flush that comes now to stage.
    tokio::time::sleep(2 * world.options.flush_after).await;
    fsync(&vfs, to).await.unwrap();
    crash(vfs).await;
    let vfs = world.mount().await;
    let to = open(&vfs, "to").await;
    assert_eq!(read(&vfs, to, 0, 200_000).await, [Dice(1).bytes(100_000), Dice(2).bytes(100_000)].concat());
    crash(vfs).await;
}

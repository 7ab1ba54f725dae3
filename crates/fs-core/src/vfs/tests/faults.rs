//! Stores that fail and heal, crashes, capacity, garbage.

use std::collections::HashSet;

use super::*;
use crate::data::Lane;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_outage_is_told_and_loses_nothing() {
    let mut world = World::new().await;
    world.io_timeout = Duration::from_millis(100);
    let vfs = world.mount().await;
    let file = create(&vfs, "f").await;
    let bytes = Dice(1).bytes(100_000);
    world.store.down.store(true, Ordering::SeqCst);
    write(&vfs, file, 0, bytes.clone()).await.unwrap();
    assert_eq!(fsync(&vfs, file).await.unwrap_err().kind, ErrorKind::Io);
    assert_eq!(read(&vfs, file, 0, 100_000).await, bytes);
    let second = open(&vfs, "f").await;
    assert_eq!(fsync(&vfs, second).await.unwrap_err().kind, ErrorKind::Io);
    // The first handle was told by its fsync, and then there was another failure: told once.
    assert_eq!(vfs.flush(file.0, file.1).await.unwrap_err().kind, ErrorKind::Io);
    vfs.flush(file.0, file.1).await.unwrap();
    world.store.down.store(false, Ordering::SeqCst);
    fsync(&vfs, file).await.unwrap();
    vfs.flush(second.0, second.1).await.unwrap();
    crash(vfs).await;
    let vfs = world.mount().await;
    let file = open(&vfs, "f").await;
    assert_eq!(read(&vfs, file, 0, 200_000).await, bytes);
    unmount(vfs).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_made_a_file_is_told_by_the_next_write() {
    let mut world = World::new().await;
    world.io_timeout = Duration::from_millis(100);
    let vfs = world.mount().await;
    let maker = create(&vfs, "f").await;
    let (other, third) = (open(&vfs, "f").await, open(&vfs, "f").await);
    let bytes = Dice(1).bytes(100_000);
    write(&vfs, maker, 0, bytes.clone()).await.unwrap();
    world.store.down.store(true, Ordering::SeqCst);
    assert_eq!(fsync(&vfs, other).await.unwrap_err().kind, ErrorKind::Io);
    let more = Dice(2).bytes(100_000);
    assert_eq!(write(&vfs, maker, 0, more.clone()).await.unwrap_err().kind, ErrorKind::Io);
    assert_eq!(read(&vfs, other, 0, 200_000).await, bytes, "what failed was not written");
    write(&vfs, maker, 100_000, more.clone()).await.expect("told once");
    write(&vfs, third, 200_000, more.clone()).await.expect("told by its close");
    assert_eq!(vfs.flush(third.0, third.1).await.unwrap_err().kind, ErrorKind::Io);
    world.store.down.store(false, Ordering::SeqCst);
    fsync(&vfs, maker).await.unwrap();
    assert_eq!(read(&vfs, other, 0, 300_000).await, [bytes, more.clone(), more].concat());
    unmount(vfs).await;
}

/// What is to be seen of a mount once `panics` has made a background task panic that stores what is dirty.
async fn check_stops_serving(world: &World, vfs: Arc<Vfs>, panics: &Panics) {
    let stored = create(&vfs, "stored").await;
    let bytes = Dice(1).bytes(100_000);
    write(&vfs, stored, 0, bytes.clone()).await.unwrap();
    fsync(&vfs, stored).await.unwrap();
    let file = create(&vfs, "f").await;
    write(&vfs, file, 0, bytes.clone()).await.unwrap();
    panics.in_tasks.store(true, Ordering::SeqCst);
    // More often than there are workers: none of them may be left to panic next.
    for _ in 0..10 {
        assert_eq!(fsync(&vfs, file).await.unwrap_err().kind, ErrorKind::Io);
    }
    vfs.data.health().wait_broken().await;
    assert!(vfs.broken().unwrap().contains("a mistake"), "{:?}", vfs.broken());
    assert_eq!(fsync(&vfs, stored).await.unwrap_err().kind, ErrorKind::Io);
    assert_eq!(vfs.sync_all().await.unwrap_err().kind, ErrorKind::Io);
    assert_eq!(vfs.flush(file.0, file.1).await.unwrap_err().kind, ErrorKind::Io);
    assert_eq!(write(&vfs, file, 0, &b"more"[..]).await.unwrap_err().kind, ErrorKind::Io);
    assert_eq!(read(&vfs, stored, 0, 100_000).await, bytes);
    assert_eq!(read(&vfs, file, 0, 100_000).await, bytes);
    let report = vfs.shutdown().await;
    // Not before all tasks have ended: one that is about to store the file would find the mistake gone.
    panics.in_tasks.store(false, Ordering::SeqCst);
    assert_eq!(report.unsaved.len(), 1, "{report:?}");
    assert_eq!(report.unsaved[0].path.as_deref(), Some("/f"));
    assert!(report.errors.iter().any(|error| error.to_string().contains("panicked")), "{report:?}");
    let vfs = world.mount().await;
    assert_eq!(vfs.broken(), None);
    let stored = open(&vfs, "stored").await;
    assert_eq!(read(&vfs, stored, 0, 200_000).await, bytes);
    unmount(vfs).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_panics_stops_serving_and_lets_nobody_wait() {
    let mut world = World::new().await;
    world.io_timeout = Duration::from_hours(1);
    let vfs = world.mount().await;
    check_stops_serving(&world, vfs, &world.kv_panics).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_upload_that_panics_stops_serving_and_lets_nobody_wait() {
    let mut world = World::new().await;
    world.io_timeout = Duration::from_hours(1);
    let vfs = world.mount().await;
    check_stops_serving(&world, vfs, &world.store.panics).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_collector_that_panics_stops_serving() {
    let world = World::new().await;
    let vfs = world.mount().await;
    let file = create(&vfs, "f").await;
    vfs.unlink(Ino::ROOT, &name("f")).await.unwrap();
    vfs.forget(file.0, 1);
    world.kv_panics.in_tasks.store(true, Ordering::SeqCst);
    vfs.release(file.1).await.unwrap();
    vfs.data.health().wait_broken().await;
    world.kv_panics.in_tasks.store(false, Ordering::SeqCst);
    let refused = vfs.create(node(&name("g")), flags(AccessMode::ReadWrite)).await;
    assert_eq!(refused.unwrap_err().kind, ErrorKind::Io);
    assert_eq!(vfs.shutdown().await.errors.len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flush_that_comes_after_the_end_is_refused() {
    let world = World::new().await;
    let vfs = world.mount().await;
    let file = create(&vfs, "f").await;
    write(&vfs, file, 0, Dice(1).bytes(100_000)).await.unwrap();
    vfs.tasks.end().await;
    assert_eq!(fsync(&vfs, file).await.unwrap_err().kind, ErrorKind::Io);
    assert_eq!(vfs.flush_everything().await.unwrap_err().kind, ErrorKind::Io);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shutdown_names_what_could_not_be_stored() {
    let mut world = World::new().await;
    world.io_timeout = Duration::from_millis(100);
    let vfs = world.mount().await;
    let file = create(&vfs, "f").await;
    world.store.down.store(true, Ordering::SeqCst);
    write(&vfs, file, 0, Dice(1).bytes(100_000)).await.unwrap();
    let report = vfs.shutdown().await;
    assert_eq!(report.unsaved.len(), 1);
    assert_eq!((report.unsaved[0].ino, report.unsaved[0].bytes), (file.0, 100_000));
    assert_eq!(report.unsaved[0].path.as_deref(), Some("/f"));
    assert!(!report.errors.is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hole_over_all_that_was_written_keeps_the_length() {
    let world = World::new().await;
    let vfs = world.mount().await;
    for (text, mode) in [("a", FallocateMode::PunchHole), ("b", FallocateMode::ZeroRange)] {
        let file = create(&vfs, text).await;
        write(&vfs, file, 0, Dice(1).bytes(100_000)).await.unwrap();
        vfs.fallocate(file.0, file.1, mode, 0, 100_000).await.unwrap();
        fsync(&vfs, file).await.unwrap();
    }
    crash(vfs).await;
    let vfs = world.mount().await;
    for text in ["a", "b"] {
        let file = open(&vfs, text).await;
        assert_eq!(read(&vfs, file, 0, 200_000).await, vec![0; 100_000]);
    }
    unmount(vfs).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crash_keeps_what_was_fsynced_and_no_more_than_was_written() {
    let world = World::new().await;
    let vfs = world.mount().await;
    let synced = create(&vfs, "synced").await;
    let lost = create(&vfs, "lost").await;
    let small = create(&vfs, "small").await;
    let bytes = Dice(1).bytes(300_000);
    write(&vfs, synced, 0, bytes.clone()).await.unwrap();
    write(&vfs, lost, 0, bytes.clone()).await.unwrap();
    write(&vfs, small, 0, &b"tiny"[..]).await.unwrap();
    fsync(&vfs, synced).await.unwrap();
    let objects = world.store.objects().await;
    fsync(&vfs, small).await.unwrap();
    assert_eq!(world.store.objects().await, objects, "a tiny file needs no object");
    crash(vfs).await;
    let vfs = world.mount().await;
    let file = open(&vfs, "synced").await;
    assert_eq!(read(&vfs, file, 0, 1 << 20).await, bytes);
    let file = open(&vfs, "small").await;
    assert_eq!(read(&vfs, file, 0, 1 << 20).await, &b"tiny"[..]);
    let file = open(&vfs, "lost").await;
    assert_eq!(vfs.getattr(file.0).await.unwrap().size, 0);
    unmount(vfs).await;
}

async fn rename(vfs: &Vfs, from: &str, to: &str, mode: RenameMode) {
    let (from, to) = (name(from), name(to));
    let args = RenameArgs { parent: Ino::ROOT, name: &from, new_parent: Ino::ROOT, new_name: &to, mode };
    vfs.rename(args).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rename_over_a_file_stores_the_new_contents_first() {
    let world = World::new().await;
    let vfs = world.mount().await;
    let old = create(&vfs, "f").await;
    write(&vfs, old, 0, Dice(1).bytes(50_000)).await.unwrap();
    let new = create(&vfs, "f.new").await;
    let bytes = Dice(2).bytes(60_000);
    write(&vfs, new, 0, bytes.clone()).await.unwrap();
    rename(&vfs, "f.new", "f", RenameMode::Replace).await;
    crash(vfs).await;
    let vfs = world.mount().await;
    let file = open(&vfs, "f").await;
    assert_eq!(read(&vfs, file, 0, 100_000).await, bytes);
    unmount(vfs).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn files_that_swap_names_are_both_stored_first() {
    let world = World::new().await;
    let vfs = world.mount().await;
    let mut dice = Dice(1);
    let (a_bytes, b_bytes) = (dice.bytes(50_000), dice.bytes(60_000));
    let a = create(&vfs, "a").await;
    write(&vfs, a, 0, a_bytes.clone()).await.unwrap();
    let b = create(&vfs, "b").await;
    write(&vfs, b, 0, b_bytes.clone()).await.unwrap();
    rename(&vfs, "a", "b", RenameMode::Exchange).await;
    crash(vfs).await;
    let vfs = world.mount().await;
    for (name, bytes) in [("a", b_bytes), ("b", a_bytes)] {
        let file = open(&vfs, name).await;
        assert_eq!(read(&vfs, file, 0, 100_000).await, bytes);
    }
    unmount(vfs).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writes_stop_at_the_capacity_and_go_on_when_there_is_room() {
    let world =
        World::with_limits(VolumeLimits { capacity: Some(1_000_000), ..VolumeLimits::default() }).await;
    let vfs = world.mount().await;
    let file = create(&vfs, "f").await;
    let mut dice = Dice(1);
    for i in 0..10u64 {
        write(&vfs, file, i * 100_000, dice.bytes(100_000)).await.unwrap();
    }
    assert_eq!(write(&vfs, file, 1_000_000, vec![1]).await.unwrap_err().kind, ErrorKind::NoSpace);
    let sparse = vfs.fallocate(file.0, file.1, FallocateMode::Allocate, 0, 2_000_000).await;
    assert_eq!(sparse.unwrap_err().kind, ErrorKind::NoSpace);
    // What is there already can be overwritten.
    let bytes = dice.bytes(100_000);
    write(&vfs, file, 300_000, bytes.clone()).await.unwrap();
    fsync(&vfs, file).await.unwrap();
    assert_eq!(vfs.statfs().await.unwrap().bytes_free, 0);
    vfs.fallocate(file.0, file.1, FallocateMode::PunchHole, 0, 100_000).await.unwrap();
    write(&vfs, file, 1_000_000, dice.bytes(100_000)).await.unwrap();
    fsync(&vfs, file).await.unwrap();
    assert_eq!(read(&vfs, file, 300_000, 100_000).await, bytes);
    check_accounts(&vfs, &[file.0]).await;
    unmount(vfs).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn holes_that_are_copied_take_no_room() {
    let world =
        World::with_limits(VolumeLimits { capacity: Some(1_000_000), ..VolumeLimits::default() }).await;
    let vfs = world.mount().await;
    let sparse = create(&vfs, "sparse").await;
    write(&vfs, sparse, 5_000_000, Dice(1).bytes(400_000)).await.unwrap();
    let copy = create(&vfs, "copy").await;
    let args = CopyArgs { from: sparse.0, from_offset: 0, to: copy.0, to_offset: 0, len: 5_400_000 };
    assert_eq!(vfs.copy_file_range(args).await.unwrap(), 5_400_000);
    assert_eq!(read(&vfs, copy, 5_000_000, 400_000).await, read(&vfs, sparse, 5_000_000, 400_000).await);
    // A third copy has more data than there is room.
    let third = create(&vfs, "third").await;
    let args = CopyArgs { to: third.0, from_offset: 5_000_000, len: 400_000, ..args };
    assert_eq!(vfs.copy_file_range(args).await.unwrap_err().kind, ErrorKind::NoSpace);
    fsync(&vfs, copy).await.unwrap();
    fsync(&vfs, sparse).await.unwrap();
    check_accounts(&vfs, &[sparse.0, copy.0, third.0]).await;
    unmount(vfs).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_more_is_free_than_the_store_can_take() {
    #[derive(Debug)]
    struct Room(Option<u64>);
    impl StoreRoom for Room {
        fn bytes_free(&self) -> Option<u64> {
            self.0
        }
    }
    for (capacity, room, free) in [
        (None, None, 1 << 50),
        (None, Some(5_000_000), 5_000_000),
        (Some(1_000_000), Some(5_000_000), 900_000),
        (Some(1_000_000), Some(300_000), 300_000),
    ] {
        let mut world = World::with_limits(VolumeLimits { capacity, ..VolumeLimits::default() }).await;
        world.options.store_room = Some(Arc::new(Room(room)));
        let vfs = world.mount().await;
        let file = create(&vfs, "f").await;
        write(&vfs, file, 0, Dice(1).bytes(100_000)).await.unwrap();
        let statfs = vfs.statfs().await.unwrap();
        assert_eq!(statfs.bytes_free, free, "{capacity:?}, {room:?}");
        assert_eq!(statfs.bytes_total, capacity.unwrap_or(free + 100_000));
        unmount(vfs).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn garbage_is_collected_and_nothing_else() {
    let world = World::new().await;
    let vfs = world.mount().await;
    let mut dice = Dice(1);
    let kept = create(&vfs, "kept").await;
    let bytes = dice.bytes(1_000_000);
    write(&vfs, kept, 0, bytes.clone()).await.unwrap();
    fsync(&vfs, kept).await.unwrap();
    let gone = create(&vfs, "gone").await;
    write(&vfs, gone, 0, dice.bytes(1_000_000)).await.unwrap();
    fsync(&vfs, gone).await.unwrap();
    assert_eq!(world.store.objects().await, 2);
    vfs.unlink(Ino::ROOT, &name("gone")).await.unwrap();
    vfs.gc().await.unwrap();
    assert_eq!(world.store.objects().await, 2, "still open");
    assert_eq!(read(&vfs, gone, 0, 10).await.len(), 10);
    vfs.release(gone.1).await.unwrap();
    vfs.forget(gone.0, 1);
    let report = vfs.gc().await.unwrap();
    assert_eq!(report.packs_deleted, 1);
    assert_eq!(world.store.objects().await, 1);
    // Mostly dead: a twentieth of a pack is left.
    let partly = create(&vfs, "partly").await;
    write(&vfs, partly, 0, dice.bytes(5_000_000)).await.unwrap();
    fsync(&vfs, partly).await.unwrap();
    let last = read(&vfs, partly, 4_800_000, 200_000).await;
    vfs.fallocate(partly.0, partly.1, FallocateMode::PunchHole, 0, 4_800_000).await.unwrap();
    fsync(&vfs, partly).await.unwrap();
    vfs.compact_chunks(&[(partly.0, ChunkIndex(0))], &HashSet::new(), Lane::Compaction).await.unwrap();
    vfs.gc().await.unwrap();
    vfs.gc().await.unwrap();
    assert_eq!(read(&vfs, partly, 4_800_000, 200_000).await, last);
    assert_eq!(read(&vfs, kept, 0, 1_000_000).await, bytes);
    unmount(vfs).await;
    let vfs = world.mount().await;
    let kept = open(&vfs, "kept").await;
    vfs.gc().await.unwrap();
    assert_eq!(read(&vfs, kept, 0, 1_000_000).await, bytes);
    let stored: u64 = world
        .store
        .inner
        .list(None)
        .map(|object| object.unwrap().size)
        .collect::<Vec<_>>()
        .await
        .into_iter()
        .sum();
    assert!(stored < 1_600_000, "{stored} bytes are left in the store");
    unmount(vfs).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn small_packs_are_merged_and_their_files_do_not_notice() {
    let world = World::new().await;
    let vfs = world.mount().await;
    let mut files = Vec::new();
    for i in 0..60u64 {
        let file = create(&vfs, &format!("f{i}")).await;
        write(&vfs, file, 0, Dice(i).bytes(6000)).await.unwrap();
        fsync(&vfs, file).await.unwrap();
        files.push(file);
    }
    // One file made of many packs, too.
    let log = create(&vfs, "log").await;
    for i in 0..20u64 {
        write(&vfs, log, i * 5000, Dice(100 + i).bytes(5000)).await.unwrap();
        fsync(&vfs, log).await.unwrap();
    }
    assert_eq!(world.store.objects().await, 80);
    let report = vfs.gc().await.unwrap();
    assert!(report.chunks_rewritten >= 60, "{report:?}");
    vfs.gc().await.unwrap();
    let objects = world.store.objects().await;
    assert!(objects <= 3, "{objects} objects are left");
    assert_eq!(vfs.gc().await.unwrap().chunks_rewritten, 0, "what was merged stays where it is");
    unmount(vfs).await;
    let vfs = world.mount().await;
    for i in 0..60u64 {
        let file = open(&vfs, &format!("f{i}")).await;
        assert_eq!(read(&vfs, file, 0, 10_000).await, Dice(i).bytes(6000));
    }
    let log = open(&vfs, "log").await;
    for i in 0..20u64 {
        assert_eq!(read(&vfs, log, i * 5000, 5000).await, Dice(100 + i).bytes(5000));
    }
    let mut inos: Vec<Ino> = files.iter().map(|file| file.0).collect();
    inos.push(log.0);
    check_accounts(&vfs, &inos).await;
    unmount(vfs).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_few_small_packs_are_left_alone() {
    let world = World::new().await;
    let vfs = world.mount().await;
    for i in 0..10u64 {
        let file = create(&vfs, &format!("f{i}")).await;
        write(&vfs, file, 0, Dice(i).bytes(6000)).await.unwrap();
        fsync(&vfs, file).await.unwrap();
    }
    assert_eq!(vfs.gc().await.unwrap().chunks_rewritten, 0);
    assert_eq!(world.store.objects().await, 10);
    unmount(vfs).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn orphans_of_a_crash_are_reaped_at_the_next_mount() {
    let world = World::new().await;
    let vfs = world.mount().await;
    let file = create(&vfs, "f").await;
    write(&vfs, file, 0, Dice(1).bytes(100_000)).await.unwrap();
    fsync(&vfs, file).await.unwrap();
    vfs.unlink(Ino::ROOT, &name("f")).await.unwrap();
    vfs.sync_all().await.unwrap();
    crash(vfs).await;
    let vfs = world.mount().await;
    vfs.gc().await.unwrap();
    assert_eq!(vfs.meta.statfs().await.unwrap().used_bytes, 0);
    assert_eq!(vfs.getattr(file.0).await.unwrap_err().kind, ErrorKind::Stale);
    vfs.gc().await.unwrap();
    assert_eq!(world.store.objects().await, 0);
    unmount(vfs).await;
}

#[tokio::test(start_paused = true)]
async fn an_unlinked_open_file_stays_usable_and_needs_no_store() {
    let mut world = World::new().await;
    world.options.flush_after = Duration::from_millis(5);
    let vfs = world.mount().await;
    let file = create(&vfs, "tmp").await;
    vfs.unlink(Ino::ROOT, &name("tmp")).await.unwrap();
    let bytes = Dice(1).bytes(500_000);
    write(&vfs, file, 0, bytes.clone()).await.unwrap();
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(read(&vfs, file, 0, 1_000_000).await, bytes);
    assert_eq!(vfs.getattr(file.0).await.unwrap().nlink, 0);
    assert_eq!(world.store.objects().await, 0);
    vfs.release(file.1).await.unwrap();
    vfs.forget(file.0, 1);
    vfs.gc().await.unwrap();
    assert_eq!(vfs.reserved_bytes.load(Ordering::SeqCst), 0);
    assert_eq!(vfs.memory.used_bytes(), 0);
    unmount(vfs).await;
    assert_eq!(world.store.objects().await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shutdown_does_not_wait_for_what_was_removed() {
    let mut world = World::new().await;
    world.io_timeout = Duration::from_millis(100);
    let vfs = world.mount().await;
    let file = create(&vfs, "f").await;
    world.store.down.store(true, Ordering::SeqCst);
    write(&vfs, file, 0, Dice(1).bytes(100_000)).await.unwrap();
    fsync(&vfs, file).await.unwrap_err();
    vfs.unlink(Ino::ROOT, &name("f")).await.unwrap();
    vfs.release(file.1).await.unwrap();
    vfs.forget(file.0, 1);
    unmount(vfs).await;
    assert_eq!(world.store.objects().await, 0);
}

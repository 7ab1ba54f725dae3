//! Packs that are durable on a local disk before the store has them.

use std::path::Path as FilePath;

use super::*;

fn staging_options(dir: &FilePath) -> DataOptions {
    let mut options = options();
    options.staging = Some(StagingOptions::new(dir.to_owned(), 1 << 30));
    options
}

/// The journals in a staging directory.
fn journals(dir: &FilePath) -> Vec<std::path::PathBuf> {
    let Ok(files) = std::fs::read_dir(dir.join(VOLUME.to_string())) else { return Vec::new() };
    let paths = files.map(|entry| entry.unwrap().path());
    let mut paths: Vec<_> = paths.filter(|path| path.file_name().unwrap() != "lock").collect();
    paths.sort();
    paths
}

/// Appends and waits as fsync does.
async fn append_durably(data: &Data, lane: Lane, bytes: &[u8]) -> (Arc<PackedRun>, Durable) {
    let (run, ticket) = append_one(data, lane, bytes).await;
    data.hasten(std::slice::from_ref(&ticket)).await;
    let durable = ticket.durable().await.unwrap();
    assert!(ticket.is_within(&durable));
    (run, durable)
}

/// Ends `data` as a crash does: nothing of it goes on, and the directory is free.
async fn crash(data: Data) {
    let staging = data.staging.as_ref().map(Arc::downgrade).unwrap();
    data.tasks.end().await;
    drop(data);
    while staging.strong_count() > 0 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test(start_paused = true)]
async fn many_waits_share_one_pack_and_need_no_store() {
    let dir = tempfile::tempdir().unwrap();
    let (store, data) = open(staging_options(dir.path())).await;
    store.failing.store(usize::MAX, Ordering::SeqCst);
    let mut written = Vec::new();
    for seed in 0..200 {
        let bytes = noise(seed, 4096);
        let (run, durable) = append_durably(&data, Lane::Small, &bytes).await;
        assert_eq!(durable.place, Place::Staging);
        assert_eq!(read_all(&data, &run).await.unwrap(), bytes);
        written.push((run, bytes));
    }
    let packs: std::collections::BTreeSet<PackId> = written.iter().map(|(run, _)| run.pack).collect();
    assert_eq!((packs.len(), journals(dir.path()).len()), (1, 1));
    let stats = data.stats();
    assert_eq!((stats.packs_staged, stats.packs_unstored), (1, 1));
    assert!(stats.staged_bytes > 200 * 4096 && stats.staged_age.is_some());
    assert_eq!(TestStore::count(&store.puts), 0, "its pack is still open for the next");

    store.failing.store(0, Ordering::SeqCst);
    data.staged_pack_stored().await;
    let stored = data.stored_with_journal();
    assert_eq!(stored.len(), 1);
    assert_eq!(data.uncommitted(), [stored[0].pack], "its record must be made stored first");
    data.forget_journals(&[stored[0].pack]).await;
    assert_eq!(journals(dir.path()).len(), 0);
    assert_eq!((data.uncommitted(), data.stats().staged_bytes), (vec![], 0));
    for (run, bytes) in &written {
        assert_eq!(read_all(&data, run).await.unwrap(), bytes);
    }
    data.close().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn bytes_that_nobody_waits_for_are_not_staged() {
    let dir = tempfile::tempdir().unwrap();
    let (store, data) = open(staging_options(dir.path())).await;
    let (_, ticket) = append_one(&data, Lane::Small, &noise(1, 100_000)).await;
    let (_, stream) = append_one(&data, Lane::Stream(Ino(1)), &noise(2, 100_000)).await;
    assert_eq!(ticket.durable().await.unwrap().place, Place::Store);
    assert_eq!(stream.durable().await.unwrap().place, Place::Store);
    assert_eq!(TestStore::count(&store.puts), 2);
    assert_eq!(journals(dir.path()).len(), 0);
    data.close().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_later_mount_reads_and_sends_what_was_staged() {
    let dir = tempfile::tempdir().unwrap();
    let (store, data) = open(staging_options(dir.path())).await;
    store.failing.store(usize::MAX, Ordering::SeqCst);
    let mut written = Vec::new();
    let mut staged: Vec<Durable> = Vec::new();
    for (seed, lane) in
        [(1, Lane::Small), (2, Lane::Stream(Ino(9))), (3, Lane::Small), (4, Lane::Stream(Ino(9)))]
    {
        let bytes = noise(seed, 300_000);
        let (run, durable) = append_durably(&data, lane, &bytes).await;
        staged.retain(|known| known.pack != durable.pack);
        staged.push(durable);
        written.push((run, bytes));
    }
    // In the same pack, but nobody waited.
    append_one(&data, Lane::Small, &noise(5, 1000)).await;
    assert_eq!(staged.len(), 2);
    crash(data).await;

    std::fs::write(
        journals(dir.path())[0].with_file_name("00000007000000ff"),
        "of a pack that nothing names",
    )
    .unwrap();
    let fresh = reopen(&store, staging_options(dir.path())).await;
    let resumed = fresh.resume(&staged, OnLost::Refuse, Resume::Send).await.unwrap();
    assert_eq!((resumed.packs, resumed.lost.len()), (2, 0));
    assert_eq!(journals(dir.path()).len(), 2);
    let gets = TestStore::count(&store.gets);
    for (run, bytes) in &written {
        assert_eq!(read_all(&fresh, run).await.unwrap(), bytes, "while the store is away");
        fresh.verify(run).await.unwrap();
    }
    assert_eq!(TestStore::count(&store.gets), gets);
    store.failing.store(0, Ordering::SeqCst);
    fresh.store_all().await.unwrap();
    let packs: Vec<PackId> = fresh.stored_with_journal().iter().map(|pack| pack.pack).collect();
    assert_eq!(packs.len(), 2);
    fresh.forget_journals(&packs).await;
    fresh.close().await.unwrap();
    assert_eq!(journals(dir.path()).len(), 0);

    let third = reopen(&store, options()).await;
    for (run, bytes) in &written {
        third.verify(run).await.unwrap();
        assert_eq!(read_all(&third, run).await.unwrap(), bytes);
    }
    assert_eq!(third.pack_footer(written[0].0.pack).await.unwrap().len(), 2);
    third.close().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_missing_or_damaged_journal_is_told_and_never_read() {
    let dir = tempfile::tempdir().unwrap();
    let (store, data) = open(staging_options(dir.path())).await;
    store.failing.store(usize::MAX, Ordering::SeqCst);
    let (first, _) = append_durably(&data, Lane::Small, &noise(1, 50_000)).await;
    let (second, small) = append_durably(&data, Lane::Small, &noise(2, 50_000)).await;
    let (_, stream) = append_durably(&data, Lane::Stream(Ino(9)), &noise(3, 50_000)).await;
    crash(data).await;
    let paths = journals(dir.path());
    let mut bytes = std::fs::read(&paths[0]).unwrap();
    let near_end = bytes.len() - 100;
    bytes[near_end] ^= 1;
    std::fs::write(&paths[0], bytes).unwrap();
    std::fs::remove_file(&paths[1]).unwrap();

    let fresh = reopen(&store, staging_options(dir.path())).await;
    let resumed = fresh.resume(&[small, stream], OnLost::Refuse, Resume::Send).await.unwrap();
    let lost: Vec<(PackId, u64)> = resumed.lost.iter().map(|lost| (lost.pack, lost.bytes)).collect();
    assert_eq!(lost, [(small.pack, u64::from(second.pack_offset)), (stream.pack, 0)]);
    assert!(resumed.lost[1].why.contains("is missing"), "{}", resumed.lost[1].why);
    assert_eq!((fresh.uncommitted(), journals(dir.path()).len()), (vec![], 1), "nothing was changed");
    crash(fresh).await;

    store.failing.store(0, Ordering::SeqCst);
    let fresh = reopen(&store, staging_options(dir.path())).await;
    let resumed = fresh.resume(&[small, stream], OnLost::Accept, Resume::Send).await.unwrap();
    assert_eq!((resumed.packs, resumed.lost.len()), (1, 2));
    assert_eq!(read_all(&fresh, &first).await.unwrap(), noise(1, 50_000));
    fresh.store_all().await.unwrap();
    assert_eq!(read_all(&fresh, &first).await.unwrap(), noise(1, 50_000));
    assert_eq!(read_all(&fresh, &second).await.unwrap_err().kind, ErrorKind::Io);
    fresh.close().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn damage_after_the_mount_is_an_error_and_not_other_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let (store, data) = open(staging_options(dir.path())).await;
    store.failing.store(usize::MAX, Ordering::SeqCst);
    let (run, durable) = append_durably(&data, Lane::Small, &noise(1, 300_000)).await;
    crash(data).await;
    let fresh = reopen(&store, staging_options(dir.path())).await;
    fresh.resume(&[durable], OnLost::Refuse, Resume::ReadOnly).await.unwrap();
    let path = &journals(dir.path())[0];
    let mut bytes = std::fs::read(path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(path, bytes).unwrap();
    assert_eq!(read_all(&fresh, &run).await.unwrap_err().kind, ErrorKind::Io);
    assert_eq!(fresh.verify(&run).await.unwrap_err().kind, ErrorKind::Io);
    fresh.close().await.unwrap();
    assert_eq!(journals(dir.path()).len(), 1, "read-only leaves everything as it is");
}

#[tokio::test(start_paused = true)]
async fn what_the_store_has_already_needs_no_journal() {
    let dir = tempfile::tempdir().unwrap();
    let (store, data) = open(staging_options(dir.path())).await;
    let (run, durable) = append_durably(&data, Lane::Small, &noise(1, 50_000)).await;
    data.store_all().await.unwrap();
    crash(data).await;
    std::fs::remove_file(&journals(dir.path())[0]).unwrap();
    let fresh = reopen(&store, staging_options(dir.path())).await;
    let resumed = fresh.resume(&[durable], OnLost::Refuse, Resume::Send).await.unwrap();
    assert_eq!((resumed.lost.len(), resumed.stored.len(), resumed.stored[0].pack), (0, 1, durable.pack));
    assert_eq!(read_all(&fresh, &run).await.unwrap(), noise(1, 50_000));
    fresh.close().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_full_directory_leaves_the_store_to_wait_for_and_works_again_later() {
    let dir = tempfile::tempdir().unwrap();
    let mut options = staging_options(dir.path());
    options.staging.as_mut().unwrap().bytes_max = 100_000;
    let (store, data) = open(options).await;
    let (_, durable) = append_durably(&data, Lane::Small, &noise(1, 80_000)).await;
    assert_eq!(durable.place, Place::Staging);
    let (_, durable) = append_durably(&data, Lane::Small, &noise(2, 80_000)).await;
    assert_eq!(durable.place, Place::Store);
    assert_eq!(TestStore::count(&store.puts), 1);
    assert!(data.stats().staged_bytes < 100_000);
    let (_, durable) = append_durably(&data, Lane::Small, &noise(3, 80_000)).await;
    assert_eq!(durable.place, Place::Store, "the first journal is still there");
    let packs: Vec<PackId> = data.stored_with_journal().iter().map(|pack| pack.pack).collect();
    data.forget_journals(&packs).await;
    let (_, durable) = append_durably(&data, Lane::Small, &noise(4, 80_000)).await;
    assert_eq!(durable.place, Place::Staging);
    data.close().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_directory_that_fails_leaves_the_store_to_wait_for() {
    let dir = tempfile::tempdir().unwrap();
    let (_, data) = open(staging_options(dir.path())).await;
    let (run, durable) = append_durably(&data, Lane::Small, &noise(1, 80_000)).await;
    assert_eq!(durable.place, Place::Staging);
    data.store_all().await.unwrap();
    std::fs::remove_dir_all(dir.path()).unwrap();
    let (other, durable) = append_durably(&data, Lane::Small, &noise(2, 80_000)).await;
    assert_eq!(durable.place, Place::Store);
    assert_eq!(read_all(&data, &run).await.unwrap(), noise(1, 80_000));
    assert_eq!(read_all(&data, &other).await.unwrap(), noise(2, 80_000));
    data.close().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn memory_is_given_back_while_the_store_is_away() {
    let dir = tempfile::tempdir().unwrap();
    let mut options = staging_options(dir.path());
    options.memory = Budget::new(8 << 20);
    options.pack_bytes = 4 << 20;
    options.part_bytes = 1 << 20;
    options.cache_memory_bytes = 0;
    let (store, data) = open(options.clone()).await;
    store.failing.store(usize::MAX, Ordering::SeqCst);
    let mut written = Vec::new();
    for seed in 0..64 {
        // Who writes waits for memory first.
        drop(options.memory.acquire(1 << 20).await);
        let bytes = noise(seed, 1 << 20);
        // Without anybody asking for it, since the store does not take it.
        let (run, _) = append_one(&data, Lane::Small, &bytes).await;
        written.push((run, bytes));
    }
    assert!(options.memory.used_bytes() <= 10 << 20, "{} bytes in memory", options.memory.used_bytes());
    for (run, bytes) in &written {
        assert_eq!(read_all(&data, run).await.unwrap(), bytes);
        data.verify(run).await.unwrap();
    }
    store.failing.store(0, Ordering::SeqCst);
    data.store_all().await.unwrap();
    assert_eq!(options.memory.used_bytes(), 0);
    let fresh = reopen(&store, super::options()).await;
    for (run, bytes) in &written {
        assert_eq!(read_all(&fresh, run).await.unwrap(), bytes);
    }
    data.close().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn memory_that_a_hanging_store_holds_is_given_back() {
    let dir = tempfile::tempdir().unwrap();
    let mut options = staging_options(dir.path());
    options.memory = Budget::new(8 << 20);
    options.pack_bytes = 2 << 20;
    options.part_bytes = 2 << 20;
    options.cache_memory_bytes = 0;
    let (store, data) = open(options.clone()).await;
    store.hanging.store(true, Ordering::SeqCst);
    let mut written = Vec::new();
    for seed in 0..64 {
        // Who writes waits for memory first.
        drop(options.memory.acquire(1 << 20).await);
        let bytes = noise(seed, 1 << 20);
        let (run, _) = append_one(&data, Lane::Small, &bytes).await;
        written.push((run, bytes));
        let (used, sending) = (options.memory.used_bytes(), TestStore::count(&store.sending));
        // Of what is being sent, one body may come from a journal, the others are in the budget.
        assert!(used <= 10 << 20 && sending <= 12 << 20, "{used} bytes in memory, {sending} of them sent");
    }
    assert!(TestStore::count(&store.sending) > 0, "the store is tried all the time");
    store.hanging.store(false, Ordering::SeqCst);
    // Those that hang go on hanging until they are given up.
    while data.store_all().await.is_err() {}
    assert_eq!((options.memory.used_bytes(), TestStore::count(&store.sending)), (0, 0));
    let fresh = reopen(&store, super::options()).await;
    for (run, bytes) in &written {
        assert_eq!(read_all(&fresh, run).await.unwrap(), bytes);
    }
    data.close().await.unwrap();
}

#[tokio::test]
async fn one_process_stages_in_a_directory() {
    let dir = tempfile::tempdir().unwrap();
    let (store, data) = open(staging_options(dir.path())).await;
    let second = Data::open(staging_options(dir.path()), Arc::clone(&store) as Arc<dyn ObjectStore>).await;
    assert_eq!(second.unwrap_err().kind, ErrorKind::Busy);
    data.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn many_wait_at_once_while_the_store_fails_now_and_then() {
    let dir = tempfile::tempdir().unwrap();
    let mut options = staging_options(dir.path());
    options.pack_bytes = 1 << 20;
    options.part_bytes = 256 << 10;
    let (store, data) = open(options).await;
    let data = Arc::new(data);
    store.failing.store(30, Ordering::SeqCst);
    let writers = (0..16u64).map(|task| {
        let data = Arc::clone(&data);
        tokio::spawn(async move {
            let lane = if task % 4 == 0 { Lane::Stream(Ino(task)) } else { Lane::Small };
            let mut mine = Vec::new();
            for turn in 0..20 {
                let bytes = noise(task * 100 + turn, 20_000);
                let (run, _) = append_durably(&data, lane, &bytes).await;
                let stored: Vec<PackId> = data.stored_with_journal().iter().map(|pack| pack.pack).collect();
                data.forget_journals(&stored).await;
                mine.push((run, bytes));
            }
            for (run, bytes) in &mine {
                assert_eq!(read_all(&data, run).await.unwrap(), bytes);
            }
            mine
        })
    });
    let mut written = Vec::new();
    for writer in writers.collect::<Vec<_>>() {
        written.extend(writer.await.unwrap());
    }
    data.store_all().await.unwrap();
    let fresh = reopen(&store, super::options()).await;
    for (run, bytes) in &written {
        assert_eq!(read_all(&fresh, run).await.unwrap(), bytes);
    }
    let stored: Vec<PackId> = data.stored_with_journal().iter().map(|pack| pack.pack).collect();
    data.forget_journals(&stored).await;
    assert_eq!(journals(dir.path()).len(), 0);
    assert_eq!(data.stats().staged_bytes, 0);
    data.close().await.unwrap();
}

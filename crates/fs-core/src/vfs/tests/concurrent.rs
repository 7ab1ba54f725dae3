//! Readers, writers, truncations and flushes at the same time; limits on memory.

use super::*;

/// Every block of the file holds one byte only, however many write it at the same time: a read of one block sees one
/// write or another, never a mixture, and never what was there before both.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn reads_see_whole_writes_while_everything_happens() {
    const BLOCK: u64 = 8192;
    const BLOCKS: u64 = 64;
    let mut world = World::new().await;
    world.options.flush_after = Duration::from_millis(5);
    world.options.compact_groups = 4;
    let vfs = world.mount().await;
    let file = create(&vfs, "f").await;
    write(&vfs, file, 0, vec![1; usize::try_from(BLOCK * BLOCKS).unwrap()]).await.unwrap();
    let mut tasks = Vec::new();
    for writer in 0..3u64 {
        let vfs = Arc::clone(&vfs);
        tasks.push(tokio::spawn(async move {
            let mut dice = Dice(writer);
            for round in 0..400u64 {
                let block = dice.roll(BLOCKS);
                let byte = u8::try_from(1 + (round * 3 + writer) % 255).unwrap();
                let bytes = vec![byte; usize::try_from(BLOCK).unwrap()];
                write(&vfs, file, block * BLOCK, bytes).await.unwrap();
                if round % 50 == 0 {
                    fsync(&vfs, file).await.unwrap();
                }
                tokio::task::yield_now().await;
            }
        }));
    }
    for reader in 0..3u64 {
        let vfs = Arc::clone(&vfs);
        tasks.push(tokio::spawn(async move {
            let mut dice = Dice(100 + reader);
            for _ in 0..600 {
                let block = dice.roll(BLOCKS);
                let bytes = read(&vfs, file, block * BLOCK, u32::try_from(BLOCK).unwrap()).await;
                assert_eq!(bytes.len() as u64, BLOCK);
                assert!(bytes[0] != 0 && bytes.iter().all(|byte| *byte == bytes[0]), "block {block}");
                tokio::task::yield_now().await;
            }
        }));
    }
    let grower = Arc::clone(&vfs);
    tasks.push(tokio::spawn(async move {
        for round in 0..100 {
            let end = BLOCK * BLOCKS;
            let target = if round % 2 == 0 { end + 100_000 } else { end };
            grower.setattr(&ROOT, file.0, size(target), None).await.unwrap();
            grower.gc().await.unwrap();
        }
    }));
    for task in tasks {
        task.await.unwrap();
    }
    vfs.sync_all().await.unwrap();
    vfs.setattr(&ROOT, file.0, size(BLOCK * BLOCKS), None).await.unwrap();
    check_accounts(&vfs, &[file.0]).await;
    unmount(vfs).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn dirty_bytes_stay_within_the_budget() {
    let mut world = World::new().await;
    world.memory_bytes = 4 << 20;
    let vfs = world.mount().await;
    let mut tasks = Vec::new();
    for number in 0..4u64 {
        let file = create(&vfs, &format!("f{number}")).await;
        let vfs = Arc::clone(&vfs);
        tasks.push(tokio::spawn(async move {
            let mut dice = Dice(number);
            for i in 0..48u64 {
                write(&vfs, file, i * 300_000, dice.bytes(300_000)).await.unwrap();
                // What is being compressed is charged twice for a moment.
                assert!(vfs.memory.used_bytes() <= 3 * (4 << 20), "{}", vfs.memory.used_bytes());
            }
            file.0
        }));
    }
    let mut inos = Vec::new();
    for task in tasks {
        inos.push(task.await.unwrap());
    }
    vfs.sync_all().await.unwrap();
    assert_eq!(vfs.memory.used_bytes(), 0);
    check_accounts(&vfs, &inos).await;
    unmount(vfs).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_large_file_streams_and_comes_back() {
    let mut world = World::new().await;
    world.memory_bytes = 48 << 20;
    let vfs = world.mount().await;
    let file = create(&vfs, "large").await;
    let mut dice = Dice(1);
    let part = dice.bytes(1 << 20);
    for i in 0..100u64 {
        let mut bytes = part.clone();
        bytes[..8].copy_from_slice(&i.to_le_bytes());
        write(&vfs, file, i << 20, bytes).await.unwrap();
    }
    fsync(&vfs, file).await.unwrap();
    crash(vfs).await;
    let vfs = world.mount().await;
    let file = open(&vfs, "large").await;
    for i in 0..100u64 {
        let bytes = read(&vfs, file, i << 20, 1 << 20).await;
        assert_eq!(bytes[..8], i.to_le_bytes());
        assert!(bytes[8..] == part[8..]);
    }
    check_accounts(&vfs, &[file.0]).await;
    unmount(vfs).await;
    assert_eq!(world.store.objects().await, 13, "each part of 8 MiB is a pack");
}

/// The files in each pack, and their bytes.
async fn contents_of_packs(vfs: &Vfs) -> Vec<BTreeMap<Ino, u64>> {
    let mut packs = Vec::new();
    for pack in vfs.meta.packs(None, 1000).await.unwrap().items {
        let mut files = BTreeMap::new();
        for entry in vfs.data.pack_footer(pack.pack).await.unwrap() {
            *files.entry(entry.ino).or_default() += u64::from(entry.run.plain_len);
        }
        packs.push(files);
    }
    packs
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn each_pack_of_eight_writers_is_a_part_of_one_file() {
    let mut world = World::new().await;
    world.memory_bytes = 96 << 20;
    let vfs = world.mount().await;
    world.store.down.store(true, Ordering::SeqCst);
    let part = Bytes::from(Dice(1).bytes(1 << 20));
    let mut tasks = Vec::new();
    for number in 0..8 {
        let file = create(&vfs, &format!("f{number}")).await;
        let (vfs, part) = (Arc::clone(&vfs), part.clone());
        tasks.push(tokio::spawn(async move {
            for i in 0..20 {
                write(&vfs, file, i << 20, part.clone()).await.unwrap();
            }
        }));
    }
    while !vfs.memory.is_waited_for() {
        tokio::task::yield_now().await;
    }
    // Nothing can be stored, so there is nothing to be gained by sending on what is not a whole part.
    for _ in 0..10 {
        vfs.relieve();
        tokio::task::yield_now().await;
    }
    world.store.down.store(false, Ordering::SeqCst);
    for task in tasks {
        task.await.unwrap();
    }
    vfs.sync_all().await.unwrap();
    let packs = contents_of_packs(&vfs).await;
    let whole = packs.iter().filter(|files| files.len() == 1 && files.values().eq([&(8 << 20)])).count();
    assert_eq!(whole, 16, "{packs:?}");
    assert_eq!(packs.iter().flat_map(BTreeMap::values).sum::<u64>(), 8 * (20 << 20));
    unmount(vfs).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_many_files_the_largest_makes_room() {
    let mut world = World::new().await;
    world.memory_bytes = 48 << 20;
    let vfs = world.mount().await;
    let part = Bytes::from(Dice(1).bytes(1 << 20));
    let mut files = Vec::new();
    for (number, parts) in [6, 7, 6, 6, 6, 5].into_iter().enumerate() {
        let file = create(&vfs, &format!("f{number}")).await;
        for i in 0..parts {
            write(&vfs, file, i << 20, part.clone()).await.unwrap();
        }
        files.push(file.0);
    }
    let dirty = || -> Vec<u64> {
        files.iter().map(|ino| vfs.inodes.get(*ino).unwrap().state().unsaved_bytes() >> 20).collect()
    };
    while dirty()[1] > 0 {
        tokio::task::yield_now().await;
    }
    assert_eq!(dirty(), [6, 0, 6, 6, 6, 5], "the others go on filling their packs");
    assert_eq!(contents_of_packs(&vfs).await, [BTreeMap::from([(files[1], 7 << 20)])]);
    unmount(vfs).await;
}

#[tokio::test]
async fn small_files_fill_packs_while_memory_is_short() {
    let mut world = World::new().await;
    world.memory_bytes = 48 << 20;
    let vfs = world.mount().await;
    let bytes = Bytes::from(Dice(1).bytes(64 << 10));
    for number in 0..2048 {
        let file = create(&vfs, &format!("f{number}")).await;
        write(&vfs, file, 0, bytes.clone()).await.unwrap();
        vfs.release(file.1).await.unwrap();
    }
    vfs.sync_all().await.unwrap();
    let packs = contents_of_packs(&vfs).await;
    assert!(packs.len() <= 16, "128 MiB are {} packs", packs.len());
    unmount(vfs).await;
}

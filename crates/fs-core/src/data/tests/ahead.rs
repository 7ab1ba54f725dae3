//! Fetching ahead of readers: what it costs, and whose memory it takes.

use super::*;

const MIB: u32 = 1 << 20;

fn part(run: &Arc<PackedRun>, mibs: Range<u32>) -> [ReadRange; 1] {
    let len = (mibs.end - mibs.start) * MIB;
    [ReadRange { run: Arc::clone(run), offset_in_run: mibs.start * MIB, len }]
}

async fn fetched_ahead(data: &Data, bytes: u64) {
    while data.stats().memory_cache_bytes < bytes {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn a_read_of_what_one_fetch_brought_is_not_copied() {
    for contents in [noise(1, 2 << 20), text(1, 2 << 20)] {
        let (store, data) = open(options()).await;
        let (run, _) = append_one(&data, Lane::Small, &contents).await;
        data.close().await.unwrap();
        let fresh = reopen(&store, options()).await;
        assert!(fresh.prefetch(&part(&run, 0..2)));
        fetched_ahead(&fresh, 2 << 20).await;
        let first = fresh.read(&run, 0, MIB, ReadHint::Normal).await.unwrap();
        let second = fresh.read(&run, MIB, MIB, ReadHint::Normal).await.unwrap();
        assert_eq!(second.as_ptr() as usize - first.as_ptr() as usize, 1 << 20, "parts of one buffer");
        assert!(first == contents[..1 << 20] && second == contents[1 << 20..]);
    }
}

#[tokio::test]
async fn a_fetch_of_all_blocks_of_a_pack_is_one_of_the_whole_object() {
    let (store, data) = open(options()).await;
    let (first, _) = append_one(&data, Lane::Small, &noise(1, 12 << 20)).await;
    let (second, _) = append_one(&data, Lane::Small, &noise(2, 3 << 20)).await;
    let (alone, ticket) = append_one(&data, Lane::Stream(Ino(3)), &noise(3, 12 << 20)).await;
    data.seal(Lane::Stream(Ino(3)));
    let object_bytes = ticket.stored().await.unwrap().stored_bytes;
    data.close().await.unwrap();
    // A part of a pack is that part, with little behind it if it may be all.
    let guess = u64::from(pack::HEADER_BYTES) + (16 << 10);
    for (run, fetched_bytes) in [(alone, object_bytes), (first, (12 << 20) + guess), (second, 3 << 20)] {
        let fresh = reopen(&store, options()).await;
        assert!(fresh.prefetch(&part(&run, 0..run.plain_len / MIB)));
        fetched_ahead(&fresh, run.plain_len.into()).await;
        let stats = fresh.stats();
        assert_eq!((stats.fetches, stats.fetched_bytes), (1, fetched_bytes));
        assert_eq!(read_all(&fresh, &run).await.unwrap().len(), run.plain_len as usize);
    }
}

#[tokio::test]
async fn readers_borrow_what_writers_do_not_use_and_give_it_back() {
    let options = DataOptions {
        memory: Budget::new(16 << 20),
        readahead_memory_bytes: 1 << 20,
        around_memory_bytes: 0,
        cache_memory_bytes: 0,
        ..options()
    };
    let (store, data) = open(options.clone()).await;
    let contents = noise(1, 10 << 20);
    let (run, _) = append_one(&data, Lane::Small, &contents).await;
    data.close().await.unwrap();

    let data = reopen(&store, options.clone()).await;
    assert_eq!(data.readahead_bytes_max(), 9 << 20);
    assert!(data.prefetch(&part(&run, 0..8)), "half of the writers' memory");
    assert!(data.prefetch(&part(&run, 8..9)), "and what is the readers'");
    assert!(!data.prefetch(&part(&run, 9..10)));
    fetched_ahead(&data, 9 << 20).await;

    let written = options.memory.acquire(6 << 20).await;
    assert_eq!(data.readahead_bytes_max(), 1 << 20);
    while data.stats().memory_cache_bytes > 1 << 20 {
        tokio::task::yield_now().await;
    }
    let rest = options.memory.try_acquire(10 << 20).expect("all of it is the writers' again");
    assert!(!data.prefetch(&part(&run, 0..1)));
    assert_eq!(read_all(&data, &run).await.unwrap(), contents);
    drop((written, rest));
    assert!(data.prefetch(&part(&run, 0..8)));
}

/// Readers that take what they fetched ahead, readers that do not come back, and writers.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn memory_stays_bounded_while_many_read_ahead_and_write() {
    let options = DataOptions {
        memory: Budget::new(8 << 20),
        readahead_memory_bytes: 2 << 20,
        around_memory_bytes: 0,
        cache_memory_bytes: 0,
        ..options()
    };
    let (store, data) = open(options.clone()).await;
    let mut runs = Vec::new();
    for seed in 0..8 {
        runs.push((append_one(&data, Lane::Small, &noise(seed, 4 << 20)).await.0, noise(seed, 4 << 20)));
    }
    data.close().await.unwrap();

    let data = Arc::new(reopen(&store, options.clone()).await);
    let readers = runs.into_iter().zip(0..).map(|((run, contents), number)| {
        let (data, memory) = (Arc::clone(&data), Arc::clone(&options.memory));
        tokio::spawn(async move {
            for turn in 0..40u32 {
                let at = turn % 4;
                let _ = data.prefetch(&part(&run, at..4));
                if number % 4 == 0 {
                    let _written = memory.acquire(u64::from(turn % 7 + 1) << 19).await;
                    tokio::task::yield_now().await;
                } else if number % 4 != 1 {
                    let read = data.read(&run, at * MIB, MIB, ReadHint::Normal).await.unwrap();
                    assert!(read == contents[(at * MIB) as usize..((at + 1) * MIB) as usize]);
                }
                let ahead = data.stats().memory_cache_bytes;
                assert!(ahead <= (2 << 20) + (4 << 20), "{ahead}");
                assert!(data.reader.ahead.bytes_in_use() <= 2 << 20);
            }
        })
    });
    for reader in future::join_all(readers).await {
        reader.unwrap();
    }
    // Nobody's room is lost.
    let all = options.memory.acquire(8 << 20).await;
    assert_eq!(all.bytes(), 8 << 20);
}

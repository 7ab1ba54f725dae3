//! Which transactions conflict and which do not.

use std::sync::Arc;

use bytes::Bytes;

use super::{Outcome, begin, conflicted, get, holds, query, range, read, same, text, write};
use crate::{Direction, Isolation, Kv, KvError, Txn, transact};

/// Begins two transactions, runs `first` and commits it, runs `second`'s reads before and its writes after that.
macro_rules! second_conflicts {
    ($kv:expr, $first:expr, $second:expr) => {{
        let (first, second) = (begin($kv).await?, begin($kv).await?);
        let reads: Outcome = $second(Arc::clone(&second)).await;
        reads?;
        write_in(&*first, $first);
        holds!(!conflicted(&first).await?, "the first transaction conflicted");
        second.set(b"written by second", b"v");
        conflicted(&second).await?
    }};
}

fn write_in(txn: &dyn Txn, write: impl Fn(&dyn Txn)) {
    write(txn);
}

pub(super) async fn write_skew_is_refused(kv: Arc<dyn Kv>) -> Outcome {
    write(&kv, |txn| {
        txn.set(b"a", b"1");
        txn.set(b"b", b"1");
    })
    .await?;
    let (one, other) = (begin(&kv).await?, begin(&kv).await?);
    get(&one, b"a").await?;
    get(&one, b"b").await?;
    get(&other, b"a").await?;
    get(&other, b"b").await?;
    one.clear(b"a");
    other.clear(b"b");
    same!(conflicted(&one).await?, false, "conflict of the first");
    same!(conflicted(&other).await?, true, "conflict of the second");
    same!(read(&kv, b"b").await?, Some(Bytes::from_static(b"1")), "a write of the second");
    Ok(())
}

pub(super) async fn phantoms_are_refused(kv: Arc<dyn Kv>) -> Outcome {
    write(&kv, |txn| txn.set(b"b", b"1")).await?;
    let absent = |txn: Arc<dyn Txn>| async move { get(&txn, b"x").await.map(|_| ()) };
    let listed = |txn: Arc<dyn Txn>| async move { range(&txn, query("a", "d")).await.map(|_| ()) };
    let all = second_conflicts!(&kv, |txn: &dyn Txn| txn.set(b"x", b"1"), absent);
    same!(all, true, "conflict with creating a key that was found absent");
    let created = second_conflicts!(&kv, |txn: &dyn Txn| txn.set(b"c", b"1"), listed);
    same!(created, true, "conflict with creating a key in a range that was read");
    let cleared = second_conflicts!(&kv, |txn: &dyn Txn| txn.clear(b"b"), listed);
    same!(cleared, true, "conflict with clearing a key in a range that was read");
    let beside = second_conflicts!(&kv, |txn: &dyn Txn| txn.set(b"d", b"1"), listed);
    same!(beside, false, "conflict with creating a key at the end of a range that was read");
    Ok(())
}

pub(super) async fn only_the_part_that_was_read_conflicts(kv: Arc<dyn Kv>) -> Outcome {
    write(&kv, |txn| ["b", "d", "f", "h"].iter().for_each(|key| txn.set(key.as_bytes(), b"1"))).await?;
    for (direction, inside, outside) in
        [(Direction::Forward, ["a", "c", "d"], "e"), (Direction::Reverse, ["i", "g", "f"], "e")]
    {
        let two = |txn: Arc<dyn Txn>| async move {
            let mut query = query("a", "j");
            query.limit = 2;
            query.direction = direction;
            range(&txn, query).await.map(|_| ())
        };
        let far = second_conflicts!(&kv, |txn: &dyn Txn| txn.set(outside.as_bytes(), b"2"), two);
        same!(far, false, "conflict with {outside} beyond two entries {direction:?}");
        write(&kv, |txn| txn.clear(outside.as_bytes())).await?;
        for key in inside {
            let near = second_conflicts!(&kv, |txn: &dyn Txn| txn.set(key.as_bytes(), b"2"), two);
            same!(near, true, "conflict with {key} within two entries {direction:?}");
            if !matches!(key, "d" | "f") {
                write(&kv, |txn| txn.clear(key.as_bytes())).await?;
            }
        }
    }
    Ok(())
}

pub(super) async fn clearing_a_range_conflicts_with_reading_it(kv: Arc<dyn Kv>) -> Outcome {
    let absent = |txn: Arc<dyn Txn>| async move { get(&txn, b"c").await.map(|_| ()) };
    let listed = |txn: Arc<dyn Txn>| async move { range(&txn, query("c", "f")).await.map(|_| ()) };
    for (begin_key, end_key, hit) in
        [("a", "d", true), ("c", "d", true), ("a", "c", false), ("f", "g", false)]
    {
        let clear = |txn: &dyn Txn| txn.clear_range(begin_key.as_bytes(), end_key.as_bytes());
        let key = second_conflicts!(&kv, clear, absent);
        same!(key, hit, "conflict of reading c with clearing {begin_key}..{end_key}");
        let range = second_conflicts!(&kv, clear, listed);
        same!(range, hit, "conflict of reading c..f with clearing {begin_key}..{end_key}");
    }
    Ok(())
}

pub(super) async fn blind_writes_do_not_conflict(kv: Arc<dyn Kv>) -> Outcome {
    let (one, other) = (begin(&kv).await?, begin(&kv).await?);
    for txn in [&one, &other] {
        txn.set(b"a", b"1");
        txn.clear(b"b");
        txn.clear_range(b"c", b"e");
        txn.set(b"d", b"own");
        get(txn, b"a").await?;
    }
    other.set(b"a", b"2");
    same!(conflicted(&one).await?, false, "conflict of the first");
    same!(conflicted(&other).await?, false, "conflict of the second");
    same!(read(&kv, b"a").await?, Some(Bytes::from_static(b"2")), "the later write");
    Ok(())
}

pub(super) async fn snapshot_reads_do_not_conflict(kv: Arc<dyn Kv>) -> Outcome {
    write(&kv, |txn| txn.set(b"a", b"1")).await?;
    let reads = |txn: Arc<dyn Txn>| async move {
        txn.snapshot_get(b"a").await.map_err(text)?;
        let mut query = query("a", "z");
        query.isolation = Isolation::Snapshot;
        range(&txn, query).await.map(|_| ())
    };
    let hit = second_conflicts!(
        &kv,
        |txn: &dyn Txn| {
            txn.set(b"a", b"2");
            txn.set(b"b", b"2");
        },
        reads
    );
    same!(hit, false, "conflict of snapshot reads");
    Ok(())
}

pub(super) async fn atomic_operations_do_not_conflict(kv: Arc<dyn Kv>) -> Outcome {
    let (one, other) = (begin(&kv).await?, begin(&kv).await?);
    for (txn, number) in [(&one, 3_u8), (&other, 2)] {
        txn.add(b"n", i64::from(number));
        txn.max(b"m", &[number]);
        txn.set_versionstamped_key(b"v", 0, b"", &[number]);
        txn.set_versionstamped_value(b"w", &[number], b"");
    }
    same!(conflicted(&one).await?, false, "conflict of the first");
    same!(conflicted(&other).await?, false, "conflict of the second");
    same!(read(&kv, b"n").await?.as_deref(), Some(&5_i64.to_le_bytes()[..]), "the sum");
    same!(read(&kv, b"m").await?.as_deref(), Some(&[3][..]), "the greater");
    let txn = begin(&kv).await?;
    let values: Vec<Bytes> =
        range(&txn, query("v", "w")).await?.entries.into_iter().map(|(_, value)| value).collect();
    same!(values, [vec![3], vec![2]], "versionstamped keys in the order of their commits");
    Ok(())
}

pub(super) async fn atomic_operations_conflict_with_readers(kv: Arc<dyn Kv>) -> Outcome {
    let reads = |txn: Arc<dyn Txn>| async move {
        get(&txn, b"n").await?;
        range(&txn, query("v", "w")).await.map(|_| ())
    };
    let add = second_conflicts!(&kv, |txn: &dyn Txn| txn.add(b"n", 1), reads);
    same!(add, true, "conflict of a reader with an add");
    let max = second_conflicts!(&kv, |txn: &dyn Txn| txn.max(b"n", &[1]), reads);
    same!(max, true, "conflict of a reader with a max");
    let key = second_conflicts!(&kv, |txn: &dyn Txn| txn.set_versionstamped_key(b"v", 0, b"", b""), reads);
    same!(key, true, "conflict of a reader with a versionstamped key");
    let value = second_conflicts!(&kv, |txn: &dyn Txn| txn.set_versionstamped_value(b"n", b"", b""), reads);
    same!(value, true, "conflict of a reader with a versionstamped value");
    let on_top = |txn: Arc<dyn Txn>| async move {
        txn.add(b"c", 1);
        get(&txn, b"c").await.map(|_| ())
    };
    let own = second_conflicts!(&kv, |txn: &dyn Txn| txn.add(b"c", 1), on_top);
    same!(own, true, "conflict of reading the result of its own add with another add");
    Ok(())
}

pub(super) async fn explicit_conflicts(kv: Arc<dyn Kv>) -> Outcome {
    let marks = |txn: Arc<dyn Txn>| async move {
        txn.add_read_conflict(b"c", b"e");
        Ok(())
    };
    for (key, hit) in [("b", false), ("c", true), ("d", true), ("e", false)] {
        let found = second_conflicts!(&kv, |txn: &dyn Txn| txn.set(key.as_bytes(), b"1"), marks);
        same!(found, hit, "conflict of marking c..e with a write of {key}");
    }
    Ok(())
}

pub(super) async fn transactions_without_writes_always_succeed(kv: Arc<dyn Kv>) -> Outcome {
    let txn = begin(&kv).await?;
    get(&txn, b"a").await?;
    range(&txn, query("a", "z")).await?;
    txn.add_read_conflict(b"a", b"z");
    write(&kv, |txn| txn.set(b"a", b"1")).await?;
    same!(conflicted(&txn).await?, false, "conflict of a transaction that only read");
    same!(conflicted(&begin(&kv).await?).await?, false, "conflict of an empty transaction");
    Ok(())
}

pub(super) async fn concurrent_counters_lose_nothing(kv: Arc<dyn Kv>) -> Outcome {
    const TASKS: u64 = 12;
    const ROUNDS: u64 = 25;
    let tasks: Vec<_> = (0..TASKS)
        .map(|_| {
            let kv = Arc::clone(&kv);
            tokio::spawn(async move {
                for _ in 0..ROUNDS {
                    count_once(&kv).await?;
                }
                Ok::<_, KvError>(())
            })
        })
        .collect();
    for task in tasks {
        task.await.map_err(text)?.map_err(text)?;
    }
    for key in [&b"by get and set"[..], b"by add"] {
        let sum = read(&kv, key).await?;
        same!(sum.as_deref(), Some(&(TASKS * ROUNDS).to_le_bytes()[..]), "counting {key:?}");
    }
    Ok(())
}

/// Harmless when run twice: a unique key tells whether it already counted.
async fn count_once(kv: &Arc<dyn Kv>) -> Result<(), KvError> {
    let token = rand::random::<u128>().to_le_bytes();
    let token = &token;
    transact(&**kv, |txn, attempt| async move {
        let mark = [&b"token "[..], token].concat();
        if attempt.maybe_committed && txn.get(&mark).await?.is_some() {
            return Ok(());
        }
        let before = txn.get(b"by get and set").await?;
        let before =
            before.and_then(|value| <[u8; 8]>::try_from(&value[..]).ok()).map_or(0, u64::from_le_bytes);
        tokio::task::yield_now().await;
        txn.set(b"by get and set", &(before + 1).to_le_bytes());
        txn.add(b"by add", 1);
        txn.set(&mark, b"");
        Ok::<_, KvError>(())
    })
    .await
}

//! Reading and writing within one transaction and one after the other.

use std::sync::Arc;

use super::{Outcome, begin, bytes, get, holds, line, query, range, read, same, text, write};
use crate::{Direction, Kv, KvError, Limits};

pub(super) async fn point_operations(kv: Arc<dyn Kv>) -> Outcome {
    same!(read(&kv, b"a").await?, None, "a key that was never set");
    write(&kv, |txn| {
        txn.set(b"a", b"1");
        txn.set(b"a\0", b"2");
        txn.set(b"\0\xff", b"");
    })
    .await?;
    same!(read(&kv, b"a").await?, Some(bytes("1")), "a key");
    same!(read(&kv, b"a\0").await?, Some(bytes("2")), "the key right after it");
    same!(read(&kv, b"\0\xff").await?, Some(bytes("")), "an empty value");
    write(&kv, |txn| {
        txn.set(b"a", b"3");
        txn.clear(b"a\0");
        txn.clear(b"never set");
    })
    .await?;
    same!(read(&kv, b"a").await?, Some(bytes("3")), "a key set again");
    same!(read(&kv, b"a\0").await?, None, "a cleared key");
    let txn = begin(&kv).await?;
    same!(txn.snapshot_get(b"a").await.map_err(text)?, Some(bytes("3")), "a snapshot read");
    Ok(())
}

pub(super) async fn own_writes_are_read(kv: Arc<dyn Kv>) -> Outcome {
    write(&kv, |txn| {
        txn.set(b"a", b"old");
        txn.set(b"n", &7_i64.to_le_bytes());
        txn.set(b"m", &[5, 0]);
    })
    .await?;
    let txn = begin(&kv).await?;
    txn.set(b"a", b"new");
    same!(get(&txn, b"a").await?, Some(bytes("new")), "its own set");
    same!(txn.snapshot_get(b"a").await.map_err(text)?, Some(bytes("new")), "its own set by a snapshot read");
    txn.clear(b"a");
    same!(get(&txn, b"a").await?, None, "its own clear");
    txn.add(b"n", 5);
    txn.add(b"n", -2);
    same!(
        get(&txn, b"n").await?.as_deref(),
        Some(&10_i64.to_le_bytes()[..]),
        "its own adds on a stored value"
    );
    txn.max(b"m", &[4, 0]);
    same!(get(&txn, b"m").await?.as_deref(), Some(&[5, 0][..]), "a lesser max");
    txn.max(b"m", &[0, 1]);
    same!(get(&txn, b"m").await?.as_deref(), Some(&[0, 1][..]), "a greater max");
    txn.set(b"n", &1_i64.to_le_bytes());
    txn.add(b"n", 1);
    same!(get(&txn, b"n").await?.as_deref(), Some(&2_i64.to_le_bytes()[..]), "its own add on its own set");
    txn.commit().await.map_err(text)?;
    same!(read(&kv, b"a").await?, None, "after the commit");
    same!(read(&kv, b"n").await?.as_deref(), Some(&2_i64.to_le_bytes()[..]), "after the commit");
    same!(read(&kv, b"m").await?.as_deref(), Some(&[0, 1][..]), "after the commit");
    Ok(())
}

pub(super) async fn own_writes_show_in_ranges(kv: Arc<dyn Kv>) -> Outcome {
    write(&kv, |txn| {
        for key in ["b", "d", "f", "h"] {
            txn.set(key.as_bytes(), b"stored");
        }
        txn.set(b"n", &1_i64.to_le_bytes());
    })
    .await?;
    let txn = begin(&kv).await?;
    txn.set(b"a", b"own");
    txn.set(b"d", b"own");
    txn.clear(b"f");
    txn.set(b"g", b"own");
    txn.add(b"n", 1);
    txn.add(b"o", 1);
    let page = range(&txn, query("a", "z")).await?;
    same!(line(&page), "a b d g h n o", "stored and own keys");
    same!(page.entries[2].1, bytes("own"), "a value written over");
    same!(page.entries[5].1[..], 2_i64.to_le_bytes()[..], "an add on a stored value");
    let mut reverse = query("a", "z");
    reverse.direction = Direction::Reverse;
    reverse.limit = 4;
    same!(line(&range(&txn, reverse).await?), "o n h g ..", "the same from the end");
    txn.clear_range(b"b", b"h");
    txn.set(b"c", b"own");
    let mut first = query("a", "z");
    first.limit = 3;
    same!(line(&range(&txn, first).await?), "a c h ..", "after clearing a range");
    txn.commit().await.map_err(text)?;
    let txn = begin(&kv).await?;
    same!(line(&range(&txn, query("a", "z")).await?), "a c h n o", "after the commit");
    Ok(())
}

pub(super) async fn ranges_in_both_directions(kv: Arc<dyn Kv>) -> Outcome {
    write(&kv, |txn| {
        for key in ["a", "b", "c", "c\0", "d"] {
            txn.set(key.as_bytes(), key.as_bytes());
        }
    })
    .await?;
    let txn = begin(&kv).await?;
    for (begin, end, limit, forward, reverse) in [
        ("a", "e", 10, "a b c c\0 d", "d c\0 c b a"),
        ("a", "e", 5, "a b c c\0 d", "d c\0 c b a"),
        ("a", "e", 4, "a b c c\0 ..", "d c\0 c b .."),
        ("a", "e", 1, "a ..", "d .."),
        ("b", "d", 10, "b c c\0", "c\0 c b"),
        ("b", "c\0", 2, "b c", "c b"),
        ("bb", "c", 1, "", ""),
        ("c", "c", 10, "", ""),
        ("d", "a", 10, "", ""),
        ("x", "z", 10, "", ""),
    ] {
        let mut query = query(begin, end);
        query.limit = limit;
        same!(line(&range(&txn, query.clone()).await?), forward, "{begin:?}..{end:?}, at most {limit}");
        query.direction = Direction::Reverse;
        same!(line(&range(&txn, query).await?), reverse, "{begin:?}..{end:?} reversed, at most {limit}");
    }
    Ok(())
}

pub(super) async fn long_ranges_come_in_pages(kv: Arc<dyn Kv>) -> Outcome {
    const COUNT: usize = 5000;
    let key = |index: usize| format!("k{index:05}");
    write(&kv, |txn| {
        for index in 0..COUNT {
            txn.set(key(index).as_bytes(), &index.to_le_bytes());
        }
    })
    .await?;
    // Every third is removed later, so that removals lie between stored keys.
    write(&kv, |txn| (0..COUNT).step_by(3).for_each(|index| txn.clear(key(index).as_bytes()))).await?;
    let expected: Vec<String> = (0..COUNT).filter(|index| index % 3 != 0).map(key).collect();
    let txn = begin(&kv).await?;
    for direction in [Direction::Forward, Direction::Reverse] {
        let mut found = Vec::new();
        let mut query = query("k", "l");
        query.limit = 700;
        query.direction = direction;
        loop {
            let page = range(&txn, query.clone()).await?;
            holds!(page.entries.len() <= 700, "a page of {} entries", page.entries.len());
            let Some((last, _)) = page.entries.last() else { break };
            match direction {
                Direction::Forward => query.begin = [last, &b"\0"[..]].concat().into(),
                Direction::Reverse => query.end = last.clone(),
            }
            let full = page.entries.len() == 700;
            holds!(full || !page.more, "a short page that says there is more");
            found.extend(page.entries.iter().map(|(key, _)| String::from_utf8_lossy(key).into_owned()));
            if !page.more {
                break;
            }
        }
        if direction == Direction::Reverse {
            found.reverse();
        }
        holds!(found == expected, "{} keys in pages instead of {}", found.len(), expected.len());
    }
    Ok(())
}

pub(super) async fn clear_range_removes_what_is_inside(kv: Arc<dyn Kv>) -> Outcome {
    write(&kv, |txn| ["a", "b", "bb", "c", "d"].iter().for_each(|key| txn.set(key.as_bytes(), b"v"))).await?;
    write(&kv, |txn| {
        txn.set(b"ba", b"set before, so cleared too");
        txn.clear_range(b"b", b"c");
        txn.clear_range(b"z", b"a");
        txn.clear_range(b"c", b"c");
    })
    .await?;
    let txn = begin(&kv).await?;
    same!(line(&range(&txn, query("a", "z")).await?), "a c d", "what is left");
    write(&kv, |txn| {
        txn.clear_range(b"a", b"c\0");
        txn.clear_range(b"b", b"z");
    })
    .await?;
    let txn = begin(&kv).await?;
    same!(line(&range(&txn, query("a", "z")).await?), "", "what is left of overlapping ranges");
    Ok(())
}

pub(super) async fn writes_after_a_cleared_range_start_from_nothing(kv: Arc<dyn Kv>) -> Outcome {
    write(&kv, |txn| {
        txn.set(b"n", &40_i64.to_le_bytes());
        txn.set(b"m", &[9]);
    })
    .await?;
    let txn = begin(&kv).await?;
    txn.clear_range(b"a", b"z");
    txn.add(b"n", 2);
    txn.max(b"m", &[3]);
    same!(
        get(&txn, b"n").await?.as_deref(),
        Some(&2_i64.to_le_bytes()[..]),
        "an add after the range was cleared"
    );
    same!(get(&txn, b"q").await?, None, "a key in the cleared range");
    txn.commit().await.map_err(text)?;
    same!(read(&kv, b"n").await?.as_deref(), Some(&2_i64.to_le_bytes()[..]), "the add after the commit");
    same!(read(&kv, b"m").await?.as_deref(), Some(&[3][..]), "the max after the commit");
    Ok(())
}

pub(super) async fn a_transaction_reads_at_one_point(kv: Arc<dyn Kv>) -> Outcome {
    write(&kv, |txn| {
        txn.set(b"a", b"1");
        txn.set(b"b", b"1");
        txn.set(b"c", b"1");
    })
    .await?;
    let txn = begin(&kv).await?;
    same!(get(&txn, b"a").await?, Some(bytes("1")), "before");
    write(&kv, |txn| {
        txn.set(b"a", b"2");
        txn.clear(b"b");
        txn.clear_range(b"c", b"d");
        txn.set(b"e", b"2");
    })
    .await?;
    same!(get(&txn, b"a").await?, Some(bytes("1")), "a key that was changed since");
    same!(get(&txn, b"b").await?, Some(bytes("1")), "a key that was cleared since");
    same!(line(&range(&txn, query("a", "z")).await?), "a b c", "a range that was changed since");
    same!(read(&kv, b"a").await?, Some(bytes("2")), "a later transaction");
    Ok(())
}

pub(super) async fn limits_are_enforced(kv: Arc<dyn Kv>) -> Outcome {
    let limits = kv.limits();
    same!(limits.key_bytes_max, Limits::STRICTEST.key_bytes_max, "key limit");
    same!(limits.value_bytes_max, Limits::STRICTEST.value_bytes_max, "value limit");
    same!(limits.txn_bytes_max, Limits::STRICTEST.txn_bytes_max, "transaction limit");
    let key = |len: usize| vec![b'k'; len];
    let value = |len: usize| vec![b'v'; len];
    for (key_len, value_len, fits) in [
        (limits.key_bytes_max, 1, true),
        (limits.key_bytes_max + 1, 1, false),
        (1, limits.value_bytes_max, true),
        (1, limits.value_bytes_max + 1, false),
    ] {
        let txn = begin(&kv).await?;
        txn.set(&key(key_len), &value(value_len));
        let fitted = match txn.commit().await {
            Ok(_) => true,
            Err(KvError::TooLarge(_)) => false,
            Err(error) => return Err(text(error)),
        };
        same!(fitted, fits, "committing a key of {key_len} with a value of {value_len} bytes");
        let stored = fits.then_some(value_len);
        let found = if fits { read(&kv, &key(key_len)).await?.map(|value| value.len()) } else { None };
        same!(found, stored, "length of the value of a key of {key_len} bytes");
    }
    for (count, fits) in [(90_u8, true), (105, false)] {
        let txn = begin(&kv).await?;
        for index in 0..count {
            txn.set(&[b'x', index], &value(limits.value_bytes_max));
        }
        let fitted = match txn.commit().await {
            Ok(_) => true,
            Err(KvError::TooLarge(_)) => false,
            Err(error) => return Err(text(error)),
        };
        same!(fitted, fits, "committing {count} values of {} bytes", limits.value_bytes_max);
    }
    same!(read(&kv, &[b'x', 104]).await?, None, "a value of a transaction that was too large");
    write(&kv, |txn| txn.clear_range(b"", b"\xff")).await
}

pub(super) async fn sync_and_close(kv: Arc<dyn Kv>) -> Outcome {
    kv.sync().await.map_err(text)?;
    write(&kv, |txn| txn.set(b"a", b"1")).await?;
    kv.sync().await.map_err(text)?;
    let txn = begin(&kv).await?;
    txn.set(b"a", b"2");
    kv.close().await.map_err(text)?;
    holds!(matches!(kv.begin().await, Err(KvError::Unavailable(_))), "begin succeeded after close");
    holds!(matches!(txn.commit().await, Err(KvError::Unavailable(_))), "commit succeeded after close");
    Ok(())
}

//! Operations that write without reading: add, max, versionstamps; and watches.

use std::sync::Arc;
use std::time::Duration;

use super::{Outcome, begin, get, holds, query, range, read, same, text, write};
use crate::Kv;

async fn number(kv: &Arc<dyn Kv>, key: &[u8]) -> Result<Option<i64>, String> {
    let value = read(kv, key).await?;
    value
        .map(|value| match <[u8; 8]>::try_from(&value[..]) {
            Ok(bytes) => Ok(i64::from_le_bytes(bytes)),
            Err(_) => Err(format!("a counter of {} bytes", value.len())),
        })
        .transpose()
}

pub(super) async fn add_counts(kv: Arc<dyn Kv>) -> Outcome {
    for (delta, sum) in [(1, 1), (255, 256), (-257, -1), (1, 0), (i64::MAX, i64::MAX), (2, i64::MIN + 1)] {
        write(&kv, |txn| txn.add(b"n", delta)).await?;
        same!(number(&kv, b"n").await?, Some(sum), "after adding {delta}");
    }
    write(&kv, |txn| {
        txn.add(b"p", 0);
        txn.add(b"q", 3);
        txn.add(b"q", 4);
        txn.set(b"r", &1_i64.to_le_bytes());
        txn.add(b"r", 1);
        txn.add(b"s", 9);
        txn.clear(b"s");
        txn.add(b"s", 1);
        txn.add(b"t", 9);
        txn.clear(b"t");
    })
    .await?;
    same!(number(&kv, b"p").await?, Some(0), "adding 0 to nothing");
    same!(number(&kv, b"q").await?, Some(7), "two adds in one transaction");
    same!(number(&kv, b"r").await?, Some(2), "an add after a set");
    same!(number(&kv, b"s").await?, Some(1), "an add after a clear");
    same!(number(&kv, b"t").await?, None, "a clear after an add");
    Ok(())
}

pub(super) async fn max_keeps_the_greater(kv: Arc<dyn Kv>) -> Outcome {
    for (value, greatest) in [
        (5_u64, 5_u64),
        (4, 5),
        (256, 256),
        (255, 256),
        (u64::MAX, u64::MAX),
        (i64::MAX.unsigned_abs(), u64::MAX),
    ] {
        write(&kv, |txn| txn.max(b"m", &value.to_le_bytes())).await?;
        let found = read(&kv, b"m").await?;
        same!(found.as_deref(), Some(&greatest.to_le_bytes()[..]), "after max with {value}");
    }
    write(&kv, |txn| {
        txn.max(b"q", &7_u64.to_le_bytes());
        txn.max(b"q", &3_u64.to_le_bytes());
        txn.clear(b"m");
        txn.max(b"m", &2_u64.to_le_bytes());
        txn.set(b"short", &[9]);
    })
    .await?;
    same!(read(&kv, b"q").await?.as_deref(), Some(&7_u64.to_le_bytes()[..]), "two in one transaction");
    same!(read(&kv, b"m").await?.as_deref(), Some(&2_u64.to_le_bytes()[..]), "max after a clear");
    write(&kv, |txn| txn.max(b"short", &8_u64.to_le_bytes())).await?;
    same!(read(&kv, b"short").await?.as_deref(), Some(&9_u64.to_le_bytes()[..]), "max over a shorter value");
    Ok(())
}

pub(super) async fn versionstamped_keys_are_ordered(kv: Arc<dyn Kv>) -> Outcome {
    let mut expected = Vec::new();
    let mut stamp_last = None;
    for round in 0..20_u8 {
        let txn = begin(&kv).await?;
        for order in [2_u16, 0, 1] {
            txn.set_versionstamped_key(b"v", order, b"!", &[round, order.to_be_bytes()[1]]);
        }
        same!(range(&txn, query("w", "x")).await?.entries.len(), 0, "an unrelated range before the commit");
        let stamp = txn.commit().await.map_err(text)?;
        holds!(stamp_last < Some(stamp), "{stamp:?} after {stamp_last:?}");
        stamp_last = Some(stamp);
        for order in 0..3_u16 {
            let key = [&b"v"[..], &stamp.0, &order.to_be_bytes(), b"!"].concat();
            expected.push((key.into(), vec![round, order.to_be_bytes()[1]].into()));
        }
    }
    let txn = begin(&kv).await?;
    let page = range(&txn, query("v", "w")).await?;
    same!(page.entries, expected, "versionstamped keys");
    Ok(())
}

pub(super) async fn versionstamped_values(kv: Arc<dyn Kv>) -> Outcome {
    write(&kv, |txn| txn.set(b"a", b"before")).await?;
    let txn = begin(&kv).await?;
    txn.set_versionstamped_value(b"a", b"<", b">");
    txn.set_versionstamped_value(b"b", b"", b"");
    let stamp = txn.commit().await.map_err(text)?;
    let txn = begin(&kv).await?;
    same!(get(&txn, b"a").await?.as_deref(), Some(&[b"<", &stamp.0[..], b">"].concat()[..]), "over a value");
    same!(get(&txn, b"b").await?.as_deref(), Some(&stamp.0[..]), "over nothing");
    Ok(())
}

pub(super) async fn a_watch_ends_when_its_key_changes(kv: Arc<dyn Kv>) -> Outcome {
    write(&kv, |txn| {
        txn.set(b"set", b"1");
        txn.set(b"clear", b"1");
        txn.set(b"in range", b"1");
        txn.add(b"add", 1);
    })
    .await?;
    let mut watches = Vec::new();
    for key in ["set", "new", "clear", "in range", "add"] {
        watches.push((key, kv.watch(key.as_bytes()).await.map_err(text)?));
    }
    drop(kv.watch(b"set").await.map_err(text)?);
    write(&kv, |txn| {
        txn.set(b"set", b"2");
        txn.set(b"new", b"1");
        txn.clear(b"clear");
        txn.clear_range(b"in", b"io");
        txn.add(b"add", 1);
    })
    .await?;
    for (key, watch) in watches {
        match tokio::time::timeout(Duration::from_secs(20), watch).await {
            Ok(ended) => ended.map_err(text)?,
            Err(_) => return Err(format!("the watch of {key:?} did not end")),
        }
    }
    Ok(())
}

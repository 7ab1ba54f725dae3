//! Commits that tell later which of them a store still holds.

use rfs_kv::{Direction, Isolation, Kv, KvError, RangeQuery, transact};

pub(crate) async fn set(kv: &dyn Kv, key: &[u8], value: &[u8]) -> Result<(), KvError> {
    transact(kv, |txn, _| async move {
        txn.set(key, value);
        Ok(())
    })
    .await
}

pub(crate) async fn get(kv: &dyn Kv, key: &[u8]) -> Result<Option<Vec<u8>>, KvError> {
    Ok(kv.begin().await?.get(key).await?.map(|value| value.to_vec()))
}

/// Commits numbered steps, each changing several keys, so that any state tells which steps it holds.
pub(crate) struct Steps;

impl Steps {
    const KEYS: u64 = 40;

    /// Commits step `number`, which must be the one after the last.
    pub(crate) async fn commit(kv: &dyn Kv, number: u64) -> Result<(), KvError> {
        transact(kv, |txn, _| async move {
            txn.set(b"number", &number.to_le_bytes());
            txn.set(&Self::key(number), &number.to_le_bytes());
            txn.add(b"sum", i64::try_from(number).unwrap());
            txn.clear_range(
                &Self::key(number + 1),
                &Self::key(number + 1 + u64::from(number % Self::KEYS < 35)),
            );
            txn.set_versionstamped_key(b"log", 0, b"", &number.to_le_bytes());
            Ok(())
        })
        .await
    }

    fn key(number: u64) -> Vec<u8> {
        format!("step {:02}", number % Self::KEYS).into_bytes()
    }

    /// The number of the last step in `kv`, after checking that it holds exactly the steps up to that one.
    pub(crate) async fn check(kv: &dyn Kv) -> u64 {
        let number =
            |value: Option<Vec<u8>>| value.map(|value| u64::from_le_bytes(value.try_into().unwrap()));
        let last = number(get(kv, b"number").await.unwrap()).unwrap_or(0);
        let sum = number(get(kv, b"sum").await.unwrap()).unwrap_or(0);
        assert_eq!(sum, last * (last + 1) / 2, "sum of steps up to {last}");
        for back in 0..Self::KEYS.min(last) {
            let step = last - back;
            let cleared = (step + 1..=last)
                .any(|later| later % Self::KEYS < 35 && Self::key(later + 1) == Self::key(step));
            let found = number(get(kv, &Self::key(step)).await.unwrap());
            assert_eq!(found, (!cleared).then_some(step), "key of step {step}, last {last}");
        }
        let txn = kv.begin().await.unwrap();
        let mut query = RangeQuery {
            begin: b"log".to_vec().into(),
            end: b"loh".to_vec().into(),
            limit: 1000,
            direction: Direction::Forward,
            isolation: Isolation::Snapshot,
        };
        let mut expected = 1;
        loop {
            let page = txn.range(query.clone()).await.unwrap();
            for (_, value) in &page.entries {
                assert_eq!(value[..], u64::to_le_bytes(expected), "log in the order of commits");
                expected += 1;
            }
            let Some((key, _)) = page.entries.last().filter(|_| page.more) else { break };
            query.begin = [key, &[0][..]].concat().into();
        }
        assert_eq!(expected, last + 1, "log entries");
        last
    }
}

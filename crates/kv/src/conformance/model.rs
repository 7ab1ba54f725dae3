//! Random operations in two interleaved transactions, compared with a `BTreeMap`.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::{Outcome, begin, conflicted, holds, same, text};
use crate::{Direction, Isolation, Kv, RangeQuery, Txn};

const SEED: u64 = 7;
const ROUNDS: usize = 150;
const OPS: usize = 12;
/// Keys are one byte from 0 to this, so that every range can be held as two bytes.
const KEYS: u8 = 24;

type Contents = BTreeMap<u8, [u8; 8]>;

/// One transaction and what it should see.
struct Side {
    txn: Arc<dyn Txn>,
    /// The state at its beginning with its own writes on top.
    seen: Contents,
    /// Writes to be done again on the state at commit, in order.
    writes: Vec<Write>,
    /// Keys whose stored value surely decided what was read; `may` those where it possibly did.
    must: [bool; KEYS as usize],
    may: [bool; KEYS as usize],
    /// Keys whose stored value no longer matters, because they were written.
    overwritten: [bool; KEYS as usize],
}

#[derive(Debug, Clone, Copy)]
enum Write {
    Set(u8, u64),
    Clear(u8),
    ClearRange(u8, u8),
    Add(u8, i64),
    Max(u8, u64),
}

impl Write {
    fn random(rng: &mut StdRng) -> Self {
        let key = rng.random_range(0..KEYS);
        match rng.random_range(0..5) {
            0 => Write::Set(key, rng.random()),
            1 => Write::Clear(key),
            2 => Write::ClearRange(key, rng.random_range(key..=KEYS).min(key + 5)),
            3 => Write::Add(key, rng.random()),
            _ => Write::Max(key, rng.random()),
        }
    }

    fn range(self) -> std::ops::Range<u8> {
        match self {
            Write::Set(key, _) | Write::Clear(key) | Write::Add(key, _) | Write::Max(key, _) => key..key + 1,
            Write::ClearRange(begin, end) => begin..end,
        }
    }

    fn apply(self, contents: &mut Contents) {
        match self {
            Write::Set(key, value) => drop(contents.insert(key, value.to_le_bytes())),
            Write::Clear(key) => drop(contents.remove(&key)),
            Write::ClearRange(begin, end) => contents.retain(|key, _| !(begin..end).contains(key)),
            Write::Add(key, delta) => {
                let value = contents.entry(key).or_default();
                *value = i64::from_le_bytes(*value).wrapping_add(delta).to_le_bytes();
            }
            Write::Max(key, other) => {
                let value = contents.entry(key).or_default();
                *value = u64::from_le_bytes(*value).max(other).to_le_bytes();
            }
        }
    }

    fn write(self, txn: &dyn Txn) {
        match self {
            Write::Set(key, value) => txn.set(&[key], &value.to_le_bytes()),
            Write::Clear(key) => txn.clear(&[key]),
            Write::ClearRange(begin, end) => txn.clear_range(&[begin], &[end]),
            Write::Add(key, delta) => txn.add(&[key], delta),
            Write::Max(key, value) => txn.max(&[key], &value.to_le_bytes()),
        }
    }
}

impl Side {
    async fn begin(kv: &Arc<dyn Kv>, contents: &Contents) -> Result<Self, String> {
        Ok(Self {
            txn: begin(kv).await?,
            seen: contents.clone(),
            writes: Vec::new(),
            must: [false; KEYS as usize],
            may: [false; KEYS as usize],
            overwritten: [false; KEYS as usize],
        })
    }

    async fn step(&mut self, rng: &mut StdRng) -> Outcome {
        match rng.random_range(0..10) {
            0..=4 => {
                let write = Write::random(rng);
                write.write(&*self.txn);
                write.apply(&mut self.seen);
                if !matches!(write, Write::Add(..) | Write::Max(..)) {
                    write.range().for_each(|key| self.overwritten[usize::from(key)] = true);
                }
                self.writes.push(write);
                Ok(())
            }
            5..=6 => {
                let key = rng.random_range(0..KEYS);
                let found = self.txn.get(&[key]).await.map_err(text)?;
                same!(found.as_deref(), self.seen.get(&key).map(|value| &value[..]), "get of {key}");
                self.note(key..key + 1);
                Ok(())
            }
            7 => {
                let key = rng.random_range(0..KEYS);
                let found = self.txn.snapshot_get(&[key]).await.map_err(text)?;
                same!(found.as_deref(), self.seen.get(&key).map(|value| &value[..]), "snapshot get of {key}");
                Ok(())
            }
            _ => self.read_range(rng).await,
        }
    }

    async fn read_range(&mut self, rng: &mut StdRng) -> Outcome {
        let begin = rng.random_range(0..KEYS);
        let end = rng.random_range(begin..=KEYS);
        let limit = rng.random_range(1..8);
        let direction = if rng.random() { Direction::Forward } else { Direction::Reverse };
        let isolation = if rng.random() { Isolation::Serializable } else { Isolation::Snapshot };
        let query =
            RangeQuery { begin: vec![begin].into(), end: vec![end].into(), limit, direction, isolation };
        let page = self.txn.range(query).await.map_err(text)?;
        let mut expected: Vec<(Bytes, Bytes)> = self
            .seen
            .range(begin..end)
            .map(|(key, value)| (vec![*key].into(), value.to_vec().into()))
            .collect();
        if direction == Direction::Reverse {
            expected.reverse();
        }
        let more = expected.len() > limit;
        expected.truncate(limit);
        same!(page.entries, expected, "range {begin}..{end}, at most {limit}, {direction:?}");
        same!(page.more, more, "more of range {begin}..{end}, at most {limit}, {direction:?}");
        if isolation == Isolation::Serializable {
            match (more, direction, expected.last()) {
                (true, Direction::Forward, Some((last, _))) => self.note(begin..last[0] + 1),
                (true, Direction::Reverse, Some((last, _))) => self.note(last[0]..end),
                _ => self.note(begin..end),
            }
        }
        Ok(())
    }

    fn note(&mut self, keys: std::ops::Range<u8>) {
        for key in keys.map(usize::from) {
            self.may[key] = true;
            self.must[key] |= !self.overwritten[key];
        }
    }
}

pub(super) async fn random_interleaved_transactions_agree_with_a_model(kv: Arc<dyn Kv>) -> Outcome {
    let mut rng = StdRng::seed_from_u64(SEED);
    let mut contents = Contents::new();
    let mut conflicts = 0;
    for round in 0..ROUNDS {
        let mut sides = [Side::begin(&kv, &contents).await?, Side::begin(&kv, &contents).await?];
        for _ in 0..rng.random_range(1..OPS) {
            let side = &mut sides[usize::from(rng.random::<bool>())];
            side.step(&mut rng).await.map_err(|what| format!("seed {SEED}, round {round}: {what}"))?;
        }
        let [first, second] = sides;
        holds!(!conflicted(&first.txn).await?, "round {round}: the first to commit conflicted");
        first.writes.iter().for_each(|write| write.apply(&mut contents));
        let changed = |read: &[bool]| {
            first.writes.iter().flat_map(|write| write.range()).any(|key| read[usize::from(key)])
        };
        let writes = !second.writes.is_empty();
        if conflicted(&second.txn).await? {
            conflicts += 1;
            holds!(writes && changed(&second.may), "seed {SEED}, round {round}: conflict without a reason");
        } else {
            holds!(!writes || !changed(&second.must), "seed {SEED}, round {round}: a conflict was missed");
            second.writes.iter().for_each(|write| write.apply(&mut contents));
        }
        let mut all = Side::begin(&kv, &contents).await?;
        let query = RangeQuery {
            begin: vec![0].into(),
            end: vec![KEYS].into(),
            limit: 1000,
            direction: Direction::Forward,
            isolation: Isolation::Snapshot,
        };
        let page = all.txn.range(query).await.map_err(text)?;
        let found: Contents = page
            .entries
            .iter()
            .filter_map(|(key, value)| Some((key[0], <[u8; 8]>::try_from(&value[..]).ok()?)))
            .collect();
        same!(found, contents, "seed {SEED}, contents after round {round}");
        all.seen.clear();
    }
    holds!(conflicts > 0 && conflicts < ROUNDS, "{conflicts} conflicts in {ROUNDS} rounds show nothing");
    Ok(())
}

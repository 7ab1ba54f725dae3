//! What every engine must do, as cases over any [`Kv`].
//!
//! A bug found on one engine becomes a case here. Each case gets an empty store of its own. Cases assert only what
//! the contract promises: an engine may conflict on keys that a transaction wrote before it read them, and a watch may
//! end early.

mod atomic;
mod conflicts;
mod model;
mod reads;

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::FutureExt;
use futures::future::BoxFuture;

use crate::{Direction, Isolation, Kv, KvError, RangePage, RangeQuery, Txn, transact};

/// What a case found: nothing, or what is wrong.
type Outcome = Result<(), String>;

/// One case.
#[derive(Clone, Copy)]
pub struct Case {
    /// What it shows.
    pub name: &'static str,
    run: fn(Arc<dyn Kv>) -> BoxFuture<'static, Outcome>,
}

/// Longest time that one case may take.
const CASE_TIME_MAX: Duration = Duration::from_mins(2);

macro_rules! cases {
    ($($module:ident :: $name:ident),* $(,)?) => {
        /// All cases.
        pub const CASES: &[Case] = &[$(Case {
            name: stringify!($name),
            run: |kv| $module::$name(kv).boxed(),
        }),*];
    };
}

cases![
    reads::point_operations,
    reads::own_writes_are_read,
    reads::own_writes_show_in_ranges,
    reads::ranges_in_both_directions,
    reads::long_ranges_come_in_pages,
    reads::clear_range_removes_what_is_inside,
    reads::writes_after_a_cleared_range_start_from_nothing,
    reads::a_transaction_reads_at_one_point,
    reads::limits_are_enforced,
    reads::sync_and_close,
    atomic::add_counts,
    atomic::max_keeps_the_greater,
    atomic::versionstamped_keys_are_ordered,
    atomic::versionstamped_values,
    atomic::a_watch_ends_when_its_key_changes,
    conflicts::write_skew_is_refused,
    conflicts::phantoms_are_refused,
    conflicts::only_the_part_that_was_read_conflicts,
    conflicts::clearing_a_range_conflicts_with_reading_it,
    conflicts::blind_writes_do_not_conflict,
    conflicts::snapshot_reads_do_not_conflict,
    conflicts::atomic_operations_do_not_conflict,
    conflicts::atomic_operations_conflict_with_readers,
    conflicts::explicit_conflicts,
    conflicts::transactions_without_writes_always_succeed,
    conflicts::concurrent_counters_lose_nothing,
    model::random_interleaved_transactions_agree_with_a_model,
];

/// Runs every case, each on the empty store that `open` gives.
///
/// # Panics
/// With the name of the first case that fails.
pub async fn all<Open, Fut>(open: Open)
where
    Open: Fn() -> Fut,
    Fut: Future<Output = Arc<dyn Kv>>,
{
    for case in CASES {
        one(*case, open().await).await;
    }
}

/// Runs one case on `kv`, which must be empty.
///
/// # Panics
/// With its name if it fails.
pub async fn one(case: Case, kv: Arc<dyn Kv>) {
    let run = AssertUnwindSafe(tokio::time::timeout(CASE_TIME_MAX, (case.run)(kv)));
    let Ok(in_time) = run.catch_unwind().await else {
        panic!("conformance case {}: it panicked, see above", case.name);
    };
    match in_time {
        Ok(Ok(())) => {}
        Ok(Err(text)) => panic!("conformance case {}: {text}", case.name),
        Err(elapsed) => panic!("conformance case {}: {elapsed} after {CASE_TIME_MAX:?}", case.name),
    }
}

/// Fails the case unless `$left == $right`.
macro_rules! same {
    ($left:expr, $right:expr, $($what:tt)+) => {
        match (&$left, &$right) {
            (left, right) if *left == *right => {}
            (left, right) => {
                return Err(format!("{}: {left:?} instead of {right:?}", format!($($what)+)));
            }
        }
    };
}

/// Fails the case unless `$condition` holds.
macro_rules! holds {
    ($condition:expr, $($what:tt)+) => {
        if !$condition {
            return Err(format!($($what)+));
        }
    };
}

use {holds, same};

/// An engine's error where the case expected none.
fn text(error: impl std::fmt::Debug) -> String {
    format!("unexpected {error:?}")
}

async fn begin(kv: &Arc<dyn Kv>) -> Result<Arc<dyn Txn>, String> {
    kv.begin().await.map_err(text)
}

/// Runs `write` in a transaction of its own until it is committed.
async fn write(kv: &Arc<dyn Kv>, write: impl Fn(&dyn Txn)) -> Outcome {
    let write = &write;
    transact(&**kv, |txn, _| async move {
        write(&*txn);
        Ok::<_, KvError>(())
    })
    .await
    .map_err(text)
}

async fn read(kv: &Arc<dyn Kv>, key: &[u8]) -> Result<Option<Bytes>, String> {
    begin(kv).await?.get(key).await.map_err(text)
}

async fn get(txn: &Arc<dyn Txn>, key: &[u8]) -> Result<Option<Bytes>, String> {
    txn.get(key).await.map_err(text)
}

fn bytes(text: &'static str) -> Bytes {
    Bytes::from_static(text.as_bytes())
}

fn query(begin: &'static str, end: &'static str) -> RangeQuery {
    RangeQuery {
        begin: bytes(begin),
        end: bytes(end),
        limit: 1000,
        direction: Direction::Forward,
        isolation: Isolation::Serializable,
    }
}

async fn range(txn: &Arc<dyn Txn>, query: RangeQuery) -> Result<RangePage, String> {
    txn.range(query).await.map_err(text)
}

/// Keys of a page, as one line to compare: `a b c`, with `..` at the end if there is more.
fn line(page: &RangePage) -> String {
    let mut words: Vec<String> =
        page.entries.iter().map(|(key, _)| String::from_utf8_lossy(key).into_owned()).collect();
    if page.more {
        words.push("..".into());
    }
    words.join(" ")
}

/// Whether `commit` was refused with a conflict.
async fn conflicted(txn: &Arc<dyn Txn>) -> Result<bool, String> {
    match txn.commit().await {
        Ok(_) => Ok(false),
        Err(KvError::Conflict) => Ok(true),
        Err(error) => Err(text(error)),
    }
}

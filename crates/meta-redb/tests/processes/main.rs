//! What a second process finds: the file of a running one, and what a killed one left.
//!
//! Apart from the other tests, since a child holds the locks of all files that are open when it is started until it
//! runs its program: a store that another test closes meanwhile would be found in use for a moment.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking, too")]

#[path = "../it/steps.rs"]
mod steps;

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rfs_kv::Kv;
use rfs_meta_redb::{OpenError, RedbKv, RedbOptions};
use tokio::sync::Mutex;

use crate::steps::{Steps, get, set};

/// Held by each test that starts a process.
static ALONE: Mutex<()> = Mutex::const_new(());

const CHILD_PATH: &str = "RFS_TEST_KILLED_CHILD";

/// Not a test: what the next one starts and kills.
#[tokio::test]
async fn killed_child() {
    let Some(path) = std::env::var_os(CHILD_PATH) else { return };
    let options = RedbOptions { durable_interval: Duration::from_millis(20), ..RedbOptions::default() };
    let kv = RedbKv::open(Path::new(&path), options).unwrap();
    let mut number = Steps::check(&kv).await;
    let mut out = std::io::stdout();
    writeln!(out, "\nopen").unwrap();
    loop {
        number += 1;
        Steps::commit(&kv, number).await.unwrap();
        if number % 37 == 0 {
            kv.sync().await.unwrap();
            writeln!(out, "synced {number}").unwrap();
            out.flush().unwrap();
        }
    }
}

#[tokio::test]
async fn kill_keeps_a_prefix_with_all_that_was_synced() {
    let _alone = ALONE.lock().await;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("meta.redb");
    RedbKv::create(&path, RedbOptions::default()).unwrap().close().await.unwrap();
    let mut rng = StdRng::seed_from_u64(1);
    let mut steps = 0;
    for round in 0..15 {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "killed_child", "--nocapture", "--test-threads=1"])
            .env(CHILD_PATH, &path)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
        assert!(lines.any(|line| line == "open"), "round {round}: the child opens the store");
        let killer_delay = Duration::from_millis(rng.random_range(1..150));
        let pid = child.id();
        let killer = std::thread::spawn(move || {
            std::thread::park_timeout(killer_delay);
            child.kill().unwrap();
            child.wait().unwrap();
        });
        let synced = lines
            .filter_map(|line| line.strip_prefix("synced ").and_then(|number| number.parse().ok()))
            .last()
            .unwrap_or(0);
        killer.join().unwrap();
        let start = tokio::time::Instant::now();
        let kv = RedbKv::open(&path, RedbOptions::default()).unwrap();
        assert!(start.elapsed() < Duration::from_secs(5), "opening after a crash took {:?}", start.elapsed());
        let last = Steps::check(&kv).await;
        assert!(
            last >= synced,
            "round {round}, child {pid}: step {synced} was synced, but {last} is the last"
        );
        steps = last;
        drop(kv);
    }
    assert!(steps > 100, "only {steps} steps in all");
}

const SECOND_PATH: &str = "RFS_TEST_SECOND_PROCESS";

/// Asserts that `path` is in use, and that the user is told which file that is and what to do.
fn is_in_use(path: &Path) {
    let error = RedbKv::open(path, RedbOptions::default()).map(|_| "success").unwrap_err();
    assert!(matches!(error, OpenError::InUse(_)), "{error:?}");
    let text = error.to_string();
    assert!(text.contains(path.to_str().unwrap()) && text.contains("umount"), "{text}");
}

/// Not a test: the second process of the next one.
#[test]
fn second_process() {
    if let Some(path) = std::env::var_os(SECOND_PATH) {
        is_in_use(Path::new(&path));
    }
}

#[tokio::test]
async fn a_second_user_is_refused() {
    let _alone = ALONE.lock().await;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("meta.redb");
    let kv = RedbKv::create(&path, RedbOptions::default()).unwrap();
    is_in_use(&path);
    let second = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "second_process"])
        .env(SECOND_PATH, &path)
        .output()
        .unwrap();
    assert!(second.status.success(), "{}", String::from_utf8_lossy(&second.stdout));
    set(&kv, b"a", b"1").await.unwrap();
    kv.close().await.unwrap();
    let kv = RedbKv::open(&path, RedbOptions::default()).unwrap();
    assert_eq!(get(&kv, b"a").await.unwrap(), Some(b"1".to_vec()));
}

//! Formatting, opening, sessions.

use super::*;
use rfs_kv::{Attempt, KvError};
use uuid::Uuid;

on_every_engine!(
    format_makes_one_empty_volume,
    sessions_come_and_go,
    several_sessions_of_a_shared_volume,
    requests_happen_once,
    the_staging_directory_is_remembered,
);

async fn format_makes_one_empty_volume(kv: Arc<dyn Kv>) {
    assert_eq!(Meta::volume(&*kv).await.unwrap(), None);
    let clock = Arc::new(ManualClock::new(at(5)));
    let opened = Meta::open(Arc::clone(&kv), clock.clone(), &OpenOptions::default()).await;
    assert_eq!(opened.err().unwrap().kind, ErrorKind::NotFound);
    let options = FormatOptions {
        uuid: Uuid::from_bytes([1; 16]),
        root_uid: 3,
        root_gid: 4,
        root_mode: 0o1777,
        ..FormatOptions::default()
    };
    for block_bytes in [0, 1000, 2048, 8 << 20] {
        let bad = FormatOptions { block_bytes, ..options.clone() };
        assert_eq!(kind_of(Meta::format(&*kv, &bad, at(5)).await), ErrorKind::Invalid);
    }
    let volume = Meta::format(&*kv, &options, at(5)).await.unwrap();
    assert_eq!(kind_of(Meta::format(&*kv, &options, at(5)).await), ErrorKind::Exists);
    assert_eq!(Meta::volume(&*kv).await.unwrap().as_ref(), Some(&volume));
    let limits = VolumeLimits { capacity: Some(5), inodes: None };
    assert_eq!(Meta::update_volume(&*kv, limits).await.unwrap().limits, limits);
    let meta = Meta::open(kv, clock, &OpenOptions::default()).await.unwrap();
    let root = meta.getattr(ROOT).await.unwrap();
    assert_eq!((root.uid, root.gid, root.mode, root.nlink), (3, 4, 0o1777, 2));
    assert_eq!(meta.getattr_and_parent(ROOT).await.unwrap().1, ROOT);
}

async fn sessions_come_and_go(kv: Arc<dyn Kv>) {
    let v = Fixture::new(kv).await;
    let first = v.meta.session_id().unwrap();
    v.meta.heartbeat().await.unwrap();
    v.meta.close().await.unwrap();
    let meta = v.reopen().await;
    let second = meta.session_id().unwrap();
    assert!(second > first);
    assert_eq!(kind_of(v.meta.heartbeat().await), ErrorKind::Stale);
    let alive: Vec<SessionId> = meta.sessions().await.unwrap().iter().map(|s| s.id).collect();
    assert_eq!(alive, vec![second]);
    meta.close().await.unwrap();
}

async fn several_sessions_of_a_shared_volume(kv: Arc<dyn Kv>) {
    let v = Fixture::new(kv).await;
    let options = OpenOptions { sharing: Sharing::Shared, hostname: "b".into(), ..OpenOptions::default() };
    let other = Meta::open(Arc::clone(&v.kv), v.clock.clone(), &options).await.unwrap();
    let file = v.file(ROOT, "f").await;
    v.meta.unlink(ROOT, &name("f")).await.unwrap();
    assert_eq!(other.orphans(None, 9).await.unwrap().items, vec![], "the other is alive");
    assert_eq!(other.reap(&[file]).await.unwrap().inodes, 0);
    v.meta.close().await.unwrap();
    assert_eq!(other.orphans(None, 9).await.unwrap().items, vec![file]);
    assert_eq!(other.reap(&[file]).await.unwrap().inodes, 1);
    assert_eq!(other.sessions().await.unwrap()[0].hostname, "b");
}

async fn requests_happen_once(kv: Arc<dyn Kv>) {
    let v = Fixture::new(kv).await;
    let file = v.file(ROOT, "f").await;
    for index in 0..50 {
        let text = format!("l{index}");
        let attr = v.meta.link(LinkArgs { ino: file, parent: ROOT, name: &name(&text) }).await.unwrap();
        assert_eq!(attr.nlink, index + 2);
        v.rename((ROOT, &text), (ROOT, "moved"), RenameMode::NoReplace).await.unwrap();
        v.rename((ROOT, "moved"), (ROOT, &text), RenameMode::NoReplace).await.unwrap();
        v.dir(ROOT, "d").await;
        v.meta.rmdir(ROOT, &name("d")).await.unwrap();
    }
    for index in 0..50 {
        let gone = v.meta.unlink(ROOT, &name(&format!("l{index}"))).await.unwrap();
        assert_eq!(gone.attr.nlink, 50 - index);
    }
    assert_eq!(v.meta.getattr(ROOT).await.unwrap().nlink, 2);
    v.assert_clean().await;
}

#[tokio::test(start_paused = true)]
async fn a_leased_volume_has_one_client_at_a_time() {
    for seed in 0..8 {
        let kv = faulty(seed);
        let clock = Arc::new(ManualClock::new(at(5)));
        Meta::format(&*kv, &FormatOptions::default(), at(5)).await.unwrap();
        let open = async |hostname: &str| {
            let now = clock.now().secs + 1;
            clock.set(at(now));
            let hostname = hostname.to_owned();
            let options = OpenOptions { sharing: Sharing::Leased, hostname, ..OpenOptions::default() };
            Meta::open(Arc::clone(&kv), clock.clone(), &options).await
        };
        let first = open("first").await.unwrap();
        let beats = async {
            loop {
                tokio::time::sleep(HEARTBEAT).await;
                let now = clock.now().secs + 1;
                clock.set(at(now));
                first.heartbeat().await.unwrap();
            }
        };
        let refused = tokio::select! {
            refused = open("second") => refused.err().unwrap(),
            () = beats => unreachable!("it never ends"),
        };
        assert_eq!(refused.kind, ErrorKind::Busy);
        assert!(refused.to_string().contains("first"), "{refused}");
        // Silent from here on: the next one waits, and is let in.
        let third = open("third").await.unwrap();
        assert_eq!(kind_of(first.heartbeat().await), ErrorKind::Stale);
        let alive: Vec<String> = third.sessions().await.unwrap().into_iter().map(|s| s.hostname).collect();
        assert_eq!(alive, ["third"]);
        third.close().await.unwrap();
        let before = tokio::time::Instant::now();
        open("fourth").await.unwrap();
        assert!(before.elapsed() < HEARTBEAT, "after a session that ended nobody waits");
    }
}

#[tokio::test(start_paused = true)]
async fn requests_wait_for_a_free_slot() {
    let v = Fixture::new(Arc::new(MemKv::new())).await;
    let dir = v.dir(ROOT, "d").await;
    let names: Vec<Name> = (0..3000).map(|index| name(&format!("f{index}"))).collect();
    let makes = names.iter().map(|name| {
        let kind = Kind::File;
        v.meta.make(MakeArgs { parent: dir, name, kind, mode: 0, rdev: 0, target: None, caller: &CALLER })
    });
    futures::future::try_join_all(makes).await.unwrap();
    assert_eq!(v.meta.readdir(dir, None, 5000).await.unwrap().items.len(), 3000);
}

async fn the_staging_directory_is_remembered(kv: Arc<dyn Kv>) {
    let clock = Arc::new(ManualClock::new(at(5)));
    Meta::format(&*kv, &FormatOptions::default(), at(5)).await.unwrap();
    assert_eq!(Meta::staging_dir(&*kv).await.unwrap(), None);
    let meta = Meta::open(Arc::clone(&kv), clock, &OpenOptions::default()).await.unwrap();
    let dir = std::path::Path::new("/a disk/staging");
    meta.set_staging_dir(Some(dir)).await.unwrap();
    assert_eq!(Meta::staging_dir(&*kv).await.unwrap().as_deref(), Some(dir));
    assert_eq!(Meta::volume(&*kv).await.unwrap(), Some(meta.opened_volume()));
    meta.set_staging_dir(None).await.unwrap();
    assert_eq!(Meta::staging_dir(&*kv).await.unwrap(), None);
}

#[tokio::test]
async fn a_commit_that_comes_late_conflicts_with_the_next_in_its_slot() {
    let v = Fixture::new(Arc::new(MemKv::new())).await;
    let request = v.meta.session().unwrap().request(v.kv.limits()).await.unwrap();
    let late = v.kv.begin().await.unwrap();
    request.record_in(&*late, Attempt::default(), &1);
    let next = v.kv.begin().await.unwrap();
    let again = Attempt { index: 1, maybe_committed: true };
    assert_eq!(request.answer_in(&*next, again).await.unwrap(), None);
    request.record_in(&*next, again, &2);
    next.commit().await.unwrap();
    assert!(matches!(late.commit().await, Err(KvError::Conflict)));
}

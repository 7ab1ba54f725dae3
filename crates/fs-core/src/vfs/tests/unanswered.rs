//! Changes of the metadata that came about although nobody was told so, and that did not.

use parking_lot::Mutex;
use rfs_kv::{KvError, RangePage, RangeQuery, Txn, Versionstamp};

use super::*;
use crate::meta::HEARTBEAT;

/// How a cluster fares around a commit.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) enum Cluster {
    #[default]
    Up,
    /// The next commit is applied and its answer lost; then it is away.
    LosesAnswer(u32),
    /// The next commit is not answered, and applied only just before the one after it; meanwhile it is away.
    HoldsCommit(u32),
    /// The next commit is applied and answered; then it is away.
    Leaves(u32),
    /// So many transactions cannot begin.
    Away(u32),
    /// It has no room for changes.
    Full,
    /// Nothing becomes durable before it is otherwise.
    Slow,
}

const FOR_LONG: u32 = u32::MAX;

/// An engine that fares so.
pub(super) struct Clustered {
    inner: Arc<dyn Kv>,
    cluster: Arc<Mutex<Cluster>>,
    held: Arc<Mutex<Option<Arc<dyn Txn>>>>,
}

impl Clustered {
    pub(super) fn new(inner: Arc<dyn Kv>, cluster: Arc<Mutex<Cluster>>) -> Clustered {
        Clustered { inner, cluster, held: Arc::default() }
    }
}

#[async_trait]
impl Kv for Clustered {
    fn limits(&self) -> rfs_kv::Limits {
        self.inner.limits()
    }

    async fn begin(&self) -> rfs_kv::Result<Arc<dyn Txn>> {
        if let Cluster::Away(transactions) = &mut *self.cluster.lock()
            && *transactions > 0
        {
            *transactions -= 1;
            return Err(KvError::Unavailable("timed out".to_owned()));
        }
        let inner = self.inner.begin().await?;
        Ok(Arc::new(ClusteredTxn { inner, cluster: Arc::clone(&self.cluster), held: Arc::clone(&self.held) }))
    }

    async fn sync(&self) -> rfs_kv::Result<()> {
        while *self.cluster.lock() == Cluster::Slow {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        self.inner.sync().await
    }

    async fn watch(&self, key: &[u8]) -> rfs_kv::Result<rfs_kv::Watch> {
        self.inner.watch(key).await
    }

    async fn close(&self) -> rfs_kv::Result<()> {
        self.inner.close().await
    }
}

struct ClusteredTxn {
    inner: Arc<dyn Txn>,
    cluster: Arc<Mutex<Cluster>>,
    held: Arc<Mutex<Option<Arc<dyn Txn>>>>,
}

#[async_trait]
impl Txn for ClusteredTxn {
    async fn get(&self, key: &[u8]) -> rfs_kv::Result<Option<Bytes>> {
        self.inner.get(key).await
    }

    async fn snapshot_get(&self, key: &[u8]) -> rfs_kv::Result<Option<Bytes>> {
        self.inner.snapshot_get(key).await
    }

    async fn range(&self, query: RangeQuery) -> rfs_kv::Result<RangePage> {
        self.inner.range(query).await
    }

    fn set(&self, key: &[u8], value: &[u8]) {
        self.inner.set(key, value);
    }

    fn clear(&self, key: &[u8]) {
        self.inner.clear(key);
    }

    fn clear_range(&self, begin: &[u8], end: &[u8]) {
        self.inner.clear_range(begin, end);
    }

    fn add(&self, key: &[u8], delta: i64) {
        self.inner.add(key, delta);
    }

    fn max(&self, key: &[u8], value: &[u8]) {
        self.inner.max(key, value);
    }

    fn set_versionstamped_key(&self, prefix: &[u8], order: u16, suffix: &[u8], value: &[u8]) {
        self.inner.set_versionstamped_key(prefix, order, suffix, value);
    }

    fn set_versionstamped_value(&self, key: &[u8], prefix: &[u8], suffix: &[u8]) {
        self.inner.set_versionstamped_value(key, prefix, suffix);
    }

    fn add_read_conflict(&self, begin: &[u8], end: &[u8]) {
        self.inner.add_read_conflict(begin, end);
    }

    async fn commit(&self) -> rfs_kv::Result<Versionstamp> {
        if *self.cluster.lock() == Cluster::Full {
            return Err(KvError::Full("no room".to_owned()));
        }
        let fares = *self.cluster.lock();
        if let Cluster::HoldsCommit(transactions) = fares {
            *self.held.lock() = Some(Arc::clone(&self.inner));
            *self.cluster.lock() = Cluster::Away(transactions);
            return Err(KvError::MaybeCommitted);
        }
        let held = self.held.lock().take();
        if let Some(held) = held {
            // It may conflict with what was committed before it.
            let _ = held.commit().await;
        }
        let stamp = self.inner.commit().await?;
        let mut cluster = self.cluster.lock();
        match *cluster {
            Cluster::Up | Cluster::Away(_) | Cluster::Full | Cluster::Slow | Cluster::HoldsCommit(_) => {
                Ok(stamp)
            }
            Cluster::Leaves(transactions) => {
                *cluster = Cluster::Away(transactions);
                Ok(stamp)
            }
            Cluster::LosesAnswer(transactions) => {
                *cluster = Cluster::Away(transactions);
                Err(KvError::MaybeCommitted)
            }
        }
    }
}

async fn truncate(vfs: &Vfs, (ino, fh): (Ino, Fh), length: u64) -> Result<Attr> {
    vfs.setattr(&ROOT, ino, size(length), Some(fh)).await
}

/// A file that was 1 MiB and is to be 1000 bytes, which came about although it was told as failed.
async fn cut_unheard(world: &World, vfs: &Vfs) -> (Ino, Fh) {
    let file = create(vfs, "f").await;
    write(vfs, file, 0, Dice(1).bytes(1 << 20)).await.unwrap();
    fsync(vfs, file).await.unwrap();
    world.cluster(Cluster::LosesAnswer(FOR_LONG));
    assert_eq!(truncate(vfs, file, 1000).await.unwrap_err().kind, ErrorKind::Io);
    file
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_fsynced_after_a_truncate_that_was_not_answered_is_there() {
    let world = World::new().await;
    let vfs = world.mount().await;
    let file = cut_unheard(&world, &vfs).await;
    fsync(&vfs, file).await.expect("nothing is dirty");
    let bytes = Dice(2).bytes(100_000);
    write(&vfs, file, 500_000, bytes.clone()).await.unwrap();
    assert_eq!(fsync(&vfs, file).await.unwrap_err().kind, ErrorKind::Io);
    world.cluster(Cluster::Up);
    fsync(&vfs, file).await.unwrap();
    let length = vfs.getattr(file.0).await.unwrap().size;
    crash(vfs).await;
    let vfs = world.mount().await;
    let file = open(&vfs, "f").await;
    assert_eq!(vfs.getattr(file.0).await.unwrap().size, length);
    assert_eq!(read(&vfs, file, 500_000, 100_000).await, bytes);
    assert_eq!(read(&vfs, file, 0, 1000).await, Dice(1).bytes(1000));
    assert!(read(&vfs, file, 1000, 499_000).await.iter().all(|byte| *byte == 0), "cut bytes are back");
    check_accounts(&vfs, &[file.0]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_length_after_a_truncate_that_was_not_answered_is_that_of_the_metadata_in_the_end() {
    let world = World::new().await;
    let vfs = world.mount().await;
    let file = cut_unheard(&world, &vfs).await;
    world.cluster(Cluster::Up);
    truncate(&vfs, file, 2000).await.unwrap();
    assert_eq!(read(&vfs, file, 0, 4000).await, [Dice(1).bytes(1000), vec![0; 1000]].concat());
    check_accounts(&vfs, &[file.0]).await;
    world.cluster(Cluster::LosesAnswer(FOR_LONG));
    assert_eq!(truncate(&vfs, file, 3000).await.unwrap_err().kind, ErrorKind::Io);
    world.cluster(Cluster::Up);
    write(&vfs, file, 0, vec![1; 10]).await.unwrap();
    fsync(&vfs, file).await.unwrap();
    assert_eq!(vfs.getattr(file.0).await.unwrap().size, 3000);
    unmount(vfs).await;
    let vfs = world.mount().await;
    assert_eq!(vfs.getattr(file.0).await.unwrap().size, 3000);
}

/// More chunks than one transaction removes: the file is cut by the first, the others make room.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_truncate_succeeds_once_the_file_is_cut() {
    let world = World::new().await;
    let vfs = world.mount().await;
    let file = create(&vfs, "f").await;
    for chunk in 0..600 {
        write(&vfs, file, chunk * CHUNK_BYTES, vec![1; 5000]).await.unwrap();
    }
    fsync(&vfs, file).await.unwrap();
    world.cluster(Cluster::Leaves(FOR_LONG));
    assert_eq!(truncate(&vfs, file, 1000).await.unwrap().size, 1000);
    world.cluster(Cluster::Up);
    let bytes = Dice(2).bytes(100_000);
    write(&vfs, file, 500_000, bytes.clone()).await.unwrap();
    fsync(&vfs, file).await.unwrap();
    crash(vfs).await;
    let vfs = world.mount().await;
    let file = open(&vfs, "f").await;
    assert_eq!(read(&vfs, file, 500_000, 200_000).await, bytes);
    truncate(&vfs, file, 600 * CHUNK_BYTES).await.unwrap();
    assert!(read(&vfs, file, CHUNK_BYTES, 5000).await.iter().all(|byte| *byte == 0), "cut bytes are back");
    check_accounts(&vfs, &[file.0]).await;
}

/// A new file of 1 MiB, which is committed although that was told as failed.
async fn commit_unheard(world: &World, vfs: &Vfs, name: &str) -> (Ino, Fh) {
    let file = create(vfs, name).await;
    write(vfs, file, 0, Dice(1).bytes(1 << 20)).await.unwrap();
    world.cluster(Cluster::LosesAnswer(FOR_LONG));
    assert_eq!(fsync(vfs, file).await.unwrap_err().kind, ErrorKind::Io);
    world.cluster(Cluster::Up);
    file
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_truncate_cuts_what_was_committed_without_an_answer() {
    let world = World::new().await;
    let vfs = world.mount().await;
    let file = commit_unheard(&world, &vfs, "f").await;
    truncate(&vfs, file, 1 << 19).await.unwrap();
    truncate(&vfs, file, 1 << 20).await.unwrap();
    fsync(&vfs, file).await.unwrap();
    assert_eq!(read(&vfs, file, 0, 1 << 19).await, Dice(1).bytes(1 << 19));
    let beyond = read(&vfs, file, 1 << 19, 1 << 19).await;
    assert!(beyond.len() == 1 << 19 && beyond.iter().all(|byte| *byte == 0), "cut bytes are back");
    check_accounts(&vfs, &[file.0]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_committed_without_an_answer_is_counted_once() {
    let world = World::new().await;
    let vfs = world.mount().await;
    let file = commit_unheard(&world, &vfs, "f").await;
    fsync(&vfs, file).await.unwrap();
    check_accounts(&vfs, &[file.0]).await;
}

#[tokio::test]
async fn what_is_committed_late_is_counted_once() {
    let world = World::new().await;
    let vfs = world.mount().await;
    let file = create(&vfs, "f").await;
    write(&vfs, file, 0, Dice(1).bytes(1 << 20)).await.unwrap();
    world.cluster(Cluster::HoldsCommit(FOR_LONG));
    assert_eq!(fsync(&vfs, file).await.unwrap_err().kind, ErrorKind::Io);
    world.cluster(Cluster::Up);
    fsync(&vfs, file).await.unwrap();
    check_accounts(&vfs, &[file.0]).await;
}

#[tokio::test(start_paused = true)]
async fn what_came_about_without_an_answer_counts_against_the_capacity() {
    let limits = VolumeLimits { capacity: Some(3 << 20), inodes: Some(100) };
    let mut world = World::with_limits(limits).await;
    world.options.heartbeat = true;
    let vfs = world.mount().await;
    // Between two heartbeats, so that it is not their answer that is lost.
    let soon = || tokio::time::sleep(HEARTBEAT * 5 / 2);
    soon().await;
    let file = commit_unheard(&world, &vfs, "f").await;
    fsync(&vfs, file).await.unwrap();
    soon().await;
    assert_eq!(vfs.meta.bytes_left(), Some(2 << 20));
    let error = write(&vfs, file, 1 << 20, Dice(2).bytes(5 << 19)).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::NoSpace);

    world.cluster(Cluster::LosesAnswer(FOR_LONG));
    assert_eq!(truncate(&vfs, file, 1 << 19).await.unwrap_err().kind, ErrorKind::Io);
    soon().await;
    world.cluster(Cluster::Up);
    soon().await;
    assert_eq!(vfs.meta.bytes_left(), Some(5 << 19));
    write(&vfs, file, 1 << 19, Dice(2).bytes(5 << 19)).await.expect("there is room");
    fsync(&vfs, file).await.unwrap();
    check_accounts(&vfs, &[file.0]).await;

    vfs.unlink(Ino::ROOT, &name("f")).await.unwrap();
    vfs.release(file.1).await.unwrap();
    world.cluster(Cluster::LosesAnswer(FOR_LONG));
    vfs.forget(file.0, 1);
    soon().await;
    world.cluster(Cluster::Up);
    soon().await;
    assert_eq!(vfs.meta.bytes_left(), Some(3 << 20));
    unmount(vfs).await;
}

#[tokio::test]
async fn files_that_were_committed_together_without_an_answer_are_counted_once() {
    let world = World::new().await;
    let vfs = world.mount().await;
    let mut files = Vec::new();
    for text in ["a", "b", "c"] {
        let file = create(&vfs, text).await;
        write(&vfs, file, 0, Dice(1).bytes(50_000)).await.unwrap();
        files.push(file);
    }
    world.cluster(Cluster::LosesAnswer(1));
    vfs.flush_everything().await.expect("each is looked at and tried alone");
    assert_eq!(*world.cluster.lock(), Cluster::Away(0));
    let inos: Vec<Ino> = files.iter().map(|file| file.0).collect();
    check_accounts(&vfs, &inos).await;
    for file in &files {
        write(&vfs, *file, 100_000, Dice(2).bytes(50_000)).await.unwrap();
    }
    world.cluster(Cluster::LosesAnswer(FOR_LONG));
    assert_eq!(vfs.flush_everything().await.unwrap_err().kind, ErrorKind::Io);
    for file in files {
        assert!(vfs.inodes.get(file.0).unwrap().state().failure.is_some());
    }
    world.cluster(Cluster::Up);
    vfs.flush_everything().await.unwrap();
    check_accounts(&vfs, &inos).await;
}

/// One of the files that are flushed together needs more than one transaction.
#[tokio::test]
async fn a_flush_that_is_refused_tells_who_waits() {
    let world = World::new().await;
    let vfs = world.mount().await;
    let (small, scattered) = (create(&vfs, "a").await, create(&vfs, "b").await);
    write(&vfs, small, 0, Dice(1).bytes(5000)).await.unwrap();
    for piece in 0..8000 {
        write(&vfs, scattered, piece * 1024, Dice(piece).bytes(512)).await.unwrap();
    }
    for (fares, kind) in [(Cluster::Full, ErrorKind::NoSpace), (Cluster::Away(FOR_LONG), ErrorKind::Io)] {
        world.cluster(fares);
        let flushed = tokio::time::timeout(Duration::from_secs(20), vfs.flush_everything()).await;
        assert_eq!(flushed.expect("whoever waits is told").unwrap_err().kind, kind);
    }
    world.cluster(Cluster::Up);
    vfs.flush_everything().await.unwrap();
    check_accounts(&vfs, &[small.0, scattered.0]).await;
}

#[tokio::test]
async fn a_failure_after_the_bytes_of_an_fsync_are_stored_is_told_by_close() {
    let mut world = World::new().await;
    world.io_timeout = Duration::from_millis(100);
    let vfs = world.mount().await;
    let file = create(&vfs, "f").await;
    world.cluster(Cluster::Slow);
    let fails = async {
        write(&vfs, file, 0, Dice(1).bytes(100_000)).await.unwrap();
        world.store.down.store(true, Ordering::SeqCst);
        vfs.flush_everything().await.unwrap_err();
        world.cluster(Cluster::Up);
    };
    let (fsynced, ()) = futures::join!(fsync(&vfs, file), fails);
    fsynced.expect("nothing was dirty");
    assert_eq!(vfs.flush(file.0, file.1).await.unwrap_err().kind, ErrorKind::Io);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bytes_can_be_read_though_it_is_not_known_what_follows_them() {
    let world = World::new().await;
    let vfs = world.mount().await;
    let file = create(&vfs, "f").await;
    write(&vfs, file, CHUNK_BYTES - (2 << 20), Dice(1).bytes(4 << 20)).await.unwrap();
    unmount(vfs).await;
    let vfs = world.mount().await;
    let file = open(&vfs, "f").await;
    for part in 0..16 {
        let got = vfs.read(file.0, file.1, CHUNK_BYTES - (2 << 20) + (part << 17), 1 << 17).await;
        assert_eq!(got.unwrap().len(), 1 << 17, "part {part}");
        world.cluster(Cluster::Away(FOR_LONG));
    }
    assert_eq!(vfs.read(file.0, file.1, CHUNK_BYTES, 1 << 17).await.unwrap_err().kind, ErrorKind::Io);
}

//! The metadata's suites: each is a function over an engine, run for all of them.

mod attributes;
mod check;
mod conflicts;
mod contents;
mod cost;
mod model;
mod namespace;
mod sessions;

use std::sync::Arc;

use rfs_kv::{FaultKv, Faults, Kv, MemKv};

use super::*;
use crate::types::{Caller, ManualClock, SetAttr};

const ROOT: Ino = Ino::ROOT;
const CALLER: Caller = Caller { uid: 1000, gid: 1000, pid: 1 };

fn name(text: &str) -> Name {
    Name::new(text.to_owned()).unwrap()
}

fn at(secs: i64) -> Timestamp {
    Timestamp { secs, nanos: 7 }
}

/// A formatted volume and its clock.
struct Fixture {
    kv: Arc<dyn Kv>,
    meta: Meta,
    clock: Arc<ManualClock>,
}

impl Fixture {
    async fn new(kv: Arc<dyn Kv>) -> Fixture {
        Fixture::with_limits(kv, VolumeLimits::default()).await
    }

    async fn with_limits(kv: Arc<dyn Kv>, limits: VolumeLimits) -> Fixture {
        let clock = Arc::new(ManualClock::new(at(1000)));
        let options = FormatOptions { limits, ..FormatOptions::default() };
        Meta::format(&*kv, &options, at(1000)).await.unwrap();
        let meta = Meta::open(Arc::clone(&kv), clock.clone(), &OpenOptions::default()).await.unwrap();
        Fixture { kv, meta, clock }
    }

    async fn reopen(&self) -> Meta {
        Meta::open(Arc::clone(&self.kv), self.clock.clone(), &OpenOptions::default()).await.unwrap()
    }

    fn tick(&self) -> Timestamp {
        let now = at(self.clock.now().secs + 1);
        self.clock.set(now);
        now
    }

    async fn make(&self, parent: Ino, text: &str, kind: Kind) -> Result<Attr> {
        let name = name(text);
        let target: Option<&[u8]> = (kind == Kind::Symlink).then_some(b"target");
        let caller = &CALLER;
        self.meta.make(MakeArgs { parent, name: &name, kind, mode: 0o755, rdev: 0, target, caller }).await
    }

    async fn dir(&self, parent: Ino, text: &str) -> Ino {
        self.make(parent, text, Kind::Directory).await.unwrap().ino
    }

    async fn file(&self, parent: Ino, text: &str) -> Ino {
        self.make(parent, text, Kind::File).await.unwrap().ino
    }

    async fn rename(&self, from: (Ino, &str), to: (Ino, &str), mode: RenameMode) -> Result<Renamed> {
        let (old, new) = (name(from.1), name(to.1));
        let args = RenameArgs { parent: from.0, name: &old, new_parent: to.0, new_name: &new, mode };
        self.meta.rename(args).await
    }

    async fn set(&self, ino: Ino, set: SetAttr) -> Result<Attr> {
        let root = Caller { uid: 0, gid: 0, pid: 1 };
        let membership = Membership::CheckedByKernel;
        self.meta.setattr(SetattrArgs { ino, set: &set, caller: &root, membership, written: None }).await
    }

    async fn assert_clean(&self) {
        let report = self.meta.check(&CheckProgress::default()).await.unwrap();
        assert_eq!(report.findings, vec![]);
    }
}

fn kind_of<T: std::fmt::Debug>(result: Result<T>) -> ErrorKind {
    result.unwrap_err().kind
}

/// Runs a suite on every engine.
macro_rules! on_every_engine {
    ($($suite:ident),* $(,)?) => {
        mod on_memory {
            $(#[tokio::test(start_paused = true)]
            async fn $suite() {
                super::$suite(std::sync::Arc::new(rfs_kv::MemKv::new())).await;
            })*
        }
        mod with_faults {
            $(#[tokio::test(start_paused = true)]
            async fn $suite() {
                for seed in 0..8 {
                    super::$suite(crate::meta::tests::faulty(seed)).await;
                }
            })*
        }
        mod on_redb {
            $(#[tokio::test]
            async fn $suite() {
                let dir = tempfile::tempdir().unwrap();
                super::$suite(crate::meta::tests::redb(dir.path())).await;
            })*
        }
    };
}
use on_every_engine;

/// The engine of local volumes, in `dir`.
fn redb(dir: &std::path::Path) -> Arc<dyn Kv> {
    let options = rfs_meta_redb::RedbOptions::default();
    Arc::new(rfs_meta_redb::RedbKv::create(dir.join("meta.redb"), options).unwrap())
}

/// An engine with a tenth of the commits in conflict, and a tenth with an unknown outcome of either kind.
fn faulty(seed: u64) -> Arc<dyn Kv> {
    Arc::new(FaultKv::new(Arc::new(MemKv::new()), seed, Faults::RETRYABLE))
}

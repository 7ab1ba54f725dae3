//! Which operations conflict, and which must not.

use std::future::Future;

use rfs_kv::{KvError, Txn};

use super::contents::{new_pack, packed, write};
use super::*;
use crate::meta::ops::{atime, commit, link, make, reap, rename, rmdir, setattr, truncate, unlink};
use crate::types::{PackId, SetAttr};

const SESSION: SessionId = SessionId(1);
const PACK: PackId = PackId(1 << 32);

/// Runs both on the same state, commits both, and returns how the second commit went.
async fn race<A, B, FA, FB>(v: &Fixture, a: A, b: B) -> Result<(), KvError>
where
    A: FnOnce(Arc<dyn Txn>) -> FA,
    B: FnOnce(Arc<dyn Txn>) -> FB,
    FA: Future<Output = ()>,
    FB: Future<Output = ()>,
{
    let (first, second) = (v.kv.begin().await.unwrap(), v.kv.begin().await.unwrap());
    a(Arc::clone(&first)).await;
    b(Arc::clone(&second)).await;
    first.commit().await.unwrap();
    second.commit().await.map(drop)
}

macro_rules! assert_conflict {
    ($v:expr, $a:expr, $b:expr) => {
        assert!(matches!(race($v, $a, $b).await, Err(KvError::Conflict)))
    };
}

macro_rules! assert_no_conflict {
    ($v:expr, $a:expr, $b:expr) => {
        assert!(race($v, $a, $b).await.is_ok())
    };
}

async fn volume() -> Fixture {
    Fixture::new(Arc::new(MemKv::new())).await
}

fn create(
    dir: Ino,
    text: &'static str,
    ino: u64,
) -> impl FnOnce(Arc<dyn Txn>) -> futures::future::BoxFuture<'static, ()> {
    move |txn| {
        Box::pin(async move {
            let name = name(text);
            let kind = Kind::File;
            let args =
                MakeArgs { parent: dir, name: &name, kind, mode: 0, rdev: 0, target: None, caller: &CALLER };
            make::make_in(&*txn, &args, Ino(ino), at(1), SESSION).await.unwrap();
        })
    }
}

fn remove_dir(
    dir: Ino,
    text: &'static str,
) -> impl FnOnce(Arc<dyn Txn>) -> futures::future::BoxFuture<'static, ()> {
    move |txn| {
        Box::pin(async move {
            rmdir::rmdir_in(&*txn, dir, &name(text), at(1), SESSION).await.unwrap();
        })
    }
}

fn remove(
    dir: Ino,
    text: &'static str,
) -> impl FnOnce(Arc<dyn Txn>) -> futures::future::BoxFuture<'static, ()> {
    move |txn| {
        Box::pin(async move {
            unlink::unlink_in(&*txn, dir, &name(text), at(1), SESSION).await.unwrap();
        })
    }
}

fn move_to(
    from: (Ino, &'static str),
    to: (Ino, &'static str),
) -> impl FnOnce(Arc<dyn Txn>) -> futures::future::BoxFuture<'static, ()> {
    move |txn| {
        Box::pin(async move {
            let (old, new) = (name(from.1), name(to.1));
            let mode = RenameMode::Replace;
            let args = RenameArgs { parent: from.0, name: &old, new_parent: to.0, new_name: &new, mode };
            rename::rename_in(&*txn, &args, at(1), SESSION).await.unwrap();
        })
    }
}

fn chmod(ino: Ino) -> impl FnOnce(Arc<dyn Txn>) -> futures::future::BoxFuture<'static, ()> {
    move |txn| {
        Box::pin(async move {
            let set = SetAttr { mode: Some(0o700), ..SetAttr::default() };
            let membership = Membership::CheckedByKernel;
            let args = SetattrArgs { ino, set: &set, caller: &CALLER, membership, written: None };
            setattr::setattr_in(&*txn, &args, at(1)).await.unwrap();
        })
    }
}

fn read_at(ino: Ino) -> impl FnOnce(Arc<dyn Txn>) -> futures::future::BoxFuture<'static, ()> {
    move |txn| Box::pin(async move { atime::touch_atime_in(&*txn, ino, at(9)).await.unwrap() })
}

fn append(ino: Ino, chunk: u64) -> impl FnOnce(Arc<dyn Txn>) -> futures::future::BoxFuture<'static, ()> {
    move |txn| {
        Box::pin(async move {
            let files = [write(ino, chunk, vec![packed(PACK, 0)], 4096)];
            commit::commit_in(&*txn, &files, &[new_pack(PACK)], SESSION).await.unwrap();
        })
    }
}

fn shorten(ino: Ino) -> impl FnOnce(Arc<dyn Txn>) -> futures::future::BoxFuture<'static, ()> {
    move |txn| {
        Box::pin(async move {
            let args = TruncateArgs {
                ino,
                size: 0,
                allocated_delta: 0,
                cut: None,
                mtime: None,
                ctime: None,
                kill_suid_sgid: false,
            };
            truncate::truncate_in(&*txn, &args, at(1), SESSION).await.unwrap();
        })
    }
}

#[tokio::test]
async fn creations_in_one_directory_do_not_conflict() {
    let v = volume().await;
    let dir = v.dir(ROOT, "d").await;
    assert_no_conflict!(&v, create(dir, "a", 9001), create(dir, "b", 9002));
    assert_no_conflict!(&v, create(dir, "c", 9003), remove(dir, "a"));
    assert_no_conflict!(&v, create(dir, "d", 9004), read_at(dir));
    assert_conflict!(&v, create(dir, "e", 9005), create(dir, "e", 9006));
}

#[tokio::test]
async fn creation_and_removal_of_the_directory_conflict() {
    let v = volume().await;
    let dir = v.dir(ROOT, "d").await;
    assert_conflict!(&v, create(dir, "a", 9001), remove_dir(ROOT, "d"));
    v.meta.unlink(dir, &name("a")).await.unwrap();
    assert_conflict!(&v, remove_dir(ROOT, "d"), create(dir, "b", 9002));
    let other = v.dir(ROOT, "e").await;
    v.file(ROOT, "f").await;
    assert_conflict!(&v, remove_dir(ROOT, "e"), move_to((ROOT, "f"), (other, "f")));
}

#[tokio::test]
async fn a_directory_that_becomes_set_group_id_conflicts_with_creations_in_it() {
    let v = volume().await;
    let dir = v.dir(ROOT, "d").await;
    assert_conflict!(&v, chmod(dir), create(dir, "a", 9001));
}

#[tokio::test]
async fn two_renames_cannot_make_a_loop() {
    let v = volume().await;
    let a = v.dir(ROOT, "a").await;
    let b = v.dir(ROOT, "b").await;
    assert_conflict!(&v, move_to((ROOT, "a"), (b, "a")), move_to((ROOT, "b"), (a, "b")));
    // The same through an ancestor in between.
    let v = volume().await;
    let a = v.dir(ROOT, "a").await;
    let b = v.dir(ROOT, "b").await;
    let in_a = v.dir(a, "x").await;
    let in_b = v.dir(b, "y").await;
    assert_conflict!(&v, move_to((ROOT, "a"), (in_b, "a")), move_to((ROOT, "b"), (in_a, "b")));
    v.assert_clean().await;
}

#[tokio::test]
async fn renames_elsewhere_do_not_conflict() {
    let v = volume().await;
    let a = v.dir(ROOT, "a").await;
    let b = v.dir(ROOT, "b").await;
    v.file(a, "x").await;
    v.file(b, "y").await;
    assert_no_conflict!(&v, move_to((a, "x"), (a, "x2")), move_to((b, "y"), (b, "y2")));
    assert_no_conflict!(&v, move_to((a, "x2"), (b, "x")), move_to((b, "y2"), (a, "y")));
    v.assert_clean().await;
}

#[tokio::test]
async fn changes_of_one_name_conflict() {
    let v = volume().await;
    v.file(ROOT, "f").await;
    assert_conflict!(&v, remove(ROOT, "f"), move_to((ROOT, "f"), (ROOT, "g")));
    let file = v.file(ROOT, "f").await;
    assert_conflict!(&v, remove(ROOT, "f"), |txn: Arc<dyn Txn>| async move {
        let args = LinkArgs { ino: file, parent: ROOT, name: &name("l") };
        link::link_in(&*txn, &args, at(1)).await.unwrap();
    });
}

#[tokio::test]
async fn commits_are_blind_and_see_truncations() {
    let v = volume().await;
    let file = v.file(ROOT, "f").await;
    assert_no_conflict!(&v, append(file, 0), append(file, 0));
    assert_no_conflict!(&v, append(file, 0), read_at(file));
    assert_no_conflict!(&v, append(file, 1), create(ROOT, "x", 9001));
    assert_conflict!(&v, shorten(file), append(file, 0));
    assert_conflict!(&v, append(file, 0), shorten(file));
    v.assert_clean().await;
}

#[tokio::test]
async fn removing_an_inode_conflicts_with_commits_to_it() {
    let v = volume().await;
    let file = v.file(ROOT, "f").await;
    v.meta.unlink(ROOT, &name("f")).await.unwrap();
    let session = v.meta.session_id().unwrap();
    let remove = |txn: Arc<dyn Txn>| async move {
        reap::reap_in(&*txn, &[file], session).await.unwrap();
    };
    assert_conflict!(&v, append(file, 0), remove);
    assert_conflict!(&v, remove, append(file, 0));
    assert_eq!(v.meta.statfs().await.unwrap().used_bytes, 0);
}

#[tokio::test]
async fn a_dead_session_cannot_commit() {
    let v = volume().await;
    let txn = v.kv.begin().await.unwrap();
    create(ROOT, "a", 9001)(Arc::clone(&txn)).await;
    v.meta.session().unwrap().check_in(&*txn).await.unwrap();
    v.reopen().await;
    assert!(matches!(txn.commit().await, Err(KvError::Conflict)));
    assert_eq!(kind_of(v.make(ROOT, "b", Kind::File).await), ErrorKind::Stale);
}

//! Every kind of damage is found, and mended.

use rfs_kv::{Txn, transact};

use super::contents::{new_pack, packed, write};
use super::*;
use crate::meta::key::{self, Field};
use crate::meta::record::{DentryRecord, Inode};
use crate::types::{CHUNK_BYTES, ChunkIndex, PackId};

const PACK: PackId = PackId(1 << 32);

/// A volume with some of everything.
struct Sample {
    v: Fixture,
    dir: Ino,
    sub: Ino,
    file: Ino,
}

async fn sample() -> Sample {
    let v = Fixture::new(Arc::new(MemKv::new())).await;
    let dir = v.dir(ROOT, "dir").await;
    let sub = v.dir(dir, "sub").await;
    let file = v.file(dir, "file").await;
    v.meta.commit(&[write(file, 0, vec![packed(PACK, 0)], 4096)], &[new_pack(PACK)]).await.unwrap();
    v.meta.setxattr(file, b"user.a", b"1", XattrMode::Either).await.unwrap();
    v.assert_clean().await;
    Sample { v, dir, sub, file }
}

impl Sample {
    /// Damages the volume behind the filesystem's back.
    async fn damage(&self, change: impl Fn(&dyn Txn) + Sync) {
        let change = &change;
        transact(&*self.v.kv, |txn, _| async move {
            change(&*txn);
            Ok::<_, Error>(())
        })
        .await
        .unwrap();
    }

    async fn inode(&self, ino: Ino) -> Inode {
        let txn = self.v.kv.begin().await.unwrap();
        Inode::decode(&txn.get(&key::inode(ino, Field::Inode)).await.unwrap().unwrap()).unwrap()
    }

    async fn findings(&self) -> Vec<Finding> {
        self.v.meta.check(&CheckProgress::default()).await.unwrap().findings
    }

    /// The check finds `expected` among others, and repairs end with a clean volume.
    async fn assert_found_and_mended(&self, expected: Finding) {
        let mut findings = self.findings().await;
        assert!(findings.contains(&expected), "{expected:?} is not in {findings:?}");
        for _ in 0..5 {
            let repaired = self.v.meta.repair(&findings).await.unwrap();
            assert_eq!(repaired.mended.len() + repaired.outdated.len(), findings.len());
            let orphans = self.v.meta.orphans(None, 100).await.unwrap().items;
            self.v.meta.reap(&orphans).await.unwrap();
            findings = self.findings().await;
            if findings.is_empty() {
                return;
            }
        }
        panic!("still there: {findings:?}");
    }
}

fn dentry(txn: &dyn Txn, dir: Ino, text: &str, ino: Ino, kind: Kind) {
    txn.set(&key::dentry(dir, &name(text)), &DentryRecord { ino, kind }.encode());
}

#[tokio::test]
async fn dangling_dentries() {
    let s = sample().await;
    s.damage(|txn| dentry(txn, s.dir, "x", Ino(77), Kind::File)).await;
    let (dir, name) = (s.dir, name("x"));
    s.assert_found_and_mended(Finding::DanglingDentry { dir, name, ino: Ino(77) }).await;
}

#[tokio::test]
async fn dentries_outside_directories() {
    let s = sample().await;
    s.damage(|txn| dentry(txn, s.file, "x", s.sub, Kind::Directory)).await;
    let finding = Finding::DentryOutsideDirectory { dir: s.file, name: name("x"), ino: s.sub };
    s.assert_found_and_mended(finding).await;
}

#[tokio::test]
async fn wrong_kinds() {
    let s = sample().await;
    s.damage(|txn| dentry(txn, s.dir, "file", s.file, Kind::Fifo)).await;
    let finding = Finding::WrongKind { dir: s.dir, name: name("file"), ino: s.file, actual: Kind::File };
    s.assert_found_and_mended(finding).await;
}

#[tokio::test]
async fn second_names_and_wrong_parents_of_directories() {
    let s = sample().await;
    s.damage(|txn| dentry(txn, ROOT, "again", s.sub, Kind::Directory)).await;
    s.assert_found_and_mended(Finding::SecondName { dir: ROOT, name: name("again"), ino: s.sub }).await;
    let inode = s.inode(s.sub).await;
    s.damage(|txn| {
        let inode = Inode { parent: Ino(5), ..inode };
        txn.set(&key::inode(s.sub, Field::Inode), &inode.encode());
    })
    .await;
    s.assert_found_and_mended(Finding::WrongParent { ino: s.sub, stored: Ino(5), actual: s.dir }).await;
    assert_eq!(s.v.meta.getattr_and_parent(s.sub).await.unwrap().1, s.dir);
}

#[tokio::test]
async fn wrong_links_and_subdirectories() {
    let s = sample().await;
    let inode = s.inode(s.file).await;
    s.damage(|txn| {
        txn.set(&key::inode(s.file, Field::Inode), &Inode { nlink: 9, ..inode }.encode());
        txn.add(&key::inode(s.dir, Field::Subdirectories), 3);
    })
    .await;
    let finding = Finding::WrongSubdirectories { ino: s.dir, stored: 4, counted: 1 };
    assert!(s.findings().await.contains(&finding));
    s.assert_found_and_mended(Finding::WrongNlink { ino: s.file, stored: 9, counted: 1 }).await;
    assert_eq!(s.v.meta.getattr(s.file).await.unwrap().nlink, 1);
}

#[tokio::test]
async fn inodes_without_a_name_are_found_again() {
    let s = sample().await;
    s.damage(|txn| {
        txn.clear(&key::dentry(s.dir, &name("file")));
        txn.clear(&key::dentry(ROOT, &name("dir")));
    })
    .await;
    let finding = Finding::Unreachable { ino: s.dir, kind: Kind::Directory };
    s.assert_found_and_mended(finding).await;
    let lost = s.v.meta.lookup(ROOT, &name("lost+found")).await.unwrap().ino;
    let file = s.v.meta.lookup(lost, &name(&format!("ino-{}", s.file))).await.unwrap();
    assert_eq!((file.ino, file.size, file.nlink), (s.file, 4096, 1));
    assert_eq!(s.v.meta.getattr_and_parent(s.sub).await.unwrap().1, s.dir);
    assert_eq!(s.v.meta.getattr_and_parent(s.dir).await.unwrap().1, lost);
}

#[tokio::test]
async fn loops_of_directories_are_cut() {
    let s = sample().await;
    let inode = s.inode(s.dir).await;
    s.damage(|txn| {
        txn.clear(&key::dentry(ROOT, &name("dir")));
        dentry(txn, s.sub, "up", s.dir, Kind::Directory);
        txn.set(&key::inode(s.dir, Field::Inode), &Inode { parent: s.sub, ..inode }.encode());
    })
    .await;
    let finding = Finding::Unreachable { ino: s.dir.min(s.sub), kind: Kind::Directory };
    s.assert_found_and_mended(finding).await;
}

#[tokio::test]
async fn a_removed_directory_with_entries_comes_back() {
    let s = sample().await;
    let inode = s.inode(s.dir).await;
    s.damage(|txn| {
        txn.clear(&key::dentry(ROOT, &name("dir")));
        txn.set(&key::inode(s.dir, Field::Inode), &Inode { nlink: 0, ..inode }.encode());
    })
    .await;
    s.assert_found_and_mended(Finding::Unreachable { ino: s.dir, kind: Kind::Directory }).await;
    s.v.meta.lookup(s.dir, &name("file")).await.unwrap();
}

#[tokio::test]
async fn orphans_without_a_record_and_records_without_an_orphan() {
    let s = sample().await;
    let session = s.v.meta.session_id().unwrap();
    s.v.meta.unlink(s.dir, &name("file")).await.unwrap();
    s.damage(|txn| {
        txn.clear(&key::orphan(s.file, session));
        txn.set(&key::orphan(s.dir, session), &record::encode_orphan());
    })
    .await;
    let stale = Finding::StaleOrphanRecord { ino: s.dir, session };
    assert!(s.findings().await.contains(&stale));
    s.assert_found_and_mended(Finding::OrphanWithoutRecord { ino: s.file }).await;
    assert_eq!(kind_of(s.v.meta.getattr(s.file).await), ErrorKind::Stale);
}

#[tokio::test]
async fn strays_of_lost_inodes() {
    let s = sample().await;
    s.damage(|txn| txn.clear(&key::inode(s.file, Field::Inode))).await;
    let findings = s.findings().await;
    assert!(findings.contains(&Finding::StrayXattrs { ino: s.file }));
    assert!(findings.contains(&Finding::StraySlices { ino: s.file }));
    assert!(findings.contains(&Finding::WrongBytesUsed { stored: 4096, counted: 0 }));
    assert!(findings.contains(&Finding::WrongInodesUsed { stored: 4, counted: 3 }));
    s.assert_found_and_mended(Finding::StrayAttributes { ino: s.file }).await;
    let statfs = s.v.meta.statfs().await.unwrap();
    assert_eq!((statfs.used_bytes, statfs.inodes_used), (0, 3));
}

#[tokio::test]
async fn slices_beyond_the_end() {
    let s = sample().await;
    let slices = record::encode_groups(&[packed(PACK, 0)]).unwrap();
    s.damage(|txn| {
        let prefix = key::chunk_prefix(s.file, ChunkIndex(4));
        txn.set_versionstamped_key(&prefix, 0, &[], &slices[0]);
        txn.add(&key::pack_live(PACK), 1000);
    })
    .await;
    let finding = Finding::SlicesBeyondEnd { ino: s.file, from: ChunkIndex(1) };
    s.assert_found_and_mended(finding).await;
    assert_eq!(s.v.meta.getattr(s.file).await.unwrap().size, 4096);
    assert_eq!(s.v.meta.chunk(s.file, ChunkIndex(0)).await.unwrap().len(), 1);
    const { assert!(CHUNK_BYTES > 4096) };
}

#[tokio::test]
async fn wrong_accounts() {
    let s = sample().await;
    s.damage(|txn| {
        txn.add(&key::pack_live(PACK), 5);
        txn.add(&key::usage(key::Counter::Inodes, SessionId(9)), -2);
    })
    .await;
    let finding = Finding::WrongInodesUsed { stored: 2, counted: 4 };
    assert!(s.findings().await.contains(&finding));
    s.assert_found_and_mended(Finding::WrongPackLive { pack: PACK, stored: 1005, counted: 1000 }).await;
    s.damage(|txn| txn.clear(&key::pack(PACK))).await;
    s.assert_found_and_mended(Finding::PackWithoutRecord { pack: PACK, live: 1000 }).await;
    let allocated = Finding::WrongAllocated { ino: s.file, stored: 4096, counted: 8192 };
    let repaired = s.v.meta.repair(&[allocated]).await.unwrap();
    assert_eq!(repaired.mended.len(), 1);
    assert_eq!(s.v.meta.getattr(s.file).await.unwrap().allocated, 8192);
    s.v.assert_clean().await;
}

#[tokio::test]
async fn a_lost_root() {
    let s = sample().await;
    s.damage(|txn| txn.clear(&key::inode(ROOT, Field::Inode))).await;
    s.assert_found_and_mended(Finding::RootMissing).await;
    assert_eq!(s.v.meta.lookup(ROOT, &name("dir")).await.unwrap().ino, s.dir);
}

#[tokio::test]
async fn outdated_findings_change_nothing() {
    let s = sample().await;
    let outdated = [
        Finding::RootMissing,
        Finding::DanglingDentry { dir: s.dir, name: name("file"), ino: s.file },
        Finding::WrongNlink { ino: s.file, stored: 5, counted: 7 },
        Finding::OrphanWithoutRecord { ino: s.file },
        Finding::StrayAttributes { ino: s.file },
        Finding::WrongPackLive { pack: PACK, stored: 5, counted: 0 },
    ];
    let repaired = s.v.meta.repair(&outdated).await.unwrap();
    assert_eq!(repaired.outdated, outdated);
    s.v.assert_clean().await;
}

#[tokio::test]
async fn scans_see_everything_in_pages() {
    let v = Fixture::new(Arc::new(MemKv::new())).await;
    for index in 0..150 {
        v.file(ROOT, &format!("f{index:03}")).await;
    }
    for limit in [1, 7, 64, 1000] {
        let mut inos = Vec::new();
        let mut after = None;
        loop {
            let page = v.meta.scan_inodes(after, limit).await.unwrap();
            assert!(page.items.len() <= limit);
            inos.extend(page.items.iter().map(|inode| inode.attr.ino));
            after = page.items.last().map(|inode| inode.attr.ino);
            if !page.more {
                break;
            }
        }
        assert_eq!(inos.len(), 151);
        assert!(inos.is_sorted());
    }
    let report = v.meta.check(&CheckProgress::default()).await.unwrap();
    assert_eq!((report.inodes, report.dentries), (151, 150));
}

#[tokio::test]
async fn records_that_do_not_decode_are_all_named_and_left_alone() {
    let s = sample().await;
    s.damage(|txn| {
        txn.set(&key::inode(s.sub, Field::Inode), b"?");
        txn.set(&key::dentry(s.dir, &name("x")), b"");
        txn.set(&key::pack(PACK), b"??");
    })
    .await;
    let findings = s.findings().await;
    let owners: Vec<Option<Ino>> = findings
        .iter()
        .map(|finding| match finding {
            Finding::Undecodable { ino, error } => {
                assert!(error.contains("record"), "{error}");
                *ino
            }
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(owners, [Some(s.sub), Some(s.dir), None]);
    let repaired = s.v.meta.repair(&findings).await.unwrap();
    assert_eq!((repaired.mended, repaired.outdated), (vec![], vec![]));
    assert_eq!(s.findings().await, findings);
}

//! Slices, lengths, packs.

use super::*;
use crate::types::{Block, CHUNK_BYTES, ChunkIndex, PackId, PackedRun, Slice, SliceStamp, Stored};

on_every_engine!(
    committed_slices_are_read_back,
    truncate_cuts_grows_and_frees,
    a_large_truncate_goes_on_after_a_crash,
    packs_live_while_they_are_named,
    compaction_takes_the_place_of_what_it_saw,
    capacity_is_a_limit,
    reaping_a_large_file_takes_pages,
    crashed_sessions_leave_orphans,
);

pub(super) fn packed(pack: PackId, offset: u32) -> Slice {
    let block = Block { stored_len: 1000, raw: true, checksum: 1 };
    let run =
        PackedRun { pack, pack_offset: 64, block_bytes: 4096, plain_len: 4096, skip: 0, blocks: vec![block] };
    Slice { offset, len: 4096, stored: Stored::Packed(run) }
}

fn hole(offset: u32, len: u32) -> Slice {
    Slice { offset, len, stored: Stored::Hole }
}

pub(super) fn write(ino: Ino, chunk: u64, slices: Vec<Slice>, grow_to: u64) -> FileCommit {
    let allocated_delta = 4096 * i64::try_from(slices.len()).unwrap();
    FileCommit {
        ino,
        chunks: vec![(ChunkIndex(chunk), slices)],
        grow_to: Some(grow_to),
        mtime: None,
        allocated_delta,
    }
}

fn truncate_to(ino: Ino, size: u64, allocated_delta: i64) -> TruncateArgs {
    TruncateArgs { ino, size, allocated_delta, cut: None, mtime: None, ctime: None, kill_suid_sgid: false }
}

pub(super) fn new_pack(pack: PackId) -> NewPack {
    NewPack { pack, bytes: 5000, state: PackState::Stored }
}

const PACK: PackId = PackId(1 << 32);

async fn committed_slices_are_read_back(kv: Arc<dyn Kv>) {
    let v = Fixture::new(kv).await;
    let a = v.file(ROOT, "a").await;
    let b = v.file(ROOT, "b").await;
    let mtime = at(1500);
    let commit = FileCommit {
        mtime: Some(mtime),
        ..write(a, 2, vec![packed(PACK, 0), packed(PACK, 4096)], 2 * CHUNK_BYTES + 8192)
    };
    let done = v.meta.commit(&[commit, write(b, 0, vec![packed(PACK, 0)], 4096)], &[new_pack(PACK)]).await;
    assert_eq!(done.unwrap(), Committed::default());
    let attr = v.meta.getattr(a).await.unwrap();
    assert_eq!((attr.size, attr.allocated), (2 * CHUNK_BYTES + 8192, 8192));
    assert_eq!((attr.mtime, attr.ctime), (mtime, mtime));
    v.meta.commit(&[write(a, 2, vec![packed(PACK, 4096)], 10)], &[]).await.unwrap();
    let groups = v.meta.chunk(a, ChunkIndex(2)).await.unwrap();
    assert_eq!(groups.len(), 2);
    assert_eq!(groups[0].slices, vec![packed(PACK, 0), packed(PACK, 4096)]);
    assert!(groups[0].stamp < groups[1].stamp);
    assert_eq!(v.meta.getattr(a).await.unwrap().size, 2 * CHUNK_BYTES + 8192, "never shorter");
    v.meta.commit(&[write(a, 5, vec![packed(PACK, 0)], 10)], &[]).await.unwrap();
    let page = v.meta.chunks(a, ChunkIndex(0), 1).await.unwrap();
    assert_eq!((page.items[0].0, page.items[0].1.len(), page.more), (ChunkIndex(2), 2, true));
    let page = v.meta.chunks(a, ChunkIndex(3), 1).await.unwrap();
    assert_eq!((page.items[0].0, page.more), (ChunkIndex(5), false));
    assert_eq!(v.meta.statfs().await.unwrap().used_bytes, 5 * 4096);
    let done =
        v.meta.commit(&[write(Ino(99_999_999), 0, vec![], 1), write(b, 0, vec![], 5000)], &[]).await.unwrap();
    assert_eq!(done.missing, vec![Ino(99_999_999)]);
    assert_eq!(v.meta.getattr(b).await.unwrap().size, 5000);
    let far = write(b, 0, vec![], FILE_BYTES_MAX + 1);
    assert_eq!(kind_of(v.meta.commit(&[far], &[]).await), ErrorKind::FileTooLarge);
}

async fn truncate_cuts_grows_and_frees(kv: Arc<dyn Kv>) {
    let v = Fixture::new(kv).await;
    let file = v.file(ROOT, "f").await;
    let end = 4 * CHUNK_BYTES;
    for chunk in 0..4 {
        v.meta.commit(&[write(file, chunk, vec![packed(PACK, 0)], end)], &[new_pack(PACK)]).await.unwrap();
    }
    let now = v.tick();
    v.set(file, SetAttr { mode: Some(0o6777), ..SetAttr::default() }).await.unwrap();
    let cut = Some((ChunkIndex(1), vec![hole(100, 1000)]));
    let args = TruncateArgs {
        cut,
        mtime: Some(now),
        kill_suid_sgid: true,
        ..truncate_to(file, CHUNK_BYTES + 100, -2 * 4096)
    };
    let attr = v.meta.truncate(&args).await.unwrap();
    assert_eq!((attr.size, attr.allocated, attr.mode), (CHUNK_BYTES + 100, 2 * 4096, 0o777));
    assert_eq!((attr.mtime, attr.ctime), (now, now));
    assert_eq!(v.meta.getattr(file).await.unwrap(), attr);
    let page = v.meta.chunks(file, ChunkIndex(0), 10).await.unwrap();
    assert_eq!(page.items.len(), 2);
    assert_eq!(page.items[1].1[1].slices, vec![hole(100, 1000)]);
    let grown = v.meta.truncate(&truncate_to(file, end, 0)).await.unwrap();
    assert_eq!(grown.size, end);
    v.meta.truncate(&truncate_to(file, 0, -2 * 4096)).await.unwrap();
    assert_eq!(v.meta.packs(None, 10).await.unwrap().items[0].live_bytes, 0);
    assert_eq!(kind_of(v.meta.truncate(&truncate_to(ROOT, 0, 0)).await), ErrorKind::IsDirectory);
    let too_far = truncate_to(file, FILE_BYTES_MAX + 1, 0);
    assert_eq!(kind_of(v.meta.truncate(&too_far).await), ErrorKind::FileTooLarge);
    v.assert_clean().await;
}

/// Writes `count` chunks of one slice each.
async fn large_file(v: &Fixture, count: u64) -> Ino {
    let file = v.file(ROOT, "large").await;
    for first in (0..count).step_by(200) {
        let chunks = (first..count.min(first + 200))
            .map(|chunk| (ChunkIndex(chunk), vec![packed(PACK, 0)]))
            .collect::<Vec<_>>();
        let allocated_delta = 4096 * i64::try_from(chunks.len()).unwrap();
        let grow_to = Some(count * CHUNK_BYTES);
        let commit = FileCommit { ino: file, chunks, grow_to, mtime: None, allocated_delta };
        v.meta.commit(&[commit], &[new_pack(PACK)]).await.unwrap();
    }
    file
}

async fn a_large_truncate_goes_on_after_a_crash(kv: Arc<dyn Kv>) {
    let v = Fixture::new(kv).await;
    let file = large_file(&v, 1300).await;
    let args = truncate_to(file, 0, -1300 * 4096);
    let (now, session) = (v.clock.now(), v.meta.session_id().unwrap());
    let args_ref = &args;
    // Only the first transaction, as if the client had died after it.
    let first = v.meta.mutate(|txn| async move {
        crate::meta::ops::truncate::truncate_in(&*txn, args_ref, now, session).await
    });
    first.await.unwrap();
    v.assert_clean().await;
    assert!(v.meta.scan_inodes(None, 10).await.unwrap().items.iter().any(|inode| inode.trimming));
    let meta = v.reopen().await;
    // Whoever makes the file longer sees to it that the old bytes are gone.
    meta.commit(&[write(file, 1200, vec![packed(PACK, 0)], 1300 * CHUNK_BYTES)], &[]).await.unwrap();
    let page = meta.chunks(file, ChunkIndex(0), 10).await.unwrap();
    assert_eq!(page.items.iter().map(|(chunk, _)| chunk.0).collect::<Vec<_>>(), vec![1200]);
    assert_eq!(meta.packs(None, 1).await.unwrap().items[0].live_bytes, 1000);
    let v = Fixture { meta, ..v };
    v.assert_clean().await;
}

async fn packs_live_while_they_are_named(kv: Arc<dyn Kv>) {
    let v = Fixture::new(kv).await;
    let a = v.file(ROOT, "a").await;
    let b = v.file(ROOT, "b").await;
    let other = PackId(7);
    let unknown = v.meta.commit(&[write(a, 0, vec![packed(PACK, 0)], 1)], &[]).await;
    assert_eq!(kind_of(unknown), ErrorKind::Stale);
    v.meta
        .commit(&[write(a, 0, vec![packed(PACK, 0)], 1)], &[new_pack(PACK), new_pack(other)])
        .await
        .unwrap();
    v.meta.commit(&[write(b, 0, vec![packed(PACK, 0)], 1)], &[]).await.unwrap();
    let page = v.meta.packs(None, 1).await.unwrap();
    assert!(page.more);
    assert_eq!((page.items[0].pack, page.items[0].live_bytes), (other, 0));
    let page = v.meta.packs(Some(other), 10).await.unwrap();
    let info = PackInfo { pack: PACK, stored_bytes: 5000, live_bytes: 2000, state: PackState::Stored };
    assert_eq!((page.items, page.more), (vec![info], false));
    assert_eq!(v.meta.drop_packs(&[PACK, other]).await.unwrap(), vec![other]);
    for file in ["a", "b"] {
        let gone = v.meta.unlink(ROOT, &name(file)).await.unwrap();
        let reaped = v.meta.reap(&[gone.ino]).await.unwrap();
        assert_eq!(reaped.packs.into_iter().collect::<Vec<_>>(), vec![PACK]);
    }
    assert_eq!(v.meta.drop_packs(&[PACK]).await.unwrap(), vec![PACK]);
    assert_eq!(v.meta.packs(None, 10).await.unwrap().items, vec![]);
    v.assert_clean().await;
}

async fn compaction_takes_the_place_of_what_it_saw(kv: Arc<dyn Kv>) {
    let v = Fixture::new(kv).await;
    let file = v.file(ROOT, "f").await;
    let merged_pack = PackId(99);
    for _ in 0..3 {
        v.meta.commit(&[write(file, 0, vec![packed(PACK, 0)], 4096)], &[new_pack(PACK)]).await.unwrap();
    }
    let seen: Vec<SliceStamp> =
        v.meta.chunk(file, ChunkIndex(0)).await.unwrap().iter().map(|group| group.stamp).collect();
    // Written after the compaction looked: stays on top.
    v.meta.commit(&[write(file, 0, vec![hole(0, 10)], 4096)], &[]).await.unwrap();
    let merged = [packed(merged_pack, 0)];
    let args = ReplaceArgs {
        ino: file,
        chunk: ChunkIndex(0),
        seen: &seen,
        merged: &merged,
        new_packs: &[new_pack(merged_pack)],
    };
    v.meta.replace_groups(args).await.unwrap();
    let groups = v.meta.chunk(file, ChunkIndex(0)).await.unwrap();
    assert_eq!(groups.len(), 2);
    assert_eq!((groups[0].stamp, groups[0].slices.as_slice()), (seen[2], merged.as_slice()));
    assert_eq!(groups[1].slices, vec![hole(0, 10)]);
    assert_eq!(kind_of(v.meta.replace_groups(args).await), ErrorKind::Stale);
    let live: Vec<i64> =
        v.meta.packs(None, 10).await.unwrap().items.iter().map(|pack| pack.live_bytes).collect();
    assert_eq!(live, vec![1000, 0]);
    let too_many = ReplaceArgs { seen: &[], ..args };
    assert_eq!(kind_of(v.meta.replace_groups(too_many).await), ErrorKind::ArgumentTooLarge);
}

async fn capacity_is_a_limit(kv: Arc<dyn Kv>) {
    let limits = VolumeLimits { capacity: Some(10_000), inodes: None };
    let v = Fixture::with_limits(kv, limits).await;
    let file = v.file(ROOT, "f").await;
    let two = write(file, 0, vec![hole(0, 1), hole(2, 1)], 1);
    v.meta.commit(std::slice::from_ref(&two), &[]).await.unwrap();
    assert_eq!(v.meta.bytes_left(), Some(10_000 - 8192));
    assert_eq!(kind_of(v.meta.commit(&[two], &[]).await), ErrorKind::NoSpace);
    assert_eq!(v.meta.bytes_left(), Some(10_000 - 8192));
    v.meta.truncate(&truncate_to(file, 0, -8192)).await.unwrap();
    assert_eq!(v.meta.bytes_left(), Some(10_000));
    let statfs = v.meta.statfs().await.unwrap();
    assert_eq!((statfs.capacity, statfs.used_bytes), (Some(10_000), 0));
}

async fn reaping_a_large_file_takes_pages(kv: Arc<dyn Kv>) {
    let v = Fixture::new(kv).await;
    let large = large_file(&v, 1100).await;
    let small = v.file(ROOT, "small").await;
    for text in ["large", "small"] {
        v.meta.unlink(ROOT, &name(text)).await.unwrap();
    }
    let reaped = v.meta.reap(&[large, small]).await.unwrap();
    assert_eq!(reaped.inodes, 2);
    let statfs = v.meta.statfs().await.unwrap();
    assert_eq!((statfs.used_bytes, statfs.inodes_used), (0, 1));
    assert_eq!(v.meta.packs(None, 1).await.unwrap().items[0].live_bytes, 0);
    v.assert_clean().await;
}

async fn crashed_sessions_leave_orphans(kv: Arc<dyn Kv>) {
    let v = Fixture::new(kv).await;
    let mut files = Vec::new();
    for index in 0..5 {
        let text = format!("f{index}");
        files.push(v.file(ROOT, &text).await);
        v.meta.unlink(ROOT, &name(&text)).await.unwrap();
    }
    let meta = v.reopen().await;
    let page = meta.orphans(None, 3).await.unwrap();
    assert_eq!((page.items.as_slice(), page.more), (&files[..3], true));
    let rest = meta.orphans(Some(files[2]), 3).await.unwrap();
    assert_eq!((rest.items.as_slice(), rest.more), (&files[3..], false));
    assert_eq!(meta.reap(&files).await.unwrap().inodes, 5);
    assert_eq!(meta.orphans(None, 3).await.unwrap().items, vec![]);
    assert_eq!(kind_of(v.meta.unlink(ROOT, &name("x")).await), ErrorKind::Stale, "declared dead");
    let v = Fixture { meta, ..v };
    v.assert_clean().await;
}

//! Names, listings, attributes and handles.

use super::*;
use crate::meta::FLAG_IMMUTABLE;
use crate::types::{SetTime, Timestamp};

type Listed = Vec<(Vec<u8>, u64)>;

/// Lists from a cookie on, at most `room` entries.
async fn list(vfs: &Vfs, dir: Ino, cookie: u64, room: usize, mode: ReaddirMode) -> Listed {
    let mut listed = Vec::new();
    let mut sink = |entry: &DirEntry<'_>| {
        if listed.len() == room {
            return ControlFlow::Break(());
        }
        assert_eq!(
            entry.attr.is_some(),
            mode == ReaddirMode::Plus && entry.name != b"." && entry.name != b".."
        );
        listed.push((entry.name.to_vec(), entry.cookie));
        ControlFlow::Continue(())
    };
    vfs.readdir(ReaddirArgs { dir, cookie, mode, entries_max: room }, &mut sink).await.unwrap();
    listed
}

#[tokio::test]
async fn closing_a_new_file_has_nothing_to_tell() {
    let world = World::new().await;
    let vfs = world.mount().await;
    let (attr, created) = vfs.create(node(&name("new")), flags(AccessMode::ReadWrite)).await.unwrap();
    assert!(created.no_flush);
    let opened = vfs.open(attr.ino, flags(AccessMode::ReadWrite)).await.unwrap();
    assert!(!opened.no_flush, "earlier bytes may have failed");
}

#[tokio::test]
async fn a_new_file_is_known_to_have_no_attributes_until_one_is_set() {
    let world = World::new().await;
    let vfs = world.mount().await;
    let get = async |ino: Ino, attribute: &[u8]| vfs.getxattr(ino, attribute).await.map_err(|e| e.kind);
    let set = async |ino: Ino| vfs.setxattr(ino, b"user.a", b"b", XattrMode::Either).await.unwrap();
    let (file, _) = vfs.create(node(&name("new")), flags(AccessMode::Write)).await.unwrap();
    world.kv_panics.everywhere.store(true, Ordering::SeqCst);
    assert_eq!(get(file.ino, b"security.capability").await, Err(ErrorKind::NoAttribute));
    assert_eq!(get(file.ino, b"system.posix_acl_access").await, Err(ErrorKind::NotSupported));
    world.kv_panics.everywhere.store(false, Ordering::SeqCst);
    set(file.ino).await;
    assert_eq!(get(file.ino, b"user.a").await.as_deref(), Ok(&b"b"[..]));
    assert_eq!(get(file.ino, b"security.capability").await, Err(ErrorKind::NoAttribute));
}

#[tokio::test(start_paused = true)]
async fn an_attribute_is_there_though_its_file_was_found_before_create_returned() {
    let mut world = World::new().await;
    // A commit takes effect some time before it returns.
    world.faults = Faults { delay: 1.0, delay_max: Duration::from_millis(10), ..Faults::NONE };
    let vfs = world.mount().await;
    let mut before = 0;
    for i in 0..50 {
        let text = name(&format!("f{i}"));
        let find_and_set = async {
            let ino = loop {
                if let Ok(attr) = vfs.lookup(Ino::ROOT, &text).await {
                    break attr.ino;
                }
            };
            let found = tokio::time::Instant::now();
            vfs.setxattr(ino, b"user.a", b"b", XattrMode::Either).await.unwrap();
            found
        };
        let create = async {
            let (attr, _) = vfs.create(node(&text), flags(AccessMode::Write)).await.unwrap();
            (attr.ino, tokio::time::Instant::now())
        };
        let (found, (ino, created)) = tokio::join!(find_and_set, create);
        before += u32::from(found < created);
        assert_eq!(vfs.getxattr(ino, b"user.a").await.unwrap(), "b");
    }
    assert!(before > 0, "none was found before its create returned");
}

#[tokio::test]
async fn a_listing_shows_each_lasting_entry_once_while_others_come_and_go() {
    let world = World::new().await;
    let vfs = world.mount().await;
    for i in 0..200 {
        vfs.mkdir(node(&name(&format!("stay{i:03}")))).await.unwrap();
        vfs.mkdir(node(&name(&format!("go{i:03}")))).await.unwrap();
    }
    let mut seen: BTreeMap<Vec<u8>, u32> = BTreeMap::new();
    let (mut cookie, mut round) = (0, 0);
    loop {
        let page = list(&vfs, Ino::ROOT, cookie, 7, ReaddirMode::Names).await;
        let Some((_, last)) = page.last() else { break };
        cookie = *last;
        for (name, _) in page {
            *seen.entry(name).or_default() += 1;
        }
        if round < 200 {
            vfs.rmdir(Ino::ROOT, &name(&format!("go{round:03}"))).await.unwrap();
            vfs.mkdir(node(&name(&format!("new{round:03}")))).await.unwrap();
        }
        round += 1;
    }
    for i in 0..200 {
        assert_eq!(seen.get(format!("stay{i:03}").as_bytes()), Some(&1));
    }
    assert!(seen.values().all(|count| *count == 1));
    assert_eq!(seen.get(&b"."[..]), Some(&1));
    // Rewound, it shows what is there now.
    let again = list(&vfs, Ino::ROOT, 0, 1000, ReaddirMode::Plus).await;
    assert_eq!(again.len(), 2 + 200 + 200);
    unmount(vfs).await;
}

#[tokio::test]
async fn cookies_lead_back_to_their_places() {
    let world = World::new().await;
    let vfs = world.mount().await;
    for i in 0..50 {
        vfs.mkdir(node(&name(&format!("d{i:02}")))).await.unwrap();
    }
    let all = list(&vfs, Ino::ROOT, 0, 1000, ReaddirMode::Names).await;
    vfs.rmdir(Ino::ROOT, &name("d10")).await.unwrap();
    let (from, to) = (name("d49"), name("d30"));
    let mode = RenameMode::Replace;
    let moved = RenameArgs { parent: Ino::ROOT, name: &from, new_parent: Ino::ROOT, new_name: &to, mode };
    vfs.rename(moved).await.unwrap();
    vfs.mkdir(node(&name("d20a"))).await.unwrap();
    let now = list(&vfs, Ino::ROOT, 0, 1000, ReaddirMode::Names).await;
    assert_eq!(now.len(), all.len() - 1);
    for (at, cookie) in &all {
        let rest = list(&vfs, Ino::ROOT, *cookie, 1000, ReaddirMode::Names).await;
        let dots = now.iter().filter(|(name, _)| at == b"." && name == b"..");
        let after = now.iter().filter(|(name, _)| name > at && !name.starts_with(b"."));
        let expected: Listed = dots.chain(after).cloned().collect();
        assert_eq!(rest, expected, "after {}", at.escape_ascii());
    }
    let unknown = ReaddirArgs { dir: Ino::ROOT, cookie: 77, mode: ReaddirMode::Names, entries_max: 1 };
    let refused = vfs.readdir(unknown, &mut |_: &DirEntry<'_>| ControlFlow::Break(())).await;
    assert_eq!(refused.unwrap_err().kind, ErrorKind::Invalid);
    unmount(vfs).await;
}

#[tokio::test]
async fn a_removed_open_directory_is_empty_and_can_be_asked() {
    let world = World::new().await;
    let vfs = world.mount().await;
    let dir = vfs.mkdir(node(&name("d"))).await.unwrap().ino;
    vfs.rmdir(Ino::ROOT, &name("d")).await.unwrap();
    assert!(list(&vfs, dir, 0, 10, ReaddirMode::Names).await.is_empty());
    assert_eq!(vfs.getattr(dir).await.unwrap().nlink, 0);
    vfs.forget(dir, 1);
    vfs.gc().await.unwrap();
    assert_eq!(vfs.getattr(dir).await.unwrap_err().kind, ErrorKind::Stale);
    unmount(vfs).await;
}

async fn attr_of(vfs: &Vfs, text: &str) -> Attr {
    let attr = vfs.lookup(Ino::ROOT, &name(text)).await.unwrap();
    vfs.forget(attr.ino, 1);
    attr
}

#[tokio::test]
async fn times_are_those_of_the_operations_not_of_the_flush() {
    let world = World::new().await;
    let vfs = world.mount().await;
    let file = create(&vfs, "f").await;
    let written = world.later(10);
    write(&vfs, file, 0, vec![1; 10_000]).await.unwrap();
    let changed = world.later(10);
    let mode = SetAttr { mode: Some(0o600), ..SetAttr::default() };
    vfs.setattr(&ROOT, file.0, mode, None).await.unwrap();
    world.later(10);
    let attr = attr_of(&vfs, "f").await;
    assert_eq!((attr.size, attr.mtime, attr.ctime), (10_000, written, changed));
    fsync(&vfs, file).await.unwrap();
    assert_eq!(attr_of(&vfs, "f").await.mtime, written);
    assert_eq!(attr_of(&vfs, "f").await.ctime, changed);
    // A time that is set stays, whatever is flushed later.
    write(&vfs, file, 0, vec![2; 10]).await.unwrap();
    let old = Timestamp { secs: 5, nanos: 6 };
    let utimes = SetAttr { mtime: Some(crate::types::SetTime::To(old)), ..SetAttr::default() };
    vfs.setattr(&ROOT, file.0, utimes, None).await.unwrap();
    fsync(&vfs, file).await.unwrap();
    assert_eq!(attr_of(&vfs, "f").await.mtime, old);
    crash(vfs).await;
    let vfs = world.mount().await;
    assert_eq!(attr_of(&vfs, "f").await.mtime, old);
    unmount(vfs).await;
}

#[tokio::test]
async fn times_of_a_kernel_that_caches_writes_are_committed_with_the_bytes() {
    let mut world = World::new().await;
    world.options.kernel_caches_writes = true;
    let vfs = world.mount().await;
    let file = create(&vfs, "f").await;
    let args = WriteArgs {
        ino: file.0,
        fh: file.1,
        offset: 0,
        bytes: Bytes::from_static(b"cached"),
        origin: WriteOrigin::KernelCache,
        kill_suid_sgid: false,
    };
    vfs.write(args).await.unwrap();
    let immutable = SetAttr { flags: Some(crate::meta::FLAG_IMMUTABLE), ..SetAttr::default() };
    vfs.setattr(&ROOT, file.0, immutable, None).await.unwrap();
    let wrote = world.later(10);
    let times =
        SetAttr { mtime: Some(crate::types::SetTime::To(wrote)), ctime: Some(wrote), ..SetAttr::default() };
    let attr = vfs.setattr(&ROOT, file.0, times, None).await.unwrap();
    assert_eq!((attr.size, attr.mtime, attr.ctime), (6, wrote, wrote));
    unmount(vfs).await;
    let vfs = world.mount().await;
    let attr = attr_of(&vfs, "f").await;
    assert_eq!((attr.size, attr.mtime, attr.ctime), (6, wrote, wrote));
    unmount(vfs).await;
}

#[tokio::test]
async fn atime_follows_relatime() {
    let world = World::new().await;
    let vfs = world.mount().await;
    let file = create(&vfs, "f").await;
    write(&vfs, file, 0, vec![1; 10]).await.unwrap();
    let first = world.later(10);
    read(&vfs, file, 0, 10).await;
    assert_eq!(attr_of(&vfs, "f").await.atime, first);
    world.later(10);
    read(&vfs, file, 0, 10).await;
    assert_eq!(attr_of(&vfs, "f").await.atime, first);
    unmount(vfs).await;
    let vfs = world.mount().await;
    assert_eq!(attr_of(&vfs, "f").await.atime, first);
    let file = open(&vfs, "f").await;
    let next_day = world.later(25 * 3600);
    read(&vfs, file, 0, 10).await;
    assert_eq!(attr_of(&vfs, "f").await.atime, next_day);
    unmount(vfs).await;
}

#[tokio::test]
async fn appends_go_to_the_end_and_set_ids_go_away() {
    let world = World::new().await;
    let vfs = world.mount().await;
    let file = create(&vfs, "f").await;
    write(&vfs, file, 0, &b"one"[..]).await.unwrap();
    let append = OpenFlags { append: true, ..flags(AccessMode::Write) };
    let fh = vfs.open(file.0, append).await.unwrap().fh;
    write(&vfs, (file.0, fh), 0, &b"two"[..]).await.unwrap();
    assert_eq!(read(&vfs, file, 0, 100).await, &b"onetwo"[..]);
    assert_eq!(vfs.read(file.0, fh, 0, 1).await.unwrap_err().kind, ErrorKind::BadHandle);
    let mode = SetAttr { mode: Some(0o4755), ..SetAttr::default() };
    vfs.setattr(&ROOT, file.0, mode, None).await.unwrap();
    let args = WriteArgs {
        ino: file.0,
        fh: file.1,
        offset: 0,
        bytes: Bytes::from_static(b"x"),
        origin: WriteOrigin::Process,
        kill_suid_sgid: true,
    };
    vfs.write(args).await.unwrap();
    assert_eq!(vfs.getattr(file.0).await.unwrap().mode, 0o755);
    vfs.setattr(&ROOT, file.0, size(0), None).await.unwrap();
    assert_eq!(vfs.getattr(file.0).await.unwrap().size, 0);
    let beyond = write(&vfs, file, (1 << 57) - 1, vec![1, 2]).await;
    assert_eq!(beyond.unwrap_err().kind, ErrorKind::FileTooLarge);
    write(&vfs, file, (1 << 57) - 1, vec![1]).await.unwrap();
    assert_eq!(vfs.getattr(file.0).await.unwrap().size, 1 << 57);
    assert_eq!(vfs.lseek(file.0, file.1, 5, Whence::Data).await.unwrap(), (1 << 57) - 1);
    vfs.fallocate(file.0, file.1, FallocateMode::PunchHole, 0, 1 << 57).await.unwrap();
    fsync(&vfs, file).await.unwrap();
    check_accounts(&vfs, &[file.0]).await;
    unmount(vfs).await;
}

#[tokio::test]
async fn what_was_written_before_a_file_became_immutable_is_stored() {
    let world = World::new().await;
    let vfs = world.mount().await;
    let file = create(&vfs, "f").await;
    write(&vfs, file, 0, &b"one"[..]).await.unwrap();
    let set = |flags| SetAttr { flags: Some(flags), ..SetAttr::default() };
    vfs.setattr(&ROOT, file.0, set(FLAG_IMMUTABLE), None).await.unwrap();
    write(&vfs, file, 3, &b"two"[..]).await.unwrap();
    // The kernel tells the times of cached writes when it likes; chmod and utimensat are refused.
    let (mtime, ctime) = (Timestamp { secs: 5, nanos: 6 }, Timestamp { secs: 7, nanos: 8 });
    let times = SetAttr { mtime: Some(SetTime::To(mtime)), ctime: Some(ctime), ..SetAttr::default() };
    let attr = vfs.setattr(&ROOT, file.0, times, None).await.unwrap();
    assert_eq!((attr.mtime, attr.ctime), (mtime, ctime));
    let utimes = SetAttr { atime: Some(SetTime::To(mtime)), ..times };
    let refused = vfs.setattr(&ROOT, file.0, utimes, None).await;
    assert_eq!(refused.unwrap_err().kind, ErrorKind::NotPermitted);
    write(&vfs, file, 6, &b"!"[..]).await.unwrap();
    vfs.setattr(&ROOT, file.0, set(0), None).await.unwrap();
    fsync(&vfs, file).await.unwrap();
    assert_eq!(read(&vfs, file, 0, 100).await, &b"onetwo!"[..]);
    unmount(vfs).await;
}

#[tokio::test]
async fn a_read_only_mount_changes_nothing_and_can_be_switched() {
    let world = World::new().await;
    let vfs = world.mount().await;
    let file = create(&vfs, "f").await;
    write(&vfs, file, 0, vec![1; 10_000]).await.unwrap();
    vfs.set_read_only(WriteAccess::ReadOnly).await.unwrap();
    assert_eq!(vfs.stats().dirty_bytes, 0);
    let refused = [
        write(&vfs, file, 0, vec![2]).await.map(|_| ()),
        vfs.mkdir(node(&name("d"))).await.map(|_| ()),
        vfs.unlink(Ino::ROOT, &name("f")).await,
        vfs.setattr(&ROOT, file.0, size(0), None).await.map(|_| ()),
        vfs.open(file.0, flags(AccessMode::Write)).await.map(|_| ()),
        vfs.setxattr(file.0, b"user.a", b"b", XattrMode::Either).await,
    ];
    for result in refused {
        assert_eq!(result.unwrap_err().kind, ErrorKind::ReadOnly);
    }
    assert_eq!(read(&vfs, file, 0, 10).await, vec![1; 10]);
    vfs.set_read_only(WriteAccess::ReadWrite).await.unwrap();
    write(&vfs, file, 0, vec![2]).await.unwrap();
    unmount(vfs).await;
}

#[tokio::test]
async fn kinds_without_contents_cannot_be_opened_as_files() {
    let world = World::new().await;
    let vfs = world.mount().await;
    let dir = vfs.mkdir(node(&name("d"))).await.unwrap();
    let opened = vfs.open(dir.ino, flags(AccessMode::Read)).await;
    assert_eq!(opened.unwrap_err().kind, ErrorKind::IsDirectory);
    let fifo = vfs.mknod(node(&name("p")), NodeKind { kind: Kind::Fifo, rdev: 0 }).await.unwrap();
    let args = ReaddirArgs { dir: fifo.ino, cookie: 0, mode: ReaddirMode::Names, entries_max: 1 };
    let listed = vfs.readdir(args, &mut |_: &DirEntry<'_>| ControlFlow::Continue(())).await;
    assert_eq!(listed.unwrap_err().kind, ErrorKind::NotDirectory);
    let link = vfs.symlink(node(&name("l")), b"d").await.unwrap();
    assert_eq!(vfs.readlink(link.ino).await.unwrap(), &b"d"[..]);
    unmount(vfs).await;
}

//! setattr, times, flags, extended attributes, limits.

use super::*;
use crate::types::SetTime;

on_every_engine!(
    chmod_chown_and_their_set_id_bits,
    groups_decide_about_the_set_group_id_bit,
    times_are_exact_and_ctime_follows,
    flags_forbid_changes,
    append_only_files_only_grow,
    attributes_by_name,
    attributes_have_limits,
    inodes_are_limited,
    read_only_changes_nothing,
);

fn mode(mode: u16) -> SetAttr {
    SetAttr { mode: Some(mode), ..SetAttr::default() }
}

fn flags(flags: u32) -> SetAttr {
    SetAttr { flags: Some(flags), ..SetAttr::default() }
}

async fn chmod_chown_and_their_set_id_bits(kv: Arc<dyn Kv>) {
    let v = Fixture::new(kv).await;
    let file = v.file(ROOT, "f").await;
    let now = v.tick();
    let attr = v.set(file, mode(0o6777)).await.unwrap();
    assert_eq!((attr.mode, attr.ctime), (0o6777, now));
    let chown = SetAttr { uid: Some(5), gid: Some(6), ..SetAttr::default() };
    let attr = v.set(file, chown).await.unwrap();
    assert_eq!((attr.mode, attr.uid, attr.gid), (0o777, 5, 6));
    // The set-group-id bit without group execution means mandatory locking; root keeps it.
    v.set(file, mode(0o6767)).await.unwrap();
    assert_eq!(v.set(file, chown).await.unwrap().mode, 0o2767);
    v.set(file, mode(0o6777)).await.unwrap();
    let kill = SetAttr { kill_suid_sgid: true, ..SetAttr::default() };
    assert_eq!(v.set(file, kill).await.unwrap().mode, 0o777);
    let dir = v.dir(ROOT, "d").await;
    v.set(dir, mode(0o6777)).await.unwrap();
    assert_eq!(v.set(dir, chown).await.unwrap().mode, 0o6777);
    assert_eq!(v.meta.getattr(file).await.unwrap().mtime, at(1000));
    let size = SetAttr { size: Some(1), ..SetAttr::default() };
    assert_eq!(kind_of(v.set(file, size).await), ErrorKind::Invalid);
    let unchanged = v.meta.getattr(file).await.unwrap();
    v.tick();
    assert_eq!(v.set(file, SetAttr::default()).await.unwrap(), unchanged);
    assert_eq!(kind_of(v.set(Ino(12345), mode(0)).await), ErrorKind::Stale);
}

async fn groups_decide_about_the_set_group_id_bit(kv: Arc<dyn Kv>) {
    let v = Fixture::new(kv).await;
    let file = v.file(ROOT, "f").await;
    v.set(file, SetAttr { gid: Some(50), ..SetAttr::default() }).await.unwrap();
    let chmod = async |membership| {
        let set = mode(0o2755);
        let args = SetattrArgs { ino: file, set: &set, caller: &CALLER, membership, written: None };
        v.meta.setattr(args).await.unwrap().mode
    };
    assert_eq!(chmod(Membership::Groups(&[1, 2])).await, 0o755);
    assert_eq!(chmod(Membership::Groups(&[1, 50])).await, 0o2755);
    assert_eq!(chmod(Membership::CheckedByKernel).await, 0o2755);
}

async fn times_are_exact_and_ctime_follows(kv: Arc<dyn Kv>) {
    let v = Fixture::new(kv).await;
    let file = v.file(ROOT, "f").await;
    let old = Timestamp { secs: -12_345_678_901, nanos: 999_999_999 };
    let far = Timestamp { secs: 1 << 40, nanos: 1 };
    let now = v.tick();
    let set = SetAttr { atime: Some(SetTime::To(old)), mtime: Some(SetTime::To(far)), ..SetAttr::default() };
    let attr = v.set(file, set).await.unwrap();
    assert_eq!((attr.atime, attr.mtime, attr.ctime), (old, far, now));
    assert_eq!(v.meta.getattr(file).await.unwrap(), attr);
    let now = v.tick();
    let set = SetAttr { mtime: Some(SetTime::Now), ..SetAttr::default() };
    let attr = v.set(file, set).await.unwrap();
    assert_eq!((attr.atime, attr.mtime, attr.ctime), (old, now, now));
    v.tick();
    let set = SetAttr { mtime: Some(SetTime::To(old)), ctime: Some(far), ..SetAttr::default() };
    let attr = v.set(file, set).await.unwrap();
    assert_eq!((attr.mtime, attr.ctime), (old, far));
    v.meta.touch_atime(file, far).await.unwrap();
    let attr = v.meta.getattr(file).await.unwrap();
    assert_eq!((attr.atime, attr.mtime, attr.ctime), (far, old, far));
}

async fn flags_forbid_changes(kv: Arc<dyn Kv>) {
    let v = Fixture::new(kv).await;
    let dir = v.dir(ROOT, "d").await;
    let file = v.file(dir, "f").await;
    for flag in [FLAG_IMMUTABLE, FLAG_APPEND] {
        v.set(file, flags(flag)).await.unwrap();
        assert_eq!(kind_of(v.set(file, mode(0o600)).await), ErrorKind::NotPermitted);
        assert_eq!(kind_of(v.meta.unlink(dir, &name("f")).await), ErrorKind::NotPermitted);
        let link = LinkArgs { ino: file, parent: ROOT, name: &name("l") };
        assert_eq!(kind_of(v.meta.link(link).await), ErrorKind::NotPermitted);
        let moved = v.rename((dir, "f"), (ROOT, "f"), RenameMode::Replace).await;
        assert_eq!(kind_of(moved), ErrorKind::NotPermitted);
        v.file(ROOT, "g").await;
        let over = v.rename((ROOT, "g"), (dir, "f"), RenameMode::Replace).await;
        assert_eq!(kind_of(over), ErrorKind::NotPermitted);
        v.meta.unlink(ROOT, &name("g")).await.unwrap();
        let set = v.meta.setxattr(file, b"user.a", b"", XattrMode::Either).await;
        assert_eq!(kind_of(set), ErrorKind::NotPermitted);
        let shorter = TruncateArgs {
            ino: file,
            size: 0,
            allocated_delta: 0,
            cut: None,
            mtime: None,
            ctime: None,
            kill_suid_sgid: false,
        };
        assert_eq!(kind_of(v.meta.truncate(&shorter).await), ErrorKind::NotPermitted);
        v.set(file, flags(0)).await.unwrap();
    }
    v.set(dir, flags(FLAG_IMMUTABLE)).await.unwrap();
    assert_eq!(kind_of(v.make(dir, "x", Kind::File).await), ErrorKind::NotPermitted);
    assert_eq!(kind_of(v.meta.unlink(dir, &name("f")).await), ErrorKind::NotPermitted);
    assert_eq!(kind_of(v.meta.rmdir(ROOT, &name("d")).await), ErrorKind::NotPermitted);
    v.set(dir, flags(FLAG_APPEND)).await.unwrap();
    v.file(dir, "x").await;
    assert_eq!(kind_of(v.meta.unlink(dir, &name("x")).await), ErrorKind::NotPermitted);
    let out = v.rename((dir, "x"), (ROOT, "x"), RenameMode::Replace).await;
    assert_eq!(kind_of(out), ErrorKind::NotPermitted);
    v.set(dir, flags(0)).await.unwrap();
    v.meta.unlink(dir, &name("x")).await.unwrap();
}

async fn append_only_files_only_grow(kv: Arc<dyn Kv>) {
    let v = Fixture::new(kv).await;
    let file = v.file(ROOT, "f").await;
    let touch = SetAttr { mtime: Some(SetTime::Now), ..SetAttr::default() };
    let set = SetAttr { mtime: Some(SetTime::To(at(5))), ..SetAttr::default() };
    v.set(file, flags(FLAG_APPEND)).await.unwrap();
    v.set(file, touch).await.unwrap();
    assert_eq!(kind_of(v.set(file, set).await), ErrorKind::NotPermitted);
    v.set(file, flags(FLAG_IMMUTABLE)).await.unwrap();
    assert_eq!(kind_of(v.set(file, touch).await), ErrorKind::NotPermitted);
    // What was written before is told all the same.
    let clear = flags(0);
    let membership = Membership::CheckedByKernel;
    let written = Some(at(7));
    let args = SetattrArgs { ino: file, set: &clear, caller: &CALLER, membership, written };
    let attr = v.meta.setattr(args).await.unwrap();
    assert_eq!((attr.flags, attr.mtime), (0, at(7)));
}

async fn attributes_by_name(kv: Arc<dyn Kv>) {
    let v = Fixture::new(kv).await;
    let file = v.file(ROOT, "f").await;
    let set = async |name: &[u8], value: &[u8], mode| v.meta.setxattr(file, name, value, mode).await;
    let now = v.tick();
    set(b"user.b", b"1", XattrMode::Create).await.unwrap();
    assert_eq!(v.meta.getattr(file).await.unwrap().ctime, now);
    assert_eq!(kind_of(set(b"user.b", b"2", XattrMode::Create).await), ErrorKind::Exists);
    assert_eq!(kind_of(set(b"user.a", b"2", XattrMode::Replace).await), ErrorKind::NoAttribute);
    set(b"user.b", b"", XattrMode::Replace).await.unwrap();
    set(b"security.x", b"\0\xFF", XattrMode::Either).await.unwrap();
    assert_eq!(v.meta.getxattr(file, b"user.b").await.unwrap(), "");
    assert_eq!(v.meta.getxattr(file, b"security.x").await.unwrap().as_ref(), b"\0\xFF");
    assert_eq!(v.meta.listxattr(file).await.unwrap(), vec!["security.x", "user.b"]);
    let now = v.tick();
    v.meta.removexattr(file, b"user.b").await.unwrap();
    assert_eq!(v.meta.getattr(file).await.unwrap().ctime, now);
    assert_eq!(kind_of(v.meta.removexattr(file, b"user.b").await), ErrorKind::NoAttribute);
    assert_eq!(kind_of(v.meta.getxattr(file, b"user.b").await), ErrorKind::NoAttribute);
    assert_eq!(v.meta.listxattr(file).await.unwrap(), vec!["security.x"]);
    assert_eq!(v.meta.listxattr(ROOT).await.unwrap(), Vec::<&str>::new());
    for bad in [&b"system.posix_acl_access"[..], b"system.x", b"foo", b"other.x"] {
        assert_eq!(kind_of(set(bad, b"", XattrMode::Either).await), ErrorKind::NotSupported);
        assert_eq!(kind_of(v.meta.getxattr(file, bad).await), ErrorKind::NotSupported);
    }
    assert_eq!(kind_of(set(b"user.", b"", XattrMode::Either).await), ErrorKind::Invalid);
    let link = v.make(ROOT, "l", Kind::Symlink).await.unwrap().ino;
    let on_link = async |name: &[u8]| v.meta.setxattr(link, name, b"", XattrMode::Either).await;
    assert_eq!(kind_of(on_link(b"user.x").await), ErrorKind::NotPermitted);
    on_link(b"trusted.x").await.unwrap();
}

async fn attributes_have_limits(kv: Arc<dyn Kv>) {
    let v = Fixture::new(kv).await;
    let file = v.file(ROOT, "f").await;
    let set = async |name: &[u8], value: &[u8]| v.meta.setxattr(file, name, value, XattrMode::Either).await;
    let big = vec![7; XATTR_BYTES_MAX + 1];
    assert_eq!(kind_of(set(b"user.a", &big).await), ErrorKind::ArgumentTooLarge);
    set(b"user.a", &big[1..]).await.unwrap();
    assert_eq!(v.meta.getxattr(file, b"user.a").await.unwrap().len(), XATTR_BYTES_MAX);
    let long = [b"user.".as_slice(), &[b'n'; 251]].concat();
    assert_eq!(kind_of(set(&long, b"").await), ErrorKind::BufferTooSmall);
    let mut count = 0;
    let refused = loop {
        let name = format!("user.{count:0250}");
        match set(name.as_bytes(), b"").await {
            Ok(()) => count += 1,
            Err(error) => break error.kind,
        }
    };
    assert_eq!((refused, count), (ErrorKind::NoSpace, 255));
    assert_eq!(v.meta.listxattr(file).await.unwrap().len(), 256);
}

async fn inodes_are_limited(kv: Arc<dyn Kv>) {
    let limits = VolumeLimits { capacity: None, inodes: Some(3) };
    let v = Fixture::with_limits(kv, limits).await;
    let a = v.file(ROOT, "a").await;
    v.dir(ROOT, "b").await;
    assert_eq!(kind_of(v.make(ROOT, "c", Kind::File).await), ErrorKind::NoSpace);
    assert_eq!(kind_of(v.make(ROOT, "a", Kind::File).await), ErrorKind::NoSpace);
    v.meta.unlink(ROOT, &name("a")).await.unwrap();
    v.meta.reap(&[a]).await.unwrap();
    v.file(ROOT, "c").await;
    let reopened = v.reopen().await;
    let statfs = reopened.statfs().await.unwrap();
    assert_eq!((statfs.inodes_max, statfs.inodes_used), (Some(3), 3));
    reopened.set_limits(VolumeLimits { capacity: None, inodes: None }).await.unwrap();
    assert_eq!(reopened.opened_volume().limits, VolumeLimits::default());
    assert_eq!(kind_of(v.make(ROOT, "d", Kind::File).await), ErrorKind::NoSpace);
}

async fn read_only_changes_nothing(kv: Arc<dyn Kv>) {
    let v = Fixture::new(kv).await;
    let file = v.file(ROOT, "f").await;
    let options = OpenOptions { read_only: true, ..OpenOptions::default() };
    let meta = Meta::open(Arc::clone(&v.kv), v.clock.clone(), &options).await.unwrap();
    assert_eq!(meta.session_id(), None);
    assert_eq!(meta.lookup(ROOT, &name("f")).await.unwrap().ino, file);
    assert_eq!(kind_of(meta.unlink(ROOT, &name("f")).await), ErrorKind::ReadOnly);
    assert_eq!(kind_of(meta.touch_atime(file, at(0)).await), ErrorKind::ReadOnly);
    v.meta.unlink(ROOT, &name("f")).await.unwrap();
}

//! Names: make, link, unlink, rmdir, rename, readdir.

use super::*;

on_every_engine!(
    made_things_are_found,
    parents_change_with_their_entries,
    set_group_id_directories_pass_on_their_group,
    links_are_counted,
    an_unlinked_inode_stays_until_it_is_reaped,
    rmdir_wants_an_empty_directory,
    nothing_is_made_in_a_removed_directory,
    rename_moves_and_replaces,
    rename_refuses_what_would_break_the_tree,
    exchange_swaps_across_kinds_and_parents,
    directories_list_in_pages,
    listing_with_attributes_sees_all,
    symbolic_links_keep_their_target,
    names_are_any_bytes,
);

async fn made_things_are_found(kv: Arc<dyn Kv>) {
    let v = Fixture::new(kv).await;
    let kinds = [Kind::File, Kind::Directory, Kind::Symlink, Kind::Fifo, Kind::Socket, Kind::CharDevice];
    for (index, kind) in kinds.into_iter().enumerate() {
        let text = format!("n{index}");
        let made = v.make(ROOT, &text, kind).await.unwrap();
        assert_eq!(made.kind, kind);
        assert_eq!((made.uid, made.gid), (1000, 1000));
        assert_eq!(v.meta.lookup(ROOT, &name(&text)).await.unwrap(), made);
        assert_eq!(v.meta.getattr(made.ino).await.unwrap(), made);
        assert_eq!(kind_of(v.make(ROOT, &text, Kind::File).await), ErrorKind::Exists);
    }
    assert_eq!(kind_of(v.meta.lookup(ROOT, &name("none")).await), ErrorKind::NotFound);
    let file = v.meta.lookup(ROOT, &name("n0")).await.unwrap().ino;
    assert_eq!(kind_of(v.make(file, "x", Kind::File).await), ErrorKind::NotDirectory);
    assert_eq!(v.meta.statfs().await.unwrap().inodes_used, 7);
    v.assert_clean().await;
}

async fn parents_change_with_their_entries(kv: Arc<dyn Kv>) {
    let v = Fixture::new(kv).await;
    let a = v.dir(ROOT, "a").await;
    let b = v.dir(ROOT, "b").await;
    assert_eq!(v.meta.getattr(ROOT).await.unwrap().nlink, 4);
    let changed = async |dir: Ino| {
        let now = v.clock.now();
        let attr = v.meta.getattr(dir).await.unwrap();
        assert_eq!((attr.mtime, attr.ctime), (now, now));
    };
    v.tick();
    let file = v.file(a, "f").await;
    changed(a).await;
    v.tick();
    v.rename((a, "f"), (b, "f"), RenameMode::Replace).await.unwrap();
    changed(a).await;
    changed(b).await;
    assert_eq!(v.meta.getattr(file).await.unwrap().ctime, v.clock.now());
    v.tick();
    let linked = v.meta.link(LinkArgs { ino: file, parent: a, name: &name("l") }).await.unwrap();
    assert_eq!((linked.nlink, linked.ctime), (2, v.clock.now()));
    changed(a).await;
    v.tick();
    v.meta.unlink(a, &name("l")).await.unwrap();
    changed(a).await;
    v.tick();
    v.dir(b, "d").await;
    changed(b).await;
    assert_eq!(v.meta.getattr(b).await.unwrap().nlink, 3);
    v.tick();
    v.meta.rmdir(b, &name("d")).await.unwrap();
    changed(b).await;
    assert_eq!(v.meta.getattr(b).await.unwrap().nlink, 2);
}

async fn set_group_id_directories_pass_on_their_group(kv: Arc<dyn Kv>) {
    let v = Fixture::new(kv).await;
    let dir = v.dir(ROOT, "d").await;
    v.set(dir, SetAttr { mode: Some(0o2775), gid: Some(77), ..SetAttr::default() }).await.unwrap();
    let file = v.make(dir, "f", Kind::File).await.unwrap();
    assert_eq!((file.gid, file.mode), (77, 0o755));
    let sub = v.make(dir, "s", Kind::Directory).await.unwrap();
    assert_eq!((sub.gid, sub.mode), (77, 0o2755));
}

async fn links_are_counted(kv: Arc<dyn Kv>) {
    let v = Fixture::new(kv).await;
    let file = v.file(ROOT, "f").await;
    let dir = v.dir(ROOT, "d").await;
    let link = async |ino, parent, text: &str| {
        let name = name(text);
        v.meta.link(LinkArgs { ino, parent, name: &name }).await
    };
    assert_eq!(link(file, dir, "l").await.unwrap().nlink, 2);
    assert_eq!(kind_of(link(file, dir, "l").await), ErrorKind::Exists);
    assert_eq!(kind_of(link(dir, ROOT, "e").await), ErrorKind::NotPermitted);
    let gone = v.meta.unlink(dir, &name("l")).await.unwrap();
    assert_eq!((gone.ino, gone.attr.nlink, gone.orphaned), (file, 1, false));
    let gone = v.meta.unlink(ROOT, &name("f")).await.unwrap();
    assert_eq!((gone.attr.nlink, gone.orphaned), (0, true));
    assert_eq!(kind_of(link(file, dir, "l").await), ErrorKind::NotFound);
    v.assert_clean().await;
}

async fn an_unlinked_inode_stays_until_it_is_reaped(kv: Arc<dyn Kv>) {
    let v = Fixture::new(kv).await;
    let file = v.file(ROOT, "f").await;
    let dir = v.dir(ROOT, "d").await;
    v.meta.unlink(ROOT, &name("f")).await.unwrap();
    let gone = v.meta.rmdir(ROOT, &name("d")).await.unwrap();
    assert_eq!((gone.ino, gone.attr.nlink), (dir, 0));
    assert_eq!(v.meta.getattr(file).await.unwrap().nlink, 0);
    v.meta.setxattr(file, b"user.a", b"1", XattrMode::Either).await.unwrap();
    assert_eq!(v.meta.orphans(None, 10).await.unwrap().items, vec![], "this session is alive");
    let reaped = v.meta.reap(&[file, dir, file]).await.unwrap();
    assert_eq!(reaped.inodes, 2);
    assert_eq!(kind_of(v.meta.getattr(file).await), ErrorKind::Stale);
    assert_eq!(kind_of(v.meta.getxattr(file, b"user.a").await), ErrorKind::NoAttribute);
    assert_eq!(v.meta.statfs().await.unwrap().inodes_used, 1);
    v.assert_clean().await;
}

async fn rmdir_wants_an_empty_directory(kv: Arc<dyn Kv>) {
    let v = Fixture::new(kv).await;
    let dir = v.dir(ROOT, "d").await;
    v.file(dir, "f").await;
    assert_eq!(kind_of(v.meta.rmdir(ROOT, &name("d")).await), ErrorKind::NotEmpty);
    assert_eq!(kind_of(v.meta.rmdir(dir, &name("f")).await), ErrorKind::NotDirectory);
    assert_eq!(kind_of(v.meta.unlink(ROOT, &name("d")).await), ErrorKind::IsDirectory);
    assert_eq!(kind_of(v.meta.rmdir(ROOT, &name("x")).await), ErrorKind::NotFound);
    v.meta.unlink(dir, &name("f")).await.unwrap();
    v.meta.rmdir(ROOT, &name("d")).await.unwrap();
    assert_eq!(kind_of(v.meta.rmdir(ROOT, &name("d")).await), ErrorKind::NotFound);
}

async fn nothing_is_made_in_a_removed_directory(kv: Arc<dyn Kv>) {
    let v = Fixture::new(kv).await;
    let dir = v.dir(ROOT, "d").await;
    let file = v.file(ROOT, "f").await;
    v.meta.rmdir(ROOT, &name("d")).await.unwrap();
    assert_eq!(kind_of(v.make(dir, "x", Kind::File).await), ErrorKind::NotFound);
    let args = LinkArgs { ino: file, parent: dir, name: &name("x") };
    assert_eq!(kind_of(v.meta.link(args).await), ErrorKind::NotFound);
    let moved = v.rename((ROOT, "f"), (dir, "f"), RenameMode::Replace).await;
    assert_eq!(kind_of(moved), ErrorKind::NotFound);
    assert_eq!(v.meta.readdir(dir, None, 10).await.unwrap().items, vec![]);
    assert_eq!(v.meta.getattr_and_parent(dir).await.unwrap().1, ROOT);
}

async fn rename_moves_and_replaces(kv: Arc<dyn Kv>) {
    let v = Fixture::new(kv).await;
    let a = v.dir(ROOT, "a").await;
    let b = v.dir(ROOT, "b").await;
    let moved = v.file(a, "f").await;
    let over = v.file(b, "g").await;
    let renamed = v.rename((a, "f"), (b, "g"), RenameMode::Replace).await.unwrap();
    assert_eq!(renamed.moved, moved);
    let replaced = renamed.replaced.unwrap();
    assert_eq!((replaced.ino, replaced.orphaned), (over, true));
    assert_eq!(kind_of(v.meta.lookup(a, &name("f")).await), ErrorKind::NotFound);
    assert_eq!(v.meta.lookup(b, &name("g")).await.unwrap().ino, moved);
    // Two names of one inode: nothing happens, both stay.
    v.meta.link(LinkArgs { ino: moved, parent: a, name: &name("l") }).await.unwrap();
    let before = v.meta.getattr(moved).await.unwrap();
    v.tick();
    v.rename((a, "l"), (b, "g"), RenameMode::Replace).await.unwrap();
    v.rename((a, "l"), (a, "l"), RenameMode::Replace).await.unwrap();
    assert_eq!(v.meta.getattr(moved).await.unwrap(), before);
    assert_eq!(v.meta.lookup(a, &name("l")).await.unwrap().ino, moved);
    // A directory takes its parent along, and replaces an empty one.
    let sub = v.dir(a, "sub").await;
    let empty = v.dir(b, "empty").await;
    let renamed = v.rename((a, "sub"), (b, "empty"), RenameMode::Replace).await.unwrap();
    assert_eq!(renamed.replaced.unwrap().ino, empty);
    assert_eq!(v.meta.getattr_and_parent(sub).await.unwrap().1, b);
    assert_eq!(v.meta.getattr(a).await.unwrap().nlink, 2);
    assert_eq!(v.meta.getattr(b).await.unwrap().nlink, 3);
    v.assert_clean().await;
}

async fn rename_refuses_what_would_break_the_tree(kv: Arc<dyn Kv>) {
    let v = Fixture::new(kv).await;
    let a = v.dir(ROOT, "a").await;
    let b = v.dir(a, "b").await;
    let c = v.dir(b, "c").await;
    v.file(ROOT, "f").await;
    let replace = RenameMode::Replace;
    assert_eq!(kind_of(v.rename((ROOT, "a"), (c, "x"), replace).await), ErrorKind::Invalid);
    assert_eq!(kind_of(v.rename((ROOT, "a"), (a, "x"), replace).await), ErrorKind::Invalid);
    assert_eq!(kind_of(v.rename((b, "c"), (ROOT, "a"), replace).await), ErrorKind::NotEmpty);
    assert_eq!(kind_of(v.rename((ROOT, "a"), (ROOT, "f"), replace).await), ErrorKind::NotDirectory);
    assert_eq!(kind_of(v.rename((ROOT, "f"), (ROOT, "a"), replace).await), ErrorKind::IsDirectory);
    assert_eq!(kind_of(v.rename((ROOT, "x"), (ROOT, "y"), replace).await), ErrorKind::NotFound);
    let no_replace = RenameMode::NoReplace;
    assert_eq!(kind_of(v.rename((ROOT, "f"), (ROOT, "a"), no_replace).await), ErrorKind::Exists);
    assert_eq!(kind_of(v.rename((ROOT, "f"), (ROOT, "f"), no_replace).await), ErrorKind::Exists);
    v.rename((ROOT, "f"), (ROOT, "g"), no_replace).await.unwrap();
    let exchange = RenameMode::Exchange;
    assert_eq!(kind_of(v.rename((ROOT, "g"), (ROOT, "x"), exchange).await), ErrorKind::NotFound);
    assert_eq!(kind_of(v.rename((ROOT, "a"), (b, "c"), exchange).await), ErrorKind::Invalid);
    assert_eq!(kind_of(v.rename((b, "c"), (ROOT, "a"), exchange).await), ErrorKind::Invalid);
    v.assert_clean().await;
}

async fn exchange_swaps_across_kinds_and_parents(kv: Arc<dyn Kv>) {
    let v = Fixture::new(kv).await;
    let a = v.dir(ROOT, "a").await;
    let b = v.dir(ROOT, "b").await;
    let file = v.file(a, "x").await;
    let dir = v.dir(b, "y").await;
    v.tick();
    let renamed = v.rename((a, "x"), (b, "y"), RenameMode::Exchange).await.unwrap();
    assert_eq!((renamed.moved, renamed.exchanged), (file, Some(dir)));
    assert_eq!(v.meta.lookup(a, &name("x")).await.unwrap().ino, dir);
    assert_eq!(v.meta.lookup(b, &name("y")).await.unwrap().ino, file);
    assert_eq!(v.meta.getattr_and_parent(dir).await.unwrap().1, a);
    assert_eq!(v.meta.getattr(a).await.unwrap().nlink, 3);
    assert_eq!(v.meta.getattr(b).await.unwrap().nlink, 2);
    for ino in [file, dir] {
        assert_eq!(v.meta.getattr(ino).await.unwrap().ctime, v.clock.now());
    }
    let kinds = async |parent: Ino| v.meta.readdir(parent, None, 9).await.unwrap().items[0].kind;
    assert_eq!(kinds(a).await, Kind::Directory);
    assert_eq!(kinds(b).await, Kind::File);
    v.assert_clean().await;
}

async fn directories_list_in_pages(kv: Arc<dyn Kv>) {
    let v = Fixture::new(kv).await;
    let dir = v.dir(ROOT, "d").await;
    for index in 0..25 {
        v.file(dir, &format!("f{index:02}")).await;
    }
    let mut seen = Vec::new();
    let mut after: Option<Name> = None;
    loop {
        let page = v.meta.readdir(dir, after.as_ref(), 10).await.unwrap();
        after = page.items.last().map(|dentry| dentry.name.clone());
        seen.extend(page.items.into_iter().map(|dentry| dentry.name.to_string()));
        // What was listed goes, what is to come comes: the rest is not disturbed.
        if let Some(after) = &after {
            v.meta.unlink(dir, after).await.unwrap();
        }
        if !page.more {
            break;
        }
    }
    let all: Vec<String> = (0..25).map(|index| format!("f{index:02}")).collect();
    assert_eq!(seen, all);
}

async fn listing_with_attributes_sees_all(kv: Arc<dyn Kv>) {
    let v = Fixture::new(kv).await;
    let dir = v.dir(ROOT, "d").await;
    let other = v.dir(ROOT, "o").await;
    for index in 0..40 {
        v.file(dir, &format!("f{index}")).await;
        v.file(other, &format!("g{index}")).await;
    }
    v.dir(dir, "sub").await;
    let far = v.meta.lookup(other, &name("g3")).await.unwrap().ino;
    v.meta.link(LinkArgs { ino: far, parent: dir, name: &name("far") }).await.unwrap();
    let page = v.meta.readdirplus(dir, None, 100).await.unwrap();
    assert_eq!((page.items.len(), page.more), (42, false));
    for (dentry, attr) in page.items {
        assert_eq!(attr, Some(v.meta.lookup(dir, &dentry.name).await.unwrap()));
    }
    let page = v.meta.readdirplus(dir, Some(&name("f9")), 100).await.unwrap();
    assert_eq!(page.items.len(), 2, "far and sub");
}

async fn symbolic_links_keep_their_target(kv: Arc<dyn Kv>) {
    let v = Fixture::new(kv).await;
    let link = async |text: &str, target: &[u8]| {
        let name = name(text);
        let kind = Kind::Symlink;
        let target = Some(target);
        let args = MakeArgs { parent: ROOT, name: &name, kind, mode: 0, rdev: 0, target, caller: &CALLER };
        v.meta.make(args).await
    };
    let long = vec![b'x'; TARGET_BYTES_MAX];
    let made = link("l", &long).await.unwrap();
    assert_eq!((made.size, made.mode), (4095, 0o777));
    assert_eq!(v.meta.getattr(made.ino).await.unwrap(), made);
    assert_eq!(v.meta.readlink(made.ino).await.unwrap(), long);
    assert_eq!(kind_of(link("m", &[b'x'; 4096]).await), ErrorKind::NameTooLong);
    assert_eq!(kind_of(link("m", b"").await), ErrorKind::Invalid);
    assert_eq!(kind_of(v.meta.readlink(ROOT).await), ErrorKind::Invalid);
}

async fn names_are_any_bytes(kv: Arc<dyn Kv>) {
    let v = Fixture::new(kv).await;
    let odd = [vec![0xFF; 255], vec![1], b"\xFF\x00".iter().map(|b| b | 1).collect(), b"...".to_vec()];
    for bytes in &odd {
        let name = Name::new(bytes.clone()).unwrap();
        let kind = Kind::File;
        let args =
            MakeArgs { parent: ROOT, name: &name, kind, mode: 0, rdev: 0, target: None, caller: &CALLER };
        let made = v.meta.make(args).await.unwrap();
        assert_eq!(v.meta.lookup(ROOT, &name).await.unwrap().ino, made.ino);
    }
    let mut sorted = odd.to_vec();
    sorted.sort();
    let page = v.meta.readdir(ROOT, None, 10).await.unwrap();
    let listed: Vec<Vec<u8>> = page.items.iter().map(|d| d.name.as_bytes().to_vec()).collect();
    assert_eq!(listed, sorted);
}

//! Random sequences of operations, compared with a plain tree in memory.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

/// An operation on things by their index: any thing ever made, whether it is a directory, a file, or removed.
#[derive(Debug, Clone)]
enum Op {
    Make { dir: usize, name: u8, kind: Kind },
    Link { thing: usize, dir: usize, name: u8 },
    Unlink { dir: usize, name: u8 },
    Rmdir { dir: usize, name: u8 },
    Rename { from: (usize, u8), to: (usize, u8), mode: RenameMode },
    Chmod { thing: usize, mode: u16 },
}

const NAMES: u8 = 4;

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let place = || (0..12_usize, 0..NAMES);
    let kind = prop_oneof![3 => Just(Kind::Directory), 2 => Just(Kind::File), 1 => Just(Kind::Symlink)];
    let mode = prop_oneof![
        3 => Just(RenameMode::Replace),
        1 => Just(RenameMode::NoReplace),
        2 => Just(RenameMode::Exchange)
    ];
    let op = prop_oneof![
        4 => (place(), kind).prop_map(|((dir, name), kind)| Op::Make { dir, name, kind }),
        2 => (0..12_usize, place()).prop_map(|(thing, (dir, name))| Op::Link { thing, dir, name }),
        2 => place().prop_map(|(dir, name)| Op::Unlink { dir, name }),
        2 => place().prop_map(|(dir, name)| Op::Rmdir { dir, name }),
        5 => (place(), place(), mode).prop_map(|(from, to, mode)| Op::Rename { from, to, mode }),
        1 => (0..12_usize, 0..0o10000_u16).prop_map(|(thing, mode)| Op::Chmod { thing, mode }),
    ];
    proptest::collection::vec(op, 1..60)
}

#[derive(Debug)]
struct Thing {
    ino: Ino,
    kind: Kind,
    mode: u16,
    names: u32,
    parent: usize,
    entries: BTreeMap<u8, usize>,
}

/// The tree as POSIX has it.
struct Tree {
    things: Vec<Thing>,
}

impl Tree {
    fn thing(ino: Ino, kind: Kind, mode: u16, parent: usize) -> Thing {
        Thing { ino, kind, mode, names: 1, parent, entries: BTreeMap::new() }
    }

    fn is_dir(&self, thing: usize) -> bool {
        self.things[thing].kind == Kind::Directory
    }

    fn directory(&self, dir: usize) -> Result<(), ErrorKind> {
        match &self.things[dir] {
            thing if thing.kind != Kind::Directory => Err(ErrorKind::NotDirectory),
            thing if thing.names == 0 => Err(ErrorKind::NotFound),
            _ => Ok(()),
        }
    }

    fn entry(&self, dir: usize, name: u8) -> Option<usize> {
        self.things[dir].entries.get(&name).copied()
    }

    fn make(&self, dir: usize, name: u8) -> Result<(), ErrorKind> {
        self.directory(dir)?;
        if self.entry(dir, name).is_some() { Err(ErrorKind::Exists) } else { Ok(()) }
    }

    fn link(&mut self, thing: usize, dir: usize, name: u8) -> Result<(), ErrorKind> {
        self.make(dir, name)?;
        if self.is_dir(thing) {
            return Err(ErrorKind::NotPermitted);
        }
        if self.things[thing].names == 0 {
            return Err(ErrorKind::NotFound);
        }
        self.things[thing].names += 1;
        self.things[dir].entries.insert(name, thing);
        Ok(())
    }

    fn unlink(&mut self, dir: usize, name: u8) -> Result<(), ErrorKind> {
        self.directory(dir)?;
        let thing = self.entry(dir, name).ok_or(ErrorKind::NotFound)?;
        if self.is_dir(thing) {
            return Err(ErrorKind::IsDirectory);
        }
        self.things[dir].entries.remove(&name);
        self.things[thing].names -= 1;
        Ok(())
    }

    fn rmdir(&mut self, dir: usize, name: u8) -> Result<(), ErrorKind> {
        self.directory(dir)?;
        let thing = self.entry(dir, name).ok_or(ErrorKind::NotFound)?;
        if !self.is_dir(thing) {
            return Err(ErrorKind::NotDirectory);
        }
        if !self.things[thing].entries.is_empty() {
            return Err(ErrorKind::NotEmpty);
        }
        self.things[dir].entries.remove(&name);
        self.things[thing].names = 0;
        Ok(())
    }

    fn is_inside(&self, mut dir: usize, outer: usize) -> bool {
        loop {
            if dir == outer {
                return true;
            }
            if dir == 0 {
                return false;
            }
            dir = self.things[dir].parent;
        }
    }

    fn rename(&mut self, from: (usize, u8), to: (usize, u8), mode: RenameMode) -> Result<(), ErrorKind> {
        let source = self.entry(from.0, from.1).ok_or(ErrorKind::NotFound)?;
        let target = self.entry(to.0, to.1);
        match (mode, target) {
            (RenameMode::NoReplace, Some(_)) => return Err(ErrorKind::Exists),
            (RenameMode::Exchange, None) => return Err(ErrorKind::NotFound),
            (_, Some(target)) if target == source => return Ok(()),
            _ => {}
        }
        self.directory(from.0)?;
        self.directory(to.0)?;
        let exchange = mode == RenameMode::Exchange;
        if self.is_dir(source) && self.is_inside(to.0, source) {
            return Err(ErrorKind::Invalid);
        }
        if let Some(target) = target {
            if exchange {
                if self.is_dir(target) && self.is_inside(from.0, target) {
                    return Err(ErrorKind::Invalid);
                }
            } else {
                match (self.is_dir(source), self.is_dir(target)) {
                    (true, false) => return Err(ErrorKind::NotDirectory),
                    (false, true) => return Err(ErrorKind::IsDirectory),
                    (true, true) if !self.things[target].entries.is_empty() => {
                        return Err(ErrorKind::NotEmpty);
                    }
                    _ => {}
                }
                let names = &mut self.things[target].names;
                *names -= 1;
            }
        }
        self.things[from.0].entries.remove(&from.1);
        if let Some(target) = target.filter(|_| exchange) {
            self.things[from.0].entries.insert(from.1, target);
            self.things[target].parent = from.0;
        }
        self.things[to.0].entries.insert(to.1, source);
        self.things[source].parent = to.0;
        Ok(())
    }
}

async fn run(kv: Arc<dyn Kv>, ops: &[Op]) {
    let v = Fixture::new(kv).await;
    let mut tree = Tree { things: vec![Tree::thing(ROOT, Kind::Directory, 0o755, 0)] };
    for op in ops {
        apply(&v, &mut tree, op).await;
    }
    compare(&v, &tree).await;
    let orphans: Vec<Ino> =
        tree.things.iter().filter(|thing| thing.names == 0).map(|thing| thing.ino).collect();
    let reaped = v.meta.reap(&orphans).await.unwrap();
    assert_eq!(reaped.inodes, orphans.len() as u64);
    v.assert_clean().await;
}

async fn apply(v: &Fixture, tree: &mut Tree, op: &Op) {
    let count = tree.things.len();
    let pick = |index: usize| index % count;
    let ino = |index: usize| tree.things[pick(index)].ino;
    let text = |index: u8| name(&index.to_string());
    let (expected, got) = match *op {
        Op::Make { dir, name, kind } => {
            let made = v.make(ino(dir), &name.to_string(), kind).await;
            let dir = pick(dir);
            let expected = tree.make(dir, name);
            if let Ok(attr) = &made {
                tree.things.push(Tree::thing(attr.ino, kind, attr.mode, dir));
                tree.things[dir].entries.insert(name, count);
            }
            (expected, made.map(drop))
        }
        Op::Link { thing, dir, name } => {
            let args = LinkArgs { ino: ino(thing), parent: ino(dir), name: &text(name) };
            let got = v.meta.link(args).await.map(drop);
            (tree.link(pick(thing), pick(dir), name), got)
        }
        Op::Unlink { dir, name } => {
            let got = v.meta.unlink(ino(dir), &text(name)).await.map(drop);
            (tree.unlink(pick(dir), name), got)
        }
        Op::Rmdir { dir, name } => {
            let got = v.meta.rmdir(ino(dir), &text(name)).await.map(drop);
            (tree.rmdir(pick(dir), name), got)
        }
        Op::Rename { from, to, mode } => {
            let (old, new) = (from.1.to_string(), to.1.to_string());
            let got = v.rename((ino(from.0), &old), (ino(to.0), &new), mode).await.map(drop);
            (tree.rename((pick(from.0), from.1), (pick(to.0), to.1), mode), got)
        }
        Op::Chmod { thing, mode } => {
            let got = v.set(ino(thing), SetAttr { mode: Some(mode), ..SetAttr::default() }).await.map(drop);
            let thing = pick(thing);
            tree.things[thing].mode = mode;
            (Ok(()), got)
        }
    };
    assert_eq!(got.map_err(|error| error.kind), expected, "{op:?}");
}

async fn compare(v: &Fixture, tree: &Tree) {
    for thing in &tree.things {
        let attr = v.meta.getattr(thing.ino).await.unwrap();
        assert_eq!((attr.kind, attr.mode), (thing.kind, thing.mode));
        if thing.kind != Kind::Directory {
            assert_eq!(attr.nlink, thing.names);
            continue;
        }
        let subdirectories = thing.entries.values().filter(|entry| tree.is_dir(**entry)).count();
        let nlink = if thing.names == 0 { 0 } else { 2 + u32::try_from(subdirectories).unwrap() };
        assert_eq!(attr.nlink, nlink);
        if thing.names > 0 {
            let parent = v.meta.getattr_and_parent(thing.ino).await.unwrap().1;
            assert_eq!(parent, tree.things[thing.parent].ino);
        }
        let listed: Vec<(String, Ino, Kind)> = v
            .meta
            .readdirplus(thing.ino, None, 100)
            .await
            .unwrap()
            .items
            .into_iter()
            .map(|(dentry, attr)| {
                assert_eq!(attr.unwrap().ino, dentry.ino);
                (dentry.name.to_string(), dentry.ino, dentry.kind)
            })
            .collect();
        let expected: Vec<(String, Ino, Kind)> = thing
            .entries
            .iter()
            .map(|(name, entry)| (name.to_string(), tree.things[*entry].ino, tree.things[*entry].kind))
            .collect();
        assert_eq!(listed, expected);
    }
}

/// Runs a future on a runtime whose clock stands still while somebody works.
fn block_on(future: impl Future<Output = ()>) {
    tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .unwrap()
        .block_on(future);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(200) })]

    #[test]
    fn the_tree_is_as_posix_has_it(ops in ops()) {
        block_on(async { run(Arc::new(MemKv::new()), &ops).await });
    }

    #[test]
    fn the_tree_is_as_posix_has_it_whatever_commits_say(ops in ops(), seed in any::<u64>()) {
        block_on(async { run(faulty(seed), &ops).await });
    }
}

//! Paths of inodes, for people.
//!
//! An inode does not know its names, so all names are read once, in pages; that takes about 100 bytes of memory for each
//! directory. Reads the metadata only, and trusts it no further than it must: a loop of directories ends.

use std::collections::{HashMap, HashSet};

use crate::meta::{DentryInfo, Meta};
use crate::types::{Ino, Kind, Name, Result};

/// Names that are read at a time.
const PAGE: usize = 2048;
/// Deeper directories than this are a loop: the kernel's limit of a path is 4,096 bytes.
const DEPTH_MAX: usize = 2048;

/// A path from the root of the volume for each of `wanted` that has a name; of several names, one.
///
/// # Errors
/// `Io`: the metadata cannot be read.
pub(super) async fn paths_of(meta: &Meta, wanted: &HashSet<Ino>) -> Result<HashMap<Ino, String>> {
    let mut names: HashMap<Ino, (Ino, Name)> = HashMap::new();
    if wanted.is_empty() {
        return Ok(HashMap::new());
    }
    let mut after: Option<(Ino, Name)> = None;
    loop {
        let cursor = after.as_ref().map(|(dir, name)| (*dir, name));
        let page = meta.scan_dentries(cursor, PAGE).await?;
        after = page.items.last().map(|last| (last.dir, last.dentry.name.clone()));
        for DentryInfo { dir, dentry } in page.items {
            if dentry.kind == Kind::Directory || wanted.contains(&dentry.ino) {
                names.entry(dentry.ino).or_insert((dir, dentry.name));
            }
        }
        if !page.more {
            break;
        }
    }
    Ok(wanted.iter().filter_map(|ino| Some((*ino, path(&names, *ino)?))).collect())
}

fn path(names: &HashMap<Ino, (Ino, Name)>, ino: Ino) -> Option<String> {
    if ino == Ino::ROOT {
        return Some("/".to_owned());
    }
    let mut parts = Vec::new();
    let mut at = ino;
    while at != Ino::ROOT && parts.len() < DEPTH_MAX {
        let (dir, name) = names.get(&at)?;
        parts.push(name.to_string());
        at = *dir;
    }
    parts.reverse();
    (at == Ino::ROOT).then(|| format!("/{}", parts.join("/")))
}

//! What a pass of the check knows of all inodes, in little memory: 24 bytes for each that is no directory. Those are nearly
//! all, and a volume may have very many.

use hashbrown::HashMap;

use crate::meta::inode::Node;
use crate::types::{CHUNK_BYTES, ChunkIndex, Ino, Kind};

/// All inodes of a volume.
#[derive(Debug, Default)]
pub(super) struct Inodes {
    /// In the order of their numbers.
    others: Vec<Other>,
    pub(super) directories: HashMap<Ino, Directory>,
}

/// Anything but a directory.
#[derive(Debug)]
pub(super) struct Other {
    pub(super) ino: Ino,
    pub(super) nlink: u32,
    pub(super) names: u32,
    /// First chunk beyond the end; `u32::MAX`: that far nothing is checked, nor while chunks are being trimmed.
    beyond: u32,
    pub(super) kind: Kind,
    pub(super) is_orphan: bool,
}

impl Other {
    /// First chunk beyond the end, if slices there are damage.
    pub(super) fn beyond(&self) -> Option<ChunkIndex> {
        Some(self.beyond).filter(|beyond| *beyond != u32::MAX).map(|beyond| ChunkIndex(beyond.into()))
    }
}

#[derive(Debug)]
pub(super) struct Directory {
    pub(super) nlink: u32,
    pub(super) parent: Ino,
    pub(super) subdirectories_stored: i64,
    pub(super) names: u32,
    pub(super) has_entries: bool,
    pub(super) subdirectories: i64,
    /// Where the name lies that counts.
    pub(super) named_in: Option<Ino>,
    pub(super) is_orphan: bool,
    pub(super) walk: Walk,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Walk {
    New,
    Open,
    Done,
}

/// One inode.
pub(super) enum Known<'a> {
    Directory(&'a mut Directory),
    Other(&'a mut Other),
}

impl Inodes {
    /// Takes the next inode; they come in the order of their numbers.
    pub(super) fn push(&mut self, node: &Node) {
        if node.inode.kind == Kind::Directory {
            let directory = Directory {
                nlink: node.inode.nlink,
                parent: node.inode.parent,
                subdirectories_stored: node.subdirectories,
                names: 0,
                has_entries: false,
                subdirectories: 0,
                named_in: None,
                is_orphan: false,
                walk: Walk::New,
            };
            self.directories.insert(node.ino, directory);
            return;
        }
        assert!(self.others.last().is_none_or(|last| last.ino < node.ino), "inodes are read in order");
        let trimming = node.truncation.trim_from.is_some();
        let beyond = u32::try_from(node.length.div_ceil(CHUNK_BYTES)).ok().filter(|_| !trimming);
        self.others.push(Other {
            ino: node.ino,
            nlink: node.inode.nlink,
            names: 0,
            beyond: beyond.unwrap_or(u32::MAX),
            kind: node.inode.kind,
            is_orphan: false,
        });
    }

    pub(super) fn len(&self) -> usize {
        self.others.len() + self.directories.len()
    }

    pub(super) fn contains(&self, ino: Ino) -> bool {
        self.other(ino).is_some() || self.directories.contains_key(&ino)
    }

    pub(super) fn other(&self, ino: Ino) -> Option<&Other> {
        let index = self.others.binary_search_by_key(&ino, |other| other.ino).ok()?;
        Some(&self.others[index])
    }

    pub(super) fn get_mut(&mut self, ino: Ino) -> Option<Known<'_>> {
        match self.others.binary_search_by_key(&ino, |other| other.ino) {
            Ok(index) => Some(Known::Other(&mut self.others[index])),
            Err(_) => self.directories.get_mut(&ino).map(Known::Directory),
        }
    }

    pub(super) fn others(&self) -> impl Iterator<Item = &Other> {
        self.others.iter()
    }
}

//! Which files are open for writing: those of which the kernel's write-back cache may hold bytes that it has not sent.
//!
//! A file's last writing handle is released only after its dirty pages were sent, also those of memory maps, so a file that
//! is not here has none. One lock, taken for a few instructions at open and release.

use std::collections::HashMap;

use parking_lot::Mutex;
use rfs_core::types::Ino;

/// The handles that can write, by file.
#[derive(Debug, Default)]
pub(crate) struct Writers(Mutex<HashMap<Ino, Open>>);

/// A file that is open for writing.
#[derive(Debug, Default)]
struct Open {
    handles: u32,
    /// Whether the kernel sends the file's times after a call that changed it by itself.
    times_follow: bool,
}

impl Writers {
    /// A writing handle of `ino` was opened.
    pub(crate) fn opened(&self, ino: Ino) {
        self.0.lock().entry(ino).or_default().handles += 1;
    }

    /// A writing handle of `ino` was released.
    pub(crate) fn released(&self, ino: Ino) {
        let mut files = self.0.lock();
        if let Some(open) = files.get_mut(&ino) {
            open.handles -= 1;
            if open.handles == 0 {
                files.remove(&ino);
            }
        }
    }

    /// fallocate(2) or `copy_file_range(2)` changes `ino`.
    pub(crate) fn changing(&self, ino: Ino) {
        if let Some(open) = self.0.lock().get_mut(&ino) {
            open.times_follow = true;
        }
    }

    /// Whether such a call changed `ino` since it was opened.
    pub(crate) fn times_follow(&self, ino: Ino) -> bool {
        self.0.lock().get(&ino).is_some_and(|open| open.times_follow)
    }

    /// Whether any file is open for writing.
    pub(crate) fn any(&self) -> bool {
        !self.0.lock().is_empty()
    }

    /// Whether `ino` is open for writing.
    pub(crate) fn has(&self, ino: Ino) -> bool {
        self.0.lock().contains_key(&ino)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_has_writers_until_the_last_is_released() {
        let writers = Writers::default();
        writers.opened(Ino(2));
        writers.opened(Ino(2));
        writers.released(Ino(2));
        assert!(writers.has(Ino(2)) && !writers.has(Ino(3)));
        writers.released(Ino(2));
        writers.released(Ino(2));
        assert!(!writers.has(Ino(2)));
    }
}

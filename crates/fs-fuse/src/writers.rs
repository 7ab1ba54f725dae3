//! Which files are open for writing: those of which the kernel's write-back cache may hold bytes that it has not sent.
//!
//! A file's last writing handle is released only after its dirty pages were sent, also those of memory maps, so a file that
//! is not here has none. One lock, taken for a few instructions at open and release.

use std::collections::HashMap;

use parking_lot::Mutex;
use rfs_core::types::Ino;

/// How many handles can write, by file.
#[derive(Debug, Default)]
pub(crate) struct Writers(Mutex<HashMap<Ino, u32>>);

impl Writers {
    /// A writing handle of `ino` was opened.
    pub(crate) fn opened(&self, ino: Ino) {
        *self.0.lock().entry(ino).or_default() += 1;
    }

    /// A writing handle of `ino` was released.
    pub(crate) fn released(&self, ino: Ino) {
        let mut files = self.0.lock();
        if let Some(handles) = files.get_mut(&ino) {
            *handles -= 1;
            if *handles == 0 {
                files.remove(&ino);
            }
        }
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

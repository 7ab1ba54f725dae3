//! Where listings of directories go on: which name a cookie stands for.
//!
//! A cookie is a hash of a name, so it means the same to every listing of the directory, and going on after it is going on
//! after that name, whatever has come and gone. Two names of one directory with the same hash of 63 bits are not expected.
//! Remembered are, for each directory that the kernel knows, the names that its last pages stopped at, so that the next page
//! need not search, and the names that were removed last: those are nowhere else to be found. Both are bounded. The locks
//! are leaves.

use std::collections::{HashMap, VecDeque};

use parking_lot::Mutex;
use xxhash_rust::xxh3::xxh3_64;

use super::handle::{shard_of, shards};
use crate::types::{Ino, Name};

/// Cookies of `.` and `..`; those of names are greater.
pub(super) const COOKIE_DOT: u64 = 1;
pub(super) const COOKIE_DOT_DOT: u64 = 2;

/// Names that are remembered of a directory: what was listed last, by some at once, of whom one is slow.
const STOPS_MAX: usize = 128;
/// Memory for removed names, of which there are two generations.
const REMOVED_BYTES_MAX: usize = 16 << 20;
/// What a removed name takes beside its bytes.
const REMOVED_OVERHEAD: usize = 100;

/// Where to go on after the entry `name`.
pub(super) fn cookie_of(name: &Name) -> u64 {
    // Offsets of files are signed.
    (xxh3_64(name.as_bytes()) >> 1).max(COOKIE_DOT_DOT + 1)
}

type Stops = Mutex<HashMap<Ino, VecDeque<Name>>>;

/// Names that cookies stand for.
#[derive(Debug)]
pub(super) struct Places {
    stops: Box<[Stops]>,
    removed: Mutex<Removed>,
}

#[derive(Debug, Default)]
struct Removed {
    recent: HashMap<(Ino, u64), Name>,
    recent_bytes: usize,
    older: HashMap<(Ino, u64), Name>,
}

impl Places {
    pub(super) fn new() -> Places {
        Places { stops: shards(), removed: Mutex::default() }
    }

    /// A page of a listing of `dir` ended with `name`.
    pub(super) fn stopped_at(&self, dir: Ino, name: Name) {
        let mut stops = shard_of(&self.stops, dir.0).lock();
        let stops = stops.entry(dir).or_default();
        stops.retain(|stop| *stop != name);
        stops.push_front(name);
        stops.truncate(STOPS_MAX);
    }

    /// The names that pages of `dir` ended with, the last one first.
    pub(super) fn stops(&self, dir: Ino) -> Vec<Name> {
        let stops = shard_of(&self.stops, dir.0).lock();
        stops.get(&dir).map_or_else(Vec::new, |stops| stops.iter().cloned().collect())
    }

    /// `dir` is about to lose `name`; earlier than it does, so that no listing goes on meanwhile and finds neither.
    pub(super) fn removed(&self, dir: Ino, name: &Name) {
        // Only who lists it has cookies of a directory.
        if shard_of(&self.stops, dir.0).lock().contains_key(&dir) {
            self.removed.lock().push(dir, name);
        }
    }

    /// The name that a page ended with, or that was removed, and that `cookie` stands for.
    pub(super) fn name(&self, dir: Ino, cookie: u64) -> Option<Name> {
        let stop = {
            let stops = shard_of(&self.stops, dir.0).lock();
            stops.get(&dir).and_then(|stops| stops.iter().find(|stop| cookie_of(stop) == cookie).cloned())
        };
        stop.or_else(|| self.removed.lock().name(dir, cookie))
    }

    /// The kernel no longer knows `dir`, so nobody lists it.
    pub(super) fn forget(&self, dir: Ino) {
        shard_of(&self.stops, dir.0).lock().remove(&dir);
    }
}

impl Removed {
    fn push(&mut self, dir: Ino, name: &Name) {
        self.recent_bytes += name.as_bytes().len() + REMOVED_OVERHEAD;
        if self.recent_bytes > REMOVED_BYTES_MAX / 2 {
            self.older = std::mem::take(&mut self.recent);
            self.recent_bytes = 0;
        }
        self.recent.insert((dir, cookie_of(name)), name.clone());
    }

    fn name(&self, dir: Ino, cookie: u64) -> Option<Name> {
        self.recent.get(&(dir, cookie)).or_else(|| self.older.get(&(dir, cookie))).cloned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIR: Ino = Ino(7);

    fn name(number: usize) -> Name {
        Name::new(format!("{number:0>50}").into_bytes()).unwrap()
    }

    #[test]
    fn the_last_stops_and_many_removed_names_are_remembered_and_no_more() {
        let places = Places::new();
        places.removed(DIR, &name(0));
        assert_eq!(places.name(DIR, cookie_of(&name(0))), None, "nobody has listed it");
        for number in 0..1000 {
            places.stopped_at(DIR, name(number));
        }
        assert_eq!(places.stops(DIR), (1000 - STOPS_MAX..1000).rev().map(name).collect::<Vec<_>>());
        let count = 300_000;
        for number in 0..count {
            places.removed(DIR, &name(number));
        }
        let remembered = |number| places.name(DIR, cookie_of(&name(number))) == Some(name(number));
        assert!((count - 50_000..count).all(remembered));
        assert!(
            (0..count).filter(|number| remembered(*number)).count() * 150
                < REMOVED_BYTES_MAX + 150 * STOPS_MAX
        );
        places.forget(DIR);
        assert_eq!(places.stops(DIR), []);
    }
}

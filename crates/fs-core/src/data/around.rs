//! Reading on in a pack: files that were written together are often read together.
//!
//! Whoever reads a small file knows nothing of its neighbours' blocks, but their bytes are near it in the pack. When
//! fetches of small runs fell close to each other, the next one brings a whole *window*: the aligned part of the pack that
//! it lies in, of 256 KiB, and of twice as much each time up to a limit; of less again where windows went largely unused.
//! Aligned, so that many readers who go through a pack side by side share windows, whoever of them comes first. A window
//! that is half used has the next one fetched. Windows hold stored bytes that nobody has checked: a reader checks what it
//! takes, as if it came from the store. A window that is still on the way is waited for.
//! Lock order: the state is a leaf.

use std::collections::VecDeque;
use std::ops::Range;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::watch;

use crate::types::PackId;

/// Packs whose readers are followed; the one forgotten is the one followed for longest.
const TRAILS_MAX: usize = 32;
/// Fetches of one pack that are remembered: so many readers may go through it side by side.
const RECENT_MAX: usize = 16;
/// Fetches this close to a remembered one seem to belong together.
const NEAR_BYTES: u64 = 256 << 10;
/// Fetches that belong together before a window is brought.
const STEPS: u32 = 2;
const FIRST_BYTES: u64 = 256 << 10;

/// Windows on packs that are being read through.
#[derive(Debug)]
pub(super) struct Around {
    /// Largest window; 0 turns this off.
    bytes_max: u64,
    /// All windows; those not used for longest go.
    memory_bytes: u64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    windows: Vec<Window>,
    trails: VecDeque<Trail>,
    /// Counts uses of windows.
    uses: u64,
}

#[derive(Debug)]
struct Window {
    pack: PackId,
    range: Range<u64>,
    /// Nothing while it is on the way; closed if it never came.
    body: watch::Receiver<Option<Bytes>>,
    /// Bytes that were taken from it.
    taken: u64,
    /// When it was last used.
    used_at: u64,
}

impl Window {
    fn len(&self) -> u64 {
        self.range.end - self.range.start
    }

    fn is_spent(&self) -> bool {
        self.taken >= self.len() / 8 * 7
    }

    /// Whether it never came.
    fn is_lost(&self) -> bool {
        self.body.has_changed().is_err() && self.body.borrow().is_none()
    }

    /// Whether the pack ended before the window did.
    fn is_last(&self) -> bool {
        self.body.borrow().as_ref().is_some_and(|body| (body.len() as u64) < self.len())
    }
}

/// A part of a window that somebody wants.
#[derive(Debug)]
struct Held {
    range: Range<u64>,
    /// Where the window begins.
    start: u64,
    body: watch::Receiver<Option<Bytes>>,
}

impl Held {
    /// The bytes, when the window has come; nothing if it has not, or ends before.
    async fn bytes(&mut self) -> Option<Bytes> {
        let body = self.body.wait_for(Option::is_some).await.ok()?.clone()?;
        let from = usize::try_from(self.range.start - self.start).ok()?;
        let to = usize::try_from(self.range.end - self.start).ok()?;
        (to <= body.len()).then(|| body.slice(from..to))
    }
}

/// How one pack is read.
#[derive(Debug)]
struct Trail {
    pack: PackId,
    /// Where the last fetches began, the newest last.
    recent: VecDeque<u64>,
    /// Of these, how many were close to others; less those that were not.
    steps: u32,
    /// Size of the next window; 0 before the first.
    bytes: u64,
}

/// The promise to fill a window; dropped without that, those who wait fetch for themselves.
#[derive(Debug)]
pub(super) struct Claim {
    /// The window: what is to be fetched, as far as the pack has it.
    pub(super) range: Range<u64>,
    body: watch::Sender<Option<Bytes>>,
}

impl Claim {
    /// The window's bytes, from its beginning on.
    pub(super) fn fill(self, body: Bytes) {
        self.body.send_replace(Some(body));
    }
}

impl Around {
    /// Windows of at most `bytes_max` and a quarter of `memory_bytes`, which is the limit for all of them.
    pub(super) fn new(bytes_max: u32, memory_bytes: u64) -> Around {
        let bytes_max = u64::from(bytes_max).min(memory_bytes / 4);
        Around { bytes_max, memory_bytes, state: Mutex::default() }
    }

    /// The stored bytes, unchecked, if windows have them; waits for one that is on the way. Along with them the window
    /// that comes next, if it is time to fetch it.
    pub(super) async fn get(&self, pack: PackId, range: Range<u64>) -> (Option<Bytes>, Option<Claim>) {
        let (held, next) = {
            let mut state = self.state.lock();
            state.windows.retain(|window| !window.is_lost());
            let Some(held) = state.take(pack, &range) else { return (None, None) };
            (held, self.next(&mut state, pack, range.end))
        };
        let mut bytes = Bytes::new();
        for mut part in held {
            let Some(part) = part.bytes().await else { return (None, next) };
            bytes = if bytes.is_empty() { part } else { [bytes, part].concat().into() };
        }
        (Some(bytes), next)
    }

    /// Notes that `range`, of small runs, is going to be fetched; the window to fetch instead, if that seems worth it.
    pub(super) fn extend(&self, pack: PackId, range: &Range<u64>) -> Option<Claim> {
        if self.bytes_max == 0 {
            return None;
        }
        let mut state = self.state.lock();
        let bytes = state.follow(pack, range.start, self.bytes_max)?;
        let mut start = range.start - range.start % bytes;
        let mut end = range.end.next_multiple_of(bytes);
        for window in state.windows.iter().filter(|window| window.pack == pack) {
            if window.range.start <= range.start {
                start = start.max(window.range.end.min(range.start));
            } else {
                end = end.min(window.range.start.max(range.end));
            }
        }
        Some(state.open(pack, start..end, self.memory_bytes))
    }

    /// The window after the one that holds the byte before `end`, if half of that is used and the next one is not there.
    fn next(&self, state: &mut State, pack: PackId, end: u64) -> Option<Claim> {
        let window = state.holding(pack, end - 1)?;
        let half_used = window.taken >= window.len() / 2;
        if window.len() < FIRST_BYTES || !half_used || window.is_last() {
            return None;
        }
        let start = window.range.end;
        if state.windows.iter().any(|other| other.pack == pack && other.range.contains(&start)) {
            return None;
        }
        let trail = state.trails.iter_mut().find(|trail| trail.pack == pack)?;
        let bytes = trail.grow(self.bytes_max);
        Some(state.open(pack, start..(start + 1).next_multiple_of(bytes), self.memory_bytes))
    }
}

impl State {
    fn holding(&mut self, pack: PackId, at: u64) -> Option<&mut Window> {
        self.windows.iter_mut().rev().find(|window| window.pack == pack && window.range.contains(&at))
    }

    /// Where `range` is, in one window or in two that follow each other, whose use is noted.
    fn take(&mut self, pack: PackId, range: &Range<u64>) -> Option<Vec<Held>> {
        let first = self.holding(pack, range.start)?.range.end;
        if first < range.end && self.holding(pack, first)?.range.end < range.end {
            return None;
        }
        let mut held = Vec::with_capacity(2);
        let mut at = range.start;
        while at < range.end {
            self.uses += 1;
            let used_at = self.uses;
            let window = self.holding(pack, at)?;
            let end = range.end.min(window.range.end);
            window.taken += end - at;
            window.used_at = used_at;
            held.push(Held { range: at..end, start: window.range.start, body: window.body.clone() });
            at = end;
        }
        Some(held)
    }

    /// Notes a fetch of a small run; the size of the window to fetch around it.
    fn follow(&mut self, pack: PackId, at: u64, bytes_max: u64) -> Option<u64> {
        let Some(trail) = self.trails.iter_mut().find(|trail| trail.pack == pack) else {
            if self.trails.len() >= TRAILS_MAX {
                self.trails.pop_front();
            }
            self.trails.push_back(Trail { pack, recent: VecDeque::from([at]), steps: 0, bytes: 0 });
            return None;
        };
        let near = trail.recent.iter().any(|other| other.abs_diff(at) <= NEAR_BYTES);
        if trail.recent.len() == RECENT_MAX {
            trail.recent.pop_front();
        }
        trail.recent.push_back(at);
        trail.steps = if near { trail.steps.saturating_add(1) } else { trail.steps.saturating_sub(1) };
        (near && trail.steps >= STEPS).then(|| trail.grow(bytes_max))
    }

    /// Adds a window that is on its way, and makes room for it.
    fn open(&mut self, pack: PackId, range: Range<u64>, memory_bytes: u64) -> Claim {
        let (sender, body) = watch::channel(None);
        let bytes = range.end - range.start;
        let mut total: u64 = self.windows.iter().map(Window::len).sum();
        while total + bytes > memory_bytes {
            let oldest = self.windows.iter().enumerate();
            let oldest = oldest.min_by_key(|(_, window)| (!window.is_spent(), window.used_at));
            let Some((index, _)) = oldest else { break };
            let gone = self.windows.swap_remove(index);
            total -= gone.len();
            if gone.taken < gone.len() / 4
                && let Some(trail) = self.trails.iter_mut().find(|trail| trail.pack == gone.pack)
            {
                trail.shrink();
            }
        }
        self.uses += 1;
        self.windows.push(Window { pack, range: range.clone(), body, taken: 0, used_at: self.uses });
        Claim { range, body: sender }
    }
}

impl Trail {
    /// The size of the next window.
    fn grow(&mut self, bytes_max: u64) -> u64 {
        self.bytes = (self.bytes * 2).max(FIRST_BYTES).min(bytes_max);
        self.bytes
    }

    /// A window brought little that was wanted.
    fn shrink(&mut self) {
        self.bytes /= 8;
        if self.bytes < FIRST_BYTES {
            self.bytes = 0;
            self.steps = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    const PACK: PackId = PackId(1);
    const FILE: u64 = 64 << 10;
    const MEMORY: u64 = 16 << 20;

    fn get(around: &Around, at: u64) -> Option<Bytes> {
        around.get(PACK, at..at + FILE).now_or_never().expect("nothing is on its way").0
    }

    /// Reads a file; the bytes that were fetched for it.
    fn read(around: &Around, at: u64) -> u64 {
        let filled = |claim: Claim| {
            let len = claim.range.end - claim.range.start;
            claim.fill(Bytes::from(vec![0; usize::try_from(len).unwrap()]));
            len
        };
        match around.get(PACK, at..at + FILE).now_or_never().expect("nothing is on its way") {
            (Some(_), next) => next.map_or(0, filled),
            (None, _) => around.extend(PACK, &(at..at + FILE)).map_or(FILE, filled),
        }
    }

    #[test]
    fn what_lies_close_is_fetched_in_growing_windows() {
        let around = Around::new(4 << 20, MEMORY);
        let fetched: Vec<u64> =
            (0..1024).map(|file| read(&around, 64 + file * FILE)).filter(|bytes| *bytes > 0).collect();
        assert!(fetched.len() <= 24, "{fetched:?}");
        assert_eq!(fetched.iter().max(), Some(&(4 << 20)));
        let total: u64 = fetched.iter().sum();
        assert!(total <= (64 << 20) + (8 << 20), "little is fetched twice or for nothing: {total}");
    }

    #[test]
    fn readers_side_by_side_share_windows() {
        let around = Around::new(4 << 20, MEMORY);
        // Sixteen readers, each of every sixteenth file, who do not keep step.
        let mut files: Vec<u64> = (0..1024).collect();
        files.sort_by_key(|file| file / 16 + (file % 16) % 5);
        let fetches = files.iter().filter(|file| read(&around, **file * FILE) > 0).count();
        assert!(fetches <= 40, "{fetches}");
    }

    #[test]
    fn readers_of_different_places_have_windows_of_their_own() {
        let around = Around::new(1 << 20, MEMORY);
        let places = (0..64).flat_map(|file| (0..4).map(move |place| (place << 24) + file * FILE));
        let fetches = places.filter(|at| read(&around, *at) > 0).count();
        assert!(fetches <= 4 * (3 + 8), "{fetches}");
    }

    #[test]
    fn what_is_read_at_random_is_fetched_alone() {
        let around = Around::new(4 << 20, MEMORY);
        let files = 1 << 14;
        let fetched: u64 = (0..2000u64).map(|step| read(&around, step * 7919 % files * FILE)).sum();
        assert!(fetched <= 2000 * FILE * 5 / 4, "{fetched}");
        assert_eq!(read(&Around::new(0, MEMORY), 0), FILE);
    }

    #[test]
    fn a_window_is_waited_for_unless_it_never_comes() {
        let around = Around::new(1 << 20, MEMORY);
        let claim = |at: u64| {
            (0..3).find_map(|step| around.extend(PACK, &(at + step..at + step + 1))).expect("a window")
        };
        let first = claim(0);
        let mut waiting = Box::pin(around.get(PACK, 10..20));
        assert!((&mut waiting).now_or_never().is_none());
        first.fill(Bytes::from(vec![7; 15]));
        assert_eq!(around.get(PACK, 4..9).now_or_never().unwrap().0.unwrap(), [7; 5].as_slice());
        assert_eq!(waiting.now_or_never().unwrap().0, None, "the pack ends before");
        let second = claim(100 << 20);
        let mut waiting = Box::pin(around.get(PACK, (100 << 20) + 10..(100 << 20) + 20));
        assert!((&mut waiting).now_or_never().is_none());
        drop(second);
        assert_eq!(waiting.now_or_never().unwrap().0, None);
        assert_eq!(get(&around, 200 << 20), None);
        assert_eq!(
            around.extend(PACK, &((100 << 20) + 10..(100 << 20) + 20)).map(|claim| claim.range.end),
            Some(101 << 20)
        );
    }

    #[test]
    fn windows_take_a_bounded_amount_of_memory() {
        let around = Around::new(4 << 20, MEMORY);
        for place in 0..64u64 {
            for file in 0..32 {
                read(&around, (place << 28) + file * FILE);
                let bytes: u64 = around.state.lock().windows.iter().map(Window::len).sum();
                assert!(bytes <= MEMORY, "{bytes}");
            }
        }
    }
}

//! Reading on in a pack: files that were written together are often read together.
//!
//! Whoever reads a small file knows nothing of its neighbours' blocks, but their bytes come next in the pack. When
//! several small fetches followed each other, the next one brings more than was asked for: 256 KiB, and twice as much
//! each time up to a limit. These windows hold stored bytes that nobody has checked: a reader checks what it takes, as if
//! it came from the store. A window that is still on the way is waited for.
//! Lock order: the state is a leaf.

use std::collections::VecDeque;
use std::ops::Range;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::watch;

use crate::types::PackId;

/// Bytes of all windows; the oldest go.
const WINDOWS_BYTES_MAX: u64 = 16 << 20;
/// Packs whose readers are followed; the one forgotten is the one followed for longest.
const TRAILS_MAX: usize = 32;
/// Fetches this close to each other follow each other.
const NEAR_BYTES: u64 = 256 << 10;
/// Fetches that follow each other before more is brought.
const STEPS: u32 = 2;
const FIRST_BYTES: u32 = 256 << 10;

/// Windows on packs that are being read through.
#[derive(Debug)]
pub(super) struct Around {
    /// Largest window; 0 turns this off.
    bytes_max: u32,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    windows: VecDeque<Window>,
    trails: VecDeque<Trail>,
}

#[derive(Debug)]
struct Window {
    pack: PackId,
    range: Range<u64>,
    /// Nothing while it is on the way; closed if it never came.
    body: watch::Receiver<Option<Bytes>>,
}

/// How one pack is read.
#[derive(Debug)]
struct Trail {
    pack: PackId,
    end: u64,
    steps: u32,
    bytes: u32,
}

/// The promise to fill a window; dropped without that, those who wait fetch for themselves.
#[derive(Debug)]
pub(super) struct Claim {
    /// Where the window ends (or the pack, if it is shorter).
    pub(super) end: u64,
    body: watch::Sender<Option<Bytes>>,
}

impl Claim {
    /// The window's bytes, from the beginning of the fetch on.
    pub(super) fn fill(self, body: Bytes) {
        self.body.send_replace(Some(body));
    }
}

impl Around {
    pub(super) fn new(bytes_max: u32) -> Around {
        Around { bytes_max, state: Mutex::default() }
    }

    /// The stored bytes, unchecked, if a window has them; waits for one that is on the way.
    pub(super) async fn get(&self, pack: PackId, range: Range<u64>) -> Option<Bytes> {
        let (start, mut body) = {
            let state = self.state.lock();
            let holds = |window: &&Window| {
                window.pack == pack && window.range.start <= range.start && range.end <= window.range.end
            };
            let window = state.windows.iter().rev().find(holds)?;
            (window.range.start, window.body.clone())
        };
        let body = body.wait_for(Option::is_some).await.ok()?.clone()?;
        let from = usize::try_from(range.start - start).ok()?;
        let to = usize::try_from(range.end - start).ok()?;
        (to <= body.len()).then(|| body.slice(from..to))
    }

    /// Notes that `range` is going to be fetched; tells how far to read on, if that seems worth it.
    pub(super) fn extend(&self, pack: PackId, range: &Range<u64>) -> Option<Claim> {
        if self.bytes_max == 0 {
            return None;
        }
        let mut state = self.state.lock();
        let index = state.trails.iter().position(|trail| trail.pack == pack);
        let Some(trail) = index.and_then(|index| state.trails.get_mut(index)) else {
            if state.trails.len() >= TRAILS_MAX {
                state.trails.pop_front();
            }
            state.trails.push_back(Trail { pack, end: range.end, steps: 0, bytes: 0 });
            return None;
        };
        if range.start > trail.end + NEAR_BYTES || range.start + NEAR_BYTES < trail.end {
            *trail = Trail { pack, end: range.end, steps: 0, bytes: 0 };
            return None;
        }
        trail.steps = trail.steps.saturating_add(1);
        trail.end = trail.end.max(range.end);
        if trail.steps < STEPS {
            return None;
        }
        trail.bytes = trail.bytes.saturating_mul(2).max(FIRST_BYTES).min(self.bytes_max);
        let end = range.end + u64::from(trail.bytes);
        trail.end = end;
        let (sender, body) = watch::channel(None);
        state.windows.push_back(Window { pack, range: range.start..end, body });
        let bytes = |window: &Window| window.range.end - window.range.start;
        let mut total: u64 = state.windows.iter().map(bytes).sum();
        while total > WINDOWS_BYTES_MAX
            && let Some(oldest) = state.windows.pop_front()
        {
            total -= bytes(&oldest);
        }
        Some(Claim { end, body: sender })
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    const PACK: PackId = PackId(1);

    #[test]
    fn only_what_follows_is_read_on_and_windows_grow_to_a_bound() {
        let around = Around::new(1 << 20);
        for far in 0..10u64 {
            assert!(around.extend(PACK, &(far << 20..(far << 20) + 100)).is_none());
        }
        let mut at = 20 << 20;
        let mut sizes = Vec::new();
        for _ in 0..6 {
            let end = around.extend(PACK, &(at..at + 100)).map_or(at + 100, |claim| claim.end);
            sizes.push(end - at - 100);
            at = end;
        }
        assert_eq!(sizes, [0, 0, 256 << 10, 512 << 10, 1 << 20, 1 << 20]);
        assert!(Around::new(0).extend(PACK, &(0..1)).is_none());
    }

    #[test]
    fn a_window_is_waited_for_unless_it_never_comes() {
        let around = Around::new(1 << 20);
        let claim =
            |at: u64| (0..3).find_map(|step| around.extend(PACK, &(at + step..at + step + 1))).unwrap();
        let first = claim(0);
        let mut waiting = Box::pin(around.get(PACK, 10..20));
        assert!((&mut waiting).now_or_never().is_none());
        first.fill(Bytes::from(vec![7; 15]));
        assert_eq!(around.get(PACK, 4..9).now_or_never().unwrap().unwrap(), [7; 5].as_slice());
        assert_eq!(waiting.now_or_never().unwrap(), None, "the pack ends before");
        let second = claim(100 << 20);
        let mut waiting = Box::pin(around.get(PACK, (100 << 20) + 10..(100 << 20) + 20));
        assert!((&mut waiting).now_or_never().is_none());
        drop(second);
        assert_eq!(waiting.now_or_never().unwrap(), None);
        assert_eq!(around.get(PackId(2), 4..9).now_or_never().unwrap(), None);
    }
}

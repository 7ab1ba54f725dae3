//! When to fetch what will probably be read next.
//!
//! Pure: one [`Readahead`] a handle tells sequential streams apart (a few at a time, as when several threads read one
//! file) and says which range to bring into the cache. The window doubles while the stream goes on. It is asked for in
//! *units* of which two or more fit into it, and which begin at multiples of their size, as do the chunks that files are
//! written in: a fetch is as long as the window allows, and ends where the pack does.

use std::ops::Range;

/// Streams that one handle is followed in.
const STREAMS: usize = 4;
/// Reads that go on before something is fetched ahead, unless the first was of the file's beginning.
const STEPS: u32 = 2;
/// The first window of a stream.
const WINDOW_MIN: u64 = 512 << 10;
/// The largest unit; a power of two, as all of them.
const UNIT_MAX: u64 = 8 << 20;
/// A read so far before or after the expected place still belongs to the stream: the kernel asks for what it reads ahead,
/// up to 4 MiB, in several requests at a time, and several threads take them.
const SLACK: u64 = 4 << 20;
/// But no farther than so many requests: small ones here and there in a file are often near each other.
const SLACK_REQUESTS: u64 = 8;

/// Streams of one handle.
#[derive(Debug, Default)]
pub(super) struct Readahead {
    streams: Vec<Stream>,
}

#[derive(Debug, Clone, Copy)]
struct Stream {
    /// Where the next read is expected.
    next: u64,
    /// Until where has been asked for.
    ahead: u64,
    window: u64,
    /// Reads that went on where it was.
    steps: u32,
}

impl Readahead {
    /// Notes a read and returns what to prefetch, if anything. `window_max` 0 turns it off.
    pub(super) fn advance(&mut self, offset: u64, len: u64, window_max: u64) -> Option<Range<u64>> {
        if window_max == 0 || len == 0 {
            return None;
        }
        let end = offset + len;
        let slack = SLACK.min(SLACK_REQUESTS * len);
        let near = |s: &Stream| offset <= s.next + slack && end + slack > s.next;
        let Some(index) = self.streams.iter().position(near) else {
            if self.streams.len() == STREAMS {
                self.streams.remove(0);
            }
            // Only a read of the beginning is taken for the start of a stream at once. A kernel that reads ahead itself
            // sends several such requests together.
            let window = if offset == 0 { WINDOW_MIN.max(4 * len).next_power_of_two() } else { 0 };
            let mut stream = Stream { next: end, ahead: end, window, steps: 0 };
            let range = stream.extend(window_max);
            self.streams.push(stream);
            return range;
        };
        let mut stream = self.streams.remove(index);
        let forward = end > stream.next;
        stream.next = stream.next.max(end);
        stream.ahead = stream.ahead.max(stream.next);
        stream.steps += u32::from(forward && stream.steps < STEPS);
        let goes_on = stream.window > 0 || stream.steps >= STEPS;
        if forward && goes_on && (stream.window == 0 || stream.due(window_max).is_some()) {
            let largest = window_max.max(WINDOW_MIN).next_power_of_two();
            stream.window = (stream.window * 2).clamp(WINDOW_MIN, largest);
        }
        let range = stream.extend(window_max);
        self.streams.push(stream);
        range
    }

    /// There is no room for `range`, which [`Readahead::advance`] returned: it is asked for again, with a smaller window.
    pub(super) fn refused(&mut self, range: &Range<u64>) {
        if let Some(stream) = self.streams.iter_mut().find(|stream| stream.ahead == range.end) {
            stream.ahead = range.start.max(stream.next);
            // The next read that is due doubles it.
            stream.window = (stream.window / 4).max(WINDOW_MIN);
        }
    }
}

impl Stream {
    /// The whole units of the window that have not been asked for.
    fn due(&self, window_max: u64) -> Option<Range<u64>> {
        let window = self.window.min(window_max);
        let unit = 1 << (window / 2).checked_ilog2()?;
        let unit = UNIT_MAX.min(unit);
        // Also counts the unit that is being read, so that what is held is no more than the window.
        let end = (self.next / unit + window / unit) * unit;
        (end > self.ahead).then_some(self.ahead..end)
    }

    /// Asks for what is due.
    fn extend(&mut self, window_max: u64) -> Option<Range<u64>> {
        let range = self.due(window_max)?;
        self.ahead = range.end;
        Some(range)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAX: u64 = 16 << 20;

    #[test]
    fn a_sequential_stream_is_fetched_once_with_growing_windows() {
        let mut readahead = Readahead::default();
        let mut ahead = 128 << 10;
        let mut largest = 0;
        for i in 0..1024u64 {
            if let Some(range) = readahead.advance(i * (128 << 10), 128 << 10, MAX) {
                assert_eq!(range.start, ahead);
                largest = largest.max(range.end - (i + 1) * (128 << 10));
                ahead = range.end;
            }
        }
        assert_eq!(largest, MAX);
    }

    #[test]
    fn a_stream_is_fetched_in_whole_units_within_its_window() {
        for (window_max, unit) in [(64 << 20, UNIT_MAX), (10 << 20, 4 << 20), (7 << 20, 2 << 20)] {
            let mut readahead = Readahead::default();
            let (mut asked, mut whole) = (0, 0);
            for i in 0..256u64 {
                // The unit that is being read next is held, too.
                let held_from = ((i + 1) << 20) / unit * unit;
                if let Some(range) = readahead.advance(i << 20, 1 << 20, window_max) {
                    assert!(range.end - held_from <= window_max, "{range:?}");
                    asked += 1;
                    whole += u64::from(range.start % unit == 0 && range.end - range.start == unit);
                }
            }
            assert!(asked - whole <= 5 && whole >= (240 << 20) / unit, "{whole} of {asked}, {unit}");
        }
    }

    #[test]
    fn a_window_that_others_need_is_smaller_at_once_and_grows_again() {
        let mut readahead = Readahead::default();
        let mut last = 0..0;
        let mut read = |mibs: Range<u64>, window_max: u64| {
            for i in mibs {
                last = readahead.advance(i << 20, 1 << 20, window_max).unwrap_or(last.clone());
            }
            last.end - last.start
        };
        assert_eq!(read(0..64, 16 << 20), 8 << 20);
        assert_eq!(read(64..128, 2 << 20), 1 << 20);
        assert_eq!(read(128..192, 16 << 20), 8 << 20);
    }

    #[test]
    fn reordered_reads_are_one_stream() {
        let mut readahead = Readahead::default();
        let mut fetched: Vec<Range<u64>> = Vec::new();
        for i in 0..64u64 {
            // The kernel's four requests of a MiB, the first one last.
            let offset = (i / 4 * 4 + 3 - i % 4) << 20;
            fetched.extend(readahead.advance(offset, 1 << 20, MAX));
        }
        let twice = fetched.iter().zip(fetched.iter().skip(1)).any(|(one, next)| next.start < one.end);
        assert!(!twice && fetched.len() > 4, "{fetched:?}");
        assert_eq!(readahead.streams.len(), 1);
    }

    #[test]
    fn what_is_refused_is_asked_for_again_in_smaller_pieces() {
        let mut readahead = Readahead::default();
        let first = readahead.advance(0, 128 << 10, MAX).expect("a stream begins");
        readahead.refused(&first);
        let again = readahead.advance(128 << 10, 128 << 10, MAX).expect("still wanted");
        assert!(again.start <= first.start + (128 << 10) && again.end >= first.end);
        let sizes = (2..1024u64).filter_map(|i| {
            let range = readahead.advance(i * (128 << 10), 128 << 10, MAX)?;
            readahead.refused(&range);
            Some(range.end - range.start)
        });
        let sizes: Vec<u64> = sizes.collect();
        assert!(sizes.len() > 500 && sizes[2..].iter().all(|bytes| *bytes <= 2 * WINDOW_MIN), "{sizes:?}");
    }

    #[test]
    fn random_reads_fetch_nothing() {
        let mut readahead = Readahead::default();
        for i in 1..100u64 {
            assert_eq!(readahead.advance(i * 7919 % 100 * (10 << 20) + 4096, 4096, MAX), None);
        }
    }

    #[test]
    fn small_reads_here_and_there_fetch_nothing() {
        let mut readahead = Readahead::default();
        for i in 1..4000u64 {
            assert_eq!(readahead.advance(i * 7919 % (64 << 8) * 4096, 4096, MAX), None);
        }
    }

    #[test]
    fn several_streams_keep_their_windows() {
        let mut readahead = Readahead::default();
        let mut fetched = [0; 3];
        for i in 0..64u64 {
            for (stream, fetched) in fetched.iter_mut().enumerate() {
                let base = stream as u64 * (1 << 30);
                if readahead.advance(base + i * (128 << 10), 128 << 10, MAX).is_some() {
                    *fetched += 1;
                }
            }
        }
        assert!(fetched.iter().all(|count| *count > 3), "{fetched:?}");
    }
}

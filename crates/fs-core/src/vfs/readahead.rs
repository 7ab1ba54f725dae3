//! When to fetch what will probably be read next.
//!
//! Pure: one [`Readahead`] a handle tells sequential streams apart (a few at a time, as when several threads read one
//! file) and says which range to bring into the cache. The window doubles while the stream goes on. What one pack has of the
//! file in one piece is fetched as one where the window allows, because stores are asked least so, and else in *units*
//! which begin at multiples of their size. What one fetch brought is held until all of it has been read.
//! Who does not read in order may be one of [strides](super::strides), which are asked first about what no stream expects.

use std::collections::VecDeque;
use std::ops::Range;

use super::strides::Strides;
use crate::data::Held;

/// Streams that one handle is followed in.
const STREAMS: usize = 4;
/// Reads that go on before something is fetched ahead, unless the first was of the file's beginning.
const STEPS: u32 = 2;
/// The first window of a stream.
const WINDOW_MIN: u64 = 512 << 10;
/// The largest unit; a power of two, as all of them.
const UNIT_MAX: u64 = 8 << 20;
/// Smaller pieces are fetched with those that follow.
const PIECE_MIN: u64 = 1 << 20;
/// Longer pieces are fetched in units: buffers of this size are used again, the pages of larger ones faulted in each time.
const PIECE_MAX: u64 = 12 << 20;
/// From so many streams on, each waits for one fetch at a time: the others are served meanwhile.
const ENOUGH_STREAMS: usize = 4;
/// A read so far before or after the expected place still belongs to the stream: the kernel asks for what it reads ahead,
/// up to 4 MiB, in several requests at a time, and several threads take them.
const SLACK: u64 = 4 << 20;
/// But no farther than so many requests: small ones here and there in a file are often near each other.
const SLACK_REQUESTS: u64 = 8;

/// Streams of one handle.
#[derive(Debug, Default)]
pub(super) struct Readahead {
    streams: Vec<Stream>,
    strides: Strides<Held>,
}

#[derive(Debug)]
struct Stream {
    /// Where the next read is expected.
    next: u64,
    /// Until where has been asked for.
    ahead: u64,
    window: u64,
    /// Reads that went on where it was.
    steps: u32,
    /// Where the fetch begins that is being read.
    begin: u64,
    /// Where it and those after it end.
    ends: VecDeque<u64>,
    /// What was last considered to be asked for ends here.
    limit: u64,
}

/// What may be held of a stream, and by how many others.
#[derive(Debug, Clone, Copy)]
pub(super) struct Share {
    /// 0 turns it off.
    pub(super) window_max: u64,
    /// All that are read ahead of now.
    pub(super) streams: usize,
}

/// What to fetch ahead of a reader.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Next {
    /// See [`Readahead::asked`].
    Window(Wish),
    /// Along a stride, one by one: see [`Readahead::strides`].
    Slots(Vec<Range<u64>>),
}

/// What a stream would have fetched, as far as its file's pieces allow.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Wish {
    /// What has room.
    pub(super) range: Range<u64>,
    window: u64,
    /// A piece that is longer is cut.
    piece_max: u64,
}

impl Readahead {
    /// Notes a read and returns what there is room for to prefetch, if anything.
    pub(super) fn advance(&mut self, offset: u64, len: u64, share: Share) -> Option<Next> {
        if share.window_max == 0 || len == 0 {
            return None;
        }
        let end = offset + len;
        if self.streams.iter().any(|stream| stream.window > 0 && stream.next == offset) {
            self.strides.note(&(offset..end));
        } else {
            let near_stream =
                self.streams.iter().any(|stream| stream.window > 0 && stream.is_near(offset, len));
            if let Some(slots) = self.strides.advance(offset..end, share.window_max, near_stream) {
                return Some(Next::Slots(slots));
            }
        }
        self.go_on(offset, len, share).map(Next::Window)
    }

    /// Those who leave something out, or go backward.
    pub(super) fn strides(&mut self) -> &mut Strides<Held> {
        &mut self.strides
    }

    /// What a stream would have fetched after a read.
    fn go_on(&mut self, offset: u64, len: u64, share: Share) -> Option<Wish> {
        let window_max = share.window_max;
        let end = offset + len;
        let Some(index) = self.streams.iter().position(|stream| stream.is_near(offset, len)) else {
            if self.streams.len() == STREAMS {
                self.streams.remove(0);
            }
            // Only a read of the beginning is taken for the start of a stream at once. A kernel that reads ahead itself
            // sends several such requests together.
            let window = if offset == 0 { WINDOW_MIN.max(4 * len).next_power_of_two() } else { 0 };
            let mut stream = Stream {
                next: end,
                ahead: end,
                window,
                steps: 0,
                begin: end,
                ends: VecDeque::new(),
                limit: end,
            };
            let wish = stream.extend(share);
            self.streams.push(stream);
            return wish;
        };
        let mut stream = self.streams.remove(index);
        let forward = end > stream.next;
        stream.go_on_to(stream.next.max(end));
        stream.steps += u32::from(forward && stream.steps < STEPS);
        let goes_on = stream.window > 0 || stream.steps >= STEPS;
        if forward && goes_on && (stream.window == 0 || stream.due(share).is_some()) {
            let largest = window_max.max(WINDOW_MIN).next_power_of_two();
            stream.window = (stream.window * 2).clamp(WINDOW_MIN, largest);
        }
        let wish = stream.extend(share);
        self.streams.push(stream);
        wish
    }

    /// Of the window `wish`, which [`Readahead::advance`] returned, fetches are made that end at `ends` (ascending), the
    /// first of which begins where the wish does.
    pub(super) fn asked(&mut self, wish: &Wish, ends: &[u64]) {
        if let Some(stream) = self.streams.iter_mut().find(|stream| stream.ahead == wish.range.end) {
            stream.ends.extend(ends);
            stream.ahead = ends.last().copied().unwrap_or(wish.range.start).max(stream.next);
        }
    }

    /// There is no room for `range`, which is the end of what was [asked](Readahead::asked) for: it is asked for again, with
    /// a smaller window.
    pub(super) fn refused(&mut self, range: &Range<u64>) {
        if let Some(stream) = self.streams.iter_mut().find(|stream| stream.ahead == range.end) {
            stream.ahead = range.start.max(stream.next);
            stream.limit = stream.ahead;
            stream.ends.retain(|end| *end <= range.start);
            // The next read that is due doubles it.
            stream.window = (stream.window / 4).max(WINDOW_MIN);
        }
    }
}

impl Stream {
    fn is_near(&self, offset: u64, len: u64) -> bool {
        let slack = SLACK.min(SLACK_REQUESTS * len);
        offset <= self.next + slack && offset + len + slack > self.next
    }

    fn go_on_to(&mut self, next: u64) {
        self.next = next;
        self.ahead = self.ahead.max(next);
        while let Some(end) = self.ends.front().copied().filter(|end| *end <= next) {
            self.begin = end;
            self.ends.pop_front();
        }
        if self.ends.is_empty() {
            self.begin = next;
        }
    }

    /// What has not been asked for and has room besides what is held, if that is more than it was.
    fn due(&self, share: Share) -> Option<Range<u64>> {
        let limit = self.begin + self.window.min(share.window_max);
        (limit > self.ahead.max(self.limit)).then_some(self.ahead..limit)
    }

    /// Asks for what is due.
    fn extend(&mut self, share: Share) -> Option<Wish> {
        let range = self.due(share)?;
        self.limit = range.end;
        self.ahead = range.end;
        let window = self.window.min(share.window_max);
        // Otherwise one is fetched while another is read.
        let one_at_a_time = share.streams >= ENOUGH_STREAMS && window == share.window_max;
        let piece_max = if one_at_a_time { window.min(PIECE_MAX) } else { (window / 2).min(UNIT_MAX) };
        Some(Wish { range, window, piece_max })
    }
}

impl Wish {
    /// What is to be looked at: one byte more than the pieces that matter.
    pub(super) fn view(&self) -> Range<u64> {
        self.range.start..self.range.start + self.window + 1
    }

    /// Where the fetches end that are to be made now. `pieces`: ends of the pieces in [`Wish::view`], ascending.
    pub(super) fn fetches(&self, pieces: &[u64]) -> Vec<u64> {
        let Range { start, end: limit } = self.range;
        let mut ends = Vec::new();
        let mut last = start;
        if pieces.iter().all(|end| *end > start + self.piece_max) {
            // Also counts the unit that is being read, so that what is held is no more than the window.
            let unit = UNIT_MAX.min(1 << (self.piece_max.max(1).ilog2()));
            while (last / unit + 1) * unit <= limit {
                last = (last / unit + 1) * unit;
                ends.push(last);
            }
            return ends;
        }
        let mut whole = pieces.iter().copied().take_while(|end| *end <= limit).peekable();
        while let Some(end) = whole.next() {
            while end - last > PIECE_MAX {
                last = (last / UNIT_MAX + 1) * UNIT_MAX;
                ends.push(last);
            }
            if end - last >= PIECE_MIN || whole.peek().is_none() && end > last {
                last = end;
                ends.push(last);
            }
        }
        ends
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIB: u64 = 1 << 10;
    const MIB: u64 = 1 << 20;

    /// A file of which each pack has one piece of `piece` bytes, and a handle on it.
    struct File {
        readahead: Readahead,
        piece: u64,
        share: Share,
    }

    impl File {
        fn of_pieces(piece: u64, window_max: u64) -> File {
            File { readahead: Readahead::default(), piece, share: Share { window_max, streams: 1 } }
        }

        /// What is fetched when `len` bytes are read at `offset`.
        fn read(&mut self, offset: u64, len: u64) -> Vec<Range<u64>> {
            let wish = match self.readahead.advance(offset, len, self.share) {
                None => return Vec::new(),
                Some(Next::Window(wish)) => wish,
                Some(Next::Slots(slots)) => return slots,
            };
            let view = wish.view();
            let pieces = (view.start / self.piece + 1..).map(|index| index * self.piece);
            let pieces: Vec<u64> = pieces.take_while(|end| *end < view.end).collect();
            let ends = wish.fetches(&pieces);
            self.readahead.asked(&wish, &ends);
            assert!(ends.iter().all(|end| *end <= wish.range.end), "{ends:?} of {wish:?}");
            let starts = std::iter::once(view.start).chain(ends.iter().copied());
            starts.zip(ends.iter().copied()).map(|(start, end)| start..end).collect()
        }
    }

    #[test]
    fn a_sequential_stream_is_fetched_once_with_growing_windows() {
        let mut file = File::of_pieces(1 << 40, 16 * MIB);
        let mut ahead = 128 * KIB;
        let mut largest = 0;
        for i in 0..1024u64 {
            for range in file.read(i * 128 * KIB, 128 * KIB) {
                assert_eq!(range.start, ahead);
                largest = largest.max(range.end - range.start);
                ahead = range.end;
            }
        }
        assert!(largest == 8 * MIB && ahead >= 128 * MIB, "{largest} {ahead}");
    }

    #[test]
    fn a_long_piece_is_fetched_in_whole_units_within_the_window() {
        for (window_max, unit) in [(64 * MIB, UNIT_MAX), (10 * MIB, 4 * MIB), (7 * MIB, 2 * MIB)] {
            let mut file = File::of_pieces(1 << 40, window_max);
            let (mut asked, mut whole) = (0, 0);
            for i in 0..256u64 {
                // The unit that is being read next is held, too.
                let held_from = (i + 1) * MIB / unit * unit;
                for range in file.read(i * MIB, MIB) {
                    assert!(range.end - held_from <= window_max, "{range:?}");
                    asked += 1;
                    whole += u64::from(range.start % unit == 0 && range.end - range.start == unit);
                }
            }
            assert!(asked - whole <= 7 && whole >= 240 * MIB / unit, "{whole} of {asked}, {unit}");
        }
    }

    #[test]
    fn what_a_pack_has_of_a_file_is_one_fetch_and_another_follows_before_it_is_read() {
        for (piece, window_max) in [(8 * MIB, 32 * MIB), (5 * MIB, 10 * MIB), (3 * MIB, 10 * MIB)] {
            let mut file = File::of_pieces(piece, window_max);
            let (mut asked, mut whole, mut ahead) = (0, 0, 0);
            for i in 0..256u64 {
                for range in file.read(i * MIB, MIB) {
                    asked += 1;
                    whole += u64::from(range.start % piece == 0 && range.end - range.start == piece);
                    ahead = range.end;
                }
                assert!(i < 64 || ahead > (i + 1) * MIB, "at {i} up to {ahead}, {piece}");
            }
            assert!(asked - whole <= 10 && whole >= 230 * MIB / piece, "{whole} of {asked}, {piece}");
        }
    }

    #[test]
    fn of_many_streams_each_fetches_a_piece_when_it_has_read_the_one_before() {
        let mut file = File::of_pieces(8 * MIB, 10 * MIB);
        file.share.streams = 8;
        let (mut asked, mut whole) = (0, 0);
        for i in 0..256u64 {
            let fetched = file.read(i * MIB, MIB);
            assert!(i < 16 || fetched.is_empty() != ((i + 1) % 8 == 0), "at {i}: {fetched:?}");
            asked += fetched.len();
            whole += fetched.iter().filter(|range| range.end - range.start == 8 * MIB).count();
        }
        assert!(asked - whole <= 5 && whole >= 30, "{whole} of {asked}");
    }

    #[test]
    fn small_pieces_are_fetched_together_and_those_of_huge_packs_in_parts() {
        let mut file = File::of_pieces(64 * KIB, 16 * MIB);
        let fetched: Vec<_> = (0..128).flat_map(|i| file.read(i * MIB, MIB)).collect();
        let small = fetched.iter().filter(|range| range.end - range.start < PIECE_MIN).count();
        assert!(small <= 2 && fetched.len() > 64, "{fetched:?}");

        let mut file = File::of_pieces(64 * MIB, 200 * MIB);
        let fetched: Vec<_> = (0..256).flat_map(|i| file.read(i * MIB, MIB)).collect();
        assert!(fetched.iter().all(|range| range.end - range.start <= PIECE_MAX), "{fetched:?}");
    }

    #[test]
    fn a_window_that_others_need_is_smaller_at_once_and_grows_again() {
        let mut file = File::of_pieces(1 << 40, 0);
        let mut last = 0..0;
        let mut read = |mibs: Range<u64>, window_max: u64| {
            file.share.window_max = window_max;
            for i in mibs {
                last = file.read(i * MIB, MIB).pop().unwrap_or(last.clone());
            }
            last.end - last.start
        };
        assert_eq!(read(0..64, 16 * MIB), 8 * MIB);
        assert_eq!(read(64..128, 2 * MIB), MIB);
        assert_eq!(read(128..192, 16 * MIB), 8 * MIB);
    }

    #[test]
    fn reordered_reads_are_one_stream() {
        let mut file = File::of_pieces(1 << 40, 16 * MIB);
        let mut fetched: Vec<Range<u64>> = Vec::new();
        for i in 0..64u64 {
            // The kernel's four requests of a MiB, the first one last.
            let offset = (i / 4 * 4 + 3 - i % 4) * MIB;
            fetched.extend(file.read(offset, MIB));
        }
        let twice = fetched.iter().zip(fetched.iter().skip(1)).any(|(one, next)| next.start < one.end);
        assert!(!twice && fetched.len() > 4, "{fetched:?}");
        assert_eq!(file.readahead.streams.len(), 1);
    }

    #[test]
    fn what_is_refused_is_asked_for_again_in_smaller_pieces() {
        let mut file = File::of_pieces(1 << 40, 16 * MIB);
        let first = file.read(0, 128 * KIB);
        let first = first[0].start..first.last().expect("a stream begins").end;
        file.readahead.refused(&first);
        let again = file.read(128 * KIB, 128 * KIB);
        assert!(again[0].start <= first.start + 128 * KIB && again.last().expect("wanted").end >= first.end);
        let mut sizes = Vec::new();
        for i in 2..1024u64 {
            if let Some(range) = file.read(i * 128 * KIB, 128 * KIB).pop() {
                file.readahead.refused(&range);
                sizes.push(range.end - range.start);
            }
        }
        assert!(sizes.len() > 200 && sizes[2..].iter().all(|bytes| *bytes <= 2 * WINDOW_MIN), "{sizes:?}");
    }

    /// Numbers below `limit` without equal steps between them.
    fn scattered(count: usize, limit: u64) -> impl Iterator<Item = u64> {
        let next = |last: &u64| Some(last.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1));
        std::iter::successors(Some(1), next).map(move |number: u64| (number >> 33) % limit).take(count)
    }

    #[test]
    fn random_reads_fetch_nothing() {
        let mut file = File::of_pieces(8 * MIB, 16 * MIB);
        for place in scattered(100, 100) {
            assert_eq!(file.read(place * (10 * MIB) + 4096, 4096), []);
        }
    }

    #[test]
    fn small_reads_here_and_there_fetch_nothing() {
        let mut file = File::of_pieces(8 * MIB, 16 * MIB);
        for place in scattered(4000, 64 << 8) {
            assert_eq!(file.read((place + 1) * 4096, 4096), []);
        }
    }

    #[test]
    fn a_stride_beside_a_stream_changes_nothing_for_it() {
        let mut alone = File::of_pieces(8 * MIB, 16 * MIB);
        let mut both = File::of_pieces(8 * MIB, 16 * MIB);
        let mut backward = 0;
        for i in 0..256u64 {
            assert_eq!(both.read(i * 128 * KIB, 128 * KIB), alone.read(i * 128 * KIB, 128 * KIB), "at {i}");
            backward += both.read((1 << 40) - i * 128 * KIB, 128 * KIB).len();
        }
        assert!(backward >= 32, "{backward}");
    }

    #[test]
    fn who_turns_back_is_followed_both_ways() {
        let mut file = File::of_pieces(1 << 40, 16 * MIB);
        let mut fetched = |offsets: &mut dyn Iterator<Item = u64>| -> u64 {
            let ranges = offsets.flat_map(|offset| file.read(offset * MIB, MIB));
            ranges.map(|range| range.end - range.start).sum()
        };
        assert!(fetched(&mut (0..64)) >= 64 * MIB);
        assert!(fetched(&mut (0..64).rev()) >= 50 * MIB);
        assert!(fetched(&mut (0..64)) >= 50 * MIB);
    }

    #[test]
    fn several_streams_keep_their_windows() {
        let mut file = File::of_pieces(8 * MIB, 16 * MIB);
        let mut fetched = [0; 3];
        for i in 0..64u64 {
            for (stream, fetched) in fetched.iter_mut().enumerate() {
                let base = stream as u64 * (1 << 30);
                if !file.read(base + i * 128 * KIB, 128 * KIB).is_empty() {
                    *fetched += 1;
                }
            }
        }
        assert!(fetched.iter().all(|count| *count > 3), "{fetched:?}");
    }
}

//! Readers that leave something out, or go backward.
//!
//! The kernel reads ahead of nobody but sequential readers: of the others it sends each `pread` as one request, up to 1 MiB.
//! Three equal steps between requests of one length (a step back, or one that leaves a gap) begin a *stride*, if nothing
//! in between was asked for. From then on the requests that lie ahead are asked for along it: two at first, and twice as
//! many each time, as far as there is memory. What a stride brings is held until the reader has passed it, whatever of it was
//! read.
//!
//! Where the gaps are smaller than a block, all blocks are fetched, in aligned *slots* of 1 MiB. Otherwise each request is
//! a slot. Random reads do not have equal steps, and sequential streams do not come here: see [`super::readahead`].

use std::collections::VecDeque;
use std::ops::Range;

/// Strides of one handle that are followed.
const STRIDES: usize = 4;
/// Requests that are remembered: four readers who take turns show three steps each.
const RECENT: usize = 16;
/// Equal steps that begin a stride.
const STEPS: usize = 3;
/// Requests of one reader arrive so many places too early or too late.
const REORDERED: i64 = 4;
/// What is left out between requests that are fetched as one: about a block.
const GAP_BYTES: u64 = 128 << 10;
/// A slot of those.
const SLOT_BYTES: u64 = 1 << 20;
/// Slots that are held at most: as many as may be on the way at once.
const SLOTS: u64 = 32;

/// Strides of one handle. `H` holds what was fetched.
#[derive(Debug)]
pub(super) struct Strides<H> {
    /// Offset and length of the last requests, the newest in front.
    recent: VecDeque<(u64, u64)>,
    strides: Vec<Stride<H>>,
}

#[derive(Debug)]
struct Stride<H> {
    /// The request that is farthest.
    at: Range<u64>,
    step: i64,
    /// What is left out is fetched, too.
    dense: bool,
    slot_bytes: u64,
    /// Where the slot begins that is to be asked for next; none before the beginning of the file.
    next: Option<u64>,
    /// Slots to have ahead of the reader.
    depth: u64,
    /// What was asked for and not passed, by its offset.
    slots: VecDeque<Slot<H>>,
}

#[derive(Debug)]
struct Slot<H> {
    range: Range<u64>,
    /// Nothing yet, or nothing to hold.
    held: Option<H>,
}

impl<H> Default for Strides<H> {
    fn default() -> Strides<H> {
        Strides { recent: VecDeque::new(), strides: Vec::new() }
    }
}

impl<H> Strides<H> {
    /// Notes a request that does not go on where the one before it ended. If it is that of a stride: what is to be fetched
    /// ahead of it now, one by one; [`Strides::fetched`] is told of each. A stride holds `bytes_max` at most. `near_stream`:
    /// a sequential reader, whose requests may have been reordered, is where the request falls.
    pub(super) fn advance(
        &mut self,
        request: Range<u64>,
        bytes_max: u64,
        near_stream: bool,
    ) -> Option<Vec<Range<u64>>> {
        let known = self.strides.iter().position(|stride| stride.has(&request));
        let known = known.map(|index| self.strides.remove(index));
        let begins = || Some(Stride::new(request.clone(), self.step_to(&request, near_stream)?));
        let stride = known.or_else(begins);
        self.note(&request);
        let mut stride = stride?;
        stride.go_on_to(request);
        let ranges = stride.extend(bytes_max);
        if self.strides.len() == STRIDES {
            self.strides.remove(0);
        }
        self.strides.push(stride);
        Some(ranges)
    }

    /// Remembers a request, so that what seems left out is not.
    pub(super) fn note(&mut self, request: &Range<u64>) {
        self.recent.truncate(RECENT - 1);
        self.recent.push_front((request.start, request.end - request.start));
    }

    /// A range that was to be fetched is on its way. It is let go when it has been passed meanwhile.
    pub(super) fn fetched(&mut self, range: &Range<u64>, held: H) {
        let slots = self.strides.iter_mut().flat_map(|stride| &mut stride.slots);
        if let Some(slot) = slots.into_iter().find(|slot| slot.range == *range) {
            slot.held = Some(held);
        }
    }

    /// There is no room for a range that was to be fetched: it is asked for again, with less ahead.
    pub(super) fn refused(&mut self, range: &Range<u64>) {
        for stride in &mut self.strides {
            if let Some(index) = stride.slots.iter().position(|slot| slot.range == *range) {
                stride.slots.truncate(index);
                stride.next = Some(stride.slot_of(range));
                stride.depth = (stride.depth / 4).max(1);
                return;
            }
        }
    }

    /// The step by which a request goes on from those before it.
    fn step_to(&self, request: &Range<u64>, near_stream: bool) -> Option<i64> {
        let len = request.end - request.start;
        let alike = || self.recent.iter().filter(|recent| recent.1 == len).map(|recent| recent.0);
        alike().enumerate().find_map(|(index, last)| {
            let step = request.start.checked_signed_diff(last)?;
            let gap = step.unsigned_abs().saturating_sub(len);
            if gap == 0 && (step >= 0 || near_stream) {
                return None;
            }
            let mut first = last;
            let mut steps = 1;
            for before in alike().skip(index + 1) {
                if first.checked_add_signed(-step) == Some(before) && steps < STEPS {
                    first = before;
                    steps += 1;
                }
            }
            let between = first.min(request.start)..first.max(request.start);
            let on_it = |offset: u64| request.start.abs_diff(offset).is_multiple_of(step.unsigned_abs());
            let nothing_else = || self.recent.iter().all(|(at, _)| !between.contains(at) || on_it(*at));
            (steps == STEPS && nothing_else()).then_some(step)
        })
    }
}

impl<H> Stride<H> {
    fn new(at: Range<u64>, step: i64) -> Stride<H> {
        let len = at.end - at.start;
        let dense = step.unsigned_abs() < len + GAP_BYTES;
        let slot_bytes = if dense { SLOT_BYTES } else { len };
        let mut stride = Stride { at, step, dense, slot_bytes, next: None, depth: 1, slots: VecDeque::new() };
        stride.next = stride.first();
        stride
    }

    /// Whether it is one of this stride's next requests, or of those that might come late.
    fn has(&self, request: &Range<u64>) -> bool {
        let len = self.at.end - self.at.start;
        let Some(distance) = request.start.checked_signed_diff(self.at.start) else { return false };
        request.end - request.start <= len
            && distance % self.step == 0
            && (-REORDERED..=REORDERED).contains(&(distance / self.step))
    }

    fn go_on_to(&mut self, request: Range<u64>) {
        let is_farther =
            if self.step > 0 { request.start > self.at.start } else { request.start < self.at.start };
        if is_farther {
            self.at = request.start..request.start + (self.at.end - self.at.start);
        }
        while self.slots.front().is_some_and(|slot| self.has_passed(&slot.range)) {
            self.slots.pop_front();
        }
    }

    fn has_passed(&self, range: &Range<u64>) -> bool {
        if self.step > 0 { range.end <= self.at.start } else { range.start >= self.at.end }
    }

    /// What is to be asked for now.
    fn extend(&mut self, bytes_max: u64) -> Vec<Range<u64>> {
        let slots_max = SLOTS.min(bytes_max / self.slot_bytes.max(GAP_BYTES));
        let is_short = |stride: &Self| (stride.slots.len() as u64) < stride.depth.min(slots_max);
        if is_short(self) {
            self.depth = SLOTS.min(self.depth * 2);
        }
        let mut ranges = Vec::new();
        if self.next.is_some_and(|next| self.has_passed(&(next..next + self.slot_bytes))) {
            self.next = self.first();
        }
        while is_short(self)
            && let Some(start) = self.next
        {
            let range = self.ahead_in(start..start + self.slot_bytes);
            if !range.is_empty() {
                ranges.push(range.clone());
                self.slots.push_back(Slot { range, held: None });
            }
            let pitch = if self.dense { SLOT_BYTES.cast_signed() * self.step.signum() } else { self.step };
            self.next = start.checked_add_signed(pitch);
        }
        ranges
    }

    /// Where the first slot begins that is not behind the reader.
    fn first(&self) -> Option<u64> {
        if !self.dense {
            return self.at.start.checked_add_signed(self.step);
        }
        let edge = if self.step > 0 { self.at.end } else { self.at.start.checked_sub(1)? };
        Some(edge / SLOT_BYTES * SLOT_BYTES)
    }

    /// What of a slot lies ahead of the reader.
    fn ahead_in(&self, slot: Range<u64>) -> Range<u64> {
        if self.step > 0 {
            slot.start.max(self.at.end)..slot.end
        } else {
            slot.start..slot.end.min(self.at.start)
        }
    }

    /// Where the slot begins that `range` lies in.
    fn slot_of(&self, range: &Range<u64>) -> u64 {
        if self.step > 0 { range.end - self.slot_bytes } else { range.start }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::rc::Rc;

    use super::*;

    const KIB: u64 = 1 << 10;
    const MIB: u64 = 1 << 20;

    /// A handle on a large file of which everything is fetched that its readers would have.
    struct File {
        strides: Strides<Rc<Range<u64>>>,
        bytes_max: u64,
        near_stream: bool,
        /// All that was ever fetched.
        fetched: Vec<Rc<Range<u64>>>,
    }

    impl File {
        fn new(bytes_max: u64) -> File {
            File { strides: Strides::default(), bytes_max, near_stream: false, fetched: Vec::new() }
        }

        /// Whether what is read had been fetched and is held.
        fn read(&mut self, offset: u64, len: u64) -> bool {
            let holds = |fetched: &Rc<Range<u64>>, at| Rc::strong_count(fetched) > 1 && fetched.contains(&at);
            let is_held = |at| self.fetched.iter().any(|fetched| holds(fetched, at));
            let was_held = is_held(offset) && is_held(offset + len - 1);
            let ranges = self.strides.advance(offset..offset + len, self.bytes_max, self.near_stream);
            for range in ranges.unwrap_or_default() {
                let held = Rc::new(range.clone());
                self.fetched.push(Rc::clone(&held));
                self.strides.fetched(&range, held);
            }
            was_held
        }

        fn held_bytes(&self) -> u64 {
            let held = self.fetched.iter().filter(|fetched| Rc::strong_count(fetched) > 1);
            held.map(|range| range.end - range.start).sum()
        }

        fn fetched_bytes(&self) -> u64 {
            self.fetched.iter().map(|range| range.end - range.start).sum()
        }
    }

    fn backward(from: u64, step: u64) -> impl Iterator<Item = u64> {
        (0..from / step).rev().map(move |index| index * step)
    }

    #[test]
    fn going_backward_is_fetched_once_in_large_slots() {
        for len in [4 * KIB, 64 * KIB, 128 * KIB, MIB] {
            let mut file = File::new(16 * MIB);
            let mut missed = 0;
            for offset in backward(64 * MIB, len) {
                missed += u64::from(!file.read(offset, len));
                assert!(file.held_bytes() <= 16 * MIB, "{}", file.held_bytes());
            }
            assert_eq!(missed, 4, "the reads that showed it, of {len}");
            assert_eq!(file.fetched_bytes(), 64 * MIB - 4 * len);
            let ends: BTreeSet<u64> = file.fetched.iter().map(|range| range.end).collect();
            assert!(file.fetched.len() <= 64 && ends.len() == file.fetched.len(), "{:?}", file.fetched);
        }
    }

    #[test]
    fn of_wide_steps_only_what_is_read_is_fetched() {
        let wide = |step: i64, len: u64| {
            let mut file = File::new(32 * MIB);
            let mut missed = 0;
            for index in 0..100 {
                missed += u64::from(!file.read((1_u64 << 40).strict_add_signed(index * step), len));
                assert!(file.held_bytes() <= 32 * MIB);
            }
            assert_eq!(missed, 4);
            assert!(file.fetched.iter().all(|range| range.end - range.start == len));
            assert!(file.fetched.len() <= 96 + 32, "{}", file.fetched.len());
            file.fetched.len() as u64
        };
        for (step, len) in [(8 << 20, MIB), (-(8 << 20), MIB), (1 << 20, 128 * KIB), (-(1 << 30), 4 * KIB)] {
            assert!(wide(step, len) >= 96 + 31);
        }
    }

    #[test]
    fn small_gaps_are_fetched_too() {
        let mut file = File::new(16 * MIB);
        let missed = (0..1000).filter(|index| !file.read(index * 64 * KIB, 4 * KIB)).count();
        assert_eq!(missed, 4);
        assert!(file.fetched.iter().skip(1).all(|range| range.end - range.start == SLOT_BYTES));
    }

    #[test]
    fn strides_that_take_turns_are_told_apart() {
        let mut file = File::new(16 * MIB);
        let mut missed = 0;
        for index in 0..50_u64 {
            for (reader, base) in [(1_u64 << 32, 8 << 20), (1 << 33, 3 << 20), (1 << 34, 5 << 20)] {
                missed += u64::from(!file.read(reader - index * base, 128 * KIB));
            }
        }
        assert_eq!(missed, 3 * 4);
    }

    #[test]
    fn requests_that_overtake_each_other_are_one_stride() {
        let mut file = File::new(16 * MIB);
        let mut missed = 0;
        for index in 0..100_u64 {
            let index = if index < 4 { index } else { index ^ 1 };
            missed += u64::from(!file.read((1 << 32) - index * 4 * MIB, 128 * KIB));
        }
        assert!(missed <= 4 + 48 && file.strides.strides.len() == 1, "{missed}");
    }

    #[test]
    fn what_has_no_room_is_asked_for_again_with_less_ahead() {
        let mut strides: Strides<()> = Strides::default();
        let mut asked = Vec::new();
        for index in 0..100_u64 {
            let offset = (1 << 40) - index * 8 * MIB;
            if let Some(ranges) = strides.advance(offset..offset + MIB, 32 * MIB, false)
                && let Some(first) = ranges.first()
            {
                assert!(first.end <= offset, "{first:?} at {offset}");
                strides.refused(first);
                asked.push(ranges.len());
            }
        }
        assert!(asked.len() > 90 && asked[2..].iter().all(|count| *count <= 2), "{asked:?}");
    }

    #[test]
    fn the_beginning_of_the_file_ends_a_stride() {
        let mut file = File::new(16 * MIB);
        for offset in backward(8 * MIB, 128 * KIB).chain([0, 0]) {
            file.read(offset, 128 * KIB);
        }
        assert_eq!(file.fetched.last().expect("fetched").start, 0);
        let mut file = File::new(16 * MIB);
        let missed = (0..6).rev().filter(|index| !file.read(index * 8 * MIB + 5, MIB)).count();
        assert_eq!((missed, file.fetched.len()), (4, 2));
    }

    #[test]
    fn neither_random_nor_sequential_requests_are_strides() {
        for (places, len) in [(16 << 10, 4 * KIB), (4 << 10, 128 * KIB), (100, 4 * KIB)] {
            let mut file = File::new(16 * MIB);
            let mut random = 1_u64;
            for _ in 0..10_000 {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                file.read((random >> 33) % places * len, len);
            }
            assert!(
                file.fetched.len() <= if places > 100 { 0 } else { 50 },
                "{places}: {}",
                file.fetched.len()
            );
        }
        // A kernel's requests for what it reads ahead.
        let mut file = File::new(16 * MIB);
        file.near_stream = true;
        for base in (0..1000).step_by(4) {
            for (one, other) in [(3, 3), (1, 2), (2, 1), (0, 0)] {
                file.read((base + one) * MIB, MIB);
                file.read((1 << 40) + (base + other) * MIB, MIB);
            }
        }
        assert_eq!(file.fetched, []);
    }
}

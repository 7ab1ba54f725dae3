//! Reading on in a pack: files that were written together are often read together.
//!
//! Whoever reads a small file knows nothing of its neighbours' blocks, but their bytes are near it in the pack. When
//! reads of small runs follow each other, or most of them fall into one pack, a fetch brings a whole *window*: what comes
//! next in the pack, up to what was brought already, so that many readers who go through a pack side by side fetch each
//! byte once. Windows begin at 256 KiB and double, up to a limit, while what they bring is read; they become smaller
//! where it is not. A window that is half read has the next one fetched; while there is much room, one that follows such a
//! window has it fetched as soon as it is come to, since it takes longer to bring twice the bytes than to read half of
//! these. A window that is still on the way is waited for, and one that is being read makes no room for others: where
//! memory is short, the others are smaller or none.
//!
//! Windows hold stored bytes that nobody has checked: a reader checks what it takes, as if it came from the store. They
//! are kept in pieces, and a piece that was read is dropped: readers who are far apart hold up no more than they need.
//! Lock order: the state is a leaf.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::types::PackId;

/// The first window.
const FIRST_BYTES: u64 = 256 << 10;
/// The first window in a pack into which most reads fall.
const DENSE_BYTES: u64 = 1 << 20;
const PIECE_BYTES: u64 = 256 << 10;
/// Tiny reads come in any order: memory of what was read is free again soon if pieces are hardly larger.
const TINY_PIECE_BYTES: u64 = 8 << 10;
/// A read that begins so close behind the end of another one follows it.
const GAP_BYTES: u64 = 64 << 10;
/// Reads that are remembered: so many readers may take turns.
const READS_MAX: usize = 128;
/// Windows that are remembered, those that were read included.
const WINDOWS_MAX: usize = 256;
/// Of the last eight reads, so many followed others: then the next one is the begin of more, wherever it falls.
const FOLLOWING_OF_8: usize = 4;
/// Of the last sixteen reads, so many fell into one pack: then all of it is being read.
const DENSE_OF_16: usize = 10;
/// A read of at most so many bytes costs little less than a small window, which is fetched when other reads were near.
const TINY_BYTES: u64 = 16 << 10;
const TINY_NEAR: usize = 2;
/// And of all reads that are remembered, so many into one pack mean that much of it is being read.
const TINY_DENSE: usize = 8;
/// A window that was used, or opened, within so many reads is kept in any case.
const ALIVE_READS: u64 = 512;
/// A window that nobody came for in this time gives up its room, where that is needed for something else.
const STALE_AFTER: Duration = Duration::from_secs(5);
/// While windows hold less than one part in so many of their memory, there is much room.
const ROOMY_PART: u64 = 8;
/// For so many windows after one that was fetched for nothing, only reads that follow others open one.
const DOUBTS: u32 = 16;

/// Windows on packs that are being read through.
#[derive(Debug)]
pub(super) struct Around {
    /// Largest window; 0 turns this off.
    bytes_max: u64,
    /// What a pack is at most, but for single long runs.
    pack_bytes: u64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// They do not overlap.
    windows: Vec<Window>,
    /// The last reads, the newest in front.
    reads: VecDeque<Read>,
    /// The size of the next window, if it is not the first.
    bytes: u64,
    doubts: u32,
    last_id: u64,
    /// Reads that were noted.
    count: u64,
}

/// What one fetch brings.
#[derive(Debug)]
struct Window {
    id: u64,
    pack: PackId,
    range: Range<u64>,
    /// While it is on the way; closed at the end of that.
    coming: Option<watch::Receiver<()>>,
    /// Of `piece_bytes` each, but for the last.
    pieces: Vec<Piece>,
    piece_bytes: u64,
    /// Bytes that are in memory or on the way.
    held: u64,
    /// Bytes that were taken.
    taken: u64,
    used_at: Instant,
    /// Reads before it was opened, and before it was last taken from; how often that was.
    opened: u64,
    used: u64,
    uses: u64,
    /// It was worth its bytes.
    proven: bool,
    /// The pack ends where it does.
    is_last: bool,
}

#[derive(Debug)]
struct Piece {
    /// Nothing if they were read.
    bytes: Option<Bytes>,
    /// Bytes that nobody took.
    left: usize,
}

#[derive(Debug)]
struct Read {
    pack: PackId,
    range: Range<u64>,
    follows: bool,
}

/// How the last reads were.
#[derive(Debug, Clone, Copy)]
enum Reads {
    /// Here and there.
    Scattered,
    /// One after another.
    Following,
    /// Most in this pack.
    Dense,
}

/// Which windows make room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Drops {
    /// Those that are not being read.
    Unused,
    /// Any, as others need the memory.
    All,
}

/// What is known of a range.
enum Held {
    Here(Bytes),
    Coming(watch::Receiver<()>),
    Absent,
}

/// The promise to fill a window; dropped without that, those who wait fetch for themselves.
#[derive(Debug)]
pub(super) struct Claim {
    /// The window: what is to be fetched, as far as the pack has it.
    pub(super) range: Range<u64>,
    id: u64,
    piece_bytes: u64,
    around: Arc<Around>,
    /// Those who wait are woken by its end, which is after that of the claim.
    _waited_for: watch::Sender<()>,
}

impl Claim {
    /// The window's bytes, from its beginning on.
    pub(super) fn fill(self, body: &Bytes) {
        // Copies: a part of the body would keep all of it in memory.
        let pieces = body.chunks(usize::try_from(self.piece_bytes).expect("pieces fit into memory"));
        let pieces =
            pieces.map(|piece| Piece { bytes: Some(Bytes::copy_from_slice(piece)), left: piece.len() });
        let pieces: Vec<Piece> = pieces.collect();
        let mut state = self.around.state.lock();
        if let Some(window) = state.windows.iter_mut().find(|window| window.id == self.id) {
            window.held = body.len() as u64;
            let end = window.range.start + window.held;
            window.is_last = end < window.range.end;
            window.range.end = end;
            window.pieces = pieces;
            window.coming = None;
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut state = self.around.state.lock();
        state.windows.retain(|window| window.id != self.id || window.coming.is_none());
    }
}

impl Around {
    /// Windows of at most `bytes_max`, in packs of about `pack_bytes`.
    pub(super) fn new(bytes_max: u32, pack_bytes: u32) -> Arc<Around> {
        let (bytes_max, pack_bytes) = (bytes_max.into(), pack_bytes.into());
        Arc::new(Around { bytes_max, pack_bytes, state: Mutex::default() })
    }

    /// The stored bytes, unchecked, if windows have them; waits for those that are on the way.
    pub(super) async fn get(&self, pack: PackId, range: Range<u64>) -> Option<Bytes> {
        loop {
            let held = self.state.lock().take(pack, &range);
            match held {
                Held::Here(bytes) => return Some(bytes),
                Held::Absent => return None,
                // Nothing is ever sent: it ends.
                Held::Coming(mut window) => drop(window.changed().await),
            }
        }
    }

    /// Notes that `range`, of small runs, is going to be read. The window to fetch, if that seems worth it: one with the
    /// range, or the one that comes next. Windows hold `memory_bytes` at most.
    pub(super) fn extend(
        self: &Arc<Around>,
        pack: PackId,
        range: &Range<u64>,
        memory_bytes: u64,
    ) -> Option<Claim> {
        let bytes_max = self.bytes_max.min(memory_bytes / 4);
        if bytes_max < FIRST_BYTES {
            return None;
        }
        let mut state = self.state.lock();
        let reads = state.note(pack, range);
        let is_roomy = state.held() < memory_bytes / ROOMY_PART;
        let (start, bytes) = match state.first_absent(pack, range) {
            None => {
                let (next, bytes) = state.next(pack, range.end, is_roomy)?;
                (next, bytes.clamp(FIRST_BYTES, bytes_max))
            }
            Some(at) => match reads {
                Reads::Scattered => return None,
                Reads::Following => (at, state.bytes.clamp(FIRST_BYTES, bytes_max)),
                Reads::Dense => {
                    let bytes = state.bytes.clamp(DENSE_BYTES.min(bytes_max), bytes_max);
                    // Others will want what was left out before it.
                    let before = state.windows_of(pack).map(|window| window.range.end);
                    let before = before.filter(|end| *end <= at).max().unwrap_or(0);
                    (if at - before <= bytes { before } else { at }, bytes)
                }
            },
        };
        let end = self.end_of(&state, pack, start, (start + bytes).max(range.end));
        let is_tiny = range.end - range.start <= TINY_BYTES;
        let piece_bytes = if is_tiny { TINY_PIECE_BYTES } else { PIECE_BYTES };
        // Where room comes back little by little, a smaller window is better than none.
        let mut end = end;
        while !state.make_room(end - start, memory_bytes, Drops::Unused) {
            end = start + (end - start) / 2;
            if end < range.end || end - start < FIRST_BYTES {
                return None;
            }
        }
        Some(self.open(&mut state, pack, start..end, piece_bytes))
    }

    /// Drops windows until they hold `memory_bytes` at most, as far as they are not on the way.
    pub(super) fn shrink(&self, memory_bytes: u64) {
        self.state.lock().make_room(0, memory_bytes, Drops::All);
    }

    /// Bytes that windows hold, without those that nobody came for in a while.
    pub(super) fn bytes_in_use(&self) -> u64 {
        let mut state = self.state.lock();
        state.windows.retain(|window| window.coming.is_some() || window.used_at.elapsed() < STALE_AFTER);
        state.held()
    }

    /// Where a window ends: where the next one begins if that is before `end` or close behind, and so with the pack's end.
    fn end_of(&self, state: &State, pack: PackId, start: u64, end: u64) -> u64 {
        let next = state.windows_of(pack).map(|window| window.range.start).filter(|at| *at > start).min();
        let limit = next.unwrap_or(self.pack_bytes);
        if next.is_some() && limit < end || (end..end + (end - start) / 2).contains(&limit) {
            limit
        } else {
            end
        }
    }

    fn open(
        self: &Arc<Around>,
        state: &mut State,
        pack: PackId,
        range: Range<u64>,
        piece_bytes: u64,
    ) -> Claim {
        let (sender, coming) = watch::channel(());
        state.doubts = state.doubts.saturating_sub(1);
        state.last_id += 1;
        let id = state.last_id;
        state.windows.push(Window {
            id,
            pack,
            range: range.clone(),
            coming: Some(coming),
            pieces: Vec::new(),
            piece_bytes,
            held: range.end - range.start,
            taken: 0,
            used_at: Instant::now(),
            opened: state.count,
            used: state.count,
            uses: 0,
            proven: false,
            is_last: false,
        });
        Claim { range, id, piece_bytes, around: Arc::clone(self), _waited_for: sender }
    }
}

impl State {
    fn held(&self) -> u64 {
        self.windows.iter().map(|window| window.held).sum()
    }

    fn windows_of(&self, pack: PackId) -> impl Iterator<Item = &Window> {
        self.windows.iter().filter(move |window| window.pack == pack)
    }

    fn index_of(&self, pack: PackId, at: u64) -> Option<usize> {
        self.windows.iter().position(|window| window.pack == pack && window.range.contains(&at))
    }

    /// Notes a read, and tells how the last ones were.
    fn note(&mut self, pack: PackId, range: &Range<u64>) -> Reads {
        let of_pack = || self.reads.iter().filter(|read| read.pack == pack);
        let follows =
            of_pack().any(|read| (read.range.end..=read.range.end + GAP_BYTES).contains(&range.start));
        let is_tiny = range.end - range.start <= TINY_BYTES;
        let near = of_pack().filter(|read| read.range.start.abs_diff(range.start) <= FIRST_BYTES).count();
        let of_pack = of_pack().count();
        self.count += 1;
        self.reads.truncate(READS_MAX - 1);
        self.reads.push_front(Read { pack, range: range.clone(), follows });
        let dense = self.reads.iter().take(16).filter(|read| read.pack == pack).count() >= DENSE_OF_16
            || is_tiny && of_pack >= TINY_DENSE;
        let following = self.reads.iter().take(8).filter(|read| read.follows).count() >= FOLLOWING_OF_8;
        if self.doubts == 0 && dense {
            Reads::Dense
        } else if follows || following || self.doubts == 0 && is_tiny && near >= TINY_NEAR {
            Reads::Following
        } else {
            Reads::Scattered
        }
    }

    /// The first byte of the range that no window has. What was read from a window before is absent again.
    fn first_absent(&mut self, pack: PackId, range: &Range<u64>) -> Option<u64> {
        let mut at = range.start;
        while at < range.end {
            let Some(index) = self.index_of(pack, at) else { return Some(at) };
            let window = &self.windows[index];
            if window.is_here(at) {
                at = window.piece_end(at);
            } else if window.taken >= window.len() / 2 {
                // The pack is read once more.
                self.windows.swap_remove(index);
            } else {
                return None;
            }
        }
        None
    }

    /// Where the next window begins and how long it is, if nothing comes yet after the one with the byte before `end` and
    /// this is half read, or is come to by who goes on from one that was.
    fn next(&self, pack: PackId, end: u64, is_roomy: bool) -> Option<(u64, u64)> {
        let window = &self.windows[self.index_of(pack, end - 1)?];
        let next = window.range.end;
        if window.is_last || self.index_of(pack, next).is_some() {
            return None;
        }
        let start = window.range.start;
        let goes_on = || self.windows_of(pack).any(|before| before.range.end == start && before.proven);
        if window.taken >= window.len() / 2 {
            Some((next, self.bytes))
        } else if is_roomy && goes_on() {
            Some((next, 2 * window.len()))
        } else {
            None
        }
    }

    /// The range, out of one window or of several that follow each other; notes that it was taken.
    fn take(&mut self, pack: PackId, range: &Range<u64>) -> Held {
        let mut parts = Vec::with_capacity(2);
        let mut at = range.start;
        while at < range.end {
            let Some(index) = self.index_of(pack, at) else { return Held::Absent };
            let window = &self.windows[index];
            if let Some(coming) = &window.coming {
                return Held::Coming(coming.clone());
            }
            let end = range.end.min(window.piece_end(at));
            let (piece, begins) = window.piece_at(at);
            let from = window.offset(at) - window.offset(begins);
            let Some(bytes) = &window.pieces[piece].bytes else { return Held::Absent };
            let to = from + window.offset(end) - window.offset(at);
            parts.push((index, piece, bytes.slice(from..to)));
            at = end;
        }
        for (index, piece, part) in &parts {
            let window = &mut self.windows[*index];
            window.used_at = Instant::now();
            window.used = self.count;
            window.uses += 1;
            window.take(*piece, part.len());
            if !window.proven && window.taken >= window.len() / 2 {
                window.proven = true;
                if window.len() >= self.bytes {
                    self.bytes = 2 * window.len();
                }
            }
        }
        match parts.as_slice() {
            [(_, _, part)] => Held::Here(part.clone()),
            parts => {
                let parts: Vec<&[u8]> = parts.iter().map(|(_, _, part)| &part[..]).collect();
                Held::Here(parts.concat().into())
            }
        }
    }

    /// Makes room for `bytes` more; whether there is enough then.
    fn make_room(&mut self, bytes: u64, memory_bytes: u64, drops: Drops) -> bool {
        let mut held = self.held();
        while held + bytes > memory_bytes || self.windows.len() >= WINDOWS_MAX {
            let crowded = self.windows.len() >= WINDOWS_MAX;
            let count = self.count;
            let useful = |window: &Window| {
                window.coming.is_none()
                    && (crowded || window.held > 0)
                    && (drops == Drops::All || !window.is_alive(count))
            };
            let windows = self.windows.iter().enumerate().filter(|(_, window)| useful(window));
            let oldest = windows.min_by_key(|(_, window)| (!window.is_spent(), window.used_at));
            let Some((index, _)) = oldest else { return false };
            let gone = self.windows.swap_remove(index);
            held -= gone.held;
            if gone.taken < gone.len() / 4 {
                self.bytes = gone.len() / 2;
                self.doubts = DOUBTS;
            }
        }
        true
    }
}

impl Window {
    fn len(&self) -> u64 {
        self.range.end - self.range.start
    }

    fn is_spent(&self) -> bool {
        self.taken >= self.len() / 8 * 7
    }

    /// Whether it is being read: not much longer ago than in the mean, of `count` reads of all.
    fn is_alive(&self, count: u64) -> bool {
        let mean = (self.used - self.opened) / self.uses.max(1);
        !self.is_spent() && count - self.used <= 4 * mean + ALIVE_READS
    }

    fn offset(&self, at: u64) -> usize {
        usize::try_from(at - self.range.start).expect("windows fit into memory")
    }

    /// The piece with this byte, and where it begins.
    fn piece_at(&self, at: u64) -> (usize, u64) {
        let index = (at - self.range.start) / self.piece_bytes;
        (usize::try_from(index).expect("fewer than bytes"), self.range.start + index * self.piece_bytes)
    }

    /// Where the piece with this byte ends.
    fn piece_end(&self, at: u64) -> u64 {
        self.range.end.min(self.piece_at(at).1 + self.piece_bytes)
    }

    /// Whether the byte, which is within, is in memory or on the way.
    fn is_here(&self, at: u64) -> bool {
        self.coming.is_some() || self.pieces[self.piece_at(at).0].bytes.is_some()
    }

    fn take(&mut self, piece: usize, bytes: usize) {
        self.taken += bytes as u64;
        let piece = &mut self.pieces[piece];
        piece.left = piece.left.saturating_sub(bytes);
        if piece.left == 0
            && let Some(read) = piece.bytes.take()
        {
            self.held -= read.len() as u64;
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    const PACK: PackId = PackId(1);
    const PACK_BYTES: u32 = 16 << 20;
    const FILE: u64 = 64 << 10;
    const MEMORY: u64 = 48 << 20;

    fn around(bytes_max: u32) -> Arc<Around> {
        Around::new(bytes_max, PACK_BYTES)
    }

    fn filled(claim: Claim, pack_bytes: u64) -> u64 {
        let len = claim.range.end.min(pack_bytes) - claim.range.start;
        claim.fill(&Bytes::from(vec![0; usize::try_from(len).unwrap()]));
        len
    }

    fn get(around: &Around, pack: PackId, range: Range<u64>) -> Option<Bytes> {
        around.get(pack, range).now_or_never().expect("nothing is on its way")
    }

    /// Reads a file; the bytes that were fetched for it, in one fetch or two.
    fn read_of(around: &Arc<Around>, pack: PackId, at: u64) -> u64 {
        read_within(around, pack, PACK_BYTES.into(), at)
    }

    fn read_within(around: &Arc<Around>, pack: PackId, pack_bytes: u64, at: u64) -> u64 {
        let claim = around.extend(pack, &(at..at + FILE), MEMORY);
        let fetched = claim.map_or(0, |claim| filled(claim, pack_bytes));
        let here = get(around, pack, at..at + FILE).is_some();
        fetched + if here { 0 } else { FILE }
    }

    fn read(around: &Arc<Around>, at: u64) -> u64 {
        read_within(around, PACK, u64::MAX, at)
    }

    fn held(around: &Around) -> u64 {
        around.state.lock().held()
    }

    #[test]
    fn what_follows_is_fetched_once_in_growing_windows() {
        let around = around(4 << 20);
        let fetched: Vec<u64> =
            (0..1024).map(|file| read(&around, 64 + file * FILE)).filter(|bytes| *bytes > 0).collect();
        assert!(fetched.len() <= 24, "{fetched:?}");
        assert!(*fetched.iter().max().unwrap() >= 4 << 20);
        let total: u64 = fetched.iter().sum();
        assert!(total <= (64 << 20) + (8 << 20), "little is fetched twice or for nothing: {total}");
        assert!(held(&around) <= 10 << 20, "what was read is gone");
    }

    #[test]
    fn the_next_window_is_asked_for_when_one_is_begun_or_where_memory_is_short_when_it_is_half_read() {
        // Which file was read when a window was asked for, and which one it begins and ends with.
        let windows = |memory_bytes: u64| -> Vec<(u64, Range<u64>)> {
            let around = around(1 << 20);
            let asked = (0..512).filter_map(|file| {
                let range = file * FILE..(file + 1) * FILE;
                let claim = around.extend(PACK, &range, memory_bytes);
                let window = claim.as_ref().map(|claim| claim.range.start / FILE..claim.range.end / FILE);
                claim.map(|claim| filled(claim, u64::MAX));
                get(&around, PACK, range);
                Some((file, window?))
            });
            asked.collect()
        };
        let roomy = windows(MEMORY);
        assert!(roomy.len() > 30);
        assert!(roomy.windows(2).skip(1).all(|pair| pair[1].0 == pair[0].1.start), "{roomy:?}");
        let short = windows(4 << 20);
        let half_read =
            |(_, window): &(u64, Range<u64>)| window.start + (window.end - window.start).div_ceil(2);
        assert!(short.windows(2).skip(6).all(|pair| pair[1].0 == half_read(&pair[0])), "{short:?}");
    }

    #[test]
    fn one_file_is_fetched_alone() {
        let around = around(4 << 20);
        assert_eq!(read(&around, 0), FILE);
        assert_eq!(read_of(&around, PackId(2), 0), FILE);
    }

    /// Reads packs of 16 MiB in which sixteen directories have a MiB each, a directory a reader; how many fetches and bytes.
    fn sixteen_readers(around: &Arc<Around>, pace: impl Fn(u64, u64) -> u64) -> (usize, u64) {
        let mut files: Vec<(u64, u64)> =
            (0..16u64).flat_map(|reader| (0..64u64).map(move |file| (reader, file))).collect();
        files.sort_by_key(|(reader, file)| pace(*reader, *file));
        let fetched = files
            .iter()
            .map(|(reader, file)| read_of(around, PackId(file / 16), ((*reader * 16) + file % 16) * FILE));
        let fetched: Vec<u64> = fetched.filter(|bytes| *bytes > 0).collect();
        (fetched.len(), fetched.iter().sum())
    }

    #[test]
    fn readers_side_by_side_fetch_each_byte_once() {
        // In step; one behind the other; and each at a pace of its own.
        let paces: [fn(u64, u64) -> u64; 3] =
            [|_, file| file, |reader, file| file + reader, |reader, file| file * (32 + reader)];
        for pace in paces {
            let (fetches, bytes) = sixteen_readers(&around(4 << 20), pace);
            assert!(fetches <= 64, "{fetches} fetches of 1,024");
            assert!(bytes <= (64 << 20) * 21 / 20, "{bytes}");
        }
    }

    #[test]
    fn what_was_read_can_be_read_again() {
        let around = around(4 << 20);
        for _ in 0..2 {
            let fetches = (0..256).filter(|file| read(&around, file * FILE) > 0).count();
            assert!(fetches <= 16, "{fetches}");
        }
    }

    #[test]
    fn small_pieces_of_a_few_packs_are_fetched_together_in_whatever_order() {
        const PIECE: u64 = 4096;
        let around = around(8 << 20);
        // 80 MiB in packs of 16 MiB: more than there is memory for.
        let mut pieces: Vec<u64> = (0..(80 << 20) / PIECE).collect();
        let mut random = 1_u64;
        for index in (1..pieces.len()).rev() {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            pieces.swap(index, usize::try_from(random % (index as u64 + 1)).unwrap());
        }
        let mut fetches = 0;
        let mut bytes = 0;
        for piece in &pieces {
            let (pack, at) = (PackId(piece / 4096), piece % 4096 * PIECE);
            let range = at..at + PIECE;
            if let Some(claim) = around.extend(pack, &range, 64 << 20) {
                fetches += 1;
                bytes += filled(claim, 16 << 20);
            }
            if get(&around, pack, range).is_none() {
                fetches += 1;
                bytes += PIECE;
            }
            assert!(held(&around) <= 64 << 20);
        }
        assert!(fetches <= pieces.len() / 10 && bytes <= 100 << 20, "{fetches} fetches of {bytes} bytes");
    }

    #[test]
    fn what_is_read_at_random_is_fetched_alone() {
        let around = around(4 << 20);
        let fetched: u64 = (0..4000u64)
            .map(|step| step * 7919 % (64 * 256))
            .map(|file| read_of(&around, PackId(file / 256), file % 256 * FILE))
            .sum();
        assert!(fetched <= 4000 * FILE * 21 / 20, "{fetched}");
        let off = Around::new(0, PACK_BYTES);
        assert!((0..9).all(|file| read(&off, file * FILE) == FILE));
    }

    #[test]
    fn windows_that_nobody_reads_become_small_and_then_rare() {
        let around = around(4 << 20);
        assert!((0..512).map(|file| read(&around, file * FILE)).any(|bytes| bytes >= 4 << 20));
        // Two files here and there.
        let places = (1..2000u64).flat_map(|place| [place * 7919, place * 7919 + 1]);
        let fetched: Vec<u64> =
            places.map(|file| read_of(&around, PackId(2 + file / 256 % 512), file % 256 * FILE)).collect();
        let late = &fetched[2000..];
        assert!(late.iter().sum::<u64>() <= late.len() as u64 * (FIRST_BYTES + FILE), "{:?}", &late[..64]);
    }

    #[test]
    fn a_window_is_waited_for_unless_it_never_comes() {
        let around = around(1 << 20);
        let claim = |at: u64| {
            (0..3)
                .find_map(|step| around.extend(PACK, &(at + step..at + step + 1), MEMORY))
                .expect("a window")
        };
        let first = claim(0);
        let start = first.range.start;
        let mut waiting = Box::pin(around.get(PACK, 10..20));
        assert!((&mut waiting).now_or_never().is_none());
        first.fill(&Bytes::from(vec![7; 15]));
        assert_eq!(get(&around, PACK, 4..9).unwrap(), [7; 5].as_slice());
        assert_eq!(waiting.now_or_never().unwrap(), None, "the pack ends at {}", start + 15);
        let second = claim(100 << 20);
        let mut waiting = Box::pin(around.get(PACK, (100 << 20) + 10..(100 << 20) + 20));
        assert!((&mut waiting).now_or_never().is_none());
        drop(second);
        assert_eq!(waiting.now_or_never().unwrap(), None);
        assert!(around.extend(PACK, &((100 << 20) + 10..(100 << 20) + 20), MEMORY).is_some());
    }

    #[test]
    fn windows_take_a_bounded_amount_of_memory() {
        let around = around(4 << 20);
        for place in 0..64u64 {
            for file in 0..32 {
                read_of(&around, PackId(place), file * 2 * FILE);
                assert!(held(&around) <= MEMORY, "{}", held(&around));
            }
        }
        assert!(held(&around) > 4 << 20);
        around.shrink(4 << 20);
        assert!(held(&around) <= 4 << 20);
        // What is on the way is neither dropped nor exceeded.
        let claims: Vec<Claim> = (0..256u64)
            .flat_map(|place| [0, 1, 2].map(|file| (PackId(100 + place), file * FILE)))
            .filter_map(|(pack, at)| around.extend(pack, &(at..at + FILE), 4 << 20))
            .collect();
        assert!(!claims.is_empty() && held(&around) <= 4 << 20);
    }
}

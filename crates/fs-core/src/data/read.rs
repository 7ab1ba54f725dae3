//! From ranges of runs to verified plain bytes.
//!
//! Looked for in this order: the memory cache, what was fetched ahead, packs that are still in memory, fetches that others
//! have begun, journals of staged packs, the disk cache, what came along with neighbours, the store. Blocks of one pack
//! that lie close together are one fetch; a block is fetched once at a time,
//! however many ask. A fetch is a future that all who wait for it share and drive; when nobody waits any more, it ends.
//! Bytes in flight are bounded by a budget of their own; fetches beyond it wait their turn.
//! Lock order: flights is a leaf.

use std::borrow::Borrow;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use futures::future::{self, BoxFuture, FutureExt, Shared, WeakShared};
use futures::stream::{self, StreamExt};
use hashbrown::HashMap;
use parking_lot::Mutex;
use tokio::sync::Semaphore;

use super::ahead::{Ahead, Held, Room};
use super::around::{Around, Claim};
use super::block::{self, Damage};
use super::cache::{BlockKey, MemoryCache};
use super::disk_cache::{DiskCache, Now};
use super::layout::block_plain_len;
use super::objects::Objects;
use super::pack;
use super::pieces::{Part, Pieces};
use super::retry::Failure;
use super::scattered::{Scattered, Turn};
use super::staging::Staging;
use super::unstored::Packs;
use super::{Admission, Budget, Counters, DataOptions, ReadHint, ReadRange};
use crate::tasks::Tasks;
use crate::types::{Block, CHUNK_BYTES, Error, ErrorKind, PackId, PackedRun, Result};

/// Tasks that prefetch; more are shed.
const PREFETCHES_MAX: usize = 64;
/// Prefetched blocks a task.
const PREFETCH_BLOCKS: usize = 256;
/// A fetch of a pack's first blocks that is at least so long is probably one of all its blocks.
const WHOLE_BYTES_MIN: u64 = 2 << 20;
/// The footer of a pack with few runs is no longer.
const FOOTER_BYTES: u64 = 16 << 10;
/// Fetches that verifying has under way.
const VERIFIES_MAX: usize = 4;
/// Longer runs are parts of large files, whose readers know what comes next.
const SMALL_RUN_MAX: u32 = 256 << 10;
/// A request that brings at most so much is one for few bytes: a disk cache that is sparing keeps what came in it.
const SCATTERED_BYTES_MAX: u64 = 256 << 10;
/// And of what came with neighbours, which share a request, blocks that others would need many requests for.
const SCATTERED_BLOCK_MAX: u64 = 16 << 10;
/// Reads of at most so many bytes are answered on the caller's thread where the kernel has the disk cache's file in memory.
const SHORT_BYTES_MAX: u64 = 128 << 10;
/// Decoding so many bytes is about a millisecond: others get their turn.
const YIELD_BYTES: u64 = 2 << 20;
/// Blocks that are decompressed into one buffer, where they are not for a cache.
const DECODED_TOGETHER: usize = 16;

/// One block that is wanted.
#[derive(Debug, Clone, Copy)]
struct Wanted {
    key: BlockKey,
    block: Block,
    plain_len: u32,
    /// Whether it is all or much of what its file has there, so that the neighbours are other files' blocks.
    small: bool,
}

impl Wanted {
    fn stored(&self) -> Range<u64> {
        let start = u64::from(self.key.1);
        start..start + u64::from(self.block.stored_len)
    }
}

/// Plain bytes of a block that were found, from `at` on.
#[derive(Debug)]
struct Here {
    at: u32,
    plain: Part,
}

impl Here {
    fn all(plain: Part) -> Here {
        Here { at: 0, plain }
    }

    fn has(&self, part: &Range<u32>) -> bool {
        self.at <= part.start && (part.end - self.at) as usize <= self.plain.len()
    }

    /// The bytes at `part` of the block, which are among these.
    fn part(&self, part: &Range<u32>) -> Part {
        self.plain.part((part.start - self.at) as usize..(part.end - self.at) as usize)
    }
}

/// What becomes of the blocks that a fetch brings.
#[derive(Debug, Clone)]
enum Purpose {
    /// Somebody waits for them.
    Read(ReadHint),
    /// Somebody will come for them, and they have room until then.
    Ahead(Arc<Room>),
}

/// What a fetch brought, by the block's place in the pack.
type Blocks = HashMap<u32, Result<Part, Failure>>;
type Fetched = Arc<Blocks>;
type Flight = Shared<BoxFuture<'static, Fetched>>;
type WeakFlight = WeakShared<BoxFuture<'static, Fetched>>;

/// What reads.
#[derive(Debug)]
pub(super) struct Reader {
    options: Arc<DataOptions>,
    objects: Objects,
    counters: Arc<Counters>,
    packs: Arc<Packs>,
    staging: Option<Arc<Staging>>,
    pub(super) memory: MemoryCache,
    pub(super) ahead: Arc<Ahead>,
    pub(super) disk: Option<Arc<DiskCache>>,
    flights: Flights,
    around: Arc<Around>,
    scattered: Arc<Scattered>,
    fetch_memory: Arc<Budget>,
    /// GETs that may be in flight.
    requests: Semaphore,
    prefetches: AtomicUsize,
    tasks: Arc<Tasks>,
}

/// Fetches under way, by block. Weak: a fetch lives as long as somebody waits for it.
#[derive(Default)]
struct Flights(Mutex<HashMap<BlockKey, WeakFlight>>);

impl std::fmt::Debug for Flights {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Flights({})", self.0.lock().len())
    }
}

impl Reader {
    pub(super) fn new(
        options: Arc<DataOptions>,
        objects: Objects,
        counters: Arc<Counters>,
        packs: Arc<Packs>,
        disk: Option<DiskCache>,
        staging: Option<Arc<Staging>>,
        tasks: Arc<Tasks>,
    ) -> Reader {
        Reader {
            objects,
            counters,
            packs,
            staging,
            memory: MemoryCache::new(options.cache_memory_bytes, options.block_bytes),
            disk: disk.map(Arc::new),
            ahead: Arc::default(),
            flights: Flights::default(),
            around: Around::new(options.fetch_around_bytes, options.pack_bytes),
            scattered: Arc::default(),
            fetch_memory: Budget::new(options.fetch_memory_bytes),
            requests: Semaphore::new(options.fetches_max.max(1)),
            prefetches: AtomicUsize::new(0),
            tasks,
            options,
        }
    }

    /// See [`super::Data::read_many`].
    pub(super) async fn read_many(
        self: &Arc<Reader>,
        ranges: &[ReadRange],
        hint: ReadHint,
    ) -> Result<Vec<Pieces>> {
        let mut here: HashMap<BlockKey, Here> = HashMap::new();
        let mut missing: BTreeMap<BlockKey, Wanted> = BTreeMap::new();
        // A read that takes long would hold up others that come to the same thread.
        let is_short = ranges.iter().map(|range| u64::from(range.len)).sum::<u64>() <= SHORT_BYTES_MAX;
        for range in ranges {
            for_blocks(&range.run, range.bytes(), |wanted, part| {
                // Where other bytes of the block are here, all of it serves both.
                let part = match here.get(&wanted.key) {
                    Some(others) if others.has(&part) => return,
                    Some(_) => 0..wanted.plain_len,
                    None if missing.contains_key(&wanted.key) => return,
                    None => part,
                };
                let plain = self.memory.get(wanted.key, wanted.plain_len).map(Part::all);
                if let Some(plain) = plain.or_else(|| self.ahead.get(wanted.key, wanted.plain_len, part.end))
                {
                    self.counters.add(|counters| &counters.memory_hits, 1);
                    here.insert(wanted.key, Here::all(plain));
                } else if is_short && let Some(found) = self.ask_disk_now(&wanted, &part, hint) {
                    here.insert(wanted.key, found);
                } else {
                    missing.insert(wanted.key, wanted);
                }
            })?;
        }
        let fetched = !missing.is_empty();
        if fetched {
            let missing: Vec<Wanted> = missing.into_values().collect();
            self.bring(&missing, hint, &mut here).await?;
            self.fetch_runs(ranges, hint);
        }
        let mut read = Vec::with_capacity(ranges.len());
        for range in ranges {
            let mut pieces = Pieces::default();
            for_blocks(&range.run, range.bytes(), |wanted, part| {
                // It may have come with a fetch ahead of somebody, who is us.
                if fetched && part.end == wanted.plain_len {
                    self.ahead.was_read(wanted.key);
                }
                pieces.push_part(here[&wanted.key].part(&part));
            })?;
            read.push(pieces);
        }
        Ok(read)
    }

    /// See [`super::Data::prefetch`].
    pub(super) fn prefetch(self: &Arc<Reader>, ranges: &[ReadRange]) -> bool {
        let missing = self.not_here(ranges);
        self.room_for(&missing).is_some_and(|room| self.bring_ahead(&missing, room))
    }

    /// See [`super::Data::prefetch_held`].
    pub(super) fn prefetch_held(self: &Arc<Reader>, ranges: &[ReadRange]) -> Option<Held> {
        let missing = self.not_here(ranges);
        let keys = missing.iter().map(|wanted| wanted.key).collect();
        let (room, held) = self.room_for(&missing)?.hold(&self.ahead, keys);
        self.bring_ahead(&missing, room).then_some(held)
    }

    /// Blocks that are not in memory.
    fn not_here(&self, ranges: &[ReadRange]) -> Vec<Wanted> {
        let mut missing: BTreeMap<BlockKey, Wanted> = BTreeMap::new();
        for range in ranges {
            // A record that cannot be is told to whoever reads it.
            let _ = for_blocks(&range.run, range.bytes(), |wanted, _| {
                let (key, len) = (wanted.key, wanted.plain_len);
                let is_here = self.ahead.has(key, len)
                    || self.memory.get(key, len).is_some()
                    || self.packs.bytes(key.0, key.1, wanted.block.stored_len).is_some();
                if !is_here {
                    missing.insert(key, wanted);
                }
            });
        }
        missing.into_values().collect()
    }

    fn room_for(&self, missing: &[Wanted]) -> Option<Room> {
        self.claim(missing.iter().map(|wanted| u64::from(wanted.plain_len)).sum())
    }

    /// Room for bytes that nobody waits for yet.
    fn claim(&self, bytes: u64) -> Option<Room> {
        let bytes_max = self.ahead_bytes_max()?;
        let room = self.ahead.claim(bytes, bytes_max, &self.options.memory)?;
        self.around.shrink(self.around_bytes_max());
        Some(room)
    }

    /// Starts to fetch blocks (ascending by key) for which there is room; false if there is no turn for all of them.
    fn bring_ahead(self: &Arc<Reader>, missing: &[Wanted], room: Room) -> bool {
        let room = Arc::new(room);
        for part in missing.chunks(PREFETCH_BLOCKS) {
            let Some(turn) = self.prefetch_turn() else { return false };
            // Begun here and not in the task, so that the reader's next request finds them.
            let (flights, _) = self.flights_for(part, &Purpose::Ahead(Arc::clone(&room)));
            self.tasks.spawn(async move {
                // Errors are told to whoever reads.
                future::join_all(flights).await;
                drop(turn);
            });
        }
        true
    }

    /// What is fetched ahead may hold without borrowing, if it may hold anything: what windows on packs do not need now is
    /// theirs.
    fn ahead_bytes_max(&self) -> Option<u64> {
        let own = self.options.readahead_memory_bytes;
        let spare = self.options.around_memory_bytes.saturating_sub(self.around.bytes_in_use());
        (own > 0).then_some(own + spare)
    }

    /// Bytes of plain blocks in memory.
    pub(super) fn memory_bytes(&self) -> u64 {
        self.memory.bytes() + self.ahead.bytes()
    }

    /// See [`super::Data::verify_many`].
    pub(super) async fn verify_many<R: Borrow<PackedRun>>(&self, runs: &[R]) -> Vec<Result<()>> {
        let mut remote: BTreeMap<BlockKey, Wanted> = BTreeMap::new();
        let mut bad: HashMap<BlockKey, Failure> = HashMap::new();
        let mut verdicts: Vec<Result<()>> = Vec::with_capacity(runs.len());
        for run in runs.iter().map(Borrow::borrow) {
            verdicts.push(for_blocks(run, 0..run.plain_len, |wanted, _| match self.ask_packs(&wanted) {
                Some(Ok(_)) => {}
                Some(Err(failure)) => drop(bad.insert(wanted.key, failure)),
                None => drop(remote.insert(wanted.key, wanted)),
            }));
        }
        let remote: Vec<Wanted> = remote.into_values().collect();
        let once = Purpose::Read(ReadHint::Once);
        let groups: Vec<Vec<Wanted>> = self.groups(&remote, &once).map(<[Wanted]>::to_vec).collect();
        let mut checks = stream::iter(groups)
            .map(async |group: Vec<Wanted>| {
                let _memory = self.fetch_memory.acquire(span_bytes(&group)).await;
                let pack = group[0].key.0;
                let mut fetched = HashMap::new();
                let missing = self.ask_staging(group, &once, &mut fetched).await;
                fetched.extend(self.fetch_store(missing, &once).await);
                (pack, fetched)
            })
            .buffer_unordered(VERIFIES_MAX);
        while let Some((pack, fetched)) = checks.next().await {
            bad.extend(
                fetched.into_iter().filter_map(|(offset, block)| Some(((pack, offset), block.err()?))),
            );
        }
        for (run, verdict) in runs.iter().zip(&mut verdicts).filter(|(_, verdict)| verdict.is_ok()) {
            let run = run.borrow();
            let mut first = None;
            *verdict = for_blocks(run, 0..run.plain_len, |wanted, _| {
                first = first.take().or_else(|| bad.get(&wanted.key).cloned());
            });
            if let Some(failure) = first {
                *verdict = Err(failure.into());
            }
        }
        verdicts
    }

    /// Adds the blocks (ascending by key) to `here`, from wherever they are.
    async fn bring(
        self: &Arc<Reader>,
        missing: &[Wanted],
        hint: ReadHint,
        here: &mut HashMap<BlockKey, Here>,
    ) -> Result<()> {
        let purpose = Purpose::Read(hint);
        let mut remote = Vec::with_capacity(missing.len());
        for wanted in missing {
            match self.ask_packs(wanted) {
                Some(Ok(plain)) => {
                    here.insert(wanted.key, Here::all(self.keep(wanted, Part::all(plain), &purpose)));
                }
                Some(Err(failure)) => return Err(failure.into()),
                None => remote.push(*wanted),
            }
        }
        if remote.is_empty() {
            return Ok(());
        }
        let (flights, owners) = self.flights_for(&remote, &purpose);
        let fetched = future::join_all(flights).await;
        for (wanted, owner) in remote.iter().zip(owners) {
            match fetched[owner].get(&wanted.key.1) {
                Some(Ok(plain)) if plain.len() == wanted.plain_len as usize => {
                    here.insert(wanted.key, Here::all(plain.clone()));
                }
                Some(Err(failure)) => return Err(failure.clone().into()),
                Some(Ok(_)) | None => return Err(contradiction(wanted.key.0).into()),
            }
        }
        Ok(())
    }

    /// The fetches that bring the blocks, and for each block which of them does. Joins those that are under way.
    fn flights_for(self: &Arc<Reader>, remote: &[Wanted], purpose: &Purpose) -> (Vec<Flight>, Vec<usize>) {
        // A flight's last handle must not be dropped under the lock, which its end takes: all handles are returned.
        let mut flights: Vec<Flight> = Vec::new();
        let mut owner_of: HashMap<BlockKey, usize> = HashMap::new();
        let mut mine = Vec::new();
        let mut under_way = self.flights.0.lock();
        for wanted in remote {
            let Some(flight) = under_way.get(&wanted.key).and_then(WeakShared::upgrade) else {
                mine.push(*wanted);
                continue;
            };
            let known = flights.iter().position(|other| other.ptr_eq(&flight));
            owner_of.insert(wanted.key, known.unwrap_or(flights.len()));
            if known.is_none() {
                flights.push(flight);
            }
        }
        for group in self.groups(&mine, purpose) {
            let flight = Arc::clone(self).fly(group.to_vec(), purpose.clone()).boxed().shared();
            if let Some(weak) = flight.downgrade() {
                under_way.extend(group.iter().map(|wanted| (wanted.key, weak.clone())));
            }
            owner_of.extend(group.iter().map(|wanted| (wanted.key, flights.len())));
            flights.push(flight);
        }
        drop(under_way);
        let owners = remote.iter().map(|wanted| owner_of[&wanted.key]).collect();
        (flights, owners)
    }

    /// One fetch: the disk cache, then the store for what it does not have.
    async fn fly(self: Arc<Reader>, group: Vec<Wanted>, purpose: Purpose) -> Fetched {
        let _landing =
            Landing { reader: Arc::clone(&self), keys: group.iter().map(|wanted| wanted.key).collect() };
        // What is fetched ahead has claimed its room.
        let _memory = match purpose {
            Purpose::Ahead(_) => None,
            Purpose::Read(_) => Some(self.fetch_memory.acquire(span_bytes(&group)).await),
        };
        let mut fetched = HashMap::with_capacity(group.len());
        let missing = self.ask_staging(group, &purpose, &mut fetched).await;
        let missing = self.ask_disk(missing, &purpose, &mut fetched).await;
        self.counters.add(|counters| &counters.misses, missing.len() as u64);
        let missing = self.ask_around(missing, &purpose, &mut fetched).await;
        let gets = self.groups(&missing, &purpose).map(|part| self.fetch_store(part.to_vec(), &purpose));
        for part in future::join_all(gets).await {
            fetched.extend(part);
        }
        Arc::new(fetched)
    }

    /// Adds what journals of staged packs have; returns what they do not have.
    async fn ask_staging(&self, group: Vec<Wanted>, purpose: &Purpose, fetched: &mut Blocks) -> Vec<Wanted> {
        let Some(staging) = &self.staging else { return group };
        let place = |wanted: &Wanted| {
            let (pack, offset) = wanted.key;
            let at = self.packs.journal_place(pack, offset, wanted.block.stored_len)?;
            Some((pack, at, wanted.block.stored_len))
        };
        let places: Vec<_> = group.iter().map(place).collect();
        if places.iter().all(Option::is_none) {
            return group;
        }
        let mut read = staging.read(places.iter().flatten().copied().collect()).await.into_iter();
        let mut missing = Vec::new();
        for (wanted, place) in group.into_iter().zip(places) {
            let Some(stored) = place.and_then(|_| read.next()) else {
                missing.push(wanted);
                continue;
            };
            let plain = match stored {
                Ok(stored) => block::decode(&stored, &wanted.block, wanted.plain_len)
                    .map(|plain| self.keep(&wanted, Part::all(plain), purpose))
                    .map_err(|damage| damage.to_string()),
                // It has been stored meanwhile.
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                    missing.push(wanted);
                    continue;
                }
                Err(error) => Err(error.to_string()),
            };
            let (pack, offset) = wanted.key;
            let plain = plain.map_err(|why| {
                Failure::new(ErrorKind::Io, format!("the journal of pack {pack}, at {offset}: {why}"))
            });
            fetched.insert(offset, plain);
        }
        missing
    }

    /// Bytes of a block, if the disk cache has them and that needs no waiting.
    fn ask_disk_now(&self, wanted: &Wanted, part: &Range<u32>, hint: ReadHint) -> Option<Here> {
        let disk = self.disk.as_ref()?;
        let Block { stored_len, raw, checksum } = wanted.block;
        if raw && stored_len != wanted.plain_len {
            return None;
        }
        // Of a compressed block all is needed.
        let stored_range = if raw { part.clone() } else { 0..stored_len };
        let Now::Here(stored) = disk.get_now(wanted.key, checksum, stored_range) else { return None };
        let found = if raw {
            Here { at: part.start, plain: Part::all(stored) }
        } else {
            let mut plain = vec![0; wanted.plain_len as usize];
            block::decompress(&stored, &mut plain).ok()?;
            let plain = Bytes::from(plain);
            // Who reads all of it has it in a cache of the kernel's now, and so has the file.
            if part.len() < plain.len() && hint == ReadHint::Normal {
                self.memory.insert_owned(wanted.key, plain.clone());
            }
            Here::all(Part::all(plain))
        };
        self.counters.add(|counters| &counters.disk_hits, 1);
        self.scattered.found();
        Some(found)
    }

    /// Adds what the disk cache has; returns what it does not have.
    async fn ask_disk(&self, group: Vec<Wanted>, purpose: &Purpose, fetched: &mut Blocks) -> Vec<Wanted> {
        let Some(disk) =
            self.disk.as_ref().filter(|disk| disk.has_any(group.iter().map(|wanted| wanted.key)))
        else {
            return group;
        };
        let blocks: Vec<_> = group.iter().map(|wanted| (wanted.key, wanted.block.checksum)).collect();
        let reading = tokio::task::spawn_blocking({
            let disk = Arc::clone(disk);
            move || disk.get(&blocks)
        });
        let Ok(found) = reading.await else { return group };
        let mut missing = Vec::new();
        for (wanted, stored) in group.into_iter().zip(found) {
            match stored.map(|stored| block::decode(&stored, &wanted.block, wanted.plain_len)) {
                Some(Ok(plain)) => {
                    self.counters.add(|counters| &counters.disk_hits, 1);
                    self.scattered.found();
                    fetched.insert(wanted.key.1, Ok(self.keep(&wanted, Part::all(plain), purpose)));
                }
                Some(Err(_)) => {
                    disk.forget(wanted.key);
                    missing.push(wanted);
                }
                None => missing.push(wanted),
            }
        }
        missing
    }

    /// Adds what came, or is coming, with neighbours; returns what does not.
    async fn ask_around(
        self: &Arc<Reader>,
        group: Vec<Wanted>,
        purpose: &Purpose,
        fetched: &mut Blocks,
    ) -> Vec<Wanted> {
        if let Some((first, last)) = group.first().zip(group.last())
            && matches!(purpose, Purpose::Read(ReadHint::Normal))
            && group.iter().all(|wanted| wanted.small)
        {
            let range = first.stored().start..last.stored().end;
            if let Some(window) = self.around.extend(first.key.0, &range, self.around_bytes_max()) {
                self.fetch_window(first.key.0, window);
            }
        }
        let mut missing = Vec::new();
        let mut for_disk = Vec::new();
        let keeps_all = self.disk_keeps_all();
        for wanted in group {
            let stored = self.around.get(wanted.key.0, wanted.stored()).await;
            let plain = stored.as_ref().map(|stored| block::decode(stored, &wanted.block, wanted.plain_len));
            if let (Some(stored), Some(Ok(plain))) = (stored, plain) {
                fetched.insert(wanted.key.1, Ok(self.keep(&wanted, Part::all(plain), purpose)));
                if keeps_all || stored.len() as u64 <= SCATTERED_BLOCK_MAX {
                    for_disk.push((wanted.key, stored));
                }
            } else {
                missing.push(wanted);
            }
        }
        self.offer_disk(for_disk, purpose);
        missing
    }

    /// What windows may hold: what large files do not need now is theirs.
    fn around_bytes_max(&self) -> u64 {
        let spare = self.options.readahead_memory_bytes.saturating_sub(self.ahead.bytes_in_use());
        self.options.around_memory_bytes + spare
    }

    /// Begins to fetch a window.
    fn fetch_window(self: &Arc<Reader>, pack: PackId, window: Claim) {
        let reader = Arc::clone(self);
        self.tasks.spawn(async move {
            let failed = || reader.counters.add(|counters| &counters.fetch_failures, 1);
            let _permit = reader.requests.acquire().await;
            reader.counters.add(|counters| &counters.fetches, 1);
            let range = window.range.clone();
            match reader.objects.get(pack, range.start..range.start + 1, range.end, failed).await {
                Ok(body) => {
                    reader.counters.add(|counters| &counters.fetched_bytes, body.len() as u64);
                    window.fill(&body);
                }
                // Who needs the bytes fetches them, and tells.
                Err(failure) => tracing::debug!(text = failure.text, "window"),
            }
        });
    }

    /// Begins to fetch those runs for the disk cache of which much is read here and there.
    fn fetch_runs(self: &Arc<Reader>, ranges: &[ReadRange], hint: ReadHint) {
        let large = |range: &&ReadRange| range.run.plain_len > SMALL_RUN_MAX;
        for range in ranges.iter().filter(large).filter(|_| hint == ReadHint::Normal && self.disk.is_some()) {
            let (pack, bytes) = (range.run.pack, range.run.stored_bytes());
            // Those who wait for their bytes have memory for GETs of their own.
            if self.scattered.is_due(pack)
                && let Some(room) = self.claim(bytes)
                && let Some(turn) = self.scattered.turn(pack)
            {
                let (reader, run) = (Arc::clone(self), Arc::clone(&range.run));
                self.tasks.spawn(async move { reader.fetch_run(&run, room, turn).await });
            }
        }
    }

    /// One GET of all that a run has in its pack, for the disk cache: who reads it checks it.
    async fn fetch_run(&self, run: &PackedRun, room: Room, turn: Turn) {
        let mut blocks = Vec::with_capacity(run.blocks.len());
        let sound = for_blocks(run, 0..run.plain_len, |wanted, _| blocks.push(wanted));
        let (Some(disk), Some(first), Ok(())) = (&self.disk, blocks.first(), sound) else { return };
        let (asked, end) = object_range(first.stored().start..first.stored().start + run.stored_bytes());
        let failed = || self.counters.add(|counters| &counters.fetch_failures, 1);
        let body = {
            let _permit = self.requests.acquire().await;
            self.counters.add(|counters| &counters.fetches, 1);
            self.objects.get(run.pack, asked.clone(), end, failed).await
        };
        match body {
            Ok(body) => {
                self.counters.add(|counters| &counters.fetched_bytes, body.len() as u64);
                // The next one is not fetched before this one has been written. What waits for that has a bound of its own.
                let body = Bytes::from_owner(RunBody { body, _turn: turn });
                let stored = |wanted: &Wanted| body.slice(within(&wanted.stored(), asked.start));
                disk.offer(blocks.iter().map(|wanted| (wanted.key, stored(wanted))));
                drop(room);
            }
            // Who needs the bytes fetches them, and tells.
            Err(failure) => tracing::debug!(text = failure.text, "run"),
        }
    }

    /// One of the turns for fetches that nobody waits for, if there is one left.
    fn prefetch_turn(self: &Arc<Reader>) -> Option<PrefetchTurn> {
        if self.prefetches.fetch_add(1, Ordering::Relaxed) >= PREFETCHES_MAX {
            self.prefetches.fetch_sub(1, Ordering::Relaxed);
            return None;
        }
        Some(PrefetchTurn(Arc::clone(self)))
    }

    /// Fetches neighbouring blocks of one pack from the store. Damaged ones are fetched once more, in case the damage
    /// happened on the way.
    async fn fetch_store(&self, group: Vec<Wanted>, purpose: &Purpose) -> Blocks {
        let mut fetched = HashMap::with_capacity(group.len());
        let damaged = self.fetch_once(&group, purpose, &mut fetched).await;
        if !damaged.is_empty() {
            tracing::warn!(pack = %damaged[0].key.0, blocks = damaged.len(), "damaged blocks are fetched again");
            self.fetch_once(&damaged, purpose, &mut fetched).await;
        }
        fetched
    }

    /// One GET for all of `group`; returns the blocks that were damaged.
    async fn fetch_once(&self, group: &[Wanted], purpose: &Purpose, fetched: &mut Blocks) -> Vec<Wanted> {
        let (Some(first), Some(last)) = (group.first(), group.last()) else { return Vec::new() };
        let pack = first.key.0;
        let (asked, end) = object_range(first.stored().start..last.stored().end);
        let failed = || self.counters.add(|counters| &counters.fetch_failures, 1);
        let body = {
            let _permit = self.requests.acquire().await;
            self.counters.add(|counters| &counters.fetches, 1);
            self.objects.get(pack, asked.clone(), end, failed).await
        };
        let body = match body {
            Ok(body) => body,
            Err(failure) => {
                fetched.extend(group.iter().map(|wanted| (wanted.key.1, Err(failure.clone()))));
                return Vec::new();
            }
        };
        self.counters.add(|counters| &counters.fetched_bytes, body.len() as u64);
        let body = Part::all(body);
        let mut damaged = Vec::new();
        let mut for_disk = Vec::new();
        let mut since_yield = 0;
        // Cached blocks have a buffer each.
        let together = if matches!(purpose, Purpose::Read(ReadHint::Normal)) { 1 } else { DECODED_TOGETHER };
        let alike = group.chunk_by(|one, next| one.block.raw == next.block.raw);
        for blocks_alike in alike.flat_map(|alike| alike.chunks(together)) {
            let stored = |block: &Wanted| body.part(within(&block.stored(), asked.start));
            for (wanted, plain) in blocks_alike.iter().zip(decode_alike(blocks_alike, stored)) {
                let block = match plain {
                    Ok(plain) => {
                        for_disk.push((wanted.key, stored(wanted).bytes()));
                        Ok(self.keep(wanted, plain, purpose))
                    }
                    Err(damage) => {
                        damaged.push(*wanted);
                        let text = format!(
                            "pack {pack}, {} bytes at {}: {damage}",
                            wanted.block.stored_len, wanted.key.1
                        );
                        Err(Failure::new(ErrorKind::Io, text))
                    }
                };
                fetched.insert(wanted.key.1, block);
                since_yield += u64::from(wanted.plain_len);
            }
            if since_yield > YIELD_BYTES {
                since_yield = 0;
                tokio::task::yield_now().await;
            }
        }
        if !damaged.is_empty() {
            failed();
        }
        let waited_for = matches!(purpose, Purpose::Read(ReadHint::Normal));
        let ahead_of_stride = matches!(purpose, Purpose::Ahead(room) if room.is_held());
        let scattered = (waited_for || ahead_of_stride) && body.len() as u64 <= SCATTERED_BYTES_MAX;
        if scattered && waited_for && !first.small {
            self.scattered.fetched(pack);
        }
        if scattered || self.disk_keeps_all() {
            self.offer_disk(for_disk, purpose);
        }
        damaged
    }

    fn disk_keeps_all(&self) -> bool {
        self.options.disk_cache.as_ref().is_some_and(|disk| disk.admission == Admission::All)
    }

    fn offer_disk(&self, stored: Vec<(BlockKey, Bytes)>, purpose: &Purpose) {
        if let Some(disk) = self.disk.as_ref().filter(|_| !matches!(purpose, Purpose::Read(ReadHint::Once))) {
            disk.offer(stored);
        }
    }

    /// The block from a pack that is still in memory.
    fn ask_packs(&self, wanted: &Wanted) -> Option<Result<Bytes, Failure>> {
        let stored = self.packs.bytes(wanted.key.0, wanted.key.1, wanted.block.stored_len)?;
        Some(block::decode(&stored, &wanted.block, wanted.plain_len).map_err(|damage| {
            Failure::new(
                ErrorKind::Io,
                format!("pack {} in memory, at {}: {damage}", wanted.key.0, wanted.key.1),
            )
        }))
    }

    /// Puts a decoded block where it is for. What is returned pins nothing else if it was cached.
    fn keep(&self, wanted: &Wanted, plain: Part, purpose: &Purpose) -> Part {
        match purpose {
            Purpose::Read(ReadHint::Normal) if self.memory.is_on() => {}
            Purpose::Read(_) => return plain,
            Purpose::Ahead(room) => {
                self.ahead.put(wanted.key, plain.clone(), room);
                return plain;
            }
        }
        // A raw block is a part of what it was fetched with.
        let own = if wanted.block.raw { Bytes::copy_from_slice(plain.as_slice()) } else { plain.bytes() };
        self.memory.insert_owned(wanted.key, own.clone());
        Part::all(own)
    }

    /// Puts a run that was just appended into the memory cache.
    pub(super) fn cache(&self, run: &PackedRun, plain: &[u8]) {
        let mut rest = plain;
        let cached = for_blocks(run, 0..run.plain_len, |wanted, part| {
            let (block, others) = rest.split_at(part.len().min(rest.len()));
            rest = others;
            self.memory.insert_copy(wanted.key, block);
        });
        debug_assert!(cached.is_ok(), "the run was made here");
    }

    /// Cuts blocks (ascending by key) into what one GET fetches.
    fn groups<'a>(
        &self,
        blocks: &'a [Wanted],
        purpose: &Purpose,
    ) -> impl Iterator<Item = &'a [Wanted]> + use<'a> {
        let gap_max = u64::from(self.options.fetch_gap_bytes);
        let bytes_max = u64::from(match purpose {
            Purpose::Read(_) => self.options.fetch_bytes_max,
            // It has room, and is as long as the reader ahead of whom it is made would have it.
            Purpose::Ahead(_) => self.options.fetch_bytes_max.max(self.options.pack_bytes),
        });
        let mut rest = blocks;
        std::iter::from_fn(move || {
            let first = rest.first()?;
            let mut end = first.stored().end;
            let follow = rest[1..].iter().take_while(|next| {
                let stored = next.stored();
                let close = next.key.0 == first.key.0
                    && stored.start >= end
                    && stored.start - end <= gap_max
                    && stored.end - first.stored().start <= bytes_max;
                end = stored.end;
                close
            });
            let (group, others) = rest.split_at(1 + follow.count());
            rest = others;
            Some(group)
        })
    }
}

/// Takes a fetch's blocks off the list when it ends, however it ends.
struct Landing {
    reader: Arc<Reader>,
    keys: Vec<BlockKey>,
}

impl Drop for Landing {
    fn drop(&mut self) {
        let mut under_way = self.reader.flights.0.lock();
        for key in &self.keys {
            under_way.remove(key);
        }
    }
}

/// What was fetched of a run, with the turn that it has until it is no longer needed.
struct RunBody {
    body: Bytes,
    _turn: Turn,
}

impl AsRef<[u8]> for RunBody {
    fn as_ref(&self) -> &[u8] {
        &self.body
    }
}

/// One of the [`PREFETCHES_MAX`] turns.
struct PrefetchTurn(Arc<Reader>);

impl Drop for PrefetchTurn {
    fn drop(&mut self) {
        self.0.prefetches.fetch_sub(1, Ordering::Relaxed);
    }
}

fn span_bytes(group: &[Wanted]) -> u64 {
    match (group.first(), group.last()) {
        (Some(first), Some(last)) => last.stored().end.saturating_sub(first.stored().start),
        _ => 0,
    }
}

/// The plain bytes of blocks, of which all are raw or none: those of neighbours are neighbours in one buffer.
fn decode_alike(blocks: &[Wanted], stored: impl Fn(&Wanted) -> Part) -> Vec<Result<Part, Damage>> {
    if blocks.iter().all(|wanted| wanted.block.raw) {
        let check = |wanted: &Wanted| {
            let stored = stored(wanted);
            block::decode(&stored.bytes(), &wanted.block, wanted.plain_len).map(|_| stored)
        };
        return blocks.iter().map(check).collect();
    }
    let mut plain = vec![0; blocks.iter().map(|wanted| wanted.plain_len as usize).sum()];
    let mut rest = plain.as_mut_slice();
    let mut decoded = Vec::with_capacity(blocks.len());
    for wanted in blocks {
        let (block, others) = rest.split_at_mut(wanted.plain_len as usize);
        rest = others;
        decoded.push(block::decode_into(stored(wanted).as_slice(), &wanted.block, block));
    }
    let plain = Part::all(plain.into());
    let mut end = 0;
    let parts = blocks.iter().zip(decoded).map(|(wanted, decoded)| {
        let start = end;
        end += wanted.plain_len as usize;
        decoded.map(|()| plain.part(start..end))
    });
    parts.collect()
}

/// What to ask for to get `blocks`, and up to where there may be more: the whole object, if those are probably all blocks of
/// a pack. Servers have less work with that than with a part of it.
fn object_range(blocks: Range<u64>) -> (Range<u64>, u64) {
    let from_first = blocks.start == u64::from(pack::HEADER_BYTES);
    if from_first && blocks.end - blocks.start >= WHOLE_BYTES_MIN {
        (0..blocks.end, blocks.end + FOOTER_BYTES)
    } else {
        (blocks.clone(), blocks.end)
    }
}

/// Where stored bytes lie in what was fetched from `start` on.
fn within(stored: &Range<u64>, start: u64) -> Range<usize> {
    let at = |offset: u64| usize::try_from(offset - start).expect("a fetch fits into memory");
    at(stored.start)..at(stored.end)
}

fn contradiction(pack: PackId) -> Failure {
    Failure::new(ErrorKind::Io, format!("the record of a run in pack {pack} contradicts itself"))
}

/// Calls `visit` for each block that `range` (plain bytes of the run) touches, with the part of the block that lies in
/// the range. Believes nothing of the run: a record that cannot be is an error before anything is allocated for it.
fn for_blocks(run: &PackedRun, range: Range<u32>, mut visit: impl FnMut(Wanted, Range<u32>)) -> Result<()> {
    let sound = run.block_bytes > 0
        && u64::from(run.plain_len) <= CHUNK_BYTES
        && run.blocks.len() == run.plain_len.div_ceil(run.block_bytes) as usize
        && run.blocks.iter().all(|block| block.stored_len <= run.block_bytes)
        && u32::try_from(u64::from(run.pack_offset) + run.stored_bytes()).is_ok();
    if !sound {
        return Err(contradiction(run.pack).into());
    }
    if range.start > range.end || range.end > run.plain_len {
        return Err(Error::new(ErrorKind::Invalid, "a range outside of its run"));
    }
    let mut stored_at = run.pack_offset;
    for (index, block) in run.blocks.iter().enumerate() {
        let plain_len = block_plain_len(run, index);
        let plain_at = run.block_bytes * u32::try_from(index).expect("fewer blocks than bytes");
        if plain_at >= range.end {
            break;
        }
        if plain_at + plain_len > range.start {
            let small = run.plain_len <= SMALL_RUN_MAX;
            let wanted = Wanted { key: (run.pack, stored_at), block: *block, plain_len, small };
            let from = range.start.saturating_sub(plain_at);
            visit(wanted, from..(range.end - plain_at).min(plain_len));
        }
        stored_at += block.stored_len;
    }
    Ok(())
}

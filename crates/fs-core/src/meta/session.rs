//! Sessions: one live client of a volume each, and exactly-once requests.
//!
//! A session is alive while its record exists. Every mutating transaction reads that record with a conflict, so a client
//! that was declared dead cannot commit any more. With [`Sharing::Leased`] a client is declared dead by the next one, after
//! it has given no sign of life for a while; until then the next one is turned away.
//!
//! Where a commit's outcome can be unknown, a request takes one of the session's slots and stores its number there with
//! its change. A run after an unknown commit reads the slot first: its own number there means that the change is done,
//! and which run did it; the results of those runs are kept in memory until the request ends. Nobody else asks for them
//! (a client that dies takes its requests along), so they need not be stored.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use rfs_kv::{Attempt, Direction, Isolation, Kv, Limits, RangeQuery, Txn, transact};
use tokio::sync::{Semaphore, SemaphorePermit};

use crate::types::{Error, ErrorKind, Result, SessionId, Timestamp};

use super::record::{SessionRecord, SlotRecord};
use super::{Meta, key, read, record};

/// Who opens a volume.
#[derive(Debug, Clone, Default)]
pub struct OpenOptions {
    /// Name of the machine.
    pub hostname: String,
    /// Process id.
    pub pid: u32,
    /// Where the volume is mounted.
    pub mountpoint: String,
    /// Makes no session; every change fails with `ReadOnly`.
    pub read_only: bool,
    /// Who else may have it open.
    pub sharing: Sharing,
}

/// Whether a volume has one client at a time or several.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Sharing {
    /// The engine lets only one client in: earlier sessions are dead.
    #[default]
    Exclusive,
    /// The engine lets everybody in, but the volume has one client: a session that gives signs of life keeps others out,
    /// one that is silent for three seconds is declared dead.
    Leased,
    /// Others may be alive.
    Shared,
}

/// A live session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionInfo {
    /// Its id.
    pub id: SessionId,
    /// Name of the machine.
    pub hostname: String,
    /// Process id.
    pub pid: u32,
    /// Where the volume is mounted.
    pub mountpoint: String,
    /// When it began.
    pub started: Timestamp,
}

/// How often a leased session has to call [`Meta::heartbeat`].
pub const HEARTBEAT: Duration = Duration::from_secs(1);
/// How long a leased session is watched before it is taken for dead. By the watcher's own patience: no clocks are compared.
const SILENCE: Duration = Duration::from_secs(3);

/// Most requests of a session at a time; more wait.
const SLOTS: u16 = 1024;

impl SessionInfo {
    /// Whether it has this record.
    fn is_of(&self, record: &SessionRecord) -> bool {
        let SessionRecord { hostname, pid, mountpoint, started } = record;
        (&self.hostname, self.pid, &self.mountpoint, self.started) == (hostname, *pid, mountpoint, *started)
    }
}

/// When a change was not answered: how many fences had begun.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NotAnswered(u64);

/// This client's session.
pub(super) struct Session {
    id: SessionId,
    slots: Semaphore,
    free: Mutex<Vec<u16>>,
    requests: AtomicU64,
    /// Fences that were begun, and the newest one that stands, both counted from 1.
    fences: AtomicU64,
    fenced: AtomicU64,
}

/// Makes a session. Replay-safe: a second run makes another one and ends the first.
pub(super) async fn begin(kv: &dyn Kv, options: &OpenOptions, now: Timestamp) -> Result<Session> {
    let record = SessionRecord {
        hostname: options.hostname.clone(),
        pid: options.pid,
        mountpoint: options.mountpoint.clone(),
        started: now,
    };
    let silent = match options.sharing {
        Sharing::Exclusive | Sharing::Shared => Vec::new(),
        Sharing::Leased => silent_sessions(kv).await?,
    };
    let (record, silent) = (&record, &silent);
    let id = transact(kv, |txn, _| async move {
        match options.sharing {
            Sharing::Shared => {}
            Sharing::Exclusive => {
                for session in live_in(&*txn).await? {
                    end_in(&*txn, session.id);
                }
            }
            Sharing::Leased => {
                for sign in signs_in(&*txn).await? {
                    if !silent.contains(&sign) && !sign.session.is_of(record) {
                        return Err(in_use(&sign.session));
                    }
                    end_in(&*txn, sign.session.id);
                }
            }
        }
        let next = txn.get(&key::NEXT_SESSION).await?;
        let next = next.as_deref().map(record::decode_next).transpose()?.unwrap_or(1);
        let id = u32::try_from(next)
            .map_err(|_| Error::new(ErrorKind::NoSpace, "the volume was opened 2^32 times"))?;
        txn.set(&key::NEXT_SESSION, &record::encode_next(next + 1));
        txn.set(&key::session(SessionId(id)), &record.encode());
        Ok::<_, Error>(SessionId(id))
    })
    .await?;
    // Packs are named after the session: its id must not be given out again after a crash.
    kv.sync().await?;
    Ok(Session {
        id,
        slots: Semaphore::new(usize::from(SLOTS)),
        free: Mutex::new((0..SLOTS).rev().collect()),
        requests: AtomicU64::new(1),
        fences: AtomicU64::new(0),
        fenced: AtomicU64::new(0),
    })
}

/// A session and its last heartbeat.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Sign {
    session: SessionInfo,
    heartbeat: Option<Bytes>,
}

async fn signs_in(txn: &dyn Txn) -> Result<Vec<Sign>> {
    let mut signs = Vec::new();
    for session in live_in(txn).await? {
        let heartbeat = txn.get(&key::session_heartbeat(session.id)).await?;
        signs.push(Sign { session, heartbeat });
    }
    Ok(signs)
}

/// Watches the live sessions for [`SILENCE`].
///
/// # Errors
/// `Busy` as soon as one of them gives a sign of life.
async fn silent_sessions(kv: &dyn Kv) -> Result<Vec<Sign>> {
    let signs = || read(kv, |txn| async move { signs_in(&*txn).await });
    let first = signs().await?;
    let mut watched = Duration::ZERO;
    while watched < SILENCE && !first.is_empty() {
        tokio::time::sleep(HEARTBEAT).await;
        watched += HEARTBEAT;
        // One that was ended meanwhile is silent too.
        if let Some(alive) = signs().await?.iter().find(|sign| !first.contains(sign)) {
            return Err(in_use(&alive.session));
        }
    }
    Ok(first)
}

fn declared_dead() -> Error {
    Error::new(ErrorKind::Stale, "this client's session was declared dead")
}

fn in_use(session: &SessionInfo) -> Error {
    let SessionInfo { hostname, pid, mountpoint, .. } = session;
    Error::new(ErrorKind::Busy, format!("mounted at {hostname}:{mountpoint} (process {pid})"))
}

fn end_in(txn: &dyn Txn, session: SessionId) {
    txn.clear(&key::session(session));
    txn.clear(&key::session_heartbeat(session));
    let slots = key::session_slots(session);
    txn.clear_range(&slots.begin, &slots.end);
}

/// All live sessions. There are few: those of machines that are mounted, and of crashed ones until the next open.
pub(super) async fn live_in(txn: &dyn Txn) -> Result<Vec<SessionInfo>> {
    let mut range = key::sessions();
    let mut sessions = Vec::new();
    loop {
        let query = RangeQuery {
            begin: range.begin.clone(),
            end: range.end.clone(),
            limit: 256,
            direction: Direction::Forward,
            isolation: Isolation::Serializable,
        };
        let page = txn.range(query).await?;
        for (key, value) in &page.entries {
            let id = record::parsed(key::parse_session(key), "session")?;
            let SessionRecord { hostname, pid, mountpoint, started } = SessionRecord::decode(value)?;
            sessions.push(SessionInfo { id, hostname, pid, mountpoint, started });
        }
        match page.entries.last() {
            Some((last, _)) if page.more => range = range.after(last),
            _ => return Ok(sessions),
        }
    }
}

impl Session {
    pub(super) fn id(&self) -> SessionId {
        self.id
    }

    /// Fails with `Stale` when the session was declared dead, and makes the commit fail if it will have been.
    pub(super) async fn check_in(&self, txn: &dyn Txn) -> Result<()> {
        match txn.get(&key::session(self.id)).await? {
            Some(_) => Ok(()),
            None => Err(declared_dead()),
        }
    }

    /// Ends the session. Replay-safe: it clears.
    pub(super) async fn end(&self, kv: &dyn Kv) -> Result<()> {
        transact(kv, |txn, _| async move {
            end_in(&*txn, self.id);
            Ok::<_, Error>(())
        })
        .await
    }

    /// Begins a request; `None` where the engine always knows what became of a commit.
    pub(super) async fn request<T: Clone>(&self, limits: Limits) -> Option<Request<'_, T>> {
        if !limits.commit_may_be_unknown {
            return None;
        }
        let permit = self.slots.acquire().await.expect("the semaphore is never closed");
        let slot = self.free.lock().pop().expect("as many slots as permits");
        let number = self.requests.fetch_add(1, Ordering::Relaxed);
        Some(Request { session: self, slot, number, runs: Mutex::new(Vec::new()), _permit: permit })
    }
}

/// A request that holds a slot.
pub(super) struct Request<'a, T> {
    session: &'a Session,
    slot: u16,
    number: u64,
    /// Results of the runs whose commit was tried.
    runs: Mutex<Vec<(u32, T)>>,
    _permit: SemaphorePermit<'a>,
}

impl<T: Clone> Request<'_, T> {
    /// The result of the run that was committed, if an earlier one was.
    pub(super) async fn answer_in(&self, txn: &dyn Txn, attempt: Attempt) -> Result<Option<T>> {
        if !attempt.maybe_committed {
            return Ok(None);
        }
        let Some(value) = txn.get(&key::session_slot(self.session.id, self.slot)).await? else {
            return Ok(None);
        };
        let stored = SlotRecord::decode(&value)?;
        if stored.request != self.number {
            return Ok(None);
        }
        let runs = self.runs.lock();
        let run = runs.iter().find(|(index, _)| *index == stored.attempt);
        let (_, result) = run.expect("only a run that is remembered was committed");
        Ok(Some(result.clone()))
    }

    /// Stores the request's number with the change and remembers the result. A commit that is applied only after a later
    /// one of the request, or of the next in its slot, conflicts with that.
    pub(super) fn record_in(&self, txn: &dyn Txn, attempt: Attempt, result: &T) {
        let slot = SlotRecord { request: self.number, attempt: attempt.index };
        let key = key::session_slot(self.session.id, self.slot);
        txn.add_read_conflict(&key, &key::successor(&key));
        txn.set(&key, &slot.encode());
        self.runs.lock().push((attempt.index, result.clone()));
    }
}

impl<T> Drop for Request<'_, T> {
    fn drop(&mut self) {
        self.session.free.lock().push(self.slot);
    }
}

impl Meta {
    /// The live sessions of the volume, this one included.
    pub async fn sessions(&self) -> Result<Vec<SessionInfo>> {
        self.read(|txn| async move { live_in(&*txn).await }).await
    }

    /// What [`Meta::fence`] has to be told of a change that was not answered just now.
    pub fn not_answered(&self) -> NotAnswered {
        NotAnswered(self.session.as_ref().map_or(0, |session| session.fences.load(Ordering::SeqCst)))
    }

    /// Sees to it that `change` does not come about any more, unless it has: what is read after this is what there is. One
    /// fence stands before all changes that were not answered before it.
    ///
    /// Every change reads the session's record, and this writes it: one that began before conflicts with it. Replay-safe:
    /// sets what is there.
    ///
    /// # Errors
    /// `Stale` when the session was declared dead; the store still does not answer.
    pub async fn fence(&self, change: NotAnswered) -> Result<()> {
        let session = self.session()?;
        if session.fenced.load(Ordering::SeqCst) > change.0 {
            return Ok(());
        }
        let fence = session.fences.fetch_add(1, Ordering::SeqCst) + 1;
        let key = key::session(session.id);
        transact(&*self.kv, |txn, _| async move {
            let record = txn.get(&key).await?.ok_or_else(declared_dead)?;
            txn.set(&key, &record);
            Ok::<_, Error>(())
        })
        .await?;
        session.fenced.fetch_max(fence, Ordering::SeqCst);
        Ok(())
    }

    /// Stores a sign of life, see [`HEARTBEAT`]. Replay-safe: sets.
    ///
    /// # Errors
    /// `Stale` when the session was declared dead.
    pub async fn heartbeat(&self) -> Result<()> {
        let session = self.session()?;
        let now = self.now();
        transact(&*self.kv, |txn, _| async move {
            session.check_in(&*txn).await?;
            txn.set(&key::session_heartbeat(session.id), &record::encode_heartbeat(now));
            Ok::<_, Error>(())
        })
        .await
    }
}

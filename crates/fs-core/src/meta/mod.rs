//! Names and attributes: every operation on the namespace, over the key-value contract.
//!
//! Owns what is stored in the metadata store: the keys (`key`), their values (`record`), sessions, inode numbers, the
//! accounts of packs and of the volume's use. Refuses to know: which engine it runs on, the object store, FUSE, and
//! caches (reads go to the store every time).
//!
//! One file an operation in `ops`; the part inside the transaction is `<operation>_in`. Every mutating transaction
//! - conflicts with the death of its session (`Stale` when it was declared dead), and
//! - may run again after it was already committed. Where the engine can leave the outcome unknown, the number of the
//!   request is stored with the change, and the second run answers with the result of the first, which its
//!   session keeps. So each operation happens exactly once, and needs no harmlessness of its own; where an operation
//!   has it anyway, it says so.
//!
//! Lock order: none of the locks here is held across an await or while taking another.

mod alloc;
mod check;
mod inode;
mod key;
mod ops;
mod pack;
mod record;
mod session;
mod usage;
mod volume;

#[cfg(test)]
mod tests;

use std::future::Future;
use std::path::PathBuf;
use std::sync::Arc;

use rfs_kv::{Attempt, Kv, RetryClass, Txn, transact, transact_recent};

use crate::types::{Attr, Clock, Error, ErrorKind, Ino, Kind, Name, Result, SessionId, Timestamp};

pub use check::{
    CheckProgress, CheckReport, DentryInfo, Finding, InodeInfo, OrphanInfo, Repaired, SliceInfo,
};
pub use ops::commit::{Committed, FileCommit, NewPack};
pub use ops::link::LinkArgs;
pub use ops::make::MakeArgs;
pub use ops::reap::Reaped;
pub use ops::rename::{RenameArgs, RenameMode, Renamed};
pub use ops::replace_groups::ReplaceArgs;
pub use ops::setattr::{Membership, SetattrArgs};
pub use ops::statfs::Statfs;
pub use ops::truncate::TruncateArgs;
pub use ops::xattr::XattrMode;
pub use pack::{PackInfo, PackState};
pub use session::{HEARTBEAT, NotAnswered, OpenOptions, SessionInfo, Sharing};
pub use volume::{CLIENT_VERSION, Codec, FormatOptions, Volume, VolumeLimits};

/// Inode flag: nobody may change, rename, link or remove it (`FS_IMMUTABLE_FL`).
pub const FLAG_IMMUTABLE: u32 = 0x10;
/// Inode flag: it may only grow at its end (`FS_APPEND_FL`).
pub const FLAG_APPEND: u32 = 0x20;

/// Longest file, in bytes (2^57).
pub const FILE_BYTES_MAX: u64 = 1 << 57;
/// Longest target of a symbolic link, in bytes.
pub const TARGET_BYTES_MAX: usize = 4095;
/// Most names of one inode.
pub const LINKS_MAX: u32 = i32::MAX as u32;
/// Largest extended attribute, in bytes.
pub const XATTR_BYTES_MAX: usize = 64 << 10;
/// Most bytes of all names of an inode's extended attributes, as listxattr(2) counts them.
pub const XATTR_LIST_BYTES_MAX: usize = 64 << 10;

/// An entry of a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dentry {
    /// Its name.
    pub name: Name,
    /// What it names.
    pub ino: Ino,
    /// The kind of that.
    pub kind: Kind,
}

/// A part of a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Page<T> {
    /// In the order of the list.
    pub items: Vec<T>,
    /// Whether the list goes on after the last item.
    pub more: bool,
}

/// What is left of an inode that lost a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unlinked {
    /// The inode.
    pub ino: Ino,
    /// Its attributes after the change.
    pub attr: Attr,
    /// Whether it lost its last name: it stays usable until [`Meta::reap`].
    pub orphaned: bool,
}

/// The metadata of one mounted volume.
pub struct Meta {
    kv: Arc<dyn Kv>,
    clock: Arc<dyn Clock>,
    volume: Volume,
    /// `None`: read-only, without a session.
    session: Option<session::Session>,
    /// Whether nobody else changes the volume while the session is alive.
    alone: bool,
    numbers: alloc::InodeNumbers,
    usage: usage::Usage,
}

impl Meta {
    /// Makes `kv` hold an empty volume: the volume record and the root directory.
    ///
    /// Replay-safe: a second run that finds the volume with this `uuid` is content.
    ///
    /// # Errors
    /// `Exists` when it holds a volume; `Invalid` for a block size that is not a power of two from 4 KiB to 4 MiB.
    pub async fn format(kv: &dyn Kv, options: &FormatOptions, now: Timestamp) -> Result<Volume> {
        ops::format::format(kv, options, now).await
    }

    /// The volume that `kv` holds, without a session.
    ///
    /// # Errors
    /// `NotSupported` when this version cannot mount it.
    pub async fn volume(kv: &dyn Kv) -> Result<Option<Volume>> {
        ops::format::volume(kv).await
    }

    /// The directory that mounts of the volume in `kv` stage in, if it is not the one beside the metadata.
    ///
    /// # Errors
    /// `Io` when the record does not decode.
    pub async fn staging_dir(kv: &dyn Kv) -> Result<Option<PathBuf>> {
        ops::format::staging_dir(kv).await
    }

    /// Changes the limits of the volume in `kv`, without a session; a mount sees them when it opens the volume.
    ///
    /// # Errors
    /// `NotFound` when it holds no volume.
    pub async fn update_volume(kv: &dyn Kv, limits: VolumeLimits) -> Result<Volume> {
        ops::format::update_volume(kv, limits).await
    }

    /// Opens the volume that `kv` holds and begins a session, unless `options.read_only`.
    ///
    /// With [`Sharing::Exclusive`] every earlier session is declared dead, with [`Sharing::Leased`] those that are silent.
    ///
    /// # Errors
    /// `NotFound` when it holds no volume; `NotSupported` when this version cannot mount it; `Busy` when another session of
    /// a leased volume is alive.
    pub async fn open(kv: Arc<dyn Kv>, clock: Arc<dyn Clock>, options: &OpenOptions) -> Result<Meta> {
        let volume = Meta::volume(&*kv)
            .await?
            .ok_or_else(|| Error::new(ErrorKind::NotFound, "the metadata store holds no volume"))?;
        let session =
            if options.read_only { None } else { Some(session::begin(&*kv, options, clock.now()).await?) };
        let alone = session.is_some() && options.sharing != Sharing::Shared;
        let usage = usage::Usage::new(volume.limits);
        let meta = Meta { kv, clock, volume, session, alone, numbers: alloc::InodeNumbers::default(), usage };
        meta.refresh_usage().await?;
        Ok(meta)
    }

    /// Ends the session and makes everything durable; the engine stays open.
    pub async fn close(&self) -> Result<()> {
        if let Some(session) = &self.session {
            session.end(&*self.kv).await?;
        }
        self.sync().await
    }

    /// Returns when everything that was committed before is durable.
    pub async fn sync(&self) -> Result<()> {
        Ok(self.kv.sync().await?)
    }

    /// The volume as it was when it was opened, but for the limits, which are those of now.
    pub fn opened_volume(&self) -> Volume {
        Volume { limits: self.usage.limits(), ..self.volume.clone() }
    }

    /// This mount's session; `None` when read-only.
    pub fn session_id(&self) -> Option<SessionId> {
        self.session.as_ref().map(session::Session::id)
    }

    /// The clock that time stamps come from.
    pub fn clock(&self) -> &Arc<dyn Clock> {
        &self.clock
    }

    fn now(&self) -> Timestamp {
        self.clock.now()
    }

    fn session(&self) -> Result<&session::Session> {
        self.session.as_ref().ok_or_else(|| ErrorKind::ReadOnly.into())
    }

    /// Runs `body` on one state of the store. It reads only, without conflicts.
    async fn read<T, F, Fut>(&self, body: F) -> Result<T>
    where
        F: Fn(Arc<dyn Txn>) -> Fut,
        Fut: Future<Output = Result<T>>,
    {
        let first = if self.alone { self.kv.begin_recent() } else { self.kv.begin() };
        match body(first.await?).await {
            Err(error) if error.class().is_some() => read(&*self.kv, body).await,
            result => result,
        }
    }

    /// Runs `body` in a transaction of this session, exactly once as far as its effect is concerned.
    async fn mutate<T, F, Fut>(&self, body: F) -> Result<T>
    where
        T: Clone,
        F: Fn(Arc<dyn Txn>) -> Fut,
        Fut: Future<Output = Result<T>>,
    {
        let session = self.session()?;
        let request = session.request(self.kv.limits()).await;
        let (body, request) = (&body, request.as_ref());
        let run = |txn: Arc<dyn Txn>, attempt: Attempt| async move {
            if let Some(request) = request
                && let Some(result) = request.answer_in(&*txn, attempt).await?
            {
                return Ok(result);
            }
            let alive = session.check_in(&*txn);
            let ((), result) = futures::try_join!(alive, body(Arc::clone(&txn)))?;
            if let Some(request) = request {
                request.record_in(&*txn, attempt, &result);
            }
            Ok(result)
        };
        let outcome =
            if self.alone { transact_recent(&*self.kv, run).await } else { transact(&*self.kv, run).await };
        if outcome.as_ref().is_err_and(Error::unanswered) {
            self.usage.not_answered();
        }
        outcome
    }
}

/// Most runs of a read whose transaction became too old.
const READ_RUNS_MAX: u32 = 20;

/// Runs `body` on one state of the store, again while the engine says that the state is too old to be read.
async fn read<T, F, Fut>(kv: &dyn Kv, body: F) -> Result<T>
where
    F: Fn(Arc<dyn Txn>) -> Fut,
    Fut: Future<Output = Result<T>>,
{
    let mut runs = 0;
    loop {
        runs += 1;
        let txn = kv.begin().await?;
        match body(txn).await {
            Err(error) if error.class().is_some() && runs < READ_RUNS_MAX => {}
            result => return result,
        }
    }
}

//! What is staged, on both sides: packs whose records rely on a journal, and the journals.
//!
//! A pack's record says *staged* from the first commit that relies on its journal until the store has the pack; then it is
//! made *stored*, durably, and only then the journal is deleted. That waits while a batch pins the pack, since the batch
//! may be about to name it as staged.

use std::sync::Arc;
use std::time::Duration;

use super::Vfs;
use crate::data::{Data, Durable, OnLost, Place, Resume, Resumed, StoredPack};
use crate::meta::{Meta, NewPack, PackState};
use crate::types::{PackId, Result};

/// Pause before journals that could not be settled are looked at again.
const RETRY_AFTER: Duration = Duration::from_millis(500);

/// Takes over what an earlier mount staged; to be called once, before anything is read or written. Without a session nothing
/// is sent and nothing changed.
///
/// # Errors
/// The metadata store or the staging directory fails. Lost packs are no error but part of the answer.
pub async fn resume(meta: &Meta, data: &Data, on_lost: OnLost) -> Result<Resumed> {
    let staged = meta.staged_packs().await?;
    let expected: Vec<Durable> = staged
        .iter()
        .map(|pack| Durable { pack: pack.pack, bytes: pack.stored_bytes, place: Place::Staging })
        .collect();
    let how = if meta.session_id().is_some() { Resume::Send } else { Resume::ReadOnly };
    let resumed = data.resume(&expected, on_lost, how).await?;
    let refused = on_lost == OnLost::Refuse && !resumed.lost.is_empty();
    if how == Resume::Send && !refused && !resumed.stored.is_empty() {
        note_stored(meta, &resumed.stored).await?;
    }
    Ok(resumed)
}

/// Ends the staging of packs that the store has, but for those that are `pinned`; whether that was all.
pub(super) async fn settle(meta: &Meta, data: &Data, pinned: impl Fn(PackId) -> bool) -> Result<bool> {
    let (waiting, stored): (Vec<StoredPack>, Vec<StoredPack>) =
        data.stored_with_journal().into_iter().partition(|pack| pinned(pack.pack));
    if !stored.is_empty() {
        note_stored(meta, &stored).await?;
        let packs: Vec<PackId> = stored.iter().map(|pack| pack.pack).collect();
        data.forget_journals(&packs).await;
    }
    Ok(waiting.is_empty())
}

/// Durable at return.
pub(super) async fn note_stored(meta: &Meta, packs: &[StoredPack]) -> Result<()> {
    let stored =
        |pack: &StoredPack| NewPack { pack: pack.pack, bytes: pack.stored_bytes, state: PackState::Stored };
    meta.packs_stored(&packs.iter().map(stored).collect::<Vec<_>>()).await
}

impl Vfs {
    /// Starts the task that settles.
    pub(super) fn start_settler(self: &Arc<Vfs>) {
        let (vfs, data) = (Arc::downgrade(self), Arc::clone(&self.data));
        self.tasks.spawn(async move {
            let mut complete = true;
            loop {
                if complete {
                    data.staged_pack_stored().await;
                } else {
                    tokio::time::sleep(RETRY_AFTER).await;
                }
                let Some(vfs) = vfs.upgrade() else { return };
                complete = match vfs.settle_staged().await {
                    Ok(complete) => complete,
                    Err(error) => {
                        tracing::warn!(%error, "could not note that packs are stored, will try again");
                        false
                    }
                };
            }
        });
    }

    /// See [`settle`].
    pub(super) async fn settle_staged(&self) -> Result<bool> {
        settle(&self.meta, &self.data, |pack| self.flusher.is_pinned(pack)).await
    }
}

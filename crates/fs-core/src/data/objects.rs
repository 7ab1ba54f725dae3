//! Packs as objects: their names, listing, deleting, footers.
//!
//! `packs/<session, 8 hex digits>/<pack id, 16 hex digits>`. Other objects under the prefix are not ours and are left
//! alone.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::stream::{self, BoxStream, StreamExt};
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, PutPayload};
use uuid::Uuid;

use super::pack::{self, HEADER_BYTES};
use super::retry::{Backoff, Failure, bounded};
use super::{FooterEntry, StoredPack};
use crate::types::{Error, ErrorKind, PackId, Result};

const PREFIX: &str = "packs";
/// Attempts of one GET, about two seconds apart from first to last.
const GET_ATTEMPTS: u32 = 5;
/// Footers up to this size come with the first request.
const TAIL_BYTES: u64 = 64 << 10;

/// The store, and how long to insist.
#[derive(Debug, Clone)]
pub(super) struct Objects {
    store: Arc<dyn ObjectStore>,
    io_timeout: Option<Duration>,
}

impl Objects {
    pub(super) fn new(store: Arc<dyn ObjectStore>, io_timeout: Option<Duration>) -> Objects {
        Objects { store, io_timeout }
    }

    pub(super) fn store(&self) -> &dyn ObjectStore {
        &*self.store
    }

    /// Longest wait for one request.
    pub(super) fn io_timeout(&self) -> Option<Duration> {
        self.io_timeout
    }

    /// One attempt to store a whole pack.
    pub(super) async fn put(&self, pack: PackId, bytes: PutPayload) -> Result<(), Failure> {
        bounded("PUT", self.io_timeout, self.store.put(&path_of(pack), bytes)).await.map(drop)
    }

    /// One attempt of [`Objects::get`].
    async fn get_once(&self, pack: PackId, needed: &Range<u64>, end: u64) -> Result<Bytes, Failure> {
        let path = path_of(pack);
        let bytes =
            bounded("GET", self.io_timeout, self.store.get_range(&path, needed.start..end.max(needed.end)))
                .await;
        match bytes {
            Ok(bytes) if bytes.len() as u64 >= needed.end - needed.start => Ok(bytes),
            Ok(_) => Err(truncated(pack)),
            Err(failure) => Err(failure),
        }
    }

    /// Fetches the bytes `needed`, and those that follow up to `end` as far as the pack has them. Tries a few times: a store repeats by itself what may succeed
    /// later, so this is for stores that do not. A pack that is missing or too short is told at once. `failed` is
    /// called for each attempt that failed.
    pub(super) async fn get(
        &self,
        pack: PackId,
        needed: Range<u64>,
        end: u64,
        failed: impl Fn(),
    ) -> Result<Bytes, Failure> {
        let began = tokio::time::Instant::now();
        let mut backoff = Backoff::new(pack.0 ^ needed.start);
        let mut attempts_left = GET_ATTEMPTS;
        loop {
            let failure = match self.get_once(pack, &needed, end).await {
                Ok(bytes) => return Ok(bytes),
                Err(failure) => failure,
            };
            failed();
            attempts_left -= 1;
            let late = self.io_timeout.is_some_and(|limit| began.elapsed() >= limit);
            if late || attempts_left == 0 || failure.kind == ErrorKind::Stale {
                return Err(Failure::new(failure.kind, format!("pack {pack}: {}", failure.text)));
            }
            // A range beyond the end is an error of no particular kind.
            if let Ok(found) = bounded("HEAD", self.io_timeout, self.store.head(&path_of(pack))).await
                && found.size < needed.end
            {
                return Err(truncated(pack));
            }
            tokio::time::sleep(backoff.pause()).await;
        }
    }

    /// What the pack says is in it, after checking its header and footer.
    pub(super) async fn footer(&self, pack: PackId, volume: Uuid) -> Result<Vec<FooterEntry>> {
        let head = bounded("HEAD", self.io_timeout, self.store.head(&path_of(pack))).await;
        let len = head
            .map_err(|failure| Failure::new(failure.kind, format!("pack {pack}: {}", failure.text)))?
            .size;
        let damaged = |bad: pack::BadPack| Error::new(ErrorKind::Io, format!("pack {pack}")).with_source(bad);
        if len < u64::from(HEADER_BYTES) {
            return Err(damaged(pack::BadPack::TooShort));
        }
        let header = self.get(pack, 0..u64::from(HEADER_BYTES), 0, || ()).await?;
        pack::check_header(&header, volume, pack).map_err(damaged)?;
        let mut tail = self.get(pack, len.saturating_sub(TAIL_BYTES)..len, len, || ()).await?;
        let footer_len = pack::footer_len(&tail, len).map_err(damaged)?;
        if footer_len > tail.len() {
            tail = self.get(pack, len - footer_len as u64..len, len, || ()).await?;
        }
        let footer = tail.slice(tail.len() - footer_len..);
        pack::read_footer(&footer, pack, len).map_err(damaged)
    }

    /// Bytes of the pack in the store, if it is there and the store answers.
    pub(super) async fn len(&self, pack: PackId) -> Option<u64> {
        let head = bounded("HEAD", self.io_timeout, self.store.head(&path_of(pack))).await;
        head.ok().map(|head| head.size)
    }

    /// The packs in the store, in no particular order.
    pub(super) fn list(&self) -> BoxStream<'static, Result<StoredPack>> {
        let objects = self.store.list(Some(&Path::from(PREFIX)));
        let packs = objects.filter_map(|object| async move {
            match object {
                Ok(object) => parse_path(&object.location)
                    .map(|pack| Ok(StoredPack { pack, stored_bytes: object.size })),
                Err(object_store::Error::NotFound { .. }) => None,
                Err(error) => Some(Err(Failure::of_store("list the packs", &error).into())),
            }
        });
        packs.boxed()
    }

    /// Deletes packs; one that is missing counts as deleted.
    pub(super) async fn delete(&self, packs: &[PackId]) -> Result<()> {
        let paths: Vec<_> = packs.iter().map(|pack| Ok(path_of(*pack))).collect();
        let mut answers = self.store.delete_stream(stream::iter(paths).boxed());
        let mut first = None;
        while let Some(answer) = answers.next().await {
            match answer {
                Ok(_) | Err(object_store::Error::NotFound { .. }) => {}
                Err(error) => first = first.or(Some(error)),
            }
        }
        match first {
            None => Ok(()),
            Some(error) => Err(Failure::of_store("delete packs", &error).into()),
        }
    }
}

fn truncated(pack: PackId) -> Failure {
    Failure::new(ErrorKind::Io, format!("pack {pack} is shorter than the metadata says"))
}

/// The object's name.
pub(super) fn path_of(pack: PackId) -> Path {
    Path::from_iter([PREFIX.to_owned(), format!("{:08x}", pack.session().0), pack.to_string()])
}

/// The pack that has this name, if it is a pack's.
fn parse_path(path: &Path) -> Option<PackId> {
    let id = path.filename().filter(|name| name.len() == 16)?;
    let pack = PackId(u64::from_str_radix(id, 16).ok()?);
    (path_of(pack) == *path).then_some(pack)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::SessionId;

    #[test]
    fn names_sort_like_ids_and_foreign_objects_are_not_packs() {
        let pack = PackId::new(SessionId(0x1f), 0x2a);
        assert_eq!(path_of(pack).as_ref(), "packs/0000001f/0000001f0000002a");
        assert_eq!(parse_path(&path_of(pack)), Some(pack));
        for name in
            ["packs/0000001f/0000001F0000002A", "packs/00000001/0000001f0000002a", "packs/+00000000000001f"]
        {
            assert_eq!(parse_path(&Path::from(name)), None, "{name}");
        }
    }
}

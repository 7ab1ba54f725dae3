//! A disk in memory that can lose power, be full, or fail.

use std::io;
use std::sync::Arc;

use parking_lot::Mutex;
use rand::Rng;
use redb::StorageBackend;
use rfs_meta_redb::BackendOpener;

#[derive(Debug, Clone)]
enum Pending {
    Write(usize, Vec<u8>),
    SetLen(usize),
}

#[derive(Debug, Default, Clone)]
struct Contents {
    /// What survives a power loss for certain.
    durable: Vec<u8>,
    /// What a running system reads.
    current: Vec<u8>,
    /// Changes since the last sync.
    pending: Vec<Pending>,
}

#[derive(Debug, Default)]
struct Shared {
    contents: Contents,
    bytes_max: Option<usize>,
    syncs_fail: bool,
    syncs: u64,
}

/// Clones share the same disk.
#[derive(Debug, Clone, Default)]
pub(crate) struct Disk(Arc<Mutex<Shared>>);

impl Disk {
    pub(crate) fn opener(&self) -> BackendOpener {
        let disk = self.clone();
        Box::new(move || Ok(Box::new(disk.clone())))
    }

    /// The disk as it is found after losing power now: changes that were not synced are there or not, in any
    /// combination, torn at sectors.
    pub(crate) fn after_power_loss(&self, rng: &mut impl Rng) -> Disk {
        const SECTOR: usize = 512;
        let Contents { mut durable, pending, .. } = self.0.lock().contents.clone();
        let kept_chance = [0.0, 0.1, 0.5, 0.9, 1.0][rng.random_range(0..5)];
        for change in pending {
            match change {
                Pending::SetLen(len) => {
                    if rng.random_bool(kept_chance) {
                        durable.resize(len, 0);
                    }
                }
                Pending::Write(offset, data) => {
                    for (index, sector) in data.chunks(SECTOR).enumerate() {
                        let begin = offset + index * SECTOR;
                        let end = begin + sector.len();
                        if !rng.random_bool(kept_chance) {
                            continue;
                        }
                        if durable.len() < end {
                            durable.resize(end, 0);
                        }
                        durable[begin..end].copy_from_slice(sector);
                    }
                }
            }
        }
        let contents = Contents { current: durable.clone(), durable, pending: Vec::new() };
        Disk(Arc::new(Mutex::new(Shared { contents, ..Shared::default() })))
    }

    /// The disk as it is found when only what was synced is there.
    pub(crate) fn synced_only(&self) -> Disk {
        let durable = self.0.lock().contents.durable.clone();
        let contents = Contents { current: durable.clone(), durable, pending: Vec::new() };
        Disk(Arc::new(Mutex::new(Shared { contents, ..Shared::default() })))
    }

    pub(crate) fn set_bytes_max(&self, bytes_max: Option<usize>) {
        self.0.lock().bytes_max = bytes_max;
    }

    pub(crate) fn set_syncs_fail(&self, fail: bool) {
        self.0.lock().syncs_fail = fail;
    }

    pub(crate) fn len(&self) -> usize {
        self.0.lock().contents.current.len()
    }

    pub(crate) fn syncs(&self) -> u64 {
        self.0.lock().syncs
    }

    /// Overwrites bytes behind the store's back.
    pub(crate) fn damage(&self, offset: usize, data: &[u8]) {
        let contents = &mut self.0.lock().contents;
        contents.current[offset..offset + data.len()].copy_from_slice(data);
        contents.durable = contents.current.clone();
    }
}

fn index(number: u64) -> io::Result<usize> {
    usize::try_from(number).map_err(io::Error::other)
}

impl StorageBackend for Disk {
    fn len(&self) -> io::Result<u64> {
        Ok(self.0.lock().contents.current.len() as u64)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let offset = index(offset)?;
        let shared = self.0.lock();
        let found = shared.contents.current.get(offset..offset + out.len());
        out.copy_from_slice(found.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        let len = index(len)?;
        let mut shared = self.0.lock();
        shared.contents.current.resize(len, 0);
        shared.contents.pending.push(Pending::SetLen(len));
        Ok(())
    }

    fn sync_data(&self) -> io::Result<()> {
        let mut shared = self.0.lock();
        shared.syncs += 1;
        if shared.syncs_fail {
            return Err(io::Error::other("input/output error"));
        }
        let Contents { durable, current, pending } = &mut shared.contents;
        for change in pending.drain(..) {
            match change {
                Pending::SetLen(len) => durable.resize(len, 0),
                Pending::Write(offset, data) => durable[offset..offset + data.len()].copy_from_slice(&data),
            }
        }
        assert!(durable == current);
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let offset = index(offset)?;
        let mut shared = self.0.lock();
        if shared.bytes_max.is_some_and(|max| offset + data.len() > max) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        let Some(place) = shared.contents.current.get_mut(offset..offset + data.len()) else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        place.copy_from_slice(data);
        shared.contents.pending.push(Pending::Write(offset, data.to_vec()));
        Ok(())
    }
}

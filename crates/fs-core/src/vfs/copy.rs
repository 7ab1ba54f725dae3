//! `copy_file_range`: bytes that are in packs are named a second time; only bytes that are still in memory are copied.

use std::sync::atomic::Ordering;

use super::Vfs;
use super::dirty::{PackedPart, Part, Piece, PieceMap};
use super::handle::InodeRef;
use super::inode::Life;
use super::request::CopyArgs;
use super::space::{close_dirty, settled};
use crate::data::PackTicket;
use crate::meta::FILE_BYTES_MAX;
use crate::types::{CHUNK_BYTES, ChunkIndex, ErrorKind, PackId, Result};

/// Bytes that one step clones.
const STEP_BYTES: u64 = CHUNK_BYTES;
/// With more bytes than this in memory the source is stored first, so that they are not stored twice.
const COPY_BYTES_MAX: u64 = 4 << 20;

/// A step's source, seen at one moment, with its packs pinned.
struct Cloned {
    parts: Vec<(u64, Part)>,
    tickets: Vec<PackTicket>,
    pins: Vec<PackId>,
}

impl Vfs {
    /// Copies a range without moving stored bytes (`copy_file_range(2)`). Returns how many bytes; fewer than asked for only
    /// where the source ends.
    ///
    /// # Errors
    /// `ReadOnly`; `Invalid` when the ranges overlap in one file; `FileTooLarge`; `NoSpace`; `IsDirectory`; `Io`.
    pub async fn copy_file_range(&self, args: CopyArgs) -> Result<u64> {
        self.check_writable()?;
        let from = self.inode(args.from).await?;
        let to = self.inode(args.to).await?;
        let length = from.state().length;
        let len = args.len.min(length.saturating_sub(args.from_offset));
        if args.from == args.to && args.from_offset.abs_diff(args.to_offset) < len {
            return Err(ErrorKind::Invalid.into());
        }
        if len == 0 {
            return Ok(0);
        }
        if args.to_offset.checked_add(len).is_none_or(|end| end > FILE_BYTES_MAX) {
            return Err(ErrorKind::FileTooLarge.into());
        }
        if from.state().unsaved_bytes() > COPY_BYTES_MAX {
            self.flush_inode(&from).await?;
        }
        let mut done = 0;
        while done < len {
            let step = (len - done).min(STEP_BYTES);
            let copied =
                self.copy_step(&from, args.from_offset + done, &to, args.to_offset + done, step).await;
            match copied {
                Ok(0) => break,
                Ok(copied) => done += copied,
                Err(error) if done == 0 => return Err(error),
                // What was copied counts; the caller meets the error when it goes on.
                Err(_) => break,
            }
        }
        Ok(done)
    }

    async fn copy_step(
        &self,
        from: &InodeRef,
        from_offset: u64,
        to: &InodeRef,
        to_offset: u64,
        len: u64,
    ) -> Result<u64> {
        let cloned = self.clone_parts(from, from_offset, len).await?;
        let result = self.put_parts(from_offset, to, to_offset, &cloned).await;
        if result.is_err() {
            self.unpin(&cloned.pins);
        }
        result
    }

    /// What the source holds. Its packs are pinned while nothing can take them away from it.
    async fn clone_parts(&self, from: &InodeRef, offset: u64, len: u64) -> Result<Cloned> {
        let _gate = from.flush_gate.lock().await;
        self.make_sure(from).await?;
        loop {
            let missing = {
                let state = from.state();
                let end = offset.saturating_add(len).min(state.length);
                match state.parts(offset..end.max(offset)) {
                    Err(missing) => missing,
                    Ok(parts) => {
                        let mut packs: Vec<PackId> = parts
                            .iter()
                            .filter_map(|(_, part)| match part {
                                Part::Packed(part) => Some(part.run.pack),
                                Part::Zeros(_) | Part::Bytes(_) => None,
                            })
                            .collect();
                        packs.sort_unstable();
                        packs.dedup();
                        let unstored = state.batches.iter().flat_map(|batch| &batch.tickets);
                        let mut tickets: Vec<PackTicket> =
                            unstored.filter(|ticket| packs.contains(&ticket.pack())).cloned().collect();
                        tickets.sort_unstable_by_key(PackTicket::pack);
                        tickets.dedup_by(|next, kept| {
                            let same = next.pack() == kept.pack();
                            if same {
                                kept.merge(next);
                            }
                            same
                        });
                        for pack in &packs {
                            let named = !tickets.iter().any(|ticket| ticket.pack() == *pack);
                            self.flusher.pin(*pack, named);
                        }
                        return Ok(Cloned { parts, tickets, pins: packs });
                    }
                }
            };
            self.load_chunk(from, missing).await?;
        }
    }

    /// Lays the parts over the target.
    async fn put_parts(
        &self,
        from_offset: u64,
        to: &InodeRef,
        to_offset: u64,
        cloned: &Cloned,
    ) -> Result<u64> {
        let total: u64 = cloned.parts.iter().map(|(_, part)| part.len()).sum();
        if total == 0 {
            self.unpin(&cloned.pins);
            return Ok(0);
        }
        let bytes_of = |wanted: fn(&Part) -> bool| -> u64 {
            cloned.parts.iter().filter(|(_, part)| wanted(part)).map(|(_, part)| part.len()).sum()
        };
        let copied = bytes_of(|part| matches!(part, Part::Bytes(_)));
        let memory = if copied > 0 { Some(self.write_memory(copied).await?) } else { None };
        let data = total - bytes_of(|part| matches!(part, Part::Zeros(_)));
        self.claim_space(to, to_offset..to_offset + total, data).await?;
        let newly = {
            let mut guard = to.state();
            let state = &mut *guard;
            if state.life == Life::Dead {
                drop(guard);
                self.reserved_bytes.fetch_sub(data, Ordering::Relaxed);
                return Err(ErrorKind::Stale.into());
            }
            let end = to_offset + total;
            state.punch(&(to_offset..end));
            close_dirty(state);
            let mut pieces = PieceMap::default();
            for (offset, part) in &cloned.parts {
                let at = offset - from_offset + to_offset;
                match part {
                    Part::Zeros(len) => pieces.put(at, Piece::Hole(*len)),
                    Part::Packed(part) => put_packed(&mut pieces, at, part),
                    Part::Bytes(_) => {}
                }
            }
            let mut batch = settled(pieces, 0);
            batch.tickets.clone_from(&cloned.tickets);
            batch.pins.clone_from(&cloned.pins);
            batch.grow_to = batch.pieces.end();
            state.push_batch(batch);
            for (offset, part) in &cloned.parts {
                if let Part::Bytes(bytes) = part {
                    state.dirty.write(offset - from_offset + to_offset, bytes.clone());
                }
            }
            state.hold(memory);
            state.length = state.length.max(end);
            state.written_at(self.now());
            self.account(state, data);
            !std::mem::replace(&mut state.listed, true)
        };
        if newly {
            self.flusher.list(to.clone());
        }
        Ok(total)
    }
}

/// Puts part of a run, cut where chunks of the target end.
fn put_packed(pieces: &mut PieceMap, at: u64, part: &PackedPart) {
    let mut at = at;
    let mut part = part.clone();
    while part.len > 0 {
        let room = ChunkIndex::of(at).start() + CHUNK_BYTES - at;
        let len = u32::try_from(room).map_or(part.len, |room| room.min(part.len));
        let first = PackedPart { len, ..part.clone() };
        pieces.put(at, Piece::Packed(first));
        at += u64::from(len);
        part.offset_in_run += len;
        part.len -= len;
    }
}

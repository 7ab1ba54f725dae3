//! One block: LZ4 where that helps, a checksum of what is stored, exact lengths on the way back.
//!
//! Pure. A block that decodes is the block that was encoded: the checksum is looked at first, and a length that does
//! not fit is damage as well, so that hostile bytes cost no more memory than the block's own length.

use std::fmt;

use bytes::Bytes;
use lz4_flex::block::{CompressTable, compress_into_with_table, decompress_into, get_maximum_output_size};
use xxhash_rust::xxh3::xxh3_64;

use crate::types::Block;

/// Why stored bytes are not the block they should be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum Damage {
    #[error("the block is incomplete")]
    Length,
    #[error("the checksum does not fit")]
    Checksum,
    #[error("the checksum fits but the block cannot be decompressed")]
    Codec,
}

/// Whether all bytes are 0, so that a hole serves instead of a block.
pub fn is_zero(bytes: &[u8]) -> bool {
    let mut words = bytes.chunks_exact(64);
    words.by_ref().all(|chunk| chunk.iter().fold(0, |all, byte| all | byte) == 0)
        && words.remainder().iter().all(|byte| *byte == 0)
}

/// A block kept raw shares the memory of what it was made from if it is at least this long; a shorter one is copied, so
/// that it does not keep a large buffer.
const SHARED_BYTES_MIN: usize = 32 << 10;
/// What is compressed to see whether more is worth it, at three places of a block.
const SAMPLE_BYTES: usize = 2 << 10;

/// Encodes blocks one after another. Made once and used for long: keeps the compressor's table and room for a job.
pub(super) struct Encoder {
    table: CompressTable,
    /// Stored bytes of the last blocks, as far as they are not shared, then room.
    room: Vec<u8>,
    room_used: usize,
    /// Blocks described so far.
    blocks: Vec<Block>,
    /// Stored bytes before those in `room`.
    stored: Vec<Bytes>,
    /// LZ4 could not shrink the last block.
    was_raw: bool,
}

impl fmt::Debug for Encoder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Encoder").field("blocks", &self.blocks.len()).finish_non_exhaustive()
    }
}

impl Encoder {
    /// An encoder without blocks.
    pub(super) fn new() -> Encoder {
        Encoder {
            table: CompressTable::default(),
            room: Vec::new(),
            room_used: 0,
            blocks: Vec::new(),
            stored: Vec::new(),
            was_raw: false,
        }
    }

    /// LZ4's result after what is in `room`, if it saves at least 1/32: less is not worth decompressing.
    fn compress(&mut self, plain: &[u8]) -> Option<usize> {
        let bytes_max = get_maximum_output_size(plain.len());
        let room = free_room(&mut self.room, self.room_used, bytes_max);
        compress_into_with_table(plain, room, &mut self.table)
            .ok()
            .filter(|len| len + plain.len() / 32 < plain.len())
    }

    /// Whether to expect nothing of compressing `plain`: the block before it could not be shrunk, and neither can its
    /// beginning, middle and end. Media and archives are long; trying all of each block takes longer than its checksum.
    fn looks_raw(&mut self, plain: &[u8]) -> bool {
        self.was_raw
            && plain.len() >= SHARED_BYTES_MIN
            && [0, plain.len() / 2, plain.len() - SAMPLE_BYTES]
                .into_iter()
                .all(|at| self.compress(&plain[at..at + SAMPLE_BYTES]).is_none())
    }

    /// Appends one block. Stores it raw unless LZ4 shrinks it. A long raw block is not copied.
    pub(super) fn push(&mut self, plain: Bytes) {
        let compressed = if self.looks_raw(&plain) { None } else { self.compress(&plain) };
        self.was_raw = compressed.is_none();
        let start = self.room_used;
        let stored = match compressed {
            Some(len) => &self.room[start..start + len],
            None => &plain,
        };
        self.blocks.push(Block {
            stored_len: u32::try_from(stored.len()).expect("a block is no longer than a chunk"),
            raw: compressed.is_none(),
            checksum: xxh3_64(stored),
        });
        match compressed {
            Some(len) => self.room_used += len,
            None if plain.len() < SHARED_BYTES_MIN => {
                free_room(&mut self.room, start, plain.len()).copy_from_slice(&plain);
                self.room_used += plain.len();
            }
            None => {
                self.leave_room();
                self.stored.push(plain);
            }
        }
    }

    fn leave_room(&mut self) {
        if self.room_used > 0 {
            self.stored.push(Bytes::copy_from_slice(&self.room[..self.room_used]));
            self.room_used = 0;
        }
    }

    /// The blocks and their bytes so far, of which no block spans two pieces; the encoder is empty again.
    pub(super) fn take(&mut self) -> (Vec<Block>, Vec<Bytes>) {
        self.leave_room();
        (std::mem::take(&mut self.blocks), std::mem::take(&mut self.stored))
    }
}

/// `len` bytes of `room` from `used` on.
fn free_room(room: &mut Vec<u8>, used: usize, len: usize) -> &mut [u8] {
    let end = used + len;
    if room.len() < end {
        room.resize(end, 0);
    }
    &mut room[used..end]
}

/// Whether the stored bytes are those that were encoded.
fn check(stored: &[u8], block: &Block) -> Result<(), Damage> {
    if stored.len() != block.stored_len as usize {
        return Err(Damage::Length);
    }
    if xxh3_64(stored) != block.checksum {
        return Err(Damage::Checksum);
    }
    Ok(())
}

/// The plain bytes of a block, which are `plain_len`. A raw block's are `stored` itself, not a copy.
pub(super) fn decode(stored: &Bytes, block: &Block, plain_len: u32) -> Result<Bytes, Damage> {
    if !block.raw {
        let mut plain = vec![0; plain_len as usize];
        decode_into(stored, block, &mut plain)?;
        return Ok(plain.into());
    }
    check(stored, block)?;
    if stored.len() == plain_len as usize { Ok(stored.clone()) } else { Err(Damage::Codec) }
}

/// Decompresses a block that is not raw; `plain` is as long as its plain bytes.
pub(super) fn decode_into(stored: &[u8], block: &Block, plain: &mut [u8]) -> Result<(), Damage> {
    check(stored, block)?;
    decompress(stored, plain)
}

/// Decompresses stored bytes that have been checked; `plain` is as long as the block's plain bytes.
pub(super) fn decompress(stored: &[u8], plain: &mut [u8]) -> Result<(), Damage> {
    match decompress_into(stored, plain) {
        Ok(len) if len == plain.len() => Ok(()),
        _ => Err(Damage::Codec),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn encode(plain: &[u8]) -> (Block, Bytes) {
        let mut encoder = Encoder::new();
        encoder.push(Bytes::copy_from_slice(plain));
        let (blocks, stored) = encoder.take();
        (blocks[0], stored[0].clone())
    }

    #[test]
    fn zeros_are_recognised_at_every_length() {
        for len in [0, 1, 63, 64, 65, 4096, 4099] {
            let mut bytes = vec![0; len];
            assert!(is_zero(&bytes));
            for at in 0..len {
                bytes[at] = 1;
                assert!(!is_zero(&bytes), "{at} of {len}");
                bytes[at] = 0;
            }
        }
    }

    #[test]
    fn what_does_not_shrink_is_stored_raw_and_decoded_without_a_copy() {
        let plain: Vec<u8> = (0..4096u64).map(|at| xxh3_64(&at.to_le_bytes()).to_le_bytes()[0]).collect();
        let (block, stored) = encode(&plain);
        assert!(block.raw);
        let decoded = decode(&stored, &block, 4096).unwrap();
        assert_eq!(decoded.as_ptr(), stored.as_ptr());
        assert_eq!(decode(&stored, &block, 4095), Err(Damage::Codec));
    }

    #[test]
    fn what_shrinks_after_much_that_does_not_is_found_at_three_places() {
        let noise: Vec<u8> =
            (0..128 << 7u64).flat_map(|at: u64| xxh3_64(&at.to_le_bytes()).to_le_bytes()).collect();
        let mut encoder = Encoder::new();
        let mut is_raw = |plain: Vec<u8>| {
            encoder.push(plain.clone().into());
            let (blocks, stored) = encoder.take();
            assert_eq!(decode(&stored[0], &blocks[0], plain.len().try_into().unwrap()).unwrap(), plain);
            blocks[0].raw
        };
        assert!(is_raw(noise.clone()) && is_raw(noise.clone()));
        // One that is copied.
        assert!(is_raw(noise[..SHARED_BYTES_MIN - 1].to_vec()));
        for at in [0, noise.len() / 2, noise.len() - 8192] {
            let mut half = noise.clone();
            half[at..at + 8192].fill(7);
            assert!(!is_raw(half), "{at}");
            assert!(is_raw(noise.clone()));
        }
    }

    #[test]
    fn one_encoder_makes_the_same_blocks_as_many() {
        let texts: Vec<Vec<u8>> = (1..20u8)
            .map(|seed| (0..3000).map(|at: u16| (at % u16::from(seed)).to_le_bytes()[0]).collect())
            .collect();
        let mut encoder = Encoder::new();
        for text in &texts {
            encoder.push(Bytes::copy_from_slice(text));
        }
        let (blocks, stored) = encoder.take();
        let stored = Bytes::from(stored.concat());
        let mut at = 0;
        for (text, block) in texts.iter().zip(&blocks) {
            let part = stored.slice(at..at + block.stored_len as usize);
            at += part.len();
            assert_eq!(decode(&part, block, 3000).unwrap(), text);
            assert!(!block.raw && part.len() < 300);
        }
    }

    proptest! {
        #[test]
        fn every_block_comes_back(plain in prop::collection::vec(0..4u8, 1..5000)) {
            let (block, stored) = encode(&plain);
            prop_assert_eq!(decode(&stored, &block, u32::try_from(plain.len()).unwrap()).unwrap(), plain);
        }

        #[test]
        fn hostile_bytes_never_decode_to_another_length(stored in prop::collection::vec(any::<u8>(), 0..300), plain_len in 0..70_000u32) {
            let block = Block { stored_len: u32::try_from(stored.len()).unwrap(), raw: false, checksum: xxh3_64(&stored) };
            if let Ok(plain) = decode(&stored.into(), &block, plain_len) {
                prop_assert_eq!(plain.len(), plain_len as usize);
            }
        }

        #[test]
        fn any_changed_byte_is_damage(plain in prop::collection::vec(0..8u8, 1..600), at in any::<prop::sample::Index>(), by in 1..=255u8) {
            let (block, stored) = encode(&plain);
            let mut changed = stored.to_vec();
            let at = at.index(changed.len());
            changed[at] ^= by;
            prop_assert_eq!(decode(&changed.into(), &block, u32::try_from(plain.len()).unwrap()), Err(Damage::Checksum));
        }
    }
}

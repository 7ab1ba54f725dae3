//! The overlay against a plain array of bytes.

use proptest::prelude::*;

use super::*;
use crate::types::{PackId, SliceStamp};

const CHUNK: u32 = 600;
const BLOCK: u32 = 16;

/// What a byte of the model is: nothing, an inline byte, or a plain byte of a pack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cell {
    Hole,
    Inline(u8),
    Packed(PackId, u32),
}

fn slice_strategy() -> impl Strategy<Value = (u32, u32, u8, u32)> {
    (0..CHUNK - 1, 1..120u32, 0..5u8, 0..40u32)
}

fn build(seed: (u32, u32, u8, u32), number: u32) -> Slice {
    let (offset, len, kind, skip) = seed;
    let len = len.min(CHUNK - offset);
    let stored = match kind {
        0 => Stored::Hole,
        1 => Stored::Inline(
            (0..len).map(|at| u8::try_from((number * 7 + at) % 251).unwrap()).collect::<Vec<_>>().into(),
        ),
        _ => Stored::Packed(run(number, skip, skip + len + skip % 7)),
    };
    Slice { offset, len, stored }
}

/// A run whose pack offsets say which plain bytes they are: each block is stored in as many bytes as it has, plus 3.
fn run(number: u32, skip: u32, plain_len: u32) -> PackedRun {
    let blocks = (0..plain_len.div_ceil(BLOCK))
        .map(|index| Block {
            stored_len: BLOCK.min(plain_len - index * BLOCK) + 3,
            raw: true,
            checksum: u64::from(index),
        })
        .collect();
    PackedRun {
        pack: PackId(u64::from(number)),
        pack_offset: 64,
        block_bytes: BLOCK,
        plain_len,
        skip,
        blocks,
    }
}

/// The plain byte of the original run that byte `at` of a (trimmed) run is.
fn plain_at(run: &PackedRun, at: u32) -> Cell {
    let index = (at / BLOCK) as usize;
    assert!(at < run.plain_len && index < run.blocks.len());
    let before: u32 = run.blocks[..index].iter().map(|block| block.stored_len).sum();
    let original = u32::try_from(run.blocks[index].checksum).unwrap();
    assert_eq!(run.pack_offset + before, 64 + original * (BLOCK + 3), "the block is where it was placed");
    Cell::Packed(run.pack, original * BLOCK + at % BLOCK)
}

fn paint(cells: &mut [Cell], slice: &Slice) {
    for at in 0..slice.len {
        cells[(slice.offset + at) as usize] = match &slice.stored {
            Stored::Hole => Cell::Hole,
            Stored::Inline(bytes) => Cell::Inline(bytes[at as usize]),
            Stored::Packed(run) => plain_at(run, run.skip + at),
        };
    }
}

fn paint_extent(cells: &mut [Cell], extent: &Extent) {
    for at in 0..extent.len {
        cells[(extent.offset + at) as usize] = match &extent.source {
            Source::Hole => Cell::Hole,
            Source::Inline(bytes) => {
                assert_eq!(bytes.len(), extent.len as usize);
                Cell::Inline(bytes[at as usize])
            }
            Source::Packed { run, offset_in_run } => plain_at(run, offset_in_run + at),
        };
    }
}

fn groups_of(slices: &[Slice], cuts: usize) -> Vec<SliceGroup> {
    let per_group = cuts.max(1);
    slices
        .chunks(per_group)
        .enumerate()
        .map(|(number, slices)| {
            let mut stamp = [0; 12];
            stamp[4..].copy_from_slice(&(number as u64).to_be_bytes());
            SliceGroup { stamp: SliceStamp(stamp), slices: slices.to_vec() }
        })
        .collect()
}

proptest! {
    #[test]
    fn overlay_is_what_painting_in_order_gives(
        seeds in prop::collection::vec(slice_strategy(), 0..40),
        cuts in 1..6usize,
        from in 0..CHUNK,
        len in 1..CHUNK,
    ) {
        let slices: Vec<Slice> = seeds.into_iter().zip(0..).map(|(seed, number)| build(seed, number)).collect();
        let mut model = vec![Cell::Hole; CHUNK as usize];
        for slice in &slices {
            paint(&mut model, slice);
        }
        let overlay = overlay(&groups_of(&slices, cuts));

        let mut painted = vec![Cell::Hole; CHUNK as usize];
        for extent in overlay.extents() {
            paint_extent(&mut painted, extent);
        }
        prop_assert_eq!(&painted, &model);
        prop_assert!(overlay.extents().windows(2).all(|two| two[0].end() <= two[1].offset));
        prop_assert!(overlay.extents().iter().all(|extent| extent.len > 0 && extent.source != Source::Hole));

        let to = (from + len).min(CHUNK);
        let tiles = overlay.tiles(from..to);
        let mut next = from;
        let mut tiled = vec![Cell::Hole; CHUNK as usize];
        for tile in &tiles {
            prop_assert_eq!(tile.offset, next);
            next = tile.end();
            paint_extent(&mut tiled, tile);
        }
        prop_assert_eq!(next, to);
        let window = from as usize..to as usize;
        prop_assert_eq!(&tiled[window.clone()], &model[window.clone()]);
        let data = model[window].iter().filter(|cell| **cell != Cell::Hole).count();
        prop_assert_eq!(overlay.data_bytes_in(from..to), data as u64);

        let is_data = |at: u32| model[at as usize] != Cell::Hole;
        prop_assert_eq!(overlay.next_data(from), (from..CHUNK).find(|at| is_data(*at)));

        // Cloning the tiles as slices of one new group shows the same bytes.
        let clones: Vec<Slice> = tiles.iter().map(Extent::to_slice).collect();
        let mut cloned = vec![Cell::Hole; CHUNK as usize];
        for slice in &clones {
            paint(&mut cloned, slice);
        }
        prop_assert_eq!(&cloned[from as usize..to as usize], &model[from as usize..to as usize]);
    }

    #[test]
    fn a_subslice_has_the_slices_bytes_and_no_needless_blocks(
        seed in slice_strategy(), from in 0..CHUNK, len in 1..CHUNK,
    ) {
        let slice = build(seed, 1);
        let range = from..from + len;
        let mut whole = vec![None; CHUNK as usize];
        let mut cells = vec![Cell::Hole; CHUNK as usize];
        paint(&mut cells, &slice);
        for at in slice.offset..slice.offset + slice.len {
            if range.contains(&at) {
                whole[at as usize] = Some(cells[at as usize]);
            }
        }
        let part = subslice(&slice, range);
        prop_assert_eq!(part.is_some(), whole.iter().any(Option::is_some));
        if let Some(part) = part {
            let mut cells = vec![Cell::Hole; CHUNK as usize];
            paint(&mut cells, &part);
            for at in part.offset..part.offset + part.len {
                prop_assert_eq!(Some(cells[at as usize]), whole[at as usize]);
            }
            prop_assert_eq!(part.len as usize, whole.iter().flatten().count());
            if let Stored::Packed(run) = &part.stored {
                let first = run.skip / BLOCK;
                let last = (run.skip + part.len - 1) / BLOCK;
                prop_assert_eq!(first, 0);
                prop_assert_eq!(run.blocks.len(), last as usize + 1);
                prop_assert_eq!(run.plain_len.div_ceil(BLOCK) as usize, run.blocks.len());
            }
        }
    }
}

#[test]
fn ten_thousand_scattered_slices_take_no_quadratic_time() {
    let slices: Vec<Slice> = (0..10_000u32)
        .map(|number| Slice {
            offset: (number.wrapping_mul(2_654_435_761) >> 8) & !0xfff,
            len: 4096,
            stored: Stored::Inline(Bytes::from_static(&[7; 4096])),
        })
        .collect();
    let started = tokio::time::Instant::now();
    let overlay = overlay(&groups_of(&slices, 500));
    assert!(started.elapsed() < std::time::Duration::from_secs(2));
    assert!(overlay.extents().len() > 3000);
}

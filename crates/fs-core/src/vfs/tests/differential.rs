//! Random operations on two files beside arrays of bytes, with flushes, remounts and crashes in between.

use super::*;

const FILES: usize = 2;
/// Two regions where operations meet: the beginning, and around the end of the first chunk.
const REGIONS: [u64; 2] = [0, CHUNK_BYTES - 150_000];
const REGION_BYTES: u64 = 300_000;

struct Run {
    world: World,
    /// Nothing in the middle of a remount only.
    mounted: Option<Arc<Vfs>>,
    files: [(Ino, Fh); FILES],
    model: [Vec<u8>; FILES],
    dice: Dice,
    log: Vec<String>,
}

impl Run {
    async fn new(seed: u64, faults: Faults, staging: Option<tempfile::TempDir>) -> Run {
        let mut world = World::new().await;
        world.staging = staging;
        world.faults = faults;
        if faults != Faults::NONE {
            world.store.flaky.store(5, Ordering::SeqCst);
        }
        world.options.compact_groups = 6;
        if seed.is_multiple_of(2) {
            world.options.flush_after = Duration::from_millis(5);
        }
        let vfs = world.mount().await;
        let files = [create(&vfs, "0").await, create(&vfs, "1").await];
        Run { world, mounted: Some(vfs), files, model: Default::default(), dice: Dice(seed), log: Vec::new() }
    }

    fn vfs(&self) -> &Vfs {
        self.mounted.as_deref().expect("mounted")
    }

    /// Leaves nothing that holds the staging directory.
    fn take(&mut self) -> Arc<Vfs> {
        self.mounted.take().expect("mounted")
    }

    fn place(&mut self) -> (u64, u64) {
        let region = usize::try_from(self.dice.roll(8) / 7).unwrap();
        let offset = REGIONS[region] + self.dice.roll(REGION_BYTES);
        let len = match self.dice.roll(4) {
            0 => 1 + self.dice.roll(200),
            1 => 1 + self.dice.roll(5000),
            _ => 1 + self.dice.roll(150_000),
        };
        (offset, len)
    }

    fn file(&mut self) -> usize {
        usize::try_from(self.dice.roll(FILES as u64)).unwrap()
    }

    async fn step(&mut self) {
        let file = self.file();
        let (offset, len) = self.place();
        let (at, end) = (usize::try_from(offset).unwrap(), usize::try_from(offset + len).unwrap());
        let (ino, fh) = self.files[file];
        let kind = self.dice.roll(100);
        self.log.push(format!("{kind}: file {file}, {offset}..{}", offset + len));
        match kind {
            0..30 => {
                let bytes = if self.dice.roll(10) == 0 {
                    vec![0; usize::try_from(len).unwrap()]
                } else {
                    self.dice.bytes(len)
                };
                if self.model[file].len() < end {
                    self.model[file].resize(end, 0);
                }
                self.model[file][at..end].copy_from_slice(&bytes);
                write(self.vfs(), (ino, fh), offset, bytes).await.unwrap();
            }
            30..55 => {
                let expected = expected(&self.model[file], at, end);
                let got = read(self.vfs(), (ino, fh), offset, u32::try_from(len).unwrap()).await;
                self.compare(&got, expected, at);
            }
            55..62 => {
                self.model[file].resize(at, 0);
                let attr = self.vfs().setattr(&ROOT, ino, size(offset), Some(fh)).await.unwrap();
                assert_eq!(attr.size, offset);
            }
            62..74 => {
                let mode = match kind {
                    62..68 => FallocateMode::PunchHole,
                    68..71 => FallocateMode::ZeroRange,
                    71..73 => FallocateMode::ZeroRangeKeepSize,
                    _ => FallocateMode::Allocate,
                };
                let grows = matches!(mode, FallocateMode::ZeroRange | FallocateMode::Allocate);
                let model = &mut self.model[file];
                if grows && model.len() < end {
                    model.resize(end, 0);
                }
                if mode != FallocateMode::Allocate {
                    let end = end.min(model.len());
                    model[at.min(end)..end].fill(0);
                }
                self.vfs().fallocate(ino, fh, mode, offset, len).await.unwrap();
            }
            74..82 => self.copy(file, offset, len).await,
            82..88 => fsync(self.vfs(), (ino, fh)).await.unwrap(),
            88..91 => {
                // Rewriting packs is given up when the store fails; it is only tidying.
                let collected = self.vfs().gc().await;
                assert!(collected.is_ok() || self.world.faults != Faults::NONE, "{collected:?}");
            }
            91..93 => self.vfs().sync_all().await.unwrap(),
            93..95 => self.check_holes(file).await,
            95..97 => {
                self.vfs().sync_all().await.unwrap();
                crash(self.take()).await;
                self.remount().await;
            }
            97 => {
                unmount(self.take()).await;
                self.remount().await;
            }
            _ => self.compare_all().await,
        }
    }

    async fn copy(&mut self, from: usize, offset: u64, len: u64) {
        let to = self.file();
        let (to_offset, _) = self.place();
        let source = &self.model[from];
        let len = len.min((source.len() as u64).saturating_sub(offset));
        let args =
            CopyArgs { from: self.files[from].0, from_offset: offset, to: self.files[to].0, to_offset, len };
        let copied = self.vfs().copy_file_range(args).await;
        if from == to && offset.abs_diff(to_offset) < len {
            assert_eq!(copied.unwrap_err().kind, ErrorKind::Invalid);
            return;
        }
        assert_eq!(copied.unwrap(), len);
        let at = usize::try_from(offset).unwrap();
        let bytes = self.model[from].get(at..at + usize::try_from(len).unwrap()).unwrap_or_default().to_vec();
        if !bytes.is_empty() {
            let at = usize::try_from(to_offset).unwrap();
            let model = &mut self.model[to];
            if model.len() < at + bytes.len() {
                model.resize(at + bytes.len(), 0);
            }
            model[at..at + bytes.len()].copy_from_slice(&bytes);
        }
    }

    async fn remount(&mut self) {
        let vfs = self.world.mount().await;
        self.files = [open(&vfs, "0").await, open(&vfs, "1").await];
        self.mounted = Some(vfs);
    }

    fn compare(&self, got: &[u8], expected: &[u8], at: usize) {
        if got != expected {
            let wrong = got.iter().zip(expected).position(|(a, b)| a != b).unwrap_or(0);
            panic!(
                "differs from byte {} on (lengths {} and {}) after\n{}",
                at + wrong,
                got.len(),
                expected.len(),
                self.log.join("\n")
            );
        }
    }

    async fn compare_all(&self) {
        for (file, model) in self.files.iter().zip(&self.model) {
            assert_eq!(self.vfs().getattr(file.0).await.unwrap().size, model.len() as u64, "{:?}", self.log);
            for (part, at) in model.chunks(1 << 20).zip((0..).step_by(1 << 20)) {
                let got = read(self.vfs(), *file, at as u64, 1 << 20).await;
                self.compare(&got, part, at);
            }
        }
    }

    /// What `SEEK_DATA` passes over is zero, and both go forward to the end.
    async fn check_holes(&self, file: usize) {
        let (ino, fh) = self.files[file];
        let model = &self.model[file];
        let mut position = 0;
        while position < model.len() as u64 {
            let data = match self.vfs().lseek(ino, fh, position, Whence::Data).await {
                Ok(data) => data,
                Err(error) => {
                    assert_eq!(error.kind, ErrorKind::NoSuchAddress);
                    model.len() as u64
                }
            };
            let skipped = usize::try_from(position).unwrap()..usize::try_from(data).unwrap();
            assert!(model[skipped].iter().all(|byte| *byte == 0), "a hole that is none");
            if data == model.len() as u64 {
                return;
            }
            // Written zeros are data until a flush, which may come just now.
            position = self.vfs().lseek(ino, fh, data, Whence::Hole).await.unwrap().max(data + 1);
        }
    }
}

fn expected(model: &[u8], at: usize, end: usize) -> &[u8] {
    let end = end.min(model.len());
    &model[at.min(end)..end]
}

async fn run(seed: u64, steps: u32, faults: Faults, staging: Option<tempfile::TempDir>) {
    let mut run = Run::new(seed, faults, staging).await;
    for _ in 0..steps {
        run.step().await;
    }
    run.compare_all().await;
    run.vfs().sync_all().await.unwrap();
    run.world.store.flaky.store(0, Ordering::SeqCst);
    run.vfs().gc().await.unwrap();
    run.compare_all().await;
    check_accounts(run.vfs(), &[run.files[0].0, run.files[1].0]).await;
    unmount(run.take()).await;
    run.remount().await;
    run.compare_all().await;
    unmount(run.take()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn files_are_arrays_of_bytes() {
    let seeds = std::env::var("RFS_TEST_SEEDS").ok().and_then(|seeds| seeds.parse().ok()).unwrap_or(6);
    for seed in 0..seeds {
        run(seed, 300, Faults::NONE, None).await;
        run(seed, 300, Faults::NONE, Some(tempfile::tempdir().unwrap())).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn conflicts_unknown_commits_and_a_flaky_store_do_not_show() {
    for seed in 100..103 {
        let delays = Faults { delay: 0.1, delay_max: Duration::from_millis(2), ..Faults::RETRYABLE };
        run(seed, 200, delays, None).await;
        run(seed, 200, delays, Some(tempfile::tempdir().unwrap())).await;
    }
}

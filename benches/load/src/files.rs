//! Files written and read whole.

use std::fs;
use std::io::{Read, Write};
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, ensure};
use clap::{Args, ValueEnum};
use rand::rngs::SmallRng;
use rand::{Rng, RngCore, SeedableRng};
use serde_json::{Value, json};

use crate::parallel;

/// Bytes of one write or read of a large file.
const REQUEST: usize = 1 << 20;

/// What files hold.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum Content {
    /// Bytes that do not compress.
    Random,
    /// Lines of numbers and words, as a table exported to text.
    Csv,
}

/// Which files.
#[derive(Args)]
pub(crate) struct FilesArgs {
    /// Where; made if missing.
    dir: PathBuf,
    /// Directories, shared out among the threads.
    #[arg(long, default_value_t = 1)]
    dirs: u32,
    /// Files in each directory.
    #[arg(long)]
    files: u32,
    /// Bytes of each file.
    #[arg(long)]
    size: u64,
    /// Threads; files of one directory belong to one thread, unless there is one directory.
    #[arg(long, default_value_t = 1)]
    threads: u32,
    /// What the files hold.
    #[arg(long, value_enum, default_value = "random")]
    content: Content,
}

impl FilesArgs {
    /// The files of one thread, in order, with a number that tells each from all others.
    fn of_thread(&self, thread: u32) -> impl Iterator<Item = (u64, PathBuf)> {
        let (threads, files) = (self.threads, self.files);
        let by_file = self.dirs == 1;
        (0..self.dirs).filter(move |dir| by_file || dir % threads == thread).flat_map(move |dir| {
            (0..files).filter(move |file| !by_file || file % threads == thread).map(move |file| {
                let number = u64::from(dir) * u64::from(files) + u64::from(file);
                (number, self.dir.join(format!("d{dir:04}")).join(format!("f{file:06}")))
            })
        })
    }

    fn report(&self, took: std::time::Duration) -> Value {
        let count = u64::from(self.dirs) * u64::from(self.files);
        let bytes = count * self.size;
        let ended = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        json!({
            "files": count, "bytes": bytes, "secs": took.as_secs_f64(), "ended": ended.as_secs_f64(),
            "files_per_second": parallel::rate(count, took),
            "mib_per_second": parallel::rate(bytes, took) / f64::from(1 << 20),
        })
    }
}

/// Writes all files.
pub(crate) fn write(args: &FilesArgs) -> Result<Value> {
    for dir in 0..args.dirs {
        fs::create_dir_all(args.dir.join(format!("d{dir:04}")))?;
    }
    let prepare = || Pattern::new(args.content);
    let took = parallel::run(args.threads, prepare, |thread, mut pattern| {
        for (number, path) in args.of_thread(thread) {
            let mut file = fs::File::create(&path).with_context(|| format!("{}", path.display()))?;
            pattern.for_each_piece(number, args.size, |piece| Ok(file.write_all(piece)?))?;
        }
        Ok(())
    })?;
    Ok(args.report(took))
}

/// Reads all files; what differs from what `write` wrote is an error.
pub(crate) fn read(args: &FilesArgs) -> Result<Value> {
    let prepare = || (Pattern::new(args.content), vec![0; REQUEST]);
    let took = parallel::run(args.threads, prepare, |thread, (mut pattern, mut buffer)| {
        for (number, path) in args.of_thread(thread) {
            let mut file = fs::File::open(&path).with_context(|| format!("{}", path.display()))?;
            pattern.for_each_piece(number, args.size, |piece| {
                let found = &mut buffer[..piece.len()];
                file.read_exact(found)?;
                ensure!(found == piece, "{} holds other bytes", path.display());
                Ok(())
            })?;
            ensure!(file.read(&mut buffer)? == 0, "{} is too long", path.display());
        }
        Ok(())
    })?;
    Ok(args.report(took))
}

/// Contents that cost little to make: pieces of one long buffer, beginning elsewhere for every file.
struct Pattern {
    source: Vec<u8>,
}

impl Pattern {
    fn new(content: Content) -> Pattern {
        let mut random = SmallRng::seed_from_u64(1);
        let mut source = vec![0; 8 * REQUEST];
        match content {
            Content::Random => random.fill_bytes(&mut source),
            Content::Csv => {
                let mut text = Vec::with_capacity(source.len() + 200);
                while text.len() < source.len() {
                    let (a, b): (u32, f64) = (random.random_range(0..1_000_000), random.random());
                    let city = ["Lisbon", "Osaka", "Quito", "Turku"][random.random_range(0..4)];
                    text.extend_from_slice(
                        format!("{a},{city},{b:.6},2026-11-{:02}\n", a % 30 + 1).as_bytes(),
                    );
                }
                source.copy_from_slice(&text[..8 * REQUEST]);
            }
        }
        Pattern { source }
    }

    fn for_each_piece(
        &mut self,
        number: u64,
        size: u64,
        mut each: impl FnMut(&[u8]) -> Result<()>,
    ) -> Result<()> {
        let space = (self.source.len() - REQUEST) as u64;
        let mut done = 0;
        while done < size {
            let len = usize::try_from(size - done).unwrap_or(REQUEST).min(REQUEST);
            let start = (number.wrapping_mul(0x9e37_79b9) + done / REQUEST as u64 * 7919) % space;
            let start = usize::try_from(start)?;
            // Every file and every piece of it differs, so that nothing is stored once for several.
            let place = start..start + 8;
            let usual: [u8; 8] = self.source[place.clone()].try_into().expect("the range has eight bytes");
            self.source[place.clone()].copy_from_slice(&(number << 32 | done >> 20).to_le_bytes());
            let result = each(&self.source[start..start + len]);
            self.source[place].copy_from_slice(&usual);
            result?;
            done += len as u64;
        }
        Ok(())
    }
}

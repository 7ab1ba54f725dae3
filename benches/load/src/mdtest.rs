//! The phases of mdtest: directories and empty files, made, looked at, opened, renamed and removed.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::{Map, Value, json};

use crate::parallel;

type Phase = (&'static str, fn(&Path) -> std::io::Result<()>, &'static str);

const PHASES: &[Phase] = &[
    ("directory_creation", |path| fs::create_dir(path), "d"),
    ("directory_stat", |path| fs::metadata(path).map(drop), "d"),
    ("directory_removal", |path| fs::remove_dir(path), "d"),
    ("file_creation", |path| fs::File::create_new(path).map(drop), "f"),
    ("file_stat", |path| fs::metadata(path).map(drop), "f"),
    ("file_open_read_close", |path| fs::read(path).map(drop), "f"),
    ("file_rename", |path| fs::rename(path, path.with_extension("r")), "f"),
    ("file_removal", |path| fs::remove_file(path.with_extension("r")), "f"),
    (
        "stat_missing",
        |path| fs::metadata(path).map_or(Ok(()), |_| Err(std::io::Error::other("it is there"))),
        "f",
    ),
];

/// Runs all phases; operations a second by phase.
pub(crate) fn run(dir: &Path, items: u32, threads: u32) -> Result<Value> {
    let own = |thread: u32| -> PathBuf { dir.join(format!("mdtest.{thread}")) };
    for thread in 0..threads {
        fs::create_dir_all(own(thread)).with_context(|| format!("{}", own(thread).display()))?;
    }
    let mut rates = Map::new();
    for (name, operation, prefix) in PHASES {
        let took = parallel::run(
            threads,
            || (),
            |thread, ()| {
                let base = own(thread);
                for item in 0..items {
                    let path = base.join(format!("{prefix}{item:07}"));
                    operation(&path).with_context(|| format!("{name} {}", path.display()))?;
                }
                Ok(())
            },
        )?;
        let rate = parallel::rate(u64::from(items) * u64::from(threads), took);
        rates.insert((*name).to_owned(), json!(rate));
    }
    for thread in 0..threads {
        fs::remove_dir(own(thread))?;
    }
    Ok(json!({ "ops": u64::from(items) * u64::from(threads), "per_second": rates }))
}

//! The runtime that asynchronous work runs on: one per process, made by commands that need it.

use std::future::Future;

use crate::exit::{Result, ResultExt};

/// A runtime with a thread a processor.
///
/// From here on files are made for their owner alone: what permission bits protect inside a volume must not be readable in
/// its packs, its metadata and its cache.
pub(crate) fn start() -> Result<tokio::runtime::Runtime> {
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o077));
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().thread_name("rfs").build();
    runtime.doing("starting threads")
}

/// Runs `work` to its end.
pub(crate) fn block_on<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    start()?.block_on(work)
}

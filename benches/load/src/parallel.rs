//! Running one function on several threads that begin together.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use anyhow::Result;

/// Runs `work(thread, prepare())` on `threads` threads; the time from the first one's beginning of its work to the last
/// one's end.
pub(crate) fn run<T>(
    threads: u32,
    prepare: impl Fn() -> T + Sync,
    work: impl Fn(u32, T) -> Result<()> + Sync,
) -> Result<Duration> {
    let barrier = Barrier::new(threads as usize);
    let spans = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|thread| {
                let (barrier, prepare, work) = (&barrier, &prepare, &work);
                scope.spawn(move || {
                    let prepared = prepare();
                    barrier.wait();
                    let begin = Instant::now();
                    work(thread, prepared).map(|()| (begin, Instant::now()))
                })
            })
            .collect();
        workers
            .into_iter()
            .map(|worker| worker.join().expect("a worker panicked"))
            .collect::<Result<Vec<_>>>()
    })?;
    let begin = spans.iter().map(|(begin, _)| *begin).min().expect("there is a thread");
    let end = spans.iter().map(|(_, end)| *end).max().expect("there is a thread");
    Ok(end - begin)
}

/// `count` things in `took`, a second.
pub(crate) fn rate(count: u64, took: Duration) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "a rate needs three digits")]
    let count = count as f64;
    count / took.as_secs_f64()
}

//! Running one function on several threads that begin together.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use anyhow::Result;

/// Runs `work(thread)` on `threads` threads; the time from the common beginning to the last one's end.
pub(crate) fn run(threads: u32, work: impl Fn(u32) -> Result<()> + Sync) -> Result<Duration> {
    let barrier = Barrier::new(threads as usize + 1);
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|thread| {
                let (barrier, work) = (&barrier, &work);
                scope.spawn(move || {
                    barrier.wait();
                    work(thread)
                })
            })
            .collect();
        barrier.wait();
        let begin = Instant::now();
        for worker in workers {
            worker.join().expect("a worker panicked")?;
        }
        Ok(begin.elapsed())
    })
}

/// `count` things in `took`, a second.
pub(crate) fn rate(count: u64, took: Duration) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "a rate needs three digits")]
    let count = count as f64;
    count / took.as_secs_f64()
}

//! The one seam between FUSE's threads and async code.
//!
//! A request's future is polled once on the thread that read the request. Most are ready at once, and their answer costs no
//! thread switch. One that has to wait moves to the runtime, so that the thread can read the next request. Each request is
//! answered exactly once; errors are turned into errnos and logged here and nowhere else; a panic is the answer EIO and
//! nothing more. No answer takes longer than `answer_within`, because the kernel lets nobody interrupt a process that
//! waits for one: past it the caller gets EIO while the work goes on (dropping it half-way could lose data), and what the
//! work gives in the end is taken back.

use std::any::Any;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use fuser::Errno;
use futures::FutureExt as _;
use rfs_core::types::{Error, ErrorKind, Result};
use tokio::runtime::Handle;
use tokio::sync::watch;
use tracing::{Instrument as _, Span, debug, error};

use crate::errno::{errno, is_incident};
use crate::given::Given;

type Outcome<T> = std::result::Result<Result<T>, Box<dyn Any + Send>>;

/// Runs requests.
#[derive(Debug, Clone)]
pub(crate) struct Bridge {
    runtime: Handle,
    answer_within: Option<Duration>,
    waiting: watch::Sender<usize>,
}

/// One request that waits on the runtime; counted while it exists.
struct Waiting(watch::Sender<usize>);

impl Waiting {
    fn new(count: &watch::Sender<usize>) -> Waiting {
        count.send_modify(|count| *count += 1);
        Waiting(count.clone())
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.send_modify(|count| *count -= 1);
    }
}

impl Bridge {
    /// A bridge to `runtime`. `answer_within`: the longest a caller waits; `None` is for ever.
    pub(crate) fn new(runtime: Handle, answer_within: Option<Duration>) -> Bridge {
        Bridge { runtime, answer_within, waiting: watch::Sender::new(0) }
    }

    /// Runs `work` and passes its result to `reply`, on this thread if it is ready at once.
    pub(crate) fn answer<T, F, R>(&self, span: Span, work: F, reply: R)
    where
        T: Given,
        F: Future<Output = Result<T>> + Send + 'static,
        R: FnOnce(std::result::Result<T, Errno>) + Send + 'static,
    {
        let mut work = Box::pin(AssertUnwindSafe(work.instrument(span.clone())).catch_unwind());
        let polled = {
            let _runtime = self.runtime.enter();
            // The waker does nothing: work that is pending is polled again at once, with the waker of its task.
            work.as_mut().poll(&mut Context::from_waker(Waker::noop()))
        };
        match polled {
            Poll::Ready(outcome) => reply(span.in_scope(|| judge(outcome))),
            Poll::Pending => {
                let waiting = Waiting::new(&self.waiting);
                let limit = self.answer_within;
                self.runtime.spawn(async move {
                    finish(work, limit, reply, span).await;
                    drop(waiting);
                });
            }
        }
    }

    /// Runs what needs no answer and does not wait. A panic goes no further than the log.
    pub(crate) fn tell(work: impl FnOnce()) {
        if let Err(panic) = std::panic::catch_unwind(AssertUnwindSafe(work)) {
            error!(panic = panic_text(&*panic), "a notification of the kernel failed");
        }
    }

    /// Waits until no request is under way.
    pub(crate) async fn drained(&self) {
        // The sender lives in `self`, so the wait cannot fail.
        let _ = self.waiting.subscribe().wait_for(|count| *count == 0).await;
    }
}

async fn finish<T, R>(
    mut work: Pin<Box<impl Future<Output = Outcome<T>>>>,
    limit: Option<Duration>,
    reply: R,
    span: Span,
) where
    T: Given,
    R: FnOnce(std::result::Result<T, Errno>),
{
    let in_time = match limit {
        None => Some(work.as_mut().await),
        Some(limit) => tokio::time::timeout(limit, work.as_mut()).await.ok(),
    };
    if let Some(outcome) = in_time {
        return reply(span.in_scope(|| judge(outcome)));
    }
    span.in_scope(|| error!(?limit, "request takes too long, the caller is told of an I/O error"));
    reply(Err(Errno::EIO));
    let late = work.await;
    match span.in_scope(|| judge(late)) {
        Ok(given) => given.take_back().await,
        Err(e) => {
            span.in_scope(|| error!(errno = e.code(), "a request that took too long failed in the end"));
        }
    }
}

/// The answer for the kernel, and a log line where one is due.
fn judge<T>(outcome: Outcome<T>) -> std::result::Result<T, Errno> {
    let failure = match outcome {
        Ok(Ok(value)) => return Ok(value),
        Ok(Err(failure)) => failure,
        Err(panic) => Error::new(ErrorKind::Io, format!("panic: {}", panic_text(&*panic))),
    };
    if is_incident(failure.kind) {
        error!(error = %failure, "request failed");
    } else {
        debug!(error = %failure, kind = ?failure.kind, "request refused");
    }
    Err(errno(failure.kind))
}

fn panic_text(panic: &(dyn Any + Send)) -> &str {
    panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("without a message")
}

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot;

    use super::*;

    type Answer = std::result::Result<u32, i32>;

    fn ask(
        bridge: &Bridge,
        work: impl Future<Output = Result<u32>> + Send + 'static,
    ) -> oneshot::Receiver<Answer> {
        let (send, receive) = oneshot::channel();
        bridge.answer(Span::none(), work, move |result| {
            send.send(result.map_err(Errno::code)).unwrap();
        });
        receive
    }

    #[tokio::test]
    async fn what_is_ready_is_answered_before_the_call_returns() {
        let bridge = Bridge::new(Handle::current(), None);
        assert_eq!(ask(&bridge, async { Ok(7) }).try_recv(), Ok(Ok(7)));
        assert_eq!(
            ask(&bridge, async { Err(ErrorKind::NotEmpty.into()) }).try_recv(),
            Ok(Err(libc::ENOTEMPTY))
        );
    }

    #[tokio::test]
    async fn what_waits_is_answered_from_the_runtime() {
        let bridge = Bridge::new(Handle::current(), Some(Duration::from_mins(1)));
        let (go, gone) = oneshot::channel::<()>();
        let mut answer = ask(&bridge, async move {
            gone.await.unwrap();
            Ok(8)
        });
        tokio::task::yield_now().await;
        assert!(answer.try_recv().is_err());
        go.send(()).unwrap();
        assert_eq!(answer.await.unwrap(), Ok(8));
        bridge.drained().await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_late_request_is_answered_with_eio_and_still_finishes() {
        let bridge = Bridge::new(Handle::current(), Some(Duration::from_secs(5)));
        let (done, finished) = oneshot::channel();
        let answer = ask(&bridge, async move {
            tokio::time::sleep(Duration::from_mins(1)).await;
            done.send(()).unwrap();
            Ok(0)
        });
        assert_eq!(answer.await.unwrap(), Err(libc::EIO));
        finished.await.unwrap();
        bridge.drained().await;
    }

    #[test]
    fn a_panic_without_a_caller_ends_there() {
        Bridge::tell(|| panic!("nobody asked"));
    }

    #[tokio::test]
    async fn a_panic_is_an_io_error() {
        let bridge = Bridge::new(Handle::current(), None);
        assert_eq!(ask(&bridge, async { panic!("at once") }).await.unwrap(), Err(libc::EIO));
        let later = ask(&bridge, async {
            tokio::task::yield_now().await;
            panic!("later")
        });
        assert_eq!(later.await.unwrap(), Err(libc::EIO));
        bridge.drained().await;
    }
}

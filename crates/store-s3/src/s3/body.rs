//! Request bodies, and the watch over an attempt that has stopped moving.
//!
//! A time limit for a whole attempt is either too long for a dead server or too short for a slow line. So a body is
//! handed over in slices, and an attempt is given up when neither a slice was taken nor a chunk of the answer came for
//! the read time-out.

use std::convert::Infallible;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use object_store::PutPayload;
use tokio::time::{Instant, timeout};

use crate::{Cause, RequestError};

/// What hyper takes at a time (256 KiB): small beside a part, large beside a system call.
const SLICE_BYTES: usize = 256 << 10;

/// Counts the steps of one attempt.
#[derive(Debug, Clone, Default)]
pub(super) struct Progress(Arc<AtomicU64>);

impl Progress {
    /// Something moved.
    pub(super) fn bump(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    /// Runs `request` until it ends, stands still for `stall`, or takes longer than `total` (if not zero).
    pub(super) async fn watch<T>(
        &self,
        operation: &'static str,
        stall: Duration,
        total: Duration,
        request: impl Future<Output = Result<T, RequestError>>,
    ) -> Result<T, RequestError> {
        let mut request = pin!(request);
        let begun = Instant::now();
        let mut seen = 0;
        loop {
            let left = if total.is_zero() { Duration::MAX } else { total.saturating_sub(begun.elapsed()) };
            if let Ok(result) = timeout(stall.min(left), &mut request).await {
                return result;
            }
            if !total.is_zero() && begun.elapsed() >= total {
                let message = format!("no end after {} s", total.as_secs());
                return Err(RequestError::new(Cause::Timeout, operation, message));
            }
            let now = self.0.load(Ordering::Relaxed);
            if now == seen {
                let message = format!("nothing moved for {:.1} s", stall.as_secs_f64());
                return Err(RequestError::new(Cause::Timeout, operation, message));
            }
            seen = now;
        }
    }
}

/// A payload as an HTTP body: no copy, handed over in slices of [`SLICE_BYTES`].
pub(super) struct SlicedBody {
    /// What is still to be sent, the next last.
    pieces: Vec<Bytes>,
    left: u64,
    progress: Progress,
}

impl SlicedBody {
    pub(super) fn new(payload: PutPayload, progress: Progress) -> SlicedBody {
        let left = payload.content_length() as u64;
        let mut pieces: Vec<Bytes> = payload.into_iter().filter(|piece| !piece.is_empty()).collect();
        pieces.reverse();
        SlicedBody { pieces, left, progress }
    }

    /// Bytes still to be sent.
    pub(super) fn len(&self) -> u64 {
        self.left
    }
}

impl Body for SlicedBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.progress.bump();
        let Some(piece) = self.pieces.last_mut() else { return Poll::Ready(None) };
        let slice = piece.split_to(piece.len().min(SLICE_BYTES));
        if piece.is_empty() {
            self.pieces.pop();
        }
        self.left -= slice.len() as u64;
        Poll::Ready(Some(Ok(Frame::data(slice))))
    }

    fn is_end_stream(&self) -> bool {
        self.left == 0
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.left)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_is_sent_whole_and_in_order() {
        let big = Bytes::from(vec![7; SLICE_BYTES + 5]);
        let payload: PutPayload = [Bytes::from("ab"), Bytes::new(), big.clone()].into_iter().collect();
        let mut body = SlicedBody::new(payload, Progress::default());
        let mut sent = Vec::new();
        let mut context = Context::from_waker(std::task::Waker::noop());
        while let Poll::Ready(Some(Ok(frame))) = Pin::new(&mut body).poll_frame(&mut context) {
            sent.push(frame.into_data().unwrap());
        }
        assert_eq!(sent.iter().map(Bytes::len).collect::<Vec<_>>(), [2, SLICE_BYTES, 5]);
        assert_eq!(sent.concat(), [b"ab".as_slice(), &big].concat());
        assert!(body.is_end_stream());
    }

    #[tokio::test(start_paused = true)]
    async fn a_stalled_attempt_is_given_up_and_a_slow_one_is_not() {
        let stall = Duration::from_secs(20);
        let progress = Progress::default();
        let slow = async {
            for _ in 0..10 {
                tokio::time::sleep(Duration::from_secs(15)).await;
                progress.bump();
            }
            Ok(())
        };
        progress.watch("PutObject", stall, Duration::ZERO, slow).await.unwrap();

        let begun = Instant::now();
        let error = Progress::default()
            .watch("PutObject", stall, Duration::ZERO, std::future::pending::<Result<(), _>>())
            .await
            .unwrap_err();
        assert_eq!(error.cause(), Cause::Timeout);
        assert_eq!(begun.elapsed(), stall);
    }

    #[tokio::test(start_paused = true)]
    async fn an_attempt_that_trickles_ends_at_its_limit() {
        let progress = Progress::default();
        let begun = Instant::now();
        let trickle = async {
            loop {
                tokio::time::sleep(Duration::from_secs(1)).await;
                progress.bump();
            }
        };
        let total = Duration::from_mins(1);
        let error: Result<(), _> = progress.watch("GetObject", Duration::from_secs(20), total, trickle).await;
        assert_eq!(error.unwrap_err().cause(), Cause::Timeout);
        assert_eq!(begun.elapsed(), total);
    }
}

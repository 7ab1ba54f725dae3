//! Waiting for the client library.
//!
//! A future of the bindings (0.11) that is polled again looks first whether its answer has come, and then notes whom to wake.
//! If the answer comes between the two, it wakes who polled before, and nobody polls any more. That matters where the two
//! are not the same: a request of the kernel is polled once without anybody to wake, and then by a task.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;

/// The output of `future`, which is of the bindings. Looks once more after each time that it has noted whom to wake.
pub(crate) async fn awaited<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    poll_fn(|context| match future.as_mut().poll(context) {
        Poll::Pending => future.as_mut().poll(context),
        ready @ Poll::Ready(_) => ready,
    })
    .await
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};
    use std::pin::Pin;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::task::{Context, Wake, Waker};

    use super::*;

    /// Does as the bindings do. Its answer comes in poll number `answered_in`, between looking and noting.
    struct Binding {
        polls: Cell<u32>,
        answered_in: u32,
        answered: Cell<bool>,
        noted: RefCell<Option<Waker>>,
    }

    impl Future for Binding {
        type Output = ();

        fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
            if self.answered.get() {
                return Poll::Ready(());
            }
            self.polls.set(self.polls.get() + 1);
            if self.polls.get() == self.answered_in {
                self.answered.set(true);
                if let Some(noted) = self.noted.take() {
                    noted.wake();
                }
            }
            *self.noted.borrow_mut() = Some(context.waker().clone());
            Poll::Pending
        }
    }

    #[derive(Default)]
    struct Woken(AtomicBool);

    impl Wake for Woken {
        fn wake(self: Arc<Woken>) {
            self.0.store(true, Ordering::SeqCst);
        }
    }

    #[test]
    fn an_answer_that_comes_while_it_is_noted_whom_to_wake_is_not_missed() {
        for answered_in in 1..=4 {
            let binding = Binding {
                polls: Cell::default(),
                answered_in,
                answered: Cell::default(),
                noted: RefCell::default(),
            };
            let mut future = pin!(awaited(binding));
            let first = future.as_mut().poll(&mut Context::from_waker(Waker::noop()));
            let task = Arc::new(Woken::default());
            let waker = Waker::from(Arc::clone(&task));
            let mut second = || future.as_mut().poll(&mut Context::from_waker(&waker));
            let told = first.is_ready() || second().is_ready() || task.0.load(Ordering::SeqCst);
            assert!(told, "the answer came in poll {answered_in}");
        }
    }
}

//! Background tasks: each has an owner, which ends and joins them all.
//!
//! A task that panics has broken an invariant. What all tasks of a mount share, its [`Health`], notes that once; whoever
//! would write on asks it first.

use std::any::Any;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use futures::FutureExt as _;
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::{SetOnce, watch};
use tokio::task::JoinSet;

use crate::types::{Error, ErrorKind, Result};

/// Whether an invariant was broken, and what was said of it.
#[derive(Debug, Default)]
pub(crate) struct Health {
    broken: SetOnce<String>,
}

impl Health {
    /// What the first task said that panicked, if one did.
    pub(crate) fn broken(&self) -> Option<&str> {
        self.broken.get().map(String::as_str)
    }

    /// # Errors
    /// `Io` once a task has panicked.
    pub(crate) fn check(&self) -> Result<()> {
        match self.broken() {
            None => Ok(()),
            Some(text) => {
                let text = format!("a background task panicked ({text}), nothing is changed any more");
                Err(Error::new(ErrorKind::Io, text))
            }
        }
    }

    /// Waits until a task has panicked.
    pub(crate) async fn wait_broken(&self) {
        self.broken.wait().await;
    }

    fn note(&self, panic: &(dyn Any + Send)) {
        let text = panic.downcast_ref::<&str>().copied();
        let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
        let text = text.unwrap_or("without a message");
        tracing::error!(text, "a background task panicked: nothing is changed any more, mount again");
        // Only the first counts.
        let _ = self.broken.set(text.to_owned());
    }
}

/// Tasks of one owner.
#[derive(Debug)]
pub(crate) struct Tasks {
    runtime: Handle,
    health: Arc<Health>,
    running: Mutex<Option<JoinSet<()>>>,
    ending: watch::Sender<bool>,
}

impl Tasks {
    /// Tasks on the runtime of the caller.
    pub(crate) fn new(health: Arc<Health>) -> Tasks {
        Tasks {
            runtime: Handle::current(),
            health,
            running: Mutex::new(Some(JoinSet::new())),
            ending: watch::Sender::new(false),
        }
    }

    pub(crate) fn health(&self) -> &Arc<Health> {
        &self.health
    }

    /// Starts a task, unless they are being ended. It is cancelled at an await when they are.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let mut ending = self.ending.subscribe();
        let health = Arc::clone(&self.health);
        if let Some(running) = &mut *self.running.lock() {
            // Finished ones are forgotten here, so that the set does not grow.
            while running.try_join_next().is_some() {}
            running.spawn_on(
                async move {
                    tokio::select! {
                        biased;
                        _ = ending.wait_for(|ending| *ending) => {}
                        ended = AssertUnwindSafe(task).catch_unwind() => {
                            if let Err(panic) = ended {
                                health.note(&*panic);
                            }
                        }
                    }
                },
                &self.runtime,
            );
        }
    }

    /// Cancels all tasks.
    pub(crate) fn cancel(&self) {
        self.ending.send_replace(true);
    }

    /// Waits until they are cancelled.
    pub(crate) async fn cancelled(&self) {
        // The sender lives in `self`, so the wait cannot fail.
        let _ = self.ending.subscribe().wait_for(|ending| *ending).await;
    }

    /// Cancels all tasks and waits until they have ended.
    pub(crate) async fn end(&self) {
        self.cancel();
        let running = self.running.lock().take();
        if let Some(mut running) = running {
            while running.join_next().await.is_some() {}
        }
    }
}

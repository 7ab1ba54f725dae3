//! Background tasks: each has this owner, which ends and joins them all.

use std::future::Future;

use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::JoinSet;

/// Tasks of one mount.
#[derive(Debug)]
pub(super) struct Tasks {
    runtime: Handle,
    running: Mutex<Option<JoinSet<()>>>,
    ending: watch::Sender<bool>,
}

impl Tasks {
    pub(super) fn new() -> Tasks {
        Tasks {
            runtime: Handle::current(),
            running: Mutex::new(Some(JoinSet::new())),
            ending: watch::Sender::new(false),
        }
    }

    /// Starts a task, unless they are being ended. It is cancelled at an await when they are.
    pub(super) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let mut ending = self.ending.subscribe();
        if let Some(running) = &mut *self.running.lock() {
            // Finished ones are forgotten here, so that the set does not grow.
            while running.try_join_next().is_some() {}
            running.spawn_on(
                async move {
                    tokio::select! {
                        biased;
                        _ = ending.wait_for(|ending| *ending) => {}
                        () = task => {}
                    }
                },
                &self.runtime,
            );
        }
    }

    /// Cancels all tasks and waits until they have ended.
    pub(super) async fn end(&self) {
        self.ending.send_replace(true);
        let running = self.running.lock().take();
        if let Some(mut running) = running {
            while running.join_next().await.is_some() {}
        }
    }
}

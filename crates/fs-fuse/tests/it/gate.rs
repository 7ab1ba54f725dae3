//! A metadata store that can be told to keep everybody waiting, or to fail.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use async_trait::async_trait;
use rfs_kv::{Kv, KvError, Limits, MemKv, Result, Txn, Watch};
use tokio::sync::watch;

/// What becomes of transactions, and of what waits for them to be durable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Gate {
    /// They go on.
    Open,
    /// They wait until it is open.
    Shut,
    /// So many go on, the others fail.
    Passes(u64),
}

/// Turns the gate.
#[derive(Debug, Clone)]
pub(crate) struct Gatekeeper {
    gate: watch::Sender<Gate>,
    passed: Arc<AtomicU64>,
}

impl Gatekeeper {
    pub(crate) fn new() -> Gatekeeper {
        Gatekeeper { gate: watch::Sender::new(Gate::Open), passed: Arc::default() }
    }

    pub(crate) fn turn(&self, gate: Gate) {
        self.passed.store(0, Ordering::SeqCst);
        self.gate.send_replace(gate);
    }

    async fn pass(&self) -> Result<()> {
        let mut gate = self.gate.subscribe();
        let gate = *gate.wait_for(|gate| *gate != Gate::Shut).await.expect("the sender is in `self`");
        match gate {
            Gate::Passes(most) if self.passed.fetch_add(1, Ordering::SeqCst) >= most => {
                Err(KvError::Unavailable("the gate is shut".to_owned()))
            }
            _ => Ok(()),
        }
    }
}

/// An engine behind a gate.
pub(crate) struct GatedKv {
    pub(crate) inner: MemKv,
    pub(crate) keeper: Gatekeeper,
}

#[async_trait]
impl Kv for GatedKv {
    fn limits(&self) -> Limits {
        self.inner.limits()
    }

    async fn begin(&self) -> Result<Arc<dyn Txn>> {
        self.keeper.pass().await?;
        self.inner.begin().await
    }

    async fn sync(&self) -> Result<()> {
        self.keeper.pass().await?;
        self.inner.sync().await
    }

    async fn watch(&self, key: &[u8]) -> Result<Watch> {
        self.inner.watch(key).await
    }

    async fn close(&self) -> Result<()> {
        self.inner.close().await
    }
}

//! The time, injected, so that tests and simulation decide what it is.

use parking_lot::Mutex;

use super::Timestamp;

/// Where wall time comes from.
pub trait Clock: Send + Sync + 'static {
    /// The time now.
    fn now(&self) -> Timestamp;
}

/// The machine's clock.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> Timestamp {
        #[expect(clippy::disallowed_methods, reason = "the one place that asks the machine")]
        let now = std::time::SystemTime::now();
        Timestamp::from(now)
    }
}

/// A clock that stands still until it is set.
#[derive(Debug)]
pub struct ManualClock(Mutex<Timestamp>);

impl ManualClock {
    /// A clock that shows `now`.
    pub fn new(now: Timestamp) -> ManualClock {
        ManualClock(Mutex::new(now))
    }

    /// Sets the time.
    pub fn set(&self, now: Timestamp) {
        *self.0.lock() = now;
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Timestamp {
        *self.0.lock()
    }
}

//! The client library's network thread: one a process, started by the first volume, stopped at the process's end.
#![expect(unsafe_code, reason = "starting the network thread is unsafe in the bindings")]

use foundationdb::api::{FdbApiBuilder, NetworkAutoStop};
use parking_lot::Mutex;

use crate::OpenError;

enum Network {
    Never,
    Running(#[expect(dead_code, reason = "dropping it stops the thread")] NetworkAutoStop),
    Stopped,
}

static NETWORK: Mutex<Network> = Mutex::new(Network::Never);

/// Starts the thread unless it runs.
pub(crate) fn start() -> Result<(), OpenError> {
    let mut network = NETWORK.lock();
    match *network {
        Network::Running(_) => Ok(()),
        Network::Stopped => Err(OpenError::Client("its network thread was stopped already".to_owned())),
        Network::Never => {
            let failed = |e: foundationdb::FdbError| OpenError::Client(e.to_string());
            let builder = FdbApiBuilder::default().build().map_err(failed)?;
            // SAFETY: called once a process (the lock and the state see to it), and `stop_network` drops the handle
            // before the process ends.
            *network = Network::Running(unsafe { builder.boot() }.map_err(failed)?);
            Ok(())
        }
    }
}

/// Stops the network thread, if it was started. The program calls it before it ends; no volume of this engine can
/// be used afterwards.
pub fn stop_network() {
    let mut network = NETWORK.lock();
    if matches!(*network, Network::Running(_)) {
        *network = Network::Stopped;
    }
}

//! The stores against one suite, real servers included, and what happens when servers and networks fail.
#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod conformance;
mod local;
mod network;
mod probe;
mod servers;

//! Object stores for rfs: S3 (with credentials, signer and HTTP client of the AWS SDK), a local directory that keeps
//! what it acknowledged, and memory, all behind the `object_store` crate's [`ObjectStore`](object_store::ObjectStore) trait.
//!
//! [`open_store`] makes one from a URL and puts the decorators around it:
//!
//! | URL | stack, outermost first |
//! |---|---|
//! | `s3://bucket/prefix?…` | [`Retrying`], [`Metered`], [`Limited`], [`S3Store`] |
//! | `file:///directory` | [`Metered`], [`DurableLocal`] |
//! | `memory://` | [`Metered`], `InMemory` |
//!
//! So a request waits for its slot inside the retry loop, every request that costs money is counted, and there is one
//! retry loop (the SDK's is off). What a failure means to the caller is decided in one place, [`classify`].
//!
//! This crate refuses to know what the objects are: it never hears of packs, slices or files.

mod config;
mod durable_local;
mod error;
mod fault;
mod limited;
mod metered;
mod open;
mod probe;
mod remote;
mod retry;
mod s3;

pub use aws_credential_types::Credentials;
pub use config::S3Config;
pub use durable_local::DurableLocal;
pub use error::{Cause, RequestError, StoreError, StoreFailure, classify, is_transient};
pub use fault::{FaultPlan, FaultStore, Outage};
pub use limited::Limited;
pub use metered::{Metered, StoreMetrics, StoreSnapshot, Verb, VerbSnapshot};
pub use open::{MissingDirectory, StoreOptions, open_store};
pub use probe::{ProbeError, ProbeReport, ProbeStep, probe, remedy};
pub use remote::{ListPage, Listing, RemoteStore};
pub use retry::{RetryConfig, Retrying};
pub use s3::S3Store;

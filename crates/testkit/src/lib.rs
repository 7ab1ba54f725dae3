//! Real servers and a faulty network for tests: nothing of this is part of the product.
//!
//! Owns: starting, killing and restarting S3 servers on free loopback ports ([`Versitygw`], [`SeaweedFs`]), and a TCP
//! proxy whose faults are switched while it runs ([`FaultProxy`]); and bytes to write ([`noise`]). Everything here is synchronous, so that tests with
//! and without an async runtime can use it, and everything stops when its guard is dropped.
//!
//! It refuses to know any crate of the filesystem: whatever is tested may depend on it.
//!
//! A server whose program is not installed is *skipped* with one clear line ([`or_skip`]); with
//! `RFS_REQUIRE_SERVERS=1` in the environment that is a failure instead.

mod fdb;
mod noise;
mod process;
mod proxy;
mod seaweedfs;
mod tls;
mod versitygw;

pub use fdb::FdbServer;
pub use noise::noise;
pub use process::{StartError, find_program, free_port, or_skip, wait_until};
pub use proxy::{Fault, FaultProxy};
pub use seaweedfs::SeaweedFs;
pub use tls::TestCertificate;
pub use versitygw::{Versitygw, VersitygwOptions};

/// What a test needs to know of a running S3 server, whichever it is.
pub trait S3Server: Send + Sync {
    /// The server's name, for messages.
    fn name(&self) -> &'static str;
    /// `http://127.0.0.1:PORT` or `https://localhost:PORT`.
    fn endpoint(&self) -> String;
    /// Host and port alone, `127.0.0.1:PORT`, for a [`FaultProxy`] in front.
    fn address(&self) -> std::net::SocketAddr;
    /// The access key of a user who may do everything.
    fn access_key(&self) -> &str;
    /// The secret key that belongs to [`S3Server::access_key`].
    fn secret_key(&self) -> &str;
    /// The region that requests must be signed for.
    fn region(&self) -> &'static str {
        "us-east-1"
    }
    /// Makes a bucket (3 to 63 characters; making it twice is fine).
    ///
    /// # Errors
    /// The server or its directory refused.
    fn create_bucket(&self, bucket: &str) -> std::io::Result<()>;
    /// Ends the server at once (SIGKILL), as a crash would. Its files stay.
    fn kill(&mut self);
    /// Starts the server again on the same port and files, and waits until it answers.
    ///
    /// # Errors
    /// It did not come up.
    fn restart(&mut self) -> Result<(), StartError>;

    /// The URL that `rfs format` takes for `bucket` and `prefix` on this server.
    fn store_url(&self, bucket: &str, prefix: &str) -> String {
        store_url(&self.endpoint(), self.region(), bucket, prefix)
    }
    /// The environment variables by which the AWS credential chain finds this server's user.
    fn credentials_env(&self) -> Vec<(&'static str, String)> {
        vec![
            ("AWS_ACCESS_KEY_ID", self.access_key().to_owned()),
            ("AWS_SECRET_ACCESS_KEY", self.secret_key().to_owned()),
            ("AWS_EC2_METADATA_DISABLED", "true".to_owned()),
        ]
    }
}

/// A store URL for `bucket`/`prefix` at `endpoint` (for instance that of a [`FaultProxy`]).
pub fn store_url(endpoint: &str, region: &str, bucket: &str, prefix: &str) -> String {
    let slash = if prefix.is_empty() { "" } else { "/" };
    format!("s3://{bucket}{slash}{prefix}?endpoint={endpoint}&region={region}&path_style=true")
}

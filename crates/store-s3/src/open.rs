//! A store from its URL, with its decorators.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use aws_credential_types::Credentials;
use object_store::ObjectStore;
use object_store::memory::InMemory;
use url::Url;

use crate::{
    DurableLocal, Limited, Metered, RetryConfig, Retrying, S3Config, S3Store, StoreError, StoreMetrics,
};

/// What to do when the directory of a `file://` URL is not there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum MissingDirectory {
    /// Make it (when a volume is made).
    Create,
    /// Refuse: its disk may not be mounted (everywhere else).
    #[default]
    Fail,
}

/// How to open a store, besides its URL.
#[derive(Debug, Clone, Default)]
pub struct StoreOptions {
    /// How long requests to a server are repeated; `None`: 300 s; zero: for ever.
    pub io_timeout: Option<Duration>,
    /// What to do when a local directory is not there.
    pub missing_directory: MissingDirectory,
    /// Where requests are counted; keep a clone to read it.
    pub metrics: Arc<StoreMetrics>,
    /// Credentials to use instead of the AWS chain's.
    pub credentials: Option<Credentials>,
    /// Where the random numbers of the retry pauses begin; `None`: anywhere.
    pub retry_seed: Option<u64>,
}

/// Opens the store that `url` names: `s3://bucket/prefix?…` (see [`S3Config::from_url`]), `file:///directory` or
/// `memory://`. Nothing is sent to an S3 server yet; [`probe`](crate::probe()) does that.
///
/// # Errors
/// `InvalidUrl`, `Config`, and for local directories `NoDirectory` and `Directory`.
pub async fn open_store(url: &str, options: &StoreOptions) -> Result<Arc<dyn ObjectStore>, StoreError> {
    let metrics = Arc::clone(&options.metrics);
    let invalid = |reason: String| StoreError::InvalidUrl { url: url.to_owned(), reason };
    let scheme = url.split_once("://").map_or("", |(scheme, _)| scheme);
    match scheme {
        "s3" => {
            let config = S3Config::from_url(url)?;
            let usual = RetryConfig { seed: options.retry_seed, ..RetryConfig::default() };
            let io_timeout = options.io_timeout.unwrap_or(usual.io_timeout);
            let retry = RetryConfig { io_timeout, ..usual };
            let in_flight = config.max_in_flight;
            let store =
                Limited::new(S3Store::connect_as(config, options.credentials.clone()).await?, in_flight);
            Ok(Arc::new(Retrying::new(Metered::new(store, Arc::clone(&metrics)), retry, metrics)))
        }
        "file" => {
            let directory = Url::parse(url).map_err(|e| invalid(e.to_string()))?;
            if let Some(query) = directory.query() {
                return Err(invalid(format!("a directory has no parameters, but it says ?{query}")));
            }
            let path = directory
                .to_file_path()
                .map_err(|()| invalid("write it as file:///absolute/path (three slashes)".to_owned()))?;
            let store = DurableLocal::open(Path::new(&path), options.missing_directory).await?;
            Ok(Arc::new(Metered::new(store, metrics)))
        }
        "memory" => Ok(Arc::new(Metered::new(InMemory::new(), metrics))),
        _ => Err(invalid(
            "a store is s3://bucket/prefix?endpoint=…&region=…, file:///directory or memory://".to_owned(),
        )),
    }
}

//! Credentials for the requests that this crate signs: from the SDK's chain, kept until shortly before they expire.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use aws_credential_types::provider::error::CredentialsError;
use aws_credential_types::provider::{ProvideCredentials, SharedCredentialsProvider};
use aws_smithy_runtime_api::client::identity::Identity;
use parking_lot::RwLock;

use super::answer::credentials_error;
use crate::RequestError;

/// Credentials are asked for again this long before they expire, as the SDK does.
const EXPIRY_MARGIN: Duration = Duration::from_secs(10);
/// Credentials that do not say when they expire are asked for again after this time, as the SDK does.
const AGE_MAX: Duration = Duration::from_mins(15);
/// How long a provider may take.
const LOAD_TIMEOUT: Duration = Duration::from_secs(5);

/// The present, which signatures are made for.
#[expect(clippy::disallowed_methods, reason = "S3 compares signatures and expiry with the real time")]
pub(super) fn now() -> SystemTime {
    SystemTime::now()
}

/// The credentials to sign with.
#[derive(Debug)]
pub(super) struct Identities {
    provider: SharedCredentialsProvider,
    kept: RwLock<Option<Kept>>,
    /// Held by who asks the provider, so that one does.
    loading: tokio::sync::Mutex<()>,
}

#[derive(Debug)]
struct Kept {
    identity: Arc<Identity>,
    until: SystemTime,
}

impl Identities {
    pub(super) fn new(provider: SharedCredentialsProvider) -> Identities {
        Identities { provider, kept: RwLock::new(None), loading: tokio::sync::Mutex::default() }
    }

    fn kept(&self) -> Option<Arc<Identity>> {
        let kept = self.kept.read();
        kept.as_ref().filter(|kept| now() < kept.until).map(|kept| Arc::clone(&kept.identity))
    }

    /// The kept credentials if they still serve, else the provider's.
    pub(super) async fn get(&self, operation: &'static str) -> Result<Arc<Identity>, RequestError> {
        if let Some(identity) = self.kept() {
            return Ok(identity);
        }
        let _loading = self.loading.lock().await;
        if let Some(identity) = self.kept() {
            return Ok(identity);
        }
        let loaded = tokio::time::timeout(LOAD_TIMEOUT, self.provider.provide_credentials())
            .await
            .unwrap_or_else(|_| Err(CredentialsError::provider_timed_out(LOAD_TIMEOUT)))
            .map_err(|error| credentials_error(operation, error))?;
        let until = loaded.expiry().map_or_else(
            || now() + AGE_MAX,
            |expiry| expiry.checked_sub(EXPIRY_MARGIN).unwrap_or(SystemTime::UNIX_EPOCH),
        );
        let identity = Arc::new(Identity::from(loaded));
        *self.kept.write() = Some(Kept { identity: Arc::clone(&identity), until });
        Ok(identity)
    }

    /// The store refused the credentials: the next request asks the provider.
    pub(super) fn forget(&self) {
        *self.kept.write() = None;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use aws_credential_types::Credentials;
    use aws_credential_types::provider::future;

    use super::*;
    use crate::Cause;

    /// Hands out numbered keys that are good for a time.
    #[derive(Debug)]
    struct Numbered {
        count: AtomicU32,
        good_for: Option<Duration>,
    }

    impl ProvideCredentials for Numbered {
        fn provide_credentials<'a>(&'a self) -> future::ProvideCredentials<'a>
        where
            Self: 'a,
        {
            let number = self.count.fetch_add(1, Ordering::Relaxed) + 1;
            let expiry = self.good_for.map(|time| now() + time);
            future::ProvideCredentials::ready(Ok(Credentials::new(
                format!("key-{number}"),
                "s",
                None,
                expiry,
                "test",
            )))
        }
    }

    fn numbered(good_for: Option<Duration>) -> Identities {
        Identities::new(SharedCredentialsProvider::new(Numbered { count: AtomicU32::new(0), good_for }))
    }

    async fn key(identities: &Identities) -> String {
        let identity = identities.get("GetObject").await.unwrap();
        identity.data::<Credentials>().unwrap().access_key_id().to_owned()
    }

    #[tokio::test]
    async fn credentials_are_kept_until_they_expire_or_are_refused() {
        for good_for in [None, Some(Duration::from_hours(1))] {
            let lasting = numbered(good_for);
            assert_eq!(key(&lasting).await, "key-1");
            assert_eq!(key(&lasting).await, "key-1");
            lasting.forget();
            assert_eq!(key(&lasting).await, "key-2");
        }
        // Within the margin they no longer serve.
        let expiring = numbered(Some(EXPIRY_MARGIN / 2));
        assert_eq!(key(&expiring).await, "key-1");
        assert_eq!(key(&expiring).await, "key-2");
    }

    #[derive(Debug)]
    struct Silent;

    impl ProvideCredentials for Silent {
        fn provide_credentials<'a>(&'a self) -> future::ProvideCredentials<'a>
        where
            Self: 'a,
        {
            future::ProvideCredentials::new(std::future::pending())
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_provider_that_does_not_answer_is_given_up() {
        let identities = Identities::new(SharedCredentialsProvider::new(Silent));
        let error = identities.get("PutObject").await.unwrap_err();
        assert_eq!(error.cause(), Cause::ExpiredCredentials);
    }
}

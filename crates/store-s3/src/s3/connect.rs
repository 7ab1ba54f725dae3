//! The SDK's client, and what sends requests beside it, from an [`S3Config`]: TLS, credentials, and everything of the SDK
//! that is turned off.

use std::path::Path;

use aws_config::environment::EnvironmentVariableRegionProvider;
use aws_config::meta::region::RegionProviderChain;
use aws_config::profile::ProfileFileRegionProvider;
use aws_config::{BehaviorVersion, Region};
use aws_credential_types::Credentials;
use aws_credential_types::provider::error::CredentialsError;
use aws_credential_types::provider::{ProvideCredentials, SharedCredentialsProvider, future};
use aws_sdk_s3::Client;
use aws_sdk_s3::config::retry::RetryConfig;
use aws_sdk_s3::config::timeout::TimeoutConfig;
use aws_sdk_s3::config::{
    RequestChecksumCalculation, ResponseChecksumValidation, StalledStreamProtectionConfig,
};
use aws_smithy_http_client::tls::rustls_provider::CryptoMode;
use aws_smithy_http_client::tls::{Provider, TlsContext, TrustStore};
use aws_smithy_http_client::{Builder, Connector};
use aws_smithy_runtime_api::client::http::HttpConnectorSettings;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;

use super::direct::Direct;
use super::identity::Identities;
use crate::{S3Config, StoreError};

/// What servers that know no regions call theirs.
const REGION_DEFAULT: &str = "us-east-1";

/// Makes both. Reads the environment and the AWS profile files; credentials are looked for at the first request.
pub(super) async fn connect(
    config: &S3Config,
    credentials: Option<Credentials>,
) -> Result<(Client, Direct), StoreError> {
    let tls = Provider::Rustls(CryptoMode::Ring);
    let context = tls_context(config.ca_bundle.as_deref())?;
    let https = Builder::new().tls_provider(tls.clone()).tls_context(context.clone()).build_https();
    let timeouts = TimeoutConfig::builder().connect_timeout(config.connect_timeout).build();
    let mut loader = aws_config::defaults(BehaviorVersion::v2026_01_12())
        .http_client(https.clone())
        // A repeated request is the business of the retry loop, a stalled one of the attempt's watch.
        .retry_config(RetryConfig::disabled())
        .stalled_stream_protection(StalledStreamProtectionConfig::disabled())
        .timeout_config(timeouts);
    if let Some(region) = &config.region {
        loader = loader.region(Region::new(region.clone()));
    }
    if let Some(endpoint) = &config.endpoint {
        loader = loader.endpoint_url(endpoint);
        if config.region.is_none() {
            // The chain's last resort is to ask the cloud machine it may run on, which takes seconds where there is none.
            let chain = RegionProviderChain::first_try(EnvironmentVariableRegionProvider::new())
                .or_else(ProfileFileRegionProvider::new())
                .or_else(Region::from_static(REGION_DEFAULT));
            loader = loader.region(chain);
        }
    }
    if let Some(credentials) = credentials {
        loader = loader.credentials_provider(credentials);
    }
    let shared = loader.load().await;
    let region = shared.region().cloned().unwrap_or(Region::from_static(REGION_DEFAULT));
    let mut builder = aws_sdk_s3::config::Builder::from(&shared)
        .region(region)
        .force_path_style(config.path_style)
        .request_checksum_calculation(RequestChecksumCalculation::WhenRequired)
        .response_checksum_validation(ResponseChecksumValidation::WhenRequired);
    let settings = HttpConnectorSettings::builder().connect_timeout(config.connect_timeout).build();
    let connector = Connector::builder().connector_settings(settings);
    let connector = if shared.endpoint_url().is_some_and(|url| url.starts_with("http://")) {
        // Without TLS there is no need for certificates, which a small container may not have.
        builder = builder.http_client(Builder::new().build_http());
        connector.build_http()
    } else {
        connector.tls_provider(tls).tls_context(context).build()
    };
    let provider =
        shared.credentials_provider().unwrap_or_else(|| SharedCredentialsProvider::new(NoProvider));
    Ok((Client::from_conf(builder.build()), Direct::new(connector, Identities::new(provider))))
}

/// What stands for a chain that does not exist.
#[derive(Debug)]
struct NoProvider;

impl ProvideCredentials for NoProvider {
    fn provide_credentials<'a>(&'a self) -> future::ProvideCredentials<'a>
    where
        Self: 'a,
    {
        future::ProvideCredentials::ready(Err(CredentialsError::not_loaded("no credentials are configured")))
    }
}

fn tls_context(ca_bundle: Option<&Path>) -> Result<TlsContext, StoreError> {
    let mut trust = TrustStore::default();
    if let Some(path) = ca_bundle {
        trust = trust.with_pem_certificate(checked_bundle(path)?);
    }
    TlsContext::builder()
        .with_trust_store(trust)
        .build()
        .map_err(|e| StoreError::Config(format!("cannot set up TLS: {e}")))
}

/// The bundle's text. It is checked here because the HTTP client panics on one that does not parse.
fn checked_bundle(path: &Path) -> Result<Vec<u8>, StoreError> {
    let unusable = |why: String| StoreError::Config(format!("CA bundle {}: {why}", path.display()));
    let pem = std::fs::read(path).map_err(|e| unusable(e.to_string()))?;
    let certificates: Vec<CertificateDer<'_>> = CertificateDer::pem_slice_iter(&pem)
        .collect::<Result<_, _>>()
        .map_err(|e| unusable(format!("not PEM: {e}")))?;
    if certificates.is_empty() {
        return Err(unusable("holds no certificate".to_owned()));
    }
    let mut roots = rustls::RootCertStore::empty();
    for certificate in certificates {
        roots.add(certificate).map_err(|e| unusable(e.to_string()))?;
    }
    Ok(pem)
}

/// Encodes a key for a URL or a header; slashes stay.
pub(super) fn percent_encode(key: &str) -> String {
    let mut encoded = String::with_capacity(key.len());
    for byte in key.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            const HEX: &[u8; 16] = b"0123456789ABCDEF";
            encoded.push('%');
            encoded.push(char::from(HEX[usize::from(byte >> 4)]));
            encoded.push(char::from(HEX[usize::from(byte & 15)]));
        }
    }
    encoded
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bundle_that_does_not_parse_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ca.pem");
        let message = |path: &Path| checked_bundle(path).unwrap_err().to_string();
        assert!(message(&path).contains("No such file"));
        std::fs::write(&path, "hello").unwrap();
        assert!(message(&path).contains("holds no certificate"));
        std::fs::write(&path, "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n").unwrap();
        assert!(message(&path).contains("CA bundle"));
    }

    #[test]
    fn copy_sources_are_encoded() {
        assert_eq!(percent_encode("a/b c+é"), "a/b%20c%2B%C3%A9");
    }
}

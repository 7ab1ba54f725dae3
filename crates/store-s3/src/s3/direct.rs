//! Requests about one object, without the SDK's machinery around them.
//!
//! The SDK's pipeline costs several times what signing and sending do. So the requests that there are many of (PUT, a
//! part, GET, HEAD, DELETE) are put together here, signed by the SDK's own signer, and sent by its HTTP client. Where
//! they go to and which region they are signed for is asked of the SDK once ([`Route`]), so that its rules for endpoints
//! hold here too. Credentials come from the SDK's chain ([`super::identity`]).
//!
//! Owns: the shape of these requests. Refuses: what their answers mean ([`super::answer`]) and how long they may take.

use std::borrow::Cow;
use std::time::Duration;

use aws_sdk_s3::Client;
use aws_sdk_s3::config::http::{HttpRequest, HttpResponse};
use aws_sdk_s3::presigning::PresigningConfig;
use aws_sdk_s3::primitives::{ByteStream, SdkBody};
use aws_sigv4::http_request::{
    PayloadChecksumKind, PercentEncodingMode, SignableBody, SignableRequest, SigningSettings,
    UriPathNormalizationMode, sign,
};
use aws_sigv4::sign::v4;
use aws_smithy_http_client::Connector;
use aws_smithy_runtime_api::client::http::HttpConnector;
use tokio::sync::OnceCell;
use url::form_urlencoded;

use super::answer::{connector_error, refused, request_error};
use super::body::SlicedBody;
use super::connect::percent_encode;
use super::identity::Identities;
use crate::{Cause, RequestError};

/// What a request without a body is signed with: the SHA-256 of nothing.
const NOTHING_SHA256: &str = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
const USER_AGENT: &str = concat!("rfs/", env!("CARGO_PKG_VERSION"));
/// How much of a refusal is read.
const REFUSAL_BYTES_MAX: usize = 64 << 10;

/// One request about one object.
pub(super) struct Call {
    operation: &'static str,
    method: &'static str,
    key: String,
    query: Vec<(&'static str, String)>,
    headers: Vec<(Cow<'static, str>, String)>,
    body: Option<SlicedBody>,
}

impl Call {
    /// `operation` is S3's name for it, for messages.
    pub(super) fn new(operation: &'static str, method: &'static str, key: String) -> Call {
        Call { operation, method, key, query: Vec::new(), headers: Vec::new(), body: None }
    }

    pub(super) fn operation(&self) -> &'static str {
        self.operation
    }

    /// With a query parameter, if there is a value.
    pub(super) fn query(mut self, name: &'static str, value: Option<String>) -> Call {
        self.query.extend(value.map(|value| (name, value)));
        self
    }

    /// With a header, if there is a value.
    pub(super) fn header(mut self, name: impl Into<Cow<'static, str>>, value: Option<String>) -> Call {
        self.headers.extend(value.map(|value| (name.into(), value)));
        self
    }

    /// With a body, which is not signed.
    pub(super) fn body(mut self, body: SlicedBody) -> Call {
        self.headers.push(("content-length".into(), body.len().to_string()));
        self.body = Some(body);
        self
    }
}

/// Where the objects of a bucket are and what requests about them are signed for.
#[derive(Debug, PartialEq, Eq)]
struct Route {
    /// What comes before a key: `http://host:port/bucket/`, `https://bucket.host/`.
    base: String,
    region: String,
    service: String,
}

/// The key that the SDK is asked about.
const SAMPLE_KEY: &str = "key";

impl Route {
    /// The route behind a presigned URL of [`SAMPLE_KEY`]; `None` if it is not signed as other requests are.
    fn of_presigned(url: &str) -> Option<Route> {
        let (object, query) = url.split_once('?')?;
        let base = object.strip_suffix(SAMPLE_KEY)?.to_owned();
        let value =
            |name: &str| form_urlencoded::parse(query.as_bytes()).find(|(n, _)| n == name).map(|(_, v)| v);
        if value("X-Amz-Algorithm")? != "AWS4-HMAC-SHA256" || value("X-Amz-S3session-Token").is_some() {
            return None;
        }
        // KEY/20261121/REGION/SERVICE/aws4_request
        let credential = value("X-Amz-Credential")?;
        let mut scope = credential.rsplit('/').skip(1);
        let (service, region) = (scope.next()?.to_owned(), scope.next()?.to_owned());
        Some(Route { base, region, service })
    }
}

/// What sends [`Call`]s.
pub(super) struct Direct {
    connector: Connector,
    identities: Identities,
    route: OnceCell<Route>,
}

impl Direct {
    pub(super) fn new(connector: Connector, identities: Identities) -> Direct {
        Direct { connector, identities, route: OnceCell::new() }
    }

    /// Sends `call`, made for `bucket` as `client` would. An answer that is no success is an error.
    pub(super) async fn send(
        &self,
        client: &Client,
        bucket: &str,
        call: Call,
    ) -> Result<HttpResponse, RequestError> {
        let operation = call.operation;
        let route = self.route.get_or_try_init(|| ask_route(client, bucket, operation)).await?;
        let request = self.signed(route, call).await?;
        let response =
            self.connector.call(request).await.map_err(|error| connector_error(operation, error))?;
        if response.status().is_success() {
            return Ok(response);
        }
        let error = refusal(operation, response).await;
        if matches!(error.cause(), Cause::Credentials | Cause::ExpiredCredentials) {
            self.identities.forget();
        }
        Err(error)
    }

    async fn signed(&self, route: &Route, call: Call) -> Result<HttpRequest, RequestError> {
        let Call { operation, method, key, query, headers, body } = call;
        let invalid = |what: &str| RequestError::new(Cause::Invalid, operation, what.to_owned());
        let mut uri = route.base.clone();
        uri.push_str(&percent_encode(&key));
        for (index, (name, value)) in query.iter().enumerate() {
            uri.push(if index == 0 { '?' } else { '&' });
            uri.push_str(name);
            uri.push('=');
            // A slash may stand in a key, not in a parameter.
            uri.push_str(&percent_encode(value).replace('/', "%2F"));
        }
        let identity = self.identities.get(operation).await?;
        let mut settings = SigningSettings::default();
        settings.percent_encoding_mode = PercentEncodingMode::Single;
        settings.payload_checksum_kind = PayloadChecksumKind::XAmzSha256;
        settings.uri_path_normalization_mode = UriPathNormalizationMode::Disabled;
        let params = v4::SigningParams::builder()
            .identity(&identity)
            .region(&route.region)
            .name(&route.service)
            .time(super::identity::now())
            .settings(settings)
            .build()
            .expect("everything is given")
            .into();
        let signable_body = match body {
            Some(_) => SignableBody::UnsignedPayload,
            None => SignableBody::Precomputed(NOTHING_SHA256.to_owned()),
        };
        let signable_headers = headers.iter().map(|(name, value)| (name.as_ref(), value.as_str()));
        let signable = SignableRequest::new(method, uri.as_str(), signable_headers, signable_body)
            .map_err(|error| invalid("the request cannot be signed").with_source(error))?;
        let (instructions, _) = sign(signable, &params)
            .map_err(|error| invalid("the request cannot be signed").with_source(error))?
            .into_parts();

        let body = body.map_or_else(SdkBody::empty, SdkBody::from_body_1_x);
        let mut request = HttpRequest::new(body);
        request.set_method(method).map_err(|error| invalid("bad method").with_source(error))?;
        request.set_uri(uri).map_err(|error| invalid("bad address").with_source(error))?;
        let to = request.headers_mut();
        let bad_header = |error| invalid("bad header").with_source(error);
        to.insert("user-agent", USER_AGENT);
        for (name, value) in headers {
            to.try_insert(name, value).map_err(bad_header)?;
        }
        for header in instructions.into_parts().0 {
            to.try_insert(header.name(), header.value().to_owned()).map_err(bad_header)?;
        }
        Ok(request)
    }
}

/// Lets the SDK sign a request for an object, and looks where it would have gone. Nothing is sent.
async fn ask_route(client: &Client, bucket: &str, operation: &'static str) -> Result<Route, RequestError> {
    let config = PresigningConfig::expires_in(Duration::from_mins(1)).expect("a minute is allowed");
    let request = client.get_object().bucket(bucket).key(SAMPLE_KEY).presigned(config).await;
    let request = request.map_err(|error| request_error(operation, error))?;
    Route::of_presigned(request.uri()).ok_or_else(|| {
        let message = "buckets that need sessions or multi-region signatures are not supported";
        RequestError::new(Cause::Unsupported, operation, message)
    })
}

/// The error that an answer without success stands for.
async fn refusal(operation: &'static str, response: HttpResponse) -> RequestError {
    let status = response.status().as_u16();
    let request_id = response.headers().get("x-amz-request-id").map(str::to_owned);
    let mut body = ByteStream::new(response.into_body());
    let mut text = Vec::new();
    while text.len() < REFUSAL_BYTES_MAX
        && let Some(Ok(bytes)) = body.next().await
    {
        text.extend_from_slice(&bytes);
    }
    refused(operation, status, request_id.as_deref(), &String::from_utf8_lossy(&text))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use aws_credential_types::Credentials;
    use aws_credential_types::provider::{ProvideCredentials, SharedCredentialsProvider, future};
    use rfs_testkit::{S3Server, Versitygw, or_skip};

    use super::*;
    use crate::S3Config;
    use crate::s3::body::Progress;
    use crate::s3::connect::connect;

    fn route(base: &str, region: &str, service: &str) -> Route {
        Route { base: base.into(), region: region.into(), service: service.into() }
    }

    #[test]
    fn a_presigned_url_tells_the_route() {
        let signed = "X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=A%2FB%2F20261121%2Feu-north-1%2Fs3%2Faws4_request&X-Amz-Date=20261121T000000Z";
        for base in [
            "http://127.0.0.1:7070/bucket/",
            "https://bucket.s3.eu-north-1.amazonaws.com/",
            "http://[::1]:80/base/path/key/",
        ] {
            let url = format!("{base}key?x-id=GetObject&{signed}");
            assert_eq!(Route::of_presigned(&url), Some(route(base, "eu-north-1", "s3")), "{url}");
        }
        let session = format!("https://b/key?{signed}&X-Amz-S3session-Token=t");
        assert_eq!(Route::of_presigned(&session), None);
        let other = signed.replace("AWS4-HMAC", "AWS4-ECDSA-P256");
        assert_eq!(Route::of_presigned(&format!("https://b/key?{other}")), None);
    }

    /// Both clients for a store URL, with temporary credentials.
    async fn connected(url: &str) -> (S3Config, Client, Direct) {
        let config = S3Config::from_url(url).unwrap();
        let credentials = Credentials::new("A", "B", Some("token".to_owned()), None, "test");
        let (client, direct) = connect(&config, Some(credentials)).await.unwrap();
        (config, client, direct)
    }

    #[tokio::test]
    async fn the_route_is_the_sdks() {
        for (url, base, region) in [
            ("s3://bucket?region=eu-north-1", "https://bucket.s3.eu-north-1.amazonaws.com/", "eu-north-1"),
            (
                "s3://bucket?region=eu-north-1&path_style=true",
                "https://s3.eu-north-1.amazonaws.com/bucket/",
                "eu-north-1",
            ),
            ("s3://bucket?region=r&endpoint=http://127.0.0.1:7070", "http://127.0.0.1:7070/bucket/", "r"),
            (
                "s3://bucket?region=r&endpoint=https://s.example&path_style=false",
                "https://bucket.s.example/",
                "r",
            ),
            (
                "s3://bucket?region=r&endpoint=http://s.example:9000/base/path",
                "http://s.example:9000/base/path/bucket/",
                "r",
            ),
        ] {
            let (config, client, _) = connected(url).await;
            let found = ask_route(&client, &config.bucket, "PutObject").await.unwrap();
            assert_eq!(found, route(base, region, "s3"), "{url}");
        }
    }

    #[tokio::test]
    async fn a_request_is_encoded_and_signed_with_its_session() {
        let (config, client, direct) =
            connected("s3://bucket?region=r&endpoint=http://s.example:9000/base").await;
        let route = ask_route(&client, &config.bucket, "UploadPart").await.unwrap();
        let call = Call::new("UploadPart", "PUT", "dir/a b+c%é~".to_owned())
            .query("partNumber", Some("1".to_owned()))
            .query("uploadId", Some("x/y+z=".to_owned()))
            .query("versionId", None)
            .header("x-amz-meta-colour", Some("blue".to_owned()))
            .body(SlicedBody::new("12345".into(), Progress::default()));
        let request = direct.signed(&route, call).await.unwrap();
        assert_eq!(
            request.uri(),
            "http://s.example:9000/base/bucket/dir/a%20b%2Bc%25%C3%A9~?partNumber=1&uploadId=x%2Fy%2Bz%3D"
        );
        let header = |name: &str| request.headers().get(name).unwrap_or_default().to_owned();
        assert_eq!(header("content-length"), "5");
        assert_eq!(header("x-amz-content-sha256"), "UNSIGNED-PAYLOAD");
        assert_eq!(header("x-amz-security-token"), "token");
        let signed = "SignedHeaders=content-length;host;x-amz-content-sha256;x-amz-date;x-amz-meta-colour;x-amz-security-token,";
        assert!(header("authorization").contains(signed), "{}", header("authorization"));

        let call = Call::new("PutObject", "PUT", "k".to_owned())
            .header("x-amz-meta-colour", Some("line\nbreak".to_owned()));
        assert_eq!(direct.signed(&route, call).await.unwrap_err().cause(), Cause::Invalid);
    }

    /// Hands out a wrong secret first and the right one from then on, as after a rotation.
    #[derive(Debug)]
    struct Rotated {
        asked: AtomicBool,
        good: Credentials,
    }

    impl ProvideCredentials for Rotated {
        fn provide_credentials<'a>(&'a self) -> future::ProvideCredentials<'a>
        where
            Self: 'a,
        {
            let credentials = if self.asked.swap(true, Ordering::Relaxed) {
                self.good.clone()
            } else {
                Credentials::new(self.good.access_key_id(), "old", None, None, "test")
            };
            future::ProvideCredentials::ready(Ok(credentials))
        }
    }

    #[tokio::test]
    async fn credentials_that_were_refused_are_asked_for_again() {
        let Some(server) = or_skip(Versitygw::start()) else { return };
        server.create_bucket("suite").unwrap();
        let (_, client, direct) = connected(&server.store_url("suite", "")).await;
        let good = Credentials::new(server.access_key(), server.secret_key(), None, None, "test");
        let provider = Rotated { asked: AtomicBool::new(false), good };
        let identities = Identities::new(SharedCredentialsProvider::new(provider));
        let direct = Direct { identities, ..direct };
        let put = || {
            let body = SlicedBody::new("12345".into(), Progress::default());
            direct.send(&client, "suite", Call::new("PutObject", "PUT", "a b/é".to_owned()).body(body))
        };
        assert_eq!(put().await.unwrap_err().cause(), Cause::Credentials);
        put().await.unwrap();
        assert_eq!(std::fs::read(server.bucket_dir("suite").join("a b/é")).unwrap(), b"12345");
    }
}

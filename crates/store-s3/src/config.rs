//! Settings of an S3 store and the URL they are written as.
//!
//! Plain data: nothing here opens anything. Credentials are no settings; they come from the AWS chain.

use std::path::PathBuf;
use std::time::Duration;

use object_store::path::Path;
use url::Url;

use crate::StoreError;

/// Where an S3 store is and how to talk to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct S3Config {
    /// The bucket's name.
    pub bucket: String,
    /// What all keys begin with; empty for the whole bucket.
    pub prefix: Path,
    /// `http://host:port` or `https://…` of a server that is not AWS's; `None`: the AWS chain's (AWS itself).
    pub endpoint: Option<String>,
    /// The region to sign for; `None`: the AWS chain's, else `us-east-1`.
    pub region: Option<String>,
    /// `endpoint/bucket/key` rather than `bucket.endpoint/key`. Default: yes with `endpoint`, no without.
    pub path_style: bool,
    /// A PEM file with certificate authorities to trust besides the system's.
    pub ca_bundle: Option<PathBuf>,
    /// A CRC32C is sent with each object, which the server compares with what it got. Only for servers that refuse the
    /// header `x-amz-checksum-crc32c`: no (yes).
    pub checksums: bool,
    /// How long a connection may take to be made (5 s).
    pub connect_timeout: Duration,
    /// How long an attempt may go without a byte moving in either direction (20 s).
    pub read_timeout: Duration,
    /// How long one attempt may take however well it moves; zero: no limit (300 s).
    pub attempt_timeout: Duration,
    /// How many requests may be in flight at once; more wait (64).
    pub max_in_flight: usize,
}

/// The query parameters of an S3 URL, for the message about one that is unknown.
const PARAMETERS: &str = "endpoint, region, path_style, ca_bundle, checksums, connect_timeout, read_timeout, \
                          attempt_timeout, max_in_flight";

impl S3Config {
    /// The defaults, for `bucket` at AWS.
    pub fn new(bucket: impl Into<String>) -> S3Config {
        S3Config {
            bucket: bucket.into(),
            prefix: Path::default(),
            endpoint: None,
            region: None,
            path_style: false,
            ca_bundle: None,
            checksums: true,
            connect_timeout: Duration::from_secs(5),
            read_timeout: Duration::from_secs(20),
            attempt_timeout: Duration::from_mins(5),
            max_in_flight: 64,
        }
    }

    /// Reads `s3://bucket/prefix?endpoint=http://127.0.0.1:7070&region=us-east-1&…`.
    ///
    /// Every field of this struct is a query parameter. Durations are seconds (`300`) or have a unit (`500ms`, `30s`,
    /// `5m`).
    ///
    /// # Errors
    /// `InvalidUrl`: another scheme, no bucket, credentials in it, an unknown parameter, or a value that does not
    /// parse; the message names it.
    pub fn from_url(url: &str) -> Result<S3Config, StoreError> {
        // The URL is repeated in messages, and a secret that was put into it must not be.
        let invalid = |reason: String| StoreError::InvalidUrl { url: without_credentials(url), reason };
        let parsed = Url::parse(url).map_err(|e| invalid(e.to_string()))?;
        if parsed.scheme() != "s3" {
            return Err(invalid("it does not begin with s3://".to_owned()));
        }
        if !parsed.username().is_empty() || parsed.password().is_some() {
            return Err(invalid(
                "credentials do not belong into the URL: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or use a \
                 profile (AWS_PROFILE)"
                    .to_owned(),
            ));
        }
        if parsed.port().is_some() || parsed.fragment().is_some() {
            return Err(invalid("write it as s3://bucket/prefix?endpoint=http://host:port".to_owned()));
        }
        let bucket = parsed.host_str().unwrap_or_default();
        if bucket.is_empty() {
            return Err(invalid("it names no bucket (s3://bucket/prefix)".to_owned()));
        }
        let mut config = S3Config::new(bucket);
        config.prefix =
            Path::from_url_path(parsed.path()).map_err(|e| invalid(format!("its prefix: {e}")))?;
        let mut path_style = None;
        for (name, value) in parsed.query_pairs() {
            let wrong = |expected: &str| {
                if !value.contains('@') {
                    return invalid(format!("{name}={value}: expected {expected}"));
                }
                // Credentials are in it, so that neither the value nor the URL may be repeated.
                let url = without_credentials(url.split('?').next().unwrap_or_default());
                StoreError::InvalidUrl {
                    url,
                    reason: format!("{name}: expected {expected}, without credentials"),
                }
            };
            let duration =
                || parse_duration(&value).ok_or_else(|| wrong("a duration such as 300, 30s or 5m"));
            match name.as_ref() {
                "endpoint" => config.endpoint = Some(parse_endpoint(&value).map_err(&wrong)?),
                "region" if value.is_empty() => return Err(wrong("a region such as us-east-1")),
                "region" => config.region = Some(value.into_owned()),
                "path_style" => path_style = Some(parse_bool(&value).ok_or_else(|| wrong("true or false"))?),
                "ca_bundle" => config.ca_bundle = Some(PathBuf::from(value.as_ref())),
                "checksums" => config.checksums = parse_bool(&value).ok_or_else(|| wrong("true or false"))?,
                "connect_timeout" => config.connect_timeout = duration()?,
                "read_timeout" => config.read_timeout = duration()?,
                "attempt_timeout" => config.attempt_timeout = duration()?,
                "max_in_flight" => {
                    config.max_in_flight =
                        value.parse().ok().filter(|n| *n > 0).ok_or_else(|| wrong("a number above zero"))?;
                }
                _ => return Err(invalid(format!("unknown parameter {name}; known are {PARAMETERS}"))),
            }
        }
        if config.connect_timeout.is_zero() || config.read_timeout.is_zero() {
            return Err(invalid("connect_timeout and read_timeout must be above zero".to_owned()));
        }
        config.path_style = path_style.unwrap_or(config.endpoint.is_some());
        Ok(config)
    }
}

/// The URL without what stands before an `@` in its authority.
fn without_credentials(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://") else { return url.to_owned() };
    let authority_len = rest.find(['/', '?', '#']).unwrap_or(rest.len());
    match rest[..authority_len].rfind('@') {
        Some(at) => format!("{scheme}://***{}", &rest[at..]),
        None => url.to_owned(),
    }
}

fn parse_endpoint(value: &str) -> Result<String, &'static str> {
    const EXPECTED: &str = "http://host:port or https://host";
    let endpoint = Url::parse(value).map_err(|_| EXPECTED)?;
    let plain = matches!(endpoint.scheme(), "http" | "https")
        && endpoint.has_host()
        && endpoint.username().is_empty()
        && endpoint.query().is_none();
    if !plain {
        return Err(EXPECTED);
    }
    let trimmed = value.trim_end_matches('/');
    // The SDK appends the bucket to a path as it is.
    Ok(if endpoint.path() == "/" { trimmed.to_owned() } else { format!("{trimmed}/") })
}

fn parse_bool(value: &str) -> Option<bool> {
    match value {
        "true" | "1" | "yes" => Some(true),
        "false" | "0" | "no" => Some(false),
        _ => None,
    }
}

fn parse_duration(value: &str) -> Option<Duration> {
    let digits = value.find(|c: char| !c.is_ascii_digit()).unwrap_or(value.len());
    let number: u64 = value[..digits].parse().ok()?;
    match &value[digits..] {
        "" | "s" => Some(Duration::from_secs(number)),
        "ms" => Some(Duration::from_millis(number)),
        "m" | "min" => Some(Duration::from_secs(number.checked_mul(60)?)),
        "h" => Some(Duration::from_secs(number.checked_mul(3600)?)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_sets_everything() {
        let config = S3Config::from_url(
            "s3://bucket/some/prefix?endpoint=http://127.0.0.1:7070/&region=eu-west-1&path_style=false\
             &ca_bundle=/etc/ca.pem&checksums=no&connect_timeout=2&read_timeout=1500ms&attempt_timeout=1m\
             &max_in_flight=7",
        )
        .unwrap();
        let expected = S3Config {
            bucket: "bucket".to_owned(),
            prefix: Path::from("some/prefix"),
            endpoint: Some("http://127.0.0.1:7070".to_owned()),
            region: Some("eu-west-1".to_owned()),
            path_style: false,
            ca_bundle: Some(PathBuf::from("/etc/ca.pem")),
            checksums: false,
            connect_timeout: Duration::from_secs(2),
            read_timeout: Duration::from_millis(1500),
            attempt_timeout: Duration::from_mins(1),
            max_in_flight: 7,
        };
        assert_eq!(config, expected);
    }

    #[test]
    fn path_style_follows_the_endpoint() {
        assert!(!S3Config::from_url("s3://bucket").unwrap().path_style);
        assert!(S3Config::from_url("s3://bucket/?endpoint=http://localhost:1").unwrap().path_style);
        assert!(S3Config::from_url("s3://bucket/").unwrap().prefix.is_root());
    }

    #[test]
    fn a_wrong_url_says_what_is_wrong() {
        for (url, part) in [
            ("s3://bucket?colour=red", "unknown parameter colour; known are endpoint"),
            ("s3://bucket?region=", "expected a region"),
            ("s3://bucket?read_timeout=soon", "read_timeout=soon: expected a duration"),
            ("s3://bucket?max_in_flight=0", "expected a number above zero"),
            ("s3://bucket?endpoint=localhost:80", "expected http://host:port"),
            ("s3://bucket?path_style=maybe", "expected true or false"),
            ("s3:///prefix", "no bucket"),
            ("s3://key:hush@bucket/", "credentials do not belong into the URL"),
            ("s3://bucket:9000/", "endpoint=http://host:port"),
            ("s3://bucket?endpoint=http://key:hush@host", "without credentials"),
            ("s3://bucket?endpoint=http%3A%2F%2Fkey%3Ahush%40host", "without credentials"),
            ("http://bucket/", "does not begin with s3://"),
        ] {
            let message = S3Config::from_url(url).unwrap_err().to_string();
            assert!(message.contains(part), "{url}: {message}");
            assert!(!message.contains("hush"), "{message}");
        }
    }
}

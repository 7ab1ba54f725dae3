//! What S3's answers mean: errors to causes, headers to numbers.

use std::borrow::Cow;
use std::error::Error;
use std::ops::Range;

use aws_credential_types::provider::error::CredentialsError;
use aws_sdk_s3::config::http::HttpResponse;
use aws_sdk_s3::error::{ProvideErrorMetadata, SdkError};
use aws_sdk_s3::operation::RequestId;
use aws_sdk_s3::primitives::{DateTime, DateTimeFormat};
use aws_smithy_runtime_api::client::result::ConnectorError;
use aws_smithy_runtime_api::http::Headers;
use object_store::path::Path;
use object_store::{Attribute, AttributeValue, Attributes, ObjectMeta};

use crate::error::chain;
use crate::{Cause, RequestError};

/// The SDK's error as this crate's.
pub(super) fn request_error<E>(operation: &'static str, error: SdkError<E, HttpResponse>) -> RequestError
where
    E: Error + ProvideErrorMetadata + Send + Sync + 'static,
{
    let status = error.raw_response().map(|response| response.status().as_u16());
    let (cause, message) = match &error {
        SdkError::TimeoutError(_) => (Cause::Timeout, "no answer in time".to_owned()),
        SdkError::ServiceError(service) => {
            let code = service.err().code().unwrap_or_default();
            let said = service.err().message().unwrap_or_default();
            let status = status.unwrap_or_default();
            (cause_of(Some(status), code), refusal_text(status, code, said, error.request_id()))
        }
        SdkError::ResponseError(_) => match status {
            Some(status @ 500..) => (Cause::Server, format!("HTTP {status}")),
            _ => (Cause::Connection, "the answer broke off or makes no sense".to_owned()),
        },
        SdkError::DispatchFailure(failure) => {
            let cause = if let Some(credentials) = find::<CredentialsError>(&error) {
                credentials_cause(credentials)
            } else if failure.is_timeout() {
                Cause::Timeout
            } else if failure.is_user() {
                Cause::Invalid
            } else {
                Cause::Connection
            };
            (cause, innermost(&error))
        }
        _ => match find::<CredentialsError>(&error) {
            Some(credentials) => (credentials_cause(credentials), innermost(&error)),
            None => (Cause::Invalid, innermost(&error)),
        },
    };
    RequestError::new(cause, operation, message).with_source(error)
}

fn refusal_text(status: u16, code: &str, said: &str, request_id: Option<&str>) -> String {
    let id = request_id.map(|id| format!(", request {id}")).unwrap_or_default();
    format!("{code} {said} (HTTP {status}{id})").trim().to_owned()
}

/// The error that an answer with this status and body stands for.
pub(super) fn refused(
    operation: &'static str,
    status: u16,
    request_id: Option<&str>,
    body: &str,
) -> RequestError {
    let code = element(body, "Code").unwrap_or_default();
    let said = element(body, "Message").unwrap_or_default();
    RequestError::new(cause_of(Some(status), code), operation, refusal_text(status, code, said, request_id))
}

/// The text of the first XML element of this name. S3's codes need no unescaping, and its messages are for reading.
fn element<'a>(xml: &'a str, name: &str) -> Option<&'a str> {
    let (_, rest) = xml.split_once(&format!("<{name}>"))?;
    rest.split_once("</").map(|(text, _)| text.trim())
}

/// The HTTP client's error as this crate's.
pub(super) fn connector_error(operation: &'static str, error: ConnectorError) -> RequestError {
    let cause = if error.is_timeout() {
        Cause::Timeout
    } else if error.is_user() {
        Cause::Invalid
    } else {
        Cause::Connection
    };
    RequestError::new(cause, operation, innermost(&error)).with_source(error)
}

/// The error of a credentials provider as this crate's.
pub(super) fn credentials_error(operation: &'static str, error: CredentialsError) -> RequestError {
    RequestError::new(credentials_cause(&error), operation, innermost(&error)).with_source(error)
}

fn credentials_cause(error: &CredentialsError) -> Cause {
    match error {
        // The provider is a service that may come back.
        CredentialsError::ProviderTimedOut(_) | CredentialsError::ProviderError(_) => {
            Cause::ExpiredCredentials
        }
        _ => Cause::Credentials,
    }
}

fn find<'a, T: Error + 'static>(error: &'a (dyn Error + 'static)) -> Option<&'a T> {
    chain(error).find_map(|error| error.downcast_ref())
}

/// The text of the error that all others wrap: the one that says something.
fn innermost(error: &(dyn Error + 'static)) -> String {
    chain(error).last().map_or_else(String::new, ToString::to_string)
}

/// The cause behind S3's error code, or else the HTTP status.
///
/// Codes: <https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html>, what `MinIO` adds
/// for full disks and versitygw for unknown users.
pub(super) fn cause_of(status: Option<u16>, code: &str) -> Cause {
    match code {
        "NoSuchBucket" => Cause::NoBucket,
        "NoSuchKey" | "NoSuchVersion" | "NotFound" => Cause::NotFound,
        "NoSuchUpload" => Cause::NoUpload,
        "InvalidAccessKeyId"
        | "SignatureDoesNotMatch"
        | "InvalidToken"
        | "InvalidSecurity"
        | "XAdminUserNotFound" => Cause::Credentials,
        "ExpiredToken" | "ExpiredTokenException" | "TokenRefreshRequired" => Cause::ExpiredCredentials,
        "RequestTimeTooSkewed" | "RequestExpired" => Cause::ClockSkew,
        "AccessDenied" | "AllAccessDisabled" | "AccountProblem" => Cause::Forbidden,
        "AuthorizationHeaderMalformed" | "PermanentRedirect" | "IllegalLocationConstraintException" => {
            Cause::WrongRegion
        }
        "SlowDown"
        | "SlowDownRead"
        | "SlowDownWrite"
        | "Throttling"
        | "ThrottlingException"
        | "RequestLimitExceeded"
        | "TooManyRequests"
        | "ServiceUnavailable"
        | "Busy"
        | "OperationAborted"
        | "ConditionalRequestConflict" => Cause::Throttled,
        "InternalError" | "ServerNotInitialized" => Cause::Server,
        "RequestTimeout" => Cause::Timeout,
        "IncompleteBody" | "BadDigest" => Cause::Connection,
        "InsufficientStorage" | "QuotaExceeded" | "XMinioStorageFull" | "XMinioAdminBucketQuotaExceeded" => {
            Cause::Full
        }
        "PreconditionFailed" => Cause::Precondition,
        "NotModified" => Cause::NotModified,
        "NotImplemented" => Cause::Unsupported,
        "InvalidRange" | "InvalidArgument" | "InvalidRequest" | "InvalidBucketName" | "KeyTooLongError"
        | "MalformedXML" | "EntityTooLarge" | "EntityTooSmall" | "InvalidPart" | "InvalidPartOrder" => {
            Cause::Invalid
        }
        _ => match status {
            Some(301 | 307 | 308) => Cause::WrongRegion,
            Some(304) => Cause::NotModified,
            Some(401) => Cause::Credentials,
            Some(403) => Cause::Forbidden,
            Some(404) => Cause::NotFound,
            Some(408) => Cause::Timeout,
            Some(412) => Cause::Precondition,
            Some(400 | 405 | 411 | 413 | 416) => Cause::Invalid,
            Some(429 | 503) => Cause::Throttled,
            Some(501) => Cause::Unsupported,
            Some(507) => Cause::Full,
            Some(500..) => Cause::Server,
            _ => Cause::Other,
        },
    }
}

/// `bytes 0-9/100` as the range and the whole size.
pub(super) fn content_range(text: &str) -> Option<(Range<u64>, u64)> {
    let (range, size) = text.strip_prefix("bytes ")?.split_once('/')?;
    let (first, last) = range.split_once('-')?;
    let (first, last): (u64, u64) = (first.parse().ok()?, last.parse().ok()?);
    let end = last.checked_add(1)?;
    (first < end).then_some((first..end, size.parse().ok()?))
}

/// The SDK's time as the trait's; the epoch if there is none.
pub(super) fn chrono_time(time: Option<&DateTime>) -> chrono::DateTime<chrono::Utc> {
    time.and_then(|time| chrono::DateTime::from_timestamp(time.secs(), time.subsec_nanos()))
        .unwrap_or_default()
}

/// A time as HTTP headers have it.
pub(super) fn http_time(time: chrono::DateTime<chrono::Utc>) -> Option<String> {
    DateTime::from_secs(time.timestamp()).fmt(DateTimeFormat::HttpDate).ok()
}

/// An object from the headers of an answer about it.
pub(super) fn object_meta(location: &Path, size: u64, headers: &Headers) -> ObjectMeta {
    let time =
        headers.get("last-modified").and_then(|t| DateTime::from_str(t, DateTimeFormat::HttpDate).ok());
    ObjectMeta {
        location: location.clone(),
        last_modified: chrono_time(time.as_ref()),
        size,
        e_tag: headers.get("etag").map(str::to_owned),
        version: headers.get("x-amz-version-id").map(str::to_owned),
    }
}

/// The header that an attribute is sent and told in; `None` for those that S3 has no word for.
pub(super) fn attribute_header(attribute: &Attribute) -> Option<Cow<'static, str>> {
    Some(match attribute {
        Attribute::ContentDisposition => "content-disposition".into(),
        Attribute::ContentEncoding => "content-encoding".into(),
        Attribute::ContentLanguage => "content-language".into(),
        Attribute::ContentType => "content-type".into(),
        Attribute::CacheControl => "cache-control".into(),
        Attribute::StorageClass => "x-amz-storage-class".into(),
        Attribute::Metadata(name) => format!("{METADATA_PREFIX}{name}").into(),
        _ => return None,
    })
}

const METADATA_PREFIX: &str = "x-amz-meta-";

/// The attributes among the headers of an answer.
pub(super) fn attributes(headers: &Headers) -> Attributes {
    let attribute = |name: &str| {
        Some(match name {
            "content-disposition" => Attribute::ContentDisposition,
            "content-encoding" => Attribute::ContentEncoding,
            "content-language" => Attribute::ContentLanguage,
            "content-type" => Attribute::ContentType,
            "cache-control" => Attribute::CacheControl,
            "x-amz-storage-class" => Attribute::StorageClass,
            _ => Attribute::Metadata(name.strip_prefix(METADATA_PREFIX)?.to_owned().into()),
        })
    };
    headers
        .iter()
        .filter_map(|(name, value)| Some((attribute(name)?, AttributeValue::from(value.to_owned()))))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_is_read_from_its_body_and_else_from_its_status() {
        let body = "<?xml version=\"1.0\"?>\n<Error><Code>SlowDown</Code><Message>Less.</Message></Error>";
        let error = refused("PutObject", 503, Some("id"), body);
        assert_eq!(error.cause(), Cause::Throttled);
        assert_eq!(error.to_string(), "PutObject: SlowDown Less. (HTTP 503, request id)");
        for (status, body, cause) in [
            (404, "", Cause::NotFound),
            (404, "<Error><Code>NoSuchBucket</Code></Error>", Cause::NoBucket),
            (301, "<html>Moved</html>", Cause::WrongRegion),
            (400, "<Error><Code>ExpiredToken</Code>", Cause::ExpiredCredentials),
            (502, "<Code>", Cause::Server),
        ] {
            assert_eq!(refused("HeadObject", status, None, body).cause(), cause, "{status} {body}");
        }
    }

    #[test]
    fn attributes_and_times_survive_headers() {
        let sent: Attributes = [
            (Attribute::ContentType, "text/csv"),
            (Attribute::StorageClass, "STANDARD_IA"),
            (Attribute::Metadata("colour".into()), "blue"),
        ]
        .into_iter()
        .collect();
        let mut headers = Headers::new();
        headers.insert("etag", "\"e\"");
        headers.insert("last-modified", "Wed, 21 Oct 2015 07:28:00 GMT");
        for (attribute, value) in &sent {
            headers.insert(attribute_header(attribute).unwrap(), value.to_string());
        }
        assert_eq!(attributes(&headers), sent);
        let meta = object_meta(&Path::from("a"), 7, &headers);
        assert_eq!((meta.size, meta.e_tag.as_deref()), (7, Some("\"e\"")));
        assert_eq!(http_time(meta.last_modified).unwrap(), "Wed, 21 Oct 2015 07:28:00 GMT");
    }

    #[test]
    fn codes_come_before_statuses() {
        assert_eq!(cause_of(Some(404), "NoSuchBucket"), Cause::NoBucket);
        assert_eq!(cause_of(Some(404), ""), Cause::NotFound);
        assert_eq!(cause_of(Some(403), "RequestTimeTooSkewed"), Cause::ClockSkew);
        assert_eq!(cause_of(Some(403), "Unheard"), Cause::Forbidden);
        assert_eq!(cause_of(Some(503), ""), Cause::Throttled);
        assert_eq!(cause_of(Some(502), ""), Cause::Server);
        assert_eq!(cause_of(Some(507), ""), Cause::Full);
    }

    #[test]
    fn content_ranges_parse() {
        assert_eq!(content_range("bytes 0-9/100"), Some((0..10, 100)));
        assert_eq!(content_range("bytes 5-5/6"), Some((5..6, 6)));
        for bad in ["", "bytes */100", "bytes 9-0/100", "bytes 0-18446744073709551615/1", "bytes 0-9/*"] {
            assert_eq!(content_range(bad), None, "{bad}");
        }
    }
}

//! What S3's answers mean: errors to causes, headers to numbers.

use std::error::Error;
use std::ops::Range;

use aws_credential_types::provider::error::CredentialsError;
use aws_sdk_s3::config::http::HttpResponse;
use aws_sdk_s3::error::{ProvideErrorMetadata, SdkError};
use aws_sdk_s3::operation::RequestId;
use aws_sdk_s3::primitives::DateTime;

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
            let id = error.request_id().map(|id| format!(", request {id}")).unwrap_or_default();
            (cause_of(Some(status), code), format!("{code} {said} (HTTP {status}{id})").trim().to_owned())
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

#[cfg(test)]
mod tests {
    use super::*;

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

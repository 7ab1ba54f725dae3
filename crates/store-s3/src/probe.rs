//! Trying out a store before anything is entrusted to it.
//!
//! Every kind of request that rfs makes is made once, on objects of its own that are deleted afterwards. What fails is
//! told with what to do about it. Open the store with a short `io_timeout`, or an unreachable one is waited for.

use std::fmt;
use std::sync::Arc;

use futures::TryStreamExt;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, PutMode, PutPayload};
use rand::Rng;

use crate::error::cause;
use crate::{Cause, StoreFailure, classify};

/// What a store can do, besides what it must.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProbeReport {
    /// Whether `If-None-Match: *` is honoured: a second creation of an object fails.
    pub conditional_put: bool,
    /// Whether an upload in parts works.
    pub multipart: bool,
}

/// The request that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProbeStep {
    /// Writing an object.
    Put,
    /// Asking for its size.
    Head,
    /// Reading a range of it.
    RangeGet,
    /// Finding it in a listing.
    List,
    /// Creating it again, which must fail.
    ConditionalPut,
    /// Deleting it.
    Delete,
}

impl fmt::Display for ProbeStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ProbeStep::Put => "write an object",
            ProbeStep::Head => "ask for an object's size",
            ProbeStep::RangeGet => "read a range of an object",
            ProbeStep::List => "list objects",
            ProbeStep::ConditionalPut => "create an object that exists",
            ProbeStep::Delete => "delete an object",
        })
    }
}

/// Why a store cannot be used, and what to do.
#[derive(Debug, thiserror::Error)]
#[error("cannot {step} in {store}: {advice}")]
pub struct ProbeError {
    /// What was tried.
    pub step: ProbeStep,
    /// What it means to whoever has to act on it.
    pub failure: StoreFailure,
    store: String,
    advice: String,
    source: object_store::Error,
}

/// Bytes of the object that is tried with: more than one TCP segment, less than anybody minds.
const OBJECT_BYTES: usize = 64 << 10;

/// Makes every kind of request once and deletes what it wrote.
///
/// # Errors
/// [`ProbeError`] for the first request that must work and does not; its text says what to do.
pub async fn probe(store: &Arc<dyn ObjectStore>) -> Result<ProbeReport, ProbeError> {
    let dir = Path::from(format!(".rfs-probe/{:016x}", rand::rng().random::<u64>()));
    let object = dir.clone().join("object");
    let upload = dir.clone().join("upload");
    let result = requests(store, &dir, &object, &upload).await;
    if let Err(error) = &result
        && error.failure == StoreFailure::Unavailable
    {
        // It would not answer this either.
        return result;
    }
    let mut deleted = Ok(());
    for location in [&object, &upload] {
        match store.delete(location).await {
            Err(error) if classify(&error) != StoreFailure::NotFound => {
                deleted = Err(fail(store, ProbeStep::Delete)(error));
            }
            _ => {}
        }
    }
    let report = result?;
    deleted?;
    Ok(report)
}

async fn requests(
    store: &Arc<dyn ObjectStore>,
    dir: &Path,
    object: &Path,
    upload: &Path,
) -> Result<ProbeReport, ProbeError> {
    let bytes: Vec<u8> = (0..OBJECT_BYTES).map(|i| (i % 251).to_le_bytes()[0]).collect();
    let payload = PutPayload::from(bytes.clone());
    let wrong = |step: ProbeStep, what: &str| {
        let source = object_store::Error::Generic { store: "probe", source: what.into() };
        fail(store, step)(source)
    };

    store.put(object, payload.clone()).await.map_err(fail(store, ProbeStep::Put))?;

    let meta = store.head(object).await.map_err(fail(store, ProbeStep::Head))?;
    if meta.size != OBJECT_BYTES as u64 {
        return Err(wrong(ProbeStep::Head, "the object just written has another size"));
    }

    let range = 1000..5000;
    let read = store.get_range(object, range).await.map_err(fail(store, ProbeStep::RangeGet))?;
    if read != bytes[1000..5000] {
        return Err(wrong(ProbeStep::RangeGet, "the bytes read are not those written"));
    }

    let list = store.list(Some(dir)).map_ok(|meta| meta.location).try_collect::<Vec<_>>();
    let listed = list.await.map_err(fail(store, ProbeStep::List))?;
    if listed != [object.clone()] {
        return Err(wrong(ProbeStep::List, "the object just written is not in the listing"));
    }

    let conditional_put = match store.put_opts(object, payload.clone(), PutMode::Create.into()).await {
        Ok(_) => false,
        Err(error) if classify(&error) == StoreFailure::AlreadyExists => true,
        Err(error) if is_unsupported(&error) => false,
        Err(error) => return Err(fail(store, ProbeStep::ConditionalPut)(error)),
    };
    let multipart = upload_in_parts(store, upload, payload).await.is_ok();
    Ok(ProbeReport { conditional_put, multipart })
}

async fn upload_in_parts(
    store: &Arc<dyn ObjectStore>,
    location: &Path,
    payload: PutPayload,
) -> object_store::Result<()> {
    let mut upload = store.put_multipart(location).await?;
    let stored = match upload.put_part(payload).await {
        Ok(()) => upload.complete().await.map(|_| ()),
        Err(error) => Err(error),
    };
    if stored.is_err() {
        upload.abort().await?;
    }
    stored
}

fn is_unsupported(error: &object_store::Error) -> bool {
    matches!(error, object_store::Error::NotImplemented { .. } | object_store::Error::NotSupported { .. })
        || cause(error) == Some(Cause::Unsupported)
}

fn fail(store: &Arc<dyn ObjectStore>, step: ProbeStep) -> impl FnOnce(object_store::Error) -> ProbeError {
    let store = store.to_string();
    move |source| ProbeError {
        step,
        failure: classify(&source),
        advice: format!("{}\n  ({source})", advice(&source, step)),
        store,
        source,
    }
}

/// What to do about a failed request.
fn advice(error: &object_store::Error, step: ProbeStep) -> String {
    if let Some(cause) = cause(error) {
        return cause_advice(cause, step).to_owned();
    }
    match classify(error) {
        StoreFailure::Full => "no room is left: make room on its disk".to_owned(),
        StoreFailure::Unavailable => "it does not answer: look after its disk or network".to_owned(),
        StoreFailure::NoBucket => "its directory is gone: is its disk mounted?".to_owned(),
        _ => "it does not do what rfs needs".to_owned(),
    }
}

/// What to do about a request to S3 that failed, of the kind that `step` makes; `None`: the error says all that is known.
pub fn remedy(error: &object_store::Error, step: ProbeStep) -> Option<&'static str> {
    match cause(error)? {
        Cause::NotFound
        | Cause::Unsupported
        | Cause::NoUpload
        | Cause::AlreadyExists
        | Cause::Precondition
        | Cause::NotModified
        | Cause::Invalid
        | Cause::Other => None,
        cause => Some(cause_advice(cause, step)),
    }
}

fn cause_advice(cause: Cause, step: ProbeStep) -> &'static str {
    match cause {
        Cause::Credentials => {
            "the access key or secret key is missing or wrong: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or \
             AWS_PROFILE"
        }
        Cause::ExpiredCredentials => {
            "the credentials have expired or their provider does not answer: log in again, or check AWS_SESSION_TOKEN"
        }
        Cause::ClockSkew => "this machine's clock differs too much from the store's: set it (NTP)",
        Cause::Forbidden => match step {
            ProbeStep::Put | ProbeStep::ConditionalPut => {
                "these credentials may not write: grant s3:PutObject"
            }
            ProbeStep::Head | ProbeStep::RangeGet => "these credentials may not read: grant s3:GetObject",
            ProbeStep::List => "these credentials may not list: grant s3:ListBucket",
            ProbeStep::Delete => "these credentials may not delete: grant s3:DeleteObject",
        },
        Cause::NoBucket => "there is no such bucket: make it first, or correct the name in the URL",
        Cause::WrongRegion => "the bucket is in another region: set region=… in the URL",
        Cause::Connection | Cause::Timeout => {
            "it does not answer: is the endpoint in the URL right, the server running, the network up?"
        }
        Cause::Throttled => "it asks for fewer requests all the time: try later",
        Cause::Server => "the server fails inside: look into its log",
        Cause::Full => "no room is left in it: make room or raise its quota",
        Cause::NotFound if step == ProbeStep::Put => {
            "the endpoint knows no such address: is it an S3 server, and path_style right?"
        }
        Cause::NotFound => {
            "the object just written is not there: the store is not consistent, rfs cannot use it"
        }
        Cause::Unsupported => "the server cannot do that: rfs cannot use it",
        Cause::NoUpload
        | Cause::AlreadyExists
        | Cause::Precondition
        | Cause::NotModified
        | Cause::Invalid
        | Cause::Other => "the server refused a plain request: is it an S3 server?",
    }
}

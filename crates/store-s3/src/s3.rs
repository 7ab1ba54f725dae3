//! `ObjectStore` over S3, one attempt a request: the AWS SDK for control and listing, requests of this crate's own making
//! for objects ([`direct`]).
//!
//! Owns: both clients, keys (prefix + location), the watch over a stalled attempt ([`body`]), and what S3's answers
//! mean ([`answer`]). Refuses: repeating anything (that is [`Retrying`](crate::Retrying)) and bounding how many
//! requests are in flight ([`Limited`](crate::Limited)).
//!
//! - Bodies are not signed (`UNSIGNED-PAYLOAD`), because SHA-256 doubled the CPU of a PUT. A whole object's CRC32C is a
//!   signed header, so that the server refuses what was damaged on the way while the bytes are still here.
//! - Answers up to [`BUFFERED_MAX`] are read into one buffer before `get_opts` returns, so that a body that breaks is
//!   part of the attempt. Larger ones are streamed.
//! - The order of a listing is the server's; nothing here relies on it, which is why `list_with_offset` is the trait's
//!   own (it filters).

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use async_trait::async_trait;
use aws_credential_types::Credentials;
use aws_sdk_s3::Client;
use aws_sdk_s3::config::http::HttpResponse;
use aws_sdk_s3::primitives::ByteStream;
use aws_sdk_s3::types::{CompletedMultipartUpload, CompletedPart, Delete, ObjectIdentifier};
use aws_smithy_runtime_api::http::Headers;
use bytes::Bytes;
use crc_fast::CrcAlgorithm;
use futures::future::BoxFuture;
use futures::stream::{self, BoxStream};
use futures::{FutureExt, StreamExt, TryStreamExt};
use object_store::multipart::PartId;
use object_store::path::Path;
use object_store::{
    Attributes, CopyMode, CopyOptions, GetOptions, GetRange, GetResult, GetResultPayload, ListResult,
    MultipartId, MultipartUpload, ObjectMeta, ObjectStore, PutMode, PutMultipartOptions, PutOptions,
    PutPayload, PutResult, Result, TagSet, UpdateVersion,
};

use crate::remote::{ListPage, Listing, PartsUpload, RemoteStore, list_all, list_one_level};
use crate::{Cause, RequestError, S3Config, StoreError};

mod answer;
mod body;
mod connect;
mod direct;
mod identity;

use answer::{
    attribute_header, attributes, chrono_time, content_range, http_time, object_meta, request_error,
};
use body::{Progress, SlicedBody};
use direct::{Call, Direct};

/// Bodies up to this many bytes are read whole into one buffer (32 MiB).
const BUFFERED_MAX: u64 = 32 << 20;

/// Keys that one `DeleteObjects` request may name.
pub(crate) const DELETE_BATCH_MAX: usize = 1000;

/// S3 or a server that speaks its protocol. Cheap to clone.
#[derive(Clone)]
pub struct S3Store {
    inner: Arc<Inner>,
}

struct Inner {
    client: Client,
    direct: Direct,
    config: S3Config,
}

impl fmt::Debug for S3Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("S3Store").field("config", &self.inner.config).finish_non_exhaustive()
    }
}

impl fmt::Display for S3Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let S3Config { bucket, prefix, endpoint, .. } = &self.inner.config;
        let slash = if prefix.is_root() { "" } else { "/" };
        write!(f, "s3://{bucket}{slash}{prefix}")?;
        endpoint.as_ref().map_or(Ok(()), |endpoint| write!(f, " at {endpoint}"))
    }
}

impl S3Store {
    /// Makes the client; nothing is sent to the bucket yet. Credentials are looked for at the first request, in the AWS
    /// chain: environment, profile, web identity, container, instance metadata; they are refreshed before they expire.
    ///
    /// # Errors
    /// `Config` if the CA bundle cannot be used.
    pub async fn connect(config: S3Config) -> Result<S3Store, StoreError> {
        Self::connect_as(config, None).await
    }

    /// As [`S3Store::connect`], with these credentials, if given, instead of the AWS chain's.
    ///
    /// # Errors
    /// `Config` if the CA bundle cannot be used.
    pub async fn connect_as(
        config: S3Config,
        credentials: Option<Credentials>,
    ) -> Result<S3Store, StoreError> {
        let (client, direct) = connect::connect(&config, credentials).await?;
        Ok(S3Store { inner: Arc::new(Inner { client, direct, config }) })
    }

    /// The settings this was made with.
    pub fn config(&self) -> &S3Config {
        &self.inner.config
    }

    fn client(&self) -> &Client {
        &self.inner.client
    }

    fn bucket(&self) -> &str {
        &self.inner.config.bucket
    }

    fn key(&self, location: &Path) -> String {
        let prefix = &self.inner.config.prefix;
        if prefix.is_root() { location.to_string() } else { format!("{prefix}/{location}") }
    }

    /// The key prefix of everything below `prefix`: empty, or ending with a slash.
    fn key_prefix(&self, prefix: Option<&Path>) -> String {
        let own = &self.inner.config.prefix;
        let mut key = match prefix {
            Some(prefix) if !prefix.is_root() => self.key(prefix),
            _ => own.to_string(),
        };
        if !key.is_empty() {
            key.push('/');
        }
        key
    }

    /// The location that `key` stands for; `None` for keys that rfs did not write: outside the prefix, directory
    /// markers, empty segments.
    fn location(&self, key: &str) -> Option<Path> {
        let own = &self.inner.config.prefix;
        let inside = if own.is_root() { key } else { key.strip_prefix(own.as_ref())?.strip_prefix('/')? };
        if inside.is_empty() || inside.ends_with('/') {
            return None;
        }
        Path::parse(inside).ok()
    }

    /// Runs one attempt under the time limits of the configuration.
    async fn attempt<T>(
        &self,
        operation: &'static str,
        location: &(impl ToString + ?Sized),
        progress: &Progress,
        request: BoxFuture<'_, Result<T, RequestError>>,
    ) -> Result<T> {
        let config = &self.inner.config;
        progress
            .watch(operation, config.read_timeout, config.attempt_timeout, request)
            .await
            .map_err(|error| error.at(location))
    }

    /// One attempt of `call`; `read` makes of the answer what is wanted of it, within the attempt.
    async fn attempt_call<T, F>(
        &self,
        location: &Path,
        progress: &Progress,
        call: Call,
        read: impl FnOnce(HttpResponse) -> F + Send,
    ) -> Result<T>
    where
        F: Future<Output = Result<T, RequestError>> + Send,
    {
        let operation = call.operation();
        let send = async {
            let answer = self.inner.direct.send(self.client(), self.bucket(), call).await?;
            progress.bump();
            read(answer).await
        };
        self.attempt(operation, location, progress, send.boxed()).await
    }

    fn conditional(call: Call, options: &GetOptions) -> Call {
        call.header("if-match", options.if_match.clone())
            .header("if-none-match", options.if_none_match.clone())
            .header("if-modified-since", options.if_modified_since.and_then(http_time))
            .header("if-unmodified-since", options.if_unmodified_since.and_then(http_time))
            .query("versionId", options.version.clone())
    }

    async fn head(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        let progress = Progress::default();
        let call = Self::conditional(Call::new("HeadObject", "HEAD", self.key(location)), &options);
        let answer = self.attempt_call(location, &progress, call, async |answer| Ok(answer)).await?;
        let size = content_length(answer.headers()).unwrap_or(0);
        Ok(GetResult {
            attributes: attributes(answer.headers()),
            meta: object_meta(location, size, answer.headers()),
            payload: GetResultPayload::Stream(stream::empty().boxed()),
            range: 0..size,
            extensions: object_store::Extensions::default(),
        })
    }

    async fn get(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        if let Some(range) = &options.range {
            range.is_valid().map_err(|e| {
                RequestError::new(Cause::Invalid, "GetObject", "bad range").with_source(e).at(location)
            })?;
        }
        let progress = Progress::default();
        let range = options.range.as_ref().map(GetRange::to_string);
        let ranged = range.is_some();
        let call = Call::new("GetObject", "GET", self.key(location)).header("range", range);
        let call = Self::conditional(call, &options);
        let read = async |mut answer: HttpResponse| {
            let (range, size) = answered_range(answer.headers(), ranged)?;
            let body = ByteStream::new(answer.take_body());
            let body = match usize::try_from(range.end - range.start) {
                Ok(len) if len as u64 <= BUFFERED_MAX => Ok(read_body(body, len, &progress).await?),
                _ => Err(body),
            };
            Ok((answer, range, size, body))
        };
        let (answer, range, size, body) = self.attempt_call(location, &progress, call, read).await?;
        let payload = match body {
            Ok(bytes) => stream::once(async { Ok(bytes) }).boxed(),
            Err(body) => self.stream_body(location, body, range.end - range.start),
        };
        Ok(GetResult {
            attributes: attributes(answer.headers()),
            meta: object_meta(location, size, answer.headers()),
            payload: GetResultPayload::Stream(payload),
            range,
            extensions: object_store::Extensions::default(),
        })
    }

    /// The body as it comes; each chunk has the read time-out, and an early end is an error.
    fn stream_body(&self, location: &Path, body: ByteStream, len: u64) -> BoxStream<'static, Result<Bytes>> {
        let location = location.clone();
        let limit = self.inner.config.read_timeout;
        let state = (body, len);
        stream::try_unfold(state, move |(mut body, left)| {
            let location = location.clone();
            async move {
                let cut = |what: &str| RequestError::new(Cause::Connection, "GetObject", what).at(&location);
                match tokio::time::timeout(limit, body.next()).await {
                    Err(_) => {
                        Err(RequestError::new(Cause::Timeout, "GetObject", "the body stalled").at(&location))
                    }
                    Ok(Some(Err(error))) => {
                        Err(RequestError::new(Cause::Connection, "GetObject", "the body broke")
                            .with_source(error)
                            .at(&location))
                    }
                    Ok(None) if left == 0 => Ok(None),
                    Ok(None) => Err(cut("the body ended early")),
                    Ok(Some(Ok(bytes))) => match left.checked_sub(bytes.len() as u64) {
                        Some(left) => Ok(Some((bytes, (body, left)))),
                        None => Err(cut("the body is longer than announced")),
                    },
                }
            }
        })
        .boxed()
    }

    /// Deletes up to [`DELETE_BATCH_MAX`] objects; one result each, in order.
    async fn delete_batch(&self, locations: Vec<Path>) -> Vec<Result<Path>> {
        if let [location] = locations.as_slice() {
            let progress = Progress::default();
            let call = Call::new("DeleteObject", "DELETE", self.key(location));
            let result = self.attempt_call(location, &progress, call, async |_| Ok(())).await;
            return vec![result.map(|()| location.clone())];
        }
        match self.delete_many(&locations).await {
            Ok(results) => results,
            // The stream's items are independent, so each tells why.
            Err(error) => {
                let cause = crate::error::cause(&error).unwrap_or(Cause::Other);
                let message = error.to_string();
                locations
                    .iter()
                    .map(|l| Err(RequestError::new(cause, "DeleteObjects", message.clone()).at(l)))
                    .collect()
            }
        }
    }

    async fn delete_many(&self, locations: &[Path]) -> Result<Vec<Result<Path>>> {
        let progress = Progress::default();
        let send = async {
            let identifiers: Vec<ObjectIdentifier> = locations
                .iter()
                .map(|location| ObjectIdentifier::builder().key(self.key(location)).build())
                .collect::<Result<_, _>>()
                .map_err(|e| RequestError::new(Cause::Invalid, "DeleteObjects", "bad key").with_source(e))?;
            let delete =
                Delete::builder().set_objects(Some(identifiers)).quiet(true).build().map_err(|e| {
                    RequestError::new(Cause::Invalid, "DeleteObjects", "bad request").with_source(e)
                })?;
            let request = self.client().delete_objects().bucket(self.bucket()).delete(delete);
            request.send().await.map_err(|e| request_error("DeleteObjects", e))
        }
        .boxed();
        let output = self.attempt("DeleteObjects", self.bucket(), &progress, send).await?;
        let failed: std::collections::HashMap<&str, _> =
            output.errors().iter().filter_map(|error| Some((error.key()?, error))).collect();
        Ok(locations
            .iter()
            .map(|location| {
                let Some(error) = failed.get(self.key(location).as_str()) else {
                    return Ok(location.clone());
                };
                let (code, message) = (error.code().unwrap_or(""), error.message().unwrap_or(""));
                match answer::cause_of(None, code) {
                    // Deleting what is not there is what was asked for.
                    Cause::NotFound => Ok(location.clone()),
                    cause => {
                        Err(RequestError::new(cause, "DeleteObjects", format!("{code}: {message}"))
                            .at(location))
                    }
                }
            })
            .collect())
    }

    async fn copy_object(&self, from: &Path, to: &Path) -> Result<()> {
        let source = format!("{}/{}", self.bucket(), self.key(from));
        let progress = Progress::default();
        let request = self
            .client()
            .copy_object()
            .bucket(self.bucket())
            .key(self.key(to))
            .copy_source(connect::percent_encode(&source));
        let send = async { request.send().await.map_err(|e| request_error("CopyObject", e)) }.boxed();
        self.attempt("CopyObject", from, &progress, send).await.map(|_| ())
    }
}

fn content_length(headers: &Headers) -> Option<u64> {
    headers.get("content-length")?.parse().ok()
}

/// The bytes that an answer holds and the size of the whole object.
fn answered_range(headers: &Headers, ranged: bool) -> Result<(Range<u64>, u64), RequestError> {
    let invalid = |message: String| RequestError::new(Cause::Invalid, "GetObject", message);
    let len = content_length(headers).ok_or_else(|| invalid("the answer has no length".to_owned()))?;
    match headers.get("content-range") {
        Some(text) => {
            let (range, size) =
                content_range(text).ok_or_else(|| invalid(format!("Content-Range {text:?}")))?;
            if range.end - range.start != len {
                return Err(invalid(format!("Content-Range {text:?} with {len} bytes")));
            }
            Ok((range, size))
        }
        None if ranged => Err(RequestError::new(
            Cause::Unsupported,
            "GetObject",
            "the store ignores ranges: it sent the whole object",
        )),
        None => Ok((0..len, len)),
    }
}

/// Reads exactly `len` bytes into one buffer (no copy if they come in one piece).
async fn read_body(mut body: ByteStream, len: usize, progress: &Progress) -> Result<Bytes, RequestError> {
    let broken = |message: &str| RequestError::new(Cause::Connection, "GetObject", message);
    let mut buffer = Vec::new();
    while let Some(chunk) = body.next().await {
        let chunk = chunk.map_err(|e| broken("the body broke").with_source(e))?;
        progress.bump();
        if buffer.is_empty() && chunk.len() == len {
            return Ok(chunk);
        }
        if buffer.is_empty() {
            buffer.reserve_exact(len);
        }
        if buffer.len() + chunk.len() > len {
            return Err(broken("the body is longer than announced"));
        }
        buffer.extend_from_slice(&chunk);
    }
    if buffer.len() == len { Ok(Bytes::from(buffer)) } else { Err(broken("the body ended early")) }
}

/// The headers that tell S3 of attributes.
fn attribute_headers(attributes: &Attributes, operation: &'static str) -> Result<Headers, RequestError> {
    let mut headers = Headers::new();
    for (attribute, value) in attributes {
        let name = attribute_header(attribute).ok_or_else(|| {
            let message = format!("the attribute {attribute:?} is not known");
            RequestError::new(Cause::Unsupported, operation, message)
        })?;
        headers.try_insert(name, value.to_string()).map_err(|error| {
            let message = format!("the attribute {attribute:?} cannot be sent");
            RequestError::new(Cause::Invalid, operation, message).with_source(error)
        })?;
    }
    Ok(headers)
}

/// The tags of an object as their header has them.
fn tagging(tags: &TagSet) -> Option<String> {
    let encoded = tags.encoded();
    (!encoded.is_empty()).then(|| encoded.to_owned())
}

/// What the server compares with the bytes it got.
const CHECKSUM_HEADER: &str = "x-amz-checksum-crc32c";

/// The CRC32C of a body as [`CHECKSUM_HEADER`] has it: big-endian, in base64.
fn crc32c(payload: &PutPayload) -> String {
    let mut digest = crc_fast::Digest::new(CrcAlgorithm::Crc32Iscsi);
    payload.iter().for_each(|piece| digest.update(piece));
    let sum = u32::try_from(digest.finalize()).expect("32 bits");
    aws_smithy_types::base64::encode(sum.to_be_bytes())
}

#[async_trait]
impl ObjectStore for S3Store {
    async fn put_opts(&self, location: &Path, payload: PutPayload, options: PutOptions) -> Result<PutResult> {
        let progress = Progress::default();
        let (if_match, if_none_match) = match &options.mode {
            PutMode::Overwrite => (None, None),
            PutMode::Create => (None, Some("*".to_owned())),
            PutMode::Update(UpdateVersion { e_tag: Some(e_tag), .. }) => (Some(e_tag.clone()), None),
            PutMode::Update(_) => {
                let error = RequestError::new(Cause::Invalid, "PutObject", "an update needs an ETag");
                return Err(error.at(location));
            }
        };
        let mut call = Call::new("PutObject", "PUT", self.key(location))
            .header("if-match", if_match)
            .header("if-none-match", if_none_match)
            .header("x-amz-tagging", tagging(&options.tags))
            .header(CHECKSUM_HEADER, self.inner.config.checksums.then(|| crc32c(&payload)))
            .body(SlicedBody::new(payload, progress.clone()));
        let headers = attribute_headers(&options.attributes, "PutObject").map_err(|e| e.at(location))?;
        for (name, value) in &headers {
            call = call.header(name.to_owned(), Some(value.to_owned()));
        }
        let send = async {
            self.inner.direct.send(self.client(), self.bucket(), call).await.map_err(|error| {
                match (error.cause(), &options.mode) {
                    (Cause::Precondition, PutMode::Create) => {
                        RequestError::new(Cause::AlreadyExists, "PutObject", "the object exists")
                            .with_source(error)
                    }
                    // An update of what is not there fails its condition, whatever the server calls it.
                    (Cause::NotFound, PutMode::Update(_)) => {
                        RequestError::new(Cause::Precondition, "PutObject", "no such object")
                            .with_source(error)
                    }
                    (Cause::Unsupported, _) if self.inner.config.checksums => {
                        let message =
                            format!("if it is {CHECKSUM_HEADER}: add checksums=no to the store's URL");
                        RequestError::new(Cause::Unsupported, "PutObject", message).with_source(error)
                    }
                    _ => error,
                }
            })
        }
        .boxed();
        let answer = self.attempt("PutObject", location, &progress, send).await?;
        let meta = object_meta(location, 0, answer.headers());
        Ok(PutResult {
            e_tag: meta.e_tag,
            version: meta.version,
            extensions: object_store::Extensions::default(),
        })
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        let store = Arc::new(self.clone());
        Ok(Box::new(PartsUpload::begin(store, location, options).await?))
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        if options.head { self.head(location, options).await } else { self.get(location, options).await }
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        let store = self.clone();
        locations
            .try_chunks(DELETE_BATCH_MAX)
            .map(move |batch| {
                let store = store.clone();
                async move {
                    let (batch, broken) = match batch {
                        Ok(batch) => (batch, None),
                        Err(error) => (error.0, Some(Err(error.1))),
                    };
                    let mut results =
                        if batch.is_empty() { Vec::new() } else { store.delete_batch(batch).await };
                    results.extend(broken);
                    stream::iter(results)
                }
            })
            .buffered(4)
            .flatten()
            .boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        list_all(Arc::new(self.clone()), prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        list_one_level(self, prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        match options.mode {
            CopyMode::Overwrite => self.copy_object(from, to).await,
            // Few servers know a condition on CopyObject; all that count know one on PutObject.
            CopyMode::Create => {
                let bytes = self.get_opts(from, GetOptions::default()).await?.bytes().await?;
                self.put_opts(to, bytes.into(), PutMode::Create.into()).await.map(|_| ())
            }
        }
    }
}

#[async_trait]
impl RemoteStore for S3Store {
    async fn create_multipart(&self, location: &Path, options: PutMultipartOptions) -> Result<MultipartId> {
        let progress = Progress::default();
        let request = self
            .client()
            .create_multipart_upload()
            .bucket(self.bucket())
            .key(self.key(location))
            .set_tagging(tagging(&options.tags));
        let headers =
            attribute_headers(&options.attributes, "CreateMultipartUpload").map_err(|e| e.at(location))?;
        let send = async {
            let request = request.customize().mutate_request(move |request| {
                for (name, value) in &headers {
                    request.headers_mut().insert(name.to_owned(), value.to_owned());
                }
            });
            let output = request.send().await.map_err(|e| request_error("CreateMultipartUpload", e))?;
            output.upload_id.ok_or_else(|| {
                RequestError::new(Cause::Invalid, "CreateMultipartUpload", "the answer has no upload id")
            })
        }
        .boxed();
        self.attempt("CreateMultipartUpload", location, &progress, send).await
    }

    async fn put_part(
        &self,
        location: &Path,
        id: &MultipartId,
        index: usize,
        payload: PutPayload,
    ) -> Result<PartId> {
        let progress = Progress::default();
        let number = part_number(index).map_err(|e| e.at(location))?;
        let call = Call::new("UploadPart", "PUT", self.key(location))
            .query("partNumber", Some(number.to_string()))
            .query("uploadId", Some(id.clone()))
            .body(SlicedBody::new(payload, progress.clone()));
        let read = async |answer: HttpResponse| {
            let e_tag = answer.headers().get("etag").map(str::to_owned);
            let content_id = e_tag
                .ok_or_else(|| RequestError::new(Cause::Invalid, "UploadPart", "the answer has no ETag"))?;
            Ok(PartId { content_id })
        };
        self.attempt_call(location, &progress, call, read).await
    }

    async fn complete_multipart(
        &self,
        location: &Path,
        id: &MultipartId,
        parts: Vec<PartId>,
    ) -> Result<PutResult> {
        let progress = Progress::default();
        let parts: Vec<CompletedPart> = parts
            .into_iter()
            .enumerate()
            .map(|(index, part)| {
                let number = part_number(index).map_err(|e| e.at(location))?;
                Ok(CompletedPart::builder().part_number(number).e_tag(part.content_id).build())
            })
            .collect::<Result<_>>()?;
        let request = self
            .client()
            .complete_multipart_upload()
            .bucket(self.bucket())
            .key(self.key(location))
            .upload_id(id)
            .multipart_upload(CompletedMultipartUpload::builder().set_parts(Some(parts)).build());
        let send =
            async { request.send().await.map_err(|e| request_error("CompleteMultipartUpload", e)) }.boxed();
        let output = self.attempt("CompleteMultipartUpload", location, &progress, send).await?;
        Ok(PutResult {
            e_tag: output.e_tag,
            version: output.version_id,
            extensions: object_store::Extensions::default(),
        })
    }

    async fn abort_multipart(&self, location: &Path, id: &MultipartId) -> Result<()> {
        let progress = Progress::default();
        let request = self
            .client()
            .abort_multipart_upload()
            .bucket(self.bucket())
            .key(self.key(location))
            .upload_id(id);
        let send = async {
            match request.send().await.map_err(|e| request_error("AbortMultipartUpload", e)) {
                // Gone is what was asked for.
                Err(error) if error.cause() == Cause::NoUpload => Ok(()),
                result => result.map(|_| ()),
            }
        }
        .boxed();
        self.attempt("AbortMultipartUpload", location, &progress, send).await
    }

    async fn list_page(
        &self,
        prefix: Option<&Path>,
        listing: Listing,
        page: Option<String>,
    ) -> Result<ListPage> {
        let progress = Progress::default();
        let key_prefix = self.key_prefix(prefix);
        let request = self
            .client()
            .list_objects_v2()
            .bucket(self.bucket())
            .set_prefix((!key_prefix.is_empty()).then(|| key_prefix.clone()))
            .set_delimiter((listing == Listing::OneLevel).then(|| "/".to_owned()))
            .set_continuation_token(page);
        let send = async { request.send().await.map_err(|e| request_error("ListObjectsV2", e)) }.boxed();
        let output = self.attempt("ListObjectsV2", &key_prefix, &progress, send).await?;
        let objects = output
            .contents()
            .iter()
            .filter_map(|object| {
                Some(ObjectMeta {
                    location: self.location(object.key()?)?,
                    last_modified: chrono_time(object.last_modified()),
                    size: object.size().and_then(|size| u64::try_from(size).ok())?,
                    e_tag: object.e_tag().map(str::to_owned),
                    version: None,
                })
            })
            .collect();
        let common_prefixes = output
            .common_prefixes()
            .iter()
            .filter_map(|common| self.location(common.prefix()?.strip_suffix('/')?))
            .collect();
        let more = output.is_truncated() == Some(true);
        let next = output.next_continuation_token.filter(|token| more && !token.is_empty());
        if more && next.is_none() {
            let message = "the listing goes on but names no next page";
            return Err(RequestError::new(Cause::Invalid, "ListObjectsV2", message).at(&key_prefix));
        }
        Ok(ListPage { objects, common_prefixes, next })
    }
}

/// S3 counts parts from 1 to 10,000.
fn part_number(index: usize) -> Result<i32, RequestError> {
    i32::try_from(index)
        .ok()
        .filter(|index| *index < 10_000)
        .map(|index| index + 1)
        .ok_or_else(|| RequestError::new(Cause::Invalid, "UploadPart", "an upload has at most 10,000 parts"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Value: <https://www.rfc-editor.org/rfc/rfc3720#appendix-B.4> (32 bytes of zeros: 8a9136aa).
    #[test]
    fn a_checksum_is_that_of_the_whole_body_in_base64() {
        let pieces: PutPayload =
            [Bytes::from_static(&[0; 20]), Bytes::from_static(&[0; 12])].into_iter().collect();
        assert_eq!(crc32c(&pieces), "ipE2qg==");
    }
}

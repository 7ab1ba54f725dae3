//! A local directory that acknowledges only what a power cut cannot take back.
//!
//! An object is written under a temporary name in [`STAGING`], its data are synced, it is renamed (or, to create,
//! linked) into place, and the directory is synced. A directory is trusted only after *this process* has synced the
//! entry that names it: that it exists proves nothing, since whoever made it may not have come to the sync yet.
//!
//! The root itself is never made after opening: if its disk is unmounted under us, writing must fail rather than go to
//! the directory below the mount point.
//!
//! Listing, copying and renaming are `LocalFileSystem`'s. It hides names of the form `…#123`, which is what the
//! temporary files are called. Blocking work runs on tokio's blocking threads, one trip a request.

use std::collections::{BTreeSet, HashSet};
use std::fmt;
use std::fs::{File, Metadata};
use std::io::{self, Read, Seek, SeekFrom};
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::{Path as FsPath, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use chrono::{DateTime, Utc};
use futures::stream::{self, BoxStream};
use futures::{FutureExt, StreamExt};
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{
    Attributes, CopyOptions, Extensions, GetOptions, GetRange, GetResult, GetResultPayload, ListResult,
    MultipartUpload, ObjectMeta, ObjectStore, PutMode, PutMultipartOptions, PutOptions, PutPayload,
    PutResult, RenameOptions, Result, UploadPart,
};
use parking_lot::Mutex;

use crate::{Cause, MissingDirectory, RequestError, StoreError};

mod staged;

use staged::{Buffers, Staged};

/// The directory of unfinished uploads, below the root.
const STAGING: &str = ".rfs-uploads";

/// An unfinished upload that nobody wrote to for this long is abandoned: its process is gone.
const ABANDONED_AFTER: Duration = Duration::from_hours(1);

/// Bodies up to this many bytes are read whole in one trip (32 MiB).
const BUFFERED_MAX: u64 = 32 << 20;

/// Deletions between two syncs of their directories.
const DELETE_BATCH: usize = 256;

/// A local directory as an object store. Cheap to clone.
#[derive(Debug, Clone)]
pub struct DurableLocal {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    files: LocalFileSystem,
    root: PathBuf,
    /// Directories whose entries this process has synced.
    durable: Mutex<HashSet<PathBuf>>,
    uploads: AtomicU64,
    buffers: Arc<Buffers>,
}

/// An operation of the local disk that failed.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} {}: {source}", path.display())]
struct LocalError {
    action: &'static str,
    path: PathBuf,
    source: io::Error,
}

fn failed(action: &'static str, path: &FsPath) -> impl FnOnce(io::Error) -> object_store::Error {
    move |source| {
        let kind = source.kind();
        let text = path.display().to_string();
        let source = Box::new(LocalError { action, path: path.to_owned(), source });
        match kind {
            io::ErrorKind::NotFound => object_store::Error::NotFound { path: text, source },
            io::ErrorKind::AlreadyExists => object_store::Error::AlreadyExists { path: text, source },
            _ => object_store::Error::Generic { store: "local directory", source },
        }
    }
}

/// As [`failed`], where a missing file or directory is not a missing object.
fn broken(action: &'static str, path: &FsPath) -> impl FnOnce(io::Error) -> object_store::Error {
    move |source| object_store::Error::Generic {
        store: "local directory",
        source: Box::new(LocalError { action, path: path.to_owned(), source }),
    }
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    tokio::task::spawn_blocking(work).await?
}

fn sync_dir(dir: &FsPath) -> Result<()> {
    File::open(dir).and_then(|dir| dir.sync_all()).map_err(broken("sync directory", dir))
}

impl DurableLocal {
    /// Opens the directory `root`, or makes it (and syncs the way to it) if `missing` says so. Removes unfinished
    /// uploads that nobody wrote to for an hour.
    ///
    /// # Errors
    /// `NoDirectory`, or `Directory` with what the system said.
    pub async fn open(root: &FsPath, missing: MissingDirectory) -> Result<DurableLocal, StoreError> {
        let root = root.to_owned();
        let path = root.display().to_string();
        let opened = tokio::task::spawn_blocking(move || Self::open_blocking(&root, missing)).await;
        opened.map_err(|e| StoreError::Directory { path, source: io::Error::other(e) })?
    }

    fn open_blocking(root: &FsPath, missing: MissingDirectory) -> Result<DurableLocal, StoreError> {
        let path = || root.display().to_string();
        let unusable = |source: io::Error| StoreError::Directory { path: path(), source };
        match std::fs::metadata(root) {
            Ok(found) if !found.is_dir() => return Err(unusable(io::ErrorKind::NotADirectory.into())),
            Ok(_) => {}
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(unusable(e)),
            Err(_) if missing == MissingDirectory::Fail => {
                return Err(StoreError::NoDirectory { path: path() });
            }
            Err(_) => create_durably(root).map_err(unusable)?,
        }
        let root = root.canonicalize().map_err(unusable)?;
        let files = LocalFileSystem::new_with_prefix(&root)
            .map_err(|e| unusable(io::Error::other(e)))?
            .with_fsync(true);
        let staging = root.join(STAGING);
        match std::fs::create_dir(&staging) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(unusable(e)),
            _ => {}
        }
        let inner = Inner {
            files,
            root,
            durable: Mutex::default(),
            uploads: AtomicU64::new(0),
            buffers: Arc::default(),
        };
        let store = DurableLocal { inner: Arc::new(inner) };
        store.inner.sweep(&staging).map_err(unusable)?;
        Ok(store)
    }

    /// The directory.
    pub fn root(&self) -> &FsPath {
        &self.inner.root
    }
}

/// `mkdir -p`, with the entry of every new directory synced.
fn create_durably(dir: &FsPath) -> io::Result<()> {
    if let Some(parent) = dir.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        if !parent.is_dir() {
            create_durably(parent)?;
        }
        match std::fs::create_dir(dir) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
            _ => {}
        }
        return File::open(parent)?.sync_all();
    }
    std::fs::create_dir(dir)
}

impl Inner {
    fn file(&self, location: &Path) -> Result<PathBuf> {
        self.files.path_to_filesystem(location)
    }

    /// Makes the directory of `file` and everything above it exist for good.
    fn ensure_parent(&self, file: &FsPath) -> Result<()> {
        let Some(parent) = file.parent() else { return Ok(()) };
        if parent == self.root || self.durable.lock().contains(parent) {
            return Ok(());
        }
        let below_root = parent.strip_prefix(&self.root).map_err(|_| {
            RequestError::new(Cause::Invalid, "put", "outside the store's directory").at(&parent.display())
        })?;
        let mut dir = self.root.clone();
        for part in below_root {
            let above = dir.clone();
            dir.push(part);
            if self.durable.lock().contains(&dir) {
                continue;
            }
            match std::fs::create_dir(&dir) {
                Err(e) if e.kind() != io::ErrorKind::AlreadyExists => {
                    return Err(broken("make directory", &dir)(e));
                }
                _ => {}
            }
            sync_dir(&above)?;
            self.durable.lock().insert(dir.clone());
        }
        Ok(())
    }

    /// A new file in the staging directory.
    fn stage(&self) -> Result<Staged> {
        loop {
            let number = self.uploads.fetch_add(1, Ordering::Relaxed);
            let path = self.root.join(STAGING).join(format!("#{:010}{number:010}", std::process::id()));
            match File::options().read(true).write(true).create_new(true).open(&path) {
                Ok(file) => return Ok(Staged::new(file, path, Arc::clone(&self.buffers))),
                // Left behind by a process of the same number.
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
                Err(e) => return Err(broken("make", &path)(e)),
            }
        }
    }

    /// Gives a staged file its name; durable when this returns.
    fn publish(&self, upload: &Staged, to: &FsPath, mode: &PutMode) -> Result<PutResult> {
        let (file, staged) = (upload.file(), upload.path());
        file.sync_data().map_err(broken("sync", staged))?;
        let metadata = file.metadata().map_err(broken("stat", staged))?;
        self.ensure_parent(to)?;
        let mut placed = place(staged, to, mode);
        if placed.as_ref().is_err_and(|e| e.kind() == io::ErrorKind::NotFound) {
            // Somebody removed a directory that was known to be there.
            self.durable.lock().clear();
            self.ensure_parent(to)?;
            placed = place(staged, to, mode);
        }
        placed.map_err(|e| match e.kind() {
            io::ErrorKind::NotFound => broken("make", to)(e),
            _ => failed("make", to)(e),
        })?;
        sync_dir(to.parent().unwrap_or(&self.root))?;
        Ok(PutResult { e_tag: Some(e_tag(&metadata)), version: None, extensions: Extensions::default() })
    }

    /// Removes the uploads of processes that are gone.
    fn sweep(&self, staging: &FsPath) -> io::Result<()> {
        // The file system's own clock, which need not be this machine's.
        let staged = self.stage().map_err(io::Error::other)?;
        let now = staged.file().metadata()?.modified()?;
        std::fs::remove_file(staged.path())?;
        for entry in std::fs::read_dir(staging)? {
            let entry = entry?;
            let Ok(metadata) = entry.metadata() else { continue };
            let age = now.duration_since(metadata.modified()?).unwrap_or_default();
            if metadata.is_file() && age > ABANDONED_AFTER {
                // Another process may have been quicker.
                let _ = std::fs::remove_file(entry.path());
            }
        }
        Ok(())
    }

    fn put(&self, location: &Path, payload: &PutPayload, mode: &PutMode) -> Result<PutResult> {
        let to = self.file(location)?;
        let staged = self.stage()?;
        let written = staged
            .write(payload, 0)
            .map_err(broken("write", staged.path()))
            .and_then(|()| self.publish(&staged, &to, mode));
        if written.is_err() {
            // It may not be there any more; if it is and stays, it is swept one day.
            let _ = std::fs::remove_file(staged.path());
        }
        written
    }

    fn get(&self, location: &Path, options: &GetOptions) -> Result<GetResult> {
        let path = self.file(location)?;
        let file = File::open(&path).map_err(failed("open", &path))?;
        let metadata = file.metadata().map_err(broken("stat", &path))?;
        if metadata.is_dir() {
            return Err(failed("open", &path)(io::Error::new(io::ErrorKind::NotFound, "a directory")));
        }
        let meta = ObjectMeta {
            location: location.clone(),
            last_modified: metadata.modified().map(DateTime::<Utc>::from).unwrap_or_default(),
            size: metadata.len(),
            e_tag: Some(e_tag(&metadata)),
            version: None,
        };
        options.check_preconditions(&meta)?;
        let range = options.range.as_ref().map_or(Ok(0..meta.size), |range: &GetRange| {
            range.as_range(meta.size).map_err(|e| {
                RequestError::new(Cause::Invalid, "get", "bad range").with_source(e).at(location)
            })
        })?;
        let payload = if options.head {
            GetResultPayload::Stream(stream::empty().boxed())
        } else if range.end - range.start > BUFFERED_MAX {
            GetResultPayload::File(file, path)
        } else {
            let bytes = read_range(&file, &path, &range)?;
            GetResultPayload::Stream(stream::once(async { Ok(bytes) }).boxed())
        };
        Ok(GetResult {
            payload,
            meta,
            range,
            attributes: Attributes::default(),
            extensions: Extensions::default(),
        })
    }

    fn delete(&self, locations: Vec<Result<Path>>) -> Vec<Result<Path>> {
        let mut dirs = BTreeSet::new();
        let mut results: Vec<Result<Path>> = locations
            .into_iter()
            .map(|location| {
                let location = location?;
                let path = self.file(&location)?;
                match std::fs::remove_file(&path) {
                    Ok(()) => {
                        dirs.extend(path.parent().map(FsPath::to_owned));
                        Ok(location)
                    }
                    // As in S3: what is not there is deleted.
                    Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(location),
                    Err(e) => Err(failed("remove", &path)(e)),
                }
            })
            .collect();
        for dir in dirs {
            // One that another deletion has removed meanwhile is gone for good when what is above it says so.
            let mut there = dir.ancestors().filter(|dir| dir.is_dir() || *dir == self.root);
            if let Err(error) = sync_dir(there.next().unwrap_or(&self.root)) {
                // None of the batch is known to be gone for good; the last one tells.
                if let Some(last) = results.last_mut() {
                    *last = Err(error);
                }
            } else {
                self.remove_empty(&dir);
            }
        }
        results
    }

    /// Removes a directory and those above it as long as they are empty: an object store has none. Whoever is about to put
    /// something there makes them again.
    fn remove_empty(&self, dir: &FsPath) {
        for dir in dir.ancestors().take_while(|dir| *dir != self.root) {
            if std::fs::remove_dir(dir).is_err() {
                break;
            }
            self.durable.lock().remove(dir);
        }
    }
}

fn place(staged: &FsPath, to: &FsPath, mode: &PutMode) -> io::Result<()> {
    match mode {
        PutMode::Create => {
            std::fs::hard_link(staged, to)?;
            // The object is there; a second name that stays is swept one day.
            let _ = std::fs::remove_file(staged);
            Ok(())
        }
        PutMode::Overwrite | PutMode::Update(_) => std::fs::rename(staged, to),
    }
}

/// Reads `range` of a file; shorter if the file ends before.
fn read_range(mut file: &File, path: &FsPath, range: &Range<u64>) -> Result<Bytes> {
    let len = range.end.saturating_sub(range.start);
    let capacity = usize::try_from(len).map_err(|e| broken("read", path)(io::Error::other(e)))?;
    // Not zeroed first, unlike a buffer for `read_exact_at`.
    let mut buffer = Vec::with_capacity(capacity);
    file.seek(SeekFrom::Start(range.start))
        .and_then(|_| file.take(len).read_to_end(&mut buffer))
        .map_err(broken("read", path))?;
    Ok(buffer.into())
}

/// The same tag that `LocalFileSystem` gives in listings.
fn e_tag(metadata: &Metadata) -> String {
    let since_epoch = metadata
        .modified()
        .ok()
        .and_then(|mtime| mtime.duration_since(std::time::SystemTime::UNIX_EPOCH).ok())
        .unwrap_or_default();
    format!("\"{:x}-{:x}-{:x}\"", metadata.ino(), since_epoch.as_micros(), metadata.len())
}

fn unsupported(what: &'static str) -> object_store::Error {
    object_store::Error::NotImplemented { operation: what.to_owned(), implementer: "DurableLocal".to_owned() }
}

impl fmt::Display for DurableLocal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "file://{}", self.inner.root.display())
    }
}

#[async_trait]
impl ObjectStore for DurableLocal {
    async fn put_opts(&self, location: &Path, payload: PutPayload, options: PutOptions) -> Result<PutResult> {
        if matches!(options.mode, PutMode::Update(_)) {
            return Err(unsupported("put with PutMode::Update"));
        }
        if !options.attributes.is_empty() {
            return Err(unsupported("put with attributes"));
        }
        let (inner, location) = (Arc::clone(&self.inner), location.clone());
        blocking(move || inner.put(&location, &payload, &options.mode)).await
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        if !options.attributes.is_empty() {
            return Err(unsupported("put_multipart with attributes"));
        }
        let (inner, location) = (Arc::clone(&self.inner), location.clone());
        blocking(move || {
            let to = inner.file(&location)?;
            let staged = Some(Arc::new(inner.stage()?));
            let upload = LocalUpload { inner, to, staged, len: 0, stored: Arc::default() };
            Ok(Box::new(upload) as Box<dyn MultipartUpload>)
        })
        .await
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        let (inner, location) = (Arc::clone(&self.inner), location.clone());
        blocking(move || inner.get(&location, &options)).await
    }

    async fn get_ranges(&self, location: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        let (inner, location, ranges) = (Arc::clone(&self.inner), location.clone(), ranges.to_vec());
        blocking(move || {
            let path = inner.file(&location)?;
            let file = File::open(&path).map_err(failed("open", &path))?;
            let size = file.metadata().map_err(broken("stat", &path))?.len();
            let read = |range: Range<u64>| {
                let range = GetRange::Bounded(range).as_range(size).map_err(|e| {
                    RequestError::new(Cause::Invalid, "get", "bad range").with_source(e).at(&location)
                })?;
                read_range(&file, &path, &range)
            };
            ranges.into_iter().map(read).collect()
        })
        .await
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        let inner = Arc::clone(&self.inner);
        locations
            .ready_chunks(DELETE_BATCH)
            .then(move |batch| {
                let inner = Arc::clone(&inner);
                async move {
                    let results = blocking(move || Ok(inner.delete(batch))).await;
                    stream::iter(results.unwrap_or_else(|error| vec![Err(error)]))
                }
            })
            .flatten()
            .boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.inner.files.list(prefix)
    }

    fn list_with_offset(
        &self,
        prefix: Option<&Path>,
        offset: &Path,
    ) -> BoxStream<'static, Result<ObjectMeta>> {
        self.inner.files.list_with_offset(prefix, offset)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        let mut result = self.inner.files.list_with_delimiter(prefix).await?;
        result.common_prefixes.retain(|prefix| prefix.as_ref() != STAGING);
        Ok(result)
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.make_room(to).await?;
        self.inner.files.copy_opts(from, to, options).await
    }

    async fn rename_opts(&self, from: &Path, to: &Path, options: RenameOptions) -> Result<()> {
        self.make_room(to).await?;
        self.inner.files.rename_opts(from, to, options).await
    }
}

impl DurableLocal {
    async fn make_room(&self, to: &Path) -> Result<()> {
        let (inner, to) = (Arc::clone(&self.inner), to.clone());
        blocking(move || inner.ensure_parent(&inner.file(&to)?)).await
    }
}

/// An upload in parts: one staged file, each part at its place in it.
struct LocalUpload {
    inner: Arc<Inner>,
    to: PathBuf,
    /// `None` once completed or aborted.
    staged: Option<Arc<Staged>>,
    /// Where the next part begins.
    len: u64,
    /// Bytes of the parts that have been written.
    stored: Arc<AtomicU64>,
}

impl fmt::Debug for LocalUpload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalUpload").field("to", &self.to).field("len", &self.len).finish_non_exhaustive()
    }
}

fn ended(to: &FsPath) -> object_store::Error {
    RequestError::new(Cause::NoUpload, "upload", "completed or aborted already").at(&to.display())
}

#[async_trait]
impl MultipartUpload for LocalUpload {
    fn put_part(&mut self, payload: PutPayload) -> UploadPart {
        let begin = self.len;
        self.len += payload.content_length() as u64;
        let Some(staged) = self.staged.clone() else {
            let error = ended(&self.to);
            return async { Err(error) }.boxed();
        };
        let stored = Arc::clone(&self.stored);
        blocking(move || {
            staged.write(&payload, begin).map_err(broken("write", staged.path()))?;
            stored.fetch_add(payload.content_length() as u64, Ordering::SeqCst);
            Ok(())
        })
        .boxed()
    }

    async fn complete(&mut self) -> Result<PutResult> {
        let staged = self.staged.take().ok_or_else(|| ended(&self.to))?;
        let (inner, to) = (Arc::clone(&self.inner), self.to.clone());
        let whole = self.stored.load(Ordering::SeqCst) == self.len;
        blocking(move || {
            let result = if whole {
                inner.publish(&staged, &to, &PutMode::Overwrite)
            } else {
                let message = "completed before all its parts were stored";
                Err(RequestError::new(Cause::Invalid, "upload", message).at(&to.display()))
            };
            if result.is_err() {
                let _ = std::fs::remove_file(staged.path());
            }
            result
        })
        .await
    }

    async fn abort(&mut self) -> Result<()> {
        let staged = self.staged.take().ok_or_else(|| ended(&self.to))?;
        blocking(move || std::fs::remove_file(staged.path()).map_err(broken("remove", staged.path()))).await
    }
}

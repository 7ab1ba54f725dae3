//! The mount's side of the control socket: answers commands while the volume is mounted.
//!
//! Owns the socket's file and the tasks of the connections. Who may connect is decided by the directory's permissions and
//! checked against the peer's user.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rfs_core::meta::Meta;
use rfs_core::types::{Clock, Ino, SystemClock, Timestamp};
use rfs_core::vfs::{Vfs, WriteAccess, fsck, info};
use rfs_fuse::{MountHandle, UnmountError, UnmountMode};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::unix::OwnedWriteHalf;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{mpsc, watch};
use tokio::task::{JoinHandle, JoinSet};

use crate::control::{self, Envelope, Event, PROTOCOL, Progress, REQUEST_BYTES_MAX, Request, WORKING_EVERY};
use crate::exit::{Exit, Failure, Result, ResultExt, meta_failure};
use crate::status::{self, MountFacts};
use crate::umount::Unmounted;
use crate::url::MetaUrl;
use crate::volume::Volume;
use crate::{config, gc};

/// Most commands at a time; more wait in the socket's queue.
const CONNECTIONS_MAX: usize = 16;
/// How long a mount may be in use before that is told.
const BUSY_MAX: Duration = Duration::from_secs(3);
/// How long answers may take to be written when the mount ends.
const GOODBYE_MAX: Duration = Duration::from_secs(30);

/// A mounted volume and everything a command may ask about it.
pub(crate) struct Mounted {
    volume: Volume,
    vfs: Arc<Vfs>,
    handle: Arc<MountHandle>,
    options: Mutex<String>,
    since: Timestamp,
}

impl Mounted {
    pub(crate) fn new(volume: Volume, vfs: Arc<Vfs>, handle: Arc<MountHandle>, options: String) -> Mounted {
        Mounted { volume, vfs, handle, options: Mutex::new(options), since: SystemClock.now() }
    }

    pub(crate) fn handle(&self) -> &Arc<MountHandle> {
        &self.handle
    }

    pub(crate) fn vfs(&self) -> &Vfs {
        &self.vfs
    }

    pub(crate) fn volume(&self) -> &Volume {
        &self.volume
    }
}

/// A bound socket.
#[derive(Debug)]
pub(crate) struct Socket {
    listener: UnixListener,
    file: SocketFile,
}

/// The name of a socket in the file system; dropping it removes the name.
#[derive(Debug)]
struct SocketFile(PathBuf);

impl Socket {
    /// Listens for commands about `volume` mounted at `mountpoint`. A file that a dead mount left is replaced: whoever
    /// holds the volume and the mount point holds the socket.
    pub(crate) fn bind(volume: &MetaUrl, mountpoint: &Path) -> Result<Socket> {
        let path = control::make_runtime_dir()?.join(control::socket_name(volume, mountpoint));
        let doing = || format!("listening for commands at {}", path.display());
        match std::fs::remove_file(&path) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(e).doing(doing()),
            _ => {}
        }
        let listener = UnixListener::bind(&path).doing(doing())?;
        Ok(Socket { listener, file: SocketFile(path) })
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        // A file that stays is replaced by the next mount and ignored by commands.
        let _ = std::fs::remove_file(&self.0);
    }
}

/// How a mount ended, for whoever asked for it.
#[derive(Debug, Clone)]
pub(crate) struct End {
    /// What could not be stored.
    pub(crate) lost: Vec<String>,
    /// What else went wrong.
    pub(crate) failure: Option<String>,
}

/// Answers commands until it is stopped.
pub(crate) struct Server {
    task: JoinHandle<()>,
    file: Option<SocketFile>,
    end: watch::Sender<Option<End>>,
}

impl Server {
    /// Starts answering.
    pub(crate) fn start(socket: Socket, mounted: Arc<Mounted>) -> Server {
        let (end, ended) = watch::channel(None);
        let Socket { listener, file } = socket;
        Server { task: tokio::spawn(accept(listener, mounted, ended)), file: Some(file), end }
    }

    /// Lets go of the socket's name, before the volume is released: from then on another mount may listen under it.
    /// Commands that are connected are answered still.
    pub(crate) fn hide(&mut self) {
        self.file = None;
    }

    /// Tells waiting commands how the mount ended and stops, after 30 s at most.
    pub(crate) async fn stop(&mut self, end: End) {
        self.end.send_replace(Some(end));
        if tokio::time::timeout(GOODBYE_MAX, &mut self.task).await.is_err() {
            self.task.abort();
        }
    }
}

async fn accept(listener: UnixListener, mounted: Arc<Mounted>, ended: watch::Receiver<Option<End>>) {
    let mut end = ended.clone();
    let mut connections = JoinSet::new();
    loop {
        // A command's task ends without a result; a full set waits for one of them.
        while connections.try_join_next().is_some() {}
        while connections.len() >= CONNECTIONS_MAX && connections.join_next().await.is_some() {}
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => {
                    connections.spawn(converse(stream, Arc::clone(&mounted), ended.clone()));
                }
                Err(error) => {
                    tracing::warn!(%error, "accepting a command");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            },
            // The guard of the value must not be held over an await.
            _ = async { end.wait_for(Option::is_some).await.is_ok() } => break,
        }
    }
    // The name is gone; who connected before is still to be answered.
    for stream in waiting(listener) {
        connections.spawn(converse(stream, Arc::clone(&mounted), ended.clone()));
    }
    while connections.join_next().await.is_some() {}
}

/// The connections that nobody has accepted yet.
fn waiting(listener: UnixListener) -> Vec<UnixStream> {
    let accepted = listener.into_std().map(|listener| {
        std::iter::from_fn(|| listener.accept().ok())
            .filter_map(|(stream, _)| {
                stream.set_nonblocking(true).ok()?;
                UnixStream::from_std(stream).ok()
            })
            .collect()
    });
    accepted.unwrap_or_default()
}

/// One connection: one request, its answer.
async fn converse(stream: UnixStream, mounted: Arc<Mounted>, ended: watch::Receiver<Option<End>>) {
    let own = rustix::process::geteuid().as_raw();
    if !stream.peer_cred().is_ok_and(|peer| peer.uid() == own || peer.uid() == 0) {
        tracing::warn!("refused a command of another user");
        return;
    }
    let (read, mut write) = stream.into_split();
    let mut line = String::new();
    let read = BufReader::new(read.take(REQUEST_BYTES_MAX)).read_line(&mut line).await;
    let request = match read.map_err(Failure::from).and_then(|_| parse(&line)) {
        Ok(request) => request,
        Err(failure) => return send(&mut write, &Event::from(Err(failure))).await,
    };
    tracing::debug!(?request, "command");
    // A full queue drops progress, never the result.
    let (tell, mut told) = mpsc::channel(16);
    let work = answer(&mounted, request, ended, tell);
    let mut work = std::pin::pin!(work);
    let mut working = tokio::time::interval(WORKING_EVERY);
    loop {
        let event = tokio::select! {
            biased;
            result = &mut work => return send(&mut write, &Event::from(result)).await,
            Some(progress) = told.recv() => Event::Progress(progress),
            _ = working.tick() => Event::Working,
        };
        send(&mut write, &event).await;
    }
}

fn parse(line: &str) -> Result<Request> {
    let other = |what: String| {
        Failure::new(Exit::Error, what)
            .hint("the mount runs another version of rfs: mount again with this one")
    };
    let envelope: Envelope =
        serde_json::from_str(line).map_err(|e| other(format!("request not understood: {e}")))?;
    if envelope.protocol != PROTOCOL {
        return Err(other(format!(
            "the mount speaks protocol {PROTOCOL}, the command {}",
            envelope.protocol
        )));
    }
    Ok(envelope.request)
}

/// Sends an event; a command that went away is no reason to stop its work.
async fn send(write: &mut OwnedWriteHalf, event: &Event) {
    let mut line = serde_json::to_vec(event).expect("events are plain data");
    line.push(b'\n');
    if let Err(error) = write.write_all(&line).await {
        tracing::debug!(%error, "a command went away");
    }
}

async fn answer(
    mounted: &Mounted,
    request: Request,
    mut ended: watch::Receiver<Option<End>>,
    tell: mpsc::Sender<Progress>,
) -> Result<Value> {
    let unmounts = matches!(request, Request::Shutdown { .. });
    match unless_ended(&mut ended, perform(mounted, request, &tell)).await {
        Some(done) if !unmounts => done,
        None if !unmounts => Err(Failure::new(Exit::Error, "the mount has ended")),
        Some(Err(failure)) => Err(failure),
        // The mount may have ended before the unmounting returned here, or somebody else has unmounted.
        Some(Ok(_)) | None => how_it_ended(ended).await,
    }
}

/// What `work` comes to; `None` if the mount ends before.
async fn unless_ended<T>(
    ended: &mut watch::Receiver<Option<End>>,
    work: impl Future<Output = T>,
) -> Option<T> {
    if ended.borrow().is_some() {
        return None;
    }
    tokio::select! {
        biased;
        done = work => Some(done),
        // The guard of the value must not be held over an await.
        _ = async { ended.wait_for(Option::is_some).await.is_ok() } => None,
    }
}

async fn perform(mounted: &Mounted, request: Request, tell: &mpsc::Sender<Progress>) -> Result<Value> {
    match request {
        Request::Status => status(mounted).await,
        Request::Info { ino } => {
            let described = info::describe(&mounted.volume.meta, Ino(ino)).await;
            let described = described.map_err(|e| meta_failure(e, "describing the inode"))?;
            Ok(serde_json::to_value(described)?)
        }
        Request::Fsck { data, repair } => {
            if repair {
                return Err(Failure::new(Exit::Busy, "a volume cannot be repaired while it is mounted")
                    .hint("unmount it, then run: rfs fsck --repair META_URL"));
            }
            let options = fsck::Options { data, repair: false };
            let progress = |now: fsck::Progress| {
                // Progress that nobody takes in time is dropped.
                let _ = tell.try_send(now.into());
            };
            let report = fsck::check(&mounted.volume.meta, &mounted.volume.data, &options, &progress).await;
            Ok(serde_json::to_value(report.map_err(|e| meta_failure(e, "checking the volume"))?)?)
        }
        Request::Gc => {
            let report = mounted.vfs.gc().await.map_err(|e| meta_failure(e, "collecting garbage"))?;
            Ok(serde_json::to_value(gc::Report::from(report))?)
        }
        Request::Flush => flush(mounted).await.map(|()| Value::Null),
        Request::Config { capacity, inodes } => configure(mounted, config::Change { capacity, inodes }).await,
        Request::ReadOnly { on } => {
            let access = if on { WriteAccess::ReadOnly } else { WriteAccess::ReadWrite };
            let changed = mounted.vfs.set_read_only(access).await;
            changed.map(|()| Value::Null).map_err(|e| meta_failure(e, "changing to or from read-only"))
        }
        Request::Shutdown { force } => shut_down(mounted, force, tell).await.map(|()| Value::Null),
    }
}

async fn status(mounted: &Mounted) -> Result<Value> {
    let Volume { url, record, meta, data, .. } = &mounted.volume;
    let volume = status::volume_report(url, record, meta).await?;
    let facts = MountFacts {
        mountpoint: mounted.handle.mountpoint(),
        options: &mounted.options.lock().clone(),
        since: mounted.since,
        broken: mounted.vfs.broken(),
        vfs: mounted.vfs.stats(),
        data: data.stats(),
        disk_cache_dir: data.disk_cache_dir(),
    };
    Ok(serde_json::to_value(status::Report { volume, mount: Some(facts.into()) })?)
}

async fn flush(mounted: &Mounted) -> Result<()> {
    mounted.handle.write_back().await.doing("writing back what the kernel holds")?;
    mounted.vfs.sync_all().await.map_err(|e| crate::volume::store_error(e, "storing what is waiting"))
}

async fn configure(mounted: &Mounted, change: config::Change) -> Result<Value> {
    let meta: &Meta = &mounted.volume.meta;
    let mut limits = meta.opened_volume().limits;
    if !change.is_empty() {
        limits = change.apply(limits);
        meta.set_limits(limits).await.map_err(|e| meta_failure(e, "changing the limits"))?;
    }
    Ok(serde_json::to_value(config::Report::from(limits))?)
}

/// Unmounts, trying for a moment longer while it is in use: a program that has just ended may not have let go of its
/// files yet, and the kernel does not say when it has.
async fn unmount(mounted: &Mounted) -> Result<(), UnmountError> {
    let began = tokio::time::Instant::now();
    loop {
        let unmounted = mounted.handle.unmount(UnmountMode::Orderly).await;
        if !matches!(unmounted, Err(UnmountError::Busy(_))) || began.elapsed() > BUSY_MAX {
            return unmounted;
        }
        tokio::time::sleep(BUSY_MAX / 20).await;
    }
}

/// Waits for the end of the mount.
async fn how_it_ended(mut ended: watch::Receiver<Option<End>>) -> Result<Value> {
    let end = ended.wait_for(Option::is_some).await.doing("waiting for the end of the mount")?.clone();
    let End { mut lost, failure } = end.expect("it was waited for");
    lost.extend(failure);
    Ok(serde_json::to_value(Unmounted { lost })?)
}

/// Stores and unmounts; the mount ends some time after.
async fn shut_down(mounted: &Mounted, force: bool, tell: &mpsc::Sender<Progress>) -> Result<()> {
    let stage = |stage: &str| Progress { stage: stage.to_owned(), done: 0, total: None };
    // Progress that nobody takes in time is dropped.
    let _ = tell.try_send(stage("storing"));
    match flush(mounted).await {
        Err(failure) if !force => {
            return Err(failure.hint(
                "try again when that is mended; --force unmounts and loses what is neither stored nor staged",
            ));
        }
        Err(failure) => tracing::warn!(%failure, "unmounting although something is not stored"),
        Ok(()) => {}
    }
    let _ = tell.try_send(stage("unmounting"));
    match unmount(mounted).await {
        Ok(()) | Err(UnmountError::NotMounted(_)) => {}
        Err(UnmountError::Busy(_)) if force => {
            mounted.handle.unmount(UnmountMode::Force).await.doing("unmounting by force")?;
        }
        Err(error @ UnmountError::Busy(_)) => {
            return Err(Failure { exit: Exit::Busy, error: error.into(), hint: None });
        }
        Err(error) => return Err(error.into()),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end() -> End {
        End { lost: vec!["a file".to_owned()], failure: None }
    }

    #[tokio::test]
    async fn an_end_that_comes_before_the_work_returns_is_told() {
        let (tell, mut ended) = watch::channel(None);
        assert_eq!(unless_ended(&mut ended, async { 1 }).await, Some(1));
        let ending = async {
            tokio::task::yield_now().await;
            tell.send_replace(Some(end()));
        };
        let (told, ()) = tokio::join!(unless_ended(&mut ended, std::future::pending::<()>()), ending);
        assert_eq!(told, None);
        let told = how_it_ended(ended).await.expect("it has ended");
        assert_eq!(told, serde_json::json!({"lost": ["a file"]}));
    }

    #[tokio::test]
    async fn who_was_not_accepted_before_the_end_is_answered_still() {
        let dir = tempfile::tempdir().expect("a temporary directory can be made");
        let path = dir.path().join("socket");
        let listener = UnixListener::bind(&path).expect("the path is free");
        let connect = || std::os::unix::net::UnixStream::connect(&path).expect("somebody listens");
        let clients = [connect(), connect()];
        assert_eq!(waiting(listener).len(), clients.len());
    }
}

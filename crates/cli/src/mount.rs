//! `rfs mount`: shows a volume in the directory tree, until it is unmounted.
//!
//! Order matters here. Opening: lock the metadata, check the store, listen on the control socket, mount, and only then
//! say that it is ready. Ending: the kernel's bytes, the filesystem's bytes, the session, the engine; whoever asked for
//! the end over the socket is answered last.

#![expect(clippy::doc_markdown, reason = "doc comments of arguments are the help text, shown as it is")]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rfs_core::data::OnLost;
use rfs_core::vfs::{ShutdownReport, Unsaved, Vfs, VfsOptions, WriteAccess};
use rfs_fuse::{MountError, MountHandle, MountOptions, Sharing};
use tokio::runtime::Handle;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::exit::{Exit, Failure, Result, ResultExt};
use crate::logging::LogArgs;
use crate::serve::{End, Mounted, Server};
use crate::settings::{LocalDir, Size, Span, Switch};
use crate::url::MetaUrl;
use crate::volume::{OpenSettings, Volume};
use crate::{daemon, format, logging, output, paths, volume};

/// Size of the disk cache, unless told otherwise.
const CACHE_SIZE_DEFAULT: Size = Size(10 << 30);
/// Most bytes that are staged, unless told otherwise.
const STAGING_MAX_DEFAULT: Size = Size(10 << 30);
/// Least memory that works: a pack being filled, parts on their way, some cache.
const MEMORY_MIN: Size = Size(32 << 20);

/// Mount a volume
///
/// Without META_URL, mounts the embedded volume: a redb file and a directory below ~/.local/share/rfs, made at first
/// use. Stays in the foreground and ends when the volume is unmounted; Ctrl-C or SIGTERM unmount it. Credentials come from
/// the usual AWS places (environment, ~/.aws, instance).
#[derive(Debug, Clone, clap::Args)]
#[command(allow_missing_positional = true)]
pub(crate) struct Args {
    /// The volume: redb:///path/meta.redb or fdb:///etc/foundationdb/fdb.cluster?prefix=rfs
    pub(crate) meta_url: Option<MetaUrl>,
    /// Where to: an existing, empty directory
    pub(crate) mountpoint: PathBuf,
    /// Return when the mount answers, and go on in the background; logs to ~/.local/state/rfs/mount.log unless --log-file
    /// says otherwise
    #[arg(short, long)]
    pub(crate) daemon: bool,
    /// Mount options, as in fstab: ro, allow_other, noatime, nosuid, nonempty, …; also memory=, cache-dir=, cache-size=,
    /// io-timeout=, writeback-cache=, cache-written=, staging=, staging-max=, pack-size=
    #[arg(short, value_name = "OPTIONS")]
    pub(crate) options: Vec<String>,
    /// Nothing can be changed (as -o ro)
    #[arg(long)]
    pub(crate) read_only: bool,
    /// Other users may use the mount, as far as permission bits let them (as -o allow_other)
    #[arg(long)]
    pub(crate) allow_other: bool,
    /// Memory for caches and for what is waiting to be stored; while many programs write and read at once, rfs takes up to
    /// 96MiB more (192MiB unless said otherwise)
    #[arg(long, value_name = "SIZE")]
    pub(crate) memory: Option<Size>,
    /// Where contents that were read are kept on a local disk: a directory, or off. Unless said otherwise META_FILE.cache,
    /// beside the metadata file, if the store is S3; there only what came in small pieces is kept, as that saves most
    /// requests. A directory that is named here takes all that is read
    #[arg(long, value_name = "DIR|off")]
    pub(crate) cache_dir: Option<LocalDir>,
    /// Most bytes in the cache directory (10GiB unless said otherwise). The last tenth of the disk is left free
    #[arg(long, value_name = "SIZE")]
    pub(crate) cache_size: Option<Size>,
    /// How long a request to the store is tried until programs get an I/O error; 0 is for ever (5m unless said otherwise)
    #[arg(long, value_name = "TIME")]
    pub(crate) io_timeout: Option<Span>,
    /// Whether the kernel collects writes: for programs that write in small pieces, on a volume that one machine owns and
    /// that has no --capacity. Off by default: it makes the kernel ask more often about every file that was open
    #[arg(long, value_enum, value_name = "WHEN")]
    pub(crate) writeback_cache: Option<Switch>,
    /// Whether the kernel keeps in memory what programs write, for them to read it again. Off suits a machine that mainly
    /// writes, such as for backups: it has a third less work and keeps its memory for others. Needs Linux 6.6
    #[arg(long, value_enum, value_name = "WHEN")]
    pub(crate) cache_written: Option<Switch>,
    /// Where fsync makes contents durable before they are sent: a directory on a local disk, or off. Where the last mount
    /// had it unless said otherwise, at first beside the metadata file; off for a volume that several machines share
    #[arg(long, value_name = "DIR|off")]
    pub(crate) staging: Option<LocalDir>,
    /// Most bytes in the staging directory; beyond them fsync waits for the store. The last tenth of the disk is left free
    #[arg(long, value_name = "SIZE")]
    pub(crate) staging_max: Option<Size>,
    /// Most bytes of one object in the store, 16MiB to 64MiB (unless said otherwise 16.5MiB, and 8MiB of a large file).
    /// Larger ones are fewer and are sent in parts while they fill, which suits a store that is far away; they take more
    /// --memory, and S3 gets no checksum of a part
    #[arg(long, value_name = "SIZE")]
    pub(crate) pack_size: Option<Size>,
}

/// What `--pack-size` can be: below, a pack could not hold what belongs together; above, one writer takes too much memory.
const PACK_SIZES: std::ops::RangeInclusive<Size> = Size(16 << 20)..=Size(64 << 20);

/// What to mount where and how: arguments and options, parsed and checked.
#[derive(Debug)]
struct Settings {
    volume: Option<MetaUrl>,
    mountpoint: PathBuf,
    options: MountOptions,
    keeps_written: bool,
    memory: Size,
    cache: Option<LocalDir>,
    cache_max: Size,
    io_timeout: Duration,
    staging: Option<LocalDir>,
    staging_max: Size,
    pack_size: Option<Size>,
}

impl Settings {
    fn of(args: &Args) -> Result<Settings> {
        let mut args = args.clone();
        let mut options = MountOptions::default();
        let lists = std::mem::take(&mut args.options);
        for list in &lists {
            let mut wrong = None;
            let parsed = options.apply(list, |name, value| match args.apply_option(name, value) {
                Ok(known) => known,
                Err(message) => {
                    wrong.get_or_insert(message);
                    true
                }
            });
            let listed =
                |failure: Failure| failure.hint("rfs help mount names those of rfs, mount(8) the others");
            parsed.exit(Exit::Usage, format!("-o {list}")).map_err(listed)?;
            if let Some(message) = wrong {
                return Err(Failure::usage(format!("-o {list}: {message}")));
            }
        }
        options.read_only |= args.read_only;
        if args.allow_other {
            options.access = rfs_fuse::Access::Everyone;
        }
        if let Some(switch) = args.writeback_cache {
            options.writeback = Some(switch == Switch::On);
        }
        let keeps_written = args.cache_written != Some(Switch::Off);
        if !keeps_written && options.writeback == Some(true) {
            return Err(Failure::usage(
                "--cache-written off: what --writeback-cache collects is in that cache",
            ));
        }
        let memory = args.memory.unwrap_or(volume::MEMORY_DEFAULT);
        if memory < MEMORY_MIN {
            return Err(Failure::usage(format!(
                "--memory {memory} is too little: give it {MEMORY_MIN} at least"
            )));
        }
        if let Some(size) = args.pack_size.filter(|size| !PACK_SIZES.contains(size)) {
            let (least, most) = (PACK_SIZES.start(), PACK_SIZES.end());
            return Err(Failure::usage(format!("--pack-size {size}: it can be {least} to {most}")));
        }
        let shared = args.meta_url.as_ref().is_some_and(|url| !url.is_exclusive());
        let uncached = args.cache_dir == Some(LocalDir::Off) || shared && args.cache_dir.is_none();
        if uncached && args.cache_size.is_some() {
            return Err(Failure::usage("--cache-size: there is no cache without --cache-dir=DIR here"));
        }
        if shared && matches!(args.staging, Some(LocalDir::Dir(_))) {
            return Err(Failure::usage(
                "--staging: others who share the volume would not see what is staged here",
            ));
        }
        if let (None, Some(url)) =
            (&args.meta_url, args.mountpoint.to_str().filter(|text| text.contains("://")))
        {
            let usage = format!("rfs mount {url} DIRECTORY");
            return Err(Failure::usage(format!("{url} is to be mounted, but where? {usage}")));
        }
        Ok(Settings {
            volume: args.meta_url.map(|url| url.canonical()),
            mountpoint: crate::url::absolute(&args.mountpoint).map_err(Failure::usage)?,
            options,
            keeps_written,
            memory,
            cache: args.cache_dir,
            cache_max: args.cache_size.unwrap_or(CACHE_SIZE_DEFAULT),
            io_timeout: args.io_timeout.map_or(volume::IO_TIMEOUT_DEFAULT, |span| span.0),
            staging: args.staging,
            staging_max: args.staging_max.unwrap_or(STAGING_MAX_DEFAULT),
            pack_size: args.pack_size,
        })
    }
}

impl Settings {
    /// How long the store is waited for; `None`: for ever.
    fn io_timeout(&self) -> Option<Duration> {
        Some(self.io_timeout).filter(|timeout| !timeout.is_zero())
    }
}

/// Options of `-o` that are ours rather than the kernel's, with dashes.
const OWN_OPTIONS: [&str; 9] = [
    "memory",
    "cache-dir",
    "cache-size",
    "io-timeout",
    "writeback-cache",
    "cache-written",
    "staging",
    "staging-max",
    "pack-size",
];

/// Whether a word of `-o` is an option of ours.
pub(crate) fn is_own_option(name: &str) -> bool {
    OWN_OPTIONS.contains(&name.replace('_', "-").as_str())
}

impl Args {
    /// Takes an option of `-o` that is one of our own; whether it is.
    fn apply_option(&mut self, name: &str, value: Option<&str>) -> Result<bool, String> {
        let given = || value.ok_or_else(|| format!("{name} needs a value"));
        match name.replace('_', "-").as_str() {
            "memory" => self.memory = Some(given()?.parse()?),
            "cache-dir" => self.cache_dir = Some(given()?.parse()?),
            "cache-size" => self.cache_size = Some(given()?.parse()?),
            "io-timeout" => self.io_timeout = Some(given()?.parse()?),
            "writeback-cache" => self.writeback_cache = Some(given()?.parse()?),
            "cache-written" => self.cache_written = Some(given()?.parse()?),
            "staging" => self.staging = Some(given()?.parse()?),
            "pack-size" => self.pack_size = Some(given()?.parse()?),
            "staging-max" => self.staging_max = Some(given()?.parse()?),
            _ => return Ok(false),
        }
        Ok(true)
    }
}

pub(crate) fn run(args: &Args, log: &LogArgs) -> Result<Exit> {
    let settings = Settings::of(args)?;
    if args.daemon && !daemon::is_child() {
        daemon::spawn()?;
        return Ok(Exit::Ok);
    }
    let mut log = log.clone();
    if daemon::is_child() {
        daemon::leave_session();
        if log.log_file.is_none() {
            log.log_file = Some(default_log_file()?);
        }
    }
    logging::start(&log)?;
    let runtime = crate::runtime::start()?;
    let result = runtime.block_on(mount(settings));
    // A request to the store or a thread in the kernel may still hang; everything that matters has been waited for.
    runtime.shutdown_timeout(Duration::from_secs(1));
    result
}

fn default_log_file() -> Result<PathBuf> {
    let directory = paths::state_dir()?;
    let made = std::fs::create_dir_all(&directory).doing(format!("making {}", directory.display()));
    made.map_err(|failure| {
        failure.hint("a mount in the background logs there; --log-file names another place")
    })?;
    Ok(directory.join("mount.log"))
}

async fn mount(settings: Settings) -> Result<Exit> {
    // Before anything that takes long, so that an early signal is not lost.
    let mut signals = Signals::listen()?;
    let url = match &settings.volume {
        Some(url) => url.clone(),
        None => format::embedded(&paths::data_dir()?).await?,
    };
    let running = tokio::select! {
        running = start(&url, settings) => running?,
        name = signals.next() => return Err(Failure::new(Exit::Error, format!("{name} before the volume was mounted"))),
    };
    if daemon::is_child() {
        daemon::detach()?;
    }
    running.serve(signals).await
}

/// A mount that answers.
struct Running {
    mounted: Arc<Mounted>,
    server: Server,
}

async fn start(url: &MetaUrl, settings: Settings) -> Result<Running> {
    if url.is_exclusive() {
        volume::refuse_mounted(url)?;
    }
    let open = OpenSettings {
        mountpoint: settings.mountpoint.clone(),
        read_only: settings.options.read_only,
        memory: settings.memory,
        cache: settings.cache.clone(),
        cache_max: settings.cache_max,
        io_timeout: settings.io_timeout,
        staging: settings.staging.clone(),
        staging_max: settings.staging_max,
        pack_size: settings.pack_size,
        on_lost: OnLost::Refuse,
    };
    let volume = Volume::open(url, &open).await?;
    match start_over(&volume, &settings).await {
        Ok((vfs, handle, server_parts)) => {
            let mounted = Arc::new(Mounted::new(volume, vfs, handle, settings.options.describe()));
            let server = Server::start(server_parts, Arc::clone(&mounted));
            Ok(Running { mounted, server })
        }
        Err(failure) => {
            if let Err(error) = volume.release().await {
                tracing::warn!(%error, "closing the volume after mounting failed");
            }
            Err(failure)
        }
    }
}

/// What mounting an open volume makes.
type Parts = (Arc<Vfs>, Arc<MountHandle>, crate::serve::Socket);

async fn start_over(volume: &Volume, settings: &Settings) -> Result<Parts> {
    let options = &settings.options;
    let vfs_options = VfsOptions {
        access: if options.read_only { WriteAccess::ReadOnly } else { WriteAccess::ReadWrite },
        kernel_caches_writes: options.writeback.unwrap_or(false) && cfg!(target_os = "linux"),
        kernel_keeps_written: settings.keeps_written,
        atime: options.atime,
        heartbeat: !volume.url.is_exclusive(),
        io_timeout: settings.io_timeout(),
        store_room: volume.store_room(),
        ..VfsOptions::default()
    };
    let (meta, data) = (Arc::clone(&volume.meta), Arc::clone(&volume.data));
    let vfs = Vfs::mount(meta, data, Arc::clone(&volume.memory), vfs_options);
    match attach(volume, settings, &vfs).await {
        Ok((handle, socket)) => Ok((vfs, handle, socket)),
        Err(failure) => {
            vfs.shutdown().await;
            Err(failure)
        }
    }
}

/// Listens for commands and mounts.
async fn attach(
    volume: &Volume,
    settings: &Settings,
    vfs: &Arc<Vfs>,
) -> Result<(Arc<MountHandle>, crate::serve::Socket)> {
    let mountpoint = rfs_fuse::resolve(&settings.mountpoint)
        .map_err(|_| MountError::MountpointMissing(settings.mountpoint.clone()))?;
    // First the socket: whoever sees the mount can ask it.
    let socket = crate::serve::Socket::bind(&volume.url, &mountpoint)?;
    let fuse = rfs_fuse::MountSettings {
        mountpoint: settings.mountpoint.clone(),
        source: volume.url.to_string(),
        options: settings.options.clone(),
        sharing: if volume.url.is_exclusive() { Sharing::Exclusive } else { Sharing::Shared },
        threads: None,
        answer_within: settings.io_timeout().map(|timeout| timeout * 2 + Duration::from_secs(30)),
        replace_dead: true,
    };
    let (vfs, runtime) = (Arc::clone(vfs), Handle::current());
    let mounting = tokio::task::spawn_blocking(move || rfs_fuse::mount(vfs, &runtime, &fuse));
    let handle = mounting.await?.map_err(mount_failure)?;
    Ok((Arc::new(handle), socket))
}

fn mount_failure(error: MountError) -> Failure {
    let (exit, hint) = match &error {
        MountError::AlreadyMounted { mountpoint, .. } => {
            let mountpoint = mountpoint.display();
            (Exit::Busy, Some(format!("mount elsewhere, or unmount it first: rfs umount {mountpoint}")))
        }
        _ => (Exit::Error, None),
    };
    Failure { exit, error: error.into(), hint }
}

impl Running {
    /// Serves until the end, and ends everything in order.
    async fn serve(mut self, mut signals: Signals) -> Result<Exit> {
        let handle = Arc::clone(self.mounted.handle());
        let unmounted = tokio::select! {
            ended = handle.wait() => ended.doing("serving the mount"),
            name = signals.next() => {
                tracing::info!(signal = name, "unmounting");
                let stopped = tokio::select! {
                    stopped = handle.stop() => stopped.map(|_| ()).doing("unmounting"),
                    again = signals.next() => return Err(gave_up(again)),
                };
                stopped
            }
        };
        let ended = tokio::select! {
            ended = self.end() => ended,
            again = signals.next() => return Err(gave_up(again)),
        };
        unmounted?;
        ended
    }

    /// Stores what is left, closes everything, and answers whoever asked for the end.
    async fn end(&mut self) -> Result<Exit> {
        let report = self.mounted.vfs().shutdown().await;
        self.server.hide();
        let closed = self.mounted.volume().release().await;
        let lost = lost(&report);
        let end = End { lost: lost.clone(), failure: closed.as_ref().err().map(Failure::message) };
        self.server.stop(end).await;
        if !lost.is_empty() {
            for line in &lost {
                output::note(format_args!("rfs: not stored: {line}"));
                tracing::error!(what = %line, "not stored");
            }
            return Err(Failure::new(Exit::StoreDown, "not everything could be stored"));
        }
        closed?;
        Ok(Exit::Ok)
    }
}

fn gave_up(signal: &str) -> Failure {
    Failure::new(
        Exit::Error,
        format!("a second {signal} while storing what is left: what was not stored is lost"),
    )
}

/// What was not stored, for people.
fn lost(report: &ShutdownReport) -> Vec<String> {
    let files = report.unsaved.iter().map(|Unsaved { ino, path, bytes }| match path {
        Some(path) => format!("{path}: {bytes} bytes"),
        None => format!("{bytes} bytes of inode {ino}, which has no name any more"),
    });
    files.chain(report.errors.iter().map(ToString::to_string)).collect()
}

/// The signals that end a mount.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

impl Signals {
    fn listen() -> Result<Signals> {
        let listen = |kind| signal(kind).doing("listening for signals");
        Ok(Signals {
            terminate: listen(SignalKind::terminate())?,
            interrupt: listen(SignalKind::interrupt())?,
            hangup: listen(SignalKind::hangup())?,
        })
    }

    /// Waits for the next one and names it.
    async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
            _ = self.hangup.recv() => "SIGHUP",
        }
    }
}

/// Mounts on behalf of mount(8): in the background.
pub(crate) fn run_for_mount(spec: &str, directory: &Path, options: &str) -> Result<Exit> {
    let args = Args {
        meta_url: Some(spec.parse().map_err(Failure::usage)?),
        mountpoint: directory.to_owned(),
        daemon: true,
        options: vec![options.to_owned()],
        read_only: false,
        allow_other: false,
        memory: None,
        cache_dir: None,
        cache_size: None,
        io_timeout: None,
        writeback_cache: None,
        cache_written: None,
        staging: None,
        staging_max: None,
        pack_size: None,
    };
    run(&args, &LogArgs::default())
}

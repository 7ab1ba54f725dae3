//! Where log lines go, and in which form.

use std::fs::{self, File, OpenOptions};
use std::io::{self, IsTerminal};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use clap::{Args, ValueEnum};
use rustix::fs::{FlockOperation, flock};
use tracing_subscriber::EnvFilter;

use crate::exit::{Result, ResultExt};

/// Form of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

/// Bytes of a log file, and of the one before it.
const LOG_BYTES_MAX: u64 = 16 << 20;

/// Where these options stand in the help: every command has them.
const HEADING: &str = "Logging";

/// Options of logging.
#[derive(Debug, Clone, Args)]
#[expect(clippy::struct_field_names, reason = "they are the names of the options")]
pub(crate) struct LogArgs {
    /// Least severe messages to log: error, warn, info, debug, trace, or a filter such as `info,rfs_core::vfs=debug`
    #[arg(long, env = "RFS_LOG", default_value = "warn", value_name = "FILTER", global = true, help_heading = HEADING)]
    pub(crate) log_level: String,
    /// Form of log lines
    #[arg(long, value_enum, default_value = "text", value_name = "FORMAT", global = true, help_heading = HEADING)]
    pub(crate) log_format: Format,
    /// Append log lines to this file instead of standard error; at 16MiB it is renamed to FILE.old, and a new one begun
    #[arg(long, value_name = "FILE", global = true, help_heading = HEADING)]
    pub(crate) log_file: Option<PathBuf>,
}

impl Default for LogArgs {
    fn default() -> LogArgs {
        LogArgs { log_level: "warn".to_owned(), log_format: Format::Text, log_file: None }
    }
}

/// Starts logging; once a process.
pub(crate) fn start(args: &LogArgs) -> Result<()> {
    let filter = EnvFilter::try_new(filter_of(&args.log_level))
        .exit(crate::exit::Exit::Usage, format!("--log-level {}", args.log_level))?;
    let builder = tracing_subscriber::fmt().with_env_filter(filter);
    match &args.log_file {
        Some(path) => {
            let file = LogFile::open(path.clone(), LOG_BYTES_MAX);
            let file = file.doing(format!("opening the log file {}", path.display()))?;
            finish(builder.with_ansi(false).with_writer(Mutex::new(file)), args.log_format);
        }
        None => finish(
            builder.with_ansi(std::io::stderr().is_terminal()).with_writer(std::io::stderr),
            args.log_format,
        ),
    }
    log_panics();
    Ok(())
}

/// A file that log lines are appended to. One that is full is renamed, in place of the one that was renamed before.
struct LogFile {
    path: PathBuf,
    file: File,
    bytes_max: u64,
}

impl LogFile {
    fn open(path: PathBuf, bytes_max: u64) -> io::Result<LogFile> {
        let file = LogFile::append(&path)?;
        Ok(LogFile { path, file, bytes_max })
    }

    fn append(path: &Path) -> io::Result<File> {
        // It names files, which permission bits may protect inside the volume.
        OpenOptions::new().create(true).append(true).mode(0o600).open(path)
    }

    /// Makes room for a line. Several mounts may log to one file: one of them renames it, the others follow.
    fn turn(&mut self) -> io::Result<()> {
        flock(&self.file, FlockOperation::LockExclusive)?;
        let begun = self.begin_anew();
        // The old file stays open if there is no new one.
        flock(&self.file, FlockOperation::Unlock)?;
        self.file = begun?;
        Ok(())
    }

    fn begin_anew(&self) -> io::Result<File> {
        let ours = self.file.metadata()?;
        let is_ours = |named: &fs::Metadata| (named.dev(), named.ino()) == (ours.dev(), ours.ino());
        // What a link leads to has another name, which is not for us to change.
        if fs::symlink_metadata(&self.path).is_ok_and(|named| is_ours(&named)) {
            let mut old = self.path.clone().into_os_string();
            old.push(".old");
            fs::rename(&self.path, old)?;
        }
        LogFile::append(&self.path)
    }
}

impl io::Write for LogFile {
    /// Writes one line.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let now = self.file.metadata()?;
        if now.is_file() && now.len() > 0 && now.len() + line.len() as u64 > self.bytes_max {
            // A file that is too long is better than a line that is lost.
            let _ = self.turn();
        }
        self.file.write(line)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// The filter for a level. The S3 SDK warns at length of every place where it looks for credentials in vain, and what it
/// fails at is told by our own error; who wants to hear it says debug, or gives a filter.
fn filter_of(level: &str) -> String {
    match level {
        "warn" | "info" => format!("{level},aws_=error"),
        _ => level.to_owned(),
    }
}

/// Has panics logged, besides what happens to them otherwise: a mount in the background writes to standard error in vain.
fn log_panics() {
    let otherwise = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        tracing::error!(%panic, "a broken invariant: this is a mistake in rfs");
        otherwise(panic);
    }));
}

type Builder<W> = tracing_subscriber::fmt::SubscriberBuilder<
    tracing_subscriber::fmt::format::DefaultFields,
    tracing_subscriber::fmt::format::Format,
    EnvFilter,
    W,
>;

fn finish<W>(builder: Builder<W>, format: Format)
where
    W: for<'w> tracing_subscriber::fmt::MakeWriter<'w> + Send + Sync + 'static,
{
    match format {
        Format::Text => builder.init(),
        Format::Json => builder.json().init(),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::sync::Arc;

    use super::*;

    #[derive(Clone, Default)]
    struct Lines(Arc<parking_lot::Mutex<Vec<u8>>>);

    impl std::io::Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn the_sdk_is_heard_only_where_it_helps() {
        let lines = Lines::default();
        for level in ["info", "debug"] {
            let writer = lines.clone();
            let filter = EnvFilter::try_new(filter_of(level)).expect("it is a filter");
            let subscriber = tracing_subscriber::fmt().with_env_filter(filter);
            let subscriber = subscriber.with_writer(move || writer.clone()).finish();
            tracing::subscriber::with_default(subscriber, || {
                tracing::warn!(target: "aws_config::meta", "the sdk at {level}");
                tracing::info!(target: "rfs_core", "ours at {level}");
            });
        }
        let text = String::from_utf8(lines.0.lock().clone()).expect("log lines are text");
        let has = |part: &str| text.contains(part);
        assert!(!has("the sdk at info") && has("ours at info") && has("the sdk at debug"), "{text}");
    }

    #[test]
    fn a_panic_is_in_the_log() {
        let lines = Lines::default();
        let writer = lines.clone();
        let subscriber = tracing_subscriber::fmt().with_writer(move || writer.clone()).finish();
        tracing::subscriber::with_default(subscriber, || {
            log_panics();
            std::panic::catch_unwind(|| panic!("the sky falls")).expect_err("it panics");
        });
        let text = String::from_utf8(lines.0.lock().clone()).expect("log lines are text");
        assert!(text.contains("ERROR") && text.contains("the sky falls"), "{text}");
    }

    fn write_line(log: &mut LogFile, number: u32) {
        log.write_all(format!("line {number}\n").as_bytes()).expect("there is room");
    }

    #[test]
    fn a_full_log_makes_place_for_a_new_one() {
        let dir = tempfile::tempdir().expect("a temporary directory can be made");
        let path = dir.path().join("mount.log");
        let text_of = |name: &str| fs::read_to_string(dir.path().join(name)).unwrap_or_default();
        let open = || LogFile::open(path.clone(), 20).expect("the directory is there");
        // Two mounts log to it.
        let mut logs = [open(), open()];
        for number in 0..5 {
            for log in &mut logs {
                write_line(log, number);
            }
        }
        assert_eq!(text_of("mount.log"), "line 4\nline 4\n");
        assert_eq!(text_of("mount.log.old"), "line 3\nline 3\n");
        // Where the log is a link, what it leads to is left alone.
        fs::remove_file(&path).expect("it is there");
        std::os::unix::fs::symlink("elsewhere", &path).expect("the name is free");
        let mut log = open();
        for number in 5..9 {
            write_line(&mut log, number);
        }
        assert_eq!(text_of("elsewhere").lines().count(), 4);
        assert_eq!(text_of("mount.log.old"), "line 3\nline 3\n");
    }
}

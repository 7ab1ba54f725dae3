//! Where log lines go, and in which form.

use std::fs::OpenOptions;
use std::io::IsTerminal;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::sync::Arc;

use clap::{Args, ValueEnum};
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
    /// Append log lines to this file instead of standard error
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
            // It names files, which permission bits may protect inside the volume.
            let file = OpenOptions::new().create(true).append(true).mode(0o600).open(path);
            let file = Arc::new(file.doing(format!("opening the log file {}", path.display()))?);
            finish(builder.with_ansi(false).with_writer(file), args.log_format);
        }
        None => finish(
            builder.with_ansi(std::io::stderr().is_terminal()).with_writer(std::io::stderr),
            args.log_format,
        ),
    }
    log_panics();
    Ok(())
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
    use parking_lot::Mutex;

    use super::*;

    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

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
}

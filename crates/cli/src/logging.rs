//! Where log lines go, and in which form.

use std::fs::OpenOptions;
use std::io::IsTerminal;
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

/// Options of logging.
#[derive(Debug, Clone, Args)]
#[expect(clippy::struct_field_names, reason = "they are the names of the options")]
pub(crate) struct LogArgs {
    /// Least severe messages to log: error, warn, info, debug, trace, or a filter such as `info,rfs_core::vfs=debug`
    #[arg(long, env = "RFS_LOG", default_value = "warn", value_name = "FILTER", global = true)]
    pub(crate) log_level: String,
    /// Form of log lines
    #[arg(long, value_enum, default_value = "text", value_name = "FORMAT", global = true)]
    pub(crate) log_format: Format,
    /// Append log lines to this file instead of standard error
    #[arg(long, value_name = "FILE", global = true)]
    pub(crate) log_file: Option<PathBuf>,
}

impl Default for LogArgs {
    fn default() -> LogArgs {
        LogArgs { log_level: "warn".to_owned(), log_format: Format::Text, log_file: None }
    }
}

/// Starts logging; once a process.
pub(crate) fn start(args: &LogArgs) -> Result<()> {
    let filter = EnvFilter::try_new(&args.log_level)
        .exit(crate::exit::Exit::Usage, format!("--log-level {}", args.log_level))?;
    let builder = tracing_subscriber::fmt().with_env_filter(filter);
    match &args.log_file {
        Some(path) => {
            let file = OpenOptions::new().create(true).append(true).open(path);
            let file = Arc::new(file.doing(format!("opening the log file {}", path.display()))?);
            finish(builder.with_ansi(false).with_writer(file), args.log_format);
        }
        None => finish(
            builder.with_ansi(std::io::stderr().is_terminal()).with_writer(std::io::stderr),
            args.log_format,
        ),
    }
    Ok(())
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

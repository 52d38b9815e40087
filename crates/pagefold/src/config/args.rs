//! The command line of `pagefold run`.

use crate::config::flags::{DenyFlags, RunFlags};
use crate::config::scope::ScopeArgs;
use std::path::PathBuf;
use std::time::Duration;

#[derive(Clone, Debug, Default, clap::Args)]
pub struct RunArgs {
    #[command(flatten)]
    pub scope: ScopeArgs,
    #[command(flatten)]
    pub deny: DenyFlags,
    #[command(flatten)]
    pub options: RunFlags,
    /// Read options from this configuration file
    ///
    /// Options on the command line override those of the file [default: /etc/pagefold/pagefold.toml if it exists; if
    /// the command line has a scope, only [deny] and [domains] of that file]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Stop after this time (60s, 5m, 2h)
    ///
    /// A number without a unit is in seconds [default: run until SIGINT or SIGTERM]
    #[arg(long = "for", value_name = "DURATION", value_parser = seconds)]
    pub duration: Option<Duration>,
    /// Show which memory would be merged, and change nothing
    #[arg(long)]
    pub dry_run: bool,
    /// Use the injector (the process that makes system calls in others) behind this socket instead of starting one; see
    /// pagefold-injector.socket
    #[arg(long, value_name = "SOCKET", hide_short_help = true)]
    pub injector: Option<PathBuf>,
    /// Print the summary as JSON (schema pagefold.run/1)
    #[arg(long, hide_short_help = true)]
    pub json: bool,
}

/// Parses a time. A number alone is in seconds.
///
/// # Errors
/// The text isn't a time.
pub fn seconds(text: &str) -> Result<Duration, String> {
    let time = match text.parse() {
        Ok(seconds) => Ok(Duration::from_secs(seconds)),
        Err(_) => humantime::parse_duration(text),
    };
    time.map_err(|_| "it is not a time; give a number and a unit, such as 60s or 5m".to_owned())
}

impl RunArgs {
    /// When the run ends, on its host's clock.
    pub fn end_ns(&self) -> u64 {
        self.duration.map_or(u64::MAX, |limit| u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX))
    }
}

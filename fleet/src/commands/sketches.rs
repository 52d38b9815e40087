//! The files of sketches that a command reads.

use crate::engine::Engine;
use crate::inventory::{Inventory, Terms};
use crate::sources::{Source, survey};
use anyhow::Result;
use humantime::{parse_duration, parse_rfc3339_weak};
use pagefold_sketch::KeyId;
use pagefold_text::exit::{self, Exit};
use pagefold_text::progress::Progress;
use pagefold_text::table::spaced;
use std::time::{Duration, SystemTime};

/// Options that all commands share.
#[derive(clap::Args)]
pub struct SketchArgs {
    /// The directories, files or URLs (s3://BUCKET/PREFIX) of sketches
    #[arg(value_name = "DIR|URL", required = true)]
    pub sources: Vec<String>,
    /// Count only files made under the key with this identifier [default: the key of most hosts]
    #[arg(long, value_name = "ID", value_parser = key)]
    pub key: Option<KeyId>,
    /// Leave out hosts whose newest file is older than this
    #[arg(long, value_name = "DURATION", default_value = "1d", value_parser = parse_duration)]
    pub max_age: Duration,
    /// Judge the age of files as of this time (UTC) [default: now]
    #[arg(long, value_name = "TIME", value_parser = parse_rfc3339_weak)]
    pub at: Option<SystemTime>,
    /// Let queries take this much memory, in MiB, before they use temporary files
    #[arg(long, value_name = "MIB", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(64..))]
    pub query_memory: u32,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

fn key(text: &str) -> Result<KeyId, String> {
    KeyId::parse(text).ok_or_else(|| "it is not 16 hexadecimal digits in lower case".to_owned())
}

/// What a command works with, once we've looked at the files.
pub struct Opened {
    pub inventory: Inventory,
    pub engine: Engine,
    pub progress: Progress,
    /// Microseconds since 1970.
    pub now_us: u64,
}

impl SketchArgs {
    /// Looks at all files, and opens those that count.
    pub async fn open(&self) -> Result<Opened> {
        let sources = self.sources.iter().map(|place| Source::open(place)).collect::<Result<Vec<_>, _>>()?;
        let progress = Progress::new();
        let show = |done: usize, all: usize| {
            progress.show(&format!("checked {done} of {all} files"), Some(done as f64 / all.max(1) as f64));
        };
        let seen = survey(&sources, show).await?;
        let since = self.at.unwrap_or_else(SystemTime::now).duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let now_us = u64::try_from(since.as_micros()).unwrap_or(u64::MAX);
        let inventory = Inventory::of(seen, Terms { key: self.key, now_us, max_age: self.max_age });
        if inventory.chosen.is_empty() {
            let first = inventory.left_out.first().map(|left| format!(" ({} {})", left.file, left.why));
            let line = format!(
                "no usable sketch in {}{}; write some with pagefold sketch",
                self.sources.join(", "),
                first.unwrap_or_default()
            );
            return Err(Exit::new(exit::NO_SCOPE, line).into());
        }
        let memory = usize::try_from(self.query_memory).unwrap_or(1024) << 20;
        let engine = Engine::open(&sources, &inventory, memory).await.map_err(failed)?;
        Ok(Opened { inventory, engine, progress, now_us })
    }
}

/// Makes an error of the engine one line.
#[expect(clippy::needless_pass_by_value, reason = "for map_err")]
pub fn failed(error: datafusion::error::DataFusionError) -> anyhow::Error {
    let what = spaced(&error.strip_backtrace());
    Exit::new(exit::FAILURE, format!("the query failed: {what}; try again with fewer files or more --query-memory"))
        .into()
}

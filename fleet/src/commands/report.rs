//! `pagefold-fleet report`.

use super::sketches::{SketchArgs, failed};
use crate::report::Report;
use anyhow::Result;
use pagefold_text::{exit, style};

/// Options of `pagefold-fleet report`.
#[derive(clap::Args)]
pub struct ReportArgs {
    #[command(flatten)]
    sketches: SketchArgs,
    /// Show this many pairs of workloads, beginning with the pair that has most in common
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(0..=100_000))]
    pairs: u32,
}

pub async fn run(args: &ReportArgs) -> Result<u8> {
    let opened = args.sketches.open().await?;
    opened.progress.show("comparing", None);
    let pairs = usize::try_from(args.pairs)?;
    let report = Report::of(&opened.engine, &opened.inventory, pairs).await.map_err(failed)?;
    opened.progress.clear();
    style::print(&if args.sketches.json { style::json(&report)? } else { report.to_string() })?;
    Ok(exit::OK)
}

//! `pagefold-lab scale`: runs algorithms on simulated memories of up to a tebibyte.

use crate::replay::Algorithm;
use crate::scale::{ScaleOptions, scale};
use anyhow::Result;
use clap::ValueEnum;
use pagefold_text::exit;
use pagefold_text::progress::Progress;
use pagefold_text::style;

/// Options of `pagefold-lab scale`.
#[derive(clap::Args)]
pub struct ScaleArgs {
    /// Simulate these memory sizes, in GiB (separated by commas) [default: 4,16,64,256,1024]
    #[arg(long, value_name = "GIB", value_delimiter = ',', value_parser = clap::value_parser!(u64).range(1..=4_096))]
    memory: Vec<u64>,
    /// Run these algorithms (separated by commas): ksm, ksm-smart, uksm, cmd-address, cmd-pagecount, cmd-subpage,
    /// nuksm, pagefold, pagefold-request [default: ksm,ksm-smart,nuksm,uksm,pagefold,pagefold-request]
    #[arg(long, value_name = "ALGORITHM", value_delimiter = ',')]
    algorithm: Vec<Algorithm>,
    /// Set the simulated time for each size, in hours [default: 24]
    #[arg(long, value_name = "HOURS", value_parser = hours)]
    hours: Option<f64>,
    /// Measure only these parts (separated by commas) [default: all]
    #[arg(long, value_name = "PART", value_delimiter = ',')]
    only: Vec<Part>,
    /// Run everything on a small scale, within seconds
    #[arg(long)]
    quick: bool,
    /// Print the results as JSON (schema pagefold.lab.scale/1)
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    /// A day with each memory size
    Growth,
    /// Error from simulating several pages as one
    Grain,
    /// Comparisons by the number of trees
    Forests,
    /// Which algorithms save memory before it runs out
    Race,
}

fn hours(text: &str) -> Result<f64, String> {
    let hours: f64 = text.parse().map_err(|error| format!("{error}"))?;
    if (0.01..=168.0).contains(&hours) { Ok(hours) } else { Err("it must be from 0.01 to 168".to_owned()) }
}

pub fn run(args: &ScaleArgs) -> Result<u8> {
    let wanted = wanted(args);
    let progress = Progress::new();
    let scaling = scale(&wanted, |done, all| {
        progress.show(&format!("simulated {done} of {all}"), Some(done as f64 / all as f64));
    });
    progress.clear();
    let text = if args.json { serde_json::to_string(&scaling)? + "\n" } else { scaling.to_string() };
    style::print(&text)?;
    Ok(exit::OK)
}

fn wanted(args: &ScaleArgs) -> ScaleOptions {
    let mut wanted = if args.quick { ScaleOptions::quick() } else { ScaleOptions::default() };
    if !args.memory.is_empty() {
        wanted.memory.clone_from(&args.memory);
    }
    if !args.algorithm.is_empty() {
        wanted.algorithms.clone_from(&args.algorithm);
    }
    wanted.hours = args.hours.unwrap_or(wanted.hours);
    let leave_out = |part| !args.only.is_empty() && !args.only.contains(&part);
    if leave_out(Part::Growth) {
        wanted.memory.clear();
    }
    if leave_out(Part::Grain) {
        wanted.check = None;
    }
    if leave_out(Part::Forests) {
        wanted.nodes.clear();
    }
    if leave_out(Part::Race) {
        wanted.races.clear();
    }
    wanted
}

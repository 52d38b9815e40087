//! `pagefold-lab fleet`: simulates fleets, placed at random, by plan and at best.

use crate::fleet::mix::Mix;
use crate::fleet::{FleetOptions, FleetOutcome, Fleets, files, simulate};
use anyhow::Result;
use pagefold_engine::units::index;
use pagefold_planner::contents::lg_sampled;
use pagefold_text::exit;
use pagefold_text::progress::Progress;
use pagefold_text::style;
use std::path::PathBuf;
use std::time::SystemTime;

/// Options of `pagefold-lab fleet`.
#[derive(clap::Args)]
pub struct FleetArgs {
    /// Simulate fleets of these numbers of hosts (separated by commas)
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "10,100,1000", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    hosts: Vec<u32>,
    /// Set the number of workloads on each host
    #[arg(long, value_name = "N", default_value_t = 40, value_parser = clap::value_parser!(u32).range(1..=1000))]
    per_host: u32,
    /// Use the programs in this record as workloads, not generated ones
    #[arg(long, value_name = "RECORD")]
    record: Option<PathBuf>,
    /// Let the planner see this many contents of each workload [default: as many as pagefold-fleet does]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(16..=4096))]
    sampled: Option<u32>,
    /// Simulate churn for this many hours, in fleets of at most 100 hosts
    #[arg(long, value_name = "HOURS", default_value_t = 24)]
    hours: u32,
    /// Set the seed: equal seeds and options give equal fleets
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Write the sketches of the first fleet into this directory, for pagefold-fleet, and simulate nothing
    #[arg(long, value_name = "DIR", conflicts_with = "json")]
    write: Option<PathBuf>,
    /// Print the results as JSON (schema pagefold.lab.fleet/1)
    #[arg(long)]
    json: bool,
}

/// We don't fill fleets with more hosts or simulate churn in them: counting their contents would take too long.
const SMALL: u32 = 100;

pub fn run(args: &FleetArgs) -> Result<u8> {
    let mix = match &args.record {
        Some(path) => Mix::of_record(path)?,
        None => Mix::generated(),
    };
    let options = |hosts: u32| FleetOptions {
        hosts,
        per_host: args.per_host,
        seed: args.seed,
        sampled: args.sampled.map_or_else(|| 1 << lg_sampled(index(hosts * args.per_host)), index),
        hours: if hosts <= SMALL { args.hours } else { 0 },
        fill: hosts <= SMALL,
    };
    let progress = Progress::new();
    if let Some(dir) = &args.write {
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let now_us = u64::try_from(since.as_micros()).unwrap_or(0);
        let hosts = args.hosts.first().copied().unwrap_or(1);
        let show = |done| progress.show("writing sketches", Some(f64::from(done) / f64::from(hosts)));
        let bytes = files::write(dir, &mix, &options(hosts), now_us, &show)?;
        progress.clear();
        println!("{hosts} hosts, {} in {}", style::human(bytes), dir.display());
        return Ok(exit::OK);
    }
    let show = |hosts: u32| {
        let progress = &progress;
        move |what: &str| progress.show(&format!("{hosts} hosts: {what}"), None)
    };
    let outcomes = args.hosts.iter().map(|&hosts| simulate(&mix, &options(hosts), &show(hosts))).collect();
    progress.clear();
    let fleets = Fleets { schema: "pagefold.lab.fleet/1", mix: mix.name.clone(), outcomes };
    let missed: Vec<String> = fleets.outcomes.iter().flat_map(FleetOutcome::missed).collect();
    style::print(&if args.json { style::json(&fleets)? } else { fleets.to_string() })?;
    for missed in &missed {
        pagefold_text::messages::complain("pagefold-lab", &format!("missed: {missed}"));
    }
    Ok(if missed.is_empty() { exit::OK } else { exit::FAILURE })
}

//! `pagefold-lab replay`: runs algorithms on a record and compares them.

use crate::record::{Record, RecordError};
use crate::replay::{Algorithm, Settings, replay, savable};
use crate::script::script;
use crate::table::Comparison;
use anyhow::{Context, Result};
use humantime::Duration;
use pagefold_text::exit::{self, Exit};
use std::path::PathBuf;

/// Options of `pagefold-lab replay`.
#[derive(clap::Args)]
pub struct ReplayArgs {
    /// The record
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Run these algorithms (separated by commas): ksm, ksm-smart, uksm, cmd-address, cmd-pagecount, cmd-subpage,
    /// nuksm, pagefold, pagefold-request [default: all]
    #[arg(long, value_name = "ALGORITHM", value_delimiter = ',')]
    algorithm: Vec<Algorithm>,
    /// Set the simulated time; memory no longer changes after the end of the record [default: the record's length]
    #[arg(long = "for", value_name = "DURATION")]
    length: Option<Duration>,
    /// Set the pages that ksmd scans per batch (not under pagefold)
    #[arg(long, value_name = "PAGES", default_value_t = 1_000, value_parser = clap::value_parser!(u32).range(1..))]
    pages_to_scan: u32,
    /// Set the sleep between batches, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 20, value_parser = clap::value_parser!(u32).range(..=3_600_000))]
    sleep: u32,
    /// Set the number of trees in nuksm's forests [default: one per 100 MiB]
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u16).range(1..=4_096))]
    trees: Option<u16>,
    /// Print the results as JSON (schema pagefold.lab.replay/1)
    #[arg(long)]
    json: bool,
}

pub fn run(args: &ReplayArgs) -> Result<u8> {
    let record = Record::read(&args.file).map_err(|error| explain(&args.file, &error))?;
    let scripted = script(&record);
    let mut settings = Settings::for_record(&scripted);
    settings.pages_to_scan = args.pages_to_scan;
    settings.sleep_ms = args.sleep;
    settings.trees = args.trees;
    if let Some(length) = args.length {
        settings.for_ns = u64::try_from(length.as_nanos()).context("--for is too long")?;
    }
    let mut algorithms = args.algorithm.clone();
    if algorithms.is_empty() {
        algorithms.extend(Algorithm::NAMES.map(|(_, algorithm)| algorithm));
    }
    let name = args.file.file_stem().map_or_else(|| "record".into(), |stem| stem.to_string_lossy().into_owned());
    let outcomes = algorithms.into_iter().map(|algorithm| replay(algorithm, &scripted, &settings)).collect();
    let comparison = Comparison {
        schema: "pagefold.lab.replay/1",
        record: name,
        source: record.origin.source.clone(),
        seconds: settings.for_ns as f64 / 1e9,
        pages: scripted.pages,
        forked: scripted.forked,
        savable: savable(&scripted, &settings),
        outcomes,
    };
    if args.json {
        println!("{}", serde_json::to_string(&comparison)?);
    } else {
        print!("{comparison}");
    }
    Ok(exit::OK)
}

fn explain(file: &std::path::Path, error: &RecordError) -> Exit {
    Exit::new(exit::FAILURE, format!("{}: {error}", file.display()))
}

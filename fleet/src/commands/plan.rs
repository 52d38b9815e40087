//! `pagefold-fleet plan`.

use super::sketches::{SketchArgs, failed};
use crate::fleet::{Limits, Workloads};
use crate::plan::Document;
use crate::rules::{MOST_BYTES, Rules};
use anyhow::Result;
use pagefold_planner::contents::Contents;
use pagefold_planner::{Placement, plan};
use pagefold_text::exit::{self, Exit};
use pagefold_text::style;
use std::io::Read;
use std::path::{Path, PathBuf};

/// Options of `pagefold-fleet plan`.
#[derive(clap::Args)]
pub struct PlanArgs {
    #[command(flatten)]
    sketches: SketchArgs,
    /// Move at most this many workloads
    #[arg(long, value_name = "M", default_value_t = 50)]
    moves: u64,
    /// Keep workloads together, apart or where they are by the rules in this file (TOML)
    #[arg(long, value_name = "FILE")]
    rules: Option<PathBuf>,
    /// Let workloads take this share of a host's memory, including memory that may come back
    #[arg(long, value_name = "PERCENT", default_value_t = 80, value_parser = clap::value_parser!(u8).range(1..=100))]
    memory: u8,
    /// Let workloads use this share of a host's processors
    #[arg(long, value_name = "PERCENT", default_value_t = 80, value_parser = clap::value_parser!(u8).range(1..=100))]
    cpu: u8,
    /// Print labels and affinity terms for Kubernetes, as JSON
    #[arg(long, conflicts_with_all = ["proxmox", "json"])]
    kubernetes: bool,
    /// Print affinity tags for Proxmox VE, as JSON
    #[arg(long, conflicts_with = "json")]
    proxmox: bool,
}

pub async fn run(args: &PlanArgs) -> Result<u8> {
    let rules = args.rules.as_deref().map(read_rules).transpose()?.unwrap_or_default();
    let mut opened = args.sketches.open().await?;
    let all = opened.engine.workloads();
    let show = |done: usize| opened.progress.show("reading sketches", Some(done as f64 / all.max(1) as f64));
    let mut known = Workloads::of(&opened.engine, show).await.map_err(failed)?;
    opened.inventory.left_out.extend(opened.engine.lost());
    let limits = Limits { memory: f64::from(args.memory) / 100.0, cpu: f64::from(args.cpu) / 100.0 };
    opened.progress.show("planning", None);
    let mut planned = known.plan_with(&rules, limits);
    planned.fleet.check().map_err(|error| Exit::new(exit::FAILURE, format!("{error}; plan for fewer hosts")))?;
    let contents = Contents::of(&planned.fleet);
    // We drop the samples, which are large: `contents` has what we need.
    planned.fleet.units.iter_mut().for_each(|unit| unit.samples = Vec::new());
    let current = Placement::current(&planned.fleet, &contents);
    let before: Vec<_> = planned.fleet.host_ids().map(|host| current.saving(host)).collect();
    drop(current);
    let made = plan(&planned.fleet, &contents, args.moves);
    let document = Document::of(&known, &planned, &made, &before, &opened.inventory, opened.now_us, args.moves);
    opened.progress.clear();
    let text = if args.kubernetes {
        style::json(&document.kubernetes())?
    } else if args.proxmox {
        style::json(&document.proxmox())?
    } else if args.sketches.json {
        style::json(&document)?
    } else {
        document.to_string()
    };
    style::print(&text)?;
    Ok(exit::OK)
}

fn read_rules(path: &Path) -> Result<Rules> {
    let refused = |code: u8, what: String| Exit::new(code, format!("cannot use {}: {what}", path.display()));
    let mut text = String::new();
    let read = std::fs::File::open(path).and_then(|file| file.take(MOST_BYTES + 1).read_to_string(&mut text));
    let read = read.map_err(|error| refused(exit::FAILURE, format!("{error}; check the file and its permissions")))?;
    if pagefold_engine::units::count(read) > MOST_BYTES {
        return Err(refused(exit::USAGE, format!("it has more than {MOST_BYTES} bytes; give a file of rules")).into());
    }
    Ok(Rules::parse(&text).map_err(|error| refused(exit::USAGE, error.to_string()))?)
}

//! `pagefold sketch`: writes a sketch of each workload, a sample of its pages' digests. Only reads memory.

use crate::backend::Backend;
use crate::config::args::RunArgs;
use crate::config::flags::DenyFlags;
use crate::config::ownership;
use crate::config::scope::{ScopeArgs, explain};
use crate::config::settings::Settings;
use crate::output;
use crate::place::{Place, unusable};
use crate::preflight;
use crate::sketch::{Keeper, Now, put};
use anyhow::Result;
use pagefold_engine::host::Host;
use pagefold_engine::limits::Limits;
use pagefold_host::live::{HostMode, LiveHost};
use pagefold_host::scope::{resolve, resolve_each};
use pagefold_host::targets::Target;
use pagefold_procmem::Roots;
use pagefold_sketch::Row;
use pagefold_text::exit::{self, Exit};
use pagefold_text::progress::Progress;
use pagefold_text::style::{Lines, Style, count, human, shorten};
use pagefold_text::table::Table;
use serde::Serialize;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

#[derive(Clone, Debug, clap::Args)]
pub struct SketchArgs {
    #[command(flatten)]
    pub scope: ScopeArgs,
    #[command(flatten)]
    pub deny: DenyFlags,
    /// File with the key that all hosts of the fleet share
    ///
    /// 64 hexadecimal digits, readable by root only. By default we use the key file that the configuration file sets.
    #[arg(long, value_name = "FILE")]
    pub key: Option<PathBuf>,
    /// Name of this host in the fleet [default: its host name]
    #[arg(long, value_name = "NAME")]
    pub host: Option<String>,
    /// Write the sketches to this file
    ///
    /// The file is Parquet, schema pagefold.sketch/1. pagefold-fleet reads files named HOST.parquet.
    #[arg(long, short, value_name = "FILE")]
    pub output: PathBuf,
    /// Read options from this configuration file
    ///
    /// Options on the command line override those of the file [default: /etc/pagefold/pagefold.toml if it exists; if
    /// the command line has a scope, only [deny] and [domains] of that file]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Print the figures as JSON (schema pagefold.sketch-summary/1)
    #[arg(long)]
    pub json: bool,
}

/// We read at most this many pages per second: 200 MiB, which takes a tenth of a core.
const PAGES_PER_SECOND: u64 = 50_000;
/// After at most this many pages we pause.
const PORTION: u64 = 5_000;
/// How long we try to learn the mappings of all processes before we read pages.
const KNOWN_LIMIT: Duration = Duration::from_secs(10);

const SCHEMA: &str = "pagefold.sketch-summary/1";

#[derive(Debug, Serialize)]
struct Summary {
    schema: &'static str,
    host: String,
    key: String,
    file: String,
    workloads: Vec<WorkloadRow>,
}

#[derive(Debug, Serialize)]
struct WorkloadRow {
    kind: &'static str,
    workload: String,
    domain: String,
    anonymous_bytes: u64,
    read_bytes: u64,
    zero_bytes: u64,
    savable_bytes: u64,
    entries: usize,
}

pub fn run(args: &SketchArgs) -> Result<u8> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        signal_hook::flag::register(signal, stop.clone())?;
    }
    let settings = Settings::of(&RunArgs {
        scope: args.scope.clone(),
        deny: args.deny.clone(),
        config: args.config.clone(),
        ..RunArgs::default()
    })?;
    preflight::need_rights("reading other processes' memory")?;
    let mut fleet = settings.fleet.clone();
    fleet.key = args.key.clone().or(fleet.key);
    fleet.host = args.host.clone().or(fleet.host);
    let fleet = fleet.fleet()?;
    let place = place(&args.output)?;
    let scope = settings.scope.spec();
    // A file may name programs that start later.
    let resolve = if args.scope == ScopeArgs::default() { resolve } else { resolve_each };
    resolve(&scope, &Roots::default()).map_err(|error| explain(&error))?;
    let ksm = preflight::ksm()?;
    let mut host = LiveHost::new(scope, Roots::default(), settings.deny, ksm, HostMode::DryRun, stop.clone())
        .map_err(|error| LiveHost::explain(&error))?;
    host.set_domains(settings.domains);
    host.read_all_domains();
    let name = fleet.host.clone();
    let key = fleet.key.id().to_string();
    let mut keeper = Keeper::new(fleet);
    let rows = read(&mut host, &mut keeper, settings.config.limits, &stop)?;
    if rows.is_empty() {
        let line = "nothing in scope may be read, or every workload holds less than a mebibyte; name other programs";
        return Err(Exit::new(exit::REFUSED, line).into());
    }
    put(&place, &rows).map_err(|error| cannot_write(&place, &error))?;
    let workloads = rows.iter().map(|row| WorkloadRow::of(row)).collect();
    let summary = Summary { schema: SCHEMA, host: name, key, file: ownership::shown(&place.path), workloads };
    output::print(args.json, &summary, |style| describe(&summary, style))?;
    Ok(exit::OK)
}

fn place(path: &std::path::Path) -> Result<Place, Exit> {
    let place = Place::of_regular(path).map_err(|why| unusable("the file", path, &why))?;
    place.check().map_err(|error| cannot_write(&place, &error))?;
    Ok(place)
}

fn cannot_write(place: &Place, error: &std::io::Error) -> Exit {
    Exit::new(exit::FAILURE, format!("cannot write {}: {error}; name another file", ownership::shown(&place.path)))
}

/// Reads everything in scope once.
fn read(host: &mut LiveHost, keeper: &mut Keeper, limits: Limits, stop: &AtomicBool) -> Result<Vec<Arc<Row>>> {
    let progress = Progress::new();
    let began = Instant::now();
    refresh(host)?;
    while !host.targets().all(Target::is_known) && began.elapsed() < KNOWN_LIMIT {
        host.wait(10_000_000).map_err(|error| LiveHost::explain(&error))?;
        refresh(host)?;
    }
    let regions = host.targets().flat_map(|target| &target.regions);
    let all: u64 = regions.map(|tracked| tracked.stretch.resident.0).sum();
    let mut done = 0;
    keeper.begin(host);
    let rate = PAGES_PER_SECOND.min(limits.pages).min(limits.pages_per_process);
    let portion = PORTION.min(rate);
    loop {
        let then = Instant::now();
        let read = keeper.step(host, Now::of(host), portion, |_, most| most);
        done += read.pages;
        progress.show("reading", Some((done as f64 / all.max(1) as f64).min(1.0)));
        if read.ended {
            progress.clear();
            return Ok(keeper.rows());
        }
        if stop.load(Ordering::Relaxed) {
            return Err(Exit::new(exit::FAILURE, "stopped before everything was read; nothing was written").into());
        }
        let pause = Duration::from_nanos(read.pages * 1_000_000_000 / rate);
        thread::sleep(pause.saturating_sub(then.elapsed()));
        // Memory may get excluded while we read, and then we mustn't read it.
        refresh(host)?;
    }
}

fn refresh(host: &mut LiveHost) -> Result<(), Exit> {
    host.observe().map(drop).map_err(|error| LiveHost::explain(&error))
}

impl WorkloadRow {
    fn of(row: &Row) -> Self {
        Self {
            kind: row.kind.as_str(),
            workload: row.workload.clone(),
            domain: row.domain.clone(),
            anonymous_bytes: row.anonymous_bytes,
            read_bytes: row.read_bytes,
            zero_bytes: row.zero_bytes,
            savable_bytes: row.savable_bytes,
            entries: row.sketch.len(),
        }
    }
}

/// We show at most this many rows. A last line counts the rest.
const ROWS: usize = 20;

fn describe(summary: &Summary, style: Style) -> String {
    let mut text = String::new();
    text.blank();
    let all = count(summary.workloads.len(), "workload", "workloads");
    text.line(format!("{}.", style.bold(&format!("Sketches of {all} are in {}", summary.file))));
    text.line(style.dim(&format!("Host {}, under the key {}.", summary.host, summary.key)));
    text.blank();
    let head = ["KIND", "WORKLOAD", "DOMAIN", "HOLDS", "READ", "SAVABLE WITHIN"];
    let mut table = Table::new(head.iter().map(|name| style.dim(name)), |column| column > 2);
    let mut largest: Vec<&WorkloadRow> = summary.workloads.iter().collect();
    largest.sort_by_key(|row| std::cmp::Reverse(row.anonymous_bytes));
    for row in largest.iter().take(ROWS) {
        let names = [row.kind.to_owned(), shorten(&row.workload, 40), shorten(&row.domain, 20)];
        let figures = [row.anonymous_bytes, row.read_bytes, row.savable_bytes].map(human);
        table.add_row(names.into_iter().chain(figures));
    }
    table.to_string().lines().for_each(|row| text.line(row));
    if largest.len() > ROWS {
        let others = count(largest.len() - ROWS, "other", "others");
        text.line(style.dim(&format!("… and {others} (all of them: --json)")));
    }
    text.blank();
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::golden;
    use pagefold_text::style;

    #[test]
    fn what_was_read_is_shown() {
        let of = |kind, workload: &str, mib: u64| WorkloadRow {
            kind,
            workload: workload.to_owned(),
            domain: "default".to_owned(),
            anonymous_bytes: mib << 20,
            read_bytes: (mib << 20) - 4_096,
            zero_bytes: 65_536,
            savable_bytes: mib << 18,
            entries: 512,
        };
        let workloads = vec![of("unit", "redis.service", 40), of("process", "java", 1_200)];
        let (host, key) = ("host-1".to_owned(), "0123456789abcdef".to_owned());
        let summary = Summary { schema: SCHEMA, host, key, file: "host-1.parquet".to_owned(), workloads };
        golden::check("sketch.txt", &describe(&summary, Style::plain_text()));
        golden::check("sketch.json", &style::json(&summary).unwrap());
    }
}

//! `pagefold status`: what the daemon has saved, what it costs, and what it is doing.

use crate::control::client::ask;
use crate::control::protocol::Request;
use crate::control::queue::Facts;
use crate::output::placement::PlacesView;
use anyhow::Result;
use pagefold_cli::exit;
use pagefold_cli::figures::{thousands, time, wrap};
use pagefold_cli::style::{self, Style, bar, count, human, line, percent, shorten};
use pagefold_core::governor::Governor;
use pagefold_core::ledger::METADATA_BYTES_PER_PAGE;
use pagefold_core::report::{Kind, KindTotal, LevelTotal, Next, RegionReport};
use pagefold_core::units::Pages;
use serde::{Deserialize, Serialize};

/// The name and version of the schema.
const SCHEMA: &str = "pagefold.status/1";
/// Processes shown; the rest is summed up.
const PROCESSES: usize = 8;
const BAR: usize = 20;
const WIDTH: usize = 78;

/// Arguments of `pagefold status`.
#[derive(Clone, Debug, clap::Args)]
pub struct StatusArgs {
    /// Print the daemon's answer as JSON (schema pagefold.status/1)
    #[arg(long)]
    pub json: bool,
}

/// The state of a run (schema pagefold.status/1). A new column begins here.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[allow(clippy::struct_excessive_bools)] // independent facts
pub struct Status {
    schema: String,
    /// The daemon's pid.
    pid: u32,
    /// Its scope, as flags.
    scope: String,
    dry_run: bool,
    /// How long it has run.
    seconds: f64,
    /// The governor that was set, and the one in force, which `auto` chooses.
    governor: Governor,
    in_force: Governor,
    /// The share of a core that pagefold and ksmd may use, and the one they used over the last ten seconds.
    allowed_share: f64,
    used_share: f64,
    paused: bool,
    /// Whether reading, marking or merging is under way.
    busy: bool,
    /// Whether this run controls ksmd, and if not, why.
    ksm_driven: bool,
    ksm_why: Option<String>,
    /// Anonymous memory in scope that is not left alone.
    resident_bytes: u64,
    /// Saved by this run, and by KSM on the whole machine.
    saved_bytes: u64,
    saved_machine_bytes: u64,
    /// Resident memory in marked spans, and the kernel's metadata for it.
    marked_bytes: u64,
    metadata_bytes: u64,
    cpu_seconds: CpuSeconds,
    pages_read: u64,
    /// Full scans requested from ksmd.
    scans: u64,
    /// Stops of targets for marking.
    stops: u64,
    longest_stop_us: f64,
    /// Global rounds completed.
    rounds: u64,
    index: Index,
    kinds: Vec<KindTotal>,
    /// The levels of the ladder, from the top.
    levels: Vec<LevelTotal>,
    /// What happens next, and to how much memory.
    next: Vec<NextRow>,
    /// The trust domains in scope, the largest first.
    domains: Vec<DomainRow>,
    /// The processes, the largest first.
    processes: Vec<ProcessRow>,
    /// Where merged pages are, on a machine with several memory nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    numa: Option<PlacesView>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct CpuSeconds {
    pagefold: f64,
    ksmd: f64,
}

/// The index of contents.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Index {
    contents: usize,
    bytes: u64,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct NextRow {
    /// The names of the core's `Next`.
    what: String,
    regions: usize,
    resident_bytes: u64,
    /// For regions that wait: when the first one is judged again.
    soonest_seconds: Option<f64>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct DomainRow {
    name: String,
    resident_bytes: u64,
    marked_bytes: u64,
    /// Left unmarked because another domain holds the same contents.
    withheld_bytes: u64,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct ProcessRow {
    pid: i32,
    name: String,
    regions: usize,
    resident_bytes: u64,
    /// Resident memory in marked spans, and the duplicates expected in it.
    marked_bytes: u64,
    expected_bytes: u64,
    /// Why it is left alone, if it is.
    left_alone: Option<String>,
}

/// Prints the daemon's state, and returns the exit code.
pub fn run(args: &StatusArgs) -> Result<u8> {
    let text = if args.json {
        style::json(&ask::<serde_json::Value>(&Request::Status)?)?
    } else {
        describe(&ask(&Request::Status)?, Style::of_stdout())
    };
    style::print(&text)?;
    Ok(exit::OK)
}

impl Status {
    /// The status to report.
    pub fn of(facts: &Facts) -> Self {
        let Facts { report, run, .. } = facts;
        let ledger = &report.ledger;
        let bytes = |pages: Pages| pages.bytes().0;
        let why = match &run.stood_down {
            _ if run.dry_run => Some("a dry run changes nothing".to_owned()),
            why => why.clone(),
        };
        Self {
            schema: SCHEMA.to_owned(),
            pid: std::process::id(),
            scope: run.scope.clone(),
            dry_run: run.dry_run,
            seconds: (ledger.now_ns - ledger.began_ns) as f64 / 1e9,
            governor: report.governor,
            in_force: report.in_force,
            allowed_share: report.top_share.fraction(),
            used_share: report.used_share,
            paused: report.paused,
            busy: report.busy,
            ksm_driven: report.drives_ksm,
            ksm_why: why.filter(|_| !report.drives_ksm),
            resident_bytes: report.regions.iter().map(|region| bytes(region.resident)).sum(),
            saved_bytes: bytes(report.saved),
            saved_machine_bytes: bytes(report.saved_machine),
            marked_bytes: bytes(report.marked),
            metadata_bytes: report.marked.0 * METADATA_BYTES_PER_PAGE,
            cpu_seconds: CpuSeconds {
                pagefold: ledger.cost.pagefold_ns as f64 / 1e9,
                ksmd: ledger.cost.ksmd_ns as f64 / 1e9,
            },
            pages_read: ledger.pages_read,
            scans: facts.scans,
            stops: ledger.stops,
            longest_stop_us: ledger.longest_stop_ns as f64 / 1e3,
            rounds: report.rounds,
            index: Index { contents: report.index_entries, bytes: report.index_bytes.0 },
            kinds: report.kinds.clone(),
            levels: report.levels.clone(),
            next: next_rows(facts),
            domains: domain_rows(facts),
            processes: process_rows(facts),
            numa: facts.places(),
        }
    }
}

/// The name of what happens next.
pub fn name_of(next: &Next) -> &'static str {
    match next {
        Next::Sample { .. } => "sample",
        Next::Read { .. } => "read",
        Next::Mark => "mark",
        Next::Merge => "merge",
        Next::Watch => "watch",
        Next::Wait { .. } => "wait",
        Next::Nothing => "nothing",
    }
}

/// The order of the rows: what happens first.
const ORDER: [&str; 7] = ["read", "mark", "merge", "sample", "wait", "watch", "nothing"];

fn next_rows(facts: &Facts) -> Vec<NextRow> {
    let mut rows: Vec<NextRow> = Vec::new();
    for region in &facts.report.regions {
        let what = name_of(&region.next);
        let at = rows.iter().position(|row| row.what == what).unwrap_or_else(|| {
            rows.push(NextRow { what: what.to_owned(), regions: 0, resident_bytes: 0, soonest_seconds: None });
            rows.len() - 1
        });
        let row = &mut rows[at];
        row.regions += 1;
        row.resident_bytes += region.resident.bytes().0;
        if let Next::Wait { ns } = region.next {
            let seconds = ns as f64 / 1e9;
            row.soonest_seconds = Some(row.soonest_seconds.map_or(seconds, |soonest| soonest.min(seconds)));
        }
    }
    rows.sort_by_key(|row| ORDER.iter().position(|name| *name == row.what));
    rows
}

fn domain_rows(facts: &Facts) -> Vec<DomainRow> {
    let names = (0_u16..).zip(&facts.domains);
    let rows = names.filter_map(|(key, name)| {
        let regions = || facts.report.regions.iter().filter(|region| region.domain.0 == key);
        let sum = |pages: fn(&RegionReport) -> Pages| regions().map(|region| pages(region).bytes().0).sum();
        regions().next()?;
        Some(DomainRow {
            name: name.clone(),
            resident_bytes: sum(|region| region.resident),
            marked_bytes: sum(|region| region.marked),
            withheld_bytes: sum(|region| region.withheld),
        })
    });
    let mut rows: Vec<DomainRow> = rows.collect();
    rows.sort_by_key(|row| std::cmp::Reverse(row.resident_bytes));
    rows
}

fn process_rows(facts: &Facts) -> Vec<ProcessRow> {
    let mut rows: Vec<ProcessRow> = Vec::new();
    for target in &facts.targets {
        let regions = || facts.report.regions.iter().filter(|region| region.owner == target.owner);
        let sum = |pages: fn(&RegionReport) -> Pages| -> u64 { regions().map(|region| pages(region).bytes().0).sum() };
        rows.push(ProcessRow {
            pid: target.pid,
            name: target.name.clone(),
            regions: regions().count(),
            resident_bytes: sum(|region| region.resident),
            marked_bytes: sum(|region| region.marked),
            expected_bytes: sum(|region| region.expected),
            left_alone: target.left_alone.clone(),
        });
    }
    rows.sort_by_key(|row| (std::cmp::Reverse(row.resident_bytes), row.pid));
    rows
}

fn describe(status: &Status, style: Style) -> String {
    let mut text = String::new();
    line(&mut text, "");
    for part in wrap(&headline(status), WIDTH) {
        line(&mut text, &style.bold(&part));
    }
    line(&mut text, "");
    let mut row = |name: &str, value: &str| {
        for (at, part) in wrap(value, WIDTH - 12).iter().enumerate() {
            let name = if at == 0 { name } else { "" };
            line(&mut text, &format!("  {}{part}", style.dim(&format!("{name:<10}"))));
        }
    };
    row("run", &format!("{} (pid {}), for {}", shorten(&status.scope, 46), status.pid, time(status.seconds)));
    row("state", &state(status));
    row("governor", &governor(status));
    row(
        "cost",
        &format!(
            "{} of a core in the last 10 s; pagefold {:.2} s, ksmd {:.2} s so far",
            percent(status.used_share, 1.0),
            status.cpu_seconds.pagefold,
            status.cpu_seconds.ksmd
        ),
    );
    row("KSM", &ksm(status));
    row(
        "marked",
        &format!(
            "{}, for which the kernel keeps {} of metadata",
            human(status.marked_bytes),
            human(status.metadata_bytes)
        ),
    );
    if status.stops > 0 {
        row(
            "stops",
            &format!(
                "{} of processes, to mark their memory; the longest {:.0} us",
                status.stops, status.longest_stop_us
            ),
        );
    }
    if status.domains.len() > 1 {
        row("domains", &domains(status));
    }
    if let Some(places) = &status.numa {
        row("nodes", &places.sentence());
    }
    kinds(&mut text, status, style);
    levels(&mut text, status, style);
    processes(&mut text, status, style);
    if let Some(places) = &status.numa {
        places.describe(&mut text, style);
    }
    next(&mut text, status, style);
    line(&mut text, "");
    text
}

/// The number of trust domains, and how strictly they are separated.
fn domains(status: &Status) -> String {
    let withheld: u64 = status.domains.iter().map(|row| row.withheld_bytes).sum();
    format!(
        "{} trust domains: contents found in two of them are marked in one at most ({} withheld). Pages that changed \
         since they were read may still merge across domains: the kernel does not know them",
        status.domains.len(),
        human(withheld)
    )
}

fn headline(status: &Status) -> String {
    let of = format!("{} in {}", human(status.resident_bytes), count(status.processes.len(), "process", "processes"));
    if status.dry_run {
        let expected: u64 = status.processes.iter().map(|row| row.expected_bytes).sum();
        let marked = human(status.marked_bytes);
        return format!("Dry run: of {of}, {marked} would be marked, {} of it duplicate.", human(expected));
    }
    format!(
        "Saves {}, {} of {of}, for {} of a core.",
        human(status.saved_bytes),
        percent(status.saved_bytes as f64, status.resident_bytes as f64),
        percent(status.used_share, 1.0)
    )
}

fn state(status: &Status) -> String {
    let at = |what: &str| status.next.iter().any(|row| row.what == what);
    let work: Vec<&str> = [("read", "reading"), ("mark", "marking"), ("merge", "merging")]
        .into_iter()
        .filter(|(what, _)| at(what))
        .map(|(_, word)| word)
        .collect();
    match (status.paused, status.busy) {
        (true, _) => "paused: nothing is read, marked or merged until pagefold resume".to_owned(),
        (false, true) if work.is_empty() => "sampling".to_owned(),
        (false, true) => work.join(", "),
        (false, false) => "watching: nothing to do until something changes".to_owned(),
    }
}

fn governor(status: &Status) -> String {
    let allowed = format!("up to {} of a core", percent(status.allowed_share, 1.0));
    match status.governor {
        Governor::Auto => format!("auto, now {}: {allowed}", status.in_force),
        governor => format!("{governor}: {allowed}"),
    }
}

fn ksm(status: &Status) -> String {
    match (&status.ksm_why, status.ksm_driven) {
        (_, true) => format!(
            "controlled by this run, {} so far; saves {} on the whole machine",
            count(usize::try_from(status.scans).unwrap_or(usize::MAX), "scan", "scans"),
            human(status.saved_machine_bytes)
        ),
        (Some(why), false) => format!("not controlled by this run: {why}"),
        (None, false) => "not controlled by this run yet".to_owned(),
    }
}

/// Colours a kind: worth merging, not worth it, not known yet.
pub fn paint(kind: Kind, text: &str, style: Style) -> String {
    match kind {
        Kind::StaticallyDuplicated => style.good(text),
        Kind::CowBroken | Kind::ShortLived => style.other(text),
        Kind::Sparse => style.plain(text),
        Kind::Unknown => style.dim(text),
    }
}

fn kinds(text: &mut String, status: &Status, style: Style) {
    line(text, "");
    line(text, &style.dim("  KIND OF MEMORY           MEMORY    SHARE  REGIONS"));
    for row in &status.kinds {
        let share = row.resident.bytes().0 as f64 / status.resident_bytes.max(1) as f64;
        let figures = format!(
            "  {:<21} {:>9}  {:>7}  {:>7}  ",
            row.kind.to_string(),
            human(row.resident.bytes().0),
            percent(share, 1.0),
            row.regions
        );
        let figures = if row.regions == 0 { style.dim(&figures) } else { figures };
        line(text, &format!("{figures}{}", paint(row.kind, &bar(share, BAR), style)));
    }
}

fn levels(text: &mut String, status: &Status, style: Style) {
    line(text, "");
    line(text, &style.dim("  LEVEL OF THE LADDER      MEMORY     CORE  REGIONS"));
    let top = status.levels.len();
    for row in &status.levels {
        let what = match row.level {
            1 => "watched, and new",
            level if level == top => "read whole, merged",
            _ => "sampled",
        };
        let figures = format!(
            "  {:<2} {what:<18} {:>9}  {:>7}  {:>7}  ",
            row.level,
            human(row.resident.bytes().0),
            percent(row.share.fraction(), 1.0),
            row.regions
        );
        let share = row.resident.bytes().0 as f64 / status.resident_bytes.max(1) as f64;
        let figures = if row.regions == 0 { style.dim(&figures) } else { figures };
        line(text, &format!("{figures}{}", style.plain(&bar(share, BAR))));
    }
}

fn processes(text: &mut String, status: &Status, style: Style) {
    line(text, "");
    line(text, &style.dim("      PID  PROGRAM            MEMORY    MARKED  DUPLICATE"));
    for row in status.processes.iter().take(PROCESSES) {
        let name = shorten(&row.name, 16);
        if let Some(why) = &row.left_alone {
            line(text, &format!("  {:>7}  {name:<16} {}", row.pid, style.dim(&format!("left alone: {why}"))));
            continue;
        }
        let size = |bytes: u64| if bytes == 0 { "-".to_owned() } else { human(bytes) };
        line(
            text,
            &format!(
                "  {:>7}  {name:<16} {:>8}  {:>8}  {:>9}",
                row.pid,
                size(row.resident_bytes),
                size(row.marked_bytes),
                size(row.expected_bytes)
            ),
        );
    }
    if let Some(rest) = status.processes.get(PROCESSES..).filter(|rest| !rest.is_empty()) {
        let memory = rest.iter().map(|row| row.resident_bytes).sum();
        let others = count(rest.len(), "process", "processes");
        line(text, &style.dim(&format!("           … and {others} more with {} (all of them: --json)", human(memory))));
    }
}

fn next(text: &mut String, status: &Status, style: Style) {
    line(text, "");
    line(text, &format!("  {}", style.bold("What happens next")));
    if status.paused {
        line(text, "  Nothing, until pagefold resume. Merged pages stay merged.");
        return;
    }
    for row in &status.next {
        let what = match row.what.as_str() {
            "read" => "being read whole, to find what is worth merging",
            "mark" if status.dry_run || !status.ksm_driven => "worth marking",
            "mark" => "about to be marked for ksmd",
            "merge" if status.dry_run => "would be merged; this is a dry run",
            "merge" => "being merged by ksmd, which takes two scans",
            "sample" => "sampled further: too few samples to decide",
            "watch" => "sampled thinly, for changes",
            "nothing" => "left alone: cannot be marked",
            _ => "",
        };
        let what = match row.soonest_seconds {
            Some(seconds) => format!("left alone; the first is judged again in {}", time(seconds)),
            None => what.to_owned(),
        };
        let regions = count(row.regions, "region", "regions");
        line(text, &format!("  {:>9}  {what} {}", human(row.resident_bytes), style.dim(&format!("({regions})"))));
    }
    line(text, "");
    line(
        text,
        &style.dim(&format!(
            "  {} pages read in {}. Why, for one process: pagefold explain PID",
            thousands(status.pages_read),
            count(usize::try_from(status.rounds).unwrap_or(usize::MAX), "round", "rounds")
        )),
    );
}

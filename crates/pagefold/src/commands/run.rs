//! `pagefold run`: the daemon, in the foreground.

pub mod reload;

use crate::audit::{Begin, End, Entry};
use crate::commands::run::reload::Standing;
use crate::config::settings::Settings;
use crate::control;
use crate::control::queue::{Desk, Facts, RunFacts};
use crate::preflight;
use anyhow::{Context, Result};
use indicatif::{ProgressBar, ProgressStyle};
use pagefold_cli::exit::{self, Exit};
use pagefold_cli::flags::{DenyFlags, RunFlags};
use pagefold_cli::scope::{ScopeArgs, explain};
use pagefold_cli::style::{self, Style};
use pagefold_core::config::Config;
use pagefold_core::engine::{Engine, cycle};
use pagefold_core::governor::Governor;
use pagefold_core::host::Host;
use pagefold_core::ledger::METADATA_BYTES_PER_PAGE;
use pagefold_core::placement::policy::Placement;
use pagefold_linux::host::live::{Changed, Event, HostMode, LiveError, LiveHost};
use pagefold_linux::inject::Injector;
use pagefold_linux::ksm::lease::{Places, Restored, Tenure, Wishes};
use pagefold_linux::ksm::{Knob, Ksm};
use pagefold_linux::os::fault;
use pagefold_linux::os::wake;
use pagefold_linux::proc::Roots;
use pagefold_linux::scope::dumpable::ask_through;
use pagefold_linux::scope::exclude::DenyList;
use serde::Serialize;
use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// What to fold, how hard and how long.
#[derive(Clone, Debug, clap::Args)]
pub struct RunArgs {
    /// Which programs.
    #[command(flatten)]
    pub scope: ScopeArgs,
    /// Whom to leave alone.
    #[command(flatten)]
    pub deny: DenyFlags,
    /// The other options that the configuration file has too.
    #[command(flatten)]
    pub options: RunFlags,
    /// Take settings that are not given here from this file (without any scope, /etc/pagefold/pagefold.toml is read if it
    /// is there)
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// End after this time (60s, 5m, 2h); without it, when told to by ctrl-C or SIGTERM
    #[arg(long = "for", value_name = "DURATION", value_parser = humantime::parse_duration)]
    pub duration: Option<Duration>,
    /// Find out what would be marked, and mark nothing
    #[arg(long)]
    pub dry_run: bool,
    /// Have the injector started by whoever listens at this socket (pagefold-injector.socket), and not by this process
    #[arg(long, value_name = "SOCKET")]
    pub injector: Option<PathBuf>,
    /// Print the summary as JSON (schema pagefold.run/1)
    #[arg(long)]
    pub json: bool,
}

/// The summary of a run.
#[derive(Debug, Serialize)]
struct Summary {
    schema: &'static str,
    scope: String,
    dry_run: bool,
    governor: Governor,
    /// Length of the run, seconds.
    seconds: f64,
    /// Processes in scope at the end.
    processes: usize,
    /// Memory that KSM saves more than before the run, metadata not subtracted.
    saved_bytes: u64,
    /// The kernel's metadata for what is marked.
    metadata_bytes: u64,
    /// In a dry run: duplicate memory in the spans that would be marked.
    expected_bytes: u64,
    /// Address space marked (in a dry run: that would be).
    marked_bytes: u64,
    /// Spans marked, and system calls made for it in targets.
    marked_spans: u64,
    /// Pages that are merged now and were not before: those saved, and those that stand for them.
    merged_pages: u64,
    cpu_seconds: CpuSeconds,
    /// From the start until nine tenths of what is saved at the end were saved.
    seconds_to_90_percent: Option<f64>,
    /// Pages read to find out.
    pages_read: u64,
    /// Full scans ordered from ksmd.
    scans: u64,
    /// Stops of targets for marking.
    stops: u64,
    longest_stop_us: f64,
    total_stop_us: f64,
    /// Merged pages moved to another memory node, and the part of pagefold's CPU time that took.
    moved_pages: u64,
    move_seconds: f64,
    /// Every knob is as it was before, but for those in `knobs_deferred`.
    knobs_restored: bool,
    /// Knobs that the kernel refuses to change while pages are merged, with the value they will get back.
    knobs_deferred: BTreeMap<String, u64>,
    /// Why KSM was not driven to the end, if somebody else turned a knob.
    stood_down: Option<String>,
    /// Lines of the audit log that could not be written.
    audit_lost: u64,
    /// Programs in scope that were left alone.
    left_alone: Vec<LeftAlone>,
}

#[derive(Debug, Serialize)]
struct CpuSeconds {
    pagefold: f64,
    ksmd: f64,
}

#[derive(Clone, Debug, Serialize)]
struct LeftAlone {
    pid: i32,
    name: String,
    reason: String,
}

/// Runs until told to stop, and returns the exit code.
pub fn run(args: &RunArgs) -> Result<u8> {
    // Signals first: from here on the end is always an orderly one.
    let (stop, woken) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let on = |signal, flag: &Arc<AtomicBool>| {
        signal_hook::flag::register(signal, flag.clone()).context("cannot listen for signals")?;
        // After the flag, so that whoever sees itself woken sees why.
        signal_hook::flag::register(signal, woken.clone()).context("cannot listen for signals")
    };
    on(signal_hook::consts::SIGINT, &stop)?;
    on(signal_hook::consts::SIGTERM, &stop)?;
    signal_hook::flag::register(wake::SIGNAL, woken.clone()).context("cannot listen for signals")?;
    let settings = Settings::of(args)?;
    let Settings { scope, config, deny, .. } = settings.clone();
    preflight::need_rights("folding other programs' memory")?;
    let ksm = preflight::ksm()?;
    let mut standing = Standing::new(args, settings)?;
    on(signal_hook::consts::SIGHUP, &standing.on_hangup().unwrap_or_else(|| stop.clone()))?;
    let injector = injector(args)?;
    let left_alone = check_scope(&scope, &deny)?;
    let local_only = standing.settings.placement.default == Placement::LocalOnly;
    let wishes = Wishes { merge_across_nodes: local_only.then_some(false), ..Wishes::default() };
    let hands = take(injector, &ksm, &wishes)?;
    let look_ns = look_ns(&config, config.governor);
    let facts =
        RunFacts { scope: scope.spec().to_string(), dry_run: args.dry_run, config: config.clone(), stood_down: None };
    let mut engine = Engine::new(config);
    let mut host = LiveHost::new(scope.spec(), Roots::default(), deny, ksm, hands, woken.clone())
        .map_err(|error| failure(&error))?;
    // What lives for seconds must be seen sooner.
    host.set_refresh_interval(look_ns);
    host.set_domains(standing.settings.domains.clone());
    host.set_policies(standing.settings.placement.clone());
    let (desk, counter) = Desk::open(woken);
    let server = control::serve(counter, args.dry_run);
    fault::point("socket-made");
    let (command, pid) = ("run", std::process::id());
    let begin = Begin { command, version: env!("CARGO_PKG_VERSION"), pid, scope: scope.spec().to_string() };
    complain(standing.log(&Entry::Begin(begin)));
    let told = watch(args, &mut engine, &mut host, &stop, left_alone, (desk, facts), &mut standing);
    drop(server);
    // Those of a round that failed.
    for event in host.take_events() {
        if let Event::Changed(changed) = event {
            complain(log_change(&mut standing, &host, changed));
        }
    }
    let processes = host.targets().filter(|target| target.exclusion.is_none()).count();
    // Whatever has happened: first KSM is given back, then it is told.
    let ended = host.finish();
    complain(standing.log(&Entry::End(End { command, pid, lost: standing.lost() })));
    if let (Some(ksm), Some(cost)) = (&ended.ksm, ended.cost) {
        engine.close(ended.now_ns, ksm, cost);
    }
    let restored = ended.restored;
    let summary = summary(args, &standing, &engine, processes, restored.as_ref(), told?);
    let text =
        if args.json { serde_json::to_string_pretty(&summary)? + "\n" } else { describe(&summary, Style::of_stdout()) };
    style::print(&text)?;
    for line in unrestored(restored.as_ref()) {
        eprintln!("pagefold: {line}");
    }
    Ok(if summary.knobs_restored { exit::OK } else { exit::FAILURE })
}

/// How often to look for what has come and gone: some times in a round.
fn look_ns(config: &Config, governor: Governor) -> u64 {
    config.pace(governor).round_ns / 4
}

/// Refuses a scope in which nothing may be touched; names what will be left alone.
fn check_scope(scope: &ScopeArgs, deny: &DenyList) -> Result<Vec<LeftAlone>, Exit> {
    let scoped = scope.resolve()?;
    let all = scoped.len();
    let left_alone: Vec<LeftAlone> = scoped
        .iter()
        .filter(|scoped| scope.pid.contains(&scoped.process.pid()) || all == 1)
        .filter_map(|scoped| {
            let reason = preflight::refusal(scoped, deny)?;
            Some(LeftAlone { pid: scoped.process.pid(), name: scoped.name.clone(), reason })
        })
        .collect();
    match left_alone.first() {
        Some(first) if left_alone.len() == all => Err(Exit::new(
            exit::REFUSED,
            format!("process {} ({}) is left alone: {}; nothing else is in scope", first.pid, first.name, first.reason),
        )),
        _ => Ok(left_alone),
    }
}

/// Starts what marks, unless this is a dry run, and gives up every right that is not needed from there on. A dry run has
/// nobody who could ask programs whether they are dumpable, and keeps what it takes to tell that from outside.
fn injector(args: &RunArgs) -> Result<Option<Injector>> {
    if args.dry_run {
        return Ok(None);
    }
    let injector = match &args.injector {
        Some(path) => preflight::injector_at(path)?,
        None => preflight::injector()?,
    };
    preflight::give_up_rights()?;
    ask_through(&injector);
    fault::point("injector-started");
    Ok(Some(injector))
}

/// Takes KSM over, if there is what marks.
pub fn take(injector: Option<Injector>, ksm: &Arc<Ksm>, wishes: &Wishes) -> Result<HostMode> {
    let Some(injector) = injector else { return Ok(HostMode::DryRun) };
    let tenure =
        Tenure::take(ksm.clone(), &Places::default(), wishes).map_err(|error| preflight::explain_take(&error))?;
    for (knob, value) in tenure.not_granted() {
        eprintln!(
            "pagefold: {} stays as it is instead of {value}: pages are merged already, or this kernel lacks it",
            knob.file_name()
        );
    }
    Ok(HostMode::Act { tenure, injector })
}

/// Goes round after round until told to stop, until the host's clock says `end_ns`, or until `each`, which is called
/// after every round, breaks.
pub fn rounds(
    engine: &mut Engine,
    host: &mut LiveHost,
    stop: &AtomicBool,
    end_ns: u64,
    mut each: impl FnMut(&mut Engine, &mut LiveHost) -> ControlFlow<()>,
) -> Result<()> {
    while !stop.load(Ordering::Relaxed) && host.now_ns() < end_ns {
        let pause_ns = match cycle(engine, host) {
            Ok(cycle) => cycle.wait_ns,
            Err(LiveError::Scope(error)) => return Err(explain(&error).into()),
            Err(error) => return Err(failure(&error).into()),
        };
        if each(engine, host).is_break() {
            break;
        }
        host.wait(pause_ns.min(end_ns.saturating_sub(host.now_ns()))).map_err(|error| failure(&error))?;
    }
    Ok(())
}

/// What ends a run. The error says all itself: its cause would be printed a second time.
fn failure(error: &LiveError) -> Exit {
    Exit::new(exit::FAILURE, format!("{error}; see pagefold doctor"))
}

/// What was told of the run while it went on.
struct Told {
    left_alone: Vec<LeftAlone>,
    stood_down: Option<String>,
}

fn watch(
    args: &RunArgs,
    engine: &mut Engine,
    host: &mut LiveHost,
    stop: &AtomicBool,
    left_alone: Vec<LeftAlone>,
    (mut desk, mut facts): (Desk, RunFacts),
    standing: &mut Standing<'_>,
) -> Result<Told> {
    let bar = progress();
    let mut told = Told { left_alone: Vec::new(), stood_down: None };
    for left in left_alone {
        tell(&bar, &mut told, Event::LeftAlone { pid: left.pid, name: left.name, why: left.reason });
    }
    let end_ns = args.duration.map_or(u64::MAX, |limit| u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX));
    rounds(engine, host, stop, end_ns, |engine, host| {
        for event in host.take_events() {
            match event {
                Event::Changed(changed) => {
                    if let Some(complaint) = log_change(standing, host, changed) {
                        say(&bar, &complaint);
                    }
                }
                event => tell(&bar, &mut told, event),
            }
        }
        if host.targets().next().is_none() && !standing.settings.scope.is_selective() {
            bar.println("every process named has ended");
            return ControlFlow::Break(());
        }
        facts.stood_down.clone_from(&told.stood_down);
        if let Some(governor) = desk.serve(engine, |engine| Facts::of(engine, host, facts.clone())) {
            host.set_refresh_interval(look_ns(&facts.config, governor));
        }
        let (lines, governor) = standing.serve(engine, host);
        for line in lines {
            say(&bar, &line);
        }
        if let Some(governor) = governor {
            host.set_refresh_interval(look_ns(&facts.config, governor));
        }
        show(&bar, engine, host, desk.is_paused());
        // The desk may have taken a signal's word for a question's.
        if stop.load(Ordering::Relaxed) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    })?;
    bar.finish_and_clear();
    Ok(told)
}

fn tell(bar: &ProgressBar, told: &mut Told, event: Event) {
    let line = match event {
        Event::Changed(_) => return,
        Event::LeftAlone { pid, name, why } => {
            // Said already when the scope was checked.
            if told.left_alone.iter().any(|left| left.pid == pid && left.reason == why) {
                return;
            }
            let line = format!("process {pid} ({name}) is left alone: {why}");
            told.left_alone.push(LeftAlone { pid, name, reason: why });
            line
        }
        Event::StoodDown { why } => {
            let line = format!("KSM is not driven any more: {why}");
            told.stood_down = Some(why);
            line
        }
    };
    say(bar, &line);
}

fn say(bar: &ProgressBar, line: &str) {
    if bar.is_hidden() {
        eprintln!("pagefold: {line}");
    } else {
        bar.println(line);
    }
}

fn complain(complaint: Option<String>) {
    if let Some(complaint) = complaint {
        eprintln!("pagefold: {complaint}");
    }
}

/// Writes a change down, if changes are; what there is to complain about.
fn log_change(standing: &mut Standing<'_>, host: &LiveHost, changed: Changed) -> Option<String> {
    if !standing.logs() {
        return None;
    }
    let target = host.targets().find(|target| target.process.pid() == changed.pid);
    standing.log(&Entry::changed(changed, target))
}

fn progress() -> ProgressBar {
    // Hidden by itself where standard error is no terminal.
    let bar = ProgressBar::new_spinner();
    if let Ok(style) = ProgressStyle::with_template("{spinner:.green} {msg}  {elapsed:.dim}") {
        bar.set_style(style);
    }
    // Its thread would wake up eight times a second to draw nothing.
    if !bar.is_hidden() {
        bar.enable_steady_tick(Duration::from_millis(120));
    }
    bar
}

fn show(bar: &ProgressBar, engine: &Engine, host: &LiveHost, paused: bool) {
    let ledger = engine.ledger();
    let resident: u64 = engine.regions().map(|region| region.view.resident.bytes().0).sum();
    bar.set_message(format!(
        "{}, {}: saved {}, CPU {:.1} s{}",
        style::count(host.targets().count(), "process", "processes"),
        style::human(resident),
        style::human(ledger.saved().bytes().0),
        (ledger.cost.pagefold_ns + ledger.cost.ksmd_ns) as f64 / 1e9,
        match (paused, engine.is_busy()) {
            (true, _) => ", paused (pagefold resume)",
            (false, true) => "",
            (false, false) => ", watching",
        },
    ));
}

fn summary(
    args: &RunArgs,
    standing: &Standing<'_>,
    engine: &Engine,
    processes: usize,
    restored: Option<&Restored>,
    told: Told,
) -> Summary {
    let ledger = engine.ledger();
    let marks = || engine.regions().flat_map(|region| &region.marks.spans);
    let deferred = restored.iter().flat_map(|restored| &restored.deferred);
    Summary {
        schema: "pagefold.run/1",
        scope: standing.settings.scope.spec().to_string(),
        dry_run: args.dry_run,
        governor: standing.settings.config.governor,
        seconds: (ledger.now_ns - ledger.began_ns) as f64 / 1e9,
        processes,
        saved_bytes: ledger.saved().bytes().0,
        metadata_bytes: marks().map(|mark| mark.resident.0).sum::<u64>() * METADATA_BYTES_PER_PAGE,
        expected_bytes: if args.dry_run { marks().map(|mark| mark.duplicate.bytes().0).sum() } else { 0 },
        marked_bytes: ledger.marked.bytes().0,
        marked_spans: ledger.spans,
        merged_pages: ledger.merged().0,
        cpu_seconds: CpuSeconds {
            pagefold: ledger.cost.pagefold_ns as f64 / 1e9,
            ksmd: ledger.cost.ksmd_ns as f64 / 1e9,
        },
        seconds_to_90_percent: ledger.seconds_to_90_percent(),
        pages_read: ledger.pages_read,
        scans: engine.scans(),
        stops: ledger.stops,
        longest_stop_us: ledger.longest_stop_ns as f64 / 1e3,
        total_stop_us: ledger.total_stop_ns as f64 / 1e3,
        moved_pages: ledger.moved.0,
        move_seconds: ledger.move_ns as f64 / 1e9,
        knobs_restored: restored.is_none_or(|restored| restored.failed.is_empty() && restored.pending.is_empty()),
        knobs_deferred: deferred.map(|&(knob, value)| (knob.file_name().to_owned(), value)).collect(),
        stood_down: told.stood_down,
        audit_lost: standing.lost(),
        left_alone: told.left_alone,
    }
}

/// What could not be put back, each in a line.
fn unrestored(restored: Option<&Restored>) -> Vec<String> {
    let Some(restored) = restored else { return Vec::new() };
    let name = |knob: &Knob| knob.file_name();
    let failed = restored.failed.iter().map(|(knob, why)| format!("could not put {} back: {why}", name(knob)));
    let pending = restored.pending.iter().map(|(knob, value)| {
        format!(
            "ksmd is still in a scan, and {} is {value} again only later; when it has ended, run pagefold doctor --fix",
            name(knob)
        )
    });
    failed.chain(pending).collect()
}

fn describe(summary: &Summary, style: Style) -> String {
    let mut text = String::new();
    let headline = if summary.dry_run {
        format!(
            "Dry run: would mark {}, of which {} are duplicate. Nothing was changed.",
            style::human(summary.marked_bytes),
            style::human(summary.expected_bytes)
        )
    } else {
        format!("Saved {} in {:.1} s.", style::human(summary.saved_bytes), summary.seconds)
    };
    style::line(&mut text, &style.bold(&headline));
    style::line(&mut text, "");
    let mut row = |name: &str, value: String| style::line(&mut text, &format!("  {name:<14}{value}"));
    let reached =
        summary.seconds_to_90_percent.map_or(String::new(), |s| format!(", nine tenths of it after {s:.1} s"));
    if !summary.dry_run {
        row("merged", format!("{} pages{reached}", summary.merged_pages));
    }
    row(
        "marked",
        format!(
            "{} in {}, kernel metadata {}",
            style::human(summary.marked_bytes),
            style::count(usize::try_from(summary.marked_spans).unwrap_or(usize::MAX), "span", "spans"),
            style::human(summary.metadata_bytes)
        ),
    );
    row(
        "CPU",
        format!(
            "{:.2} s by pagefold ({} pages read), {:.2} s by ksmd ({} scans)",
            summary.cpu_seconds.pagefold, summary.pages_read, summary.cpu_seconds.ksmd, summary.scans
        ),
    );
    row("stops", format!("{}, the longest {:.0} us", summary.stops, summary.longest_stop_us));
    if summary.moved_pages > 0 {
        row("moved", format!("{} pages to other memory nodes, {:.2} s", summary.moved_pages, summary.move_seconds));
    }
    if let Some(why) = &summary.stood_down {
        row("stood down", why.clone());
    }
    let deferred: Vec<String> =
        summary.knobs_deferred.iter().map(|(knob, value)| format!("{knob} ({value})")).collect();
    row(
        "KSM",
        match (summary.dry_run, deferred.is_empty()) {
            (true, _) => "not touched".to_owned(),
            (false, true) => "as it was".to_owned(),
            (false, false) => format!(
                "as it was, but for {}, which the kernel lets be put back when nothing is merged any more",
                deferred.join(", ")
            ),
        },
    );
    if summary.saved_bytes > 0 {
        style::line(&mut text, "");
        style::line(
            &mut text,
            &style.dim(&format!("The memory stays folded. To give it back: pagefold unmerge {}", summary.scope)),
        );
    }
    text
}

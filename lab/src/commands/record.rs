//! `pagefold-lab record`: records the page contents of running programs over time, as digests. Reads only.

use crate::interrupt::Interrupt;
use crate::record::{Deltas, Origin, RecordWriter, Source, Written, schema};
use crate::recorder::{Recorder, RecordingOptions};
use anyhow::{Context, Result};
use pagefold::config::flags::DenyFlags;
use pagefold::config::scope::ScopeArgs;
use pagefold_host::scope::ProcessInfo;
use pagefold_host::scope::deny_list::DenyList;
use pagefold_host::scope::exclude::process_exclusion;
use pagefold_procmem::memory::PageReader;
use pagefold_procmem::os::cpu::own_cpu_ns;
use pagefold_text::exit::{self, Exit};
use pagefold_text::progress::Progress;
use pagefold_text::style::{self, Lines};
use serde::Serialize;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Options of `pagefold-lab record`.
#[derive(Clone, Debug, clap::Args)]
pub struct RecordArgs {
    /// The processes to record.
    #[command(flatten)]
    pub scope: ScopeArgs,
    /// Changes to the deny list.
    #[command(flatten)]
    pub deny: DenyFlags,
    /// Take a snapshot this often (500ms, 1s, 1m); each reads all memory in scope
    #[arg(long, value_name = "DURATION", default_value = "1s", value_parser = interval)]
    pub every: Duration,
    /// Stop after this time, or earlier on Ctrl-C or when all processes have ended
    #[arg(long = "for", value_name = "DURATION", default_value = "60s", value_parser = humantime::parse_duration)]
    pub duration: Duration,
    /// Write the record to this file (Parquet, schema pagefold.record/1)
    #[arg(short, long, value_name = "FILE")]
    pub output: PathBuf,
    /// Leave out names and PIDs, and shift addresses and frames by random numbers
    #[arg(long)]
    pub anonymous: bool,
    /// Print a summary as JSON (schema pagefold.lab.record/1)
    #[arg(long)]
    pub json: bool,
}

pub fn interval(text: &str) -> Result<Duration, String> {
    let every = humantime::parse_duration(text).map_err(|error| error.to_string())?;
    if every < Duration::from_millis(1) { Err("it is less than 1ms".to_owned()) } else { Ok(every) }
}

#[derive(Debug, Serialize)]
struct Summary {
    schema: &'static str,
    file: PathBuf,
    file_schema: &'static str,
    scope: String,
    seconds: f64,
    #[serde(flatten)]
    written: Written,
    /// CPU time spent recording and writing.
    cpu_seconds: f64,
    #[serde(rename = "longest_look_seconds")]
    longest_snapshot_seconds: f64,
    /// Processes in scope that we left alone at the end.
    left_alone: Vec<LeftAlone>,
}

#[derive(Debug, Serialize)]
struct LeftAlone {
    pid: i32,
    name: String,
    reason: String,
}

pub fn run(args: &RecordArgs) -> Result<u8> {
    // Signals first: from here on an interrupt ends the recording in an orderly way.
    let stop = Interrupt::on_signals().context("cannot listen for signals")?;
    let scoped = args.scope.resolve()?;
    require_page_flags()?;
    let deny = args.deny.apply(DenyList::default());
    refuse_if_all_are_left_alone(&scoped, &deny)?;
    let every_ns = u64::try_from(args.every.as_nanos()).unwrap_or(u64::MAX);
    let origin = Origin { source: "live".to_owned(), every_ns, anonymous: args.anonymous };
    let mut writer = RecordWriter::create(&args.output, &origin)?;
    let began = Instant::now();
    let cpu_before_ns = own_cpu_ns();
    let options = RecordingOptions {
        scope: args.scope.spec(),
        deny,
        every: args.every,
        length: args.duration,
        anonymous: args.anonymous,
    };
    let mut recorder = Recorder::new(options, scoped, stop)?;
    let mut deltas = Deltas::new();
    let progress = Progress::new();
    while let Some(memory) = recorder.next_snapshot()? {
        let pages = memory.regions.iter().map(|(_, pages)| pages.len()).sum::<usize>();
        let snapshot = deltas.next(memory);
        writer.write(&snapshot)?;
        let message = format!("recording {pages} pages, {} changes", snapshot.events.len());
        progress.show(&message, Some(began.elapsed().as_secs_f64() / args.duration.as_secs_f64()));
    }
    let written = writer.finish()?;
    progress.clear();
    let summary = summary(args, &recorder, written, began.elapsed(), own_cpu_ns() - cpu_before_ns);
    let text = if args.json { serde_json::to_string_pretty(&summary)? + "\n" } else { describe(&summary) };
    style::print(&text)?;
    Ok(exit::OK)
}

/// Fails where we can't read page flags: the record couldn't show which pages are merged, shared or zero.
pub fn require_page_flags() -> Result<(), Exit> {
    if PageReader::new().sees_frames() {
        return Ok(());
    }
    Err(match std::fs::metadata("/proc/kpageflags") {
        Ok(_) => Exit::new(exit::NOT_PERMITTED, "not permitted to read other processes' memory; run as root (sudo)"),
        Err(_) => Exit::new(
            exit::NO_KERNEL_SUPPORT,
            "this kernel has no /proc/kpageflags; it must be built with CONFIG_PROC_PAGE_MONITOR",
        ),
    })
}

fn refuse_if_all_are_left_alone(scoped: &[ProcessInfo], deny: &DenyList) -> Result<(), Exit> {
    let mut first = None;
    for scoped in scoped {
        match process_exclusion(scoped, deny, None) {
            Ok(None) => return Ok(()),
            Ok(Some(exclusion)) => first = first.or(Some((scoped, exclusion.to_string()))),
            Err(error) => first = first.or(Some((scoped, error.to_string()))),
        }
    }
    let Some((scoped, reason)) = first else {
        return Err(Exit::new(exit::NO_SCOPE, "every process in scope has ended; start it again"));
    };
    let pid = scoped.process.pid();
    let name = &scoped.name;
    let line =
        format!("process {pid} ({name}) is left alone: {reason}; nothing else is in scope; select other processes");
    Err(Exit::new(exit::REFUSED, line))
}

fn counted(number: u64, one: &str, many: &str) -> String {
    format!("{number} {}", if number == 1 { one } else { many })
}

fn summary(args: &RecordArgs, recorder: &Recorder, written: Written, time: Duration, cpu_ns: u64) -> Summary {
    Summary {
        schema: "pagefold.lab.record/1",
        file: args.output.clone(),
        file_schema: schema::SCHEMA,
        scope: args.scope.spec().to_string(),
        seconds: time.as_secs_f64(),
        written,
        cpu_seconds: cpu_ns as f64 / 1e9,
        longest_snapshot_seconds: recorder.longest_snapshot().as_secs_f64(),
        left_alone: recorder
            .left_alone()
            .map(|(pid, name, why)| LeftAlone { pid, name: name.to_owned(), reason: why.to_string() })
            .collect(),
    }
}

fn describe(summary: &Summary) -> String {
    let written = &summary.written;
    let mut text = String::new();
    text.line(format!(
        "{}: {} of {}, {} and {}; {} in the first, {} after it.",
        summary.file.display(),
        counted(written.snapshots, "snapshot", "snapshots"),
        counted(written.processes, "process", "processes"),
        counted(written.regions, "region", "regions"),
        style::human(written.pages * 4096),
        counted(written.pages, "page", "pages"),
        counted(written.changes, "change", "changes"),
    ));
    text.line(format!(
        "{} on disk; {:.1} s of CPU time in {:.1} s, the longest snapshot took {:.2} s.",
        style::human(written.bytes),
        summary.cpu_seconds,
        summary.seconds,
        summary.longest_snapshot_seconds,
    ));
    for left in &summary.left_alone {
        text.line(format!("Process {} ({}) was left alone: {}.", left.pid, left.name, left.reason));
    }
    text
}

//! `pagefold-lab programs`: starts real programs and records them at work.

use super::record::{interval, require_page_flags};
use crate::interrupt::Interrupt;
use crate::ksm_control::KsmForExperiment;
use crate::programs::{QEMU, SUBJECTS, Subject, Subjects};
use crate::record::{Deltas, Origin, RecordWriter, Source};
use crate::recorder::{Recorder, RecordingOptions};
use anyhow::{Context, Result, anyhow, bail};
use pagefold_engine::units::Bytes;
use pagefold_host::scope::deny_list::DenyList;
use pagefold_host::scope::{ScopeSpec, resolve};
use pagefold_procmem::Roots;
use pagefold_text::exit;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Time between two steps of the programs' work.
const TURN: Duration = Duration::from_secs(1);

/// Options of `pagefold-lab programs`.
#[derive(Clone, Debug, clap::Args)]
pub struct ProgramsArgs {
    /// The programs (see --list)
    #[arg(value_name = "NAME", required_unless_present = "list", value_parser = subject)]
    programs: Option<&'static str>,
    /// Write the record to this file (Parquet, schema pagefold.record/1)
    #[arg(short, long, value_name = "FILE", required_unless_present = "list")]
    output: Option<PathBuf>,
    /// Take a snapshot this often; each reads all memory in scope
    #[arg(long, value_name = "DURATION", default_value = "1s", value_parser = interval)]
    every: Duration,
    /// Stop after this time [default: see --list]
    #[arg(long = "for", value_name = "DURATION", value_parser = humantime::parse_duration)]
    length: Option<Duration>,
    /// List the programs
    #[arg(long, exclusive = true)]
    list: bool,
}

fn subject(name: &str) -> Result<&'static str, String> {
    Subject::named(name).map(|subject| subject.name).ok_or_else(|| {
        let names: Vec<_> = SUBJECTS.iter().map(|subject| subject.name).collect();
        format!("choose {}", names.join(", "))
    })
}

pub fn run(args: &ProgramsArgs) -> Result<u8> {
    if args.list {
        let width = SUBJECTS.iter().map(|subject| subject.name.len()).max().unwrap_or(0);
        for Subject { name, about, seconds, .. } in SUBJECTS {
            println!("{name:width$}  {about}; {seconds} s");
        }
        return Ok(exit::OK);
    }
    let (Some(subject), Some(file)) = (args.programs.and_then(Subject::named), &args.output) else {
        bail!("programs and a file are required; see pagefold-lab programs --help");
    };
    require_page_flags()?;
    let interrupt = Interrupt::on_signals().context("cannot listen for signals")?;
    let length = args.length.unwrap_or(Duration::from_secs(subject.seconds));
    let every_ns = u64::try_from(args.every.as_nanos()).unwrap_or(u64::MAX);
    let mut writer = RecordWriter::create(file, &Origin { source: "live".to_owned(), every_ns, anonymous: false })?;
    // No pages may be merged while we record: the record shows memory as it is before merging.
    let _ksm = KsmForExperiment::take(&interrupt)?;
    let (subjects, _scratch) = subject.start()?;
    let scope = ScopeSpec::of_pids(subjects.pids());
    let scoped = resolve(&scope, &Roots::default())?;
    // We start guests with `mem-merge=off`, or QEMU would mark them itself.
    let deny = DenyList::default().overriding(vec![QEMU.to_owned()]);
    let options = RecordingOptions { scope, deny, every: args.every, length, anonymous: false };
    let mut recorder = Recorder::new(options, scoped, interrupt.clone())?;
    let work = WorkThread::begin(subjects);
    let mut deltas = Deltas::new();
    while let Some(memory) = recorder.next_snapshot()? {
        writer.write(&deltas.next(memory))?;
    }
    work.end()?;
    interrupt.check()?;
    let longest = recorder.longest_snapshot();
    let written = writer.finish()?;
    println!(
        "{}: {} snapshots of {} programs, {} pages in the first and {} changes after it, {:.1} MiB in {}; the longest snapshot took {:.2} s",
        subject.name,
        written.snapshots,
        written.processes,
        written.pages,
        written.changes,
        Bytes(written.bytes).mib(),
        file.display(),
        longest.as_secs_f64()
    );
    Ok(exit::OK)
}

/// A thread that keeps the programs at work until the record is complete.
struct WorkThread {
    done: Arc<AtomicBool>,
    thread: JoinHandle<Result<()>>,
}

impl WorkThread {
    fn begin(mut subjects: Box<dyn Subjects>) -> Self {
        let done = Arc::new(AtomicBool::new(false));
        let stop = Interrupt::from(Arc::clone(&done));
        let thread = std::thread::spawn(move || {
            let began = Instant::now();
            while stop.sleep(TURN).is_ok() {
                subjects.advance(began.elapsed())?;
            }
            subjects.end()
        });
        Self { done, thread }
    }

    fn end(self) -> Result<()> {
        self.done.store(true, Ordering::Relaxed);
        self.thread.join().map_err(|_| anyhow!("the thread that keeps the programs at work has panicked"))?
    }
}

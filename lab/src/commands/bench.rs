//! The command line of `pagefold-lab bench`.

use crate::bench::experiment::{EXPERIMENTS, Experiment, ExperimentSetting};
use crate::bench::guest::GuestKernel;
use crate::bench::plan::{Step, order, plan, remaining};
use crate::bench::report::{ExperimentReport, Failure, MachineDescription};
use crate::bench::results::{self, BenchOptions, Finished};
use crate::bench::table;
use anyhow::Context;
use pagefold_procmem::os::interrupt::Interrupt;
use pagefold_text::exit::{self, Exit};
use std::collections::BTreeSet;
use std::env;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// In place of a policy, when an experiment failed altogether.
const WHOLE: &str = "the experiment";

/// Options of `pagefold-lab bench`.
#[derive(Clone, Debug, Default, clap::Args)]
#[expect(clippy::struct_excessive_bools, reason = "each is a flag of its own")]
pub struct BenchArgs {
    /// Experiments to run [default: all]
    #[arg(value_name = "NAME")]
    pub names: Vec<String>,
    /// List the experiments and the claims they test
    #[arg(long)]
    pub list: bool,
    /// Write the results as JSON, one line per experiment (schema pagefold.bench/1); - means standard output
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Write the results of each repetition into this directory, as JSON with the raw samples. What is there already is
    /// not measured again
    #[arg(long, value_name = "DIR", conflicts_with = "in_guest")]
    pub output: Option<PathBuf>,
    /// Repeat each experiment
    #[arg(long, value_name = "N", default_value = "1", requires = "output", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub repeat: u32,
    /// Shuffle the experiments of each repetition, and the policies of each experiment: equal seeds give equal orders
    #[arg(long, value_name = "N", requires = "output")]
    pub seed: Option<u64>,
    /// Run small and short, to check that everything works; speed is not judged
    #[arg(long)]
    pub quick: bool,
    /// Include further peers: KSM at 100, 1000 and 2000 pages per 20 ms, its advisor, also at its cap, ksmtuned, and what uksmd does
    #[arg(long)]
    pub all_peers: bool,
    /// Run only these policies (separated by commas)
    #[arg(long, value_name = "POLICY", value_delimiter = ',')]
    pub policy: Vec<String>,
    /// The pagefold program to measure [default: the one in the same directory]
    #[arg(long, value_name = "FILE")]
    pub program: Option<PathBuf>,
    /// Run in an emulated machine with this kernel, where CPU seconds are counted instructions
    #[arg(long, value_name = "KERNEL")]
    pub in_guest: Option<PathBuf>,
    /// Load this kernel module in the emulated machine
    #[arg(long, value_name = "FILE", requires = "in_guest")]
    pub module: Option<PathBuf>,
    /// Run within the machine that an experiment emulates: nothing is judged
    #[arg(long, hide = true)]
    pub emulated: bool,
}

/// Runs the experiments. The exit code is 1 if an experiment missed a bar or we couldn't measure something.
pub fn run(args: &BenchArgs) -> anyhow::Result<u8> {
    if args.list {
        print!("{}", table::list(&EXPERIMENTS));
        return Ok(0);
    }
    let experiments = if args.names.is_empty() {
        EXPERIMENTS.iter().filter(|experiment| args.in_guest.is_some() || can_run(experiment)).collect()
    } else {
        let mut named = args.names.iter().map(|name| experiment(name)).collect::<Result<Vec<_>, Exit>>()?;
        // The same experiment named twice would be the same repetition.
        let mut seen = BTreeSet::new();
        named.retain(|experiment| seen.insert(experiment.name));
        named
    };
    let player = env::current_exe().context("cannot find the path of this program")?;
    let beside = player.with_file_name("pagefold");
    let program = args.program.as_ref().unwrap_or(&beside);
    let to_stdout = args.json.as_deref() == Some(Path::new("-"));
    let mut json: Option<Box<dyn Write>> = match &args.json {
        None => None,
        Some(_) if to_stdout => Some(Box::new(io::stdout())),
        Some(path) => Some(Box::new(File::create(path).with_context(|| path.display().to_string())?)),
    };
    let guest = args.in_guest.as_ref().map(|kernel| GuestKernel::new(kernel, args.module.as_deref())).transpose()?;
    let interrupt = Interrupt::on_signals()?;
    let setting = ExperimentSetting {
        program,
        player: &player,
        quick: args.quick,
        all_peers: args.all_peers,
        guest: guest.as_ref(),
        emulated: args.emulated,
        policies: &args.policy,
        order: None,
        interrupt: &interrupt,
    };
    let store = args.output.as_deref().map(|dir| Store::open(dir, args, program)).transpose()?;
    let mut finished = store.as_ref().map_or_else(|| Ok(Vec::new()), Store::load)?;
    let steps = plan(&experiments, args.repeat, args.seed);
    let is_finished = |finished: &[Finished], step: &Step| {
        finished
            .iter()
            .position(|one| (one.report.experiment.as_str(), one.repetition) == (step.experiment.name, step.repetition))
    };
    let mut passed = true;
    for (at, step) in steps.iter().enumerate() {
        let known = is_finished(&finished, step);
        if store.is_some() {
            let left: Vec<Step> =
                steps[at..].iter().filter(|step| is_finished(&finished, step).is_none()).copied().collect();
            announce(at, steps.len(), step, known.is_some(), remaining(&left, &finished));
        }
        let report = if let Some(at) = known {
            finished[at].report.clone()
        } else {
            let began = Instant::now();
            let setting = ExperimentSetting { order: order(args.seed, step.repetition), ..setting };
            let report = conduct(step.experiment, &setting)?;
            if !to_stdout {
                println!("{}", table::report(&report));
            }
            // If an experiment failed altogether, we measure it again next time.
            let failed = report.failures.iter().any(|failure| failure.policy == WHOLE);
            if let Some(store) = store.as_ref().filter(|_| !failed) {
                finished.push(store.add(step.repetition, began.elapsed(), &report)?);
            }
            report
        };
        passed &= report.passed();
        if let Some(json) = &mut json {
            serde_json::to_writer(&mut *json, &report)?;
            writeln!(json)?;
        }
    }
    Ok(u8::from(!passed))
}

/// The directory of `--output`.
struct Store<'a> {
    dir: &'a Path,
    options: BenchOptions,
}

impl<'a> Store<'a> {
    fn open(dir: &'a Path, args: &BenchArgs, program: &Path) -> anyhow::Result<Self> {
        fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
        let options = BenchOptions {
            seed: args.seed,
            quick: args.quick,
            all_peers: args.all_peers,
            policies: args.policy.iter().cloned().collect(),
            kernel: MachineDescription::this().kernel,
            program: BenchOptions::digest(program)?,
        };
        Ok(Self { dir, options })
    }

    fn load(&self) -> anyhow::Result<Vec<Finished>> {
        results::load(self.dir, Some(&self.options))
    }

    fn add(&self, repetition: u32, elapsed: Duration, report: &ExperimentReport) -> anyhow::Result<Finished> {
        let finished = Finished::new(repetition, self.options.clone(), elapsed, report.clone());
        results::write(self.dir, &finished)?;
        Ok(finished)
    }
}

/// Announces on standard error the next experiment, and when all will be finished. This gets its own line, because
/// experiments report their progress there, too.
fn announce(at: usize, of: usize, step: &Step, known: bool, left: Option<Duration>) {
    let Step { experiment, repetition } = step;
    let what = if known { ", is there already" } else { "" };
    let left = left.filter(|_| !known).map_or_else(String::new, |left| {
        format!(", about {} left", humantime::format_duration(Duration::from_secs(left.as_secs())))
    });
    eprintln!("{} of {of}: {}, repetition {repetition}{what}{left}", at + 1, experiment.name);
}

/// Reports on standard error the experiments that a run of all leaves out.
fn can_run(experiment: &Experiment) -> bool {
    let lacks = experiment.lacks();
    lacks.inspect(|lacks| eprintln!("{} is left out: {lacks}", experiment.name)).is_none()
}

fn experiment(name: &str) -> Result<&'static Experiment, Exit> {
    Experiment::named(name).ok_or_else(|| {
        let names = EXPERIMENTS.map(|experiment| experiment.name).join(", ");
        Exit::new(exit::USAGE, format!("there is no experiment {name}; choose {names}"))
    })
}

/// Runs one experiment. A failure becomes part of its report; an interrupt ends everything.
fn conduct(experiment: &Experiment, setting: &ExperimentSetting<'_>) -> anyhow::Result<ExperimentReport> {
    let mut report = ExperimentReport::new(experiment.name, experiment.claim);
    if let Err(error) = experiment.conduct(setting, &mut report) {
        setting.interrupt.check()?;
        eprintln!("{}: {error:#}", experiment.name);
        report.failures.push(Failure { policy: WHOLE.to_owned(), error: format!("{error:#}") });
    }
    Ok(report)
}

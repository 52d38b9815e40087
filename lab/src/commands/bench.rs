//! The command line of `pagefold-lab bench`.

use crate::bench::experiment::{EXPERIMENTS, Experiment, ExperimentSetting};
use crate::bench::guest::GuestKernel;
use crate::bench::plan::{Step, order, plan, remaining};
use crate::bench::report::{ExperimentReport, Failure, MachineDescription};
use crate::bench::results::{self, BenchOptions, Finished};
use crate::bench::table;
use crate::interrupt::Interrupt;
use anyhow::Context;
use pagefold_text::exit::{self, Exit};
use std::env;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Stands in place of a policy if an experiment failed altogether.
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
    /// Write the results of each repetition into this directory, as JSON with the raw samples. Repetitions that are
    /// there already are not measured again
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
    /// Include further peers: KSM at 100, 1000 and 2000 pages per 20 ms, its advisor, also at its cap, ksmtuned, and
    /// uksmd's rules
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
    let experiments = experiments(args)?;
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
    let mut store = args.output.as_deref().map(|dir| Store::open(dir, args, program)).transpose()?;
    let steps = plan(&experiments, args.repeat, args.seed);
    let mut passed = true;
    for (at, step) in steps.iter().enumerate() {
        let mut known = None;
        if let Some(store) = &store {
            store.announce(&steps, at);
            known = store.report(step).cloned();
        }
        let report = if let Some(report) = known {
            report
        } else {
            let began = Instant::now();
            let setting = ExperimentSetting { order: order(args.seed, step.repetition), ..setting };
            let report = conduct(step.experiment, &setting)?;
            if !to_stdout {
                println!("{}", table::report(&report));
            }
            if let Some(store) = &mut store {
                store.add(step.repetition, began.elapsed(), &report)?;
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

/// The experiments that were named, each once: the same one again would be the same repetition. By default, all that
/// can run here; we report on standard error those that can't.
fn experiments(args: &BenchArgs) -> Result<Vec<&'static Experiment>, Exit> {
    let mut chosen = Vec::new();
    for name in &args.names {
        let experiment = experiment(name)?;
        if chosen.iter().all(|other: &&Experiment| other.name != experiment.name) {
            chosen.push(experiment);
        }
    }
    if args.names.is_empty() {
        for experiment in &EXPERIMENTS {
            match experiment.lacks() {
                Some(lacks) if args.in_guest.is_none() => eprintln!("{} is left out: {lacks}", experiment.name),
                _ => chosen.push(experiment),
            }
        }
    }
    Ok(chosen)
}

/// The directory of `--output`, and the repetitions there.
struct Store<'a> {
    dir: &'a Path,
    options: BenchOptions,
    finished: Vec<Finished>,
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
        let finished = results::load(dir, Some(&options))?;
        Ok(Self { dir, options, finished })
    }

    fn report(&self, step: &Step) -> Option<&ExperimentReport> {
        let is_its_own =
            |one: &&Finished| one.repetition == step.repetition && one.report.experiment == step.experiment.name;
        Some(&self.finished.iter().find(is_its_own)?.report)
    }

    fn add(&mut self, repetition: u32, elapsed: Duration, report: &ExperimentReport) -> anyhow::Result<()> {
        // If an experiment failed altogether, we measure it again next time.
        if report.failures.iter().all(|failure| failure.policy != WHOLE) {
            let finished = Finished::new(repetition, self.options.clone(), elapsed, report.clone());
            results::write(self.dir, &finished)?;
            self.finished.push(finished);
        }
        Ok(())
    }

    /// Announces on standard error the next experiment, and when all will be finished. This gets its own line, because
    /// experiments report their progress there, too.
    fn announce(&self, steps: &[Step], at: usize) {
        let Step { experiment, repetition } = steps[at];
        eprint!("{} of {}: {}, repetition {repetition}", at + 1, steps.len(), experiment.name);
        let mut left = steps[at..].to_vec();
        left.retain(|step| self.report(step).is_none());
        if self.report(&steps[at]).is_some() {
            eprint!(", is there already");
        } else if let Some(left) = remaining(&left, &self.finished) {
            eprint!(", about {} left", humantime::format_duration(Duration::from_secs(left.as_secs())));
        }
        eprintln!();
    }
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

//! The command line of `pagefold-lab bench`.

use crate::bench::experiment::{EXPERIMENTS, Experiment, ExperimentSetting};
use crate::bench::guest::GuestKernel;
use crate::bench::plot;
use crate::bench::report::{ExperimentReport, Failure};
use crate::bench::table;
use crate::plots;
use anyhow::Context;
use pagefold_cli::exit::{self, Exit};
use pagefold_linux::os::interrupt::Interrupt;
use std::env;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

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
    /// Write charts (SVG) into this directory
    #[arg(long, value_name = "DIR", conflicts_with = "in_guest")]
    pub plots: Option<PathBuf>,
    /// Run small and short, to check that everything works; speed is not judged
    #[arg(long)]
    pub quick: bool,
    /// Include the peers that take long (KSM's advisor)
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

/// Runs the experiments. The exit code is 1 if a bar was missed or something could not be measured.
pub fn run(args: &BenchArgs) -> anyhow::Result<u8> {
    if args.list {
        print!("{}", table::list(&EXPERIMENTS));
        return Ok(0);
    }
    let experiments = if args.names.is_empty() {
        EXPERIMENTS.iter().collect()
    } else {
        args.names.iter().map(|name| experiment(name)).collect::<Result<Vec<_>, Exit>>()?
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
    if let Some(dir) = &args.plots {
        fs::create_dir_all(dir).with_context(|| dir.display().to_string())?;
    }
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
        interrupt: &interrupt,
    };
    let mut passed = true;
    for experiment in experiments {
        let report = conduct(experiment, &setting)?;
        passed &= report.passed();
        if let Some(json) = &mut json {
            serde_json::to_writer(&mut *json, &report)?;
            writeln!(json)?;
        }
        if !to_stdout {
            println!("{}", table::report(&report));
        }
        if let Some(dir) = &args.plots {
            plots::write(dir, &plot::charts(&report))?;
        }
    }
    Ok(u8::from(!passed))
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
        report.failures.push(Failure { policy: "the experiment".to_owned(), error: format!("{error:#}") });
    }
    Ok(report)
}

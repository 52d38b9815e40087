//! The command line: a module for each subcommand, with its flags, checks and output. The other modules hold the logic.

mod bench;
mod fleet;
mod generate;
mod programs;
mod record;
mod replay;
mod scale;
mod sketch_error;

use clap::{Parser, Subcommand};
use pagefold_report::command::ReportArgs;
use std::process::ExitCode;

/// Measures pagefold against KSM, and compares the papers' algorithms on recorded memory.
#[derive(Parser)]
#[command(name = "pagefold-lab", version, propagate_version = true, max_term_width = 100)]
#[command(after_help = "Exit codes: 0 success, 1 failure or a missed bar, 2 usage, 3 not permitted, 4 kernel lacks a \
    feature, 5 nothing in scope, 6 target refused, 7 another program controls KSM.")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Measure pagefold against KSM alone and against an oracle
    Bench(bench::BenchArgs),
    /// Write what bench has measured as one web page
    Report(ReportArgs),
    /// Record the page contents of running programs over time, as digests
    Record(record::RecordArgs),
    /// Generate a record of one of the papers' workloads
    Generate(generate::GenerateArgs),
    /// Start real programs and record them at work
    Programs(programs::ProgramsArgs),
    /// Run algorithms on a record and compare what they find and what it costs
    Replay(replay::ReplayArgs),
    /// Run algorithms on simulated memories of up to a tebibyte
    Scale(scale::ScaleArgs),
    /// Compare what sketches tell of the programs of a record with exact digests
    SketchError(sketch_error::SketchErrorArgs),
    /// Simulate fleets, placed at random, by plan and at best
    Fleet(fleet::FleetArgs),
    /// Run as a tenant of an experiment
    #[command(hide = true)]
    Tenant {
        /// The memory to hold, as JSON
        #[arg(long)]
        spec: String,
    },
}

pub fn main() -> ExitCode {
    let cli = match pagefold_text::program::parse::<Cli>() {
        Ok(cli) => cli,
        Err(code) => return code,
    };
    let result = match &cli.command {
        Command::Bench(args) => bench::run(args),
        Command::Report(args) => pagefold_report::command::run(args),
        Command::Record(args) => record::run(args),
        Command::Generate(args) => generate::run(args),
        Command::Programs(args) => programs::run(args),
        Command::Replay(args) => replay::run(args),
        Command::Scale(args) => scale::run(args),
        Command::SketchError(args) => sketch_error::run(args),
        Command::Fleet(args) => fleet::run(args),
        Command::Tenant { spec } => crate::activity::serve(spec),
    };
    pagefold_text::program::finish("pagefold-lab", result)
}

//! `pagefold lab`: the papers' algorithms against each other, on memory that was recorded or made up.

mod generate;
mod programs;
mod record;
mod replay;
mod scale;

use anyhow::Result;
use clap::{Args, Subcommand};

/// Options of `pagefold lab`.
#[derive(Args)]
pub struct LabArgs {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Record what the memory of running programs holds, as digests, over a time
    Record(record::RecordArgs),
    /// Make a record of a workload out of the papers
    Generate(generate::GenerateArgs),
    /// Start real programs, and record them at work
    Programs(programs::ProgramsArgs),
    /// Let algorithms loose on a record, and compare what they find and what it takes
    Replay(replay::ReplayArgs),
    /// Simulate memories up to a terabyte, and see how algorithms grow with them
    Scale(scale::ScaleArgs),
}

/// Does what is asked for.
pub fn run(args: &LabArgs) -> Result<u8> {
    match &args.command {
        Command::Record(args) => record::run(args),
        Command::Generate(args) => generate::run(args),
        Command::Programs(args) => programs::run(args),
        Command::Replay(args) => replay::run(args),
        Command::Scale(args) => scale::run(args),
    }
}

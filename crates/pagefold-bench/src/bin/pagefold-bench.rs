//! The experiments without the rest of the program, for working on them: what it measures is named by `--program`.

use clap::{Parser, Subcommand};
use pagefold_bench::BenchArgs;
use std::process::ExitCode;

#[derive(Parser)]
#[command(version, about = "Experiments with KSM, beside pagefold and without it")]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Do experiments
    Bench(BenchArgs),
    /// Play a tenant
    #[command(hide = true)]
    Tenant {
        /// What memory to hold, as JSON
        #[arg(long)]
        spec: String,
    },
}

fn main() -> ExitCode {
    match Args::parse().command {
        Command::Tenant { spec } => pagefold_workload::serve(&spec),
        Command::Bench(args) => match pagefold_bench::main(&args) {
            Ok(code) => ExitCode::from(code),
            Err(error) => {
                eprintln!("pagefold-bench: {error:#}");
                ExitCode::from(2)
            }
        },
    }
}

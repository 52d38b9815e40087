//! The command line: a module for each subcommand.

mod plan;
mod report;
mod sketches;
mod verify;

use clap::{CommandFactory, Parser, Subcommand};
use std::process::ExitCode;

/// Reports what the hosts of a fleet hold in common, and plans which workloads to put together. Moves nothing itself.
#[derive(Parser)]
#[command(name = "pagefold-fleet", version, propagate_version = true, max_term_width = 100)]
#[command(after_help = "Exit codes: 0 success, 1 failure, 2 usage, 5 no usable sketch.")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Show what hosts and pairs of workloads have in common, and what is saved or could be
    Report(report::ReportArgs),
    /// Plan which workloads to put together or apart
    Plan(plan::PlanArgs),
    /// Compare a plan's promise with what hosts saved afterwards
    Verify(verify::VerifyArgs),
}

pub fn command() -> clap::Command {
    Cli::command()
}

pub fn main() -> ExitCode {
    let cli = match pagefold_text::program::parse::<Cli>() {
        Ok(cli) => cli,
        Err(code) => return code,
    };
    quiet_workers();
    let run = async {
        match &cli.command {
            Command::Report(args) => report::run(args).await,
            Command::Plan(args) => plan::run(args).await,
            Command::Verify(args) => verify::run(args).await,
        }
    };
    let result = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime.block_on(run),
        Err(error) => Err(anyhow::anyhow!("cannot start threads: {error}; raise the limit of threads")),
    };
    pagefold_text::program::finish("pagefold-fleet", result)
}

/// If DataFusion panics on a thread of its own, the query fails with an error of one line. So we don't print the
/// panic's own text.
fn quiet_workers() {
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        if std::thread::current().name() != Some("tokio-rt-worker") {
            before(info);
        }
    }));
}

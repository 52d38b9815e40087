//! The program. This file only wires: each subcommand is a module of its own.

use clap::{Parser, Subcommand};
use commands::{doctor, exec, explain, run, scan, status, unmerge};
use std::process::ExitCode;

mod audit;
mod commands;
mod config;
mod control;
mod demo;
mod output;
mod preflight;

/// Finds memory that running programs hold twice, and has the kernel fold it into one copy.
#[derive(Parser)]
#[command(name = "pagefold", version, propagate_version = true, max_term_width = 100)]
#[command(after_help = "Exit codes: 0 well, 1 failed, 2 usage, 3 not permitted, 4 kernel lacks something, \
    5 nothing in scope, 6 target refused, 7 KSM is somebody else's, 8 no pagefold is running.")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Show what could be saved, and where; changes nothing
    Scan(scan::ScanArgs),
    /// Fold the memory of running programs until told to stop
    Run(run::RunArgs),
    /// Show what the running pagefold has saved, what that costs, and what it is at
    Status(status::StatusArgs),
    /// Show what it thinks of each part of a program's memory, and what happens next
    Explain(explain::ExplainArgs),
    /// Let it use more of a core, or less
    Governor(control::GovernorArgs),
    /// Have it read, mark and merge nothing more for now
    Pause(control::PauseArgs),
    /// Have it go on
    Resume(control::PauseArgs),
    /// Start a program whose memory may be folded, without tracing it
    Exec(exec::ExecArgs),
    /// Give programs their own copies back
    Unmerge(unmerge::UnmergeArgs),
    /// Show what this machine allows, what is in the way, and what to do about it
    Doctor(doctor::DoctorArgs),
    /// Show the whole story in a minute, on programs it starts itself
    Demo(demo::DemoArgs),
    /// Hold memory as told: what the demonstration merges
    #[command(hide = true)]
    Tenant {
        /// What to hold
        #[arg(long)]
        spec: String,
    },
    /// Make other programs' system calls, on order from standard input
    #[command(hide = true, name = preflight::INJECTOR)]
    Injector,
}

fn main() -> ExitCode {
    let cli = match pagefold_cli::parse::<Cli>() {
        Ok(cli) => cli,
        Err(code) => return code,
    };
    let result = match &cli.command {
        Command::Scan(args) => scan::run(args),
        Command::Run(args) => run::run(args),
        Command::Status(args) => status::run(args),
        Command::Explain(args) => explain::run(args),
        Command::Governor(args) => control::governor(args),
        Command::Pause(args) => control::pause(args),
        Command::Resume(args) => control::resume(args),
        Command::Exec(args) => exec::run(args),
        Command::Unmerge(args) => unmerge::run(args),
        Command::Doctor(args) => doctor::run(args),
        Command::Demo(args) => demo::run(args),
        Command::Tenant { spec } => pagefold_workload::serve(spec),
        Command::Injector => pagefold_linux::inject::serve(),
    };
    pagefold_cli::finish("pagefold", result)
}

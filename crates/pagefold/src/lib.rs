//! The program `pagefold`. This file parses the command line and calls a subcommand. Each subcommand is a module.
//!
//! It's a library so that two other programs can use it: one writes manual pages and completions, and pagefold-xen has
//! the same commands for Xen guests.
//!
//! | to change | see |
//! | --- | --- |
//! | a subcommand, its own flags, its output | [`commands`]: one module each |
//! | an option of the command line and the configuration file | [`config::options`], then [`config::settings`] |
//! | a new column of `status` | [`commands::status`], from the engine's report |
//! | the daemon's loop, and the machines it works on | [`daemon`], [`backend`] |
//! | requests to a running daemon | [`control`] |
//! | checks before we touch anything, and explanations of refusals | [`preflight`] |
//! | the audit log | [`audit`] |
//! | threads that write files | [`background`] |
//! | a metric | `FAMILIES` in [`metrics`] |
//! | the file that records savings over time; the latest events | [`history`]; [`events`] |
//! | the file from which the next run learns which memory is worth merging | [`learned`] |
//! | tables shared by several commands | [`output`] |
//! | sketches of workloads' memory, for a fleet | [`sketch`] |
//! | the manual's tables of JSON fields | [`reference`] |
//! | the demonstration | [`demo`] |
//!
//! pagefold-engine decides which memory to merge. Only pagefold-host and the crates below it touch the system.

use crate::config::args::RunArgs;
use clap::{CommandFactory, Parser, Subcommand};
use commands::examples;
use commands::sketch as sketches;
use commands::{
    complete, config as files, control as requests, doctor, enable, exec, explain, history as savings, include, run,
    scan, status, top, unmerge,
};
use control::protocol::Request;
use demo::worker::WorkerMemory;
use pagefold_inject::{Call, inject_into};
use std::process::ExitCode;

/// Writes a message to standard error: one line, without control characters that a terminal would obey.
macro_rules! complain {
    ($($message:tt)*) => { pagefold_text::messages::complain("pagefold", &format!($($message)*)) };
}

pub mod audit;
pub mod backend;
mod background;
mod bounds;
pub mod commands;
pub mod config;
pub mod control;
pub mod daemon;
mod demo;
pub mod events;
#[cfg(test)]
#[path = "golden_tests.rs"]
mod golden;
pub mod history;
pub mod kept_out;
mod learned;
pub mod log;
pub mod metrics;
pub mod output;
pub mod place;
pub mod preflight;
pub mod reference;
mod service;
mod sketch;

/// Find memory that running processes hold twice, and let the kernel merge it (KSM)
#[derive(Parser)]
#[command(name = "pagefold", version, propagate_version = true, max_term_width = 100)]
#[command(after_long_help = "Exit codes: 0 success, 1 failure, 2 usage, 3 not permitted, 4 kernel support missing, \
    5 nothing in scope, 6 target refused, 7 KSM in use by another program, 8 no daemon running, 126 and 127 as in a shell (exec).")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Show how much memory could be saved, and where; changes nothing
    #[command(after_long_help = examples::SCAN)]
    Scan(scan::ScanArgs),
    /// Write sketches of workloads' memory, to compare workloads of several hosts
    ///
    /// A sketch is a sample of keyed digests of a workload's pages, without their contents.
    #[command(after_long_help = examples::SKETCH)]
    Sketch(sketches::SketchArgs),
    /// Merge the memory of running processes until stopped
    #[command(after_long_help = examples::RUN)]
    Run(RunArgs),
    /// Add programs, units, guests, containers, pods, cgroups or users to the scope, and start or reload the service
    #[command(after_long_help = examples::ENABLE)]
    Enable(enable::EnableArgs),
    /// Undo `enable`, and unmerge the memory
    #[command(after_long_help = examples::DISABLE)]
    Disable(enable::EnableArgs),
    /// Show what the daemon has saved, what it costs, and what it is doing
    #[command(after_long_help = examples::STATUS)]
    Status(status::StatusArgs),
    /// Show live how much memory is saved, by process or workload, and why
    #[command(after_long_help = examples::TOP)]
    Top(top::TopArgs),
    /// Print the savings over time, as CSV or JSON; works without a daemon
    #[command(after_long_help = examples::HISTORY)]
    History(savings::HistoryArgs),
    /// Show what the daemon does with a process's regions or a workload's memory, and why
    #[command(after_long_help = examples::EXPLAIN)]
    Explain(explain::ExplainArgs),
    /// Change how much CPU time the daemon may use
    #[command(after_long_help = examples::GOVERNOR)]
    Governor(requests::GovernorArgs),
    /// Pause the daemon: read, mark and merge nothing until resumed
    Pause(requests::PauseArgs),
    /// Resume a paused daemon
    Resume(requests::PauseArgs),
    /// Start a program whose whole memory KSM may merge, without tracing it (ptrace)
    #[command(after_long_help = examples::EXEC)]
    Exec(exec::ExecArgs),
    /// Unmerge processes, and don't merge them again until `include`, even after a restart
    #[command(after_long_help = examples::EXCLUDE)]
    Exclude(unmerge::UnmergeArgs),
    /// Unmerge the memory of processes; a running daemon also excludes them
    ///
    /// Each process gets its own copies of merged pages again. A running daemon does this itself, and won't merge the
    /// processes again until `pagefold include`.
    #[command(after_long_help = examples::UNMERGE)]
    Unmerge(unmerge::UnmergeArgs),
    /// Let excluded processes be merged again
    #[command(after_long_help = examples::INCLUDE)]
    Include(include::IncludeArgs),
    /// Check whether this machine can run pagefold, and say what to change
    ///
    /// The exit code is the one that `pagefold run` would have.
    #[command(after_long_help = examples::DOCTOR)]
    Doctor(doctor::DoctorArgs),
    /// Check the configuration files, or show their settings
    #[command(subcommand, after_long_help = examples::CONFIG)]
    Config(files::ConfigCommand),
    /// Show in a minute how pagefold works, on processes that it starts
    Demo(demo::DemoArgs),
    /// Hold memory for the demonstration
    #[command(hide = true)]
    DemoWorker(WorkerMemory),
    /// Print the names of running workloads of a kind, for completions
    #[command(hide = true)]
    Complete {
        /// unit, vm, container or pod
        kind: String,
    },
    /// Make system calls in other processes, as requested on standard input
    #[command(hide = true, name = preflight::INJECTOR)]
    Injector {
        /// Start an injector on each socket that comes over standard input
        #[arg(long)]
        starter: bool,
    },
}

pub fn command() -> clap::Command {
    Cli::command()
}

pub fn main() -> ExitCode {
    let cli = match pagefold_text::program::parse::<Cli>() {
        Ok(cli) => cli,
        Err(code) => return code,
    };
    let result = match &cli.command {
        Command::Scan(args) => scan::run(args),
        Command::Sketch(args) => sketches::run(args),
        Command::Run(args) => run::run(args),
        Command::Enable(args) => enable::enable(args),
        Command::Disable(args) => enable::disable(args),
        Command::Status(args) => status::run(args),
        Command::Top(args) => top::run(args),
        Command::History(args) => savings::run(args),
        Command::Explain(args) => explain::run(args),
        Command::Governor(args) => requests::change(&Request::Governor { name: args.name.to_string() }, args.json),
        Command::Pause(args) => requests::change(&Request::Pause, args.json),
        Command::Resume(args) => requests::change(&Request::Resume, args.json),
        Command::Exec(args) => exec::run(args),
        Command::Exclude(args) => unmerge::run(args, true),
        Command::Unmerge(args) => unmerge::run(args, false),
        Command::Include(args) => include::run(args),
        Command::Doctor(args) => doctor::run(args),
        Command::Config(command) => files::run(command),
        Command::Demo(args) => demo::run(args),
        Command::DemoWorker(memory) => demo::worker::serve(*memory),
        Command::Complete { kind } => complete::run(kind),
        Command::Injector { starter: true } => pagefold_inject::start_injectors(preflight::injector_command),
        Command::Injector { starter: false } => pagefold_inject::serve(Call::is_harmless, inject_into),
    };
    pagefold_text::program::finish("pagefold", result)
}

#[cfg(test)]
mod tests {
    /// A terminal's default size, less one row for the prompt.
    const ROWS: usize = 23;
    const COLUMNS: usize = 80;

    #[test]
    fn short_help_fits_a_terminal() {
        let mut command = super::command().term_width(COLUMNS);
        command.build();
        let ours = |command: &&mut clap::Command| !command.is_hide_set() && command.get_name() != "help";
        for subcommand in command.get_subcommands_mut().filter(ours) {
            let help = subcommand.render_help().to_string();
            let columns = help.lines().map(|line| line.chars().count()).max();
            assert!(help.lines().count() <= ROWS && columns <= Some(COLUMNS), "{help}");
        }
    }
}

//! The program `pagefold-xen`: pagefold for Xen guests, from dom0.
#![forbid(unsafe_code)]

/// Writes a message to standard error: one line, with nothing in it that a terminal would obey.
macro_rules! complain {
    ($($message:tt)*) => { pagefold_text::messages::complain("pagefold-xen", &format!($($message)*)) };
}

mod commands;

use clap::{Parser, Subcommand};
use commands::{doctor, explain, run, scan, unmerge};
use pagefold::commands::{control, status, top};
use pagefold::control::protocol::Request;
use std::process::ExitCode;

/// Find memory that guests of Xen hold twice, and let the hypervisor keep one copy
#[derive(Parser)]
#[command(name = "pagefold-xen", version, propagate_version = true, max_term_width = 100)]
#[command(
    after_help = "Exit codes: 0 success, 1 failure, 2 usage, 3 not permitted, 4 this is not dom0, or the hypervisor or its \
    libraries lack something, 5 nothing in scope, 6 guest refused, 7 another pagefold is at work, 8 no daemon running."
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Show how much memory could be saved, and where, without changing anything
    Scan(scan::ScanArgs),
    /// Share the memory of running guests until stopped
    Run(run::RunArgs),
    /// Show what the daemon has saved, what it costs, and what it is doing
    Status(status::StatusArgs),
    /// Show the savings, by guest, and what the daemon is doing, live
    Top(top::TopArgs),
    /// Show, range by range, how the daemon judges a guest's memory and what happens next
    Explain(explain::ExplainArgs),
    /// Change how much CPU time the daemon may use
    Governor(control::GovernorArgs),
    /// Pause the daemon: read and share nothing until resumed
    Pause(control::PauseArgs),
    /// Resume a paused daemon
    Resume(control::PauseArgs),
    /// Give guests their own copies of shared pages
    Unmerge(unmerge::UnmergeArgs),
    /// Check whether memory of guests can be shared here, and what to change if not
    Doctor(doctor::DoctorArgs),
}

fn main() -> ExitCode {
    let cli = match pagefold_text::program::parse::<Cli>() {
        Ok(cli) => cli,
        Err(code) => return code,
    };
    let result = match &cli.command {
        Command::Scan(args) => scan::run(args),
        Command::Run(args) => run::run(args),
        Command::Status(args) => status::run(args),
        Command::Top(args) => top::run(args),
        Command::Explain(args) => explain::run(args),
        Command::Governor(args) => control::change(&Request::Governor { name: args.name.to_string() }, args.json),
        Command::Pause(args) => control::change(&Request::Pause, args.json),
        Command::Resume(args) => control::change(&Request::Resume, args.json),
        Command::Unmerge(args) => unmerge::run(args),
        Command::Doctor(args) => doctor::run(args),
    };
    pagefold_text::program::finish("pagefold-xen", result)
}

//! The program `pagefold-report`: one page on the results of `pagefold-lab bench`, also on another machine.
#![forbid(unsafe_code)]

use clap::Parser;
use pagefold_report::command::{ReportArgs, run};
use std::process::ExitCode;

/// Write what pagefold-lab bench has measured as one web page
#[derive(Parser)]
#[command(name = "pagefold-report", version, max_term_width = 100)]
struct Cli {
    #[command(flatten)]
    args: ReportArgs,
}

fn main() -> ExitCode {
    match pagefold_text::program::parse::<Cli>() {
        Ok(cli) => pagefold_text::program::finish("pagefold-report", run(&cli.args)),
        Err(code) => code,
    }
}

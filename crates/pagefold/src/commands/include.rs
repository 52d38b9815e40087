//! `pagefold include`: lets the daemon merge processes again that `pagefold unmerge` has kept out.

use crate::config::scope::{ScopeArgs, explain};
use crate::control::client::ask;
use crate::control::protocol::{Request, Selectors};
use crate::output;
use anyhow::Result;
use pagefold_text::exit;
use pagefold_text::style::{self, Lines, Style};
use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, clap::Args)]
pub struct IncludeArgs {
    #[command(flatten)]
    pub scope: ScopeArgs,
    /// Print the result as JSON (schema pagefold.include/1)
    #[arg(long)]
    pub json: bool,
}

/// The result (schema pagefold.include/1).
#[derive(Debug, Serialize, Deserialize)]
pub struct Included {
    schema: String,
    scope: String,
    processes: Vec<Process>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Process {
    pid: i32,
    name: String,
}

impl Included {
    pub fn new(scope: String, processes: Vec<(i32, String)>) -> Self {
        let processes = processes.into_iter().map(|(pid, name)| Process { pid, name }).collect();
        Self { schema: "pagefold.include/1".to_owned(), scope, processes }
    }
}

pub fn run(args: &IncludeArgs) -> Result<u8> {
    let selectors = Selectors::of(&args.scope.spec()).map_err(|error| explain(&error))?;
    let included: Included = ask(&Request::Include(selectors))?;
    output::print(args.json, &included, |style| describe(&included, style))?;
    Ok(exit::OK)
}

fn describe(included: &Included, style: Style) -> String {
    let mut text = String::new();
    let scope = &included.scope;
    if included.processes.is_empty() {
        text.line(style.bold(&format!("Included {scope} again. None of the processes that were kept out is running.")));
    } else {
        let processes = style::count(included.processes.len(), "process", "processes");
        text.line(style.bold(&format!("Included {scope} again: {processes} that may be merged from now on.")));
    }
    for process in &included.processes {
        text.line(format!("  {:>8}  {}", process.pid, process.name));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::golden;

    #[test]
    fn what_was_included_is_shown() {
        let processes = vec![(4_001, "redis-server".to_owned()), (4_002, "redis-server".to_owned())];
        let included = Included::new("--exe redis-server".to_owned(), processes);
        let none = Included::new("--cgroup /web.slice".to_owned(), Vec::new());
        let text = [&included, &none].map(|included| describe(included, Style::plain_text())).concat();
        golden::check("include.txt", &text);
        golden::check("include.json", &style::json(&included).unwrap());
    }
}

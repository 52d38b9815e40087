//! `pagefold include`: lets pagefold merge processes again after `pagefold exclude` or `unmerge`.

use crate::config::scope::{ScopeArgs, explain, with_descendants};
use crate::control::client::ask;
use crate::control::protocol::{Request, Selectors};
use crate::kept_out;
use crate::output;
use crate::preflight;
use anyhow::Result;
use pagefold_host::scope::{ScopeSpec, own_pid, resolve_for_including};
use pagefold_ksm::lease::KsmPaths;
use pagefold_ksm::lock::Lock;
use pagefold_procmem::Roots;
use pagefold_text::exit::{self, Exit};
use pagefold_text::program::code_of;
use pagefold_text::style::{self, Lines, Style};
use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, clap::Args)]
#[command(mut_arg("pid", with_descendants))]
pub struct IncludeArgs {
    #[command(flatten)]
    pub scope: ScopeArgs,
    /// Print the result as JSON (schema pagefold.include/1)
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct Included {
    schema: String,
    scope: String,
    processes: Vec<Process>,
    /// Why we couldn't save the change. If we couldn't, only the running daemon knows about the change.
    pub not_kept: Option<String>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Process {
    pid: i32,
    name: String,
}

impl Included {
    pub fn new(scope: String, processes: Vec<(i32, String)>) -> Self {
        let processes = processes.into_iter().map(|(pid, name)| Process { pid, name }).collect();
        Self { schema: "pagefold.include/1".to_owned(), scope, processes, not_kept: None }
    }
}

pub fn run(args: &IncludeArgs) -> Result<u8> {
    let selectors = Selectors::of(&args.scope.spec()).map_err(|error| explain(&error))?;
    let spec = selectors.spec();
    let included = match ask(&Request::Include(selectors)) {
        Err(error) if code_of(&error) == exit::NO_DAEMON => include(&spec)?,
        asked => asked?,
    };
    output::print(args.json, &included, |style| describe(&included, style))?;
    Ok(exit::OK)
}

/// Removes the processes from the file that lists the excluded ones, if no daemon is running to do that.
fn include(spec: &ScopeSpec) -> Result<Included, Exit> {
    preflight::need_root("changing which processes are excluded")?;
    // While we have the lock, no daemon can start and miss the change.
    let _lock = Lock::try_take(&KsmPaths::default().lock).map_err(|error| preflight::explain_take(&error.into()))?;
    let roots = Roots::default();
    let found = resolve_for_including(spec, &roots, &[own_pid()]).map_err(|error| explain(&error))?;
    let mut list = kept_out::read()?;
    let mut processes = Vec::new();
    for info in list.include(spec, &found, &roots).map_err(|error| kept_out::explain(&error))? {
        processes.push((info.pid(), info.name.clone()));
    }
    kept_out::write(&list).map_err(|why| Exit::new(exit::FAILURE, format!("nothing was included: {why}")))?;
    Ok(Included::new(spec.to_string(), processes))
}

fn describe(included: &Included, style: Style) -> String {
    let mut text = String::new();
    let scope = &included.scope;
    if included.processes.is_empty() {
        text.line(style.bold(&format!("Included {scope} again. None of its running processes was kept out.")));
    } else {
        let processes = style::count(included.processes.len(), "process", "processes");
        text.line(style.bold(&format!("Included {scope} again: {processes} that may be merged from now on.")));
    }
    for process in &included.processes {
        text.line(format!("  {:>8}  {}", process.pid, process.name));
    }
    if let Some(why) = &included.not_kept {
        text.line(format!("Only until pagefold ends: {why}."));
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

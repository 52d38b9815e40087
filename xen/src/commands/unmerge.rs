//! `pagefold-xen unmerge`: gives guests their own copies of shared pages.

use super::{ScopeArgs, call, open, resolve, take_lock};
use anyhow::Result;
use pagefold::commands::unmerge::{Process, Summary, describe};
use pagefold::output;
use pagefold_engine::units::Pages;
use pagefold_text::escape::printable;
use pagefold_text::exit;
use pagefold_text::style;
use pagefold_xen::hypervisor::Hypervisor;
use pagefold_xen::unshare::unshare;

/// We leave one part in this many of the machine's memory free, even if pages stay shared: with no memory free, a guest
/// that writes to a shared page has to wait.
const KEEP_PART: u64 = 64;

#[derive(Clone, Debug, clap::Args)]
pub struct UnmergeArgs {
    #[command(flatten)]
    scope: ScopeArgs,
    /// Print the result as JSON (schema pagefold.unmerge/1)
    #[arg(long)]
    json: bool,
}

pub fn run(args: &UnmergeArgs) -> Result<u8> {
    let guests = args.scope.guests()?;
    let mut xen = open("unmerging")?;
    let _lock = take_lock()?;
    let memory = xen.memory().map_err(|error| call(&error))?;
    let keep = Pages(memory.total.0 / KEEP_PART);
    let mut summary = Summary::new();
    let mut code = exit::OK;
    for guest in resolve(&mut xen, &guests)? {
        let mut row = Process {
            pid: guest.domain.id.0.into(),
            name: printable(guest.name.as_bytes()),
            given_back_bytes: 0,
            unmarked_bytes: 0,
            failed: None,
        };
        let failed = match unshare(&mut xen, &guest.domain, keep) {
            Ok(given) => {
                row.given_back_bytes = given.pages.bytes().0;
                if given.left > Pages(0) { Some(still_shared(given.left, keep)) } else { None }
            }
            Err(error) => Some(call(&error).line),
        };
        if let Some(failed) = failed {
            complain!("guest {} ({}): {failed}", row.name, row.pid);
            code = exit::FAILURE;
            row.failed = Some(failed);
        }
        summary.given_back_bytes += row.given_back_bytes;
        summary.processes.push(row);
    }
    summary.still_saved_bytes = xen.memory().map_err(|error| call(&error))?.saved.bytes().0;
    output::print(args.json, &summary, |style| describe(&summary, "Xen", "guest", "guests", style))?;
    Ok(code)
}

fn still_shared(left: Pages, keep: Pages) -> String {
    let left = style::human(left.bytes().0);
    let keep = style::human(keep.bytes().0);
    format!("{left} of it stay shared: less than {keep} of memory would be left; free some")
}

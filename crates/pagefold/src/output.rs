//! Output that several commands share.

pub mod page;
pub mod placement;
pub mod requests;
pub mod xen;

use anyhow::Context;
use pagefold_text::style::{self, Style};
use serde::Serialize;
use std::time::Duration;

/// How long a daemon waits at its end for a slow reader of its summary.
const READ_LIMIT: Duration = Duration::from_secs(2);

/// This machine's host name. Empty if we can't read it.
pub fn host_name() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default().trim().to_owned()
}

/// Prints the result of a command as JSON, or as the text that `describe` makes of it.
pub fn print(json: bool, result: &impl Serialize, describe: impl FnOnce(Style) -> String) -> anyhow::Result<()> {
    style::print(&text(json, result, describe)?).context("cannot print the result")
}

/// Prints a daemon's summary. If nobody reads it within [`READ_LIMIT`], we give up, so that the daemon ends.
pub fn print_at_end(json: bool, result: &impl Serialize, describe: impl FnOnce(Style) -> String) -> anyhow::Result<()> {
    let text = text(json, result, describe)?;
    style::print_within(READ_LIMIT, &text).context("cannot print the summary")
}

fn text(json: bool, result: &impl Serialize, describe: impl FnOnce(Style) -> String) -> anyhow::Result<String> {
    Ok(if json { style::json(result)? } else { describe(Style::of_stdout()) })
}

//! What several commands print.

pub mod page;
pub mod placement;
pub mod requests;
pub mod xen;

use pagefold_cli::style::{self, Style};
use serde::Serialize;

/// Prints the result of a command as JSON, or as the text that `describe` makes of it.
pub fn print(json: bool, result: &impl Serialize, describe: impl FnOnce(Style) -> String) -> anyhow::Result<()> {
    let text = if json { style::json(result)? } else { describe(Style::of_stdout()) };
    Ok(style::print(&text)?)
}

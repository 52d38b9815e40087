//! `pagefold governor`, `pause` and `resume`: change what the running daemon does.

use crate::control::client::ask;
use crate::control::protocol::{ControlState, Request};
use anyhow::Result;
use pagefold_engine::governor::Governor;
use pagefold_text::exit;
use pagefold_text::style;

#[derive(Clone, Debug, clap::Args)]
pub struct GovernorArgs {
    /// full, medium, low, quiet, or auto
    pub name: Governor,
    /// Print the new state as JSON (schema pagefold.control/1)
    #[arg(long)]
    pub json: bool,
}

#[derive(Clone, Debug, clap::Args)]
pub struct PauseArgs {
    /// Print the new state as JSON (schema pagefold.control/1)
    #[arg(long)]
    pub json: bool,
}

/// Sends a change, prints the new state, and returns the exit code.
pub fn change(request: &Request, json: bool) -> Result<u8> {
    let state: ControlState = ask(request)?;
    let text = if json { style::json(&state)?.trim_end().to_owned() } else { confirmation(request, &state) };
    style::print(&(text + "\n"))?;
    Ok(exit::OK)
}

/// The new state in one line.
fn confirmation(request: &Request, state: &ControlState) -> String {
    let share = style::percent(state.allowed_share, 1.0);
    let governor = match (state.governor, state.in_force) {
        (Governor::Auto, in_force) => format!("governor auto (now {in_force})"),
        (governor, _) => format!("governor {governor}"),
    };
    match request {
        Request::Pause => "Paused: nothing is read, marked or merged. Merged pages stay merged.".to_owned(),
        Request::Resume => format!("Resumed: {governor}, up to {share} of a core."),
        _ if state.paused => {
            format!("In force: {governor}, up to {share} of a core. Still paused: run pagefold resume.")
        }
        _ => format!("In force: {governor}, up to {share} of a core."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::protocol::SCHEMA;

    #[test]
    fn confirmations_show_the_new_state() {
        let state = ControlState {
            schema: SCHEMA.to_owned(),
            pid: 1,
            governor: Governor::Auto,
            in_force: Governor::Low,
            allowed_share: 0.2,
            paused: false,
        };
        let request = Request::Governor { name: "auto".into() };
        assert_eq!(confirmation(&request, &state), "In force: governor auto (now low), up to 20 % of a core.");
        crate::golden::check("control.json", &style::json(&state).unwrap());
        let paused = ControlState { paused: true, governor: Governor::Low, ..state };
        assert!(confirmation(&request, &paused).contains("Still paused"));
        assert!(confirmation(&Request::Pause, &paused).starts_with("Paused: "));
    }
}

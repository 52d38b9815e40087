//! Talking to a running `pagefold run` over a socket that only root can reach.
//!
//! One line of JSON each way ([`protocol`]). The daemon's end ([`server`]) has threads of its own and never keeps the
//! rounds waiting: it leaves a question at the [`queue`], which the loop looks at between two rounds.

pub mod client;
pub mod protocol;
pub mod queue;
pub mod server;

use crate::commands::explain;
use crate::commands::status::Status;
use anyhow::Result;
use client::ask;
use pagefold_cli::exit;
use pagefold_cli::style;
use pagefold_core::governor::Governor;
use protocol::{PATH, Request, Standing};
use queue::Counter;
use serde::Serialize;
use server::Server;
use std::path::Path;
use std::sync::Arc;

/// Serves the socket, if it can be had: a run without one is still a run, and a dry run leaves it to one that acts.
pub fn serve(counter: Counter, dry_run: bool) -> Option<Server> {
    let answer = move |request: Request| {
        let facts = counter.ask(request.clone())?;
        match request {
            Request::Status => json(&Status::of(&facts)),
            Request::Explain { pid } => json(&explain::of(&facts, pid)?),
            Request::Governor { .. } | Request::Pause | Request::Resume => json(&facts.standing()),
        }
    };
    match Server::start(Path::new(PATH), !dry_run, Arc::new(answer)) {
        Ok(server) => Some(server),
        Err(error) => {
            eprintln!("pagefold: {error:#}; pagefold status and the like will not reach this run");
            None
        }
    }
}

fn json(answer: &impl Serialize) -> Result<String, String> {
    serde_json::to_string(answer).map_err(|error| format!("the answer cannot be written: {error}; ask again"))
}

/// Which governor.
#[derive(Clone, Debug, clap::Args)]
pub struct GovernorArgs {
    /// full, medium, low, quiet, or auto
    pub name: Governor,
    /// Print what is in force now as JSON (schema pagefold.control/1)
    #[arg(long)]
    pub json: bool,
}

/// How to confirm.
#[derive(Clone, Debug, clap::Args)]
pub struct PauseArgs {
    /// Print what is in force now as JSON (schema pagefold.control/1)
    #[arg(long)]
    pub json: bool,
}

/// Puts another governor in force, and returns the exit code.
pub fn governor(args: &GovernorArgs) -> Result<u8> {
    change(&Request::Governor { name: args.name.to_string() }, args.json)
}

/// Pauses the daemon, and returns the exit code.
pub fn pause(args: &PauseArgs) -> Result<u8> {
    change(&Request::Pause, args.json)
}

/// Lets the daemon go on, and returns the exit code.
pub fn resume(args: &PauseArgs) -> Result<u8> {
    change(&Request::Resume, args.json)
}

fn change(request: &Request, json: bool) -> Result<u8> {
    let standing: Standing = ask(request)?;
    let text = if json { serde_json::to_string_pretty(&standing)? } else { confirmation(request, &standing) };
    style::print(&(text + "\n"))?;
    Ok(exit::OK)
}

/// What is in force now, in a line.
fn confirmation(request: &Request, standing: &Standing) -> String {
    let share = style::percent(standing.allowed_share, 1.0);
    let governor = match (standing.governor, standing.in_force) {
        (Governor::Auto, in_force) => format!("governor auto, which has chosen {in_force} for now"),
        (governor, _) => format!("governor {governor}"),
    };
    match request {
        Request::Pause => "Paused: nothing is read, marked or merged. What is merged stays merged.".to_owned(),
        Request::Resume => format!("Going on: {governor}, up to {share} of a core."),
        _ if standing.paused => {
            format!("In force: {governor}, up to {share} of a core. Paused still: see pagefold resume.")
        }
        _ => format!("In force: {governor}, up to {share} of a core."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn confirmations_say_what_is_in_force() {
        let standing = Standing {
            schema: protocol::SCHEMA.to_owned(),
            pid: 1,
            governor: Governor::Auto,
            in_force: Governor::Low,
            allowed_share: 0.2,
            paused: false,
        };
        let request = Request::Governor { name: "auto".into() };
        assert_eq!(
            confirmation(&request, &standing),
            "In force: governor auto, which has chosen low for now, up to 20 % of a core."
        );
        let paused = Standing { paused: true, governor: Governor::Low, ..standing };
        assert!(confirmation(&request, &paused).contains("Paused still"));
        assert!(confirmation(&Request::Pause, &paused).starts_with("Paused: "));
    }
}

//! Requests to a running `pagefold run`, over a socket for root. Members of the group `pagefold` may only ask for the
//! status.
//!
//! Each request and each answer is one line of JSON ([`protocol`]). The daemon's end ([`server`]) has its own threads
//! and never delays the engine: it puts requests into a [`queue`] that the main loop serves between two cycles.

pub mod cached;
pub mod client;
pub mod orders;
pub mod protocol;
pub mod queue;
pub mod server;

use crate::background::{Background, Complaints};
use crate::commands::explain;
use crate::commands::status::Status;
use crate::kept_out;
use cached::Cached;
use orders::Answer;
use pagefold_procmem::os::locked;
use pagefold_procmem::os::peer::{group_id, is_trusted};
use pagefold_text::exit::{self, Exit};
use protocol::{GROUP, PATH, Request};
use queue::{Facts, RequestSender};
use serde::Serialize;
use server::Server;
use std::path::Path;
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex};
use tracing::debug;

/// The shortest time between two writes of the list of excluded processes, nanoseconds.
const KEEP_EVERY_NS: u64 = 5_000_000_000;

/// Serves the socket. If that fails, the run goes on without a socket. A dry run doesn't replace another run's socket.
pub fn serve(requests: RequestSender, dry_run: bool) -> Option<Server> {
    let cached = Mutex::new(Cached::new(requests.clone(), status));
    let answer = Arc::new(move |request, uid| {
        if is_trusted(uid) {
            return answer(&requests, request, uid);
        }
        // The server lets members of the group ask for the status only. They all get the same cached status.
        locked(&cached).get().map(|text| text.to_string()).map_err(failed)
    });
    match Server::start(Path::new(PATH), !dry_run, group_id(GROUP), answer) {
        Ok(server) => Some(server),
        Err(error) => {
            complain!("pagefold status and other requests will not reach this run: {error:#}");
            None
        }
    }
}

fn answer(requests: &RequestSender, request: Request, uid: u32) -> Result<String, Exit> {
    debug!(target: "control", ?request, uid);
    match request {
        Request::Unmerge(_) | Request::Include(_) | Request::Reload => order(requests, request, uid),
        Request::Workload(ref selectors) => {
            let facts = requests.send(request.clone()).map_err(failed)?;
            json(&explain::workload::of(&facts, &selectors.spec())?).map_err(failed)
        }
        request => view(requests, request).map_err(failed),
    }
}

fn failed(why: String) -> Exit {
    Exit::new(exit::FAILURE, why)
}

fn order(requests: &RequestSender, request: Request, uid: u32) -> Result<String, Exit> {
    let changes_list = request != Request::Reload;
    let ordered = requests.order(request, uid);
    // Save the list even if the request failed: a request that took too long may still have changed the list.
    let not_kept = if changes_list { keep(requests).err() } else { None };
    let mut answer = ordered?;
    match &mut answer {
        Answer::Unmerged(summary) => summary.not_kept = not_kept,
        Answer::Included(included) => included.not_kept = not_kept,
        Answer::Reloaded(_) => {}
    }
    json(&answer).map_err(failed)
}

/// Saves the list of excluded processes when it has grown, so that new descendants of these processes stay excluded
/// after a crash.
#[derive(Debug)]
pub struct Keeper {
    thread: Option<Background<()>>,
    adopted: u64,
    next_ns: u64,
}

impl Keeper {
    pub fn start(requests: &RequestSender) -> Self {
        let requests = requests.clone();
        let keep_all = move |work: Receiver<()>| {
            let mut complaints = Complaints::default();
            for () in work {
                let kept = keep(&requests);
                complaints.hear(kept.map_err(|why| format!("the list of excluded processes is not up to date: {why}")));
            }
        };
        Self { thread: Background::start("kept out", keep_all).ok(), adopted: 0, next_ns: 0 }
    }

    /// Saves the list if the number of descendants in it has grown ([`KeptOut::adopted`]), at most every few seconds.
    ///
    /// [`KeptOut::adopted`]: pagefold_host::scope::kept_out::KeptOut::adopted
    pub fn keep(&mut self, adopted: u64, now_ns: u64) {
        if adopted == self.adopted || now_ns < self.next_ns {
            return;
        }
        self.adopted = adopted;
        self.next_ns = now_ns + KEEP_EVERY_NS;
        if let Some(thread) = &self.thread {
            thread.offer(());
        }
    }
}

/// Saves the list of excluded processes for the next run.
fn keep(requests: &RequestSender) -> Result<(), String> {
    let _turn = kept_out::turn()?;
    let facts = requests.send(Request::Status)?;
    if facts.run.dry_run || facts.xen.is_some() { Ok(()) } else { kept_out::write(&facts.kept_out) }
}

fn view(requests: &RequestSender, request: Request) -> Result<String, String> {
    let facts = requests.send(request.clone())?;
    match request {
        Request::Explain { pid } => json(&explain::of(&facts, pid)?),
        Request::Guest { guest } => json(&explain::of_guest(&facts, &guest)),
        Request::Governor { .. } | Request::Pause | Request::Resume => json(&facts.control_state()),
        _ => status(&facts),
    }
}

fn status(facts: &Facts) -> Result<String, String> {
    json(&Status::of(facts))
}

fn json(answer: &impl Serialize) -> Result<String, String> {
    serde_json::to_string(answer).map_err(|error| format!("cannot encode the answer: {error}; try again"))
}

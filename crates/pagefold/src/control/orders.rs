//! `unmerge` and `include`: requests about processes. The host may need several cycles to carry them out.

use super::protocol::{Request, Selectors};
use super::queue::Order;
use crate::commands::include::Included;
use crate::commands::unmerge::Summary;
use crate::config::scope;
use crate::events::Events;
use pagefold_host::live::{LiveHost, RequestRefusal, Unmerging};
use pagefold_host::scope::kept_out::KeptOutError;
use pagefold_text::exit::{self, Exit};
use serde::Serialize;
use std::sync::mpsc::Sender;

type Reply = Sender<Result<String, Exit>>;

/// The requests that we haven't answered yet.
#[derive(Debug, Default)]
pub struct Orders {
    under_way: Vec<UnderWay>,
}

/// A request to unmerge.
#[derive(Debug)]
struct UnderWay {
    unmerging: Unmerging,
    scope: String,
    reply: Reply,
}

impl Orders {
    /// Begins new requests and answers finished ones. Call this after taking the host's events.
    pub fn serve(&mut self, new: Vec<Order>, host: &mut LiveHost, events: &mut Events) {
        for Order { request, uid, reply } in new {
            match request {
                Request::Unmerge(selectors) => self.begin_to_unmerge(&selectors, uid, reply, host, events),
                Request::Include(selectors) => send(&reply, include(&selectors, uid, host, events)),
                _ => {}
            }
        }
        for mut order in std::mem::take(&mut self.under_way) {
            match host.poll_unmerging(&mut order.unmerging) {
                Some(processes) => {
                    let mut summary = Summary::of_daemon(order.scope, host.saved_bytes());
                    for process in processes {
                        summary.add(&process);
                    }
                    send(&order.reply, Ok(summary));
                }
                None => self.under_way.push(order),
            }
        }
        host.forget_unmerged();
    }

    fn begin_to_unmerge(
        &mut self,
        selectors: &Selectors,
        uid: u32,
        reply: Reply,
        host: &mut LiveHost,
        events: &mut Events,
    ) {
        let spec = selectors.spec();
        let scope = spec.to_string();
        match host.unmerge(spec, uid) {
            Ok(unmerging) => {
                events.note("unmerge", format!("unmerged and kept out at the request of uid {uid}: {scope}"));
                self.under_way.push(UnderWay { unmerging, scope, reply });
            }
            Err(refusal) => send(&reply, Err::<Summary, _>(explain(&refusal))),
        }
    }
}

/// Refuses all these orders.
pub fn refuse(orders: Vec<Order>, why: &Exit) {
    for order in orders {
        send(&order.reply, Err::<Summary, _>(why.clone()));
    }
}

fn include(selectors: &Selectors, uid: u32, host: &mut LiveHost, events: &mut Events) -> Result<Included, Exit> {
    let spec = selectors.spec();
    let processes = host.include(&spec).map_err(|refusal| explain(&refusal))?;
    events.note("include", format!("included again at the request of uid {uid}: {spec}"));
    Ok(Included::new(spec.to_string(), processes))
}

fn send(reply: &Reply, answer: Result<impl Serialize, Exit>) {
    let answer = answer.and_then(|answer| super::json(&answer).map_err(|why| Exit::new(exit::FAILURE, why)));
    // The peer may have hung up.
    let _ = reply.send(answer);
}

fn explain(refusal: &RequestRefusal) -> Exit {
    match refusal {
        RequestRefusal::Scope(error) => scope::explain(error),
        RequestRefusal::KeptOut(error @ KeptOutError::NotKeptOut(_)) => {
            Exit::new(exit::NO_SCOPE, format!("{error}; see pagefold status"))
        }
        RequestRefusal::KeptOut(error @ KeptOutError::TooMany) => {
            Exit::new(exit::FAILURE, format!("{error}; name a cgroup, a user or a program instead of processes"))
        }
        RequestRefusal::DryRun => Exit::new(exit::FAILURE, format!("{refusal}; stop it first")),
    }
}

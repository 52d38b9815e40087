//! `unmerge` and `include`: requests about processes. The host may need several cycles to carry them out.

use super::protocol::{Reloaded, Request, Selectors};
use super::queue::Order;
use crate::audit::{Demand, Entry};
use crate::commands::include::Included;
use crate::commands::run::reload::ActiveSettings;
use crate::commands::unmerge::Summary;
use crate::config::scope;
use crate::kept_out;
use pagefold_host::live::{LiveHost, RequestRefusal, Unmerging};
use pagefold_text::exit::{self, Exit};
use serde::Serialize;
use std::sync::mpsc::Sender;

type Reply = Sender<Result<Answer, Exit>>;

#[derive(Debug, Serialize)]
#[serde(untagged)]
pub enum Answer {
    Unmerged(Summary),
    Included(Included),
    Reloaded(Reloaded),
}

/// The requests that we haven't answered yet.
#[derive(Debug, Default)]
pub struct Orders {
    under_way: Vec<UnderWay>,
}

#[derive(Debug)]
struct UnderWay {
    unmerging: Unmerging,
    scope: String,
    reply: Reply,
}

impl Orders {
    /// Begins new requests and answers finished ones. Call this after taking the host's events.
    pub fn serve(&mut self, new: Vec<Order>, host: &mut LiveHost, active: &mut ActiveSettings<'_>) {
        for Order { request, uid, reply } in new {
            match request {
                Request::Unmerge(selectors) => self.begin_to_unmerge(&selectors, uid, reply, host, active),
                Request::Include(selectors) => {
                    send(&reply, include(&selectors, uid, host, active).map(Answer::Included));
                }
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
                    send(&order.reply, Ok(Answer::Unmerged(summary)));
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
        active: &mut ActiveSettings<'_>,
    ) {
        let spec = selectors.spec();
        let scope = spec.to_string();
        match host.unmerge(spec, uid) {
            Ok(unmerging) => {
                active.log(&Entry::Exclude(Demand { scope: scope.clone(), uid }));
                self.under_way.push(UnderWay { unmerging, scope, reply });
            }
            Err(refusal) => send(&reply, Err(explain(&refusal))),
        }
    }
}

pub fn refuse(orders: Vec<Order>, why: &Exit) {
    for order in orders {
        send(&order.reply, Err(why.clone()));
    }
}

fn include(
    selectors: &Selectors,
    uid: u32,
    host: &mut LiveHost,
    active: &mut ActiveSettings<'_>,
) -> Result<Included, Exit> {
    let spec = selectors.spec();
    let processes = host.include(&spec).map_err(|refusal| explain(&refusal))?;
    active.log(&Entry::Include(Demand { scope: spec.to_string(), uid }));
    Ok(Included::new(spec.to_string(), processes))
}

pub fn send(reply: &Reply, answer: Result<Answer, Exit>) {
    // The peer may have hung up.
    let _ = reply.send(answer);
}

fn explain(refusal: &RequestRefusal) -> Exit {
    match refusal {
        RequestRefusal::Scope(error) => scope::explain(error),
        RequestRefusal::KeptOut(error) => kept_out::explain(error),
        RequestRefusal::DryRun => Exit::new(exit::FAILURE, format!("{refusal}; stop it first")),
    }
}

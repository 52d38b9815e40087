//! Makes guests of Xen a [`Backend`] of the daemon, and gives Xen's errors exit codes and advice.

use crate::guests::SelectError;
use crate::host::{Clock, Guest, XenError, XenHost};
use crate::hypervisor::{CallError, Hypervisor};
use pagefold::audit::Owner;
use pagefold::backend::{Backend, Ending};
use pagefold::commands::run::reload::ActiveSettings;
use pagefold::control::orders::{self, Orders};
use pagefold::control::queue::{Facts, Order, RunFacts, TargetFacts};
use pagefold_engine::engine::Engine;
use pagefold_engine::keys::RegionKey;
use pagefold_host::live::{Ended, Event};
use pagefold_host::scope::Selector;
use pagefold_host::scope::kept_out::KeptOut;
use pagefold_text::escape::printable;
use pagefold_text::exit::{self, Exit};
use std::collections::BTreeMap;

impl<H: Hypervisor, C: Clock> Backend for XenHost<H, C> {
    const TARGET: &'static str = "guest";
    const TARGETS: &'static str = "guests";

    fn explain(error: &XenError) -> Exit {
        match error {
            XenError::Select(error) => select(error),
            XenError::Call(error) => call(error),
        }
    }

    fn now_ns(&self) -> u64 {
        self.now_ns()
    }

    fn target_count(&self) -> usize {
        self.guests().count()
    }

    fn pid_of(&self, region: RegionKey) -> Option<i32> {
        Some(self.guest_of(region)?.number())
    }

    fn owner(&self, pid: i32) -> Option<Owner> {
        let guest = self.guests().find(|guest| guest.number() == pid)?;
        let name = printable(guest.known.name.as_bytes());
        Some(Owner { pid, name, domain: Some(guest.known.trust.clone()), ..Owner::default() })
    }

    fn facts(&self, engine: &Engine, run: RunFacts) -> Facts {
        let targets = self.guests().map(|guest| TargetFacts {
            owner: guest.owner,
            pid: guest.number(),
            domain: guest.trust,
            name: printable(guest.known.name.as_bytes()),
            selected_by: run.selectors.iter().position(|selector| fits(selector, guest)),
            left_alone: guest.left_alone.clone(),
            ..TargetFacts::default()
        });
        Facts {
            state: engine.state(),
            injector_restarts: 0,
            targets: targets.collect(),
            turned_away: 0,
            domains: self.trusts().to_vec(),
            kept_out: KeptOut::default(),
            merged_domain: None,
            limited: BTreeMap::new(),
            run,
            xen: Some(self.figures()),
            cost_ns: 0,
        }
    }

    fn take_events(&mut self) -> Vec<Event> {
        let left_alone = self.take_left_alone().into_iter();
        left_alone.map(|left| Event::LeftAlone { pid: left.pid, name: left.name, why: left.reason }).collect()
    }

    fn carry_out(&mut self, _orders: &mut Orders, new: Vec<Order>, _active: &mut ActiveSettings<'_>) {
        let line = "this pagefold shares memory of Xen's guests, not of processes; stop it first";
        orders::refuse(new, &Exit::new(exit::KSM_TAKEN, line));
    }

    fn finish(mut self) -> Ending {
        let judged = self.guests().filter(|guest| guest.left_alone.is_none()).count();
        let ksm = self.close();
        let ended = Ended { restored: None, now_ns: self.now_ns(), ksm, cost: Some(self.cost()) };
        Ending { judged, ended, xen: Some(self.figures()) }
    }
}

/// Whether a selector (`--all` or a number) matches this guest.
fn fits(selector: &Selector, guest: &Guest) -> bool {
    *selector == Selector::All || *selector == Selector::Pid(guest.number())
}

/// The exit code and advice for a wrong selection of guests.
pub fn select(error: &SelectError) -> Exit {
    let (code, advice) = match error {
        SelectError::Malformed(_) | SelectError::Contradiction(_) => (exit::USAGE, "see xen/README.md"),
        SelectError::Dom0 => (exit::REFUSED, "name other guests"),
        SelectError::Unknown(_) => (exit::NO_SCOPE, "look with xl list"),
    };
    Exit::new(code, format!("{error}; {advice}"))
}

/// The exit code and advice when the hypervisor refuses.
pub fn call(error: &CallError) -> Exit {
    match error {
        CallError::NoSharing => {
            let line = format!("{error}; build it with EXPERT, UNSUPPORTED and MEM_SHARING, see xen/README.md");
            Exit::new(exit::NO_KERNEL_SUPPORT, line)
        }
        CallError::Denied => Exit::new(exit::NOT_PERMITTED, error.to_string()),
        _ => Exit::new(exit::FAILURE, format!("the hypervisor refuses: {error}; see pagefold-xen doctor --xen-domain")),
    }
}

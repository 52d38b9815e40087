//! Compares a plan's promise with what hosts saved afterwards.

use crate::fleet::Workloads;
use crate::inventory::{Inventory, LeftOut};
use crate::plan::{Document, MoveRow};
use crate::report::write_left_out;
use pagefold_engine::units::{count, index};
use pagefold_text::style::{human, percent};
use pagefold_text::table::Table;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

pub const SCHEMA: &str = "pagefold.fleet.verify/1";

/// The comparison as JSON. Sizes are in bytes.
#[derive(Clone, Debug, Serialize)]
pub struct Verification {
    pub schema: &'static str,
    /// How many moves the plan has, and how many were made.
    pub moves: u64,
    pub made: u64,
    /// How many workloads of the plan are on no host any more.
    pub gone: u64,
    pub hosts: Vec<HostPromise>,
    pub left_out: Vec<LeftOut>,
}

/// A host that the plan was to change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct HostPromise {
    pub host: String,
    /// How much the host said that it saved when the plan was made.
    pub before_bytes: u64,
    /// `before_bytes`, plus what the plan was to add.
    pub promised_bytes: u64,
    /// How much it says now. `None` if it has no sketches that count.
    pub saved_bytes: Option<u64>,
}

impl Verification {
    pub fn of(plan: &Document, now: &Workloads, inventory: &Inventory) -> Self {
        let mut saved: BTreeMap<&str, u64> = now.hosts.iter().map(|host| (host.name.as_str(), 0)).collect();
        let mut place: BTreeMap<(&str, &str), Vec<&str>> = BTreeMap::new();
        for workload in &now.workloads {
            let host = now.hosts[index(workload.host)].name.as_str();
            *saved.entry(host).or_default() += workload.saved;
            place.entry((&workload.kind, &workload.name)).or_default().push(host);
        }
        // Where each workload's last move takes it. A workload with the same name on another host is a different one.
        let mut wanted: BTreeSet<(&str, &str, &str)> = BTreeSet::new();
        for step in &plan.steps {
            for MoveRow { kind, workload, from, to } in &step.moves {
                wanted.remove(&(from, kind, workload));
                wanted.insert((to, kind, workload));
            }
        }
        let mut made = 0;
        let mut gone = 0;
        for &(to, kind, workload) in &wanted {
            match place.get(&(kind, workload)) {
                Some(hosts) => made += u64::from(hosts.contains(&to)),
                None => gone += 1,
            }
        }
        let mut hosts = Vec::new();
        for host in &plan.hosts {
            hosts.push(HostPromise {
                host: host.host.clone(),
                before_bytes: host.saved_bytes,
                promised_bytes: host.saved_bytes.saturating_add(host.after.bytes).saturating_sub(host.before.bytes),
                saved_bytes: saved.get(host.host.as_str()).copied(),
            });
        }
        let left_out = inventory.left_out.clone();
        Self { schema: SCHEMA, moves: count(wanted.len()), made, gone, hosts, left_out }
    }
}

impl fmt::Display for Verification {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table =
            Table::new(["HOST", "SAVED THEN", "PROMISED", "SAVED NOW", "OF THE PROMISE"], |column| column > 0);
        let mut known = 0;
        let mut promised = 0_u64;
        let mut saved = 0_u64;
        for host in &self.hosts {
            let mut saved_now = "unknown".to_owned();
            let mut share = String::new();
            if let Some(bytes) = host.saved_bytes {
                saved_now = human(bytes);
                share = percent(bytes as f64, host.promised_bytes as f64);
                known += 1;
                // The plan comes from a file, so it may promise anything.
                promised = promised.saturating_add(host.promised_bytes);
                saved = saved.saturating_add(bytes);
            }
            table.add_row([host.host.clone(), human(host.before_bytes), human(host.promised_bytes), saved_now, share]);
        }
        writeln!(f, "{table}\n")?;
        writeln!(
            f,
            "{} of {} moves were made ({} workloads are gone); {} hosts with sketches save {} of the {} promised ({})",
            self.made,
            self.moves,
            self.gone,
            known,
            human(saved),
            human(promised),
            percent(saved as f64, promised as f64),
        )?;
        write_left_out(f, &self.left_out, 0)
    }
}

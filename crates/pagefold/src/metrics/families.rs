//! The metrics: a table of their names, types, labels, help texts and values. pagefold-metrics(5) is made from this
//! table.
//!
//! Metrics only reveal facts that docs/safety.md allows everybody to know: sums, words from the administrator's
//! configuration, and, with one trust domain, workloads. No metric names a program, process, address or trust domain.

use super::text::{Kind, Sample, append};
use crate::commands::status::groups::{OTHER, ScopeRow};
use crate::commands::status::rows::{NO_WORKLOAD, by_workload, process_rows};
use crate::commands::status::{Doing, Status};
use pagefold_engine::governor::Governor;
use pagefold_engine::reserve::RoomState;
use pagefold_engine::stops::LENGTHS_NS;
use pagefold_engine::units::{PAGE_BYTES, Pages};
use serde::Serialize;

/// A metric. We list its labels for the manual, since a status may lack the values that would show them.
pub struct Family {
    pub name: &'static str,
    pub kind: Kind,
    pub labels: &'static [&'static str],
    pub help: &'static str,
    values: fn(&Status) -> Vec<Sample>,
}

impl Family {
    const fn by(self, labels: &'static [&'static str]) -> Self {
        Self { labels, ..self }
    }
}

const fn gauge(name: &'static str, help: &'static str, values: fn(&Status) -> Vec<Sample>) -> Family {
    Family { name, kind: Kind::Gauge, labels: &[], help, values }
}

const fn counter(name: &'static str, help: &'static str, values: fn(&Status) -> Vec<Sample>) -> Family {
    Family { name, kind: Kind::Counter, labels: &[], help, values }
}

/// A metric names at most this many workloads, so that a host where workloads come and go doesn't flood the database.
const WORKLOADS_MOST: usize = 20;
const GOVERNORS: [Governor; 4] = [Governor::Full, Governor::Medium, Governor::Low, Governor::Quiet];
const ROOM_STATES: [RoomState; 3] = [RoomState::Enough, RoomState::Overcommitted, RoomState::Short];

/// All metrics, in the order of the page.
pub const FAMILIES: &[Family] = &[
    gauge("pagefold_build_info", "Version of pagefold; always 1", |_| {
        vec![sample(&[("version", env!("CARGO_PKG_VERSION"))], 1.0)]
    })
    .by(&["version"]),
    gauge("pagefold_run_info", "Settings of the run; always 1", |status| {
        let dry_run = status.run.dry_run.to_string();
        let governor = status.activity.governor.to_string();
        let mechanism = name_of(status.run.mechanism);
        vec![sample(&[("dry_run", &dry_run), ("governor", &governor), ("mechanism", &mechanism)], 1.0)]
    })
    .by(&["dry_run", "governor", "mechanism"]),
    gauge("pagefold_uptime_seconds", "Time since the run began", |status| one(status.activity.seconds)),
    gauge(
        "pagefold_saved_bytes",
        "Memory that merging saves the processes in scope (they would need so much more without it); absent until counted",
        |status| one_if(status.memory.saved_bytes.map(float)),
    ),
    gauge("pagefold_saved_age_seconds", "Time since the saving was last counted", |status| {
        one_if(status.memory.saved_age_seconds)
    }),
    gauge("pagefold_metadata_bytes", "Kernel memory for metadata about the memory that the run has marked", |status| {
        one(float(status.memory.metadata_bytes))
    }),
    gauge("pagefold_net_profit_bytes", "Saved memory minus metadata; may be negative", |status| {
        one_if(status.memory.net_profit_bytes().map(|bytes| bytes as f64))
    }),
    gauge("pagefold_may_return_bytes", "Memory needed if programs write to all merged pages", |status| {
        one(float(status.memory.may_return_bytes))
    }),
    gauge("pagefold_available_bytes", "Memory on the machine that programs can get without swapping", |status| {
        one(float(status.memory.available_bytes))
    }),
    counter(
        "pagefold_copied_bytes_total",
        "Merged pages copied because they were written or unmerged, on the whole machine",
        |status| one(float(status.copies.copied_bytes)),
    ),
    gauge("pagefold_copied_worst_day_bytes", "The most memory copied from merged pages in any 24 hours of the run", |status| {
        one(float(status.copies.copied_worst_day_bytes))
    }),
    gauge(
        "pagefold_likely_return_bytes",
        "The most memory that writes to merged pages took within an hour, halved for each hour since, and never more than is saved now",
        |status| one(float(status.reserve.likely_bytes)),
    ),
    gauge(
        "pagefold_headroom_bytes",
        "Memory that more programs may use here if as much comes back as is likely (pagefold_likely_return_bytes), and at \
         worst, if all merged memory does",
        |status| {
            vec![
                sample(&[("returns", "likely")], float(status.reserve.headroom_bytes)),
                sample(&[("returns", "worst")], float(status.reserve.headroom_at_worst_bytes)),
            ]
        },
    )
    .by(&["returns"]),
    gauge("pagefold_left_bytes", "Available memory plus free swap", |status| {
        one(float(status.reserve.machine.left.bytes().0))
    }),
    gauge(
        "pagefold_reserve_bytes",
        "Memory to keep free for writes to merged pages; nothing more is merged if less is free",
        |status| one(float(status.reserve.machine.reserve.bytes().0)),
    ),
    gauge(
        "pagefold_room",
        "1 for the machine's headroom: enough for writes to all merged pages, overcommitted, or short of the reserve",
        |status| flags("state", &ROOM_STATES, &[status.reserve.machine.state]),
    )
    .by(&["state"]),
    gauge(
        "pagefold_tight_limits",
        "Number of memory limits of cgroups in scope that are overcommitted or short of memory",
        tight_limits,
    )
    .by(&["state"]),
    counter("pagefold_taken_back_bytes_total", "Address space unmarked because memory was short", |status| {
        one(float(status.reserve.taken_back_bytes))
    }),
    gauge("pagefold_resident_bytes", "Anonymous memory in scope that is not left alone", |status| {
        one(float(status.memory.resident_bytes))
    }),
    gauge(
        "pagefold_unmerged_bytes",
        "Memory that the processes in scope would hold if nothing were merged",
        |status| one(float(status.memory.unmerged_bytes)),
    ),
    gauge("pagefold_marked_bytes", "Resident memory that is marked; in a dry run, that would be marked", |status| {
        one(float(status.memory.marked_bytes))
    }),
    gauge("pagefold_to_unmark_bytes", "Marked address space that must be unmarked but could not be yet", |status| {
        one(float(status.to_unmark_bytes))
    }),
    gauge("pagefold_kind_resident_bytes", "Resident memory in scope by kind of region", |status| {
        let kinds = status.totals.kinds.iter();
        kinds.map(|row| sample(&[("kind", &name_of(row.kind))], float(row.resident.bytes().0))).collect()
    })
    .by(&["kind"]),
    gauge("pagefold_scope_processes", "Processes in scope, by the selector that they match", |status| {
        of_scopes(status, |row| Some(row.processes as u64))
    })
    .by(&["kind", "scope"]),
    gauge("pagefold_scope_resident_bytes", "Resident memory in scope, by the selector that it matches", |status| {
        of_scopes(status, |row| Some(row.memory.resident_bytes))
    })
    .by(&["kind", "scope"]),
    gauge(
        "pagefold_scope_saved_bytes",
        "Memory that merging saves, by selector; absent until counted, and if there are several trust domains",
        |status| of_one_domain(status, |row| row.saved_bytes),
    )
    .by(&["kind", "scope"]),
    gauge(
        "pagefold_workload_saved_bytes",
        "Memory that merging saves, for the 20 workloads (units, guests, containers, pods) that save most, and for all \
         others; absent until counted, and if there are several trust domains",
        saved_by_workload,
    )
    .by(&["workload"]),
    gauge(
        "pagefold_scope_expected_bytes",
        "Duplicates in marked memory (on request: in all memory), by selector; absent if there are several trust domains",
        |status| of_one_domain(status, |row| Some(row.memory.expected_bytes)),
    )
    .by(&["kind", "scope"]),
    gauge("pagefold_processes", "Processes in scope that are not left alone", |status| {
        one(status.programs.not_left_alone() as f64)
    }),
    gauge("pagefold_left_out_processes", "Processes in scope that are left alone, by reason", |status| {
        let reasons = status.programs.left_out.iter();
        reasons.map(|row| sample(&[("reason", &row.reason)], row.processes as f64)).collect()
    })
    .by(&["reason"]),
    counter(
        "pagefold_cpu_seconds_total",
        "CPU time by part: pagefold without its injector (includes merging on request), the injector, ksmd",
        |status| {
            let cost = &status.work.cpu_seconds;
            vec![
                sample(&[("part", "pagefold")], float(cost.own_ns()) / 1e9),
                sample(&[("part", "injector")], float(cost.injector_ns) / 1e9),
                sample(&[("part", "ksmd")], float(cost.ksmd_ns) / 1e9),
            ]
        },
    )
    .by(&["part"]),
    gauge("pagefold_cpu_used_ratio", "Share of a core used in the last ten seconds, by all parts", |status| {
        one(status.activity.used_share)
    }),
    gauge("pagefold_cpu_allowed_ratio", "Share of a core that may be used", |status| {
        one(status.activity.allowed_share.fraction())
    }),
    gauge("pagefold_governor", "1 for the governor in force", |status| {
        flags("governor", &GOVERNORS, &[status.activity.in_force])
    })
    .by(&["governor"]),
    gauge("pagefold_state", "1 for each activity of the run now; there may be several", |status| {
        flags("state", &Doing::ALL, &status.doing())
    })
    .by(&["state"]),
    gauge("pagefold_ksm_controlled", "1 if the run controls KSM", |status| one(flag(status.activity.ksm_driven))),
    gauge("pagefold_stood_down", "1 if the run has given up KSM because another program changed a setting", |status| {
        one(flag(status.stood_down))
    }),
    counter("pagefold_rounds_total", "Sampling rounds", |status| one(float(status.work.rounds))),
    counter("pagefold_read_bytes_total", "Memory of programs read", |status| {
        one(bytes_of(Pages(status.work.pages_read)))
    }),
    counter("pagefold_scans_total", "Scans by ksmd that the run ordered", |status| one(float(status.work.scans))),
    counter(
        "pagefold_requested_bytes_total",
        "Memory that the run asked the kernel to merge on request, by result; no values if ksmd merges",
        |status| {
            let Some(counts) = &status.requests else { return Vec::new() };
            vec![
                sample(&[("result", "merged")], bytes_of(counts.merged)),
                sample(&[("result", "shared")], bytes_of(counts.shared)),
                sample(&[("result", "differing")], bytes_of(counts.differing)),
                sample(&[("result", "failed")], bytes_of(counts.failed)),
            ]
        },
    )
    .by(&["result"]),
    counter(
        "pagefold_huge_page_splits_total",
        "Huge pages split on the machine since the run began: into base pages (page), or only in page tables (mapping)",
        |status| {
            vec![
                sample(&[("split", "page")], float(status.incidents.splits.pages)),
                sample(&[("split", "mapping")], float(status.incidents.splits.mappings)),
            ]
        },
    )
    .by(&["split"]),
    counter(
        "pagefold_huge_pages_collapsed_total",
        "Huge pages collapsed again where merges did not last and the program had huge pages before",
        |status| one(float(status.incidents.collapsed)),
    ),
    counter("pagefold_refused_spans_total", "Memory ranges not marked because their program refused the call or had ended", |status| {
        one(float(status.incidents.refused_spans))
    }),
    counter("pagefold_injector_restarts_total", "How often the injector was restarted", |status| {
        one(f64::from(status.injector_restarts))
    }),
    counter("pagefold_audit_lost_lines_total", "Audit log lines that could not be written", |status| {
        one(float(status.audit_lost))
    }),
    Family {
        name: "pagefold_stop_seconds",
        kind: Kind::Histogram,
        labels: &["le"],
        help: "How long programs' threads were stopped to make a system call in them",
        values: stop_seconds,
    },
    gauge("pagefold_longest_stop_seconds", "The longest stop of a program's thread", |status| {
        one(status.work.longest_stop_us / 1e6)
    }),
];

/// A number of bytes, pages or events: exact up to 8 PiB.
fn float(number: u64) -> f64 {
    number as f64
}

fn bytes_of(pages: Pages) -> f64 {
    float(pages.0) * float(PAGE_BYTES)
}

/// The value's name in `status --json`.
fn name_of(value: impl Serialize) -> String {
    serde_json::to_value(value).ok().and_then(|name| Some(name.as_str()?.to_owned())).unwrap_or_default()
}

fn flag(is: bool) -> f64 {
    f64::from(u8::from(is))
}

fn sample(labels: &[(&'static str, &str)], value: f64) -> Sample {
    let labels = labels.iter().map(|&(label, of)| (label, of.to_owned())).collect();
    Sample { suffix: "", labels, value }
}

fn one(value: f64) -> Vec<Sample> {
    vec![sample(&[], value)]
}

fn one_if(value: Option<f64>) -> Vec<Sample> {
    value.into_iter().flat_map(one).collect()
}

fn tight_limits(status: &Status) -> Vec<Sample> {
    vec![
        sample(&[("state", &name_of(RoomState::Overcommitted))], status.reserve.limits_overcommitted as f64),
        sample(&[("state", &name_of(RoomState::Short))], status.reserve.limits_short as f64),
    ]
}

fn of_scopes(status: &Status, value: fn(&ScopeRow) -> Option<u64>) -> Vec<Sample> {
    let mut samples = Vec::new();
    for row in &status.programs.scopes {
        if let Some(value) = value(row) {
            samples.push(sample(&[("kind", &row.kind), ("scope", &row.name)], float(value)));
        }
    }
    samples
}

/// No samples if there are several trust domains: a domain mustn't learn how much memory others have in common.
fn of_one_domain(status: &Status, value: fn(&ScopeRow) -> Option<u64>) -> Vec<Sample> {
    if has_several_domains(status) { Vec::new() } else { of_scopes(status, value) }
}

fn has_several_domains(status: &Status) -> bool {
    status.programs.domains.len() > 1
}

fn saved_by_workload(status: &Status) -> Vec<Sample> {
    if status.memory.saved_bytes.is_none() || has_several_domains(status) {
        return Vec::new();
    }
    let mut samples = Vec::new();
    let mut other_bytes = 0;
    for row in by_workload(process_rows(&status.programs.processes)) {
        let saved_bytes = row.saved_bytes.unwrap_or(0);
        // Any user may start scopes, and each of their names would be another series.
        let is_scope = matches!(row.workload.rsplit_once('.'), Some((_, "scope")));
        let is_other = is_scope || [NO_WORKLOAD, OTHER].contains(&&*row.workload);
        if is_other || samples.len() == WORKLOADS_MOST {
            other_bytes += saved_bytes;
        } else {
            samples.push(sample(&[("workload", &row.workload)], float(saved_bytes)));
        }
    }
    samples.push(sample(&[("workload", OTHER)], float(other_bytes)));
    samples
}

/// A sample for each value in `all`: 1 if it's in `now`, otherwise 0.
fn flags<T: Serialize + PartialEq>(label: &'static str, all: &[T], now: &[T]) -> Vec<Sample> {
    all.iter().map(|one| sample(&[(label, &name_of(one))], flag(now.contains(one)))).collect()
}

fn stop_seconds(status: &Status) -> Vec<Sample> {
    let mut samples = Vec::new();
    let mut stops = 0_u64;
    for (class, count) in status.work.stop_lengths.0.into_iter().enumerate() {
        let longest = LENGTHS_NS.get(class).map_or("+Inf".to_owned(), |&ns| (ns as f64 / 1e9).to_string());
        stops = stops.saturating_add(count);
        samples.push(Sample { suffix: "_bucket", ..sample(&[("le", &longest)], float(stops)) });
    }
    samples.push(Sample { suffix: "_sum", ..sample(&[], status.work.total_stop_us / 1e6) });
    samples.push(Sample { suffix: "_count", ..sample(&[], float(stops)) });
    samples
}

pub fn page(status: &Status) -> String {
    let mut text = String::new();
    for Family { name, kind, help, values, .. } in FAMILIES {
        append(&mut text, name, *kind, help, &values(status));
    }
    text
}

#[cfg(test)]
#[path = "families_tests.rs"]
mod tests;

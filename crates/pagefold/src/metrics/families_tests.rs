use super::*;
use crate::commands::status::ProcessRow;
use std::collections::BTreeSet;

fn status() -> Status {
    serde_json::from_str(
        r#"{
        "schema": "pagefold.status/1", "pid": 7, "scope": "--exe a", "dry_run": false, "mechanism": "request", "only": "all",
        "seconds": 12.5, "governor": "auto", "in_force": "low", "allowed_share": 0.2, "used_share": 0.05,
        "paused": false, "busy": true, "ksm_driven": true, "ksm_why": null, "stood_down": false, "foreign_marks": false,
        "available_bytes": 1073741824, "resident_bytes": 1000, "unmerged_bytes": 1200, "saved_bytes": 400, "saved_age_seconds": 1.5, "may_return_bytes": 500, "saved_machine_bytes": 500, "exited_bytes": 0,
        "marked_bytes": 300, "metadata_bytes": 600, "to_unmark_bytes": 10, "copied_bytes": 4096,
        "copied_worst_day_bytes": 4096,
        "reserve": {"keep": "auto", "take_back": false, "likely_bytes": 8192, "headroom_bytes": 12288, "headroom_at_worst_bytes": 0, "taken_back_bytes": 12288,
            "machine": {"state": "overcommitted", "total_bytes": 1048576, "left_bytes": 20480, "reserve_bytes": 16384, "worst_bytes": 24576},
            "limits": [{"cgroup": "/secret", "state": "short", "total_bytes": 4096, "left_bytes": 0, "reserve_bytes": 4096, "worst_bytes": 4096}],
            "limits_overcommitted": 3, "limits_short": 1, "limits_full": 0}, "splits": {"pages": 7, "mappings": 9}, "collapsed": 4, "refused_spans": 2, "injector_restarts": 1, "audit_lost": 5,
        "cpu_seconds": {"pagefold": 2.0, "injector": 0.5, "ksmd": 0.25}, "pages_read": 3, "scans": 4, "stops": 6,
        "longest_stop_us": 200000.0, "total_stop_us": 500000.0, "stop_lengths": [1, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 3], "rounds": 3,
        "index": {"contents": 5, "bytes": 100},
        "kinds": [{"kind": "statically-duplicated", "regions": 2, "resident_bytes": 8192}],
        "levels": [], "domains": [{"name": "secret-domain", "resident_bytes": 1, "marked_bytes": 1, "processes": 1, "left_alone": false}],
        "next": [{"what": "read", "regions": 2, "resident_bytes": 400, "soonest_seconds": null}],
        "processes": [
            {"pid": 31337, "name": "secret-program", "regions": 3, "resident_bytes": 1000, "unmerged_bytes": 1200, "marked_bytes": 300,
             "expected_bytes": 200, "saved_bytes": 100, "workload": "unit shop.service", "left_alone": null, "to_unmark": null},
            {"pid": 31338, "name": "secret-program", "regions": 0, "resident_bytes": 0, "unmerged_bytes": 0, "marked_bytes": 0,
             "expected_bytes": 0, "left_alone": "traced by process 31339", "to_unmark": null}
        ],
        "scopes": [{"kind": "exe", "name": "a\"b\\", "processes": 2, "resident_bytes": 1000, "unmerged_bytes": 0, "marked_bytes": 300,
            "expected_bytes": 200, "saved_bytes": 100}],
        "left_out": [{"reason": "traced", "processes": 1}], "kept_out": [], "events": [],
        "requests": {"asked_pages": 10, "merged_pages": 4, "shared_pages": 3, "differing_pages": 2, "failed_pages": 1}
    }"#,
    )
    .unwrap()
}

#[test]
fn the_page_has_the_figures_of_the_status_in_base_units() {
    crate::golden::check("metrics.txt", &page(&status()));
}

#[test]
fn every_field_of_a_status_is_explained() {
    crate::reference::assert_explained(&serde_json::to_value(status()).unwrap());
}

#[test]
fn while_paused_nothing_else_is_under_way() {
    let mut status = status();
    status.activity.paused = true;
    let page = page(&status);
    let lines: Vec<&str> = page.lines().filter(|line| line.starts_with("pagefold_state{")).collect();
    let under_way: Vec<&&str> = lines.iter().filter(|line| line.ends_with(" 1")).collect();
    assert_eq!(under_way, [&"pagefold_state{state=\"paused\"} 1"]);
    assert_eq!(lines.len(), 6);
}

/// Anyone may be able to read metrics (docs/safety.md).
#[test]
fn no_program_process_or_trust_domain_is_named() {
    let page = page(&status());
    for secret in ["secret", "31337", "31338", "31339"] {
        assert!(!page.contains(secret), "{secret} in\n{page}");
    }
}

/// A domain mustn't learn how much the programs of another domain have in common.
#[test]
fn duplicates_by_scope_are_known_only_where_there_is_one_trust_domain() {
    let mut status = status();
    let names = ["pagefold_scope_expected_bytes{", "pagefold_scope_saved_bytes{", "pagefold_workload_saved_bytes{"];
    assert!(names.iter().all(|name| page(&status).contains(name)));
    status.programs.domains = [status.programs.domains.clone(), status.programs.domains.clone()].concat();
    assert!(!names.iter().any(|name| page(&status).contains(name)));
}

#[test]
fn the_workloads_that_save_most_are_named_and_the_others_summed_up() {
    let mut status = status();
    let process = status.programs.processes[0].clone();
    status.programs.processes.clear();
    for number in 0..30 {
        let workload = match number {
            29 => Some("app-firefox-4711.scope".to_owned()),
            _ => Some(format!("unit {number}.service")),
        };
        status.programs.processes.push(ProcessRow { workload, saved_bytes: Some(100 + number), ..process.clone() });
    }
    let samples = saved_by_workload(&status);
    let labels: Vec<&str> = samples.iter().map(|sample| sample.labels[0].1.as_str()).collect();
    assert_eq!((labels.len(), labels[0], labels[19]), (21, "unit 28.service", "unit 9.service"));
    let sum: f64 = samples.iter().map(|sample| sample.value).sum();
    assert_eq!((labels[20], samples[20].value, sum), ("other", f64::from(936 + 129), f64::from(3_435)));
    status.memory.saved_bytes = None;
    assert!(saved_by_workload(&status).is_empty());
}

#[test]
fn names_follow_the_conventions() {
    let names: BTreeSet<&str> = FAMILIES.iter().map(|family| family.name).collect();
    assert_eq!(names.len(), FAMILIES.len());
    for Family { name, kind, help, .. } in FAMILIES {
        assert!(
            name.starts_with("pagefold_") && name.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_'),
            "{name}"
        );
        assert_eq!(name.ends_with("_total"), *kind == Kind::Counter, "{name}");
        assert!(!help.ends_with('.') && !help.contains(['|', '\n']), "{help}");
    }
}

#[test]
fn the_labels_are_those_that_the_manual_names() {
    let status = status();
    for family in FAMILIES {
        let values = (family.values)(&status);
        let labels: BTreeSet<&str> = values.iter().flat_map(|sample| &sample.labels).map(|(label, _)| *label).collect();
        assert_eq!(labels, family.labels.iter().copied().collect(), "{}", family.name);
    }
}

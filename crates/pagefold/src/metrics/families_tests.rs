use super::*;
use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::Path;

/// Enclose the table in docs/metrics.md.
const BEGIN: &str = "<!-- Generated from the table of metrics: see docs/contributing.md -->\n";
const END: &str = "<!-- End of the generated part -->\n";

fn status() -> Status {
    serde_json::from_str(
        r#"{
        "schema": "pagefold.status/1", "pid": 7, "scope": "--exe a", "dry_run": false, "mechanism": "request",
        "seconds": 12.5, "governor": "auto", "in_force": "low", "allowed_share": 0.2, "used_share": 0.05,
        "paused": false, "busy": true, "ksm_driven": true, "ksm_why": null, "stood_down": false,
        "available_bytes": 1073741824, "resident_bytes": 1000, "saved_bytes": 400, "saved_machine_bytes": 500, "exited_bytes": 0,
        "marked_bytes": 300, "metadata_bytes": 600, "to_unmark_bytes": 10, "copied_bytes": 4096,
        "copied_worst_day_bytes": 4096,
        "reserve": {"keep": "auto", "take_back": false, "likely_bytes": 8192, "taken_back_bytes": 12288,
            "machine": {"state": "overcommitted", "total_bytes": 1048576, "left_bytes": 20480, "reserve_bytes": 16384, "worst_bytes": 24576},
            "limits": [{"cgroup": "/secret", "state": "short", "total_bytes": 4096, "left_bytes": 0, "reserve_bytes": 4096, "worst_bytes": 4096}],
            "limits_overcommitted": 3, "limits_short": 1}, "splits": {"pages": 7, "mappings": 9}, "collapsed": 4, "refused_spans": 2, "injector_restarts": 1,
        "cpu_seconds": {"pagefold": 2.0, "injector": 0.5, "ksmd": 0.25}, "pages_read": 3, "scans": 4, "stops": 6,
        "longest_stop_us": 200000.0, "total_stop_us": 500000.0, "stop_lengths": [1, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 3], "rounds": 3,
        "index": {"contents": 5, "bytes": 100},
        "kinds": [{"kind": "statically-duplicated", "regions": 2, "resident_bytes": 8192}],
        "levels": [], "domains": [{"name": "secret-domain", "resident_bytes": 1, "marked_bytes": 1, "withheld_bytes": 77777}],
        "next": [{"what": "read", "regions": 2, "resident_bytes": 400, "soonest_seconds": null}],
        "processes": [
            {"pid": 31337, "name": "secret-program", "regions": 3, "resident_bytes": 1000, "marked_bytes": 300,
             "expected_bytes": 200, "left_alone": null, "to_unmark": null},
            {"pid": 31338, "name": "secret-program", "regions": 0, "resident_bytes": 0, "marked_bytes": 0,
             "expected_bytes": 0, "left_alone": "traced by process 31339", "to_unmark": null}
        ],
        "scopes": [{"kind": "exe", "name": "a\"b\\", "processes": 2, "resident_bytes": 1000, "marked_bytes": 300,
            "expected_bytes": 200}],
        "left_out": [{"reason": "traced", "processes": 1}],
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
fn while_paused_nothing_else_is_under_way() {
    let mut status = status();
    status.paused = true;
    let page = page(&status);
    let lines: Vec<&str> = page.lines().filter(|line| line.starts_with("pagefold_state{")).collect();
    let under_way: Vec<&&str> = lines.iter().filter(|line| line.ends_with(" 1")).collect();
    assert_eq!(under_way, [&"pagefold_state{state=\"paused\"} 1"]);
    assert_eq!(lines.len(), 6);
}

/// docs/safety.md: anyone may be able to read metrics.
#[test]
fn no_program_process_or_trust_domain_is_named() {
    let page = page(&status());
    for secret in ["secret", "31337", "31338", "31339", "77777"] {
        assert!(!page.contains(secret), "{secret} in\n{page}");
    }
}

/// Contents that another domain holds as well are withheld from a scope, which its duplicates would show.
#[test]
fn duplicates_by_scope_are_known_only_where_there_is_one_trust_domain() {
    let mut status = status();
    let has = |status: &Status| page(status).contains("pagefold_scope_expected_bytes{");
    assert!(has(&status));
    status.domains = [status.domains.clone(), status.domains.clone()].concat();
    assert!(!has(&status));
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

/// With `PAGEFOLD_BLESS=1` it writes the table instead.
#[test]
fn the_table_in_the_documentation_is_up_to_date() {
    let status = status();
    let mut table = "| metric | type | labels | meaning |\n| --- | --- | --- | --- |\n".to_owned();
    for Family { name, kind, help, values } in FAMILIES {
        let values = values(&status);
        let labels: BTreeSet<&str> = values.iter().flat_map(|sample| &sample.labels).map(|(label, _)| *label).collect();
        let labels: Vec<String> = labels.into_iter().map(|label| format!("`{label}`")).collect();
        let _ = writeln!(table, "| `{name}` | {} | {} | {help} |", kind.name(), labels.join(", "));
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/metrics.md");
    let found = std::fs::read_to_string(&path).unwrap();
    let (before, rest) = found.split_once(BEGIN).unwrap();
    let (_, after) = rest.split_once(END).unwrap();
    let expected = format!("{before}{BEGIN}{table}{END}{after}");
    if std::env::var_os("PAGEFOLD_BLESS").is_some() {
        std::fs::write(&path, expected).unwrap();
    } else {
        assert!(
            found == expected,
            "docs/metrics.md is out of date: PAGEFOLD_BLESS=1 cargo test -p pagefold --lib families"
        );
    }
}

use crate::files::{MIB, NOW, fleet, json, row, text, two_kinds, write};
use serde_json::Value;

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap()
}

#[test]
fn hosts_and_pairs_are_reported() {
    let dir = tempfile::tempdir().unwrap();
    two_kinds(dir.path());
    let report = json("report", dir.path(), &[]);
    assert_eq!(report["schema"], "pagefold.fleet.report/1");
    let host = &report["hosts"][0];
    assert_eq!((host["host"].as_str(), host["workloads"].as_u64()), (Some("host-0"), Some(3)));
    assert_eq!(host["saved_bytes"].as_u64(), Some(3 * MIB));
    assert_eq!((host["within_bytes"].as_u64(), host["take_back_bytes"].as_u64()), (Some(MIB), Some(2 * MIB)));
    // No two workloads of one host and domain have a content in common.
    assert!(number(&host["across_bytes"]) <= number(&host["across_error_bytes"]), "{host}");
    let pairs = report["pairs"].as_array().unwrap();
    assert!(
        pairs.iter().all(|pair| pair["domain"] == "default" || pair["workload"].as_str().unwrap().starts_with("alien"))
    );
    let of_web = |pair: &&Value| {
        let mut sides = [["workload", "host"], ["other_workload", "other_host"]]
            .map(|names| names.map(|name| pair[name].as_str().unwrap_or_default()));
        sides.sort_unstable();
        sides == [["web-0-0", "host-0"], ["web-1-0", "host-1"]]
    };
    let web = pairs.iter().find(of_web).unwrap();
    let exact = 20_000.0 * 4096.0;
    assert!(number(&web["low_bytes"]) <= exact && exact <= number(&web["high_bytes"]), "{web}");
    assert!((number(&web["common_bytes"]) / exact - 1.0).abs() < 0.06, "{web}");
    // The bounds are the sketches' own, so measurements of the sketches' bounds hold for the report.
    let read = |host: &str| pagefold_sketch::read(std::fs::read(dir.path().join(host)).unwrap()).unwrap();
    let of = |host: &str, name: &str| {
        read(host).rows.iter().find(|row| row.workload == name).map(|row| row.sketch.clone()).unwrap()
    };
    let common = of("host-0.parquet", "web-0-0").common(&of("host-1.parquet", "web-1-0"));
    for (reported, pages) in [("low_bytes", common.low), ("common_bytes", common.contents), ("high_bytes", common.high)]
    {
        // The queries derive theta from a sketch's estimate, which is in whole pages.
        assert!((number(&web[reported]) / 4096.0 / pages - 1.0).abs() < 1e-4, "{reported}: {web}, not {common:?}");
    }
    // The pairs with most in common come first, and pairs with nothing in common are missing.
    assert_eq!(pairs.len(), 3, "{pairs:?}");
}

#[test]
fn what_a_host_could_save_is_within_the_error() {
    let dir = tempfile::tempdir().unwrap();
    // Ten workloads that hold the same 30,000 pages and 10,000 of their own.
    let own = |number: u64| 1_000_000 * number..1_000_000 * number + 10_000;
    let rows: Vec<_> = (1..=10).map(|number| row(&format!("w{number}"), &[0..30_000, own(number)])).collect();
    write(dir.path(), "one", &rows);
    let report = json("report", dir.path(), &["--pairs", "45"]);
    let host = &report["hosts"][0];
    let exact = 9.0 * 30_000.0 * 4096.0;
    assert!((number(&host["across_bytes"]) - exact).abs() <= number(&host["across_error_bytes"]), "{host}");
    assert!(number(&host["across_error_bytes"]) < exact / 10.0, "{host}");
    let within = |pair: &&Value| {
        let exact = 30_000.0 * 4096.0;
        number(&pair["low_bytes"]) <= exact && exact <= number(&pair["high_bytes"])
    };
    let pairs = report["pairs"].as_array().unwrap();
    // All hold the same, so each makes pairs with at least the next four.
    assert!(pairs.len() >= 30);
    assert!(pairs.iter().filter(within).count() >= 27, "{pairs:?}");
}

#[test]
fn text_is_for_people() {
    let dir = tempfile::tempdir().unwrap();
    two_kinds(dir.path());
    let output = fleet(&["report", dir.path().to_str().unwrap(), "--at", NOW]).output().unwrap();
    let text = text(&output.stdout);
    for part in ["HOST", "host-1", "3 MiB", "pod web-0-0", "2 hosts, 6 workloads: 6 MiB saved", "OF THE SMALLER"] {
        assert!(text.contains(part), "{part} is missing in {text}");
    }
}

//! Apache Spark gives the same answer on the same files, from the same queries.

use crate::files::{NOW, NOW_US, bytes, json, key, row, two_kinds, write};
use crate::s3::python;
use crate::skip::skip;
use pagefold_sketch::Row;
use serde_json::Value;
use std::path::Path;
use std::process::Command;

/// Two executors with a core each. The queries are small, and so are their stages.
const CLUSTER: [&str; 6] = [
    "--master",
    "local-cluster[2,1,1024]",
    "--conf",
    "spark.sql.shuffle.partitions=4",
    "--conf",
    "spark.ui.enabled=false",
];

#[test]
fn spark_gives_the_same_answer() {
    let Some(python) = python() else { return skip("no Python with pyspark: scripts/setup fleet makes one") };
    let dir = tempfile::tempdir().unwrap();
    two_kinds(dir.path());
    // The workloads of this host have enough in common for all forms of sketches: empty, one content, exact, estimated.
    let rows: Vec<Row> = [0, 1, 500, 4093, 30_000, 100_000_u64]
        .iter()
        .map(|&pages| row(&format!("n{pages}"), &[0..pages, 5_000_000 + pages..5_000_000 + 2 * pages]))
        .collect();
    write(dir.path(), "forms", &rows);
    // Now files that don't count.
    let put = |name: &str, bytes: &[u8]| std::fs::write(dir.path().join(name), bytes).unwrap();
    let good = bytes("x", &[row("w", &[0..9000])]);
    put("half.parquet", &good[..good.len() / 2]);
    std::fs::create_dir(dir.path().join("yesterday")).unwrap();
    let old = [Row { time_us: NOW_US - 3_600_000_000, since_us: 0, ..row("w", &[0..9000]) }];
    put("yesterday/host-0.parquet", &bytes("host-0", &old));
    put("for-another.parquet", &bytes("host-0", &[row("w", &[0..9000])]));
    write(dir.path(), "ö b%41", &[row("w", &[0..9])]);
    // Numbers whose sum has more than 63 bits: the engine mustn't fail.
    let absurd = Row { anonymous_bytes: 1 << 50, ..row("w", &[0..9]) };
    let mut bytes = bytes("absurd", &[absurd.clone(), Row { workload: "x".into(), ..absurd }]);
    let (from, to) = ((1_u64 << 50).to_le_bytes(), (1_u64 << 62).to_le_bytes());
    while let Some(at) = bytes.windows(8).position(|window| window == from) {
        bytes[at..at + 8].copy_from_slice(&to);
    }
    put("absurd.parquet", &bytes);
    write(dir.path(), "other-key", &[Row { key: key(2), ..row("w", &[0..9000]) }]);
    let output = dir.path().join("spark.json");
    let job = Path::new(env!("CARGO_MANIFEST_DIR")).join("spark/report.py");
    let mut submit = Command::new(python.with_file_name("spark-submit"));
    submit.args(CLUSTER).arg(job).arg(dir.path()).args(["--at", NOW, "--pairs", "50", "--output"]).arg(&output);
    // spark-submit finds Spark by the first python3 in PATH.
    let path = format!("{}:{}", python.parent().unwrap().display(), std::env::var("PATH").unwrap_or_default());
    let run = submit.env("PYSPARK_PYTHON", &python).env("PATH", path).output().unwrap();
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    let theirs: Value = serde_json::from_slice(&std::fs::read(&output).unwrap()).unwrap();
    let ours = json("report", dir.path(), &["--pairs", "50"]);
    let mut differences = Vec::new();
    for part in ["schema", "key", "hosts", "pairs", "sampled", "older_files"] {
        compare(part, &ours[part], &theirs[part], &mut differences);
    }
    assert!(differences.is_empty(), "{differences:#?}");
    assert!(ours["pairs"].as_array().unwrap().len() > 10);
    let files = |report: &Value| -> Vec<String> {
        let mut files: Vec<String> = report["left_out"]
            .as_array()
            .unwrap()
            .iter()
            .map(|left| left["file"].as_str().unwrap().to_owned())
            .collect();
        files.sort();
        files
    };
    assert_eq!(files(&ours), files(&theirs));
}

/// Numbers may differ by rounding, because the two may add fractions in another order.
fn compare(place: &str, ours: &Value, theirs: &Value, differences: &mut Vec<String>) {
    match (ours, theirs) {
        (Value::Array(a), Value::Array(b)) if a.len() == b.len() => {
            a.iter().zip(b).enumerate().for_each(|(at, (a, b))| compare(&format!("{place}[{at}]"), a, b, differences));
        }
        (Value::Object(a), Value::Object(b)) if a.keys().eq(b.keys()) || a.len() == b.len() => {
            a.iter().for_each(|(name, a)| compare(&format!("{place}.{name}"), a, &b[name], differences));
        }
        (Value::Number(a), Value::Number(b))
            if a.as_f64().zip(b.as_f64()).is_some_and(|(a, b)| (a - b).abs() <= 1.0) => {}
        (a, b) if a == b => {}
        (a, b) => differences.push(format!("{place}: {a} here, {b} there")),
    }
}

//! All experiments, small and short, on real programs and the real KSM: they answer correctly before, during and after
//! merging, we measure everything, and KSM gets its old state back. `pagefold-lab bench` measures costs and speed.

mod common;

use common::lab;
use pagefold_testkit::{KsmLock, is_root, skip};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// The reason if the experiments can't run here.
fn cannot_run() -> Option<String> {
    let fpm = std::fs::read_dir("/usr/sbin").into_iter().flatten().flatten().find_map(|entry| {
        let name = entry.file_name().into_string().ok()?;
        name.starts_with("php-fpm").then_some(name)
    });
    let programs = [
        "apache2",
        "redis-check-rdb",
        "mariadbd",
        "mariadb-install-db",
        "gcc",
        "gunicorn",
        "puma",
        "ruby",
        "php",
        "memcached",
        "qemu-system-x86_64",
        "busybox",
        fpm.as_deref().unwrap_or("php-fpm"),
    ];
    let is_installed = |name: &str| ["/usr/sbin", "/usr/bin"].iter().any(|dir| Path::new(dir).join(name).exists());
    if let Some(program) = programs.iter().find(|program| !is_installed(program)) {
        return Some(format!("{program} is not installed (scripts/setup installs it)"));
    }
    let has_ksm = Path::new("/sys/kernel/mm/ksm/run").exists();
    (!has_ksm || !is_root()).then(|| "needs root and a kernel with KSM".to_owned())
}

#[test]
fn every_experiment_runs_and_its_programs_answer_correctly() {
    if let Some(reason) = cannot_run() {
        return skip(reason);
    }
    let dir = tempfile::tempdir().unwrap();
    let results = dir.path().join("results");
    let output = lab(&["bench", "--quick", "--seed", "1", "--output", results.to_str().unwrap(), "--json", "-"]);
    let errors = String::from_utf8_lossy(&output.stderr);
    for (missing, reason) in [
        ("scripts/guest-kernel", "no kernel for guests"),
        ("run lab/scripts/wordpress", "WordPress is not unpacked (scripts/setup does that)"),
        ("a kernel with zram", "the kernel has no zram"),
        ("is never", "no huge pages here"),
    ] {
        if errors.contains(missing) {
            return skip(reason);
        }
    }
    // 1 means that the experiment missed a bar, which doesn't matter at this size.
    assert!(matches!(output.status.code(), Some(0 | 1)), "{}: {errors}", output.status);
    let reports: Vec<Value> =
        serde_json::Deserializer::from_slice(&output.stdout).into_iter().map(Result::unwrap).collect();
    let reports: BTreeMap<&str, &Value> =
        reports.iter().map(|report| (report["experiment"].as_str().unwrap(), report)).collect();
    let listed = String::from_utf8(lab(&["bench", "--list"]).stdout).unwrap();
    // A line that isn't indented begins with the name of an experiment.
    let names = listed.lines().filter_map(|line| line.split_whitespace().next().filter(|name| line.starts_with(name)));
    let left_out = if Path::new("/dev/ksm").exists() { &[][..] } else { &["on-request", "programs-on-request"] };
    for name in names.filter(|name| !left_out.contains(name)) {
        let report = reports.get(name).unwrap_or_else(|| panic!("no {name}: {errors}"));
        assert_eq!(report["failures"], Value::Array(Vec::new()), "{name}: {errors}");
        for run in report["runs"].as_array().unwrap() {
            for when in ["before", "during", "after"] {
                assert_ne!(run["answers_correct"][when], false, "{name}, {} {when}: {errors}", run["policy"]);
            }
        }
    }
    databases_are_merged(reports["real-programs"]);
    clones_are_merged(reports["clones"]);
    neighbours_are_measured(reports["neighbours"]);
    workers_huge_pages_jobs_and_machines_are_measured(&reports);
    containers_hold_less_while_their_pages_are_loaded(reports["containers"]);
    let fit = |policy: &str| figure(reports["overcommit"], &format!("{policy}: MiB of programs that fit"));
    assert!(fit("no merging") <= 72.0 && fit("pagefold") >= 96.0, "{}", reports["overcommit"]["figures"]);

    // The report has all of them.
    let page = dir.path().join("report.html");
    let output = lab(&["report", results.to_str().unwrap(), "-o", page.to_str().unwrap()]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let page = std::fs::read_to_string(page).unwrap();
    assert!(reports.keys().all(|name| page.contains(&format!("<h2>{name}</h2>"))), "{:?}", reports.keys());
    assert_ksm_is_given_back();
}

fn figure(report: &Value, name: &str) -> f64 {
    report["figures"][name].as_f64().unwrap_or_else(|| panic!("no {name}: {}", report["figures"]))
}

fn databases_are_merged(report: &Value) {
    let mut runs: Vec<&Value> = report["runs"].as_array().unwrap().iter().collect();
    runs.sort_by_key(|run| run["policy"].as_str().unwrap());
    let policies: Vec<&str> = runs.iter().filter_map(|run| run["policy"].as_str()).collect();
    assert_eq!(policies, ["ksm-everything", "oracle", "pagefold"]);
    assert!(runs.iter().all(|run| run["saved_bytes"].as_u64().unwrap() > 16 << 20), "{runs:?}");
    let saved = |at: usize| runs[at]["saved_bytes"].as_f64().unwrap();
    assert!(saved(2) >= 0.8 * saved(0), "pagefold {} of {}", saved(2), saved(0));
}

/// We find clones by their own path.
fn clones_are_merged(report: &Value) {
    for policy in ["pagefold", "ksm-1000/20ms"] {
        let merged = figure(report, &format!("clones of which 90 % was merged before the next start, {policy}"));
        assert!(merged >= 1.0, "{policy}: {}", report["figures"]);
    }
}

/// How a server fares beside each policy.
fn neighbours_are_measured(report: &Value) {
    for policy in ["no merging", "pagefold", "ksm-1000/20ms"] {
        for when in ["while merging", "at rest"] {
            let figure = |name: &str| figure(report, &format!("{policy} {name} {when}"));
            for server in ["", "of mariadb "] {
                let percentiles = ["p50 us", "p99 us", "p99.9 us"].map(|name| figure(&format!("{server}{name}")));
                assert!(percentiles[0] > 0.0 && percentiles.is_sorted(), "{policy} {when}: {percentiles:?}");
            }
            assert!(figure("compression MiB/s") > 0.0 && figure("compilations a second") > 0.0);
        }
    }
}

/// The policies merge prefork servers beyond the pages shared by fork, KSM splits huge pages, compile jobs give the
/// same objects, and machines that start one after the other merge.
fn workers_huge_pages_jobs_and_machines_are_measured(reports: &BTreeMap<&str, &Value>) {
    let (workers, huge, build, vms) = (reports["workers"], reports["huge"], reports["build"], reports["vms"]);
    assert!(figure(workers, "ksm-everything: php-fpm, MiB shared by fork") > 1.0);
    assert!(figure(workers, "ksm-everything: all, MiB saved by merging") > 1.0);
    for layout in ["", " in one mapping"] {
        let [before, after] = ["before", "afterwards"]
            .map(|when| figure(huge, &format!("ksm-everything{layout}: MiB in huge pages {when}")));
        assert!(before - after >= 32.0, "{layout}: {before} {after}");
    }
    assert!(figure(build, "pagefold: time of a job relative to no merging, median") > 0.1);
    assert!(figure(build, "ksm-1000/20ms: MiB held by the compilers, mean over time") > 1.0);
    for policy in ["pagefold", "ksm-1000/20ms"] {
        assert!(figure(vms, &format!("{policy}: MiB of the machines when all are up")) > 64.0);
    }
}

/// Sites in containers answer every page load while they merge, then hold less memory, and leave nothing behind.
fn containers_hold_less_while_their_pages_are_loaded(report: &Value) {
    for policy in ["no merging", "pagefold"] {
        let figure = |name: &str| figure(report, &format!("{policy}: {name}"));
        assert!(figure("page loads") >= 30.0);
        let percentiles = ["p50 of a page load, ms", "p99 of a page load, ms"].map(figure);
        assert!(percentiles[0] > 0.0 && percentiles.is_sorted(), "{policy}: {percentiles:?}");
    }
    assert!(figure(report, "no merging: MiB of anonymous memory at the end") > 150.0);
    let left = figure(report, "pagefold: anonymous memory at the end relative to no merging");
    assert!((0.1..0.8).contains(&left), "{left}");
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(!mounts.contains("/pagefold-lab-"), "{mounts}");
}

fn assert_ksm_is_given_back() {
    // The next test may use KSM as soon as the experiment has given it back.
    let _lock = KsmLock::take();
    for (knob, value) in [("run", "0"), ("pages_sharing", "0"), ("max_page_sharing", "256"), ("use_zero_pages", "0")] {
        let now = std::fs::read_to_string(format!("/sys/kernel/mm/ksm/{knob}")).unwrap();
        assert_eq!(now.trim(), value, "{knob}");
    }
}

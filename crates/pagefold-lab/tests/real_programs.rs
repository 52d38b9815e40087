//! Real databases answer correctly before, during and after merging, and KSM is restored. `pagefold-lab bench` measures
//! costs and speed.

use pagefold_testkit::{KsmLock, is_root, lab, skip};
use serde_json::Value;
use std::path::Path;

/// Why experiments with these programs cannot run here, if so.
fn cannot_run(programs: &[&str]) -> Option<String> {
    let is_installed = |name: &str| ["/usr/sbin", "/usr/bin"].iter().any(|dir| Path::new(dir).join(name).exists());
    if let Some(program) = programs.iter().find(|program| !is_installed(program)) {
        return Some(format!("{program} is not installed (scripts/setup installs it)"));
    }
    let has_ksm = Path::new("/sys/kernel/mm/ksm/run").exists();
    (!has_ksm || !is_root()).then(|| "needs root and a kernel with KSM".to_owned())
}

#[test]
fn databases_answer_correctly_while_merged() {
    if let Some(reason) = cannot_run(&["redis-check-rdb", "mariadbd", "mariadb-install-db"]) {
        return skip(reason);
    }
    let output = lab(&["bench", "real-programs", "--quick", "--json", "-"]);
    let errors = String::from_utf8_lossy(&output.stderr);
    // 1 means that a bar was missed, which does not matter at this size.
    assert!(matches!(output.status.code(), Some(0 | 1)), "{}: {errors}", output.status);
    let report: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {errors}"));
    assert_eq!(report["schema"], "pagefold.bench/1");
    let runs = report["runs"].as_array().unwrap();
    let policies: Vec<&str> = runs.iter().filter_map(|run| run["policy"].as_str()).collect();
    assert_eq!(policies, ["ksm-everything", "oracle", "pagefold"], "{errors}");
    for run in runs {
        for when in ["before", "during", "after"] {
            assert_eq!(run["answers_correct"][when], true, "{} {when}: {errors}", run["policy"]);
        }
        assert!(run["saved_bytes"].as_u64().unwrap() > 16 << 20, "{run}");
    }
    let saved = |at: usize| runs[at]["saved_bytes"].as_f64().unwrap();
    assert!(saved(2) >= 0.8 * saved(0), "pagefold {} of {}", saved(2), saved(0));
    assert_ksm_is_given_back();
}

/// Clones are found by a path of their own and are merged, and what a server feels beside each policy is measured.
#[test]
fn clones_are_merged_and_neighbours_are_measured() {
    if let Some(reason) = cannot_run(&["redis-check-rdb", "mariadbd", "gcc"]) {
        return skip(reason);
    }
    let output = lab(&["bench", "clones", "neighbours", "--quick", "--json", "-"]);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{errors}");
    let reports: Vec<Value> =
        serde_json::Deserializer::from_slice(&output.stdout).into_iter().map(Result::unwrap).collect();
    for report in &reports {
        for run in report["runs"].as_array().unwrap() {
            assert_eq!(run["answers_correct"]["during"], true, "{}: {errors}", run["policy"]);
        }
    }
    let [clones, neighbours] = &reports[..] else { panic!("{} reports: {errors}", reports.len()) };
    for policy in ["pagefold", "ksm-1000/20ms"] {
        let merged = &clones["figures"][format!("clones of which 90 % was merged before the next start, {policy}")];
        assert!(merged.as_f64().unwrap() >= 1.0, "{policy}: {}", clones["figures"]);
    }
    for policy in ["no merging", "pagefold", "pagefold --governor quiet", "ksm-1000/20ms"] {
        for when in ["while merging", "at rest"] {
            let figure = |name: &str| neighbours["figures"][format!("{policy} {name} {when}")].as_f64().unwrap();
            for server in ["", "of mariadb "] {
                let percentiles = ["p50 us", "p99 us", "p99.9 us"].map(|name| figure(&format!("{server}{name}")));
                assert!(percentiles[0] > 0.0 && percentiles.is_sorted(), "{policy} {when}: {percentiles:?}");
            }
            assert!(figure("compression MiB/s") > 0.0 && figure("compilations a second") > 0.0);
        }
    }
    assert_ksm_is_given_back();
}

/// Prefork servers are merged beyond what they share by fork, huge pages are split by KSM, compile jobs give the same objects, and
/// machines that are started one after the other are merged.
#[test]
fn workers_huge_pages_jobs_and_machines_are_measured() {
    let fpm = std::fs::read_dir("/usr/sbin").unwrap().flatten().find_map(|entry| {
        let name = entry.file_name().into_string().ok()?;
        name.starts_with("php-fpm").then_some(name)
    });
    let needed = ["gunicorn", fpm.as_deref().unwrap_or("php-fpm"), "gcc", "qemu-system-x86_64", "busybox"];
    if let Some(reason) = cannot_run(&needed) {
        return skip(reason);
    }
    let output = lab(&["bench", "workers", "huge", "build", "vms", "--quick", "--json", "-"]);
    let errors = String::from_utf8_lossy(&output.stderr);
    for (missing, reason) in [("scripts/guest-kernel", "no kernel for guests"), ("is never", "no huge pages here")] {
        if errors.contains(missing) {
            return skip(reason);
        }
    }
    assert_eq!(output.status.code(), Some(0), "{errors}");
    let reports: Vec<Value> =
        serde_json::Deserializer::from_slice(&output.stdout).into_iter().map(Result::unwrap).collect();
    let [workers, huge, build, vms] = &reports[..] else { panic!("{} reports: {errors}", reports.len()) };
    for run in reports.iter().flat_map(|report| report["runs"].as_array().unwrap()) {
        assert_eq!(run["answers_correct"]["during"], true, "{}: {errors}", run["policy"]);
    }
    let figure = |report: &Value, name: &str| {
        report["figures"][name].as_f64().unwrap_or_else(|| panic!("no {name}: {}", report["figures"]))
    };
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
    assert_ksm_is_given_back();
}

/// Below a limit, programs with the same contents are started as long as there is room: merging makes some.
#[test]
fn more_fits_below_a_limit_where_memory_is_merged() {
    if let Some(reason) = cannot_run(&[]) {
        return skip(reason);
    }
    let output = lab(&["bench", "overcommit", "--quick", "--json", "-"]);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{errors}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let fit = |policy: &str| report["figures"][format!("{policy}: MiB of programs that fit")].as_f64().unwrap();
    assert!(fit("no merging") <= 72.0 && fit("pagefold") >= 96.0, "{}", report["figures"]);
    assert_ksm_is_given_back();
}

/// Sites in containers answer every page load correctly while they are merged, hold less memory then, and leave nothing behind.
#[test]
fn containers_hold_less_while_their_pages_are_loaded() {
    if let Some(reason) = cannot_run(&["apache2", "mariadbd", "mariadb-install-db", "php", "busybox"]) {
        return skip(reason);
    }
    let output = lab(&["bench", "containers", "--quick", "--json", "-"]);
    let errors = String::from_utf8_lossy(&output.stderr);
    if errors.contains("run scripts/wordpress") {
        return skip("WordPress is not unpacked (scripts/setup does that)");
    }
    assert_eq!(output.status.code(), Some(0), "{errors}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    for run in report["runs"].as_array().unwrap() {
        for when in ["before", "during", "after"] {
            assert_eq!(run["answers_correct"][when], true, "{} {when}: {errors}", run["policy"]);
        }
    }
    let figure = |policy: &str, name: &str| {
        let value = &report["figures"][format!("{policy}: {name}")];
        value.as_f64().unwrap_or_else(|| panic!("no {name} of {policy}: {}", report["figures"]))
    };
    for policy in ["no merging", "ksm-1000/20ms", "pagefold"] {
        assert!(figure(policy, "page loads") >= 30.0);
        let percentiles = ["p50 of a page load, ms", "p99 of a page load, ms"].map(|name| figure(policy, name));
        assert!(percentiles[0] > 0.0 && percentiles.is_sorted(), "{policy}: {percentiles:?}");
    }
    assert!(figure("no merging", "MiB of anonymous memory at the end") > 150.0);
    let left = figure("pagefold", "anonymous memory at the end relative to no merging");
    assert!((0.1..0.8).contains(&left), "{left}");
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(!mounts.contains("/pagefold-lab-"), "{mounts}");
    assert_ksm_is_given_back();
}

fn assert_ksm_is_given_back() {
    // The next test may use KSM as soon as the experiment has given it back.
    let _lock = KsmLock::take();
    for (knob, value) in [("run", "0"), ("pages_sharing", "0"), ("max_page_sharing", "256"), ("use_zero_pages", "0")] {
        let now = std::fs::read_to_string(format!("/sys/kernel/mm/ksm/{knob}")).unwrap();
        assert_eq!(now.trim(), value, "{knob}");
    }
}

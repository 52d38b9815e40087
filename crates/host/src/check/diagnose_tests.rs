//! Findings for fixtures with one problem each.

use super::*;
use crate::check::facts::Fact;
use crate::check::facts::fixture::{healthy, set_frame};
use pagefold_ksm::lock::Lock;
use pagefold_ksm::request::Carrier;
use pagefold_ksm::state_file::{Holder, State};
use pagefold_ksm::{Knob, Knobs};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

/// The findings that aren't ok after `spoil`, by id and severity.
fn found(spoil: impl FnOnce(&Path, &MachinePaths)) -> Vec<(&'static str, Severity)> {
    findings(spoil).iter().map(|finding| (finding.id, finding.severity)).collect()
}

fn findings(spoil: impl FnOnce(&Path, &MachinePaths)) -> Vec<Finding> {
    let dir = tempfile::tempdir().unwrap();
    let roots = healthy(dir.path());
    spoil(dir.path(), &roots);
    let mut findings = examine(&roots);
    for finding in &findings {
        assert!(!finding.what.is_empty());
        let well = finding.severity == Severity::Ok;
        assert_eq!(well, finding.why.is_empty() && finding.todo.is_empty(), "{finding:?}");
    }
    findings.retain(|finding| finding.severity != Severity::Ok);
    findings
}

fn write(path: &Path, text: &str) {
    std::fs::write(path, text).unwrap();
}

#[test]
fn a_healthy_machine_has_no_findings() {
    assert_eq!(found(|_, _| {}), []);
}

#[test]
fn ids_are_distinct() {
    let dir = tempfile::tempdir().unwrap();
    let mut ids: Vec<_> = examine(&healthy(dir.path())).iter().map(|finding| finding.id).collect();
    let all = ids.len();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), all);
}

#[test]
fn each_problem_in_a_file_makes_one_finding() {
    use Severity::{Blocker, Note, Warning};
    let limited = "Uid:\t0\t0\t0\t0\nCapEff:\t0000000000080006\nSeccomp:\t0\n";
    let user = "Uid:\t1000\t1000\t0\t0\nCapEff:\t0000000000000000\nSeccomp:\t0\n";
    let filtered = "Uid:\t0\t0\t0\t0\nCapEff:\t000001ffffffffff\nSeccomp:\t2\n";
    let ksm = "sys/kernel/mm/ksm";
    let dir = tempfile::tempdir().unwrap();
    let mut texts = format!("{:#?}\n", examine(&healthy(dir.path())));
    for (path, text, id, severity) in [
        ("proc/sys/kernel/osrelease", "6.5.0-9", "kernel", Note),
        ("proc/sys/kernel/osrelease", "6.3.13", "kernel", Blocker),
        ("proc/sys/kernel/osrelease", "plan 9", "kernel", Warning),
        (&format!("{ksm}/run"), "1", "run", Blocker),
        (&format!("{ksm}/pages_sharing"), "512", "run", Note),
        (&format!("{ksm}/advisor_mode"), "none [scan-time]", "advisor", Blocker),
        ("proc/self/status", limited, "capabilities", Blocker),
        ("proc/self/status", user, "capabilities", Blocker),
        ("proc/self/status", filtered, "seccomp", Warning),
        ("proc/sys/kernel/yama/ptrace_scope", "3", "ptrace", Blocker),
        ("sys/kernel/mm/transparent_hugepage/enabled", "[always] madvise never", "huge-pages", Note),
        ("sys/kernel/mm/transparent_hugepage/khugepaged/max_ptes_none", "511", "khugepaged", Note),
        ("proc/sys/vm/max_map_count", "4096", "map-count", Warning),
        ("sys/devices/system/node/online", "0-1", "nodes", Note),
        ("proc/meminfo", "SwapTotal: 0 kB\n", "swap", Note),
        ("state.json", "{", "state", Blocker),
    ] {
        let [finding] = &findings(|dir, _| write(&dir.join(path), text))[..] else { panic!("{path}: {text}") };
        assert_eq!((finding.id, finding.severity), (id, severity), "{path}: {text}");
        // The text of this finding has the path of a temporary directory, so we keep it out of the golden file.
        if path != "state.json" {
            let _ = writeln!(texts, "{finding:#?}");
        }
    }
    pagefold_testkit::golden::check(&Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/findings.txt"), &texts);
}

#[test]
fn each_missing_file_makes_one_finding() {
    use Severity::{Note, Warning};
    for (path, id, severity) in [
        ("proc/self/ksm_stat", "ksm-stat", Note),
        ("proc/kpageflags", "page-monitor", Warning),
        ("proc/self/pagemap", "page-monitor", Warning),
        ("proc/pressure/memory", "pressure", Note),
        ("sys/fs/cgroup/cgroup.controllers", "cgroups", Note),
    ] {
        assert_eq!(found(|dir, _| std::fs::remove_file(dir.join(path)).unwrap()), [(id, severity)], "{path}");
    }
    let without = found(|dir, _| std::fs::remove_dir_all(dir.join("sys/kernel/mm/ksm")).unwrap());
    assert_eq!(without, [("ksm", Severity::Blocker)]);
    let hidden = found(|_, roots| set_frame(&roots.proc, 0));
    assert_eq!(hidden, [("page-monitor", Warning)]);
}

#[test]
fn khugepaged_that_fills_merged_zeros_is_found() {
    let huge_pages = "sys/kernel/mm/transparent_hugepage";
    let of = |mode: &str| {
        found(|dir, _| {
            write(&dir.join(huge_pages).join("enabled"), mode);
            write(&dir.join(huge_pages).join("khugepaged/max_ptes_none"), "511\n");
        })
    };
    assert!(of("[always] madvise never").contains(&("khugepaged", Severity::Warning)));
    assert_eq!(of("always madvise [never]"), []);
}

#[test]
fn other_page_sizes_are_a_blocker() {
    let large = found(|_, roots| {
        let auxv: Vec<u8> = [6_u64, 65536, 0, 0].into_iter().flat_map(u64::to_ne_bytes).collect();
        std::fs::write(roots.proc.join("self/auxv"), auxv).unwrap();
    });
    assert_eq!(large, [("page-size", Severity::Blocker)]);
}

#[test]
fn other_programs_that_use_ksm_are_found() {
    let user = "ksm_rmap_items 1024\nksm_merging_pages 512\nksm_merge_any: no\n";
    let marked_by_itself = "ksm_rmap_items 1024\nksm_merging_pages 512\nksm_merge_any: yes\n";
    let add = |roots: &MachinePaths, name: &str, ksm_stat: &str| {
        std::fs::create_dir(roots.proc.join("77")).unwrap();
        write(&roots.proc.join("77/stat"), &format!("77 ({name}) S 1 0 0 0 -1 0 0 0 0 0 3 4 0 0 25 5 1 0 9 0 0\n"));
        write(&roots.proc.join("77/ksm_stat"), ksm_stat);
        let status = "Tgid:\t77\nTracerPid:\t0\nUid:\t0\t0\t0\t0\nGid:\t0\t0\t0\t0\nCapPrm:\t0\n";
        write(&roots.proc.join("77/status"), status);
    };
    let programs = |name: &str, ksm_stat: &str| found(|_, roots| add(roots, name, ksm_stat));
    assert_eq!(programs("ksmtuned", ""), [("programs", Severity::Blocker)]);
    assert_eq!(programs("virt-handler", ""), [("programs", Severity::Note)]);
    assert_eq!(programs("cache", ""), []);
    for ksm_stat in [user, marked_by_itself] {
        assert_eq!(programs("cache", ksm_stat), [("programs", Severity::Note)]);
    }
    // While pagefold is running, we report only programs that mark themselves, or that may (Linux 6.12 doesn't tell).
    let unknown = "ksm_rmap_items 1024\nksm_merging_pages 512\n";
    for (ksm_stat, severity) in [(user, Severity::Ok), (marked_by_itself, Severity::Note), (unknown, Severity::Note)] {
        let dir = tempfile::tempdir().unwrap();
        let roots = healthy(dir.path());
        let _held = Lock::try_take(&roots.lock).unwrap();
        add(&roots, "cache", ksm_stat);
        let finding = examine(&roots).into_iter().find(|finding| finding.id == "programs").unwrap();
        assert_eq!(finding.severity, severity, "{}", finding.what);
    }
}

#[test]
fn a_running_ksmd_is_ok_if_pagefold_is_running() {
    let mut held = None;
    let running = found(|dir, roots| {
        held = Some(Lock::try_take(&roots.lock).unwrap());
        write(&dir.join("sys/kernel/mm/ksm/run"), "1");
        write(&dir.join("sys/kernel/mm/ksm/pages_sharing"), "9");
    });
    assert_eq!(running, [("lock", Severity::Blocker)], "a second one cannot run");
}

#[test]
fn knobs_of_a_pagefold_with_a_run_directory_of_its_own_are_found() {
    let knob = |dir: &Path, name: &str, value: &str| write(&dir.join("sys/kernel/mm/ksm").join(name), value);
    let left = found(|dir, _| {
        knob(dir, "sleep_millisecs", "2147483649");
        knob(dir, "use_zero_pages", "1");
    });
    assert_eq!(left, [("state", Severity::Warning)]);
    let running = found(|dir, _| {
        knob(dir, "run", "1");
        knob(dir, "pages_to_scan", "4294967295");
    });
    assert_eq!(running, [("run", Severity::Blocker), ("state", Severity::Warning)]);
    // The administrator may choose this setting, so it's no finding.
    assert_eq!(found(|dir, _| knob(dir, "sleep_millisecs", "200")), []);
}

#[test]
fn state_left_by_a_crash_or_deferred_is_found() {
    let run = Cell::new(0);
    let left = |boot: &str, holder: Option<Holder>| {
        found(|_, roots| {
            let gone = Holder { pid: 4, start_time_ticks: 4 };
            let mut state = State::new(boot.to_owned(), gone, BTreeMap::from([(Knob::Run, 0)]));
            state.note(Knob::Run, 0, 1);
            state.holder = holder;
            state.save(&roots.state).unwrap();
            write(&roots.sys.join("kernel/mm/ksm/run"), &run.get().to_string());
        })
    };
    let gone = Some(Holder { pid: 4, start_time_ticks: 4 });
    assert_eq!(left("boot", gone), [("state", Severity::Warning)]);
    assert_eq!(left("boot", None), [("state", Severity::Note)]);
    assert_eq!(left("another", gone), []);
    // If ksmd runs, the killed run has left it running, and the next run stops it. After a reboot somebody else must
    // have started it.
    run.set(1);
    assert_eq!(left("boot", gone), [("state", Severity::Warning)]);
    assert_eq!(left("another", gone), [("run", Severity::Blocker)]);
}

#[test]
fn what_merges_on_request_is_found() {
    // Without the device the machine is healthy. With a file in its place that isn't the device, there's a finding.
    assert_eq!(found(|_, roots| write(&roots.dev.join("ksm"), "")), [("request", Severity::Note)]);
    let module = |name: &'static str| {
        found(move |_, roots| {
            let at = roots.modules.join("6.12.9-amd64/updates/dkms");
            std::fs::create_dir_all(&at).unwrap();
            write(&at.join(name), "");
        })
    };
    assert_eq!(module("ksm_request.ko.xz"), [("request", Severity::Note)]);
    assert_eq!(module("ksm_request.ko"), [("request", Severity::Note)]);
    assert_eq!(module("another.ko"), []);
}

#[test]
fn nobody_who_cannot_see_a_running_pagefold_is_advised_to_stop_ksmd() {
    let dir = tempfile::tempdir().unwrap();
    let mut facts = MachineFacts::gather(&healthy(dir.path()));
    facts.lock_holder = Fact::Denied;
    if let Fact::Is((knobs, _)) = &mut facts.ksm {
        knobs.run = 1;
    }
    let finding = judge(&facts).into_iter().find(|finding| finding.id == "run").unwrap();
    assert!(finding.severity == Severity::Blocker && finding.todo.contains("run as root"), "{finding:?}");
}

#[test]
fn the_finding_about_requests_names_what_merges() {
    use Severity::{Note, Ok};
    let dir = tempfile::tempdir().unwrap();
    let mut facts = MachineFacts::gather(&healthy(dir.path()));
    let mut says = |request, spoil: fn(&mut Knobs)| {
        facts.request = request;
        if let Fact::Is((knobs, _)) = &mut facts.ksm {
            knobs.run = 0;
            spoil(knobs);
        }
        let finding = judge(&facts).into_iter().find(|finding| finding.id == "request").unwrap();
        (finding.severity, finding.what)
    };
    for (request, spoil, severity, words) in [
        (Fact::Is(Carrier::Series), (|_| {}) as fn(&mut Knobs), Ok, "by this kernel"),
        (Fact::Is(Carrier::Series), |knobs| knobs.run = 2, Note, "run is 2"),
        (Fact::Is(Carrier::Module), |_| {}, Ok, "by the module"),
        (Fact::Absent, |_| {}, Ok, "pagefold uses ksmd"),
        (Fact::Denied, |_| {}, Note, "cannot be opened"),
    ] {
        let said = says(request, spoil);
        assert!(said.0 == severity && said.1.contains(words), "{said:?}");
    }
}

//! Tenants as processes: start, commands, damage, end.

use pagefold_engine::units::Pages;
use pagefold_lab::activity::{Activity, counters};
use pagefold_lab::tenant::{Segment, Tenant, TenantSpec, Verdict};
use pagefold_procmem::maps::read_smaps;
use pagefold_procmem::process::Process;
use pagefold_report::results::NAMES;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const PROGRAM: &str = env!("CARGO_BIN_EXE_pagefold-lab");

fn everything() -> TenantSpec {
    TenantSpec::new([
        Segment::Same { pages: 300, seed: 1 },
        Segment::Random { pages: 301, seed: 2 },
        Segment::Zero { pages: 302 },
        Segment::Shared { pages: 303, seed: 3 },
        Segment::Pairs { pages: 304, seed: 4 },
        Segment::Tails { pages: 305, seed: 5 },
    ])
}

#[test]
fn a_tenant_finds_its_memory_intact_until_it_is_damaged() {
    let mut tenant = Tenant::start(Path::new(PROGRAM), &everything()).unwrap();
    assert_eq!(tenant.verify().unwrap(), Verdict::Intact);
    tenant.touch(Pages(1000)).unwrap();
    tenant.break_copies().unwrap();
    assert_eq!(tenant.verify().unwrap(), Verdict::Intact);
    tenant.damage().unwrap();
    assert_eq!(tenant.verify().unwrap(), Verdict::Damaged(Pages(1)));
}

#[test]
fn a_tenant_holds_the_specified_memory_and_ends_when_dropped() {
    let spec = everything();
    let tenant = Tenant::start(Path::new(PROGRAM), &spec).unwrap();
    let process = Process::open(tenant.pid()).unwrap();
    let status = String::from_utf8(process.read_file("status").unwrap()).unwrap();
    let kib = status.lines().find_map(|line| line.strip_prefix("RssAnon:")?.trim().strip_suffix(" kB")).unwrap();
    let pages = kib.parse::<u64>().unwrap() / 4;
    assert!((spec.pages().0..spec.pages().0 + 500).contains(&pages), "{pages}");
    drop(tenant);
    assert!(!process.is_alive());
}

#[test]
fn a_tenant_asks_for_huge_pages_and_reads_in_each_segment() {
    let spec = TenantSpec::new([Segment::Random { pages: 1024, seed: 1 }, Segment::Shared { pages: 1024, seed: 2 }]);
    for (spec, asked) in [(spec.clone(), false), (spec.with_huge_pages(), true)] {
        let mut tenant = Tenant::start(Path::new(PROGRAM), &spec).unwrap();
        let mappings = read_smaps(&Process::open(tenant.pid()).unwrap()).unwrap();
        assert_eq!(mappings.iter().any(|mapping| mapping.flags.has(*b"hg")), asked);
        let speeds = tenant.chase(Duration::from_millis(10)).unwrap();
        assert!(speeds.len() == 2 && speeds.iter().all(|ns| (0.1..1e6).contains(ns)), "{speeds:?}");
        assert_eq!(tenant.verify().unwrap(), Verdict::Intact);
    }
}

#[test]
fn a_tenant_ends_with_its_standard_input() {
    let mut child = Command::new(PROGRAM)
        .args(["tenant", "--spec", r#"{"segments":[{"zero":{"pages":4}}]}"#])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    drop(child.stdin.take());
    assert!(child.wait().unwrap().success());
}

#[test]
fn a_breaker_writes_on_its_schedule_while_it_answers() {
    let spec = Activity::Breaker { every_us: 2000 }.of_tenant([Segment::Same { pages: 50, seed: 1 }]);
    let mut tenant = Tenant::start(Path::new(PROGRAM), &spec).unwrap();
    assert_eq!(counters(&mut tenant).unwrap().pages_written, 0);
    tenant.begin().unwrap();
    let end = Instant::now() + Duration::from_secs(20);
    while counters(&mut tenant).unwrap().pages_written < 100 && Instant::now() < end {
        assert_eq!(tenant.verify().unwrap(), Verdict::Intact);
        std::thread::sleep(Duration::from_millis(20));
    }
    let counters = counters(&mut tenant).unwrap();
    assert!(counters.pages_written >= 100, "{counters:?}");
    // Never ahead of schedule: the first page is due at once, each further page 2 ms later.
    assert!((counters.pages_written - 1) as f64 * 0.002 <= counters.seconds, "{counters:?}");
    tenant.damage().unwrap();
    // After one pass the first page has been written again.
    while tenant.verify().unwrap() != Verdict::Intact {
        assert!(Instant::now() < end);
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn short_lived_memory_is_mapped_and_unmapped() {
    let activity = Activity::ShortLived { pages: 500, seed: 1, life_us: 5000, mergeable: false };
    let mut tenant = Tenant::start(Path::new(PROGRAM), &activity.of_tenant([])).unwrap();
    tenant.begin().unwrap();
    let end = Instant::now() + Duration::from_secs(20);
    while counters(&mut tenant).unwrap().lives.len() < 3 && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(20));
    }
    let lives = counters(&mut tenant).unwrap().lives;
    assert!(lives.len() >= 3, "{lives:?}");
    assert!(lives.iter().all(|life| life.merged_pages == 0 && life.seconds >= 0.005), "{lives:?}");
    assert_eq!(tenant.verify().unwrap(), Verdict::Intact);
}

#[test]
fn a_tenant_without_activity_cannot_begin() {
    let mut tenant = Tenant::start(Path::new(PROGRAM), &TenantSpec::new([Segment::Zero { pages: 1 }])).unwrap();
    assert!(tenant.begin().unwrap_err().to_string().contains("nothing to begin"));
}

#[test]
fn a_tenant_can_be_started_by_another_command() {
    let spec = TenantSpec::new([Segment::Zero { pages: 1 }]);
    let nice = |pid: i32| Process::open(pid).unwrap().stat().unwrap().nice;
    let mut tenant = Tenant::start_by(&["nice", "-n", "3"], Path::new(PROGRAM), &spec).unwrap();
    let own = nice(i32::try_from(std::process::id()).unwrap());
    assert_eq!(nice(tenant.pid()), (own + 3).min(19));
    assert_eq!(tenant.verify().unwrap(), Verdict::Intact);
    let error = Tenant::start_by(&["/nonexistent/command"], Path::new(PROGRAM), &spec).unwrap_err();
    assert!(format!("{error:#}").contains("/nonexistent/command"), "{error:#}");
}

#[test]
fn a_tenant_that_cannot_start_is_reported() {
    assert!(Tenant::start(Path::new("/nonexistent/program"), &everything()).is_err());
    // A program that runs but isn't a tenant.
    let error = Tenant::start(Path::new("/bin/true"), &everything()).unwrap_err();
    assert!(error.to_string().contains("ended"), "{error}");
}

#[test]
fn the_list_names_every_experiment() {
    let output = Command::new(PROGRAM).args(["bench", "--list"]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success());
    for name in NAMES {
        assert!(text.lines().any(|line| line.starts_with(name)), "{text}");
    }
    let unknown = Command::new(PROGRAM).args(["bench", "no-such"]).output().unwrap();
    assert_eq!(unknown.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&unknown.stderr).contains("static-mix"));
}

#[test]
fn a_guest_needs_a_kernel_and_has_no_output_directory() {
    for (arguments, code, line) in [
        (&["--in-guest", "/no/such"][..], 1, "/no/such is not a file"),
        (&["--in-guest", "/bin/sh", "--module", "/no/such"], 1, "/no/such is not a file"),
        (&["--module", "/bin/sh"], 2, "--in-guest"),
        (&["--in-guest", "/bin/sh", "--output", "/tmp"], 2, "cannot be used with"),
    ] {
        let output = Command::new(PROGRAM).args(["bench", "static-mix"]).args(arguments).output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{errors}");
        assert!(errors.contains(line), "{errors}");
    }
}

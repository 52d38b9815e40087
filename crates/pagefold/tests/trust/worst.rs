//! Some programs do their worst to stall pagefold, or to make it use much memory. Even so others are merged, requests
//! are answered, and the run ends in an orderly way.

use super::*;
use pagefold_testkit::injection::Victim;

/// The numbers of programs that keep their memory map locked, and of programs in an exec that doesn't end.
const LOCKED: usize = 20;
const IN_EXEC: usize = 2;
/// The most memory that the daemon and its injector may use together, KiB: beside one program, and beside a crowd.
const MOST_KIB: u64 = 32 << 10;
const MOST_BESIDE_CROWD_KIB: u64 = 64 << 10;
/// Programs of one user that do their worst together.
const CROWD: usize = 100;
const USER: &str = "4321";

/// Programs of these kinds in a cgroup. `None` if this machine can't have them. Reports why.
fn victims(kinds: &[&str], group: &Cgroup) -> Option<Vec<Victim>> {
    victims_of(&[], kinds, group)
}

/// Like [`victims`], but run by the user in `options`.
fn victims_of(options: &[&str], kinds: &[&str], group: &Cgroup) -> Option<Vec<Victim>> {
    let start = |kind: &&str| {
        Victim::try_start(&[&["stalling", kind], options].concat()).inspect(|victim| group.add(victim.pid()))
    };
    let victims: Vec<Victim> = kinds.iter().map(start).collect::<Result<_, _>>().map_err(skip).ok()?;
    let waits = |pid: i32| tids(pid).iter().any(|tid| state(*tid) == b'D');
    for (victim, _) in victims.iter().zip(kinds).filter(|(_, kind)| **kind == "locked") {
        wait_until("a thread waits for the lock", || waits(victim.pid()));
    }
    Some(victims)
}

#[test]
fn programs_that_stall_delay_no_other_one_and_no_request() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let program = victim_binary("holder");
    let group = Cgroup::create("unified").expect("cgroup version 2");
    let kinds = [["locked"; LOCKED].as_slice(), &["exec"; IN_EXEC]].concat();
    let Some(mut stalling) = victims(&kinds, &group) else { return };
    let mut others = [holder(&program), holder(&program)];
    let own: Vec<i32> = others.iter().map(Holder::pid).collect();
    let pids: Vec<i32> = stalling.iter().map(Victim::pid).chain(own.iter().copied()).collect();
    let began = Instant::now();
    let daemon = Daemon::on(&pids, &["--governor", "full"]).answering();
    let answering = began.elapsed();
    println!("answers after {:.1} s", answering.as_secs_f64());
    assert!(answering < Duration::from_secs(20), "{answering:?}");
    let mut merged = None;
    let (mut answers, mut threads) = (Vec::new(), 0);
    while merged.is_none() || began.elapsed() < Duration::from_secs(20) {
        let asked = Instant::now();
        assert!(pagefold(&["status"]).status.success());
        answers.push(asked.elapsed());
        threads = threads.max(tids(daemon.pid()).len());
        if merged.is_none() && are_merged(&own, MERGED) {
            merged = Some(began.elapsed());
        }
        assert!(began.elapsed() < Duration::from_secs(60), "the others are not merged");
        std::thread::sleep(Duration::from_millis(100));
    }
    answers.sort_unstable();
    let at = |percent: usize| answers[(answers.len() - 1) * percent / 100];
    println!(
        "the others were merged after {:.1} s; {} answers: median {:?}, 90 % within {:?}, all within {:?}; {threads} threads",
        merged.unwrap().as_secs_f64(),
        answers.len(),
        at(50),
        at(90),
        at(100)
    );
    assert!(at(90) < Duration::from_secs(1) && at(100) < Duration::from_secs(3), "{answers:?}");
    // Stalled programs of one cgroup may block at most 8 of the daemon's threads, besides some 8 that it always has.
    assert!(threads <= 8 + 8, "{threads} threads");
    let shown = String::from_utf8(pagefold(&["status"]).stdout).unwrap();
    assert_has(&shown, &["keeps its memory map locked"]);
    let signalled = Instant::now();
    daemon.stop();
    println!("ended after {:.1} s", signalled.elapsed().as_secs_f64());
    assert!(signalled.elapsed() < Duration::from_secs(30));
    for victim in stalling.iter_mut().skip(LOCKED) {
        victim.send();
        victim.expect_ok("exec");
    }
    assert!(others.iter_mut().all(Holder::is_intact));
    ksm.give_back(&own);
}

/// The sum of a field of the status of processes, KiB.
fn sum_kib(pids: &[i32], field: &str) -> u64 {
    pids.iter().map(|pid| kib(&format!("/proc/{pid}/status"), field)).sum()
}

#[test]
fn no_program_makes_pagefold_large() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let program = victim_binary("holder");
    let group = Cgroup::create("unified").expect("cgroup version 2");
    let mut others = [holder(&program), holder(&program)];
    let own: Vec<i32> = others.iter().map(Holder::pid).collect();
    // Measures the memory of the daemon and the injector while they work on these processes and the others.
    let measure = |victims: &[Victim]| {
        let pids: Vec<i32> = own.iter().copied().chain(victims.iter().map(Victim::pid)).collect();
        let daemon = Daemon::on(&pids, &["--governor", "full"]).answering();
        let began = Instant::now();
        let processes = [vec![daemon.pid()], [daemon.children(), daemon.injectors()].concat()];
        let (mut own_most, mut status) = ([0; 2], String::new());
        for pass in 0.. {
            if pass % 40 == 0 {
                // The answer lists every region.
                status = String::from_utf8(pagefold(&["status", "--json"]).stdout).unwrap();
            }
            own_most = [0, 1].map(|at| own_most[at].max(sum_kib(&processes[at], "RssAnon")));
            let is_merged = are_merged(&own, MERGED);
            if is_merged && began.elapsed() > Duration::from_secs(20) {
                break;
            }
            assert!(began.elapsed() < Duration::from_secs(90), "the others are not merged");
            std::thread::sleep(Duration::from_millis(20));
        }
        let peaks = [0, 1].map(|at| [own_most[at], sum_kib(&processes[at], "VmHWM")]);
        daemon.stop();
        unmerge(&pids);
        (peaks, status)
    };
    let (alone, _) = measure(&[]);
    println!("daemon and injector, own memory and peak: {alone:?} KiB");
    for (kind, number, most) in [
        ("mappings", 1, MOST_KIB),
        ("regions", 1, MOST_KIB),
        ("churn", 1, MOST_KIB),
        ("regions", CROWD, MOST_BESIDE_CROWD_KIB),
    ] {
        let Some(mut victims) = victims_of(&[USER], &vec![kind; number], &group) else { return };
        let (beside, status) = measure(&victims);
        println!("beside {number} of {kind}: {beside:?} KiB");
        let [[daemon, _], [injector, _]] = beside;
        assert!(daemon + injector <= most, "{number} of {kind}: {daemon} and {injector} KiB");
        assert_eq!(status.contains("has more than 16384 mappings"), kind == "mappings", "{status}");
        for victim in &mut victims {
            victim.send();
            victim.expect_ok(kind);
        }
    }
    assert!(others.iter_mut().all(Holder::is_intact));
    ksm.assert_restored();
}

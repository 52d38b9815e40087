//! Programs that do their worst to stall pagefold: others are merged, requests are answered, and the
//! run ends in an orderly way.

use super::*;
use pagefold_testkit::injection::Victim;

/// Programs that stall: those that keep their memory map locked, and those in an exec that does not end.
const LOCKED: usize = 20;
const IN_EXEC: usize = 2;

/// Victims of these kinds in a cgroup. `None`, with the reason reported, where they cannot do what they should.
fn victims(kinds: &[&str], group: &Cgroup) -> Option<Vec<Victim>> {
    let start = |kind: &&str| Victim::try_start(&["stalling", kind]).inspect(|victim| group.add(victim.pid()));
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
    let daemon = Daemon::on(&pids, &["--governor", "full"]).answering();
    let (began, mut merged) = (Instant::now(), None);
    let (mut answers, mut threads) = (Vec::new(), 0);
    while merged.is_none() || began.elapsed() < Duration::from_secs(20) {
        let asked = Instant::now();
        assert!(pagefold(&["status"]).status.success());
        answers.push(asked.elapsed());
        threads = threads.max(tids(daemon.pid()).len());
        if merged.is_none() && own.iter().all(|&pid| marks(pid).merged >= 7 * MIB) {
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
    // Of one cgroup no more than 8 leave a thread behind.
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
    unmerge(&own);
    ksm.assert_restored();
}

//! Forty programs of one user stall whoever stops them. Beside them, two programs of root are marked and unmarked as if
//! they were alone.

use super::*;
use pagefold_testkit::injection::Victim;

const USER: &str = "4321";
const PROGRAMS: usize = 40;
/// The bounds that docs/safety.md states, and the time that our own start takes.
const MARKED_WITHIN: Duration = Duration::from_secs(3);
const UNMARKED_WITHIN: Duration = Duration::from_secs(5);

/// The kinds of victims: some hold their memory map's lock for reading, and others get no CPU time.
const LOCKED_OR_LATE: &[&str] = &["reading", "late"];
/// These don't stop during a long system call, not even while the call waits.
const CALLING: &[&str] = &["calling"];

struct Hostile {
    victims: Vec<Victim>,
    throttled: Cgroup,
    /// The cgroup of all victims, like that of a user's session.
    own: Cgroup,
}

impl Hostile {
    /// `None` if this machine can't have such victims. Reports why.
    fn start(kinds: &[&str], options: &[&str]) -> Option<Self> {
        let Some(throttled) = Cgroup::create("cpu") else {
            skip_unsupported("no control group limits CPU time");
            return None;
        };
        let own = Cgroup::create("unified").expect("cgroup version 2");
        if kinds == CALLING {
            // With little weight they wait longer for a CPU, and take little of it from others.
            throttled.set("cpu.shares", "2");
        } else {
            // All threads in this cgroup together get a thousandth of a core.
            throttled.set("cpu.cfs_period_us", "1000000");
            throttled.set("cpu.cfs_quota_us", "1000");
        }
        let mut hostile = Self { victims: Vec::new(), throttled, own };
        for kind in kinds {
            for _ in 0..PROGRAMS / kinds.len() {
                let victim = Victim::try_start(&[&["stalling", kind], options].concat()).map_err(skip).ok()?;
                hostile.own.add(victim.pid());
                if *kind != "reading" {
                    hostile.throttled.add(victim.pid());
                }
                hostile.victims.push(victim);
            }
        }
        Some(hostile)
    }

    fn pids(&self) -> Vec<i32> {
        self.victims.iter().map(Victim::pid).collect()
    }
}

impl Drop for Hostile {
    fn drop(&mut self) {
        // Let the victims end, all at the same time.
        for victim in &self.victims {
            victim.kill(libc::SIGKILL);
        }
        self.throttled.set("cpu.cfs_quota_us", "-1");
        self.throttled.set("cpu.shares", "1024");
    }
}

#[test]
fn one_users_programs_delay_no_mark_of_others_and_no_secret() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let program = victim_binary("holder");
    for kinds in [&[], LOCKED_OR_LATE, CALLING] {
        let Some(hostile) = Hostile::start(kinds, &[USER]) else { return };
        let mut pids = hostile.pids();
        let mut twins = [holder(&program), holder(&program)];
        let own: Vec<i32> = twins.iter().map(Holder::pid).collect();
        pids.extend(&own);
        let config = ConfigFile::new("");
        let daemon = Daemon::on(&pids, &["--config", config.name(), "--governor", "full"]).answering();
        let began = Instant::now();
        let mut has_stalled = kinds.is_empty();
        while own.iter().any(|&pid| marks(pid).marked < MERGED) && began.elapsed() < Duration::from_secs(60) {
            has_stalled = has_stalled || hostile.victims.iter().any(Victim::is_traced);
            std::thread::sleep(Duration::from_millis(10));
        }
        let marked = began.elapsed();
        wait_until_merged(&own, MERGED);
        if kinds == LOCKED_OR_LATE {
            // All the others have to be unmarked at the same moment.
            daemon.reload(&config, "[deny]\nalso = [\"victim\"]\n");
        }
        assert_eq!(twins[0].ask(&format!("lock 0 {PAGES}")), 0);
        let began = Instant::now();
        while marks(own[0]) != Marks::default() && began.elapsed() < Duration::from_secs(60) {
            std::thread::sleep(Duration::from_millis(10));
        }
        let unmarked = began.elapsed();
        println!("beside {kinds:?}: twins marked after {marked:?}, a secret unmarked after {unmarked:?}");
        assert!(twins.iter_mut().all(Holder::is_intact));
        drop(hostile);
        ksm.end(daemon, &own);
        assert!(has_stalled, "{kinds:?} delayed no stop");
        assert!(marked < MARKED_WITHIN && unmarked < UNMARKED_WITHIN, "{marked:?}, {unmarked:?}");
    }
}

#[test]
fn one_users_programs_delay_no_unmerging_of_others() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let program = victim_binary("holder");
    let Some(hostile) = Hostile::start(LOCKED_OR_LATE, &[USER, "marked"]) else { return };
    let mut twins = [holder(&program), holder(&program)];
    let own: Vec<i32> = twins.iter().map(Holder::pid).collect();
    let daemon = Daemon::on(&own, &["--governor", "full"]);
    wait_until_merged(&own, MERGED);
    daemon.stop();
    let all = [hostile.pids(), own.clone()].concat();
    let began = Instant::now();
    let command = Daemon::start(&with_pids(&["unmerge", "--json"], &all, &[]));
    while own.iter().any(|&pid| marks(pid) != Marks::default()) && began.elapsed() < Duration::from_secs(60) {
        std::thread::sleep(Duration::from_millis(10));
    }
    let unmarked = began.elapsed();
    let ended = command.end();
    println!("unmarked after {unmarked:?}, the command ended after {:?}", began.elapsed());
    assert_eq!(ended.errors.lines().count(), hostile.victims.len(), "{ended:?}");
    assert!(twins.iter_mut().all(Holder::is_intact));
    drop(hostile);
    ksm.give_back(&own);
    assert!(unmarked < UNMARKED_WITHIN, "{unmarked:?}");
}

/// Programs whose threads get a core four times a second, each in a cgroup of its own: they stop late, but in time.
#[test]
fn programs_that_stop_late_delay_no_answer() {
    const PERIOD: &str = "230000";
    let Some(ksm) = KsmAtRest::take() else { return };
    let mut groups = Vec::new();
    let mut victims = Vec::new();
    for _ in 0..12 {
        let Some(group) = Cgroup::create("cpu") else { return skip_unsupported("no control group limits CPU time") };
        let Ok(victim) = Victim::try_start(&["stalling", "late", "0"]).map_err(skip) else { return };
        group.set("cpu.cfs_period_us", PERIOD);
        group.set("cpu.cfs_quota_us", "2000");
        group.add(victim.pid());
        groups.push(group);
        victims.push(victim);
    }
    let pids: Vec<i32> = victims.iter().map(Victim::pid).collect();
    let daemon = Daemon::on(&pids, &["--governor", "full"]).answering();
    let mut longest = Duration::ZERO;
    let mut marked = 0;
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(20) || (marked == 0 && began.elapsed() < Duration::from_secs(60)) {
        let asked = Instant::now();
        status();
        longest = longest.max(asked.elapsed());
        std::thread::sleep(Duration::from_millis(20));
        marked = pids.iter().filter(|&&pid| marks(pid) != Marks::default()).count();
    }
    println!("{marked} of {} are marked; the longest answer took {longest:?}", pids.len());
    for group in &groups {
        group.set("cpu.cfs_quota_us", "-1");
    }
    ksm.end(daemon, &pids);
    assert!(marked > 0 && longest < Duration::from_secs(1), "{marked}, {longest:?}");
}

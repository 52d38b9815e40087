//! A merged page stays charged to the cgroup whose copy was kept. Here, on the real kernel, programs with equal memory
//! each have a cgroup limit that would suffice without pagefold. They write to all of that memory in any order, and
//! none of them may be killed.

use pagefold_engine::random::Random;
use pagefold_testkit::limit::Limited;
use pagefold_testkit::*;
use std::time::{Duration, Instant};

/// The number of rounds, and the variable that changes it.
const ROUNDS: u64 = 3;
const ROUNDS_VARIABLE: &str = "PAGEFOLD_CHARGE_ROUNDS";
/// A program's other memory, MiB.
const BESIDES: u64 = 4;
/// If nothing was merged for this time, we assume that nothing more will be.
const SETTLED: Duration = Duration::from_secs(4);
const SETTLED_AT_LATEST: Duration = Duration::from_secs(90);
/// Each round must save at least this much, in percent of what an oracle could save that chooses for each page whose
/// copy stays. ksmd keeps the copy of the program marked later, so it never uses the first program's headroom. With
/// three programs it can save two thirds at most, less our reserve.
const SAVED_PERCENT: u64 = 60;
const SAVED_PERCENT_KSMD: u64 = 50;
/// The first round is a setup from public reports: this many containers, each with this much memory and limit, MiB.
const REPORTED_COUNT: u64 = 3;
const REPORTED_MIB: u64 = 60;
const REPORTED_LIMIT_MIB: u64 = REPORTED_MIB * 140 / 100;

/// What happens to the daemon before the programs write.
#[derive(Clone, Copy, Debug)]
enum Fate {
    Alive,
    Stopped,
    Killed,
}

/// A program in a cgroup of its own.
struct Contained {
    holder: Holder,
    cgroup: Limited,
}

impl Contained {
    fn start(mib: u64, limit_mib: u64) -> Option<Self> {
        let cgroup = Limited::make()?;
        cgroup.limit(limit_mib * MIB);
        Some(Self::inside(cgroup, mib))
    }

    fn inside(cgroup: Limited, mib: u64) -> Self {
        let holder = Holder::start(mib * PAGES_PER_MIB);
        cgroup.add(holder.pid());
        let mut contained = Self { holder, cgroup };
        contained.write(1);
        contained
    }

    /// Writes to all of the program's pages. Programs that write with the same `number` get the same contents.
    fn write(&mut self, number: u64) {
        self.holder.write(0, self.holder.pages, (0xc4a6_e000 + number) << 28);
    }

    /// Whether `explain` says that no more of the program's memory is merged, and names the limit.
    fn is_explained(&self) -> bool {
        let text = succeed(&["explain", &self.holder.pid().to_string()]).replace('\n', " ");
        let cgroup = self.cgroup.path().file_name().unwrap().to_str().unwrap();
        ["charge", "headroom", cgroup].iter().all(|word| text.contains(word))
    }
}

fn charged(programs: &[Contained]) -> u64 {
    programs.iter().map(|program| program.cgroup.usage()).sum()
}

/// Waits until nothing is merged any more.
fn settle(programs: &[Contained]) {
    let began = Instant::now();
    let (mut last, mut since) = (charged(programs), Instant::now());
    while since.elapsed() < SETTLED {
        assert!(began.elapsed() < SETTLED_AT_LATEST, "it goes on");
        std::thread::sleep(Duration::from_millis(100));
        let now = charged(programs);
        if now.abs_diff(last) > MIB / 4 || status()["busy"] == true {
            (last, since) = (now, Instant::now());
        }
    }
}

/// Plays a round. Returns how much is saved, in percent of what an oracle could save.
fn round(ksm: &KsmAtRest, number: u64, random: &mut Random) -> Option<u64> {
    let fate = match number % 4 {
        0 => Fate::Stopped,
        2 => Fate::Killed,
        _ => Fate::Alive,
    };
    let (mut count, mut mib) = (3 + random.below(2), 24 + random.below(25));
    let mut limit_mib = mib * (125 + random.below(51)) / 100 + BESIDES;
    if number == 0 {
        (count, mib, limit_mib) = (REPORTED_COUNT, REPORTED_MIB, REPORTED_LIMIT_MIB);
    }
    let mut programs = Vec::new();
    for _ in 0..count {
        programs.push(Contained::start(mib, limit_mib)?);
    }
    let before = charged(&programs);
    // Each kept copy takes a page of one program's headroom.
    let headroom: u64 = programs.iter().map(|program| limit_mib * MIB - program.cgroup.usage()).sum();
    let most = (count - 1) * headroom.min(mib * MIB);
    let daemon = daemon_on(&programs);
    settle(&programs);
    let bytes = before.saturating_sub(charged(&programs));
    let saved = bytes * 100 / most;
    println!(
        "round {number}: {count} of {mib} MiB below {limit_mib} MiB, {fate:?}: {saved} % of {} MiB saved",
        most / MIB
    );
    if bytes < (count - 1) * mib * MIB / 100 * 90 {
        assert!(programs.iter().any(Contained::is_explained), "nobody says why no more is merged");
    }
    let daemon = match fate {
        Fate::Alive => Some(daemon),
        Fate::Stopped => {
            daemon.signal(libc::SIGSTOP);
            Some(daemon)
        }
        Fate::Killed => {
            daemon.kill();
            None
        }
    };
    // The program whose cgroup is charged most writes first, or a random one.
    if number % 2 == 0 {
        programs.sort_by_key(|program| std::cmp::Reverse(program.cgroup.usage()));
    } else {
        for last in (1..programs.len()).rev() {
            programs.swap(last, usize::try_from(random.below(last as u64 + 1)).unwrap());
        }
    }
    for at in 0..programs.len() {
        programs[at].write(2);
        for program in &programs {
            assert_eq!(program.cgroup.kills(), 0, "round {number}: {} bytes in use", program.cgroup.usage());
        }
    }
    assert!(programs.iter_mut().all(|program| program.holder.is_intact()));
    if let Some(daemon) = daemon {
        daemon.signal(libc::SIGCONT);
        assert_eq!(daemon.terminate().code, Some(0));
    } else {
        succeed(&["doctor", "--fix"]);
    }
    give_back(ksm, &programs);
    Some(saved)
}

fn pids_of(programs: &[Contained]) -> Vec<i32> {
    programs.iter().map(|program| program.holder.pid()).collect()
}

fn daemon_on(programs: &[Contained]) -> Daemon {
    Daemon::on(&pids_of(programs), &["--governor", "full", "--mechanism", mechanism()]).answering()
}

fn give_back(ksm: &KsmAtRest, programs: &[Contained]) {
    for program in programs {
        program.cgroup.unlimited();
    }
    ksm.give_back(&pids_of(programs));
}

#[test]
fn nobody_is_killed_for_the_copies_that_its_cgroup_keeps_for_others() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let rounds = std::env::var(ROUNDS_VARIABLE).map_or(ROUNDS, |rounds| rounds.parse().unwrap());
    let mut random = Random::new(0x00c4_a6e0);
    for number in 0..rounds {
        let Some(saved) = round(&ksm, number, &mut random) else { return };
        let least = if is_on_request() { SAVED_PERCENT } else { SAVED_PERCENT_KSMD };
        assert!(saved >= least, "round {number}: {saved} %");
    }
}

/// Guests below a slice with a limit, as `machine.slice` is, beside a container with a limit of its own.
#[test]
fn guests_share_the_headroom_of_their_slice() {
    const EACH: u64 = 40;
    const SLICE: u64 = 2 * (EACH + BESIDES) * 5 / 4;
    const CONTAINER: u64 = EACH * 140 / 100 + BESIDES;
    let Some(ksm) = KsmAtRest::take() else { return };
    let Some(slice) = Limited::make() else { return };
    slice.limit(SLICE * MIB);
    let guest = |name: &str| Contained::inside(slice.below(name), EACH);
    let mut programs = vec![guest("guest-1.scope"), guest("guest-2.scope")];
    programs.extend(Contained::start(EACH, CONTAINER));
    let before = charged(&programs);
    let daemon = daemon_on(&programs);
    settle(&programs);
    let saved = before.saturating_sub(charged(&programs)) / MIB;
    println!("{saved} of {} MiB saved", 2 * EACH);
    // With ksmd, the container may end up mapping every page that stays charged to the slice.
    let least_percent = if is_on_request() { 90 } else { 20 };
    assert!(saved * 100 >= 2 * EACH * least_percent, "{saved} MiB");
    for first in [2, 0, 1] {
        programs[first].write(2);
        assert!(programs.iter().all(|program| program.cgroup.kills() == 0));
    }
    assert_eq!(slice.kills(), 0);
    assert!(programs.iter_mut().all(|program| program.holder.is_intact()));
    assert_eq!(daemon.terminate().code, Some(0));
    slice.unlimited();
    give_back(&ksm, &programs);
}

#[test]
fn others_get_copies_of_their_own_when_a_limit_is_lowered() {
    const EACH: u64 = 40;
    const LOWERED: u64 = (EACH * 4 / 3 + BESIDES) * MIB;
    let Some(ksm) = KsmAtRest::take() else { return };
    let mut programs = Vec::new();
    for _ in 0..3 {
        let Some(program) = Contained::start(EACH, EACH * 9 / 4 + BESIDES) else { return };
        programs.push(program);
    }
    let before = charged(&programs);
    let daemon = daemon_on(&programs);
    settle(&programs);
    let saved = before - charged(&programs);
    assert!(saved >= 2 * EACH * MIB / 100 * 95, "{saved}");
    // Lower the limits, so that there's headroom for only a third of each program's memory. Later, the program whose
    // cgroup is charged most writes first.
    programs.sort_by_key(|program| std::cmp::Reverse(program.cgroup.usage()));
    for program in &programs {
        program.cgroup.limit(LOWERED);
    }
    let has_copies = |program: &Contained| program.cgroup.usage() >= EACH / 2 * MIB;
    wait_until("others have copies of their own", || programs.iter().all(has_copies));
    settle(&programs);
    daemon.signal(libc::SIGSTOP);
    for at in 0..programs.len() {
        println!("in use: {:?} MiB", programs.iter().map(|program| program.cgroup.usage() / MIB).collect::<Vec<_>>());
        programs[at].write(2);
    }
    assert!(programs.iter().all(|program| program.cgroup.kills() == 0));
    assert!(programs.iter_mut().all(|program| program.holder.is_intact()));
    daemon.signal(libc::SIGCONT);
    assert_eq!(daemon.terminate().code, Some(0));
    give_back(&ksm, &programs);
}

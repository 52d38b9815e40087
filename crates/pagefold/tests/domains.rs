//! Trust domains on the real kernel: the page tables show that no two domains share a frame.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use pagefold_testkit::*;

/// The frames of a process's anonymous pages that other pages map, too.
fn shared_frames(pid: i32) -> BTreeSet<u64> {
    const PRESENT: u64 = 1 << 63;
    const FILE: u64 = 1 << 61;
    const EXCLUSIVE: u64 = 1 << 56;
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let pagemap = File::open(format!("/proc/{pid}/pagemap")).unwrap();
    let mut frames = BTreeSet::new();
    for line in maps.lines().filter(|line| line.contains(" rw-p ")) {
        let (start, end) = line.split_once(' ').unwrap().0.split_once('-').unwrap();
        let page = |address: &str| u64::from_str_radix(address, 16).unwrap() / 4096;
        let mut bytes = vec![0; usize::try_from((page(end) - page(start)) * 8).unwrap()];
        pagemap.read_exact_at(&mut bytes, page(start) * 8).unwrap();
        let entries = bytes.chunks_exact(8).map(|bytes| u64::from_le_bytes(bytes.try_into().unwrap()));
        let shared = entries.filter(|entry| entry & PRESENT != 0 && entry & (FILE | EXCLUSIVE) == 0);
        frames.extend(shared.map(|entry| entry & ((1 << 55) - 1)));
    }
    frames
}

fn frames_of(holders: &[Holder]) -> BTreeSet<u64> {
    holders.iter().flat_map(|holder| shared_frames(holder.pid())).collect()
}

/// Checks that no process of one group shares a frame with one of the other group.
#[track_caller]
fn assert_apart(some: &[i32], others: &[i32]) {
    let frames = |pids: &[i32]| pids.iter().flat_map(|&pid| shared_frames(pid)).collect::<BTreeSet<_>>();
    assert_eq!(frames(some).intersection(&frames(others)).count(), 0, "pages are shared");
}

/// The options of a run that merges by ksmd in the trust domains of this configuration.
fn options(config: &ConfigFile) -> [&str; 6] {
    ["--config", config.name(), "--governor", "full", "--mechanism", "ksmd"]
}

fn is_marked(pids: &[i32]) -> bool {
    pids.iter().any(|&pid| marks(pid) != Marks::default())
}

#[test]
fn only_the_memory_of_one_domain_is_merged() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let one = victim_binary("holder");
    let other = ProgramCopy::of(&one, "the-others");
    // All processes have the same 32 MiB, and the processes of each domain another 16 MiB in common.
    let start = |program: &Path, own: u64| {
        [(); 2].map(|()| {
            let mut holder = Holder::sharing(program, 32, 16, 50);
            holder.write(32 * PAGES_PER_MIB, 16 * PAGES_PER_MIB, own << 32);
            holder
        })
    };
    let (mut ones, mut others) = (start(&one, 0x800_d051), start(&other, 0x800_d052));
    let rule = "[[domains.rule]]\nname = \"others\"\nexe = \"the-others\"\n";
    let config = ConfigFile::new(rule);
    let options = options(&config);
    let (one_pids, other_pids) = (pids(&ones), pids(&others));
    let all = [one_pids.clone(), other_pids.clone()].concat();
    let daemon = Daemon::on(&all, &options).answering();
    // As long as no domain is named, ksmd merges root's.
    wait_until("it is merged", || saved_bytes() >= 47 * MIB);
    for _ in 0..5 {
        std::thread::sleep(Duration::from_secs(1));
        assert!(!is_marked(&other_pids), "the other domain is left alone");
    }
    let shown = status();
    let domain = |name: &str| row(&shown["domains"], "name", name).clone();
    assert_eq!((&domain("default")["left_alone"], &domain("default")["processes"]), (&false.into(), &2.into()));
    assert_eq!((&domain("others")["left_alone"], &domain("others")["processes"]), (&true.into(), &2.into()));
    let why = &row(&shown["processes"], "pid", other_pids[0])["left_alone"];
    assert_eq!(why, "in trust domain others; ksmd merges one domain, default ([domains] merge)");
    let left_out = row(&shown["left_out"], "reason", "other-domain");
    assert_eq!(left_out["processes"], 2);
    let text = succeed(&["status"]);
    let domains = "2 trust domains: ksmd merges default; 2 processes of other domains are left alone";
    assert_has(&text, &[domains, "could merge them"]);

    // We choose the other domain. It mustn't be marked until the first domain is all unmarked.
    daemon.reload(&config, &format!("[domains]\nmerge = \"others\"\n{rule}"));
    wait_until("the other domain is merged", || {
        // We check the domains in this order, so that we can't miss marks of both.
        assert!(!(is_marked(&other_pids) && is_marked(&one_pids)), "two domains are marked");
        saved_bytes() >= 47 * MIB && are_merged(&other_pids, 47 * MIB)
    });
    assert!(!is_marked(&one_pids));
    assert_apart(&one_pids, &other_pids);
    let text = succeed(&["explain", &one_pids[0].to_string()]);
    assert_has(&text, &["in trust domain default; ksmd merges one domain, others"]);
    daemon.stop();
    assert_intact(&mut ones);
    assert_intact(&mut others);
    ksm.give_back(&all);

    // Without the rule all four processes share frames.
    let daemon = Daemon::on(&all, &["--governor", "full", "--mechanism", "ksmd"]);
    wait_until("all are merged", || saved_bytes() >= (3 * 32 + 2 * 16 - 1) * MIB);
    assert!(frames_of(&ones).intersection(&frames_of(&others)).count() as u64 >= 31 * PAGES_PER_MIB);
    ksm.end(daemon, &all);
}

/// A process of two equal halves.
fn doubled(program: &Path, content: u64) -> Holder {
    let mut holder = Holder::start_as(program, DOUBLED);
    write_doubled(&mut holder, content);
    holder
}

/// Pages of a process with two equal halves.
const DOUBLED: u64 = 8 * PAGES_PER_MIB;

fn write_doubled(holder: &mut Holder, content: u64) {
    for first in [0, DOUBLED / 2] {
        holder.write(first, DOUBLED / 2, content);
    }
}

fn become_other(holder: &mut Holder) {
    assert_eq!(holder.ask("user 4321"), 0);
}

fn left_alone(status: &serde_json::Value, pid: i32) -> serde_json::Value {
    row(&status["processes"], "pid", pid)["left_alone"].clone()
}

/// One victim is traced, as by a debugger. The other one sleeps, so it can't say whether it's dumpable. Attackers write
/// the victims' contents.
#[test]
fn a_process_that_cannot_be_reached_keeps_its_marks_and_its_domain() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let config = ConfigFile::new("[domains]\nby = \"user\"\n");
    let mut victims = [0xd0a1_0000, 0xd0a2_0000].map(|content| doubled(&victim_binary("holder"), content));
    // Now only the process itself can say whether it's dumpable.
    victims[1].ask("group 77");
    let victim_pids = [victims[0].pid(), victims[1].pid()];
    let mut attackers = [Holder::start(DOUBLED), Holder::start(DOUBLED)];
    attackers.iter_mut().for_each(become_other);
    let attacker_pids = [attackers[0].pid(), attackers[1].pid()];
    let all = [victim_pids, attacker_pids].concat();
    let daemon = Daemon::on(&all, &options(&config));
    wait_until_merged(&victim_pids, 7 * MIB);
    let tracer = Tracer::of(victim_pids[0]);
    victims[1].ask("sleep");
    wait_until("they are left alone", || {
        let status = status();
        victim_pids.iter().all(|&pid| left_alone(&status, pid).is_string())
    });
    write_doubled(&mut attackers[0], 0xd0a1_0000);
    write_doubled(&mut attackers[1], 0xd0a2_0000);
    for _ in 0..15 {
        std::thread::sleep(Duration::from_secs(1));
        assert_apart(&victim_pids, &attacker_pids);
    }
    assert!(are_merged(&victim_pids, 7 * MIB));
    let shown = status();
    for pid in victim_pids {
        let marked = row(&shown["processes"], "pid", pid)["marked_bytes"].as_u64();
        assert!(marked >= Some(7 * MIB), "its marks are accounted for: {marked:?}");
    }
    drop(tracer);
    wait_until("one is not left alone any more", || left_alone(&status(), victim_pids[0]).is_null());
    for _ in 0..5 {
        std::thread::sleep(Duration::from_secs(1));
        assert_apart(&victim_pids, &attacker_pids);
    }
    assert!(victims[0].is_intact() && attackers.iter_mut().all(Holder::is_intact));
    daemon.stop();
    drop(victims);
    ksm.give_back(&attacker_pids);
}

/// A victim that can't be unmarked keeps everything else from being merged, even in a later run that finds its marks.
#[test]
fn another_domain_is_not_merged_while_memory_of_the_former_one_is_marked() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let merging = |domain: &str| format!("[domains]\nby = \"user\"\nmerge = \"{domain}\"\n");
    let config = ConfigFile::new(&merging("user:0"));
    let options = options(&config);
    let mut victim = doubled(&victim_binary("holder"), 0xd0a3_0000);
    let mut others = [Holder::start(DOUBLED), Holder::start(DOUBLED)];
    for other in &mut others {
        become_other(other);
        write_doubled(other, 0xd0a3_0000);
    }
    let (victim_pid, other_pids) = ([victim.pid()], [others[0].pid(), others[1].pid()]);
    let all = [&victim_pid[..], &other_pids].concat();
    let daemon = Daemon::on(&all, &options);
    wait_until_merged(&victim_pid, 7 * MIB);
    let tracer = Tracer::of(victim_pid[0]);
    let assert_waiting = || {
        for _ in 0..5 {
            std::thread::sleep(Duration::from_secs(1));
            assert!(!is_marked(&other_pids), "it is marked before the former domain is unmarked");
        }
        let status = status();
        let to_unmark = &row(&status["processes"], "pid", victim_pid[0])["to_unmark"];
        assert!(to_unmark["reason"].as_str().unwrap().contains("ksmd merges one domain, user:4321"), "{to_unmark}");
        assert!(is_marked(&victim_pid) && status["foreign_marks"] == true);
    };
    daemon.reload(&config, &merging("user:4321"));
    wait_until("it is to be unmarked", || !row(&status()["processes"], "pid", victim_pid[0])["to_unmark"].is_null());
    assert_waiting();
    daemon.stop();
    let daemon = Daemon::on(&all, &options).answering();
    wait_until("its marks are found", || !row(&status()["processes"], "pid", victim_pid[0])["to_unmark"].is_null());
    assert_waiting();
    drop(tracer);
    wait_until("the other domain is merged", || {
        assert!(!(is_marked(&other_pids) && is_marked(&victim_pid)), "two domains are marked");
        are_merged(&other_pids, 7 * MIB)
    });
    assert!(!is_marked(&victim_pid));
    assert_apart(&victim_pid, &other_pids);
    assert!(victim.is_intact() && others.iter_mut().all(Holder::is_intact));
    ksm.end(daemon, &all);
}

/// A fork has left the scope before we saw it.
#[test]
fn a_fork_out_of_scope_keeps_no_marks() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let [scope, elsewhere] = [(); 2].map(|()| Cgroup::create("unified").expect("cgroup version 2"));
    let mut parent = doubled(&victim_binary("holder"), 0xd0a6_0000);
    scope.add(parent.pid());
    let path = scope.path().to_str().unwrap();
    let daemon = Daemon::start(&["run", "--json", "--cgroup", path, "--governor", "full"]).answering();
    wait_until_merged(&[parent.pid()], 7 * MIB);
    daemon.signal(libc::SIGSTOP);
    let child = [parent.fork()];
    elsewhere.add(child[0]);
    daemon.signal(libc::SIGCONT);
    assert!(is_marked(&child));
    wait_until("the fork is unmarked", || !is_marked(&child));
    assert!(parent.is_intact() && is_marked(&[parent.pid()]));
    wait_until("it's forgotten", || status()["processes"].as_array().unwrap().len() == 1);
    ksm.end(daemon, &[parent.pid()]);
}

/// A user's programs try to get into the domain that is merged, by a program's name and by a cgroup's attribute.
#[test]
fn nobody_gets_into_the_merged_domain_by_itself() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let config = ConfigFile::new(
        "[domains]\nby = \"user\"\nmerge = \"caches\"\n[[domains.rule]]\nname = \"caches\"\nexe = \"pf-cache\"\n",
    );
    let plain = victim_binary("holder");
    let (cache, forged) = (ProgramCopy::of(&plain, "pf-cache"), ProgramCopy::of(&plain, "pf-cache"));
    std::os::unix::fs::chown(&*forged, Some(4321), None).unwrap();
    let mut caches = [&cache, &cache].map(|program| doubled(program, 0xd0a4_0000));
    let owned = Cgroup::create("unified").expect("cgroup version 2");
    std::os::unix::fs::chown(owned.path(), Some(4321), None).unwrap();
    cgroup::set_attribute(owned.path(), "user.pagefold.domain", "caches");
    let mut attackers = [&*forged, &plain].map(|program| doubled(program, 0xd0a4_0000));
    attackers.iter_mut().for_each(become_other);
    owned.add(attackers[1].pid());
    let (cache_pids, attacker_pids) = (caches.each_ref().map(Holder::pid), attackers.each_ref().map(Holder::pid));
    let all = [cache_pids, attacker_pids].concat();
    let daemon = Daemon::on(&all, &options(&config));
    wait_until_merged(&cache_pids, 7 * MIB);
    for _ in 0..5 {
        std::thread::sleep(Duration::from_secs(1));
        assert!(!is_marked(&attacker_pids));
    }
    let shown = status();
    for pid in attacker_pids {
        let why = left_alone(&shown, pid);
        assert!(why.as_str().unwrap().starts_with("in trust domain user:4321; "), "{why}");
    }
    assert!(caches.iter_mut().chain(&mut attackers).all(Holder::is_intact));
    ksm.end(daemon, &all);
}

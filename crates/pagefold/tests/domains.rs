//! Trust domains on the real kernel: the page tables show that no frame is shared between two of them.

use pagefold_workload::{Segment, Tenant, TenantSpec};
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::time::Duration;

use pagefold_testkit::holder::Change;
use pagefold_testkit::*;

/// The frames in a process's page table that several anonymous pages share.
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

fn frames_of(tenants: &[Tenant]) -> BTreeSet<u64> {
    tenants.iter().flat_map(|tenant| shared_frames(tenant.pid())).collect()
}

#[test]
fn no_frame_is_shared_between_two_domains() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let dir = tempfile::tempdir().unwrap();
    let (config, other) = (dir.path().join("pagefold.toml"), ProgramCopy::of(program(), "the-others"));
    // All have the same 32 MiB; each domain has 16 MiB of its own in common.
    let held = |own: u64| {
        let pages = |mib: u64| mib * PAGES_PER_MIB;
        TenantSpec::new([
            Segment::Shared { pages: pages(32), seed: 50 },
            Segment::Shared { pages: pages(16), seed: own },
        ])
    };
    let start = |program, own| (0..2).map(|_| Tenant::start(program, &held(own)).unwrap()).collect::<Vec<_>>();
    let (mut ones, mut others) = (start(program(), 51), start(&other, 52));
    let rule = "[[domains.rule]]\nname = \"others\"\nexe = \"the-others\"\n";
    fs::write(&config, rule).unwrap();
    let options = ["--config", config.to_str().unwrap(), "--governor", "full"];
    let all: Vec<i32> = pids(&ones).into_iter().chain(pids(&others)).collect();
    let daemon = Daemon::on(&all, &options).answering();
    // In each domain its own common memory, and in one of them what all have in common.
    wait_until("each domain is merged", || saved_bytes() >= 63 * MIB);
    wait_until("nothing is left to do", || {
        let status = status();
        status["busy"] == false && status["domains"].as_array().is_some_and(|rows| rows.len() == 2)
    });
    let status = status();
    let (one, another) = (frames_of(&ones), frames_of(&others));
    assert!(one.len() as u64 >= 16 * PAGES_PER_MIB && another.len() as u64 >= 16 * PAGES_PER_MIB);
    assert_eq!(one.intersection(&another).count(), 0, "frames are shared between the domains");
    let withheld = |name: &str| row(&status["domains"], "name", name)["withheld_bytes"].as_u64().unwrap();
    let (least, most) = (withheld("default").min(withheld("others")), withheld("default").max(withheld("others")));
    assert!(least < 4 * MIB && most >= 63 * MIB, "{least} and {most} withheld");
    let text = succeed(&["status"]);
    assert!(text.contains("2 trust domains: contents found in two of them are marked in one"), "{text}");
    daemon.stop();
    assert_intact(&mut ones);
    assert_intact(&mut others);
    unmerge(&all);
    ksm.assert_restored();

    // Without the rule all four share frames.
    let daemon = Daemon::on(&all, &["--governor", "full"]);
    wait_until("all are merged", || saved_bytes() >= (3 * 32 + 2 * 16 - 1) * MIB);
    assert!(frames_of(&ones).intersection(&frames_of(&others)).count() as u64 >= 31 * PAGES_PER_MIB);
    daemon.stop();
    unmerge(&all);
    ksm.assert_restored();
}

/// A process of two equal halves.
fn doubled(content: u64) -> Holder {
    let mut holder = Holder::start(DOUBLED);
    write_doubled(&mut holder, content);
    holder
}

/// Pages of such a process.
const DOUBLED: u64 = 8 * PAGES_PER_MIB;

fn write_doubled(holder: &mut Holder, content: u64) {
    for first in [0, DOUBLED / 2] {
        holder.change(Change::Write { first, pages: DOUBLED / 2, content, step: 1 });
    }
}

/// One process is traced, as by a debugger, the other cannot say whether it is dumpable. An attacker writes what they hold.
#[test]
fn a_process_that_cannot_be_reached_keeps_its_marks_and_its_domain() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("pagefold.toml");
    fs::write(&config, "[domains]\nby = \"user\"\n").unwrap();
    let mut victims = [doubled(0xd0a1_0000), doubled(0xd0a2_0000)];
    // Only the process itself sees its attribute.
    victims[1].ask("group 77");
    let victim_pids = [victims[0].pid(), victims[1].pid()];
    let mut attackers = [Holder::start(DOUBLED), Holder::start(DOUBLED)];
    for attacker in &mut attackers {
        assert_eq!(attacker.ask("user 4321"), 0);
    }
    let attacker_pids = [attackers[0].pid(), attackers[1].pid()];
    let all = [victim_pids, attacker_pids].concat();
    let daemon = Daemon::on(&all, &["--config", config.to_str().unwrap(), "--governor", "full", "--mechanism", "ksmd"]);
    let are_merged = || victim_pids.iter().all(|&pid| marks(pid).merged >= 7 * MIB);
    wait_until("the victims are merged", are_merged);
    let tracer = Tracer::of(victim_pids[0]);
    victims[1].ask("sleep");
    let reason_of = |status: &serde_json::Value, pid: i32| row(&status["processes"], "pid", pid)["left_alone"].clone();
    wait_until("they are left alone", || {
        let status = status();
        victim_pids.iter().all(|&pid| reason_of(&status, pid).is_string())
    });
    write_doubled(&mut attackers[0], 0xd0a1_0000);
    write_doubled(&mut attackers[1], 0xd0a2_0000);
    let frames = |pids: [i32; 2]| pids.iter().flat_map(|&pid| shared_frames(pid)).collect::<BTreeSet<_>>();
    let assert_apart = || {
        let shared = frames(victim_pids).intersection(&frames(attacker_pids)).count();
        assert_eq!(shared, 0, "pages are shared with an attacker");
    };
    for _ in 0..30 {
        std::thread::sleep(Duration::from_secs(1));
        assert_apart();
    }
    assert!(are_merged());
    let shown = status();
    for pid in victim_pids {
        let marked = row(&shown["processes"], "pid", pid)["marked_bytes"].as_u64();
        assert!(marked >= Some(7 * MIB), "its marks are accounted for: {marked:?}");
    }
    drop(tracer);
    wait_until("one is not left alone any more", || reason_of(&status(), victim_pids[0]).is_null());
    for _ in 0..10 {
        std::thread::sleep(Duration::from_secs(1));
        assert_apart();
    }
    assert!(victims[0].is_intact() && attackers.iter_mut().all(Holder::is_intact));
    daemon.stop();
    drop(victims);
    unmerge(&attacker_pids);
    ksm.assert_restored();
}

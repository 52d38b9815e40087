//! `pagefold scan --why` on processes that were thought to share memory.

use pagefold_testkit::holder::Change;
use pagefold_testkit::*;
use serde_json::Value;
use std::fs;

/// Each set-up has this much memory in common.
const COMMON: u64 = 16;
const PAGES: u64 = COMMON * PAGES_PER_MIB;

/// Reserves hugetlb pages of 2 MiB, and returns them when dropped.
struct HugetlbPages(String);

const RESERVED: &str = "/proc/sys/vm/nr_hugepages";

impl HugetlbPages {
    /// `None` if the kernel can't find so many.
    fn reserve(pages: u64) -> Option<Self> {
        let before = fs::read_to_string(RESERVED).ok()?.trim().to_owned();
        let reserved = Self(before.clone());
        let wanted = before.parse::<u64>().ok()? + pages;
        fs::write(RESERVED, wanted.to_string()).ok()?;
        let found = fs::read_to_string(RESERVED).ok()?.trim().parse::<u64>().ok()?;
        (found >= wanted).then_some(reserved)
    }
}

impl Drop for HugetlbPages {
    fn drop(&mut self) {
        let _ = fs::write(RESERVED, &self.0);
    }
}

/// Two processes whose memory has the same contents.
fn twins(content: u64) -> [Holder; 2] {
    [(); 2].map(|()| Holder::with(PAGES, content))
}

/// The fields of smaps_rollup that a scan mustn't change.
fn sizes(pids: &[i32]) -> Vec<[u64; 3]> {
    let size = |pid: &i32| ["Rss", "Pss_Anon", "Pss_Shmem"].map(|name| kib(&format!("/proc/{pid}/smaps_rollup"), name));
    pids.iter().map(size).collect()
}

fn why(pids: &[i32], more: &[&str]) -> Value {
    json_of(&with_pids(&["scan", "--why"], pids, more))
}

#[track_caller]
fn assert_within_a_tenth(bytes: u64, name: &str) {
    assert!(bytes.abs_diff(COMMON * MIB) <= COMMON * MIB / 10, "{name}: {bytes}");
}

fn duplicates(report: &Value, cause: &str) -> u64 {
    let parts = report["totals"]["out_of_reach"].as_array().unwrap();
    parts.iter().find(|part| part["cause"] == cause).map_or(0, |part| part["duplicate_bytes"].as_u64().unwrap())
}

#[test]
fn each_set_up_is_named_with_its_cause_and_amount() {
    if !can_read_pages() {
        return;
    }
    let files = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let mut all = Vec::new();
    let mut shared = [(); 2].map(|()| Holder::start(1));
    for holder in &mut shared {
        holder.ask(&format!("shared {PAGES} {}", 1_u64 << 40));
    }
    let hugetlb = HugetlbPages::reserve(COMMON);
    if hugetlb.is_some() {
        let mut holders = [(); 2].map(|()| Holder::start(1));
        for holder in &mut holders {
            holder.ask(&format!("hugetlb {PAGES} {}", 2_u64 << 40));
        }
        all.extend(holders);
    } else {
        skip_unsupported("not enough contiguous memory for hugetlb pages");
    }
    let mut registered = twins(3 << 40);
    for holder in &mut registered {
        holder.ask(&format!("register 0 {PAGES}"));
    }
    let mut mapped = [(); 2].map(|()| Holder::start(PAGES));
    let mut contents = vec![0; usize::try_from(COMMON * MIB).unwrap()];
    for (page, number) in contents.chunks_exact_mut(4096).zip(0..) {
        holder::fill(page, (4 << 40) + number);
    }
    for (holder, name) in mapped.iter_mut().zip(["one", "other"]) {
        let path = files.path().join(name);
        fs::write(&path, &contents).unwrap();
        holder.ask(&format!("map {}", path.display()));
        holder.ask(&format!("advise 0 {PAGES} {}", libc::MADV_POPULATE_READ));
    }
    let mut locked = twins(5 << 40);
    for holder in &mut locked {
        holder.ask(&format!("lock 0 {PAGES}"));
    }
    let mut parent = Holder::with(PAGES, 6 << 40);
    let child = parent.fork();
    let mergeable = twins(7 << 40);

    all.extend(shared.into_iter().chain(registered).chain(mapped).chain(locked).chain(mergeable));
    all.push(parent);
    let mut pids: Vec<i32> = all.iter().map(Holder::pid).collect();
    pids.push(child);
    let before = sizes(&pids);
    for more in [&[][..], &["--exact"], &["--seed", "1"]] {
        let report = why(&pids, more);
        assert_eq!(report["schema"], "pagefold.why/1");
        for cause in ["shared_memory", "userfaultfd", "page_cache", "locked"] {
            assert_within_a_tenth(duplicates(&report, cause), cause);
        }
        if hugetlb.is_some() {
            assert_within_a_tenth(duplicates(&report, "hugetlb"), "hugetlb");
        }
        let totals = &report["totals"];
        assert_within_a_tenth(totals["shared_by_fork_bytes"].as_u64().unwrap(), "fork");
        // The programs' own heaps and data are mergeable, too.
        let mergeable = totals["mergeable_duplicate_bytes"].as_u64().unwrap();
        assert!((COMMON * MIB..(COMMON + 6) * MIB).contains(&mergeable), "{mergeable}");
        let causes: Vec<&str> =
            report["causes"].as_array().unwrap().iter().map(|row| row["cause"].as_str().unwrap()).collect();
        assert!(causes.contains(&"shared_memory"), "{causes:?}");
        assert_eq!(report["rows"].as_array().unwrap().len(), pids.len());
    }
    assert_eq!(sizes(&pids), before, "the scan has changed what the processes hold");
    assert!(all.iter_mut().all(Holder::is_intact));
}

#[test]
fn two_processes_are_compared_page_by_page() {
    if !can_read_pages() {
        return;
    }
    let quarter = PAGES / 4;
    let mut holders = [(); 2].map(|()| Holder::start(PAGES));
    for (holder, number) in holders.iter_mut().zip(1..) {
        // A quarter each: equal at the same place, alike but for one word, equal in reverse order, unique.
        holder.write(0, quarter, 1 << 40);
        holder.change(Change::Write {
            first: quarter,
            pages: quarter,
            content: holder::ALIKE | (number * 1_000),
            step: 2_000,
        });
        for page in 0..quarter {
            let place = if number == 1 { page } else { quarter - 1 - page };
            holder.write(2 * quarter + place, 1, (2 << 40) + page);
        }
        holder.write(3 * quarter, quarter, (2 + number) << 50);
    }
    let pids = holders.each_ref().map(Holder::pid);
    let report = why(&pids, &["--exact"]);
    let pair = &report["pair"];
    let pages = |likeness: &str| {
        let classes = pair["classes"].as_array().unwrap();
        classes.iter().find(|class| class["likeness"] == likeness).map_or(0, |class| class["pages"].as_u64().unwrap())
    };
    // The programs' own heaps and stacks differ a little.
    for (likeness, expected) in [("same", quarter), ("counters", quarter), ("elsewhere", quarter)] {
        assert!(pages(likeness).abs_diff(expected) <= quarter / 10, "{likeness}: {pair}");
    }
    assert!(pages("incompressible") + pages("unique") >= quarter, "{pair}");
    assert!(pages("one_frame") > 0, "both map the same files: {pair}");
    let common = &report["totals"]["frames_in_common"];
    assert_eq!((&common["merged"], &common["by_fork"]), (&0.into(), &0.into()), "{common}");
    assert!(common["by_file"].as_u64().unwrap() > 0, "{common}");

    let child = holders[0].fork();
    let report = why(&[pids[0], child], &[]);
    let common = &report["totals"]["frames_in_common"];
    assert!(common["by_fork"].as_u64().unwrap() >= PAGES, "{common}");
}

/// A cgroup whose programs are in a trust domain of their own.
fn another_domain() -> Option<Cgroup> {
    let group = Cgroup::create("unified")?;
    cgroup::set_attribute(group.path(), "user.pagefold.domain", "another");
    Some(group)
}

#[test]
fn copies_of_the_program_share_no_frame_of_their_own() {
    if !can_read_pages() {
        return;
    }
    // Statically linked programs from different files have nothing in common but what their kernel gives them.
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let holders = ["one", "other"].map(|name| {
        // Busybox goes by its name.
        fs::create_dir(folder.path().join(name)).unwrap();
        let copy = folder.path().join(name).join("busybox");
        // We don't open the copy for writing ourselves: other tests' children would have it open, too, and then it
        // couldn't run.
        let copied = std::process::Command::new("cp").arg("/bin/busybox").arg(&copy).status().unwrap();
        copied.success().then_some(())?;
        Some(std::process::Command::new(copy).args(["sleep", "1000"]).spawn().unwrap())
    });
    let [Some(one), Some(other)] = holders else {
        return skip("busybox-static is not installed");
    };
    let children = [one, other].map(OwnedChild);
    std::thread::sleep(std::time::Duration::from_millis(200));
    let pids = children.each_ref().map(|child| i32::try_from(child.0.id()).unwrap());
    let Some(group) = another_domain() else { return skip("cgroups have no extended attributes here") };
    group.add(pids[1]);
    let with_domains = why(&pids, &[]);
    for common in [&with_domains["totals"]["frames_in_common"], &with_domains["frames_between_domains"]] {
        for kind in ["merged", "by_fork", "by_file"] {
            assert_eq!(common[kind], 0, "{with_domains}");
        }
    }
    assert_eq!((&with_domains["unexamined_processes"], &with_domains["unexamined_bytes"]), (&0.into(), &0.into()));
    // Merging on request merges each domain.
    let is_read = std::path::Path::new("/dev/ksm").exists();
    let unknown = with_domains["totals"]["unknown"].to_string();
    assert!(is_read || unknown.contains("in trust domain another"), "{with_domains}");
    drop(group);
    let one_domain = why(&pids, &[]);
    assert_eq!(one_domain["frames_between_domains"], Value::Null);
    assert_eq!(one_domain["totals"]["frames_in_common"], with_domains["totals"]["frames_in_common"]);
}

/// We count frames of other trust domains although we don't read them, and report memory that we mustn't look at.
#[test]
fn only_frames_that_were_looked_at_prove_isolation() {
    if !can_read_pages() {
        return;
    }
    let Some(group) = another_domain() else { return skip("cgroups have no extended attributes here") };
    let copy = ProgramCopy::of(&victim_binary("holder"), "another-domain");
    let pair = [Holder::with(PAGES, 1 << 40), Holder::with_as(&copy, PAGES, 1 << 40)];
    let pids = pair.each_ref().map(Holder::pid);
    group.add(pids[1]);
    let report = why(&pids, &[]);
    // Both map the C library.
    assert!(report["frames_between_domains"]["by_file"].as_u64().unwrap() > 0, "{report}");
    assert_eq!(report["unexamined_processes"], 0);
    drop(group);
    let denied = why(&pids, &["--deny", copy.name()]);
    assert_eq!(denied["unexamined_processes"], 1, "{denied}");
}

#[test]
fn memory_of_two_processes_counts_once() {
    if !can_read_pages() {
        return;
    }
    let mut parent = Holder::with(PAGES, 8 << 40);
    // The parent waits for a child that runs in the parent's memory.
    parent.ask("sleep");
    wait_until("the child is there", || !children_of(parent.pid()).is_empty());
    let child = children_of(parent.pid())[0];
    let report = why(&[parent.pid(), child], &[]);
    let totals = &report["totals"];
    let mapped = totals["mapped_bytes"].as_u64().unwrap();
    let unknown = totals["unknown"].as_array().unwrap();
    let reason = format!("its memory is that of process {}, and counted there", parent.pid().min(child));
    let same = unknown.iter().find(|part| part["reason"] == reason.as_str()).expect("the child isn't counted");
    let same = same["bytes"].as_u64().unwrap();
    assert!(same >= COMMON * MIB && mapped - same >= COMMON * MIB, "{same} of {mapped}");
    assert!(mapped - same < (COMMON + 8) * MIB, "{same} of {mapped}");
    assert!(totals["mergeable_duplicate_bytes"].as_u64().unwrap() < MIB, "{totals}");
}

//! Checks merging on request in an emulated machine whose kernel has `/dev/ksm`, or gets it from the module
//! `/ksm_request.ko`. `tests/request.rs` boots it.
//!
//! All programs are in /bin, which only root can write. Prints a line with PASS or FAIL for each check. With the
//! argument `million`, only merges two trust domains with the same contents by a million requests.

use pagefold_engine::hash::LineDigester;
use pagefold_ksm::request::{Hashed, RequestDevice};
use pagefold_testkit::holder::{ALIKE, Change, fill};
use pagefold_testkit::ksm::{self, number, saved_bytes, write_knob};
use pagefold_testkit::{Forked, Holder};
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Command, ExitCode, Output, Stdio};
use std::time::{Duration, Instant};

const PAGEFOLD: &str = "/bin/pagefold";
const HOLDER: &str = "/bin/holder";
const CONFIG: &str = "/bin/request.toml";
const MODULE: &str = "/ksm_request.ko";
/// Pages of each holder, how many of them have contents of their own, and how many are zeros.
const PAGES: u64 = 2048;
const OWN: u64 = 256;
const ZEROS: u64 = 128;
const EQUAL: u64 = PAGES - OWN - ZEROS;
/// Pages of each clone.
const CLONE: u64 = 8192;
/// We name pages again after 250 ms, and look every 50 ms whether they're merged.
const SOON: Duration = Duration::from_millis(300);
const LIMIT: Duration = Duration::from_secs(60);
/// Pages of each holder when a million requests merge two domains with two holders each.
const MANY: u64 = 1 << 19;
const LIMIT_MANY: Duration = Duration::from_secs(2400);

fn main() -> ExitCode {
    load_module();
    let mut checks = Checks::default();
    let before = State::now();
    if std::env::args().nth(1).as_deref() == Some("million") {
        million(&mut checks);
    } else {
        everything(&mut checks);
    }
    let after = State::now();
    checks.add("ksmd has not scanned, and no knob has changed", before == after, format_args!("{before:?} {after:?}"));
    println!("request: {} of {} checks passed", checks.passed, checks.all);
    if checks.passed == checks.all { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn everything(checks: &mut Checks) {
    for check in
        [hashes, forked, merging, outsiders, clones, zeros, alike, domains, exclusion, moving, dry_run, refusals]
    {
        check(checks);
    }
}

fn load_module() {
    let Ok(module) = File::open(MODULE) else { return };
    // SAFETY: the descriptor is open, and the parameters are an empty string.
    let done = unsafe { libc::syscall(libc::SYS_finit_module, module.as_raw_fd(), c"".as_ptr(), 0) };
    assert_eq!(done, 0, "the module: {}", std::io::Error::last_os_error());
}

#[derive(Default)]
struct Checks {
    all: u32,
    passed: u32,
}

impl Checks {
    fn add(&mut self, what: &str, passed: bool, seen: impl std::fmt::Display) {
        self.all += 1;
        self.passed += u32::from(passed);
        if passed { println!("PASS {what}") } else { println!("FAIL {what}: {seen}") }
    }

    fn intact(&mut self, what: &str, a: &mut Holder, b: &mut Holder) {
        self.add(what, a.is_intact() && b.is_intact(), "damage");
    }

    /// Checks that the first two share pages, that the last two do, and that no page is shared across the two pairs.
    fn apart(&mut self, [a, b, c, d]: [&Holder; 4], pages: u64, least: u64, said: &str) {
        for (what, one, two) in [("one domain", a, b), ("the other domain", c, d)] {
            let shared = common(one, two, 0, pages);
            self.add(&format!("{what} is merged"), shared >= least, format_args!("{shared}; {said}"));
        }
        let across: u64 = [(a, c), (a, d), (b, c), (b, d)].map(|(one, two)| common(one, two, 0, pages)).iter().sum();
        self.add("not one page is merged across domains", across == 0, across);
    }
}

/// ksmd's counters, and KSM's knobs.
#[derive(Debug, PartialEq)]
struct State {
    scans: u64,
    scanned: u64,
    knobs: Vec<(&'static str, u64)>,
}

impl State {
    fn now() -> Self {
        Self { scans: number("full_scans"), scanned: number("pages_scanned"), knobs: ksm::knobs() }
    }
}

/// Pages shared through fork aren't merged pages, even where kpageflags calls every anonymous page merged (Linux 6.12).
fn forked(checks: &mut Checks) {
    let mut memory = vec![0_u8; 4 << 20];
    for (page, number) in memory.chunks_exact_mut(4096).zip(0_u16..) {
        page.fill(number.to_le_bytes()[0]);
    }
    let child = Forked::start(|| {});
    let pids = format!("{},{}", std::process::id(), child.0);
    let output = Command::new(PAGEFOLD).args(["scan", "--json", "--pid", &pids]).output().expect(PAGEFOLD);
    drop((child, std::hint::black_box(memory)));
    let said: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
    let totals = &said["totals"];
    let is_right = totals["merged_bytes"] == 0 && totals["fork_shared_bytes"].as_u64() >= Some(4 << 20);
    checks.add("pages shared through fork are not taken for merged", is_right, totals);
}

/// A holder whose first pages are the same in all, followed by zeros and by pages of its own.
fn holder(program: &str, own: u64) -> Holder {
    let mut holder = Holder::start_as(Path::new(program), PAGES);
    for (first, pages, content, step) in [(0, EQUAL, 1, 1), (EQUAL, ZEROS, 0, 0), (PAGES - OWN, OWN, own << 32, 1)] {
        holder.change(Change::Write { first, pages, content, step });
    }
    holder
}

fn pair() -> [Holder; 2] {
    [holder(HOLDER, 1), holder(HOLDER, 2)]
}

fn list(holders: &[&Holder]) -> String {
    holders.iter().map(|holder| holder.pid().to_string()).collect::<Vec<_>>().join(",")
}

fn start(holders: &[&Holder], options: &[&str]) -> Child {
    let mut command = Command::new(PAGEFOLD);
    command
        .args(["run", "--json", "--mechanism", "request", "--governor", "full", "--pid", &list(holders)])
        .args(options);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect(PAGEFOLD)
}

/// Ends a run, and returns its summary and its messages.
fn end(run: Child) -> (Value, String) {
    let Output { status, stdout, stderr } = run.wait_with_output().expect("a child");
    let said = format!("{status}: {}", String::from_utf8_lossy(&stderr));
    (serde_json::from_slice(&stdout).unwrap_or_default(), said)
}

/// Asks a run to end.
fn terminate(run: Child) -> (Value, String) {
    // SAFETY: we pass no memory. Nobody has waited for the child yet.
    unsafe { libc::kill(i32::try_from(run.id()).expect("a pid"), libc::SIGTERM) };
    end(run)
}

fn unmerge(holders: &[&Holder]) -> String {
    let output = Command::new(PAGEFOLD).args(["unmerge", "--pid", &list(holders)]).output().expect(PAGEFOLD);
    format!("{}: {}", output.status, String::from_utf8_lossy(&output.stderr))
}

/// The frames of a holder's pages, as far as they're present. Merged zeros have no frame of the holder's.
fn frames(holder: &Holder, first: u64, pages: u64) -> BTreeSet<u64> {
    frames_at(holder.pid(), holder.first + first, pages)
}

fn frames_at(pid: i32, first: u64, pages: u64) -> BTreeSet<u64> {
    let pagemap = File::open(format!("/proc/{pid}/pagemap")).expect("pagemap");
    let mut bytes = vec![0; usize::try_from(pages * 8).expect("a length")];
    pagemap.read_exact_at(&mut bytes, first * 8).expect("pagemap");
    let mut frames = BTreeSet::new();
    for entry in bytes.chunks_exact(8) {
        let entry = u64::from_le_bytes(entry.try_into().expect("eight bytes"));
        if entry >> 63 == 1 {
            frames.insert(entry & ((1 << 55) - 1));
        }
    }
    frames
}

fn common(a: &Holder, b: &Holder, first: u64, pages: u64) -> u64 {
    frames(a, first, pages).intersection(&frames(b, first, pages)).count() as u64
}

/// Whether the mapping of a page is marked.
fn is_marked(holder: &Holder, page: u64) -> bool {
    let text = fs::read_to_string(format!("/proc/{}/smaps", holder.pid())).expect("smaps");
    let address = (holder.first + page) * 4096;
    let mut here = false;
    for line in text.lines() {
        let mut words = line.split_ascii_whitespace();
        let word = words.next().unwrap_or_default();
        if let Some((start, end)) = word.split_once('-') {
            let number = |text| u64::from_str_radix(text, 16).expect("an address");
            here = number(start) <= address && address < number(end);
        } else if word == "VmFlags:" && here {
            return words.any(|flag| flag == "mg");
        }
    }
    false
}

fn wait_until(condition: impl Fn() -> bool) -> bool {
    wait_until_within(LIMIT, condition)
}

fn wait_until_within(limit: Duration, condition: impl Fn() -> bool) -> bool {
    let end = Instant::now() + limit;
    while !condition() {
        if Instant::now() > end {
            return false;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    true
}

/// Checks that the kernel's hashes are as the header defines them.
fn hashes(checks: &mut Checks) {
    let holder = holder(HOLDER, 1);
    let device = RequestDevice::open(Path::new("/dev/ksm")).expect("/dev/ksm");
    checks.add("the kernel hashes pages in place", device.hashes(), "it does not");
    // SAFETY: we pass no memory, and the descriptor is new.
    let process = unsafe {
        let pidfd = libc::syscall(libc::SYS_pidfd_open, holder.pid(), 0);
        OwnedFd::from_raw_fd(i32::try_from(pidfd).expect("a descriptor"))
    };
    let mut page = [0; 4096];
    for lines in [1, 2, 8, 64] {
        let digester = LineDigester::new(0x1234_5678_9abc_def0, lines);
        let address = holder.first * 4096;
        let key = digester.key();
        let mut found = vec![0; usize::try_from(PAGES).expect("a length")];
        // First by one line, then by more.
        for (from, to) in [(0, 1), (1, lines)] {
            let pages = Hashed { process: process.as_fd(), address, key, from, to };
            device.hash(&pages, &mut found).expect("hashes");
        }
        let mut wrong = 0;
        for (hash, number) in found.into_iter().zip(0..) {
            let content = match number {
                0..EQUAL => 1 + number,
                number if number < EQUAL + ZEROS => 0,
                number => (1 << 32) + number - (PAGES - OWN),
            };
            fill(&mut page, content);
            wrong += u32::from(hash != digester.hash(&page, lines));
        }
        checks.add(&format!("hashes by {lines} lines are as defined"), wrong == 0, wrong);
    }
}

/// Pages that differ in one word only, half of them in both processes.
fn alike(checks: &mut Checks) {
    let [mut a, mut b] = [1, 2].map(|own| {
        let mut holder = Holder::start_as(Path::new(HOLDER), PAGES);
        for (first, content) in [(0, ALIKE), (PAGES / 2, ALIKE + (own << 32))] {
            holder.change(Change::Write { first, pages: PAGES / 2, content, step: 1 });
        }
        holder
    });
    let (summary, said) = end(start(&[&a, &b], &["--for", "15s"]));
    let shared = common(&a, &b, 0, PAGES / 2);
    checks.add("similar pages are merged if equal", shared >= PAGES / 2 - 16, format_args!("{shared}; {said}"));
    let other = common(&a, &b, PAGES / 2, PAGES / 2);
    let own = [&a, &b].map(|holder| frames(holder, 0, PAGES).len() as u64);
    let apart = other == 0 && own == [PAGES; 2];
    checks.add("pages that differ in one word are not merged", apart, format_args!("{other} {own:?}; {summary}"));
    checks.intact("no byte has changed in similar pages", &mut a, &mut b);
    unmerge(&[&a, &b]);
}

fn merging(checks: &mut Checks) {
    let [mut a, mut b] = pair();
    let (summary, said) = end(start(&[&a, &b], &["--for", "8s"]));
    checks.add("the run says that it merges on request", summary["mechanism"] == "request", &said);
    let saved = saved_bytes() / 4096;
    let wanted = EQUAL + 2 * ZEROS;
    let seen = format!("{saved} of {wanted}; {summary}");
    checks.add("all equal pages are saved", saved.abs_diff(wanted) <= 64, seen);
    let shared = common(&a, &b, 0, EQUAL);
    checks.add("equal pages share frames", shared >= EQUAL - 16, shared);
    let other = common(&a, &b, PAGES - OWN, OWN);
    checks.add("pages that differ share no frame", other == 0, other);
    checks.intact("no byte has changed", &mut a, &mut b);
    checks.add("nothing was stopped to mark it", summary["stops"] == 0, &summary["stops"]);

    a.change(Change::Write { first: 0, pages: 64, content: 9 << 32, step: 1 });
    checks.intact("a write to a merged page is private", &mut a, &mut b);
    let said = unmerge(&[&a, &b]);
    let left = common(&a, &b, 0, PAGES);
    checks.add("unmerge gives everything its own copy", left == 0, format_args!("{left}; {said}"));
    checks.intact("no byte has changed by unmerging", &mut a, &mut b);
    checks.add("nothing is marked any more", !is_marked(&a, 0) && !is_marked(&b, 0), said);
}

/// What a process shares through fork with one that's out of scope stays as it is. A family in scope is merged whole.
fn outsiders(checks: &mut Checks) {
    let [mut a, mut b] = pair();
    let child = a.fork();
    // These are the parent's own again.
    a.change(Change::Write { first: 0, pages: 64, content: 1, step: 1 });
    let (_, said) = end(start(&[&a, &b], &["--for", "8s"]));
    let own = common(&a, &b, 0, 64);
    checks.add("own pages of a forked process are merged", own >= 60, format_args!("{own}; {said}"));
    let shared = common(&a, &b, 64, EQUAL - 64);
    checks.add("pages shared with a child out of scope are not merged", shared == 0, shared);
    let kept = frames_at(child, a.first + 64, EQUAL - 64).intersection(&frames(&a, 64, EQUAL - 64)).count() as u64;
    checks.add("they are still shared with the child", kept == EQUAL - 64, kept);

    let (_, said) = end(start(&[&a, &b], &["--for", "8s", "--pid", &child.to_string()]));
    let merged = common(&a, &b, 0, EQUAL);
    checks.add("a family in scope is merged", merged >= EQUAL - 16, format_args!("{merged}; {said}"));
    let childs = frames_at(child, a.first + 64, EQUAL - 64).intersection(&frames(&b, 64, EQUAL - 64)).count() as u64;
    checks.add("its child is, too", childs >= EQUAL - 64 - 16, childs);
    checks.intact("no byte has changed in a family", &mut a, &mut b);
    unmerge(&[&a, &b]);
}

/// Clones that start one after the other are merged with the first by position, and hardly read. A clone that starts
/// during the run is merged soon after it has filled its memory. An emulated machine is slow, so the time that filling
/// takes is the measure.
fn clones(checks: &mut Checks) {
    let mut run = None;
    let mut clones = Vec::new();
    for number in 0..4 {
        let began = Instant::now();
        let mut clone = Holder::start_as(Path::new(HOLDER), CLONE);
        clone.change(Change::Write { first: 0, pages: CLONE, content: 1, step: 1 });
        // These differ.
        clone.change(Change::Write { first: CLONE / 2, pages: OWN, content: (1 + number) << 32, step: 1 });
        clones.push(clone);
        let filled = began.elapsed();
        if number == 1 {
            let command = ["run", "--json", "--mechanism", "request", "--governor", "full", "--exe", HOLDER];
            let mut pagefold = Command::new(PAGEFOLD);
            pagefold.args(command).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
            run = Some(pagefold.spawn().expect(PAGEFOLD));
        }
        if let [first, .., last] = clones.as_slice() {
            let began = Instant::now();
            let merged = wait_until(|| common(first, last, 0, CLONE) >= (CLONE - OWN) * 98 / 100);
            let took = began.elapsed();
            let seen = common(first, last, 0, CLONE);
            let is_soon = number == 1 || took <= filled + SOON;
            let what = format!("clone {number} is merged {took:.0?} after it was filled in {filled:.0?}");
            checks.add(&what, merged && is_soon, seen);
        }
    }
    let (summary, said) = terminate(run.expect("a run"));
    let read = summary["pages_read"].as_u64().unwrap_or(u64::MAX);
    let named = &summary["requests"];
    checks.add(&format!("{read} pages of 4 clones were read"), read <= 2 * CLONE, format_args!("{named}; {said}"));
    checks.add("no byte has changed in clones", clones.iter_mut().all(Holder::is_intact), "damage");
    unmerge(&clones.iter().collect::<Vec<_>>());
}

/// Merges zeros alone: the processes share none of their other pages.
fn zeros(checks: &mut Checks) {
    let [mut a, mut b] = pair();
    let before = saved_bytes() / 4096;
    let (summary, said) = end(start(&[&a, &b], &["--for", "8s", "--only", "zeros"]));
    let saved = saved_bytes() / 4096 - before;
    checks.add("zeros are saved", saved.abs_diff(2 * ZEROS) <= 64, format_args!("{saved} of {}; {said}", 2 * ZEROS));
    let shared = common(&a, &b, 0, EQUAL) + common(&a, &b, PAGES - OWN, OWN);
    checks.add("other equal pages are not merged", shared == 0, format_args!("{shared}; {summary}"));
    checks.intact("no byte has changed next to zeros", &mut a, &mut b);
    unmerge(&[&a, &b]);
}

/// Makes a second program, which has its own trust domain, and returns its path.
fn other_domain() -> &'static str {
    let other = "/bin/other-holder";
    fs::copy(HOLDER, other).expect(other);
    fs::write(CONFIG, "[[domains.rule]]\nname = \"others\"\nexe = \"other-holder\"\n").expect(CONFIG);
    other
}

/// Two domains hold the same contents, all of them eligible.
fn million(checks: &mut Checks) {
    let other = other_domain();
    let mut holders = [HOLDER, HOLDER, other, other].map(|program| {
        let mut holder = Holder::start_as(Path::new(program), MANY);
        holder.change(Change::Write { first: 0, pages: MANY, content: 1, step: 1 });
        holder
    });
    let [a, b, c, d] = &holders;
    let run = start(&[a, b, c, d], &["--config", CONFIG]);
    // We don't wait for all: pagefold asks later for a page that's written or moved just then.
    let done = wait_until_within(LIMIT_MANY, || saved_bytes() / 4096 >= 2 * MANY - 4096);
    let (summary, said) = terminate(run);
    let requests = &summary["requests"];
    checks.add("both domains are merged", done, format_args!("{} pages; {said}; {requests}", saved_bytes() / 4096));
    let asked = requests["asked_pages"].as_u64().unwrap_or(0);
    checks.add(&format!("{asked} pages were named, a million or more"), asked >= 1_000_000, requests);
    checks.apart([a, b, c, d], MANY, MANY - 4096, &said);
    checks.add("no byte has changed in a million pages", holders.iter_mut().all(Holder::is_intact), "damage");
}

fn domains(checks: &mut Checks) {
    let other = other_domain();
    let mut holders = [holder(HOLDER, 1), holder(HOLDER, 2), holder(other, 3), holder(other, 4)];
    let [a, b, c, d] = &holders;
    let (_, said) = end(start(&[a, b, c, d], &["--for", "10s", "--config", CONFIG]));
    checks.apart([a, b, c, d], EQUAL, EQUAL - 16, &said);
    checks.add("no byte has changed in two domains", holders.iter_mut().all(Holder::is_intact), "damage");
    unmerge(&holders.each_ref());
}

/// pagefold doesn't name pages of excluded memory, and unmarks memory that becomes excluded.
fn exclusion(checks: &mut Checks) {
    let [mut a, mut b] = pair();
    a.ask("lock 0 256");
    let run = start(&[&a, &b], &["--for", "300s"]);
    let merged = wait_until(|| common(&a, &b, 256, EQUAL - 256) >= EQUAL - 256 - 16);
    checks.add("memory next to locked memory is merged", merged, common(&a, &b, 256, EQUAL - 256));
    checks.add("locked memory is not merged", common(&a, &b, 0, 256) == 0 && !is_marked(&a, 0), common(&a, &b, 0, 256));
    // Only one process locks its memory, so the other keeps its mark.
    b.ask(&format!("lock 512 {}", 256));
    let unmarked = wait_until(|| !is_marked(&b, 512) && common(&a, &b, 512, 256) == 0);
    checks.add("memory that is locked later is unmarked", unmarked, common(&a, &b, 512, 256));
    checks.add("its other memory stays merged", common(&a, &b, 1024, 256) >= 240, common(&a, &b, 1024, 256));
    let (summary, said) = terminate(run);
    checks.add("the run ends well", summary["knobs_restored"] == true, said);
    checks.intact("no byte has changed by exclusions", &mut a, &mut b);
    unmerge(&[&a, &b]);
}

/// A process that moves to another domain is unmarked as a whole.
fn moving(checks: &mut Checks) {
    fs::write(CONFIG, "[domains]\nby = \"user\"\n").expect(CONFIG);
    let [mut a, mut b] = pair();
    let run = start(&[&a, &b], &["--for", "300s", "--config", CONFIG]);
    let merged = wait_until(|| common(&a, &b, 0, EQUAL) >= EQUAL - 16);
    checks.add("processes of one user are merged", merged, common(&a, &b, 0, EQUAL));
    b.ask("user 1000");
    let unmerged = wait_until(|| common(&a, &b, 0, EQUAL) == 0 && !is_marked(&b, 0));
    checks.add("a process that changes its user is unmerged", unmerged, common(&a, &b, 0, EQUAL));
    std::thread::sleep(Duration::from_secs(10));
    checks.add("that process is not merged again", common(&a, &b, 0, EQUAL) == 0, common(&a, &b, 0, EQUAL));
    terminate(run);
    checks.intact("no byte has changed by the move", &mut a, &mut b);
    unmerge(&[&a, &b]);
}

/// A dry run names nothing, and reports the pages that it would name.
fn dry_run(checks: &mut Checks) {
    let [a, b] = pair();
    let (summary, said) = end(start(&[&a, &b], &["--for", "8s", "--dry-run"]));
    let expected = summary["expected_bytes"].as_u64().unwrap_or(0) / 4096;
    let wanted = 2 * (EQUAL + ZEROS);
    checks.add("a dry run counts equal pages", expected.abs_diff(wanted) <= 128, format_args!("{expected}; {said}"));
    let untouched = common(&a, &b, 0, EQUAL) == 0 && !is_marked(&a, 0) && !is_marked(&b, 0);
    checks.add("a dry run merges and marks nothing", untouched, common(&a, &b, 0, EQUAL));
}

fn refusals(checks: &mut Checks) {
    let a = holder(HOLDER, 1);
    write_knob("run", "2");
    let run = start(&[&a], &["--for", "1s"]).wait_with_output().expect("a child");
    let said = String::from_utf8_lossy(&run.stderr).into_owned();
    write_knob("run", "0");
    checks.add("run 2 is refused", run.status.code() == Some(7) && said.contains("run is 2"), said);
    let doctor = Command::new(PAGEFOLD).args(["doctor", "--verbose"]).output().expect(PAGEFOLD);
    let said = String::from_utf8_lossy(&doctor.stdout).into_owned();
    let by = if Path::new(MODULE).exists() { "by the module ksm_request" } else { "by this kernel" };
    checks.add("doctor says how pages are merged", said.contains(&format!("merging on request: {by}")), said);
}

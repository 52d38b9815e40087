use super::marks::PASSES;
use super::survey::{FLAGS_NS, LONG_NS};
use super::*;
use crate::churn::LEFT_ALONE_NS;
use crate::judge::ScopeRules;
use crate::scope::deny_list::DenyList;
use crate::scope::domain::DEFAULT;
use crate::scope::exe::{Distrust, Matching};
use crate::scope::{ScopeSpec, Selector};
use pagefold_engine::units::Pages;
use pagefold_procmem::Roots;
use pagefold_procmem::os::abandonable::{Job, elsewhere};
use pagefold_testkit::{state, wait_until};
use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::time::Duration;

const SECOND: u64 = 1_000_000_000;
/// The child maps at `FIRST` and each `STEP` after it, and moves a mapping to `AWAY`, far from the others.
const FIRST: usize = 0x10_0000_0000;
const STEP: usize = 64 << 20;
const AWAY: usize = 0x20_0000_0000;
const BYTES: usize = 8 << 20;

/// A forked child that maps, unmaps, moves and fills memory on request.
struct Child {
    pid: i32,
    line: UnixStream,
}

impl Child {
    fn fork() -> Self {
        let (line, theirs) = UnixStream::pair().unwrap();
        // SAFETY: the child makes only system calls, which are safe after fork in a program with threads.
        match unsafe { libc::fork() } {
            0 => serve_requests(&theirs),
            pid => {
                assert!(pid > 0);
                Self { pid, line }
            }
        }
    }

    fn request(&mut self, order: u8) {
        self.line.write_all(&[order]).unwrap();
        let mut done = [0];
        self.line.read_exact(&mut done).unwrap();
        assert_eq!(done, [order], "the child failed");
        // Until it waits for the next request, it may fault in pages.
        let pid = self.pid;
        wait_until("the child waits", || state(pid) != b'R');
    }

    fn kill(&mut self) {
        // SAFETY: the child is ours and not yet reaped.
        unsafe { libc::kill(self.pid, libc::SIGKILL) };
        // The stream ends when the child does.
        let _ = self.line.read(&mut [0]);
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        self.kill();
        // SAFETY: the child is ours.
        unsafe { libc::waitpid(self.pid, std::ptr::null_mut(), 0) };
    }
}

extern "C" fn serve_requests_in_thread(line: *mut libc::c_void) -> libc::c_int {
    // SAFETY: the stream of the main thread, whose stack remains.
    serve_requests(unsafe { &*line.cast::<UnixStream>() })
}

fn serve_requests(line: &UnixStream) -> ! {
    use std::os::fd::AsRawFd;
    let (fd, mut maps) = (line.as_raw_fd(), 0);
    loop {
        let mut order = [0_u8];
        // SAFETY: system calls on this process's own memory, at addresses that nothing else uses.
        unsafe {
            if libc::read(fd, order.as_mut_ptr().cast(), 1) != 1 {
                libc::_exit(0);
            }
            let last = (FIRST + STEP * (maps - usize::from(maps > 0))) as *mut libc::c_void;
            let done = match order[0] {
                b'm' => {
                    let at = (FIRST + STEP * maps) as *mut libc::c_void;
                    let how = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
                    let mapped = libc::mmap(at, BYTES, libc::PROT_READ | libc::PROT_WRITE, how, -1, 0);
                    libc::madvise(at, BYTES, libc::MADV_NOHUGEPAGE);
                    maps += 1;
                    mapped == at && libc::madvise(at, 4096, libc::MADV_POPULATE_WRITE) == 0
                }
                b'a' => {
                    // Replaces its auxv, without an exec. The addresses only have to be in order.
                    let auxv = [libc::AT_NULL, 0];
                    let mut map = [0x2_0000; 13];
                    map[0] = 0x1_0000;
                    map[11] = auxv.as_ptr().addr() as u64;
                    // The size of the new auxv, and no executable.
                    map[12] = u64::from(u32::MAX) << 32 | size_of_val(&auxv) as u64;
                    let bytes = size_of_val(&map);
                    libc::prctl(libc::PR_SET_MM, libc::PR_SET_MM_MAP, map.as_ptr(), bytes, 0) == 0
                }
                b'l' => {
                    // Maps and unmaps until the next request.
                    libc::write(fd, order.as_ptr().cast(), 1);
                    let how = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
                    while libc::recv(fd, order.as_mut_ptr().cast(), 1, libc::MSG_PEEK | libc::MSG_DONTWAIT) < 0 {
                        let at = libc::mmap(std::ptr::null_mut(), 65_536, libc::PROT_READ, how, -1, 0);
                        libc::munmap(at, 65_536);
                    }
                    continue;
                }
                b'n' => libc::prctl(libc::PR_SET_NAME, c"another".as_ptr()) == 0,
                b't' => {
                    // Another thread goes on, and the main thread ends.
                    let how = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
                    let stack = libc::mmap(std::ptr::null_mut(), BYTES, libc::PROT_READ | libc::PROT_WRITE, how, -1, 0);
                    let shared = libc::CLONE_VM | libc::CLONE_FILES | libc::CLONE_SIGHAND | libc::CLONE_THREAD;
                    let given = std::ptr::from_ref(line).cast_mut().cast();
                    libc::write(fd, order.as_ptr().cast(), 1);
                    libc::clone(serve_requests_in_thread, stack.byte_add(BYTES), shared, given);
                    libc::syscall(libc::SYS_exit, 0) == 0
                }
                b'k' => libc::mlock(last, BYTES) == 0,
                b's' => {
                    // Fails on kernels without KSM.
                    libc::madvise(last, BYTES, libc::MADV_MERGEABLE);
                    true
                }
                b'w' => libc::madvise(last, BYTES, libc::MADV_WIPEONFORK) == 0,
                b'u' => {
                    maps -= 1;
                    libc::munmap(last, BYTES) == 0
                }
                b'r' => {
                    let how = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
                    libc::mremap(last, BYTES, BYTES, how, AWAY as *mut libc::c_void) as usize == AWAY
                }
                _ => libc::madvise(last, BYTES, libc::MADV_POPULATE_WRITE) == 0,
            };
            order[0] = if done { order[0] } else { 0 };
            libc::write(fd, order.as_ptr().cast(), 1);
        }
    }
}

struct Watched {
    child: Child,
    target: Target,
    now_ns: u64,
    next_key: u32,
    history: ProgramHistory,
    rules: ScopeRules,
}

impl Watched {
    fn new() -> Self {
        let child = Child::fork();
        let process = Arc::new(Process::open(child.pid).unwrap());
        let mut info = ProcessInfo::of(&process).unwrap();
        info.by_pid = Some(child.pid);
        let scope = ScopeSpec::of_pids([child.pid]);
        let mut watched = Self {
            child,
            target: Target::new(info, OwnerKey(1), DomainKey(0)),
            now_ns: 0,
            next_key: 0,
            history: ProgramHistory::default(),
            rules: ScopeRules::new(scope, Roots::default(), DenyList::new([])),
        };
        assert!(watched.refresh_after(0));
        watched
    }

    fn refresh(&mut self) -> Result<bool, ReadError> {
        let next_key = &mut self.next_key;
        let mut judge = Judge::new(&mut self.rules, &self.history);
        self.target.refresh(self.now_ns, 1, &mut judge, || {
            *next_key += 1;
            RegionKey(*next_key)
        })
    }

    fn refresh_after(&mut self, ns: u64) -> bool {
        self.now_ns += ns;
        // The child inherits everything that other tests have in memory, so a survey may cost ten times as much.
        if let Some(last) = &mut self.target.surveys.last {
            last.cost_ns = last.cost_ns.min(1_000_000);
        }
        self.refresh().unwrap()
    }

    fn refresh_until_restless(&mut self) {
        // The child must be running during the check, and other programs may compete for the core.
        let end = Instant::now() + Duration::from_secs(20);
        while self.target.exclusion != Some(Exclusion::Restless) {
            assert!(Instant::now() < end, "not detected");
            self.refresh_after(SECOND);
        }
    }

    /// Turns the target into a process that has just appeared.
    fn forget(&mut self) {
        self.target.forget_memory();
        self.target.appeared_ns = Some(self.now_ns);
        self.target.surveys.are_known = false;
    }

    /// The number of present pages in the region at an address, and its key.
    fn at(&self, address: usize) -> Option<(u64, RegionKey)> {
        let region = self.target.regions.iter().find(|tracked| tracked.stretch.first.address() == address as u64)?;
        assert_eq!(region.stretch.pages, Pages(BYTES as u64 / 4096));
        Some((region.stretch.resident.0, region.key))
    }
}

#[test]
fn a_process_whose_like_end_soon_is_not_surveyed_before_it_has_outlived_them() {
    for (lives, surveyed_after) in [(SECOND, 8), (60 * SECOND, 0)] {
        let mut watched = Watched::new();
        watched.child.request(b'm');
        watched.child.request(b'f');
        watched.forget();
        let family = watched.target.family().expect("it has been looked at");
        watched.history.lifetimes.record_end(family, lives, 0);
        for _ in 0..surveyed_after {
            assert!(!watched.refresh_after(0) && watched.target.regions.is_empty() && watched.target.on_probation);
            watched.now_ns += SECOND;
        }
        assert!(watched.refresh_after(0) && watched.at(FIRST).is_some() && !watched.target.on_probation);
    }
    // Once we know a process, it's not put on probation again.
    let mut watched = Watched::new();
    watched.forget();
    watched.refresh_after(0);
    watched.target.forget_memory();
    watched.history.lifetimes.record_end(watched.target.family().unwrap(), SECOND, 0);
    assert!(watched.refresh_after(0) && !watched.target.regions.is_empty());
    // The child has inherited its memory from a marked program, perhaps with the marks.
    let mut watched = Watched::new();
    watched.forget();
    watched.history.lifetimes.record_end(watched.target.family().unwrap(), SECOND, 0);
    watched.history.marked.add(watched.target.image().unwrap(), DomainKey(0), DEFAULT).unwrap();
    assert!(watched.refresh_after(0) && !watched.target.regions.is_empty());
    // We notice its end at any age.
    watched.history = ProgramHistory::default();
    watched.forget();
    watched.child.kill();
    assert!(matches!(watched.refresh(), Err(ReadError::Vanished { .. })));
}

#[test]
fn changed_mappings_are_surveyed_and_unchanged_ones_are_not() {
    let mut watched = Watched::new();
    // A new child may still be faulting in the pages it needs to read requests.
    watched.child.request(b'm');
    assert!(watched.refresh_after(10 * SECOND));
    let (resident, key) = watched.at(FIRST).unwrap();
    assert_eq!(resident, 1);
    let due_ns = |watched: &Watched| watched.target.surveys.last.as_ref().unwrap().next_maps_ns;
    let first_ns = due_ns(&watched);
    assert!(!watched.refresh_after(SECOND / 2) && due_ns(&watched) == first_ns, "the sizes have not changed");
    assert!(
        !watched.refresh_after(10 * SECOND) && due_ns(&watched) > first_ns,
        "the list is checked from time to time"
    );

    watched.child.request(b'm');
    assert!(watched.refresh_after(10 * SECOND));
    assert!(watched.at(FIRST + STEP).is_some() && watched.at(FIRST) == Some((1, key)));
    watched.child.request(b'u');
    assert!(watched.refresh_after(10 * SECOND));
    assert!(watched.at(FIRST + STEP).is_none() && watched.at(FIRST) == Some((1, key)));
    watched.child.request(b'f');
    assert!(watched.refresh_after(10 * SECOND));
    assert_eq!(watched.at(FIRST), Some((BYTES as u64 / 4096, key)));
}

#[test]
fn surveys_are_limited_to_their_share_of_the_time() {
    let mut watched = Watched::new();
    watched.child.request(b'm');
    assert!(watched.refresh_after(10 * SECOND));
    watched.child.request(b'm');
    assert!(!watched.refresh_after(1));
    assert!(watched.at(FIRST + STEP).is_none());
    assert!(watched.refresh_after(10 * SECOND));
    assert!(watched.at(FIRST + STEP).is_some());
}

/// A survey of a large process keeps its threads from mapping memory.
#[test]
fn a_large_process_is_surveyed_rarely_except_for_locks_and_much_new_memory() {
    let mut watched = Watched::new();
    for _ in 0..2 {
        watched.child.request(b'm');
        assert!(watched.refresh_after(10 * SECOND));
    }
    let is_surveyed_after = |watched: &mut Watched, seconds: u64| {
        let before = watched.target.surveyed_ns();
        watched.target.surveys.last.as_mut().unwrap().cost_ns = LONG_NS;
        watched.now_ns += seconds * SECOND;
        watched.refresh().unwrap();
        // On a busy machine, a survey takes longer than we wait for it.
        while watched.target.surveys.running.is_some() {
            std::thread::sleep(Duration::from_millis(1));
            watched.refresh().unwrap();
        }
        watched.target.surveyed_ns() != before
    };
    watched.child.request(b'u');
    assert!(!is_surveyed_after(&mut watched, 3) && is_surveyed_after(&mut watched, 20));
    watched.child.request(b'm');
    assert!(is_surveyed_after(&mut watched, 3) && watched.at(FIRST + STEP).is_some());
    watched.child.request(b'k');
    assert!(is_surveyed_after(&mut watched, 2) && watched.at(FIRST + STEP).is_none());
}

#[test]
fn a_mapping_that_was_removed_and_created_again_between_surveys_is_a_new_region() {
    let mut watched = Watched::new();
    watched.child.request(b'm');
    assert!(watched.refresh_after(10 * SECOND));
    let (_, first) = watched.at(FIRST).unwrap();
    // It's too soon for a survey, but we record the smaller size.
    watched.child.request(b'u');
    assert!(!watched.refresh_after(1));
    watched.child.request(b'm');
    assert!(watched.refresh_after(10 * SECOND));
    let (_, second) = watched.at(FIRST).unwrap();
    assert_ne!(first, second);
    watched.child.request(b'f');
    assert!(watched.refresh_after(10 * SECOND));
    assert_eq!(watched.at(FIRST).unwrap().1, second, "filling is no replacement");
}

#[test]
fn a_process_that_maps_all_the_time_is_left_alone_until_it_stops() {
    let mut watched = Watched::new();
    watched.child.request(b'm');
    assert!(watched.refresh_after(10 * SECOND));
    assert!(watched.at(FIRST).is_some() && watched.target.exclusion.is_none());
    watched.child.request(b'l');
    watched.refresh_until_restless();
    assert!(watched.target.regions.is_empty());
    watched.child.request(b'f');
    assert!(!watched.refresh_after(SECOND), "still left alone");
    assert!(watched.refresh_after(LEFT_ALONE_NS) && watched.at(FIRST).is_some() && watched.target.exclusion.is_none());
}

#[test]
fn a_restless_program_keeps_no_locked_memory_merged() {
    let mut watched = Watched::new();
    watched.child.request(b'm');
    watched.child.request(b's');
    assert!(watched.refresh_after(10 * SECOND) && watched.at(FIRST).is_some());
    watched.target.set_marked();
    watched.child.request(b'l');
    watched.refresh_until_restless();
    watched.child.request(b'f');
    watched.refresh_after(2 * SECOND);
    assert!(watched.at(FIRST).is_some() && watched.target.exclusion == Some(Exclusion::Restless));
    watched.child.request(b'k');
    watched.refresh_after(2 * SECOND);
    assert!(watched.at(FIRST).is_none() && watched.target.exclusion == Some(Exclusion::Restless));
    assert!(watched.target.left_out.iter().any(|(_, _, why)| *why == Exclusion::Locked));
    // Once the time is over, we don't leave the process alone any more.
    watched.refresh_after(LEFT_ALONE_NS);
    assert!(watched.target.exclusion.is_none());
}

#[test]
fn what_is_marked_stays_known_while_its_process_is_left_alone() {
    let mut watched = Watched::new();
    watched.child.request(b'm');
    assert!(watched.refresh_after(10 * SECOND));
    let before = watched.at(FIRST).unwrap();
    for (why, is_counted) in [
        (Exclusion::Traced { by: 1 }, true),
        (Exclusion::Restless, true),
        (Exclusion::Stuck, false),
        (Exclusion::NotReadable, false),
        (Exclusion::DumpableUnknown, true),
    ] {
        watched.target.set_marked();
        assert!(watched.target.leave_alone(why.clone()), "{why}");
        assert_eq!(watched.target.may_be_counted(), is_counted, "{why}");
        assert!(!watched.target.leave_alone(why), "it is not new");
        assert_eq!(watched.at(FIRST), Some(before));
        assert!(!watched.target.may_be_read());
        // Its regions have the same keys afterwards.
        watched.target.invalidate();
        assert!(watched.refresh_after(10 * SECOND));
        assert!(watched.at(FIRST) == Some(before) && watched.target.may_be_read());
    }
    // The regions go if the marks must go, or if there are none. As long as marks remain, limits count the pages.
    let first = &mut watched.target.regions[0].stretch;
    first.marked = first.pages;
    let marked = first.resident;
    assert!(watched.target.leave_alone(Exclusion::NotDumpable) && watched.target.regions.is_empty());
    assert!(!watched.target.may_be_counted());
    assert!(
        marked > Pages(0) && watched.target.forgotten() == marked,
        "{:?} of {marked:?}",
        watched.target.forgotten()
    );
    watched.target.request_unmark(Exclusion::NotDumpable, Marks::Mappings);
    watched.target.set_settled();
    assert_eq!(watched.target.forgotten(), Pages(0));
    let mut watched = Watched::new();
    watched.child.request(b'm');
    assert!(watched.refresh_after(10 * SECOND));
    assert!(watched.target.leave_alone(Exclusion::Restless) && watched.target.regions.is_empty());
    assert!(!watched.target.may_be_counted());
}

#[test]
fn only_processes_of_the_merged_domain_are_read_and_those_of_others_unmarked() {
    let mut watched = Watched::new();
    watched.child.request(b'm');
    assert!(watched.refresh_after(10 * SECOND));
    let [own, other] = [DEFAULT, "other"].map(|name| watched.rules.domains.key_of(name).unwrap());
    watched.target.set_marked();
    assert!(watched.at(FIRST).is_some() && !watched.target.has_foreign_marks(own));
    assert!(watched.target.has_foreign_marks(other));
    let change = |watched: &mut Watched, merged| {
        watched.rules.merged = Some(merged);
        watched.target.judge_again();
        assert!(watched.refresh_after(0));
    };
    change(&mut watched, other);
    let why = Exclusion::OtherDomain { own: DEFAULT.to_owned(), merged: "other".to_owned() };
    assert_eq!(watched.target.exclusion, Some(why));
    assert!(watched.target.regions.is_empty() && !watched.target.may_be_read());
    assert!(watched.target.pending.as_ref().is_some_and(|pending| pending.marks == Marks::Mappings));
    assert!(watched.target.has_foreign_marks(other), "it is still marked");
    watched.target.set_settled();
    assert!(!watched.target.has_foreign_marks(other));
    watched.refresh_after(0);
    assert!(watched.target.exclusion.is_some());
    change(&mut watched, own);
    assert!(watched.at(FIRST).is_some() && watched.target.may_be_read());
}

/// Two processes whose users get no key must not count as one domain.
#[test]
fn a_process_for_whose_domain_no_key_is_left_is_left_alone_and_unmarked() {
    for by_ksmd in [false, true] {
        let mut watched = Watched::new();
        watched.child.request(b'm');
        assert!(watched.refresh_after(10 * SECOND) && watched.at(FIRST).is_some());
        watched.target.set_marked();
        watched.rules.domain_rules.by_user = true;
        watched.rules.merged = by_ksmd.then_some(watched.target.domain);
        for number in 0.. {
            if watched.rules.domains.are_full() {
                break;
            }
            watched.rules.domains.key_of(&format!("domain {number}"));
        }
        watched.target.judge_again();
        assert!(watched.refresh_after(0));
        assert_eq!(watched.target.exclusion, Some(Exclusion::NoDomain));
        assert!(watched.target.regions.is_empty() && !watched.target.may_be_read());
        assert!(watched.target.pending.as_ref().is_some_and(|pending| pending.marks == Marks::Mappings));
        watched.target.set_settled();
        for _ in 0..3 {
            watched.refresh_after(10 * SECOND);
            assert_eq!(watched.target.exclusion, Some(Exclusion::NoDomain));
            assert!(watched.target.regions.is_empty() && !watched.target.may_be_read());
        }
        // Once a key is free, the process is in a domain again.
        watched.rules.domains.keep(|_| false);
        watched.rules.merged = None;
        watched.target.judge_again();
        assert!(watched.refresh_after(0) && watched.at(FIRST).is_some() && watched.target.exclusion.is_none());
    }
}

/// A release is switched by a link while programs of the last one run.
#[test]
fn a_program_stays_in_scope_when_the_link_that_it_was_selected_by_is_switched() {
    let directory = tempfile::tempdir().unwrap();
    let current = directory.path().join("current");
    for release in ["1", "2"] {
        fs::create_dir(directory.path().join(release)).unwrap();
        fs::copy("/bin/sleep", directory.path().join(release).join("server")).unwrap();
    }
    symlink("1", &current).unwrap();
    let mut server = loop {
        match Command::new(current.join("server")).arg("600").spawn() {
            // A child that another test has forked still holds the copy open.
            Err(error) if error.kind() == io::ErrorKind::ExecutableFileBusy => std::thread::yield_now(),
            server => break server.unwrap(),
        }
    };
    let pid = i32::try_from(server.id()).unwrap();
    wait_until("it has been loaded", || state(pid) == b'S');
    let mut now_ns = 0;
    let selector = Selector::Exe(current.join("server").to_str().unwrap().to_owned());
    let mut rules = ScopeRules::new(ScopeSpec(vec![selector]), Roots::default(), DenyList::new([]));
    let new_target = || {
        let process = Arc::new(Process::open(pid).unwrap());
        Target::new(ProcessInfo::of(&process).unwrap(), OwnerKey(1), DomainKey(0))
    };
    let mut check = |target: &mut Target, rules: &mut ScopeRules| {
        now_ns += SECOND;
        target.judge_again();
        let history = ProgramHistory::default();
        target.refresh(now_ns, 1, &mut Judge::new(rules, &history), || RegionKey(1)).unwrap();
        target.exclusion.clone()
    };
    let mut target = new_target();
    assert_eq!(check(&mut target, &mut rules), None);
    fs::remove_file(&current).unwrap();
    symlink("2", &current).unwrap();
    assert_eq!(check(&mut target, &mut rules), None);
    let other_version = Some(Exclusion::Untrusted(Distrust::OtherVersion));
    assert_eq!(check(&mut new_target(), &mut rules), other_version, "a run that begins now");
    rules.scope = ScopeSpec(vec![Selector::Exe("another".to_owned())]);
    assert_eq!(check(&mut target, &mut rules), Some(Exclusion::OutOfScope), "its selector has gone");
    server.kill().unwrap();
    server.wait().unwrap();
}

#[test]
fn a_fork_is_known_by_the_links_that_have_led_to_its_parent() {
    let directory = tempfile::tempdir().unwrap();
    let link = directory.path().join("link");
    symlink(std::env::current_exe().unwrap(), &link).unwrap();
    let child = Child::fork();
    let info_of = |pid: i32| ProcessInfo::of(&Arc::new(Process::open(pid).unwrap())).unwrap();
    let matches = |info: &ProcessInfo| info.exe.as_ref().unwrap().matches(link.to_str().unwrap(), b"");
    let parent = Target::new(info_of(i32::try_from(std::process::id()).unwrap()), OwnerKey(1), DomainKey(0));
    let known = matches(&parent.info);
    assert_ne!(known, Matching::No);
    fs::remove_file(&link).unwrap();
    let mut fork = info_of(child.pid);
    assert_eq!(matches(&fork), Matching::No);
    let mut executed = fork.clone();
    executed.stat.only_forked = false;
    for info in [&mut fork, &mut executed] {
        parent.share_exe(info);
    }
    assert_eq!((matches(&fork), matches(&executed)), (known, Matching::No));
}

/// We wait only for programs that an earlier run has marked. A program that marks its own memory has chosen to do so.
#[test]
fn only_our_own_marks_in_other_domains_are_waited_for() {
    for is_recorded in [false, true] {
        let mut watched = Watched::new();
        watched.child.request(b'm');
        watched.child.request(b's');
        let [own, other] = [DEFAULT, "other"].map(|name| watched.rules.domains.key_of(name).unwrap());
        if is_recorded {
            watched.history.marked.add(watched.target.image().unwrap(), own, DEFAULT).unwrap();
        }
        watched.rules.merged = Some(other);
        watched.target.judge_again();
        assert!(watched.refresh_after(10 * SECOND) && watched.target.is_excluded());
        assert_eq!(watched.target.has_foreign_marks(other), is_recorded);
        assert_eq!(watched.target.pending.is_some(), is_recorded);
        if !is_recorded {
            continue;
        }
        // We remove all marks again and again, and each time the program makes others.
        for try_number in 1..=PASSES {
            assert!(watched.target.has_foreign_marks(other));
            assert_eq!(watched.target.set_unmarked(watched.now_ns), try_number < PASSES);
        }
        watched.refresh_after(10 * SECOND);
        assert!(!watched.target.has_foreign_marks(other) && watched.target.pending.is_none());
        // If memory must never be merged, or somebody wants it unmerged, we try again later.
        watched.target.unmerge(1);
        for try_number in 1..=PASSES {
            assert_eq!(watched.target.set_unmarked(watched.now_ns), try_number < PASSES);
        }
        assert!(watched.target.pending.as_ref().is_some_and(|pending| pending.problem.is_some()));
    }
}

#[test]
fn marks_of_a_process_with_hidden_cgroups_stay_in_the_account() {
    let mut watched = Watched::new();
    let proc = tempfile::tempdir().unwrap();
    let dir = proc.path().join(watched.child.pid.to_string());
    std::fs::create_dir(&dir).unwrap();
    for entry in std::fs::read_dir(format!("/proc/{}", watched.child.pid)).unwrap() {
        let path = entry.unwrap().path();
        let link = dir.join(path.file_name().unwrap());
        symlink(if path.ends_with("cgroup") { "x".repeat(300).into() } else { path }, link).unwrap();
    }
    watched.target.info.process = Arc::new(Process::open_at(proc.path(), watched.child.pid).unwrap());
    let [own, other] = [DEFAULT, "other"].map(|name| watched.rules.domains.key_of(name).unwrap());
    watched.history.marked.add(watched.target.image().unwrap(), own, DEFAULT).unwrap();
    watched.refresh_after(10 * SECOND);
    assert!(matches!(watched.target.exclusion, Some(Exclusion::OptedOut(_))));
    assert!(watched.target.has_foreign_marks(other) && watched.target.pending.is_some());
}

/// A denied program may call itself something else.
#[test]
fn a_denial_stands_until_another_program_runs_or_the_list_changes() {
    let is_denied = |watched: &mut Watched| {
        watched.refresh_after(10 * SECOND);
        matches!(watched.target.exclusion, Some(Exclusion::DenyListed { .. }))
    };
    for has_new_list in [true, false] {
        let mut watched = Watched::new();
        watched.rules.deny = DenyList::new([watched.target.info.name.clone()]);
        watched.target.judge_again();
        assert!(is_denied(&mut watched));
        watched.child.request(b'n');
        assert!(is_denied(&mut watched));
        if has_new_list {
            watched.target.forget_denial();
        } else {
            watched.child.request(b'a');
        }
        assert!(!is_denied(&mut watched));
    }
}

#[test]
fn a_moved_mapping_is_detected_although_no_size_has_changed() {
    let mut watched = Watched::new();
    watched.child.request(b'm');
    assert!(watched.refresh_after(10 * SECOND));
    watched.child.request(b'r');
    assert!(watched.refresh_after(10 * SECOND));
    assert!(watched.at(AWAY).is_some() && watched.at(FIRST).is_none());
}

#[test]
fn a_process_that_has_ended_is_vanished_whether_reaped_or_not() {
    let mut watched = Watched::new();
    watched.child.kill();
    let end = std::time::Instant::now() + std::time::Duration::from_secs(5);
    while watched.target.info.process.is_alive() && std::time::Instant::now() < end {
        std::thread::yield_now();
    }
    assert!(matches!(watched.refresh(), Err(ReadError::Vanished { .. })));
    // SAFETY: the child is ours.
    unsafe { libc::waitpid(watched.child.pid, std::ptr::null_mut(), 0) };
    assert!(matches!(watched.refresh(), Err(ReadError::Vanished { .. })));
}

/// After the main thread's end `/proc/PID` shows a zombie, but another thread goes on with the same memory.
#[test]
fn a_process_whose_main_thread_has_ended_is_still_judged() {
    let mut watched = Watched::new();
    watched.child.request(b'm');
    assert!(watched.refresh_after(10 * SECOND));
    watched.target.set_marked();
    watched.child.request(b't');
    pagefold_testkit::wait_until("the main thread has ended", || {
        watched.target.info.process.stat().unwrap().has_ended()
    });
    watched.refresh_after(SECOND);
    assert!(watched.at(FIRST).is_some() && watched.target.exclusion.is_none());
    watched.child.request(b'k');
    for _ in 0..4 {
        watched.refresh_after(SECOND);
    }
    assert!(watched.at(FIRST).is_none());
    assert!(
        watched.target.left_out.iter().any(|(_, _, why)| *why == Exclusion::Locked),
        "{:?}",
        watched.target.left_out
    );
    watched.child.kill();
    pagefold_testkit::wait_until("all threads have ended", || !watched.target.info.process.is_alive());
    assert!(matches!(watched.refresh(), Err(ReadError::Vanished { .. })));
}

/// Locks and flags of whole mappings change neither sizes nor the list of mappings.
#[test]
fn flags_of_whole_mappings_are_found_in_a_bounded_time() {
    for (request, limit_ns, why) in [(b'k', 2 * SECOND, Exclusion::Locked), (b'w', FLAGS_NS, Exclusion::WipeOnFork)] {
        let mut watched = Watched::new();
        watched.child.request(b'm');
        assert!(watched.refresh_after(10 * SECOND));
        assert!(watched.at(FIRST).is_some());
        watched.refresh_after(FLAGS_NS);
        watched.child.request(request);
        watched.target.set_marked();
        for _ in 0..4 {
            watched.refresh_after(limit_ns / 4);
        }
        watched.refresh_after(SECOND / 4);
        assert!(watched.at(FIRST).is_none(), "{why}");
        assert!(watched.target.left_out.iter().any(|(_, _, reason)| *reason == why), "{:?}", watched.target.left_out);
    }
}

#[test]
fn a_process_that_replaces_its_auxv_keeps_its_marks_in_the_account() {
    let mut watched = Watched::new();
    watched.target.set_marked();
    watched.target.unmerge(0);
    let image = watched.target.image();
    watched.child.request(b'a');
    watched.refresh_after(10 * SECOND);
    assert_ne!(watched.target.image(), image);
    assert!(watched.target.marks.are_set && watched.target.pending.is_some());
}

/// If other processes have used up our patience, or the injector takes long, the process hasn't stalled.
#[test]
fn a_process_does_not_pay_for_the_delays_of_others() {
    let mut watched = Watched::new();
    let process = watched.target.info.process.clone();
    while run_abandonable(|| std::thread::sleep(PATIENCE / 2)).is_ok() {}
    let read = watched.target.read(|_| {
        std::thread::sleep(PATIENCE / 3);
        Ok(())
    });
    assert!(read.is_err_and(|error| error.is_late()) && watched.target.has_timed_out());
    // The read may end between the two looks at it.
    while watched.target.has_timed_out() {
        let is_refreshed = watched.refresh_after(SECOND);
        assert!(!is_refreshed || !watched.target.has_timed_out());
        std::thread::sleep(Duration::from_millis(1));
    }
    for _ in 0..3 {
        let job = Job::start(|| elsewhere(|| std::thread::sleep(PATIENCE * 2)));
        let mut job = job.wait(PATIENCE).unwrap_err();
        std::thread::sleep(PATIENCE);
        watched.target.leave(&mut job.pending);
    }
    assert!(READS.pause(&process).is_zero() && !READS.is_in_force(&process));
    // If the process itself keeps us waiting, it has stalled.
    let mut job = Job::start(|| std::thread::sleep(PATIENCE * 3)).wait(PATIENCE).unwrap_err();
    watched.target.leave(&mut job.pending);
    assert!(READS.is_in_force(&process) && READS.pause(&process).is_zero());
    std::thread::sleep(PATIENCE * 2);
    watched.target.leave(&mut job.pending);
    assert!(!READS.pause(&process).is_zero());
}

/// A program can make our reads compute for long, by mappings with long names. We don't wait longer for such a read
/// than for one that sleeps, and use the result later.
#[test]
fn a_read_that_computes_for_long_goes_on_without_us() {
    let mut watched = Watched::new();
    watched.child.request(b'm');
    assert!(watched.refresh_after(10 * SECOND));
    let slow = |process: &Process| {
        let end = Instant::now() + PATIENCE * 3;
        while Instant::now() < end {
            std::hint::spin_loop();
        }
        read_smaps(process)
    };
    let began = Instant::now();
    let error = watched.target.mappings_by(slow).unwrap_err();
    assert!(began.elapsed() < PATIENCE * 2, "{:?}", began.elapsed());
    assert!(error.is_late() && error.to_string().contains("takes long"), "{error}");
    assert!(watched.target.mappings_by(slow).is_err_and(|error| error.is_late()), "one at a time");
    while watched.target.has_timed_out() {
        // The read can't have ended yet.
        if began.elapsed() < PATIENCE * 2 {
            assert!(!watched.target.is_blocked() && !watched.refresh_after(SECOND));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(READS.pause(&watched.target.info.process).is_zero(), "it is no stall");
    let details = watched.target.mappings_by(slow).unwrap();
    assert!(details.iter().any(|detail| detail.vma.start == FIRST as u64));
    assert!(watched.target.mappings_by(slow).is_err(), "it is used once");
    let began = Instant::now();
    let mut watched = Watched::new();
    let read = watched.target.read(move |process| slow(process));
    assert!(read.is_err() && began.elapsed() < PATIENCE * 2);
}

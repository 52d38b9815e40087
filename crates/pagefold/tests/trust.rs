//! If marked memory becomes excluded or changes its domain, pagefold unmarks and unmerges it in a bounded time.

#[path = "trust/shares.rs"]
mod shares;
#[path = "trust/worst.rs"]
mod worst;

use pagefold_testkit::*;
use std::path::Path;
use std::time::{Duration, Instant};

/// The number of pages of each process, and the number from which we make their contents.
const PAGES: u64 = 8 * PAGES_PER_MIB;
const CONTENT: u64 = 0x7057_0001;
/// Nearly all of a process's memory.
const MERGED: u64 = 7 * MIB;
/// The bounds in docs/safety.md for a process's state (2 s) and for flags of mappings (10 s), plus time for a busy
/// machine.
const SOON: Duration = Duration::from_secs(12);
const FLAGS: Duration = Duration::from_secs(20);
/// The bound for root's processes, which we must ask whether they're dumpable.
const ASKED: Duration = Duration::from_secs(110);

/// A process with the same contents as all others of the test.
fn holder(program: &Path) -> Holder {
    Holder::with_as(program, PAGES, CONTENT)
}

/// A process, the change that we make to it, and how long it may stay marked after that.
struct Case<'a> {
    name: &'static str,
    holder: Holder,
    act: Box<dyn FnMut(&mut Holder) + 'a>,
    limit: Duration,
}

#[test]
fn what_becomes_excluded_after_it_was_marked_is_unmarked_even_while_paused() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let plain = victim_binary("holder");
    let other = ProgramCopy::of(&plain, "pf-denied");
    let config = ConfigFile::new("[domains]\nby = \"cgroup-xattr\"\n");
    let owned = Cgroup::create("unified").expect("cgroup version 2");
    std::os::unix::fs::chown(owned.path(), Some(1234), None).unwrap();
    let ask = |command: String| -> Box<dyn FnMut(&mut Holder)> {
        Box::new(move |holder| assert_eq!(holder.ask(&command), 0))
    };
    let all = |command: &str| ask(format!("{command} 0 {PAGES}"));
    let advise = |advice: i32| ask(format!("advise 0 {PAGES} {advice}"));
    let case = |name, program: &Path, act, limit| Case { name, holder: holder(program), act, limit };
    let mut others = vec![holder(&plain), holder(&plain)];
    let mut cases = vec![
        case("mlock", &plain, all("lock"), SOON),
        case("MADV_WIPEONFORK", &plain, advise(libc::MADV_WIPEONFORK), FLAGS),
        case("MADV_DONTDUMP", &plain, advise(libc::MADV_DONTDUMP), FLAGS),
        case("userfaultfd", &plain, all("register"), FLAGS),
        case("not dumpable", &plain, ask("dumpable 0".to_owned()), SOON),
        case("not dumpable, as root", &plain, ask("dumpable 0".to_owned()), ASKED),
        case("cgroup with an opt-out", &plain, Box::new(|holder: &mut Holder| owned.add(holder.pid())), SOON),
        case("deny list", &other, Box::new(|_: &mut Holder| {}), SOON),
    ];
    cases[4].holder.ask("user 4321");
    cgroup::set_attribute(owned.path(), "user.pagefold.avoid", "1");
    let pids: Vec<i32> = others.iter().chain(cases.iter().map(|case| &case.holder)).map(Holder::pid).collect();
    let daemon = Daemon::on(&pids, &["--config", config.name(), "--governor", "full"]);
    wait_until_merged(&pids, MERGED);
    assert!(pagefold(&["pause"]).status.success());
    let mut began = Instant::now();
    for case in &mut cases {
        (case.act)(&mut case.holder);
    }
    let mut late = Vec::new();
    for case in &mut cases {
        let pid = case.holder.pid();
        if case.name == "deny list" {
            // The deny list comes last, because reloading it makes the daemon look at everything again.
            daemon.reload(&config, "[deny]\nalso = [\"pf-denied\"]\n");
            began = Instant::now();
        }
        while marks(pid) != Marks::default() && began.elapsed() < case.limit {
            std::thread::sleep(Duration::from_millis(20));
        }
        match marks(pid) {
            left if left == Marks::default() => println!("{}: {:.1} s", case.name, began.elapsed().as_secs_f64()),
            left => late.push((case.name, left)),
        }
        assert!(case.holder.is_intact(), "{}", case.name);
    }
    assert!(late.is_empty(), "still marked: {late:?}");
    for other in &mut others {
        assert!(other.is_intact() && marks(other.pid()).merged >= MERGED, "the others stay merged");
    }
    assert!(pagefold(&["resume"]).status.success());
    // The processes stay unmarked.
    std::thread::sleep(Duration::from_secs(3));
    for case in &mut cases {
        assert_eq!(marks(case.holder.pid()), Marks::default(), "{}", case.name);
        assert!(case.holder.is_intact(), "{}", case.name);
    }
    ksm.end(daemon, &others.iter().map(Holder::pid).collect::<Vec<_>>());
}

#[test]
fn a_process_that_moves_to_another_domain_is_unmarked_first() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let config = ConfigFile::new("[domains]\nby = \"user\"\n");
    let program = victim_binary("holder");
    // Two processes are root's, one starts as root's and changes its user, and one belongs to that user from the start.
    let mut roots = [holder(&program), holder(&program)];
    let (mut moving, mut there) = (holder(&program), holder(&program));
    there.ask("user 4321");
    let all = [roots[0].pid(), roots[1].pid(), moving.pid(), there.pid()];
    let daemon = Daemon::on(&all[..3], &["--config", config.name(), "--governor", "full"]);
    wait_until_merged(&all[..3], MERGED);
    moving.ask("user 4321");
    wait_until_unmarked(moving.pid(), SOON, "merged with root's");
    // ksmd only merges root's domain.
    std::thread::sleep(Duration::from_secs(5));
    assert_eq!(marks(moving.pid()), Marks::default());
    let status = status();
    let why = &row(&status["processes"], "pid", moving.pid())["left_alone"];
    assert_eq!(why, "in trust domain user:4321; ksmd merges one domain, user:0 ([domains] merge)");
    assert!(moving.is_intact() && there.is_intact());
    for root in &mut roots {
        assert!(root.is_intact() && marks(root.pid()).merged >= MERGED);
    }
    ksm.end(daemon, &all);
}

#[test]
fn marks_that_cannot_be_removed_yet_are_shown() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let config = ConfigFile::new("");
    let program = victim_binary("holder");
    let denied = ProgramCopy::of(&program, "pf-denied");
    let (mut stays, mut frozen) = (holder(&program), holder(&denied));
    let Some(freezer) = Freezer::of_any_version() else { return };
    let pids = [stays.pid(), frozen.pid()];
    let daemon = Daemon::on(&pids, &["--config", config.name(), "--governor", "full"]);
    wait_until_merged(&pids, MERGED);
    assert_eq!(status()["to_unmark_bytes"], 0);
    freezer.freeze_process(frozen.pid());
    daemon.reload(&config, "[deny]\nalso = [\"pf-denied\"]\n");
    wait_until("its marks are shown", || status()["to_unmark_bytes"].as_u64() >= Some(MERGED));
    let shown = status();
    let to_unmark = &row(&shown["processes"], "pid", frozen.pid())["to_unmark"];
    assert_eq!(
        (&to_unmark["bytes"], &to_unmark["reason"]),
        (&shown["to_unmark_bytes"], &"on the deny list (pf-denied)".into())
    );
    assert!(to_unmark["problem"].as_str().unwrap().contains("frozen"), "{to_unmark}");
    assert!(row(&shown["processes"], "pid", stays.pid())["to_unmark"].is_null(), "{shown}");
    assert!(succeed(&["status"]).contains("to unmark 8"), "{}", succeed(&["status"]));
    let explanation = succeed(&["explain", &frozen.pid().to_string()]);
    assert_has(&explanation, &["still to be unmarked: on the deny list (pf-denied)"]);
    freezer.freeze(false);
    wait_until("it is unmarked", || marks(frozen.pid()) == Marks::default());
    wait_until("nothing is left to unmark", || status()["to_unmark_bytes"] == 0);
    assert!(stays.is_intact() && frozen.is_intact());
    ksm.end(daemon, &[stays.pid()]);
}

/// An exec removes marks, but the process and its pid stay the same.
#[test]
fn a_new_program_is_judged_anew() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let program = victim_binary("holder");
    let denied = ProgramCopy::of(&program, "pf-denied");
    let (mut stays, mut turns) = (holder(&program), holder(&program));
    let pids = [stays.pid(), turns.pid()];
    let daemon = Daemon::on(&pids, &["--deny", "pf-denied", "--governor", "full"]);
    wait_until_merged(&pids, MERGED);
    // The new program is on the deny list, and holds the same memory again.
    turns.exec(&denied, PAGES);
    turns.write(0, PAGES, CONTENT);
    std::thread::sleep(Duration::from_secs(8));
    assert_eq!(marks(turns.pid()), Marks::default());
    assert!(stays.is_intact() && turns.is_intact());
    let text = succeed(&["explain", &turns.pid().to_string()]);
    assert_has(&text, &["on the deny list (pf-denied)"]);
    ksm.end(daemon, &[stays.pid()]);
}

/// The parent of a vfork sleeps uninterruptibly, so it can't say whether it's dumpable.
#[test]
fn a_process_that_cannot_answer_is_neither_read_nor_marked() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let program = victim_binary("holder");
    let (mut one, mut other, mut silent) = (holder(&program), holder(&program), holder(&program));
    // After it changes its group, only the process itself can say whether it's dumpable.
    for command in ["group 77", "dumpable 0", "sleep"] {
        silent.ask(command);
    }
    wait_until("it sleeps", || state(silent.pid()) == b'D');
    let pids = [one.pid(), other.pid(), silent.pid()];
    let daemon = Daemon::on(&pids, &["--governor", "full"]);
    wait_until_merged(&pids[..2], MERGED);
    std::thread::sleep(Duration::from_secs(3));
    assert_eq!(marks(silent.pid()), Marks::default());
    let text = succeed(&["explain", &silent.pid().to_string()]);
    assert_has(&text, &["whether its memory is private"]);
    assert!(one.is_intact() && other.is_intact());
    ksm.end(daemon, &pids[..2]);
}

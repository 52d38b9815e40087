//! The verdict at the end, from the victims' own reports and from everything that can be seen from outside.

use crate::Run;
use crate::victims::{Class, Member, Signals, masks, signals};
use pagefold_inject::held;
use pagefold_testkit::injection::{PLAIN, Victim};
use pagefold_testkit::status_field;
use std::collections::BTreeMap;
use std::fs;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// How long a handler may take to return, or a thread to thaw, on busy processors. After the first condition that
/// doesn't come true in time, the others get less.
const LIMIT: Duration = Duration::from_secs(30);
const LIMIT_AFTER_FAILURE: Duration = Duration::from_secs(1);

fn comes_true(mut condition: impl FnMut() -> bool) -> bool {
    static HAS_FAILED: AtomicBool = AtomicBool::new(false);
    let begun = Instant::now();
    loop {
        if condition() {
            return true;
        }
        if begun.elapsed() > if HAS_FAILED.load(Relaxed) { LIMIT_AFTER_FAILURE } else { LIMIT } {
            HAS_FAILED.store(true, Relaxed);
            return false;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Checks all victims, and returns everything that is wrong.
pub fn failures(run: &Run) -> Vec<String> {
    let mut failures = run.results.failures();
    let mut fail = |what: String| failures.push(what);
    for &index in &run.victims.stopped {
        run.victims.members[index].kill(libc::SIGCONT);
    }
    if !comes_true(|| held() == 0) {
        fail("a target is still held".into());
    }
    let mut own = [0_u64; 3];
    for member in &run.victims.members {
        let Some(target) = member.target() else { continue };
        let pid = target.process.pid();
        if let Err(what) = check_from_outside(member, pid) {
            fail(format!("{}: {what}", member.name));
        }
        if let Some(victim) = member.victim.lock().unwrap().as_mut() {
            match verdict(member, victim) {
                Ok(reported) => {
                    if member.disturbed_by == Signals::Interrupting && !masks(&member.name) {
                        (0..3).for_each(|kind| own[kind] += reported.own[kind]);
                    }
                    if reported.short > 0 {
                        let tally = run.results.tally(&member.name);
                        let (made, refused) = (tally.made, tally.count("NoSafeThread"));
                        println!("{}: {} writes cut short by {made} injections", member.name, reported.short);
                        // A thread that is copying in a write looks like one that computes. Repeated checks find most
                        // of these.
                        if reported.short > 8 + refused {
                            fail(format!("{}: {} writes cut short, {refused} refused", member.name, reported.short));
                        }
                    }
                }
                Err(what) => fail(format!("{}: {what}", member.name)),
            }
        }
    }
    // A signal sent during a stop stays pending until the thread has its own registers again, and must then interrupt
    // its call. We rarely stop a thread just before that call.
    println!(
        "signals sent during a stop: {} interrupted the call, {} arrived before it, {} elsewhere",
        own[0], own[1], own[2]
    );
    if own[0] < own[1] * 4 || own[0] == 0 {
        fail(format!("too few signals sent during a stop interrupted the call: {own:?}"));
    }
    counts(run, &mut fail);
    failures
}

fn check_from_outside(member: &Member, pid: i32) -> Result<(), String> {
    let tasks = || -> Vec<String> {
        let entries = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten();
        entries.filter_map(|entry| Some(entry.ok()?.path().to_str()?.to_owned())).collect()
    };
    if tasks().is_empty() {
        return Err("it has ended".into());
    }
    let free = |dir: &String| {
        // A thread that has just ended has neither field.
        let is_untraced = status_field(dir, "TracerPid").is_none_or(|by| by == "0");
        is_untraced && status_field(dir, "State").is_none_or(|state| !state.starts_with(['t', 'T']))
    };
    if !comes_true(|| tasks().iter().all(free)) {
        return Err("it is still traced or stopped".into());
    }
    // A handler blocks its signal while it runs.
    if member.steady && !comes_true(|| signals(pid) == member.signals_before) {
        return Err(format!("its signals are {:?}, and were {:?}", signals(pid), member.signals_before));
    }
    Ok(())
}

/// The counts that a victim reports at its end.
struct Counts {
    /// Of the signals sent during a stop: how many interrupted the call, arrived before it, or arrived elsewhere.
    own: [u64; 3],
    /// How many large writes were cut short.
    short: u64,
}

/// Ends the victim, and compares its counts with the signals that were sent.
fn verdict(member: &Member, victim: &mut Victim) -> Result<Counts, String> {
    victim.send_byte(b'q');
    // These two victims wait for nothing but a signal, and a wait may have begun before we sent the byte.
    let waits = ["pause", "sigsuspend"].iter().any(|name| member.name.starts_with(name));
    if !comes_true(|| {
        if waits {
            member.send(PLAIN);
        }
        has_answered(victim)
    }) {
        return Err("it does not end".into());
    }
    let line = victim.line();
    let Some(counts) = line.strip_prefix("ok ") else { return Err(line) };
    let count = |name: &str| -> Result<&str, String> {
        counts.split(' ').find_map(|word| word.strip_prefix(name)).ok_or_else(|| format!("it printed {line}"))
    };
    let number = |text: &str| text.parse::<u64>().map_err(|_| format!("it printed {line}"));
    if number(count("rounds=")?)? == 0 {
        return Err("it made no round".into());
    }
    let runs = number(count("runs=")?)?;
    let sent = member.sent.load(Relaxed) + member.sent_inside.load(Relaxed);
    let most = sent + member.perhaps_sent.load(Relaxed);
    // To end the victim's wait, we may have sent it signals after its last check.
    let least = if waits { 0 } else { sent };
    if !(least..=most).contains(&runs) {
        return Err(format!("its handlers ran {runs} times for {sent} to {most} signals"));
    }
    let own: Vec<u64> = count("own=")?.split('/').map(number).collect::<Result<_, _>>()?;
    let own = <[u64; 3]>::try_from(own).map_err(|_| format!("it printed {line}"))?;
    Ok(Counts { own, short: number(count("short=")?)? })
}

fn has_answered(victim: &Victim) -> bool {
    let fd = victim.program.output.get_ref().as_raw_fd();
    let mut polled = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    !victim.program.output.buffer().is_empty() || {
        // SAFETY: one pollfd, which lives through the call.
        unsafe { libc::poll(&raw mut polled, 1, 20) > 0 }
    }
}

/// Whether there were enough injections, altogether and of each kind.
fn counts(run: &Run, fail: &mut impl FnMut(String)) {
    let made = run.made.load(Relaxed);
    if made < run.wanted {
        fail(format!("{made} injections were made instead of {}", run.wanted));
    }
    let classes: BTreeMap<_, _> =
        run.victims.members.iter().map(|member| (member.name.as_str(), member.class)).collect();
    for (name, class) in classes {
        let tally = run.results.tally(name);
        let enough = match class {
            // Only one tracer can attach at a time, so refusals because of another injector don't count.
            Class::Willing => tally.made > 0 && tally.made >= 2 * (tally.failed() - tally.count("Traced")),
            // We may stop a writer while it runs, perhaps in the middle of a write, but never while a write blocks.
            Class::Reluctant if name.ends_with("-write") => tally.count("NoSafeThread") > 0,
            Class::Reluctant | Class::Execs | Class::ShortLived => tally.made > 0,
        };
        if !enough && run.wanted >= 5000 {
            fail(format!("{name}: {tally:?}"));
        }
    }
}

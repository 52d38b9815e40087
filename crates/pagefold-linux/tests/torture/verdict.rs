//! What is left when all is over: the outside look, and the victims' own verdicts.

use crate::Run;
use crate::crew::{Class, Member, Storm, masks, signals};
use crate::inject_support::{Victim, status_field};
use crate::storm::PLAIN;
use pagefold_linux::inject::held;
use std::collections::BTreeMap;
use std::fs;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// How long the last handler may take, or a thawed thread; on busy cores everything takes long. Only a failure waits
/// for so long, and only the first one.
const PATIENCE: Duration = Duration::from_secs(30);
const NO_PATIENCE: Duration = Duration::from_millis(500);

fn comes_true(mut what: impl FnMut() -> bool) -> bool {
    static IN_VAIN: AtomicBool = AtomicBool::new(false);
    let begun = Instant::now();
    loop {
        if what() {
            return true;
        }
        if begun.elapsed() > if IN_VAIN.load(Relaxed) { NO_PATIENCE } else { PATIENCE } {
            IN_VAIN.store(true, Relaxed);
            return false;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

pub fn judge(run: &Run) -> Vec<String> {
    let mut failures = run.tally.failures();
    let mut fail = |what: String| failures.push(what);
    for &index in &run.crew.stopped {
        run.crew.members[index].kill(libc::SIGCONT);
    }
    if !comes_true(|| held() == 0) {
        fail("something is still held".into());
    }
    let mut own = [0_u64; 3];
    for member in &run.crew.members {
        let Some(target) = member.target() else { continue };
        let pid = target.process.pid();
        if let Err(what) = seen_from_outside(member, pid) {
            fail(format!("{}: {what}", member.name));
        }
        if let Some(victim) = member.victim.lock().unwrap().as_mut() {
            match verdict(member, victim) {
                Ok(account) => {
                    if member.storm == Storm::Interrupting && !masks(&member.name) {
                        (0..3).for_each(|kind| own[kind] += account.own[kind]);
                    }
                    if account.short > 0 {
                        let line = run.tally.line(&member.name);
                        let (made, refused) = (line.made, line.count("no-safe-thread"));
                        println!("{}: {} writes cut short by {made} injections", member.name, account.short);
                        // What is copying is not seen to be in a write; looking again and again finds most of them.
                        if account.short > 8 + refused {
                            fail(format!("{}: {} writes cut short, {refused} spared", member.name, account.short));
                        }
                    }
                }
                Err(what) => fail(format!("{}: {what}", member.name)),
            }
        }
    }
    // A signal sent in a stop waits until the thread is itself again, and must then interrupt its call. To be stopped
    // just before the call is rare.
    println!(
        "signals sent in a stop: {} interrupted the call, {} came before it, {} elsewhere",
        own[0], own[1], own[2]
    );
    if own[0] < own[1] * 4 || own[0] == 0 {
        fail(format!("too few signals sent in a stop interrupted the call: {own:?}"));
    }
    counts(run, &mut fail);
    failures
}

fn seen_from_outside(member: &Member, pid: i32) -> Result<(), String> {
    let tasks = || -> Vec<String> {
        let entries = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten();
        entries.filter_map(|entry| Some(entry.ok()?.path().to_str()?.to_owned())).collect()
    };
    if tasks().is_empty() {
        return Err("it is gone".into());
    }
    let free = |dir: &String| {
        // A thread that has ended meanwhile is neither.
        let tracer = status_field(dir, "TracerPid").is_none_or(|by| by == "0");
        let state = status_field(dir, "State").is_none_or(|state| !state.starts_with(['t', 'T']));
        tracer && state
    };
    if !comes_true(|| tasks().iter().all(free)) {
        return Err("it is still traced or stopped".into());
    }
    // A handler that still runs blocks its signal.
    if member.steady && !comes_true(|| signals(pid) == member.signals) {
        return Err(format!("its signals are {:?}, and were {:?}", signals(pid), member.signals));
    }
    Ok(())
}

/// What a content victim says of itself.
struct Account {
    /// Signals sent in a stop: that interrupted the call, came before it, came elsewhere.
    own: [u64; 3],
    /// Large writes cut short.
    short: u64,
}

/// Tells the victim to end, and compares its counts with ours.
fn verdict(member: &Member, victim: &mut Victim) -> Result<Account, String> {
    victim.send_byte(b'q');
    // Two calls wait for nothing but a signal, and one may have begun before the byte came.
    let waits = ["pause", "sigsuspend"].iter().any(|name| member.name.starts_with(name));
    if !comes_true(|| {
        if waits {
            member.send(PLAIN);
        }
        answers(victim)
    }) {
        return Err("it does not answer".into());
    }
    let line = victim.line();
    let Some(counts) = line.strip_prefix("ok ") else { return Err(line) };
    let count = |name: &str| -> Result<&str, String> {
        counts.split(' ').find_map(|word| word.strip_prefix(name)).ok_or_else(|| format!("it says {line}"))
    };
    let number = |text: &str| text.parse::<u64>().map_err(|_| format!("it says {line}"));
    if number(count("rounds=")?)? == 0 {
        return Err("it has done nothing".into());
    }
    let runs = number(count("runs=")?)?;
    let sent = member.sent.load(Relaxed) + member.sent_inside.load(Relaxed);
    let most = sent + member.perhaps_sent.load(Relaxed);
    // After its last look it may have been sent one more of those that end its wait.
    let least = if waits { 0 } else { sent };
    if !(least..=most).contains(&runs) {
        return Err(format!("its handlers ran {runs} times for {sent} to {most} signals"));
    }
    let own: Vec<u64> = count("own=")?.split('/').map(number).collect::<Result<_, _>>()?;
    let own = <[u64; 3]>::try_from(own).map_err(|_| format!("it says {line}"))?;
    Ok(Account { own, short: number(count("short=")?)? })
}

fn answers(victim: &Victim) -> bool {
    let fd = victim.output.get_ref().as_raw_fd();
    let mut polled = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    !victim.output.buffer().is_empty() || unsafe { libc::poll(&raw mut polled, 1, 20) } > 0
}

/// Whether there were enough injections, altogether and of each kind.
fn counts(run: &Run, fail: &mut impl FnMut(String)) {
    let made = run.made.load(Relaxed);
    if made < run.wanted {
        fail(format!("{made} injections were made instead of {}", run.wanted));
    }
    let classes: BTreeMap<_, _> = run.crew.members.iter().map(|member| (member.name.as_str(), member.class)).collect();
    for (name, class) in classes {
        let line = run.tally.line(name);
        let enough = match class {
            // One tracer at a time: another worker's does not count.
            Class::Willing => line.made > 0 && line.made >= 2 * (line.failed() - line.count("traced")),
            // Writers are caught running, and so perhaps in the middle of a write, but not blocked in it.
            Class::Reluctant if name.ends_with("-write") => line.count("no-safe-thread") > 0,
            Class::Reluctant | Class::Execs | Class::Mayfly => line.made > 0,
            Class::Compat => line.made == 0 && line.count("compat") > 0,
        };
        if !enough && run.wanted >= 5000 {
            fail(format!("{name}: {line:?}"));
        }
    }
}

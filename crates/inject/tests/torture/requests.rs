//! The requests for injections, and their right results.

use crate::Run;
use crate::victims::{Class, Member, Signals, Target};
use pagefold_engine::random::Random;
use pagefold_inject::{Call, Errno, InjectError, InjectionReport, Limits, inject, inject_thread};
use pagefold_testkit::injection::{MARK, ON_STACK, PATIENT, PLAIN, UNMARK, injector, run_unchecked};
use pagefold_testkit::tids;
use std::sync::atomic::Ordering::Relaxed;

/// Generous limits: on busy processors a thread takes long to stop, and the test is about damage, not delays.
const WILLING: Limits = Limits { calls_per_stop: 8, ..PATIENT };
/// Short limits: some of these victims never stop.
const RELUCTANT: Limits = Limits { stop_ns: 20_000_000, call_ns: 100_000_000, calls_per_stop: 8 };

fn limits(member: &Member) -> &'static Limits {
    if member.class == Class::Reluctant { &RELUCTANT } else { &WILLING }
}

/// A batch of calls, and the values that they must return.
struct Batch {
    calls: Vec<Call>,
    answers: Vec<u64>,
    signals: u64,
}

/// Chooses a batch: mostly a mark or its removal, sometimes more calls than fit into one stop, or signals that the
/// target sends itself during the stop.
fn batch(member: &Member, target: &Target, random: &mut Random) -> Batch {
    let own = u64::from(target.inner_pid.unsigned_abs());
    let mark = |random: &mut Random| {
        let advice = if random.below(2) == 0 { MARK } else { UNMARK };
        (Call::madvise(target.addr, target.len, advice), 0)
    };
    let getpid = || (Call { nr: libc::SYS_getpid, args: [0; 6] }, own);
    let mut signals = 0;
    let calls: Vec<(Call, u64)> = match random.below(20) {
        0..3 => (0..=random.below(20)).map(|_| mark(random)).collect(),
        3..8 if member.disturbed_by != Signals::Ignored => {
            signals = 1 + random.below(2);
            let mut calls = vec![mark(random), getpid()];
            for signal in [PLAIN, ON_STACK].into_iter().take(usize::try_from(signals).unwrap()) {
                let args = [own, u64::from(signal.unsigned_abs()), 0, 0, 0, 0];
                calls.push((Call { nr: libc::SYS_kill, args }, 0));
            }
            calls
        }
        8 => vec![getpid()],
        _ => vec![mark(random)],
    };
    let (calls, answers) = calls.into_iter().unzip();
    Batch { calls, answers, signals }
}

/// Makes one request and records its result. Returns false if the injector has ended.
fn request(
    run: &Run,
    member: &Member,
    random: &mut Random,
    make: impl FnOnce(&Target, &[Call], &Limits, &mut Random) -> Result<InjectionReport, InjectError>,
) -> bool {
    // There's no target between two short-lived victims.
    let Some(target) = member.target() else {
        std::thread::yield_now();
        return true;
    };
    let Batch { calls, answers, signals } = batch(member, &target, random);
    run.requests.fetch_add(1, Relaxed);
    let result = make(&target, &calls, limits(member), random);
    match &result {
        Ok(report) => {
            run.made.fetch_add(1, Relaxed);
            member.sent_inside.fetch_add(signals, Relaxed);
            let changing = matches!(member.class, Class::Execs | Class::ShortLived);
            let right = report.results.len() == answers.len()
                && report.results.iter().zip(&answers).all(|(result, answer)| match result {
                    Ok(value) => value == answer,
                    // Documented: EINTR if stops and signals interrupt unmerging at every attempt.
                    Err(Errno(libc::EINTR)) => true,
                    Err(Errno(libc::ENOMEM | libc::EINVAL)) => changing,
                    Err(_) => false,
                });
            if !right || report.stops == 0 {
                run.results.fail(format!("{}: answers {report:?} to {calls:?}", member.name));
            }
        }
        Err(error) => {
            member.perhaps_sent.fetch_add(signals, Relaxed);
            if !member.class.permits(error) {
                run.results.fail(format!("{}: {error} ({error:?})", member.name));
            }
        }
    }
    run.results.record(&member.name, &result);
    !matches!(result, Err(InjectError::WorkerGone))
}

pub fn by_injector(run: &Run, mut random: Random) {
    let mut injector = injector("worker");
    let mut silent = 0;
    while !run.is_enough() {
        let member = &run.victims.members[*random.pick(&run.victims.weighted)];
        let has_injector = request(run, member, &mut random, |target, calls, limits, _| {
            let result = run_unchecked(&mut injector, &target.process, calls, limits);
            silent = if matches!(result, Err(InjectError::WorkerSilent)) { silent + 1 } else { 0 };
            result
        });
        // On a loaded machine an answer may be late once. The next request waits for that answer, too.
        if silent > 1 {
            run.results.fail(format!("{}: its injector does not answer", member.name));
        }
        if silent > 1 || !has_injector {
            break;
        }
    }
}

pub fn directly(run: &Run, mut random: Random) {
    // Direct injections are faster than injector processes. We limit them so that the processes get enough requests.
    for _ in 0..run.wanted / 5 {
        if run.is_enough() {
            break;
        }
        let member = &run.victims.members[*random.pick(&run.victims.direct)];
        request(run, member, &mut random, |target, calls, limits, random| {
            let pid = target.process.pid();
            // We choose a thread other than the main one, because the main one writes and the others sleep.
            if member.name.starts_with("many") {
                let tids: Vec<i32> = tids(pid).into_iter().filter(|&tid| tid != pid).collect();
                return inject_thread(&target.process, *random.pick(&tids), calls, limits);
            }
            inject(&target.process, calls, limits)
        });
    }
}

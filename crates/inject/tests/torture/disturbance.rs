//! Disturbances of the victims while we inject into them: signals, stops, freezing, death.

use crate::Run;
use crate::victims::{Member, Signals, Target};
use pagefold_engine::random::Random;
use pagefold_testkit::injection::{CONTENT, ON_STACK, PLAIN, RESTARTING, Victim};
use pagefold_testkit::{Freezer, send};
use std::os::unix::process::ExitStatusExt;
use std::thread::Scope;
use std::time::Duration;

/// Signals that the victims ignore, and that the kernel ignores by default.
const IGNORED: [i32; 2] = [libc::SIGURG, libc::SIGWINCH];

fn pause_us(us: u64) {
    std::thread::sleep(Duration::from_micros(us));
}

/// Starts all disturbances. They end with the run.
pub fn start<'scope>(scope: &'scope Scope<'scope, '_>, run: &'scope Run, seeds: &mut Random) {
    let mut random = || Random::new(seeds.next());
    let (for_signals, for_stops) = (random(), random());
    scope.spawn(move || signals(run, for_signals));
    scope.spawn(move || stops(run, for_stops));
    for (freezer, _) in &run.victims.freezers {
        let random = random();
        scope.spawn(move || freezing(run, freezer, random));
    }
    for member in run.victims.members.iter().filter(|member| member.name == "short-lived") {
        let random = random();
        scope.spawn(move || short_lives(run, member, random));
    }
}

fn signals(run: &Run, mut random: Random) {
    while !run.is_over() {
        let member = random.pick(&run.victims.members);
        match random.below(5) {
            0 => member.kill(*random.pick(&IGNORED)),
            _ if member.disturbed_by == Signals::Ignored => member.kill(*random.pick(&IGNORED)),
            _ => member.send(*random.pick(&[PLAIN, RESTARTING, ON_STACK])),
        }
        // The victim in strict mode waits by reading, so we give it something to read.
        if random.below(64) == 0 {
            for member in run.victims.members.iter().filter(|member| member.name == "strict") {
                if let Some(victim) = member.victim.lock().unwrap().as_mut() {
                    victim.send_byte(b'.');
                }
            }
        }
        pause_us(100 + random.below(400));
    }
}

fn stops(run: &Run, mut random: Random) {
    while !run.is_over() {
        let member = &run.victims.members[*random.pick(&run.victims.stopped)];
        member.kill(libc::SIGSTOP);
        pause_us(random.below(3000));
        member.kill(libc::SIGCONT);
        pause_us(random.below(1500));
    }
}

fn freezing(run: &Run, freezer: &Freezer, mut random: Random) {
    while !run.is_over() {
        freezer.freeze(true);
        pause_us(random.below(5000));
        freezer.freeze(false);
        pause_us(random.below(10_000));
    }
}

/// Runs short-lived victims one after the other, and kills half of them.
fn short_lives(run: &Run, member: &Member, mut random: Random) {
    while !run.is_over() {
        let life_ms = 5 + random.below(40);
        let mut victim = match Victim::try_start(&["torture", "short-lived", &life_ms.to_string()]) {
            Ok(victim) => victim,
            Err(why) => return run.results.fail(format!("a short-lived victim: {why}")),
        };
        *member.target.lock().unwrap() = Target::of(&victim);
        let killed = random.below(2) == 0;
        if killed {
            pause_us(random.below(life_ms * 1000));
            send(victim.pid(), libc::SIGKILL);
        }
        let status = victim.program.child.0.wait().expect("a child");
        *member.target.lock().unwrap() = None;
        let expected = status.code() == Some(CONTENT) || (killed && status.signal() == Some(libc::SIGKILL));
        if !expected {
            run.results.fail(format!(
                "a short-lived victim ended with {status}, killed: {killed}; it printed {:?}",
                victim.line()
            ));
        }
    }
}

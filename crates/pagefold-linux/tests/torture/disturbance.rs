//! What happens to the victims while they are injected into: signals, stops, frost, death.

use crate::Run;
use crate::crew::{Member, Storm, Target};
use crate::inject_support::{Freezer, Victim};
use pagefold_core::random::Random;
use pagefold_linux::proc::process::Process;
use std::os::unix::process::ExitStatusExt;
use std::sync::Arc;
use std::thread::Scope;
use std::time::Duration;

/// As `examples/victim/handlers.rs` has them: without flags, with SA_RESTART, with SA_ONSTACK.
pub const PLAIN: i32 = 35;
const RESTARTING: i32 = 36;
pub const ON_STACK: i32 = 37;
/// One that victims ignore, one that is ignored anyway.
const IGNORED: [i32; 2] = [libc::SIGURG, libc::SIGWINCH];
/// How a mayfly ends that was left alone and is content.
const FAREWELL: i32 = 7;

fn pause_us(us: u64) {
    std::thread::sleep(Duration::from_micros(us));
}

/// Starts all storms. They end when the run is over.
pub fn raise<'scope>(scope: &'scope Scope<'scope, '_>, run: &'scope Run, seeds: &mut Random) {
    let random = Random::new(seeds.next());
    scope.spawn(move || signals(run, random));
    let random = Random::new(seeds.next());
    scope.spawn(move || stops(run, random));
    for (freezer, _) in &run.crew.freezers {
        let random = Random::new(seeds.next());
        scope.spawn(move || frost(run, freezer, random));
    }
    for member in run.crew.members.iter().filter(|member| member.name == "mayfly") {
        let random = Random::new(seeds.next());
        scope.spawn(move || mayflies(run, member, random));
    }
}

fn signals(run: &Run, mut random: Random) {
    while !run.is_over() {
        let member = random.pick(&run.crew.members);
        match random.below(5) {
            0 => member.kill(*random.pick(&IGNORED)),
            _ if member.storm == Storm::Ignored => member.kill(*random.pick(&IGNORED)),
            _ => member.send(*random.pick(&[PLAIN, RESTARTING, ON_STACK])),
        }
        // Something to do for the one that may only read.
        if random.below(64) == 0 {
            for member in run.crew.members.iter().filter(|member| member.name == "strict") {
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
        let member = &run.crew.members[*random.pick(&run.crew.stopped)];
        member.kill(libc::SIGSTOP);
        pause_us(random.below(3000));
        member.kill(libc::SIGCONT);
        pause_us(random.below(1500));
    }
}

fn frost(run: &Run, freezer: &Freezer, mut random: Random) {
    while !run.is_over() {
        freezer.freeze(true);
        pause_us(random.below(5000));
        freezer.freeze(false);
        pause_us(random.below(10_000));
    }
}

/// One short life after the other, half of them cut off.
fn mayflies(run: &Run, member: &Member, mut random: Random) {
    while !run.is_over() {
        let life_ms = 5 + random.below(40);
        let mut victim = match Victim::try_start(&["torture", "mayfly", &life_ms.to_string()]) {
            Ok(victim) => victim,
            Err(why) => return run.tally.fail(format!("a mayfly: {why}")),
        };
        let pid = victim.process.pid();
        let process = Process::open(pid);
        let (addr, len, inner_pid) = (victim.addr, victim.len, pid);
        *member.target.lock().unwrap() = process.ok().map(|process| Arc::new(Target { process, addr, len, inner_pid }));
        let killed = random.below(2) == 0;
        if killed {
            pause_us(random.below(life_ms * 1000));
            unsafe { libc::kill(pid, libc::SIGKILL) };
        }
        let status = victim.child.wait().expect("it is ours to wait for");
        *member.target.lock().unwrap() = None;
        let expected = status.code() == Some(FAREWELL) || (killed && status.signal() == Some(libc::SIGKILL));
        if !expected {
            run.tally.fail(format!("a mayfly ended with {status}, killed: {killed}; it said {:?}", victim.line()));
        }
    }
}

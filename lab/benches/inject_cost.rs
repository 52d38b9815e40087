//! Measures how long an injection stops its target. Run `cargo bench --bench inject_cost`.
//!
//! `PAGEFOLD_OTHER_VICTIM=PATH` names the `victim` of another build, whose injector takes turns with this build's.

use pagefold_inject::{Injector, Limits};
use pagefold_testkit::injection::{MARK, Victim, run_unchecked};
use pagefold_testkit::{victim_binary, wait_until};
use std::path::PathBuf;
use std::process::Command;

const INJECTIONS: usize = 300;

fn main() {
    let other = std::env::var_os("PAGEFOLD_OTHER_VICTIM").map(PathBuf::from);
    let programs: Vec<PathBuf> = std::iter::once(victim_binary("victim")).chain(other).collect();
    for (kind, calls) in [("futex", 1), ("futex", 30), ("epoll", 1), ("thread", 1), ("heap-stack", 1)] {
        let mut victim = Victim::try_start(&["registers", kind]).unwrap();
        victim.send_byte(b'b');
        assert_eq!(victim.line(), "round");
        let mut injectors: Vec<_> = programs
            .iter()
            .map(|path| (Injector::spawn(Command::new(path).arg("worker")).unwrap(), Vec::new(), Vec::new()))
            .collect();
        for _ in 0..INJECTIONS {
            for (injector, stops, aways) in &mut injectors {
                let marks = victim.calls(MARK, calls);
                let mut report = None;
                wait_until("an injection succeeds", || {
                    report = run_unchecked(injector, &victim.process, &marks, &Limits::default()).ok();
                    report.is_some()
                });
                let report = report.unwrap();
                assert!(report.results.iter().all(|result| *result == Ok(0)) && report.stops >= 1);
                stops.push(report.longest_stop_ns);
                aways.push(report.longest_away_ns);
            }
        }
        victim.send();
        assert_eq!((victim.line().as_str(), victim.line().as_str()), ("stack clean", "ok"));
        for ((_, stops, aways), path) in injectors.into_iter().zip(&programs) {
            println!(
                "{kind}, {calls} calls: stopped {}, with registers replaced {}: {}",
                percentiles(stops),
                percentiles(aways),
                path.display()
            );
        }
    }
}

fn percentiles(mut ns: Vec<u64>) -> String {
    ns.sort_unstable();
    let us = |permille: usize| ns[(ns.len() - 1) * permille / 1000] / 1000;
    format!("{} us (p10 {}, p99 {}, max {})", us(500), us(100), us(990), us(1000))
}

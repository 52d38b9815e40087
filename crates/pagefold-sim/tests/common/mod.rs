//! A simulated machine, and the live engine on it.
#![allow(dead_code, reason = "each test uses a part of it")]

use pagefold_core::config::Config;
use pagefold_core::engine::{Cycle, Engine, cycle};
use pagefold_core::host::Host;
use pagefold_sim::{Costs, Knobs, SimHost};
use std::convert::Infallible;

pub const SECOND: u64 = 1_000_000_000;
/// Pages in a MiB.
pub const MIB: u64 = 256;

/// A machine with the settings that pagefold makes.
pub fn host() -> SimHost {
    SimHost::new(7, Costs::default(), Knobs::driven())
}

pub fn config() -> Config {
    Config { seed: 11, ..Config::default() }
}

pub fn engine() -> Engine {
    Engine::new(config())
}

/// Runs the engine for some virtual seconds.
pub fn run(host: &mut SimHost, engine: &mut Engine, seconds: u64) {
    run_on(host, engine, seconds, SimHost::now_ns, |_| {});
}

/// Runs the engine on any host with this clock, and calls `after` each cycle.
pub fn run_on<H: Host<Error = Infallible>>(
    host: &mut H,
    engine: &mut Engine,
    seconds: u64,
    now_ns: impl Fn(&H) -> u64,
    mut after: impl FnMut(&H),
) {
    let end_ns = now_ns(host) + seconds * SECOND;
    while now_ns(host) < end_ns {
        let Ok(Cycle { wait_ns, .. }) = cycle(engine, host);
        let Ok(()) = host.wait(wait_ns.max(1_000_000).min(end_ns.saturating_sub(now_ns(host))));
        after(host);
    }
}

//! If the injector dies, it's restarted, or the run ends with an error. In both cases nothing is left behind.

use pagefold_testkit::*;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::time::{Duration, Instant};

const PAGES: u64 = 8 * PAGES_PER_MIB;

fn holders() -> [Holder; 2] {
    [(); 2].map(|()| Holder::with(PAGES, 0x1213_0001))
}

/// Waits until the daemon has an injector other than `former`.
fn next_injector(daemon: &Daemon, former: i32) -> i32 {
    let mut found = former;
    wait_until("there is an injector", || {
        let others = daemon.injectors().into_iter().find(|&pid| pid != former && state(pid) != b'Z');
        found = others.unwrap_or(former);
        found != former
    });
    found
}

#[test]
fn a_killed_injector_comes_back_and_memory_is_merged() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let mut holders = holders();
    let pids = [holders[0].pid(), holders[1].pid()];
    let daemon = Daemon::on(&pids, &["--governor", "full"]);
    // Kill the injector before anything is marked, and then once more.
    wait_until("the run has begun", || Path::new(STATE_FILE).exists());
    let first = next_injector(&daemon, 0);
    send(first, libc::SIGKILL);
    let second = next_injector(&daemon, first);
    send(second, libc::SIGKILL);
    wait_until_merged(&pids, 7 * MIB);
    // Kill it again while there's nothing to do.
    let third = next_injector(&daemon, second);
    send(third, libc::SIGKILL);
    let fourth = next_injector(&daemon, third);
    assert!(holders.iter_mut().all(Holder::is_intact));
    let ended = daemon.terminate();
    // If there are several restarts before the daemon looks, it reports them once.
    assert!(ended.errors.contains("the injector process had ended; process "), "{}", ended.errors);
    assert_eq!(ended.summary()["knobs_restored"], true);
    wait_until("no injector survives", || ![first, second, third, fourth].into_iter().any(exists));
    ksm.give_back(&pids);
}

#[test]
fn without_an_injector_the_run_ends_with_an_error_and_the_knobs_are_restored() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("injector.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let mut holders = holders();
    let pids = [holders[0].pid(), holders[1].pid()];
    let daemon = Daemon::on(&pids, &["--governor", "full", "--injector", path.to_str().unwrap()]);
    // We accept only one connection, as if the service had then been removed.
    let mut injector = injector_on(listener.accept().unwrap().0);
    drop(listener);
    wait_until_merged(&pids, 7 * MIB);
    let began = Instant::now();
    injector.kill().unwrap();
    injector.wait().unwrap();
    let ended = daemon.end();
    println!("ended after {:.1} s", began.elapsed().as_secs_f64());
    assert_eq!(ended.code, Some(1), "{}", ended.errors);
    assert_eq!(ended.errors.lines().count(), 1, "{}", ended.errors);
    assert!(ended.errors.contains("attempts to start it again have failed"), "{}", ended.errors);
    assert!(began.elapsed() > Duration::from_secs(4), "it was tried for a while");
    assert!(holders.iter_mut().all(Holder::is_intact));
    ksm.give_back(&pids);
}

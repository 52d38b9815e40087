//! How soon a live host notices changes. It marks nothing and leaves KSM alone, so it needs no lock.

use pagefold_engine::host::Host;
use pagefold_host::live::{HostMode, LiveHost};
use pagefold_host::scope::deny_list::DenyList;
use pagefold_host::scope::{ScopeSpec, Selector};
use pagefold_ksm::{KSM_ROOT, Ksm};
use pagefold_procmem::Roots;
use pagefold_testkit::{ProgramCopy, Script, is_root, skip, skip_unsupported};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const LONG_NS: u64 = 20_000_000_000;
/// We list processes once a second. The other four seconds are for a busy machine.
const SOON: Duration = Duration::from_secs(5);

/// A program under a name of its own, and processes that run it.
struct Program {
    file: ProgramCopy,
    running: Vec<Script>,
}

impl Program {
    fn new(name: &str) -> Self {
        let name = format!("pf{name}{}", std::process::id());
        Self { file: ProgramCopy::of(Path::new("/bin/cat"), &name), running: Vec::new() }
    }

    fn start(&mut self) {
        self.running.push(Script::of(&mut Command::new(&*self.file)));
    }
}

fn host(program: &Program, stop: &Arc<AtomicBool>) -> Option<LiveHost> {
    if !is_root() {
        skip("only root can observe other processes");
        return None;
    }
    let ksm = match Ksm::open(Path::new(KSM_ROOT)) {
        Ok(ksm) => Arc::new(ksm),
        Err(error) => {
            skip_unsupported(error);
            return None;
        }
    };
    let spec = ScopeSpec(vec![Selector::Exe(program.file.name().to_owned())]);
    Some(LiveHost::new(spec, Roots::default(), DenyList::default(), ksm, HostMode::DryRun, stop.clone()).unwrap())
}

/// Observes until the targets stay unchanged for a whole wait.
fn settle(host: &mut LiveHost) {
    let mut waited = Instant::now();
    while waited.elapsed() < Duration::from_millis(1_300) {
        waited = Instant::now();
        host.observe().unwrap();
        host.wait(1_400_000_000).unwrap();
    }
}

fn waiting(host: &mut LiveHost, meanwhile: impl FnOnce() + Send) -> Duration {
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(100));
            meanwhile();
        });
        let began = Instant::now();
        host.wait(LONG_NS).unwrap();
        began.elapsed()
    })
}

#[test]
fn a_wait_ends_when_a_process_starts_and_when_it_ends() {
    let mut program = Program::new("new");
    program.start();
    let Some(mut host) = host(&program, &Arc::new(AtomicBool::new(false))) else { return };
    settle(&mut host);
    let before = host.observe().unwrap().regions.len();
    assert!(before > 0);
    assert!(waiting(&mut host, || program.start()) < SOON);
    settle(&mut host);
    let snapshot = host.observe().unwrap();
    assert_eq!((host.targets().count(), snapshot.regions.len()), (2, 2 * before));
    assert!(snapshot.memory.total > snapshot.memory.available, "{:?}", snapshot.memory);
    assert!(waiting(&mut host, || drop(program.running.pop())) < SOON);
    assert_eq!((host.targets().count(), host.observe().unwrap().regions.len()), (1, before));
}

#[test]
fn a_signal_ends_a_wait() {
    let mut program = Program::new("sig");
    program.start();
    let stop = Arc::new(AtomicBool::new(false));
    let Some(mut host) = host(&program, &stop) else { return };
    signal_hook::flag::register(signal_hook::consts::SIGUSR2, stop.clone()).unwrap();
    settle(&mut host);
    // SAFETY: pthread_self always succeeds.
    let own = unsafe { libc::pthread_self() };
    let took = waiting(&mut host, || {
        // SAFETY: the thread is alive, as it waits for this one, and the signal has a handler.
        assert_eq!(unsafe { libc::pthread_kill(own, libc::SIGUSR2) }, 0);
    });
    assert!(stop.load(Ordering::Relaxed) && took < SOON, "{took:?}");
}

//! Measures the cost of observing when nothing happens, without the engine and its samples. Run
//! `cargo bench --bench watch_cost`.

use pagefold_engine::host::Host;
use pagefold_host::live::{HostMode, LiveHost};
use pagefold_host::scope::deny_list::DenyList;
use pagefold_host::scope::{ScopeSpec, Selector};
use pagefold_ksm::{KSM_ROOT, Ksm};
use pagefold_procmem::Roots;
use pagefold_procmem::os::cpu::own_cpu_ns;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

/// The length of a round of the governor `full`.
const ROUND_NS: u64 = 2_000_000_000;

fn main() {
    let directory = tempfile::tempdir().unwrap();
    let name = format!("pfcost{}", std::process::id());
    std::fs::copy("/bin/cat", directory.path().join(&name)).unwrap();
    let ksm = Arc::new(Ksm::open(Path::new(KSM_ROOT)).unwrap());
    let mut running: Vec<Child> = Vec::new();
    for count in [1, 10, 100, 1_000] {
        while running.len() < count {
            let mut command = Command::new(directory.path().join(&name));
            running.push(command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap());
        }
        let pids: Vec<i32> = running.iter().map(|child| i32::try_from(child.id()).unwrap()).collect();
        let by_pid = ScopeSpec::of_pids(pids);
        let by_exe = ScopeSpec(vec![Selector::Exe(name.clone())]);
        for (how, spec) in [("by pid", by_pid), ("by exe", by_exe)] {
            let stop = Arc::new(AtomicBool::new(false));
            let mut host =
                LiveHost::new(spec, Roots::default(), DenyList::default(), ksm.clone(), HostMode::DryRun, stop)
                    .unwrap();
            let mut watch = |time: Duration| {
                let (began, before_ns) = (Instant::now(), own_cpu_ns());
                while began.elapsed() < time {
                    host.observe().unwrap();
                    host.wait(ROUND_NS).unwrap();
                }
                (own_cpu_ns() - before_ns) as f64 / 1e6 / began.elapsed().as_secs_f64()
            };
            let settling = watch(Duration::from_secs(6));
            let settled = watch(Duration::from_secs(20));
            println!("{count:5} processes {how}: {settled:.3} ms of CPU per second ({settling:.3} at first)");
        }
    }
    for child in &mut running {
        child.kill().unwrap();
        child.wait().unwrap();
    }
}

//! CPU time of other processes.

use super::process::{Process, ReadError};
use crate::os::cpu;

/// CPU time of all threads of a process, including ended ones, nanoseconds (`schedstat` covers the first thread only).
pub fn process_cpu_ns(process: &Process) -> Result<u64, ReadError> {
    match cpu::process_cpu_ns(process.pid()) {
        // The kernel finds the clock by pid, which may have been reused, so we check that our process is still alive.
        Some(ns) if process.is_alive() => Ok(ns),
        _ => Err(ReadError::Vanished { pid: process.pid() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::os::cpu::{own_and_children_cpu_ns, own_cpu_ns, reaped_children_cpu_ns};
    use std::process::Command;

    fn burn(ns: u64) {
        let end = own_cpu_ns() + ns;
        let mut sink = 0_u64;
        while own_cpu_ns() < end {
            for step in 0..10_000_u64 {
                sink = std::hint::black_box(sink.wrapping_mul(31).wrapping_add(step));
            }
        }
    }

    #[test]
    fn process_cpu_time_counts_all_threads() {
        let own = Process::open(i32::try_from(std::process::id()).unwrap()).unwrap();
        let before = process_cpu_ns(&own).unwrap();
        std::thread::spawn(|| burn(30_000_000)).join().unwrap();
        let spent = process_cpu_ns(&own).unwrap() - before;
        assert!(spent >= 30_000_000, "{spent}");
    }

    #[test]
    fn children_count_once_they_are_reaped() {
        let before = reaped_children_cpu_ns();
        let mut child =
            Command::new("sh").args(["-c", "i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done"]).spawn().unwrap();
        let held = Process::open(i32::try_from(child.id()).unwrap()).unwrap();
        assert!(process_cpu_ns(&held).is_ok());
        child.wait().unwrap();
        let spent = reaped_children_cpu_ns() - before;
        assert!(spent > 1_000_000, "{spent}");
        assert!(own_and_children_cpu_ns() >= spent);
        assert!(matches!(process_cpu_ns(&held), Err(ReadError::Vanished { .. })));
    }
}

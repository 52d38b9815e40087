//! uksmd's policy: this daemon marks all programs that have run for half a minute, and leaves the rate at the kernel's
//! default. It needs system calls that only pf-kernel has, so we follow its rules here, as of its README and source
//! (<https://codeberg.org/pf-kernel/uksmd>, <https://github.com/CachyOS/uksmd>).

use super::ksm::mark_eligible;
use super::{Marks, Policy, Stage};
use anyhow::Context;
use pagefold_ksm::Knob;
use pagefold_procmem::process::Process;
use std::fs;
use std::time::{Duration, Instant};

/// Time between two looks at the programs.
const EVERY: Duration = Duration::from_secs(15);

/// A program must have run for this long.
const OLD_SECONDS: f64 = 30.0;

/// uksmd leaves programs with these names alone.
const INCOMPATIBLE: [&[u8]; 3] = [b"mariadbd", b"mysqld", b"p2pool"];

/// KSM by uksmd's rules.
#[derive(Clone, Copy, Debug)]
pub struct UksmdRules {
    pub seconds: u64,
}

impl Policy for UksmdRules {
    fn name(&self) -> String {
        format!("uksmd's rules/{}s", self.seconds)
    }

    fn marks(&self) -> Marks {
        Marks::None
    }

    /// Follows the rules until the time is up.
    fn drive(&self, stage: &mut Stage<'_>) -> anyhow::Result<()> {
        stage.ksm()?.set(Knob::Run, 1)?;
        let end = Instant::now() + Duration::from_secs(self.seconds);
        let mut marked = vec![0; stage.processes().len()];
        let mut scans_then = None;
        loop {
            let control = stage.ksm()?;
            let scans = control.ksm().full_scans()?;
            let is_calm = control.counter("pages_volatile")? <= 0;
            if scans_then != Some(scans) || is_calm {
                for (process, marked) in stage.processes().iter().zip(&mut marked) {
                    if is_chosen(&process.stat()?.comm, age_seconds(process)?) {
                        // The daemon marks a process with everything it'll ever map. We mark new memory at the next
                        // look.
                        *marked = mark_eligible(process)?;
                    }
                }
                scans_then = Some(scans);
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                stage.run.marked_bytes = Some(marked.iter().sum());
                return Ok(());
            }
            stage.setting.interrupt.sleep(EVERY.min(left))?;
        }
    }
}

fn is_chosen(comm: &[u8], age_seconds: f64) -> bool {
    age_seconds >= OLD_SECONDS && !INCOMPATIBLE.contains(&comm)
}

fn age_seconds(process: &Process) -> anyhow::Result<f64> {
    let uptime = fs::read_to_string("/proc/uptime")?;
    let uptime: f64 = uptime.split(' ').next().and_then(|text| text.parse().ok()).context("/proc/uptime")?;
    // The kernel counts 100 ticks a second for all of user space.
    Ok(uptime - process.start_time_ticks() as f64 / 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn young_and_incompatible_programs_are_left_alone() {
        assert!(is_chosen(b"redis-server", 30.0) && !is_chosen(b"redis-server", 29.9));
        assert!(!is_chosen(b"mariadbd", 1000.0));
        let own = Process::open(i32::try_from(std::process::id()).unwrap()).unwrap();
        assert!((0.0..3600.0).contains(&age_seconds(&own).unwrap()));
    }
}

//! The processes of a scenario.

use crate::model::{Disturbance, Scenario, Victim};
use crate::pages::{Extent, PAGE};
use pagefold_testkit::cgroup::start_in;
use pagefold_testkit::{Cgroup, Holder, Script};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// The processes of a scenario. Dropping this ends them.
pub struct Programs {
    pub victims: Vec<Holder>,
    pub extents: Vec<Extent>,
    _filler: Option<Script>,
    _cgroups: Vec<Cgroup>,
}

impl Programs {
    pub fn start(scenario: &Scenario) -> Self {
        let mut victims = Vec::new();
        let mut extents = Vec::new();
        let mut cgroups = Vec::new();
        for victim in &scenario.victims {
            let mut command = Command::new("/bin/holder");
            if victim.confined {
                let cgroup = Cgroup::create("unified").expect("a control group");
                cgroup.set("cpuset.mems", &victim.node.to_string());
                start_in(&mut command, cgroup.path());
                cgroups.push(cgroup);
            }
            keep_to_node(&mut command, victim);
            let mut holder = Holder::by(&mut command, scenario.pages as u64);
            holder.write(0, holder.pages, 1);
            let extent =
                Extent { pid: holder.pid(), start: holder.first * PAGE, pages: scenario.pages, node: victim.node };
            if victim.active {
                activate(&extent);
            }
            holder.ask("watch");
            extents.push(extent);
            victims.push(holder);
        }
        let mut filler = None;
        if let Disturbance::Full { node, left_mib } = scenario.disturbance {
            let args = ["filler".to_owned(), node.to_string(), left_mib.to_string()];
            let started = filler.insert(Script::of(Command::new("/bin/numa_guest").args(args)));
            assert_eq!(started.line(), "ready");
        }
        Self { victims, extents, _filler: filler, _cgroups: cgroups }
    }

    pub fn pids(&self) -> Vec<i32> {
        self.victims.iter().map(Holder::pid).collect()
    }

    pub fn mark(&mut self) {
        self.victims.iter_mut().for_each(|victim| victim.mark(0, victim.pages));
    }

    /// Checks every byte of all processes. Returns the errors.
    pub fn check(&mut self) -> Vec<String> {
        let mut errors = Vec::new();
        for (number, victim) in self.victims.iter_mut().enumerate() {
            let pages = victim.ask("check");
            if pages > 0 {
                errors.push(format!("victim {number}: {pages} damaged"));
            }
        }
        errors
    }
}

/// Makes a program run on a node's processor, which has the node's number: the kernel allocates its memory there too,
/// if it can.
fn keep_to_node(command: &mut Command, victim: &Victim) {
    let Victim { node, nice, .. } = *victim;
    // SAFETY: two system calls with numbers and the child's own set; all zeros is an empty set.
    unsafe {
        command.pre_exec(move || {
            let mut processors: libc::cpu_set_t = std::mem::zeroed();
            libc::CPU_SET(node, &mut processors);
            let is_kept = libc::sched_setaffinity(0, size_of_val(&processors), &raw const processors) == 0;
            let is_nice = libc::setpriority(libc::PRIO_PROCESS, 0, nice) == 0;
            if is_kept && is_nice { Ok(()) } else { Err(std::io::Error::last_os_error()) }
        });
    }
}

/// Moves a process's pages to the active list.
fn activate(extent: &Extent) {
    let memory = File::open(format!("/proc/{}/mem", extent.pid)).expect("a victim's memory");
    // The kernel records the first reference, and activates the page on the second (mark_page_accessed in mm/swap.c).
    for _ in 0..2 {
        drain();
        for page in 0..extent.pages as u64 {
            memory.read_exact_at(&mut [0; 4096], extent.start + page * PAGE).expect("a page");
        }
    }
    drain();
}

/// Makes the kernel move the pages that it collects on each processor to their lists (lru_add_drain_all in
/// fs/drop_caches.c).
fn drain() {
    crate::write("/proc/sys/vm/drop_caches", "1");
}

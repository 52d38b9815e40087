use super::*;
use crate::scope::Selector;
use crate::scope::tests::Tree;
use std::cell::Cell;
use std::fs;

const SECOND: u64 = 1_000_000_000;

struct Machine {
    tree: Tree,
    spec: ScopeSpec,
    new_processes: NewProcesses,
    /// Number of candidates in the last call: 0 if it didn't read the list.
    asked: Cell<u32>,
}

impl Machine {
    fn new(with_loadavg: bool) -> Self {
        let tree = Tree::new();
        if with_loadavg {
            fs::write(tree.roots.proc.join("loadavg"), "0.00 0.00 0.00 1/9 9\n").unwrap();
        }
        let new_processes = NewProcesses::new(&tree.roots);
        let spec = ScopeSpec(vec![Selector::Exe("meant".to_owned())]);
        Self { tree, spec, new_processes, asked: Cell::new(0) }
    }

    fn start(&self, pid: i32, exe: &str) {
        self.tree.process(pid, b"x", Some(exe), 0, "0::/\n");
        if self.new_processes.loadavg.is_some() {
            fs::write(self.tree.roots.proc.join("loadavg"), format!("0.00 0.01 0.05 1/9 {pid}\n")).unwrap();
        }
    }

    fn find(&mut self, now_ns: u64) -> Vec<i32> {
        self.asked.set(0);
        let found = self.new_processes.find(now_ns, &self.spec, &self.tree.roots, |_| {
            self.asked.set(self.asked.get() + 1);
            false
        });
        found.unwrap().iter().map(|scoped| scoped.process.pid()).collect()
    }
}

#[test]
fn the_list_is_read_only_if_a_process_was_started() {
    let mut machine = Machine::new(true);
    machine.start(20, "/bin/other");
    assert!(machine.find(0).is_empty());
    assert!(machine.find(4 * SECOND).is_empty());
    machine.find(5 * SECOND);
    assert_eq!(machine.asked.get(), 0);
    machine.start(21, "/bin/meant");
    assert_eq!(machine.find(6 * SECOND), [21]);
    machine.new_processes.invalidate();
    assert_eq!(machine.find(7 * SECOND), [21], "only the caller decides which processes are known");
}

#[test]
fn a_new_process_is_examined_again_after_exec() {
    let mut machine = Machine::new(true);
    machine.start(20, "/bin/sh");
    assert!(machine.find(0).is_empty());
    machine.tree.exec(20, "/bin/meant");
    assert_eq!(machine.find(SECOND), [20]);
}

#[test]
fn a_new_process_is_examined_twice_even_if_the_second_time_is_late() {
    let mut machine = Machine::new(true);
    machine.find(0);
    machine.start(20, "/bin/sh");
    assert!(machine.find(SECOND).is_empty());
    machine.tree.exec(20, "/bin/meant");
    assert_eq!(machine.find(9 * SECOND), [20]);
}

#[test]
fn with_many_processes_the_list_is_read_less_often() {
    let mut machine = Machine::new(true);
    for pid in 20..420 {
        machine.start(pid, "/bin/other");
    }
    machine.find(0);
    machine.find(SECOND);
    assert_eq!(machine.asked.get(), 0);
    machine.find(400 * LIST_NS * LIST_SHARE);
    assert_eq!(machine.asked.get(), 400);
}

#[test]
fn an_older_process_that_comes_into_scope_is_found_by_a_full_pass() {
    let mut machine = Machine::new(true);
    machine.start(20, "/bin/sh");
    for second in 0..5 {
        assert!(machine.find(second * SECOND).is_empty());
    }
    machine.tree.exec(20, "/bin/meant");
    machine.start(21, "/bin/other");
    assert!(machine.find(5 * SECOND).is_empty());
    let full_ns = machine.new_processes.next_full_ns;
    assert!(full_ns >= FULL_MIN_NS);
    assert_eq!(machine.find(full_ns), [20]);
}

#[test]
fn without_the_last_pid_the_list_is_read_every_time() {
    let mut machine = Machine::new(false);
    assert!(machine.find(0).is_empty());
    machine.start(20, "/bin/meant");
    assert_eq!(machine.find(9 * SECOND), [20]);
}

#[test]
fn others_idle_processes_delay_no_list_for_long() {
    let mut machine = Machine::new(true);
    for pid in 21..3_000 {
        fs::create_dir(machine.tree.roots.proc.join(pid.to_string())).unwrap();
    }
    machine.find(0);
    machine.start(20, "/bin/meant");
    assert_eq!(machine.find(LIST_MAX_NS), [20]);
}

#[test]
fn processes_that_are_too_many_are_counted_until_they_end_or_leave_the_scope() {
    let mut machine = Machine::new(true);
    for pid in [20, 21, 22] {
        machine.start(pid, "/bin/meant");
    }
    for pid in machine.find(0) {
        machine.new_processes.turn_away(pid);
    }
    assert_eq!(machine.new_processes.turned_away(), 3);
    machine.tree.exec(20, "/bin/other");
    fs::remove_dir_all(machine.tree.roots.proc.join("21")).unwrap();
    machine.start(23, "/bin/other");
    machine.find(4 * SECOND);
    assert_eq!(machine.new_processes.turned_away(), 2, "a pass over new processes doesn't examine the others");
    for pid in machine.find(400 * SECOND) {
        machine.new_processes.turn_away(pid);
    }
    assert_eq!(machine.new_processes.turned_away(), 1);
}

#[test]
fn a_call_examines_only_as_many_processes_as_it_has_time_for() {
    let mut machine = Machine::new(true);
    machine.new_processes.most = Duration::ZERO;
    for pid in [20, 21, 22] {
        machine.start(pid, "/bin/meant");
    }
    let mut found = Vec::new();
    for call in 0..3 {
        assert_eq!(machine.new_processes.has_examined_all(), call == 0);
        // New processes, and others that we only examine again, come after the ones that a call had no time for.
        machine.start(30 + call, "/bin/other");
        found.extend(machine.find(0));
    }
    assert_eq!(found, [20, 21, 22]);
    machine.new_processes.most = MOST;
    assert_eq!(machine.find(0), [20, 21, 22], "its caller hasn't taken them");
    assert!(machine.new_processes.has_examined_all());
}

/// In a child of its own, because the limit applies to all threads of a process.
#[test]
fn processes_that_we_have_no_files_left_for_are_counted() {
    const PROCESSES: i32 = 50;
    let machine = Machine::new(false);
    for pid in 20..20 + PROCESSES {
        machine.start(pid, "/bin/meant");
    }
    let result = machine.tree.roots.proc.join("result");
    let _child = pagefold_testkit::Forked::start(|| {
        let all = rustix::process::getrlimit(rustix::process::Resource::Nofile);
        for most in 8..1000 {
            let limit = rustix::process::Rlimit { current: Some(most), ..all };
            rustix::process::setrlimit(rustix::process::Resource::Nofile, limit).unwrap();
            let mut new_processes = NewProcesses::new(&machine.tree.roots);
            let found = new_processes.find(0, &machine.spec, &machine.tree.roots, |_| false);
            let turned_away = new_processes.turned_away();
            let found = found.map_or(0, |found| found.len());
            rustix::process::setrlimit(rustix::process::Resource::Nofile, all).unwrap();
            if found > 0 {
                fs::write(&result, format!("{}", found + turned_away)).unwrap();
                return;
            }
        }
    });
    assert_eq!(fs::read_to_string(result).unwrap(), PROCESSES.to_string());
}

//! The processes of a scenario, and their handles.

use crate::pages::Extent;
use pagefold_testkit::Script;
use pagefold_testkit::cgroup::start_in;
use pagefold_testkit::numa::{Disturbance, Scenario};
use std::fs;
use std::io::{BufRead, Write};
use std::process::Command;

/// A copy of `/init`: pagefold leaves process 1 alone.
const PROGRAM: &str = "/bin/victim";

/// A process, with the address of its memory, which it prints first.
pub struct Program {
    script: Script,
    address: u64,
}

impl Program {
    fn start(args: &[String], cgroup: Option<&str>) -> Self {
        let mut command = Command::new(PROGRAM);
        if let Some(cgroup) = cgroup {
            start_in(&mut command, cgroup.as_ref());
        }
        let mut script = Script::of(command.args(args));
        let said = script.line();
        let words: Vec<&str> = said.split(' ').collect();
        assert_eq!(words[0], "ready", "{args:?} says {said}");
        Self { script, address: words.get(1).map_or(0, |address| address.parse().expect("an address")) }
    }

    fn ask(&mut self, what: &str) -> Result<(), String> {
        let written = writeln!(self.script.input, "{what}").map_err(|error| format!("it has ended: {error}"));
        let said = self.script.line();
        if said == "done" { Ok(()) } else { Err(format!("at {what}: {said:?} {written:?}")) }
    }

    pub fn pid(&self) -> i32 {
        self.script.pid()
    }

    fn end(self) -> Result<(), String> {
        let Script { mut child, input, mut output } = self.script;
        drop(input);
        let mut rest = String::new();
        let _ = output.read_line(&mut rest);
        let status = child.0.wait().expect("a child");
        if status.success() && rest.is_empty() { Ok(()) } else { Err(format!("{status}: {rest}")) }
    }
}

/// The processes of a scenario.
pub struct Programs {
    pub victims: Vec<Program>,
    pub extents: Vec<Extent>,
    filler: Option<Program>,
    cgroups: Vec<String>,
}

impl Programs {
    pub fn start(scenario: &Scenario) -> Self {
        let mut programs = Self { victims: Vec::new(), extents: Vec::new(), filler: None, cgroups: Vec::new() };
        for (number, victim) in scenario.victims.iter().enumerate() {
            let cgroup = victim.confined.then(|| {
                let path = format!("/sys/fs/cgroup/victim-{number}");
                fs::create_dir(&path).expect(&path);
                crate::write(&format!("{path}/cpuset.mems"), &victim.node.to_string());
                path
            });
            let numbers = [victim.node.to_string(), victim.nice.to_string(), scenario.pages.to_string()];
            let args: Vec<String> = std::iter::once("victim".to_owned()).chain(numbers).collect();
            let mut member = Program::start(&args, cgroup.as_deref());
            if victim.active {
                member.ask("activate").expect("a victim");
            }
            programs.extents.push(Extent {
                pid: member.pid(),
                start: member.address,
                pages: scenario.pages,
                node: victim.node,
            });
            programs.victims.push(member);
            programs.cgroups.extend(cgroup);
        }
        if let Disturbance::Full { node, left_mib } = scenario.disturbance {
            programs.filler =
                Some(Program::start(&["filler".to_owned(), node.to_string(), left_mib.to_string()], None));
        }
        programs
    }

    pub fn mark(&mut self) {
        self.victims.iter_mut().for_each(|victim| victim.ask("mark").expect("a victim"));
    }

    /// Checks every byte of all processes. Returns the errors.
    pub fn check(&mut self) -> Vec<String> {
        let said = self.victims.iter_mut().map(|victim| victim.ask("check"));
        said.enumerate().filter_map(|(number, said)| Some(format!("victim {number}: {}", said.err()?))).collect()
    }

    /// Ends all processes. Returns the errors.
    pub fn end(self) -> Vec<String> {
        let said = self.victims.into_iter().chain(self.filler).map(Program::end);
        let wrong = said.enumerate().filter_map(|(number, said)| Some(format!("victim {number}: {}", said.err()?)));
        let wrong = wrong.collect();
        for cgroup in self.cgroups {
            fs::remove_dir(&cgroup).expect(&cgroup);
        }
        wrong
    }
}

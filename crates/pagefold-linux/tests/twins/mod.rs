//! Runs `examples/twins.rs`.

use pagefold_core::units::Vpn;
use pagefold_linux::proc::process::Process;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

/// The program, running.
pub struct Twins {
    program: Child,
    pub parent: Process,
    #[allow(dead_code)] // not every test looks at it
    pub child: Process,
    /// First pages of the regions: twins, forked, private.
    pub regions: [Vpn; 3],
}

impl Twins {
    pub fn start(pages: [usize; 3]) -> Self {
        let mut program = Command::new(built())
            .args(pages.map(|pages| pages.to_string()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(program.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let words: Vec<&str> = line.split_whitespace().collect();
        let [_, child, a, b, c] = words[..] else { panic!("twins said: {line}") };
        Self {
            parent: Process::open(i32::try_from(program.id()).unwrap()).unwrap(),
            child: Process::open(child.parse().unwrap()).unwrap(),
            regions: [a, b, c].map(|address| Vpn::of_address(u64::from_str_radix(address, 16).unwrap())),
            program,
        }
    }

    /// Ends it; true when it found all of its memory as it had written it.
    pub fn finish(mut self) -> bool {
        drop(self.program.stdin.take());
        self.program.wait().unwrap().success()
    }
}

impl Drop for Twins {
    fn drop(&mut self) {
        let _ = self.program.kill();
        let _ = self.program.wait();
    }
}

/// The example's path. `cargo test` builds examples, `cargo test --test NAME` does not.
fn built() -> PathBuf {
    let deps = std::env::current_exe().unwrap();
    let profile = deps.parent().and_then(|deps| deps.parent()).unwrap();
    let path = profile.join("examples/twins");
    if !path.exists() {
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["build", "--quiet", "--package", env!("CARGO_PKG_NAME"), "--example", "twins"]);
        cargo.arg("--target-dir").arg(profile.parent().unwrap());
        if profile.ends_with("release") {
            cargo.arg("--release");
        }
        assert!(cargo.status().unwrap().success());
    }
    path
}

//! Java servers whose heap changes constantly.

use super::{Target, need, output_of};
use crate::dialogue::Dialogue;
use anyhow::{Context, ensure};
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

const READY_LIMIT: Duration = Duration::from_secs(60);
const ANSWER_LIMIT: Duration = Duration::from_secs(30);
const PACKAGE: &str = "default-jdk-headless";
const SOURCE: &str = include_str!("Churn.java");
const BLOCK_KIB: u64 = 16;

#[derive(Clone, Debug)]
pub struct JavaTools {
    java: PathBuf,
    javac: PathBuf,
}

impl JavaTools {
    /// Finds the tools, or names the packages to install.
    pub fn find() -> anyhow::Result<Self> {
        Ok(Self { java: need("java", PACKAGE)?, javac: need("javac", PACKAGE)? })
    }
}

#[derive(Debug)]
pub struct JavaProgram {
    java: PathBuf,
    classes: PathBuf,
    heap_mib: u64,
}

impl JavaProgram {
    /// Compiles the program for a heap of `heap_mib`.
    pub fn make(tools: JavaTools, scratch: &Path, heap_mib: u64) -> anyhow::Result<Self> {
        let classes = scratch.join("java");
        fs::create_dir_all(&classes)?;
        let source = classes.join("Churn.java");
        fs::write(&source, SOURCE)?;
        output_of(Command::new(tools.javac).arg("-d").arg(&classes).arg(source))?;
        Ok(Self { java: tools.java, classes, heap_mib })
    }

    /// Starts a server with its own data in two fifths of its heap.
    pub fn start(&self, instance: usize) -> anyhow::Result<Java> {
        let heap = self.heap_mib;
        let mut command = Command::new(&self.java);
        command
            .args([format!("-Xms{heap}m"), format!("-Xmx{heap}m")])
            // Prints the address of the heap.
            .arg("-Xlog:gc+heap+coops=debug:stdout")
            .arg("-cp")
            .arg(&self.classes)
            .args(["Churn", &(instance + 1).to_string(), &(heap * 1024 * 2 / 5 / BLOCK_KIB).to_string()]);
        let mut dialogue = Dialogue::start(&mut command, Some(&self.classes.join(format!("log-{instance}"))))?;
        let output = dialogue.ready(READY_LIMIT)?;
        let heap = output.iter().find_map(|line| heap_range(line));
        let heap = heap.with_context(|| format!("java does not print its heap's address: {output:?}"))?;
        Ok(Java { dialogue, heap })
    }
}

/// Addresses in `[...] Heap address: 0x00000000e7000000, size: 400 MB, Compressed Oops mode: ...`.
fn heap_range(line: &str) -> Option<Range<u64>> {
    let (address, rest) = line.split_once("Heap address: 0x")?.1.split_once(", size: ")?;
    let start = u64::from_str_radix(address, 16).ok()?;
    let mib: u64 = rest.split_once(" MB")?.0.parse().ok()?;
    Some(start..start + (mib << 20))
}

#[derive(Debug)]
pub struct Java {
    dialogue: Dialogue,
    heap: Range<u64>,
}

impl Target for Java {
    fn name(&self) -> &'static str {
        "java"
    }

    fn pid(&self) -> i32 {
        self.dialogue.pid()
    }

    /// Compares every block with its expected content.
    fn check(&mut self) -> anyhow::Result<String> {
        let answer = self.dialogue.ask("check", ANSWER_LIMIT)?;
        ensure!(answer.ends_with(" blocks, 0 damaged"), "java answers {answer:?}");
        Ok(answer)
    }

    fn heap(&self) -> Option<Range<u64>> {
        Some(self.heap.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heap_addresses_of_java_17_are_parsed() {
        let line = "[0.004s][debug][gc,heap,coops] Heap address: 0x00000000e7000000, size: 400 MB, Compressed Oops mode: 32-bit";
        assert_eq!(heap_range(line), Some(0xe700_0000..0x1_0000_0000));
        assert_eq!(heap_range("ready"), None);
    }
}

//! Which program a process runs, to notice an exec.

use crate::proc::process::{Process, ReadError};
use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::unix::fs::FileExt;

/// Identifies the execution of a program: a hash of the auxiliary vector, which holds addresses that the kernel chooses at
/// random at each exec. Processes forked from each other have the same until one of them executes a program.
pub(crate) fn image_of(process: &Process) -> Result<u64, ReadError> {
    let mut hash = DefaultHasher::new();
    process.read_file("auxv")?.hash(&mut hash);
    Ok(hash.finish())
}

/// The address space that a process had when this was opened.
#[derive(Debug)]
pub(crate) struct AddressSpace(File);

impl AddressSpace {
    pub(crate) fn of(process: &Process) -> Result<Self, ReadError> {
        process.open_file("pagemap").map(Self)
    }

    /// Whether any process still uses it. It has ended after an exec, unless the process shared it (vfork). Takes no lock:
    /// the kernel refuses an odd position before it takes one, but only if the address space exists (fs/proc/task_mmu.c).
    pub(crate) fn exists(&self) -> bool {
        !matches!(self.0.read_at(&mut [0; 1], 1), Ok(0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader, Write};
    use std::process::{Command, Stdio};

    #[test]
    fn an_exec_ends_the_address_space_and_changes_the_image() {
        let mut child = Command::new("sh")
            .args(["-c", "echo ready; read line; exec sh -c 'echo again; read line'"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (mut input, mut output) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
        let process = Process::open(i32::try_from(child.id()).unwrap()).unwrap();
        let (space, image) = (AddressSpace::of(&process).unwrap(), image_of(&process).unwrap());
        assert!(space.exists());
        assert_eq!(image_of(&process).unwrap(), image);
        writeln!(input).unwrap();
        output.read_line(&mut line).unwrap();
        assert!(!space.exists());
        assert_ne!(image_of(&process).unwrap(), image);
        writeln!(input).unwrap();
        child.wait().unwrap();
    }
}

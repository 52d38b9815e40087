//! A process that becomes another program.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// A process that executes another program when it is told to.
pub struct Execing {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Execing {
    pub fn start() -> Self {
        let mut child = Command::new("sh")
            .args(["-c", "echo ready; read line; exec sh -c 'echo again; read line'"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (input, output) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        let mut execing = Self { child, input, output };
        execing.await_line();
        execing
    }

    pub fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).unwrap()
    }

    /// Returns once the other program runs.
    pub fn exec(&mut self) {
        writeln!(self.input).unwrap();
        self.await_line();
    }

    pub fn end(mut self) {
        writeln!(self.input).unwrap();
        self.child.wait().unwrap();
    }

    fn await_line(&mut self) {
        self.output.read_line(&mut String::new()).unwrap();
    }
}

//! A worker of the demonstration: a process that holds known memory and compares it when it's asked to.

use anyhow::{Context, Result, anyhow};
use pagefold_engine::random::{Random, finalize};
use pagefold_engine::units::{PAGE_SIZE, Pages};
use pagefold_text::{exit, style};
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

/// How long an answer may take: a worker that takes a minute has been stopped.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);

/// The memory of a worker.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct WorkerMemory {
    /// Pages that every worker holds
    pub common: u64,
    /// Pages of zeros
    pub zero: u64,
    /// Pages that no other worker holds
    pub own: u64,
}

impl WorkerMemory {
    pub fn pages(self) -> Pages {
        Pages(self.common + self.zero + self.own)
    }

    /// Writes page `number`. The contents are incompressible, except for the zeros.
    fn write(self, number: u64, page: &mut [u8; PAGE_SIZE]) {
        let pid = if number < self.common { 0 } else { u64::from(std::process::id()) };
        let mut words = Random::new(finalize(finalize(pid).wrapping_add(number)));
        let is_zero = (self.common..self.common + self.zero).contains(&number);
        for word in page.chunks_exact_mut(8) {
            word.copy_from_slice(&if is_zero { 0 } else { words.next() }.to_le_bytes());
        }
    }
}

#[derive(Clone)]
#[repr(align(4096))]
struct Page([u8; PAGE_SIZE]);

/// Fills new pages as `memory` says.
fn fill(memory: WorkerMemory) -> Result<Vec<Page>> {
    let mut pages = vec![Page([1; PAGE_SIZE]); usize::try_from(memory.pages().0)?];
    for (number, page) in (0..).zip(&mut pages) {
        memory.write(number, &mut page.0);
    }
    Ok(pages)
}

/// How many pages differ from the ones we wrote.
fn damaged(memory: WorkerMemory, pages: &[Page]) -> u64 {
    let mut wanted = [0; PAGE_SIZE];
    let mut damaged = 0;
    for (number, page) in (0..).zip(pages) {
        memory.write(number, &mut wanted);
        damaged += u64::from(page.0 != wanted);
    }
    damaged
}

/// Runs as a worker: fills the memory and prints `ready`. Then compares every byte whenever it reads a line, and prints
/// the number of damaged pages. Ends with its standard input.
pub fn serve(memory: WorkerMemory) -> Result<u8> {
    let pages = fill(memory)?;
    style::print("ready\n")?;
    for line in io::stdin().lines() {
        line?;
        style::print(&format!("{}\n", damaged(memory, &pages)))?;
    }
    Ok(exit::OK)
}

/// A running worker. Dropping this ends it.
#[derive(Debug)]
pub struct Worker {
    child: Child,
    answers: Receiver<String>,
}

impl Worker {
    /// Starts a worker, whose first answer is `ready`.
    pub fn start(memory: WorkerMemory) -> Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .arg("demo-worker")
            .args([memory.common, memory.zero, memory.own].map(|pages| pages.to_string()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // In a process group of its own, the worker gets no Ctrl-C: we end our workers ourselves.
            .process_group(0)
            .spawn()
            .context("cannot start a worker")?;
        let output = child.stdout.take().context("a worker has no standard output")?;
        let (sender, answers) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        Ok(Self { child, answers })
    }

    pub fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).unwrap_or(0)
    }

    /// Makes the worker compare its memory. The answer is the number of damaged pages.
    pub fn compare(&mut self) -> Result<()> {
        let pid = self.pid();
        let input = self.child.stdin.as_mut().context("a worker has no standard input")?;
        writeln!(input).with_context(|| format!("worker process {pid} has ended"))
    }

    pub fn answer(&self) -> Result<String> {
        let pid = self.pid();
        self.answers.recv_timeout(ANSWER_LIMIT).map_err(|error| match error {
            RecvTimeoutError::Timeout => anyhow!("worker process {pid} has not answered for {ANSWER_LIMIT:?}"),
            RecvTimeoutError::Disconnected => anyhow!("worker process {pid} has ended"),
        })
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // Both calls fail only if the process has already ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn a_worker_notices_each_page_that_changes() {
        let memory = WorkerMemory { common: 3, zero: 2, own: 3 };
        let mut pages = fill(memory).unwrap();
        assert_eq!(damaged(memory, &pages), 0);
        let contents: HashSet<_> = pages.iter().map(|page| page.0).collect();
        assert_eq!(contents.len(), 7, "only the zeros are equal");
        assert_eq!((pages[3].0, pages[4].0), ([0; PAGE_SIZE], [0; PAGE_SIZE]));
        for number in [0, 4, 7] {
            pages[number].0[PAGE_SIZE - 1] ^= 1;
        }
        assert_eq!(damaged(memory, &pages), 3);
    }
}

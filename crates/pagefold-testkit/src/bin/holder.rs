//! Programs that hold memory as they are told, page by page: this test program once more, as its test `holder`.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

pub const PAGE: usize = 4096;
/// Pages on either side that nobody can touch: no mapping of the program is next to what it holds.
const FENCE: usize = 512;

/// What is done to pages of a program.
#[derive(Clone, Copy, Debug)]
pub enum Deed {
    /// Pages from the first get contents from the first, each so much further than the one before. Content 0 is zeros.
    Write { first: u64, pages: u64, content: u64, step: u64 },
    /// Pages are given back (`MADV_DONTNEED`).
    Drop { first: u64, pages: u64 },
}

/// A program that holds memory. Ended when dropped.
pub struct Holder {
    child: Child,
    commands: ChildStdin,
    answers: BufReader<ChildStdout>,
    /// The number of its first page.
    pub first: u64,
    pub pages: u64,
}

impl Holder {
    /// Starts one with memory for so many pages, none there yet.
    pub fn start(pages: u64) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "holder", "--ignored", "--nocapture"])
            .env("PAGEFOLD_HOLDER", pages.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let commands = child.stdin.take().unwrap();
        let mut answers = BufReader::new(child.stdout.take().unwrap());
        let first = answer(&mut answers);
        Self { child, commands, answers, first, pages }
    }

    pub fn pid(&self) -> i32 {
        self.child.id().try_into().unwrap()
    }

    /// Has something done and waits until it is.
    pub fn does(&mut self, deed: Deed) {
        match deed {
            Deed::Write { first, pages, content, step } => self.ask(&format!("write {first} {pages} {content} {step}")),
            Deed::Drop { first, pages } => self.ask(&format!("drop {first} {pages}")),
        };
    }

    /// Marks all of it.
    pub fn mark(&mut self) {
        self.ask("mark");
    }

    /// Forks, without exec: the child's pid. It holds what it got, and ends with its parent.
    pub fn fork(&mut self) -> i32 {
        self.ask("fork").try_into().unwrap()
    }

    fn ask(&mut self, command: &str) -> u64 {
        writeln!(self.commands, "{command}").unwrap();
        answer(&mut self.answers)
    }
}

/// The number after `=`. The test harness may have begun the line.
fn answer(answers: &mut impl BufRead) -> u64 {
    let line = answers.lines().map(Result::unwrap).find(|line| line.contains('=')).expect("the program has ended");
    line.rsplit('=').next().unwrap().parse().unwrap()
}

impl Drop for Holder {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The inside of a holder. Ends when its standard input does.
pub fn hold() {
    let Ok(pages) = std::env::var("PAGEFOLD_HOLDER") else { return };
    let pages: usize = pages.parse().unwrap();
    let length = pages * PAGE;
    // SAFETY: a fresh private mapping, checked for failure, of which the middle is made accessible; that is page-aligned,
    // zeroed by the kernel and never unmapped.
    let (at, words) = unsafe {
        let (flags, all) = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE, length + 2 * FENCE * PAGE);
        let at = libc::mmap(std::ptr::null_mut(), all, libc::PROT_NONE, flags, -1, 0);
        assert_ne!(at, libc::MAP_FAILED);
        let at = at.byte_add(FENCE * PAGE);
        assert_eq!(libc::mprotect(at, length, libc::PROT_READ | libc::PROT_WRITE), 0);
        assert_eq!(libc::madvise(at, length, libc::MADV_NOHUGEPAGE), 0);
        (at, std::slice::from_raw_parts_mut(at.cast::<u64>(), length / 8))
    };
    say(at as u64 / PAGE as u64);
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let mut parts = line.split(' ');
        let command = parts.next().unwrap_or_default();
        let numbers: Vec<u64> = parts.map(|part| part.parse().unwrap()).collect();
        let mut answer = 0;
        match (command, numbers.as_slice()) {
            ("write", &[first, pages, content, step]) => {
                for page in 0..pages {
                    let at = usize::try_from(first + page).unwrap() * PAGE / 8;
                    fill(&mut words[at..at + PAGE / 8], content + page * step);
                }
            }
            ("drop", &[first, pages]) => {
                let (first, pages) = (usize::try_from(first).unwrap() * PAGE, usize::try_from(pages).unwrap() * PAGE);
                assert!(first + pages <= length);
                // SAFETY: within the mapping, to which no reference is used meanwhile; the pages read as zeros afterwards.
                assert_eq!(unsafe { libc::madvise(at.byte_add(first), pages, libc::MADV_DONTNEED) }, 0);
            }
            // SAFETY: all of the mapping; merging never changes what it reads as.
            ("mark", []) => assert_eq!(unsafe { libc::madvise(at, length, libc::MADV_MERGEABLE) }, 0),
            // SAFETY: what the child calls needs no lock that another thread may have held, and no memory.
            ("fork", []) => match unsafe { libc::fork() } {
                0 => loop {
                    // SAFETY: both calls concern the child alone.
                    unsafe {
                        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                        libc::pause();
                    }
                },
                child => answer = u64::try_from(child).expect("fork"),
            },
            _ => panic!("unknown command {line}"),
        }
        say(answer);
    }
    std::hint::black_box(words);
}

fn say(answer: u64) {
    println!("={answer}");
    std::io::stdout().flush().unwrap();
}

/// The same words for the same content, zeros for 0.
fn fill(page: &mut [u64], content: u64) {
    let mut state = content.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    for word in page {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        *word = state;
    }
}

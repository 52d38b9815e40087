//! A handle of the victim `holder`, a process that writes its memory page by page as a test says.

use crate::{PAGES_PER_MIB, Script, victim_binary};
use pagefold_engine::random::{Random, finalize};
use std::path::Path;
use std::process::Command;

/// A change of a holder's memory.
#[derive(Clone, Copy, Debug)]
pub enum Change {
    /// Page `first` gets content `content`, and each further page a content `step` higher. Content 0 is all zeros.
    Write { first: u64, pages: u64, content: u64, step: u64 },
    /// Gives the pages back with MADV_DONTNEED.
    Drop { first: u64, pages: u64 },
}

/// Contents with this bit differ from each other in only one word.
pub const ALIKE: u64 = 1 << 63;

/// Contents with this bit are those of [`Holder::sharing`], by seed.
const COMMON: u64 = 1 << 62;

/// Fills a page with a content. The same number gives the same bytes; 0 gives zeros.
pub fn fill(page: &mut [u8], content: u64) {
    match content {
        0 => page.fill(0),
        content if content & ALIKE != 0 => {
            fill_randomly(page, ALIKE);
            let words = page.len() as u64 / 8;
            let at = usize::try_from(content % words * 8).expect("an offset");
            page[at..at + 8].copy_from_slice(&content.to_ne_bytes());
        }
        content => fill_randomly(page, content),
    }
}

fn fill_randomly(page: &mut [u8], seed: u64) {
    let mut words = Random::new(finalize(seed));
    for word in page.chunks_exact_mut(8) {
        word.copy_from_slice(&words.next().to_ne_bytes());
    }
}

/// A process that holds memory. Killed when dropped.
pub struct Holder {
    program: Script,
    /// The number of the process's first page: its address divided by the page size.
    pub first: u64,
    pub pages: u64,
}

impl Holder {
    /// Starts a process with an address range of this size, none of it populated.
    pub fn start(pages: u64) -> Self {
        Self::start_as(victim_binary("holder").as_ref(), pages)
    }

    /// Like [`Self::start`], with a copy of the program under another name.
    pub fn start_as(program: &Path, pages: u64) -> Self {
        Self::by(&mut Command::new(program), pages)
    }

    /// Like [`Self::start`], with this command.
    pub fn by(command: &mut Command, pages: u64) -> Self {
        let mut program = Script::of(command.arg(pages.to_string()));
        let first = answer(&mut program);
        Self { program, first, pages }
    }

    /// Starts a process whose pages have ascending contents, starting with `content`.
    pub fn with(pages: u64, content: u64) -> Self {
        Self::with_as(victim_binary("holder").as_ref(), pages, content)
    }

    /// Like [`Self::with`], with a copy of the program under another name.
    pub fn with_as(program: &Path, pages: u64, content: u64) -> Self {
        let mut holder = Self::start_as(program, pages);
        holder.write(0, pages, content);
        holder
    }

    /// Starts a copy of the program with memory that all with the same `seed` have in common, and memory of its own.
    pub fn sharing(program: &Path, common_mib: u64, own_mib: u64, seed: u64) -> Self {
        let (common, own) = (common_mib * PAGES_PER_MIB, own_mib * PAGES_PER_MIB);
        let mut holder = Self::start_as(program, common + own);
        holder.write(0, common, COMMON | (seed << 32));
        holder.write(common, own, holder.unique_content());
        holder
    }

    /// Starts a process with all its memory marked, where each page is different from all others on the machine.
    pub fn random(pages: u64) -> Self {
        let mut holder = Self::start(pages);
        holder.write(0, pages, holder.unique_content());
        holder.mark(0, pages);
        holder
    }

    /// Like [`Self::random`], but the second half is a copy of the first.
    pub fn duplicated(pages: u64) -> Self {
        let mut holder = Self::random(pages);
        holder.duplicate();
        holder
    }

    /// Overwrites the second half with the contents of [`Self::random`]'s first half.
    pub fn duplicate(&mut self) {
        let half = self.pages / 2;
        self.write(half, half, self.unique_content());
    }

    /// The first of a series of contents that no other process writes.
    fn unique_content(&self) -> u64 {
        u64::from(self.program.child.0.id()) << 32 | 1
    }

    pub fn pid(&self) -> i32 {
        self.program.pid()
    }

    /// Gives pages ascending contents, starting with `content`.
    pub fn write(&mut self, first: u64, pages: u64, content: u64) {
        self.change(Change::Write { first, pages, content, step: 1 });
    }

    pub fn zero(&mut self, first: u64, pages: u64) {
        self.change(Change::Write { first, pages, content: 0, step: 0 });
    }

    /// Makes a change and waits until it's done.
    pub fn change(&mut self, change: Change) {
        match change {
            Change::Write { first, pages, content, step } => {
                self.ask(&format!("write {first} {pages} {content} {step}"));
            }
            Change::Drop { first, pages } => {
                self.ask(&format!("drop {first} {pages}"));
            }
        }
    }

    pub fn mark(&mut self, first: u64, pages: u64) {
        self.ask(&format!("mark {first} {pages}"));
    }

    /// Forks, without exec, and returns the child's pid. The child does nothing but hold its memory, and ends with its
    /// parent.
    pub fn fork(&mut self) -> i32 {
        self.ask("fork").try_into().unwrap()
    }

    /// Like [`Self::fork`], but the child writes to pages first, as [`Self::write`] does.
    pub fn fork_and_write(&mut self, first: u64, pages: u64, content: u64) -> i32 {
        self.ask(&format!("fork {first} {pages} {content}")).try_into().unwrap()
    }

    /// Like [`Self::fork`], but the child maps so many pages right below its memory first, with ascending contents.
    pub fn fork_and_map(&mut self, pages: u64, content: u64) -> i32 {
        self.ask(&format!("fork {pages} {content}")).try_into().unwrap()
    }

    /// Whether every page that we wrote and didn't drop still has its content.
    pub fn is_intact(&mut self) -> bool {
        self.ask("check") == 0
    }

    /// Makes the process run another program, a copy of `holder`, with an address range of this size.
    pub fn exec(&mut self, program: &Path, pages: u64) {
        self.first = self.ask(&format!("exec {pages} {}", program.display()));
        self.pages = pages;
    }

    /// How many cycles a write to each of its pages takes.
    pub fn times_of_writes(&mut self) -> Vec<u64> {
        let pages = self.ask("time");
        (0..pages).map(|_| answer(&mut self.program)).collect()
    }

    /// Sends any other command of the program `holder`, and returns its answer.
    pub fn ask(&mut self, command: &str) -> u64 {
        self.program.say(command);
        answer(&mut self.program)
    }
}

fn answer(program: &mut Script) -> u64 {
    let line = program.line();
    line.parse().unwrap_or_else(|_| panic!("the holder answered {line:?}"))
}

/// Two processes, see [`Holder::sharing`].
pub fn pair(common_mib: u64, own_mib: u64, seed: u64) -> [Holder; 2] {
    [(); 2].map(|()| Holder::sharing(&victim_binary("holder"), common_mib, own_mib, seed))
}

pub fn pids(holders: &[Holder]) -> Vec<i32> {
    holders.iter().map(Holder::pid).collect()
}

/// Asserts that every byte of their memory is as written.
#[track_caller]
pub fn assert_intact(holders: &mut [Holder]) {
    assert!(holders.iter_mut().all(Holder::is_intact));
}

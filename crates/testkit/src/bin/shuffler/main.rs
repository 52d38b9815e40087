//! A program that changes its memory in many ways and knows what every byte of it must be, for tests of data integrity.
//!
//! `shuffler KEY=VALUE...` (see [`Options`]) holds mappings whose pages share contents with other shufflers. It prints
//! `ready`. Then it writes, forks, protects, moves, unmaps, discards and pages out, in an order that follows from its
//! seed. It keeps a model of the contents, and at least once a second it checks every byte and prints a line with
//! counts. When its input ends, it prints `end ok` and exits with code 0. When it finds damage, it prints `bad: PAGE,
//! EXPECTED, FOUND` at once and exits with code 1.

mod content;
mod region;

use content::Content;
use pagefold_engine::random::Random;
use region::{Arena, Damage, MOST, PAGE, Region};
use std::time::{Duration, Instant};

struct Options {
    /// Memory held at the beginning, MiB (default: 48).
    mib: usize,
    regions: usize,
    seed: u64,
    /// The percentage of pages with contents that other shufflers have too.
    share: u64,
    huge: bool,
    pause_us: u64,
    /// How much memory the operation `burst` takes and gives back, MiB.
    burst: usize,
    /// Falsify the model after the first second, to prove that the checks can fail.
    sabotage: bool,
    ops: Vec<(Op, usize)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Op {
    Write,
    Word,
    Check,
    Fork,
    Protect,
    Remap,
    Renew,
    Replace,
    Discard,
    Pageout,
    Collapse,
    /// Rewrites a page with its own content. Not by default.
    Rewrite,
    /// Takes memory and gives it back. Not by default.
    Burst,
}

/// All operations, by name, with their default weights. Moving and collapsing unmerge thousands of pages at once: if
/// they weren't rare, nothing would ever be merged.
const OPERATIONS: [(&str, Op, usize); 13] = [
    ("write", Op::Write, 120),
    ("word", Op::Word, 80),
    ("check", Op::Check, 80),
    ("fork", Op::Fork, 10),
    ("protect", Op::Protect, 24),
    ("remap", Op::Remap, 2),
    ("renew", Op::Renew, 1),
    ("replace", Op::Replace, 3),
    ("discard", Op::Discard, 4),
    ("pageout", Op::Pageout, 8),
    ("collapse", Op::Collapse, 4),
    ("rewrite", Op::Rewrite, 0),
    ("burst", Op::Burst, 0),
];

impl Options {
    fn parse(words: impl Iterator<Item = String>) -> Self {
        let mut options = Self {
            mib: 48,
            regions: 6,
            seed: 1,
            share: 85,
            huge: false,
            pause_us: 2_000,
            burst: 16,
            sabotage: false,
            ops: OPERATIONS.iter().map(|&(_, op, weight)| (op, weight)).collect(),
        };
        for word in words {
            let (key, value) = word.split_once('=').expect("KEY=VALUE");
            let number = || value.parse::<u64>().expect("a number");
            let size = || usize::try_from(number()).expect("a number");
            match key {
                "mib" => options.mib = size(),
                "regions" => options.regions = size().max(1),
                "seed" => options.seed = number(),
                "share" => options.share = number(),
                "huge" => options.huge = number() == 1,
                "pause-us" => options.pause_us = number(),
                "burst" => options.burst = size(),
                "sabotage" => options.sabotage = number() == 1,
                "ops" => {
                    options.ops = value
                        .split(',')
                        .map(|name| {
                            let found = OPERATIONS.iter().find(|operation| operation.0 == name);
                            let &(_, op, weight) = found.unwrap_or_else(|| panic!("no {name}"));
                            (op, weight.max(1))
                        })
                        .collect();
                }
                _ => panic!("there is no {key}"),
            }
        }
        options
    }
}

#[derive(Default)]
struct Counts {
    pages_checked: u64,
    writes: u64,
    forks: u64,
    faults: u64,
    remaps: u64,
    discards: u64,
    pageouts: u64,
    collapses: u64,
}

struct Shuffler {
    options: Options,
    arena: Arena,
    regions: Vec<Region>,
    random: Random,
    fresh: u64,
    children: Vec<libc::pid_t>,
    counts: Counts,
}

impl Shuffler {
    fn new(options: Options) -> Result<Self, Damage> {
        let mut shuffler = Self {
            arena: Arena::new(options.regions * 2),
            regions: Vec::new(),
            random: Random::new(options.seed),
            fresh: 0,
            children: Vec::new(),
            counts: Counts::default(),
            options,
        };
        for region in 0..shuffler.options.regions {
            let mapped = shuffler.map();
            shuffler.regions.push(mapped);
            shuffler.fill(region, 0, shuffler.regions[region].pages.len())?;
        }
        Ok(shuffler)
    }

    /// A number below `end`, which is not 0.
    fn index(&mut self, end: usize) -> usize {
        usize::try_from(self.random.below(end as u64)).expect("below a usize")
    }

    /// True in `share` of 100 cases.
    fn percent(&mut self, share: u64) -> bool {
        self.random.below(100) < share
    }

    fn map(&mut self) -> Region {
        let pages = (self.options.mib * 256 / self.options.regions).clamp(64, MOST);
        let Options { huge, seed, .. } = self.options;
        Region::map(&mut self.arena, self.random.next(), pages, huge, seed)
    }

    /// A new content for a page. Either the other shufflers have it at this page too, or no shuffler has it at all.
    fn content(&mut self, region: usize, page: usize) -> Content {
        if self.percent(self.options.share) {
            Content::common((region * MOST + page) as u64)
        } else {
            self.fresh += 1;
            Content::unique(self.fresh)
        }
    }

    fn fill(&mut self, region: usize, first: usize, pages: usize) -> Result<(), Damage> {
        for page in first..first + pages {
            let content = self.content(region, page);
            self.regions[region].write(page, content)?;
        }
        Ok(())
    }

    /// Chooses a random range of pages. Returns region, first page, and number of pages.
    fn some(&mut self, most: usize) -> (usize, usize, usize) {
        let region = self.index(self.regions.len());
        let all = self.regions[region].pages.len();
        let pages = 1 + self.index(most.min(all));
        (region, self.index(all - pages + 1), pages)
    }

    fn check(&mut self, most: usize) -> Result<(), Damage> {
        let (region, first, pages) = self.some(most);
        self.counts.pages_checked += pages as u64;
        (first..first + pages).try_for_each(|page| self.regions[region].check(page))
    }

    fn check_all(&mut self) -> Result<(), Damage> {
        for region in &self.regions {
            self.counts.pages_checked += region.check_all()? as u64;
        }
        Ok(())
    }

    fn write(&mut self, most: usize) -> Result<(), Damage> {
        let (region, first, pages) = self.some(most);
        self.counts.writes += pages as u64;
        self.counts.faults += u64::from(self.regions[region].is_protected());
        self.fill(region, first, pages)
    }

    fn step(&mut self) -> Result<(), Damage> {
        let sum = self.options.ops.iter().map(|&(_, weight)| weight).sum();
        let mut at = self.index(sum);
        let op = self.options.ops.iter().find(|&&(_, weight)| {
            let found = at < weight;
            at = at.saturating_sub(weight);
            found
        });
        match op.map_or(Op::Check, |&(op, _)| op) {
            Op::Write => self.write(8)?,
            Op::Word => {
                let (region, page, _) = self.some(1);
                let random = self.random.next();
                let (known, region) = (self.regions[region].pages[page], &mut self.regions[region]);
                self.counts.writes += 1;
                self.counts.faults += u64::from(region.is_protected());
                region.replace_word(page, known.with_word_replaced(random))?;
            }
            Op::Check => self.check(128)?,
            Op::Fork => self.fork()?,
            Op::Protect => self.protect()?,
            Op::Remap => self.remap()?,
            Op::Renew => {
                let region = self.index(self.regions.len());
                let new = self.map();
                let old = std::mem::replace(&mut self.regions[region], new);
                old.check_all()?;
                old.unmap(&mut self.arena);
                self.fill(region, 0, self.regions[region].pages.len())?;
            }
            Op::Replace => {
                let (region, first, pages) = self.some(256);
                self.regions[region].replace(first, pages);
                self.check_zero(region, first, pages)?;
            }
            Op::Discard => {
                let (region, first, pages) = self.some(256);
                self.counts.discards += pages as u64;
                self.regions[region].discard(first, pages);
                self.check_zero(region, first, pages)?;
            }
            Op::Pageout => {
                let (region, first, pages) = self.some(512);
                if self.regions[region].advise(first, pages, libc::MADV_PAGEOUT).is_ok() {
                    self.counts.pageouts += pages as u64;
                }
            }
            Op::Collapse => {
                // Collapses into a huge page, which unmerges its parts. The kernel may refuse for many reasons.
                let (region, page, _) = self.some(1);
                let (region, first) = (&self.regions[region], page / 512 * 512);
                let pages = (region.pages.len() - first).min(512);
                if self.options.huge && region.advise(first, pages, libc::MADV_COLLAPSE).is_ok() {
                    self.counts.collapses += 1;
                }
            }
            Op::Rewrite => {
                let region = self.index(self.regions.len());
                let page = self.index(self.regions[region].pages.len());
                self.regions[region].rewrite(page)?;
            }
            Op::Burst => burst(self.options.burst),
        }
        self.reap(4)
    }

    /// Checks that a part of the range reads as zeros, and writes new contents to most of it.
    fn check_zero(&mut self, region: usize, first: usize, pages: usize) -> Result<(), Damage> {
        let read = self.index(pages + 1);
        (first..first + read).try_for_each(|page| self.regions[region].check(page))?;
        self.fill(region, first, pages - pages / 8)
    }

    fn protect(&mut self) -> Result<(), Damage> {
        match self.regions.iter().position(Region::is_protected) {
            None => {
                let region = self.index(self.regions.len());
                self.regions[region].protect();
            }
            Some(region) if self.percent(50) => {
                let page = self.index(self.regions[region].pages.len());
                self.counts.faults += 1;
                self.fill(region, page, 1)?;
            }
            Some(region) => self.regions[region].unprotect(),
        }
        Ok(())
    }

    fn remap(&mut self) -> Result<(), Damage> {
        let region = self.index(self.regions.len());
        let random = self.random.next();
        let pages = self.regions[region].pages.len();
        let normal = (self.options.mib * 256 / self.options.regions).clamp(64, MOST);
        // Moving several mappings at once needs Linux 6.17, where a signal can leave half of them moved.
        let done = if self.percent(50) && !self.regions[region].split {
            self.regions[region].relocate(&mut self.arena, random)
        } else if pages < normal + normal / 4 && pages + 64 <= MOST {
            let more = 1 + self.index(64);
            let done = self.regions[region].resize(pages + more);
            if done.is_ok() {
                self.fill(region, pages, more)?;
            }
            done
        } else {
            self.regions[region].resize(normal)
        };
        self.counts.remaps += 1;
        match done {
            Ok(()) => {}
            Err(libc::EFAULT) if self.regions[region].split => {}
            Err(error) => return Err(Damage(format!("mremap: {}", std::io::Error::from_raw_os_error(error)))),
        }
        self.regions[region].check_all()?;
        Ok(())
    }

    /// Starts a child that checks its inherited memory and writes to it, while the parent does the same.
    fn fork(&mut self) -> Result<(), Damage> {
        self.reap(1)?;
        self.counts.forks += 1;
        let seed = self.random.next();
        // SAFETY: the program has one thread.
        match unsafe { libc::fork() } {
            0 => {
                // SAFETY: no memory is passed.
                unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
                self.children.clear();
                self.random = Random::new(seed);
                let result = self.child();
                if let Err(Damage(what)) = &result {
                    println!("bad: in a child: {what}");
                }
                // SAFETY: no memory is passed.
                unsafe { libc::_exit(i32::from(result.is_err())) }
            }
            -1 => Err(Damage(format!("fork: {}", std::io::Error::last_os_error()))),
            pid => {
                self.children.push(pid);
                // We write at once, while parent and child still share their pages.
                self.write(16)
            }
        }
    }

    fn child(&mut self) -> Result<(), Damage> {
        for _ in 0..4 {
            self.check(512)?;
            self.write(16)?;
            std::thread::sleep(Duration::from_millis(self.random.next() % 8));
        }
        self.check_all()
    }

    /// Waits until at most `most` children are left. A child that was killed or found damage is an error.
    fn reap(&mut self, most: usize) -> Result<(), Damage> {
        while !self.children.is_empty() {
            let wait = if self.children.len() > most { 0 } else { libc::WNOHANG };
            let mut status = 0;
            // SAFETY: the kernel writes the status.
            let pid = unsafe { libc::waitpid(-1, &raw mut status, wait) };
            if pid == 0 {
                break;
            }
            self.children.retain(|&child| child != pid);
            if status != 0 {
                return Err(Damage(format!("child {pid} ended with status {status:#x}")));
            }
        }
        Ok(())
    }

    fn line(&self) -> String {
        let Counts { pages_checked, writes, forks, faults, remaps, discards, pageouts, collapses } = self.counts;
        format!(
            "checked={pages_checked} written={writes} forks={forks} faults={faults} remaps={remaps} \
             discarded={discards} paged_out={pageouts} collapsed={collapses}"
        )
    }
}

fn burst(mib: usize) {
    let mut memory = vec![1_u8; mib << 20];
    memory.iter_mut().step_by(PAGE).for_each(|byte| *byte = 2);
    std::hint::black_box(&memory);
}

fn input_ended() -> bool {
    let mut input = libc::pollfd { fd: 0, events: libc::POLLIN, revents: 0 };
    // An input that has ended counts as ready, and nobody ever sends anything here.
    // SAFETY: one pollfd, which lives through the call.
    unsafe { libc::poll(&raw mut input, 1, 0) > 0 }
}

fn run(options: Options) -> Result<String, Damage> {
    let start = Instant::now();
    let (pause, sabotage) = (Duration::from_micros(options.pause_us), options.sabotage);
    let mut shuffler = Shuffler::new(options)?;
    println!("ready");
    let mut second = 1;
    while !input_ended() {
        shuffler.step()?;
        std::thread::sleep(pause);
        if start.elapsed().as_secs() >= second {
            shuffler.check_all()?;
            println!("{second} s: {} ok", shuffler.line());
            second = start.elapsed().as_secs() + 1;
            if sabotage {
                shuffler.regions[0].pages[7] = Content::unique(u64::from(u32::MAX >> 1));
            }
        }
    }
    shuffler.reap(0)?;
    shuffler.check_all()?;
    Ok(shuffler.line())
}

fn main() {
    region::catch_faults();
    match run(Options::parse(std::env::args().skip(1))) {
        Ok(line) => println!("end ok {line}"),
        Err(Damage(what)) => {
            println!("bad: {what}");
            std::process::exit(1);
        }
    }
}

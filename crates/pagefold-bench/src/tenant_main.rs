//! The inside of a tenant.

use crate::contents::{fill, fill_but_tail, mix};
use crate::live::{Counters, Part};
use crate::tenant::{Segment, TenantSpec};
use anyhow::Context;
use memmap2::MmapMut;
use pagefold_core::units::PAGE_SIZE;
use std::io::{BufRead, Write};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Instant;

/// Runs as a tenant: fills memory as the JSON of a [`TenantSpec`] says, then answers commands on standard input until
/// it ends or says `quit`. Never returns.
///
/// Commands: `verify` (answers `ok`, or `BAD n` with the number of damaged pages), `touch N` (reads a word in each of
/// the first N pages), `cow` (writes to every page what it holds), `damage` (changes one byte), `begin` (the live part
/// of the spec), `counters` (answers its [`Counters`] as JSON), `quit`.
pub fn tenant_main(spec: &str) -> ! {
    let code = match run(spec) {
        Ok(()) => 0,
        Err(error) => {
            eprintln!("tenant: {error:#}");
            1
        }
    };
    std::process::exit(code)
}

fn run(spec: &str) -> anyhow::Result<()> {
    let spec: TenantSpec = serde_json::from_str(spec).context("the tenant's spec")?;
    let mut memory = spec.segments.iter().map(|&segment| Filled::new(segment)).collect::<anyhow::Result<Vec<_>>>()?;
    let mut part = spec.live.map(Part::new).transpose()?;
    let mut output = std::io::stdout().lock();
    let mut say = |line: &str| writeln!(output, "{line}").and_then(|()| output.flush());
    say("ready")?;
    let lines = lines();
    loop {
        let line = match part.as_ref().and_then(Part::due) {
            None => lines.recv().map_err(|_| RecvTimeoutError::Disconnected),
            Some(due) => lines.recv_timeout(due.saturating_duration_since(Instant::now())),
        };
        let line = match line {
            Ok(line) => line?,
            Err(RecvTimeoutError::Disconnected) => return Ok(()),
            Err(RecvTimeoutError::Timeout) => {
                if let Some(part) = &mut part {
                    part.act(&mut memory)?;
                }
                continue;
            }
        };
        let asked = Instant::now();
        match line.split_once(' ').unwrap_or((line.as_str(), "")) {
            ("verify", "") => {
                let own = part.as_ref().map_or(0, Part::damaged);
                match memory.iter().map(Filled::damaged).sum::<u64>() + own {
                    0 => say("ok")?,
                    pages => say(&format!("BAD {pages}"))?,
                }
            }
            ("touch", pages) => {
                let pages = pages.parse().context("touch wants a number of pages")?;
                let words = memory.iter().flat_map(Filled::first_words);
                // The sum is printed so that the reads cannot be left out.
                say(&format!("ok {}", words.take(pages).fold(0, u64::wrapping_add)))?;
            }
            ("cow", "") => {
                memory.iter_mut().for_each(Filled::rewrite);
                say("ok")?;
            }
            ("damage", "") => {
                if let Some(byte) = memory.first_mut().and_then(|filled| filled.pages_mut().first_mut()) {
                    *byte ^= 1;
                }
                say("ok")?;
            }
            ("begin", "") => match &mut part {
                Some(part) => {
                    say("ok")?;
                    part.begin(asked);
                }
                None => say("nothing to begin")?,
            },
            ("counters", "") => {
                let counters = part.as_mut().map_or_else(Counters::default, |part| part.counters(asked));
                say(&serde_json::to_string(&counters)?)?;
            }
            ("quit", "") => return Ok(()),
            _ => say(&format!("unknown command {line}"))?,
        }
        if let Some(part) = &mut part {
            part.pause(asked.elapsed());
        }
    }
}

/// The lines of standard input, until it ends.
fn lines() -> Receiver<std::io::Result<String>> {
    let (sender, lines) = channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines() {
            if sender.send(line).is_err() {
                break;
            }
        }
    });
    lines
}

/// One segment's memory.
pub struct Filled {
    segment: Segment,
    memory: MmapMut,
    length: usize,
}

impl Filled {
    /// Maps memory of its own and fills it.
    pub fn new(segment: Segment) -> anyhow::Result<Self> {
        let length =
            usize::try_from(segment.pages().0)?.checked_mul(PAGE_SIZE).context("a segment that is too long")?;
        let memory = MmapMut::map_anon(length).context("a segment's memory")?;
        let mut filled = Self { segment, memory, length };
        for (page, number) in filled.pages_mut().chunks_exact_mut(PAGE_SIZE).zip(0..) {
            write(segment, page, number);
        }
        Ok(filled)
    }

    fn pages(&self) -> &[u8] {
        &self.memory[..self.length]
    }

    /// All its bytes.
    pub fn pages_mut(&mut self) -> &mut [u8] {
        &mut self.memory[..self.length]
    }

    /// Pages that do not hold what was written.
    pub fn damaged(&self) -> u64 {
        let mut wanted = [0; PAGE_SIZE];
        let differs = |(page, number): &(&[u8], u64)| {
            write(self.segment, &mut wanted, *number);
            **page != wanted
        };
        self.pages().chunks_exact(PAGE_SIZE).zip(0..).filter(differs).count() as u64
    }

    fn first_words(&self) -> impl Iterator<Item = u64> {
        self.pages().chunks_exact(PAGE_SIZE).map(|page| page.first_chunk().map_or(0, |word| u64::from_le_bytes(*word)))
    }

    /// Writes one page as a whole, and returns which one comes next.
    pub fn write_again(&mut self, number: usize) -> usize {
        let segment = self.segment;
        if let Some(page) = self.pages_mut().chunks_exact_mut(PAGE_SIZE).nth(number) {
            write(segment, page, number as u64);
        }
        if (number + 1) * PAGE_SIZE < self.length { number + 1 } else { 0 }
    }

    fn rewrite(&mut self) {
        for page in self.pages_mut().chunks_exact_mut(PAGE_SIZE) {
            // black_box: a store of what was just read could be left out.
            page[0] = std::hint::black_box(page[0]);
        }
    }
}

/// Writes what page `number` of a segment holds.
fn write(segment: Segment, page: &mut [u8], number: u64) {
    // Each kind has sequences of its own, so that equal seeds do not make twins by mistake.
    match segment {
        Segment::Same { seed, .. } => fill(page, mix(seed) ^ 1, 0),
        Segment::Random { seed, .. } => fill(page, mix(mix(seed) ^ u64::from(std::process::id())) ^ 2, number),
        Segment::Zero { .. } => std::hint::black_box(page).fill(0),
        Segment::Shared { seed, .. } => fill(page, mix(seed) ^ 3, number),
        Segment::Pairs { seed, pages } => fill(page, mix(seed) ^ 4, number % (pages / 2).max(1)),
        Segment::Tails { seed, .. } => fill_but_tail(page, mix(seed) ^ 5, number),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    fn copies(filled: &[&Filled]) -> HashMap<Vec<u8>, usize> {
        let mut copies = HashMap::new();
        for page in filled.iter().flat_map(|filled| filled.pages().chunks_exact(PAGE_SIZE)) {
            *copies.entry(page.to_vec()).or_insert(0) += 1;
        }
        copies
    }

    #[test]
    fn segments_hold_what_their_names_say() {
        let make = |segment| Filled::new(segment).unwrap();
        let same = make(Segment::Same { pages: 8, seed: 7 });
        assert_eq!(copies(&[&same]).len(), 1);
        assert!(same.pages().iter().any(|&byte| byte != 0));
        assert_eq!(same.pages().as_ptr().align_offset(PAGE_SIZE), 0);
        let pairs = make(Segment::Pairs { pages: 8, seed: 7 });
        assert!(copies(&[&pairs]).values().all(|&count| count == 2));
        let (shared, twin) = (make(Segment::Shared { pages: 8, seed: 7 }), make(Segment::Shared { pages: 8, seed: 7 }));
        assert_eq!(copies(&[&shared]).len(), 8);
        assert!(copies(&[&shared, &twin]).values().all(|&count| count == 2));
        let (random, tails) = (make(Segment::Random { pages: 8, seed: 7 }), make(Segment::Tails { pages: 8, seed: 7 }));
        assert_eq!(copies(&[&random, &tails, &shared, &same, &pairs]).len(), 8 + 8 + 8 + 1 + 4);
        assert!(make(Segment::Zero { pages: 3 }).pages().iter().all(|&byte| byte == 0));
    }

    #[test]
    fn damage_is_found_page_by_page_and_rewriting_is_none() {
        let mut filled = Filled::new(Segment::Random { pages: 5, seed: 1 }).unwrap();
        filled.rewrite();
        assert_eq!(filled.damaged(), 0);
        filled.pages_mut()[3 * PAGE_SIZE - 1] ^= 0x80;
        filled.pages_mut()[4 * PAGE_SIZE] ^= 1;
        assert_eq!(filled.damaged(), 2);
    }
}

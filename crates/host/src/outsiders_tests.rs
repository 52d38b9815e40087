use super::*;
use crate::sampling::{HashMode, RegionRead, SamplingJob, sample};
use pagefold_engine::hash::Digester;
use pagefold_engine::keys::RegionKey;
use pagefold_procmem::memory::{Contents, ReadHow};
use pagefold_testkit::{Holder, is_root, skip, wait_until};

const PAGES: u32 = 32;

/// The first pages of a process's mapping.
fn member(pid: i32, master: &Holder, pages: u64) -> Member {
    let first = Vpn(master.first);
    Member { process: Arc::new(Process::open(pid).unwrap()), first, end: first + pages }
}

/// Reads the master's memory. Returns, for each page, whether processes outside the family map it.
fn outsiders(master: &Holder, family: Vec<Member>) -> Vec<bool> {
    let read = RegionRead {
        region: RegionKey(1),
        family,
        process: Arc::new(Process::open(master.pid()).unwrap()),
        runs: vec![(Vpn(master.first), PAGES / 2), (Vpn(master.first) + u64::from(PAGES / 2), PAGES / 2)],
        how: ReadHow { contents: Contents::All, ..ReadHow::default() },
    };
    let job = SamplingJob {
        reads: vec![read],
        looks: Vec::new(),
        charged_to: None,
        count: None,
        hash_mode: HashMode::Read(Digester::new(1)),
        takes_averages: false,
        topology: None,
    };
    let read = sample(PageReader::new(), job).unwrap();
    assert!(read.failed.is_empty() && read.pages.iter().all(|page| may_be_forked(page.state)), "{read:?}");
    read.pages.iter().map(|page| page.outsiders).collect()
}

#[test]
fn pages_that_others_map_are_told_from_those_of_the_family() {
    if !is_root() {
        skip("frames are shown to root only");
        return;
    }
    let mut master = Holder::with(PAGES.into(), 1);
    let worker = master.fork_and_write(8, 8, 1_000);
    let other = master.fork_and_write(0, 8, 2_000);
    let whole = |pid| member(pid, &master, PAGES.into());
    let eighths = |expected: [bool; 4]| expected.map(|outsiders| [outsiders; 8]).concat();
    // The worker doesn't map the second eight any more, but `other` does. So the number of mappers is the family's.
    wait_until("both have written", || {
        outsiders(&master, vec![whole(master.pid()), whole(worker)]) == eighths([false, true, true, true])
    });
    let found = outsiders(&master, vec![whole(master.pid()), whole(worker), whole(other)]);
    assert_eq!(found, eighths([false; 4]));
    // We may not merge the rest of the worker's mapping.
    let found = outsiders(&master, vec![whole(master.pid()), member(worker, &master, 4), whole(other)]);
    assert_eq!(found[..8], [[false; 4], [true; 4]].concat());
}

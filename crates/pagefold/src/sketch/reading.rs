//! Reads one workload and makes its sketch.

use super::Now;
use super::settings::Fleet;
use super::workloads::{Id, Member, Workload};
use pagefold_engine::host::PageState;
use pagefold_engine::units::{PAGE_BYTES, Pages, whole};
use pagefold_host::live::{Content, PageContent};
use pagefold_procmem::cpu::process_cpu_ns;
use pagefold_procmem::cursor::ReadCursor;
use pagefold_procmem::process::Process;
use pagefold_sketch::{Content as Digest, Counted, Counter, Row};
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;

/// We remember this many frames shared through fork (512 MiB of a workload), to count each once. We ignore the rest.
const SHARED_MOST: usize = 1 << 17;

/// We stop reading a process that has grown meanwhile to twice its size plus this many pages (256 MiB).
const ENDLESS_PAGES: u64 = 1 << 16;

/// A process's pid and start time.
pub type ProcessId = (i32, u64);

#[derive(Debug)]
pub struct Reading {
    id: Id,
    began: Now,
    /// Processes still to read. The current one is last.
    left: Vec<Member>,
    /// How far we've read the current process.
    pub cursor: ReadCursor,
    counter: Counter,
    zeros: u64,
    /// Pages that we've read of the current process.
    read: u64,
    /// Resident pages that we didn't read, in the processes that we've finished.
    unread: u64,
    merged_of_next: u64,
    shared: HashSet<u32>,
    known: Known,
    processes: Vec<Arc<Process>>,
}

/// Facts that we keep to compare them with the workload's next sketch.
#[derive(Clone, Debug, Default)]
pub struct Known {
    /// CPU time so far, nanoseconds.
    cpu_ns: BTreeMap<ProcessId, u64>,
    /// Merged pages of each process that we read whole.
    merged: BTreeMap<ProcessId, u64>,
}

impl Known {
    /// Whether one of these processes was in the workload.
    pub fn has_any(&self, processes: &BTreeSet<ProcessId>) -> bool {
        self.cpu_ns.keys().any(|process| processes.contains(process))
    }
}

/// A complete sketch, and the facts to compare with the next one.
#[derive(Debug)]
pub struct Finished {
    pub id: Id,
    pub row: Row,
    pub known: Known,
}

impl Reading {
    pub fn new(workload: Workload, began: Now) -> Self {
        let Workload { id, mut members } = workload;
        members.reverse();
        let processes: Vec<Arc<Process>> = members.iter().map(|member| member.process.clone()).collect();
        let cpu_ns = processes.iter().map(|process| (process.key(), cpu_ns_of(process))).collect();
        Self {
            id,
            began,
            left: members,
            cursor: ReadCursor::default(),
            counter: Counter::new(),
            zeros: 0,
            read: 0,
            unread: 0,
            merged_of_next: 0,
            shared: HashSet::new(),
            known: Known { cpu_ns, merged: BTreeMap::new() },
            processes,
        }
    }

    pub fn next(&self) -> Option<&Member> {
        self.left.last()
    }

    pub fn add(&mut self, pages: &[PageContent]) {
        for page in pages {
            let counts = match page.state {
                PageState::Merged => {
                    self.merged_of_next += 1;
                    true
                }
                // A frame that processes share through fork counts once.
                PageState::Shared => {
                    let frame = page.frame.and_then(|frame| u32::try_from(frame).ok());
                    self.shared.len() < SHARED_MOST && frame.is_some_and(|frame| self.shared.insert(frame))
                }
                _ => true,
            };
            self.read += 1;
            match page.content {
                _ if !counts => {}
                Content::Zeros => self.zeros += 1,
                Content::Digest(digest) => self.counter.add(Digest(digest)),
            }
        }
    }

    /// Whether we've read much more of this process than it held. It may map new memory faster than we read.
    pub fn is_endless(&self) -> bool {
        self.next().is_some_and(|member| self.read > 2 * member.resident.0 + ENDLESS_PAGES)
    }

    /// Goes on to the next process. `whole`: we've read this process to its end.
    pub fn finish_member(&mut self, whole: bool) {
        let Some(member) = self.left.pop() else { return };
        if whole {
            self.known.merged.insert(member.process.key(), self.merged_of_next);
        } else {
            self.unread += member.resident.0.saturating_sub(self.read);
        }
        self.read = 0;
        self.merged_of_next = 0;
        self.cursor = ReadCursor::default();
    }

    pub fn processes(&self) -> &[Arc<Process>] {
        &self.processes
    }

    /// Makes the row once all processes are read. `zeros_merged` is the workload's number of merged zero pages.
    /// `sharing` and `shared` are KSM's counters `pages_sharing` and `pages_shared`.
    pub fn finish(
        self,
        fleet: &Fleet,
        now: Now,
        former: Option<(&Row, &Known)>,
        zeros_merged: Pages,
        sharing: Pages,
        shared: Pages,
    ) -> Finished {
        let Self { id, began, counter, zeros, unread, mut known, processes, .. } = self;
        let counted = counter.finish();
        let read = bytes(counted.pages.0 + zeros);
        let nothing = Known::default();
        let (since_us, before) = former.map_or((began.us, &nothing), |(row, known)| (row.time_us, known));
        let broken = bytes(lost(&before.merged, &known.merged));
        let mut spent_ns = 0;
        for process in &processes {
            let cpu_ns = cpu_ns_of(process);
            let at_start = known.cpu_ns.insert(process.key(), cpu_ns).unwrap_or(cpu_ns);
            spent_ns += cpu_ns.saturating_sub(before.cpu_ns.get(&process.key()).copied().unwrap_or(at_start));
        }
        // Merging saves all but one of n equal pages. The one may belong to another workload, so we use KSM's average.
        let merged: u64 = known.merged.values().sum();
        let saved = merged as f64 * sharing.0 as f64 / (sharing.0 + shared.0).max(1) as f64;
        let mut came_bytes = 0;
        let mut went_bytes = 0;
        let mut take_back_bytes = broken;
        if let Some((row, _)) = former {
            came_bytes = whole(counted.sketch.without(&row.sketch).bytes());
            went_bytes = whole(row.sketch.without(&counted.sketch).bytes());
            take_back_bytes = broken.max(row.take_back_bytes);
        }
        let savable = counted.spare.0 + zeros.saturating_sub(1);
        let Counted { sketch, by_copies, .. } = counted;
        let row = Row {
            host: fleet.host.clone(),
            key: fleet.key.id(),
            kind: id.kind,
            workload: id.name.clone(),
            domain: id.domain.clone(),
            time_us: now.us.max(since_us),
            since_us,
            anonymous_bytes: read + bytes(unread),
            read_bytes: read,
            zero_bytes: bytes(zeros),
            pages: by_copies.map(|pages| pages.0),
            savable_bytes: bytes(savable),
            saved_bytes: bytes(whole(saved) + zeros_merged.0),
            take_back_bytes,
            came_bytes,
            went_bytes,
            broken_bytes: broken,
            cpu_millicores: spent_ns / now.us.saturating_sub(since_us).max(1),
            host_memory_bytes: fleet.memory_bytes,
            host_cpu_millicores: fleet.cpu_millicores,
            sketch,
        };
        Finished { id, row, known }
    }

    pub fn id(&self) -> &Id {
        &self.id
    }

    /// Whether one of these processes is in the workload.
    pub fn has_any(&self, processes: &BTreeSet<ProcessId>) -> bool {
        self.known.has_any(processes)
    }
}

fn bytes(pages: u64) -> u64 {
    pages * PAGE_BYTES
}

/// CPU time of a process so far, nanoseconds. 0 if it has ended.
fn cpu_ns_of(process: &Process) -> u64 {
    process_cpu_ns(process).unwrap_or(0)
}

/// How many merged pages these processes have lost.
fn lost(before: &BTreeMap<ProcessId, u64>, now: &BTreeMap<ProcessId, u64>) -> u64 {
    before.iter().filter_map(|(process, merged)| Some(merged.saturating_sub(*now.get(process)?))).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_engine::keys::OwnerKey;
    use pagefold_sketch::{FleetKey, Kind};

    const S: u64 = 1_000_000;

    fn now(seconds: u64) -> Now {
        Now { ns: seconds * 1_000_000_000, us: (1_800_000_000 + seconds) * S }
    }

    fn fleet() -> Fleet {
        Fleet { key: FleetKey::new([9; 32]), host: "node".to_owned(), memory_bytes: 1 << 30, cpu_millicores: 2000 }
    }

    fn begin(seconds: u64) -> Reading {
        let process = Arc::new(Process::open(std::process::id().try_into().unwrap()).unwrap());
        let id = Id { kind: Kind::Pod, name: "web".to_owned(), domain: "default".to_owned() };
        let member = Member { owner: OwnerKey(1), process, resident: Pages(1000) };
        Reading::new(Workload { id, members: vec![member] }, now(seconds))
    }

    fn pages(state: PageState, contents: std::ops::Range<u64>) -> Vec<PageContent> {
        contents.map(|content| PageContent { state, frame: Some(content), content: Content::Digest(content) }).collect()
    }

    fn finish(reading: Reading, seconds: u64, former: Option<&Finished>) -> Finished {
        let former = former.map(|former| (&former.row, &former.known));
        let finished = reading.finish(&fleet(), now(seconds), former, Pages(0), Pages(300), Pages(100));
        finished.row.check().unwrap();
        finished
    }

    #[test]
    fn pages_are_counted_by_what_they_hold() {
        let mut reading = begin(10);
        reading.add(&pages(PageState::Private, 1..101));
        reading.add(&pages(PageState::Private, 51..101));
        let zero = PageContent { state: PageState::Private, frame: None, content: Content::Zeros };
        reading.add(&[zero; 30]);
        // Two processes share these 40 pages. For the page after them, we don't know the frame.
        reading.add(&pages(PageState::Shared, 201..241));
        reading.add(&pages(PageState::Shared, 201..241));
        reading.add(&[PageContent { frame: None, ..pages(PageState::Shared, 300..301)[0] }]);
        reading.finish_member(true);
        assert!(reading.next().is_none());
        let Finished { row, .. } = finish(reading, 20, None);
        assert_eq!((row.read_bytes, row.anonymous_bytes, row.zero_bytes), (220 * 4096, 220 * 4096, 30 * 4096));
        assert_eq!(row.pages, [90, 100, 0, 0, 0]);
        assert_eq!(row.savable_bytes, (50 + 29) * 4096);
        assert_eq!((row.since_us, row.time_us), (now(10).us, now(20).us));
        assert_eq!((row.came_bytes, row.went_bytes, row.broken_bytes), (0, 0, 0));
    }

    #[test]
    fn a_sketch_is_compared_with_the_former_one() {
        let mut first = begin(0);
        first.add(&pages(PageState::Merged, 1..401));
        first.finish_member(true);
        let first = finish(first, 100, None);
        // Three quarters of the host's merged pages are saved.
        assert_eq!(first.row.saved_bytes, 300 * 4096);
        let mut second = begin(200);
        second.add(&pages(PageState::Merged, 1..301));
        second.add(&pages(PageState::Private, 501..551));
        second.finish_member(true);
        let second = finish(second, 300, Some(&first));
        let Row { since_us, came_bytes, went_bytes, broken_bytes, take_back_bytes, .. } = second.row;
        assert_eq!((since_us, came_bytes, went_bytes), (now(100).us, 50 * 4096, 100 * 4096));
        assert_eq!((broken_bytes, take_back_bytes), (100 * 4096, 100 * 4096));
        // The highest loss counts. A process that we didn't read to its end doesn't count.
        let mut third = begin(350);
        third.add(&pages(PageState::Merged, 1..11));
        third.finish_member(false);
        let third = finish(third, 400, Some(&second));
        assert_eq!((third.row.broken_bytes, third.row.take_back_bytes), (0, 100 * 4096));
        assert_eq!((third.row.read_bytes, third.row.anonymous_bytes), (10 * 4096, 1000 * 4096));
        // If the clock goes back, the period doesn't become negative.
        let back = finish(begin(0), 50, Some(&third));
        assert_eq!(back.row.time_us, back.row.since_us);
    }

    #[test]
    fn a_process_that_grows_without_end_is_left() {
        let mut reading = begin(0);
        for _ in 0..67 {
            assert!(!reading.is_endless());
            reading.add(&pages(PageState::Private, 0..1000));
        }
        reading.add(&pages(PageState::Private, 0..1000));
        assert!(reading.is_endless());
    }
}

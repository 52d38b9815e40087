//! The simulated server memory: services of four similar processes each, on eight nodes, with a day's changes.
//!
//! Contents follow measurements of real programs: guests of one image (40 % of their memory can be saved), two
//! databases (67 and 76 %), interpreters (14 %), a garbage-collected heap (3 %) and one without common pages. Every
//! process rewrites a tenth with unique contents and another with contents that its siblings also get, each page twice
//! a day on average; the garbage-collected one rewrites half of its memory every half hour. The processes of one
//! service in four live for two to six hours, and then new ones replace them.

use super::{NS_PER_HOUR, PAGES_PER_GIB};
use pagefold_engine::random::Random;
use pagefold_engine::units::{Pages, Permyriad, whole};
use pagefold_sim::{Behaviour, Fill, Knobs, Mapping, Process, Replica, SimHost, Writes};

pub const NODES: u16 = 8;
/// Processes of one service.
const SIBLINGS: u64 = 4;
const PROCESSES: std::ops::RangeInclusive<u64> = 32..=1_000;

/// Memory of the processes of a service, independent of size and granularity.
#[derive(Clone, Copy, Debug)]
struct Kind {
    /// Static regions: size in tenths of the process, and the share that siblings have too.
    body: &'static [(u64, u32)],
    /// The share of zeros in the static regions.
    zeros: u32,
    /// Unique memory that the process rewrites: size in tenths, and the time for as many writes as it has pages,
    /// nanoseconds.
    heap: (u64, u64),
}

const TURNOVER_NS: u64 = 12 * NS_PER_HOUR;
const HEAP: (u64, u64) = (1, TURNOVER_NS);
const GUEST: Kind = Kind { body: &[(4, 9_500), (4, 500)], zeros: 400, heap: HEAP };
const KINDS: [Kind; 8] = [
    GUEST,
    Kind { body: &[(8, 8_800)], zeros: 100, heap: HEAP },
    Kind { body: &[(2, 5_600), (6, 300)], zeros: 100, heap: HEAP },
    GUEST,
    Kind { body: &[(8, 8_400)], zeros: 3_600, heap: HEAP },
    Kind { body: &[(4, 200)], zeros: 100, heap: (5, NS_PER_HOUR / 2) },
    Kind { body: &[(8, 0)], zeros: 0, heap: HEAP },
    GUEST,
];

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ServerMemory {
    pub gib: u64,
    /// Simulated time, nanoseconds.
    pub for_ns: u64,
}

impl ServerMemory {
    pub fn new(gib: u64, hours: f64) -> Self {
        Self { gib, for_ns: whole(hours * NS_PER_HOUR as f64) }
    }

    pub fn pages(self) -> u64 {
        self.gib * PAGES_PER_GIB
    }

    /// Processes at any time.
    pub fn processes(self) -> u64 {
        self.gib.clamp(*PROCESSES.start(), *PROCESSES.end())
    }

    pub fn populate(self, sim: SimHost, knobs: &Knobs) -> SimHost {
        let pages = self.pages() / u64::from(knobs.granularity) / self.processes();
        // A twentieth of the memory is free.
        let node = Pages(pages * self.processes() * 21 / 20 / u64::from(NODES));
        let mut sim = sim.with_nodes(&[node; NODES as usize]);
        for number in 0..self.processes() {
            let mut lives = Random::for_purpose(number, 0x11fe);
            let comes_and_goes = number / SIBLINGS % 4 == 3;
            let mut from_ns = 0;
            loop {
                let to_ns = from_ns + (2 * NS_PER_HOUR + lives.below(4 * NS_PER_HOUR));
                let home = u16::try_from(number % u64::from(NODES)).unwrap_or(0);
                let process = process(number / SIBLINGS, pages, from_ns).at_home_on(home);
                let ends = comes_and_goes && to_ns < self.for_ns;
                sim.add(if ends { process.exiting_at(to_ns) } else { process });
                if !ends {
                    break;
                }
                from_ns = to_ns;
            }
        }
        sim
    }
}

/// A process of a service, with `pages` simulated pages.
fn process(service: u64, pages: u64, start_ns: u64) -> Process {
    let kind = usize::try_from(service).unwrap_or(0) % KINDS.len();
    let Kind { body, zeros, heap } = KINDS[kind];
    // Each region's size in tenths, its share of duplicates, and its behaviour.
    let mut regions = Vec::new();
    for &(tenths, density) in body {
        regions.push((tenths, Some(density), Behaviour::Static));
    }
    // As many contents as pages: all siblings eventually get the same contents.
    let writes = Writes::Duplicate { series: 1_000_000 + service, size: part(pages, 1).0 };
    let density = body.iter().map(|&(_, density)| density).max();
    regions.push((1, density, Behaviour::Turnover { every_ns: TURNOVER_NS, writes }));
    regions.push((heap.0, None, Behaviour::Turnover { every_ns: heap.1, writes: Writes::Unique }));
    let mut process = Process::starting_at(start_ns);
    for (number, (tenths, density, behaviour)) in (1..).zip(regions) {
        let fill = match density {
            Some(density) => Fill::Replica(Replica {
                template: service * 8 + number,
                density: vec![Permyriad(density)],
                zeros: Permyriad(zeros),
                run: 7,
                shift: 0,
            }),
            None => Fill::Random,
        };
        // Regions of a kind are in the same family in all services.
        let mapping = Mapping::new(part(pages, tenths), fill).of_family(kind as u64 * 8 + number);
        process = process.mapping(mapping.behaving(behaviour));
    }
    process
}

fn part(pages: u64, tenths: u64) -> Pages {
    Pages((pages * tenths / 10).max(1))
}

//! Runs the kernel and the model scan by scan and compares their counters.

use super::family;
use super::memory::{PROGRAMS, SCANS, Schedule};
use pagefold_engine::host::{Actions, Host, PageState, ScanOrder};
use pagefold_engine::keys::OwnerKey;
use pagefold_host::check::facts::Release;
use pagefold_host::scope::deny_list::DenyList;
use pagefold_host::scope::{ScopeSpec, resolve};
use pagefold_ksm::Knob;
use pagefold_lab::interrupt::Interrupt;
use pagefold_lab::ksm_control::KsmForExperiment;
use pagefold_lab::record::{Deltas, MemorySnapshot, Origin, Page, Record, Snapshot, Source};
use pagefold_lab::recorder::{Recorder, RecordingOptions};
use pagefold_lab::script::script;
use pagefold_procmem::Roots;
use pagefold_sim::{Costs, Knobs, Script, SimHost};
use pagefold_testkit::{Holder, skip, skip_unsupported};
use std::fmt::Write;
use std::fs;
use std::time::Duration;

/// Time between scans in the model, longer than any scan.
const STEP_NS: u64 = 3_600_000_000_000;
/// The first release whose ksmd doesn't search the stable tree for pages with a changed checksum.
const SINCE: Release = Release(6, 11);
/// Tolerance of counters: a thousandth, or a few pages that ksmd couldn't lock.
const THOUSANDTHS: u64 = 1;
const FEW: u64 = 8;

#[derive(Clone, Copy, Debug)]
pub struct Setting {
    pub smart_scan: bool,
    pub use_zero_pages: bool,
}

pub const SETTINGS: [Setting; 4] = [
    Setting { smart_scan: false, use_zero_pages: false },
    Setting { smart_scan: true, use_zero_pages: false },
    Setting { smart_scan: false, use_zero_pages: true },
    Setting { smart_scan: true, use_zero_pages: true },
];

#[derive(Clone, Copy, Debug, Default)]
pub struct Counters {
    pub shared: u64,
    pub sharing: u64,
    pub unshared: u64,
    pub volatile: u64,
    /// Pages replaced by the zero page.
    pub zero: u64,
    /// Pages scanned in this scan.
    pub scanned: u64,
    /// ksmd's CPU time in this scan.
    pub cpu_ns: u64,
    pub full_scans: u64,
}

impl Counters {
    /// Subtracts an earlier reading from the counters that grow with each scan, and leaves the rest.
    fn since(self, before: &Self) -> Self {
        Self {
            scanned: self.scanned - before.scanned,
            cpu_ns: self.cpu_ns - before.cpu_ns,
            full_scans: self.full_scans - before.full_scans,
            ..self
        }
    }
}

/// Observations of ksmd, and the script that repeats them in the model.
pub struct Observations {
    setting: Setting,
    script: Script,
    /// The processes that fork before a scan, after the steps of the script.
    forks: Vec<(u64, OwnerKey)>,
    kernel: Vec<Counters>,
}

/// KSM under exclusive control.
pub struct KernelUnderTest {
    control: KsmForExperiment,
    /// The value of `ksm_zero_pages` for no zero pages: a kernel can lose count (-11 was seen).
    no_zeros: i64,
}

impl KernelUnderTest {
    pub fn take() -> Option<Self> {
        let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
        if Release::parse(&release).is_none_or(|release| release < SINCE) {
            skip_unsupported(format!(
                "ksmd of Linux {} searches the stable tree before it compares checksums",
                release.trim()
            ));
            return None;
        }
        match KsmForExperiment::take(&Interrupt::default()) {
            Ok(control) => Some(Self { control, no_zeros: zeros() }),
            Err(error) => {
                skip(format!("{error:#}"));
                None
            }
        }
    }

    fn read(&self) -> Counters {
        let counters = self.control.ksm().counters().unwrap();
        Counters {
            shared: counters.pages_shared.0,
            sharing: counters.pages_sharing.0,
            unshared: self.count("pages_unshared"),
            volatile: self.count("pages_volatile"),
            zero: (zeros() - self.no_zeros).try_into().unwrap_or(0),
            scanned: counters.pages_scanned.unwrap_or(0),
            cpu_ns: self.control.ksmd().cpu_ns().unwrap(),
            full_scans: counters.full_scans,
        }
    }

    fn count(&self, name: &str) -> u64 {
        self.control.counter(name).unwrap().try_into().unwrap_or(0)
    }

    fn scan(&mut self) -> Counters {
        let before = self.read();
        self.control.scan_once(&Interrupt::default()).unwrap();
        let rests = || anyhow::Ok(self.control.ksmd().rests()?.then_some(()));
        Interrupt::default().wait(Duration::from_secs(60), rests).unwrap().expect("ksmd must become idle");
        let after = self.read();
        after.since(&before)
    }

    /// Resets KSM to its state after boot.
    fn reset(&mut self, setting: Setting) {
        self.control.unmerge().unwrap();
        self.no_zeros = zeros();
        self.control.set(Knob::SmartScan, u64::from(setting.smart_scan)).unwrap();
        self.control.set(Knob::UseZeroPages, u64::from(setting.use_zero_pages)).unwrap();
    }

    pub fn observe(&mut self, setting: Setting, mut schedule: Schedule) -> Observations {
        self.reset(setting);
        let mut holders: Vec<Option<Holder>> = (0..PROGRAMS).map(|_| Some(Holder::start(schedule.pages()))).collect();
        let mut marked = [false; PROGRAMS];
        let mut recorder = recorder(&holders);
        // The record begins without memory, one step before the first scan.
        let (mut deltas, mut snapshots, mut kernel) = (Deltas::new(), vec![Snapshot::default()], Vec::new());
        for scan in 1..=SCANS {
            if let Some(program) = Schedule::ends(scan) {
                holders[program] = None;
            }
            for (program, change) in schedule.changes(scan) {
                holders[program].as_mut().unwrap().change(change);
            }
            for program in Schedule::marks(scan) {
                let holder = holders[program].as_mut().unwrap();
                holder.mark(0, holder.pages);
                marked[program] = true;
            }
            let mut memory = recorder.next_snapshot().unwrap().unwrap();
            memory.time_ns = scan as u64 * STEP_NS;
            keep_marked(&mut memory, &holders, marked);
            keep_zeros(&mut memory);
            snapshots.push(deltas.next(memory));
            kernel.push(self.scan());
        }
        let origin = Origin { source: "live".to_owned(), every_ns: STEP_NS, anonymous: false };
        let script = script(&Record { origin, snapshots }).script;
        Observations { setting, script, forks: Vec::new(), kernel }
    }

    /// Runs the changes of [`family`].
    pub fn observe_family(&mut self, setting: Setting) -> Observations {
        self.reset(setting);
        let mut holders: Vec<Holder> = (0..family::PROGRAMS).map(|_| Holder::start(family::PAGES)).collect();
        let (mut steps, mut forks, mut kernel) = (Vec::new(), Vec::new(), Vec::new());
        for (program, holder) in (0..).zip(&mut holders) {
            steps.extend(family::start(program).map(|step| (STEP_NS, step)));
            holder.mark(0, family::PAGES);
        }
        for scan in 1..=family::SCANS {
            let at_ns = scan * STEP_NS;
            for (program, change) in family::changes(scan) {
                holders[program as usize].change(change);
                steps.extend(family::steps(program, change).into_iter().map(|step| (at_ns, step)));
            }
            for program in family::forks(scan) {
                holders[program as usize].fork();
                forks.push((scan, OwnerKey(program)));
            }
            kernel.push(self.scan());
        }
        Observations { setting, script: steps.into(), forks, kernel }
    }
}

/// The kernel's count of merged zero pages, 0 if it has none.
fn zeros() -> i64 {
    fs::read_to_string("/sys/kernel/mm/ksm/ksm_zero_pages").map_or(0, |text| text.trim().parse().unwrap())
}

fn recorder(holders: &[Option<Holder>]) -> Recorder {
    let pids: Vec<i32> = holders.iter().flatten().map(Holder::pid).collect();
    let scope = |pids: Vec<i32>| ScopeSpec::of_pids(pids);
    // In this order, not in the order of their pids.
    let scoped = pids.iter().flat_map(|&pid| resolve(&scope(vec![pid]), &Roots::default()).unwrap()).collect();
    let options = RecordingOptions {
        scope: scope(pids),
        deny: DenyList::default(),
        every: Duration::ZERO,
        length: Duration::MAX,
        anonymous: false,
    };
    Recorder::new(options, scoped, Interrupt::default()).unwrap()
}

/// Keeps only the regions of programs that have marked their memory.
fn keep_marked(memory: &mut MemorySnapshot, holders: &[Option<Holder>], marked: [bool; PROGRAMS]) {
    let held = |process: u32| holders[process as usize].as_ref().filter(|_| marked[process as usize]);
    memory.processes.retain(|row| held(row.process).is_some());
    memory.regions.retain(|(row, _)| {
        held(row.process).is_some_and(|holder| (holder.first..holder.first + holder.pages).contains(&row.first.0))
    });
    let marked = marked.iter().zip(holders).filter(|(marked, holder)| **marked && holder.is_some());
    assert_eq!(memory.regions.len(), marked.count(), "one region for each program");
}

/// Turns zero pages into private ones: the programs read only pages that they've written, so ksmd has mapped the zero
/// page and the content hasn't changed.
fn keep_zeros(memory: &mut MemorySnapshot) {
    let pages = memory.regions.iter_mut().flat_map(|(_, pages)| pages);
    for (_, page) in pages.filter(|(_, page)| page.state == PageState::ZeroMapped) {
        *page = Page { state: PageState::Private, frame: None, ..*page };
    }
}

/// Runs the model on the same memory with the same number of kicks.
fn model(observed: &Observations) -> Vec<Counters> {
    let Setting { smart_scan, use_zero_pages } = observed.setting;
    let knobs = Knobs { smart_scan, use_zero_pages, merge_any: true, ..Knobs::default() };
    let mut sim = SimHost::new(1, Costs::default(), knobs);
    sim.play(observed.script.clone());
    let mut before = Counters::default();
    let scan = |(number, kernel): (u64, &Counters)| {
        let Ok(()) = sim.wait(number * STEP_NS - sim.now_ns());
        for &(_, parent) in observed.forks.iter().filter(|&&(before, _)| before == number) {
            sim.fork(parent);
        }
        for _ in 0..kernel.full_scans {
            let Ok(_) = sim.apply(&Actions { scan: ScanOrder::KICK, ..Actions::default() });
            let Ok(()) = sim.wait(STEP_NS / 10);
            assert!(!sim.is_scanning());
        }
        let (ksm, (unshared, volatile)) = (sim.ksm(), sim.unshared_and_volatile());
        let after = Counters {
            shared: ksm.shared.0,
            sharing: ksm.sharing.0,
            unshared,
            volatile,
            zero: ksm.zero.0,
            scanned: ksm.scanned,
            cpu_ns: sim.cost().ksmd_ns,
            full_scans: ksm.full_scans,
        };
        after.since(&std::mem::replace(&mut before, after))
    };
    (1..).zip(&observed.kernel).map(scan).collect()
}

/// Prints both sets of counters and returns the mismatches.
pub fn differences(observed: &Observations) -> Vec<String> {
    let model = model(observed);
    let mut mismatches = Vec::new();
    println!("{:?}: kernel and model", observed.setting);
    for (scan, (kernel, model)) in (1..).zip(observed.kernel.iter().zip(&model)) {
        let mut line = format!("  scan {scan:2}");
        for (name, of) in COUNTS {
            let (kernel, model) = (of(kernel), of(model));
            let _ = write!(line, "  {name} {kernel}/{model}");
            if kernel.abs_diff(model) > FEW.max(kernel.max(model) * THOUSANDTHS / 1000) {
                mismatches
                    .push(format!("{:?}, scan {scan}: {name} is {kernel}, in the model {model}", observed.setting));
            }
        }
        let (kernel, model) = (kernel.cpu_ns as f64 / 1e6, model.cpu_ns as f64 / 1e6);
        println!("{line}  CPU {kernel:.1}/{model:.1} ms ({:.2})", model / kernel);
    }
    if observed.kernel[0].scanned > model[0].scanned {
        mismatches.push("Other memory on this machine may be marked; ksmd must have nothing else to scan.".to_owned());
    }
    let all = |counters: &[Counters]| counters.iter().map(|counters| counters.cpu_ns as f64).sum::<f64>() / 1e6;
    let (kernel, model) = (all(&observed.kernel), all(&model));
    println!("  CPU of all scans {kernel:.0}/{model:.0} ms: ratio {:.2}", model / kernel);
    mismatches
}

type Count = (&'static str, fn(&Counters) -> u64);

const COUNTS: [Count; 7] = [
    ("scans", |counters| counters.full_scans),
    ("shared", |counters| counters.shared),
    ("sharing", |counters| counters.sharing),
    ("unshared", |counters| counters.unshared),
    ("volatile", |counters| counters.volatile),
    ("zero", |counters| counters.zero),
    ("scanned", |counters| counters.scanned),
];

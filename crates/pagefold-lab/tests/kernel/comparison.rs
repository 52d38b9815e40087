//! The kernel and the model, each scan of theirs, and how they compare.

use super::family;
use super::memory::{Course, PROGRAMS, SCANS};
use pagefold_core::host::{Actions, Host, PageState, ScanOrder};
use pagefold_core::keys::OwnerKey;
use pagefold_lab::record::{Deltas, MemorySnapshot, Origin, Page, Record, Snapshot, Source};
use pagefold_lab::recorder::{Recorder, RecordingOptions};
use pagefold_lab::script::script;
use pagefold_linux::check::facts::Release;
use pagefold_linux::ksm::Knob;
use pagefold_linux::ksm::experiment::KsmForExperiment;
use pagefold_linux::os::interrupt::Interrupt;
use pagefold_linux::proc::Roots;
use pagefold_linux::scope::deny_list::DenyList;
use pagefold_linux::scope::{ScopeSpec, resolve};
use pagefold_sim::{Costs, Knobs, Script, SimHost};
use pagefold_testkit::{Holder, skip, skip_unsupported};
use std::fmt::Write;
use std::fs;
use std::time::Duration;

/// Time from one scan to the next, in the model: none takes as long.
const STEP_NS: u64 = 3_600_000_000_000;
/// Since then a page whose checksum has changed goes no further; before, the stable tree was searched all the same.
const SINCE: Release = Release(6, 11);
/// Counts that are not further apart agree: a thousandth, or a few pages, on which ksmd cannot get hold at the moment.
const THOUSANDTHS: u64 = 1;
const FEW: u64 = 8;

/// How ksmd is set.
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    pub smart_scan: bool,
    pub use_zero_pages: bool,
}

/// Every setting.
pub const SETTINGS: [Setting; 4] = [
    Setting { smart_scan: false, use_zero_pages: false },
    Setting { smart_scan: true, use_zero_pages: false },
    Setting { smart_scan: false, use_zero_pages: true },
    Setting { smart_scan: true, use_zero_pages: true },
];

/// What the counters say after a scan.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counted {
    pub shared: u64,
    pub sharing: u64,
    pub unshared: u64,
    pub volatile: u64,
    /// Pages in whose place the zero page is mapped.
    pub zero: u64,
    /// Pages looked at in this scan.
    pub scanned: u64,
    /// ksmd's CPU time in this scan.
    pub cpu_ns: u64,
    pub full_scans: u64,
}

/// All that was seen of ksmd.
pub struct Seen {
    setting: Setting,
    script: Script,
    /// Who forks before which scan, after the steps of the script.
    forks: Vec<(u64, OwnerKey)>,
    kernel: Vec<Counted>,
}

/// KSM in our hands.
pub struct Machine {
    steering: KsmForExperiment,
    /// What `ksm_zero_pages` says when there are none: a kernel can lose count (-11 was seen).
    no_zeros: i64,
}

impl Machine {
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
            Ok(steering) => Some(Self { steering, no_zeros: zeros() }),
            Err(error) => {
                skip(format!("{error:#}"));
                None
            }
        }
    }

    fn read(&self) -> Counted {
        let counters = self.steering.ksm().counters().unwrap();
        Counted {
            shared: counters.pages_shared.0,
            sharing: counters.pages_sharing.0,
            unshared: counters.pages_unshared.0,
            volatile: counters.pages_volatile.0,
            zero: (zeros() - self.no_zeros).try_into().unwrap_or(0),
            scanned: counters.pages_scanned.unwrap_or(0),
            cpu_ns: self.steering.ksmd().cpu_ns().unwrap(),
            full_scans: counters.full_scans,
        }
    }

    fn scan(&mut self) -> Counted {
        let before = self.read();
        self.steering.scan_once(&Interrupt::default()).unwrap();
        let rests = || anyhow::Ok(self.steering.ksmd().rests()?.then_some(()));
        Interrupt::default().wait(Duration::from_secs(60), rests).unwrap().expect("ksmd comes to rest");
        let after = self.read();
        let since = |of: fn(&Counted) -> u64| of(&after) - of(&before);
        Counted {
            scanned: since(|counted| counted.scanned),
            cpu_ns: since(|counted| counted.cpu_ns),
            full_scans: since(|counted| counted.full_scans),
            ..after
        }
    }

    /// Has KSM as fresh as after a boot.
    fn reset(&mut self, setting: Setting) {
        self.steering.unmerge().unwrap();
        self.no_zeros = zeros();
        self.steering.set(Knob::SmartScan, u64::from(setting.smart_scan)).unwrap();
        self.steering.set(Knob::UseZeroPages, u64::from(setting.use_zero_pages)).unwrap();
    }

    /// Sees a course through.
    pub fn watch(&mut self, setting: Setting, mut course: Course) -> Seen {
        self.reset(setting);
        let mut holders: Vec<Option<Holder>> = (0..PROGRAMS).map(|_| Some(Holder::start(course.pages()))).collect();
        let mut marked = [false; PROGRAMS];
        let mut recorder = recorder(&holders);
        // The record begins with nothing, one step before the first scan.
        let (mut deltas, mut snapshots, mut kernel) = (Deltas::new(), vec![Snapshot::default()], Vec::new());
        for scan in 1..=SCANS {
            if let Some(program) = Course::ends(scan) {
                holders[program] = None;
            }
            for (program, deed) in course.deeds(scan) {
                holders[program].as_mut().unwrap().change(deed);
            }
            for program in Course::marks(scan) {
                let holder = holders[program].as_mut().unwrap();
                holder.mark(0, holder.pages);
                marked[program] = true;
            }
            let mut look = recorder.look().unwrap().unwrap();
            look.time_ns = scan as u64 * STEP_NS;
            keep_marked(&mut look, &holders, marked);
            keep_zeros(&mut look);
            snapshots.push(deltas.next(look));
            kernel.push(self.scan());
        }
        let origin = Origin { source: "live".to_owned(), every_ns: STEP_NS, anonymous: false };
        let script = script(&Record { origin, snapshots }).script;
        Seen { setting, script, forks: Vec::new(), kernel }
    }

    /// Sees a family through.
    pub fn watch_family(&mut self, setting: Setting) -> Seen {
        self.reset(setting);
        let mut holders: Vec<Holder> = (0..family::PROGRAMS).map(|_| Holder::start(family::PAGES)).collect();
        let (mut steps, mut forks, mut kernel) = (Vec::new(), Vec::new(), Vec::new());
        for (program, holder) in (0..).zip(&mut holders) {
            steps.extend(family::start(program).map(|step| (STEP_NS, step)));
            holder.mark(0, family::PAGES);
        }
        for scan in 1..=family::SCANS {
            let at_ns = scan * STEP_NS;
            for (program, deed) in family::deeds(scan) {
                holders[program as usize].change(deed);
                steps.extend(family::steps(program, deed).into_iter().map(|step| (at_ns, step)));
            }
            for program in family::forks(scan) {
                holders[program as usize].fork();
                forks.push((scan, OwnerKey(program)));
            }
            kernel.push(self.scan());
        }
        Seen { setting, script: steps.into(), forks, kernel }
    }
}

/// The kernel's count of folded zero pages, 0 where it keeps none.
fn zeros() -> i64 {
    fs::read_to_string("/sys/kernel/mm/ksm/ksm_zero_pages").map_or(0, |text| text.trim().parse().unwrap())
}

fn recorder(holders: &[Option<Holder>]) -> Recorder {
    let pids = holders.iter().flatten().map(Holder::pid);
    let scope = |pid| ScopeSpec { pids: vec![pid], ..ScopeSpec::default() };
    let scoped = pids.flat_map(|pid| resolve(&scope(pid), &Roots::default()).unwrap()).collect();
    let options = RecordingOptions {
        scope: ScopeSpec::default(),
        deny: DenyList::default(),
        every: Duration::ZERO,
        length: Duration::MAX,
        anonymous: false,
    };
    Recorder::new(options, scoped, Interrupt::default()).unwrap()
}

/// Leaves of a look what the programs that have marked their memory hold.
fn keep_marked(look: &mut MemorySnapshot, holders: &[Option<Holder>], marked: [bool; PROGRAMS]) {
    let held = |process: u32| holders[process as usize].as_ref().filter(|_| marked[process as usize]);
    look.processes.retain(|row| held(row.process).is_some());
    look.regions.retain(|(row, _)| {
        held(row.process).is_some_and(|holder| (holder.first..holder.first + holder.pages).contains(&row.first.0))
    });
    let marked = marked.iter().zip(holders).filter(|(marked, holder)| **marked && holder.is_some());
    assert_eq!(look.regions.len(), marked.count(), "one region for each program");
}

/// The programs never read what they have not written: the zero page is where ksmd has put it, and for them nothing has
/// changed.
fn keep_zeros(look: &mut MemorySnapshot) {
    let pages = look.regions.iter_mut().flat_map(|(_, pages)| pages);
    for (_, page) in pages.filter(|(_, page)| page.state == PageState::ZeroMapped) {
        *page = Page { state: PageState::Private, frame: None, ..*page };
    }
}

/// The model on the same memory, kicked as often.
fn model(seen: &Seen) -> Vec<Counted> {
    let Setting { smart_scan, use_zero_pages } = seen.setting;
    let knobs = Knobs { smart_scan, use_zero_pages, merge_any: true, ..Knobs::default() };
    let mut sim = SimHost::new(1, Costs::default(), knobs);
    sim.play(seen.script.clone());
    let mut before = Counted::default();
    let scan = |(number, kernel): (u64, &Counted)| {
        let Ok(()) = sim.wait(number * STEP_NS - sim.now_ns());
        for &(_, parent) in seen.forks.iter().filter(|&&(before, _)| before == number) {
            sim.fork(parent);
        }
        for _ in 0..kernel.full_scans {
            let Ok(_) = sim.apply(&Actions { scan: ScanOrder::KICK, ..Actions::default() });
            let Ok(()) = sim.wait(STEP_NS / 10);
            assert!(!sim.is_scanning());
        }
        let (ksm, (unshared, volatile)) = (sim.ksm(), sim.unshared_and_volatile());
        let after = Counted {
            shared: ksm.shared.0,
            sharing: ksm.sharing.0,
            unshared,
            volatile,
            zero: ksm.zero.0,
            scanned: ksm.scanned,
            cpu_ns: sim.cost().ksmd_ns,
            full_scans: ksm.full_scans,
        };
        let since = |of: fn(&Counted) -> u64| of(&after) - of(&before);
        let counted = Counted {
            scanned: since(|counted| counted.scanned),
            cpu_ns: since(|counted| counted.cpu_ns),
            full_scans: since(|counted| counted.full_scans),
            ..after
        };
        before = after;
        counted
    };
    (1..).zip(&seen.kernel).map(scan).collect()
}

/// Prints both, and tells where they do not agree.
pub fn differences(seen: &Seen) -> Vec<String> {
    let model = model(seen);
    let mut apart = Vec::new();
    println!("{:?}: kernel and model", seen.setting);
    for (scan, (kernel, model)) in (1..).zip(seen.kernel.iter().zip(&model)) {
        let mut line = format!("  scan {scan:2}");
        for (name, of) in COUNTS {
            let (kernel, model) = (of(kernel), of(model));
            let _ = write!(line, "  {name} {kernel}/{model}");
            if kernel.abs_diff(model) > FEW.max(kernel.max(model) * THOUSANDTHS / 1000) {
                apart.push(format!("{:?}, scan {scan}: {name} is {kernel}, in the model {model}", seen.setting));
            }
        }
        let (kernel, model) = (kernel.cpu_ns as f64 / 1e6, model.cpu_ns as f64 / 1e6);
        println!("{line}  CPU {kernel:.1}/{model:.1} ms ({:.2})", model / kernel);
    }
    if seen.kernel[0].scanned > model[0].scanned {
        apart.push("Is other memory marked on this machine? ksmd must have nothing else to scan.".to_owned());
    }
    let all = |counted: &[Counted]| counted.iter().map(|counted| counted.cpu_ns as f64).sum::<f64>() / 1e6;
    let (kernel, model) = (all(&seen.kernel), all(&model));
    println!("  CPU of all scans {kernel:.0}/{model:.0} ms: the model takes {:.2} of it", model / kernel);
    apart
}

type Count = (&'static str, fn(&Counted) -> u64);

const COUNTS: [Count; 7] = [
    ("scans", |counted| counted.full_scans),
    ("shared", |counted| counted.shared),
    ("sharing", |counted| counted.sharing),
    ("unshared", |counted| counted.unshared),
    ("volatile", |counted| counted.volatile),
    ("zero", |counted| counted.zero),
    ("scanned", |counted| counted.scanned),
];

//! Golden files, in `golden/`: the program's output about runs on the simulated host and about fixed figures.
//!
//! `PAGEFOLD_BLESS=1` rewrites them. The files in `golden/kept` come from earlier versions, and we only read them.
//! Golden tests of a module's private parts are in that module, and those of the command line in `tests/golden.rs`.

use crate::audit::Owner;
use crate::backend::{Backend, Ending};
use crate::commands::explain::{self, Explanation};
use crate::commands::run::progress::{self, LeftAlone, Progress};
use crate::commands::run::reload::ActiveSettings;
use crate::commands::run::summary::{self, Summary};
use crate::commands::scan;
use crate::commands::scan::report::{CgroupRow, Cost, GroupRow, KindRow, ProcessRow, ScanReport};
use crate::commands::scan::sharing::Matrix;
use crate::commands::scan::survey::LeftOut;
use crate::commands::scan::why::cause::Cause;
use crate::commands::scan::why::pair::{Class, Likeness, PairReport};
use crate::commands::scan::why::{self, CauseRow, CommonFrames, OutOfReach, Row, Unknown, WhyReport};
use crate::commands::status::groups::reason_of;
use crate::commands::status::{self, Status};
use crate::config::args::RunArgs;
use crate::config::config_file::parse;
use crate::config::settings::Settings;
use crate::control::orders::Orders;
use crate::control::queue::{Facts, Order, RunFacts, TargetFacts, ToUnmark};
use crate::daemon::{Cycles, log_outcome};
use crate::events::Events;
use crate::metrics::families;
use crate::output::page::Origin;
use crate::reference::assert_explained;
use pagefold_engine::config::Config;
use pagefold_engine::engine::Engine;
use pagefold_engine::governor::Governor;
use pagefold_engine::host::{
    Actions, Host, HugeSplits, LimitView, Mechanism, MemoryView, Outcome, SamplePlan, Samples, Snapshot,
};
use pagefold_engine::keys::{DomainKey, LimitKey, OwnerKey, RegionKey};
use pagefold_engine::reserve::RoomState;
use pagefold_engine::sampling::census::Figures;
use pagefold_engine::units::{Pages, Permyriad};
use pagefold_host::check::users::KsmUser;
use pagefold_host::live::{Ended, Event};
use pagefold_host::scope::exclude::Exclusion;
use pagefold_host::scope::kept_out::{Entry, KeptOut, Verdict};
use pagefold_host::scope::{ScopeSpec, Selector};
use pagefold_ksm::{Knob, RestoreOutcome};
use pagefold_procmem::maps::{RegionKind, VmaDetail, parse_smaps};
use pagefold_sim::{Behaviour, Costs, Fill, Knobs, Mapping, Process, Replica, SimHost, Writes};
use pagefold_text::exit::Exit;
use pagefold_text::style::{Style, json};
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::ffi::OsStr;
use std::fmt::Write;
use std::path::Path;
use std::sync::Arc;

/// The present, seconds since 1970.
pub const NOW: u64 = 1_790_000_000;
pub const PID: u32 = 4_711;
const MILLISECOND: u64 = 1_000_000;
/// The number of pages in a MiB.
const MIB: u64 = 256;

const DOMAINS: [&str; 3] = ["default", "web", "user 1000"];
const SCOPE: &str =
    "[scope]\nexes = [\"redis-server\"]\ncgroups = [\"/sys/fs/cgroup/web.slice\"]\nusers = [\"1000\"]\n";

/// Compares a text with a golden file. If the text is JSON, `reference.rs` must explain all its fields.
#[track_caller]
pub fn check(name: &str, text: &str) {
    match Path::new(name).extension().and_then(OsStr::to_str) {
        Some("json") => assert_explained(&serde_json::from_str(text).unwrap()),
        Some("jsonl") => {
            for line in text.lines() {
                assert_explained(&serde_json::from_str(line).unwrap());
            }
        }
        _ => {}
    }
    pagefold_testkit::golden::check(&Path::new(env!("CARGO_MANIFEST_DIR")).join("golden").join(name), text);
}

/// The simulated host, and the daemon's facts about its processes.
pub struct Simulated {
    host: SimHost,
    targets: Vec<TargetFacts>,
    /// The processes as the audit names them.
    identities: Vec<Owner>,
    kept_out: KeptOut,
    owners: BTreeMap<RegionKey, OwnerKey>,
}

impl Host for Simulated {
    type Error = Infallible;

    fn observe(&mut self) -> Result<Snapshot, Infallible> {
        let snapshot = self.host.observe()?;
        self.owners.extend(snapshot.regions.iter().map(|region| (region.key, region.owner)));
        Ok(snapshot)
    }

    fn read(&mut self, plan: &SamplePlan) -> Result<Samples, Infallible> {
        self.host.read(plan)
    }

    fn apply(&mut self, actions: &Actions) -> Result<Outcome, Infallible> {
        self.host.apply(actions)
    }

    fn wait(&mut self, ns: u64) -> Result<(), Infallible> {
        self.host.wait(ns)
    }
}

impl Backend for Simulated {
    fn explain(error: &Infallible) -> Exit {
        match *error {}
    }

    fn now_ns(&self) -> u64 {
        self.host.now_ns()
    }

    fn target_count(&self) -> usize {
        self.targets.len()
    }

    fn pid_of(&self, region: RegionKey) -> Option<i32> {
        let owner = self.owners.get(&region)?;
        Some(self.targets.iter().find(|target| target.owner == *owner)?.pid)
    }

    fn owner(&self, pid: i32) -> Option<Owner> {
        self.identities.iter().find(|identity| identity.pid == pid).cloned()
    }

    fn facts(&self, engine: &Engine, run: RunFacts) -> Facts {
        let state = engine.state();
        let tight = state.reserve.limits.iter().filter(|limit| limit.room.state != RoomState::Enough);
        let limited = tight.map(|limit| (limit.key, self.limited_path(limit.key))).collect();
        Facts {
            state,
            injector_restarts: 0,
            targets: self.targets.clone(),
            turned_away: 3,
            domains: DOMAINS.map(str::to_owned).to_vec(),
            kept_out: self.kept_out.clone(),
            merged_domain: (run.config.mechanism == Mechanism::Ksmd).then(|| DOMAINS[0].to_owned()),
            limited,
            run,
            xen: None,
            cost_ns: 0,
        }
    }

    fn take_events(&mut self) -> Vec<Event> {
        Vec::new()
    }

    fn limited_path(&self, _limit: LimitKey) -> String {
        "/sys/fs/cgroup/system.slice/redis-server.slice".to_owned()
    }

    fn carry_out(&mut self, _orders: &mut Orders, _new: Vec<Order>, _active: &mut ActiveSettings<'_>) {}

    fn finish(self) -> Ending {
        self.ending(None)
    }
}

impl Simulated {
    fn ending(&self, restored: Option<RestoreOutcome>) -> Ending {
        let judged = self.targets.iter().filter(|target| target.left_alone.is_none()).count();
        let ended = Ended { restored, now_ns: self.now_ns(), ksm: None, cost: None };
        Ending { judged, ended, xen: None }
    }
}

/// A run on the simulated host.
pub struct Run {
    pub machine: Simulated,
    engine: Engine,
    pub known: RunFacts,
    pub active: ActiveSettings<'static>,
    audit: tempfile::TempDir,
}

impl Run {
    /// A run that hasn't begun.
    pub fn new(host: SimHost, mechanism: Mechanism, dry_run: bool) -> Self {
        let config = Config { mechanism, governor: Governor::Full, seed: 11, ..Config::default() };
        let args: &'static RunArgs = Box::leak(Box::new(RunArgs { dry_run, ..RunArgs::default() }));
        let audit = tempfile::tempdir().unwrap();
        let settings = Settings::of_options(args, None, parse(SCOPE, "pagefold.toml").unwrap()).unwrap();
        let known = RunFacts::new(dry_run, &settings.scope, &config);
        let settings = Settings { audit: Some(audit.path().join("audit.jsonl")), ..settings };
        let mut active = ActiveSettings::new(args, settings).unwrap();
        active.events = Events::new(None, dry_run);
        let engine = Engine::new(config);
        let machine = Simulated {
            host,
            targets: Vec::new(),
            identities: Vec::new(),
            kept_out: KeptOut::default(),
            owners: BTreeMap::new(),
        };
        Self { machine, engine, known, active, audit }
    }

    /// A run by ksmd on programs of each kind.
    pub fn by_ksmd() -> Self {
        let mut run = Self::new(SimHost::new(7, Costs::default(), Knobs::driven()), Mechanism::Ksmd, false);
        run.start_programs();
        run
    }

    /// A run that merges on request, on a machine with two memory nodes.
    pub fn on_request() -> Self {
        let host = SimHost::new(7, Costs::default(), Knobs::requested());
        let host = host.with_nodes(&[Pages(2_048 * MIB), Pages(2_048 * MIB)]);
        let mut run = Self::new(host, Mechanism::Request, false);
        let out = Entry {
            verdict: Verdict::Out { by: 0 },
            selector: Selector::Exe("keeper".to_owned()),
            processes: [].into(),
        };
        let again = Entry { verdict: Verdict::In, selector: Selector::Pid(4_009), processes: [(4_009, 1)].into() };
        run.machine.kept_out = KeptOut::of(vec![out, again]);
        run.start_programs();
        run
    }

    fn start_programs(&mut self) {
        let redis = Replica { template: 10, density: vec![Permyriad(8_800)], zeros: Permyriad(100), run: 7, shift: 0 };
        let process = || Process::starting_at(0);
        let redis = Mapping::new(Pages(32 * MIB), Fill::Replica(redis)).of_family(10);
        let cache = Mapping::new(Pages(8 * MIB), Fill::Series(20)).of_family(20);
        let churn = Behaviour::Churn { per_second: Permyriad(107), writes: Writes::Unique };
        let heap = Mapping::new(Pages(24 * MIB), Fill::Random).behaving(churn).of_family(30);
        let breaker = Behaviour::CowBreaker { every_ns: 10 * MILLISECOND };
        let buffers = Mapping::new(Pages(16 * MIB), Fill::Same(40)).behaving(breaker).of_family(40);
        let objects = Mapping::new(Pages(4 * MIB), Fill::Same(50))
            .behaving(Behaviour::ShortLived { life_ns: 250 * MILLISECOND })
            .of_family(50);
        let guest = Mapping::new(Pages(64 * MIB), Fill::Zeros).huge().of_family(60);
        for number in 1..=3_u64 {
            let other = Mapping::new(Pages(number * MIB), Fill::Random).of_family(70 + number);
            self.add("redis-server", 110, 0, process().mapping(redis.clone()).mapping(other));
        }
        for (domain, uid) in [(1, 33), (1, 33), (2, 1_000)] {
            self.add("nginx", uid, domain, process().mapping(cache.clone()));
        }
        self.add("java", 33, 1, process().mapping(heap).mapping(cache.clone()));
        self.add("postgres", 33, 1, process().mapping(buffers));
        self.add("cc1plus", 1_000, 2, process().mapping(objects));
        self.add("qemu-system-x86", 33, 1, process().mapping(guest));
        let zeros = Mapping::new(Pages(6 * MIB), Fill::Zeros).of_family(80);
        self.add("sandbox", 1_000, 2, process().untouchable().mapping(zeros).mapping(cache));
        let left_alone = self.add("keepassxc", 1_000, 2, process());
        let thin = Replica { template: 90, density: vec![Permyriad(500)], zeros: Permyriad(0), run: 3, shift: 0 };
        let thin = Mapping::new(Pages(24 * MIB), Fill::Replica(thin)).of_family(90);
        for _ in 0..2 {
            self.add("python3", 1_000, 0, process().mapping(thin.clone()));
        }
        if self.known.config.mechanism == Mechanism::Ksmd {
            let other = self.add("worker", 1_000, 0, process());
            let why = Exclusion::OtherDomain { own: DOMAINS[2].to_owned(), merged: DOMAINS[0].to_owned() };
            let target = self.target_mut(other);
            (target.domain, target.left_alone) = (DomainKey(2), Some(why.to_string()));
            target.reason = Some(reason_of(&why));
        }
        let target = self.target_mut(left_alone);
        target.left_alone = Some("on the deny list (keepassxc)".to_owned());
        target.reason = Some("deny-list");
        target.to_unmark = Some(ToUnmark {
            bytes: 12 << 20,
            reason: "on the deny list (keepassxc)".to_owned(),
            problem: Some("process 4012 is stopped by a signal".to_owned()),
        });
        let events = &mut self.active.events;
        events.add_of_process("left-alone", 4_012, "keepassxc", "on the deny list (keepassxc)");
        events.note("governor", "auto");
        events.note("scan", "1 in all");
        let redis = self
            .machine
            .targets
            .iter()
            .filter(|target| target.name == "redis-server")
            .map(|target| target.owner)
            .collect();
        let limit = LimitView {
            key: LimitKey(1),
            limit: Pages(128 * MIB),
            left: Pages(20 * MIB),
            kills: None,
            owners: redis,
            read_ns: 0,
        };
        self.machine.host.set_limits(vec![limit]);
        self.machine.host.set_memory(MemoryView {
            total: Pages(4_096 * MIB),
            available: Pages(1_024 * MIB),
            swap_free: Pages(0),
            pressure: Some(Permyriad(12)),
        });
    }

    /// Starts a process in scope. With ksmd all are in one domain, since ksmd merges only one.
    pub fn add(&mut self, name: &str, uid: u32, domain: u16, process: Process) -> OwnerKey {
        let domain = if self.known.config.mechanism == Mechanism::Ksmd { 0 } else { domain };
        let owner = self.machine.host.add(process.in_domain(domain));
        let pid = 4_001 + i32::try_from(owner.0).unwrap();
        let cgroup =
            if uid == 33 { format!("/web.slice/{name}.service") } else { format!("/system.slice/{name}.slice") };
        // These are the positions of the selectors in `SCOPE`.
        let selected_by = match (uid, name) {
            (33, _) => Some(0),
            (1000, _) => Some(1),
            (_, "redis-server") => Some(2),
            _ => None,
        };
        let workload = match (name, pid) {
            ("redis-server", _) => Some("redis-server.service"),
            (_, 4_010) => Some("vm web-1"),
            _ => None,
        };
        self.machine.targets.push(TargetFacts {
            owner,
            pid,
            start_time_ticks: 1_000,
            domain: DomainKey(domain),
            name: name.to_owned(),
            workload: workload.map(str::to_owned),
            selected_by,
            ..TargetFacts::default()
        });
        self.machine.identities.push(Owner {
            pid,
            start_time_ticks: 1_000,
            name: name.to_owned(),
            exe: Some(format!("/usr/bin/{name}")),
            uid: Some(uid),
            cgroup: Some(cgroup),
            domain: Some(DOMAINS[usize::from(domain)].to_owned()),
        });
        owner
    }

    fn target_mut(&mut self, owner: OwnerKey) -> &mut TargetFacts {
        self.machine.targets.iter_mut().find(|target| target.owner == owner).unwrap()
    }

    /// Continues the run for some virtual seconds, as the daemon does.
    pub fn seconds(&mut self, seconds: u64) {
        self.millis(seconds * 1_000);
    }

    fn millis(&mut self, millis: u64) {
        let end_ns = self.machine.now_ns() + millis * MILLISECOND;
        let mut cycles = Cycles::until(Arc::default(), end_ns);
        while let Some(outcome) = cycles.next(&mut self.engine, &mut self.machine).unwrap() {
            log_outcome(&mut self.active, &self.machine, &outcome);
        }
    }

    pub fn facts(&self) -> Facts {
        let mut events = self.active.events.list();
        let before = events.len() as u64;
        for (at, event) in (0..).zip(&mut events) {
            event.time = NOW - 20 * (before - at);
        }
        self.machine.facts(&self.engine, RunFacts { events, ..self.known.clone() })
    }

    pub fn status(&self) -> Status {
        let mut status = Status::of(&self.facts());
        status.pid = PID;
        status
    }

    pub fn explanation(&self, pid: i32) -> Explanation {
        let facts = self.facts();
        let target = facts.targets.iter().find(|target| target.pid == pid).unwrap();
        let exe = self.machine.owner(pid).unwrap().exe.unwrap();
        explain::of_target(&facts, target, Some(Path::new(&exe)), &mappings(&facts, target.owner))
    }

    /// The audit log with a fixed time, since other tests check the format of times.
    fn audit(&mut self) -> String {
        self.active.finish(&Progress::start());
        let text = std::fs::read_to_string(self.audit.path().join("audit.jsonl")).unwrap();
        let untimed = |line: &str| {
            let (schema, rest) = line.split_once("\"time\":\"").unwrap();
            let (_, rest) = rest.split_once('"').unwrap();
            format!("{schema}\"time\":\"2026-09-21T14:13:20.000Z\"{rest}\n")
        };
        text.lines().map(untimed).collect()
    }

    fn summary(&self, restored: Option<RestoreOutcome>) -> Summary {
        let mut progress = Progress::start();
        for target in &self.machine.targets {
            if let Some(reason) = target.left_alone.clone() {
                progress.left_alone.push(LeftAlone { pid: target.pid, name: target.name.clone(), reason });
            }
        }
        Summary::new(&self.active, &self.known, &self.engine, &self.machine.ending(restored), progress)
    }
}

/// The mappings of a process: its regions, and some that we leave alone.
fn mappings(facts: &Facts, owner: OwnerKey) -> Vec<VmaDetail> {
    let mut text = String::new();
    let mut add = |first: u64, kib: u64, head: &str, flags: &str| {
        let (end, anonymous) = (first + (kib << 10), if head.starts_with("rw") { kib } else { 0 });
        let _ = writeln!(
            text,
            "{first:x}-{end:x} {head}\nRss: {kib} kB\nAnonymous: {anonymous} kB\nSwap: 0 kB\nVmFlags: {flags}"
        );
    };
    for region in facts.state.regions.iter().filter(|region| region.owner == owner) {
        add(region.first.address(), region.pages.0 * 4, "rw-p 00000000 00:00 0", "rd wr mr mw me ac");
    }
    let base = 0x7f00_0000_0000;
    add(base, 2_048, "r-xp 00000000 fe:00 77 /usr/bin/program", "rd ex mr mw me");
    add(base + (1 << 24), 64, "rw-p 00000000 00:00 0", "rd wr mr mw me lo ac");
    add(base + (2 << 24), 1_024, "rw-s 00000000 00:01 78 /dev/shm/queue", "rd wr sh mr mw me ms");
    add(base + (3 << 24), 512, "rw-p 00000000 00:00 0", "rd wr mr mw me ac");
    parse_smaps(text.as_bytes()).unwrap()
}

fn text(status: &Status) -> String {
    status::describe(status, Style::plain_text())
}

#[test]
fn a_run_by_ksmd_is_shown() {
    let mut run = Run::by_ksmd();
    run.millis(20);
    check("status-marking.txt", &text(&run.status()));
    check("explain-marking.txt", &explanations(&run, &[4_001, 4_006]));
    run.millis(100);
    check("status-merging.txt", &text(&run.status()));
    check("explain-merging.txt", &explanations(&run, &[4_001, 4_011]));
    run.seconds(120);
    let status = run.status();
    check("status-ksmd.txt", &text(&status));
    check("status-ksmd.json", &json(&status).unwrap());
    check("metrics-ksmd.txt", &families::page(&status));
    check("audit-ksmd.jsonl", &run.audit());
    check("explain-ksmd.txt", &explanations(&run, &ALL));
    check("explain.json", &json(&run.explanation(4_001)).unwrap());
    let line = |paused| progress::line(&run.engine, "11 processes", paused);
    check("run-progress.txt", &format!("{}\n{}\n", line(false), line(true)));
    let deferred = RestoreOutcome { deferred: vec![(Knob::MaxPageSharing, 256)], ..RestoreOutcome::default() };
    summarized(&run.summary(Some(deferred)), "ksmd");
}

/// A process of each kind.
const ALL: [i32; 10] = [4_001, 4_004, 4_006, 4_007, 4_008, 4_009, 4_010, 4_011, 4_012, 4_013];

fn explanations(run: &Run, pids: &[i32]) -> String {
    let texts = pids.iter().map(|&pid| explain::words::describe(&run.explanation(pid), Style::plain_text()));
    texts.collect()
}

fn summarized(summary: &Summary, name: &str) {
    check(&format!("run-{name}.txt"), &summary::describe(summary, Style::plain_text()));
    check(&format!("run-{name}.json"), &json(summary).unwrap());
}

#[test]
fn a_run_on_request_is_shown() {
    let mut run = Run::on_request();
    run.seconds(120);
    let status = run.status();
    check("status-request.txt", &text(&status));
    check("status-request.json", &json(&status).unwrap());
    check("metrics-request.txt", &families::page(&status));
    check("audit-request.jsonl", &run.audit());
    let explained = explain::workload::of_processes(
        &run.facts(),
        &ScopeSpec(vec![Selector::Exe("redis-server".to_owned()), Selector::Exe("keepassxc".to_owned())]),
        &[(4_001, 1_000), (4_002, 1_000), (4_003, 1_000), (4_012, 1_000), (4_001, 999), (77, 1)].into(),
    );
    check("explain-workload.txt", &explain::workload::describe(&explained, Style::plain_text()));
    check("explain-workload.json", &json(&explained).unwrap());
    check("explain-request.txt", &explanations(&run, &ALL));
    summarized(&run.summary(Some(RestoreOutcome::default())), "request");
}

#[test]
fn a_dry_run_is_shown() {
    let mut host = SimHost::new(7, Costs::default(), Knobs::driven());
    host.set_ours(false);
    let mut run = Run::new(host, Mechanism::Ksmd, true);
    run.start_programs();
    run.seconds(120);
    check("status-dry-run.txt", &text(&run.status()));
    check("explain-dry-run.txt", &explanations(&run, &[4_001, 4_006, 4_011]));
    summarized(&run.summary(None), "dry-run");
}

#[test]
fn what_holds_a_run_back_is_shown() {
    let none = SimHost::new(7, Costs::default(), Knobs::driven());
    check("status-waiting.txt", &text(&Run::new(none, Mechanism::Ksmd, false).status()));
    let mut run = Run::by_ksmd();
    run.engine.set_governor(Governor::Quiet);
    run.seconds(1);
    check("status-reading.txt", &text(&run.status()));
    check("explain-reading.txt", &explanations(&run, &[4_001, 4_003, 4_004, 4_009]));
    run.engine.set_governor(Governor::Medium);
    run.seconds(19);
    check("status-deferred.txt", &text(&run.status()));
    check("explain-deferred.txt", &explanations(&run, &[4_006, 4_013]));
    run.machine.host.set_memory(MemoryView {
        total: Pages(4_096 * MIB),
        available: Pages(8 * MIB),
        ..MemoryView::default()
    });
    run.seconds(10);
    let mut facts = run.facts();
    facts.injector_restarts = 1;
    facts.state.incidents.splits = HugeSplits { pages: 1_200, mappings: 31 };
    facts.state.incidents.collapsed = 4;
    let mut status = Status::of(&facts);
    status.pid = PID;
    let user = |pid, name: &str, mib: u64| KsmUser {
        pid,
        name: name.to_owned(),
        merged_bytes: mib << 20,
        metadata_bytes: mib << 14,
        ..KsmUser::default()
    };
    status.set_others(vec![user(4_001, "redis-server", 90), user(77, "cache", 128), user(78, "idle", 0)]);
    check("status-short.txt", &text(&status));
    check("explain-short.txt", &explanations(&run, &[4_001, 4_008]));
    run.engine.set_paused(true);
    run.seconds(1);
    check("status-paused.txt", &text(&run.status()));
    run.engine.set_paused(false);
    run.machine.host.set_ours(false);
    run.known.stood_down = Some("pages_to_scan was set to 7 by another program".to_owned());
    run.seconds(1);
    check("status-stood-down.txt", &text(&run.status()));
    check("explain-stood-down.txt", &explanations(&run, &[4_001, 4_008]));
    summarized(&run.summary(Some(RestoreOutcome::default())), "stood-down");
    let outside = explain::of(&run.facts(), 1).unwrap();
    check("explain-outside.txt", &explain::words::describe(&outside, Style::plain_text()));
}

/// The figures of this much memory. A part of it is duplicate.
fn figures(mib: f64) -> Figures {
    let resident = mib * 256.0;
    Figures {
        resident,
        anonymous: resident * 1.25,
        zero: resident / 128.0,
        duplicate_within: resident / 16.0,
        duplicate_across: resident / 4.0,
        merged: resident / 64.0,
        fork_shared: resident / 8.0,
        swapped: resident / 32.0,
        savable_gross: resident * 0.32,
        savable: resident * 0.3,
        metadata: resident / 200.0,
    }
}

fn survey() -> ScanReport {
    let kind = |kind: RegionKind, mib| KindRow { kind: kind.to_string(), figures: figures(mib) };
    let row = |pid, name: &str, mib, left_out: Option<&str>| ProcessRow {
        pid,
        name: name.to_owned(),
        exe: Some(format!("/usr/bin/{name}")),
        cgroup: Some("/system.slice/redis.service".to_owned()),
        workload: Some("redis.service".to_owned()),
        figures: figures(mib),
        kinds: vec![kind(RegionKind::Heap, mib)],
        excluded: Vec::new(),
        left_out: left_out.map(str::to_owned),
        way_in: if pid == 4_004 { " (--allow ssh-agent lets it in)".to_owned() } else { String::new() },
        pinned_part: 0.0,
    };
    let cgroup =
        |cgroup: &str, processes, mib| CgroupRow { cgroup: cgroup.to_owned(), processes, figures: figures(mib) };
    let group = |name: &str, processes, mib| GroupRow {
        name: name.to_owned(),
        processes,
        figures: figures(mib),
        out_of_reach_bytes: 1 << 20,
        left_out_bytes: 4 << 20,
    };
    let left_out =
        |reason: &str, bytes| LeftOut { reason: reason.to_owned(), bytes, regions: 2, is_out_of_reach: false };
    let not_dumpable = Exclusion::NotDumpable.to_string();
    ScanReport {
        schema: scan::report::SCHEMA,
        exact: false,
        sampled_fraction: 0.0625,
        error_bytes: 9 << 20,
        without_headroom_bytes: 25 << 20,
        scope: "--exe redis-server".to_owned(),
        totals: figures(1_001.5),
        processes: vec![
            row(4_001, "redis-server", 1_000.0, None),
            row(4_003, "a-program-with-a-long-name", 1.5, None),
            row(4_004, "ssh-agent", 0.0, Some(&not_dumpable)),
            row(4_005, "make", 0.0, Some("has ended")),
        ],
        kinds: vec![kind(RegionKind::Anonymous, 900.0), kind(RegionKind::Heap, 101.5)],
        programs: vec![group("redis-server", 1, 1_000.0), group("a-program-with-a-long-name", 1, 1.5)],
        workloads: vec![group("redis.service", 2, 1_000.0), group("vm web1", 1, 1.5)],
        cgroups: vec![cgroup("/system.slice/redis.service", 2, 1_000.0), cgroup("/", 1, 1.5)],
        excluded: vec![
            left_out(&not_dumpable, 4 << 20),
            LeftOut { regions: 0, ..left_out(&Exclusion::Pinned.to_string(), 1 << 20) },
            left_out("locked in memory", 64 << 10),
        ],
        numa: None,
        cost: Cost::new(20_512, 34_000_000, 21_000_000),
        of: ("process", "processes"),
        is_host: false,
        across_workloads: None,
        command: Some("pagefold run --exe redis-server --deny 'wallet*'".to_owned()),
        matrix: Some(Matrix {
            names: vec!["redis.service".to_owned(), "vm <web1>".to_owned()],
            pages: vec![vec![Some(12_800), Some(256)], vec![Some(250), None]],
            exact: false,
        }),
    }
}

#[test]
fn a_scan_is_shown() {
    let found = survey();
    check("scan.txt", &scan::table::text(&found, Style::plain_text()));
    check("scan.json", &json(&found).unwrap());
    check("scan.html", &scan::html::page(&found, &Origin { host: "host1".to_owned(), time: NOW }));
    let host = ScanReport { is_host: true, scope: "--all".to_owned(), ..found.clone() };
    check("scan-host.txt", &scan::table::text(&host, Style::plain_text()));
    let nothing = ScanReport { exact: true, totals: Figures::default(), ..found };
    check("scan-nothing.txt", &scan::table::text(&nothing, Style::plain_text()));
}

/// A row of `scan --why` with some of everything.
fn why_row(name: &str, processes: usize) -> Row {
    let part = |cause, mib: u64| OutOfReach { cause, duplicate_bytes: mib << 20, unique_bytes: 1 << 20 };
    Row {
        name: name.to_owned(),
        processes,
        mapped_bytes: 1 << 30,
        merged_bytes: 96 << 20,
        mergeable_duplicate_bytes: 200 << 20,
        mergeable_unique_bytes: 300 << 20,
        out_of_reach: vec![
            part(Cause::SharedMemory, 256),
            part(Cause::Hugetlb, 64),
            part(Cause::Userfaultfd, 32),
            part(Cause::PageCache, 16),
            part(Cause::Copies, 2),
        ],
        shared_by_fork_bytes: 30 << 20,
        shared_by_file_bytes: 8 << 20,
        unknown: vec![Unknown { reason: "swapped out".to_owned(), bytes: 15 << 20 }],
        frames_in_common: CommonFrames { merged: 0, by_fork: 0, by_file: 2_048 },
    }
}

#[test]
fn the_reasons_why_nothing_is_shared_are_shown() {
    let totals = why_row("total", 3);
    let causes = totals.out_of_reach.iter().map(|part| CauseRow::of(part.cause)).collect();
    let class = |likeness, pages| Class { likeness, pages };
    let report = WhyReport {
        schema: why::SCHEMA,
        scope: "--pid 4001,4003".to_owned(),
        exact: false,
        sampled_fraction: 0.125,
        error_bytes: 9 << 20,
        totals,
        rows: vec![why_row("4001 cloud-hypervisor", 1), why_row("4003 a-program-with-a-long-name", 1)],
        frames_between_domains: Some(CommonFrames { merged: 0, by_fork: 0, by_file: 1_024 }),
        unexamined_processes: 0,
        unexamined_bytes: 0,
        causes,
        pair: Some(PairReport {
            pids: [4_001, 4_003],
            pages: 8_192,
            sampled_fraction: 0.03,
            classes: vec![
                class(Likeness::Pointers, 4_000),
                class(Likeness::Same, 3_000),
                class(Likeness::Shifted, 1_000),
                class(Likeness::Incompressible, 192),
            ],
            differing_words: 90_000,
            pointer_words: 88_000,
            huge_pages: 512,
        }),
        cost: Cost::new(262_144, 340_000_000, 210_000_000),
    };
    check("why.txt", &why::words::text(&report, Style::plain_text()));
    check("why.json", &json(&report).unwrap());
    let isolated = Row { frames_in_common: CommonFrames::default(), ..report.totals.clone() };
    let exact = WhyReport { exact: true, totals: isolated, frames_between_domains: None, pair: None, ..report };
    let unproven = WhyReport { unexamined_processes: 1, unexamined_bytes: 15 << 20, ..exact.clone() };
    let text = why::words::text(&exact, Style::plain_text());
    check("why-isolated.txt", &text);
    for line in text.lines() {
        assert!(line.chars().count() <= 80, "{line}");
    }
    let text = why::words::text(&unproven, Style::plain_text()).replace('\n', " ");
    assert!(
        text.contains("Isolation isn't proven") && text.contains("couldn't look at 1 process and at 15 MiB"),
        "{text}"
    );
}

#[test]
fn every_remedy_fits_a_terminal() {
    for cause in Cause::ALL {
        for (who, what) in cause.remedies() {
            assert!(11 + who.len() + 2 + what.len() <= 80, "{who}: {what}");
        }
        assert!(11 + cause.name().len() <= 80);
    }
}

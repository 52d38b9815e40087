//! The victims, and which results each of them permits.

use pagefold_inject::InjectError;
use pagefold_procmem::process::Process;
use pagefold_testkit::injection::{BLOCKING, Victim};
use pagefold_testkit::{Freezer, skip_unsupported, status_field};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// Which results a request to a victim may have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Class {
    /// Nearly every injection is made.
    #[default]
    Willing,
    /// Sometimes we can't or mustn't stop the victim.
    Reluctant,
    /// Its memory changes with each exec.
    Execs,
    /// It may end at any moment.
    ShortLived,
}

impl Class {
    pub fn permits(self, error: &InjectError) -> bool {
        match self {
            // Nothing in this test kills the injector.
            _ if matches!(error, InjectError::WorkerGone) => false,
            Self::Willing | Self::Reluctant | Self::Execs => error.is_passing(),
            Self::ShortLived => {
                error.is_passing() || matches!(error, InjectError::Vanished { .. } | InjectError::Zombie { .. })
            }
        }
    }

    /// How often we choose such a victim, relative to the others.
    fn weight(self) -> usize {
        match self {
            Self::Willing => 6,
            Self::ShortLived => 12,
            Self::Execs => 4,
            Self::Reluctant => 2,
        }
    }
}

/// A process that we inject into.
pub struct Target {
    pub process: Process,
    pub addr: u64,
    pub len: u64,
    /// Its pid in its own namespace.
    pub inner_pid: i32,
}

impl Target {
    /// `None` if it has ended.
    pub fn of(victim: &Victim) -> Option<Arc<Self>> {
        let process = Process::open(victim.pid()).ok()?;
        Some(Arc::new(Self { process, addr: victim.addr, len: victim.len, inner_pid: victim.inner_pid }))
    }
}

/// Which signals we send to a victim, and how many it must count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Signals {
    /// Only signals that it ignores.
    #[default]
    Ignored,
    /// Signals that it handles: each must run its handler once.
    Counted,
    /// Like `Counted`, and each signal without SA_RESTART must interrupt the call that the victim blocks in.
    Interrupting,
}

/// A victim, or a series of short-lived victims.
#[derive(Default)]
pub struct Member {
    pub name: String,
    pub class: Class,
    pub disturbed_by: Signals,
    /// Whether `/proc` shows the same signals whenever no handler runs.
    pub steady: bool,
    /// Whether threads of this process inject into the victim. Then this process must not wait for the victim.
    pub direct: bool,
    pub target: Mutex<Option<Arc<Target>>>,
    pub victim: Mutex<Option<Victim>>,
    /// The signals that `/proc` showed at the start.
    pub signals_before: Option<[String; 4]>,
    /// How many signals we've sent from outside.
    pub sent: AtomicU64,
    /// How many signals injected calls have sent.
    pub sent_inside: AtomicU64,
    /// How many signals injected calls may have sent: we don't know their results.
    pub perhaps_sent: AtomicU64,
}

impl Member {
    fn new(name: &str, class: Class, disturbed_by: Signals) -> Self {
        Self { name: name.to_owned(), class, disturbed_by, ..Self::default() }
    }

    pub fn target(&self) -> Option<Arc<Target>> {
        self.target.lock().unwrap().clone()
    }

    /// Sends a signal from outside. We queue it, so that none is lost.
    pub fn send(&self, signal: i32) {
        let Some(target) = self.target() else { return };
        let value = libc::sigval { sival_ptr: std::ptr::null_mut() };
        // SAFETY: the value is a null pointer that no handler uses.
        let error = unsafe { libc::sigqueue(target.process.pid(), signal, value) };
        // EAGAIN: the queue is full.
        if error == 0 {
            self.sent.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub fn kill(&self, signal: i32) {
        if let Some(target) = self.target() {
            pagefold_testkit::send(target.process.pid(), signal);
        }
    }
}

#[derive(Default)]
pub struct Victims {
    pub members: Vec<Member>,
    /// Indices into `members`, each repeated by its weight.
    pub weighted: Vec<usize>,
    pub direct: Vec<usize>,
    pub freezers: Vec<(Freezer, Vec<usize>)>,
    pub stopped: Vec<usize>,
}

const WITH_TRAITS: [&str; 14] = [
    "poll filter-kill",
    "nanosleep filter-kill-thread",
    "epoll filter-errno",
    "read-pipe filter-trap",
    "semtimedop filter-notify",
    "futex filter-trace",
    "select filter-log",
    "io-uring filter-allow",
    "epoll namespaces",
    "ppoll-mask namespaces",
    "epoll trap-blocked",
    "nanosleep trap-ignored",
    "recv-silent trap-ignored",
    "epoll-pwait-mask trap-blocked",
];

impl Victims {
    pub fn start() -> Self {
        let mut victims = Self::default();
        for words in BLOCKING.iter().chain(&WITH_TRAITS) {
            // sigtimedwait itself unblocks signals while it waits.
            let steady = !masks(words) && *words != "sigtimedwait";
            victims.start_one(words, Class::Willing, Signals::Interrupting, |member| member.steady = steady);
        }
        victims.start_one("strict", Class::Willing, Signals::Counted, |_| {});
        for words in ["busy", "busy trap-blocked", "jit", "rseq", "signals", "handlers", "forks", "threads"] {
            victims.start_one(words, Class::Willing, Signals::Counted, |_| {});
        }
        for words in ["many-threads 2000", "main-exit", "waitall"] {
            victims.start_one(words, Class::Willing, Signals::Ignored, |_| {});
        }
        for words in ["vfork", "big-write", "sqpoll-write"] {
            victims.start_one(words, Class::Reluctant, Signals::Ignored, |_| {});
        }
        victims.start_one("execs", Class::Execs, Signals::Ignored, |_| {});
        // We leave out calls that end with EINTR after any stop or freezer (signal(7)).
        for words in ["nanosleep", "poll", "futex", "read-pipe", "busy"] {
            let member = victims.start_one(words, Class::Willing, Signals::Counted, |member| member.name += " stopped");
            victims.stopped.extend(member);
        }
        for version in [1, 2] {
            let Some(freezer) = Freezer::create(version) else {
                skip_unsupported(format!("no freezer of version {version} is mounted"));
                continue;
            };
            let mut frozen = Vec::new();
            for words in ["nanosleep", "poll", "busy"] {
                let name = |member: &mut Member| member.name = format!("{words} frozen-v{version}");
                frozen.extend(victims.start_one(words, Class::Reluctant, Signals::Counted, name));
            }
            for &index in &frozen {
                freezer.add(victims.members[index].target().unwrap().process.pid());
            }
            victims.freezers.push((freezer, frozen));
        }
        for _ in 0..2 {
            let index = victims.members.len();
            victims.members.push(Member::new("short-lived", Class::ShortLived, Signals::Ignored));
            victims.weighted.extend(vec![index; Class::ShortLived.weight()]);
        }
        for words in ["epoll", "read-pipe", "busy", "many-threads 200"] {
            let disturbed_by = if words.starts_with("many") { Signals::Ignored } else { Signals::Counted };
            let index = victims.start_one(words, Class::Willing, disturbed_by, |member| {
                member.name += " direct";
                member.direct = true;
            });
            victims.direct.extend(index);
        }
        victims
    }

    fn start_one(
        &mut self,
        words: &str,
        class: Class,
        disturbed_by: Signals,
        also: impl FnOnce(&mut Member),
    ) -> Option<usize> {
        let mut member = Member::new(words, class, disturbed_by);
        also(&mut member);
        let args: Vec<_> = std::iter::once("torture").chain(words.split(' ')).collect();
        let victim = match Victim::try_start(&args) {
            Ok(victim) => victim,
            Err(why) => {
                assert!(why.starts_with("skip: "), "{words}: {why}");
                skip_unsupported(format!("{words}: {}", &why[6..]));
                return None;
            }
        };
        member.signals_before = signals(victim.pid());
        member.target = Mutex::new(Target::of(&victim));
        member.victim = Mutex::new(Some(victim));
        Some(self.add(member))
    }

    fn add(&mut self, member: Member) -> usize {
        let index = self.members.len();
        if !member.direct {
            self.weighted.extend(vec![index; member.class.weight()]);
        }
        self.members.push(member);
        index
    }

    /// The number of members with each name.
    pub fn names(&self) -> BTreeMap<&str, usize> {
        let mut names = BTreeMap::new();
        self.members.iter().for_each(|member| *names.entry(member.name.as_str()).or_default() += 1);
        names
    }
}

impl Drop for Victims {
    fn drop(&mut self) {
        // The victims end before their groups are removed.
        self.members.clear();
    }
}

/// Whether a victim unblocks signals only during its call. Then they can't arrive at any other moment, and the mask
/// that `/proc` shows isn't always the same.
pub fn masks(name: &str) -> bool {
    name.contains("-mask") || name.starts_with("sigsuspend")
}

/// What `/proc` says about a process's signals: the main thread's mask, which ones are ignored or have handlers, and
/// its seccomp mode.
pub fn signals(pid: i32) -> Option<[String; 4]> {
    let field = |name| status_field(&format!("/proc/{pid}"), name);
    Some([field("SigBlk")?, field("SigIgn")?, field("SigCgt")?, field("Seccomp")?])
}

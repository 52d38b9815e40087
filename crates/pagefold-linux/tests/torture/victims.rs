//! The victims: who they are, and what may be done to them.

use crate::inject_support::{Freezer, Victim, example, skip, start_compat, status_field};
use pagefold_linux::inject::InjectError;
use pagefold_linux::proc::process::Process;
use std::collections::BTreeMap;
use std::process::Child;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// What may come of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Nearly every injection is made.
    Willing,
    /// Has times at which it must not be stopped, or cannot be.
    Reluctant,
    /// Its memory changes with each of its lives.
    Execs,
    /// May be gone at any moment.
    Mayfly,
    /// 32-bit code.
    Compat,
}

impl Class {
    pub fn permits(self, error: &InjectError) -> bool {
        match self {
            Self::Willing | Self::Reluctant | Self::Execs => error.is_passing(),
            Self::Mayfly => {
                error.is_passing() || matches!(error, InjectError::Vanished { .. } | InjectError::Zombie { .. })
            }
            Self::Compat => matches!(error, InjectError::Compat { .. }),
        }
    }

    /// How often it is chosen.
    fn weight(self) -> usize {
        match self {
            Self::Willing => 6,
            Self::Mayfly | Self::Execs => 4,
            Self::Reluctant | Self::Compat => 2,
        }
    }
}

/// Who is injected into.
pub struct Target {
    pub process: Process,
    pub addr: u64,
    pub len: u64,
    /// Its pid as it sees it.
    pub inner_pid: i32,
}

/// What signals a victim is sent, and how the count must come out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Storm {
    /// Only those that are ignored.
    Ignored,
    /// Handled: each must run its handler once.
    Counted,
    /// The same, and while it blocks each signal without SA_RESTART must interrupt it.
    Interrupting,
}

/// A place in the crew. Mayflies hold it one after the other.
pub struct Member {
    pub name: String,
    pub class: Class,
    pub storm: Storm,
    /// What `/proc` shows of its signals is the same whenever no handler runs.
    pub steady: bool,
    /// By threads of this very process, which must then not wait for it.
    pub direct: bool,
    pub target: Mutex<Option<Arc<Target>>>,
    pub victim: Mutex<Option<Victim>>,
    /// What `/proc` showed of its signals at first.
    pub signals: Option<[String; 4]>,
    /// Signals sent from outside.
    pub sent: AtomicU64,
    /// Signals sent by an injected call.
    pub sent_inside: AtomicU64,
    /// The same, if it was: the answer was lost.
    pub perhaps_sent: AtomicU64,
}

impl Member {
    fn new(name: &str, class: Class, storm: Storm) -> Self {
        Self {
            name: name.to_owned(),
            class,
            storm,
            steady: false,
            direct: false,
            target: Mutex::default(),
            victim: Mutex::default(),
            signals: None,
            sent: AtomicU64::new(0),
            sent_inside: AtomicU64::new(0),
            perhaps_sent: AtomicU64::new(0),
        }
    }

    pub fn target(&self) -> Option<Arc<Target>> {
        self.target.lock().unwrap().clone()
    }

    /// Sends a signal from outside, queued, so that none may be lost.
    pub fn send(&self, signal: i32) {
        let Some(target) = self.target() else { return };
        let value = libc::sigval { sival_ptr: std::ptr::null_mut() };
        // EAGAIN: the queue is full.
        if unsafe { libc::sigqueue(target.process.pid(), signal, value) } == 0 {
            self.sent.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub fn kill(&self, signal: i32) {
        if let Some(target) = self.target() {
            unsafe { libc::kill(target.process.pid(), signal) };
        }
    }
}

pub struct Crew {
    pub members: Vec<Member>,
    /// Indices into `members`, each as often as its weight.
    pub lots: Vec<usize>,
    pub direct: Vec<usize>,
    pub freezers: Vec<(Freezer, Vec<usize>)>,
    pub stopped: Vec<usize>,
    compat: Mutex<Option<Child>>,
    /// Of the 32-bit program.
    dir: tempfile::TempDir,
}

/// Calls that block.
const BLOCKING: [&str; 36] = [
    "nanosleep",
    "clock-nanosleep",
    "futex-timeout",
    "futex",
    "futex-waitv",
    "poll",
    "ppoll",
    "ppoll-mask",
    "select",
    "pselect",
    "pselect-mask",
    "epoll",
    "epoll-pwait-mask",
    "epoll-pwait2",
    "read-pipe",
    "readv",
    "eventfd",
    "recv",
    "recv-timeout",
    "recv-silent",
    "recvmsg",
    "accept",
    "accept-timeout",
    "wait4",
    "waitid",
    "inotify",
    "msgrcv",
    "semop",
    "semtimedop",
    "sigtimedwait",
    "sigsuspend",
    "pause",
    "io-getevents",
    "io-uring",
    "io-uring-mask",
    "io-uring-sqpoll",
];
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

impl Crew {
    pub fn muster() -> Self {
        let mut crew = Self {
            members: Vec::new(),
            lots: Vec::new(),
            direct: Vec::new(),
            freezers: Vec::new(),
            stopped: Vec::new(),
            compat: Mutex::default(),
            dir: tempfile::tempdir().unwrap(),
        };
        for words in BLOCKING.iter().chain(&WITH_TRAITS) {
            // The one that waits for signals unblocks them while it does.
            let steady = !masks(words) && *words != "sigtimedwait";
            crew.enlist(words, Class::Willing, Storm::Interrupting, |member| member.steady = steady);
        }
        crew.enlist("strict", Class::Willing, Storm::Counted, |_| {});
        for words in ["busy", "busy trap-blocked", "jit", "rseq", "signals", "handlers", "forks", "threads"] {
            crew.enlist(words, Class::Willing, Storm::Counted, |_| {});
        }
        for words in ["many-threads 2000", "main-exit", "waitall"] {
            crew.enlist(words, Class::Willing, Storm::Ignored, |_| {});
        }
        for words in ["vfork", "big-write", "sqpoll-write"] {
            crew.enlist(words, Class::Reluctant, Storm::Ignored, |_| {});
        }
        crew.enlist("execs", Class::Execs, Storm::Ignored, |_| {});
        // Calls that a stop or a freezer interrupts without anybody's help are not among these (signal(7)).
        for words in ["nanosleep", "poll", "futex", "read-pipe", "busy"] {
            let member = crew.enlist(words, Class::Willing, Storm::Counted, |member| member.name += " stopped");
            crew.stopped.extend(member);
        }
        for version in [1, 2] {
            let Some(freezer) = Freezer::new(version) else {
                skip(&format!("no freezer of version {version}"));
                continue;
            };
            let mut frozen = Vec::new();
            for words in ["nanosleep", "poll", "busy"] {
                let name = |member: &mut Member| member.name = format!("{words} frozen-v{version}");
                frozen.extend(crew.enlist(words, Class::Reluctant, Storm::Counted, name));
            }
            for &index in &frozen {
                freezer.add(crew.members[index].target().unwrap().process.pid());
            }
            crew.freezers.push((freezer, frozen));
        }
        for _ in 0..2 {
            let index = crew.members.len();
            crew.members.push(Member::new("mayfly", Class::Mayfly, Storm::Ignored));
            crew.lots.extend(vec![index; Class::Mayfly.weight()]);
        }
        for words in ["epoll", "read-pipe", "busy", "many-threads 200"] {
            let storm = if words.starts_with("many") { Storm::Ignored } else { Storm::Counted };
            let index = crew.enlist(words, Class::Willing, storm, |member| {
                member.name += " direct";
                member.direct = true;
            });
            crew.direct.extend(index);
        }
        crew.enlist_compat();
        crew
    }

    fn enlist(&mut self, words: &str, class: Class, storm: Storm, also: impl FnOnce(&mut Member)) -> Option<usize> {
        let mut member = Member::new(words, class, storm);
        also(&mut member);
        let args: Vec<_> = std::iter::once("torture").chain(words.split(' ')).collect();
        let victim = match Victim::try_start(&args) {
            Ok(victim) => victim,
            Err(why) => {
                assert!(why.starts_with("skip: "), "{words}: {why} ({})", example().display());
                skip(&format!("{words}: {}", &why[6..]));
                return None;
            }
        };
        let pid = victim.process.pid();
        let process = Process::open(pid).unwrap();
        let (addr, len, inner_pid) = (victim.addr, victim.len, victim.inner_pid);
        member.signals = signals(pid);
        member.target = Mutex::new(Some(Arc::new(Target { process, addr, len, inner_pid })));
        member.victim = Mutex::new(Some(victim));
        Some(self.add(member))
    }

    fn add(&mut self, member: Member) -> usize {
        let index = self.members.len();
        if !member.direct {
            self.lots.extend(vec![index; member.class.weight()]);
        }
        self.members.push(member);
        index
    }

    fn enlist_compat(&mut self) {
        let mut child = match start_compat(self.dir.path()) {
            Ok(child) => child,
            Err(why) => return skip(&why),
        };
        let Ok(process) = Process::open(i32::try_from(child.id()).unwrap()) else {
            let _ = child.wait();
            return skip("32-bit programs end at once");
        };
        let member = Member::new("32-bit", Class::Compat, Storm::Ignored);
        let inner_pid = process.pid();
        *member.target.lock().unwrap() = Some(Arc::new(Target { process, addr: 0, len: 0, inner_pid }));
        self.add(member);
        self.compat = Mutex::new(Some(child));
    }

    /// How many members bear each name.
    pub fn names(&self) -> BTreeMap<&str, usize> {
        let mut names = BTreeMap::new();
        self.members.iter().for_each(|member| *names.entry(member.name.as_str()).or_default() += 1);
        names
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        if let Some(mut child) = self.compat.lock().unwrap().take() {
            let _ = child.kill();
            let _ = child.wait();
        }
        // The victims before the groups they are in.
        self.members.clear();
    }
}

/// Whether a victim lets signals through only in its call: they can come at no other moment, and `/proc` shows the mask
/// of either.
pub fn masks(name: &str) -> bool {
    name.contains("-mask") || name.starts_with("sigsuspend")
}

/// What can be seen of a process's signals: the main thread's mask, and what the handlers are.
pub fn signals(pid: i32) -> Option<[String; 4]> {
    let field = |name| status_field(&format!("/proc/{pid}"), name);
    Some([field("SigBlk")?, field("SigIgn")?, field("SigCgt")?, field("Seccomp")?])
}

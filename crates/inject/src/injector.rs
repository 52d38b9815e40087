//! The injector as its users see it: a process that is started again when it dies.
//!
//! An injector keeps no state, so a new one can take its place. When an injector has died, we don't know whether it
//! carried out its last request: that request fails with an error that says so, and the caller looks at the target
//! again. Threads whose registers the dead process had borrowed resume by themselves or die ([`super::return_frame`]).
//! So we wait longer before each further restart, and give up when injectors keep dying or we can't start one.

use super::starter::Starter;
use super::worker::Connection;
use super::{Batch, InjectError, InjectionReport};
use pagefold_procmem::os::abandonable::{Job, LIMIT, elsewhere};
use pagefold_procmem::os::locked;
use std::io;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};
use tracing::debug;

/// We replace a dead injector at once. If the new one fails, too, we wait this long before the next start, and twice as
/// long after each further failure.
const FIRST_PAUSE: Duration = Duration::from_millis(if cfg!(test) { 10 } else { 250 });
/// After this many deaths and failed starts in a row we don't start another one: the pauses until then add up to 16 s.
const FAILURES_MOST: u32 = 8;
/// Once an injector has lived this long, earlier failures no longer count.
const HEALTHY: Duration = Duration::from_secs(60);
/// How long a request of [`InjectorHandle::run_first`] waits for an earlier request to end, and how often it checks.
const TURN_LIMIT: Duration = Duration::from_secs(5);
const TURN_TICK: Duration = Duration::from_millis(2);

/// An injector process. Dropping this ends the process.
#[derive(Debug)]
pub struct Injector {
    supervised: Arc<Mutex<Supervised>>,
    queue: Arc<Queue>,
}

/// A handle to an [`Injector`] that doesn't keep the injector alive.
#[derive(Clone, Debug)]
pub struct InjectorHandle {
    supervised: Weak<Mutex<Supervised>>,
    queue: Arc<Queue>,
}

/// The requests of [`InjectorHandle::run_first`] that wait for the injector or use it.
#[derive(Debug, Default)]
struct Queue {
    length: AtomicUsize,
    /// The request that has locked this goes next.
    turn: Mutex<()>,
}

type Start = Arc<dyn Fn() -> io::Result<Connection> + Send + Sync>;

struct Supervised {
    connection: Connection,
    /// How long to wait for a reply. `None`: as long as the request's limits allow.
    patience: Option<Duration>,
    /// Starts another injector. `None`: we don't replace a dead one.
    start: Option<Start>,
    started: Instant,
    /// Set while there is no injector.
    down: Option<Down>,
    /// Deaths and failed starts in a row.
    failures: u32,
    restarts: u32,
    /// CPU time of earlier injectors.
    former_ns: u64,
    /// Whether the injectors are descendants of this process.
    is_descendant: bool,
}

struct Down {
    why: String,
    next: Instant,
}

impl Injector {
    /// Starts `command`, which must call [`super::serve`] on its standard input and output. We don't replace it when it
    /// dies.
    pub fn spawn(command: &mut Command) -> io::Result<Self> {
        Ok(Self::of(Connection::spawn(command)?, None, true))
    }

    /// Starts the process `starter`, which must call [`super::start_injectors`]. It starts an injector for us, and a
    /// new one whenever the last one has died.
    pub fn keep_running(starter: &mut Command) -> io::Result<Self> {
        let starter = Starter::spawn(starter)?;
        Self::keep(move || starter.start(), true)
    }

    /// Connects to the socket of a service manager that starts an injector for each connection. We connect again
    /// whenever the injector has died.
    ///
    /// # Errors
    /// `PermissionDenied` unless each end belongs to root or to the other end's user.
    pub fn connect(path: &Path) -> io::Result<Self> {
        let path = path.to_owned();
        Self::keep(move || Connection::connect(&path), false)
    }

    fn keep(
        start: impl Fn() -> io::Result<Connection> + Send + Sync + 'static,
        is_descendant: bool,
    ) -> io::Result<Self> {
        Ok(Self::of(start()?, Some(Arc::new(start)), is_descendant))
    }

    fn of(connection: Connection, start: Option<Start>, is_descendant: bool) -> Self {
        let supervised = Supervised {
            connection,
            patience: None,
            start,
            started: Instant::now(),
            down: None,
            failures: 0,
            restarts: 0,
            former_ns: 0,
            is_descendant,
        };
        Self { supervised: Arc::new(Mutex::new(supervised)), queue: Arc::default() }
    }

    /// Makes requests fail with [`InjectError::WorkerSilent`] after this time. They fail at once while an earlier
    /// request is unanswered or one of [`InjectorHandle::run_first`] is waiting. The injector may still carry out a
    /// request that timed out.
    pub fn set_patience(&mut self, patience: Duration) {
        self.lock().patience = Some(patience);
    }

    /// Makes the injector run a batch, but only while the process runs the batch's program.
    ///
    /// # Errors
    /// [`InjectError::OtherProgram`] if the process runs another one.
    /// [`InjectError::WorkerGone`] if the injector has died: we don't know whether it made the calls.
    /// [`InjectError::WorkerSilent`] if it doesn't reply in time. We don't kill it then, because it may hold a target
    /// that only it can restore. Until it replies, later requests fail at once if there's a patience
    /// ([`Self::set_patience`]), and wait otherwise.
    pub fn run(&mut self, batch: Batch<'_>) -> Result<InjectionReport, InjectError> {
        self.handle().run(batch)
    }

    /// If the injector has died, starts another one once the pause is over. Returns how often we've done that.
    ///
    /// # Errors
    /// [`InjectError::WorkerLost`] if injectors keep dying or can't be started. Then we no longer try.
    pub fn tend(&mut self) -> Result<u32, InjectError> {
        let mut supervised = self.lock();
        match supervised.tend() {
            Err(lost @ InjectError::WorkerLost { .. }) => Err(lost),
            _ => Ok(supervised.restarts),
        }
    }

    /// CPU time of all injectors so far, each up to its last reply, nanoseconds.
    pub fn cpu_ns(&self) -> u64 {
        let supervised = self.lock();
        supervised.connection.cpu_ns() + supervised.former_ns
    }

    /// Whether our RUSAGE_CHILDREN includes the injectors' CPU time once they've ended.
    pub fn is_descendant(&self) -> bool {
        self.lock().is_descendant
    }

    /// The injector's pid; 0 if there is none.
    pub fn pid(&self) -> u32 {
        let supervised = self.lock();
        if supervised.down.is_some() { 0 } else { supervised.connection.pid() }
    }

    pub fn handle(&self) -> InjectorHandle {
        InjectorHandle { supervised: Arc::downgrade(&self.supervised), queue: self.queue.clone() }
    }

    /// Ignores poisoning: at worst a panic has left a request half written, and the next one fails or times out.
    fn lock(&self) -> MutexGuard<'_, Supervised> {
        locked(&self.supervised)
    }
}

impl InjectorHandle {
    /// Like [`Injector::run`], while the [`Injector`] exists.
    pub fn run(&self, batch: Batch<'_>) -> Result<InjectionReport, InjectError> {
        let supervised = self.supervised.upgrade().ok_or(InjectError::WorkerGone)?;
        let is_last = self.queue.length.load(Ordering::Relaxed) > 0;
        let mut supervised = locked(&supervised);
        if is_last && supervised.patience.is_some() {
            return Err(InjectError::WorkerSilent);
        }
        supervised.run(batch)
    }

    /// Like [`Self::run`], but waits for earlier requests to end. If there's a patience, requests of [`Self::run`] fail
    /// meanwhile. Use this on a thread that its starter may abandon.
    pub fn run_first(&self, batch: Batch<'_>) -> Result<InjectionReport, InjectError> {
        self.queue.length.fetch_add(1, Ordering::Relaxed);
        let result = elsewhere(|| {
            let _turn = locked(&self.queue.turn);
            let end = Instant::now() + TURN_LIMIT;
            loop {
                let supervised = self.supervised.upgrade().ok_or(InjectError::WorkerGone)?;
                let mut supervised = locked(&supervised);
                supervised.tend()?;
                if supervised.connection.is_free() || Instant::now() >= end {
                    return supervised.run(batch);
                }
                drop(supervised);
                std::thread::sleep(TURN_TICK);
            }
        });
        self.queue.length.fetch_sub(1, Ordering::Relaxed);
        result
    }
}

impl Supervised {
    fn run(&mut self, batch: Batch<'_>) -> Result<InjectionReport, InjectError> {
        self.tend()?;
        let result = self.connection.run(batch, self.patience);
        debug!(target: "inject", pid = batch.process.pid(), calls = batch.calls.len(), ?result);
        result
    }

    /// Makes sure that there is an injector.
    fn tend(&mut self) -> Result<(), InjectError> {
        if self.down.is_some() {
            return self.restart();
        }
        if self.connection.is_usable() {
            return Ok(());
        }
        self.connection.end();
        self.former_ns += self.connection.take_cpu_ns();
        self.fall("it has ended".to_owned())
    }

    /// Records a death or failed start, and starts another injector if the pause is over.
    fn fall(&mut self, why: String) -> Result<(), InjectError> {
        if self.down.is_none() && self.started.elapsed() >= HEALTHY {
            self.failures = 0;
        }
        self.failures += 1;
        debug!(target: "inject", failures = self.failures, "no injector: {why}");
        let pause =
            if self.failures == 1 { Duration::ZERO } else { FIRST_PAUSE * 2_u32.pow(self.failures.min(16) - 2) };
        self.down = Some(Down { why, next: Instant::now() + pause });
        self.restart()
    }

    fn restart(&mut self) -> Result<(), InjectError> {
        let (Some(start), Some(down)) = (&self.start, &self.down) else { return Err(InjectError::WorkerGone) };
        if self.failures >= FAILURES_MOST {
            return Err(InjectError::WorkerLost { why: down.why.clone(), failures: self.failures });
        }
        if Instant::now() < down.next {
            return Err(InjectError::WorkerGone);
        }
        let start = start.clone();
        match Job::start(move || start()).wait_for(LIMIT) {
            Ok(Ok(connection)) => {
                self.connection = connection;
                self.started = Instant::now();
                self.down = None;
                self.restarts += 1;
                debug!(target: "inject", pid = self.connection.pid(), "a new injector has replaced it");
                Ok(())
            }
            Ok(Err(error)) => self.fall(error.to_string()),
            Err(_) => self.fall("starting it takes too long".to_owned()),
        }
    }
}

impl std::fmt::Debug for Supervised {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let pid = self.connection.pid();
        formatter
            .debug_struct("Supervised")
            .field("pid", &pid)
            .field("failures", &self.failures)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Call, Limits, ProgramId};
    use super::*;
    use pagefold_procmem::process::Process;

    #[test]
    fn an_injector_that_keeps_dying_is_given_up_after_a_while() {
        let begun = Instant::now();
        let mut injector = Injector::keep(|| Connection::spawn(&mut Command::new("true")), true).unwrap();
        let mut restarts = 0;
        let lost = loop {
            match injector.tend() {
                Ok(so_far) => restarts = so_far,
                Err(lost) => break lost,
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        assert!(matches!(lost, InjectError::WorkerLost { failures: FAILURES_MOST, .. }), "{lost}");
        assert_eq!(restarts, FAILURES_MOST - 1);
        assert!(begun.elapsed() > Duration::from_millis(10 * 63), "{:?}", begun.elapsed());
        assert_eq!(injector.pid(), 0);
    }

    /// This injector takes 0.6 s for each request with calls.
    const SLOW: &str = r#"while read -r line; do
        case "$line" in *'"calls":[]'*) ;; *) sleep 0.6 ;; esac
        id="${line#*\"id\":}"
        echo '{"version":4,"id":'"${id%%,*}"',"pid":1,"cpu_ns":0,"refusal":null,"result":{"Ok":{"results":[],"stops":0,"longest_stop_ns":0,"total_stop_ns":0}}}'
    done"#;

    /// An injector may still carry out a mark after we've stopped waiting for its reply. So code that unmarks must let
    /// the injector finish before it reads the marks.
    #[test]
    fn a_request_that_goes_first_waits_for_earlier_ones_and_keeps_later_ones_back() {
        const PATIENCE: Duration = Duration::from_millis(100);
        let own = Process::open(i32::try_from(std::process::id()).unwrap()).unwrap();
        let program = ProgramId::of(&own).unwrap();
        let mut injector = Injector::spawn(Command::new("sh").args(["-c", SLOW])).unwrap();
        injector.set_patience(PATIENCE);
        let limits = Limits::default();
        let batch = |calls| Batch { process: &own, program: &program, calls, limits: &limits };
        let begun = Instant::now();
        let mark = [Call::madvise(0, 0, libc::MADV_MERGEABLE)];
        assert_eq!(injector.run(batch(&mark)), Err(InjectError::WorkerSilent));
        let handle = injector.handle();
        let first = std::thread::spawn(move || {
            let own = Process::open(i32::try_from(std::process::id()).unwrap()).unwrap();
            handle
                .run_first(Batch { process: &own, program: &program, calls: &[], limits: &limits })
                .map(|_| begun.elapsed())
        });
        while !first.is_finished() {
            let asked = Instant::now();
            let later = injector.run(batch(&[]));
            assert!(first.is_finished() || later == Err(InjectError::WorkerSilent), "{later:?}");
            assert!(asked.elapsed() < Duration::from_secs(1));
            std::thread::sleep(Duration::from_millis(5));
        }
        let over = first.join().unwrap().unwrap();
        assert!(over >= Duration::from_millis(600), "{over:?}");
        assert!(injector.run(batch(&[])).is_ok());
    }

    #[test]
    fn without_a_way_to_start_it_again_it_stays_gone() {
        let mut injector = Injector::spawn(&mut Command::new("true")).unwrap();
        let own = Process::open(i32::try_from(std::process::id()).unwrap()).unwrap();
        let program = ProgramId::of(&own).unwrap();
        let batch = Batch { process: &own, program: &program, calls: &[], limits: &Limits::default() };
        for _ in 0..3 {
            assert_eq!(injector.run(batch), Err(InjectError::WorkerGone));
        }
        assert_eq!(injector.tend(), Ok(0));
    }
}

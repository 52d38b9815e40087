//! The injector, a process that makes system calls in other processes, and the protocol by which we ask it for them.
//!
//! If a tracer dies while a target has borrowed registers, the target may die, too. So the tracer is a process of its
//! own that does nothing else, ignores every signal that it can ignore, and is out of reach of ctrl-C. It ends when the
//! process that started it has ended (end of file), but never while it holds a target.
//!
//! Its user either has it started ([`super::starter`]) or connects to a socket, where a service manager starts an
//! injector for each connection. Either way the injector stays out of the seccomp filters of its user and of a hardened
//! service: no tracer under a filter may suspend its targets' filters.
//!
//! Requests and replies are one JSON object per line on a socket pair. A reply carries the number of its request, so we
//! recognize a late one and drop it.

use super::{Batch, Call, InjectError, InjectionReport, Limits, held};
use pagefold_procmem::image::ProgramId;
use pagefold_procmem::os::cpu::own_cpu_ns;
use pagefold_procmem::os::peer::{Peer, is_trusted};
use pagefold_procmem::os::privileges::{INJECTING, keep_from_dumps, keep_only};
use pagefold_procmem::process::Process;
use serde::{Deserialize, Serialize};
use std::io::{self, BufRead, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const VERSION: u32 = 4;
/// The longest line that we accept, bytes: some 40,000 calls.
const LINE_BYTES: u64 = 8 << 20;
/// How long we wait for a reply that has probably come already.
const GLANCE: Duration = Duration::from_millis(1);
/// How long we wait for a reply beyond the limits of its request.
const SLACK: Duration = Duration::from_secs(5);

#[derive(PartialEq, Serialize, Deserialize)]
pub struct Request {
    version: u32,
    id: u64,
    pid: i32,
    start_time_ticks: u64,
    /// The program that the process must be running.
    program: ProgramId,
    pub calls: Vec<Call>,
    pub limits: Limits,
}

#[derive(PartialEq, Serialize, Deserialize)]
pub struct Reply {
    version: u32,
    id: u64,
    pid: u32,
    /// CPU time of the injector since it started, nanoseconds.
    cpu_ns: u64,
    /// Why the injector accepts no requests from this user, if it doesn't.
    refusal: Option<String>,
    result: Result<InjectionReport, InjectError>,
}

#[derive(Debug)]
pub(super) struct Connection {
    /// `None` if another process has started the injector.
    child: Option<Child>,
    pid: u32,
    stream: UnixStream,
    /// The part of the next reply that we've read.
    pending: Vec<u8>,
    last_id: u64,
    /// Whether we've written only part of a request, so that the injector would misread the next one.
    broken: bool,
    refusal: Option<String>,
    cpu_ns: u64,
    /// Whether the injector hasn't answered the last request.
    is_waiting: bool,
}

impl Connection {
    pub(super) fn new(pid: u32, child: Option<Child>, stream: UnixStream) -> Self {
        Self {
            child,
            pid,
            stream,
            pending: Vec::new(),
            last_id: 0,
            broken: false,
            refusal: None,
            cpu_ns: 0,
            is_waiting: false,
        }
    }

    pub(super) fn spawn(command: &mut Command) -> io::Result<Self> {
        let (stream, theirs) = UnixStream::pair()?;
        let theirs: OwnedFd = theirs.into();
        command.stdin(Stdio::from(theirs.try_clone()?)).stdout(Stdio::from(theirs));
        let child = command.spawn();
        // Otherwise `command` would keep the injector's end of the socket open in this process, and we wouldn't notice
        // the injector's death.
        command.stdin(Stdio::null()).stdout(Stdio::null());
        let child = child?;
        Ok(Self::new(child.id(), Some(child), stream))
    }

    pub(super) fn connect(path: &Path) -> io::Result<Self> {
        let stream = UnixStream::connect(path)?;
        let uid = Peer::of(&stream)?.uid;
        if !is_trusted(uid) {
            let what = format!("the socket belongs to user {uid}, which is not trusted");
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, what));
        }
        let mut connection = Self::new(0, None, stream);
        // We ask for an empty batch in our own process, to see whether the other end accepts requests.
        let own = i32::try_from(std::process::id()).ok().and_then(|pid| Process::open(pid).ok());
        let own = own.ok_or_else(|| io::Error::other("cannot read the entry of this process in /proc"))?;
        let program = ProgramId::of(&own).map_err(io::Error::other)?;
        let batch = Batch { process: &own, program: &program, calls: &[], limits: &Limits::default() };
        match connection.run(batch, None) {
            Ok(_) => Ok(connection),
            Err(_) if connection.refusal.is_some() => {
                Err(io::Error::new(io::ErrorKind::PermissionDenied, connection.refusal.take().unwrap_or_default()))
            }
            Err(error) => Err(io::Error::other(error.to_string())),
        }
    }

    /// Whether the other end is alive and can understand the next request.
    pub(super) fn is_usable(&self) -> bool {
        let mut byte = 0_u8;
        let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
        // SAFETY: `byte` outlives the call, which writes at most that.
        let read = unsafe { libc::recv(self.stream.as_raw_fd(), (&raw mut byte).cast(), 1, flags) };
        let is_open = match read {
            0 => false,
            1.. => true,
            _ => matches!(io::Error::last_os_error().kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted),
        };
        is_open && !self.broken
    }

    /// Hangs up. The injector sees the end of file, and ends within a millisecond, or as soon as it has restored the
    /// target that it holds.
    pub(super) fn end(&self) {
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
    }

    pub(super) fn pid(&self) -> u32 {
        self.pid
    }

    /// The injector's CPU time up to its last reply, nanoseconds.
    pub(super) fn cpu_ns(&self) -> u64 {
        self.cpu_ns
    }

    pub(super) fn take_cpu_ns(&mut self) -> u64 {
        std::mem::take(&mut self.cpu_ns)
    }

    /// Whether the injector has answered the last request.
    pub(super) fn is_free(&mut self) -> bool {
        if self.is_waiting {
            // If there's a reply, this clears the flag.
            let _ = self.reply(Instant::now() + GLANCE);
        }
        !self.is_waiting
    }

    /// Makes a request. With `patience` we wait no longer than that for the reply, and fail at once if an earlier
    /// request is unanswered.
    pub(super) fn run(&mut self, batch: Batch<'_>, patience: Option<Duration>) -> Result<InjectionReport, InjectError> {
        if self.broken {
            return Err(InjectError::WorkerSilent);
        }
        if patience.is_some() && !self.is_free() {
            return Err(InjectError::WorkerSilent);
        }
        self.last_id += 1;
        let request = Request {
            version: VERSION,
            id: self.last_id,
            pid: batch.process.pid(),
            start_time_ticks: batch.process.start_time_ticks(),
            program: *batch.program,
            calls: batch.calls.to_vec(),
            limits: *batch.limits,
        };
        let limit = reply_limit(batch.calls.len(), batch.limits);
        let limit = patience.unwrap_or(limit).min(limit);
        let deadline = Instant::now() + limit;
        let mut line = serde_json::to_vec(&request).map_err(|error| malformed(&error))?;
        line.push(b'\n');
        self.stream.set_write_timeout(Some(limit)).map_err(|_| InjectError::WorkerGone)?;
        let written = self.stream.write_all(&line).map_err(|error| {
            self.broken = disconnected(&error) == InjectError::WorkerSilent;
            disconnected(&error)
        });
        // If the pipe broke, we go on and read the reply: an injector that refuses this user replies and hangs up
        // without reading what we've asked.
        if let Err(InjectError::WorkerSilent) = written {
            return Err(InjectError::WorkerSilent);
        }
        self.is_waiting = true;
        self.reply(deadline)?
    }

    /// Waits for the reply to the last request.
    fn reply(&mut self, deadline: Instant) -> Result<Result<InjectionReport, InjectError>, InjectError> {
        loop {
            let line = self.line(deadline)?;
            let reply: Reply = serde_json::from_slice(&line).map_err(|error| malformed(&error))?;
            if reply.version != VERSION {
                return Err(InjectError::Protocol { what: format!("version {} of the protocol", reply.version) });
            }
            self.pid = reply.pid;
            self.cpu_ns = self.cpu_ns.max(reply.cpu_ns);
            if reply.refusal.is_some() {
                self.refusal = reply.refusal;
            }
            // The injector replies with id 0 if it couldn't parse the request.
            if reply.id == self.last_id || reply.id == 0 {
                self.is_waiting = false;
                return Ok(reply.result);
            }
        }
    }

    fn line(&mut self, deadline: Instant) -> Result<Vec<u8>, InjectError> {
        let mut chunk = [0; 16 << 10];
        loop {
            if let Some(end) = self.pending.iter().position(|&byte| byte == b'\n') {
                let rest = self.pending.split_off(end + 1);
                return Ok(std::mem::replace(&mut self.pending, rest));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(InjectError::WorkerSilent);
            }
            self.stream.set_read_timeout(Some(left)).map_err(|_| InjectError::WorkerGone)?;
            match self.stream.read(&mut chunk) {
                Ok(0) => return Err(InjectError::WorkerGone),
                Ok(read) => self.pending.extend_from_slice(&chunk[..read]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(disconnected(&error)),
            }
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.end();
        if let Some(child) = &mut self.child {
            wait_briefly(child);
        }
    }
}

/// Waits for a process that is ending. After 100 ms we leave it: it may hold a target.
pub(super) fn wait_briefly(child: &mut Child) {
    for _ in 0..50 {
        match child.try_wait() {
            Ok(None) => std::thread::sleep(Duration::from_millis(2)),
            _ => return,
        }
    }
}

/// How long a reply may take, if the calls use up all limits and each batch needs two attempts.
pub fn reply_limit(calls: usize, limits: &Limits) -> Duration {
    let calls = u64::try_from(calls).unwrap_or(u64::MAX);
    let per_stop = u64::try_from(limits.calls_per_stop.max(1)).unwrap_or(1);
    let stops_ns = calls.div_ceil(per_stop).saturating_mul(limits.stop_ns).saturating_mul(2);
    let total_ns = calls.saturating_mul(limits.call_ns).saturating_add(stops_ns);
    SLACK.saturating_add(Duration::from_nanos(total_ns)).min(Duration::from_secs(3600))
}

fn disconnected(error: &io::Error) -> InjectError {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => InjectError::WorkerSilent,
        _ => InjectError::WorkerGone,
    }
}

fn malformed(error: &serde_json::Error) -> InjectError {
    InjectError::Protocol { what: error.to_string() }
}

/// Makes the calls of a request: [`super::inject_into`], except in tests.
pub type Inject = fn(Batch<'_>) -> Result<InjectionReport, InjectError>;

/// Runs the injector: replies to the requests on standard input until its end. Only makes calls that are `allowed`, and
/// makes them by `inject`.
pub fn serve(allowed: fn(&Call) -> bool, inject: Inject) -> ! {
    confine();
    pagefold_procmem::os::fault::init();
    let mut input = io::stdin().lock();
    let mut output = io::stdout().lock();
    if let Some(refusal) = refusal(&input) {
        let result = Err(InjectError::WorkerGone);
        let _ = send(&mut output, &Reply::new(0, Some(refusal), result));
        std::process::exit(1)
    }
    let mut line = Vec::new();
    loop {
        line.clear();
        match (&mut input).take(LINE_BYTES).read_until(b'\n', &mut line) {
            Ok(0) | Err(_) => break,
            Ok(_) => {}
        }
        // If the line has no newline, the process that sent it died in the middle of the request.
        if line.last() != Some(&b'\n') {
            break;
        }
        let (id, result) = answer(&line, allowed, inject);
        if send(&mut output, &Reply::new(id, None, result)).is_err() {
            break;
        }
    }
    while held() > 0 {
        std::thread::sleep(Duration::from_millis(10));
    }
    std::process::exit(0)
}

impl Reply {
    fn new(id: u64, refusal: Option<String>, result: Result<InjectionReport, InjectError>) -> Self {
        Self { version: VERSION, id, pid: std::process::id(), cpu_ns: own_cpu_ns(), refusal, result }
    }
}

fn send(output: &mut impl Write, reply: &Reply) -> io::Result<()> {
    let mut bytes = serde_json::to_vec(reply)?;
    bytes.push(b'\n');
    output.write_all(&bytes)?;
    output.flush()
}

/// Why we refuse requests from the other end of `input`, if we do. An input that's no socket comes from our parent.
fn refusal(input: &impl AsFd) -> Option<String> {
    let stream = UnixStream::from(input.as_fd().try_clone_to_owned().ok()?);
    let peer = Peer::of(&stream).ok()?;
    if is_trusted(peer.uid) {
        return None;
    }
    Some("only root may use this injector; run the command with sudo".to_owned())
}

fn answer(line: &[u8], allowed: fn(&Call) -> bool, inject: Inject) -> (u64, Result<InjectionReport, InjectError>) {
    let request: Request = match serde_json::from_slice(line) {
        Ok(request) => request,
        Err(error) => return (0, Err(malformed(&error))),
    };
    if request.version != VERSION {
        let what = format!("version {} of the protocol", request.version);
        return (request.id, Err(InjectError::Protocol { what }));
    }
    if let Some(call) = request.calls.iter().find(|call| !allowed(call)) {
        return (request.id, Err(InjectError::Protocol { what: format!("{call:?}") }));
    }
    let result = match Process::open(request.pid) {
        Ok(process) if process.start_time_ticks() == request.start_time_ticks => {
            let Request { program, calls, limits, .. } = &request;
            inject(Batch { process: &process, program, calls, limits })
        }
        Ok(_) => Err(InjectError::Vanished { pid: request.pid }),
        Err(error) => Err(InjectError::from_read(error)),
    };
    (request.id, result)
}

/// Lets nothing but SIGKILL end this process, and drops capabilities.
pub(super) fn confine() {
    shield_process();
    // We drop capabilities before we read any request. Everything above needs more of them.
    if let Err(error) = keep_only(&INJECTING) {
        eprintln!("pagefold: the injector cannot drop its capabilities: {error}; see docs/privileges.md");
        std::process::exit(1)
    }
}

fn shield_process() {
    const IGNORED: [i32; 10] = [
        libc::SIGINT,
        libc::SIGTERM,
        libc::SIGHUP,
        libc::SIGQUIT,
        libc::SIGPIPE,
        libc::SIGUSR1,
        libc::SIGUSR2,
        libc::SIGALRM,
        libc::SIGTSTP,
        libc::SIGTTOU,
    ];
    for signal in IGNORED {
        // SAFETY: ignoring a signal installs no handler.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
    // SAFETY: no arguments. We leave the terminal's process group, so that ctrl-C doesn't reach us. This only fails if we
    // already lead a group, which is just as good.
    unsafe { libc::setsid() };
    // The OOM killer mustn't choose us in the middle of a call. Without CAP_SYS_RESOURCE this fails, but a process as
    // small as this is an unlikely victim anyway.
    let _ = std::fs::write("/proc/self/oom_score_adj", "-1000");
    // The tracing threads inherit this, so they need no CAP_SYS_NICE. If it fails, stops take longer where cores are
    // scarce.
    // SAFETY: numbers only.
    unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, -10) };
    keep_from_dumps();
}

#[cfg(test)]
mod tests {
    use super::super::inject_into;
    use super::*;
    use pagefold_engine::stops::StopLengths;
    use pagefold_procmem::merge_any::PR_SET_MEMORY_MERGE;

    const PROGRAM: ProgramId = ProgramId { image: 0, exe: None, uid: 0 };

    #[test]
    fn requests_of_another_version_and_malformed_ones_get_a_reply() {
        let limits = Limits::default();
        let request = Request {
            version: VERSION + 1,
            id: 7,
            pid: 1,
            start_time_ticks: 0,
            program: PROGRAM,
            calls: vec![],
            limits,
        };
        let (id, result) = answer(&serde_json::to_vec(&request).unwrap(), Call::is_harmless, inject_into);
        assert!(id == 7 && matches!(result, Err(InjectError::Protocol { .. })));
        for line in [&b""[..], b"{}", b"[1,2", b"\xff\n", b"{\"version\":4}\n"] {
            assert!(matches!(answer(line, Call::is_harmless, inject_into), (0, Err(InjectError::Protocol { .. }))));
        }
    }

    /// A request for this process, but with another start time, as if its pid had been reused.
    fn stale(call: Call) -> (u64, Result<InjectionReport, InjectError>) {
        let request = Request {
            version: VERSION,
            id: 1,
            pid: i32::try_from(std::process::id()).unwrap(),
            start_time_ticks: 1,
            program: PROGRAM,
            calls: vec![Call::madvise(0, 0, libc::MADV_MERGEABLE), call],
            limits: Limits::default(),
        };
        answer(&serde_json::to_vec(&request).unwrap(), Call::is_harmless, inject_into)
    }

    #[test]
    fn a_reused_pid_is_not_touched() {
        let pid = i32::try_from(std::process::id()).unwrap();
        let unmark = Call::madvise(0, 0, libc::MADV_UNMERGEABLE);
        for call in [unmark, Call::prctl(libc::PR_GET_DUMPABLE, [0; 4]), Call::prctl(PR_SET_MEMORY_MERGE, [0; 4])] {
            assert_eq!(stale(call), (1, Err(InjectError::Vanished { pid })));
        }
    }

    #[test]
    fn no_other_calls_are_made() {
        for call in [
            Call::madvise(0, 4096, libc::MADV_DONTNEED),
            Call::prctl(libc::PR_SET_DUMPABLE, [1, 0, 0, 0]),
            Call::prctl(PR_SET_MEMORY_MERGE, [1, 0, 0, 0]),
            Call { nr: libc::SYS_execve, args: [0; 6] },
        ] {
            assert!(matches!(stale(call), (1, Err(InjectError::Protocol { .. }))), "{call:?}");
        }
    }

    #[test]
    fn replies_are_the_same_after_a_round_trip() {
        let report = InjectionReport {
            results: vec![Ok(u64::MAX), Err(super::super::Errno(12))],
            stops: 1,
            longest_stop_ns: 2,
            total_stop_ns: 3,
            stop_lengths: StopLengths([1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, u64::MAX]),
            ..InjectionReport::default()
        };
        for result in [Ok(report), Err(InjectError::Traced { pid: 1, by: 2 }), Err(InjectError::WorkerSilent)] {
            let reply = Reply::new(u64::MAX, None, result.clone());
            let back: Reply = serde_json::from_slice(&serde_json::to_vec(&reply).unwrap()).unwrap();
            assert!(back.result == result && back.id == u64::MAX);
        }
    }

    #[test]
    fn patience_is_bounded() {
        let endless = Limits { stop_ns: u64::MAX, call_ns: u64::MAX, calls_per_stop: 0 };
        assert_eq!(reply_limit(usize::MAX, &endless), Duration::from_secs(3600));
        assert!(reply_limit(0, &Limits::default()) >= SLACK);
    }
}

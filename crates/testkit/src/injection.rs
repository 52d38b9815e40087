//! A handle of the victim `victim`, for injection tests.

use crate::process::{status_field, tids, wait_until};
use crate::{OwnedChild, Script, skip, victim_binary};
use pagefold_inject::{Batch, Call, InjectError, InjectionReport, Injector, Limits, ProgramId, inject, inject_into};
use pagefold_procmem::process::Process;
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// The advice that injection tests make a victim give on its memory, and its opposite. Tests that use KSM run at the
/// same time and rely on nobody else marking memory. So we use a flag that only a core dump looks at.
pub const MARK: i32 = libc::MADV_DONTDUMP;
pub const UNMARK: i32 = libc::MADV_DODUMP;

/// The signals whose handlers a torture victim counts: one without flags, one with SA_RESTART, one with SA_ONSTACK.
pub const PLAIN: i32 = 35;
pub const RESTARTING: i32 = 36;
pub const ON_STACK: i32 = 37;
/// The exit code of a torture victim that lived to its planned end and found nothing wrong.
pub const CONTENT: i32 = 7;

/// The victim's modes that block in a call.
pub const BLOCKING: [&str; 36] = [
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

/// Like the default limits, but with more time, because on busy processors a thread takes long to stop.
pub const PATIENT: Limits = Limits { stop_ns: 3_000_000_000, call_ns: 3_000_000_000, calls_per_stop: 32 };

/// Whether we may trace a child here. If not, reports why.
#[track_caller]
pub fn can_inject() -> bool {
    let mut victim = Victim::start("idle");
    let result = victim.mark(MARK);
    victim.send();
    match result {
        Err(error @ InjectError::Denied { .. }) => {
            skip(error);
            false
        }
        _ => true,
    }
}

/// Starts an injector process: the mode `worker` of the victim, or another one.
pub fn injector(mode: &str) -> Injector {
    Injector::spawn(Command::new(victim_binary("victim")).arg(mode)).unwrap()
}

/// In tests' requests this stands for whichever program the process runs when the call is made. The share of its user
/// or cgroup isn't limited then.
const ANY_PROGRAM: ProgramId = ProgramId { image: 0, exe: None, uid: 0 };

/// Makes the injector of [`injector`] run `calls` in `process`, whichever program that runs.
pub fn run_unchecked(
    injector: &mut Injector,
    process: &Process,
    calls: &[Call],
    limits: &Limits,
) -> Result<InjectionReport, InjectError> {
    injector.run(Batch { process, program: &ANY_PROGRAM, calls, limits })
}

/// Makes the calls of a request, in the mode `worker` of the victim.
pub fn inject_as_asked(batch: Batch<'_>) -> Result<InjectionReport, InjectError> {
    if *batch.program == ANY_PROGRAM { inject(batch.process, batch.calls, batch.limits) } else { inject_into(batch) }
}

pub struct Victim {
    pub program: Script,
    pub process: Process,
    pub addr: u64,
    pub len: u64,
    /// The victim's pid in its own namespace.
    pub inner_pid: i32,
}

impl Victim {
    pub fn start(mode: &str) -> Self {
        Self::try_start(&[mode]).unwrap()
    }

    /// Starts a victim, if injection is possible here.
    #[track_caller]
    pub fn if_possible(mode: &str) -> Option<Self> {
        can_inject().then(|| Self::start(mode))
    }

    /// Starts a victim with these arguments. The error says why the victim can't do what they ask for.
    pub fn try_start(args: &[&str]) -> Result<Self, String> {
        let mut command = Command::new(victim_binary("victim"));
        // SAFETY: prctl(2) is async-signal-safe.
        unsafe {
            command.args(args).pre_exec(|| {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                Ok(())
            });
        }
        // The mode `registers` waits for input in a recv(2) that an injection mustn't interrupt.
        let mut program =
            if args[0] == "registers" { Script::with_socket(&mut command) } else { Script::of(&mut command) };
        let mut pid = program.pid();
        let mut line = program.line();
        // A victim in a pid namespace of its own is a child of the process that we've started.
        if let Some(inside) = line.strip_prefix("child ") {
            pid = inside.parse().unwrap();
            line = program.line();
        }
        let Some(fields) = line.strip_prefix("ready ") else {
            return Err(line.trim_start_matches("bad: ").to_owned());
        };
        let mut fields = fields.split_whitespace();
        let addr = u64::from_str_radix(fields.next().unwrap(), 16).unwrap();
        let len = fields.next().unwrap().parse().unwrap();
        let inner_pid = fields.next().map_or(pid, |pid| pid.parse().unwrap());
        let process = Process::open(pid).map_err(|error| error.to_string())?;
        Ok(Self { program, process, addr, len, inner_pid })
    }

    pub fn pid(&self) -> i32 {
        self.process.pid()
    }

    pub fn calls(&self, advice: i32, count: usize) -> Vec<Call> {
        vec![Call::madvise(self.addr, self.len, advice); count]
    }

    pub fn mark(&self, advice: i32) -> Result<InjectionReport, InjectError> {
        inject(&self.process, &self.calls(advice, 1), &PATIENT)
    }

    /// Marks, unmarks and marks again, `times` times, and checks each time that the call took effect.
    pub fn mark_repeatedly(&self, times: usize) {
        for _ in 0..times {
            for (advice, marked) in [(MARK, true), (UNMARK, false), (MARK, true)] {
                let report = self.mark(advice).unwrap();
                assert_eq!(report.results, [Ok(0)]);
                assert!(report.stops >= 1 && report.longest_stop_ns > 0);
                assert_eq!(self.is_marked(), marked);
            }
        }
    }

    pub fn is_marked(&self) -> bool {
        // We read the files of the thread with the highest id, since the main thread may have ended.
        let tid = tids(self.pid()).into_iter().max().unwrap();
        let smaps = fs::read_to_string(format!("/proc/{}/task/{tid}/smaps", self.pid())).unwrap();
        let start = format!("{:x}-", self.addr);
        let flags = smaps
            .lines()
            .skip_while(|line| !line.starts_with(&start))
            .find(|line| line.starts_with("VmFlags:"))
            .expect("the victim's memory");
        flags.split_whitespace().any(|flag| flag == "dd")
    }

    pub fn status(&self, field: &str) -> String {
        status_field(&format!("/proc/{}", self.pid()), field).unwrap_or_default()
    }

    pub fn is_traced(&self) -> bool {
        self.status("TracerPid") != "0"
    }

    /// Waits until the main thread is blocked in system call `nr`, or in the call that restarts it.
    pub fn wait_blocked(&self, nr: i64) {
        let (call, restart) = (format!("{nr} "), format!("{} ", libc::SYS_restart_syscall));
        wait_until("the victim is blocked", || {
            fs::read_to_string(format!("/proc/{}/syscall", self.pid()))
                .is_ok_and(|text| text.starts_with(&call) || text.starts_with(&restart))
        });
    }

    pub fn wait_state(&self, state: u8) {
        wait_until("the victim is in the state", || self.process.stat().is_ok_and(|stat| stat.state == state));
    }

    pub fn line(&mut self) -> String {
        self.program.line()
    }

    /// Sends the byte that the victim waits for.
    pub fn send(&mut self) {
        self.send_byte(b'x');
    }

    pub fn send_byte(&mut self, byte: u8) {
        // If the victim is dead, sending fails. The caller sees that by the line that's missing.
        let _ = self.program.input.write_all(&[byte]);
    }

    pub fn kill(&self, signal: i32) {
        // SAFETY: no memory is passed. We haven't waited for the victim.
        assert_eq!(unsafe { libc::kill(self.pid(), signal) }, 0);
    }

    /// Asserts that the victim has found nothing wrong: it prints `ok`, and perhaps counts.
    #[track_caller]
    pub fn expect_ok(&mut self, what: &str) {
        let line = self.line();
        assert!(line == "ok" || line.starts_with("ok "), "{what}: {line:?}");
    }

    /// Lets the victim end, and asserts that it has found nothing wrong.
    #[track_caller]
    pub fn finish(&mut self, what: &str) {
        self.send();
        self.expect_ok(what);
    }
}

pub fn pause_ms(ms: u64) {
    std::thread::sleep(Duration::from_millis(ms));
}

/// Writes a 32-bit program into `dir`, and starts it. It fills `pages` pages with numbers, the same in each such
/// program, and then blocks in pause(2). The error says why it can't run.
pub fn start_compat(dir: &Path, pages: u32) -> Result<OwnedChild, String> {
    const MEMORY: u32 = 0x1000_0000;
    let words = |words: &[u32]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<_>>();
    // mov edi, MEMORY; mov ecx, the number of words; mov eax, 1
    let mut code = [vec![0xbf], words(&[MEMORY]), vec![0xb9], words(&[pages * 1024]), vec![0xb8], words(&[1])].concat();
    // jecxz over the loop; stosd; imul eax, 1664525; add eax, 1013904223; loop
    code.extend([vec![0xe3, 14, 0xab, 0x69, 0xc0], words(&[1_664_525]), vec![0x05], words(&[1_013_904_223])].concat());
    code.extend([0xe2, 0xf2]);
    // mov eax, 29 (pause); int 0x80; jmp back.
    code.extend([0xb8, 29, 0, 0, 0, 0xcd, 0x80, 0xeb, 0xf7]);
    // The ELF header, and program headers of the code and the memory.
    let mut elf = vec![0x7f, b'E', b'L', b'F', 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 3, 0, 1, 0, 0, 0];
    elf.extend(words(&[0x0804_8074, 52, 0, 0, 0x0020_0034, 2, 0]));
    let size = 0x74 + u32::try_from(code.len()).unwrap();
    elf.extend(words(&[1, 0, 0x0804_8000, 0x0804_8000, size, size, 5, 4096]));
    elf.extend(words(&[1, 0, MEMORY, MEMORY, 0, pages.max(1) * 4096, 6, 4096]));
    elf.extend(code);
    let path = dir.join("compat");
    fs::write(&path, elf).unwrap();
    fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    Command::new(&path).spawn().map(OwnedChild).map_err(|error| format!("32-bit programs cannot run: {error}"))
}

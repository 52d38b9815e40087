//! Programs for the injection tests to work on. Each checks for itself that it noticed nothing.
//!
//! A victim prints `ready ADDR LEN`, does what its mode says, and prints `ok` or `bad: REASON`. Modes that block
//! do so twice: the first time the call must end as if nothing had been (its timeout, its event); before the second
//! the victim prints `again`, and a real SIGUSR1 must end the call with a real EINTR and one run of the handler.
#![allow(missing_docs, clippy::undocumented_unsafe_blocks, clippy::unnecessary_wraps, clippy::cast_ptr_alignment)] // A test program: raw calls are what it is for.

use std::arch::asm;
use std::io::{Read, Write};
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

const PAGES: usize = 64;
const WAIT_MS: i64 = 300;
const LONG_MS: i64 = 20_000;
const HARMLESS: u64 = 0xfeed_face_cafe_beef;

static HANDLED: AtomicU64 = AtomicU64::new(0);
static TRAPPED: AtomicI64 = AtomicI64::new(0);

extern "C" fn count(_signal: i32) {
    HANDLED.fetch_add(1, Ordering::Relaxed);
}

extern "C" fn trapped(_signal: i32, _info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let context = context.cast::<libc::ucontext_t>();
    TRAPPED.fetch_add(1, Ordering::Relaxed);
    unsafe { (*context).uc_mcontext.gregs[libc::REG_RAX as usize] = -1 };
}

fn main() {
    let mode = std::env::args().nth(1).expect("a mode");
    match mode.as_str() {
        "worker" => pagefold_linux::inject::serve(),
        "worker-filtered" => {
            filter(libc::SECCOMP_RET_ALLOW);
            pagefold_linux::inject::serve()
        }
        _ => {}
    }
    let memory = Memory::new();
    handle(libc::SIGUSR1, count as *const () as usize, 0);
    handle(libc::SIGTRAP, count as *const () as usize, 0);
    handle(libc::SIGRTMIN(), count as *const () as usize, libc::SA_RESTART);
    let before = signals();
    println!("ready {:x} {}", memory.addr as u64, PAGES * 4096);
    let verdict = run(&mode);
    let verdict = verdict.and_then(|()| {
        memory.check()?;
        if signals() == before { Ok(()) } else { Err("signal mask or handlers changed".into()) }
    });
    match verdict {
        Ok(()) => println!("ok"),
        Err(reason) => println!("bad: {reason}"),
    }
    // The test looks at this process until it says so.
    let _ = std::io::stdin().read(&mut [0]);
}

fn run(mode: &str) -> Result<(), String> {
    match mode {
        "busy" => busy(),
        "idle" => command().map(drop),
        "sleeper" => sleeper(),
        "stopped" => stopped(),
        "vfork" => vfork(),
        "big-write" => big_write(),
        "waitall" => waitall(),
        "threads" => threads(),
        "main-exit" => main_exit(),
        "queue" => queue(),
        "strict" => strict(),
        "filter-kill" => filtered(libc::SECCOMP_RET_KILL_PROCESS),
        "filter-errno" => filtered(libc::SECCOMP_RET_ERRNO | 1),
        "filter-trap" => filtered(libc::SECCOMP_RET_TRAP),
        "rseq" => rseq(),
        "churn" => churn(),
        "execs" => execs(),
        _ => blocking(mode),
    }
}

fn unsigned(number: i64) -> u64 {
    u64::from_ne_bytes(number.to_ne_bytes())
}

// ---- what is checked --------------------------------------------------------------------------------------------

struct Memory {
    addr: *mut u64,
}

impl Memory {
    fn new() -> Self {
        // A hole on either side, so that it stays a mapping of its own.
        let len = (PAGES + 2) * 4096;
        unsafe {
            let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
            let whole = libc::mmap(std::ptr::null_mut(), len, prot, flags, -1, 0).cast::<u8>();
            assert!(!whole.cast::<libc::c_void>().eq(&libc::MAP_FAILED));
            libc::munmap(whole.cast(), 4096);
            libc::munmap(whole.add(len - 4096).cast(), 4096);
            let addr = whole.add(4096).cast::<u64>();
            (0..PAGES * 512).for_each(|word| addr.add(word).write_volatile((word as u64).wrapping_mul(HARMLESS)));
            Self { addr }
        }
    }

    fn check(&self) -> Result<(), String> {
        let intact = (0..PAGES * 512)
            .all(|word| unsafe { self.addr.add(word).read_volatile() } == (word as u64).wrapping_mul(HARMLESS));
        if intact { Ok(()) } else { Err("memory changed".into()) }
    }
}

fn handle(signal: i32, handler: usize, flags: i32) {
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler;
        action.sa_flags = flags;
        libc::sigaction(signal, &raw const action, std::ptr::null_mut());
    }
}

/// The blocked signals and all handlers.
fn signals() -> (u64, Vec<usize>) {
    let mut mask = 0_u64;
    unsafe { libc::syscall(libc::SYS_rt_sigprocmask, 0, std::ptr::null::<u64>(), &raw mut mask, 8) };
    let handlers = (1..32)
        .map(|signal| unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            libc::sigaction(signal, std::ptr::null(), &raw mut action);
            action.sa_sigaction
        })
        .collect();
    (mask, handlers)
}

/// A system call that checks that every other register survives it.
fn call(nr: i64, args: [u64; 6]) -> Result<i64, String> {
    let mut answer = nr;
    let mut after = args;
    let kept: [u64; 4] = [11, 22, 33, 44].map(|seed: u64| seed.wrapping_mul(HARMLESS));
    let mut seen = kept;
    let floats = [1.25_f64, -2.5, 1e300];
    let mut floats_seen = floats;
    unsafe {
        asm!("syscall",
            inlateout("rax") answer, inlateout("rdi") after[0], inlateout("rsi") after[1],
            inlateout("rdx") after[2], inlateout("r10") after[3], inlateout("r8") after[4], inlateout("r9") after[5],
            inlateout("r12") seen[0], inlateout("r13") seen[1], inlateout("r14") seen[2], inlateout("r15") seen[3],
            inlateout("xmm0") floats_seen[0], inlateout("xmm7") floats_seen[1], inlateout("xmm15") floats_seen[2],
            out("rcx") _, out("r11") _);
    }
    if after != args || seen != kept || floats_seen.map(f64::to_bits) != floats.map(f64::to_bits) {
        return Err(format!("registers changed: {after:x?} {seen:x?} {floats_seen:?} after {args:x?}"));
    }
    if (-4095..-133).contains(&answer) { Err(format!("leaked errno {answer}")) } else { Ok(answer) }
}

// ---- blocked in a call ------------------------------------------------------------------------------------------

/// What a blocking mode does: once with a timeout or an event, once for long.
struct Blocking {
    nr: i64,
    args: Box<dyn Fn(i64) -> [u64; 6]>,
    /// Makes the event, in a child, after the wait.
    event: Option<Box<dyn Fn()>>,
    answer: i64,
    /// Removes what outlives the process.
    remove: Box<dyn Fn()>,
}

fn ptr<T>(value: T) -> u64 {
    std::ptr::from_mut(Box::leak(Box::new(value))) as u64
}

fn timespec(ms: i64) -> u64 {
    ptr(libc::timespec { tv_sec: ms / 1000, tv_nsec: ms % 1000 * 1_000_000 })
}

fn pipe() -> [i32; 2] {
    let mut ends = [0; 2];
    assert_eq!(unsafe { libc::pipe(ends.as_mut_ptr()) }, 0);
    ends
}

fn word(fd: i32) -> u64 {
    u64::from(fd.unsigned_abs())
}

fn polled(fd: i32) -> u64 {
    ptr(libc::pollfd { fd, events: libc::POLLIN, revents: 0 })
}

fn fd_set(fd: i32) -> u64 {
    unsafe {
        let mut set: libc::fd_set = std::mem::zeroed();
        libc::FD_SET(fd, &raw mut set);
        ptr(set)
    }
}

fn epoll(fd: i32) -> i32 {
    unsafe {
        let epoll = libc::epoll_create1(0);
        let mut event = libc::epoll_event { events: 1, u64: 0 };
        libc::epoll_ctl(epoll, libc::EPOLL_CTL_ADD, fd, &raw mut event);
        epoll
    }
}

fn buffer() -> u64 {
    ptr([0_u8; 4096])
}

#[allow(clippy::too_many_lines)]
fn blocking_mode(mode: &str) -> Result<Blocking, String> {
    let [reader, writer] = pipe();
    let timed = |nr: i64, answer: i64, args: Box<dyn Fn(i64) -> [u64; 6]>| Blocking {
        nr,
        args,
        event: None,
        answer,
        remove: Box::new(|| {}),
    };
    let usr1 = 1_u64 << (libc::SIGUSR1 - 1);
    Ok(match mode {
        "nanosleep" => timed(libc::SYS_nanosleep, 0, Box::new(|ms| [timespec(ms), ptr([0_u64; 2]), 0, 0, 0, 0])),
        "futex" => timed(libc::SYS_futex, -110, Box::new(|ms| [ptr(5_u32), 128, 5, timespec(ms), 0, 0])),
        "poll" => timed(libc::SYS_poll, 0, Box::new(move |ms| [polled(reader), 1, unsigned(ms), 0, 0, 0])),
        "ppoll" => timed(libc::SYS_ppoll, 0, Box::new(move |ms| [polled(reader), 1, timespec(ms), 0, 0, 0])),
        // SIGUSR1 is blocked but for the time of the call.
        "ppoll-mask" | "epoll-pwait" => {
            unsafe { libc::syscall(libc::SYS_rt_sigprocmask, libc::SIG_BLOCK, &raw const usr1, 0, 8) };
            if mode == "ppoll-mask" {
                timed(libc::SYS_ppoll, 0, Box::new(move |ms| [polled(reader), 1, timespec(ms), ptr(0_u64), 8, 0]))
            } else {
                let events = buffer();
                let epoll = word(epoll(reader));
                let args = move |ms: i64| [epoll, events, 8, unsigned(ms), ptr(0_u64), 8];
                timed(libc::SYS_epoll_pwait, 0, Box::new(args))
            }
        }
        "select" => timed(
            libc::SYS_select,
            0,
            Box::new(move |ms| {
                let timeout = ptr(libc::timeval { tv_sec: ms / 1000, tv_usec: ms % 1000 * 1000 });
                [word(reader + 1), fd_set(reader), 0, 0, timeout, 0]
            }),
        ),
        "pselect" => {
            timed(libc::SYS_pselect6, 0, Box::new(move |ms| [word(reader + 1), fd_set(reader), 0, 0, timespec(ms), 0]))
        }
        "read-pipe" => Blocking {
            nr: libc::SYS_read,
            args: Box::new(move |_| [word(reader), buffer(), 100, 0, 0, 0]),
            event: Some(Box::new(move || unsafe {
                libc::write(writer, [7_u8; 3].as_ptr().cast(), 3);
            })),
            answer: 3,
            remove: Box::new(|| {}),
        },
        "wait4" => Blocking {
            nr: libc::SYS_wait4,
            args: Box::new(|ms| {
                if ms == LONG_MS {
                    forked(|| std::thread::sleep(std::time::Duration::from_millis(unsigned(LONG_MS))));
                }
                [u64::MAX, 0, 0, 0, 0, 0]
            }),
            event: Some(Box::new(|| {})),
            answer: i64::MAX,
            remove: Box::new(|| {}),
        },
        "inotify" => {
            let dir = format!("/tmp/victim-{}", std::process::id());
            std::fs::create_dir_all(&dir).map_err(|error| error.to_string())?;
            let fd = unsafe { libc::inotify_init1(0) };
            let path = std::ffi::CString::new(dir.clone()).map_err(|error| error.to_string())?;
            unsafe { libc::inotify_add_watch(fd, path.as_ptr(), libc::IN_DELETE_SELF) };
            Blocking {
                nr: libc::SYS_read,
                args: Box::new(move |_| [word(fd), buffer(), 100, 0, 0, 0]),
                event: Some(Box::new(move || drop(std::fs::remove_dir(&dir)))),
                answer: i64::MAX,
                remove: Box::new(|| {}),
            }
        }
        "msgrcv" => {
            let queue = unsafe { libc::msgget(libc::IPC_PRIVATE, 0o600) };
            Blocking {
                nr: libc::SYS_msgrcv,
                args: Box::new(move |_| [word(queue), buffer(), 100, 0, 0, 0]),
                event: Some(Box::new(move || unsafe {
                    libc::msgsnd(queue, ptr([1_u64, 2]) as *const libc::c_void, 8, 0);
                })),
                answer: 8,
                remove: Box::new(move || unsafe {
                    libc::msgctl(queue, libc::IPC_RMID, std::ptr::null_mut());
                }),
            }
        }
        "epoll" => {
            let (events, epoll) = (buffer(), word(epoll(reader)));
            timed(libc::SYS_epoll_wait, 0, Box::new(move |ms| [epoll, events, 8, unsigned(ms), 0, 0]))
        }
        "sigtimedwait" => {
            let usr2 = 1_u64 << (libc::SIGUSR2 - 1);
            unsafe { libc::syscall(libc::SYS_rt_sigprocmask, libc::SIG_BLOCK, &raw const usr2, 0, 8) };
            timed(libc::SYS_rt_sigtimedwait, -11, Box::new(move |ms| [ptr(usr2), 0, timespec(ms), 8, 0, 0]))
        }
        "semtimedop" => {
            let semaphores = unsafe { libc::semget(libc::IPC_PRIVATE, 1, 0o600) };
            let operation = ptr(libc::sembuf { sem_num: 0, sem_op: -1, sem_flg: 0 });
            let args = move |ms| [word(semaphores), operation, 1, timespec(ms), 0, 0];
            let remove = Box::new(move || unsafe {
                libc::semctl(semaphores, 0, libc::IPC_RMID);
            });
            Blocking { remove, ..timed(libc::SYS_semtimedop, -11, Box::new(args)) }
        }
        "io-getevents" => {
            let mut context = 0_u64;
            if unsafe { libc::syscall(libc::SYS_io_setup, 4, &raw mut context) } != 0 {
                return Err("skip: io_setup is not permitted".into());
            }
            timed(libc::SYS_io_getevents, 0, Box::new(move |ms| [context, 1, 1, buffer(), timespec(ms), 0]))
        }
        "recv-timeout" => {
            let mut pair = [0; 2];
            unsafe { libc::socketpair(libc::AF_UNIX, libc::SOCK_STREAM, 0, pair.as_mut_ptr()) };
            let args = move |ms: i64| {
                let timeout = libc::timeval { tv_sec: ms / 1000, tv_usec: ms % 1000 * 1000 };
                unsafe {
                    let value = (&raw const timeout).cast();
                    libc::setsockopt(pair[0], libc::SOL_SOCKET, libc::SO_RCVTIMEO, value, 16);
                }
                [word(pair[0]), buffer(), 100, 0, 0, 0]
            };
            timed(libc::SYS_recvfrom, -11, Box::new(args))
        }
        "io-uring" => {
            let mut params = [0_u32; 32];
            let ring = unsafe { libc::syscall(libc::SYS_io_uring_setup, 4, params.as_mut_ptr()) };
            if ring < 0 {
                return Err("skip: io_uring_setup is not permitted".into());
            }
            // GETEVENTS with an extended argument that holds a timeout.
            let args = move |ms| [unsigned(ring), 0, 1, 1 | 8, ptr([0, 0, timespec(ms)]), 24];
            timed(libc::SYS_io_uring_enter, -62, Box::new(args))
        }
        other => return Err(format!("no such mode: {other}")),
    })
}

fn forked(child: impl FnOnce()) -> i32 {
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
        child();
        unsafe { libc::_exit(0) };
    }
    pid
}

fn blocking(mode: &str) -> Result<(), String> {
    let what = blocking_mode(mode)?;
    let verdict = block_twice(mode, &what);
    (what.remove)();
    verdict
}

fn block_twice(mode: &str, what: &Blocking) -> Result<(), String> {
    let before = signals();
    let args = (what.args)(WAIT_MS);
    let child = what.event.as_ref().map_or(0, |event| {
        forked(|| {
            unsafe { libc::usleep(u32::try_from(WAIT_MS).unwrap_or(0) * 1000) };
            event();
        })
    });
    println!("blocking {}", what.nr);
    let answer = call(what.nr, args)?;
    let expected = match what.answer {
        i64::MAX if mode == "wait4" => answer == i64::from(child),
        i64::MAX => answer > 0,
        exactly => answer == exactly,
    };
    if !expected {
        return Err(format!("answered {answer}, not {}", what.answer));
    }
    if mode != "wait4" && child > 0 {
        unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) };
    }
    if HANDLED.load(Ordering::Relaxed) != 0 {
        return Err("a handler ran that nobody asked for".into());
    }
    if mode == "inotify" {
        return signals_back(&before);
    }
    let args = (what.args)(LONG_MS);
    println!("again");
    let answer = call(what.nr, args)?;
    let handled = HANDLED.load(Ordering::Relaxed);
    if answer != -4 || handled != 1 {
        return Err(format!("a real signal: answered {answer}, not -4, and the handler ran {handled} times"));
    }
    signals_back(&before)?;
    // The mode's own mask; `main` compares with the one before it.
    unsafe { libc::syscall(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, &raw const NONE, 0, 8) };
    Ok(())
}

static NONE: u64 = 0;

fn signals_back(before: &(u64, Vec<usize>)) -> Result<(), String> {
    if signals() == *before { Ok(()) } else { Err("signal mask or handlers changed".into()) }
}

// ---- other states -----------------------------------------------------------------------------------------------

/// Waits for a byte on standard input.
fn command() -> Result<u8, String> {
    let mut byte = 0_u8;
    match call(libc::SYS_read, [0, &raw mut byte as u64, 1, 0, 0, 0])? {
        1 => Ok(byte),
        other => Err(format!("reading standard input answered {other}")),
    }
}

fn mix(rounds: u64) -> u64 {
    (0..rounds).fold(HARMLESS, |state, round| {
        let state = state ^ (state << 13);
        let state = state ^ (state >> 7);
        (state ^ (state << 17)).wrapping_add(round)
    })
}

fn busy() -> Result<(), String> {
    let expected = mix(std::hint::black_box(20_000_000));
    let until = std::time::Instant::now() + std::time::Duration::from_millis(700);
    while std::time::Instant::now() < until {
        if mix(std::hint::black_box(20_000_000)) != expected {
            return Err("a computation went wrong".into());
        }
    }
    Ok(())
}

/// Sleeps for ever, in naps.
fn sleeper() -> Result<(), String> {
    loop {
        match call(libc::SYS_nanosleep, [timespec(LONG_MS), 0, 0, 0, 0, 0])? {
            0 => {}
            other => return Err(format!("nanosleep answered {other}")),
        }
    }
}

fn stopped() -> Result<(), String> {
    unsafe { libc::raise(libc::SIGSTOP) };
    Ok(())
}

fn vfork() -> Result<(), String> {
    let pid = unsafe { libc::syscall(libc::SYS_clone, libc::CLONE_VFORK | libc::SIGCHLD, 0, 0, 0, 0) };
    if pid == 0 {
        unsafe {
            libc::usleep(800_000);
            libc::_exit(0);
        }
    }
    let reaped = call(libc::SYS_wait4, [u64::MAX, 0, 0, 0, 0, 0])?;
    if reaped == pid { Ok(()) } else { Err(format!("wait4 answered {reaped}, not {pid}")) }
}

fn big_write() -> Result<(), String> {
    let [reader, writer] = pipe();
    let bytes = vec![7_u8; 1 << 20];
    forked(|| unsafe {
        libc::close(writer);
        libc::usleep(600_000);
        let mut buffer = vec![0_u8; 1 << 16];
        while libc::read(reader, buffer.as_mut_ptr().cast(), buffer.len()) > 0 {}
    });
    match call(libc::SYS_write, [word(writer), bytes.as_ptr() as u64, 1 << 20, 0, 0, 0])? {
        0x10_0000 => Ok(()),
        other => Err(format!("a write of 1 MiB answered {other}")),
    }
}

/// A receive that must not be cut short, and a thread that may be stopped instead.
fn waitall() -> Result<(), String> {
    let mut pair = [0; 2];
    unsafe { libc::socketpair(libc::AF_UNIX, libc::SOCK_STREAM, 0, pair.as_mut_ptr()) };
    unsafe { libc::write(pair[1], [0_u8; 5].as_ptr().cast(), 5) };
    for _ in 0..2 {
        std::thread::spawn(|| call(libc::SYS_nanosleep, [timespec(LONG_MS), 0, 0, 0, 0, 0]));
    }
    std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_millis(600));
        unsafe { libc::write(pair[1], [0_u8; 5].as_ptr().cast(), 5) };
    });
    let all = u64::from(libc::MSG_WAITALL.unsigned_abs());
    match call(libc::SYS_recvfrom, [word(pair[0]), buffer(), 10, all, 0, 0])? {
        10 => Ok(()),
        other => Err(format!("a receive of 10 bytes answered {other}")),
    }
}

fn threads() -> Result<(), String> {
    let workers: Vec<_> = (0..6).map(|_| std::thread::spawn(busy)).collect();
    workers.into_iter().try_for_each(|worker| worker.join().map_err(|_| "a thread panicked".to_owned())?)
}

/// The main thread ends; another one goes on.
fn main_exit() -> Result<(), String> {
    std::thread::spawn(|| {
        let verdict = command().map_or_else(|reason| format!("bad: {reason}"), |_| "ok".to_owned());
        println!("{verdict}");
        let _ = std::io::stdout().flush();
        unsafe { libc::syscall(libc::SYS_exit_group, 0) };
    });
    unsafe { libc::syscall(libc::SYS_exit, 0) };
    Ok(())
}

/// Counts queued real-time signals, none of which may be lost or doubled, until a byte comes; says how many.
fn queue() -> Result<(), String> {
    command()?;
    println!("counted {}", HANDLED.load(Ordering::Relaxed));
    Ok(())
}

fn strict() -> Result<(), String> {
    unsafe { libc::prctl(libc::PR_SET_SECCOMP, 1, 0, 0, 0) };
    command()?;
    // Only read, write, exit and sigreturn are permitted: printing is a write.
    unsafe { libc::write(1, b"ok\n".as_ptr().cast(), 3) };
    unsafe { libc::madvise(std::ptr::null_mut(), 0, 0) };
    unsafe { libc::write(1, b"bad: unfiltered\n".as_ptr().cast(), 16) };
    Ok(())
}

/// Under a filter that answers `action` to madvise.
fn filtered(action: u32) -> Result<(), String> {
    handle(libc::SIGSYS, trapped as *const () as usize, libc::SA_SIGINFO);
    let before = signals();
    if !filter(action) {
        return Err("skip: seccomp filters are not permitted".into());
    }
    println!("filtered");
    command()?;
    signals_back(&before)?;
    if TRAPPED.load(Ordering::Relaxed) != 0 {
        return Err("the injected call ran into the filter".into());
    }
    if action == libc::SECCOMP_RET_KILL_PROCESS {
        println!("ok");
    }
    let own = unsafe { libc::madvise(std::ptr::null_mut(), 0, libc::MADV_NORMAL) };
    handle(libc::SIGSYS, libc::SIG_DFL, 0);
    let back = if action == libc::SECCOMP_RET_TRAP { TRAPPED.load(Ordering::Relaxed) == 1 } else { own == -1 };
    if back { Ok(()) } else { Err("the filter is gone".into()) }
}

/// Installs a filter that answers `action` to madvise and lets all else through.
fn filter(action: u32) -> bool {
    let instruction =
        |code: u32, jt: u8, jf: u8, k: u32| libc::sock_filter { code: u16::try_from(code).unwrap_or(0), jt, jf, k };
    let mut program = [
        instruction(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        instruction(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, 28),
        instruction(libc::BPF_RET | libc::BPF_K, 0, 0, action),
        instruction(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: 4, filter: program.as_mut_ptr() };
    unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) == 0
    }
}

unsafe extern "C" {
    /// Where glibc registered restartable sequences, from the thread pointer.
    static __rseq_offset: isize;
    static __rseq_size: u32;
}

/// Half of the time in a restartable sequence. The kernel forgets a sequence it has aborted or found left; one that
/// comes to its end and is forgotten was interrupted without being aborted.
fn rseq() -> Result<(), String> {
    let (mut aborted, mut lost) = (0_u64, 0_u64);
    let area: u64;
    unsafe {
        if __rseq_size == 0 {
            return Err("skip: no restartable sequences".into());
        }
        let thread: u64;
        asm!("mov {}, fs:0", out(reg) thread);
        area = thread.wrapping_add_signed(__rseq_offset as i64);
    }
    let until = std::time::Instant::now() + std::time::Duration::from_millis(1500);
    while std::time::Instant::now() < until {
        unsafe {
            asm!(
                ".pushsection .data.rel.rseq, \"aw\"",
                ".balign 32",
                "7: .long 0, 0",
                ".quad 3f, 4f - 3f, 5f",
                ".popsection",
                "lea {t}, [rip + 7b]",
                "mov [{area} + 8], {t}",
                "3: mov {t}, 100000",
                "6: dec {t}",
                "jnz 6b",
                "cmp qword ptr [{area} + 8], 0",
                "jne 4f",
                "inc {lost}",
                "4: jmp 8f",
                ".byte 0x0f, 0xb9, 0x3d",
                ".long 0x53053053",
                "5: inc {aborted}",
                "8: mov {t}, 100000",
                "9: dec {t}",
                "jnz 9b",
                area = in(reg) area, t = out(reg) _, lost = inout(reg) lost, aborted = inout(reg) aborted,
            );
        }
    }
    println!("aborted {aborted} lost {lost}");
    if lost == 0 { Ok(()) } else { Err(format!("{lost} sequences went on after an interruption")) }
}

/// Threads that come and go, and forks.
fn churn() -> Result<(), String> {
    let until = std::time::Instant::now() + std::time::Duration::from_millis(1500);
    while std::time::Instant::now() < until {
        let thread = std::thread::spawn(|| mix(1000));
        let child = forked(|| {});
        let reaped = unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) };
        if reaped != child {
            return Err(format!("waitpid answered {reaped}"));
        }
        if thread.join().is_err() {
            return Err("a thread panicked".into());
        }
    }
    Ok(())
}

/// Becomes itself again and again, from the main thread and from others.
fn execs() -> Result<(), String> {
    use std::os::unix::process::CommandExt;
    let left: u32 = std::env::args().nth(2).and_then(|left| left.parse().ok()).unwrap_or(60);
    if left == 0 {
        return Ok(());
    }
    let again = move || {
        let error = std::process::Command::new("/proc/self/exe").args(["execs", &(left - 1).to_string()]).exec();
        format!("exec: {error}")
    };
    let idle = || drop(call(libc::SYS_nanosleep, [timespec(LONG_MS), 0, 0, 0, 0, 0]));
    std::thread::spawn(idle);
    std::thread::sleep(std::time::Duration::from_millis(3));
    Err(if left % 2 == 0 { again() } else { std::thread::spawn(again).join().unwrap_or_default() })
}

//! Modes that block in a system call, twice: until its timeout or event, and until a real signal.

use crate::checks::{HANDLED, LONG_MS, WAIT_MS, signals, signals_back, unsigned};
use crate::hold::call;
use std::sync::atomic::Ordering;

/// A blocking call: made first with a short timeout or an event, then with a long timeout.
pub struct Blocking {
    pub nr: i64,
    pub args: Box<dyn Fn(i64) -> [u64; 6]>,
    /// Makes the event that ends the first call, in a child.
    event: Option<Box<dyn Fn()>>,
    answer: i64,
    /// Removes what outlives the process.
    remove: Box<dyn Fn()>,
}

pub fn ptr<T>(value: T) -> u64 {
    std::ptr::from_mut(Box::leak(Box::new(value))) as u64
}

pub fn timespec(ms: i64) -> u64 {
    ptr(libc::timespec { tv_sec: ms / 1000, tv_nsec: ms % 1000 * 1_000_000 })
}

pub fn pipe() -> [i32; 2] {
    let mut ends = [0; 2];
    assert_eq!(unsafe { libc::pipe(ends.as_mut_ptr()) }, 0);
    ends
}

pub fn word(fd: i32) -> u64 {
    u64::from(fd.unsigned_abs())
}

pub fn polled(fd: i32) -> u64 {
    ptr(libc::pollfd { fd, events: libc::POLLIN, revents: 0 })
}

pub fn fd_set(fd: i32) -> u64 {
    unsafe {
        let mut set: libc::fd_set = std::mem::zeroed();
        libc::FD_SET(fd, &raw mut set);
        ptr(set)
    }
}

pub fn epoll(fd: i32) -> i32 {
    unsafe {
        let epoll = libc::epoll_create1(0);
        let mut event = libc::epoll_event { events: 1, u64: 0 };
        libc::epoll_ctl(epoll, libc::EPOLL_CTL_ADD, fd, &raw mut event);
        epoll
    }
}

pub fn buffer() -> u64 {
    ptr([0_u8; 4096])
}

#[allow(clippy::too_many_lines)]
pub fn blocking_mode(mode: &str) -> Result<Blocking, String> {
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

pub fn forked(child: impl FnOnce()) -> i32 {
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
        child();
        unsafe { libc::_exit(0) };
    }
    pid
}

pub fn blocking(mode: &str) -> Result<(), String> {
    let what = blocking_mode(mode)?;
    let verdict = block_twice(mode, &what);
    (what.remove)();
    verdict
}

pub fn block_twice(mode: &str, what: &Blocking) -> Result<(), String> {
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
        return Err("an unexpected handler ran".into());
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
    // Undoes the mask of the mode: `main` compares with the one before it.
    unsafe { libc::syscall(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, &raw const NONE, 0, 8) };
    Ok(())
}

pub static NONE: u64 = 0;

//! The system calls that victims block in.

use crate::blocking::{epoll, forked, pipe, word};
use crate::checks::unsigned;
use crate::handlers::{self, STORM, bit};
use crate::system::{WRITABLE, map};
use std::sync::atomic::{AtomicU32, Ordering};

/// The timeout of a call, in milliseconds.
const TIMEOUT_MS: i64 = 30;
const EAGAIN: i64 = -11;
const ETIME: i64 = -62;
const ETIMEDOUT: i64 = -110;

type Args = Box<dyn FnMut() -> [u64; 6]>;
type After = Box<dyn FnMut(i64) -> Result<(), String>>;

/// A call that we can make again and again.
pub struct Kind {
    pub nr: i64,
    pub args: Args,
    /// Judges any answer but EINTR.
    pub after: After,
    /// Whether the kernel restarts the call after a handler with SA_RESTART.
    pub restarts: bool,
    /// Whether we unblock the counted signals only while the call waits. Then each of their handlers means an EINTR.
    pub masked: bool,
    /// Removes what would outlive the process.
    pub remove: Box<dyn Fn()>,
}

impl Kind {
    fn new(nr: i64, after: After, args: Args) -> Self {
        Self { nr, args, after, restarts: false, masked: false, remove: Box::new(|| {}) }
    }
}

/// Memory for a call's argument. It lives for ever, and we may write it before each call.
struct Place<T>(*mut T);

impl<T: 'static> Place<T> {
    fn new(value: T) -> Self {
        Self(Box::leak(Box::new(value)))
    }

    fn set(&self, value: T) -> u64 {
        unsafe { self.0.write(value) };
        self.addr()
    }

    fn addr(&self) -> u64 {
        self.0.addr() as u64
    }
}

struct Timeout(Place<libc::timespec>);

impl Timeout {
    fn new() -> Self {
        Self(Place::new(libc::timespec { tv_sec: 0, tv_nsec: 0 }))
    }

    fn set(&self) -> u64 {
        self.0.set(libc::timespec { tv_sec: 0, tv_nsec: TIMEOUT_MS * 1_000_000 })
    }
}

/// Starts a child that makes an event every few milliseconds, as long as this process lives.
pub fn feed(mut event: impl FnMut(u8)) {
    let parent = unsafe { libc::getpid() };
    forked(move || {
        handlers::mask(!0);
        for round in 0_u64.. {
            if unsafe { libc::getppid() } != parent {
                break;
            }
            unsafe { libc::usleep(5000 + u32::try_from(round * 7 % 5).unwrap_or(0) * 2000) };
            event(u8::try_from(round % 256).unwrap_or(0));
        }
    });
}

fn sleep_ms(ms: i64) {
    std::thread::sleep(std::time::Duration::from_millis(unsigned(ms)));
}

fn feed_bytes(fd: i32) {
    feed(move |byte| unsafe {
        libc::write(fd, (&raw const byte).cast(), 1);
    });
}

/// Checks that the bytes of [`feed_bytes`] arrive in order.
#[derive(Default)]
struct Order(u8);

impl Order {
    fn check(&mut self, bytes: &[u8]) -> Result<(), String> {
        for &byte in bytes {
            if byte != self.0 {
                return Err(format!("byte {byte} came instead of {}", self.0));
            }
            self.0 = self.0.wrapping_add(1);
        }
        Ok(())
    }
}

fn exactly(expected: i64) -> After {
    Box::new(move |answer| if answer == expected { Ok(()) } else { Err(format!("answered {answer}, not {expected}")) })
}

fn either(a: i64, b: i64) -> After {
    Box::new(move |answer| match answer {
        answer if answer == a || answer == b => Ok(()),
        answer => Err(format!("answered {answer}, not {a} or {b}")),
    })
}

/// Accepts an answer of ready or timed out. If ready, reads the bytes, which must be the next ones.
fn drained(fd: i32) -> After {
    let mut order = Order::default();
    unsafe { libc::fcntl(fd, libc::F_SETFL, libc::O_NONBLOCK) };
    Box::new(move |answer| match answer {
        0 => Ok(()),
        1 => {
            let mut bytes = [0_u8; 256];
            let read = unsafe { libc::read(fd, bytes.as_mut_ptr().cast(), 256) };
            let read = usize::try_from(read).map_err(|_| "ready, but there was nothing to read")?;
            order.check(&bytes[..read])
        }
        other => Err(format!("answered {other}, not 0 or 1")),
    })
}

fn ordered(buffer: *mut [u8; 256]) -> After {
    let mut order = Order::default();
    Box::new(move |answer| match usize::try_from(answer) {
        Ok(read @ 1..=256) => order.check(unsafe { &(&*buffer)[..read] }),
        _ => Err(format!("answered {answer}, not a number of bytes")),
    })
}

pub fn sockets() -> [i32; 2] {
    let mut pair = [0; 2];
    assert_eq!(unsafe { libc::socketpair(libc::AF_UNIX, libc::SOCK_STREAM, 0, pair.as_mut_ptr()) }, 0);
    pair
}

pub fn limit(fd: i32, ms: i64) {
    let timeout = libc::timeval { tv_sec: ms / 1000, tv_usec: ms % 1000 * 1000 };
    unsafe { libc::setsockopt(fd, libc::SOL_SOCKET, libc::SO_RCVTIMEO, (&raw const timeout).cast(), 16) };
}

/// Sets the timeout of a socket before each call.
fn limited(fd: i32, args: impl Fn() -> [u64; 6] + 'static) -> Args {
    Box::new(move || {
        limit(fd, TIMEOUT_MS);
        args()
    })
}

fn shared_word() -> &'static AtomicU32 {
    unsafe { &*map(4096, WRITABLE, libc::MAP_SHARED | libc::MAP_ANONYMOUS, -1).cast::<AtomicU32>() }
}

fn count_up(word: &'static AtomicU32) {
    feed(move |_| {
        word.fetch_add(1, Ordering::SeqCst);
        unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, 9) };
    });
}

/// Blocks the counted signals and SIGUSR1. Returns the address of a mask that unblocks them, for the call.
fn masked() -> u64 {
    handlers::mask(STORM | bit(libc::SIGUSR1));
    Place::new(0_u64).addr()
}

pub fn kind(mode: &str) -> Result<Kind, String> {
    let make = |nr: i64, after: After, args: Args| {
        let masked = mode.ends_with("-mask") || mode == "sigsuspend";
        Kind { masked, ..Kind::new(nr, after, args) }
    };
    let restarting = |nr, after, args| Kind { restarts: true, ..make(nr, after, args) };
    let timeout = Timeout::new();
    let buffer = Place::new([0_u8; 256]);
    let bytes = buffer.0;
    let buffer = buffer.addr();
    let mask = if mode.ends_with("-mask") { masked() } else { 0 };
    let piped = || {
        let [reader, writer] = pipe();
        feed_bytes(writer);
        reader
    };
    Ok(match mode {
        "nanosleep" => {
            let rest = Place::new([0_u64; 2]).addr();
            make(libc::SYS_nanosleep, exactly(0), Box::new(move || [timeout.set(), rest, 0, 0, 0, 0]))
        }
        "clock-nanosleep" => {
            make(libc::SYS_clock_nanosleep, exactly(0), Box::new(move || [1, 0, timeout.set(), 0, 0, 0]))
        }
        "futex-timeout" => {
            let word = Place::new(5_u32).addr();
            make(libc::SYS_futex, exactly(ETIMEDOUT), Box::new(move || [word, 128, 5, timeout.set(), 0, 0]))
        }
        "futex" => {
            let word = shared_word();
            count_up(word);
            let args = move || [word.as_ptr().addr() as u64, 0, u64::from(word.load(Ordering::SeqCst)), 0, 0, 0];
            restarting(libc::SYS_futex, either(0, EAGAIN), Box::new(args))
        }
        "futex-waitv" => {
            let word = shared_word();
            count_up(word);
            let waiter = Place::new([0_u64; 3]);
            // struct futex_waitv: value, address, size 32.
            let args = move || {
                let value = u64::from(word.load(Ordering::SeqCst));
                [waiter.set([value, word.as_ptr().addr() as u64, 2]), 1, 0, 0, 0, 0]
            };
            restarting(libc::SYS_futex_waitv, either(0, EAGAIN), Box::new(args))
        }
        "poll" | "ppoll" | "ppoll-mask" => {
            let fd = piped();
            let polled = Place::new(libc::pollfd { fd, events: libc::POLLIN, revents: 0 });
            let set = move || polled.set(libc::pollfd { fd, events: libc::POLLIN, revents: 0 });
            if mode == "poll" {
                make(libc::SYS_poll, drained(fd), Box::new(move || [set(), 1, unsigned(TIMEOUT_MS), 0, 0, 0]))
            } else {
                make(libc::SYS_ppoll, drained(fd), Box::new(move || [set(), 1, timeout.set(), mask, 8, 0]))
            }
        }
        "select" | "pselect" | "pselect-mask" => {
            let fd = piped();
            let mut readable: libc::fd_set = unsafe { std::mem::zeroed() };
            unsafe { libc::FD_SET(fd, &raw mut readable) };
            let set = Place::new(readable);
            let until = Place::new([0_i64; 2]);
            let sets = Place::new([mask, 8]).addr();
            if mode == "select" {
                let args = move || {
                    let until = until.set([0, TIMEOUT_MS * 1000]);
                    [word(fd + 1), set.set(readable), 0, 0, until, 0]
                };
                make(libc::SYS_select, drained(fd), Box::new(args))
            } else {
                let args = move || [word(fd + 1), set.set(readable), 0, 0, timeout.set(), sets];
                make(libc::SYS_pselect6, drained(fd), Box::new(args))
            }
        }
        "epoll" | "epoll-pwait-mask" | "epoll-pwait2" => {
            let fd = piped();
            let epoll = word(epoll(fd));
            if mode == "epoll-pwait2" {
                let args = move || [epoll, buffer, 8, timeout.set(), 0, 0];
                return Ok(make(libc::SYS_epoll_pwait2, drained(fd), Box::new(args)));
            }
            let nr = if mode == "epoll" { libc::SYS_epoll_wait } else { libc::SYS_epoll_pwait };
            make(nr, drained(fd), Box::new(move || [epoll, buffer, 8, unsigned(TIMEOUT_MS), mask, 8]))
        }
        "read-pipe" => {
            let fd = word(piped());
            restarting(libc::SYS_read, ordered(bytes), Box::new(move || [fd, buffer, 256, 0, 0, 0]))
        }
        "readv" => {
            let fd = word(piped());
            let vector = Place::new([buffer, 256]).addr();
            restarting(libc::SYS_readv, ordered(bytes), Box::new(move || [fd, vector, 1, 0, 0, 0]))
        }
        "eventfd" => {
            let fd = unsafe { libc::eventfd(0, 0) };
            feed(move |_| unsafe {
                libc::eventfd_write(fd, 1);
            });
            restarting(libc::SYS_read, exactly(8), Box::new(move || [word(fd), buffer, 8, 0, 0, 0]))
        }
        "recv" | "recv-timeout" => {
            let [reader, writer] = sockets();
            feed_bytes(writer);
            let args = move || [word(reader), buffer, 256, 0, 0, 0];
            if mode == "recv" {
                return Ok(restarting(libc::SYS_recvfrom, ordered(bytes), Box::new(args)));
            }
            let mut ordered = ordered(bytes);
            // Times out if the feeder doesn't run in time.
            let after: After = Box::new(move |answer| if answer == EAGAIN { Ok(()) } else { ordered(answer) });
            make(libc::SYS_recvfrom, after, limited(reader, args))
        }
        "recv-silent" => {
            let [reader, _writer] = sockets();
            let args = limited(reader, move || [word(reader), buffer, 256, 0, 0, 0]);
            make(libc::SYS_recvfrom, exactly(EAGAIN), args)
        }
        "recvmsg" => {
            let [reader, writer] = sockets();
            feed_bytes(writer);
            let vector = Place::new([buffer, 256]).addr();
            // struct msghdr: no name, one vector.
            let header = Place::new([0_u64; 7]);
            let args = move || [word(reader), header.set([0, 0, vector, 1, 0, 0, 0]), 0, 0, 0, 0];
            restarting(libc::SYS_recvmsg, ordered(bytes), Box::new(args))
        }
        "accept" | "accept-timeout" => accepting(mode == "accept-timeout")?,
        "wait4" | "waitid" => children(mode == "wait4"),
        "inotify" => {
            let dir = std::env::temp_dir().join(format!("pagefold-torture-{}", std::process::id()));
            std::fs::create_dir(&dir).map_err(|error| error.to_string())?;
            let path = std::ffi::CString::new(dir.to_str().unwrap_or_default()).unwrap_or_default();
            let fd = unsafe { libc::inotify_init() };
            unsafe { libc::inotify_add_watch(fd, path.as_ptr(), libc::IN_CREATE) };
            let file = dir.join("event");
            feed(move |_| {
                let _ = std::fs::write(&file, "");
                let _ = std::fs::remove_file(&file);
            });
            let after: After = Box::new(|answer| match answer {
                1.. => Ok(()),
                other => Err(format!("answered {other}, not a length")),
            });
            let args = Box::new(move || [word(fd), buffer, 256, 0, 0, 0]);
            Kind {
                remove: Box::new(move || drop(std::fs::remove_dir_all(&dir))),
                ..restarting(libc::SYS_read, after, args)
            }
        }
        "msgrcv" => {
            let queue = unsafe { libc::msgget(libc::IPC_PRIVATE, 0o600) };
            feed(move |byte| unsafe {
                let message = [1_u64, u64::from(byte)];
                libc::msgsnd(queue, message.as_ptr().cast(), 8, 0);
            });
            let mut order = Order::default();
            let after: After = Box::new(move |answer| match answer {
                8 => order.check(unsafe { &(&*bytes)[8..9] }),
                other => Err(format!("answered {other}, not 8")),
            });
            let args = Box::new(move || [word(queue), buffer, 8, 0, 0, 0]);
            let remove = move || unsafe {
                libc::msgctl(queue, libc::IPC_RMID, std::ptr::null_mut());
            };
            Kind { remove: Box::new(remove), ..make(libc::SYS_msgrcv, after, args) }
        }
        "semop" | "semtimedop" => {
            let semaphores = unsafe { libc::semget(libc::IPC_PRIVATE, 1, 0o600) };
            let operation = |change| Place::new(libc::sembuf { sem_num: 0, sem_op: change, sem_flg: 0 });
            let (down, up) = (operation(-1).addr(), operation(1));
            let remove = Box::new(move || unsafe {
                libc::semctl(semaphores, 0, libc::IPC_RMID);
            });
            let sems = word(semaphores);
            if mode == "semtimedop" {
                let args = Box::new(move || [sems, down, 1, timeout.set(), 0, 0]);
                return Ok(Kind { remove, ..make(libc::SYS_semtimedop, exactly(EAGAIN), args) });
            }
            feed(move |_| unsafe {
                libc::semop(semaphores, up.0, 1);
            });
            Kind { remove, ..make(libc::SYS_semop, exactly(0), Box::new(move || [sems, down, 1, 0, 0, 0])) }
        }
        "sigtimedwait" => {
            handlers::mask(bit(libc::SIGUSR2));
            let set = Place::new(bit(libc::SIGUSR2)).addr();
            let args = Box::new(move || [set, 0, timeout.set(), 8, 0, 0]);
            make(libc::SYS_rt_sigtimedwait, exactly(EAGAIN), args)
        }
        "sigsuspend" => {
            let mask = masked();
            make(libc::SYS_rt_sigsuspend, exactly(-4), Box::new(move || [mask, 8, 0, 0, 0, 0]))
        }
        "pause" => make(libc::SYS_pause, exactly(-4), Box::new(|| [0; 6])),
        "io-getevents" => {
            let mut context = 0_u64;
            if unsafe { libc::syscall(libc::SYS_io_setup, 4, &raw mut context) } != 0 {
                return Err("skip: io_setup is not permitted".into());
            }
            let args = Box::new(move || [context, 1, 1, buffer, timeout.set(), 0]);
            make(libc::SYS_io_getevents, exactly(0), args)
        }
        "io-uring" | "io-uring-mask" | "io-uring-sqpoll" => {
            let ring = ring(if mode == "io-uring-sqpoll" { 2 } else { 0 })?;
            // GETEVENTS with an extended argument of mask, mask size and timeout.
            let extended = Place::new([0_u64; 3]);
            let args = move || [ring, 0, 1, 1 | 8, extended.set([mask, 8, timeout.set()]), 24];
            make(libc::SYS_io_uring_enter, exactly(ETIME), Box::new(args))
        }
        other => return Err(format!("no such mode: {other}")),
    })
}

/// An io_uring. With flag 2, a kernel thread polls for submissions.
pub fn ring(flags: u32) -> Result<u64, String> {
    let mut params = [0_u32; 30];
    params[2] = flags;
    // How long the thread polls before it sleeps, in milliseconds.
    params[4] = 1;
    set_up_ring(&mut params).map(word)
}

/// An io_uring with these parameters. The kernel fills in the rest.
pub fn set_up_ring(params: &mut [u32; 30]) -> Result<i32, String> {
    let ring = unsafe { libc::syscall(libc::SYS_io_uring_setup, 4, params.as_mut_ptr()) };
    i32::try_from(ring).ok().filter(|&ring| ring >= 0).ok_or_else(|| "skip: io_uring_setup is not permitted".into())
}

fn accepting(timeout: bool) -> Result<Kind, String> {
    use std::os::fd::IntoRawFd;
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
    let name = format!("pagefold-torture-{}", std::process::id());
    let addr = SocketAddr::from_abstract_name(name).map_err(|error| error.to_string())?;
    let listener = UnixListener::bind_addr(&addr).map_err(|error| error.to_string())?.into_raw_fd();
    feed(move |_| drop(UnixStream::connect_addr(&addr)));
    let args = move || [word(listener), 0, 0, 0, 0, 0];
    let after: After = Box::new(|answer| match i32::try_from(answer) {
        Ok(fd @ 3..) => {
            unsafe { libc::close(fd) };
            Ok(())
        }
        // Times out if the feeder doesn't run in time.
        _ if answer == EAGAIN => Ok(()),
        _ => Err(format!("answered {answer}, not a descriptor")),
    });
    Ok(if timeout {
        Kind::new(libc::SYS_accept, after, limited(listener, args))
    } else {
        Kind { restarts: true, ..Kind::new(libc::SYS_accept4, after, Box::new(args)) }
    })
}

/// Waits for a child, and after reaping it starts another one.
fn children(wait4: bool) -> Kind {
    let child = std::rc::Rc::new(std::cell::Cell::new(0));
    let current = std::rc::Rc::clone(&child);
    let args = move || {
        if current.get() == 0 {
            current.set(forked(|| sleep_ms(8)));
        }
        if wait4 { [u64::MAX, 0, 0, 0, 0, 0] } else { [0, 0, 0, 4, 0, 0] }
    };
    let after: After = Box::new(move |answer| {
        let reaped = child.replace(0);
        let expected = if wait4 { i64::from(reaped) } else { 0 };
        if answer == expected { Ok(()) } else { Err(format!("answered {answer}, not {expected}")) }
    });
    let nr = if wait4 { libc::SYS_wait4 } else { libc::SYS_waitid };
    Kind { restarts: true, ..Kind::new(nr, after, Box::new(args)) }
}

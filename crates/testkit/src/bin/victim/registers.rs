//! Mode `registers KIND`: in each round the victim loads all its registers with known values, blocks or computes, and
//! then checks that each register, its signals and its memory are as before.
//!
//! After `ready ADDRESS LENGTH` each round begins with the byte `b` on standard input. The victim then prints `round`.
//! Any other byte ends the round. The victim then prints `stack clean` or `stack written`, for the memory below its red
//! zone, and `ok` or `bad: REASON`.
#![allow(clippy::similar_names, clippy::cast_possible_truncation, clippy::cast_sign_loss)]

use crate::blocking::{epoll, pipe};
use crate::checks::{HANDLED, count, handle, report, signals, signals_back};
use crate::handlers;
use crate::hold::{Code, Frame, RCX, RED, VICTIM_STOP};
use crate::hold::{victim_busy, victim_call, victim_futex, victim_nanosleep, victim_poll};
use crate::system::{anonymous, spawn_on};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};

/// The red zone and the unused memory below it that we check, in bytes.
const BELOW: usize = 8192 + RED;

/// The thread's pending signals, and the base of fs.
fn pending_and_fs() -> [u64; 2] {
    const ARCH_GET_FS: i32 = 0x1003;
    let (mut pending, mut fs) = (0_u64, 0_u64);
    unsafe {
        libc::syscall(libc::SYS_rt_sigpending, &raw mut pending, 8);
        libc::syscall(libc::SYS_arch_prctl, ARCH_GET_FS, &raw mut fs);
    }
    [pending, fs]
}

struct Stage {
    kind: String,
    memory: &'static mut [u8],
    pipe: [i32; 2],
    epoll: i32,
}

static FUTEX: AtomicU32 = AtomicU32::new(0);
static SLEEP: libc::timespec = libc::timespec { tv_sec: 0, tv_nsec: 150_000_000 };
static LONG: libc::timespec = libc::timespec { tv_sec: 60, tv_nsec: 0 };
const WAITED_FOR: i32 = 40;

impl Stage {
    /// The call, its arguments, and what it must return when the round ends.
    fn call(&mut self) -> (i64, [u64; 6], u64) {
        let [reader, _] = self.pipe;
        // The buffer outlives the call.
        let buffer = self.memory.as_ptr() as u64 + self.memory.len() as u64 - 64;
        match self.kind.as_str() {
            "nanosleep" => (libc::SYS_nanosleep, [&raw const SLEEP as u64, 0, 0, 0, 0, 0], 0),
            "futex" => (libc::SYS_futex, [FUTEX.as_ptr() as u64, 0, 0, 0, 0, 0], 0),
            "futex-timeout" => (libc::SYS_futex, [FUTEX.as_ptr() as u64, 0, 0, &raw const LONG as u64, 0, 0], 0),
            "poll" => {
                let request = libc::pollfd { fd: reader, events: libc::POLLIN, revents: 0 };
                unsafe { (buffer as *mut libc::pollfd).write(request) };
                (libc::SYS_poll, [buffer, 1, 60_000, 0, 0, 0], 1)
            }
            "epoll" => (libc::SYS_epoll_wait, [self.epoll as u64, buffer, 1, u64::MAX, 0, 0], 1),
            "sigtimedwait" => {
                unsafe { (buffer as *mut u64).write(1 << (WAITED_FOR - 1)) };
                let set = [buffer, 0, &raw const LONG as u64, 8, 0, 0];
                (libc::SYS_rt_sigtimedwait, set, WAITED_FOR as u64)
            }
            "busy" | "busy-notrap" => (0x1234, [1, 2, 3, 4, 5, 6], 0x1234),
            _ => (libc::SYS_read, [reader as u64, buffer, 1, 0, 0, 0], 1),
        }
    }

    fn code(&self) -> Code {
        match self.kind.as_str() {
            "nanosleep" => victim_nanosleep,
            "futex" | "futex-timeout" => victim_futex,
            "poll" => victim_poll,
            "busy" | "busy-notrap" => victim_busy,
            _ => victim_call,
        }
    }

    fn ended(&self) {
        if matches!(self.kind.as_str(), "poll" | "epoll") {
            unsafe { libc::read(self.pipe[0], [0_u8].as_mut_ptr().cast(), 1) };
        }
        VICTIM_STOP.store(0, Ordering::Relaxed);
        FUTEX.store(0, Ordering::Relaxed);
    }

    fn round(&mut self) -> Result<(), String> {
        let (nr, args, answer) = self.call();
        let filled = self.memory.len() - 64;
        let mut frame = Frame::<BELOW>::new(self.code(), answer);
        frame.general[0] = nr as u64;
        frame.general[1..7].copy_from_slice(&args);
        let (signals, pending, handled) = (signals(), pending_and_fs(), HANDLED.load(Ordering::Relaxed));
        println!("round");
        frame.run();
        self.ended();
        // If a futex wait begins or restarts after the word has changed, it returns at once.
        let late = (-i64::from(libc::EAGAIN)) as u64;
        let is_late = self.kind.starts_with("futex") && frame.general_after[0] == late;
        frame.general[0] = if is_late { late } else { answer };
        // After a call, the last two registers hold the return address and the flags.
        let computes = self.kind.starts_with("busy");
        frame.check(0..if computes { frame.general.len() } else { RCX })?;
        signals_back(&signals)?;
        let pending_now = pending_and_fs();
        if pending_now != pending {
            return Err(format!("pending signals and the base of fs are {pending_now:x?} after {pending:x?}"));
        }
        if HANDLED.load(Ordering::Relaxed) != handled {
            return Err("a handler ran".into());
        }
        if let Some(at) = self.memory[..filled].iter().enumerate().position(|(at, &byte)| byte != content(at)) {
            return Err(format!("byte {at} of its memory"));
        }
        println!("stack {}", if frame.is_clean() { "clean" } else { "written" });
        Ok(())
    }
}

fn content(at: usize) -> u8 {
    (at / 4096 * 3 + at * 11 + 5) as u8
}

/// Begins or ends a round for each byte. Blocks in a call that the injector doesn't interrupt.
fn end_rounds(pipe: i32, signalled: Option<i32>, begin: &Sender<()>) {
    let mut byte = 0_u8;
    while unsafe { libc::recv(0, (&raw mut byte).cast(), 1, libc::MSG_WAITALL) } == 1 {
        if byte == b'b' {
            begin.send(()).unwrap();
            continue;
        }
        VICTIM_STOP.store(1, Ordering::Relaxed);
        FUTEX.store(1, Ordering::Relaxed);
        unsafe {
            libc::syscall(libc::SYS_futex, FUTEX.as_ptr(), 1, i32::MAX, 0, 0, 0);
            libc::write(pipe, (&raw const byte).cast(), 1);
            if let Some(tid) = signalled {
                libc::syscall(libc::SYS_tgkill, libc::getpid(), tid, WAITED_FOR);
            }
        }
    }
    std::process::exit(0);
}

pub fn main(kind: &str) {
    let kind = kind.to_owned();
    let bytes: usize = if kind == "large" { 4 << 20 } else { 256 << 10 };
    let memory = unsafe { std::slice::from_raw_parts_mut(anonymous(bytes), bytes) };
    for (at, byte) in memory.iter_mut().enumerate() {
        *byte = content(at);
    }
    println!("ready {:x} {}", memory.as_ptr() as u64, memory.len() - 4096);
    let pipe = pipe();
    let epoll = epoll(pipe[0]);
    let stage = Stage { kind: kind.clone(), memory, pipe, epoll };
    let (begin, begun) = channel();
    match kind.as_str() {
        // The injector mustn't choose the main thread.
        "thread" => in_thread(stage, &begin, begun),
        "heap-stack" => on_the_heap(stage, &begin, begun),
        _ => rounds(stage, Some(begin), &begun),
    }
}

fn set_stage(kind: &str) {
    unsafe {
        for signal in [libc::SIGUSR1, libc::SIGUSR2, libc::SIGTRAP, WAITED_FOR] {
            handle(signal, count as *const () as usize, libc::SA_ONSTACK);
        }
        let stack = libc::stack_t { ss_sp: anonymous(1 << 17).cast(), ss_flags: 0, ss_size: 1 << 17 };
        assert_eq!(libc::sigaltstack(&raw const stack, null_mut()), 0);
        let mut blocked = (1_u64 << (libc::SIGUSR2 - 1)) | (1 << (libc::SIGWINCH - 1)) | (1 << (WAITED_FOR - 1));
        if kind == "busy-notrap" {
            blocked |= 1 << (libc::SIGTRAP - 1);
        }
        handlers::mask(blocked);
        if kind == "pending" {
            libc::raise(libc::SIGUSR2);
            libc::raise(libc::SIGUSR2);
            libc::kill(libc::getpid(), libc::SIGWINCH);
        }
    }
}

fn rounds(mut stage: Stage, begin: Option<Sender<()>>, begun: &Receiver<()>) {
    let writer = stage.pipe[1];
    let signalled = (stage.kind == "sigtimedwait").then(|| unsafe { libc::gettid() });
    set_stage(&stage.kind);
    if let Some(begin) = begin {
        std::thread::spawn(move || {
            handlers::mask(u64::MAX);
            end_rounds(writer, signalled, &begin);
        });
    }
    while begun.recv().is_ok() {
        if !matches!(stage.kind.as_str(), "poll" | "epoll") && stage.call().0 != libc::SYS_read {
            drain(stage.pipe[0]);
        }
        report(stage.round());
    }
}

fn drain(pipe: i32) {
    let mut waiting = 0_i32;
    let mut bytes = [0_u8; 64];
    unsafe {
        while libc::ioctl(pipe, libc::FIONREAD, &raw mut waiting) == 0 && waiting > 0 {
            libc::read(pipe, bytes.as_mut_ptr().cast(), 64);
        }
    }
}

fn in_thread(stage: Stage, begin: &Sender<()>, begun: Receiver<()>) {
    let writer = stage.pipe[1];
    std::thread::spawn(move || rounds(stage, None, &begun));
    end_rounds(writer, None, begin);
}

/// Makes the rounds on a stack in heap memory, which nobody can recognize as a thread's stack.
fn on_the_heap(stage: Stage, begin: &Sender<()>, begun: Receiver<()>) {
    let writer = stage.pipe[1];
    unsafe { spawn_on(anonymous(1 << 20), 1 << 20, Box::new(move || rounds(stage, None, &begun))) };
    end_rounds(writer, None, begin);
}

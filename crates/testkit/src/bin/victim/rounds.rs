//! Torture modes that do more than block in one call.

use crate::blocking::{forked, pipe, word};
use crate::checks::{LONG_MS, Memory, signals};
use crate::handlers::{self, ON_STACK, PLAIN, RUNS};
use crate::hold::{call, spin};
use crate::states::vfork;
use crate::system::{ANONYMOUS, WRITABLE, nanosleep_us, sleep_us};
use crate::torture::{self, RAISED, ROUNDS, is_asked_to_end, rounds, until_asked_to_end};
use crate::{kinds, rseq, seccomp};
use pagefold_testkit::injection::CONTENT;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Victims that compute pause for this many microseconds, because many of them share the processors.
const REST_US: u32 = 3000;

/// How many writes were cut short.
pub static SHORT: AtomicU64 = AtomicU64::new(0);
static COMPLAINT: Mutex<Option<String>> = Mutex::new(None);

/// Runs a mode. `None` if the mode isn't one of these.
pub fn of(mode: &str, traits: &[String], memory: Memory) -> Result<Option<Result<(), String>>, String> {
    Ok(Some(match mode {
        "busy" => rounds(memory, || {
            spin(300_000)?;
            nap(REST_US);
            Ok(())
        }),
        "jit" => jit(memory),
        "rseq" => sequences(memory),
        "signals" => own_signals(memory),
        "handlers" => in_handlers(memory),
        "threads" => short_lived_threads(memory),
        "many-threads" => many_threads(traits, memory),
        "main-exit" => without_main(memory),
        "forks" => forks(memory),
        "vfork" => vforks(memory),
        "execs" => execs(traits, memory),
        "short-lived" => short_lived(traits, memory),
        "big-write" => big_writes(memory),
        "waitall" => waitall(memory),
        "sqpoll-write" => {
            kinds::ring(2)?;
            big_writes(memory)
        }
        "strict" => strict(memory),
        _ => return Ok(None),
    }))
}

fn nap(us: u32) {
    unsafe { libc::usleep(us) };
}

/// Writes and runs code repeatedly, in a page that is either always executable or alternately writable and executable.
/// Some of the code contains the bytes of a `syscall` instruction. The page is the first executable mapping.
fn jit(memory: Memory) -> Result<(), String> {
    const ALL: i32 = WRITABLE | libc::PROT_EXEC;
    let at = 0x20_0000 as *mut libc::c_void;
    let page = unsafe { libc::mmap(at, 4096, ALL, ANONYMOUS | libc::MAP_FIXED_NOREPLACE, -1, 0) }.cast::<u8>();
    if page.cast() != at {
        return Err("skip: no memory that is writable and executable".into());
    }
    let mut turn = 0_u64;
    rounds(memory, move || {
        turn += 1;
        let value = turn.wrapping_mul(0x0f05_c30f_05c3_0f05) | 0x0f05;
        // mov ecx, rounds; dec ecx; jnz; movabs rax, value; ret
        let mut code = vec![0xb9];
        code.extend(200_000_u32.to_le_bytes());
        code.extend([0xff, 0xc9, 0x75, 0xfc, 0x48, 0xb8]);
        code.extend(value.to_le_bytes());
        code.extend([0xc3, 0x0f, 0x05, 0xc3]);
        let place = usize::try_from(turn % 64).unwrap_or(0) * 64;
        let separate = turn % 128 >= 64;
        let answer = unsafe {
            if separate {
                libc::mprotect(at, 4096, WRITABLE);
            }
            page.add(place).copy_from_nonoverlapping(code.as_ptr(), code.len());
            if separate {
                libc::mprotect(at, 4096, libc::PROT_READ | libc::PROT_EXEC);
            }
            let function: extern "C" fn() -> u64 = std::mem::transmute(page.add(place));
            let answer = function();
            libc::mprotect(at, 4096, ALL);
            answer
        };
        nap(REST_US / 4);
        if answer == value { Ok(()) } else { Err(format!("new code answered {answer:x}, not {value:x}")) }
    })
}

fn sequences(memory: Memory) -> Result<(), String> {
    let mut aborted = 0;
    rounds(memory, || {
        let mut left = 32;
        aborted += rseq::sequences(|| {
            left -= 1;
            left == 0
        })?;
        nap(REST_US);
        Ok(())
    })?;
    // Otherwise this mode could not fail.
    if aborted == 0 && ROUNDS.load(Relaxed) > 1000 { Err("no sequence was ever interrupted".into()) } else { Ok(()) }
}

/// Changes mask, a handler and the alternate stack, and checks that they stay.
fn own_signals(memory: Memory) -> Result<(), String> {
    const UNBLOCKABLE: u64 = 1 << (libc::SIGKILL - 1) | 1 << (libc::SIGSTOP - 1);
    let mut turn = 0_u64;
    rounds(memory, move || {
        turn += 1;
        let mask = turn.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let old = handlers::mask(mask);
        let stack = handlers::alternate_stack(turn % 2 == 0);
        let handler = 0x1000 + usize::try_from(turn).unwrap_or(0);
        crate::checks::handle(libc::SIGUSR2, handler, 0);
        spin(300_000)?;
        nap(REST_US);
        let (mut action, mut now): (libc::sigaction, libc::stack_t) = unsafe { std::mem::zeroed() };
        unsafe {
            libc::sigaltstack(std::ptr::null(), &raw mut now);
            libc::sigaction(libc::SIGUSR2, std::ptr::null(), &raw mut action);
        }
        crate::checks::handle(libc::SIGUSR2, libc::SIG_DFL, 0);
        handlers::alternate_stack(true);
        let found = handlers::mask(old);
        if found != mask & !UNBLOCKABLE {
            return Err(format!("the mask was {found:x}, not {mask:x}"));
        }
        if action.sa_sigaction != handler || (now.ss_sp.addr(), now.ss_size) != stack {
            return Err("the handler or the alternate stack was another".into());
        }
        Ok(())
    })
}

/// Runs in handlers nearly all the time, every other time on the alternate stack.
fn in_handlers(memory: Memory) -> Result<(), String> {
    handlers::SPIN.store(400_000, Relaxed);
    let own = unsafe { libc::getpid() };
    let mut turn = 0_u64;
    rounds(memory, move || {
        turn += 1;
        let signal = if turn % 2 == 0 { PLAIN } else { ON_STACK };
        let before = RUNS.load(Relaxed);
        RAISED.fetch_add(1, Relaxed);
        // We send the signal to the thread, so its code isn't SI_USER, and the thread handles it before the call
        // returns.
        unsafe { libc::syscall(libc::SYS_tgkill, own, own, signal) };
        nap(REST_US / 2);
        if RUNS.load(Relaxed) > before { Ok(()) } else { Err("a raised signal was not handled".into()) }
    })
}

fn short_lived_threads(memory: Memory) -> Result<(), String> {
    rounds(memory, || {
        // The threads have no alternate stack, so we let them inherit a mask that blocks the signals.
        let old = handlers::mask(handlers::STORM);
        let threads: Vec<_> = (0..3)
            .map(|_| {
                std::thread::spawn(|| {
                    spin(100_000)?;
                    nanosleep_us(3000).map(drop)
                })
            })
            .collect();
        handlers::mask(old);
        nap(REST_US);
        threads.into_iter().try_for_each(|thread| thread.join().map_err(|_| "a thread panicked".to_owned())?)
    })
}

fn complain(reason: String) {
    COMPLAINT.lock().unwrap_or_else(std::sync::PoisonError::into_inner).get_or_insert(reason);
}

fn complained() -> Result<(), String> {
    COMPLAINT.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take().map_or(Ok(()), Err)
}

fn napping_thread(ms: i64) -> Result<(), String> {
    std::thread::Builder::new()
        .stack_size(64 << 10)
        .spawn(move || {
            handlers::mask(handlers::STORM);
            loop {
                if let Err(reason) = sleep_us(ms * 1000) {
                    complain(reason);
                }
            }
        })
        .map(drop)
        .map_err(|error| format!("skip: starting a thread: {error}"))
}

/// The main thread writes, and nobody may interrupt that. All other threads sleep.
fn many_threads(traits: &[String], memory: Memory) -> Result<(), String> {
    let threads: u32 = traits.first().and_then(|number| number.parse().ok()).unwrap_or(1);
    (0..threads).try_for_each(|index| napping_thread(1000 + i64::from(index % 100) * 10))?;
    big_writes(memory)
}

/// The main thread ends; another thread continues.
fn without_main(memory: Memory) -> Result<(), String> {
    torture::ready(memory);
    std::thread::spawn(move || {
        let before = signals();
        torture::end(until_asked_to_end(memory, &before, || sleep_us(5000)))
    });
    unsafe { libc::syscall(libc::SYS_exit, 0) };
    Ok(())
}

/// Forks children that check everything they inherited.
fn forks(memory: Memory) -> Result<(), String> {
    let before = signals();
    rounds(memory, move || {
        let child = forked(|| {
            // Whatever the moment of the fork, the child inherits mask and handlers.
            let intact = memory.check().is_ok() && crate::checks::signals_back(&before).is_ok();
            unsafe { libc::_exit(if intact && spin(1000).is_ok() { CONTENT } else { 1 }) };
        });
        let mut status = 0;
        while unsafe { libc::waitpid(child, &raw mut status, 0) } != child {}
        nap(REST_US * 2);
        if status == CONTENT << 8 { Ok(()) } else { Err(format!("a child ended with status {status:x}")) }
    })
}

fn vforks(memory: Memory) -> Result<(), String> {
    rounds(memory, || {
        nap(1000);
        vfork(5000)
    })
}

/// Executes itself repeatedly, from the main thread and from others.
fn execs(traits: &[String], memory: Memory) -> Result<(), String> {
    use std::os::unix::process::CommandExt;
    let turn: u64 = traits.first().and_then(|turn| turn.parse().ok()).unwrap_or(0);
    ROUNDS.store(turn, Relaxed);
    if turn == 0 {
        // The exec will replace or unmap this range.
        torture::ready(memory);
    }
    memory.check()?;
    napping_thread(LONG_MS)?;
    nap(2000);
    spin(200_000)?;
    memory.check()?;
    complained()?;
    if is_asked_to_end() {
        return Ok(());
    }
    let again = move || {
        let turn = (turn + 1).to_string();
        format!("exec: {}", std::process::Command::new("/proc/self/exe").args(["torture", "execs", &turn]).exec())
    };
    Err(if turn % 2 == 0 { again() } else { std::thread::spawn(again).join().unwrap_or_default() })
}

fn short_lived(traits: &[String], memory: Memory) -> Result<(), String> {
    let ms = traits.first().and_then(|ms| ms.parse().ok()).unwrap_or(0);
    let before = signals();
    torture::ready(memory);
    if ms % 2 == 0 {
        napping_thread(1)?;
    }
    for _ in 0..ms {
        spin(100_000)?;
        nanosleep_us(1000)?;
    }
    let intact = memory.check().and_then(|()| crate::checks::signals_back(&before)).is_ok();
    unsafe { libc::_exit(if intact { CONTENT } else { 1 }) }
}

/// Fills a pipe with parts of a stream, of which no byte may be missing or doubled. A stop makes a blocked write return
/// early, as a signal does, so the injector doesn't choose a thread that blocks in one. It may choose one that is about
/// to write. We count writes that were cut short.
fn big_writes(memory: Memory) -> Result<(), String> {
    const BYTES: usize = 200_000;
    let [reader, writer] = pipe();
    let parent = unsafe { libc::getpid() };
    forked(move || unsafe {
        libc::close(writer);
        let mut buffer = vec![0_u8; 1 << 16];
        let mut expected = 0_u8;
        while libc::getppid() == parent {
            let read = libc::read(reader, buffer.as_mut_ptr().cast(), buffer.len());
            for &byte in &buffer[..usize::try_from(read).unwrap_or(0)] {
                if byte != expected {
                    libc::kill(parent, libc::SIGABRT);
                }
                expected = byte.wrapping_add(1);
            }
            libc::usleep(2000);
        }
    });
    let bytes: Vec<u8> = (0..BYTES + 256).map(|index| u8::try_from(index % 256).unwrap_or(0)).collect();
    let mut at = 0;
    rounds(memory, || {
        complained()?;
        let from = &bytes[at..at + BYTES];
        let answer = call(libc::SYS_write, [word(writer), from.as_ptr().addr() as u64, BYTES as u64, 0, 0, 0])?;
        let written = usize::try_from(answer).map_err(|_| format!("a write answered {answer}"))?;
        at = (at + written) % 256;
        SHORT.fetch_add(u64::from(written < BYTES), Relaxed);
        if written == 0 { Err("a write answered 0".into()) } else { Ok(()) }
    })
}

/// Makes receives that mustn't return early, and has threads that the injector may stop instead.
fn waitall(memory: Memory) -> Result<(), String> {
    let [reader, writer] = kinds::sockets();
    kinds::feed(move |_| unsafe {
        libc::write(writer, [0_u8; 5].as_ptr().cast(), 5);
    });
    (0..2).try_for_each(|_| napping_thread(20))?;
    let buffer = Box::leak(Box::new([0_u8; 16])).as_mut_ptr().addr() as u64;
    let all = u64::from(libc::MSG_WAITALL.unsigned_abs());
    rounds(memory, move || {
        complained()?;
        match call(libc::SYS_recvfrom, [word(reader), buffer, 10, all, 0, 0])? {
            10 => Ok(()),
            other => Err(format!("a receive of 10 bytes answered {other}")),
        }
    })
}

/// Reads bytes up to a `q`, because strict mode allows only read, write and the return from handlers.
fn strict(memory: Memory) -> Result<(), String> {
    static BYTE: AtomicU64 = AtomicU64::new(0);
    torture::ready(memory);
    torture::STRICT.store(true, Relaxed);
    seccomp::be_strict();
    loop {
        let interrupted = handlers::INTERRUPTED.load(Relaxed);
        let answer = call(libc::SYS_read, [0, BYTE.as_ptr().addr() as u64, 1, 0, 0, 0])?;
        let interrupted = handlers::INTERRUPTED.load(Relaxed) > interrupted;
        if interrupted != (answer == -4) || (answer != 1 && answer != -4) {
            return Err(format!("answered {answer}, interrupted: {interrupted}"));
        }
        ROUNDS.fetch_add(1, Relaxed);
        spin(1000)?;
        memory.check()?;
        if answer == 1 && BYTE.load(Relaxed) == u64::from(b'q') {
            return Ok(());
        }
    }
}

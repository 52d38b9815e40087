//! Modes that don't just block in a call.

use crate::blocking::{forked, pipe, word};
use crate::checks::{HARMLESS, Memory, PAGES};
use crate::hold::call;
use crate::system::anonymous;
use crate::torture::is_asked_to_end;

/// Waits for a byte on standard input.
pub fn command() -> Result<u8, String> {
    let mut byte = 0_u8;
    match call(libc::SYS_read, [0, &raw mut byte as u64, 1, 0, 0, 0])? {
        1 => Ok(byte),
        other => Err(format!("reading standard input answered {other}")),
    }
}

pub fn mix(rounds: u64) -> u64 {
    (0..rounds).fold(HARMLESS, |state, round| {
        let state = state ^ (state << 13);
        let state = state ^ (state >> 7);
        (state ^ (state << 17)).wrapping_add(round)
    })
}

pub fn stopped() -> Result<(), String> {
    unsafe { libc::raise(libc::SIGSTOP) };
    Ok(())
}

/// Waits uninterruptibly for a child, which ends after this time, and reaps it.
pub fn vfork(us: u32) -> Result<(), String> {
    let pid = unsafe { libc::syscall(libc::SYS_clone, libc::CLONE_VFORK | libc::SIGCHLD, 0, 0, 0, 0) };
    if pid == 0 {
        unsafe {
            libc::usleep(us);
            libc::_exit(0);
        }
    }
    let reaped = call(libc::SYS_wait4, [u64::MAX, 0, 0, 0, 0, 0])?;
    if reaped == pid { Ok(()) } else { Err(format!("wait4 answered {reaped}, not {pid}")) }
}

pub fn big_write() -> Result<(), String> {
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

/// Makes calls that don't sleep but look for signals, until a byte comes: loads a BPF program, allocates pages of a file
/// (Linux 6.18 doesn't look there any more), and asks for random bytes. Prints how many of the latter calls were cut
/// short. The others must not fail.
pub fn never_sleeping() -> Result<(), String> {
    const PROG_LOAD: i64 = 5;
    const SOCKET_FILTER: u64 = 1;
    const INSTRUCTIONS: u32 = 4_000;
    const SET_R0: u64 = 0xb7;
    const EXIT: u64 = 0x95;
    let mut program = vec![SET_R0; INSTRUCTIONS as usize];
    program.push(EXIT);
    let license = c"GPL".as_ptr() as u64;
    let attributes = [SOCKET_FILTER | (u64::from(INSTRUCTIONS) + 1) << 32, program.as_ptr() as u64, license, 0, 0, 0];
    let file = unsafe { libc::memfd_create(c"never-sleeping".as_ptr(), 0) };
    let mut random = vec![0_u8; 64 << 10];
    let (mut rounds, mut short) = (0, 0);
    let failed = |call: &str| Err(format!("{call}: {}", std::io::Error::last_os_error()));
    while !is_asked_to_end() {
        rounds += 1;
        let loaded = unsafe { libc::syscall(libc::SYS_bpf, PROG_LOAD, attributes.as_ptr(), size_of_val(&attributes)) };
        if loaded < 0 {
            return failed("bpf");
        }
        unsafe { libc::close(i32::try_from(loaded).unwrap()) };
        if unsafe { libc::fallocate(file, 0, 0, 1 << 20) } != 0 {
            return failed("fallocate");
        }
        unsafe { libc::ftruncate(file, 0) };
        let got = unsafe { libc::getrandom(random.as_mut_ptr().cast(), random.len(), 0) };
        if got < 256 {
            return failed("getrandom");
        }
        short += u32::from(got.unsigned_abs() < random.len());
    }
    println!("{short} of {rounds} calls were cut short");
    Ok(())
}

/// Forks without pause, with 512 MiB of page tables to copy, until a byte comes.
pub fn forks() -> Result<(), String> {
    const BYTES: usize = 512 << 20;
    let memory = anonymous(BYTES);
    unsafe { libc::madvise(memory.cast(), BYTES, libc::MADV_NOHUGEPAGE) };
    for page in (0..BYTES).step_by(4096) {
        unsafe { memory.add(page).write(1) };
    }
    std::thread::spawn(|| {
        loop {
            let child = forked(|| {});
            unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) };
        }
    });
    println!("forking");
    command().map(drop)
}

/// Moves memory that it marks between two addresses, below and above its program, until a byte comes.
pub fn moving() -> Result<(), String> {
    const BYTES: usize = PAGES * 4096;
    let mut memory = Memory::new();
    let (low, high) = (0x2000_0000 as *mut u64, memory.addr);
    assert_eq!(unsafe { libc::madvise(high.cast(), BYTES, libc::MADV_MERGEABLE) }, 0);
    println!("moving");
    while !is_asked_to_end() {
        let to = if memory.addr == low { high } else { low };
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        let moved = unsafe { libc::mremap(memory.addr.cast(), BYTES, BYTES, flags, to) };
        if moved != to.cast() {
            return Err(format!("mremap: {}", std::io::Error::last_os_error()));
        }
        memory.addr = to;
        mix(20_000);
    }
    memory.check()?;
    command().map(drop)
}

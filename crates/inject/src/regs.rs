//! Computes the registers with which an interrupted thread continues as if nothing had happened.
//!
//! The tracer's interrupt wakes a thread that blocks in a system call. Most calls then return one of the kernel's
//! private errors 512 to 516. On the way back to the program, the kernel turns these into a restart if there was no
//! signal. It uses the registers at that moment, so it's enough to restore them all, `orig_rax` included. Some calls
//! return a plain EINTR instead, which the program would see. We restart these by turning EINTR into ERESTARTNOHAND:
//! the kernel then restarts the call, or returns EINTR if a handler runs. A few calls never sleep, but fail if they
//! find a signal pending. We restart two of these as well.

use super::ptrace::Registers;
use super::{signed, unsigned};

/// The code segment selector of 64-bit programs.
const USER_CS_64: u64 = 0x33;
/// The kernel's private error for "restart unless a handler runs".
const ERESTARTNOHAND: i64 = 514;
/// The kernel's private error for "restart in any case".
const ERESTARTNOINTR: i64 = 513;

/// The libc crate lacks this number.
const SYS_IO_PGETEVENTS: i64 = 333;

/// Whether a thread with these registers runs 64-bit code.
pub fn is_64_bit(registers: &Registers) -> bool {
    registers.cs == USER_CS_64
}

/// Whether the thread was stopped on its way out of a system call. Otherwise it was on its way back from an interrupt.
pub fn in_syscall(registers: &Registers) -> bool {
    signed(registers.orig_rax) >= 0
}

/// Whether the instruction pointer lies in the critical section `[start, start + length)`.
pub fn in_critical_section(registers: &Registers, start: u64, length: u64) -> bool {
    registers.rip.wrapping_sub(start) < length
}

/// Whether a call that returns EINTR has done nothing yet, so that we can make it again.
///
/// The socket calls return EINTR if the socket has SO_RCVTIMEO or SO_SNDTIMEO, otherwise ERESTARTSYS. A call that has
/// transferred something returns the count, so EINTR means that nothing was transferred.
pub fn repairable(nr: i64) -> bool {
    matches!(
        nr,
        libc::SYS_epoll_wait
            | libc::SYS_epoll_pwait
            | libc::SYS_epoll_pwait2
            | libc::SYS_rt_sigtimedwait
            | libc::SYS_semop
            | libc::SYS_semtimedop
            | libc::SYS_io_getevents
            | SYS_IO_PGETEVENTS
            | libc::SYS_io_uring_enter
            | libc::SYS_read
            | libc::SYS_readv
            | libc::SYS_recvfrom
            | libc::SYS_recvmsg
            | libc::SYS_accept
            | libc::SYS_accept4
            | libc::SYS_sendto
            | libc::SYS_sendmsg
    )
}

/// Computes the registers to restore from the ones at the stop.
///
/// `by_us`: the tracer caused the stop, not job control, which may itself make a call return EINTR.
/// `by_syscall_instruction`: the instruction before `rip` is `syscall`. After `int 0x80` the call's number is one of
/// the 32-bit table.
pub fn repaired(stopped: &Registers, by_us: bool, by_syscall_instruction: bool) -> Registers {
    let mut registers = *stopped;
    if by_us && by_syscall_instruction {
        if let Some(restart) = restart_of(stopped) {
            registers.rax = unsigned(-restart);
        }
    }
    registers
}

/// The error that makes the kernel restart a call, if our interrupt made the call fail. `None` if the call didn't fail
/// that way, or mustn't be made again.
fn restart_of(stopped: &Registers) -> Option<i64> {
    const BPF_PROG_LOAD: u64 = 5;
    const MOVES_DATA: u64 = 0x08 | 0x20; // FALLOC_FL_COLLAPSE_RANGE, FALLOC_FL_INSERT_RANGE
    let interrupted = signed(stopped.rax) == -i64::from(libc::EINTR);
    match signed(stopped.orig_rax) {
        // The verifier gives up at any signal with EAGAIN, which programs don't expect here.
        libc::SYS_bpf if stopped.rdi == BPF_PROG_LOAD => {
            (signed(stopped.rax) == -i64::from(libc::EAGAIN)).then_some(ERESTARTNOINTR)
        }
        // Memory file systems undo the part that they've done before they fail; on others, repeating it does no harm.
        libc::SYS_fallocate if stopped.rsi & MOVES_DATA == 0 => interrupted.then_some(ERESTARTNOHAND),
        nr if repairable(nr) => interrupted.then_some(ERESTARTNOHAND),
        _ => None,
    }
}

/// Whether the kernel restarts the call, or would if no handler ran.
pub fn restarts(registers: &Registers) -> bool {
    in_syscall(registers) && matches!(signed(registers.rax), -514..=-512 | -516)
}

/// The registers with which `rt_sigreturn` resumes the thread, given the ones to restore. If the kernel would restart a
/// call, we point the thread at its `syscall` instruction, as `arch_do_signal_or_restart` does. We never use
/// `restart_syscall`, which returns EINTR after `rt_sigreturn`, so a relative timeout starts over. `original` is the
/// number of the call that `restart_syscall` continues. Without that number the call returns EINTR.
pub fn return_registers(own: &Registers, original: Option<i64>) -> Registers {
    let mut home = *own;
    if restarts(own) {
        home.rip = own.rip.wrapping_sub(2);
        home.rax = match original {
            Some(nr) if signed(own.orig_rax) == libc::SYS_restart_syscall => unsigned(nr),
            _ => own.orig_rax,
        };
    }
    home
}

/// Finds the number of the call that `restart_syscall` continues: the last one loaded into `eax` before the `syscall`
/// instruction at the end of `code`.
pub fn number_in_code(code: &[u8]) -> Option<i64> {
    const RESTARTED: [i64; 4] = [libc::SYS_nanosleep, libc::SYS_clock_nanosleep, libc::SYS_futex, libc::SYS_poll];
    const MOV_EAX: u8 = 0xb8;
    code.windows(5).rev().find_map(|window| match window {
        [MOV_EAX, a, b, c, d] => {
            let nr = i64::from(u32::from_le_bytes([*a, *b, *c, *d]));
            RESTARTED.contains(&nr).then_some(nr)
        }
        _ => None,
    })
}

/// The registers that send a thread to the `rt_sigreturn` function at `back`, to return by its frame at `base`.
pub fn returning(own: &Registers, base: u64, back: u64) -> Registers {
    let mut registers = *own;
    registers.rip = back;
    registers.rsp = base.wrapping_add(8);
    registers.orig_rax = u64::MAX;
    registers
}

/// The registers that make a thread at the entry of a call enter another one instead, which returns to `rip`.
pub fn entering(own: &Registers, rsp: u64, rip: u64, nr: i64, args: &[u64; 6]) -> Registers {
    let mut registers = calling(own, rip, nr, args);
    registers.rsp = rsp;
    registers.orig_rax = unsigned(nr);
    registers.rax = unsigned(-i64::from(libc::ENOSYS));
    registers
}

/// The registers that make the thread run one call at `instruction`, a `syscall` instruction.
pub fn calling(stopped: &Registers, instruction: u64, nr: i64, args: &[u64; 6]) -> Registers {
    let mut registers = *stopped;
    registers.rip = instruction;
    registers.rax = unsigned(nr);
    // If these registers looked like a system call, the kernel might restart it.
    registers.orig_rax = u64::MAX;
    [registers.rdi, registers.rsi, registers.rdx, registers.r10, registers.r8, registers.r9] = *args;
    registers
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stopped(nr: i64, rax: i64) -> Registers {
        // SAFETY: plain integers.
        let mut registers: Registers = unsafe { std::mem::zeroed() };
        registers.cs = USER_CS_64;
        registers.orig_rax = unsigned(nr);
        registers.rax = unsigned(rax);
        (registers.rip, registers.rsp, registers.rdi, registers.rcx) = (0x1000, 0x2000, 7, 0x1000);
        registers
    }

    fn words(registers: &Registers) -> [u64; 27] {
        // SAFETY: the structure is 27 words.
        unsafe { std::mem::transmute_copy(registers) }
    }

    #[test]
    fn only_a_spurious_eintr_of_the_known_calls_is_repaired() {
        for nr in -1..470 {
            for rax in [-4, -512, -513, -514, -516, -11, 0, 1, nr] {
                let before = stopped(nr, rax);
                let after = repaired(&before, true, true);
                let is_known = repairable(nr) || nr == libc::SYS_fallocate;
                let expected = if rax == -4 && is_known { -514 } else { rax };
                assert_eq!(signed(after.rax), expected, "call {nr} answering {rax}");
                // Everything but `rax` stays the same.
                assert_eq!(words(&Registers { rax: before.rax, ..after }), words(&before));
                assert_eq!(words(&repaired(&before, false, true)), words(&before), "a stop of job control");
                assert_eq!(words(&repaired(&before, true, false)), words(&before), "int 0x80");
            }
        }
        for never in [libc::SYS_write, libc::SYS_nanosleep, libc::SYS_futex, libc::SYS_close, libc::SYS_ioctl, -1] {
            assert!(!repairable(never));
        }
    }

    /// When a signal comes, loading a BPF program fails with EAGAIN, and fallocate(2) of memory with EINTR.
    #[test]
    fn calls_that_only_look_for_signals_are_restarted() {
        let answer = |nr, rax, rdi, rsi| {
            let before = Registers { rdi, rsi, ..stopped(nr, rax) };
            signed(repaired(&before, true, true).rax)
        };
        assert_eq!(answer(libc::SYS_bpf, -11, 5, 0), -513);
        for (rax, command) in [(-4, 5), (-22, 5), (3, 5), (-11, 0), (-11, 10)] {
            assert_eq!(answer(libc::SYS_bpf, rax, command, 0), rax, "bpf command {command}");
        }
        for mode in 0..0x40 {
            let moves_data = mode & 0x28 != 0;
            assert_eq!(answer(libc::SYS_fallocate, -4, 3, mode), if moves_data { -4 } else { -514 }, "mode {mode}");
        }
    }

    #[test]
    fn a_call_changes_its_own_registers_only() {
        let before = stopped(libc::SYS_nanosleep, -516);
        let call = calling(&before, 0x5000, libc::SYS_madvise, &[1, 2, 3, 4, 5, 6]);
        assert_eq!((call.rip, signed(call.rax), call.orig_rax), (0x5000, libc::SYS_madvise, u64::MAX));
        assert_eq!((call.rdi, call.rsi, call.rdx, call.r10, call.r8, call.r9), (1, 2, 3, 4, 5, 6));
        assert_eq!((call.rsp, call.rbx, call.rbp, call.rcx), (before.rsp, before.rbx, before.rbp, before.rcx));
        assert!(in_syscall(&before) && !in_syscall(&call));
    }

    #[test]
    fn a_return_restarts_the_calls_that_the_kernel_would() {
        for nr in [-1, libc::SYS_read, libc::SYS_poll, libc::SYS_restart_syscall] {
            for rax in [-516, -515, -514, -513, -512, -511, -4, 0, 7] {
                let own = stopped(nr, rax);
                let home = return_registers(&own, Some(libc::SYS_futex));
                let again = nr >= 0 && [-516, -514, -513, -512].contains(&rax);
                let number = if nr == libc::SYS_restart_syscall { libc::SYS_futex } else { nr };
                let expected = if again { (own.rip - 2, number) } else { (own.rip, rax) };
                assert_eq!((home.rip, signed(home.rax)), expected, "call {nr} answering {rax}");
                assert_eq!(words(&Registers { rip: own.rip, rax: own.rax, ..home }), words(&own));
            }
        }
        assert_eq!(signed(return_registers(&stopped(219, -516), None).rax), libc::SYS_restart_syscall);
    }

    #[test]
    fn the_number_of_a_call_is_read_from_the_code() {
        assert_eq!(number_in_code(&[0x90, 0xb8, 7, 0, 0, 0]), Some(libc::SYS_poll));
        assert_eq!(number_in_code(&[0xb8, 7, 0, 0, 0, 0xb8, 202, 0, 0, 0, 0x40, 0x80]), Some(libc::SYS_futex));
        assert_eq!(number_in_code(&[0xb8, 219, 0, 0, 0, 0x90]), None);
        assert_eq!(number_in_code(&[0xb8, 7]), None);
    }

    #[test]
    fn a_thread_with_a_frame_returns_by_it() {
        let own = stopped(libc::SYS_futex, -512);
        let returning = returning(&own, 0x8000, 0x3000);
        assert_eq!((returning.rip, returning.rsp, returning.orig_rax), (0x3000, 0x8008, u64::MAX));
        let entering = entering(&own, 0x8000, 0x4002, libc::SYS_madvise, &[1, 2, 3, 4, 5, 6]);
        assert_eq!((entering.rip, entering.rsp, signed(entering.orig_rax)), (0x4002, 0x8000, libc::SYS_madvise));
        assert_eq!((entering.rdi, entering.r9, entering.rbx), (1, 6, own.rbx));
    }

    #[test]
    fn critical_sections_are_half_open() {
        let registers = stopped(-1, 0);
        assert!(in_critical_section(&registers, 0x1000, 1));
        assert!(!in_critical_section(&registers, 0x1001, 100) && !in_critical_section(&registers, 0xfff, 1));
        assert!(!in_critical_section(&registers, 0, 0));
    }
}

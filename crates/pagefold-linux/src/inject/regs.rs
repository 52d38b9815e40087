//! What a thread's registers must be so that it notices nothing.
//!
//! A thread that blocks in a system call is woken by the tracer's interrupt. Most calls answer the
//! kernel's private errors 512 to 516, and the kernel turns these into a restart on the way back to
//! the program, if nothing but the tracer was there. That works on the registers as they are then, so
//! restoring them all, `orig_rax` included, is enough. Some calls answer a plain EINTR instead, which
//! goes to the program. They are restarted by putting ERESTARTNOHAND in its place: the kernel then
//! restarts the call unless a handler is to run, and in that case makes it the EINTR it was.

use super::ptrace::Registers;
use super::{signed, unsigned};

/// Code segment selector of 64-bit programs.
const USER_CS_64: u64 = 0x33;
/// The kernel's "restart unless a handler runs".
const ERESTARTNOHAND: i64 = 514;

/// Missing in the libc crate.
const SYS_IO_PGETEVENTS: i64 = 333;

/// Whether the registers are those of a thread that runs 64-bit code.
pub fn is_64_bit(registers: &Registers) -> bool {
    registers.cs == USER_CS_64
}

/// Whether the thread was stopped on its way out of a system call (and not on its way back from an interrupt).
pub fn in_syscall(registers: &Registers) -> bool {
    signed(registers.orig_rax) >= 0
}

/// Whether the instruction pointer lies in the critical section `[start, start + length)`.
pub fn in_critical_section(registers: &Registers, start: u64, length: u64) -> bool {
    registers.rip.wrapping_sub(start) < length
}

/// Calls that answer EINTR although they have done nothing yet, and can therefore simply be made again.
///
/// The socket calls do so when the socket has SO_RCVTIMEO or SO_SNDTIMEO; without, they answer ERESTARTSYS. A call
/// that has transferred something answers the count, so EINTR means that nothing was.
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

/// The registers to leave the thread with, given those it was stopped with.
///
/// `by_us`: the stop was the tracer's, not one of job control, which may end a call with EINTR by itself.
/// `by_syscall_instruction`: the two bytes before `rip` are `syscall`; after `int 0x80` the number would be of the
/// 32-bit table.
pub fn repaired(stopped: &Registers, by_us: bool, by_syscall_instruction: bool) -> Registers {
    let mut registers = *stopped;
    let interrupted = signed(stopped.rax) == -i64::from(libc::EINTR);
    if by_us && by_syscall_instruction && interrupted && repairable(signed(stopped.orig_rax)) {
        registers.rax = unsigned(-ERESTARTNOHAND);
    }
    registers
}

/// The registers that make the thread run one call at `instruction`, a `syscall` instruction.
pub fn calling(stopped: &Registers, instruction: u64, nr: i64, args: &[u64; 6]) -> Registers {
    let mut registers = *stopped;
    registers.rip = instruction;
    registers.rax = unsigned(nr);
    // Not in a system call: the kernel must not "restart" the registers set here.
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
                let expected = if rax == -4 && repairable(nr) { -514 } else { rax };
                assert_eq!(signed(after.rax), expected, "call {nr} answering {rax}");
                // Nothing else is touched.
                assert_eq!(words(&Registers { rax: before.rax, ..after }), words(&before));
                assert_eq!(words(&repaired(&before, false, true)), words(&before), "a stop of job control");
                assert_eq!(words(&repaired(&before, true, false)), words(&before), "int 0x80");
            }
        }
        for never in [libc::SYS_write, libc::SYS_nanosleep, libc::SYS_futex, libc::SYS_close, libc::SYS_ioctl, -1] {
            assert!(!repairable(never));
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
    fn critical_sections_are_half_open() {
        let registers = stopped(-1, 0);
        assert!(in_critical_section(&registers, 0x1000, 1));
        assert!(!in_critical_section(&registers, 0x1001, 100) && !in_critical_section(&registers, 0xfff, 1));
        assert!(!in_critical_section(&registers, 0, 0));
    }
}

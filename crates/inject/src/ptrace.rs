//! Thin wrappers of ptrace and related system calls.
//!
//! All of this may run while a target's registers are borrowed, so nothing here may panic or allocate.

use super::Errno;
use pagefold_engine::units::count;

/// The general-purpose registers of a thread.
pub type Registers = libc::user_regs_struct;

const PTRACE_CONT: u64 = 7;
const PTRACE_DETACH: u64 = 17;
const PTRACE_PEEKDATA: u64 = 2;
const PTRACE_GETREGS: u64 = 12;
const PTRACE_SETREGS: u64 = 13;
const PTRACE_SYSCALL: u64 = 24;
const PTRACE_SETOPTIONS: u64 = 0x4200;
const PTRACE_GETSIGINFO: u64 = 0x4202;
const PTRACE_GETREGSET: u64 = 0x4204;
const PTRACE_SEIZE: u64 = 0x4206;
const PTRACE_INTERRUPT: u64 = 0x4207;
const PTRACE_PEEKSIGINFO: u64 = 0x4209;
const PTRACE_GETSIGMASK: u64 = 0x420a;
const PTRACE_SETSIGMASK: u64 = 0x420b;
const PTRACE_GET_SYSCALL_INFO: u64 = 0x420e;
const PTRACE_GET_RSEQ_CONFIGURATION: u64 = 0x420f;
const PTRACE_GET_SYSCALL_USER_DISPATCH_CONFIG: u64 = 0x4211;

/// Sets bit 7 of the signal at system-call stops, to distinguish them from a real SIGTRAP.
pub const OPTION_TRACESYSGOOD: u64 = 1;
/// Suspends the thread's seccomp filters while set. Linux 4.3; needs CAP_SYS_ADMIN.
pub const OPTION_SUSPEND_SECCOMP: u64 = 1 << 21;

const EVENT_STOP: i32 = 128;
const SYSCALL_STOP: i32 = libc::SIGTRAP | 0x80;

/// The next event of a tracee.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TraceeEvent {
    Nothing,
    /// Stopped by [`interrupt`] or by job control.
    Trap {
        /// SIGTRAP, or the signal of the group stop.
        signal: i32,
    },
    /// Stopped before this signal is delivered.
    Signal(i32),
    /// At the entry to or the exit from a system call.
    Syscall,
    /// Dead, or no longer traced by this thread.
    Gone,
}

/// The address of memory of this process, for the kernel to write to.
pub fn address_of_mut<T>(value: &mut T) -> u64 {
    word(std::ptr::from_mut(value).expose_provenance())
}

/// The address of memory of this process, for the kernel to read.
fn address_of<T>(value: &T) -> u64 {
    word(std::ptr::from_ref(value).expose_provenance())
}

/// An address in the tracee, as an `iovec` wants it.
fn pointer(addr: u64) -> *mut libc::c_void {
    std::ptr::without_provenance_mut(usize::from_ne_bytes(addr.to_ne_bytes()))
}

/// `usize` and `u64` have the same size here.
fn word(number: usize) -> u64 {
    u64::from_ne_bytes(number.to_ne_bytes())
}

fn ptrace(request: u64, tid: i32, addr: u64, data: u64) -> Result<i64, Errno> {
    // SAFETY: the callers below pass a plain number, or the address of memory that is valid for what the kernel reads
    // or writes with that request.
    let result = unsafe { libc::syscall(libc::SYS_ptrace, request, i64::from(tid), addr, data) };
    if result < 0 { Err(Errno::last()) } else { Ok(result) }
}

/// Makes a request whose result only says whether it succeeded.
fn order(request: u64, tid: i32, addr: u64, data: u64) -> Result<(), Errno> {
    ptrace(request, tid, addr, data)?;
    Ok(())
}

/// Attaches to a thread, without stopping it.
pub fn seize(tid: i32) -> Result<(), Errno> {
    order(PTRACE_SEIZE, tid, 0, 0)
}

pub fn interrupt(tid: i32) -> Result<(), Errno> {
    order(PTRACE_INTERRUPT, tid, 0, 0)
}

/// Resumes a stopped tracee until its next event. Delivers `signal` unless it's 0.
pub fn resume(tid: i32, signal: i32) -> Result<(), Errno> {
    order(PTRACE_CONT, tid, 0, u64::from(signal.unsigned_abs()))
}

/// Resumes a stopped tracee until its next system-call entry or exit.
pub fn resume_to_syscall(tid: i32) -> Result<(), Errno> {
    order(PTRACE_SYSCALL, tid, 0, 0)
}

/// Detaches from a stopped tracee. Delivers `signal` unless it's 0.
pub fn detach(tid: i32, signal: i32) -> Result<(), Errno> {
    order(PTRACE_DETACH, tid, 0, u64::from(signal.unsigned_abs()))
}

pub fn set_options(tid: i32, options: u64) -> Result<(), Errno> {
    order(PTRACE_SETOPTIONS, tid, 0, options)
}

pub fn registers(tid: i32) -> Result<Registers, Errno> {
    // SAFETY: the structure is plain integers, and zero is a value of them.
    let mut registers: Registers = unsafe { std::mem::zeroed() };
    ptrace(PTRACE_GETREGS, tid, 0, address_of_mut(&mut registers))?;
    Ok(registers)
}

pub fn set_registers(tid: i32, registers: &Registers) -> Result<(), Errno> {
    order(PTRACE_SETREGS, tid, 0, address_of(registers))
}

/// The set of blocked signals, bit `n - 1` for signal `n`.
pub fn signal_mask(tid: i32) -> Result<u64, Errno> {
    let mut mask = 0_u64;
    ptrace(PTRACE_GETSIGMASK, tid, 8, address_of_mut(&mut mask))?;
    Ok(mask)
}

pub fn set_signal_mask(tid: i32, mask: u64) -> Result<(), Errno> {
    order(PTRACE_SETSIGMASK, tid, 8, address_of(&mask))
}

/// Reads one word of the tracee's memory, even where the tracee itself can't read.
pub fn peek(tid: i32, addr: u64) -> Result<u64, Errno> {
    let mut word = 0_u64;
    // The raw system call stores the word through its last argument.
    ptrace(PTRACE_PEEKDATA, tid, addr, address_of_mut(&mut word))?;
    Ok(word)
}

/// Reads all of `bytes` from the tracee's memory at `addr`, or fails.
pub fn read(tid: i32, addr: u64, bytes: &mut [u8]) -> Result<(), Errno> {
    let local = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    let remote = libc::iovec { iov_base: pointer(addr), iov_len: bytes.len() };
    // SAFETY: `local` is valid for writing, and both outlive the call.
    let read = unsafe { libc::process_vm_readv(tid, &raw const local, 1, &raw const remote, 1, 0) };
    if usize::try_from(read) == Ok(bytes.len()) { Ok(()) } else { Err(Errno::last()) }
}

/// Writes to the tracee's memory at `addr`. Fails where the tracee can't write, perhaps after a part is written.
pub fn write(tid: i32, addr: u64, bytes: &[u8]) -> Result<(), Errno> {
    let local = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let remote = libc::iovec { iov_base: pointer(addr), iov_len: bytes.len() };
    // SAFETY: `local` is only read, and both outlive the call.
    let written = unsafe { libc::process_vm_writev(tid, &raw const local, 1, &raw const remote, 1, 0) };
    if usize::try_from(written) == Ok(bytes.len()) { Ok(()) } else { Err(Errno::last()) }
}

/// Reads the floating-point and vector state in XSAVE's standard (not compacted) format. Returns its length.
pub fn xstate(tid: i32, bytes: &mut [u8]) -> Result<usize, Errno> {
    const NT_X86_XSTATE: u64 = 0x202;
    register_set(tid, NT_X86_XSTATE, bytes)
}

/// Whether the thread has a shadow stack (Linux 6.6 and later).
pub fn has_shadow_stack(tid: i32) -> bool {
    const NT_X86_SHSTK: u64 = 0x204;
    register_set(tid, NT_X86_SHSTK, &mut [0; 8]).is_ok()
}

fn register_set(tid: i32, set: u64, bytes: &mut [u8]) -> Result<usize, Errno> {
    let mut room = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    ptrace(PTRACE_GETREGSET, tid, set, address_of_mut(&mut room))?;
    Ok(room.iov_len)
}

/// The pending signals of the thread and of its process, bit `n - 1` for signal `n`. `None` if they're too many to
/// inspect.
pub fn pending_signals(tid: i32) -> Option<u64> {
    const BATCH: usize = 8;
    const MOST: u64 = 512;
    const SHARED: u32 = 1;
    let mut pending = 0;
    for flags in [0, SHARED] {
        let mut first = 0_u64;
        loop {
            // SAFETY: the structure is plain data, and zero is a value of it.
            let mut infos: [libc::siginfo_t; BATCH] = unsafe { std::mem::zeroed() };
            // struct ptrace_peeksiginfo_args: index of the first, flags, and how many.
            let wanted = [first, u64::from(flags) | count(BATCH) << 32];
            let found = ptrace(PTRACE_PEEKSIGINFO, tid, address_of(&wanted), address_of_mut(&mut infos)).ok()?;
            let found = usize::try_from(found).unwrap_or(0).min(BATCH);
            for info in &infos[..found] {
                pending |= 1_u64 << (info.si_signo - 1).clamp(0, 63);
            }
            if found < BATCH {
                break;
            }
            first += count(found);
            if first >= MOST {
                return None;
            }
        }
    }
    Some(pending)
}

/// Why the kernel raised a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SignalCause {
    /// `si_code`.
    pub code: i32,
    /// `si_addr`, which only the signal of a fault has.
    pub address: u64,
}

/// The cause of the signal that the tracee is about to receive. `None` if a process sent it. (A process can forge a
/// kernel's signal to itself; we can't tell.)
pub fn signal_cause(tid: i32) -> Option<SignalCause> {
    // SAFETY: the structure is plain data, and zero is a value of it.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    ptrace(PTRACE_GETSIGINFO, tid, 0, address_of_mut(&mut info)).ok()?;
    // SI_USER, SI_QUEUE and SI_TKILL are zero or negative; SI_KERNEL (0x80) and the codes of faults are positive.
    if info.si_code <= 0 {
        return None;
    }
    // SAFETY: the structure is plain data, whichever member the kernel has set.
    let address = word(unsafe { info.si_addr() }.addr());
    Some(SignalCause { code: info.si_code, address })
}

/// The system call that a tracee is about to enter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SyscallEntry {
    pub nr: u64,
    pub args: [u64; 6],
    /// The address after its `syscall` instruction.
    pub rip: u64,
}

/// The 64-bit system call that a stopped tracee is about to enter. `None` if it isn't about to enter one, or enters one
/// of the 32-bit table. Linux 5.3.
pub fn syscall_entry(tid: i32) -> Result<Option<SyscallEntry>, Errno> {
    const ENTRY: u64 = 1;
    const AUDIT_ARCH_X86_64: u64 = 0xc000_003e;
    // struct ptrace_syscall_info: operation and architecture, instruction pointer, stack pointer, number, arguments.
    let mut info = [0_u64; 11];
    ptrace(PTRACE_GET_SYSCALL_INFO, tid, count(size_of_val(&info)), address_of_mut(&mut info))?;
    let [head, rip, _, nr, args @ .., _] = info;
    let is_64_bit = head & 0xff == ENTRY && head >> 32 == AUDIT_ARCH_X86_64;
    Ok(is_64_bit.then_some(SyscallEntry { nr, args, rip }))
}

/// The address of the thread's area for restartable sequences (rseq); 0 if it has none.
pub fn rseq_area(tid: i32) -> Result<u64, Errno> {
    let mut configuration = [0_u64; 3];
    ptrace(PTRACE_GET_RSEQ_CONFIGURATION, tid, 24, address_of_mut(&mut configuration))?;
    Ok(configuration[0])
}

/// Whether the thread gets SIGSYS for its own system calls (syscall user dispatch, as in Wine). Linux 6.4.
pub fn dispatches_syscalls(tid: i32) -> Result<bool, Errno> {
    let mut configuration = [0_u64; 4];
    ptrace(PTRACE_GET_SYSCALL_USER_DISPATCH_CONFIG, tid, 32, address_of_mut(&mut configuration))?;
    Ok(configuration[0] != 0)
}

/// Reads the next event of a tracee without waiting. Consumes a stop, but not a death: the target may be a child of
/// this process, and its exit status belongs to the code that started it.
///
/// Sees only tracees of the calling thread (`__WNOTHREAD`). After an exec by another thread the main thread's id
/// belongs to a new task, which isn't traced but may be a child of this process.
pub fn poll(tid: i32) -> TraceeEvent {
    const STOPS: i32 = libc::WSTOPPED | libc::WNOHANG | libc::__WALL | libc::__WNOTHREAD;
    const BOTH: i32 = STOPS | libc::WEXITED | libc::WNOWAIT;
    match wait(tid, BOTH) {
        Some((0, _)) => TraceeEvent::Nothing,
        Some((libc::CLD_TRAPPED | libc::CLD_STOPPED, _)) => match wait(tid, STOPS) {
            // SIGKILL has just ended the stop. The next poll sees the death.
            None | Some((0, _)) => TraceeEvent::Nothing,
            Some((_, status)) => match status {
                SYSCALL_STOP => TraceeEvent::Syscall,
                status if status >> 8 == EVENT_STOP => TraceeEvent::Trap { signal: status & 0x7f },
                signal => TraceeEvent::Signal(signal & 0x7f),
            },
        },
        _ => TraceeEvent::Gone,
    }
}

/// Returns `si_code` and `si_status`: zeros if there's no event, `None` if there's no such tracee.
fn wait(tid: i32, flags: i32) -> Option<(i32, i32)> {
    // SAFETY: the structure is plain data, and zero is a value of it.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    // SAFETY: `info` outlives the call. We make the raw system call, because libc's `waitid` is a cancellation point.
    let result =
        unsafe { libc::syscall(libc::SYS_waitid, libc::P_PID, tid, &raw mut info, flags, std::ptr::null_mut::<u8>()) };
    if result < 0 {
        return None;
    }
    // SAFETY: for a zeroed or a SIGCHLD structure this member is initialised.
    Some((info.si_code, unsafe { info.si_status() }))
}

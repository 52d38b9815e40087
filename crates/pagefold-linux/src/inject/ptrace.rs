//! The system calls of tracing, as they are: thin, allocation-free, no policy.
//!
//! Everything here may run while a target's registers are not its own, so nothing here may panic
//! or allocate.

use super::Errno;

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
const PTRACE_GET_RSEQ_CONFIGURATION: u64 = 0x420f;
const PTRACE_GET_SYSCALL_USER_DISPATCH_CONFIG: u64 = 0x4211;

/// System-call stops are told from SIGTRAP by bit 7.
pub const OPTION_TRACESYSGOOD: u64 = 1;
/// The thread's seccomp filters sleep while this is set. Linux 4.3, needs CAP_SYS_ADMIN.
pub const OPTION_SUSPEND_SECCOMP: u64 = 1 << 21;

const EVENT_STOP: i32 = 128;
const SYSCALL_STOP: i32 = libc::SIGTRAP | 0x80;

/// What a look at a tracee found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TraceeEvent {
    /// Nothing new.
    Nothing,
    /// Stopped by our interrupt (`signal` is SIGTRAP) or by job control (the stopping signal).
    Trap {
        /// SIGTRAP, or the signal of the group stop.
        signal: i32,
    },
    /// About to be given this signal.
    Signal(i32),
    /// At the entry to or the exit from a system call.
    Syscall,
    /// Dead, or no longer ours.
    Gone,
}

fn ptrace(request: u64, tid: i32, addr: u64, data: u64) -> Result<i64, Errno> {
    // SAFETY: the callers below pass, for each request, an address of memory that is valid for what
    // the kernel reads or writes there, or a plain number.
    let result = unsafe { libc::syscall(libc::SYS_ptrace, request, i64::from(tid), addr, data) };
    if result < 0 { Err(Errno::last()) } else { Ok(result) }
}

/// Starts tracing without stopping anything.
pub fn seize(tid: i32) -> Result<(), Errno> {
    ptrace(PTRACE_SEIZE, tid, 0, 0).map(drop)
}

/// Asks for a stop.
pub fn interrupt(tid: i32) -> Result<(), Errno> {
    ptrace(PTRACE_INTERRUPT, tid, 0, 0).map(drop)
}

/// Lets a stopped tracee go on until something happens to it, handing it `signal` if not zero.
pub fn resume(tid: i32, signal: i32) -> Result<(), Errno> {
    ptrace(PTRACE_CONT, tid, 0, u64::from(signal.unsigned_abs())).map(drop)
}

/// Lets a stopped tracee go on to its next system-call entry or exit.
pub fn resume_to_syscall(tid: i32) -> Result<(), Errno> {
    ptrace(PTRACE_SYSCALL, tid, 0, 0).map(drop)
}

/// Ends the tracing of a stopped tracee, handing it `signal` if not zero.
pub fn detach(tid: i32, signal: i32) -> Result<(), Errno> {
    ptrace(PTRACE_DETACH, tid, 0, u64::from(signal.unsigned_abs())).map(drop)
}

/// Replaces the options.
pub fn set_options(tid: i32, options: u64) -> Result<(), Errno> {
    ptrace(PTRACE_SETOPTIONS, tid, 0, options).map(drop)
}

/// All general-purpose registers.
pub fn registers(tid: i32) -> Result<Registers, Errno> {
    // SAFETY: the structure is plain integers, for which zero is a value.
    let mut registers: Registers = unsafe { std::mem::zeroed() };
    ptrace(PTRACE_GETREGS, tid, 0, &raw mut registers as u64)?;
    Ok(registers)
}

/// Sets all general-purpose registers.
pub fn set_registers(tid: i32, registers: &Registers) -> Result<(), Errno> {
    ptrace(PTRACE_SETREGS, tid, 0, std::ptr::from_ref(registers) as u64).map(drop)
}

/// The set of blocked signals, bit `n - 1` for signal `n`.
pub fn signal_mask(tid: i32) -> Result<u64, Errno> {
    let mut mask = 0_u64;
    ptrace(PTRACE_GETSIGMASK, tid, 8, &raw mut mask as u64)?;
    Ok(mask)
}

/// Sets the set of blocked signals.
pub fn set_signal_mask(tid: i32, mask: u64) -> Result<(), Errno> {
    ptrace(PTRACE_SETSIGMASK, tid, 8, &raw const mask as u64).map(drop)
}

/// One word of the tracee's memory, readable by it or not.
pub fn peek(tid: i32, addr: u64) -> Result<u64, Errno> {
    let mut word = 0_u64;
    // The raw system call stores the word through its last argument; only libc's wrapper returns it.
    ptrace(PTRACE_PEEKDATA, tid, addr, &raw mut word as u64)?;
    Ok(word)
}

/// Copies the tracee's memory from `addr` on. All or nothing.
pub fn read(tid: i32, addr: u64, bytes: &mut [u8]) -> Result<(), Errno> {
    let local = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    let remote = libc::iovec { iov_base: addr as *mut libc::c_void, iov_len: bytes.len() };
    // SAFETY: `local` is valid for writing, and both outlive the call.
    let read = unsafe { libc::process_vm_readv(tid, &raw const local, 1, &raw const remote, 1, 0) };
    if usize::try_from(read) == Ok(bytes.len()) { Ok(()) } else { Err(Errno::last()) }
}

/// Writes to the tracee's memory from `addr` on, where it may write itself. After an error some may be written.
pub fn write(tid: i32, addr: u64, bytes: &[u8]) -> Result<(), Errno> {
    let local = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let remote = libc::iovec { iov_base: addr as *mut libc::c_void, iov_len: bytes.len() };
    // SAFETY: `local` is only read, and both outlive the call.
    let written = unsafe { libc::process_vm_writev(tid, &raw const local, 1, &raw const remote, 1, 0) };
    if usize::try_from(written) == Ok(bytes.len()) { Ok(()) } else { Err(Errno::last()) }
}

/// The floating-point and vector state, in the format of XSAVE that is not compacted. Returns its length.
pub fn xstate(tid: i32, bytes: &mut [u8]) -> Result<usize, Errno> {
    const NT_X86_XSTATE: u64 = 0x202;
    register_set(tid, NT_X86_XSTATE, bytes)
}

/// Whether the thread has a shadow stack. Linux 6.6; before, none has.
pub fn has_shadow_stack(tid: i32) -> bool {
    const NT_X86_SHSTK: u64 = 0x204;
    register_set(tid, NT_X86_SHSTK, &mut [0; 8]).is_ok()
}

fn register_set(tid: i32, set: u64, bytes: &mut [u8]) -> Result<usize, Errno> {
    let mut room = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    ptrace(PTRACE_GETREGSET, tid, set, &raw mut room as u64)?;
    Ok(room.iov_len)
}

/// Whether a signal outside of `mask` waits to be delivered, among the first of the queues.
pub fn has_pending(tid: i32, mask: u64) -> bool {
    const LOOKED_AT: usize = 8;
    const SHARED: u32 = 1;
    // SAFETY: the structure is plain data, for which zero is a value.
    let mut infos: [libc::siginfo_t; LOOKED_AT] = unsafe { std::mem::zeroed() };
    [0, SHARED].into_iter().any(|flags| {
        // struct ptrace_peeksiginfo_args: the first one's index, flags, and how many.
        let wanted = [0_u64, u64::from(flags) | (LOOKED_AT as u64) << 32];
        let found = ptrace(PTRACE_PEEKSIGINFO, tid, &raw const wanted as u64, infos.as_mut_ptr() as u64).unwrap_or(0);
        infos.iter().take(usize::try_from(found).unwrap_or(0)).any(|info| mask >> (info.si_signo - 1) & 1 == 0)
    })
}

/// Whether the signal that the tracee is about to be given came from a fault of its own.
pub fn signal_is_fault(tid: i32) -> bool {
    // SAFETY: the structure is plain data, for which zero is a value.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    // SI_USER, SI_QUEUE and SI_TKILL are zero or negative; SI_KERNEL (0x80) and the fault codes are positive.
    ptrace(PTRACE_GETSIGINFO, tid, 0, &raw mut info as u64).is_ok() && info.si_code > 0
}

/// Where the thread registered its restartable sequences, zero if nowhere.
pub fn rseq_area(tid: i32) -> Result<u64, Errno> {
    let mut configuration = [0_u64; 3];
    ptrace(PTRACE_GET_RSEQ_CONFIGURATION, tid, 24, configuration.as_mut_ptr() as u64)?;
    Ok(configuration[0])
}

/// Whether the thread has its system calls sent to itself as SIGSYS (Wine does). Linux 6.4.
pub fn dispatches_syscalls(tid: i32) -> Result<bool, Errno> {
    let mut configuration = [0_u64; 4];
    ptrace(PTRACE_GET_SYSCALL_USER_DISPATCH_CONFIG, tid, 32, configuration.as_mut_ptr() as u64)?;
    Ok(configuration[0] != 0)
}

/// Looks at a tracee without waiting. Takes notice of a stop; leaves a death to whoever is to reap it:
/// the target may be a child of this very process, and its exit status belongs to the code that started it.
pub fn poll(tid: i32) -> TraceeEvent {
    const BOTH: i32 = libc::WSTOPPED | libc::WEXITED | libc::WNOHANG | libc::WNOWAIT | libc::__WALL;
    const STOPS: i32 = libc::WSTOPPED | libc::WNOHANG | libc::__WALL;
    match wait(tid, BOTH) {
        Some((0, _)) => TraceeEvent::Nothing,
        Some((libc::CLD_TRAPPED | libc::CLD_STOPPED, _)) => match wait(tid, STOPS) {
            // A stop that is over before it is taken notice of was ended by SIGKILL; the next look sees the death.
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

/// `si_code` and `si_status`, zeros when there is nothing, `None` when there is no such tracee.
fn wait(tid: i32, flags: i32) -> Option<(i32, i32)> {
    // SAFETY: the structure is plain data, for which zero is a value.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    // SAFETY: `info` outlives the call. The raw call, because libc's is a cancellation point.
    let result =
        unsafe { libc::syscall(libc::SYS_waitid, libc::P_PID, tid, &raw mut info, flags, std::ptr::null_mut::<u8>()) };
    if result < 0 {
        return None;
    }
    // SAFETY: for a zeroed or a SIGCHLD structure this member is initialised.
    Some((info.si_code, unsafe { info.si_status() }))
}

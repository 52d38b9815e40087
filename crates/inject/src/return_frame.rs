//! The frame by which a thread gets its own registers back if we die while it has borrowed ones. Before we change a
//! thread's registers, we write a genuine signal frame with its own registers, floating-point state and signal mask
//! onto an unused page of its stack (`struct rt_sigframe`, arch/x86/include/asm/sigframe.h, laid out as by
//! `get_sigframe`; read in Linux 6.12, 6.15 and 6.18). From then on the kernel takes the thread to be in a signal
//! handler: whenever its tracer dies, it reaches `rt_sigreturn` and has its own state again. The steps in order, and
//! what the thread does if the tracer dies right after each:
//!
//! | step | without the tracer, the thread |
//! | --- | --- |
//! | options set, frame written | continues; the frame lies in unused memory |
//! | registers: at the `rt_sigreturn` function, stack pointer at the frame | returns by the frame; no call is made |
//! | all signals blocked | the same; the frame holds the thread's own mask |
//! | run to the entry of that `rt_sigreturn` | the same |
//! | there: the number and arguments of the call, the instruction pointer behind a `syscall` and before a `ret` | makes the call, then `ret` takes it to the `rt_sigreturn` function; if the kernel restarts the call, it executes the `syscall` |
//! | run to the exit of the call | the same |
//! | its mask restored (before the registers: in the other order it would be left with all signals blocked) | the same; handlers may run below the frame |
//! | its registers restored | continues |
//! | the frame replaced by zeros, options cleared | continues |
//!
//! The stack pointer is never below the frame, so nothing that runs there, a handler included, can damage it. We don't
//! start the call directly: we stop the thread at the entry of `rt_sigreturn` and replace that by the call. That's
//! because of seccomp, which is active again when the tracer is dead: `rt_sigreturn` passes strict mode and every
//! filter that lets a program handle signals. This leaves one microsecond unprotected, between our setting the call's
//! number and the filter's check of it.
//!
//! `rt_sigreturn` bypasses the kernel's restart of an interrupted call. So we point the frame's registers at the call's
//! `syscall` instruction, and the thread makes the call again ([`super::regs::return_registers`]). This differs from
//! the kernel's restart in one case: if a signal arrives during a stop whose tracer dies, its handler runs and then the
//! call is made again, even where it should return EINTR. (If the signal was pending before, we end the attempt and try
//! later.) In two more cases a call ends with EINTR if the tracer dies. One is a call that returns EINTR after any
//! interruption, if we die before we've set [`super::regs::repaired`], which is the first thing that we do in the stop.
//! The other is a call that an earlier stop has turned into `restart_syscall`, if the code doesn't show its number.

use super::ptrace::{self, Registers};
use super::trampoline::Trampoline;
use pagefold_engine::units::count;
use std::sync::LazyLock;

/// Room for the largest frame: AMX has 8 KiB of floating-point state, everything else less than 3 KiB.
const LONGEST: usize = 16 << 10;

/// `struct _fpx_sw_bytes` in the floating-point state, and the magic numbers in it and at the end of the state.
const SW_BYTES: usize = 464;
const SW_BYTES_LENGTH: usize = 48;
const MAGIC1: u32 = 0x4650_5853;
const MAGIC2: u32 = 0x4650_5845;
/// `struct xstate_header`: `xfeatures`, `xcomp_bv`.
const HEADER: usize = 512;
const XSTATE_LEAST: usize = 576;
const X87_SSE: u64 = 3;
const PKRU: u64 = 1 << 9;
/// AMX's tiles. The kernel extends a thread's state for them when it first uses them.
const AMX_DATA: u64 = 1 << 18;

/// `struct ucontext` as far as `rt_sigreturn` reads it.
const UCONTEXT_LENGTH: u64 = 304;
const UC_STACK_FLAGS: usize = 24;
const UC_REGISTERS: usize = 40;
const UC_FPSTATE: usize = 224;
const UC_SIGMASK: usize = 296;
/// UC_FP_XSTATE, UC_SIGCONTEXT_SS and UC_STRICT_RESTORE_SS.
const UC_FLAGS: u64 = 7;
/// An invalid value: neither SS_ONSTACK nor SS_DISABLE nor 0. `do_sigaltstack` refuses it, `restore_altstack` ignores
/// the error, and the thread keeps its alternate stack.
const SS_INVALID: u64 = 4;

pub struct ReturnFrame {
    frame: Box<[u8; LONGEST]>,
    length: usize,
    /// The address of the frame. Its first word is the address of the `rt_sigreturn` function, for `ret`. The
    /// `rt_sigreturn` call itself needs a stack pointer 8 bytes above.
    pub base: u64,
}

impl ReturnFrame {
    /// Allocates everything now, because we mustn't allocate during the stop.
    pub fn new() -> Self {
        feature_ends();
        Self { frame: Box::new([0; LONGEST]), length: 0, base: 0 }
    }

    /// Builds the frame that gives the stopped thread `tid` the registers `goal` and the signal mask `mask`. `room`
    /// finds unused memory of a given length and returns its end. Returns false if this thread can't have a frame.
    pub fn prepare(
        &mut self,
        tid: i32,
        goal: &Registers,
        mask: u64,
        trampoline: Trampoline,
        room: impl FnOnce(u64) -> Option<u64>,
    ) -> bool {
        self.length = 0;
        // With a shadow stack, `ret` refuses an address that no `call` has pushed.
        if ptrace::has_shadow_stack(tid) {
            return false;
        }
        // The floating-point state's place in the frame depends on its length, so we first read it to the beginning of
        // the buffer.
        let Ok(read) = ptrace::xstate(tid, &mut self.frame[..]) else { return false };
        if read >= LONGEST {
            return false;
        }
        let Some(state) = XstateSizes::of(&self.frame[..read]) else { return false };
        let Some(top) = room(FrameLayout::bytes(state.full)) else { return false };
        let Some(layout) = FrameLayout::below(top, state.full) else { return false };
        let fpstate = usize::try_from(layout.fpstate - layout.base).unwrap_or(LONGEST);
        let ucontext = usize::try_from(layout.ucontext - layout.base).unwrap_or(LONGEST);
        let end = fpstate + state.full + size_of::<u32>();
        if end > LONGEST {
            return false;
        }
        self.frame.copy_within(..state.full, fpstate);
        self.frame[..fpstate].fill(0);
        put(&mut self.frame[..], 0, trampoline.sigreturn);
        fill_ucontext(&mut self.frame[ucontext..fpstate], goal, mask, layout.fpstate);
        state.seal(&mut self.frame[fpstate..end]);
        self.base = layout.base;
        self.length = end;
        true
    }

    /// Writes the frame to the thread's memory, which holds zeros there. If that fails, zeroes the memory again and
    /// returns false.
    pub fn write(&mut self, tid: i32) -> bool {
        let written = ptrace::write(tid, self.base, &self.frame[..self.length]).is_ok();
        if !written {
            self.unwrite(tid);
        }
        written
    }

    /// Zeroes those parts of the frame in the thread's memory that are still as we wrote them. Doesn't allocate.
    pub fn unwrite(&self, tid: i32) {
        const STEP: usize = 1024;
        let mut found = [0; STEP];
        for (part, addr) in self.frame[..self.length].chunks(STEP).zip((self.base..).step_by(STEP)) {
            let found = &mut found[..part.len()];
            if ptrace::read(tid, addr, found).is_ok() && found == part {
                let _ = ptrace::write(tid, addr, &[0; STEP][..part.len()]);
            }
        }
    }

    /// The length of the frame, bytes; 0 if we have none.
    pub fn length(&self) -> u64 {
        count(self.length)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FrameLayout {
    base: u64,
    ucontext: u64,
    fpstate: u64,
}

impl FrameLayout {
    /// The most bytes that a frame takes, however its end is aligned.
    fn bytes(xstate_length: usize) -> u64 {
        count(xstate_length + size_of::<u32>()) + 64 + UCONTEXT_LENGTH + 16 + 8
    }

    fn below(top: u64, xstate_length: usize) -> Option<Self> {
        let fpstate = top.checked_sub(count(xstate_length + size_of::<u32>()))? & !63;
        let ucontext = fpstate.checked_sub(UCONTEXT_LENGTH)? & !15;
        Some(Self { base: ucontext.checked_sub(8)?, ucontext, fpstate })
    }
}

/// What a frame says about its floating-point state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct XstateSizes {
    /// The features that aren't in their initial state. `rt_sigreturn` resets all others.
    features: u64,
    /// The size that the frame declares, bytes: all features that every thread has, and AMX if it's in use.
    declared: usize,
    full: usize,
}

impl XstateSizes {
    fn of(xstate: &[u8]) -> Option<Self> {
        if word(xstate, HEADER + 8)? != 0 {
            return None; // compacted, which the kernel doesn't do here
        }
        let possible = word(xstate, SW_BYTES)?;
        // The kernel writes the protection keys even if the header doesn't list them.
        let features = word(xstate, HEADER)? | X87_SSE | (possible & PKRU);
        let full = end_of(possible);
        // If the length differs, the state has a feature whose place we don't know.
        if full != xstate.len() {
            return None;
        }
        Some(Self { features, declared: end_of(possible & !AMX_DATA | features), full })
    }

    /// Adds the magic numbers that make a floating-point state part of a signal frame (`check_xstate_in_sigframe`). The
    /// caller has left room for the second one after the state. The kernel looks for the second one at the declared
    /// size. Linux 6.15 up to a revert in 7.1, and stable kernels with the same change, look at the thread's own size
    /// instead, which includes AMX once the thread has used it. We write the number to both places: if AMX isn't in
    /// use, nothing else is there.
    fn seal(self, xstate: &mut [u8]) {
        let size = u32::try_from(self.declared).unwrap_or(0);
        xstate[SW_BYTES..SW_BYTES + SW_BYTES_LENGTH].fill(0);
        put(xstate, SW_BYTES, u64::from(MAGIC1) | u64::from(size + 4) << 32);
        put(xstate, SW_BYTES + 8, self.features);
        put(xstate, SW_BYTES + 16, u64::from(size));
        put(xstate, HEADER, self.features);
        for at in [self.declared, self.full] {
            xstate[at..at + size_of::<u32>()].copy_from_slice(&MAGIC2.to_le_bytes());
        }
    }
}

/// Where each feature's part of the state ends, in XSAVE's standard format. We read all of them once and not in a stop:
/// in a virtual machine each CPUID traps to the host, which took 35 us.
fn feature_ends() -> &'static [usize; 63] {
    static ENDS: LazyLock<[usize; 63]> = LazyLock::new(|| {
        std::array::from_fn(|feature| {
            #[allow(unused_unsafe)] // safe in newer compilers than the oldest supported
            // SAFETY: all 64-bit processors have the instruction; it returns zeros for unknown leaves.
            let leaf = unsafe { std::arch::x86_64::__cpuid_count(0xd, u32::try_from(feature).unwrap_or(0)) };
            usize::try_from(leaf.eax.saturating_add(leaf.ebx)).unwrap_or(usize::MAX)
        })
    });
    &ENDS
}

/// Where the state ends if it has these features.
fn end_of(features: u64) -> usize {
    let mut end = XSTATE_LEAST;
    for (feature, &feature_end) in feature_ends().iter().enumerate().skip(2) {
        if features >> feature & 1 != 0 {
            end = end.max(feature_end);
        }
    }
    end
}

fn fill_ucontext(bytes: &mut [u8], goal: &Registers, mask: u64, fpstate: u64) {
    let selectors = (goal.cs & 0xffff) | (goal.ss & 0xffff) << 48;
    put(bytes, 0, UC_FLAGS);
    put(bytes, UC_STACK_FLAGS, SS_INVALID);
    // struct sigcontext_64
    let words = [
        goal.r8,
        goal.r9,
        goal.r10,
        goal.r11,
        goal.r12,
        goal.r13,
        goal.r14,
        goal.r15,
        goal.rdi,
        goal.rsi,
        goal.rbp,
        goal.rbx,
        goal.rdx,
        goal.rax,
        goal.rcx,
        goal.rsp,
        goal.rip,
        goal.eflags,
        selectors,
    ];
    for (index, word) in words.into_iter().enumerate() {
        put(bytes, UC_REGISTERS + index * 8, word);
    }
    put(bytes, UC_FPSTATE, fpstate);
    put(bytes, UC_SIGMASK, mask);
}

fn word(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

fn put(bytes: &mut [u8], at: usize, word: u64) {
    bytes[at..at + 8].copy_from_slice(&word.to_le_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_of_a_frame_do_not_overlap() {
        for top in 0x7fff_0000..0x7fff_0080_u64 {
            for length in [XSTATE_LEAST, 832, 2696, 11_008] {
                let layout = FrameLayout::below(top, length).unwrap();
                assert!(layout.fpstate + length as u64 + 4 <= top && layout.fpstate % 64 == 0);
                assert!(layout.base + FrameLayout::bytes(length) >= top);
                assert!(layout.ucontext + UCONTEXT_LENGTH <= layout.fpstate);
                assert_eq!((layout.base + 8, layout.ucontext % 16), (layout.ucontext, 0));
            }
        }
        assert_eq!(FrameLayout::below(500, XSTATE_LEAST), None);
    }

    #[test]
    fn the_sizes_of_a_state_follow_from_its_features() {
        let avx = feature_ends()[2].max(XSTATE_LEAST);
        let mut xstate = vec![0; avx];
        put(&mut xstate, SW_BYTES, X87_SSE | 4);
        let sizes = XstateSizes { features: X87_SSE, declared: avx, full: avx };
        assert_eq!(XstateSizes::of(&xstate), Some(sizes), "the full size, whether in use or not");
        put(&mut xstate, HEADER, 4);
        assert_eq!(XstateSizes::of(&xstate), Some(XstateSizes { features: X87_SSE | 4, ..sizes }));
        put(&mut xstate, HEADER + 8, 1 << 63);
        assert_eq!(XstateSizes::of(&xstate), None, "compacted");
        assert_eq!(XstateSizes::of(&xstate[..500]), None);
        assert_eq!(XstateSizes::of(&vec![0; avx + 64]), None, "features of unknown position");
        let amx = feature_ends()[18];
        if amx > avx {
            let mut xstate = vec![0; amx];
            put(&mut xstate, SW_BYTES, X87_SSE | 4 | AMX_DATA);
            assert_eq!(XstateSizes::of(&xstate), Some(XstateSizes { features: X87_SSE, declared: avx, full: amx }));
            put(&mut xstate, HEADER, AMX_DATA);
            assert_eq!(XstateSizes::of(&xstate).unwrap().declared, amx);
        }
    }

    #[test]
    fn a_sealed_state_has_the_second_magic_number_wherever_a_kernel_looks() {
        let mut xstate = vec![0; 2816 + 4];
        XstateSizes { features: 7, declared: 832, full: 2816 }.seal(&mut xstate);
        assert_eq!(xstate[SW_BYTES..SW_BYTES + 8], [0x53, 0x58, 0x50, 0x46, 0x44, 3, 0, 0]);
        let magic2 = [0x45, 0x58, 0x50, 0x46];
        assert_eq!((xstate[HEADER], &xstate[832..836], &xstate[2816..]), (7, &magic2[..], &magic2[..]));
    }
}

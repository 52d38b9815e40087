//! We check the general-purpose, x87, vector and mask registers, MXCSR, the carry flag (while counting), and the memory
//! below the stack pointer.

use crate::checks::HARMLESS;
use std::arch::global_asm;
use std::mem::offset_of;
use std::ops::Range;
use std::sync::LazyLock;
use std::sync::atomic::AtomicU32;

const GENERAL: usize = 15;
pub const RCX: usize = 13;
/// The size of the red zone below the stack pointer, in bytes.
pub const RED: usize = 128;
/// The size of XSAVE's area with everything up to AVX-512.
const AREA: usize = 2688;

/// An area for XSAVE, in its standard format.
#[derive(Clone)]
#[repr(C, align(64))]
struct Area([u8; AREA]);

/// The registers and memory that we load before the code runs, and their values afterwards.
#[repr(C)]
pub struct Frame<const BELOW: usize> {
    /// rax rdi rsi rdx r10 r8 r9 rbx rbp r12 r13 r14 r15 rcx r11
    pub general: [u64; GENERAL],
    pub general_after: [u64; GENERAL],
    code: Code,
    features: u64,
    below_bytes: usize,
    extended: Area,
    extended_after: Area,
    /// Our own state, to return with.
    own: Area,
    /// The memory below the stack pointer, ending with the red zone.
    below: [u8; BELOW],
    below_after: [u8; BELOW],
}

/// Where the probe continues once all registers are loaded.
pub type Code = unsafe extern "C" fn();

/// Ends [`victim_busy`].
#[unsafe(no_mangle)]
pub static VICTIM_STOP: AtomicU32 = AtomicU32::new(0);

unsafe extern "C" {
    fn victim_probe(frame: *mut libc::c_void);
    pub fn victim_call();
    static victim_after_call: u8;
    fn victim_spin();
    static victim_spinning: u8;
    static victim_spun: u8;
    // If a stop interrupts one of these calls, the kernel doesn't show which one it was; only the code does. So each
    // has code of its own.
    pub fn victim_nanosleep();
    pub fn victim_futex();
    pub fn victim_poll();
    pub fn victim_busy();
}

global_asm!(
    r"
.globl victim_probe, victim_call, victim_after_call, victim_spin
.globl victim_spinning, victim_spun
.globl victim_nanosleep, victim_futex, victim_poll, victim_busy
victim_probe:
    push rbx
    push rbp
    push r12
    push r13
    push r14
    push r15
    push qword ptr [rdi + {code}]
    push rdi
    mov rbx, rdi
    mov rax, [rbx + {features}]
    xor edx, edx
    xsave [rbx + {own}]
    lea rsi, [rbx + {below}]
    mov rcx, [rbx + {below_bytes}]
    mov rdi, rsp
    sub rdi, rcx
    rep movsb
    xrstor [rbx + {extended}]
    mov rax, rbx
    .set victim_offset, 8
    .irp register, rdi, rsi, rdx, r10, r8, r9, rbx, rbp, r12, r13, r14, r15, rcx, r11
    mov \register, [rax + victim_offset]
    .set victim_offset, victim_offset + 8
    .endr
    mov rax, [rax]
    jmp qword ptr [rsp + 8]
victim_call:
    syscall
victim_after_call:
    jmp 3f
victim_spin:
    stc
victim_spinning:
    dec rcx
    jnz victim_spinning
victim_spun:
    adc rcx, 0
    jmp 3f
victim_nanosleep:
    mov eax, 35
    syscall
    jmp 3f
victim_futex:
    mov eax, 202
    syscall
    jmp 3f
victim_poll:
    mov eax, 7
    syscall
    jmp 3f
victim_busy:
    pause
    cmp dword ptr [rip + VICTIM_STOP], 0
    je victim_busy
3:  xchg rax, [rsp]
    .set victim_offset, {after} + 8
    .irp register, rdi, rsi, rdx, r10, r8, r9, rbx, rbp, r12, r13, r14, r15, rcx, r11
    mov [rax + victim_offset], \register
    .set victim_offset, victim_offset + 8
    .endr
    mov rbx, rax
    mov rax, [rsp]
    mov [rbx + {after}], rax
    mov rax, [rbx + {features}]
    xor edx, edx
    xsave [rbx + {extended_after}]
    lea rdi, [rbx + {below}]
    mov rcx, [rbx + {below_bytes}]
    add rdi, rcx
    mov rsi, rsp
    sub rsi, rcx
    rep movsb
    xrstor [rbx + {own}]
    add rsp, 16
    pop r15
    pop r14
    pop r13
    pop r12
    pop rbp
    pop rbx
    ret
",
    code = const offset_of!(Frame<RED>, code),
    features = const offset_of!(Frame<RED>, features),
    below_bytes = const offset_of!(Frame<RED>, below_bytes),
    extended = const offset_of!(Frame<RED>, extended),
    extended_after = const offset_of!(Frame<RED>, extended_after),
    own = const offset_of!(Frame<RED>, own),
    below = const offset_of!(Frame<RED>, below),
    after = const offset_of!(Frame<RED>, general_after),
);

/// The address after the `syscall` instruction of [`call`].
pub fn after_syscall() -> i64 {
    i64::try_from((&raw const victim_after_call).addr()).unwrap_or(0)
}

/// The addresses of the loop in which [`spin`] counts.
pub fn spinning() -> Range<i64> {
    let [start, end] = [&raw const victim_spinning, &raw const victim_spun].map(<*const u8>::addr);
    i64::try_from(start).unwrap_or(0)..i64::try_from(end).unwrap_or(0)
}

/// The extended state that this processor has.
struct Extended {
    /// x87, SSE, AVX and the three parts of AVX-512, as a mask for XSAVE.
    features: u64,
    /// The bytes to compare. We leave out the last x87 instruction and operand, and bytes that XSAVE doesn't write.
    compared: [Range<usize>; 8],
}

static EXTENDED: LazyLock<Extended> = LazyLock::new(|| {
    use std::arch::x86_64::{__cpuid_count, _xgetbv};
    #[target_feature(enable = "xsave")]
    #[allow(unused_unsafe)]
    unsafe fn enabled() -> u64 {
        unsafe { _xgetbv(0) }
    }
    let features = unsafe { enabled() } & 0xe7;
    #[allow(unused_unsafe)]
    let part = |feature: u32| {
        let leaf = unsafe { __cpuid_count(0xd, feature) };
        let length = if features >> feature & 1 == 0 { 0 } else { leaf.eax };
        leaf.ebx as usize..(leaf.ebx + length) as usize
    };
    let compared = [0..5, 24..28, 32..416, 512..520, part(2), part(5), part(6), part(7)];
    assert!(compared.iter().all(|part| part.end <= AREA));
    Extended { features, compared }
});

/// Detects the processor's features now, before a filter or a handler interferes.
pub fn prepare() {
    LazyLock::force(&EXTENDED);
}

/// A register or byte that has changed.
#[derive(Clone, Copy, Debug)]
pub struct Difference {
    what: &'static str,
    number: usize,
}

impl From<Difference> for String {
    fn from(difference: Difference) -> Self {
        format!("{} {} changed", difference.what, difference.number)
    }
}

impl<const BELOW: usize> Frame<BELOW> {
    pub fn new(code: Code, seed: u64) -> Self {
        let mut state = seed.wrapping_mul(HARMLESS) | 1;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(HARMLESS);
            state ^ (state >> 29)
        };
        let mut extended = Area([0; AREA]);
        let mut below = [0; BELOW];
        let bytes = &mut extended.0;
        let (registers, rest) = bytes.split_at_mut(576);
        for word in [&mut registers[32..416], rest, &mut below].into_iter().flat_map(|part| part.chunks_exact_mut(8)) {
            word.copy_from_slice(&next().to_le_bytes());
        }
        // The x87 registers have 80 of 128 bits.
        registers[32..160].chunks_exact_mut(16).for_each(|register| register[10..].fill(0));
        // x87: a control word that isn't the default, registers 0 to 2 in use, so the top of the stack is register 5.
        registers[0..2].copy_from_slice(&0x0e7f_u16.to_le_bytes());
        registers[2..4].copy_from_slice(&0x2800_u16.to_le_bytes());
        registers[4] = 0xe0;
        // MXCSR: rounds to zero, all exceptions masked.
        registers[24..28].copy_from_slice(&0x7f80_u32.to_le_bytes());
        registers[512..520].copy_from_slice(&EXTENDED.features.to_le_bytes());
        Self {
            general: std::array::from_fn(|_| next()),
            general_after: [0; GENERAL],
            code,
            features: EXTENDED.features,
            below_bytes: BELOW,
            extended,
            extended_after: Area([0; AREA]),
            own: Area([0; AREA]),
            below,
            below_after: [0; BELOW],
        }
    }

    pub fn run(&mut self) {
        unsafe { victim_probe((&raw mut *self).cast()) };
    }

    /// Compares these general-purpose registers, all other registers, and the red zone. Doesn't allocate, because it
    /// runs in signal handlers.
    pub fn check(&self, general: Range<usize>) -> Result<(), Difference> {
        let compare = |what, mut numbers: Range<usize>, differs: &dyn Fn(usize) -> bool| {
            numbers.find(|&number| differs(number)).map_or(Ok(()), |number| Err(Difference { what, number }))
        };
        compare("general-purpose register", general, &|at| self.general[at] != self.general_after[at])?;
        for part in &EXTENDED.compared {
            let differs = |at: usize| self.extended.0[at] != self.extended_after.0[at];
            compare("byte of the extended registers", part.clone(), &differs)?;
        }
        compare("byte of the red zone", BELOW - RED..BELOW, &|at| self.below[at] != self.below_after[at])
    }

    /// Whether the memory below the red zone is unchanged.
    pub fn is_clean(&self) -> bool {
        self.below[..BELOW - RED] == self.below_after[..BELOW - RED]
    }
}

/// Makes a system call and checks that every register survives it, except the ones that the call itself changes.
pub fn call(nr: i64, args: [u64; 6]) -> Result<i64, String> {
    let mut frame = Frame::<RED>::new(victim_call, args[1] ^ 0x1234_5678);
    frame.general[0] = u64::from_ne_bytes(nr.to_ne_bytes());
    frame.general[1..7].copy_from_slice(&args);
    frame.run();
    let describe = |what| format!("{}: {:x?} after {:x?}", String::from(what), frame.general_after, frame.general);
    // We don't compare rax, rcx and r11, which the call changes.
    frame.check(1..RCX).map_err(describe)?;
    let answer = i64::from_ne_bytes(frame.general_after[0].to_ne_bytes());
    if (-4095..-133).contains(&answer) { Err(format!("leaked errno {answer}")) } else { Ok(answer) }
}

/// Counts down for `rounds` rounds, each a third of a nanosecond or so. Checks that every register survives this.
pub fn spin(rounds: u64) -> Result<(), Difference> {
    let mut frame = Frame::<RED>::new(victim_spin, rounds);
    frame.general[RCX] = rounds.max(1);
    frame.run();
    // Afterwards rcx holds the carry flag.
    frame.general[RCX] = 1;
    frame.check(0..GENERAL)
}

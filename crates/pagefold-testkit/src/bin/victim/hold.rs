//! Fills all registers before a system call or a computation, and checks them afterwards.
//!
//! These are the general-purpose registers, the vector registers as wide as the processor has them, the mask registers
//! of AVX-512, the x87 stack, MXCSR, the carry flag (while computing) and the red zone below the stack pointer.

use crate::checks::HARMLESS;
use std::arch::global_asm;
use std::mem::offset_of;
use std::sync::LazyLock;

const GENERAL: usize = 15;
const RCX: usize = 13;
const RED: usize = 16;
const VECTOR: usize = 32 * 8;
const X87: usize = 4;
/// Rounding upwards, all exceptions masked.
const MXCSR: u32 = 0x5f80;

#[repr(C)]
struct Frame {
    /// rax rdi rsi rdx r10 r8 r9 rbx rbp r12 r13 r14 r15 rcx r11
    general: [u64; GENERAL],
    general_after: [u64; GENERAL],
    red: [u64; RED],
    red_after: [u64; RED],
    x87: [f64; X87],
    x87_after: [f64; X87],
    masks: [u64; 8],
    masks_after: [u64; 8],
    level: u64,
    mxcsr: u32,
    mxcsr_after: u32,
    vector: [u64; VECTOR],
    vector_after: [u64; VECTOR],
}

unsafe extern "C" {
    fn victim_hold_call(frame: *mut Frame);
    fn victim_hold_spin(frame: *mut Frame);
    static victim_hold_after: u8;
}

global_asm!(
    r"
.macro victim_enter
    push rbx
    push rbp
    push r12
    push r13
    push r14
    push r15
    push rdi
    mov rax, rdi
    ldmxcsr [rax + {mxcsr}]
    .irp n, 0, 8, 16, 24
    fld qword ptr [rax + {x87} + \n]
    .endr
    mov rcx, [rax + {level}]
    cmp rcx, 1
    ja 23f
    je 22f
    .irp n, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15
    movups xmm\n, [rax + {vector} + \n * 64]
    .endr
    jmp 24f
22:
    .irp n, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15
    vmovdqu ymm\n, [rax + {vector} + \n * 64]
    .endr
    jmp 24f
23:
    .irp n, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31
    vmovdqu64 zmm\n, [rax + {vector} + \n * 64]
    .endr
    .irp n, 0, 1, 2, 3, 4, 5, 6, 7
    kmovq k\n, [rax + {masks} + \n * 8]
    .endr
24:
    .irp n, 0, 8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 104, 112, 120
    mov rcx, [rax + {red} + \n]
    mov [rsp - 128 + \n], rcx
    .endr
    mov rdi, [rax + 8]
    mov rsi, [rax + 16]
    mov rdx, [rax + 24]
    mov r10, [rax + 32]
    mov r8, [rax + 40]
    mov r9, [rax + 48]
    mov rbx, [rax + 56]
    mov rbp, [rax + 64]
    mov r12, [rax + 72]
    mov r13, [rax + 80]
    mov r14, [rax + 88]
    mov r15, [rax + 96]
    mov rcx, [rax + 104]
    mov r11, [rax + 112]
    mov rax, [rax]
.endm
.macro victim_leave
    xchg rax, [rsp]
    mov [rax + {after} + 8], rdi
    mov [rax + {after} + 16], rsi
    mov [rax + {after} + 24], rdx
    mov [rax + {after} + 32], r10
    mov [rax + {after} + 40], r8
    mov [rax + {after} + 48], r9
    mov [rax + {after} + 56], rbx
    mov [rax + {after} + 64], rbp
    mov [rax + {after} + 72], r12
    mov [rax + {after} + 80], r13
    mov [rax + {after} + 88], r14
    mov [rax + {after} + 96], r15
    mov [rax + {after} + 104], rcx
    mov [rax + {after} + 112], r11
    .irp n, 0, 8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 104, 112, 120
    mov rcx, [rsp - 128 + \n]
    mov [rax + {red_after} + \n], rcx
    .endr
    pop rcx
    mov [rax + {after}], rcx
    .irp n, 24, 16, 8, 0
    fstp qword ptr [rax + {x87_after} + \n]
    .endr
    stmxcsr [rax + {mxcsr_after}]
    mov rcx, [rax + {level}]
    cmp rcx, 1
    ja 33f
    je 32f
    .irp n, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15
    movups [rax + {vector_after} + \n * 64], xmm\n
    .endr
    jmp 34f
32:
    .irp n, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15
    vmovdqu [rax + {vector_after} + \n * 64], ymm\n
    .endr
    vzeroupper
    jmp 34f
33:
    .irp n, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31
    vmovdqu64 [rax + {vector_after} + \n * 64], zmm\n
    .endr
    .irp n, 0, 1, 2, 3, 4, 5, 6, 7
    kmovq [rax + {masks_after} + \n * 8], k\n
    .endr
    vzeroupper
34:
    push 0x1f80
    ldmxcsr [rsp]
    pop rcx
    pop r15
    pop r14
    pop r13
    pop r12
    pop rbp
    pop rbx
    ret
.endm
.globl victim_hold_call
victim_hold_call:
    victim_enter
    syscall
.globl victim_hold_after
victim_hold_after:
    victim_leave
.globl victim_hold_spin
victim_hold_spin:
    victim_enter
    stc
52: dec rcx
    jnz 52b
    adc rcx, 0
    victim_leave
",
    mxcsr = const offset_of!(Frame, mxcsr),
    mxcsr_after = const offset_of!(Frame, mxcsr_after),
    x87 = const offset_of!(Frame, x87),
    x87_after = const offset_of!(Frame, x87_after),
    level = const offset_of!(Frame, level),
    vector = const offset_of!(Frame, vector),
    vector_after = const offset_of!(Frame, vector_after),
    masks = const offset_of!(Frame, masks),
    masks_after = const offset_of!(Frame, masks_after),
    red = const offset_of!(Frame, red),
    red_after = const offset_of!(Frame, red_after),
    after = const offset_of!(Frame, general_after),
);

/// The address after the `syscall` instruction of [`call_held`].
pub fn after_syscall() -> i64 {
    i64::try_from((&raw const victim_hold_after).addr()).unwrap_or(0)
}

/// 0: SSE. 1: AVX. 2: AVX-512 with 64-bit masks.
static LEVEL: LazyLock<u64> = LazyLock::new(|| {
    if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bw") {
        2
    } else {
        u64::from(is_x86_feature_detected!("avx"))
    }
});

/// Detects the processor's features, before a filter or a handler interferes.
pub fn prepare() {
    LazyLock::force(&LEVEL);
}

impl Frame {
    fn new(seed: u64) -> Self {
        let mut state = seed.wrapping_mul(HARMLESS) | 1;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(HARMLESS);
            state ^ (state >> 29)
        };
        Self {
            general: std::array::from_fn(|_| next()),
            general_after: [0; GENERAL],
            red: std::array::from_fn(|_| next()),
            red_after: [0; RED],
            x87: [1.25, -2.5e300, 3.0e-300, 7.0],
            x87_after: [0.0; X87],
            masks: std::array::from_fn(|_| next()),
            masks_after: [0; 8],
            level: *LEVEL,
            mxcsr: MXCSR,
            mxcsr_after: 0,
            vector: std::array::from_fn(|_| next()),
            vector_after: [0; VECTOR],
        }
    }

    /// The difference. Does not allocate, because it runs in signal handlers.
    fn check(&self) -> Result<(), &'static str> {
        let (registers, words) = [(16, 2), (16, 4), (32, 8)][usize::try_from(self.level).unwrap_or(0)];
        let kept = |register: usize| {
            let range = register * 8..register * 8 + words;
            self.vector[range.clone()] == self.vector_after[range]
        };
        // The caller checks rax, rcx and r11.
        if self.general[1..RCX] != self.general_after[1..RCX] {
            Err("a general-purpose register changed")
        } else if self.red != self.red_after {
            Err("the red zone changed")
        } else if self.x87.map(f64::to_bits) != self.x87_after.map(f64::to_bits) {
            Err("an x87 register changed")
        } else if self.mxcsr_after & !0x3f != MXCSR {
            Err("MXCSR changed")
        } else if !(0..registers).all(kept) {
            Err("a vector register changed")
        } else if self.level == 2 && self.masks != self.masks_after {
            Err("a mask register changed")
        } else {
            Ok(())
        }
    }
}

/// Makes a system call and checks that every register survives it, except those that the call itself changes.
pub fn call_held(nr: i64, args: [u64; 6]) -> Result<i64, String> {
    let mut frame = Frame::new(args[1] ^ 0x1234_5678);
    frame.general[0] = u64::from_ne_bytes(nr.to_ne_bytes());
    frame.general[1..7].copy_from_slice(&args);
    unsafe { victim_hold_call(&raw mut frame) };
    let describe = |what| format!("{what}: {:x?} after {:x?}", frame.general_after, frame.general);
    frame.check().map_err(describe)?;
    let answer = i64::from_ne_bytes(frame.general_after[0].to_ne_bytes());
    if (-4095..-133).contains(&answer) { Err(format!("leaked errno {answer}")) } else { Ok(answer) }
}

/// Counts down, `rounds` of about a third of a nanosecond, and checks that every register survives it.
pub fn spin_held(rounds: u64) -> Result<(), &'static str> {
    let mut frame = Frame::new(rounds);
    frame.general[RCX] = rounds.max(1);
    unsafe { victim_hold_spin(&raw mut frame) };
    frame.check()?;
    let [first, .., counted, last] = frame.general_after;
    if counted != 1 {
        return Err("the counter or the carry flag changed");
    }
    if first != frame.general[0] || last != frame.general[GENERAL - 1] {
        return Err("rax or r11 changed");
    }
    Ok(())
}

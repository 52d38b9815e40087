//! Restartable sequences.

use std::arch::asm;

unsafe extern "C" {
    /// Where glibc has its area for restartable sequences, relative to the thread pointer.
    static __rseq_offset: isize;
    static __rseq_size: u32;
}

/// Spends half of the time in restartable sequences, until `done`. The kernel clears the pointer to a sequence when it
/// aborts it, or finds that the thread has left it. If a sequence runs to its end and the pointer is clear, the thread
/// was interrupted without an abort. Returns how many sequences were aborted.
pub fn sequences(mut done: impl FnMut() -> bool) -> Result<u64, String> {
    let (mut aborted, mut lost) = (0_u64, 0_u64);
    let area: u64;
    unsafe {
        if __rseq_size == 0 {
            return Err("skip: no restartable sequences".into());
        }
        let thread: u64;
        asm!("mov {}, fs:0", out(reg) thread);
        area = thread.wrapping_add_signed(__rseq_offset as i64);
    }
    while !done() {
        unsafe {
            asm!(
                ".pushsection .data.rel.rseq, \"aw\"",
                ".balign 32",
                "7: .long 0, 0",
                ".quad 3f, 4f - 3f, 5f",
                ".popsection",
                "lea {t}, [rip + 7b]",
                "mov [{area} + 8], {t}",
                "3: mov {t}, 100000",
                "6: dec {t}",
                "jnz 6b",
                "cmp qword ptr [{area} + 8], 0",
                "jne 4f",
                "inc {lost}",
                "4: jmp 8f",
                ".byte 0x0f, 0xb9, 0x3d",
                ".long 0x53053053",
                "5: inc {aborted}",
                "8: mov {t}, 100000",
                "9: dec {t}",
                "jnz 9b",
                area = in(reg) area, t = out(reg) _, lost = inout(reg) lost, aborted = inout(reg) aborted,
            );
        }
    }
    if lost == 0 { Ok(aborted) } else { Err(format!("{lost} sequences went on after an interruption")) }
}

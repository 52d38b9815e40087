//! Finds a `syscall` instruction in the target's code. We never write to that code.

use super::InjectError;
use super::code::Code;
use super::thread::Activity;
use pagefold_procmem::maps::{Names, each_mapping};
use pagefold_procmem::process::Process;
use std::io::Read;
use std::ops::ControlFlow;

/// The machine code of `syscall`.
const SYSCALL: [u8; 2] = [0x0f, 0x05];
/// We search this many bytes of each executable mapping. libc has a `syscall` instruction within its first pages of
/// code.
const SEARCHED_BYTES: u64 = 1 << 20;
/// We search this many bytes of all mappings together.
const SEARCHED_MOST: u64 = 64 << 20;
/// How many executable mappings of a process we search, at most.
const SEARCHED_MAPPINGS: usize = 4096;

/// Whether `word`, the memory at an instruction in little-endian order, begins with `syscall`.
pub fn is_syscall(word: u64) -> bool {
    word.to_le_bytes()[..2] == SYSCALL
}

/// Finds a `syscall` instruction that thread `tid` can execute. We prefer the one that the thread is blocked in, then
/// one in the vDSO (whose time functions fall back to the system call), then the first one in the populated pages of
/// the executable mappings.
pub fn find(process: &Process, tid: i32, activity: Activity, code: &Code) -> Result<u64, InjectError> {
    if let Activity::Syscall { pc, .. } = activity {
        let mut bytes = [0; 2];
        let at = pc.wrapping_sub(2);
        if code.read(&mut bytes, at) && bytes == SYSCALL {
            return Ok(at);
        }
    }
    // We read the thread's file, because the process's own is empty once its main thread has ended.
    let maps = process.open_file(&format!("task/{tid}/maps")).map_err(InjectError::from_read)?;
    let executable = executable(maps);
    if executable.is_empty() {
        // A process without memory is about to end.
        return Err(InjectError::Busy { pid: process.pid() });
    }
    find_in(process, code, &executable)
}

fn find_in(process: &Process, code: &Code, executable: &[Executable]) -> Result<u64, InjectError> {
    let mut has_code = false;
    let mut left = SEARCHED_MOST;
    for &Executable { start, end, vdso } in executable {
        if left == 0 {
            return Err(InjectError::NoInstruction { pid: process.pid() });
        }
        let mut found = None;
        let length = end.saturating_sub(start).min(SEARCHED_BYTES).min(left);
        left -= length;
        code.search(start..start + length, vdso, |at, bytes| {
            has_code = true;
            match bytes.windows(2).position(|pair| pair == SYSCALL) {
                Some(offset) => {
                    found = Some(at + u64::try_from(offset).unwrap_or(0));
                    ControlFlow::Break(())
                }
                None => ControlFlow::Continue(()),
            }
        })
        .map_err(InjectError::from_read)?;
        if let Some(found) = found {
            return Ok(found);
        }
    }
    if !has_code {
        // The process is in the middle of an exec.
        return Err(InjectError::Busy { pid: process.pid() });
    }
    Err(InjectError::NoInstruction { pid: process.pid() })
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Executable {
    pub(crate) start: u64,
    pub(crate) end: u64,
    pub(crate) vdso: bool,
}

/// The executable mappings in the text of `maps`, the vDSO first. Without the vsyscall page: `syscall` can't run there.
pub(crate) fn executable(maps: impl Read) -> Vec<Executable> {
    let mut found = Vec::new();
    // If reading fails, we use the mappings that we've read until then.
    let _ = each_mapping(maps, Names::Special, |vma| {
        if !vma.perms.read || !vma.perms.exec || vma.name == b"[vsyscall]" {
            return ControlFlow::Continue(());
        }
        let vdso = vma.inode == 0 && vma.name == b"[vdso]";
        let executable = Executable { start: vma.start, end: vma.end, vdso };
        if vdso {
            found.insert(0, executable);
        } else if found.len() < SEARCHED_MAPPINGS {
            found.push(executable);
        }
        ControlFlow::Continue(())
    });
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::code::tests::unmapped;
    use pagefold_engine::units::PAGE_BYTES;
    use std::os::unix::fs::FileExt;

    #[test]
    fn the_vdso_comes_first_and_the_vsyscall_page_is_left_out() {
        let maps = b"00400000-00401000 r-xp 00000000 08:01 12 /bin/x\n\
            00401000-00402000 rw-p 00000000 00:00 0 \n\
            7ffe0000-7ffe1000 --xp 00000000 00:00 0 \n\
            7fff0000-7fff2000 r-xp 00000000 00:00 0                          [vdso]\n\
            ffffffffff600000-ffffffffff601000 r-xp 00000000 00:00 0                  [vsyscall]\n";
        let found: Vec<_> = executable(&maps[..]).iter().map(|code| (code.start, code.end, code.vdso)).collect();
        assert_eq!(found, [(0x7fff_0000, 0x7fff_2000, true), (0x40_0000, 0x40_1000, false)]);
    }

    #[test]
    fn a_process_that_has_no_code_mapped_in_yet_is_asked_again() {
        let own = Process::open(i32::try_from(std::process::id()).unwrap()).unwrap();
        let code = Code::open(&own, own.pid()).unwrap();
        // As in the middle of an exec: a mapping of the program without a page in it.
        let start = unmapped(1);
        let found = find_in(&own, &code, &[Executable { start, end: start + PAGE_BYTES, vdso: false }]);
        assert!(matches!(found, Err(InjectError::Busy { .. })), "{found:?}");
    }

    #[test]
    fn not_all_of_much_code_is_searched() {
        let own = Process::open(i32::try_from(std::process::id()).unwrap()).unwrap();
        let code = Code::open(&own, own.pid()).unwrap();
        let mut executable = executable(own.open_file("maps").unwrap());
        assert!(find_in(&own, &code, &executable).is_ok());
        let empty = Executable { start: PAGE_BYTES, end: PAGE_BYTES + SEARCHED_BYTES, vdso: false };
        executable.splice(..0, vec![empty; 64]);
        assert!(matches!(find_in(&own, &code, &executable), Err(InjectError::NoInstruction { .. })));
    }

    #[test]
    fn an_instruction_is_found_in_this_process() {
        let own = Process::open(i32::try_from(std::process::id()).unwrap()).unwrap();
        let code = Code::open(&own, own.pid()).unwrap();
        let at = find(&own, own.pid(), Activity::Running, &code).unwrap();
        let mut word = [0; 8];
        own.open_file("mem").unwrap().read_exact_at(&mut word, at).unwrap();
        assert!(is_syscall(u64::from_le_bytes(word)) && !is_syscall(0x050f_0000));
    }
}

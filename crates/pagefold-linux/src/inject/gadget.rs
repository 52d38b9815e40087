//! Finds a `syscall` instruction in the target's code. Nothing is ever written to that code.

use super::InjectError;
use super::thread::Activity;
use crate::proc::process::{Process, ReadError};
use std::os::unix::fs::FileExt;

/// The two bytes of the instruction.
const SYSCALL: [u8; 2] = [0x0f, 0x05];
/// Bytes searched in each executable mapping. libc has one within its first pages of code.
const SEARCHED_BYTES: u64 = 1 << 20;
const CHUNK_BYTES: usize = 64 << 10;

/// Whether `word`, the memory at an instruction in little-endian order, begins with `syscall`.
pub fn is_syscall(word: u64) -> bool {
    word.to_le_bytes()[..2] == SYSCALL
}

/// Finds the address of a `syscall` instruction that thread `tid` can execute: the one it is blocked in, otherwise one
/// in the vDSO (where the time functions fall back to the system call), otherwise the first in its executable mappings.
pub fn find(process: &Process, tid: i32, activity: Activity) -> Result<u64, InjectError> {
    // The thread's file, because that of a process whose main thread has ended is empty.
    let memory = process.open_file(&format!("task/{tid}/mem")).map_err(InjectError::from_read)?;
    if let Activity::Syscall { pc, .. } = activity {
        let mut bytes = [0; 2];
        if memory.read_exact_at(&mut bytes, pc.wrapping_sub(2)).is_ok() && bytes == SYSCALL {
            return Ok(pc.wrapping_sub(2));
        }
    }
    let maps = process.read_file(&format!("task/{tid}/maps")).map_err(InjectError::from_read)?;
    let executable = executable(&maps);
    if executable.is_empty() {
        // Without memory it is about to end.
        return Err(InjectError::Busy { pid: process.pid() });
    }
    let mut chunk = vec![0; CHUNK_BYTES];
    for (start, end) in executable {
        let end = end.min(start.saturating_add(SEARCHED_BYTES));
        let mut at = start;
        while at < end {
            let length = usize::try_from(end - at).unwrap_or(CHUNK_BYTES).min(CHUNK_BYTES);
            let read = match memory.read_at(&mut chunk[..length], at) {
                // Its memory is gone: it is about to end, or has executed another program.
                Ok(0) => return Err(InjectError::Busy { pid: process.pid() }),
                Ok(read) => read,
                // A mapping beyond its file's end, or a device: try the next one.
                Err(error) if error.raw_os_error() == Some(libc::EIO) => break,
                Err(error) => {
                    return Err(InjectError::from_read(ReadError::from_io(process.pid(), "mem", error)));
                }
            };
            if let Some(found) = chunk[..read].windows(2).position(|pair| pair == SYSCALL) {
                return Ok(at + u64::try_from(found).unwrap_or(0));
            }
            // One byte of overlap, for an instruction across two chunks.
            at += u64::try_from(read).unwrap_or(0).saturating_sub(1).max(1);
            if read < length || at + 1 >= end {
                break;
            }
        }
    }
    Err(InjectError::NoInstruction { pid: process.pid() })
}

/// The executable mappings in the text of `maps`, the vDSO first. Not the vsyscall page, which cannot execute `syscall`.
pub(crate) fn executable(maps: &[u8]) -> Vec<(u64, u64)> {
    let mut found = Vec::new();
    for line in maps.split(|&byte| byte == b'\n') {
        let Ok(head) = std::str::from_utf8(&line[..line.len().min(60)]) else { continue };
        let mut fields = head.split_ascii_whitespace();
        let Some((start, end)) = fields.next().and_then(|range| range.split_once('-')) else { continue };
        let (Ok(start), Ok(end)) = (u64::from_str_radix(start, 16), u64::from_str_radix(end, 16)) else { continue };
        let readable_code =
            fields.next().is_some_and(|mode| mode.starts_with('r') && mode.as_bytes().get(2) == Some(&b'x'));
        if !readable_code || line.ends_with(b"[vsyscall]") {
            continue;
        }
        if line.ends_with(b"[vdso]") {
            found.insert(0, (start, end));
        } else {
            found.push((start, end));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_vdso_comes_first_and_the_vsyscall_page_is_left_out() {
        let maps = b"00400000-00401000 r-xp 00000000 08:01 12 /bin/x\n\
            00401000-00402000 rw-p 00000000 00:00 0 \n\
            7ffe0000-7ffe1000 --xp 00000000 00:00 0 \n\
            7fff0000-7fff2000 r-xp 00000000 00:00 0                          [vdso]\n\
            ffffffffff600000-ffffffffff601000 r-xp 00000000 00:00 0                  [vsyscall]\n";
        assert_eq!(executable(maps), [(0x7fff_0000, 0x7fff_2000), (0x40_0000, 0x40_1000)]);
    }

    #[test]
    fn an_instruction_is_found_in_this_process() {
        let own = Process::open(i32::try_from(std::process::id()).unwrap()).unwrap();
        let at = find(&own, own.pid(), Activity::Running).unwrap();
        let bytes = own.open_file("mem").unwrap();
        let mut word = [0; 8];
        bytes.read_exact_at(&mut word, at).unwrap();
        assert!(is_syscall(u64::from_le_bytes(word)) && !is_syscall(0x050f_0000));
    }
}

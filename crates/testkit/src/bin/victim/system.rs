//! Calls that several modes make.

use crate::hold::call;
use std::ptr::null_mut;

pub const WRITABLE: i32 = libc::PROT_READ | libc::PROT_WRITE;
pub const ANONYMOUS: i32 = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;

/// Maps memory at an address, or anywhere if it's 0.
pub fn map_at(at: usize, length: usize, access: i32, flags: i32, fd: i32) -> *mut u8 {
    let memory = unsafe { libc::mmap(at as *mut libc::c_void, length, access, flags, fd, 0) };
    assert_ne!(memory, libc::MAP_FAILED, "{}", std::io::Error::last_os_error());
    memory.cast()
}

pub fn map(length: usize, access: i32, flags: i32, fd: i32) -> *mut u8 {
    map_at(0, length, access, flags, fd)
}

pub fn anonymous(length: usize) -> *mut u8 {
    map(length, WRITABLE, ANONYMOUS, -1)
}

pub fn nanosleep_us(us: i64) -> Result<i64, String> {
    let time = libc::timespec { tv_sec: us / 1_000_000, tv_nsec: us % 1_000_000 * 1000 };
    call(libc::SYS_nanosleep, [(&raw const time).addr() as u64, 0, 0, 0, 0, 0])
}

/// Sleeps. Any other answer than 0 is an error.
pub fn sleep_us(us: i64) -> Result<(), String> {
    match nanosleep_us(us)? {
        0 => Ok(()),
        other => Err(format!("nanosleep answered {other}")),
    }
}

/// Starts a thread on this stack.
///
/// # Safety
/// The stack, and everything that `run` borrows, have to live until the thread has ended.
pub unsafe fn spawn_on(stack: *mut u8, length: usize, run: Box<dyn FnOnce() + '_>) -> libc::pthread_t {
    extern "C" fn start(given: *mut libc::c_void) -> *mut libc::c_void {
        let run = unsafe { Box::from_raw(given.cast::<Box<dyn FnOnce()>>()) };
        run();
        null_mut()
    }
    unsafe {
        let mut attributes: libc::pthread_attr_t = std::mem::zeroed();
        libc::pthread_attr_init(&raw mut attributes);
        libc::pthread_attr_setstack(&raw mut attributes, stack.cast(), length);
        let mut thread: libc::pthread_t = 0;
        let given = Box::into_raw(Box::new(run)).cast();
        assert_eq!(libc::pthread_create(&raw mut thread, &raw const attributes, start, given), 0);
        thread
    }
}

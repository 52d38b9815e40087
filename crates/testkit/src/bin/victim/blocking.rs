//! Pipes, epolls and children for the modes.

pub fn pipe() -> [i32; 2] {
    let mut ends = [0; 2];
    assert_eq!(unsafe { libc::pipe(ends.as_mut_ptr()) }, 0);
    ends
}

pub fn word(fd: i32) -> u64 {
    u64::from(fd.unsigned_abs())
}

pub fn epoll(fd: i32) -> i32 {
    unsafe {
        let epoll = libc::epoll_create1(0);
        let mut event = libc::epoll_event { events: 1, u64: 0 };
        libc::epoll_ctl(epoll, libc::EPOLL_CTL_ADD, fd, &raw mut event);
        epoll
    }
}

pub fn forked(child: impl FnOnce()) -> i32 {
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
        child();
        unsafe { libc::_exit(0) };
    }
    pid
}

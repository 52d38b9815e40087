use super::*;
use pagefold_testkit::{OwnedChild, skip_unsupported};
use rustix::thread::set_no_new_privs;
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::thread;

/// An error that none of these calls returns otherwise.
const REFUSED: i32 = libc::ENOTNAM;

/// Makes a call with these arguments, and returns the error. The last arguments are invalid, in case the call isn't
/// refused.
fn error_of(call: libc::c_long, arguments: &[i64]) -> i32 {
    let mut all = [-1; 6];
    all[..arguments.len()].copy_from_slice(arguments);
    let [first, second, third, fourth, fifth, sixth] = all;
    // SAFETY: no pointer among the arguments is valid, so the call reads and writes nothing of ours.
    let answer = unsafe { libc::syscall(call, first, second, third, fourth, fifth, sixth) };
    if answer == -1 { io::Error::last_os_error().raw_os_error().unwrap_or(0) } else { 0 }
}

#[test]
fn forbidden_calls_are_refused_and_a_daemon_can_work() {
    let (before, mut writer) = UnixStream::pair().unwrap();
    let filtered = move || {
        set_no_new_privs(true).unwrap();
        install(&mut filter(REFUSED)).unwrap();
        for &call in FORBIDDEN {
            // If the filter let them through, some of these calls would go on in a child.
            let error = error_of(call, &[]);
            if error != REFUSED {
                eprintln!("call {call}: {error}");
                std::process::abort();
            }
        }
        let own = i64::from(std::process::id());
        let init = 1;
        let x32 = 0x4000_0000 | libc::SYS_getpid;
        let new_process = i64::from(libc::SIGCHLD);
        let new_namespace = i64::from(libc::CLONE_THREAD | libc::CLONE_NEWNS);
        for (call, argument) in [
            (libc::SYS_clone, new_process),
            (libc::SYS_clone, new_namespace),
            (libc::SYS_kill, init),
            (libc::SYS_kill, -1),
            (libc::SYS_tgkill, init),
            (libc::SYS_socket, i64::from(libc::AF_INET)),
            (libc::SYS_socket, i64::from(libc::AF_NETLINK)),
            (x32, 0),
        ] {
            assert_eq!(error_of(call, &[argument, 0]), REFUSED, "call {call} of {argument}");
        }
        assert!(Command::new("true").spawn().is_err());
        // Signal 0 only checks whether we may send signals.
        assert_eq!(error_of(libc::SYS_kill, &[own, 0]), 0);
        assert_eq!(error_of(libc::SYS_socket, &[i64::from(libc::AF_UNIX), 1, 0]), 0);
        assert!(thread::spawn(|| File::open("/proc/1/stat").is_ok()).join().unwrap());
        // A thread started later has the filter, too.
        assert_eq!(thread::spawn(|| error_of(libc::SYS_setns, &[])).join().unwrap(), REFUSED);
        writer.write_all(b"done").unwrap();
    };
    thread::spawn(filtered).join().unwrap();
    let mut text = String::new();
    (&before).read_to_string(&mut text).unwrap();
    assert_eq!(text, "done");
    assert_ne!(error_of(libc::SYS_setns, &[]), REFUSED, "only that thread has the filter");
}

#[test]
fn under_landlock_files_and_other_processes_are_out_of_reach() {
    let other = OwnedChild(Command::new("sleep").arg("60").spawn().unwrap());
    let other = i64::from(other.pid());
    // The kernel first checks whether we may read the process. Only then does it fail to write the answer.
    let look = move || error_of(libc::SYS_get_robust_list, &[other]);
    let mut open = File::open("/proc/self/stat").unwrap();
    assert_eq!(look(), libc::EFAULT);
    let restricted = move || {
        set_no_new_privs(true).unwrap();
        if let Err(error) = forbid_files() {
            return skip_unsupported(format!("Landlock: {error}"));
        }
        for path in ["/etc/passwd", "/proc/self/stat", "/"] {
            assert_eq!(File::open(path).unwrap_err().kind(), io::ErrorKind::PermissionDenied, "{path}");
        }
        assert!(File::create("/tmp/pagefold-not-here").is_err());
        assert_eq!(look(), libc::EPERM);
        assert!(open.read(&mut [0; 16]).is_ok());
        assert!(thread::spawn(|| File::open("/etc/passwd").is_err()).join().unwrap());
    };
    thread::spawn(restricted).join().unwrap();
    assert!(File::open("/etc/passwd").is_ok(), "only that thread is restricted");
}

//! The `/init` of emulated machines. Runs the command in `/command.json` (the program and its arguments), and writes
//! its exit status to the second serial port.

use std::ffi::CString;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::process::Command;

fn main() {
    assert_eq!(std::process::id(), 1, "this is the /init of emulated machines");
    for (kind, at) in [
        ("proc", "/proc"),
        ("sysfs", "/sys"),
        ("devtmpfs", "/dev"),
        ("tmpfs", "/tmp"),
        ("tmpfs", "/run"),
        ("cgroup2", "/sys/fs/cgroup"),
    ] {
        mount(kind, at);
    }
    fs::write("/sys/fs/cgroup/cgroup.subtree_control", "+cpuset").expect("cpusets");
    let mut results = results();
    let text = fs::read_to_string("/command.json").expect("a command");
    let command: Vec<String> = serde_json::from_str(&text).expect("a command");
    let status = Command::new(&command[0]).args(&command[1..]).env("PAGEFOLD_PROGRAMS", "/bin").status();
    writeln!(results, "{}", status.expect("a program")).expect("the results");
    results.flush().expect("the results");
    // SAFETY: no memory is passed. The emulator ends instead of rebooting.
    unsafe {
        libc::tcdrain(results.as_raw_fd());
        libc::reboot(libc::RB_AUTOBOOT);
    }
}

fn mount(kind: &str, at: &str) {
    fs::create_dir_all(at).expect(at);
    let (kind, place) = (CString::new(kind).expect("no zeros"), CString::new(at).expect("no zeros"));
    // SAFETY: the strings end with zero.
    let done = unsafe { libc::mount(kind.as_ptr(), place.as_ptr(), kind.as_ptr(), 0, std::ptr::null()) };
    assert_eq!(done, 0, "mount {at}: {}", std::io::Error::last_os_error());
}

/// The second serial port. The kernel and the programs write to the first.
fn results() -> File {
    let port = OpenOptions::new().write(true).open("/dev/ttyS1").expect("/dev/ttyS1");
    // SAFETY: all zeros is a termios, and the calls read and write nothing else.
    unsafe {
        let mut how: libc::termios = std::mem::zeroed();
        libc::tcgetattr(port.as_raw_fd(), &raw mut how);
        libc::cfmakeraw(&raw mut how);
        libc::cfsetspeed(&raw mut how, libc::B115200);
        libc::tcsetattr(port.as_raw_fd(), libc::TCSANOW, &raw const how);
    }
    port
}

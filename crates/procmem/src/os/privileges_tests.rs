use super::*;
use crate::memory::{PageReader, ReadHow};
use crate::pagemap::{Pagemap, PagemapEntry};
use crate::process::{Process, ReadError};
use pagefold_engine::units::Vpn;
use pagefold_testkit::OwnedChild;
use std::process::{Command, Stdio};

/// Runs `act` on a separate thread that has dropped all capabilities but `kept`.
fn with_only<T: Send>(kept: &[Capability], act: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let acting = scope.spawn(|| {
            keep_only(kept).unwrap();
            act()
        });
        acting.join().unwrap()
    })
}

fn may_all() -> bool {
    let may = missing(&READING).unwrap().is_empty();
    if !may {
        pagefold_testkit::skip("not root, or without the capabilities to be tested");
    }
    may
}

struct Other(OwnedChild);

impl Other {
    fn start() -> Self {
        let user = ["--reuid=65534", "--regid=65534", "--clear-groups", "sleep", "60"];
        let child = Command::new("setpriv").args(user).stdin(Stdio::null()).spawn().expect("setpriv of util-linux");
        let pid = child.id();
        let is_asleep = || {
            let end = std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name == "sleep\n");
            // The process has called exec and finished starting.
            end && std::fs::read_to_string(format!("/proc/{pid}/syscall"))
                .is_ok_and(|call| !call.starts_with("running"))
        };
        while !is_asleep() {
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
        Self(OwnedChild(child))
    }

    fn process(&self) -> Process {
        Process::open(self.0.pid()).unwrap()
    }

    /// The last page of its stack, which is present.
    fn page(&self) -> Vpn {
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", self.0.pid())).unwrap();
        let stack = maps.lines().find(|line| line.ends_with("[stack]")).unwrap();
        let end = stack.split(['-', ' ']).nth(1).unwrap();
        Vpn(u64::from_str_radix(end, 16).unwrap() / 4096 - 1)
    }
}

fn frame(process: &Process, page: Vpn) -> Result<Option<u64>, ReadError> {
    let mut entry = [0];
    Pagemap::open(process)?.read(page, &mut entry)?;
    Ok(PagemapEntry(entry[0]).pfn())
}

fn reads(process: &Process, page: Vpn) -> bool {
    let mut seen = false;
    let how = ReadHow::default();
    let read = PageReader::new().read_runs(process, &[(page, 1)], how, |view| seen = view.bytes.is_some());
    read.is_ok() && seen
}

/// All three capabilities together let us read a process of another user. If any one is missing, something fails.
#[test]
#[cfg_attr(not(feature = "live"), ignore = "needs root")]
fn each_kept_capability_is_needed() {
    if !may_all() {
        return;
    }
    let other = Other::start();
    let page = other.page();
    let look = |kept: &[Capability]| {
        with_only(kept, || (frame(&other.process(), page).map_err(drop), reads(&other.process(), page)))
    };
    let but = |without| READING.into_iter().filter(|&capability| capability != without).collect::<Vec<_>>();
    assert!(matches!(look(&READING), (Ok(Some(_)), true)));
    // Newer kernels show the page table to CAP_SYS_ADMIN as well (`may_access_mm`, kernel/fork.c).
    assert!(!look(&but(Capability::CAP_SYS_PTRACE)).1, "no memory");
    assert_eq!(look(&but(Capability::CAP_DAC_READ_SEARCH)), (Err(()), false), "not even the page table");
    assert_eq!(look(&but(Capability::CAP_SYS_ADMIN)), (Ok(None), true), "no frames");
}

#[test]
fn missing_capabilities_are_listed() {
    with_only(&[Capability::CAP_SYS_ADMIN], || {
        let gone = missing(&READING).unwrap();
        assert!(gone.contains(&Capability::CAP_SYS_PTRACE), "{gone:?}");
        assert_eq!(Capability::CAP_SYS_PTRACE.to_string(), "CAP_SYS_PTRACE");
    });
}

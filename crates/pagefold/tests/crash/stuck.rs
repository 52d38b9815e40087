//! A target that does not release its mmap lock.
//!
//! The target maps a file of a frozen file system and populates a page of it for writing. That call waits for the thaw
//! in `page_mkwrite` with the lock held for reading (`faultin_page` in mm/gup.c). Another thread's mmap then waits to
//! take the lock for writing, so every further reader waits behind it: `smaps`, `pagemap`, `process_vm_readv` and ksmd.

use super::*;
use std::fs;
use std::time::{Duration, Instant};

const PROGRAM: &str = r#"
import ctypes, os, random, sys, threading, time
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
SHARED, PRIVATE_ANONYMOUS, POPULATE_WRITE = 1, 0x22, 23
held = random.Random(7).randbytes(8 << 20)
at = libc.mmap(None, 4096, 3, SHARED, os.open(sys.argv[1], os.O_RDWR), 0)
print("ready", flush=True)
sys.stdin.readline()
threading.Thread(target=lambda: libc.madvise(at, 4096, POPULATE_WRITE), daemon=True).start()
# Maps a page now and then until it has waited, too: on a busy machine the other thread takes the lock late.
waited = 0
while waited < 0.5:
    time.sleep(0.05)
    began = time.monotonic()
    libc.mmap(None, 4096, 3, PRIVATE_ANONYMOUS, -1, 0)
    waited = time.monotonic() - began
print("free", flush=True)
sys.stdin.readline()
print("intact" if held == random.Random(7).randbytes(8 << 20) else "damaged", flush=True)
"#;

/// The target, in a mount namespace with its file system. Dropping this thaws the file system and ends the target.
struct Stuck {
    script: Script,
    disk: Disk,
}

impl Stuck {
    /// `None` if we can't mount such a file system. Reports why.
    fn start() -> Option<Self> {
        let disk = Disk::mount()?;
        let file = format!("{}/file", disk.mount);
        output_of(disk.namespace.command("truncate").args(["-s", "4096", &file]));
        let mut script = Script::of(disk.namespace.command("python3").args(["-c", PROGRAM, &file]));
        assert_eq!(script.line(), "ready");
        Some(Self { script, disk })
    }

    fn pid(&self) -> i32 {
        self.script.pid()
    }

    /// Makes the target hold its lock.
    fn get_stuck(&mut self) {
        self.disk.set_frozen(true);
        self.script.say("now");
        wait_until("its main thread waits for the lock", || {
            fs::read_to_string(format!("/proc/{}/wchan", self.pid())).is_ok_and(|place| place.contains("mmap"))
                && state(self.pid()) == b'D'
        });
    }

    /// Thaws the file system; the program must then continue.
    fn thaw(&mut self) {
        self.disk.set_frozen(false);
        assert_eq!(self.script.line(), "free");
    }

    /// Ends the program, whose memory must be intact.
    fn end(mut self) {
        self.script.say("check");
        assert_eq!(self.script.line(), "intact");
    }
}

impl Drop for Stuck {
    fn drop(&mut self) {
        // We thaw before ending the program, which can't end while its file system is frozen.
        self.disk.thaw();
    }
}

#[test]
fn a_stuck_target_does_not_delay_others() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let Some(mut stuck) = Stuck::start() else { return };
    // The copy has a unique name, so that we can start another process of it while the target is stuck.
    let exe = ProgramCopy::unique();
    let spec = spec(COMMON_MIB, 0, 64);
    let first = Tenant::start(&exe, &spec).unwrap();
    let named = [format!("--pid={}", stuck.pid()), format!("--exe={}", exe.name())];
    // The target has equal pages. If it were marked before it's stuck, ksmd would wait for its lock, too.
    let daemon = Daemon::start(&["run", "--json", "--governor=full", "--duplicate-threshold=50", &named[0], &named[1]]);
    wait_until("the run has begun", || Path::new("/run/pagefold/control.sock").exists());
    stuck.get_stuck();
    let status = || String::from_utf8(pagefold(&["status"]).stdout).unwrap();
    wait_until("the status shows it", || status().contains("keeps its memory map locked"));
    // The other processes get marked all the same.
    let mut tenants = [first, Tenant::start(&exe, &spec).unwrap()];
    let began = Instant::now();
    let is_marked = |tenant: &Tenant| marks(tenant.pid()).marked >= COMMON_MIB * MIB / 100 * 95;
    wait_until("the others are marked", || tenants.iter().all(is_marked));
    println!("marked {} ms after the second one was started", began.elapsed().as_millis());
    std::thread::sleep(Duration::from_secs(1));
    println!("{} MiB saved while one is stuck", saved_bytes() / MIB);
    assert_eq!(state(stuck.pid()), b'D', "it is stuck still");
    let signalled = Instant::now();
    let left = daemon.terminate();
    println!("ended {} ms after the signal: {}", signalled.elapsed().as_millis(), left.errors);
    assert!(signalled.elapsed() < Duration::from_secs(30), "{left:?}");
    assert_eq!(left.code, Some(0), "{left:?}");
    assert!(left.errors.contains(&format!("process {}", stuck.pid())), "{left:?}");
    ksm.assert_knobs_restored();
    stuck.thaw();
    stuck.end();
    ksm.give_back(&pids(&tenants));
    assert_unharmed(&mut tenants);
}

/// The daemon answers the request while the target is stuck, and unmerges it once it releases its lock.
#[test]
fn a_stuck_target_is_unmerged_when_it_lets_go() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let Some(mut stuck) = Stuck::start() else { return };
    // The twin has the same memory.
    let Some(twin) = Stuck::start() else { return };
    let pids = [stuck.pid(), twin.pid()];
    let daemon = Daemon::on(&pids, &["--governor", "full"]).answering();
    wait_until_merged(&pids, 7 * MIB);
    wait_until("ksmd rests", || status()["busy"] == false);
    stuck.get_stuck();
    let began = Instant::now();
    let output = pagefold(&with_pids(&["unmerge", "--json"], &pids, &[]));
    println!("answered after {:?}", began.elapsed());
    assert!(began.elapsed() < Duration::from_secs(8), "{:?}", began.elapsed());
    assert_failed(
        &output,
        6,
        &format!("process {} (python3) keeps its memory map locked; pagefold keeps trying", pids[0]),
    );
    assert_unmarked(&pids[1..]);
    assert_eq!(state(stuck.pid()), b'D', "it is stuck still");
    let thawed = Instant::now();
    stuck.thaw();
    wait_until_unmarked(stuck.pid(), Duration::from_secs(30), "marked after it let go");
    println!("unmarked {:?} after it let go", thawed.elapsed());
    let reason = || row(&status()["processes"], "pid", stuck.pid())["left_alone"].clone();
    wait_until("the reason is shown", || reason() == "unmerged by request of uid 0");
    assert_eq!(daemon.stop()["knobs_restored"], true);
    ksm.assert_knobs_restored();
    stuck.end();
    drop(twin);
    ksm.give_back(&[Sleeper::start().pid()]);
}

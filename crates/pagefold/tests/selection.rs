//! Who is in scope, who isn't and why: the same in `scan`, `run`, `status` and `explain`.

use pagefold_testkit::*;
use serde_json::Value;
use std::fs;
use std::os::unix::fs::chown;
use std::process::Command;

const PAGES: u64 = 8 * PAGES_PER_MIB;

/// Why a process is left out, in the result of a scan.
fn left_out(scan: &Value, pid: i32) -> &Value {
    &row(&scan["processes"], "pid", pid)["left_out"]
}

/// Why a process is left alone, by the status of the daemon.
fn left_alone(pid: i32) -> Value {
    let status = status();
    let rows = status["processes"].as_array().unwrap();
    rows.iter().find(|row| row["pid"] == pid).map_or("not seen yet".into(), |row| row["left_alone"].clone())
}

/// A process with the same contents as all others of its test.
fn filled(mut holder: Holder, content: u64) -> Holder {
    holder.write(0, PAGES, content);
    holder
}

#[test]
fn whatever_a_selector_names_is_in_scope_or_listed_with_the_reason() {
    if !can_read_pages() {
        return;
    }
    let Some(_ksm) = KsmAtRest::take() else { return };
    let program = ProgramCopy::of(&victim_binary("holder"), "pf-upgraded");
    let foreign = ProgramCopy::of(&victim_binary("holder"), "pf-upgraded");
    let content = 0x5e1e_0001 << 32;
    let mut holders = vec![filled(Holder::start_as(&program, PAGES), content)];
    // Run it as in a service with PrivateTmp=, where it has copies of all mounts.
    let with_mounts = Holder::by(Command::new("unshare").args(["--mount", program.name()]), PAGES);
    holders.push(filled(with_mounts, content));
    let new = format!("{}.new", program.name());
    fs::copy(victim_binary("holder"), &new).unwrap();
    fs::rename(&new, program.name()).unwrap();
    holders.push(filled(Holder::start_as(&program, PAGES), content));
    chown(foreign.name(), Some(1234), None).unwrap();
    let stranger = filled(Holder::start_as(&foreign, PAGES), content);

    let reason = "can be changed by users other than root";
    let scan = json_of(&["scan", "--exe", "pf-upgraded"]);
    assert_eq!(scan["processes"].as_array().unwrap().len(), 4, "{scan}");
    assert!(scan["totals"]["savable_gross_bytes"].as_u64().unwrap() >= 15 * MIB, "{scan}");
    let pids: Vec<i32> = holders.iter().map(Holder::pid).collect();
    for &pid in &pids {
        assert_eq!(*left_out(&scan, pid), Value::Null, "{pid}");
    }
    assert!(left_out(&scan, stranger.pid()).as_str().unwrap().contains(reason), "{scan}");

    assert_fails(&["scan", "pf-upgradde"], 5, "; did you mean --exe pf-upgraded?");
    // We don't suggest the program of this name: anybody can give a program any name.
    assert_fails(&["run", "--dry-run", "--unit", "pf-upgraded"], 5, "; check the spelling");
    for command in ["scan", "run"] {
        assert_fails(
            &[command, "pf-upgraded", "no-such-program-here"],
            5,
            "no process matches --exe no-such-program-here; ",
        );
    }

    let daemon = Daemon::start(&["run", "--json", "--governor", "full", "--exe", "pf-upgraded"]).answering();
    wait_until_merged(&pids, 7 * MIB);
    for &pid in &pids {
        assert_eq!(left_alone(pid), Value::Null, "{pid}");
    }
    assert_eq!(left_alone(stranger.pid()), *left_out(&scan, stranger.pid()));
    assert_fails(&["explain", "pf-upgraded", "no-such"], 5, "no process matches --exe no-such; ");
    let explained = succeed(&["explain", &stranger.pid().to_string()]);
    assert_has(&explained, &["left alone", reason]);
    let untrusted = row(&status()["left_out"], "reason", "untrusted")["processes"].clone();
    assert_eq!(untrusted, 1);
    assert_eq!(marks(stranger.pid()), Marks::default());
    let summary = daemon.stop();
    assert_eq!(row(&summary["left_alone"], "pid", stranger.pid())["reason"], *left_out(&scan, stranger.pid()));
}

#[test]
fn a_32_bit_program_has_one_reason_everywhere() {
    if !can_read_pages() {
        return;
    }
    let Some(_ksm) = KsmAtRest::take() else { return };
    let dir = tempfile::tempdir().unwrap();
    let compat = match injection::start_compat(dir.path(), 0) {
        Ok(compat) => compat,
        Err(why) => return skip_unsupported(why),
    };
    let pid = compat.pid().to_string();
    let reason = "a 32-bit program, which cannot be marked from outside; start it by pagefold exec";
    assert_fails(&["scan", "--pid", &pid], 6, reason);
    assert_fails(&["run", "--pid", &pid], 6, reason);
    let other = Holder::with(PAGES, 0x5e1e_0002 << 32);
    let scan = json_of(&["scan", "--pid", &pid, "--pid", &other.pid().to_string()]);
    assert_eq!(*left_out(&scan, compat.pid()), reason);
    let daemon = Daemon::on(&[compat.pid(), other.pid()], &[]).answering();
    wait_until("it is left alone", || left_alone(compat.pid()) == reason);
    assert_has(&succeed(&["explain", &pid]), &["a 32-bit program, which cannot"]);
    assert_eq!(row(&daemon.stop()["left_alone"], "pid", compat.pid())["reason"], reason);
}

/// Two Python programs that hold the same 16 MiB. `prepare` is code that each runs, with this memory as `data`.
fn alike(prepare: &str) -> [Script; 2] {
    let text = format!(
        "import ctypes, hashlib, mmap, os, struct, sys
data = mmap.mmap(-1, 16 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for page in range(len(data) // 4096):
    data[page * 4096:page * 4096 + 32] = hashlib.sha256(b'%d' % page).digest()
{prepare}
print('ready', flush=True)
sys.stdin.readline()"
    );
    [Script::start(&text), Script::start(&text)]
}

#[test]
fn files_and_guards_that_a_program_maps_do_not_keep_it_out() {
    if !can_read_pages() {
        return;
    }
    let Some(_ksm) = KsmAtRest::take() else { return };
    let dir = tempfile::tempdir().unwrap();
    let index = dir.path().join("index");
    fs::File::create(&index).unwrap().set_len(256 << 20).unwrap();
    let file = index.display();
    let maps = alike(&format!(
        "index = open('{file}')
libc = ctypes.CDLL(None)
for at in range(20000):
    libc.mmap(None, ctypes.c_size_t(4096), 1, 1, index.fileno(), ctypes.c_long(at * 8192))
for at in range(20000): # stacks and guards of threads that did nothing yet
    libc.mmap(None, ctypes.c_size_t(4096), 3 * (at % 2), 0x22, -1, ctypes.c_long(0))"
    ));
    let pids = [maps[0].pid(), maps[1].pid()];
    let scan = json_of(&with_pids(&["scan"], &pids, &[]));
    assert_eq!(*left_out(&scan, pids[0]), Value::Null);
    assert!(scan["totals"]["savable_gross_bytes"].as_u64().unwrap() >= 15 * MIB, "{scan}");
    let _daemon = Daemon::on(&pids, &["--governor", "full"]).answering();
    wait_until_merged(&pids, 15 * MIB);
    let marked = if is_on_request() { "16 MiB" } else { "16 MiB marked" };
    assert_has(&succeed(&["explain", &pids[0].to_string()]), &[marked, "shared mapping"]);
}

/// Code that registers the first `mib` MiB of a Python object as a buffer of io_uring (io_uring_setup and
/// io_uring_register), which pins them.
fn pinning(object: &str, mib: u64) -> String {
    format!(
        "call = ctypes.CDLL(None, use_errno=True).syscall
ring = call(425, 8, ctypes.byref((ctypes.c_char * 120)()))
start = ctypes.addressof(ctypes.c_char.from_buffer({object}))
buffer = ctypes.create_string_buffer(struct.pack('QQ', start, {mib} << 20), 16)
if ring < 0 or call(427, ring, 0, buffer, 1) < 0:
    data = None"
    )
}

fn are_16_mib_pinned(pid: i32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/status")).unwrap().contains("VmPin:\t   16384 kB")
}

#[test]
fn memory_beside_pinned_pages_is_promised() {
    if !can_read_pages() {
        return;
    }
    // `data` beside as much private memory that is pinned, and `data` beside shared memory that is pinned.
    let half = alike(&format!(
        "more = mmap.mmap(-1, 16 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for page in range(len(more) // 4096):
    more[page * 4096:page * 4096 + 32] = hashlib.sha256(b'more %d' % page).digest()
{}",
        pinning("more", 16)
    ));
    let shared =
        alike(&format!("shared = mmap.mmap(-1, 16 << 20)\nshared[:] = b'x' * len(shared)\n{}", pinning("shared", 16)));
    for (programs, expected) in [(half, 8), (shared, 8)] {
        let pids = [programs[0].pid(), programs[1].pid()];
        if !pids.iter().all(|&pid| are_16_mib_pinned(pid)) {
            return skip_unsupported("io_uring pins no buffers here");
        }
        let scan = json_of(&with_pids(&["scan", "--exact"], &pids, &[]));
        let why = json_of(&with_pids(&["scan", "--why"], &pids, &[]));
        for pid in pids {
            // Python's own heaps are alike, too.
            let savable = row(&scan["processes"], "pid", pid)["savable_bytes"].as_u64().unwrap() / MIB;
            assert!((expected - 1..=expected + 4).contains(&savable), "{savable} MiB, not {expected}: {scan}");
        }
        let duplicates = why["totals"]["mergeable_duplicate_bytes"].as_u64().unwrap() / MIB;
        assert!((2 * expected - 2..=2 * expected + 8).contains(&duplicates), "{duplicates} MiB: {why}");
    }
}

#[test]
fn other_users_of_ksm_are_named_with_what_they_hold() {
    // If we merge on request, nobody merges memory that programs mark themselves.
    if is_on_request() {
        return;
    }
    let Some(_ksm) = KsmAtRest::take() else { return };
    let holder = victim_binary("holder");
    let others = [(); 2].map(|()| {
        let exec = Holder::by(Command::new(program()).args(["exec", "--"]).arg(&holder), PAGES);
        filled(exec, 0x5e1e_0004 << 32)
    });
    // Two families of three.
    let mut own = [(); 2].map(|()| Holder::with(PAGES, 0x5e1e_0005 << 32));
    let mut pids: Vec<i32> = own.iter().map(Holder::pid).collect();
    for parent in &mut own {
        pids.extend([parent.fork(), parent.fork()]);
    }
    let daemon = Daemon::on(&pids, &["--governor", "full"]).answering();
    wait_until_merged(&pids, 7 * MIB);
    wait_until_merged(&[others[0].pid(), others[1].pid()], 7 * MIB);
    let status = status();
    for other in &others {
        let other = row(&status["others"], "pid", other.pid());
        assert!(other["merged_bytes"].as_u64().unwrap() >= 7 * MIB, "{other}");
        assert!(other["metadata_bytes"].as_u64().unwrap() >= 7 * MIB / 64, "{other}");
    }
    assert!(status["others"].as_array().unwrap().iter().all(|row| pids.iter().all(|&pid| row["pid"] != pid)));
    assert_has(&succeed(&["status"]), &["others", &format!("(pid {})", others[0].pid())]);
    // The exit code is 7, since no second run is possible.
    let doctor: Value = serde_json::from_slice(&pagefold(&["doctor", "--json"]).stdout).unwrap();
    assert_eq!(
        (&doctor["exit_code"], &row(&doctor["findings"], "id", "lock")["severity"]),
        (&7.into(), &"blocker".into())
    );
    let what = |id: &str| row(&doctor["findings"], "id", id)["what"].as_str().unwrap().to_owned();
    assert_has(&what("programs"), &["KSM is used by holder (pid", " MiB"]);
    // `doctor` counts frames: each pair of families saves one of two copies, however many children map it.
    let saved: f64 = what("ksm").split(' ').find_map(|word| word.parse().ok()).unwrap();
    assert!((14.0..20.0).contains(&saved), "{}", what("ksm"));
    drop(daemon);
}

#[test]
fn running_workloads_are_listed_for_completions() {
    let Some(group) = Cgroup::of_any_version() else { return };
    let complete = |kind: &str| {
        let mut command = Command::new("unshare");
        command.args(["--pid", "--fork", "--mount-proc"]).arg(program()).args(["complete", kind]);
        cgroup::start_in(&mut command, group.path());
        output_of(&mut command)
    };
    let name = group.path().file_name().unwrap().to_str().unwrap();
    assert!(complete("unit").lines().any(|line| line == name), "{name}");
    assert_eq!((complete("vm"), complete("no-such-kind")), (String::new(), String::new()));
    let (container, id) = cgroup::container();
    let guest = format!(r"machine-qemu\x2d1\x2d{}.scope", &id[..12]);
    let guest = Cgroup::of_any_version_named(&guest);
    let members = [Sleeper::start(), Sleeper::start()];
    container.add(members[0].pid());
    guest.add(members[1].pid());
    for kind in ["container", "vm"] {
        let names = succeed(&["complete", kind]);
        assert!(names.lines().any(|line| line == &id[..12]), "{id} in {names}");
    }
}

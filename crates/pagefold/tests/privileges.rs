//! The privileges that the program keeps and drops, the contents that it mustn't disclose, and its systemd units.

use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Arc, Mutex};

use ::pagefold::reference::{SCHEMAS, Schema};
use pagefold_testkit::*;

/// The capabilities that are kept (docs/privileges.md): CAP_DAC_READ_SEARCH (2), CAP_SYS_PTRACE (19), CAP_SYS_ADMIN
/// (21).
const KEPT: u64 = 1 << 2 | 1 << 19 | 1 << 21;
/// The daemon also keeps this capability on machines with several memory nodes or with huge pages.
const SYS_NICE: u64 = 1 << 23;

/// The capabilities that the daemon keeps on this machine.
fn kept_by_daemon() -> u64 {
    if has_huge_pages() { KEPT | SYS_NICE } else { KEPT }
}

fn units() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/systemd")
}

/// Checks that every thread of the process has exactly these capabilities, can't get more, and has this many seccomp
/// filters.
#[track_caller]
fn assert_confined(pid: i32, kept: u64, filters: u64) {
    for thread in fs::read_dir(format!("/proc/{pid}/task")).unwrap() {
        let status = fs::read_to_string(thread.unwrap().path().join("status")).unwrap();
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
            u64::from_str_radix(line.trim(), 16).unwrap()
        };
        assert_eq!((field("CapEff:"), field("CapPrm:")), (kept, kept), "{status}");
        // The bounding set may contain capabilities that only other machines need, but no_new_privs makes them useless.
        assert_eq!(field("CapBnd:") & !(KEPT | SYS_NICE), 0, "{status}");
        assert_eq!((field("CapInh:"), field("CapAmb:"), field("NoNewPrivs:")), (0, 0, 1), "{status}");
        assert_eq!(field("Seccomp_filters:"), filters, "{status}");
    }
}

/// A holder's memory besides Python's own. It's little because a sketch gets 0.08 % of a core, and the first read of a
/// page takes 17 us on a virtual machine whose hypervisor shadows page tables.
const HELD: u64 = 2 * MIB;

/// Becomes a process of some kind, and holds 2 MiB with the same contents as all processes of that kind.
const HOLDS: &str = r#"
import ctypes, mmap, random, struct, sys
kind = sys.argv[1]
libc = ctypes.CDLL(None, use_errno=True)
held = mmap.mmap(-1, 2 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
held.write(random.Random(kind).randbytes(2 << 20))
if kind == "undumpable": libc.prctl(4, 0, 0, 0, 0)
if kind == "filtered":
    class Filter(ctypes.Structure): _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]
    # madvise kills, all else is allowed.
    code = b"".join(struct.pack("HBBI", *i) for i in [(0x20, 0, 0, 0), (0x15, 0, 1, 28), (6, 0, 0, 0x80000000), (6, 0, 0, 0x7fff0000)])
    code = ctypes.create_string_buffer(code)
    libc.prctl(38, 1, 0, 0, 0)
    assert libc.prctl(22, 2, ctypes.byref(Filter(4, ctypes.addressof(code))), 0, 0) == 0
print("ready", flush=True)
sys.stdin.readline()
print("alive", flush=True)
"#;

/// A python3 that every user may run. Others may lack access to the first one in root's PATH.
fn python() -> &'static str {
    if Path::new("/usr/bin/python3").exists() { "/usr/bin/python3" } else { "python3" }
}

/// A process of some kind that holds memory.
struct Holder {
    kind: &'static str,
    script: Script,
}

impl Holder {
    fn start(kind: &'static str) -> Self {
        let before: &[&str] = match kind {
            "of another user" => &["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"],
            "in a user namespace" => &["unshare", "--user", "--map-root-user"],
            _ => &["env"],
        };
        let mut command = Command::new(before[0]);
        let mut script = Script::of(command.args(&before[1..]).args([python(), "-c", HOLDS, kind]));
        assert_eq!(script.line(), "ready", "{kind}");
        Self { kind, script }
    }

    fn pid(&self) -> i32 {
        self.script.pid()
    }

    /// Checks that the process still runs, and ends as it should.
    fn end(mut self) {
        self.script.say("end");
        assert_eq!(self.script.line(), "alive", "{}", self.kind);
        assert!(self.script.wait().success());
    }
}

/// A pair of each kind of process that may be merged, and a pair that may not.
fn pairs() -> Vec<Holder> {
    let kinds = ["of root", "of another user", "in a user namespace", "filtered", "undumpable"];
    kinds.iter().flat_map(|&kind| [Holder::start(kind), Holder::start(kind)]).collect()
}

fn pids_of(holders: &[Holder]) -> Vec<i32> {
    holders.iter().map(Holder::pid).collect()
}

#[track_caller]
fn wait_until_all_merged(holders: &[Holder]) {
    let to_merge = || holders.iter().filter(|holder| holder.kind != "undumpable");
    wait_until("all are merged", || to_merge().all(|holder| marks(holder.pid()).merged >= HELD));
    for undumpable in holders.iter().filter(|holder| holder.kind == "undumpable") {
        assert_eq!(marks(undumpable.pid()), Marks::default(), "it is not dumpable");
    }
}

#[track_caller]
fn assert_undumpable_reported(summary: &Value, holders: &[Holder]) {
    for undumpable in holders.iter().filter(|holder| holder.kind == "undumpable") {
        let rows = summary["left_alone"].as_array().unwrap();
        let mut reasons =
            rows.iter().filter(|row| row["pid"] == undumpable.pid()).map(|row| row["reason"].as_str().unwrap());
        // The process may be busy when the daemon first asks it.
        assert_eq!(reasons.next_back(), Some("not dumpable: its memory is private"), "{summary}");
    }
}

#[test]
fn sketches_are_kept_with_the_capabilities_that_are_kept() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let dir = tempfile::tempdir().unwrap();
    let (key, file) = (dir.path().join("key"), dir.path().join("node.parquet"));
    fs::write(&key, "0f".repeat(32)).unwrap();
    fs::set_permissions(&key, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    let holders = [Holder::start("of another user"), Holder::start("of another user")];
    let pids = pids_of(&holders);
    let words = [dir.path(), &key].map(|path| path.to_str().unwrap());
    let daemon =
        Daemon::on(&pids, &["--for", "300s", "--sketches", words[0], "--fleet-key", words[1], "--fleet-host", "node"]);
    wait_until("the sketches are written", || file.exists());
    assert_confined(daemon.pid(), kept_by_daemon(), 1);
    let [starter] = daemon.children()[..] else { panic!("{:?}", daemon.children()) };
    let [injector] = daemon.injectors()[..] else { panic!("{:?}", daemon.injectors()) };
    for pid in [starter, injector] {
        assert_confined(pid, KEPT, 0);
    }
    let sketches = pagefold_sketch::read(fs::read(&file).unwrap()).unwrap();
    assert!(sketches.rows.iter().any(|row| row.read_bytes > 2 * HELD && row.savable_bytes >= HELD), "{sketches:?}");
    ksm.end(daemon, &pids);
    holders.into_iter().for_each(Holder::end);
}

#[test]
fn programs_that_are_not_dumpable_are_merged_if_they_are_named() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let holders = ["undumpable", "undumpable", "of another user", "of another user"].map(Holder::start);
    let pids = pids_of(&holders);
    let why = String::from_utf8(pagefold(&with_pids(&["scan"], &pids[..2], &[])).stderr).unwrap();
    let (_, way) = why.split_once("not dumpable: its memory is private (--allow ").unwrap();
    let (program, _) = way.split_once(" lets it in)").unwrap();
    // Both names work: the program's own, and that of the link by which it was started.
    for name in [program, "python3"] {
        succeed(&with_pids(&["scan"], &pids[..2], &["--allow", name]));
    }
    let daemon = Daemon::on(&pids, &["--allow", "python3", "--deny", "python3-private", "--for", "300s"]);
    wait_until_merged(&pids, HELD);
    ksm.end(daemon, &pids);
    assert_unmarked(&pids);
    holders.into_iter().for_each(Holder::end);
}

/// A socket for which a process is started per connection, as a service manager does with `Accept=yes` and
/// `StandardInput=socket`.
struct SocketUnit {
    _dir: tempfile::TempDir,
    path: PathBuf,
    children: Arc<Mutex<Vec<Child>>>,
}

impl SocketUnit {
    fn start() -> Self {
        let dir = tempfile::tempdir_in("/tmp").unwrap();
        let path = dir.path().join("injector.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let children = Arc::new(Mutex::new(Vec::new()));
        let started = children.clone();
        // This thread ends with the test's process.
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                started.lock().unwrap().push(injector_on(stream.unwrap()));
            }
        });
        Self { _dir: dir, path, children }
    }

    fn pids(&self) -> Vec<i32> {
        self.children.lock().unwrap().iter().map(|child| i32::try_from(child.id()).unwrap()).collect()
    }

    /// Checks that all injectors end after the program that connected to them has ended.
    #[track_caller]
    fn assert_ended(&self) {
        let mut children = self.children.lock().unwrap();
        wait_until("the injectors end", || children.iter_mut().all(|child| child.try_wait().unwrap().is_some()));
    }
}

/// The settings of a unit, in order.
fn settings(unit: &str) -> Vec<(String, String)> {
    let text = fs::read_to_string(units().join(unit)).unwrap();
    let lines = text.lines().filter(|line| !line.starts_with(['#', '[']));
    lines.filter_map(|line| line.split_once('=')).map(|(name, value)| (name.into(), value.into())).collect()
}

/// Adds the system calls that a word names: a single call, or all calls of a set.
fn members<'a>(sets: &'a BTreeMap<String, Vec<String>>, word: &'a str, into: &mut BTreeSet<&'a str>) {
    match sets.get(word) {
        Some(words) => words.iter().for_each(|word| members(sets, word, into)),
        None => drop(into.insert(word)),
    }
}

/// The numbers of the system calls that the unit's filter allows, as systemd interprets it.
fn allowed_calls(unit: &str) -> Option<Vec<u32>> {
    let output = Command::new("systemd-analyze").args(["--no-pager", "syscall-filter"]).output().ok()?;
    let mut sets: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut set = String::new();
    for line in String::from_utf8(output.stdout).unwrap().lines() {
        match (line.starts_with('@'), line.trim()) {
            (true, name) => name.clone_into(&mut set),
            (false, "") => set.clear(),
            (false, word) if !set.is_empty() && !word.starts_with('#') => {
                sets.entry(set.clone()).or_default().push(word.to_owned());
            }
            _ => {}
        }
    }
    let settings = settings(unit);
    let mut left = BTreeSet::new();
    members(&sets, "@default", &mut left);
    for (_, value) in settings.iter().filter(|(name, _)| name == "SystemCallFilter") {
        let mut words = BTreeSet::new();
        value.trim_start_matches('~').split(' ').for_each(|word| members(&sets, word, &mut words));
        if value.starts_with('~') {
            left.retain(|word| !words.contains(word));
        } else {
            left.extend(words);
        }
    }
    let header = fs::read_to_string("/usr/include/x86_64-linux-gnu/asm/unistd_64.h").ok()?;
    let numbers = header.lines().filter_map(|line| line.strip_prefix("#define __NR_")?.split_once(' '));
    let left: Vec<u32> =
        numbers.filter(|(name, _)| left.contains(name)).map(|(_, number)| number.trim().parse().unwrap()).collect();
    assert!((150..350).contains(&left.len()), "{} calls", left.len());
    Some(left)
}

/// Installs a filter that allows the calls in its first argument, and executes the program in the others.
const FILTERED: &str = r#"
import ctypes, os, struct, sys
class Filter(ctypes.Structure): _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]
code = [(0x20, 0, 0, 0)]
for number in sys.argv[1].split(","): code += [(0x15, 0, 1, int(number)), (6, 0, 0, 0x7fff0000)]
code += [(6, 0, 0, 0x00050001)]
text = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *i) for i in code))
assert ctypes.CDLL(None).prctl(22, 2, ctypes.byref(Filter(len(code), ctypes.addressof(text))), 0, 0) == 0
os.execv(sys.argv[2], sys.argv[2:])
"#;

/// Executes the program with the unit's capabilities only, and a file system that is read-only except for the unit's
/// paths.
const CONFINED: &str = r#"
set -e
mkdir -p /run/pagefold
for path in /run/pagefold /sys/kernel/mm/ksm; do mount --bind $path $path; done
for path in / /sys /run /tmp; do ! mountpoint -q $path || mount -o remount,bind,ro $path; done
! touch /run/not-here /tmp/not-here /not-here 2>/dev/null
exec setpriv --inh-caps=-all --bounding-set=$0 --no-new-privs "$@"
"#;

/// We do by hand what systemd does with pagefold.service and pagefold-injector.socket.
#[test]
fn confined_as_by_its_unit_it_merges_through_a_separate_injector() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let Some(calls) = allowed_calls("pagefold.service") else {
        return skip("systemd-analyze or the headers of the kernel are not installed");
    };
    let calls = calls.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
    let settings = settings("pagefold.service");
    let kept = &settings.iter().find(|(name, _)| name == "CapabilityBoundingSet").unwrap().1;
    let kept: Vec<String> = kept.split(' ').map(|name| name.replace("CAP_", "+").to_lowercase()).collect();
    let kept = format!("-all,{}", kept.join(","));
    let unit_socket = SocketUnit::start();
    let holders = pairs();
    let pids = pids_of(&holders);
    let run =
        with_pids(&["run", "--json"], &pids, &["--for", "300s", "--injector", unit_socket.path.to_str().unwrap()]);
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "private", "sh", "-c", CONFINED, &kept]);
    command.args([python(), "-c", FILTERED, &calls]).arg(program()).args(&run);
    let daemon = Daemon::of(&mut command);
    wait_until_all_merged(&holders);
    // The unit's filter, and its own.
    assert_confined(daemon.pid(), kept_by_daemon(), 2);
    assert_eq!(daemon.children(), [] as [i32; 0]);
    let [injector] = unit_socket.pids()[..] else { panic!("{:?}", unit_socket.pids()) };
    assert_confined(injector, KEPT, 0);
    json_of(&["status"]);
    let summary = daemon.stop();
    assert_eq!(summary["knobs_restored"], true);
    assert_undumpable_reported(&summary, &holders);
    unit_socket.assert_ended();
    ksm.give_back(&pids);
    assert_unmarked(&pids);
    holders.into_iter().for_each(Holder::end);
}

fn without(capability: &str, args: &[&str]) -> Output {
    let set = format!("-{capability}");
    let mut command = Command::new("setpriv");
    command.args(["--inh-caps", &set, "--bounding-set", &set]).arg(program()).args(args);
    command.stdin(Stdio::null()).output().unwrap()
}

#[test]
fn a_missing_capability_is_named() {
    if !is_root() {
        return skip("needs root");
    }
    let idle = Sleeper::start();
    let pid = idle.pid().to_string();
    for capability in ["sys_ptrace", "sys_admin", "dac_read_search"] {
        let says = format!("needs CAP_{}, which", capability.to_uppercase());
        for args in [&["run", "--pid", &pid][..], &["unmerge", "--pid", &pid], &["demo"]] {
            assert_refused(&without(capability, args), 3, &says);
        }
    }
}

/// In a new pid namespace, starts a process that may be read and one that may not, and scans all processes.
const ALL: &str = r#"
sleep 1000 &
until grep -q sleep /proc/$!/comm; do :; done
setpriv --inh-caps=-sys_ptrace --bounding-set=-sys_ptrace sh -c '
sleep 1000 &
until grep -q sleep /proc/$!/comm; do :; done
"$0" scan --all --json' "$0"
"#;

#[test]
fn all_leaves_out_what_may_not_be_read() {
    if !is_root() {
        return skip("needs root");
    }
    let mut unshare = Command::new("unshare");
    unshare.args(["--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", ALL]).arg(program());
    let scan: Value = serde_json::from_str(&output_of(&mut unshare)).unwrap();
    let rows = scan["processes"].as_array().unwrap();
    let (left_out, scanned): (Vec<_>, Vec<_>) = rows.iter().partition(|row| row["left_out"].is_string());
    assert!(left_out.iter().any(|row| row["name"] == "sleep"), "{scan}");
    assert!(scanned.iter().any(|row| row["name"] == "sleep"), "{scan}");
}

/// The kernel may let us look at a process's mappings, but not read its memory.
#[test]
fn what_turns_out_to_be_unreadable_is_left_out() {
    if !is_root() {
        return skip("needs root");
    }
    let idle = [Sleeper::start(), Sleeper::start()];
    let pids = [idle[0].pid(), idle[1].pid()];
    let scan = |fault: &str| {
        let args = with_pids(&["scan", "--exact", "--json"], &pids, &[]);
        Command::new(program()).args(args).env("PAGEFOLD_FAULT", fault).stdin(Stdio::null()).output().unwrap()
    };
    assert_refused(&scan("read:process_vm_readv=EPERM"), 3, "not permitted to read process");
    let output = scan("read:process_vm_readv@2=EPERM");
    let scan: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(row(&scan["processes"], "pid", pids[0].min(pids[1]))["left_out"].is_null(), "{scan}");
    assert_eq!(row(&scan["processes"], "pid", pids[0].max(pids[1]))["left_out"], "cannot be read", "{scan}");
}

#[test]
fn the_injector_serves_only_root_and_the_daemon_uses_only_a_root_injector() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let idle = Sleeper::start();
    let pid = idle.pid().to_string();
    let run = |socket: &Path| pagefold(&["run", "--pid", &pid, "--for", "1s", "--injector", socket.to_str().unwrap()]);
    // Another user connects to a socket that was opened for everybody.
    let unit_socket = SocketUnit::start();
    let open =
        |path: &Path, mode| fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
    open(unit_socket.path.parent().unwrap(), 0o755);
    open(&unit_socket.path, 0o666);
    let client = "import socket, sys\ns = socket.socket(socket.AF_UNIX)\ns.connect(sys.argv[1])\n\
        print(s.makefile().read(), end='')";
    let answer = output_of(as_other_user("python3").args(["-c", client]).arg(&unit_socket.path));
    let answer: Value = serde_json::from_str(&answer).unwrap();
    assert!(answer["refusal"].as_str().unwrap().contains("only root"), "{answer}");
    unit_socket.assert_ended();
    // Another user listens.
    let dir = tempfile::tempdir_in("/tmp").unwrap();
    open(dir.path(), 0o777);
    let path = dir.path().join("injector.sock");
    let server = "import socket, sys\ns = socket.socket(socket.AF_UNIX)\ns.bind(sys.argv[1])\ns.listen()\n\
        print('ready', flush=True)\nsys.stdin.read()";
    let mut other_user = Script::of(as_other_user("python3").args(["-c", server]).arg(&path));
    assert_eq!(other_user.line(), "ready");
    assert_refused(&run(&path), 3, "the socket belongs to user 65534");
    drop(other_user);
    // At the first path nothing listens any more, and at the second nothing ever did.
    assert_refused(&run(&path), 1, "no process listens");
    assert_refused(&run(Path::new("/run/pagefold-nowhere.sock")), 1, "no process listens");
    ksm.assert_restored();
}

// ---- disclosure ------------------------------------------------------------------------------------------------

/// Holds recognizable contents, each twice.
const SECRET: &str = r#"
import mmap, sys
held = mmap.mmap(-1, 16 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
page = (b"not-to-be-told " * 300)[:4088]
for number in range(2048): held.write(page + number.to_bytes(8, "big"))
for number in range(2048): held.write(page + number.to_bytes(8, "big"))
print("ready", flush=True)
sys.stdin.readline()
"#;

/// Collects every key, and every plain value with its key.
fn walk<'a>(value: &'a Value, key: &'a str, keys: &mut BTreeSet<&'a str>, leaves: &mut Vec<(&'a str, &'a Value)>) {
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                keys.insert(name);
                walk(value, name, keys, leaves);
            }
        }
        Value::Array(rows) => rows.iter().for_each(|row| walk(row, key, keys, leaves)),
        leaf => leaves.push((key, leaf)),
    }
}

/// The length of the longest run of hexadecimal digits.
fn longest_hex(text: &str) -> usize {
    text.split(|letter: char| !letter.is_ascii_hexdigit()).map(str::len).max().unwrap_or(0)
}

#[track_caller]
fn assert_discloses_no_contents(document: &Value) {
    let text = document.to_string();
    assert!(!text.contains("not-to-be-told") && !text.contains("not-to-be"), "{text}");
    let (mut keys, mut leaves) = (BTreeSet::new(), Vec::new());
    walk(document, "", &mut keys, &mut leaves);
    // KSM's knobs are also keys.
    let is_knob = |key: &str| Path::new("/sys/kernel/mm/ksm").join(key).exists();
    let explained: BTreeSet<&str> = SCHEMAS.iter().flat_map(Schema::names).collect();
    keys.retain(|key| !is_knob(key) && !explained.contains(key));
    assert!(keys.is_empty(), "{keys:?} are not in reference.rs");
    for (key, leaf) in leaves {
        match leaf {
            // A user address has up to twelve digits, a kernel address sixteen.
            Value::String(text) if key == "range" => assert!(longest_hex(text) <= 16, "{text}"),
            // Names of containers and of their cgroups contain such long hexadecimal numbers.
            Value::String(text) => {
                let is_name = ["cgroup", "workload", "name"].contains(&key);
                assert!(is_name || longest_hex(text) < 16, "{key}: {text}");
            }
            // A digest of 64 bits is nearly always larger than this, and no size or count is that large.
            Value::Number(number) => assert!(number.as_f64().unwrap().abs() < 1e15, "{key}: {number}"),
            _ => {}
        }
    }
}

#[test]
fn no_output_discloses_memory_contents() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let holders = [Script::start(SECRET), Script::start(SECRET)];
    let pids = [holders[0].pid(), holders[1].pid()];
    let scan = json_of(&with_pids(&["scan", "--exact"], &pids, &[]));
    assert!(scan["totals"]["duplicate_across_bytes"].as_u64().unwrap() > 0, "it has read them: {scan}");
    assert_discloses_no_contents(&scan);
    let dry = Daemon::on(&pids, &["--dry-run", "--for", "3s"]).end().summary();
    assert_discloses_no_contents(&dry);
    let daemon = Daemon::on(&pids, &["--for", "300s"]);
    wait_until_merged(&pids, 15 * MIB);
    assert_discloses_no_contents(&status());
    let explanation = json_of(&["explain", &pids[0].to_string()]);
    assert!(!explanation["regions"].as_array().unwrap().is_empty());
    assert_discloses_no_contents(&explanation);
    assert_discloses_no_contents(&ksm.end(daemon, &pids));
}

// ---- units -------------------------------------------------------------------------------------------------------

/// Copies of the units that start the program under test.
fn installed() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for unit in fs::read_dir(units()).unwrap() {
        let unit = unit.unwrap().path();
        let text = fs::read_to_string(&unit).unwrap().replace("/usr/local/bin/pagefold", program().to_str().unwrap());
        fs::write(dir.path().join(unit.file_name().unwrap()), text).unwrap();
    }
    dir
}

fn analyze(args: &[&str], unit: &Path) -> Option<Output> {
    let output = Command::new("systemd-analyze").args(args).arg(unit).output();
    if output.is_err() {
        skip("systemd-analyze is not installed");
    }
    output.ok()
}

#[test]
fn systemd_accepts_the_units() {
    let dir = installed();
    for unit in
        ["pagefold.service", "pagefold-injector.socket", "pagefold-injector@.service", "pagefold-metrics.socket"]
    {
        let Some(output) = analyze(&["--man=no", "verify"], &dir.path().join(unit)) else { return };
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && text.trim().is_empty(), "{unit}: {text}");
    }
}

/// docs/privileges.md has these ratings of `systemd-analyze security`, here in tenths.
#[test]
fn the_units_are_as_confined_as_documented() {
    let dir = installed();
    for (unit, most) in [("pagefold.service", 20), ("pagefold-injector@.service", 60)] {
        let threshold = format!("--threshold={most}");
        let args = ["--no-pager", "security", "--offline=true", &threshold];
        let Some(output) = analyze(&args, &dir.path().join(unit)) else { return };
        let text = String::from_utf8_lossy(&output.stdout);
        println!("{}", text.lines().last().unwrap_or_default());
        assert!(output.status.success(), "{text}");
    }
}

/// If the injector ran under a seccomp filter, it couldn't suspend a target's filter. These settings make systemd
/// install one.
#[test]
fn the_injector_unit_installs_no_seccomp_filter() {
    const FILTERS: &str = "SystemCallFilter SystemCallArchitectures SystemCallLog RestrictAddressFamilies RestrictNamespaces RestrictRealtime \
        RestrictSUIDSGID MemoryDenyWriteExecute LockPersonality PrivateDevices ProtectClock \
        ProtectHostname ProtectKernelLogs ProtectKernelModules ProtectKernelTunables DynamicUser User";
    let settings = settings("pagefold-injector@.service");
    assert!(settings.iter().any(|(name, _)| name == "StandardInput"));
    for (name, value) in settings {
        assert!(!FILTERS.split(' ').any(|filter| filter == name), "{name}={value}");
        // The injector mustn't be killed either while it holds a target.
        assert!(!["Memory", "RuntimeMax", "Watchdog"].iter().any(|kind| name.starts_with(kind)), "{name}");
    }
}

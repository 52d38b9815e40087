//! `pagefold scan` on processes for which we know the contents of every page.

use serde_json::Value;
use std::process::Command;

use pagefold_testkit::holder::Change;
use pagefold_testkit::*;

/// A process with segments of (MiB, content, step). Each page's content is `step` above the previous one's; 0 means
/// zeros.
fn holder<const N: usize>(segments: [(u64, u64, u64); N]) -> Holder {
    let pages = segments.map(|(mib, ..)| mib * PAGES_PER_MIB);
    let (mut holder, mut first) = (Holder::start(pages.iter().sum()), 0);
    for ((_, content, step), pages) in segments.into_iter().zip(pages) {
        holder.change(Change::Write { first, pages, content, step });
        first += pages;
    }
    holder
}

/// A process with this many MiB of distinct pages. The same seed makes the same pages.
fn random(mib: u64, seed: u64) -> Holder {
    holder([(mib, seed << 32, 1)])
}

fn scan(pids: &[i32], more: &[&str]) -> Value {
    json_of(&with_pids(&["scan"], pids, more))
}

fn bytes(value: &Value, field: &str) -> u64 {
    value[field].as_u64().unwrap_or_else(|| panic!("{field} in {value}"))
}

/// Checks that two values are nearly equal, since the program's own memory differs a little from run to run.
#[track_caller]
fn assert_close(value: u64, expected: u64, allowance: u64) {
    assert!(value.abs_diff(expected) <= allowance, "{value} is not {expected} within {allowance}");
}

fn process(report: &Value, pid: i32) -> &Value {
    row(&report["processes"], "pid", pid)
}

#[test]
fn known_memory_is_counted_to_the_page() {
    if !can_read_pages() {
        return;
    }
    // The two hold 24 MiB in common. The first also has 8 MiB of zeros and 4 MiB of equal pages.
    let first = holder([(24, 1 << 32, 1), (10, 2 << 32, 1), (8, 0, 0), (4, 5 << 32, 0)]);
    let second = holder([(24, 1 << 32, 1), (6, 3 << 32, 1)]);
    let small = [random(1, 8), random(1, 9)];
    let report = scan(&[first.pid(), second.pid()], &["--exact"]);
    // The pages that any two of these programs have in common.
    let base = scan(&[small[0].pid(), small[1].pid()], &["--exact"])["totals"].clone();
    let totals = &report["totals"];
    assert_eq!(report["schema"], "pagefold.scan/1");
    assert_eq!((&report["exact"], &report["error_bytes"]), (&true.into(), &0.into()));
    let allowance = MIB / 2;
    assert_close(bytes(totals, "zero_bytes"), 8 * MIB + bytes(&base, "zero_bytes"), allowance);
    assert_close(
        bytes(totals, "duplicate_across_bytes"),
        24 * MIB + bytes(&base, "duplicate_across_bytes"),
        3 * allowance,
    );
    assert_close(bytes(totals, "duplicate_within_bytes"), 4 * MIB + bytes(&base, "duplicate_within_bytes"), allowance);
    assert_close(bytes(totals, "resident_bytes"), 76 * MIB + bytes(&base, "resident_bytes") - 2 * MIB, 3 * allowance);
    let parts = ["zero_bytes", "duplicate_within_bytes", "duplicate_across_bytes"];
    let gross: u64 = parts.iter().map(|part| bytes(totals, part)).sum();
    assert_close(bytes(totals, "savable_gross_bytes"), gross, 4);
    // KSM's metadata takes 64 bytes per page, and another 64 for each of about 6145 shared contents.
    let metadata = bytes(totals, "resident_bytes") / 64 + 6145 * 64;
    assert_close(bytes(totals, "metadata_bytes"), metadata, metadata / 10);
    assert_close(bytes(totals, "savable_bytes"), gross - metadata, allowance);
    // Half of the memory that two processes have in common is attributed to each.
    assert_close(bytes(process(&report, second.pid()), "savable_gross_bytes"), 12 * MIB, 2 * allowance);
    assert_close(bytes(process(&report, first.pid()), "savable_gross_bytes"), 24 * MIB, 2 * allowance);

    // The rows of every breakdown must add up to the total.
    for list in ["processes", "kinds", "cgroups"] {
        let sum: u64 = report[list].as_array().unwrap().iter().map(|row| bytes(row, "savable_gross_bytes")).sum();
        assert_close(sum, bytes(totals, "savable_gross_bytes"), 64);
    }
    for field in ["fork_shared_bytes", "swapped_bytes", "merged_bytes", "anonymous_bytes"] {
        bytes(totals, field);
    }
    assert!(bytes(&report["cost"], "pages_read") * 4096 >= 76 * MIB);
    assert!(report["cost"]["cpu_seconds"].as_f64().unwrap() > 0.0);
    assert!(report["cost"]["ns_per_page"].as_f64().unwrap() > 0.0);
    assert!(process(&report, first.pid())["kinds"].as_array().unwrap().iter().any(|row| row["kind"] == "anonymous"));

    // 19 of 20 samples should be within their stated error of the exact figure. Fewer than 15 are in only one of
    // thousands of tests.
    let exact = bytes(totals, "savable_gross_bytes");
    let hits = (0..20).filter(|seed| {
        let sampled = scan(&[first.pid(), second.pid()], &["--seed", &seed.to_string()]);
        let off = bytes(&sampled["totals"], "savable_gross_bytes").abs_diff(exact);
        let error = bytes(&sampled, "error_bytes");
        assert!(error <= bytes(totals, "resident_bytes") / 50 + MIB, "stated {error}");
        // Some of the program's pages change between the scans.
        off <= error + 128 * 1024
    });
    assert!(hits.count() >= 15);
}

#[test]
fn merged_pages_stay_merged_and_private_copies_of_them_are_savable() {
    if !can_read_pages() {
        return;
    }
    let Some(_ksm) = KsmAtRest::take() else { return };
    let [mut one, mut two, private] = [(); 3].map(|()| random(8, 7));
    one.mark(0, one.pages);
    two.mark(0, two.pages);
    for (knob, value) in [("pages_to_scan", "5000"), ("sleep_millisecs", "10"), ("run", "1")] {
        write_knob(knob, value);
    }
    wait_until("8 MiB are merged", || number("pages_sharing") >= 2048);
    write_knob("run", "0");
    for _ in 0..2 {
        let report = scan(&[one.pid(), two.pid(), private.pid()], &["--exact"]);
        let totals = &report["totals"];
        assert_close(bytes(totals, "merged_bytes"), 16 * MIB, MIB / 4);
        // Every page of the third process can be merged into an existing page, so all of its memory is savable.
        let savable = bytes(process(&report, private.pid()), "savable_gross_bytes");
        assert!((8 * MIB..10 * MIB).contains(&savable), "{savable}");
        assert!(number("pages_sharing") >= 2048, "scanning has unmerged pages");
    }
}

/// As in a container with the host's pid namespace, but its own cgroup namespace.
#[test]
fn cgroups_have_the_same_names_in_a_cgroup_namespace() {
    if !can_read_pages() {
        return;
    }
    let group = |hierarchy| Cgroup::create(hierarchy).map(|group| (group, hierarchy));
    let Some((held, hierarchy)) = group("unified").or_else(|| group("pids")) else {
        return skip_unsupported("no control groups are mounted");
    };
    let own = Cgroup::create(hierarchy).unwrap();
    // Until the child runs sleep, it's a fork of the shell, whose memory would vanish if the exec came during the scan.
    let script = "sleep 30 & echo $! > $2/cgroup.procs
        until grep -q sleep /proc/$!/comm; do :; done
        echo $$ > $3/cgroup.procs
        unshare --cgroup sh -c 'grep -q /../ /proc/'$!/cgroup' && exec $0 scan --json --cgroup $1' $1 $2
        kill $!";
    let output = Command::new("unshare")
        .args(["--pid", "--fork", "--mount-proc", "sh", "-c", script, "sh"])
        .args([program().as_os_str(), held.path().as_os_str(), own.path().as_os_str()])
        .output()
        .unwrap();
    let report: Value = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&output.stderr)));
    assert_eq!(report["processes"].as_array().map(Vec::len), Some(1), "{report}");
}

#[test]
fn without_a_scope_the_whole_host_is_shown_with_a_command_that_works() {
    if !can_read_pages() {
        return;
    }
    // If another test's run went on, the scan would print another command or none.
    let Some(_ksm) = KsmAtRest::take() else { return };
    // A pid namespace of its own stands for the host.
    let script = r"
import json, subprocess, sys
hold = '''import hashlib, mmap, sys
data = mmap.mmap(-1, 16 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for page in range(len(data) // 4096):
    data[page * 4096:page * 4096 + 32] = hashlib.sha256(b'%d' % page).digest()
print(flush=True)
sys.stdin.readline()'''
start = lambda: subprocess.Popen([sys.executable, '-c', hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
holders = [start(), start()]
for holder in holders:
    holder.stdout.readline()
program = sys.argv[1]
text = subprocess.run([program, 'scan'], capture_output=True, text=True, check=True).stdout
command = text.split('To save it:')[1].split()
run = subprocess.run([program] + command[1:] + ['--dry-run', '--json', '--for', '1s'], capture_output=True, text=True)
found = json.loads(subprocess.run([program, 'scan', '--json'], capture_output=True, check=True).stdout)
print(json.dumps({'text': text, 'command': command, 'code': run.returncode, 'errors': run.stderr, 'found': found,
    'processes': json.loads(run.stdout or '{}').get('processes')}))";
    let output = Command::new("unshare")
        .args(["--pid", "--fork", "--mount-proc", "python3", "-c", script])
        .arg(program())
        .output()
        .unwrap();
    let result: Value = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&output.stderr)));
    let (text, found) = (result["text"].as_str().unwrap(), &result["found"]);
    assert_eq!(found["scope"], "--all");
    let program = &found["programs"][0];
    assert!(program["name"].as_str().unwrap().starts_with("python3"), "{program}");
    assert_close(bytes(program, "savable_bytes"), 16 * MIB, 6 * MIB);
    assert_eq!(program["processes"], 3, "{program}");
    assert!(text.contains("PROGRAM") && !text.contains("PID"), "{text}");
    assert_eq!(result["command"][1], "run", "{text}");
    assert_eq!((&result["code"], &result["processes"]), (&0.into(), &3.into()), "{result}");
}

#[test]
fn errors_are_one_line_with_their_exit_code() {
    assert_fails(&["scan", "--exe", "no-such-program-here"], 5, "no process matches");
    if !can_read_pages() {
        return;
    }
    let mut alone = Command::new("unshare");
    alone.args(["--pid", "--fork", "--mount-proc"]).arg(program()).arg("scan");
    assert_refused(&alone.output().unwrap(), 5, "nothing to look at yet: no other process runs here");
    if has_kernel_threads() {
        assert_fails(&["scan", "--pid", "2"], 6, "kernel thread");
    }
    let mut ended = zombie();
    assert_fails(&["scan", "--pid", &ended.id().to_string()], 6, "has ended");
    ended.wait().unwrap();

    let (copy, own) = (ProgramCopy::of(program(), "pagefold"), std::process::id().to_string());
    let output = as_other_user(copy.name()).args(["scan", "--pid", &own]).output().unwrap();
    assert_eq!(output.status.code(), Some(3), "{}", String::from_utf8_lossy(&output.stderr));
}

//! The web pages of `pagefold scan --html` and `pagefold top --html`, as a browser shows them.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use pagefold_testkit::*;

/// A process that holds memory, and whose name is HTML that a page must not interpret.
fn hostile() -> Script {
    let script = "import mmap, sys\n\
        open('/proc/self/comm', 'w').write('<img src=x>\"')\n\
        held = mmap.mmap(-1, 4 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)\n\
        held.write(b'\\1' * (4 << 20))\n\
        print('ready', flush=True); sys.stdin.readline()";
    let mut script = Script::of(Command::new("python3").args(["-c", script]));
    assert_eq!(script.line(), "ready");
    script
}

const NAME: &str = "&lt;img src=x&gt;";

/// Two processes with memory in common, memory of their own, and zeros.
fn holders() -> [Holder; 2] {
    let mut holders = pair(24, 20, 1);
    for holder in &mut holders {
        holder.zero(36 * PAGES_PER_MIB, 8 * PAGES_PER_MIB);
    }
    holders
}

#[test]
fn a_browser_shows_the_page_of_a_scan() {
    let Some(browser) = Browser::new() else { return };
    if !can_read_pages() {
        return;
    }
    // If another test's run went on, the scan would print another command or none.
    let Some(_ksm) = KsmAtRest::take() else { return };
    let (holders, hostile) = (holders(), hostile());
    let pids = [pids(&holders), vec![hostile.pid()]].concat();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("scan.html");
    succeed(&with_pids(&["scan"], &pids, &["--html", file.to_str().unwrap()]));
    let document = browser.document(&file);
    let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    let parts = [
        &*format!("on <b>{}</b>, 20", host.trim()),
        "could be saved.</h1>",
        "savable: all zeros",
        "<td>anonymous</td>",
        "pagefold run --pid",
        NAME,
        "Left out",
    ];
    assert_has(&document, &parts);
    browser.assert_narrow(&file);
    browser.pictures(&file);
}

#[test]
fn a_browser_shows_the_page_of_a_run_and_its_history() {
    let Some(browser) = Browser::new() else { return };
    let Some(_ksm) = KsmAtRest::take() else { return };
    let (mut holders, hostile) = (holders(), hostile());
    let pids = [pids(&holders), vec![hostile.pid()]].concat();
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let (history, page, later) = (path("history"), path("top.html"), path("later.html"));
    let top = |page: &str| pagefold(&["top", "--html", page, "--history", &history]);
    assert_refused(&top(&page), 8, "no pagefold is running");
    assert!(!Path::new(&page).exists());
    fs::write(&history, "pagefold.history/1\n").unwrap();
    let daemon = Daemon::on(&pids, &["--for", "300s", "--history", &history]).answering();
    wait_until("the memory is merged", || saved_bytes() >= 30 * MIB && status()["busy"] == false);
    let events = status()["events"].clone();
    let mark = row(&events, "what", "mark");
    assert!(pids.contains(&i32::try_from(mark["pid"].as_i64().unwrap()).unwrap()), "{mark}");
    assert!(mark["done_bytes"].as_u64().unwrap() > 0 && mark["time"].as_u64().unwrap() > 1_600_000_000, "{mark}");
    row(&events, "what", "scan");
    succeed(&["governor", "low"]);
    succeed(&["pause"]);
    let events = status()["events"].as_array().unwrap().clone();
    let whats = events.iter().map(|event| event["what"].as_str().unwrap());
    let asked: Vec<&str> = whats.filter(|what| ["pause", "governor"].contains(what)).collect();
    assert_eq!(asked, ["governor", "pause"]);

    wait_until("the history has something", || {
        top(&page).status.success() && fs::read_to_string(&page).unwrap().contains("<figure class=\"chart\">")
    });
    let document = browser.document(Path::new(&page));
    assert_has(
        &document,
        &["saved in 3 processes.</h1>", "Over time", "Kinds of memory", NAME, "<td>paused</td>", "marked "],
    );
    browser.assert_narrow(Path::new(&page));
    browser.pictures(Path::new(&page));
    assert_has(&daemon.terminate().errors, &["is not a history: it has 19 bytes", "pagefold begins a new one"]);
    // Without a daemon, the page shows the history that the daemon has left behind.
    assert_eq!(top(&later).status.code(), Some(0));
    let document = browser.document(Path::new(&later));
    assert!(document.contains("No pagefold is running.</h1>") && document.contains("class=\"chart\""), "{document}");
    assert_refused(&pagefold(&["top", "--since", "2h", "--history", &history]), 2, "top needs a terminal");
    fs::set_permissions(&history, fs::Permissions::from_mode(0o600)).unwrap();
    fs::write(&history, "").unwrap();
    assert_refused(&top(&later), 8, "nor can the history be read");
    unmerge(&pids);
    assert_intact(&mut holders);
}

//! Merging on request, in an emulated machine whose kernel has `/dev/ksm`. The example `request_guest` has the checks.
//!
//! `PAGEFOLD_REQUEST_KERNEL` names the kernel. Beside the options of a kernel that pagefold runs on, it needs the
//! second serial port, cgroups with cpusets, Unix sockets, user namespaces and seccomp. If it doesn't have the series,
//! `PAGEFOLD_REQUEST_MODULE` names the module `ksm_request.ko` for it.

mod common;

use common::example;
use pagefold_testkit::guest::{Tools, run_guest};
use pagefold_testkit::{program, victim_binary};
use std::path::PathBuf;
use std::time::Duration;

#[test]
#[ignore = "boots the kernel that PAGEFOLD_REQUEST_KERNEL names, as scripts/kernel builds it"]
fn equal_pages_of_one_trust_domain_are_merged_and_nothing_else() {
    check(r#"["/bin/request_guest"]"#, 1024, Duration::from_secs(900));
}

#[test]
#[ignore = "the same, with 10 GiB of memory"]
fn a_million_requests_merge_nothing_across_trust_domains() {
    check(r#"["/bin/request_guest", "million"]"#, 10 * 1024, Duration::from_secs(3600));
}

/// Runs a command in an emulated machine with this much memory.
fn check(command: &str, mebibytes: u32, limit: Duration) {
    let kernel = PathBuf::from(std::env::var_os("PAGEFOLD_REQUEST_KERNEL").expect("PAGEFOLD_REQUEST_KERNEL"));
    let Some(tools) = Tools::with_kernel(kernel) else { return };
    let guest = example("request_guest");
    let holder = victim_binary("holder");
    let mut files = vec![("command.json", command.as_bytes().to_vec())];
    let module = std::env::var_os("PAGEFOLD_REQUEST_MODULE").map(|path| std::fs::read(path).expect("the module"));
    files.extend(module.map(|module| ("ksm_request.ko", module)));
    let image = tools.image(&[("request_guest", &guest), ("holder", &holder), ("pagefold", program())], &files);
    let ended = run_guest(&tools, &image, limit, |machine| {
        machine.args(["-cpu", "max", "-m", &mebibytes.to_string()]);
        machine.args(["-append", "console=ttyS0 panic=-1 oops=panic loglevel=5 nokaslr mitigations=off"]);
    });
    let checks = ended.console.lines().filter(|line| line.contains("PASS ") || line.contains("FAIL "));
    checks.for_each(|line| println!("{line}"));
    assert!(ended.results.contains("exit status: 0"), "{}: {}\n{}", ended.status, ended.results, ended.console);
    for complaint in ["BUG:", "WARNING:", "Oops", "Bad page"] {
        assert!(!ended.console.contains(complaint), "{}", ended.console);
    }
    println!("{:.0} s", ended.took.as_secs_f64());
}

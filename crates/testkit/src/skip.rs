//! How a test reports that it, or a part of it, can't run on this machine.
//!
//! We write the line to standard error ourselves, because the test harness captures the output of a test that passes.
//! With `PAGEFOLD_NO_SKIP=1`, as in CI, a skipped test fails: `scripts/setup` installs everything that a test needs,
//! except features that the kernel or the hardware lacks.

use std::fmt::Display;
use std::io::Write;

/// Reports that we skip the current test for lack of something that an administrator can provide.
///
/// # Panics
/// When `PAGEFOLD_NO_SKIP` is set.
#[track_caller]
pub fn skip(reason: impl Display) {
    report(&reason);
    assert!(!is_forbidden(), "skipped although PAGEFOLD_NO_SKIP is set: {reason}");
}

/// Reports that we skip the current test because this kernel or hardware lacks a feature, which no setup can change.
pub fn skip_unsupported(reason: impl Display) {
    report(&reason);
}

fn is_forbidden() -> bool {
    std::env::var_os("PAGEFOLD_NO_SKIP").is_some_and(|value| !value.is_empty() && value != "0")
}

fn report(reason: &dyn Display) {
    // The harness names the thread after the test.
    let thread = std::thread::current();
    let line = format!("SKIP {}: {reason}\n", thread.name().unwrap_or("a thread of a test"));
    let _ = std::io::stderr().write_all(line.as_bytes());
}

//! What the tests of `pagefold-lab` share, beside what those of `pagefold` do.
#![allow(dead_code, unused_imports, reason = "each test file uses a part of it")]

#[path = "../../../pagefold/tests/support/mod.rs"]
mod pagefold;

pub use pagefold::*;
use std::process::{Command, Output, Stdio};

/// The program under test, which also plays the tenants.
pub const LAB: &str = env!("CARGO_BIN_EXE_pagefold-lab");

/// Runs `pagefold-lab` to its end.
pub fn lab(args: &[&str]) -> Output {
    Command::new(LAB).args(args).stdin(Stdio::null()).output().unwrap()
}

/// `pagefold-lab` must fail with this code, print nothing else, and say why in one line.
#[track_caller]
pub fn fails(args: &[&str], code: i32, says: &str) {
    let output = lab(args);
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(code), "{error}");
    assert!(error.starts_with("pagefold-lab: ") && error.lines().count() == 1, "{error}");
    assert!(error.contains(says) && error.contains("; "), "{error}");
    assert!(output.stdout.is_empty(), "{}", String::from_utf8_lossy(&output.stdout));
}

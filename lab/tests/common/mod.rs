//! Runs of `pagefold-lab`, and its examples.
#![allow(dead_code, reason = "each test uses a part of it")]

use pagefold_testkit::assert_failed_as;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// An example, which `cargo test --examples` builds beside the tests.
pub fn example(name: &str) -> PathBuf {
    let own = std::env::current_exe().unwrap();
    own.parent().and_then(Path::parent).expect("target/PROFILE/deps").join("examples").join(name)
}

pub fn lab(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_pagefold-lab")).args(args).stdin(Stdio::null()).output().unwrap()
}

/// `pagefold-lab` fails with this code and prints nothing but one line on standard error, with the reason and a remedy.
#[track_caller]
pub fn assert_lab_fails(args: &[&str], code: i32, says: &str) {
    let output = lab(args);
    assert_failed_as("pagefold-lab", &output, code, says);
    assert!(output.stdout.is_empty(), "{}", String::from_utf8_lossy(&output.stdout));
}

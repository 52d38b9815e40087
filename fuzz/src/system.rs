//! KSM's files, facts about the machine, and names on the command line.

use crate::fuzzing;
use pagefold_engine::config::Preset;
use pagefold_engine::error::ConfigError;
use pagefold_engine::governor::Governor;
use pagefold_engine::placement::policy::Placement;
use pagefold_host::check::facts::Release;
use std::fmt::Display;
use std::str::FromStr;

/// Counters, knobs and choices below `/sys/kernel/mm/ksm`: numbers print and parse back, and a choice is a part of the
/// text.
pub fn ksm_files(text: &[u8]) {
    if let Some(number) = fuzzing::ksm_number::<u64>(text) {
        assert_eq!(fuzzing::ksm_number(format!("{number}\n").as_bytes()), Some(number));
    }
    if let Some(number) = fuzzing::ksm_number::<i64>(text) {
        assert_eq!(fuzzing::ksm_number(format!("{number}\n").as_bytes()), Some(number));
    }
    let Some(choice) = fuzzing::ksm_choice(text) else { return };
    assert!(!choice.contains(']') && std::str::from_utf8(text).is_ok_and(|text| text.contains(choice)));
    assert_eq!(fuzzing::ksm_choice(format!("always [{choice}] never\n").as_bytes()), Some(choice));
}

/// Kernel version, memory nodes and zones, allowed processors and nodes, and the auxiliary vector.
pub fn machine(bytes: &[u8]) {
    let _ = fuzzing::page_size(bytes);
    let text = String::from_utf8_lossy(bytes);
    if let Some(release) = Release::parse(&text) {
        assert_eq!(Release::parse(&format!("{release}.9-amd64\n")), Some(release));
    }
    if let Some(count) = fuzzing::count_list(&text) {
        assert!(count > 0);
        let last = count - 1;
        assert_eq!(fuzzing::count_list(&format!("0-{last}\n")), Some(count));
    }
    let _ = fuzzing::allowed(bytes);
    let _ = fuzzing::node_kib(&text, "Node 0 MemFree");
    let (numbers, meets) = fuzzing::list(&text);
    assert!(numbers == 0 || meets);
    // Parts of the block lie in it and don't overlap.
    let mut end = 32_768;
    for (first, frames) in fuzzing::block_of_two(&text) {
        assert!(first >= end && frames > 0);
        end = first + frames;
    }
    assert!(end <= 65_536);
}

/// Names of governors, placements and presets: the parser accepts an exact spelling only, and refuses others in one
/// line.
pub fn names(text: &[u8]) {
    let Ok(text) = std::str::from_utf8(text) else { return };
    assert_named::<Governor>(text);
    assert_named::<Placement>(text);
    assert_named::<Preset>(text);
}

fn assert_named<T: FromStr<Err = ConfigError> + Display>(text: &str) {
    match text.parse::<T>() {
        Ok(value) => assert_eq!(value.to_string(), text),
        Err(error) => {
            let error = error.to_string();
            assert!(!error.contains(char::is_control), "{error:?}");
            assert!(error.len() < 200 + 12 * text.len());
        }
    }
}

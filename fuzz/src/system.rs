//! KSM's files, facts about the machine, and names on the command line.

use pagefold_engine::config::Preset;
use pagefold_engine::error::ConfigError;
use pagefold_engine::governor::Governor;
use pagefold_engine::keys::NodeKey;
use pagefold_engine::placement::policy::Placement;
use pagefold_host::check::facts::{Release, page_size_in};
use pagefold_ksm::plain;
use pagefold_procmem::numa::allowed;
use pagefold_procmem::os::fields::{chosen, kib};
use pagefold_procmem::os::numa::{FrameSpan, divided, zones_of};
use pagefold_procmem::os::number_list::NumberList;
use std::fmt::Display;
use std::str::FromStr;

/// Counters, knobs and choices below `/sys/kernel/mm/ksm`: numbers print and parse back, and a choice is a part of the
/// text.
pub fn ksm_files(text: &[u8]) {
    assert_number::<u64>(text);
    assert_number::<i64>(text);
    let Some(text) = plain(text) else { return };
    let Some(choice) = chosen(text) else { return };
    assert!(!choice.contains(']') && text.contains(choice));
    assert_eq!(chosen(&format!("always [{choice}] never\n")), Some(choice));
}

fn assert_number<T: FromStr + Display + PartialEq>(text: &[u8]) {
    let number = |text: &[u8]| plain(text)?.parse::<T>().ok();
    if let Some(value) = number(text) {
        assert!(number(format!("{value}\n").as_bytes()).is_some_and(|again| again == value));
    }
}

/// Kernel version, memory nodes and zones, allowed processors and nodes, and the auxiliary vector.
pub fn machine(bytes: &[u8]) {
    let _ = page_size_in(bytes);
    let text = String::from_utf8_lossy(bytes);
    if let Some(release) = Release::parse(&text) {
        assert_eq!(Release::parse(&format!("{release}.9-amd64\n")), Some(release));
    }
    if let Some(list) = NumberList::parse(&text) {
        if let Some(last) = list.len().checked_sub(1) {
            assert_eq!(NumberList::parse(&format!("0-{last}\n")).map(|all| all.len()), Some(list.len()));
        }
        assert!(list.iter().next().is_none() || list.meets(&list));
    }
    let _ = allowed(bytes);
    let _ = kib(bytes, "Node 0 MemFree");
    // Parts of a block of two nodes lie in it and don't overlap.
    let block = [0, 1].map(|node| FrameSpan { first: 32_768, frames: 32_768, node: NodeKey(node) });
    let mut end = 32_768;
    for part in divided(&block, &zones_of(&text)) {
        assert!(part.first >= end && part.frames > 0);
        end = part.first + part.frames;
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

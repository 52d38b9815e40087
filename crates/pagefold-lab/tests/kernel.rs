//! ksmd's model against ksmd: the same memory, scan by scan, the same counters.
//!
//! Programs of the test's own hold memory that is known and changes between scans. Before each scan it is recorded, as
//! `pagefold-lab record` does it; then ksmd is kicked. Afterwards the model gets the record, and as many kicks.

mod kernel {
    pub mod comparison;
    pub mod family;
    pub mod memory;
}

use kernel::comparison::{Machine, Setting, differences};
use kernel::memory::Course;

const SETTINGS: [Setting; 4] = [
    Setting { smart_scan: false, use_zero_pages: false },
    Setting { smart_scan: true, use_zero_pages: false },
    Setting { smart_scan: false, use_zero_pages: true },
    Setting { smart_scan: true, use_zero_pages: true },
];

#[test]
fn the_model_counts_what_the_kernel_counts() {
    let Some(mut machine) = Machine::take() else { return };
    let apart = SETTINGS.map(|setting| differences(&machine.watch(setting, Course::new(1)))).concat();
    assert!(apart.is_empty(), "{}", apart.join("\n"));
}

#[test]
fn the_model_counts_what_the_kernel_counts_in_a_family() {
    let Some(mut machine) = Machine::take() else { return };
    let apart = SETTINGS.map(|setting| differences(&machine.watch_family(setting))).concat();
    assert!(apart.is_empty(), "{}", apart.join("\n"));
}

/// How far the model's CPU time is off: a figure, no judgement. Takes 1 GiB and a minute.
#[test]
#[ignore = "a measurement: run it by name, on an idle machine"]
fn calibration_on_a_gibibyte() {
    let Some(mut machine) = Machine::take() else { return };
    for setting in SETTINGS {
        differences(&machine.watch(setting, Course::new(7)));
    }
}

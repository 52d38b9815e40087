//! ksmd's model against ksmd: the same memory, scan by scan, the same counters.
//!
//! Programs of the test's own hold memory that is known and changes between scans. Before each scan it is recorded, as
//! `pagefold-lab record` does it; then ksmd is kicked. Afterwards the model gets the record, and as many kicks.

mod kernel {
    pub mod comparison;
    pub mod family;
    pub mod memory;
}

use kernel::comparison::{Machine, SETTINGS, differences};
use kernel::memory::Course;

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

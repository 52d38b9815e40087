//! Compares the model of ksmd with ksmd: the same memory must give the same counters after each scan.
//!
//! Test programs hold known memory that changes between scans. Before each scan we record it, as `pagefold-lab record`
//! does; then we kick ksmd. Afterwards the model gets the record and the same number of kicks.

mod kernel {
    pub mod comparison;
    pub mod family;
    pub mod memory;
}

use kernel::comparison::{KernelUnderTest, SETTINGS, differences};
use kernel::memory::Schedule;

#[test]
fn model_and_kernel_counters_agree() {
    let Some(mut machine) = KernelUnderTest::take() else { return };
    let mismatches = SETTINGS.map(|setting| differences(&machine.observe(setting, Schedule::new(1)))).concat();
    assert!(mismatches.is_empty(), "{}", mismatches.join("\n"));
}

#[test]
fn model_and_kernel_counters_agree_in_a_family() {
    let Some(mut machine) = KernelUnderTest::take() else { return };
    let mismatches = SETTINGS.map(|setting| differences(&machine.observe_family(setting))).concat();
    assert!(mismatches.is_empty(), "{}", mismatches.join("\n"));
}

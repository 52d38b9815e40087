//! How far the model's CPU time is off, on 1 GiB of memory: `cargo bench --bench calibration`, about a
//! minute on an idle machine.

#[allow(dead_code, reason = "the tests use the rest of it")]
#[path = "../tests/kernel/comparison.rs"]
mod comparison;
#[allow(dead_code, reason = "the tests use it")]
#[path = "../tests/kernel/family.rs"]
mod family;
#[path = "../tests/kernel/memory.rs"]
mod memory;

use comparison::{KernelUnderTest, SETTINGS, differences};
use memory::Schedule;

fn main() {
    let Some(mut machine) = KernelUnderTest::take() else { return };
    for setting in SETTINGS {
        differences(&machine.observe(setting, Schedule::new(7)));
    }
}

//! The cost of the controller's reads of KSM's state: `cargo bench --bench ksm_cost`.

use pagefold_ksm::ksmd::Ksmd;
use pagefold_ksm::{KSM_ROOT, Ksm};
use std::hint::black_box;
use std::path::Path;
use std::time::Instant;

fn main() {
    let ksm = Ksm::open(Path::new(KSM_ROOT)).unwrap();
    let ksmd = Ksmd::find().unwrap().expect("ksmd");
    time("Ksm::counters", || {
        black_box(ksm.counters().unwrap());
    });
    time("Ksm::knobs", || {
        black_box(ksm.knobs().unwrap());
    });
    time("Ksmd::rests", || {
        black_box(ksmd.rests().unwrap());
    });
    time("Ksmd::cpu_ns", || {
        black_box(ksmd.cpu_ns().unwrap());
    });
}

fn time(name: &str, mut call: impl FnMut()) {
    const CALLS: u128 = 10_000;
    let began = Instant::now();
    for _ in 0..CALLS {
        call();
    }
    println!("{name}: {} ns", began.elapsed().as_nanos() / CALLS);
}

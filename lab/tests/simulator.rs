//! The simulated host itself follows KSM's rules, and costs as much as we measured. The product's tests and our
//! experiments rely on it.

mod simulator {
    mod calibration;
    mod granularity;
    mod merging;
    mod rules;
}

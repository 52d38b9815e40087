//! The simulated host itself: that it follows KSM's rules, and costs what was measured. The product's tests, and our
//! experiments, rely on it.

mod simulator {
    mod calibration;
    mod granularity;
    mod merging;
    mod rules;
}

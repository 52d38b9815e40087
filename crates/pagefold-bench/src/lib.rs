//! Workloads and experiments.

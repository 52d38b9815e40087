//! `pagefold-fleet` on files of sketches.
#![expect(clippy::single_range_in_vec_init, reason = "workloads hold ranges of contents, often one")]

#[path = "fleet/change.rs"]
mod change;
#[path = "fleet/files.rs"]
mod files;
#[path = "fleet/hostile.rs"]
mod hostile;
#[path = "fleet/plan.rs"]
mod plan;
#[path = "fleet/report.rs"]
mod report;
#[path = "fleet/s3.rs"]
mod s3;
#[allow(dead_code, reason = "part of it is for other tests")]
#[path = "../../crates/testkit/src/skip.rs"]
mod skip;
#[path = "fleet/spark.rs"]
mod spark;

//! The SQL that DataFusion and Spark both run, from `fleet/sql`.

/// The view `workloads`.
pub const WORKLOADS: &str = include_str!("../sql/workloads.sql");
/// The view `held`: how many contents each workload holds, without its sketch.
pub const HELD: &str = "SELECT id, held FROM workloads";
/// For each host, the memory that its workloads take, save and could save.
pub const HOSTS: &str = include_str!("../sql/hosts.sql");

const PAIRS: &str = include_str!("../sql/pairs.sql");
const SAMPLES: &str = include_str!("../sql/samples.sql");

/// How many contents of all workloads we search for candidate pairs at most, and how many of each workload at least and
/// at most.
const SAMPLED_MOST: usize = 1_000_000;
const SAMPLED: (usize, usize) = (4, 128);

/// How many contents of each workload we search for candidate pairs. With `n` of them, two workloads of the same size
/// that have a share `s` in common miss each other with the probability (1 - s)^n.
pub fn sampled(workloads: usize) -> usize {
    (SAMPLED_MOST / workloads.max(1)).clamp(SAMPLED.0, SAMPLED.1)
}

/// The view `contents` in DataFusion's dialect: the lowest hashes of each workload.
pub fn contents(sampled: usize) -> String {
    format!(
        "SELECT id, sha2(domain, 256) AS domain_id, unnest(theta_lowest(sketch, {sampled})) AS content FROM workloads"
    )
}

/// The query for the pairs of workloads that have most in common.
pub fn pairs(sampled: usize, pairs: usize) -> String {
    PAIRS.replace("{sampled}", &sampled.to_string()).replace("{pairs}", &pairs.to_string())
}

/// The query for all workloads, with samples of at most 2^lg contents.
pub fn samples(lg: u8) -> String {
    SAMPLES.replace("{lg_sampled}", &lg.to_string())
}

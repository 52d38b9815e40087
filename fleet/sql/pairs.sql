-- The pairs of workloads that have most in common.
--
-- `contents` has the {sampled} contents with the lowest hashes of each workload. Two workloads that have much in common
-- meet there, because a low hash is low for both. We pair each workload with the next 4 in the order of ids that hold
-- the same content, so that a content that everybody holds does not pair everybody with everybody. Then we compare the
-- best of these candidates in full. The smaller side of a join comes first, because DataFusion keeps that side in
-- memory.
--
-- The bounds are those of a score interval, two standard deviations wide: of N common contents, a binomial share theta is in both
-- sketches.
WITH near AS (
    SELECT id,
        LEAD(id, 1) OVER (PARTITION BY domain_id, content ORDER BY id) AS next_1,
        LEAD(id, 2) OVER (PARTITION BY domain_id, content ORDER BY id) AS next_2,
        LEAD(id, 3) OVER (PARTITION BY domain_id, content ORDER BY id) AS next_3,
        LEAD(id, 4) OVER (PARTITION BY domain_id, content ORDER BY id) AS next_4
    FROM contents
),
steps AS (
    SELECT step FROM (VALUES (1), (2), (3), (4)) AS numbers(step)
),
met AS (
    SELECT one, other, COUNT(*) AS met
    FROM (
        SELECT id AS one,
            CASE step WHEN 1 THEN next_1 WHEN 2 THEN next_2 WHEN 3 THEN next_3 ELSE next_4 END AS other
        FROM near CROSS JOIN steps
    ) AS pairs
    WHERE other IS NOT NULL
    GROUP BY one, other
),
half AS (
    SELECT met.one, met.other, met.met, a.held AS held_one
    FROM held AS a JOIN met ON a.id = met.one
),
candidates AS (
    SELECT half.one, half.other
    FROM held AS b JOIN half ON b.id = half.other
    ORDER BY half.met * CASE WHEN half.held_one > b.held THEN half.held_one ELSE b.held END DESC, half.one, half.other
    LIMIT {pairs}
),
compared AS (
    SELECT a.host AS host, a.kind AS kind, a.workload AS workload,
        b.host AS other_host, b.kind AS other_kind, b.workload AS other_workload, a.domain AS domain,
        a.held AS held, b.held AS other_held,
        CASE WHEN a.theta < b.theta THEN a.theta ELSE b.theta END AS theta,
        LEAST(CAST(theta_sketch_estimate(theta_intersection(a.sketch, b.sketch)) AS DOUBLE), a.held, b.held) AS common
    FROM candidates
    JOIN workloads AS a ON a.id = candidates.one
    JOIN workloads AS b ON b.id = candidates.other
)
SELECT host, kind, workload, other_host, other_kind, other_workload, domain,
    4096 * held AS held_bytes,
    4096 * other_held AS other_held_bytes,
    4096 * common AS common_bytes,
    4096 * (common * theta + 2 * (1 - theta) - SQRT(4 * (1 - theta) * common * theta + 4 * (1 - theta) * (1 - theta))) / theta AS low_bytes,
    4096 * (common * theta + 2 * (1 - theta) + SQRT(4 * (1 - theta) * common * theta + 4 * (1 - theta) * (1 - theta))) / theta AS high_bytes
FROM compared
ORDER BY common_bytes DESC, host, kind, workload, other_host, other_kind, other_workload, domain

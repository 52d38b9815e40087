-- The pairs of workloads that have most in common.
--
-- `contents` has the {sampled} contents with the lowest hashes of each workload: two workloads that hold much in common meet there,
-- because what is low is low for both. Each is paired with the next 8 of those that hold the same content, in the order of their ids, so that
-- a content that everybody holds does not make a pair of everybody: the places are joined, and not the contents alone, because engines form
-- all pairs that agree in a join before they look at anything else. The best of these candidates are then compared in full.
--
-- The bounds are those of a score interval, two standard deviations wide: of N common contents, a binomial share theta is in both
-- sketches.
WITH placed AS (
    SELECT id, domain, content, ROW_NUMBER() OVER (PARTITION BY domain, content ORDER BY id) AS place
    FROM contents
),
steps AS (
    SELECT step FROM (VALUES (1), (2), (3), (4), (5), (6), (7), (8)) AS numbers(step)
),
met AS (
    SELECT one.id AS one, other.id AS other, COUNT(*) AS met
    FROM (SELECT id, domain, content, place + step AS next_place FROM placed CROSS JOIN steps) AS one
    JOIN placed AS other ON one.domain = other.domain AND one.content = other.content AND one.next_place = other.place
    GROUP BY one.id, other.id
),
candidates AS (
    SELECT met.one, met.other
    FROM met
    JOIN held AS a ON a.id = met.one
    JOIN held AS b ON b.id = met.other
    ORDER BY met.met * CASE WHEN a.held > b.held THEN a.held ELSE b.held END DESC, met.one, met.other
    LIMIT {pairs}
),
compared AS (
    SELECT a.host AS host, a.kind AS kind, a.workload AS workload,
        b.host AS other_host, b.kind AS other_kind, b.workload AS other_workload, a.domain AS domain,
        a.held AS held, b.held AS other_held,
        CASE WHEN a.theta < b.theta THEN a.theta ELSE b.theta END AS theta,
        CAST(theta_sketch_estimate(theta_intersection(a.sketch, b.sketch)) AS DOUBLE) AS common
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

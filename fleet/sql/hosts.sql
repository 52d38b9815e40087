-- For each host: the memory that its workloads take, save and could save.
--   within_bytes   copies within a workload.
--   across_bytes   copies in several workloads of one trust domain: the sum of what each holds, less their union.
--   across_error_bytes   across_bytes is off by at most this in 19 of 20 cases: two standard deviations of the sum and of the union
--       (which keeps 4,096 contents, or up to three fewer).
WITH domains AS (
    SELECT host,
        COUNT(*) AS workloads,
        MAX(time_us) AS time_us,
        SUM(anonymous_bytes) AS anonymous_bytes,
        SUM(read_bytes) AS read_bytes,
        SUM(saved_bytes) AS saved_bytes,
        SUM(savable_bytes) AS within_bytes,
        SUM(take_back_bytes) AS take_back_bytes,
        SUM(cpu_millicores) AS cpu_millicores,
        MAX(host_memory_bytes) AS host_memory_bytes,
        MAX(host_cpu_millicores) AS host_cpu_millicores,
        SUM(held) AS held,
        SUM(held * (1 - theta) / theta) AS held_variance,
        theta_union_agg(sketch, 12) AS together
    FROM workloads
    GROUP BY host, domain
),
unions AS (
    SELECT *,
        CAST(theta_sketch_estimate(together) AS DOUBLE) AS held_together
    FROM domains
)
SELECT host,
    SUM(workloads) AS workloads,
    MAX(time_us) AS time_us,
    SUM(anonymous_bytes) AS anonymous_bytes,
    SUM(read_bytes) AS read_bytes,
    SUM(saved_bytes) AS saved_bytes,
    SUM(within_bytes) AS within_bytes,
    SUM(take_back_bytes) AS take_back_bytes,
    SUM(cpu_millicores) AS cpu_millicores,
    MAX(host_memory_bytes) AS host_memory_bytes,
    MAX(host_cpu_millicores) AS host_cpu_millicores,
    4096 * SUM(CASE WHEN held > held_together THEN held - held_together ELSE 0.0 END) AS across_bytes,
    4096 * 2 * SQRT(SUM(held_variance + CASE
        WHEN held_together > 4096 THEN held_together * (held_together / 4096 - 1)
        ELSE 0.0
    END)) AS across_error_bytes
FROM unions
GROUP BY host
ORDER BY host

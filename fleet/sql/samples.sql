-- The rows that a plan is based on: each workload, with a sketch of at most 2^{lg_sampled} contents.
SELECT host, kind, workload, domain, anonymous_bytes, read_bytes, savable_bytes, saved_bytes, take_back_bytes, cpu_millicores,
    host_memory_bytes, host_cpu_millicores, theta_union(sketch, sketch, {lg_sampled}) AS sample
FROM sketches

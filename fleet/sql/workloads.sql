-- The view `workloads`: the rows of `sketches`, with what their sketches say.
--   id     tells workloads apart: a digest of their names, which may be long, and would be copied many times. No name contains a line
--          end.
--   held   distinct contents, pages.
--   theta  the share of them that the sketch keeps: a full sketch has a preamble of 24 bytes, and 8 for each content.
--          One that keeps all has a shorter preamble.
SELECT *,
    CASE WHEN kept > 0 AND held > kept + 1 THEN kept / held ELSE 1.0 END AS theta
FROM (
    SELECT *,
        sha2(host || '
' || kind || '
' || workload || '
' || domain, 256) AS id,
        CAST(theta_sketch_estimate(sketch) AS DOUBLE) AS held,
        (CAST(length(sketch) AS DOUBLE) - 24) / 8 AS kept
    FROM sketches
) AS estimated

-- The view `workloads`: the rows of `sketches`, with figures from their sketches.
--   id     tells workloads apart: a digest of their names, because names may be long and we copy ids many times. No name contains a line
--          end.
--   held   distinct contents, pages.
--   theta  the share of them that the sketch keeps. A full sketch has a preamble of 24 bytes, and 8 bytes for each content.
--          A sketch that keeps all contents has a shorter preamble.
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

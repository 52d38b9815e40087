#!/usr/bin/env python3
"""Reports what the hosts of a fleet hold in common, on Apache Spark 4.1 or later.

    spark-submit fleet/spark/report.py DIR|URL... [--pairs N] [--output FILE]

The queries are the same as pagefold-fleet's (fleet/sql), and so is the answer: JSON, schema pagefold.fleet.report/1. The
theta functions are Spark's own. Spark doesn't know the checksums of these files. It leaves out rows that it can't decode,
values that aren't sketches, files made under another key, and hosts that are gone or whose clocks are wrong.
"""

import argparse
import datetime
import json
import pathlib
import re
import sys
from urllib.parse import unquote

from pyspark.sql import SparkSession

SQL = pathlib.Path(__file__).resolve().parent.parent / "sql"
TEXTS = ["host", "key", "kind", "workload", "domain"]
TIMES = ["time_us", "since_us"]
NUMBERS = """anonymous_bytes read_bytes zero_bytes pages_1 pages_2 pages_3_15 pages_16_255 pages_256 savable_bytes saved_bytes
    take_back_bytes came_bytes went_bytes broken_bytes cpu_millicores host_memory_bytes host_cpu_millicores""".split()

# As in pagefold-fleet: we look for pairs in this many contents of all workloads, with bounds for each workload.
SAMPLED_MOST = 1_000_000
SAMPLED = (4, 128)
AHEAD_US = 5 * 60 * 1_000_000

# Whether a value is a compact theta sketch, not packed, with the library's default seed: the length must agree with the
# preamble (in 8-byte words) and with the number of entries.
IS_SKETCH = """
    length(sketch) BETWEEN 8 AND 32768 AND hex(substring(sketch, 2, 2)) = '0303' AND CASE
        WHEN words = 1 THEN length(sketch) = 8 OR length(sketch) = 16 AND seed = 'CC93'
        WHEN words IN (2, 3) THEN seed = 'CC93' AND length(sketch) = 8 * words + 8 * conv(concat(
            substring(entries, 7, 2), substring(entries, 5, 2), substring(entries, 3, 2), substring(entries, 1, 2)), 16, 10)
        ELSE FALSE
    END"""

# The largest number that a host may report, and the most workloads, so that sums don't overflow.
NUMBER_MOST = 1 << 50
ROWS_MOST = 4096

# The lowest hashes of each workload: the first entries of its sketch, because entries ascend.
CONTENTS = """
    SELECT id, sha2(domain, 256) AS domain_id, substring(sketch, 1 + 8 * (words + entry), 8) AS content
    FROM (SELECT *, CAST(conv(hex(substring(sketch, 1, 1)), 16, 10) AS INT) & 63 AS words FROM workloads) AS parsed
    LATERAL VIEW explode(sequence(0, {sampled} - 1)) AS entry
    WHERE 8 * (words + entry) < length(sketch)"""


def main():
    arguments = parse()
    spark = SparkSession.builder.appName("pagefold-fleet").config("spark.sql.session.timeZone", "UTC").getOrCreate()
    try:
        report = make_report(spark, arguments)
    finally:
        spark.stop()
    text = json.dumps(report, indent=2)
    if arguments.output:
        pathlib.Path(arguments.output).write_text(text + "\n")
    else:
        print(text)
    return 0 if report["hosts"] else 5


def parse():
    parser = argparse.ArgumentParser(description="Reports what the hosts of a fleet hold in common.")
    parser.add_argument("sources", nargs="+", metavar="DIR|URL")
    parser.add_argument("--pairs", type=int, default=20, help="show this many pairs of workloads [default: 20]")
    parser.add_argument("--key", help="count files made under the key of this identifier only")
    parser.add_argument("--max-age", type=float, default=24, metavar="HOURS", help="leave out older hosts [default: 24]")
    parser.add_argument("--at", type=datetime.datetime.fromisoformat, help="judge ages as of this time (UTC) [default: now]")
    parser.add_argument("--output", metavar="FILE", help="write the report to this file")
    return parser.parse_args()


def make_report(spark, arguments):
    schema = ", ".join(
        [f"{name} STRING" for name in TEXTS]
        + [f"{name} TIMESTAMP" for name in TIMES]
        + [f"{name} BIGINT" for name in NUMBERS]
        + ["sketch BINARY"]
    )
    names = {"pathGlobFilter": "*.parquet", "recursiveFileLookup": "true"}
    listed = spark.read.format("binaryFile").options(**names).load(arguments.sources).select("path")
    listed = {plain(row.path) for row in listed.collect()}
    # Hosts may replace their files while we read.
    lenient = {"ignoreCorruptFiles": "true", "ignoreMissingFiles": "true"}
    read = spark.read.schema(schema).options(**names, **lenient).parquet(*arguments.sources)
    read.selectExpr("*", "_metadata.file_path AS file").createOrReplaceTempView("files")
    headers = spark.sql(f"""
        SELECT file, MIN(host) AS host, MIN(key) AS key, unix_micros(MAX(time_us)) AS time_us, COUNT(*) AS workloads,
            COUNT(DISTINCT host, key) = 1 AND COUNT(*) = COUNT(kind) AND COUNT(*) = COUNT(workload)
                AND COUNT(*) = COUNT(domain) AND COUNT(*) = COUNT(anonymous_bytes) AND COUNT(*) <= {ROWS_MOST}
                AND bool_and(LEAST({", ".join(NUMBERS)}) >= 0 AND GREATEST({", ".join(NUMBERS)}) <= {NUMBER_MOST}) AS is_ours,
            bool_and({IS_SKETCH}) AS is_sound
        FROM (SELECT *, CAST(conv(hex(substring(sketch, 1, 1)), 16, 10) AS INT) & 63 AS words,
            hex(substring(sketch, 7, 2)) AS seed, hex(substring(sketch, 9, 4)) AS entries FROM files) AS parsed
        GROUP BY file""").collect()
    chosen, left_out, older = choose(headers, listed, arguments)
    workloads = sum(header.workloads for header in chosen)
    sampled = min(max(SAMPLED_MOST // max(workloads, 1), SAMPLED[0]), SAMPLED[1])
    files = spark.createDataFrame([(header.file,) for header in chosen], "file STRING")
    files.createOrReplaceTempView("chosen")
    spark.sql("SELECT files.* FROM files JOIN chosen ON files.file = chosen.file").drop("file").createOrReplaceTempView("sketches")
    spark.sql(query("workloads")).createOrReplaceTempView("workloads")
    spark.sql("SELECT id, held FROM workloads").createOrReplaceTempView("held")
    spark.sql(CONTENTS.format(sampled=sampled)).createOrReplaceTempView("contents")
    hosts = [row.asDict() for row in spark.sql(query("hosts")).collect()] if chosen else []
    pairs = query("pairs").replace("{sampled}", str(sampled)).replace("{pairs}", str(arguments.pairs))
    pairs = [row.asDict() for row in spark.sql(pairs).collect()] if chosen and arguments.pairs else []
    for row in hosts + pairs:
        row.pop("time_us", None)
        row.update({name: int(value) for name, value in row.items() if isinstance(value, float)})
    return {
        "schema": "pagefold.fleet.report/1",
        "key": chosen[0].key if chosen else None,
        "hosts": hosts,
        "pairs": pairs,
        "sampled": sampled,
        "left_out": left_out,
        "older_files": older,
    }


def query(name):
    return (SQL / f"{name}.sql").read_text()


def plain(path):
    """A path without the scheme of local files, as pagefold-fleet prints it."""
    return re.sub("^file:/+", "/", path)


def path_of(header):
    """The path of a file. Spark's metadata has a URL instead."""
    return plain(unquote(header.file))


def choose(headers, listed, arguments):
    """The newest file of each host that counts, the others with the reason, and how many are older."""
    at = arguments.at.replace(tzinfo=datetime.UTC) if arguments.at else datetime.datetime.now(datetime.UTC)
    now_us = (at - datetime.datetime.fromtimestamp(0, datetime.UTC)) // datetime.timedelta(microseconds=1)
    left_out, by_host, keys = [], {}, {}
    leave_out = lambda file, host, why: left_out.append({"file": file, "host": host, "why": why})
    for file in sorted(listed - {path_of(header) for header in headers}):
        leave_out(file, None, "cannot be decoded")
    sound = []
    for header in sorted(headers, key=lambda header: header.file):
        if not header.is_ours:
            leave_out(path_of(header), None, "is not a file of sketches")
        elif not header.is_sound:
            leave_out(path_of(header), header.host, "has a damaged sketch")
        elif not path_of(header).endswith(f"/{header.host}.parquet"):
            leave_out(path_of(header), header.host, "is not named after its host (HOST.parquet)")
        else:
            sound.append(header)
            keys[header.key] = keys.get(header.key, 0) + 1
    key = arguments.key or max(sorted(keys), key=keys.get, default=None)
    for header in sound:
        ahead_us = header.time_us - now_us
        if header.key != key:
            leave_out(path_of(header), header.host, f"was made under the key {header.key}, not {key}")
        elif ahead_us > AHEAD_US:
            leave_out(path_of(header), header.host, f"is {rounded(ahead_us)} ahead: its host's clock is wrong")
        else:
            by_host.setdefault(header.host, []).append(header)
    chosen, older = [], 0
    for host, files in sorted(by_host.items()):
        newest = max(files, key=lambda header: header.time_us)
        older += len(files) - 1
        age_us = now_us - newest.time_us
        if age_us > arguments.max_age * 3600 * 1_000_000:
            leave_out(path_of(newest), host, f"is {rounded(age_us)} old: the host is gone, or writes no sketches")
        else:
            chosen.append(newest)
    return chosen, left_out, older


def rounded(time_us):
    return datetime.timedelta(seconds=time_us // 1_000_000)


if __name__ == "__main__":
    sys.exit(main())

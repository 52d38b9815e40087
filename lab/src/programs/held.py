"""Holds a shared table, objects made from it and bytes of its own. Answers with a checksum of all of them.

Arguments: the table (CSV), the seed of the own bytes, their size in MiB. Prints "ready", then answers each input line
until end of input.
"""

import sys
import zlib

import numpy
import pandas

frame = pandas.read_csv(sys.argv[1])
records = frame.head(len(frame) // 10).to_dict("records")
own = numpy.random.default_rng(int(sys.argv[2])).bytes(int(sys.argv[3]) << 20)


def checksum():
    total = zlib.crc32(own)
    for name in frame.columns:
        column = frame[name].to_numpy()
        total = zlib.crc32("".join(column).encode() if column.dtype == object else column.tobytes(), total)
    for record in records:
        total = zlib.crc32(repr(record).encode(), total)
    return total


print("ready", flush=True)
for _ in sys.stdin:
    print(len(frame), len(records), checksum(), flush=True)

"""A service for gunicorn --preload. It answers every request with the checksum of its model, and collects garbage."""

import gc
import mmap
import os
import random
import zlib

MODEL = mmap.mmap(-1, int(os.environ["MODEL_MIB"]) << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for first in range(0, len(MODEL), 1 << 16):
    MODEL[first : first + (1 << 16)] = random.Random(first).randbytes(1 << 16)
# The garbage collector writes to every one of these objects, so after the first request each worker has copies.
RECORDS = [{"number": number} for number in range(30_000)]


def answer(_environ, start_response):
    gc.collect()
    checksum = b"%08x" % zlib.crc32(MODEL)
    start_response("200 OK", [("Content-Length", str(len(checksum)))])
    return [checksum]

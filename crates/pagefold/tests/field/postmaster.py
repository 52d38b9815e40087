"""A database server: shared buffers, and backends that fill private caches after the fork.

Prints "ready", then answers each input line: "intact" if every backend's memory is as written.
"""

import hashlib
import mmap
import os
import sys

BACKENDS = 3


def filled(mib, seed, kind):
    memory = mmap.mmap(-1, mib << 20, kind | mmap.MAP_ANONYMOUS)
    for page in range(mib << 8):
        memory[page << 12 : (page << 12) + 32] = hashlib.sha256(f"{seed} {page}".encode()).digest()
    return memory


def serve(buffers, questions, answers):
    cache = filled(8, "cache", mmap.MAP_PRIVATE)
    written = [hashlib.sha256(memory).digest() for memory in (buffers, cache)]
    os.write(answers, b"y")
    while os.read(questions, 1):
        held = [hashlib.sha256(memory).digest() for memory in (buffers, cache)]
        os.write(answers, b"y" if held == written else b"n")


buffers = filled(24, "buffers", mmap.MAP_SHARED)
backends = []
for _ in range(BACKENDS):
    ask, be_asked, hear, answer = *reversed(os.pipe()), *os.pipe()
    if os.fork() == 0:
        # When the server ends, so do the backends: nobody else may hold the pipes that it writes to.
        for other, _ in backends:
            os.close(other)
        os.close(ask)
        serve(buffers, be_asked, answer)
        os._exit(0)
    os.close(be_asked)
    backends.append((ask, hear))


def answers():
    return [os.read(hear, 1) for _, hear in backends]


answers()
print("ready", flush=True)
for _ in sys.stdin:
    for ask, _ in backends:
        os.write(ask, b"?")
    print("intact" if answers() == [b"y"] * BACKENDS else "damaged", flush=True)

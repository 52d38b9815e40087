"""A WSGI application that holds the bytes of a file, objects made from them, and modules. Answers with the worker's pid
and a checksum of all bytes. The environment names the file.
"""

import asyncio, decimal, email.message, http.client, json, os, sqlite3, xml.etree.ElementTree, zlib  # noqa: E401, F401

with open(os.environ["HELD_FILE"], "rb") as file:
    shared = file.read()
objects = [shared[at : at + 100] for at in range(0, len(shared), 1000)]


def application(environ, start_response):
    total = zlib.crc32(shared)
    for item in objects:
        total = zlib.crc32(item, total)
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [f"{os.getpid()} {len(objects)} {total}\n".encode()]

"""Frames that no client library sends: unsupported versions, wrong lengths, random bytes."""

from __future__ import annotations

import struct

from fencepost.protocol.writer import uvarint
from tests.oracle.tracer import Tracer
from tests.support.raw import encode


def framed(body: bytes) -> bytes:
    return struct.pack(">i", len(body)) + body


def header(key: int, version: int, *, client: bytes | None = b"raw") -> bytes:
    """Return a request header v1, which is also the beginning of a request header v2."""
    name = struct.pack(">h", -1) if client is None else struct.pack(">h", len(client)) + client
    return struct.pack(">hhi", key, version, 7) + name


def unsupported_versions(t: Tracer) -> None:
    for key in (0, 1, 2, 3, 8, 9, 10, 11, 12, 13, 14, 22, 24, 25, 26, 28):
        t.bytes(f"version 99 of api {key}", framed(header(key, 99)))
        t.bytes(f"version -1 of api {key}", framed(header(key, -1)))
    for key in (4, 5, 6, 7, 999, -1, 32767):
        t.bytes(f"api {key}", framed(header(key, 0)))
    for version in (0, 1, 2):
        t.bytes(f"produce v{version}", framed(header(0, version) + bytes(12)))
    for version in range(4):
        t.bytes(f"fetch v{version}", framed(header(1, version) + bytes(20)))


def api_versions(t: Tracer) -> None:
    for version in (6, 99, 32767, -1):
        raw = t.bytes(f"api_versions v{version}", framed(header(18, version) + b"\0\4raw\0021\0"))
        if raw is not None:
            # A response in version 0: an error, and the supported range for the client's retry.
            error, count = struct.unpack_from(">hi", raw, 4)
            ranges = [struct.unpack_from(">hhh", raw, 10 + 6 * i) for i in range(count)]
            t.note("error, ranges, bytes left", [error, ranges, len(raw) - 10 - 6 * count])
    for name, software in (("", "1"), ("raw", ""), ("-raw", "1"), ("r w", "1"), ("raw-", "1.0")):
        for version in (3, 4):
            answer = t.quietly(
                "api_versions",
                version,
                client_software_name=name,
                client_software_version=software,
            )
            t.note(f"api_versions v{version} of {name!r} {software!r}", answer["error_code"])


def lengths_that_lie(t: Tracer) -> None:
    whole = encode("metadata", 1, 7, "raw", {"topics": []})
    for size in (-1, -(2**31), 2**31 - 1, 104_857_601):
        t.bytes(f"a frame of {size} bytes", struct.pack(">i", size) + whole)
    t.bytes("a frame of 0 bytes", struct.pack(">i", 0))
    for size in (1, 3, 7, 8, 9):
        t.bytes(f"a header cut at {size}", framed(whole[:size]))
    t.bytes("a body cut short", framed(whole[:-1]))
    t.bytes("a byte too many", framed(whole + b"\0"))
    t.bytes("a client id longer than the frame", framed(struct.pack(">hhih", 3, 1, 7, 9999)))
    t.bytes("a client id that is no text", framed(header(3, 1, client=b"\xff\xfe") + bytes(4)))
    t.bytes("no client id", framed(header(18, 0, client=None)))
    t.bytes("an array of two thousand million", framed(header(3, 1) + struct.pack(">i", 2**31 - 1)))
    t.bytes("an array of minus two", framed(header(3, 1) + struct.pack(">i", -2)))
    for size in (32_767, 32_768, 40_000):
        text = uvarint(size + 1) + b"g" * size
        t.bytes(f"a compact string of {size} bytes", framed(header(42, 2) + b"\0\2" + text + b"\0"))
    t.bytes("a null array where none may be", framed(header(8, 2) + struct.pack(">h", -1)))


def bodies_that_are_noise(t: Tracer) -> None:
    noise = bytes((i * 37 + 11) % 256 for i in range(64))
    for api, version in (
        (0, 9),
        (1, 11),
        (1, 16),
        (2, 7),
        (8, 8),
        (9, 8),
        (10, 4),
        (11, 9),
        (12, 4),
        (13, 4),
        (14, 5),
        (22, 4),
        (24, 3),
        (26, 4),
        (28, 4),
    ):
        t.bytes(f"noise for api {api} v{version}", framed(header(api, version) + noise))
        t.bytes(f"nothing for api {api} v{version}", framed(header(api, version)))


def http_on_the_wrong_port(t: Tracer) -> None:
    t.bytes("GET", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    t.bytes("a TLS hello", bytes.fromhex("1603010200010001fc0303") + bytes(60))


TRACES = [
    unsupported_versions,
    api_versions,
    lengths_that_lie,
    bodies_that_are_noise,
    http_on_the_wrong_port,
]

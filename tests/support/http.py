"""Requests to the broker's HTTP servers, byte by byte."""

from __future__ import annotations

import asyncio
from contextlib import closing

Address = tuple[str, int]


def request(
    target: str = "/", method: str = "GET", body: bytes = b"", version: str = "1.1", **headers: str
) -> bytes:
    """Return the bytes of one request; the keywords are names of headers, unchanged."""
    fields = {"Host": "localhost", "Content-Length": str(len(body)), **headers}
    lines = [f"{method} {target} HTTP/{version}", *(f"{k}: {v}" for k, v in fields.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body


async def exchange(address: Address, sent: bytes) -> tuple[int, dict[str, str], bytes]:
    """Send bytes on a new connection; return status, headers and body of the response."""
    reader, writer = await asyncio.open_connection(*address)
    with closing(writer):
        writer.write(sent)
        if b"close" not in sent:
            writer.write_eof()
        answer = await reader.read()
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    return int(first.split(" ")[1]), dict(line.split(": ", 1) for line in lines), body


async def page(address: Address, path: str, **headers: str) -> tuple[int, str, str]:
    """Return status, content type and text of a page."""
    status, headers_received, body = await exchange(
        address, request(path, version="1.0", **headers)
    )
    return status, headers_received["Content-Type"], body.decode()

"""Requests to the broker's HTTP servers, byte by byte."""

from __future__ import annotations

import asyncio
from contextlib import closing

Address = tuple[str, int]


def request(
    target: str = "/", method: str = "GET", body: bytes = b"", version: str = "1.1", **headers: str
) -> bytes:
    """One request; a header's name is written as Python writes it."""
    fields = {"Host": "localhost", "Content-Length": str(len(body)), **headers}
    lines = [f"{method} {target} HTTP/{version}", *(f"{k}: {v}" for k, v in fields.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body


async def asked(address: Address, sent: bytes) -> tuple[int, dict[str, str], bytes]:
    """All that comes back on a connection of its own: status, headers and body."""
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
    """Status, content type and text of a page."""
    status, told, body = await asked(address, request(path, version="1.0", **headers))
    return status, told["Content-Type"], body.decode()

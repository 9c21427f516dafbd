"""HTTP/1.1 messages without sockets: parsing of requests, encoding of responses.

Parsing is strict where two lenient parsers may disagree: lines end with CR LF, a header is one
line, a body has one Content-Length. Anything else raises :class:`HttpError` with a status and a
plain text explanation.

Source: RFC 9110 and RFC 9112.
"""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import field
from http import HTTPStatus
from ipaddress import ip_address
from typing import Final
from urllib.parse import parse_qsl, unquote

from fencepost.logcore.values import dataclass

METHODS: Final = ("GET", "HEAD", "POST", "DELETE")
"""The supported methods; the handler decides which of them a path accepts."""

MAX_QUERY_FIELDS: Final = 100
"""The maximum number of fields of a query string."""

MAX_BODY_DIGITS: Final = 18
"""The maximum number of digits of a Content-Length; converting very long numbers is slow."""

TEXT: Final = "text/plain; charset=utf-8"

_REQUEST_LINE = re.compile(rb"([A-Z]{1,32}) ([!-~]+) HTTP/(\d)\.(\d)")
_FIELD = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[ \t]*([^\x00-\x08\x0a-\x1f\x7f]*)")
_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\s:/@\[\]]+)(?::(\d{0,5}))?")
_LOCAL = "localhost"


class HttpError(Exception):
    """Refuses a request with a ``status`` and an explanation for the client."""

    def __init__(self, status: int, text: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(text)
        self.status, self.text = status, text
        self.headers = headers or {}


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A client's request. HEAD is passed on unchanged: the server omits the response body."""

    method: str
    """One of :data:`METHODS`."""
    path: str
    """Without the query, percent-decoded."""
    query: Mapping[str, str] = field(default_factory=dict)
    """The last value of each field."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """By lower-case name; values of repeated headers are joined by ``, ``."""
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """A handler's response. A body that is an iterator is sent part by part."""

    status: int = 200
    content_type: str = TEXT
    body: bytes | AsyncIterator[bytes] = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Additional headers, in ASCII."""


@dataclass(frozen=True, slots=True)
class RequestHead:
    """A request without its body."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body_bytes: int
    """The length of the body that follows."""
    is_1_0: bool
    """Whether the client uses HTTP/1.0, which has no chunked encoding."""
    keeps_alive: bool
    """Whether the client may send another request on the same connection."""


def text_response(status: int, text: str, headers: Mapping[str, str] | None = None) -> HttpResponse:
    """Build a response whose body is one line of plain text."""
    return HttpResponse(status, TEXT, f"{text}\n".encode(), headers or {})


def parse_head(head: bytes) -> RequestHead:
    """Parse the request line and headers, with or without the empty line. Raises HttpError."""
    first, *lines = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
    line = _REQUEST_LINE.fullmatch(first)
    if line is None:
        raise HttpError(400, "the first line is not an HTTP request line")
    major, minor = int(line[3]), int(line[4])
    if major != 1:
        raise HttpError(505, f"HTTP/{major}.{minor} is not supported; use HTTP/1.1")
    method = line[1].decode()
    if method not in METHODS:
        raise HttpError(501, f"the method {method} is not supported")
    headers = _headers(lines)
    authority, path, query = _target(line[2].decode())
    if authority is not None:
        headers["host"] = authority
    if minor >= 1 and "host" not in headers:
        raise HttpError(400, "an HTTP/1.1 request needs a Host header")
    wishes = {option.strip().lower() for option in headers.get("connection", "").split(",")}
    is_1_0 = minor == 0
    return RequestHead(
        method,
        path,
        query,
        headers,
        _body_bytes(headers),
        is_1_0,
        keeps_alive="close" not in wishes and (not is_1_0 or "keep-alive" in wishes),
    )


def _headers(lines: list[bytes]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for line in lines:
        match = _FIELD.fullmatch(line)
        if match is None:
            raise HttpError(400, "a header is not a line of the form NAME: VALUE")
        name, value = match[1].decode().lower(), match[2].decode("latin-1").rstrip(" \t")
        if name in headers:
            if name in {"host", "content-length", "origin"}:
                raise HttpError(400, f"more than one {name} header")
            value = f"{headers[name]}, {value}"
        headers[name] = value
    return headers


def _target(target: str) -> tuple[str | None, str, dict[str, str]]:
    """Return the host if the target contains one, the path and the query."""
    authority = None
    if target.lower().startswith("http://"):
        authority, slash, rest = target[7:].partition("/")
        target = slash + rest or "/"
    if not target.startswith("/"):
        raise HttpError(400, "the target of a request must begin with /")
    path, _, query = target.partition("#")[0].partition("?")
    try:
        fields = parse_qsl(
            query, keep_blank_values=True, errors="strict", max_num_fields=MAX_QUERY_FIELDS
        )
        return authority, unquote(path, errors="strict"), dict(fields)
    except UnicodeDecodeError:
        raise HttpError(400, "the target of the request is not UTF-8") from None
    except ValueError:
        raise HttpError(400, f"a query must not have more than {MAX_QUERY_FIELDS} fields") from None


def _body_bytes(headers: Mapping[str, str]) -> int:
    if "transfer-encoding" in headers:
        raise HttpError(411, "a body needs a Content-Length; chunked bodies are not supported")
    length = headers.get("content-length", "0")
    if not (length.isascii() and length.isdecimal() and len(length) <= MAX_BODY_DIGITS):
        raise HttpError(400, "the Content-Length is not a number")
    return int(length)


# --- Host and Origin ---


def check_host(headers: Mapping[str, str], names: frozenset[str] | None) -> None:
    """Refuse requests that another site's web page may have sent. Raises HttpError.

    A page can make its own name resolve to this machine (DNS rebinding), and then read the
    responses. Only the Host header reveals such a request. So a server on a loopback address
    accepts only loopback names and ``names``. A server on other addresses accepts every name
    (``names`` is None). A page can also send requests to another origin, although it cannot read
    the responses. The Origin header reveals such requests, and they are refused.
    """
    host = headers.get("host")
    if host is None:
        return  # HTTP/1.0, which browsers do not use
    match = _HOST.fullmatch(host)
    if match is None:
        raise HttpError(400, "the Host header is not HOST or HOST:PORT")
    name = match[1].strip("[]").rstrip(".").lower()
    if names is not None and name not in names and not is_loopback(name):
        raise HttpError(
            421, "this server listens on this machine only and refuses the host name in Host"
        )
    origin = headers.get("origin")
    if origin is not None and origin.lower() != f"http://{host}".lower():
        raise HttpError(403, "requests of web pages of another origin are refused")


def is_loopback(host: str) -> bool:
    """Return whether a name or an address is a loopback one."""
    if host == _LOCAL or host.endswith(f".{_LOCAL}"):
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


# --- responses ---


def response_head(response: HttpResponse, *, is_1_0: bool, keeps_alive: bool) -> bytes:
    """Encode the status line and the headers, including the empty line."""
    body = response.body
    headers = {
        "Date": time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime()),
        "Content-Type": response.content_type,
        "Cache-Control": "no-store",
        "X-Content-Type-Options": "nosniff",
        **response.headers,
    }
    if isinstance(body, bytes):
        headers["Content-Length"] = str(len(body))
    elif not is_1_0:
        headers["Transfer-Encoding"] = "chunked"
    headers["Connection"] = "keep-alive" if keeps_alive else "close"
    phrase = HTTPStatus(response.status).phrase
    lines = [f"HTTP/1.1 {response.status} {phrase}", *(f"{k}: {v}" for k, v in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode("ascii")


LAST_CHUNK: Final = b"0\r\n\r\n"


def chunk(piece: bytes) -> bytes:
    """Encode a part of a body of unknown length; an empty part would end the body."""
    return b"%x\r\n%b\r\n" % (len(piece), piece)

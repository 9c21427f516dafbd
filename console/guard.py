"""Authorizes requests by token, Host header and CSRF header, and limits what a page may load.

The page itself contains no data and is served to any client that uses an allowed host name. Every
path under ``/api/`` needs the token. The token reaches the browser in the URL's fragment, which is
never sent to a server, and returns in a header. A foreign page cannot add that header without
permission by CORS, and no answer has a CORS header.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Collection
from ipaddress import ip_address

from aiohttp import web

API = "/api/"
"""The prefix of paths that need the token."""

CSRF_HEADER = "X-Fencepost-Console"
"""A header that requests with side effects must carry besides the token, with any value."""

CONTENT_SECURITY_POLICY = (
    "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "object-src 'none'"
)

HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-store",
}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


class RequestRefusal(web.HTTPException):
    """An error answer in the API's format. ``error`` is a keyword for programs."""

    status_code = 400

    def __init__(self, status: int, error: str, message: str) -> None:
        self.status_code = status
        self.error = error
        self.message = message
        super().__init__()


class AccessGuard:
    """The access rules of one console. ``hosts`` are its allowed host names, without ports."""

    def __init__(self, token: str, hosts: Collection[str], *, allow_writes: bool) -> None:
        self.token = token
        self.allow_writes = allow_writes
        self._hosts = frozenset(host.lower().strip("[]") for host in hosts)

    def check(self, request: web.Request) -> None:
        """Raise :class:`RequestRefusal` unless the request is allowed."""
        # DNS rebinding: a page from a foreign host name that resolves to this machine could read
        # the console's answers.
        if _name(request.host) not in self._hosts:
            raise RequestRefusal(
                421,
                "wrong-host",
                (
                    f"this console does not accept the host name {request.host!r}: add it with"
                    " --allow-host"
                ),
            )
        if not request.path.startswith(API):
            return
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        is_right = hmac.compare_digest(given.strip().encode(), self.token.encode())
        if scheme.lower() != "bearer" or not is_right:
            raise RequestRefusal(
                401, "wrong-token", "the token is missing, or it is not the one of this console"
            )
        if request.method in {"GET", "HEAD"}:
            return
        if CSRF_HEADER not in request.headers:
            raise RequestRefusal(
                403,
                "no-csrf-header",
                f"a request that may change something needs the header {CSRF_HEADER}",
            )
        origin = request.headers.get("Origin")
        if origin is not None and origin.partition("://")[2].lower() != request.host.lower():
            raise RequestRefusal(
                403, "foreign-origin", f"requests from the origin {origin} are refused"
            )

    def check_writes(self) -> None:
        """Raise :class:`RequestRefusal` unless the console was started with ``--allow-writes``."""
        if not self.allow_writes:
            message = "this console is read-only; start it with --allow-writes to allow changes"
            raise RequestRefusal(403, "read-only", message)


def _name(host: str) -> str:
    """Return the Host header without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()

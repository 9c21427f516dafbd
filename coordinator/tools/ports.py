"""A local port that stays reserved while the server on it restarts."""

from __future__ import annotations

import socket


def hold_port(host: str = "127.0.0.1") -> socket.socket:
    """Reserve a free port: a bound socket that never listens; ``getsockname()[1]`` is the port.

    Until the socket is closed, the system does not hand out the port to a process that asks for any
    free one. A server that binds the port by its number with SO_REUSEADDR, as servers do, can
    listen on it, again and again. Clients are refused while no server listens. Raises OSError if no
    port is free.
    """
    held = socket.socket()
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((host, 0))
    except OSError:
        held.close()
        raise
    return held

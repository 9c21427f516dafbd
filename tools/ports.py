"""A local port that stays reserved while the server on it restarts."""

from __future__ import annotations

import socket


def hold_port(host: str = "127.0.0.1") -> socket.socket:
    """Return a bound socket that never listens; ``getsockname()[1]`` is its port, a free one.

    Until the socket is closed, the kernel does not assign the port to a process that binds port 0.
    A server that binds this port with SO_REUSEADDR can listen on it, any number of times. While no
    server listens, connections are refused. Raises OSError if no port is free.
    """
    held = socket.socket()
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((host, 0))
    except OSError:
        held.close()
        raise
    return held

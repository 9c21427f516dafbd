"""A port of this machine that is kept between two lives of whoever listens on it."""

from __future__ import annotations

import socket


def hold_port(host: str = "127.0.0.1") -> socket.socket:
    """Reserve a free port: a bound socket that never listens; ``getsockname()[1]`` is the port.

    Until it is closed the system gives the port to nobody who asks for any free one, and who binds
    it by its number with SO_REUSEADDR, as servers do, can listen on it, again and again. A client
    is refused while nobody does. Raises OSError if no port is free.
    """
    held = socket.socket()
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((host, 0))
    except OSError:
        held.close()
        raise
    return held

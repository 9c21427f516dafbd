"""No other process gets a held port while its server is down, and the server may rebind it."""

from __future__ import annotations

import errno
import socket

import pytest

from fencepost.tools.ports import hold_port

OTHERS = 500


def test_held_port_can_be_bound_repeatedly() -> None:
    with hold_port() as held:
        address = held.getsockname()
        for _ in range(2):
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(address)
            with (
                socket.create_server(address) as server,
                socket.create_connection(address) as client,
            ):
                accepted, peer = server.accept()
                assert peer == client.getsockname()
                accepted.close()


def test_held_port_is_never_assigned_to_another_server() -> None:
    with hold_port() as held:
        others = [socket.create_server(("127.0.0.1", 0)) for _ in range(OTHERS)]
        got = {other.getsockname()[1] for other in others}
        for other in others:
            other.close()
        assert held.getsockname()[1] not in got
        assert len(got) == OTHERS


def test_held_port_cannot_be_bound_by_two_servers() -> None:
    with hold_port() as held, socket.create_server(held.getsockname()):
        with pytest.raises(OSError, match="in use") as refused:
            socket.create_server(held.getsockname())
        assert refused.value.errno == errno.EADDRINUSE

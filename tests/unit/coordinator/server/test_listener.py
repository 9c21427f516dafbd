"""Accepting connections: the number per turn of the loop, and without free file descriptors."""

from __future__ import annotations

import asyncio
import socket

import structlog
from structlog.testing import capture_logs

from fencepost.coordinator.server.listener import ACCEPTED_PER_TURN, Listener
from tests.support.descriptors import free_descriptors
from tests.support.waits import DEADLINE_S, until_async

CLIENTS = 2 * ACCEPTED_PER_TURN + 1


async def test_accepted_connections_per_loop_turn_are_limited() -> None:
    loop = asyncio.get_running_loop()
    arrived: list[socket.socket] = []
    in_a_turn: list[int] = []
    bound = socket.create_server(("127.0.0.1", 0))
    listener = Listener(loop, bound, lambda connection, _: arrived.append(connection))
    clients = [socket.create_connection(listener.address) for _ in range(CLIENTS)]

    try:
        async with asyncio.timeout(DEADLINE_S):
            while len(arrived) < CLIENTS:
                before = len(arrived)
                await asyncio.sleep(0)
                in_a_turn.append(len(arrived) - before)
        assert max(in_a_turn) == ACCEPTED_PER_TURN
    finally:
        listener.close()
        for connection in (*clients, *arrived):
            connection.close()


async def test_clients_wait_for_free_file_descriptors_with_one_log_line() -> None:
    structlog.reset_defaults()  # a broker of another test may have silenced the log
    arrived: list[socket.socket] = []
    bound = socket.create_server(("127.0.0.1", 0))
    listener = Listener(
        asyncio.get_running_loop(), bound, lambda connection, _: arrived.append(connection)
    )
    clients = [socket.create_connection(listener.address) for _ in range(5)]

    async def accepted(count: int) -> None:
        async def are_there() -> bool:
            return len(arrived) == count

        await until_async(are_there, f"{count} accepted")

    def told(event: str) -> list[str]:
        return [line["log_level"] for line in logs if line["event"] == event]

    try:
        with capture_logs() as logs:
            with free_descriptors(2):
                await accepted(2)
                assert told("no connection can be accepted") == ["warning"]
                arrived[0].close()
                await accepted(3)
                for connection in arrived:
                    connection.close()
                await accepted(5)
            clients.append(socket.create_connection(listener.address))
            await accepted(6)
            assert told("no connection can be accepted") == ["warning"]
            assert told("connections are accepted again") == ["info"]
    finally:
        listener.close()
        for connection in (*clients, *arrived):
            connection.close()

"""Checks which brokers answer, with a shorter timeout than the requests behind a page."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from fencepost.client.channel import BrokerUnreachable, ConnectionLostError
from fencepost.client.client import WireClient
from fencepost.client.security import PLAINTEXT, Security

MAX_CONCURRENT_CHECKS: Final = 32
"""The maximum number of concurrent checks. A check of a silent broker takes the whole timeout."""

_NO_ANSWER: Final = (BrokerUnreachable, ConnectionLostError)


class HealthProbe:
    """Connections to all brokers, checked in separate threads.

    The check is a Metadata request without topics, whose cost does not depend on the number of
    topics. A broker that is missing from every answer is no longer checked.
    """

    def __init__(self, bootstrap: str, timeout_s: float, security: Security = PLAINTEXT) -> None:
        self._bootstrap, self._timeout_ms, self._security = bootstrap, timeout_s * 1000, security
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pulse")
        self._checks = ThreadPoolExecutor(MAX_CONCURRENT_CHECKS, thread_name_prefix="pulse-check")
        self._clients: dict[tuple[int, str], WireClient] = {}
        """Clients by broker id and address."""

    async def probe(self) -> Mapping[str, Any]:
        """Check each broker.

        ``silent`` lists the brokers that do not answer; ``away`` is the error if no broker answers.
        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._probe)

    def _probe(self) -> Mapping[str, Any]:
        silent: list[tuple[int, str]] = []
        named: set[tuple[int, str]] = set()
        problem = ""
        clients = self._clients or {(-1, self._bootstrap): self._client(self._bootstrap)}
        checks = {broker: self._checks.submit(_named, client) for broker, client in clients.items()}
        for broker, check in checks.items():
            try:
                named |= check.result()
            except _NO_ANSWER as error:
                silent.append(broker)
                problem = str(error)
        if not self._clients:
            for client in clients.values():
                client.close()
        if named:
            self._follow(named)
            silent = [member for member in silent if member in named]
        ids = sorted(node for node, _ in silent if node >= 0)
        return {"silent": ids, "away": None if named else problem}

    def _follow(self, named: set[tuple[int, str]]) -> None:
        for broker in self._clients.keys() - named:
            self._clients.pop(broker).close()
        for broker in named - self._clients.keys():
            self._clients[broker] = self._client(broker[1])

    def _client(self, address: str) -> WireClient:
        return WireClient(
            address,
            client_id="fencepost-console",
            timeout_ms=self._timeout_ms,
            security=self._security,
        )

    def close(self) -> None:
        """Close the connections; a check in progress fails."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._checks.shutdown(wait=False, cancel_futures=True)
        for client in self._clients.values():
            client.close()
        self._clients.clear()


def _named(client: WireClient) -> set[tuple[int, str]]:
    """Return the ids and addresses of the brokers in a broker's answer."""
    answer = client.call("Metadata", check=False, topics=())
    return {(broker.node_id, _address(broker.host, broker.port)) for broker in answer.brokers}


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

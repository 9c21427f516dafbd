"""A cluster under test that is controlled over HTTP, for tests in other languages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from fencepost.coordinator.history.entries import Entry
from fencepost.coordinator.server.http import HttpError, HttpRequest
from fencepost.testing.cluster import Cluster
from fencepost.testing.hooks import HookServer, body_of

if TYPE_CHECKING:
    from fencepost.cluster.image import TopicImage
    from fencepost.testing.views import ShareRecords

T = TypeVar("T")

ACTIONS = ("kill", "pause", "restart", "resume", "stop")
"""The actions of ``POST /brokers/ID/ACTION``; each is a method of ``Cluster``."""


class ClusterHooks(HookServer):
    """The HTTP paths of :class:`HookServer`, for a cluster, its brokers and its network."""

    paths: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **HookServer.paths,
        "brokers": ("GET", "POST"),
        "leader": ("GET",),
        "network": ("POST", "DELETE"),
    }

    def __init__(self, address: str, cluster: Cluster) -> None:
        super().__init__(address)
        self.clock, self.faults = cluster.clock, cluster.faults
        self._positions = cluster._positions
        self._cluster = cluster
        self._turn = asyncio.Lock()

    @property
    def _bootstrap(self) -> str:
        return self._cluster.bootstrap

    async def _call(self, work: Callable[[], T]) -> T:
        """Run a method of the cluster in a thread."""
        try:
            return await asyncio.to_thread(work)
        except (AssertionError, TimeoutError) as error:
            raise HttpError(408, str(error)) from error

    async def _change(self, work: Callable[[], T]) -> T:
        """Run a method that changes nodes or the network in a thread, one at a time.

        A query that waits for the effect of a change, such as a new leader, does not delay it.
        """
        async with self._turn:
            return await self._call(work)

    async def _get_brokers(self, _request: HttpRequest, _rest: str) -> object:
        def state(broker: Any) -> str:
            if not broker.is_running:
                return "down"
            return "paused" if broker.is_paused else "running"

        return {
            "bootstrap": self._cluster.bootstrap,
            "brokers": [
                {"id": node, "address": broker.bootstrap, "state": state(broker)}
                for node, broker in self._cluster.brokers.items()
            ],
        }

    async def _post_brokers(self, request: HttpRequest, rest: str) -> object:
        """Handle ``/brokers/ID/ACTION``."""
        node, _, action = rest.partition("/")
        if action not in ACTIONS or not node.isdecimal():
            raise HttpError(404, f"there is /brokers/ID/ACTION, with {', '.join(ACTIONS)}")
        await self._change(lambda: getattr(self._cluster, action)(int(node)))
        return await self._get_brokers(request, "")

    async def _get_leader(self, request: HttpRequest, _rest: str) -> object:
        """Return the leader of ``?topic=…&partition=…`` once a running broker leads."""
        topic, index = request.query.get("topic", ""), int(request.query.get("partition", "0"))
        leader = await self._call(lambda: self._cluster.leader(topic, index))
        partition = await self._call(lambda: self._cluster.partition(topic, index))
        return {"leader": leader, "replicas": partition.replicas, "isr": partition.isr}

    async def _post_network(self, request: HttpRequest, _rest: str) -> object:
        body = body_of(request, nodes=list, others=list, one_way=bool)
        await self._change(
            lambda: self._cluster.partition_network(
                body.get("nodes", ()),
                body.get("others", ()),
                one_way=body.get("one_way", False),
            )
        )
        return {}

    async def _delete_network(self, _request: HttpRequest, _rest: str) -> object:
        await self._change(self._cluster.heal)
        return {}

    async def _topics(self) -> Mapping[str, TopicImage]:
        return (await self._call(lambda: self._cluster.image)).topics

    async def _create_topic(self, name: str, partitions: int, config: Mapping[str, str]) -> int:
        count = None if partitions == -1 else partitions
        await self._call(lambda: self._cluster.topic(name, count, config))
        return len((await self._topics())[name].partitions)

    async def _shares(self, group: str) -> list[ShareRecords]:
        return await self._call(lambda: self._cluster.shares(group))

    async def _all_entries(self) -> list[Entry]:
        return await self._call(self._cluster.history)

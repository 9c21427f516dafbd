"""A broker of a cluster on ZooKeeper: the daemon's code, on a simulated event loop.

``coordinator/zookeeper`` down to kazoo's interface, the handlers of the controller's requests, and
the active controller with its state machine are the product's code. Kazoo's client
(:mod:`tests.sim.zk_client`) and the connection to another broker (:class:`Connection`) are models.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast
from uuid import UUID

from fencepost.cluster.alter_partition import AlterPartitionRequest
from fencepost.cluster.controller.errors import NotControllerError, StaleBrokerEpochError
from fencepost.cluster.controller.machine import Controller
from fencepost.cluster.controller.outcome import ControllerResult
from fencepost.cluster.errors import Errors
from fencepost.cluster.image import MetadataImage
from fencepost.cluster.records import BrokerEndpoint
from fencepost.coordinator import zookeeper
from fencepost.coordinator.config.broker_config import BrokerConfig
from fencepost.coordinator.controller import active
from fencepost.coordinator.handlers import leader_and_isr, stop_replica, update_metadata
from fencepost.coordinator.replication.errors import MembershipError
from fencepost.coordinator.runtime import background
from fencepost.coordinator.zookeeper import access, channels, node, session, zk_controller
from fencepost.coordinator.zookeeper.channels import ControllerChannelManager
from fencepost.coordinator.zookeeper.loading import ZkImage
from fencepost.coordinator.zookeeper.node import ZooKeeperNode
from fencepost.coordinator.zookeeper.request_batch import BrokerRequestBatch
from fencepost.coordinator.zookeeper.zk_controller import ZkController
from fencepost.protocol.api import ApiKey
from fencepost.protocol.messages import response_factory
from fencepost.txn.ids import ProducerIdBlock
from tests.sim.invariants import BrokenInvariantError
from tests.sim.isr_answers import altered
from tests.sim.loop import Loop
from tests.sim.messages import AllocateIds
from tests.sim.network import Answer
from tests.sim.process import Process
from tests.sim.zk_client import Client

if TYPE_CHECKING:
    from tests.sim.zk_cluster import ZooKeeperCluster

LISTENER: Final = "PLAINTEXT"
PORT: Final = 9092
UNKNOWN_MS: Final = 60
"""How long a request waits before it fails while no controller is known."""
SHUTDOWN_ATTEMPTS: Final = 3
AUTHORIZER: Final = "kafka.security.authorizer.AclAuthorizer"

TOLD: Final = {
    int(ApiKey.LEADER_AND_ISR): leader_and_isr.run,
    int(ApiKey.UPDATE_METADATA): update_metadata.run,
    int(ApiKey.STOP_REPLICA): stop_replica.run,
}


class ControlledShutdown(NamedTuple):
    """A broker's request for a controlled shutdown."""

    broker_id: int
    broker_epoch: int


class Told(NamedTuple):
    """A controller's request, and the number of the connection that carries it."""

    request: Any
    connected_s: float


class ZooKeeperBroker(Process):
    """A broker process of a cluster on ZooKeeper."""

    def __init__(self, cluster: ZooKeeperCluster, broker_id: int) -> None:
        super().__init__(cluster, broker_id)
        self._cluster = cluster
        self.loop: Loop
        self.zookeeper: ZooKeeperNode
        self._heard = 0
        """The newest controller epoch of a request that it has accepted."""
        self._requests |= {
            AlterPartitionRequest: self._alter_partition,
            AllocateIds: self._allocate_ids,
            ControlledShutdown: self._shut_down,
        }

    @property
    def config(self) -> BrokerConfig:
        """The settings of its daemon."""
        rules = {"authorizer.class.name": AUTHORIZER} if self._cluster.options.tools else {}
        return BrokerConfig(
            rules
            | {
                "node.id": self.broker_id,
                "zookeeper.connect": "z",
                "zookeeper.session.timeout.ms": self.options.session_ms,
                "min.insync.replicas": self.options.min_isr,
                "leader.imbalance.check.interval.seconds": 5,
            }
        )

    # --- lifecycle ---

    def _join(self) -> None:
        self.loop = Loop(self.node)
        self.loop.zookeeper = self._cluster.ensemble  # type: ignore[attr-defined]
        self.loop.network = self._cluster.network  # type: ignore[attr-defined]
        with self.loop.running():
            self.zookeeper = ZooKeeperNode(
                self.config,
                cast("Any", self),
                node_id=self.broker_id,
                listener=LISTENER,
                on_lost=self._lost,
            )
            background.spawn(self._live(), "live")
        self.loop.after_turn = self._check_office

    def _check_office(self) -> None:
        """Check that this broker names itself as the controller only while it is active."""
        if self.zookeeper.controller_id == self.broker_id and self.zookeeper.elected is None:
            raise BrokenInvariantError(f"{self.node.name} has no office, and says that it has")

    # The daemon's clock is the node's.

    def now_ms(self) -> int:
        """Return the wall-clock time."""
        return self.node.now_ms

    def monotonic_ms(self) -> int:
        """Return the monotonic time."""
        return self.node.scheduler.now

    async def _live(self) -> None:
        zookeeper = self.zookeeper
        try:
            await zookeeper.find_cluster_id()
            image = await zookeeper.join(
                (BrokerEndpoint(LISTENER, self.node.name, PORT, 0),),
            )
            self._take(image)
            zookeeper.follow(self._take, image)
            await zookeeper.enter(self._on_controller_failover)
        except MembershipError as error:
            self._lost(error)
        except asyncio.CancelledError:
            pass
        else:
            self.node.say(f"is told who there is (epoch {zookeeper.broker_epoch})")

    def _lost(self, error: MembershipError) -> None:
        self.node.say(f"ends: {error}")
        background.spawn(self._end(), "end")

    async def _end(self) -> None:
        await self.zookeeper.stop()
        self._stopped()

    def stop(self) -> None:
        """Begin a controlled shutdown, then end."""
        if not self.is_shutting_down:
            self.node.say("is to stop")
            self.is_shutting_down = True
            with self.loop.running():
                background.spawn(self._leave(), "leave")

    async def _leave(self) -> None:
        """Leave the cluster, as ``ZooKeeperMember.leave`` does."""
        if self.zookeeper.broker_epoch >= 0:
            self.zookeeper.in_controlled_shutdown = True
            for _ in range(SHUTDOWN_ATTEMPTS):
                let_go = self.loop.create_future()
                request = ControlledShutdown(self.broker_id, self.zookeeper.broker_epoch)
                self.ask_controller(request, let_go.set_result, purpose="shutdown")
                if await let_go == Errors.NONE:
                    break
        await self._end()

    # --- images ---

    @property
    def broker_epoch(self) -> int:
        return self.zookeeper.broker_epoch

    def _take(self, image: MetadataImage) -> None:
        own = image.brokers.get(self.broker_id)
        if own is not None:
            self.view.broker_epoch = own.epoch
        self._publish(image)

    # --- the controller ---

    def _on_controller_failover(
        self,
        loaded: ZkImage,
        teller: BrokerRequestBatch,
        epoch_version: int,
        on_lost: Callable[[], None],
    ) -> ZkController:
        self.node.say(f"takes office in epoch {teller.epoch}")
        return ZkController(
            self.config,
            self.zookeeper.session,
            cast("Any", self),
            loaded,
            lambda answered: ControllerChannelManager(
                node_id=self.broker_id,
                listener=LISTENER,
                security=cast("Any", None),
                timeout_ms=self.options.request_timeout_ms,
                answered=answered,
            ),
            lambda event, _origin, _trigger: self.node.say(
                f"{event.kind} {event.subject} {dict(event.detail)}"
            ),
            batch=teller,
            cluster_id="simulated",
            epoch_version=epoch_version,
            on_lost=on_lost,
        )

    def give_up(self) -> None:
        """Resign, as a controller does that could not write its decisions."""
        if self.node.is_up and self.zookeeper.elected is not None:
            with self.loop.running():
                self.zookeeper._fail()

    def decide(self, decision: Callable[[Controller], ControllerResult[Any]]) -> Any:
        """Run a decision of this broker's active controller. Raises DomainError."""
        chosen = self.zookeeper.elected
        if chosen is None:
            raise NotControllerError("another broker is")
        with self.loop.running():
            return chosen.active.decide(decision, trigger="request")

    def _answer_once_written(self, answer: Any, reply: Answer) -> None:
        chosen = self.zookeeper.elected
        on_its_way = None if chosen is None else chosen.store.durable()
        if on_its_way is None:
            reply(answer)
            return

        def written(done: asyncio.Future[None]) -> None:
            failed = done.cancelled() or done.exception() is not None
            reply(int(Errors.NOT_CONTROLLER) if failed else answer)

        on_its_way.add_done_callback(written)

    def _decided(
        self, decisions: Callable[[], Any], reply: Answer, make: Callable[[Any], Any]
    ) -> None:
        try:
            with self.loop.running():
                answer = make(decisions())
                self._answer_once_written(answer, reply)
        except NotControllerError:
            reply(int(Errors.NOT_CONTROLLER))
        except StaleBrokerEpochError:
            reply(int(Errors.STALE_BROKER_EPOCH))

    def _alter_partition(self, request: AlterPartitionRequest, reply: Answer) -> None:
        self._decided(lambda: altered(self.decide, request), reply, lambda answer: answer)

    def _allocate_ids(self, request: AllocateIds, reply: Answer) -> None:
        self._decided(
            lambda: self.decide(lambda one: one.allocate_producer_ids(*request)),
            reply,
            lambda block: ProducerIdBlock(block.first, block.size),
        )

    def _shut_down(self, request: ControlledShutdown, reply: Answer) -> None:
        def to_the_end() -> None:
            while self.decide(lambda one: one.begin_shutdown(*request)):
                pass

        self._decided(to_the_end, reply, lambda _: int(Errors.NONE))

    def ask_controller(self, request: Any, answer: Answer, *, purpose: str, **options: Any) -> None:
        to = self.zookeeper.controller
        if to is None:
            self.node.after(UNKNOWN_MS, answer, None)
            return

        def answered(found: Any) -> None:
            # As the daemon's channel does, which then asks the current controller.
            if found == Errors.NOT_CONTROLLER:
                self.node.after(UNKNOWN_MS, answer, None)
            else:
                answer(found)

        self.cluster.network.call(
            self.node,
            to[0],
            request,
            answered,
            timeout_ms=self.options.request_timeout_ms,
            purpose=f"{purpose} {to[0]}",
            **options,
        )

    # --- requests of the controller ---

    def _receive(self, sender: str, request: Any, reply: Answer) -> None:
        if not isinstance(request, Told):
            super()._receive(sender, request, reply)
        elif not self._cluster.before_told(self, request.request) and self.loop.is_alive:
            with self.loop.running():
                background.spawn(self._told(*request, reply), "serve")

    async def _told(self, request: Any, connected_s: float, reply: Answer) -> None:
        key, version = request.__api_key__, request.__version__
        ctx = SimpleNamespace(
            body=request,
            respond=response_factory(key, version),
            broker=SimpleNamespace(on_zookeeper=self.zookeeper),
            connection=SimpleNamespace(session=SimpleNamespace(connected_s=connected_s)),
            require_on_cluster=lambda _operation: None,
        )
        answer = await cast("Any", TOLD[key])(ctx)
        if not answer.error_code:
            if request.controller_epoch < self._heard:
                raise BrokenInvariantError(
                    f"{self.node.name} takes what a controller of epoch"
                    f" {request.controller_epoch} says, after one of {self._heard}"
                )
            self._heard = request.controller_epoch
        if not self._cluster.after_told(self, request):
            reply(answer)


class Connection:
    """Replaces ``ControllerConnection``, a connection of a controller to one broker."""

    def __init__(self, client_id: str, _security: Any) -> None:
        self._loop = cast("Loop", asyncio.get_running_loop())
        self._network = self._loop.network  # type: ignore[attr-defined]
        self._client_id = client_id
        self._connect()

    def _connect(self) -> None:
        """Begin another connection; requests in flight on the former one may still arrive."""
        self._network.numbers += 1
        self._number = self._network.numbers

    async def ask(self, to: tuple[str, int], request: Any, *, timeout_ms: float) -> Any:
        """Send a request; return the answer. Raises OSError without an answer."""
        future = self._loop.create_future()

        def answered(answer: Any) -> None:
            if not future.done():
                future.set_result(answer)

        self._network.call(
            self._loop.node,
            to[0],
            Told(request, self._number),
            answered,
            timeout_ms=int(timeout_ms),
            purpose=f"{self._client_id} {self._number}",
        )
        found = await future
        if found is None:
            self._connect()
            raise OSError("no answer")
        return found

    async def close(self) -> None:
        """Do nothing: requests in flight may still arrive."""


class _Log:
    """Replaces a logger of the daemon's code; drops everything."""

    def __getattr__(self, _name: str) -> Callable[..., None]:
        return lambda *_arguments, **_where: None


class _Failures(_Log):
    def error(self, _what: str, **where: Any) -> None:
        """Raise what the daemon would only have logged."""
        raise AssertionError(f"{where.get('what')}: {where.get('cause')}") from where.get(
            "exc_info"
        )


@contextmanager
def models(draw: Random) -> Iterator[None]:
    """Replace connections, random ids and loggers in the daemon's modules by models."""
    ids = iter(range(1, 1 << 30))

    def next_id() -> UUID:
        return UUID(int=next(ids) | 1 << 110)

    quiet = [
        one
        for name, one in sys.modules.items()
        if name.startswith(f"{zookeeper.__name__}.") and hasattr(one, "_log")
    ]
    changes: list[tuple[Any, str, Any]] = [
        (session, "client_of", Client.of),
        (channels, "ControllerConnection", Connection),
        (node, "uuid4", next_id),
        (zk_controller, "new_topic_id", next_id),
        (access, "random", draw),
        (background, "_log", _Failures()),
        *((one, "_log", _Log()) for one in (*quiet, active)),
    ]
    kept = [(where, name, getattr(where, name)) for where, name, _ in changes]
    for where, name, value in changes:
        setattr(where, name, value)
    try:
        yield
    finally:
        for where, name, value in kept:
            setattr(where, name, value)

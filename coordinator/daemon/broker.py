"""The broker as an object: its services, and the order in which they start and stop.

A test, an example or the daemon creates a broker; one event loop may run several brokers::

    async with Broker(data_dir=path) as broker:
        ...  # any Kafka client at broker.bootstrap

    with Broker.in_thread(path) as broker:  # the same for code without an event loop
        ...
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self, runtime_checkable

import structlog

from fencepost.cluster.image import UNASSIGNED
from fencepost.cluster.records import BrokerEndpoint
from fencepost.coordinator.broker_services import Services
from fencepost.coordinator.config.broker_config import BrokerConfig
from fencepost.coordinator.config.key import ConfigError
from fencepost.coordinator.config.listener_config import ListenerConfig, SecurityProtocol
from fencepost.coordinator.config.listeners import (
    ANY_ADDRESS,
    INSECURE,
    advertised_controllers,
    advertised_listeners,
    client_listeners,
    controller_listeners,
    parse_address,
)
from fencepost.coordinator.config.logs import configure_quietly
from fencepost.coordinator.config.roles import Roles, roles_of
from fencepost.coordinator.daemon import warm_up
from fencepost.coordinator.daemon.data_directory import (
    has_identity,
    identify,
    lock,
    note_joined,
    standalone_metadata,
)
from fencepost.coordinator.daemon.errors import BrokerError
from fencepost.coordinator.daemon.metadata_failure import stop_on_failure
from fencepost.coordinator.daemon.serving import Listeners, certificates_of, check_listeners
from fencepost.coordinator.handlers import Registry
from fencepost.coordinator.metadata.names import METADATA_TOPIC
from fencepost.coordinator.replication.errors import MembershipError
from fencepost.coordinator.runtime.background import Repeated, Step, Threads, each_in_turn, spawn
from fencepost.coordinator.security.authorizer import Authorizer
from fencepost.coordinator.server.server import Server
from fencepost.coordinator.storage.cleaner import Cleaner
from fencepost.coordinator.storage.maintenance import Maintenance
from fencepost.coordinator.storage.storage import Storage
from fencepost.logcore.checkpoints import clean_shutdown_epoch
from fencepost.logcore.clock import Clock, SystemClock, cluster_clock
from fencepost.logcore.fs import FileSystem, OsFileSystem
from fencepost.protocol.api import TELEMETRY_APIS, ApiKey

if TYPE_CHECKING:
    from fencepost.cluster.controller.scram import ScramCredentialUpsertion
    from fencepost.coordinator.daemon.cluster_broker import ClusterBroker
    from fencepost.coordinator.daemon.controller_part import ControllerPart
    from fencepost.coordinator.daemon.in_thread import BrokerThread
    from fencepost.coordinator.daemon.metrics_listener import MetricsListener
    from fencepost.coordinator.metrics.endpoint import Endpoint

_log = structlog.get_logger(__name__)

_METADATA_DIRECTORY = f"{METADATA_TOPIC}-0"


@runtime_checkable
class MovedClock(Clock, Protocol):
    """A clock that a test advances by hand; the advance runs the timers that become due.

    Each broker that uses the clock attaches itself, on the broker's event loop.
    """

    def attach(self, broker: Broker) -> None:
        """Register a broker that has started to serve."""

    def detach(self, broker: Broker) -> None:
        """Unregister a broker that is about to stop."""


class Broker:
    """One broker on one data directory.

    ``listen`` is HOST:PORT; port 0 takes a free port. Without ``listen``, the broker uses
    ``listeners`` from the configuration, or else a free port on loopback. ``config`` maps Kafka's
    keys to strings as in ``server.properties``, or to numbers, booleans and lists. The constructor
    raises :class:`fencepost.coordinator.config.key.ConfigError` for unknown keys and invalid
    values. A listener without authentication must be on loopback, unless ``insecure`` or the key
    ``fencepost.insecure`` allows other machines to reach it. ``add_scram`` names SCRAM users as
    Kafka's ``kafka-storage format --add-scram`` does; a credential that exists already is kept.
    ``fs`` and ``clock`` default to the operating system's; tests pass their own.
    """

    def __init__(
        self,
        data_dir: str | Path,
        listen: str | None = None,
        config: Mapping[str, object] | None = None,
        *,
        insecure: bool = False,
        add_scram: Sequence[str] = (),
        fs: FileSystem | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.config = BrokerConfig({**(config or {}), **({INSECURE: True} if insecure else {})})
        Authorizer.configured(self.config)  # report a wrong configuration at once
        self.fs: FileSystem = OsFileSystem() if fs is None else fs
        self.clock: Clock = SystemClock() if clock is None else clock
        self.data_dir = Path(data_dir)
        advertised = advertised_listeners(self.config)
        self.roles = roles_of(self.config)
        listeners = (client_listeners if self.roles.is_broker else controller_listeners)(
            self.config
        )
        if listen is not None or not listeners:
            first = next(iter((listeners or advertised).values()), ListenerConfig())
            host, port = split_address(listen or "127.0.0.1:0")
            listeners = {first.name: replace(first, host=host, port=port)}
        if not self.roles.is_broker:
            advertised = advertised_controllers(self.config)
        self._listeners = Listeners(listeners, advertised)
        self._of_controller: Listeners | None = None
        """The listeners for other brokers, if this broker is also their controller."""
        every = [*listeners.values()]
        if self.roles.is_broker and self.roles.decides_for_others:
            listeners = controller_listeners(self.config)
            self._of_controller = Listeners(listeners, advertised_controllers(self.config))
            every += listeners.values()
        check_listeners(self.config, every)
        self._added_users = _added_users(add_scram)
        self._member: ClusterBroker | None = None
        """Membership in a cluster of several brokers; None for a standalone broker."""
        self.controller_part: ControllerPart | None = None
        """The controller role of this node, if it is the controller of other brokers."""
        self.on_lost: Callable[[BrokerError], None] | None = None
        """Called when the broker must stop: it lost its membership, or its metadata log failed."""
        self._is_stopping = False
        self.certificates = certificates_of(self.config, every, self.clock)
        """Certificates of the TLS listeners; None without such a listener."""
        self._lock: int | None = None
        self._storage: Storage | None = None
        self._services: Services | None = None
        self._server: Server | None = None
        self._maintenance: Maintenance | None = None
        self._metrics_listen: MetricsListener | None = None
        if self.config.text("fencepost.metrics.listen"):
            from fencepost.coordinator.daemon.metrics_listener import MetricsListener  # noqa: PLC0415 - few brokers serve metrics

            self._metrics_listen = MetricsListener.of(self.config)
        self._metrics: Endpoint | None = None
        self.cleaner: Cleaner | None = None

    @classmethod
    def in_thread(
        cls,
        data_dir: str | Path,
        listen: str | None = None,
        config: Mapping[str, object] | None = None,
        *,
        insecure: bool = False,
        add_scram: Sequence[str] = (),
        clock: Clock | None = None,
    ) -> BrokerThread:
        """Return a context manager that runs a broker on an event loop in a thread of its own."""
        from fencepost.coordinator.daemon.in_thread import BrokerThread  # noqa: PLC0415 - the daemon needs no threads

        return BrokerThread(
            lambda: cls(
                data_dir, listen, config, insecure=insecure, add_scram=add_scram, clock=clock
            )
        )

    @property
    def storage(self) -> Storage:
        """The open data directory. Raises RuntimeError if it is not open."""
        if self._storage is None:
            raise RuntimeError("the broker's directory is not open")
        return self._storage

    @property
    def services(self) -> Services:
        """The services of the broker. Raises RuntimeError before :meth:`start`."""
        if self._services is None:
            raise RuntimeError("the broker is not started")
        return self._services

    @property
    def server(self) -> Server:
        """The broker's socket server. Raises RuntimeError if the broker is not listening."""
        if self._server is None:
            raise RuntimeError("the broker is not started")
        return self._server

    @property
    def repeated(self) -> list[Repeated]:
        """The periodic tasks of the broker while it listens."""
        tasks = [] if self._maintenance is None else self._maintenance.tasks
        return tasks if self.cleaner is None else [*tasks, self.cleaner.task]

    # --- addresses ---

    @property
    def address(self) -> tuple[str, int]:
        """The bound (host, port). Raises RuntimeError if the broker is not listening."""
        return self.server.address

    @property
    def advertised(self) -> tuple[str, int]:
        """The (host, port) that clients of the first listener are told to connect to."""
        return self.advertised_on()

    def advertised_on(self, listener: str | None = None) -> tuple[str, int]:
        """Return the (host, port) advertised to clients of a listener, by default the first one."""
        return self._listeners.address_of(listener)

    @property
    def bootstrap(self) -> str:
        """The advertised address as HOST:PORT, for ``bootstrap.servers``."""
        host, port = self.advertised
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    @property
    def metrics_address(self) -> tuple[str, int]:
        """The (host, port) of metrics and health. Raises RuntimeError when they are not served."""
        if self._metrics is None:
            raise RuntimeError("metrics are not served")
        return self._metrics.address

    # --- life ---

    async def start(self) -> None:
        """Open the directory, load it and listen.

        Raises BrokerError after closing everything that was opened.
        """
        configure_quietly()
        for key, reason in self.config.without_effect():
            _log.warning("setting has no effect", key=key, reason=reason)
        try:
            if self.roles.registers:
                await self._join()
                return
            if self._metrics_listen is None:
                cluster_id = self.open()
            else:
                # In a thread, so that /healthz and /readyz answer while the logs are being opened.
                self._metrics = await self._serve_metrics(self._metrics_listen)
                threads = Threads("open")
                try:
                    cluster_id = await threads.run(self.open)
                finally:
                    threads.close()
            self._services = services = Services(
                self.storage, cluster_id=cluster_id, advertised=self.advertised_on
            )
            stop_on_failure(self.storage.metadata_log, self._stop_on_loss)
            await services.start()
            await self._add_users(services)
            await self._serve(services)
            if not self.roles.is_broker:
                services.history.stop()  # a controller has no topic to write the history to
                services.active_controller.start()
            if self._metrics is not None and self._server is not None:
                self._metrics.serves(services, self._server)
        except BaseException:
            await self.stop()
            raise

    async def _serve_metrics(self, listener: MetricsListener) -> Endpoint:
        """Start the metrics listener."""
        try:
            endpoint = await listener.serve(self.config)
        except OSError as error:
            where = f"{listener.host}:{listener.port}"
            raise BrokerError(f"cannot serve metrics on {where}: {error}") from error
        host, port = endpoint.address
        scheme = "https" if listener.certificate else "http"
        _log.info("metrics are served", address=f"{scheme}://{host}:{port}/metrics")
        return endpoint

    async def _join(self) -> None:
        """Start as a broker of a cluster, whose controller may run in this process."""
        if self._metrics_listen is not None:
            self._metrics = await self._serve_metrics(self._metrics_listen)
        await self._listeners.bind()
        threads = Threads("open")
        try:
            directory = await threads.run(self._take_directory)
            previous = clean_shutdown_epoch(self.fs, directory)
            part = await self._decide(directory, threads)
            self._member = member = self._make_cluster_broker(part)
            node_id = self.config.int("node.id")
            asks = self.roles.elects or not has_identity(self.fs, directory)
            cluster_id = await member.find_cluster_id() if asks else ""
            meta = identify(self.fs, directory, node_id, cluster_id)
            addresses = {name: self.advertised_on(name) for name in self._listeners.all}
            before = None
            if part is None:
                before = await threads.run(partial(standalone_metadata, self.fs, directory))
            image = await member.join(meta, addresses, previous)
            if before is not None:
                note_joined(self.fs, directory, before, image)
            observed = member.metadata(meta.node_id)
            observed.install(image)
            self._storage = await threads.run(
                lambda: Storage(
                    self.fs,
                    directory,
                    self.config,
                    self.clock,
                    node_id=meta.node_id,
                    observed=observed,
                    beside=None if part is None else part.storage,
                )
            )
            self._services = services = Services(
                self.storage, cluster_id=meta.cluster_id, advertised=self.advertised_on
            )
            if part is not None:
                part.share_history(services)
            await member.serve(services, image)
            if self.roles.elects:
                await self._add_users(services)
        except MembershipError as error:
            raise BrokerError(str(error)) from error
        finally:
            threads.close()
        await self._serve(services)
        try:
            await member.served(services)
        except MembershipError as error:
            raise BrokerError(str(error)) from error
        if self._metrics is not None and self._server is not None:
            self._metrics.serves(services, self._server)

    def _make_cluster_broker(self, part: ControllerPart | None) -> ClusterBroker:
        """Return this broker's cluster membership; the broker has not joined yet."""
        # Imported here because most brokers are standalone.
        from fencepost.coordinator.daemon.cluster_broker import ClusterBroker  # noqa: PLC0415

        if not self.roles.elects:
            return ClusterBroker(
                self.config, self._controllers(part), self._listeners.all, self._stop_on_loss
            )
        try:
            from fencepost.coordinator.daemon.zookeeper_broker import ZooKeeperBroker  # noqa: PLC0415
        except ModuleNotFoundError as error:
            needs = "zookeeper.connect needs kazoo: pip install '.[zookeeper]' in Fencepost's clone"
            raise BrokerError(needs) from error
        broker = ZooKeeperBroker(self.config, self.roles, self._listeners.all, self._stop_on_loss)
        try:
            broker.open(cluster_clock(self.clock))
        except ConfigError as error:
            raise BrokerError(str(error)) from error
        return broker

    async def _decide(self, directory: str, threads: Threads) -> ControllerPart | None:
        """Start the controller role, if this node is the controller of other brokers."""
        if self._of_controller is None:
            return None
        from fencepost.coordinator.daemon.controller_part import ControllerPart  # noqa: PLC0415 - few nodes are controllers

        meta = identify(self.fs, directory, self.config.int("node.id"))
        self.controller_part = part = await ControllerPart.open(
            self.fs,
            directory,
            self.config,
            cluster_clock(self.clock),
            meta,
            self._of_controller,
            threads,
        )
        self._keep_private(f"{directory}/{_METADATA_DIRECTORY}")
        stop_on_failure(part.storage.metadata_log, self._stop_on_loss)
        await self._add_users(part.services)
        await part.serve(self.certificates)
        return part

    def _controllers(self, part: ControllerPart | None) -> Roles:
        """Return the roles, with the address of the controller in this process if there is one."""
        if part is None:
            return self.roles
        address = part.listeners.address_of(self.roles.controller_listener)
        return replace(self.roles, bootstrap=(address,), voters=())

    def _stop_on_loss(self, why: Exception) -> None:
        _log.error("the broker has to stop", cause=str(why))
        if self.on_lost is not None:
            self.on_lost(BrokerError(str(why)))
        elif not self._is_stopping:
            spawn(self.stop(), "stop a broker that has to")

    def open(self) -> str:
        """Lock the data directory and load it without serving it; :meth:`stop` closes it again.

        Returns the cluster id. Commands that work on the data of a stopped broker use this method.
        Raises BrokerError, MetadataError, LogError, OSError.
        """
        directory = self._take_directory()
        meta = identify(self.fs, directory, self.config.int("node.id"))
        self._storage = Storage(
            self.fs,
            directory,
            self.config,
            self.clock,
            node_id=meta.node_id,
            directory_id=meta.directory_id or UNASSIGNED,
            end_points=[*self._end_points()],
            is_broker=self.roles.is_broker,
        )
        self._keep_private(f"{directory}/{_METADATA_DIRECTORY}")
        return meta.cluster_id

    def _take_directory(self) -> str:
        directory = str(self.data_dir)
        self._lock = lock(self.fs, directory, is_member=self.roles.is_member)
        return directory

    def _end_points(self) -> Iterator[BrokerEndpoint]:
        """Yield the broker's endpoints whose ports are known before the sockets are bound."""
        for name, listener in self._listeners.all.items():
            advertised = self._listeners.advertised.get(name, listener)
            if advertised.port:
                host = socket.gethostname() if advertised.host in ANY_ADDRESS else advertised.host
                number = list(SecurityProtocol).index(listener.protocol)
                yield BrokerEndpoint(name, host, advertised.port, number)

    def _keep_private(self, directory: str) -> None:
        """Restrict the metadata directory to its owner, because it holds users' credentials."""
        try:
            self.fs.make_private(directory)
        except OSError as error:
            _log.warning("others may read the metadata", directory=directory, cause=str(error))

    async def _serve(self, services: Services) -> None:
        config = self.config
        self._server = server = self._listeners.prepare(services, self._registry(services))
        if self._metrics is not None:
            self._metrics.watch(server)
        await self._listeners.open(server, self.certificates)
        self._maintenance = Maintenance(services.logs, config, self.clock)
        self._maintenance.start()
        self.cleaner = Cleaner(services.logs, config, self.clock)
        self.cleaner.start()
        services.logs.removals.start()
        if isinstance(self.clock, MovedClock):
            self.clock.attach(self)
        _log.info(
            "broker started",
            cluster_id=services.cluster_id,
            node_id=services.node_id,
            address=self.bootstrap,
            data_dir=str(self.data_dir),
            topics=len(services.metadata.topics),
            after_clean_shutdown=services.logs.was_clean,
        )

    def _registry(self, services: Services) -> Registry:
        """Return the registry of the APIs that this node serves."""
        if not self.roles.is_broker:
            from fencepost.coordinator.handlers.controller_registry import controller_registry  # noqa: PLC0415 - few nodes are controllers

            return controller_registry()
        if services.zookeeper is not None:
            from fencepost.coordinator.handlers.zookeeper_registry import zookeeper_registry  # noqa: PLC0415 - few brokers use ZooKeeper

            return zookeeper_registry(services)
        two_phase = self.config.bool("transaction.two.phase.commit.enable")
        return Registry(
            unstable_versions=self.config.bool("unstable.api.versions.enable"),
            unstable_apis=(ApiKey.INIT_PRODUCER_ID,) if two_phase else (),
            forwards=None if services.controller is None else services.controller_versions,
            without=() if self.config.bool("fencepost.client.telemetry.enable") else TELEMETRY_APIS,
        )

    async def _add_users(self, services: Services) -> None:
        if not self._added_users:
            return
        from fencepost.coordinator.daemon.added_users import add_users  # noqa: PLC0415 - most starts add none

        await add_users(services, self._added_users)

    async def warm_up(self) -> None:
        """Load the code for the first client's requests over several turns of the event loop.

        Call it only in a process that runs nothing but this broker: loading would delay other
        brokers, or a program that embeds the broker.
        """
        if self._server is not None and self.roles.is_broker:
            await warm_up.warm_up(self._server.registry)

    @property
    def member(self) -> ClusterBroker | None:
        """The cluster membership; None for a standalone broker and before :meth:`start`."""
        return self._member

    async def go_silent(self) -> None:
        """Reset all connections without a response; the caller must call :meth:`stop` next."""
        self.server.reset()
        if self.controller_part is not None:
            self.controller_part.reset()
        if self._member is not None:
            await self._member.go_silent()
        await asyncio.sleep(0)

    async def stop(self) -> None:
        """Stop accepting, complete delayed requests, close everything, mark the shutdown as clean.

        A failing step is logged, and the logs are closed anyway. Does nothing unless started.
        """
        self._is_stopping = True
        if isinstance(self.clock, MovedClock):
            self.clock.detach(self)
        if self._metrics is not None:
            self._metrics.stops()
        if self._member is not None:
            await self._member.leave()
        try:
            await each_in_turn(self._shutdown_steps())
        finally:
            self._member = self.controller_part = None
            self._server = self._maintenance = self.cleaner = self._lock = None
            self._services = self._storage = self._metrics = None
            self._is_stopping = False

    def _shutdown_steps(self) -> list[Step]:
        """Return the steps of the shutdown in their order."""
        steps: list[Step] = [("close what was not served", self._listeners.unbind)]
        services, storage, part = self._services, self._storage, self.controller_part
        if self._server is not None:
            steps.append(("stop accepting", self._server.stop_accepting))
        if services is not None:
            steps.append(("answer long polls", services.fetches.delayed.close))
            if not self.roles.is_broker:
                steps.append(("stop the controller", services.active_controller.stop))
        if self.certificates is not None:
            steps.append(("stop looking at certificates", self.certificates.stop))
        if self._maintenance is not None:
            steps.append(("stop maintenance", self._maintenance.stop))
        if self.cleaner is not None:
            steps.append(("stop the cleaner", self.cleaner.stop))
        if services is not None:
            steps += services.shutdown_steps()
        if self._server is not None:
            steps.append(("close connections", self._server.stop))
        if services is not None:
            steps += services.last_shutdown_steps()
        if self._member is not None:
            steps += self._member.shutdown_steps()
        if part is not None:
            steps += part.shutdown_steps()
            storage = part.storage
        if storage is not None:
            steps += [
                ("end removals", storage.logs.removals.close),
                ("end flushes", storage.flusher.close),
                ("cut the metadata log", storage.end_metadata),
                ("close the logs", storage.logs.close),
            ]
        if self._lock is not None:
            steps.append(("give up the lock", partial(self.fs.close, self._lock)))
        if self._metrics is not None:
            steps.append(("end the metrics", self._metrics.close))
        return steps

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.stop()


def _added_users(texts: Sequence[str]) -> list[ScramCredentialUpsertion]:
    if not texts:
        return []
    from fencepost.coordinator.daemon.added_users import parse_added_users  # noqa: PLC0415 - most starts add none

    return parse_added_users(texts)


def split_address(text: str) -> tuple[str, int]:
    """Return (host, port) of HOST:PORT or [HOST]:PORT. Raises BrokerError."""
    try:
        return parse_address(text)
    except ValueError as error:
        raise BrokerError(str(error)) from error

"""The broker as an object: its services, and the order in which they start and stop.

A test, an example or the daemon makes one; several fit in one process and one event loop::

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
from fencepost.coordinator.daemon import first_contact
from fencepost.coordinator.daemon.data_directory import (
    has_identity,
    identify,
    lock,
    metadata_of_before,
    note_joined,
)
from fencepost.coordinator.daemon.errors import BrokerError
from fencepost.coordinator.daemon.serving import Listeners, certificates_of, check_listeners
from fencepost.coordinator.data.cleaner import Cleaner
from fencepost.coordinator.data.maintenance import Maintenance
from fencepost.coordinator.data.storage import Storage
from fencepost.coordinator.handlers import Registry
from fencepost.coordinator.metadata.names import METADATA_TOPIC
from fencepost.coordinator.net.server import Server
from fencepost.coordinator.replication.errors import MembershipError
from fencepost.coordinator.runtime.background import Repeated, Step, Threads, each_in_turn, spawn
from fencepost.coordinator.security.authorizer import Authorizer
from fencepost.coordinator.services import Services
from fencepost.coordinator.wire.api import ApiKey
from fencepost.logcore.checkpoints import clean_shutdown_epoch
from fencepost.logcore.clock import Clock, SystemClock, cluster_clock
from fencepost.logcore.fs import FileSystem, OsFileSystem

if TYPE_CHECKING:
    from fencepost.cluster.controller.scram import Upsertion
    from fencepost.coordinator.daemon.controller_part import ControllerPart
    from fencepost.coordinator.daemon.in_thread import BrokerThread
    from fencepost.coordinator.daemon.member import Member
    from fencepost.coordinator.daemon.metrics_listener import MetricsListener
    from fencepost.coordinator.metrics.endpoint import Endpoint

_log = structlog.get_logger(__name__)

_METADATA_DIRECTORY = f"{METADATA_TOPIC}-0"


@runtime_checkable
class MovedClock(Clock, Protocol):
    """A clock that somebody moves by hand, and that has done then what is due.

    It is told of every broker that goes by it, on the broker's loop.
    """

    def attach(self, broker: Broker) -> None:
        """The broker serves."""

    def detach(self, broker: Broker) -> None:
        """The broker stops."""


class Broker:
    """One broker on one data directory.

    ``listen`` is HOST:PORT, port 0 for a free one; without it, ``listeners`` says it, or it is a
    free port on loopback. ``config`` holds settings by Kafka's names, as texts or as the numbers,
    booleans and lists that they mean; unknown keys and bad values raise
    :class:`fencepost.coordinator.config.key.ConfigError` here.
    ``insecure`` lets a listener that asks nobody who they are be open to other machines, which is
    refused otherwise; so does the key ``fencepost.insecure``.
    ``add_scram`` names users as Kafka's ``kafka-storage format --add-scram`` does; those who are
    there already stay as they are.
    ``fs`` and ``clock`` are the operating system's unless a test brings its own.
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
        Authorizer.configured(self.config)  # what is wrong with it is to be known at once
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
        """Where brokers join, if this one is their controller as well."""
        every = [*listeners.values()]
        if self.roles.is_broker and self.roles.decides_for_others:
            listeners = controller_listeners(self.config)
            self._of_controller = Listeners(listeners, advertised_controllers(self.config))
            every += listeners.values()
        check_listeners(self.config, every)
        self._added_users = _added_users(add_scram)
        self._member: Member | None = None
        """What a broker has whose controllers are elsewhere."""
        self.controller_part: ControllerPart | None = None
        """What it has as the controller of others."""
        self.on_lost: Callable[[BrokerError], None] | None = None
        """Told if the broker has to stop by itself: it is no member of its cluster any more."""
        self.certificates = certificates_of(self.config, every, self.clock)
        """Of listeners that encrypt; None where none does."""
        self._lock: int | None = None
        self._storage: Storage | None = None
        self._services: Services | None = None
        self._server: Server | None = None
        self._maintenance: Maintenance | None = None
        self._metrics_listen: MetricsListener | None = None
        if self.config.text("fencepost.metrics.listen"):
            from fencepost.coordinator.daemon.metrics_listener import MetricsListener  # noqa: PLC0415 - most brokers need none of it

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
        """A broker on an event loop of its own in a thread of its own; a context manager."""
        from fencepost.coordinator.daemon.in_thread import BrokerThread  # noqa: PLC0415 - the daemon needs no threads

        return BrokerThread(
            lambda: cls(
                data_dir, listen, config, insecure=insecure, add_scram=add_scram, clock=clock
            )
        )

    @property
    def storage(self) -> Storage:
        """The open data directory. Raises RuntimeError when it is not open."""
        if self._storage is None:
            raise RuntimeError("the broker's directory is not open")
        return self._storage

    @property
    def services(self) -> Services:
        """The services of the broker. Raises RuntimeError when it is not started."""
        if self._services is None:
            raise RuntimeError("the broker is not started")
        return self._services

    @property
    def server(self) -> Server:
        """Its sockets. Raises RuntimeError when it does not listen."""
        if self._server is None:
            raise RuntimeError("the broker is not started")
        return self._server

    @property
    def repeated(self) -> list[Repeated]:
        """What it does again and again, while it listens."""
        tasks = [] if self._maintenance is None else self._maintenance.tasks
        return tasks if self.cleaner is None else [*tasks, self.cleaner.task]

    # --- addresses ---

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens. Raises RuntimeError when it does not."""
        return self.server.address

    @property
    def advertised(self) -> tuple[str, int]:
        """Where clients of the first listener are told to connect to."""
        return self.advertised_on()

    def advertised_on(self, listener: str | None = None) -> tuple[str, int]:
        """Where clients that came by this listener, or the first one, are told to connect to."""
        return self._listeners.address_of(listener)

    @property
    def bootstrap(self) -> str:
        """The advertised address as HOST:PORT, for ``bootstrap.servers``."""
        host, port = self.advertised
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    @property
    def metrics_address(self) -> tuple[str, int]:
        """Where metrics and health are served. Raises RuntimeError where they are not."""
        if self._metrics is None:
            raise RuntimeError("metrics are not served")
        return self._metrics.address

    # --- life ---

    async def start(self) -> None:
        """Open, load, listen. Raises BrokerError; whatever was begun is undone then."""
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
                # In a thread, so that somebody can be told meanwhile that we are starting.
                self._metrics = await self._serve_metrics(self._metrics_listen)
                threads = Threads("open")
                try:
                    cluster_id = await threads.run(self.open)
                finally:
                    threads.close()
            self._services = services = Services(
                self.storage, cluster_id=cluster_id, advertised=self.advertised_on
            )
            await services.start()
            await self._add_users(services)
            await self._serve(services)
            if not self.roles.is_broker:
                services.history.stop()  # it would need a topic of its own here
                services.active_controller.start()
            if self._metrics is not None and self._server is not None:
                self._metrics.serves(services, self._server)
        except BaseException:
            await self.stop()
            raise

    async def _serve_metrics(self, listener: MetricsListener) -> Endpoint:
        """Tell how the broker does, from now on."""
        try:
            endpoint = await listener.serve(self.config)
        except OSError as error:
            where = f"{listener.host}:{listener.port}"
            raise BrokerError(f"can not serve metrics on {where}: {error}") from error
        host, port = endpoint.address
        scheme = "https" if listener.certificate else "http"
        _log.info("metrics are served", address=f"{scheme}://{host}:{port}/metrics")
        return endpoint

    async def _join(self) -> None:
        """Start as a broker among others, whose controller may be in this very process."""
        if self._metrics_listen is not None:
            self._metrics = await self._serve_metrics(self._metrics_listen)
        await self._listeners.bind()
        threads = Threads("open")
        try:
            directory = await threads.run(self._take_directory)
            previous = clean_shutdown_epoch(self.fs, directory)
            part = await self._decide(directory, threads)
            self._member = member = self._of_a_cluster(part)
            node_id = self.config.int("node.id")
            asks = self.roles.elects or not has_identity(self.fs, directory)
            cluster_id = await member.find_cluster_id() if asks else ""
            meta = identify(self.fs, directory, node_id, cluster_id)
            addresses = {name: self.advertised_on(name) for name in self._listeners.all}
            before = None
            if part is None:
                before = await threads.run(partial(metadata_of_before, self.fs, directory))
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
                part.beside(services)
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

    def _of_a_cluster(self, part: ControllerPart | None) -> Member:
        """What makes this broker one among others."""
        # Most brokers are alone.
        from fencepost.coordinator.daemon.member import Member  # noqa: PLC0415

        if not self.roles.elects:
            return Member(self.config, self._controllers(part), self._listeners.all, self._lost)
        try:
            from fencepost.coordinator.daemon.zookeeper_member import ZooKeeperMember  # noqa: PLC0415
        except ModuleNotFoundError as error:
            needs = "zookeeper.connect needs kazoo: pip install 'fencepost[zookeeper]'"
            raise BrokerError(needs) from error
        found = ZooKeeperMember(self.config, self.roles, self._listeners.all, self._lost)
        try:
            found.open(cluster_clock(self.clock))
        except ConfigError as error:
            raise BrokerError(str(error)) from error
        return found

    async def _decide(self, directory: str, threads: Threads) -> ControllerPart | None:
        """Begin to be the controller of whoever joins, if this node is that."""
        if self._of_controller is None:
            return None
        from fencepost.coordinator.daemon.controller_part import ControllerPart  # noqa: PLC0415 - few are that

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
        await self._add_users(part.services)
        await part.serve(self.certificates)
        return part

    def _controllers(self, part: ControllerPart | None) -> Roles:
        """Where controllers are: the one of this process is where it says it is."""
        if part is None:
            return self.roles
        address = part.listeners.address_of(self.roles.controller_listener)
        return replace(self.roles, bootstrap=(address,), voters=())

    def _lost(self, why: MembershipError) -> None:
        _log.error("the broker has to stop", cause=str(why))
        if self.on_lost is not None:
            self.on_lost(BrokerError(str(why)))
        else:
            spawn(self.stop(), "stop a broker that has to")

    def open(self) -> str:
        """Take the directory and load what is in it, without serving it; :meth:`stop` ends that.

        Returns the cluster's id.

        For commands that work on a stopped broker's data. Raises BrokerError, MetadataError,
        LogError, OSError.
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
        """Where the broker will listen, as far as that is known before it does."""
        for name, listener in self._listeners.all.items():
            one = self._listeners.advertised.get(name, listener)
            if one.port:
                host = socket.gethostname() if one.host in ANY_ADDRESS else one.host
                number = list(SecurityProtocol).index(listener.protocol)
                yield BrokerEndpoint(name, host, one.port, number)

    def _keep_private(self, directory: str) -> None:
        """What users' passwords have become is in there."""
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
        """What is served."""
        if not self.roles.is_broker:
            from fencepost.coordinator.handlers.controller_registry import controller_registry  # noqa: PLC0415 - few are that

            return controller_registry()
        if services.zookeeper is not None:
            from fencepost.coordinator.handlers.zookeeper_registry import zookeeper_registry  # noqa: PLC0415 - the same

            return zookeeper_registry(services)
        two_phase = self.config.bool("transaction.two.phase.commit.enable")
        return Registry(
            unstable_versions=self.config.bool("unstable.api.versions.enable"),
            unstable_apis=(ApiKey.INIT_PRODUCER_ID,) if two_phase else (),
            forwards=None if services.controller is None else services.controller_versions,
        )

    async def _add_users(self, services: Services) -> None:
        if not self._added_users:
            return
        from fencepost.coordinator.daemon.added_users import add_users  # noqa: PLC0415 - most starts add none

        await add_users(services, self._added_users)

    async def prepare_first_contact(self) -> None:
        """Load what the first client will need, a piece a turn; for a process of the broker's own.

        In a process with several brokers, or with a program around one, it would be in the way.
        """
        if self._server is not None and self.roles.is_broker:
            await first_contact.prepare_first_contact(self._server.registry)

    @property
    def member(self) -> Member | None:
        """What it has as a member of a cluster; None alone, and while it is not started."""
        return self._member

    async def go_silent(self) -> None:
        """End all connections, without a word to anybody; :meth:`stop` has to follow."""
        self.server.reset()
        if self.controller_part is not None:
            self.controller_part.reset()
        if self._member is not None:
            await self._member.go_silent()
        await asyncio.sleep(0)

    async def stop(self) -> None:
        """Stop accepting, answer what waits, close everything, leave the clean-shutdown mark.

        A step that fails is logged, and the logs are closed all the same. The call does nothing
        when the broker is not started.
        """
        if isinstance(self.clock, MovedClock):
            self.clock.detach(self)
        if self._metrics is not None:
            self._metrics.stops()
        if self._member is not None:
            await self._member.leave()
        try:
            await each_in_turn(self._steps_of_a_stop())
        finally:
            self._member = self.controller_part = None
            self._server = self._maintenance = self.cleaner = self._lock = None
            self._services = self._storage = self._metrics = None

    def _steps_of_a_stop(self) -> list[Step]:
        """The steps of a stop, in their order."""
        steps: list[Step] = [("close what was not served", self._listeners.unbind)]
        services, storage, part = self._services, self._storage, self.controller_part
        if self._server is not None:
            steps.append(("stop accepting", self._server.stop_accepting))
        if services is not None:
            steps.append(("answer long polls", services.fetches.delayed.close))
            if not self.roles.is_broker:
                steps.append(("decide nothing more", services.active_controller.stop))
        if self.certificates is not None:
            steps.append(("stop looking at certificates", self.certificates.stop))
        if self._maintenance is not None:
            steps.append(("stop maintenance", self._maintenance.stop))
        if self.cleaner is not None:
            steps.append(("stop the cleaner", self.cleaner.stop))
        if services is not None:
            steps += services.steps_of_a_stop()
        if self._server is not None:
            steps.append(("close connections", self._server.stop))
        if services is not None:
            steps += services.last_steps_of_a_stop()
        if self._member is not None:
            steps += self._member.steps_of_a_stop()
        if part is not None:
            steps += part.steps_of_a_stop()
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


def _added_users(texts: Sequence[str]) -> list[Upsertion]:
    if not texts:
        return []
    from fencepost.coordinator.daemon.added_users import parse_added_users  # noqa: PLC0415 - most starts add none

    return parse_added_users(texts)


def split_address(text: str) -> tuple[str, int]:
    """(host, port) of HOST:PORT or [HOST]:PORT. Raises BrokerError."""
    try:
        return parse_address(text)
    except ValueError as error:
        raise BrokerError(str(error)) from error

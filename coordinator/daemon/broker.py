"""The broker as an object: its services, and the order in which they start and stop.

A test, an example or the daemon makes one; several fit in one process and one event loop::

    async with Broker(data_dir=path) as broker:
        ...  # any Kafka client at broker.bootstrap

    with Broker.in_thread(path) as broker:  # the same for code without an event loop
        ...
"""

from __future__ import annotations

import socket
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self, runtime_checkable

import structlog

from fencepost.coordinator.config.broker_config import BrokerConfig, ConfigError
from fencepost.coordinator.config.listener_config import ListenerConfig
from fencepost.coordinator.config.listeners import (
    ANY_ADDRESS,
    INSECURE,
    advertised_listeners,
    check_closed,
    client_listeners,
    parse_address,
    tells_passwords,
)
from fencepost.coordinator.config.logs import configure_quietly
from fencepost.coordinator.daemon import first_contact
from fencepost.coordinator.daemon.connection_bounds import keep_to, window_of
from fencepost.coordinator.data.cleaner import Cleaner
from fencepost.coordinator.data.maintenance import Maintenance
from fencepost.coordinator.data.storage import Storage
from fencepost.coordinator.error_codes import error_code
from fencepost.coordinator.handlers import Registry
from fencepost.coordinator.metadata.names import METADATA_TOPIC
from fencepost.coordinator.net.server import Server
from fencepost.coordinator.runtime.background import Repeated, Step, Threads, each_in_turn
from fencepost.coordinator.security.authorizer import Authorizer
from fencepost.coordinator.services import Services
from fencepost.coordinator.wire.api import ApiKey
from fencepost.coordinator.wire.limits import ConnectionLimits
from fencepost.logcore.checkpoints import (
    LOCK,
    META_PROPERTIES,
    CheckpointError,
    MetaProperties,
    read_meta_properties,
    uuid_to_text,
    write_meta_properties,
)
from fencepost.logcore.clock import Clock, SystemClock
from fencepost.logcore.fs import TEMPORARY_SUFFIX, FileSystem, OsFileSystem

if TYPE_CHECKING:
    from fencepost.coordinator.daemon.certificates import Certificates
    from fencepost.coordinator.daemon.in_thread import BrokerThread
    from fencepost.coordinator.daemon.metrics_listener import MetricsListener
    from fencepost.coordinator.metrics.endpoint import Endpoint
    from fencepost.coordinator.security.added_users import AddedUser
    from fencepost.coordinator.security.logins import Logins

_log = structlog.get_logger(__name__)

_METADATA_DIRECTORY = f"{METADATA_TOPIC}-0"
_OF_KRAFT = "quorum-state"
"""A file beside the log of an Apache Kafka that has run; ours has no quorum."""
_BEFORE_ITS_METADATA = frozenset(
    {LOCK, META_PROPERTIES, META_PROPERTIES + TEMPORARY_SUFFIX, "lost+found"}
)
"""What a data directory may hold that no broker has been started on: a first start that was cut
short leaves three of these, making a file system the last."""


class BrokerError(Exception):
    """The broker can not start; the message says why and is for the operator."""


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
        self._advertised = advertised_listeners(self.config)
        self._listen = client_listeners(self.config)
        if listen is not None or not self._listen:
            listeners = self._listen or self._advertised
            first = next(iter(listeners.values()), ListenerConfig())
            host, port = split_address(listen or "127.0.0.1:0")
            self._listen = {first.name: replace(first, host=host, port=port)}
        check_closed(self.config, self._listen.values())
        for one in self._listen.values():
            if one.is_sasl:
                _check_logins(self.config, one.name)
        self._added_users = _added_users(add_scram)
        self.certificates: Certificates | None = None
        """Of listeners that encrypt; None where none does."""
        if any(one.is_tls for one in self._listen.values()):
            # Most brokers need none of it.
            from fencepost.coordinator.daemon.certificates import Certificates  # noqa: PLC0415

            self.certificates = Certificates(self.config, self._listen.values(), self.clock)
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
        if listener is None:
            listener = next(iter(self._listen))
        if listener in self._advertised:
            return self._advertised[listener].host, self._advertised[listener].port
        host, port = self.server.addresses[listener]
        return (socket.gethostname() if host in ANY_ADDRESS else host), port

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
            self._add_users(services)
            await self._serve(services)
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

    def open(self) -> str:
        """Take the directory and load what is in it, without serving it; :meth:`stop` ends that.

        Returns the cluster's id.

        For commands that work on a stopped broker's data. Raises BrokerError, MetadataError,
        LogError, OSError.
        """
        directory = str(self.data_dir)
        try:
            self.fs.make_directory(directory)
            if LOCK not in (self.fs.list_directory(directory) or ()):
                self._refuse_foreign(directory)  # before anything is made in it
            self._lock = self.fs.lock(f"{directory}/{LOCK}")
            self._refuse_foreign(directory)
        except BlockingIOError as error:
            raise BrokerError(
                f"the data directory {directory} is in use by another process"
            ) from error
        except OSError as error:
            raise BrokerError(f"the data directory {directory} can not be used: {error}") from error
        meta = self._identify(directory)
        self._storage = Storage(self.fs, directory, self.config, self.clock, node_id=meta.node_id)
        self._keep_private(f"{directory}/{_METADATA_DIRECTORY}")
        return meta.cluster_id

    def _keep_private(self, directory: str) -> None:
        """What users' passwords have become is in there."""
        try:
            self.fs.make_private(directory)
        except OSError as error:
            _log.warning("others may read the metadata", directory=directory, cause=str(error))

    def _refuse_foreign(self, directory: str) -> None:
        """Leave a directory alone that was never this broker's, and has something in it.

        What no topic explains is renamed at a start; here that would be all there is.
        """
        names = set(self.fs.list_directory(directory) or ())
        metadata = f"{directory}/{_METADATA_DIRECTORY}"
        if _OF_KRAFT in (self.fs.list_directory(metadata) or ()):
            raise BrokerError(
                f"the data directory {directory} is Apache Kafka's: {metadata} has {_OF_KRAFT}."
                " Give another one; to take over its partitions see `fencepost log import`"
            )
        foreign = sorted(names - _BEFORE_ITS_METADATA)
        missing = META_PROPERTIES
        if META_PROPERTIES in names:
            # Apache Kafka's, maybe: its small files are harmless where it has no partition.
            missing = _METADATA_DIRECTORY
            foreign = [one for one in foreign if self.fs.is_directory(f"{directory}/{one}")]
        if missing not in names and foreign:
            raise BrokerError(
                f"the data directory {directory} has no {missing} but holds {foreign[0]}: it is"
                " none of this broker. Give it a directory that is empty or not there yet; to"
                " take over partitions of Apache Kafka see `fencepost log import`"
            )

    def _identify(self, directory: str) -> MetaProperties:
        """Read who owns the directory, or write it down at the first start."""
        node_id = self.config.int("node.id")
        try:
            meta = read_meta_properties(self.fs, directory)
        except CheckpointError as error:
            raise BrokerError(f"{directory}/meta.properties is damaged: {error}") from error
        if meta is None:
            meta = MetaProperties(uuid_to_text(uuid.uuid4()), node_id, uuid.uuid4())
            write_meta_properties(self.fs, directory, meta)
        elif meta.node_id != node_id:
            raise BrokerError(
                f"{directory} belongs to node.id {meta.node_id}, the configuration says {node_id}"
            )
        return meta

    async def _serve(self, services: Services) -> None:
        config = self.config
        limits = ConnectionLimits(
            max_request_bytes=config.int("socket.request.max.bytes"),
            max_queued_request_bytes=config.int("queued.max.request.bytes"),
            max_queued_response_bytes=config.int("queued.max.response.bytes"),
            max_idle_ms=config.int("connections.max.idle.ms"),
        )
        two_phase = config.bool("transaction.two.phase.commit.enable")
        registry = Registry(
            unstable_versions=config.bool("unstable.api.versions.enable"),
            unstable_apis=(ApiKey.INIT_PRODUCER_ID,) if two_phase else (),
        )
        self._server = Server(
            services,
            registry=registry,
            limits=limits,
            error_code=error_code,
            logins=self._logins(services),
            window=window_of(config),
        )
        keep_to(self._server, config, services.quotas, self._listen)
        if self._metrics is not None:
            self._metrics.watch(self._server)
        await self._listen_all(self._server)
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

    def _add_users(self, services: Services) -> None:
        if self._added_users:
            from fencepost.coordinator.security.added_users import add_users  # noqa: PLC0415 - most starts add none

            _log.info("users added", names=add_users(services.users, self._added_users))

    def _logins(self, services: Services) -> Logins | None:
        """How clients log in, where any have to."""
        with_sasl = [one.name for one in self._listen.values() if one.is_sasl]
        for one in filter(tells_passwords, self._listen.values()):
            _log.warning("PLAIN without TLS: others can read the passwords", listener=one.name)
        if not with_sasl:
            return None
        from fencepost.coordinator.security.logins import Logins  # noqa: PLC0415 - most brokers let anybody in

        return Logins.of_listeners(
            with_sasl, self.config, services.users, services.password_checks, self.clock
        )

    async def _listen_all(self, server: Server) -> None:
        certificates = self.certificates
        if certificates is not None:
            try:
                await certificates.load()
            except ConfigError as error:
                raise BrokerError(str(error)) from error
            certificates.start()
            self.services.check_certificates = certificates.check
        for one in self._listen.values():
            tls = None if certificates is None else certificates.tls.get(one.name)
            try:
                await server.start(one, tls)
            except OSError as error:
                raise BrokerError(f"can not listen on {one.host}:{one.port}: {error}") from error

    async def prepare_first_contact(self) -> None:
        """Load what the first client will need, a piece a turn; for a process of the broker's own.

        In a process with several brokers, or with a program around one, it would be in the way.
        """
        if self._server is not None:
            await first_contact.prepare_first_contact(self._server.registry)

    async def stop(self) -> None:
        """Stop accepting, answer what waits, close everything, leave the clean-shutdown mark.

        A step that fails is logged, and the logs are closed all the same. The call does nothing
        when the broker is not started.
        """
        if isinstance(self.clock, MovedClock):
            self.clock.detach(self)
        if self._metrics is not None:
            self._metrics.stops()
        try:
            await each_in_turn(self._steps_of_a_stop())
        finally:
            self._server = self._maintenance = self.cleaner = self._lock = None
            self._services = self._storage = self._metrics = None

    def _steps_of_a_stop(self) -> list[Step]:
        """The steps of a stop, in their order."""
        steps: list[Step] = []
        services, storage = self._services, self._storage
        if self._server is not None:
            steps.append(("stop accepting", self._server.stop_accepting))
        if services is not None:
            steps.append(("answer long polls", services.fetches.delayed.close))
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
        if storage is not None:
            steps += [
                ("end removals", storage.logs.removals.close),
                ("end flushes", storage.flusher.close),
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


def _added_users(texts: Sequence[str]) -> list[AddedUser]:
    if not texts:
        return []
    from fencepost.coordinator.security.added_users import AddedUserError, parse_added_user  # noqa: PLC0415 - most starts add none

    try:
        return [parse_added_user(text) for text in texts]
    except AddedUserError as error:
        raise BrokerError(f"a user to add (--add-scram): {error}") from None


def _check_logins(config: BrokerConfig, listener: str) -> None:
    from fencepost.coordinator.security.logins import check_logins  # noqa: PLC0415 - most brokers let anybody in

    check_logins(config, listener)


def split_address(text: str) -> tuple[str, int]:
    """(host, port) of HOST:PORT or [HOST]:PORT. Raises BrokerError."""
    try:
        return parse_address(text)
    except ValueError as error:
        raise BrokerError(str(error)) from error

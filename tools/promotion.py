"""Promotes a standalone broker to a broker of a new cluster with controllers of Apache Kafka.

The broker's metadata already consists of Apache Kafka's records, so a promotion only writes a
directory for each controller to start from, with ``meta.properties`` and a snapshot. The broker's
own directory gets a note of the promotion, but otherwise stays unchanged and usable until the
broker has joined the controllers.

After an interruption, the next call repeats the promotion. ``meta.properties`` is written last:
without it Apache Kafka does not start, and so cannot begin an empty cluster in that directory.

Source: ``Formatter``, ``KafkaMetadataLog``; KIP-630 (snapshots), KIP-853 (voters).
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from fencepost.cluster.controller.activation import METADATA_VERSION
from fencepost.cluster.controller.handover import without_leaders
from fencepost.coordinator.config import properties
from fencepost.coordinator.config.broker_config import BrokerConfig
from fencepost.coordinator.config.listener_config import ListenerConfig, SecurityProtocol
from fencepost.coordinator.config.listeners import (
    ADVERTISED,
    BETWEEN_BROKERS,
    CONTROLLER_LISTENERS,
    LISTENERS,
    PROTOCOLS,
    advertised_listeners,
    client_listeners,
    mapped_protocols,
    parse_address,
)
from fencepost.coordinator.config.roles import BOOTSTRAP, ROLES, VOTERS, roles_of
from fencepost.coordinator.metadata.control_records import Voter
from fencepost.coordinator.metadata.metadata import FEATURES, SHARE_VERSION
from fencepost.coordinator.metadata.names import METADATA_TOPIC
from fencepost.coordinator.metadata.quorum_state import (
    is_of_fencepost,
    is_of_member,
    note_promotion,
)
from fencepost.coordinator.metadata.snapshots import SnapshotId, write_snapshot
from fencepost.coordinator.metadata.state_topics import unsafe_configs, without_unsafe_configs
from fencepost.coordinator.metadata.stopped import StoppedMetadata, read_stopped
from fencepost.logcore.checkpoints import (
    CLEAN_SHUTDOWN,
    LOCK,
    META_PROPERTIES,
    QUORUM_STATE,
    CheckpointError,
    MetaProperties,
    read_meta_properties,
    write_meta_properties,
)
from fencepost.logcore.fs import FileSystem, replace_file
from fencepost.logcore.values import dataclass

METADATA_DIRECTORY: Final = f"{METADATA_TOPIC}-0"
BROKER_FILE: Final = "broker.properties"
CONTROLLER_FILE: Final = "controller.properties"
_CONTROLLER: Final = "controller-"
_METADATA: Final = "metadata"

_OWN: Final = frozenset(
    {
        *(LISTENERS, ADVERTISED, BETWEEN_BROKERS, CONTROLLER_LISTENERS, PROTOCOLS),
        *(ROLES, BOOTSTRAP, VOTERS, "node.id", "broker.id", "broker.rack"),
        *("log.dir", "log.dirs", "metadata.log.dir", "security.inter.broker.protocol"),
    }
)
"""Settings about a node's identity and location, which differ between nodes."""

_ONE_REPLICA: Final = (
    "offsets.topic.replication.factor",
    "transaction.state.log.replication.factor",
    "transaction.state.log.min.isr",
)
"""Settings whose defaults in Apache Kafka would require more than this one broker."""


class PromotionError(Exception):
    """The broker cannot be promoted, for the reason in the message. Nothing was changed."""


class ControllerAddress(NamedTuple):
    """A controller's id and address."""

    node_id: int
    host: str
    port: int

    @property
    def address(self) -> str:
        """HOST:PORT."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def of(cls, text: str) -> ControllerAddress:
        """Parse ID@HOST:PORT. Raises ValueError."""
        node_id, separator, address = text.partition("@")
        if not separator or not node_id.isdecimal():
            raise ValueError(f"{text!r} is not ID@HOST:PORT")
        return cls(int(node_id), *parse_address(address))


@dataclass(frozen=True, slots=True)
class PromotionRequest:
    """The arguments of a promotion."""

    data_dir: Path
    output: Path
    controllers: Sequence[ControllerAddress]
    settings: Mapping[str, str]
    """The settings that the broker was started with."""
    listen: str
    """The broker's address, if the settings do not contain it."""
    controller_settings: Mapping[str, str]
    """Additional settings for the controllers alone."""
    static: bool = False
    """Whether the voters are fixed, by ``controller.quorum.voters`` in each node's settings."""


@dataclass(frozen=True, slots=True)
class PromotionPlan:
    """The checked contents of all files to write."""

    wanted: PromotionRequest
    meta: MetaProperties
    metadata: StoppedMetadata
    broker_settings: Mapping[str, str]
    controller_settings: Mapping[int, Mapping[str, str]]
    warnings: Sequence[str]

    @property
    def snapshot(self) -> SnapshotId:
        """The id of the controllers' first snapshot."""
        return SnapshotId(self.metadata.image.offset + 1, self.metadata.image.epoch)

    def directory_of(self, node_id: int) -> Path:
        """Return the directory of a controller's files."""
        return self.wanted.output / f"{_CONTROLLER}{node_id}"


@contextmanager
def held(fs: FileSystem, data_dir: Path) -> Iterator[None]:
    """Lock a data directory against brokers. Raises PromotionError if it is in use, OSError."""
    if fs.read_file(f"{data_dir}/{META_PROPERTIES}") is None:
        raise PromotionError(f"{data_dir} is not the data directory of a broker")
    try:
        lock = fs.lock(f"{data_dir}/{LOCK}")
    except BlockingIOError as error:
        raise PromotionError(f"{data_dir} is in use by a running broker: stop it first") from error
    try:
        yield
    finally:
        fs.close(lock)


def make_plan(fs: FileSystem, request: PromotionRequest) -> PromotionPlan:
    """Check a promotion, and plan it. The caller holds the lock of the data directory.

    Raises PromotionError, MetadataError, ConfigError, OSError.
    """
    meta, metadata = _read(fs, str(request.data_dir))
    config = BrokerConfig(request.settings)
    if config.int("node.id") != meta.node_id:
        raise PromotionError(
            f"{request.data_dir} belongs to node.id {meta.node_id}, but the configuration has"
            f" {config.int('node.id')}"
        )
    _check_controllers(fs, request, meta)
    listeners = _listeners(config, request.listen)
    of_broker = _broker_settings(request, meta, config, listeners)
    roles_of(BrokerConfig({key: text for key, text in of_broker.items() if key != "log.dirs"}))
    return PromotionPlan(
        request,
        meta,
        metadata,
        of_broker,
        {
            controller.node_id: _controller_settings(request, controller, of_broker)
            for controller in request.controllers
        },
        [*_warnings(fs, request, metadata, config, listeners, of_broker)],
    )


def _read(fs: FileSystem, directory: str) -> tuple[MetaProperties, StoppedMetadata]:
    """Return the identity and metadata of a standalone broker's directory."""
    log = f"{directory}/{METADATA_DIRECTORY}"
    try:
        meta = read_meta_properties(fs, directory)
    except CheckpointError as error:
        raise PromotionError(f"{directory}/{META_PROPERTIES} is damaged: {error}") from error
    if meta is None or not is_of_fencepost(fs, log):
        raise PromotionError(f"{directory} is not the data directory of a standalone broker")
    if is_of_member(fs, log):
        raise PromotionError(f"the broker of {directory} has already joined controllers")
    metadata = read_stopped(fs, log)
    if metadata is None or meta.node_id not in metadata.image.brokers:
        raise PromotionError(
            f"{directory} has no metadata of this broker: start it once, and stop it"
        )
    others = sorted(metadata.image.brokers.keys() - {meta.node_id})
    if others:
        raise PromotionError(
            f"{directory} belongs to the controller of other brokers {others}; only a"
            " standalone broker can be promoted"
        )
    return meta, metadata


def _check_controllers(fs: FileSystem, request: PromotionRequest, meta: MetaProperties) -> None:
    ids = [controller.node_id for controller in request.controllers]
    if not ids:
        raise PromotionError("a cluster needs a controller")
    if len({*ids}) < len(ids):
        raise PromotionError("two controllers have the same id")
    if meta.node_id in ids:
        raise PromotionError(
            f"the id {meta.node_id} is the broker's own: every node of a cluster, broker or"
            " controller, needs another id"
        )
    if len({controller.address for controller in request.controllers}) < len(ids):
        raise PromotionError("two controllers have the same address")
    output = str(request.output)
    names = fs.list_directory(output) or ()
    allowed = {f"{_CONTROLLER}{node_id}" for node_id in ids}
    for name in sorted(names):
        if name.startswith(_CONTROLLER) and name not in allowed:
            raise PromotionError(f"{output} holds {name} of other controllers: remove it first")
    for node_id in ids:
        at = f"{output}/{_CONTROLLER}{node_id}/{_METADATA}"
        if fs.read_file(f"{at}/{METADATA_DIRECTORY}/{QUORUM_STATE}") is not None:
            raise PromotionError(
                f"the controller {node_id} has been started on {at} and uses it: stop it and"
                " remove the directory, or give another --output"
            )


def _listeners(config: BrokerConfig, listen: str) -> dict[str, ListenerConfig]:
    """Return the broker's listeners by name."""
    listeners = client_listeners(config)
    if listeners:
        return listeners
    first = next(iter(advertised_listeners(config).values()), ListenerConfig())
    try:
        host, port = parse_address(listen)
    except ValueError as error:
        raise PromotionError(str(error)) from error
    return {first.name: ListenerConfig(first.name, host, port, first.protocol)}


def _broker_settings(
    request: PromotionRequest,
    meta: MetaProperties,
    config: BrokerConfig,
    listeners: Mapping[str, ListenerConfig],
) -> dict[str, str]:
    """Return the settings of the promoted broker: its current ones, and those of the cluster."""
    names = [name.upper() for name in config.items(CONTROLLER_LISTENERS)] or ["CONTROLLER"]
    advertised = {**listeners, **advertised_listeners(config)}
    settings = {key: text for key, text in request.settings.items() if key not in _OWN}
    protocols = {listener.name: str(listener.protocol) for listener in listeners.values()}
    protocols |= dict(_pair(entry) for entry in mapped_protocols(config))
    protocols.setdefault(names[0], SecurityProtocol.PLAINTEXT)
    between = config.text(BETWEEN_BROKERS) or (
        config.text("security.inter.broker.protocol") or "PLAINTEXT"
    )
    if between not in listeners:
        between = next(iter(listeners))
    broker_settings = {
        ROLES: "broker",
        "node.id": str(meta.node_id),
        "log.dirs": str(request.data_dir.absolute()),
        LISTENERS: ",".join(_listener_text(name, listener) for name, listener in listeners.items()),
        ADVERTISED: ",".join(_listener_text(name, address) for name, address in advertised.items()),
        PROTOCOLS: ",".join(f"{name}:{protocol}" for name, protocol in protocols.items()),
        BETWEEN_BROKERS: between,
        CONTROLLER_LISTENERS: names[0],
        **_quorum(request),
    }
    if config.text("broker.rack"):
        broker_settings["broker.rack"] = config.text("broker.rack") or ""
    return {**broker_settings, **dict.fromkeys(_ONE_REPLICA, "1"), **settings}


def _pair(entry: str) -> tuple[str, str]:
    name, _, protocol = entry.partition(":")
    return name.strip().upper(), protocol.strip().upper()


def _listener_text(name: str, listener: ListenerConfig) -> str:
    host = f"[{listener.host}]" if ":" in listener.host else listener.host
    return f"{name}://{host}:{listener.port}"


def _quorum(request: PromotionRequest) -> dict[str, str]:
    """Return the settings by which nodes find the controllers."""
    if request.static:
        return {
            VOTERS: ",".join(
                f"{controller.node_id}@{controller.address}" for controller in request.controllers
            )
        }
    return {BOOTSTRAP: ",".join(controller.address for controller in request.controllers)}


def _controller_settings(
    request: PromotionRequest, controller: ControllerAddress, broker: Mapping[str, str]
) -> dict[str, str]:
    """Return a controller's settings, with the broker's settings that are not about its own node.

    Apache Kafka ignores settings that do not apply to a controller.
    """
    name = broker[CONTROLLER_LISTENERS]
    listener_prefix = f"listener.name.{name.lower()}."
    settings = {
        key: text
        for key, text in broker.items()
        if key not in _OWN
        and not key.startswith("fencepost.")
        and (not key.startswith("listener.name.") or key.startswith(listener_prefix))
    }
    room = request.output.absolute() / f"{_CONTROLLER}{controller.node_id}"
    return {
        ROLES: "controller",
        "node.id": str(controller.node_id),
        "log.dirs": str(room / _METADATA),
        LISTENERS: f"{name}://{controller.address}",
        CONTROLLER_LISTENERS: name,
        PROTOCOLS: broker[PROTOCOLS],
        **_quorum(request),
        **settings,
        **request.controller_settings,
    }


def _warnings(
    fs: FileSystem,
    request: PromotionRequest,
    metadata: StoppedMetadata,
    config: BrokerConfig,
    listeners: Mapping[str, ListenerConfig],
    broker: Mapping[str, str],
) -> Iterator[str]:
    """Yield warnings about problems that would otherwise appear only as later failures."""
    if fs.read_file(f"{request.data_dir}/{CLEAN_SHUTDOWN}") is None:
        yield "the broker was not stopped cleanly: it will check its logs when it starts"
    advertised = {**listeners, **advertised_listeners(config)}
    for name, address in advertised.items():
        if _is_local(address.host) and not all(
            _is_local(each.host) for each in request.controllers
        ):
            yield (
                f"{name} is advertised as {address.host}, which brokers on other machines cannot"
                f" reach: set {ADVERTISED}"
            )
        if address.port == 0:
            yield f"{name} has another port after each start: clients will not find the broker"
    protocols = dict(map(_pair, broker[PROTOCOLS].split(",")))
    of_controllers = protocols.get(broker[CONTROLLER_LISTENERS], "PLAINTEXT")
    asks_nobody = of_controllers in (SecurityProtocol.PLAINTEXT, SecurityProtocol.SSL)
    if "authorizer.class.name" in request.settings and asks_nobody:
        yield (
            "the controllers authenticate no brokers, but have an authorizer: without"
            " User:ANONYMOUS (or the names of the certificates) in super.users no broker"
            " can register"
        )
    between = listeners[broker[BETWEEN_BROKERS]]
    if between.is_sasl and "sasl.mechanism.inter.broker.protocol" not in request.settings:
        yield (
            f"brokers will connect to each other on the listener {between.name}, which"
            " requires a login: set sasl.mechanism.inter.broker.protocol and its"
            " credentials"
        )
    for topic in sorted(metadata.image.topics):
        for key, why in unsafe_configs(topic, metadata.image.topic_configs(topic)).items():
            yield f"{key} of {topic} is not handed over: {why}"
    level = metadata.image.features.get(METADATA_VERSION, 0)
    if level > FEATURES[METADATA_VERSION][0]:
        yield f"metadata.version is {level}: the controllers must be of Apache Kafka 4.4 or later"
    if metadata.image.features.get(SHARE_VERSION, 0) == 0:
        yield (
            "share groups and streams groups are off, as they were here; kafka-features upgrade"
            " turns them on once brokers of Apache Kafka serve them"
        )


def _is_local(host: str) -> bool:
    return host == "localhost" or host.startswith("127.") or host == "::1"


def carry_out(fs: FileSystem, plan: PromotionPlan, now_ms: int) -> None:
    """Write all files. The caller holds the lock of the data directory. Raises OSError."""
    request, output = plan.wanted, str(plan.wanted.output)
    _make_output(fs, request.output.absolute())
    fs.make_private(output)  # settings may hold passwords
    ids = {
        controller.node_id: _directory_id(fs, plan, controller.node_id)
        for controller in request.controllers
    }
    listener = plan.broker_settings[CONTROLLER_LISTENERS]
    voters = [
        Voter(controller.node_id, ids[controller.node_id], listener, *controller[1:])
        for controller in request.controllers
    ]
    image = without_leaders(without_unsafe_configs(plan.metadata.image), plan.meta.node_id)
    for controller in request.controllers:
        room = str(plan.directory_of(controller.node_id))
        metadata = f"{room}/{_METADATA}"
        log = f"{metadata}/{METADATA_DIRECTORY}"
        fs.make_directory(log)
        fs.make_private(log)  # it holds the users' credentials
        last_ms = plan.metadata.last_timestamp_ms
        write_snapshot(fs, log, image, now_ms, last_ms, () if request.static else voters)
        settings = properties.text_of(plan.controller_settings[controller.node_id])
        replace_file(fs, room, CONTROLLER_FILE, settings)
        for path in (metadata, room, output):
            fs.sync_directory(path)
        owner = MetaProperties(plan.meta.cluster_id, controller.node_id, ids[controller.node_id])
        write_meta_properties(fs, metadata, owner)
    replace_file(fs, output, BROKER_FILE, properties.text_of(plan.broker_settings))
    note_promotion(fs, f"{request.data_dir}/{METADATA_DIRECTORY}", plan.snapshot)


def _make_output(fs: FileSystem, path: Path) -> None:
    """Make a directory and its parents, durable against power loss."""
    made = [parent for parent in (path, *path.parents[:-1]) if not fs.is_directory(str(parent))]
    fs.make_directory(str(path))
    for parent in reversed(made or [path]):
        fs.sync_directory(str(parent.parent))


def _directory_id(fs: FileSystem, plan: PromotionPlan, node_id: int) -> uuid.UUID:
    """Return the directory id that an interrupted earlier call has written, or a new one."""
    try:
        meta = read_meta_properties(fs, str(plan.directory_of(node_id) / _METADATA))
    except CheckpointError:
        meta = None
    if meta is not None and (meta.cluster_id, meta.node_id) == (plan.meta.cluster_id, node_id):
        return meta.directory_id
    return uuid.uuid4()

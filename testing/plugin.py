"""The pytest plugin of the entry point ``fencepost``: fixtures with a broker for tests.

pytest loads it in every run of every project that has Fencepost installed, so it imports the broker
only when a test uses a fixture, and has no autouse fixture.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path
    from typing import TypeVar

    from fencepost.testing.clients import Clients
    from fencepost.testing.clock import TestClock
    from fencepost.testing.cluster import Cluster
    from fencepost.testing.kafka import Kafka
    from fencepost.testing.replaying import Replay
    from fencepost.testing.under_test import KafkaUnderTest

    K = TypeVar("K", Kafka, Cluster)

MARKER = "kafka"
SHARED = ("kafka_session", "kafka_module")
"""Fixtures whose broker outlives the test."""
OWN = ("kafka", "kafka_cluster")
"""Fixtures with a broker for one test."""

MAX_TEST_NAME = 80
"""The maximum number of characters of a test's name that a unique name contains; Kafka permits 249
characters in a whole name."""

_NOT_IN_A_NAME = re.compile(r"[^a-zA-Z0-9_-]+")
_OF_A_BROKER = ("config", "users", "tls", "acls", "now_ms")
"""Arguments of the marker that concern the broker as a whole."""
_KEYS = ("topics", *_OF_A_BROKER, "brokers")
_TOPIC_KEYS = frozenset({"partitions", "config"})


@dataclass
class _PluginState:
    """The plugin's state during a run."""

    brokers: list[KafkaUnderTest] = field(default_factory=list)
    """Running brokers."""
    tests: int = 0
    test: str = ""
    """The prefix of this test's names."""
    began_ms: dict[int, int] = field(default_factory=dict)
    """When this test began, on the clock of each broker that already ran; by ``id(broker)``."""


_RUN = pytest.StashKey[_PluginState]()
_FAILED = pytest.StashKey[bool]()
_READ = pytest.StashKey[bool]()
"""Whether a fixture has read the markers of a test."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Register the plugin's only setting."""
    parser.addini(
        "kafka_config",
        "settings of every broker that the fixtures start, KEY=VALUE a line, by Kafka's names",
        type="linelist",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.stash[_RUN] = _PluginState()
    config.addinivalue_line(
        "markers",
        "kafka(topics=None, config=None, users=None, tls=False, acls=None, now_ms=None, brokers=3):"
        " topics of the test's broker, {'orders': 3} by their partitions, its settings by Kafka's"
        " names, users and what they may do, {'alice': 'secret'}, ['alice READ topic:orders'], the"
        " time at which its clock begins (see the fixtures kafka, kafka_cluster, kafka_module,"
        " kafka_session); brokers of a kafka_cluster",
    )


# --- the marker ---


@dataclass
class _MarkerArguments:
    """The combined arguments of the markers of test, class and module; the nearest one wins."""

    topics: dict[str, tuple[int | None, Mapping[str, object]]] = field(default_factory=dict)
    config: dict[str, object] = field(default_factory=dict)
    users: dict[str, str] = field(default_factory=dict)
    tls: bool = False
    acls: list[str] | None = None
    now_ms: int | None = None
    brokers: int = 3

    @property
    def of_broker(self) -> dict[str, Any]:
        """Arguments of the broker as a whole, without its settings."""
        return {name: getattr(self, name) for name in _OF_A_BROKER if name != "config"}


def _read_markers(node: pytest.Item | pytest.Collector) -> _MarkerArguments:
    """Read the markers, or fail the test with their error."""
    arguments = _MarkerArguments()
    node.stash[_READ] = True
    for marker in reversed(list(node.iter_markers(MARKER))):
        try:
            _read(marker, arguments)
        except (TypeError, ValueError) as error:
            raise _failure(f"@pytest.mark.kafka: {error}") from None
    return arguments


def _failure(message: str) -> BaseException:
    """Return an exception that fails a test with a message only."""
    return pytest.fail.Exception(message, pytrace=False)


def _read(marker: pytest.Mark, into: _MarkerArguments) -> None:
    from fencepost.testing.arguments import names  # noqa: PLC0415 - see above

    if marker.args:
        raise TypeError(f"topics= and config= are given by name, not {marker.args[0]!r}")
    names("the marker", marker.kwargs, _KEYS)
    users, acls = marker.kwargs.get("users") or {}, marker.kwargs.get("acls")
    if not isinstance(users, Mapping):
        raise TypeError(f"users are passwords by name, not {type(users).__name__}")
    into.users.update(users)
    into.brokers = marker.kwargs.get("brokers", into.brokers)
    if type(into.brokers) is not int or into.brokers < 1:
        raise ValueError(f"brokers is their number, 1 or more: {into.brokers!r}")
    into.tls = marker.kwargs.get("tls", into.tls)
    if not isinstance(into.tls, bool):
        raise TypeError(f"tls is True or False, not {into.tls!r}")
    into.now_ms = marker.kwargs.get("now_ms", into.now_ms)
    if into.now_ms is not None and type(into.now_ms) is not int:
        raise TypeError(f"now_ms is a number of milliseconds, not {into.now_ms!r}")
    if acls is not None:
        if not isinstance(acls, (list, tuple)):
            raise TypeError(f"acls are a list of rules, not {acls!r}")
        into.acls = [*(into.acls or ()), *acls]
    topics, config = marker.kwargs.get("topics") or {}, marker.kwargs.get("config") or {}
    if not isinstance(config, Mapping):
        raise TypeError(f"config is a mapping of settings, not {config!r}")
    into.config.update(config)
    if isinstance(topics, (list, tuple, set, frozenset)):
        topics = dict.fromkeys(topics)
    if not isinstance(topics, Mapping):
        raise TypeError(f"topics are a mapping like {{'orders': 3}} or names, not {topics!r}")
    for name, what in topics.items():
        if not isinstance(name, str):
            raise TypeError(f"a topic's name is a str, not {name!r}")
        into.topics[name] = _topic(name, what)


def _topic(name: str, what: object) -> tuple[int | None, Mapping[str, object]]:
    """Return partitions (None for the broker's default) and settings."""
    if not isinstance(what, Mapping):
        what = {"partitions": what}
    from fencepost.coordinator.config.key import nearest  # noqa: PLC0415 - see above

    unknown = sorted(what.keys() - _TOPIC_KEYS, key=str)
    if unknown:
        hint = nearest(str(unknown[0]), _TOPIC_KEYS)
        raise ValueError(f"topic {name!r} has partitions and config, not {unknown[0]!r}{hint}")
    partitions, config = what.get("partitions"), what.get("config") or {}
    if partitions is not None and (type(partitions) is not int or partitions < 1):
        raise ValueError(f"topic {name!r} has a number of partitions, 1 or more: {partitions!r}")
    if not isinstance(config, Mapping):
        raise TypeError(f"config of topic {name!r} is a mapping, not {config!r}")
    return partitions, config


def pytest_itemcollected(item: pytest.Item) -> None:
    """Create the marker's topics on a shared broker before the other fixtures."""
    names: list[str] = getattr(item, "fixturenames", [])
    if any(name in names for name in SHARED) and item.get_closest_marker(MARKER) is not None:
        names.insert(0, "_kafka_marked_topics")


@pytest.fixture
def _kafka_marked_topics(request: pytest.FixtureRequest) -> None:
    arguments = _read_markers(request.node)
    for name in SHARED:
        if name in request.fixturenames:
            _create_topics(request.getfixturevalue(name), arguments)


def _check_fixtures(item: pytest.Item) -> None:
    """Fail a test if its markers have arguments that its fixtures do not support."""
    fixtures: set[str] = set(getattr(item, "fixturenames", []))
    for node, marker in item.iter_markers_with_node(MARKER):
        of_module = isinstance(node, (pytest.Module, pytest.Package, pytest.Session))
        ignored = [key for key in _OF_A_BROKER if key in marker.kwargs]
        if ignored and fixtures.isdisjoint(OWN):
            if "kafka_module" in fixtures and not of_module:
                raise _failure(
                    f"@pytest.mark.kafka: {ignored[0]}= is for a broker of the test's own (fixture"
                    " kafka), or in the pytestmark of a module for that of kafka_module"
                )
            if "kafka_session" in fixtures and "kafka_module" not in fixtures:
                raise _failure(
                    f"@pytest.mark.kafka: {ignored[0]}= is for a broker of the test's own (fixture"
                    " kafka); kafka_session has the settings of kafka_config in the configuration"
                )
        if "brokers" in marker.kwargs and not of_module and "kafka_cluster" not in fixtures:
            raise _failure("@pytest.mark.kafka: brokers= is for the fixture kafka_cluster")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Fail a test whose own marker no fixture has read."""
    result = yield
    own_arguments = [
        node is item and marker.kwargs for node, marker in item.iter_markers_with_node(MARKER)
    ]
    if any(own_arguments) and not item.stash.get(_READ, False):
        fixtures = ", ".join((*OWN, *SHARED))
        raise _failure(f"@pytest.mark.kafka: the test has none of the fixtures {fixtures}")
    return result


def _create_topics(kafka: KafkaUnderTest, arguments: _MarkerArguments) -> None:
    from fencepost.protocol.errors import WireError  # noqa: PLC0415 - see above

    for name, (partitions, config) in arguments.topics.items():
        try:
            kafka.topic(name, partitions, config)
        except (TypeError, ValueError, WireError) as error:
            raise _failure(f"@pytest.mark.kafka: topic {name!r}: {error}") from None


# --- the fixtures ---


def _settings(config: pytest.Config) -> dict[str, object]:
    """Return the project's settings."""
    settings: dict[str, object] = {}
    for line in config.getini("kafka_config"):
        key, equals, value = line.partition("=")
        if not equals:
            raise pytest.UsageError(f"kafka_config: {line!r} is not KEY=VALUE")
        settings[key.strip()] = value.strip()
    return settings


def _serve(
    request: pytest.FixtureRequest,
    paths: pytest.TempPathFactory,
    arguments: _MarkerArguments,
    make: Callable[..., K],
    **options: object,
) -> Iterator[K]:
    """Run a broker for the life of the fixture; keep its directory if the test fails."""
    import shutil  # noqa: PLC0415 - see above

    from fencepost.coordinator.config.key import ConfigError  # noqa: PLC0415
    from fencepost.coordinator.daemon.errors import BrokerError  # noqa: PLC0415

    run = request.config.stash[_RUN]
    directory = paths.mktemp("kafka")
    settings = _settings(request.config) | arguments.config
    try:
        kafka = make(
            data_dir=directory, config=settings, **arguments.of_broker, **options
        ).__enter__()
    except (BrokerError, ConfigError, TypeError, ValueError, ImportError) as error:
        raise _failure(f"the broker's settings: {error}") from None
    run.brokers.append(kafka)
    try:
        yield kafka
    finally:
        run.brokers.remove(kafka)
        kafka.__exit__(None, None, None)
        if not request.node.stash.get(_FAILED, False):
            shutil.rmtree(directory, ignore_errors=True)


def _kafka() -> type[Kafka]:
    from fencepost.testing.kafka import Kafka  # noqa: PLC0415 - see above

    return Kafka


@pytest.fixture
def kafka(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Kafka]:
    """A Kafka broker for this test: ``kafka.bootstrap``, ``kafka.topic("orders")``, and so on.

    ``@pytest.mark.kafka(topics={"orders": 3}, config={"num.partitions": 2})`` prepares it.
    """
    arguments = _read_markers(request.node)
    for broker in _serve(request, tmp_path_factory, arguments, _kafka()):
        _create_topics(broker, arguments)
        yield broker


@pytest.fixture
def kafka_clock(kafka: Kafka) -> TestClock:
    """The clock of the test's own broker; it stands still until ``kafka_clock.advance(…)``."""
    kafka.clock.auto = False
    return kafka.clock


@pytest.fixture
def kafka_replay(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str | Path], Replay]]:
    """Replay an incident on a broker of its own: ``kafka_replay("incident.json")``.

    The path is relative to the test's file. The broker's history is in a failed test's report.
    """
    from contextlib import ExitStack, contextmanager  # noqa: PLC0415 - see above

    from fencepost.client.queries.incident import load  # noqa: PLC0415
    from fencepost.testing.replaying import replay_on  # noqa: PLC0415

    serve = contextmanager(_serve)
    with ExitStack() as brokers:

        def play(path: str | Path) -> Replay:
            __tracebackhide__ = True
            incident = load(request.path.parent / path)
            arguments = _MarkerArguments(config=dict(incident.settings), now_ms=incident.start_ms)
            broker = brokers.enter_context(serve(request, tmp_path_factory, arguments, _kafka()))
            return replay_on(broker, incident)

        yield play


@pytest.fixture
def kafka_cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """Three brokers and a controller for this test; the test may kill, pause and cut off each.

    ``@pytest.mark.kafka(topics={"orders": 3}, config=…, brokers=3)`` prepares them.
    """
    from fencepost.testing.cluster import Cluster  # noqa: PLC0415 - see above

    arguments = _read_markers(request.node)
    for cluster in _serve(request, tmp_path_factory, arguments, Cluster, brokers=arguments.brokers):
        _create_topics(cluster, arguments)
        yield cluster


@pytest.fixture
def _kafka_clients(request: pytest.FixtureRequest) -> Iterator[Clients]:
    """Make clients of the broker that the test uses, and close them after the test."""
    from fencepost.testing.clients import Clients  # noqa: PLC0415 - see above

    used = [fixture for fixture in ("kafka_cluster", *SHARED) if fixture in request.fixturenames]
    clients = Clients(request.getfixturevalue(used[0] if used else "kafka"))
    yield clients
    clients.close()


@pytest.fixture
def confluent_producer(_kafka_clients: Clients) -> Callable[..., Any]:
    """Make producers of confluent-kafka: ``confluent_producer({"linger.ms": 5})``."""
    return _kafka_clients.producer("confluent_kafka.Producer")


@pytest.fixture
def confluent_consumer(_kafka_clients: Clients) -> Callable[..., Any]:
    """Make consumers of confluent-kafka: ``confluent_consumer("orders", group="shop")``."""
    return _kafka_clients.consumer("confluent_kafka.Consumer")


@pytest.fixture
def kafka_python_producer(_kafka_clients: Clients) -> Callable[..., Any]:
    """Make producers of kafka-python: ``kafka_python_producer({"linger_ms": 5})``."""
    return _kafka_clients.producer("kafka.KafkaProducer")


@pytest.fixture
def kafka_python_consumer(_kafka_clients: Clients) -> Callable[..., Any]:
    """Make consumers of kafka-python: ``kafka_python_consumer("orders", group="shop")``."""
    return _kafka_clients.consumer("kafka.KafkaConsumer")


@pytest.fixture
def aiokafka_producer(_kafka_clients: Clients) -> Callable[..., Any]:
    """Make producers of aiokafka, for ``async with``: ``aiokafka_producer({"linger_ms": 5})``."""
    return _kafka_clients.producer("aiokafka.AIOKafkaProducer")


@pytest.fixture
def aiokafka_consumer(_kafka_clients: Clients) -> Callable[..., Any]:
    """Make consumers of aiokafka, for ``async with``: ``aiokafka_consumer("orders")``."""
    return _kafka_clients.consumer("aiokafka.AIOKafkaConsumer")


@pytest.fixture(scope="module")
def kafka_module(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Kafka]:
    """One Kafka broker per module; ``kafka_module.name("orders")`` is a name unique to the test.

    ``pytestmark = pytest.mark.kafka(config=…)`` in the module sets the broker's settings.
    """
    rename = _own_name(request.config)
    yield from _serve(
        request, tmp_path_factory, _read_markers(request.node), _kafka(), rename=rename
    )


@pytest.fixture(scope="session")
def kafka_session(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Kafka]:
    """One Kafka broker per session; ``kafka_session.name("orders")`` is a name unique to the test.

    The broker's settings come from ``kafka_config`` in pytest's ini-file.
    """
    rename = _own_name(request.config)
    yield from _serve(request, tmp_path_factory, _MarkerArguments(), _kafka(), rename=rename)


def _own_name(config: pytest.Config) -> Callable[[str], str]:
    run = config.stash[_RUN]
    return lambda base: f"{run.test}-{base}"


# --- starting and failing tests ---


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Start a test with names of its own, and with clean shared brokers."""
    run = item.config.stash[_RUN]
    run.tests += 1
    name = _NOT_IN_A_NAME.sub("-", item.name).strip("-")[:MAX_TEST_NAME]
    run.test = f"{name}-{run.tests}"
    for broker in run.brokers:  # undo the previous test's changes of shared brokers
        broker.faults.clear()
        broker.clock.auto = True
        broker.serve_again()
    run.began_ms = {id(broker): broker.clock.now_ms() for broker in run.brokers}
    _check_fixtures(item)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
    call: pytest.CallInfo[None],
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add to a failed test's report the events of groups and transactions, with their causes."""
    report = yield
    if not report.failed:
        return report
    node: Any = item
    while node is not None:
        node.stash[_FAILED] = True
        node = node.parent
    run = item.config.stash[_RUN]
    for broker in run.brokers:
        from fencepost.testing.report import report_of  # noqa: PLC0415 - see above

        title = f"Kafka at {broker.bootstrap}"
        text = report_of(broker, run.began_ms.get(id(broker), 0))
        if text and call.when != "teardown":
            report.sections.append((title, text))
    return report

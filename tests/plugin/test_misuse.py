"""Invalid calls of the plugin's API raise an error with a full sentence in the called method."""

from __future__ import annotations

import inspect
import math
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient

from fencepost.client.client import ApiError
from fencepost.coordinator.config.key import ConfigError
from fencepost.testing import Cluster, Kafka
from fencepost.testing.aio import Aio
from fencepost.testing.cluster import CONTROLLER_ID, ClusterAio
from fencepost.testing.kafka import KafkaAio
from fencepost.testing.under_test import KafkaUnderTest

USERS = {"alice": "secret", "bob": "other"}


@pytest.fixture(scope="module")
def own() -> Iterator[Kafka]:
    with Kafka(users=USERS, acls=[]) as kafka:
        kafka.topic("orders")
        kafka.produce("orders", "tea")
        yield kafka


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(2) as found:
        found.topic("orders")
        found.produce("orders", "tea")
        yield found


@pytest.fixture(params=["kafka", "cluster"])
def either(request: pytest.FixtureRequest) -> KafkaUnderTest:
    found: KafkaUnderTest = request.getfixturevalue(
        "own" if request.param == "kafka" else "cluster"
    )
    return found


# --- suggestions of similar names ---

Call = Callable[[Any], object]

OF_BOTH: list[tuple[Call, str]] = [
    (lambda k: k.records("ordrs"), "there is no topic 'ordrs'; did you mean orders?"),
    (
        lambda k: k.records("ordrs", at_least=1, timeout=0),
        "at least 1 records of ordrs .*: there is no topic 'ordrs'; did you mean orders?",
    ),
    (lambda k: k.records("orders", partition=3), "orders has no partition 3, but 1"),
    (
        lambda k: k.records("orders", isolation="read_comitted"),
        "isolation is one of read_committed, .*; did you mean read_committed",
    ),
    (lambda k: k.records("orders", tiemout=1), r"records\(\) has no tiemout=; did you mean timeou"),
    (lambda k: k.records("orders", 1), r"records\(topic, \*, isolation, .* does not fit records\("),
    (lambda k: k.records("orders", timeout=-1), "timeout is 0 or more, and finite, not -1"),
    (
        lambda k: k.wait_for_group("shop", state="Stabel", timeout=0),
        "state is one of .*; did you mean Stable",
    ),
    (lambda k: k.wait_for_group("shop", members=-1), "members is 0 or more, not -1"),
    (lambda k: k.wait_for_group("shop", timeout=1), "there is no group 'shop'"),
    (
        lambda k: k.assert_committed("shop", {"ordrs": {0: 1}}, timeout=0),
        r"(?s)ordrs:0 is None, not 1.*there is no group 'shop'.*'ordrs'; did you mean orders",
    ),
    (lambda k: k.assert_committed("shop", {"orders": {"0": 1}}), "a partition is an int, not '0'"),
    (lambda k: k.topic("more", partitions=0), "partitions is 1 or more, not 0"),
    (
        lambda k: k.topic("more", config={"retension.ms": 1}),
        "retension.ms: unknown topic configuration; did you mean retention.ms",
    ),
    (lambda k: k.produce("orders", {"a": 1}), "a message is bytes, str, None or a tuple"),
    (lambda k: k.produce("or/ders", "tea"), "INVALID_TOPIC_EXCEPTION .*: or/ders"),
    (lambda k: setattr(k.clock, "auto", "no"), "auto is True or False, not 'no'"),
    (lambda k: k.faults.add(api="EndTx", drop=True), "no API 'EndTx'; did you mean EndTxn"),
    (lambda k: k.faults.add(api="Zzzzzz", drop=True), "use Kafka's names, such as EndTxn"),
    (
        lambda k: k.faults.add(error="NOT_COORDINATR"),
        "no error 'NOT_COORDINATR' in Kafka's protocol; did you mean NOT_COORDINATOR",
    ),
    (lambda k: k.faults.add(drop="requests"), "drop is one of .*; did you mean request"),
    (lambda k: k.faults.add(close="befor"), "close is one of .*; did you mean before"),
    (
        lambda k: k.faults.add(api="EndTxn", drop=True, match={"transactionalid": "x"}),
        "EndTxn has no field transactionalid; did you mean transactional_id",
    ),
    (
        lambda k: k.faults.add(drop=True, match={"producer_idd": 1}),
        "no API has field producer_idd; did you mean producer_id",
    ),
    (lambda k: k.faults.add(drop=True, delay_ms=-5), "delay_ms is 0 or more"),
    (lambda k: k.faults.add(dorp=True), r"add\(\) has no dorp=; did you mean drop"),
    (lambda k: k.clock.advance(61), r"advance\(\*, seconds, ms, speed\) does not fit advance\(61"),
    (lambda k: k.clock.advance(seconds=-1), "seconds is 0 or more, and finite, not -1"),
    (lambda k: k.clock.advance(second=1), r"advance\(\) has no second=; did you mean seconds"),
]

OF_ONE: list[tuple[Call, str]] = [
    (
        lambda k: k.client_config("alcie"),
        "'alcie' is not one of the broker's: .*; did you mean alice",
    ),
    (lambda k: k.client_config("alice", "conflent"), "style is one of .*; did you mean confluent"),
    (
        lambda k: k.client_config("alice", mechanism="SCRAM-SHA-215"),
        "mechanism is one of .*; did you mean SCRAM-SHA-2",
    ),
    (lambda k: k.acl("alcie READ topic:orders"), "'alcie' is not one of .*; did you mean alice"),
    (lambda k: k.acl("alice REED topic:orders"), "unknown operation 'REED'; did you mean READ"),
    (
        lambda k: k.acl("alice READ topik:orders"),
        "no resource type 'topik'; .*; did you mean topic",
    ),
]

OF_SEVERAL: list[tuple[Call, str]] = [
    (lambda c: c.kill(7), "there is no broker 7; this cluster has 1, 2"),
    (lambda c: c.stop(CONTROLLER_ID), "there is no broker 100; .*100 is the controller"),
    (lambda c: c.restart("1"), "broker_id is an int, not '1'"),
    (lambda c: c.pause(0), "there is no broker 0"),
    (lambda c: c.resume(-1), "there is no broker -1"),
    (lambda c: c.partition_network(1, 2), r"nodes are a list of their ids, \[1\], not 1"),
    (lambda c: c.partition_network([1], [3]), "there is no broker 3; this cluster has 1, 2"),
    (lambda c: c.partition_network([1], []), "which is empty"),
    (lambda c: c.partition("ordrs"), "there is no topic 'ordrs'; did you mean orders"),
    (lambda c: c.partition("orders", 1), "orders has no partition 1, but 1"),
    (lambda c: c.wait_for(lambda: 0, "a leader", 0), "a leader"),
    (lambda c: c.wait_for(lambda: {}["x"], "x", 0), r"x; the last look raised KeyError\('x'\)"),
    (lambda c: c.topic("more", replicas=5), "INVALID_REPLICATION_FACTOR"),
]

TOLD = (TypeError, ValueError, ApiError, TimeoutError, AssertionError, RuntimeError, ConfigError)


@pytest.mark.parametrize(("call", "sentence"), OF_BOTH)
def test_misspelt_name_is_refused_with_a_suggestion(
    either: KafkaUnderTest, call: Call, sentence: str
) -> None:
    with pytest.raises(TOLD, match=sentence):
        call(either)


@pytest.mark.parametrize(("call", "sentence"), OF_ONE)
def test_invalid_users_are_refused_with_a_sentence(own: Kafka, call: Call, sentence: str) -> None:
    with pytest.raises(TOLD, match=sentence):
        call(own)


@pytest.mark.parametrize(("call", "sentence"), OF_SEVERAL)
def test_invalid_cluster_call_is_refused_with_a_sentence(
    cluster: Cluster, call: Call, sentence: str
) -> None:
    with pytest.raises(TOLD, match=sentence):
        call(cluster)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"config": {"log.retension.ms": 1}}, "log.retension.ms: .*did you mean log.retention.ms"),
        ({"config": ["a"]}, "config is a mapping of settings"),
        ({"config": {"num.partitions": [1]}}, "a setting is a str, a number or a truth value"),
        ({"users": ["alice"]}, "users are passwords by name"),
        ({"users": USERS, "acls": ["alcie READ topic:t"]}, "did you mean alice"),
        ({"tls": "yes"}, "tls is True or False, not 'yes'"),
        ({"usres": USERS}, r"has no usres=; did you mean users"),
        ({"data_dir": 7}, "data_dir is a path, not 7"),
        ({"rename": "orders"}, "rename is a function"),
        ({"now_ms": -1}, "now_ms is 0 or more"),
    ],
)
@pytest.mark.parametrize("make", [Kafka, Cluster])
def test_invalid_start_arguments_are_refused_with_a_sentence(
    make: Callable[..., Any], settings: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(TOLD, match=sentence), make(**settings):
        pass


def test_call_on_a_paused_or_closed_broker_is_refused() -> None:
    with Kafka() as kafka:
        kafka.pause()
        with pytest.raises(RuntimeError, match=r"the broker is paused; kafka.resume\(\)"):
            kafka.records("orders")
        kafka.clock.advance(seconds=60)  # does not wait for a paused broker
        kafka.resume()
        kafka.produce("orders", "tea")
    with pytest.raises(RuntimeError, match=r"the broker is down; kafka.restart\(\)"):
        kafka.produce("orders", "tea")
    with Cluster(1) as cluster:
        cluster.topic("orders")
        cluster.kill(1)
        with pytest.raises(RuntimeError, match=r"broker 1 is down; restart\(1\) starts it"):
            cluster.pause(1)
        with pytest.raises(RuntimeError, match=r"no broker of the cluster runs; cluster.restart"):
            cluster.records("orders")
    for call in (
        lambda: cluster.records("orders"),
        lambda: cluster.kill(1),
        lambda: cluster.leader("orders"),
        lambda: cluster.wait_for(lambda: True, "it"),
        cluster.start,
    ):
        with pytest.raises(RuntimeError, match="the cluster is closed"):
            call()
    cluster.close()


# --- every argument of every method ---

HOSTILE: tuple[object, ...] = (
    None,
    True,
    -1,
    7,
    10**30,
    1.5,
    math.nan,
    math.inf,
    "",
    "nope",
    "x" * 40_000,
    "\ud800",
    "\x1b[31m",
    b"x",
    [],
    {},
    ("a",),
    {"a": 1},
    {"a": {0: None}},
    {1: 2},
    object(),
)

MEANT: Mapping[str, dict[str, object]] = {
    "name": {"base": "orders"},
    "client_config": {"user": None, "style": "confluent", "mechanism": "PLAIN"},
    "client": {"kind": AdminClient, "user": None},
    "topic": {"name": "made", "partitions": 1, "config": {}},
    "produce": {
        "topic": "orders",
        "key": None,
        "headers": (),
        "partition": None,
        "timestamp_ms": None,
    },
    "records": {
        "topic": "orders",
        "isolation": "read_committed",
        "partition": None,
        "at_least": 0,
        "timeout": 0,
    },
    "wait_for_group": {
        "group": "shop",
        "members": None,
        "state": None,
        "lag": None,
        "timeout": 0,
    },
    "wait_for_fetch": {"group": "shop", "members": None, "timeout": 0},
    "committed": {"group": "shop"},
    "assert_committed": {"group": "shop", "offsets": {"orders": {0: None}}, "timeout": 0},
    "shares": {"group": "shop"},
    "wait_for_shares": {
        "group": "shop",
        "record": None,
        "until": None,
        "delivery_count": None,
        "timeout": 0,
    },
    "feature": {"name": "share.version", "level": 2},
    "history": {"subject": "shop"},
    "partition": {"topic": "orders", "index": 0},
    "leader": {"topic": "orders", "index": 0, "timeout": 0},
    "wait_for_isr": {"topic": "orders", "index": 0, "size": None, "timeout": 0},
    "wait_for": {"look": lambda: True, "what": "it", "timeout": 0},
    "add": {
        "api": None,
        "error": None,
        "drop": True,
        "close": None,
        "delay_ms": 0,
        "times": 1,
        "match": None,
        "only": None,
    },
    "observe": {"api": None, "match": None},
    "wait": {"timeout": 0, "hits": 0},
    "advance": {"seconds": 0, "ms": 0, "speed": None},
    "partition_network": {"nodes": [1], "others": [2], "one_way": False},
    **{name: {"broker_id": 1} for name in ("kill", "stop", "restart", "pause", "resume")},
}
"""A valid call of each method. The test replaces one argument at a time."""

ELSEWHERE = frozenset({"acl", "advance_async", "attach", "call", "detach", "remove", "run"}) | {
    "takes",
    "wait_async",
}
"""Methods that take rules, which other tests cover, and methods for the broker's own event loop."""


def _subjects(found: KafkaUnderTest) -> list[object]:
    return [found, found.faults, found.faults.observe(), found.clock]


def _methods(subject: object) -> Iterator[tuple[str, Any]]:
    for name, method in inspect.getmembers(type(subject), inspect.isfunction):
        if not name.startswith("_") and len(inspect.signature(method).parameters) > 1:
            yield name, getattr(subject, name)


def test_each_argument_of_each_method_is_checked(either: KafkaUnderTest) -> None:
    unmeant, complaints, asked = [], [], 0
    for subject in _subjects(either):
        for name, method in _methods(subject):
            if name in ELSEWHERE:
                continue
            meant = MEANT.get(name)
            if meant is None:
                unmeant.append(f"{type(subject).__name__}.{name}")
                continue
            for parameter in meant:
                for value in HOSTILE:
                    asked += 1
                    complaint = _call(method, {**meant, parameter: value}, parameter)
                    either.faults.clear()
                    if isinstance(either, Cluster):
                        either.heal()
                    if complaint:
                        complaints.append(f"{name}({parameter}={value!r:.40}): {complaint}")
    assert not unmeant, f"without a call that is meant: {unmeant}"
    assert not complaints, "\n".join(complaints)
    assert asked > 500


def _call(method: Any, arguments: dict[str, object], parameter: str) -> str:
    """Return the problem with a call's outcome, or "" if it worked or raised a proper error."""
    value = arguments[parameter]
    if parameter == "timeout" and type(value) in {int, float} and 0 < value < math.inf:  # type: ignore[operator]
        return ""  # a valid but long wait
    try:
        method(**arguments)
    except TOLD as error:
        told = str(error)
        last = traceback.extract_tb(error.__traceback__)[-1]
        if not (last.line or "").lstrip().startswith("raise"):
            return f"{type(error).__name__} from inside, {last.filename}:{last.lineno}: {told}"
        return "" if len(told.split()) > 2 else f"no sentence: {told}"
    except Exception as error:  # noqa: BLE001 - any other exception is a problem
        return f"{type(error).__name__}: {error}"
    return ""


def test_aio_has_every_blocking_method() -> None:
    own = {name for name in vars(KafkaUnderTest) if not name.startswith("_")}
    blocking = own - {"name", "client_config", "ca_file", "bootstrap", "is_running", "aio"}
    blocking -= {"data_dir", "look_s", "patience_s", "clock", "faults", "serve_again", "trouble"}
    blocking -= {"client"}
    for cls in (KafkaAio, ClusterAio):
        assert issubclass(cls, Aio)
        assert not [name for name in blocking if not hasattr(cls, name)]

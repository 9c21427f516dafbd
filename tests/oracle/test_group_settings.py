"""Group requests to brokers with certain static settings: the responses must equal Kafka's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fencepost.coordinator.config.cross_checks import KINDS
from fencepost.coordinator.config.group_keys import GROUP_OWN_KEYS
from fencepost.coordinator.config.key import ConfigType
from tests.oracle.test_traces import run, unexpected
from tests.oracle.tracer import Tracer
from tests.oracle.traces_admin import GROUP
from tests.oracle.traces_consumer import beat, describe, enter, fetch, of, topic
from tests.oracle.traces_groups import ready
from tests.oracle.traces_migration import alive, join, leave, logged, stable, sync
from tests.oracle.traces_offsets import commit
from tests.support import requests
from tests.support.daemon import Daemon
from tests.support.kafka import Kafka, jars, required
from tests.support.raw import RawClient
from tests.support.targets import SETTINGS
from tests.support.waits import until

pytestmark = pytest.mark.oracle

MEMBERS = 2
SMALL = {
    "group.max.size": str(MEMBERS),
    "group.consumer.max.size": str(MEMBERS),
}
QUICK = {"offsets.retention.check.interval.ms": "200"}


def full_groups(t: Tracer) -> None:
    """Exceed the maximum group size with new and static members, within and between protocols."""
    ready(t, "fc", "fk", "fm")
    topic(t, "f-a", 4)
    first = stable(t, "fc", "f-a", 0, 1, group_instance_id="i")
    pending = t(
        "join_group",
        5,
        group_id="fc",
        member_id="",
        session_timeout=10_000,
        rebalance_timeout=10_000,
        protocol_type="consumer",
        protocols=[{"name": "range", "metadata": b"\0\0\0\0\0\0\xff\xff\xff\xff"}],
    )
    leave(t, "fc", pending["member_id"])
    join(t, "fc", "", "f-a", group_instance_id="i")
    alive(t, "fc", first, group_instance_id="i")

    member = enter(t, "fk", "a", "f-a", instance_id="i")
    enter(t, "fk", "b", "f-a")
    for version in (0, 1):
        enter(t, "fk", "c", "f-a", version=version)
    enter(t, "fk", "d", "f-a", instance_id="j")
    for version in (0, 3, 5, 9):
        join(t, "fk", "", "f-a", version=version)
    join(t, "fk", "", "f-a", version=5, group_instance_id="k")
    beat(t, "fk", "a", member["member_epoch"], instance_id="i")
    beat(t, "fk", "b", -1)
    enter(t, "fk", "c", "f-a")
    # The group is full again; a static member that rejoins does not exceed its size (KAFKA-20601).
    join(t, "fk", "", "f-a", version=5, group_instance_id="k")
    join(t, "fk", "", "f-a", version=5, group_instance_id="i")
    describe(t, "fk")
    describe(t, "fk")

    classic = stable(t, "fm", "f-a", 0, 1)
    enter(t, "fm", "m", "f-a")
    enter(t, "fm", "n", "f-a")
    alive(t, "fm", classic)
    describe(t, "fm")


def preferred_assignors(t: Tracer) -> None:
    """Change the assignor that most members prefer; the group epoch is bumped (KAFKA-20434)."""
    ready(t, "ap")
    topic(t, "a-p", 4)
    names = ("one", "two", "three")
    for name in names:
        enter(t, "ap", name, "a-p", instance_id=name, server_assignor="uniform")
    describe(t, "ap")
    for name in names:
        beat(t, "ap", name, -2, instance_id=name)
        enter(t, "ap", f"{name}-again", "a-p", instance_id=name, server_assignor="range")
        describe(t, "ap")
    # A member that changes its instance id gives the former instance id up (KAFKA-20747).
    enter(t, "ap", "three-again", "a-p", instance_id="four", server_assignor="range")
    beat(t, "ap", "three-again", -1, instance_id="four")
    enter(t, "ap", "five", "a-p", instance_id="three")
    describe(t, "ap")


def expiry(t: Tracer) -> None:
    """Expire offsets that have a retention time, in simple, empty and active groups."""
    for name in ("x-mine", "x-other"):
        topic(t, name, 1)
    ready(t, "x-simple", "x-classic", "x-consumer", "x-empty")
    offsets = ("x-mine", 0, 1, ""), ("x-other", 0, 2, "")
    soon: dict[str, Any] = {"retention_time": 300}

    def left(group: str) -> dict[str, int]:
        found = t.quietly("offset_fetch", 5, group_id=group, topics=None)
        return {
            row["name"]: part["committed_offset"]
            for row in found["topics"]
            for part in row["partitions"]
        }

    def gone(group: str, *kept: str) -> None:
        until(lambda: set(left(group)) == set(kept), f"{group} keeps {kept}", deadline_s=60)
        t("offset_fetch", 5, group_id=group, topics=None)
        t("describe_groups", 6, groups=[group])

    commit(t, "x-simple", 2, *offsets, **soon)
    commit(t, "x-simple", 9, ("x-mine", 0, 1, ""))
    gone("x-simple", "x-mine")
    # An old version needs only one JoinGroup. Between two JoinGroups, the empty group might expire.
    joined = stable(t, "x-empty", "x-mine", 0, version=3)
    who = {"generation_id_or_member_epoch": joined["generation_id"]}
    commit(t, "x-empty", 4, *offsets, **soon, **who, member_id=joined["member_id"])
    leave(t, "x-empty", joined["member_id"])
    gone("x-empty")
    joined = stable(t, "x-classic", "x-mine", 0, version=3, session_timeout=60_000)
    who = {"generation_id_or_member_epoch": joined["generation_id"]}
    commit(t, "x-classic", 4, *offsets, **soon, **who, member_id=joined["member_id"])
    gone("x-classic", "x-mine")
    alive(t, "x-classic", joined)
    # The retention time is long enough for a member to join before the group expires.
    commit(t, "x-consumer", 4, *offsets, retention_time=3_000)
    enter(t, "x-consumer", "m", "x-mine")
    gone("x-consumer", "x-mine")


def changes_of_kind(t: Tracer) -> None:
    """Convert a group in every way, with and without members, including static ones."""
    ready(t, "pe", "pu", "pd", "ps")
    topic_id = topic(t, "p-a", 2)
    joined = stable(t, "pe", "p-a", 0, 1)
    leave(t, "pe", joined["member_id"])
    enter(t, "pe", "m", "p-a")
    beat(t, "pe", "m", -1)
    again = stable(t, "pe", "p-a", 0, 1)
    leave(t, "pe", again["member_id"])

    classic = stable(t, "pu", "p-a", 0, 1)
    enter(t, "pu", "m", "p-a")
    describe(t, "pu")
    t("describe_groups", 6, groups=["pu"])
    alive(t, "pu", classic)
    logged(t, "pu")

    first = enter(t, "pd", "m", "p-a")
    below = join(t, "pd", "", "p-a")
    sync(t, "pd", below)
    told = beat(t, "pd", "m", first["member_epoch"])
    beat(t, "pd", "m", told["member_epoch"], topic_partitions=of(topic_id, 0))
    fetch(t, "pd", "m", told["member_epoch"])
    beat(t, "pd", "m", -1)
    describe(t, "pd")
    t("describe_groups", 6, groups=["pd"])
    alive(t, "pd", below)

    up = enter(t, "ps", "m", "p-a", instance_id="i")
    down = join(t, "ps", "", "p-a", group_instance_id="i")
    beat(t, "ps", "m", up["member_epoch"], instance_id="i")
    describe(t, "ps")
    alive(t, "ps", down, group_instance_id="i")
    logged(t, "ps")


OWN = {
    "consumer.session.timeout.ms": "60000",
    "consumer.heartbeat.interval.ms": "5000",
    "consumer.assignment.interval.ms": "0",
}
TIGHT = {
    "group.consumer.max.session.timeout.ms": "50000",
    "group.consumer.min.heartbeat.interval.ms": "7000",
    "group.consumer.heartbeat.interval.ms": "7000",
}


def alter(t: Tracer, group: str, settings: dict[str, str]) -> None:
    changes = [requests.config_op(*pair) for pair in settings.items()]
    row = requests.altered_resource(GROUP, group, *changes)
    t("incremental_alter_configs", 1, **requests.incremental_alter_configs(row))


def own_settings(t: Tracer, group: str) -> None:
    row = requests.described_resource(GROUP, group, *OWN)
    t("describe_configs", 4, **requests.describe_configs(row, include_synonyms=False))


def settings_within_bounds(t: Tracer) -> None:
    """Give a group settings that are within the broker's bounds."""
    ready(t, "sb")
    topic(t, "s-b", 1)
    alter(t, "sb", OWN)
    own_settings(t, "sb")
    enter(t, "sb", "m", "s-b")


def settings_beyond_bounds(t: Tracer) -> None:
    """Use and change settings that are outside of the bounds with which the broker restarts."""
    ready(t, "sb")
    own_settings(t, "sb")
    enter(t, "sb", "n", "s-b")
    alter(t, "sb", {"consumer.assignment.interval.ms": "1"})
    alter(t, "sb", {"consumer.session.timeout.ms": "50001"})
    alter(t, "sb", {"consumer.session.timeout.ms": "50000"})
    alter(t, "sb", {"consumer.heartbeat.interval.ms": "7001"})
    own_settings(t, "sb")
    enter(t, "sb", "n", "s-b")


SHORT_SESSIONS = {f"group.{kind}.min.session.timeout.ms": "1000" for kind in KINDS}
REFUSABLE: dict[ConfigType, tuple[str, ...]] = {
    ConfigType.BOOLEAN: ("x", ""),
    ConfigType.STRING: ("x", "", "__x", "by_duration:P", "by_duration:-P1D"),
    ConfigType.INT: ("x", "", "-1", "0", "1", "2147483647", "2147483648", "1.5"),
    ConfigType.LONG: ("x", "", "-1", "9223372036854775808"),
    ConfigType.LIST: ("x",),
}
"""Values to try for each type of key; some keys refuse some of the values."""


def refusals(bootstrap: str) -> dict[str, tuple[str, str | None]]:
    """Return error and message for each refused setting, or pair of settings, of a group."""
    tried = [{name: text} for name, key in GROUP_OWN_KEYS.items() for text in REFUSABLE[key.type]]
    tried += [
        {f"{kind}.session.timeout.ms": "6000", f"{kind}.heartbeat.interval.ms": text}
        for kind in KINDS
        for text in ("6000", "7000")
    ]
    tried += [{"share.no.such.key": "1"}, {"share.session.timeout.ms": "50000", "x": "1"}]
    found = {}
    with RawClient(bootstrap) as client:
        for settings in tried:
            changes = [requests.config_op(*pair) for pair in settings.items()]
            row = requests.altered_resource(GROUP, "refused", *changes)
            body = requests.incremental_alter_configs(row, validate_only=True)
            (answer,) = client.call("incremental_alter_configs", 1, **body)["responses"]
            found[str(settings)] = answer["error_code"], answer["error_message"]
    return found


Brokers = tuple[Kafka, Daemon]


def started(tmp_path_factory: pytest.TempPathFactory, own: dict[str, str]) -> Iterator[Brokers]:
    settings = {**SETTINGS, **own}
    kafka = Kafka(tmp_path_factory.mktemp("kafka"), settings)
    with required():
        kafka.start()
    daemon = Daemon(tmp_path_factory.mktemp("fencepost"), settings).start()
    yield kafka, daemon
    daemon.stop()
    kafka.stop()


@pytest.fixture(params=["disabled", "upgrade", "downgrade"])
def one_way(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Brokers]:
    yield from started(tmp_path_factory, {"group.consumer.migration.policy": request.param})


@pytest.fixture
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Brokers]:
    yield from started(tmp_path_factory, SMALL)


@pytest.fixture
def forgetful(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Brokers]:
    yield from started(tmp_path_factory, QUICK)


@pytest.fixture
def short_sessions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Brokers]:
    yield from started(tmp_path_factory, SHORT_SESSIONS)


def judge(trace: Callable[[Tracer], None], brokers: Brokers) -> None:
    kafka, daemon = brokers
    theirs, ours = run(trace, kafka.bootstrap), run(trace, daemon.bootstrap)
    found = unexpected(trace.__name__, ours, theirs)
    assert not found, f"{len(found)} differences:\n" + "\n".join(found)


def test_group_protocol_changes_under_each_policy_as_in_kafka(one_way: Brokers) -> None:
    judge(changes_of_kind, one_way)


def test_full_groups_refuse_members_as_kafka_does(small: Brokers) -> None:
    judge(full_groups, small)


def test_preferred_assignor_is_chosen_as_in_kafka(forgetful: Brokers) -> None:
    judge(preferred_assignors, forgetful)


def test_group_settings_beyond_later_bounds_behave_as_in_kafka(forgetful: Brokers) -> None:
    judge(settings_within_bounds, forgetful)
    kafka, daemon = forgetful
    kafka.add_settings(TIGHT)
    kafka.upgrade(jars)
    daemon.stop()
    daemon.settings.update(TIGHT)
    daemon.start()
    judge(settings_beyond_bounds, forgetful)


def test_refused_settings_have_kafkas_messages(short_sessions: Brokers) -> None:
    kafka, daemon = short_sessions
    theirs, ours = refusals(kafka.bootstrap), refusals(daemon.bootstrap)
    assert ours == theirs
    assert sum(error == "invalid_config" for error, _ in ours.values()) > 100


def test_offsets_expire_as_in_kafka(forgetful: Brokers) -> None:
    judge(expiry, forgetful)

"""``fencepost acls`` on a broker with an authorizer: Fencepost, or Apache Kafka."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fencepost.coordinator.daemon.broker import Broker
from fencepost.coordinator.security.authorizer import STANDARD
from tests.support.cluster import unique
from tests.support.targets import SETTINGS
from tests.support.waits import until
from tests.wire.command_line import cli

GUARDED = {
    **SETTINGS,
    "authorizer.class.name": STANDARD,
    "super.users": "User:ANONYMOUS; User:root",
}
FOR_A = ["add", "--allow-principal", "User:a"]
SHOWN = "nothing was changed; --execute makes the change"


@contextmanager
def _kafka(directory: Path) -> Iterator[str]:
    from tests.support.kafka import Kafka, required

    broker = Kafka(directory, GUARDED)
    with required():
        broker.start()
    try:
        yield broker.bootstrap
    finally:
        broker.stop()


@contextmanager
def _fencepost(directory: Path) -> Iterator[str]:
    with Broker.in_thread(directory, config=GUARDED) as broker:
        yield broker.bootstrap


@pytest.fixture(scope="module")
def on_kafka(request) -> bool:
    return request.config.getoption("--target") != "fencepost"


@pytest.fixture(scope="module")
def guarded(on_kafka, tmp_path_factory) -> Iterator[str]:
    start = _kafka if on_kafka else _fencepost
    with start(tmp_path_factory.mktemp("guarded")) as bootstrap:
        yield bootstrap


@pytest.fixture
def clean(guarded) -> Iterator[str]:
    """Yield the broker without rules, and delete all rules afterwards."""
    yield guarded
    cli(guarded, "acls", "remove", "--operation", "all", "--execute")
    everything = ("acls", "remove", "--principal")
    for principal in {row["principal"] for row in rows(guarded, "list")}:
        cli(guarded, *everything, str(principal), "--execute")


def rows(bootstrap: str, *arguments: str, status: int = 0) -> list[dict[str, object]]:
    done = cli(bootstrap, "acls", *arguments, "--format", "json", status=status)
    found: list[dict[str, object]] = json.loads(done.stdout)
    return found


def short(found: list[dict[str, object]]) -> list[str]:
    keys = ("permission", "operation", "principal", "host", "resource", "pattern", "name")
    return sorted(" ".join(str(row[key]) for key in keys) for row in found)


def listed(bootstrap: str, expected: list[str], *options: str) -> None:
    """Wait until exactly these rules are listed; Apache Kafka's broker applies changes later."""
    until(lambda: short(rows(bootstrap, "list", *options)) == sorted(expected), f"{expected}")


def test_rules_are_added_listed_and_removed(clean):
    name = unique("t")
    allow = ("add", "--allow-principal", "User:alice", "--topic", name)
    added = rows(clean, *allow, "--operation", "Read", "--operation", "describe_configs")
    read = f"ALLOW READ User:alice * topic literal {name}"
    configs = f"ALLOW DESCRIBE_CONFIGS User:alice * topic literal {name}"
    assert short(added) == sorted([read, configs])
    assert {row["result"] for row in added} == {"added"}
    listed(clean, [read, configs], "--topic", name)
    again = rows(clean, *allow, "--operation", "DescribeConfigs", "--operation", "Write")
    assert {row["operation"]: row["result"] for row in again} == {
        "DESCRIBE_CONFIGS": "was there", "WRITE": "added",
    }  # fmt: skip
    write = f"ALLOW WRITE User:alice * topic literal {name}"
    listed(clean, [read, configs, write])

    what = ("remove", "--topic", name, "--operation", "Read")
    shown = cli(clean, "acls", *what)
    assert "READ" in shown.stdout
    assert SHOWN in shown.stderr
    listed(clean, [read, configs, write])
    done = cli(clean, "acls", *what, "--execute")
    assert "removed 1 rule" in done.stderr
    listed(clean, [configs, write])
    assert "removed 2 rules" in cli(clean, "acls", "remove", "--topic", name, "--execute").stderr
    listed(clean, [])


def test_acl_rules_for_hosts_and_denials_are_listed_and_removed(clean):
    rows(
        clean, "add", "--allow-principal", "User:*", "--deny-principal", "User:eve",
        "--deny-host", "10.0.0.1", "--deny-host", "10.0.0.2", "--group", "app",
        "--resource-pattern-type", "prefixed", "--cluster", "--operation", "all",
    )  # fmt: skip
    where = "group prefixed app", "cluster literal kafka-cluster"
    expected = [f"ALLOW ALL User:* * {resource}" for resource in where]
    expected += [f"DENY ALL User:eve 10.0.0.{n} {resource}" for n in (1, 2) for resource in where]
    listed(clean, expected)
    listed(clean, [rule for rule in expected if "eve" in rule], "--principal", "User:eve")
    cli(clean, "acls", "remove", "--deny-host", "10.0.0.1", "--execute")
    listed(clean, [rule for rule in expected if "10.0.0.1" not in rule])
    cli(clean, "acls", "remove", "--principal", "User:eve", "--execute")
    listed(clean, expected[:2])
    cli(clean, "acls", "remove", "--cluster", "--execute")
    listed(clean, expected[:1])


def test_acls_match_lists_the_rules_that_affect_a_resource(clean):
    name = unique("orders")
    for pattern, named in [
        ("literal", name),
        ("literal", "*"),
        ("prefixed", "ord"),
        ("literal", "x"),
    ]:
        rows(
            clean, "add", "--allow-principal", "User:a", "--operation", "read", "--topic", named,
            "--resource-pattern-type", pattern,
        )  # fmt: skip
    rule = "ALLOW READ User:a * topic "
    mine, all_names, prefix = f"{rule}literal {name}", f"{rule}literal *", f"{rule}prefixed ord"
    listed(clean, [mine, all_names, prefix], "--topic", name)
    listed(clean, [mine], "--topic", name, "--resource-pattern-type", "literal")
    listed(clean, [mine], "--topic", name, "--resource-pattern-type", "any")
    listed(clean, [prefix], "--topic", "ord", "--resource-pattern-type", "prefixed")
    everything = ("remove", "--topic", name, "--resource-pattern-type", "match")
    assert short(rows(clean, *everything)) == sorted([mine, all_names, prefix])
    assert short(rows(clean, "remove", "--topic", name)) == [mine]


def test_producer_and_consumer_options_add_all_required_acls(clean):
    who = ("--allow-principal", "User:app", "--topic", "t", "--producer", "--idempotent")
    rows(clean, "add", *who, "--transactional-id", "x", "--consumer", "--group", "g")
    topic = [
        f"ALLOW {operation} User:app * topic literal t"
        for operation in ("READ", "WRITE", "CREATE", "DESCRIBE")
    ]
    others = [
        "ALLOW WRITE User:app * transactional-id literal x",
        "ALLOW DESCRIBE User:app * transactional-id literal x",
        "ALLOW READ User:app * group literal g",
        "ALLOW IDEMPOTENT_WRITE User:app * cluster literal kafka-cluster",
    ]
    listed(clean, [*topic, *others])
    cli(clean, "acls", "remove", "--producer", "--topic", "t", "--execute")
    listed(clean, [topic[0], *others])


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["add", "--topic", "t"], "name a principal"),
        (["add", "--allow-principal", "alice", "--topic", "t"], "is not a principal of the form"),
        (["add", "--deny-principal", "User:a", "--allow-host", "h", "--topic", "t"], "goes with"),
        (FOR_A, "name a resource"),
        ([*FOR_A, "--topic", "t", "--operation", "x"], "the operations are"),
        ([*FOR_A, "--group", "t", "--operation", "write"], "WRITE is not an operation"),
        ([*FOR_A, "--producer"], "--producer requires --topic"),
        ([*FOR_A, "--consumer", "--topic", "t"], "requires --topic and --group"),
        ([*FOR_A, "--idempotent", "--cluster"], "--producer"),
        ([*FOR_A, "--producer", "--topic", "t", "--operation", "all"], "determine the operations"),
        ([*FOR_A, "--topic", "t", "--resource-pattern-type", "any"], "is not one of"),
        (["remove"], "name a resource, a principal"),
        (["why", "alice", "read", "orders"], "is not topic:NAME"),
        (["why", "alice", "read", "topic:"], "is not topic:NAME"),
        (["why", "alice", "read", "cluster:x"], "is not topic:NAME"),
        (["why", "alice", "any", "topic:t"], "unknown operation any"),
    ],
)
def test_acls_usage_error_has_status_2_and_names_the_reason(guarded, words, why):
    assert why in cli(guarded, "acls", *words, status=2).stderr


def decides(bootstrap: str, *words: str) -> tuple[object, object]:
    told = cli(bootstrap, "acls", "why", *words, "--format", "json", status=None)
    (row,) = json.loads(told.stdout)
    assert told.exit_code == (0 if row["decision"] == "allowed" else 1)
    return row["decision"], row["rule"] or row["because"]


def test_acls_why_names_the_deciding_rule(clean, on_kafka):
    name = unique("orders")
    add = ("add", "--topic")
    rows(clean, *add, name, "--allow-principal", "User:alice", "--operation", "read")
    rows(
        clean, *add, "ord", "--resource-pattern-type", "prefixed", "--deny-principal", "User:*",
        "--deny-host", "0:0:0:0:0:0:0:1", "--operation", "read",
    )  # fmt: skip
    until(lambda: len(rows(clean, "list")) == 2, "both rules")
    rule = f"ALLOW READ for User:alice from * on Topic:LITERAL:{name}"
    deny = "DENY READ for User:* from 0:0:0:0:0:0:0:1 on Topic:PREFIXED:ord"
    assert decides(clean, "alice", "Read", f"topic:{name}") == ("allowed", rule)
    assert decides(clean, "User:alice", "describe", f"topic:{name}") == ("allowed", rule)
    assert decides(clean, "alice", "read", f"topic:{name}", "--host", "::1") == ("denied", deny)
    assert decides(clean, "alice", "write", f"topic:{name}") == ("denied", "no rule allows it")
    assert decides(clean, "bob", "read", f"topic:{name}") == ("denied", "no rule allows it")
    assert decides(clean, "bob", "alter", "cluster") == ("denied", "no rule applies to it")
    if on_kafka:
        # Apache Kafka hides the values of keys that it does not define, such as super.users.
        asked = cli(clean, "acls", "why", "root", "alter", "cluster", status=1)
        assert "the broker does not return super.users" in asked.stderr
    else:
        assert decides(clean, "root", "alter", "cluster") == ("allowed", "super user")
        assert decides(clean, "Role:root", "alter", "cluster")[0] == "denied"


def test_acls_without_an_authorizer_fail_with_security_disabled(bootstrap):
    refused = cli(bootstrap, "acls", "list", status=1)
    assert "SECURITY_DISABLED" in refused.stderr
    assert "No Authorizer is configured" in refused.stderr
    add = ("acls", "add", "--allow-principal", "User:a", "--cluster")
    assert "SECURITY_DISABLED" in cli(bootstrap, *add, status=1).stderr

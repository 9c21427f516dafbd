"""Audit lines about denied requests and, at level DEBUG, about allowed requests."""

from __future__ import annotations

import json
import shlex

import pytest
import structlog

from fencepost.cluster.acl import Operation, ResourceType
from fencepost.coordinator.config import logs
from fencepost.coordinator.security.audit import (
    LINES_AT_ONCE,
    LINES_PER_S,
    MAX_PRINCIPALS,
    MAX_TEXT_CHARACTERS,
    Audit,
)
from fencepost.coordinator.security.authorizer import Authorizer
from fencepost.coordinator.security.rules import RuleTable
from tests.unit.coordinator.security.slow_authorizer import rule, session

RULES = [
    "ALLOW READ User:bob * TOPIC PREFIXED green",
    "DENY READ User:bob * TOPIC PREFIXED alp",
]


@pytest.fixture(autouse=True)
def restored():
    logs.set_level("INFO")
    yield
    logs.set_level("INFO")
    structlog.reset_defaults()


class Clock:
    def __init__(self) -> None:
        self.now_s = 50.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def authorizer(clock) -> Authorizer:
    made = Authorizer(audit=Audit(clock))
    made.rules = RuleTable.of(map(rule, RULES))
    return made


def lines(capsys) -> list[dict]:
    found = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    for line in found:
        assert line.pop("timestamp")
    return found


def ask(of: Authorizer, name: str, user: str = "bob", *, terminal=False, **fields) -> bool:
    logs.configure(terminal=terminal)
    fields = {"request": "Fetch", **fields}
    return of.allows(session(user), Operation.READ, ResourceType.TOPIC, name, **fields)


@pytest.mark.parametrize("audited", [True, False])
def test_denied_request_is_logged_if_audited(authorizer, capsys, audited):
    assert not ask(authorizer, "alpha", audited=audited)
    assert lines(capsys) == [
        {
            "level": "info", "event": "access denied", "principal": "User:bob",
            "operation": "READ", "host": "127.0.0.1", "resource": "Topic:LITERAL:alpha",
            "request": "Fetch", "resources": 1,
            "rule": "DENY READ for User:bob from * on Topic:PREFIXED:alp",
        }
    ] * audited  # fmt: skip


@pytest.mark.parametrize("audited", [True, False])
@pytest.mark.parametrize("level", ["INFO", "DEBUG"])
def test_allowed_request_is_logged_only_at_debug_level(authorizer, capsys, level, audited):
    logs.set_level(level)
    assert ask(authorizer, "green1", audited=audited, count=3)
    told = lines(capsys)
    if level == "INFO" or not audited:
        assert told == []
    else:
        (line,) = told
        assert (line["level"], line["event"]) == ("debug", "access allowed")
        assert (line["resource"], line["resources"]) == ("Topic:LITERAL:green1", 3)
        assert line["rule"] == "ALLOW READ for User:bob from * on Topic:PREFIXED:green"


def test_audit_lines_are_rate_limited_per_principal(authorizer, capsys, clock):
    for _ in range(LINES_AT_ONCE + 7):
        ask(authorizer, "alpha")
    assert len(lines(capsys)) == LINES_AT_ONCE
    ask(authorizer, "alpha", user="eve")
    assert [line["principal"] for line in lines(capsys)] == ["User:eve"], (
        "others are told as before"
    )
    clock.now_s += 1.0
    for _ in range(LINES_PER_S + 1):
        ask(authorizer, "alpha")
    first, *rest = lines(capsys)
    assert (first["event"], first["principal"]) == ("denials were not logged", "User:bob")
    assert first["lines"] == 7
    assert [line["event"] for line in rest] == ["access denied"] * LINES_PER_S


def test_audit_limits_the_number_of_tracked_principals(authorizer, capsys):
    for user in range(MAX_PRINCIPALS + 5):
        ask(authorizer, "alpha", user=f"u{user}")
    assert len(authorizer._audit._allowances) == MAX_PRINCIPALS
    assert len(lines(capsys)) == MAX_PRINCIPALS + 5


def test_audit_line_truncates_long_names(authorizer, capsys):
    ask(authorizer, "x" * 30_000, user="y" * 30_000)
    (line,) = lines(capsys)
    for key in ("resource", "principal"):
        assert len(line[key]) == MAX_TEXT_CHARACTERS + 1, key


def test_audit_line_escapes_names_chosen_by_clients(authorizer, capsys):
    name = 'x" operation=WRITE principal="User:admin\\'
    ask(authorizer, "a\nb c", user=name, terminal=True)
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    words = dict(word.split("=", 1) for word in shlex.split(text) if "=" in word)
    assert words["principal"] == f"User:{name}"
    assert words["operation"] == "READ"
    assert words["resource"] == r"Topic:LITERAL:a\nb c"

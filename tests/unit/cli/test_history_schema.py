"""The JSON schema describes every entry that a broker can write."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from fencepost.cli.history_schema import KINDS, SUBJECTS, schema
from fencepost.coordinator.history.causes import CAUSES, SHARE_CAUSES, TRANSACTION_CAUSES
from fencepost.coordinator.history.entries import (
    CLIENT,
    CLUSTER,
    GROUP,
    PARTITION,
    POLL_PAUSE_REPORTED,
    REQUEST_SCOPES,
    TRANSACTION,
    Entry,
    Observed,
    encode_value,
)
from fencepost.coordinator.history.recorded_apis import CONNECTION_CLOSED, REQUEST
from fencepost.groups.events import EventKind as GroupEvent
from fencepost.groups.share.events import EventKind as ShareEvent
from fencepost.txn.events import EventKind as TransactionEvent
from tests.support.daemon import ROOT

VALIDATOR = Draft202012Validator(schema())


def errors(entry: Entry) -> list[str]:
    return [error.message for error in VALIDATOR.iter_errors(json.loads(encode_value(entry)))]


def entry_of(scope: str, kind: str, **detail: object) -> Entry:
    return Entry(1, scope, "s", kind, "shard", detail=detail)


def test_history_schema_is_a_valid_json_schema() -> None:
    Draft202012Validator.check_schema(schema())


def test_schema_describes_every_coordinator_event() -> None:
    of_groups = {*map(str, GroupEvent), *map(str, ShareEvent), POLL_PAUSE_REPORTED}
    assert KINDS[GROUP].keys() == of_groups
    assert KINDS[TRANSACTION].keys() == set(map(str, TransactionEvent))
    assert KINDS[CLIENT].keys() == set(map(str, Observed))
    for scope in REQUEST_SCOPES:
        assert KINDS[scope].keys() == {REQUEST, CONNECTION_CLOSED}
    assert SUBJECTS.keys() == KINDS.keys()


def kinds_in(source: Path) -> Iterator[str]:
    """Yield the kinds of events that a module creates, except kinds that are never recorded."""
    module = ast.parse(source.read_text(encoding="utf-8"))
    assigned: dict[str, list[ast.expr]] = {}
    for node in ast.walk(module):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            assigned.setdefault(node.targets[0].id, []).append(node.value)
    for node in ast.walk(module):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else None
        name = node.func.id if isinstance(node.func, ast.Name) else name
        is_routine = any(
            keyword.arg == "routine" and isinstance(keyword.value, ast.Constant)
            for keyword in node.keywords
        )
        if name not in {"Event", "_announce_election"} or is_routine:
            continue
        kind = node.args[0]
        values = assigned.get(kind.id, []) if isinstance(kind, ast.Name) else [kind]
        for value in values:
            results = [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]
            for result in results:
                for constant in ast.walk(result):
                    if isinstance(constant, ast.Constant) and isinstance(constant.value, str):
                        yield constant.value


def test_schema_describes_every_cluster_event() -> None:
    found = {
        kind
        for folder in ("cluster", "coordinator/zookeeper", "coordinator/controller")
        for source in (ROOT / folder).rglob("*.py")
        for kind in kinds_in(source)
    }
    assert found == KINDS[PARTITION].keys() | KINDS[CLUSTER].keys()


@pytest.mark.parametrize(
    ("scope", "kind"), [(scope, kind) for scope, kinds in KINDS.items() for kind in kinds]
)
def test_entry_is_valid_only_in_the_scope_of_its_kind(scope: str, kind: str) -> None:
    assert errors(entry_of(scope, kind)) == []
    other = CLUSTER if scope != CLUSTER else GROUP
    assert errors(entry_of(other, kind)) != []


def test_entry_with_each_known_cause_is_valid() -> None:
    told = [
        *(
            entry_of(TRANSACTION, "transaction-aborted", cause=cause)
            for cause in TRANSACTION_CAUSES
        ),
        *(entry_of(GROUP, "share-records-returned", cause=cause) for cause in SHARE_CAUSES),
    ]
    for entry in told:
        assert entry.cause in CAUSES
        assert errors(entry) == []
    joined = entry_of(GROUP, "rebalance-started", reason="new member m joined")
    assert (joined.cause, errors(joined)) == ("member-joined", [])


def test_entry_of_unknown_kind_is_invalid() -> None:
    assert errors(entry_of(GROUP, "group-painted")) != []


def test_published_schema_file_is_up_to_date() -> None:
    published = ROOT / "docs" / "history-entry.schema.json"
    assert json.loads(published.read_text(encoding="utf-8")) == schema()

"""Checks that no client changes an internal topic, or sees the metadata topic."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tests.lives.pools import INTERNAL_TOPICS
from tests.support.raw import Answer

METADATA = "__cluster_metadata"
OFFSETS = "__consumer_offsets"
Body = Mapping[str, Any]


def _rows(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield all pairs of topic and error of a response."""
    if isinstance(value, list):
        for item in value:
            yield from _rows(item, name)
    elif isinstance(value, Mapping):
        name = next((value[k] for k in ("name", "topic", "topic_name") if value.get(k)), name)
        error = value.get("error_code") or value.get("partition_error_code")
        if error is not None and name:
            yield name, error
        for inner in value.values():
            if isinstance(inner, list | Mapping):
                yield from _rows(inner, name)


def _changed(_: Body, answer: Answer) -> set[str]:
    return {name for name, error in _rows(answer) if error == "none" and name in INTERNAL_TOPICS}


def _marked(body: Body, answer: Answer) -> set[str]:
    return _changed(body, answer) - {OFFSETS}


def _added(_: Body, answer: Answer) -> set[str]:
    rows = [row for row in _rows(answer) if row[0] in INTERNAL_TOPICS]
    return {name for name, error in rows if error == "none"} - {OFFSETS}


def _seen(_: Body, answer: Answer) -> set[str]:
    return {name for name, error in _rows(answer) if error == "none" and name == METADATA}


CLOSED: Mapping[str, Callable[[Body, Answer], set[str]]] = {
    "produce": _changed,
    "delete_records": _changed,
    "delete_topics": _changed,
    "create_partitions": _changed,
    "create_topics": _seen,
    "add_partitions_to_txn": _added,
    "write_txn_markers": _marked,
    "fetch": _seen,
    "list_offsets": _seen,
    "offset_for_leader_epoch": _seen,
    "describe_producers": _seen,
}


def broken(api: str, body: Body, answer: Answer) -> list[str]:
    """Return the violations in a response."""
    judge = CLOSED.get(api)
    return [] if judge is None else [f"{name} is not closed" for name in judge(body, answer)]

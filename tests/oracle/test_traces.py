"""The same requests to Apache Kafka and to Fencepost must get the same responses."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import zip_longest

import pytest

from tests.oracle import (
    traces_admin,
    traces_consumer,
    traces_data,
    traces_features,
    traces_frames,
    traces_groups,
    traces_migration,
    traces_offsets,
    traces_quotas,
    traces_share,
    traces_txn,
)
from tests.oracle.deliberate import DELIBERATE
from tests.oracle.tracer import Step, Tracer, leaves
from tests.support.cluster import Cluster
from tests.support.daemon import Daemon
from tests.support.kafka import Kafka

pytestmark = pytest.mark.oracle

BROKE = "the trace broke"

TRACES: list[Callable[[Tracer], None]] = [
    *traces_groups.TRACES,
    *traces_consumer.TRACES,
    *traces_migration.TRACES,
    *traces_offsets.TRACES,
    *traces_txn.TRACES,
    *traces_features.TRACES,
    *traces_data.TRACES,
    *traces_frames.TRACES,
    *traces_admin.TRACES,
    *traces_quotas.TRACES,
    *traces_share.TRACES,
]


def run(trace: Callable[[Tracer], None], bootstrap: str) -> list[Step]:
    tracer = Tracer(bootstrap)
    try:
        trace(tracer)
    except Exception as broke:  # noqa: BLE001 - if only one broker breaks the trace, they differ
        tracer.steps.append((BROKE, repr(broke)))
    finally:
        tracer.close()
    return tracer.steps


def differences(ours: object, theirs: object) -> list[str]:
    """Return a line for each leaf that differs."""
    return [
        f"{where or 'answer'}: {_text(our)} instead of {_text(their)}"
        for where, our, their in leaves(ours, theirs)
    ]


def unintended(trace: str, found: list[str]) -> list[str]:
    """Return the differences that are not listed, and a complaint for each unused entry."""
    listed = {
        f": {entry.ours} instead of {entry.theirs}": entry.why
        for entry in DELIBERATE
        if entry.trace == trace
    }
    unused = [why for end, why in listed.items() if not any(f.endswith(end) for f in found)]
    return [f for f in found if not f.endswith(tuple(listed))] + [
        f"deliberate, but not to be seen: {why}" for why in unused
    ]


def _text(value: object) -> str:
    return json.dumps(value, default=repr, ensure_ascii=False)[:1500]


@pytest.mark.parametrize("trace", TRACES, ids=lambda trace: trace.__name__)
def test_responses_of_a_trace_are_the_same(
    trace: Callable[[Tracer], None], kafka: Kafka, fencepost: Daemon
) -> None:
    theirs, ours = run(trace, kafka.bootstrap), run(trace, fencepost.bootstrap)
    found = unexpected(trace.__name__, ours, theirs)
    assert not found, f"{len(found)} differences:\n" + "\n".join(found)


def unexpected(trace: str, ours: list[Step], theirs: list[Step]) -> list[str]:
    """Return the unintended differences of two runs. Apache Kafka's run must be complete."""
    assert theirs[-1][0] != BROKE, f"Apache Kafka itself broke the trace: {theirs[-1]}"
    found = []
    for number, pair in enumerate(zip_longest(ours, theirs, fillvalue=("nothing", None))):
        (our_step, our_answer), (their_step, their_answer) = pair
        # Compare only the names of the APIs, because a request may contain ids from the broker.
        if our_step.split()[0] != their_step.split()[0]:
            found.append(f"step {number}: {our_step}, {our_answer} | {their_step}, {their_answer}")
            break
        found += [
            f"step {number}: {their_step}\n      {line}"
            for line in differences(our_answer, their_answer)
        ]
    return unintended(trace, found)


def test_advertised_api_versions_are_the_same(kafka: Kafka, fencepost: Daemon) -> None:
    """Each API that Fencepost serves has the versions that Apache Kafka advertises."""

    def ranges(bootstrap: str) -> dict[int, tuple[int, int]]:
        with Cluster(bootstrap) as cluster:
            answer = cluster.call(
                "api_versions", 5, client_software_name="raw", client_software_version="1"
            )
        return {a["api_key"]: (a["min_version"], a["max_version"]) for a in answer["api_keys"]}

    ours, theirs = ranges(fencepost.bootstrap), ranges(kafka.bootstrap)
    assert ours == {key: theirs.get(key) for key in ours}
    assert {18: (0, 5), 28: (0, 6), 42: (0, 3), 94: (0, 0)}.items() <= ours.items()


def test_comparison_of_responses_finds_differences() -> None:
    ours = {"topics": [{"error_code": "none"}], "same": 1}
    theirs = {"topics": [{"error_code": "unknown_topic_id"}], "same": 1}
    assert differences(ours, ours) == []
    assert differences(ours, theirs) == [
        '.topics[0].error_code: "none" instead of "unknown_topic_id"'
    ]
    assert differences([1], [1, 2]) == ["answer: [1] instead of [1, 2]"]
    assert differences({"a": 1}, {"b": 1}) == ['answer: {"a": 1} instead of {"b": 1}']

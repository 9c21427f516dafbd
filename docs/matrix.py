"""The compatibility matrix, from the outcomes of the client scenarios.

``pytest tests/wire --results FILE`` writes the outcomes and the versions, and ``python -m
docs.matrix FILE…`` keeps the outcomes that the matrix needs in ``docs/compatibility.json``. If a
test has two outcomes on the same broker, Python and platform, the later one is kept. Every cell
comes from that file; nothing is assumed.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from docs.settings import table

KEPT = Path(__file__).with_name("compatibility.json")

CLIENTS = ("librdkafka", "aiokafka", "kafka-python", "Java")

_TXN = r"transactions\.py::test_"
_OUTCOME = _TXN + r"(committed_records|open_transaction|lso_waits)"
_OFFSETS = _TXN + r"transaction(al_offsets|_with_offsets)"
_LISTING = (
    r"groups\.py::test_groups_are_listed_|transactions\.py::test_transactions_are_listed_"
    r"|test_list_transactions_accepts"
)
_STICKY = r"cooperative_sticky_members_of_three_clients"
_FENCED = (
    r"test_(newer_producer|fenced_producer|abandoned_transaction|producer_paused|two_processes)"
)
_ADMIN = (
    r"test_admin\.py::test_(recreated|create_partitions|topic_configs|invalid_topic_config"
    r"|broker_configs|records|list_offsets)"
)

FEATURES: Mapping[str, Mapping[str, str]] = {
    "write and read, every codec the client has": {
        "librdkafka": r"records_of_every_other_client\[confluent",
        "aiokafka": r"records_of_every_other_client\[aiokafka",
        "kafka-python": r"records_of_every_other_client\[kafka-python",
    },
    "offsets by time, seek, reset policy": {
        "aiokafka": r"offsets_by_timestamp|seek_into|consumer_without_offset_starts",
        "kafka-python": r"offsets_by_timestamp",
    },
    "idempotent producer": {
        "librdkafka": r"test_idempotent_clients",
        "aiokafka": r"test_idempotent_clients",
        "kafka-python": r"test_idempotent_clients",
    },
    "transactions: commit, abort, read_committed": {
        "librdkafka": _OUTCOME + r".*\[confluent",
        "aiokafka": _OUTCOME + r".*\[aiokafka",
        "kafka-python": _OUTCOME + r".*\[kafka-python",
        "Java": r"test_exactly_once_copy_by_java|test_java_transactional_perf_producer",
    },
    "offsets inside a transaction": {
        "librdkafka": _OFFSETS + r".*confluent",
        "aiokafka": _OFFSETS + r".*aiokafka",
        "kafka-python": _OFFSETS + r".*kafka-python",
        "Java": r"test_exactly_once_copy_by_java",
    },
    "fencing of zombies, transaction timeout": {
        "librdkafka": _FENCED + r".*confluent",
        "aiokafka": _FENCED + r".*aiokafka",
        "kafka-python": _FENCED + r".*kafka-python",
    },
    "group, classic protocol": {
        "librdkafka": r"test_groups.*test_(restarted|auto_commit)",
        "aiokafka": r"test_groups.*test_(three_consumers|records_are_processed|member_without)",
        "kafka-python": r"test_kafka_python_members_share",
        "Java": r"java_consumer_group.*\[classic",
    },
    "cooperative rebalance": {
        "librdkafka": r"cooperative_rebalance_moves|" + _STICKY,
        "aiokafka": r"leaves_the_rest_to_the_first\[cooperative|" + _STICKY,
        "Java": _STICKY,
    },
    "static membership": {"librdkafka": r"test_groups.*(static_member|instance_id)"},
    "group, consumer protocol (KIP-848)": {
        "librdkafka": r"test_consumer_protocol",
        "Java": r"java_consumer_group.*\[consumer",
    },
    "a group with members of both protocols": {"librdkafka": r"test_mixed_groups"},
    "administration: topics, settings, groups, offsets": {
        "librdkafka": _ADMIN + r"|groups\.py::test_groups_are_listed_",
        "kafka-python": r"test_kafka_python_creates|" + _LISTING,
        "Java": r"hanging_transaction_is_aborted_by_the_java_tool",
    },
}
"""Feature → client → pattern of the scenarios that must have passed; no entry: no scenario."""

BROKERS = {"fencepost": "Fencepost", "kafka": "Apache Kafka"}

_ANY = re.compile("|".join(pattern for row in FEATURES.values() for pattern in row.values()))


def _runs() -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = json.loads(KEPT.read_text(encoding="utf-8"))
    return runs


def cell(pattern: str | None, runs: list[dict[str, Any]]) -> str:
    """Return the text of one cell: the brokers on which the scenarios of ``pattern`` passed."""
    if pattern is None:
        return "no scenario"
    told, passed = [], 0
    for name, title in BROKERS.items():
        found = [
            outcome
            for run in runs
            if run["target"] == name
            for test, outcome in run["outcomes"].items()
            if re.search(pattern, test)
        ]
        if "failed" in found:
            told.append(f"{title} **fails**")
        elif "passed" in found:
            told.append(title)
            passed += 1
    return "both" if passed == len(BROKERS) else ", ".join(told) or "not run"


def matrix() -> str:
    """Return the table of features by clients."""
    runs = _runs()
    rows = (
        (feature, *(cell(patterns.get(client), runs) for client in CLIENTS))
        for feature, patterns in FEATURES.items()
    )
    return table(("feature", *CLIENTS), rows)


def run_table() -> str:
    """Return the table of runs: broker, Python, platform, clients, outcomes and date of each."""
    rows = (
        (
            BROKERS[run["target"]],
            run["python"],
            run["platform"],
            ", ".join(f"{name} {version}" for name, version in run["clients"].items()),
            ", ".join(
                f"{count} {what}" for what, count in Counter(run["outcomes"].values()).items()
            ),
            run["date"],
        )
        for run in _runs()
    )
    return table(("broker", "Python", "platform", "clients", "scenarios", "date"), rows)


def _key(run: Mapping[str, Any]) -> tuple[str, ...]:
    return str(run["target"]), str(run["python"]), str(run["platform"])


def main(files: list[str]) -> None:
    """Merge the results of ``files`` into ``docs/compatibility.json``."""
    kept = {_key(run): run for run in _runs()} if KEPT.exists() else {}
    for name in files:
        run = json.loads(Path(name).read_text(encoding="utf-8"))
        former = kept.get(_key(run), {"outcomes": {}})["outcomes"]
        later = {test: what for test, what in run["outcomes"].items() if _ANY.search(test)}
        kept[_key(run)] = run | {"outcomes": former | later}
    runs = [kept[key] for key in sorted(kept)]
    KEPT.write_text(json.dumps(runs, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])

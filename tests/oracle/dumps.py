"""The output of Apache Kafka's DumpLogSegments, as rows of ``fencepost dump-log``.

The tool's text differs little between releases; an unknown line fails the test.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.kafka import run_tool

Row = dict[str, Any]

_CODECS = {"none": 0, "gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}
_BATCH = re.compile(
    r"baseOffset: (\d+) lastOffset: (\d+) count: (\d+) baseSequence: (-?\d+) lastSequence: (-?\d+)"
    r" producerId: (-?\d+) producerEpoch: (-?\d+) partitionLeaderEpoch: (\d+)"
    r" isTransactional: (\w+) isControl: (\w+) deleteHorizonMs: OptionalLong(\S+)"
    r" position: (\d+) (\w+): (-?\d+) size: (\d+) magic: (\d) compresscodec: (\w+) crc: (\d+)"
    r" isvalid: true"
)
_RECORD = re.compile(
    r"\| offset: (\d+) (?:CreateTime|LogAppendTime): (-?\d+) keySize: (-?\d+) valueSize: (-?\d+)"
    r" sequence: (-?\d+) headerKeys: \[(.*?)\]"
    r"(?: endTxnMarker: (\w+) coordinatorEpoch: (\d+))?(?: key: (.*?))?(?: payload: (.*))?"
)
_PRODUCER = re.compile(
    r"producerId: (\d+) producerEpoch: (-?\d+) coordinatorEpoch: (-?\d+)"
    r" currentTxnFirstOffset: OptionalLong(\S+) lastTimestamp: (-?\d+)"
    r"(?: firstSequence: -?\d+ lastSequence: (-?\d+) lastOffset: (-?\d+) .*)?"
)
_ABORTED = re.compile(
    r"version: 0 producerId: (\d+) firstOffset: (\d+) lastOffset: (\d+) lastStableOffset: (\d+)"
)
_OFFSET = re.compile(r"offset: (\d+) position: (\d+)")
_TIME = re.compile(r"timestamp: (-?\d+) offset: (\d+)")
_NO_ROW = re.compile(
    r"Log starting offset: \d+|\S+ is empty\.|Non-consecutive offsets in .*"
    r"|  -?\d+ is followed by \d+"
    r"|Found timestamp mismatch in :.*|  Index timestamp: \d+, log timestamp: -1"
)
"""Lines that have no counterpart in Fencepost's rows.

Compaction leaves offset gaps, and the tool reports a gap before the first batch of a segment. If
compaction has removed all records of a batch, the tool shows the log timestamp -1, because it only
reads records. The batch's header still has the timestamp of the index entry.
"""


def by_kafka(paths: Sequence[Path], *options: str) -> dict[str, list[Row]]:
    """Return rows in Fencepost's form, by file; AssertionError for an unknown line."""
    said = run_tool(
        "org.apache.kafka.tools.DumpLogSegments",
        "--deep-iteration",
        *options,
        "--files",
        ",".join(map(str, paths)),
    )
    found: dict[str, list[Row]] = {str(path): [] for path in paths}
    rows = None
    for line in said.splitlines():
        if line.startswith("Dumping "):
            rows = found[line.removeprefix("Dumping ")]
        elif not _NO_ROW.fullmatch(line):
            assert rows is not None, line
            rows.append(_row(line))
    return found


def _row(line: str) -> Row:
    for pattern, make in (
        (_BATCH, _batch),
        (_RECORD, _record),
        (_PRODUCER, _producer),
        (_ABORTED, _aborted),
        (_OFFSET, lambda offset, position: _numbers("offset-index", offset=offset, at=position)),
        (_TIME, lambda time, offset: _numbers("time-index", time=time, offset=offset)),
    ):
        match = pattern.fullmatch(line)
        if match is not None:
            return make(*match.groups())
    raise AssertionError(f"a line that nobody knows: {line[:300]}")


def _numbers(kind: str, **values: str | int) -> Row:
    return {"kind": kind, **{name: int(value) for name, value in values.items()}}


def _optional(text: str) -> int:
    return -1 if text == ".empty" else int(text.strip("[]"))


def _batch(*part: str) -> Row:
    return {
        **_numbers("batch", base=part[0], last=part[1], records=part[2]),
        "sequences": (int(part[3]), int(part[4])),
        "producer": (int(part[5]), int(part[6])),
        "epoch": int(part[7]),
        "transactional": part[8] == "true",
        "control": part[9] == "true",
        "horizon": _optional(part[10]),
        "position": int(part[11]),
        "time": (part[12], int(part[13])),
        "size": int(part[14]),
        "magic": int(part[15]),
        "codec": _CODECS[part[16]],
        "crc": int(part[17]),
    }


def _record(*part: str) -> Row:
    names = part[5]
    return {
        **_numbers("record", offset=part[0], time=part[1], key_size=part[2], value_size=part[3]),
        "sequence": int(part[4]),
        "headers": names,
        "control": None if part[6] is None else (part[6], int(part[7])),
        "key": part[8],
        "payload": part[9],
    }


def _producer(*part: str) -> Row:
    return {
        **_numbers("producer", id=part[0], epoch=part[1], coordinator=part[2]),
        "first": _optional(part[3]),
        "time": int(part[4]),
        "last": (-1, -1) if part[5] is None else (int(part[5]), int(part[6])),
    }


def _aborted(*part: str) -> Row:
    return _numbers("txn-index", id=part[0], first=part[1], last=part[2], stable=part[3])


# --- our own rows in the same form ---


def by_fencepost(rows: Sequence[Row]) -> Iterator[Row]:
    """Yield the rows of ``dump-log --records --format json`` in the form of :func:`by_kafka`.

    ``payload`` is the decoded record, or its value; fields that Kafka's tool does not print are
    left out.
    """
    batch: Row = {}
    for row in rows:
        kind = row["kind"]
        if kind == "batch":
            batch = row
            yield _our_batch(row)
        elif kind == "record":
            yield _our_record(row, batch)
        elif kind == "offset-index":
            yield _numbers(kind, offset=row["offset"], at=row["position"])
        elif kind == "time-index":
            yield _numbers(kind, time=row["timestamp_ms"], offset=row["offset"])
        elif kind == "txn-index":
            yield _numbers(
                kind,
                id=row["producer_id"],
                first=row["first_offset"],
                last=row["last_offset"],
                stable=row["last_stable_offset"],
            )
        else:
            assert kind == "producer", row
            yield {
                "kind": kind,
                "id": row["producer_id"],
                "epoch": row["producer_epoch"],
                "coordinator": row["coordinator_epoch"],
                "first": row["current_txn_first_offset"],
                "time": row["last_timestamp_ms"],
                "last": (row["last_sequence"], row["last_offset"]),
            }


def _our_batch(row: Row) -> Row:
    return {
        **_numbers("batch", base=row["base_offset"], last=row["last_offset"]),
        "records": row["records"],
        "sequences": (row["base_sequence"], row["last_sequence"]),
        "producer": (row["producer_id"], row["producer_epoch"]),
        "epoch": row["leader_epoch"],
        "transactional": row["transactional"],
        "control": row["control"],
        "horizon": row.get("delete_horizon_ms", -1),
        "position": row["position"],
        "time": (row["timestamp_type"], row["max_timestamp_ms"]),
        "size": row["size"],
        "magic": row["magic"],
        "codec": row["codec"],
        "crc": row["crc"],
    }


def _our_record(row: Row, batch: Row) -> Row:
    base = batch["base_sequence"]
    delta = row["offset"] - batch["base_offset"]
    return {
        **_numbers("record", offset=row["offset"], time=row["timestamp_ms"]),
        "key_size": _size(row["key"]),
        "value_size": _size(row["value"]),
        "sequence": -1 if base < 0 else base + delta,
        "headers": ",".join(name for name, _ in row["headers"]),
        "control": (row["control"], row["coordinator_epoch"]) if "control" in row else None,
        "key": row["key"],
        "payload": row.get("decoded", row["value"]),
    }


def _size(shown: str | None) -> int:
    if shown is None:
        return -1
    return len(shown) // 2 - 1 if shown.startswith("0x") else len(shown.encode())


# --- records of the coordinators ---

_GROUP_KINDS = {
    "1": "OffsetCommit",
    "2": "GroupMetadata",
    "3": "ConsumerGroup",
    "5": "ConsumerMember",
    "6": "ConsumerGroup",
    "7": "ConsumerMember",
    "8": "ConsumerMember",
    "10": "ShareMember",
    "11": "ShareGroup",
    "12": "ShareGroup",
    "13": "ShareMember",
    "14": "ShareMember",
    "15": "ShareGroup",
}
_SHARE_STATE_KINDS = {"0": "ShareSnapshot", "1": "ShareUpdate"}
_NAMES = {
    "group": "group_id",
    "protocol": "protocol_name",
    "generation": "generation_id",
    "current_state_timestamp": "state_timestamp_ms",
    "commit_timestamp": "commit_timestamp_ms",
    "expire_timestamp": "expire_timestamp_ms",
    "assigned_partitions": "assigned",
    "partitions_pending_revocation": "pending_revocation",
    "assignment_epoch": "epoch",
    "assignment_timestamp": "timestamp_ms",
    "classic_member_metadata": "classic",
    "transaction_timeout_ms": "timeout_ms",
    "transaction_status": "state",
    "transaction_partitions": "partitions",
    "transaction_last_update_timestamp_ms": "last_update_ms",
    "transaction_start_timestamp_ms": "start_ms",
    "topic_partitions": "partitions",
    "rebalance_timeout": "rebalance_timeout_ms",
    "session_timeout": "session_timeout_ms",
    "create_timestamp": "create_timestamp_ms",
    "write_timestamp": "write_timestamp_ms",
    "state_batches": "batches",
    "initializing_topics": "initializing",
    "initialized_topics": "initialized",
    "deleting_topics": "deleting",
}
"""Kafka's names of fields whose names in Fencepost differ in more than their case."""


def decoded_by_kafka(row: Row) -> Row:
    """Convert the JSON that DumpLogSegments prints to Fencepost's ``decoded`` field."""
    key = json.loads(row["key"])
    data = {_name(name): value for name, value in key["data"].items()}
    if "transactional_id" in data:
        found: Row = data
    elif "topic_id" in data:
        data["topic_id"] = _value("topicId", data["topic_id"])
        found = {"type": _SHARE_STATE_KINDS[key["type"]], **data}
    else:
        found = {"type": _GROUP_KINDS[key["type"]], **data}
        if found["type"].startswith(("Consumer", "Share")):
            found["kind"] = int(key["type"])
    if row["payload"] == "<DELETE>":
        return {**found, "tombstone": True}
    data = json.loads(row["payload"])["data"]
    value = {_name(name): _value(name, item) for name, item in data.items()}
    if found.get("type") == "ShareMember" and "assigned" in value:
        rows = [[topic["topic_id"], topic["partitions"]] for topic in value.pop("assigned")]
        value["partitions"] = rows
    return {**found, "value": value}


def _name(camel: str) -> str:
    snake = re.sub(r"(?<!^)([A-Z])", r"_\1", camel).lower()
    return _NAMES.get(snake, snake)


def _value(name: str, item: Any) -> Any:
    if name == "topicId":
        return "0x" + base64.urlsafe_b64decode(item + "==").hex()
    if name == "transactionStatus":
        return _name(item).upper()
    if name == "transactionPartitions":
        return sorted(
            [topic["topic"], index] for topic in item or () for index in topic["partitionIds"]
        )
    if name == "stateBatches":
        return [list(batch.values()) for batch in item]
    if name in {"initializingTopics", "initializedTopics"}:
        rows = [(_value("topicId", topic["topicId"]), topic) for topic in item]
        return [
            {"topic_id": found, "name": topic["topicName"], "partitions": topic["partitions"]}
            for found, topic in rows
        ]
    if name == "deletingTopics":
        return [[_value("topicId", topic["topicId"]), topic["topicName"]] for topic in item]
    if name == "topicPartitions":
        return [[_value("topicId", topic["topicId"]), topic["partitions"]] for topic in item]
    if name in {"subscription", "assignment"} and isinstance(item, str):
        return base64.b64decode(item)
    if isinstance(item, Mapping):
        return {_name(inner): _value(inner, value) for inner, value in item.items()}
    if isinstance(item, list):
        return [_value("", element) for element in item]
    return item


def without_defaults(ours: Row, theirs: Row) -> Row:
    """Return Fencepost's decoded record without the fields that Kafka's record version lacks.

    These fields must hold their default values.
    """
    if "value" not in ours or "value" not in theirs:
        return ours
    absent = {name: ours["value"][name] for name in ours["value"].keys() - theirs["value"].keys()}
    assert all(value in (-1, 0, None, "", []) for value in absent.values()), absent
    kept = {name: value for name, value in ours["value"].items() if name not in absent}
    return {**ours, "value": kept}

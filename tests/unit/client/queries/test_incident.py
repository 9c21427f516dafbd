"""Incident files: written files can be read, and bad files are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fencepost.client.queries.incident import (
    MAX_FILE_BYTES,
    MAX_PARTITIONS,
    MAX_SPAN_MS,
    MAX_STEPS,
    Cause,
    Incident,
    IncidentError,
    Payload,
    Step,
    TopicOfIncident,
    dump,
    load,
)
from fencepost.client.queries.incident_values import as_json, from_json
from fencepost.coordinator.history.recorded_apis import SUBJECTS
from fencepost.protocol.api import APIS
from fencepost.protocol.codec import encode_request, encode_response
from fencepost.protocol.schema import default_entity, message_class

END_TXN = {
    "transactional_id": "payments",
    "producer_id": 7,
    "producer_epoch": 3,
    "committed": True,
}
INCIDENT = Incident(
    1_000,
    9_000,
    ("shop",),
    ("payments",),
    {"group.max.size": "7"},
    {"shop": {"consumer.session.timeout.ms": "45000"}},
    {"transaction.version": 2},
    {"orders": TopicOfIncident("00000000-0000-0000-0000-000000000007", 3)},
    [
        Step(1, 0, 1, "EndTxn", "till", 3, END_TXN, 5, 2, {"error_code": "PRODUCER_FENCED"}, None),
        Step(2, 4, 1, "connection-closed"),
    ],
    [Cause(3, 1, "payments", "producer-refused", "EndTxn", None, "request EndTxn")],
    {"orders": {2: {7: Payload(None, b"tea", (("trace", None), ("trace", b"7")))}}},
)


def written(
    path: Path, change: Callable[[dict[str, Any]], object] = lambda _incident: None
) -> Path:
    values = json.loads(dump(INCIDENT))
    change(values)
    file = path / "incident.json"
    file.write_text(json.dumps(values))
    return file


def test_written_incident_is_read_back_unchanged(tmp_path: Path) -> None:
    file = tmp_path / "incident.json"
    file.write_text(dump(INCIDENT))
    assert load(file) == INCIDENT
    assert file.read_text().count("\n    {") == 3, "a line for each step and cause"


def put(*keys: Any, value: Any) -> Callable[[dict[str, Any]], object]:
    """Return a change that sets a value."""

    def change(incident: Any) -> None:
        for key in keys[:-1]:
            incident = incident[key]
        incident[keys[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (put("format", value="other"), 'its "format" is not "fencepost-incident"'),
        (put("version", value=2), "version 2 of the format, but only 1 is known"),
        (put("end_ms", value=1_000 + MAX_SPAN_MS + 1), "ms after start_ms; the limit is"),
        (put("end_ms", value=999), "end_ms is -1 ms after start_ms"),
        (put("start_ms", value=True), "start_ms of the file is True, not a number"),
        (put("settings", "log.dirs", value="/"), "'log.dirs' is no setting"),
        (put("settings", "group.share.assignors", value="os.system"), "is no setting"),
        (put("group_settings", "shop", value=[]), "settings are not an object"),
        (put("topics", "orders", "partitions", value=MAX_PARTITIONS + 1), "from 0 to 1000"),
        (put("features", "share.version", value="1"), "features.share.version is 1, not a number"),
        (put("groups", value=["g"] * 101), "groups is not an array of at most 100"),
        (put("steps", value=[{}] * (MAX_STEPS + 1)), "steps is not an array of at most 20000"),
        (put("steps", 0, "number", value=2), "step 1 has the number 2"),
        (put("steps", 0, "at_ms", value=5), "step 2 is before the step that it follows"),
        (put("steps", 0, "api", value="DeleteTopics"), "api of step 1 is 'DeleteTopics'; known"),
        (put("steps", 0, "version", value=99), "version of step 1 is 99, not a number"),
        (put("steps", 0, "payload", value=""), "step 1 has no field 'payload'"),
        (put("steps", 0, "request", "topic", value=""), "request has no field 'topic'"),
        (put("steps", 0, "request", "producer_id", value="7"), "request.producer_id is '7'"),
        (put("steps", 0, "request", "producer_id", value=1 << 70), "step 1, EndTxn: "),
        (put("steps", 0, "request", "transactional_id", value=None), "transactional_id is null"),
        (put("steps", 0, "response", "error_code", value="OOPS"), "error_code is 'OOPS', not a"),
        (put("steps", 0, "response", value=[]), "response of step 1 is not an object"),
        (put("records", value={"orders": {"x": {}}}), "records: invalid literal for int()"),
        (put("records", value={"orders": {"0": {"0": ["tea"]}}}), "records: "),
        (put("records", value={"orders": {"0": {"0": ["?", None, []]}}}), "records: "),
        (put("causes", 0, "at_ms", value=-1), "at_ms of cause 1 is -1"),
        (put("causes", 0, "why", value="x" * 10_001), "why of cause 1 is not a text of at most"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_incident_with_invalid_field_is_refused_with_a_reason(
    change: Callable[[dict[str, Any]], object], complaint: str, tmp_path: Path
) -> None:
    file = written(tmp_path, change)
    with pytest.raises(IncidentError) as refused:
        load(file)
    assert complaint in str(refused.value)
    assert str(refused.value).startswith(f"{file}: ")


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, "\xff", "null"])
def test_file_that_is_not_an_incident_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "incident.json"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(IncidentError, match=r"not JSON|not an incident"):
        load(file)


def test_incident_file_above_the_size_limit_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "incident.json"
    with file.open("wb") as sparse:
        sparse.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(IncidentError, match=f"larger than {MAX_FILE_BYTES} bytes"):
        load(file)


@pytest.mark.parametrize("key", SUBJECTS, ids=lambda key: key.name.lower())
def test_every_recorded_api_survives_json_in_every_version(key: Any) -> None:
    api = APIS[key]
    for version in range(api.min_version, api.max_version + 1):
        for side in ("request", "response"):
            message = default_entity(message_class(key, version, side))
            again = from_json(key, version, side, json.loads(json.dumps(as_json(message))))
            if side == "request":
                frames = [
                    encode_request(key, version, 0, "c", entity) for entity in (message, again)
                ]
            else:
                frames = [encode_response(key, version, 0, entity) for entity in (message, again)]  # type: ignore[misc]
            assert frames[0] == frames[1]

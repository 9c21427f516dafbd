"""The file of an incident: requests, times and causes, as ``fencepost record`` writes them.

docs/testing.md documents the format. A file may come from anywhere, so :func:`load` checks its
size, every number and every request before a replay uses them.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from fencepost.client.queries.incident_values import from_json
from fencepost.coordinator.history.recorded_apis import CONNECTION_CLOSED, SUBJECTS
from fencepost.logcore.values import dataclass
from fencepost.protocol.api import APIS
from fencepost.protocol.codec import encode_request
from fencepost.protocol.errors import WireError

FORMAT: Final = "fencepost-incident"
VERSION: Final = 1

MAX_FILE_BYTES: Final = 32 << 20
MAX_STEPS: Final = 20_000
MAX_CAUSES: Final = 20_000
MAX_NAMES: Final = 100
"""The maximum number of groups, of transactional ids, and of topics."""
MAX_PARTITIONS: Final = 1_000
"""The maximum number of partitions of all topics together."""
MAX_RECORDS: Final = 200_000
"""The maximum number of records that a replay produces."""
MAX_SPAN_MS: Final = 7 * 86_400_000
MAX_TIME_MS: Final = 253_402_300_799_999
"""The end of the year 9999."""
MAX_CHARACTERS: Final = 10_000
"""The maximum number of characters in a text outside of requests."""

APIS_BY_NAME: Final[Mapping[str, int]] = {APIS[key].name: int(key) for key in SUBJECTS}

_SETTING_PREFIXES: Final = (
    *("group.consumer.", "group.share.", "group.min.", "group.max.", "group.initial."),
    *("transaction.max.", "transaction.partition.", "transactional.id."),
    "group.coordinator.rebalance.",
)
_GROUP_SETTING_PREFIXES: Final = ("consumer.", "share.")


class IncidentError(ValueError):
    """An incident file cannot be used."""


def is_setting(name: str) -> bool:
    """Return whether a broker's setting is part of an incident.

    Settings of assignors are not part of it, because they name classes, and a file must not choose
    which classes are loaded.
    """
    return name.startswith(_SETTING_PREFIXES) and not name.endswith("assignors")


def is_group_setting(name: str) -> bool:
    """Return whether a group's setting is part of an incident."""
    return name.startswith(_GROUP_SETTING_PREFIXES) and not name.endswith(("assignors", ".enable"))


class TopicOfIncident(NamedTuple):
    """A topic that the requests name."""

    id: str
    partitions: int


@dataclass(frozen=True, slots=True)
class Step:
    """One request, or the end of a connection (``api`` is ``connection-closed``).

    ``at_ms`` counts from the start of the incident. ``answered_after`` is the number of the last
    step that had begun when the response was sent; None for a request without a response.
    """

    number: int
    at_ms: int
    connection: int
    api: str
    client_id: str | None = None
    version: int = 0
    request: Mapping[str, Any] = field(default_factory=dict)
    answered_at_ms: int | None = None
    answered_after: int | None = None
    response: Mapping[str, Any] | None = None
    error: str | None = None
    """The error of a request that failed as a whole, without a response from its handler."""

    @property
    def is_end(self) -> bool:
        """Whether the client closed the connection, instead of sending a request."""
        return self.api == CONNECTION_CLOSED


@dataclass(frozen=True, slots=True)
class Cause:
    """An event with its cause; ``after`` is the number of the step before the event."""

    at_ms: int
    after: int
    subject: str
    what: str
    why: str | None = None
    member: str | None = None
    trigger: str | None = None


class Payload(NamedTuple):
    """The key, value and headers of a record, for ``--records``; bytes are base64 in the file."""

    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]


Payloads = Mapping[str, Mapping[int, Mapping[int, Payload]]]
"""Topic → partition → recorded offset → payload."""


@dataclass(frozen=True, slots=True)
class Incident:
    """Requests, times and causes; docs/testing.md describes the fields of the file."""

    start_ms: int
    end_ms: int
    groups: tuple[str, ...]
    transactional_ids: tuple[str, ...]
    settings: Mapping[str, str]
    group_settings: Mapping[str, Mapping[str, str]]
    features: Mapping[str, int]
    topics: Mapping[str, TopicOfIncident]
    steps: Sequence[Step]
    causes: Sequence[Cause]
    records: Payloads = field(default_factory=dict)

    @property
    def subjects(self) -> tuple[str, ...]:
        """All groups and transactional ids."""
        return self.groups + self.transactional_ids


def dump(incident: Incident) -> str:
    """Return the file's text, one step or cause a line."""
    plain = asdict(incident)
    plain["topics"] = {name: topic._asdict() for name, topic in incident.topics.items()}
    plain["records"] = _written_records(incident.records)
    lists = {name: plain.pop(name) for name in ("steps", "causes")}
    head = json.dumps({"format": FORMAT, "version": VERSION, **plain}, indent=2)[:-2]
    for name, rows in lists.items():
        kept = [
            {key: value for key, value in row.items() if value not in (None, {})} for row in rows
        ]
        lines = ",\n".join(f"    {json.dumps(row)}" for row in kept)
        head += f',\n  "{name}": [\n{lines}\n  ]' if kept else f',\n  "{name}": []'
    return head + "\n}\n"


def load(path: str | Path) -> Incident:
    """Read and check a file. Raises IncidentError, and OSError if it cannot be read."""
    with Path(path).open("rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    try:
        return _checked(data)
    except IncidentError as error:
        raise IncidentError(f"{path}: {error}") from None


def _checked(data: bytes) -> Incident:
    if len(data) > MAX_FILE_BYTES:
        raise IncidentError(f"larger than {MAX_FILE_BYTES} bytes")
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise IncidentError(f"not JSON: {error}") from None
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise IncidentError(f'not an incident: its "format" is not "{FORMAT}"')
    if values.get("version") != VERSION:
        shown = str(values.get("version"))[:20]
        raise IncidentError(f"version {shown} of the format, but only {VERSION} is known")
    start_ms, end_ms = (
        _number(values.get(name), f"{name} of the file", MAX_TIME_MS)
        for name in ("start_ms", "end_ms")
    )
    span = end_ms - start_ms
    if not 0 <= span <= MAX_SPAN_MS:
        raise IncidentError(f"end_ms is {span} ms after start_ms; the limit is {MAX_SPAN_MS}")
    topics = _topics(_mapping(values, "topics"))
    steps = [_step(at, step, span) for at, step in enumerate(_list(values, "steps", MAX_STEPS), 1)]
    _check_order(steps)
    return Incident(
        start_ms,
        end_ms,
        _names(values, "groups"),
        _names(values, "transactional_ids"),
        _settings(_mapping(values, "settings"), is_setting),
        {
            group: _settings(rows, is_group_setting)
            for group, rows in _mapping(values, "group_settings").items()
        },
        {
            name: _number(level, f"features.{name}", 100)
            for name, level in _mapping(values, "features").items()
        },
        topics,
        steps,
        [
            _cause(at, cause, span)
            for at, cause in enumerate(_list(values, "causes", MAX_CAUSES), 1)
        ],
        _read_records(_mapping(values, "records")),
    )


def _number(value: Any, where: str, most: int) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise IncidentError(f"{where} is {str(value)[:50]}, not a number from 0 to {most}")
    return value


def _number_or_none(values: Mapping[str, Any], name: str, where: str, most: int) -> int | None:
    value = values.get(name)
    return None if value is None else _number(value, f"{name} of {where}", most)


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or len(value) > MAX_CHARACTERS:
        raise IncidentError(f"{where} is not a text of at most {MAX_CHARACTERS} characters")
    return value


def _text_or_none(values: Mapping[str, Any], name: str, where: str) -> str | None:
    value = values.get(name)
    return None if value is None else _text(value, f"{name} of {where}")


def _mapping(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    mapping = values.get(name, {})
    if not isinstance(mapping, dict) or len(mapping) > MAX_NAMES:
        raise IncidentError(f"{name} is not an object of at most {MAX_NAMES} names")
    return mapping


def _list(values: Mapping[str, Any], name: str, most: int) -> list[Any]:
    items = values.get(name, [])
    if not isinstance(items, list) or len(items) > most:
        raise IncidentError(f"{name} is not an array of at most {most} elements")
    return items


def _names(values: Mapping[str, Any], name: str) -> tuple[str, ...]:
    return tuple(_text(value, name) for value in _list(values, name, MAX_NAMES))


def _settings(values: Any, is_allowed: Callable[[str], bool]) -> dict[str, str]:
    if not isinstance(values, dict):
        raise IncidentError("settings are not an object")
    for name, value in values.items():
        if not is_allowed(name):
            raise IncidentError(f"{name[:100]!r} is no setting that an incident may have")
        _text(value, name)
    return values


def _topics(values: Mapping[str, Any]) -> dict[str, TopicOfIncident]:
    topics, left = {}, MAX_PARTITIONS
    for name, row in values.items():
        if not isinstance(row, dict):
            raise IncidentError(f"topic {name[:100]!r} is not an object")
        where = f"partitions of topic {name[:100]!r}"
        partitions = _number(row.get("partitions"), where, left)
        left -= partitions
        topics[name] = TopicOfIncident(
            _text(row.get("id"), f"id of topic {name[:100]!r}"), partitions
        )
    return topics


def _row(row: Any, where: str, fields_type: type) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise IncidentError(f"{where} is not an object")
    unknown = sorted(row.keys() - set(fields_type.__dataclass_fields__))  # type: ignore[attr-defined]
    if unknown:
        raise IncidentError(f"{where} has no field {unknown[0][:100]!r}")
    return row


def _cause(at: int, row: Any, span: int) -> Cause:
    where = f"cause {at}"
    values = _row(row, where, Cause)
    return Cause(
        _number(values.get("at_ms"), f"at_ms of {where}", span),
        _number(values.get("after"), f"after of {where}", MAX_STEPS),
        _text(values.get("subject"), f"subject of {where}"),
        _text(values.get("what"), f"what of {where}"),
        *(_text_or_none(values, name, where) for name in ("why", "member", "trigger")),
    )


def _step(at: int, row: Any, span: int) -> Step:
    where = f"step {at}"
    values = _row(row, where, Step)
    if values.get("number") != at:
        raise IncidentError(f"{where} has the number {str(values.get('number'))[:20]}")
    at_ms = _number(values.get("at_ms"), f"at_ms of {where}", span)
    connection = _number(values.get("connection"), f"connection of {where}", MAX_STEPS)
    api = _text(values.get("api"), f"api of {where}")
    if api == CONNECTION_CLOSED:
        return Step(at, at_ms, connection, api)
    if api not in APIS_BY_NAME:
        raise IncidentError(f"api of {where} is {api[:50]!r}; known are {', '.join(APIS_BY_NAME)}")
    api_definition = APIS[APIS_BY_NAME[api]]
    version = _number(values.get("version"), f"version of {where}", api_definition.max_version)
    if version < api_definition.min_version:
        raise IncidentError(f"{where} is {api} version {version}, which is not served")
    client_id = _text_or_none(values, "client_id", where)
    response = values.get("response")
    if response is not None and not isinstance(response, dict):
        raise IncidentError(f"response of {where} is not an object")
    step = Step(
        at,
        at_ms,
        connection,
        api,
        client_id,
        version,
        values.get("request", {}),
        _number_or_none(values, "answered_at_ms", where, span),
        _number_or_none(values, "answered_after", where, MAX_STEPS),
        response,
        _text_or_none(values, "error", where),
    )
    try:
        body = from_json(api_definition.key, version, "request", step.request)
        encode_request(api_definition.key, version, 0, client_id, body)
        if response is not None:
            from_json(api_definition.key, version, "response", response)
    except (ValueError, WireError) as error:
        raise IncidentError(f"{where}, {api}: {error}") from None
    return step


def _written_records(records: Payloads) -> dict[str, Any]:
    return {
        topic: {
            str(index): {
                str(offset): [
                    _encoded(record.key),
                    _encoded(record.value),
                    [[name, _encoded(value)] for name, value in record.headers],
                ]
                for offset, record in rows.items()
            }
            for index, rows in partitions.items()
        }
        for topic, partitions in records.items()
    }


def _encoded(data: bytes | None) -> str | None:
    return None if data is None else base64.b64encode(data).decode()


def _read_records(values: Mapping[str, Any]) -> Payloads:
    """Read keys, values and headers; the file's size bounds them."""
    try:
        return {
            topic: {
                int(index): {int(offset): _payload(*row) for offset, row in rows.items()}
                for index, rows in partitions.items()
            }
            for topic, partitions in values.items()
        }
    except (ValueError, TypeError, AttributeError) as error:
        raise IncidentError(f"records: {error}") from None


def _payload(key: Any, value: Any, headers: Any) -> Payload:
    read = [(_text(name, "a header's name"), _decoded(data)) for name, data in headers]
    return Payload(_decoded(key), _decoded(value), tuple(read))


def _decoded(text: Any) -> bytes | None:
    return None if text is None else base64.b64decode(text, validate=True)


def _check_order(steps: Sequence[Step]) -> None:
    last_ms = 0
    for step in steps:
        if step.at_ms < last_ms:
            raise IncidentError(f"step {step.number} is before the step that it follows")
        last_ms = step.at_ms

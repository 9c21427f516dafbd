"""The routes from MQTT topics to Kafka topics, and the subscriptions that they need."""

from __future__ import annotations

import itertools
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fencepost.cluster.topic_names import check_name
from fencepost.logcore.machine import DomainError
from fencepost.pipelines.mqtt.message_ids import OwnId, canonical, json_id

_ILLEGAL = re.compile(r"[^a-zA-Z0-9._-]")
_FIELDS = {"filter": str, "topic": str, "key": str, "qos": int}
_PLACE = re.compile(r"\{(topic|\d+)\}")


class RouteError(ValueError):
    """A route is invalid, or no route matches a message."""


def check_filter(pattern: str) -> None:
    """Raise RouteError for a filter that no broker would accept."""
    levels = pattern.split("/")
    for index, level in enumerate(levels):
        last = index == len(levels) - 1
        if level == "#" and not last:
            raise RouteError(f"{pattern!r}: # must be the last level")
        if level not in {"+", "#"} and ("+" in level or "#" in level):
            raise RouteError(f"{pattern!r}: a wildcard is a level of its own")
    if not pattern or "\0" in pattern or len(pattern.encode()) > 65_535:
        raise RouteError(f"{pattern!r}: not an MQTT topic filter")
    if levels[0] == "$share":
        raise RouteError(f"{pattern!r}: a shared subscription repeats messages to other clients")


def covers(wide: str, narrow: str) -> bool:
    """Return whether ``wide`` matches every topic that ``narrow`` matches.

    A topic is a filter that matches only itself. ``+`` matches one level, ``#`` the rest. A leading
    wildcard does not match topics that begin with ``$`` (MQTT 5, 4.7).
    """
    if narrow.startswith("$") and wide[:1] in {"+", "#"}:
        return False
    narrow_levels = narrow.split("/")
    for index, level in enumerate(ours := wide.split("/")):
        if level == "#":
            return True
        if (
            index >= len(narrow_levels)
            or narrow_levels[index] == "#"
            or level not in {"+", narrow_levels[index]}
        ):
            return False
    return len(ours) == len(narrow_levels)


def overlap(one: str, other: str) -> bool:
    """Return whether any topic matches both filters."""
    if {one[:1], other[:1]} & {"+", "#"} and "$" in {one[:1], other[:1]}:
        return False
    left, right = one.split("/"), other.split("/")
    for ours, theirs in zip(left, right, strict=False):
        if "#" in {ours, theirs}:
            return True
        if ours != theirs and "+" not in {ours, theirs}:
            return False
    rest = left[len(right) :] or right[len(left) :]
    return not rest or rest == ["#"]


def fill(template: str, topic: str) -> str:
    """Put the MQTT topic (``{topic}``) or its levels (``{0}``, ``{1}`` …) into ``template``."""
    levels = topic.split("/")

    def place(match: re.Match[str]) -> str:
        name = match.group(1)
        if name == "topic":
            return topic
        if int(name) >= len(levels):
            raise RouteError(f"{topic!r} has no level {name}, which {template!r} names")
        return levels[int(name)]

    return _PLACE.sub(place, template)


@dataclass(frozen=True, slots=True)
class Route:
    """The Kafka topic and key, as templates, of messages that match a filter.

    Characters that are illegal in a Kafka topic become ``_``.
    """

    pattern: str
    topic: str
    key: str = "{topic}"
    qos: int = 2

    def __post_init__(self) -> None:
        check_filter(self.pattern)
        if self.qos not in {0, 1, 2}:
            raise RouteError(f"{self.pattern!r}: QoS is 0, 1 or 2, not {self.qos}")
        if not self.topic:
            raise RouteError(f"{self.pattern!r}: it needs a Kafka topic")
        levels = self.pattern.split("/")
        for template in (self.topic, self.key):
            numbers = [int(name) for name in _PLACE.findall(template) if name != "topic"]
            if levels[-1] != "#" and max(numbers, default=0) >= len(levels):
                raise RouteError(f"{self.pattern!r} has no level {max(numbers)}: {template!r}")

    def target(self, topic: str) -> tuple[str, bytes]:
        """Return the Kafka topic and key of a message. Raises RouteError."""
        name = _ILLEGAL.sub("_", fill(self.topic, topic))
        try:
            check_name(name)
        except DomainError as error:
            raise RouteError(f"{topic!r} gives no Kafka topic: {error}") from None
        return name, fill(self.key, topic).encode()


@dataclass(frozen=True, slots=True)
class MessageId:
    """The place of a message's own id: ``property:NAME``, ``json:FIELD`` or ``level:N``.

    An id is unique among the messages of one MQTT topic.
    """

    kind: str
    name: str

    @classmethod
    def parse(cls, text: str) -> MessageId:
        """Parse one of the three forms. Raises RouteError for any other text."""
        kind, _, name = text.partition(":")
        is_valid = kind in {"property", "json"} or (kind == "level" and name.isdecimal())
        if not is_valid or not name:
            raise RouteError(f"{text!r}: it must be property:NAME, json:FIELD or level:N")
        return cls(kind, name)

    def of(self, topic: str, payload: bytes, properties: Iterable[tuple[str, str]]) -> OwnId | None:
        """Return the id of a message, None if it has none.

        If a user property occurs several times, all its values together form the id.
        """
        if self.kind == "json":
            return json_id(payload, self.name)
        if self.kind == "level":
            levels = topic.split("/")
            return OwnId(levels[int(self.name)]) if int(self.name) < len(levels) else None
        texts = [text for name, text in properties if name == self.name]
        if len(texts) > 1:
            return OwnId(canonical(texts), is_json=True, former=texts[-1])
        return OwnId(texts[0]) if texts else None


@dataclass(frozen=True, slots=True)
class Mapped:
    """All routes; the first route with a matching filter applies.

    A broker may deliver a message once for each matching subscription (MQTT 5, 3.3.4), each time
    with its own packet id, so subscriptions must not overlap. Raises RouteError if two do.
    """

    routes: tuple[Route, ...]
    message_id: MessageId = field(default_factory=lambda: MessageId("property", "message-id"))

    def __post_init__(self) -> None:
        for (one, _), (other, _) in itertools.combinations(self.subscriptions, 2):
            if overlap(one, other):
                raise RouteError(
                    f"{one!r} and {other!r} overlap: a broker may deliver twice what fits both; "
                    "a last route whose filter covers them makes them one subscription"
                )

    @property
    def subscriptions(self) -> list[tuple[str, int]]:
        """The filters that no other filter covers, each with the highest QoS of those it covers."""
        covered = set(self.covered)
        return [
            (wide, max(route.qos for route in self.routes if covers(wide, route.pattern)))
            for wide in dict.fromkeys(route.pattern for route in self.routes)
            if wide not in covered
        ]

    @property
    def covered(self) -> list[str]:
        """Filters that do not need a subscription of their own."""
        patterns = dict.fromkeys(route.pattern for route in self.routes)
        return [
            pattern
            for pattern in patterns
            if any(wide != pattern and covers(wide, pattern) for wide in patterns)
        ]

    def route(self, topic: str) -> Route:
        """Return the route of a topic. Raises RouteError if there is none."""
        for route in self.routes:
            if covers(route.pattern, topic):
                return route
        raise RouteError(f"no route for {topic!r}")


def load(path: Path) -> Mapped:
    """Read a TOML file: ``message_id``, and ``[[route]]`` tables with filter, topic, key, qos."""
    try:
        content: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RouteError(f"{path}: {error}") from error
    unknown = set(content) - {"route", "message_id"}
    tables = content.get("route")
    if unknown or not isinstance(tables, list) or not tables:
        raise RouteError(
            f"{path}: it must contain [[route]] tables, and may contain message_id"
            + (f", not {', '.join(sorted(unknown))}" if unknown else "")
        )
    routes = []
    for table in tables:
        wrong = set(table) - set(_FIELDS) if isinstance(table, dict) else {"no table"}
        if wrong or "filter" not in table or "topic" not in table:
            raise RouteError(f"{path}: a route has filter, topic, key and qos: {table}")
        for name, value in table.items():
            if type(value) is not _FIELDS[name]:
                raise RouteError(
                    f"{path}: {name} = {value!r}: it must be of type {_FIELDS[name].__name__}"
                )
        routes.append(
            Route(table["filter"], table["topic"], table.get("key", "{topic}"), table.get("qos", 2))
        )
    message_id = content.get("message_id", "property:message-id")
    if not isinstance(message_id, str):
        raise RouteError(f"{path}: message_id = {message_id!r}: it must be of type str")
    return Mapped(tuple(routes), MessageId.parse(message_id))

"""Tables of settings, from the definitions that the broker itself reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from fencepost.coordinator.config.broker_keys import BROKER_KEYS, REPLACED
from fencepost.coordinator.config.client_metrics import CLIENT_METRICS_KEYS
from fencepost.coordinator.config.group_keys import GROUP_OWN_KEYS
from fencepost.coordinator.config.ignored_keys import IGNORED_KEYS
from fencepost.coordinator.config.key import ConfigKey
from fencepost.coordinator.config.topic_keys import REFUSED_TOPIC_KEYS, TOPIC_KEYS

_LIMITS = {-(1 << 31), (1 << 31) - 1, -(1 << 63), (1 << 63) - 1}
"""The bounds of the integer types. A table shows no bound that follows from the type."""


def cell(text: str) -> str:
    """Return ``text`` as the cell of a table."""
    return " ".join(text.split()).replace("|", r"\|")


def table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table; the cells are Markdown already."""
    heads = list(columns)
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines)


def _default(key: ConfigKey) -> str:
    if key.default is None:
        return "not set"
    if key.default == "":
        return "empty"
    if key.default == str((1 << 63) - 1):
        return "unlimited"
    return f"`{cell(key.default)}`"


def _bound(value: float) -> str:
    return str(int(value)) if value == int(value) else str(value)


def _values(key: ConfigKey) -> str:
    """Return the valid values of ``key``: its choices or its bounds."""
    if key.choices:
        return f"of {', '.join(f'`{choice}`' for choice in key.choices)}"
    low = None if key.low is None or key.low in _LIMITS else key.low
    high = None if key.high is None or key.high in _LIMITS else key.high
    if low is not None and high is not None:
        return f"{_bound(low)} to {_bound(high)}"
    if low is not None:
        return f"from {_bound(low)}"
    return "" if high is None else f"to {_bound(high)}"


def _row(key: ConfigKey, default: str, change: str = "") -> tuple[str, ...]:
    told = (key.type.name.lower(), key.unit, _values(key), change)
    meaning = f"{cell(key.doc)} *{', '.join(word for word in told if word)}*"
    return f"`{key.name}`", default, meaning


def _rows(
    keys: Iterable[ConfigKey], default: Callable[[ConfigKey], str]
) -> Iterator[tuple[str, ...]]:
    for key in sorted(keys, key=lambda key: key.name):
        if not key.inert:
            yield _row(key, default(key))


def broker_table() -> str:
    """Return the table of the broker's keys that have an effect."""
    rows = [
        _row(key, _default(key), "while it runs" if key.updatable else "")
        for key in sorted(BROKER_KEYS.values(), key=lambda key: key.name)
        if not key.inert
    ]
    return table(("key", "default", "meaning"), rows)


def topic_table() -> str:
    """Return the table of the topic keys that have an effect."""

    def default(key: ConfigKey) -> str:
        return ", ".join(f"`{synonym.name}`" for synonym in key.synonyms) or "not set"

    return table(("key", "default: the broker's", "meaning"), _rows(TOPIC_KEYS.values(), default))


def group_table() -> str:
    """Return the table of the keys that can be set for a single consumer group."""
    rows = _rows(GROUP_OWN_KEYS.values(), lambda key: f"`group.{key.name}`")
    return table(("key", "default: the broker's", "meaning"), rows)


def inert_table() -> str:
    """Return the table of keys that are accepted without effect or refused, with the reasons."""
    rows = []
    for where, keys in (
        ("broker", BROKER_KEYS),
        ("topic", TOPIC_KEYS),
        ("group", GROUP_OWN_KEYS),
        ("client metrics", CLIENT_METRICS_KEYS),
    ):
        reasons: dict[str, list[str]] = {}
        for key in keys.values():
            if key.inert:
                reasons.setdefault(key.inert, []).append(f"`{key.name}`")
        rows += [(where, ", ".join(names), cell(why)) for why, names in reasons.items()]
    reasons = {}
    for name, why in IGNORED_KEYS.items():
        reasons.setdefault(why, []).append(f"`{name}`")
    rows += [("broker, not kept", ", ".join(names), cell(why)) for why, names in reasons.items()]
    for where, refused in (("broker", REPLACED), ("topic", REFUSED_TOPIC_KEYS)):
        rows += [
            (f"{where}, refused", f"`{name}`", cell(reason)) for name, reason in refused.items()
        ]
    return table(("of", "keys", "why"), rows)

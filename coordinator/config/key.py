"""Configuration keys: their types, bounds and choices, and the parsing of their values.

Values are parsed as in Kafka's ``ConfigDef``: surrounding blanks are stripped, ``true`` and
``false`` may be in any case, and lists are split at commas.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum
from ipaddress import IPv6Address, ip_address

from fencepost.logcore.machine import DomainError
from fencepost.logcore.values import dataclass

Value = int | float | str | bool | tuple[str, ...] | None

MAX_VALUE_CHARACTERS = 32_768
"""The maximum number of characters of a value. Longer values would not fit into DescribeConfigs,
whose older versions limit strings to 32,767 bytes."""

HIDDEN = "[hidden]"
"""Shown instead of a sensitive value, as in Kafka."""

SHOWN_CHARACTERS = 100
"""The maximum number of characters of a rejected value in the error message."""


class ConfigError(DomainError):
    """A key is unknown, or its value is invalid (INVALID_CONFIG).

    ``value`` is None if the error is not about a value. ``message`` is given for errors whose
    message in Kafka does not begin with the key or "Invalid value".
    """

    def __init__(self, key: str, value: object, reason: str, message: str = "") -> None:
        shown = str(value)
        if len(shown) > SHOWN_CHARACTERS:
            shown = shown[:SHOWN_CHARACTERS] + "…"
        what = key if value is None else f"Invalid value {shown} for configuration {key}"
        super().__init__(message or f"{what}: {reason}")
        self.key = key
        self.value = value
        self.reason = reason


class ConfigType(IntEnum):
    """A value's type, with its number in DescribeConfigs."""

    UNKNOWN = 0
    BOOLEAN = 1
    STRING = 2
    INT = 3
    SHORT = 4
    LONG = 5
    DOUBLE = 6
    LIST = 7
    CLASS = 8
    PASSWORD = 9


_BITS = {ConfigType.SHORT: 16, ConfigType.INT: 32, ConfigType.LONG: 64}


@dataclass(frozen=True, slots=True)
class Synonym:
    """A broker key that gives a topic key's default; ``factor`` converts the unit."""

    name: str
    factor: int = 1


@dataclass(frozen=True, slots=True)
class ConfigKey:
    """One key. ``default`` is text, as DescribeConfigs shows it; None if the key has no default."""

    name: str
    type: ConfigType
    default: str | None
    doc: str
    unit: str = ""
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    updatable: bool = False
    """Whether a broker key can be changed while the broker runs. (A topic key always can.)"""
    inert: str = ""
    """Why the key has no effect here; empty for a key that has an effect. Keys without effect are
    accepted with a warning, so that a configuration made for Apache Kafka works."""
    synonyms: tuple[Synonym, ...] = ()
    """For a topic key, the broker keys that give its default, the strongest first."""
    any_case: bool = False
    """Whether the choices may be written in any case."""
    form: str = ""
    """The name in :data:`FORMS` of the function that checks the value; empty for no check."""
    internal: bool = False
    """Whether DescribeConfigs shows the key only if it is set (``ConfigDef.defineInternal``)."""

    def parse(self, text: str) -> Value:
        """Return the value that ``text`` stands for. Raises :class:`ConfigError`."""
        text = text.strip()
        if len(text) > MAX_VALUE_CHARACTERS:
            raise self._refuse(text, f"it is longer than {MAX_VALUE_CHARACTERS} characters")
        if self.type is ConfigType.BOOLEAN:
            if text.lower() not in {"true", "false"}:
                raise self._refuse(text, "Expected value to be either true or false")
            return text.lower() == "true"
        if self.type in {ConfigType.STRING, ConfigType.PASSWORD}:
            if self.any_case:
                text = text.lower()
            self._check_choice(text, [text])
            self._check_form(text)
            return text
        if self.type is ConfigType.LIST:
            # As in ``ConfigDef.parseValue``, a repeated item counts once (KIP-1161).
            items = tuple(dict.fromkeys(map(str.strip, text.split(",")))) if text else ()
            self._check_choice(text, items)
            self._check_form(text)
            return items
        return self._number(text)

    def _check_form(self, text: str) -> None:
        if self.form:
            try:
                FORMS[self.form](text)
            except ValueError as error:
                raise self._refuse(text, str(error)) from error

    def value_of(self, text: str | None) -> Value:
        """Return the value of ``text``, or of the default if ``text`` is None."""
        if text is not None:
            return self.parse(text)
        return None if self.default is None else self.parse(self.default)

    def _number(self, text: str) -> int | float:
        try:
            value = float(text) if self.type is ConfigType.DOUBLE else int(text)
        except ValueError as error:
            raise self._refuse(text, self._not_a_number()) from error
        if self.type in _BITS:
            bound = 1 << (_BITS[self.type] - 1)
            if not -bound <= value < bound:
                raise self._refuse(text, self._not_a_number())
        if self.low is not None and not value >= self.low:
            raise self._refuse(text, f"Value must be at least {self.low}")
        if self.high is not None and not value <= self.high:
            raise self._refuse(text, f"Value must be no more than {self.high}")
        self._check_choice(text, [str(value)])
        return value

    def _not_a_number(self) -> str:
        return f"Not a number of type {self.type.name}"

    def _check_choice(self, text: str, items: Sequence[str]) -> None:
        if self.choices and not all(item in self.choices for item in items):
            how = " (case insensitive)" if self.any_case else ""
            raise self._refuse(text, f"String must be one of{how}: {', '.join(self.choices)}")

    def _refuse(self, text: str, reason: str) -> ConfigError:
        return ConfigError(self.name, HIDDEN if self.is_sensitive else text, reason)

    @property
    def is_sensitive(self) -> bool:
        """Whether clients must not see the value of a password or of an unknown key.

        Source: ``KafkaConfig.maybeSensitive``.
        """
        return self.type in {ConfigType.PASSWORD, ConfigType.UNKNOWN}


def counts_of_addresses(text: str) -> dict[str, int]:
    """Parse HOST:COUNT entries separated by commas; return the counts by client address.

    ``localhost`` is the only host name that is accepted. Raises ValueError.
    """
    counts: dict[str, int] = {}
    for entry in filter(None, map(str.strip, text.split(","))):
        host, _, count = entry.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not host or not count.isdecimal():
            raise ValueError(f"{entry!r} is not HOST:COUNT")
        for address in ("127.0.0.1", "::1") if host == "localhost" else (host,):
            counts[plain_address(address)] = int(count)
    return counts


def plain_address(host: str) -> str:
    """Return an IP address as text; for an IPv4-mapped address, the IPv4 address.

    Raises ValueError.
    """
    try:
        address = ip_address(host)
    except ValueError:
        raise ValueError(
            f"{host!r} is not an IP address, and host names are not resolved"
        ) from None
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return str(address if mapped is None else mapped)


RACK_AWARE = "org.apache.kafka.common.replica.RackAwareReplicaSelector"
LEADER_ALONE = "org.apache.kafka.common.replica.LeaderSelector"
"""Classes for ``replica.selector.class``: consumers fetch from a replica in their rack, or from the
leader."""


def replica_selector(text: str) -> str:
    """Return ``text`` if it names a class of Apache Kafka that is built in. Raises ValueError."""
    if text not in {"", LEADER_ALONE, RACK_AWARE}:
        raise ValueError(f"Java classes are not loaded; built in is {RACK_AWARE}")
    return text


def throttled_replicas(text: str) -> frozenset[tuple[int, int]] | None:
    """Parse PARTITION:BROKER entries; return the pairs, or None for ``*``, which means all.

    Raises ValueError. Source: ``ThrottledReplicaListValidator``.
    """
    if text.strip() == "*":
        return None
    entries = [entry.strip().partition(":") for entry in text.split(",")] if text.strip() else []
    if not all(index.isdecimal() and broker.isdecimal() for index, _, broker in entries):
        raise ValueError(
            "must be the literal '*' or a list of replicas in the following format:"
            " [partitionId]:[brokerId],[partitionId]:[brokerId],..."
        )
    return frozenset((int(index), int(broker)) for index, _, broker in entries)


def distinct_items(text: str) -> list[str]:
    """Return the items of a list. Raises ValueError if one is repeated."""
    items = [item.strip() for item in text.split(",")] if text.strip() else []
    if len(set(items)) < len(items):
        raise ValueError("an item is repeated")
    return items


FORMS: Mapping[str, Callable[[str], object]] = {
    "counts-of-addresses": counts_of_addresses,
    "distinct-items": distinct_items,
    "replica-selector": replica_selector,
    "throttled-replicas": throttled_replicas,
}
"""Functions that raise ValueError for an invalid value, by the name in ``form=``."""


def read_keys(table: str) -> tuple[ConfigKey, ...]:
    """Return the keys of a table.

    An entry is a line for :func:`read_key`, followed by the key's description, which is indented.
    """
    entries = (entry.splitlines() for entry in re.split(r"\n(?! )", table.strip()))
    return tuple(read_key(head, " ".join(map(str.strip, doc))) for head, *doc in entries)


def read_key(line: str, doc: str, inert: str = "") -> ConfigKey:
    """Parse a line of a table: name, type, default (``-`` for none), and constraints.

    The constraints are ``unit=``, ``low=``, ``high=``, ``form=``, and ``of=`` with choices
    separated by commas. ``dynamic`` means that the key can be changed while the broker runs,
    ``any-case`` that its choices may be written in any case, ``internal`` that DescribeConfigs
    shows the key only if it is set.
    """
    name, kind, default, *rest = line.split()
    given = dict(item.partition("=")[::2] for item in rest)
    low, high, choices = given.get("low"), given.get("high"), given.get("of")
    return ConfigKey(
        name,
        ConfigType[kind],
        None if default == "-" else default.strip('"'),
        doc,
        given.get("unit", ""),
        None if low is None else int(low),
        None if high is None else int(high),
        () if choices is None else tuple(choices.split(",")),
        updatable="dynamic" in given,
        any_case="any-case" in given,
        inert=inert,
        form=given.get("form", ""),
        internal="internal" in given,
    )


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint for the error about an unknown ``name``: a similar ``known`` name, if any."""
    import difflib  # noqa: PLC0415 - only errors need it

    spelling = {value.lower(): value for value in known}
    close = difflib.get_close_matches(name.lower(), list(spelling), n=1)
    return f"; did you mean {spelling[close[0]]}?" if close else ""


def setting_text(key: str, value: object) -> str:
    """Convert a setting from a string, number, boolean or list of strings to a string.

    Raises ConfigError for anything else.
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (str, int, float)):
        return str(value)
    if isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value):
        return ",".join(value)
    raise ConfigError(key, value, "expected text, a number, true, false or a list of texts")


def text_of(value: Value) -> str | None:
    """Return a value as DescribeConfigs shows it."""
    if value is None:
        return None
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return ",".join(value)
    return str(value)

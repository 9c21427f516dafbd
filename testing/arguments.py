"""Checks of a test's arguments, before a method does anything with them.

Each rule belongs to a parameter name, and holds wherever that name occurs. An error is one
sentence, with the nearest existing name.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any, Final, TypeVar

from fencepost.coordinator.config.key import nearest

C = TypeVar("C", bound=type)

RECORD_STATES: Final = ("ACKNOWLEDGED", "ACQUIRED", "ARCHIVED", "ARCHIVING", "AVAILABLE")
"""Kafka's names of the states of records in share groups."""

ISOLATIONS: Final = ("read_committed", "read_uncommitted")

MAX_SHORT: Final = (1 << 15) - 1
MAX_INT: Final = (1 << 31) - 1
MAX_LONG: Final = (1 << 63) - 1
MAX_NAME_BYTES: Final = (1 << 15) - 1
"""The length limit of a string in Kafka's protocol."""

LAST_MS: Final = 253_402_300_799_999
"""The end of the year 9999, after which times cannot be formatted."""

GROUP_STATES: Final = (
    "Assigning",
    "CompletingRebalance",
    "Dead",
    "Empty",
    "PreparingRebalance",
    "Reconciling",
    "Stable",
)
"""Kafka's names of the group states in both protocols."""


def one_of(what: str, value: object, allowed: Iterable[str]) -> None:
    """Raise ValueError unless ``value`` is among ``allowed``."""
    allowed = list(allowed)
    if value not in allowed:
        hint = nearest(value, allowed) if isinstance(value, str) else ""
        raise ValueError(f"{what} is one of {', '.join(allowed)}, not {value!r}{hint}")


def names(what: str, given: Iterable[str], allowed: Iterable[str]) -> None:
    """Raise TypeError for the first name that is not in ``allowed``."""
    allowed = list(allowed)
    for item in given:
        if item not in allowed:
            there = f"; there are {', '.join(f'{name}=' for name in allowed)}"
            raise TypeError(f"{what} has no {item}={nearest(item, allowed) or there}")


def setting_texts(settings: Mapping[str, object]) -> dict[str, str]:
    """Return settings as Kafka writes them. Raises TypeError for an invalid value."""
    if not isinstance(settings, Mapping):
        raise TypeError(f"config is a mapping of settings, not {settings!r}")
    texts = {}
    for key, value in settings.items():
        if not isinstance(key, str):
            raise TypeError(f"config: a setting's name is a str, not {key!r}")
        if isinstance(value, bool):
            texts[key] = str(value).lower()
        elif isinstance(value, (str, int, float)):
            texts[key] = str(value)
        else:
            raise TypeError(f"{key}={value!r}: a setting is a str, a number or a truth value")
    return texts


def name_of(what: str, value: object) -> str:
    """Check a name that a request will carry. Raises TypeError, ValueError."""
    if not isinstance(value, str):
        raise TypeError(f"{what} is a str, not {value!r}")
    if not value:
        raise ValueError(f"{what} is empty")
    if len(utf8(what, value)) > MAX_NAME_BYTES:
        raise ValueError(f"{what} has more than {MAX_NAME_BYTES} bytes: {value[:20]!r}…")
    return value


def utf8(what: str, value: str) -> bytes:
    """Return a text in UTF-8. Raises ValueError for a lone surrogate."""
    try:
        return value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{what} cannot be encoded as UTF-8: {value!r}") from None


def integer(what: str, value: object, least: int = -MAX_LONG - 1, most: int = MAX_LONG) -> int:
    """Check a number that a request will carry. Raises TypeError, ValueError."""
    if type(value) is not int:
        raise TypeError(f"{what} is an int, not {value!r}")
    if value < least:
        raise ValueError(f"{what} is {least} or more, not {value}")
    if value > most:
        raise ValueError(f"{what} is {most} at most, not {value}")
    return value


def _integer(least: int, most: int = MAX_INT) -> Callable[[str, object], object]:
    return lambda what, value: integer(what, value, least, most)


def _duration(what: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{what} is a number, not {value!r}")
    if not 0 <= value < math.inf:
        raise ValueError(f"{what} is 0 or more, and finite, not {value}")


def _speed(what: str, value: object) -> None:
    _duration(what, value)
    if not value:
        raise ValueError(f"{what} is above 0, not {value}")


def flag(what: str, value: object) -> None:
    """Raise TypeError for a value that is not a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{what} is True or False, not {value!r}")


def _path(what: str, value: object) -> None:
    if not isinstance(value, (str, Path)):
        raise TypeError(f"{what} is a path, not {value!r}")


def _function(what: str, value: object) -> None:
    if not callable(value):
        raise TypeError(f"{what} is a function, not {value!r}")


def _settings(_what: str, value: object) -> None:
    setting_texts(value)  # type: ignore[arg-type]  # it refuses what is no mapping


def _isolation(what: str, value: object) -> None:
    one_of(what, value, ISOLATIONS)


def _state(what: str, value: object) -> None:
    one_of(what, value, GROUP_STATES)


def _until(what: str, value: object) -> None:
    one_of(what, value, RECORD_STATES)


def _record(what: str, value: object) -> None:
    if not isinstance(value, tuple) or len(value) < 3:
        raise TypeError(f"{what} is a record, or (topic, partition, offset), not {value!r}")
    name_of("a topic", value[0])
    integer("a partition", value[1], 0)
    integer("an offset", value[2], 0)


CHECKS: Final[Mapping[str, Callable[[str, object], object]]] = {
    **dict.fromkeys(("topic", "group", "name", "base", "subject", "user", "what"), name_of),
    **dict.fromkeys(("timeout", "seconds", "ms", "delay_ms"), _duration),
    **dict.fromkeys(("at_least", "hits", "index", "lag", "members"), _integer(0)),
    **dict.fromkeys(("partition", "size"), _integer(0)),
    **dict.fromkeys(("partitions", "replicas", "times", "brokers", "delivery_count"), _integer(1)),
    "broker_id": _integer(-MAX_INT),
    "level": _integer(0, MAX_SHORT),
    "timestamp_ms": integer,
    "now_ms": _integer(0, LAST_MS),
    **dict.fromkeys(("tls", "one_way", "auto"), flag),
    **dict.fromkeys(("look", "rename"), _function),
    "speed": _speed,
    "config": _settings,
    "data_dir": _path,
    "isolation": _isolation,
    "record": _record,
    "until": _until,
    "state": _state,
}
"""The rule for an argument, by the name of its parameter."""


def checked(cls: C) -> C:
    """Make the public methods of a class check their arguments first."""
    for name, method in list(vars(cls).items()):
        if inspect.isfunction(method) and (name == "__init__" or not name.startswith("_")):
            setattr(cls, name, _checking(method, cls.__name__ if name == "__init__" else name))
    return cls


def _checking(method: Callable[..., Any], called: str) -> Callable[..., Any]:
    signature = inspect.signature(method)
    rules = [
        (parameter.name, CHECKS[parameter.name], str(parameter.annotation).endswith("| None"))
        for parameter in signature.parameters.values()
        if parameter.name in CHECKS
    ]
    if not rules:
        return method

    def check(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:
            raise _unbound(signature, called, args, kwargs) from None
        for name, rule, may_be_none in rules:
            if name in given and not (may_be_none and given[name] is None):
                rule(name, given[name])

    if inspect.iscoroutinefunction(method):

        @wraps(method)
        async def call_async(*args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            check(args, kwargs)
            return await method(*args, **kwargs)

        return call_async

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        check(args, kwargs)
        return method(*args, **kwargs)

    return call


def _unbound(
    signature: inspect.Signature, called: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> TypeError:
    """Return the error of a call whose arguments do not match the signature."""
    parameters = [
        parameter for parameter in signature.parameters.values() if parameter.name != "self"
    ]
    parameter_names = [
        parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_POSITIONAL
    ]
    try:
        names(f"{called}()", kwargs, parameter_names)
    except TypeError as error:
        return error
    by_name = [
        parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY
    ]
    by_place = [
        str(parameter).partition(":")[0]
        for parameter in parameters
        if parameter.name not in by_name
    ]
    shown = ", ".join([*by_place, *(["*"] if by_name else []), *by_name])
    given = [*map(repr, args[1:]), *(f"{name}=…" for name in kwargs)]
    return TypeError(f"{called}({shown}) does not fit {called}({', '.join(given)})")

"""Builders of messages of any version from one set of field names.

A handler serves up to a dozen versions of its API. It passes the fields of all versions to a
:class:`MessageFactory`, which drops the fields that the request's version lacks, and gives missing
fields Kafka's defaults. A misspelled name, which exists in no version, raises an error.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from fencepost.logcore.values import mutable_class
from fencepost.protocol.limits import MAX_ERROR_TEXT_CHARACTERS
from fencepost.protocol.schema import (
    Builder,
    Entity,
    Side,
    all_fields,
    is_known,
    message_class,
    struct_class,
)
from fencepost.protocol.writer import FunctionSource

ERROR_TEXTS = frozenset({"error_message", "batch_index_error_message"})
"""Fields with error messages, which may quote long values of the request."""


class MessageFactory:
    """Builds the structures of one message: ``factory.TopicProduceResponse(name=…, …)``.

    Attribute names are kio's class names. Field names are kio's, with two additions:

    * a time or duration field may be given as ``<field>_ms`` with an integer of milliseconds
      (``throttle_time_ms=0``, ``log_append_time_ms=-1``); -1 is allowed for every time;
    * error codes are given as ``ErrorCode`` or as an integer; an error message is cut at
      ``MAX_ERROR_TEXT_CHARACTERS``.

    Arrays may be any sequence. For a class that this version lacks the result is None, because the
    field that would hold the structure is dropped as well.
    """

    def __init__(self, api_key: int, version: int, side: Side) -> None:
        self._api_key = api_key
        self._side: Side = side
        self.version = version

    def __getattr__(self, name: str) -> Builder:
        if name.startswith("_"):
            raise AttributeError(name)
        cls = struct_class(self._api_key, self.version, self._side, name)
        if cls is None:
            if not is_known(self._api_key, self._side, name):
                raise AttributeError(f"no version of {self._cls.__name__} has a structure {name}")
            builder: Builder = _build_nothing
        else:
            builder = self._builder(cls)
        setattr(self, name, builder)
        return builder

    def message(self, **values: Any) -> Entity:
        """Build the whole message (``ProduceResponse`` of a Produce response) from its fields."""
        builder: Builder = getattr(self, self._cls.__name__)
        return builder(**values)

    @property
    def _cls(self) -> type:
        return message_class(self._api_key, self.version, self._side)

    def _builder(self, cls: type) -> Builder:
        names = {info.name: info.name for info in all_fields(cls)}
        names.update({f"{info.name}_ms": info.name for info in all_fields(cls) if info.is_time})
        defaults = {info.name: info.default for info in all_fields(cls)}
        plans: dict[tuple[str, ...], Callable[[dict[str, Any]], Entity]] = {}
        unfrozen = mutable_class(cls)

        def plan_for(names_given: tuple[str, ...]) -> Callable[[dict[str, Any]], Entity]:
            for name in names_given:
                if name not in names:
                    self._check_known(cls, name)
            set_fields = {names[name]: name for name in names_given if name in names}
            src = FunctionSource(
                new=object.__new__, unfrozen=unfrozen, cls=cls, shortened=_shortened
            )
            src.line("    ", "entity = new(unfrozen)")
            for target, default in defaults.items():
                if target not in set_fields:
                    value = src.name(default, "default")
                else:
                    value = f"values[{set_fields[target]!r}]"
                    value = f"shortened({value})" if target in ERROR_TEXTS else value
                src.line("    ", f"entity.{target} = {value}")
            src.line("    ", "entity.__class__ = cls")
            src.line("    ", "return entity")
            plans[names_given] = src.function(
                "def build(values):", f"builder of {cls.__qualname__}"
            )
            return plans[names_given]

        def build(**values: Any) -> Entity:
            # A call site always passes the same names, so the plan is made once.
            names_given = tuple(values)
            return (plans.get(names_given) or plan_for(names_given))(values)

        return build

    def _check_known(self, cls: type, name: str) -> None:
        if not any(
            is_known(self._api_key, self._side, cls.__name__, key)
            for key in dict.fromkeys((name, name.removesuffix("_ms")))
        ):
            raise TypeError(f"no version of {cls.__name__} has a field {name}")


def _shortened(text: str | None) -> str | None:
    if text is None or len(text) <= MAX_ERROR_TEXT_CHARACTERS:
        return text
    return text[: MAX_ERROR_TEXT_CHARACTERS - 1] + "…"


def _build_nothing(**_values: Any) -> Entity:
    return None


class ResponseFactory(MessageFactory):
    """Builds the structures of one API's response at one version."""

    def error(self, code: int, message: str | None = None) -> Entity:
        """Return the response with only the top-level error set.

        None if this version of the response has no top-level error code (Produce, OffsetCommit and
        others report errors item by item).
        """
        cls = self._cls
        names = {info.name for info in all_fields(cls)}
        if "error_code" not in names:
            return None
        values: dict[str, object] = {"error_code": code}
        if "error_message" in names:
            values["error_message"] = _shortened(message)
        return cls(**{info.name: info.default for info in all_fields(cls)} | values)


RequestFactory = MessageFactory
"""Builds the structures of one API's request at one version."""


@cache
def response_factory(api_key: int, version: int) -> ResponseFactory:
    """Return the factory of an API and version. It is shared, so classes are looked up once."""
    return ResponseFactory(api_key, version, "response")


@cache
def request_factory(api_key: int, version: int) -> RequestFactory:
    """Return the factory of an API and version. It is shared, so classes are looked up once."""
    return RequestFactory(api_key, version, "request")

"""kio's message classes by API and version, and the wire format of their fields.

The writer (``writer.py``) and the walker (``precheck.py``) are compiled from :func:`fields_of`,
which reads the layout from the classes of kio and ``overlay.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, field, fields, is_dataclass, make_dataclass
from datetime import timedelta
from functools import cache
from importlib import import_module
from pathlib import Path
from struct import calcsize
from types import ModuleType, NoneType, UnionType
from typing import Any, Final, Literal, get_args, get_origin

import kio.schema
from kio.static.constants import EntityType
from kio.static.primitive import TZAware

from fencepost.logcore.values import dataclass
from fencepost.protocol import (
    added_errors,  # noqa: F401 - codes that must be known before the first message is read
    overlay,
)
from fencepost.protocol.api import KNOWN_APIS, ApiKey

Entity = Any
"""An instance of a kio message class. The classes are loaded by name at run time, so a type checker
does not see their fields."""

Side = Literal["request", "response"]

STRUCT_CODES: Final = {
    "bool": "?",
    "int8": "b",
    "uint8": "B",
    "int16": "h",
    "uint16": "H",
    "error_code": "h",
    "int32": "i",
    "uint32": "I",
    "timedelta_i32": "i",
    "int64": "q",
    "uint64": "Q",
    "float64": "d",
    "timedelta_i64": "q",
    "datetime_i64": "q",
    "uuid": "16s",
}
"""The :mod:`struct` code of each fixed-size type."""

FIXED_SIZES: Final = {name: calcsize(f">{code}") for name, code in STRUCT_CODES.items()}
"""The size in bytes of each fixed-size type."""

DURATIONS: Final = frozenset({"timedelta_i32", "timedelta_i64"})
TIMES: Final = DURATIONS | {"datetime_i64"}
"""Types that are a timedelta or datetime in kio, and milliseconds on the wire."""


@dataclass(frozen=True, slots=True)
class FieldInfo:
    """One field of a message class."""

    name: str
    kafka_type: str | None
    """``int32``, ``string``, … or None for a structure."""
    struct: type | None
    """The structure's class, else None."""
    is_array: bool
    nullable: bool
    """Whether the value may be null; for an array, whether its elements may be null."""
    tag: int | None
    default: object
    """The default value of the field in Kafka's generated code."""

    @property
    def is_time(self) -> bool:
        """Return whether the field is in milliseconds on the wire."""
        return self.kafka_type in TIMES and not self.is_array


@dataclass(frozen=True, slots=True)
class StructInfo:
    """One message class: its plain fields in wire order, its tagged ones by ascending tag."""

    flexible: bool
    plain: tuple[FieldInfo, ...]
    tagged: tuple[FieldInfo, ...]


def _without_none(annotation: Any) -> tuple[Any, bool]:
    if get_origin(annotation) is UnionType:
        inner = [arg for arg in get_args(annotation) if arg is not NoneType]
        return inner[0], len(inner) < len(get_args(annotation))
    return annotation, False


def _implicit_default(kafka_type: str | None, struct: type | None, *, is_array: bool) -> object:
    if is_array:
        return ()
    if struct is not None:
        return default_entity(struct)
    if kafka_type == "string":
        return ""
    if kafka_type in {"bytes", "records"}:
        return b""
    if kafka_type == "bool":
        return False
    # The writer encodes 0 as NONE or a zero number or time, and None as the zero uuid.
    return None if kafka_type == "uuid" else 0


@cache
def default_entity(cls: type) -> Entity:
    """Return the instance of ``cls`` in which every field has Kafka's default."""
    return cls(**{info.name: info.default for info in all_fields(cls)})


@cache
def fields_of(cls: type) -> StructInfo:
    """Return the wire layout of a kio message class."""
    plain: list[FieldInfo] = []
    tagged: list[FieldInfo] = []
    for item in fields(cls):
        annotation, array_nullable = _without_none(item.type)
        is_array = get_origin(annotation) is tuple
        nullable = array_nullable
        if is_array:
            annotation, nullable = _without_none(get_args(annotation)[0])
        struct: type | None = annotation if is_dataclass(annotation) else None  # type: ignore[assignment]
        kafka_type = None if struct else item.metadata["kafka_type"]
        default = (
            _implicit_default(kafka_type, struct, is_array=is_array)
            if item.default is MISSING
            else item.default
        )
        if isinstance(default, timedelta) and not default:
            default = 0
        tag = item.metadata.get("tag")
        info = FieldInfo(item.name, kafka_type, struct, is_array, nullable, tag, default)
        (plain if tag is None else tagged).append(info)
    tagged.sort(key=lambda info: info.tag or 0)
    flexible: bool = cls.__flexible__  # type: ignore[attr-defined]
    return StructInfo(flexible, tuple(plain), tuple(tagged))


def all_fields(cls: type) -> tuple[FieldInfo, ...]:
    """Return every field of a message class, plain ones first."""
    info = fields_of(cls)
    return info.plain + info.tagged


@cache
def has_struct_arrays(cls: type) -> bool:
    """Return whether an instance may contain many structures, and so is processed in steps."""
    return any(
        info.struct is not None and (info.is_array or has_struct_arrays(info.struct))
        for info in all_fields(cls)
    )


@cache
def module_of(api_key: int, version: int, side: Side) -> ModuleType:
    """Return the module with the classes of one message: kio's, or ours where kio has none.

    Raises KeyError for an unknown API or version.
    """
    api = KNOWN_APIS[api_key]
    if not api.min_version <= version <= api.max_version:
        raise KeyError((api_key, version))
    ours = overlay.module_of(api_key, version, side)
    if ours is not None:
        return ours
    return import_module(f"kio.schema.{api.module}.v{version}.{side}")


@cache
def message_class(api_key: int, version: int, side: Side) -> type:
    """Return the class of the whole message."""
    classes = vars(module_of(api_key, version, side)).values()
    result: type = next(
        candidate
        for candidate in classes
        if getattr(candidate, "__type__", None) is EntityType[side]
    )
    return result


_CLASS_FACTS = ("__type__", "__version__", "__flexible__", "__api_key__", "__header_schema__")


@cache
def lenient_class(cls: type) -> type:
    """Return ``cls``, or a copy of it whose non-nullable times may be null.

    kio refuses a time of -1 in such fields, but Kafka sends it: DescribeTransactions returns it as
    the start time of an empty transaction. A class without such a field is returned unchanged.
    """
    changed: dict[str, Any] = {}
    for info in all_fields(cls):
        if info.kafka_type == "datetime_i64" and not info.nullable:
            changed[info.name] = TZAware | None
        elif info.struct is not None and (lenient := lenient_class(info.struct)) is not info.struct:
            changed[info.name] = tuple[lenient, ...] if info.is_array else lenient  # type: ignore[valid-type]
    if not changed:
        return cls
    members: list[tuple[str, Any, Any]] = [
        (
            item.name,
            changed.get(item.name, item.type),
            field(default=item.default, metadata=item.metadata),
        )
        for item in fields(cls)
    ]
    facts = {name: getattr(cls, name) for name in _CLASS_FACTS}
    return make_dataclass(
        cls.__name__, members, namespace=facts, frozen=True, slots=True, kw_only=True
    )


def struct_class(api_key: int, version: int, side: Side, name: str) -> type | None:
    """Return the class called ``name`` in one message's module; None if the version has none."""
    value = getattr(module_of(api_key, version, side), name, None)
    return value if isinstance(value, type) and hasattr(value, "__flexible__") else None


@cache
def is_known(api_key: int, side: Side, name: str, field_name: str | None = None) -> bool:
    """Return whether any version of the API has a class ``name``, and a field ``field_name``.

    Call this only for a name that the current version lacks. Other versions are searched in the
    source text of kio's modules, because an import costs 5 to 20 ms, and a client would wait for
    four imports before its first response. Versions that kio lacks are searched last, in their
    classes.
    """
    api = KNOWN_APIS[api_key]
    without_text = []
    for version in range(api.max_version, api.min_version - 1, -1):
        text = _text_of(api_key, version, side)
        if text is None:
            without_text.append(version)
            continue
        written = text.partition(f"\nclass {name}:\n")[2].partition("\nclass ")[0]
        if written and (field_name is None or f"\n    {field_name}: " in written):
            return True
    for version in without_text:
        cls = struct_class(api_key, version, side, name)
        if cls is not None and (
            field_name is None or any(info.name == field_name for info in all_fields(cls))
        ):
            return True
    return False


def _text_of(api_key: int, version: int, side: Side) -> str | None:
    """Return the source of one message's module; None if the file does not exist."""
    path = f"{KNOWN_APIS[api_key].module}/v{version}/{side}.py"
    try:
        return Path(kio.schema.__path__[0], path).read_text(encoding="utf-8")
    except OSError:
        return None


def is_flexible(api_key: int, version: int) -> bool:
    """Return whether the version has compact lengths and tagged fields (header v2, KIP-482)."""
    flexible: bool = message_class(api_key, version, "request").__flexible__  # type: ignore[attr-defined]
    return flexible


def response_header_is_tagged(api_key: int, version: int) -> bool:
    """Return whether the response header has a tag section: never for ApiVersions (KIP-511)."""
    return api_key != ApiKey.API_VERSIONS and is_flexible(api_key, version)


Builder = Callable[..., Entity]

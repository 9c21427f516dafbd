"""Messages that kio lacks, compared with the schemas and the classes of Apache Kafka."""

from __future__ import annotations

import base64
import json
import random
import re
import uuid
import zipfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from fencepost.protocol import overlay
from fencepost.protocol.api import ZOOKEEPER_APIS
from fencepost.protocol.schema import fields_of, message_class
from fencepost.protocol.writer import compile_writer
from tests.fuzz.entities import random_entity
from tests.support import kafka39
from tests.support.kafka import Libs, jars, java_command, run_to_end
from tests.support.raw import plain

pytestmark = [pytest.mark.oracle, pytest.mark.usefixtures("java_tools"), pytest.mark.timeout(300)]

JUDGE = Path(__file__).with_name("MessageJudge.java")
SEED, ENTITIES = 44, 200

MESSAGES = list(overlay.messages())


def libs_of(message: overlay.Message) -> Libs:
    """Return the jars of the release that has the message."""
    return kafka39.jars if message[0] in ZOOKEEPER_APIS else jars


@cache
def schema(name: str, libs: Libs) -> Mapping[str, Any]:
    """Return the schema of a message, such as ApiVersionsRequest."""
    (jar,) = libs().glob("kafka-clients-*.jar")
    with zipfile.ZipFile(jar) as archive:
        text = archive.read(f"common/message/{name}.json").decode()
    return json.loads(re.sub(r"^\s*//.*$", "", text, flags=re.MULTILINE))


def in_versions(versions: str, version: int) -> bool:
    if versions in ("none", ""):
        return False
    low, _, high = versions.removesuffix("+").partition("-")
    is_open = versions.endswith("+")
    return int(low) <= version and (is_open or version <= int(high or low))


def snake(name: str) -> str:
    """Return kio's name of a field."""
    text = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
    return {"throttle_time_ms": "throttle_time", "type": "type_"}.get(text, text)


def default_of(field: Mapping[str, Any], kind: str) -> object:
    """Return the default of a field that is not an array."""
    default = field.get("default")
    if default is None:
        return {"string": "", "bool": False, "uuid": None}.get(kind, 0)
    if default == "null":
        return None
    return default if kind == "string" else json.loads(str(default))


def rows_of_schema(
    fields: list[Any], version: int, common: Mapping[str, list[Any]] = MappingProxyType({})
) -> list[tuple[Any, ...]]:
    """Return name, type, array, nullable, tag, default and inner rows of a structure's fields.

    Tagged fields are the last rows. ``common`` has the structures that a schema uses more than
    once.
    """
    rows = []
    for field in fields:
        if not in_versions(field["versions"], version):
            continue
        kind = field["type"].removeprefix("[]")
        is_array = field["type"] != kind
        inner = field.get("fields") or common.get(kind, [])
        rows.append(
            (
                snake(field["name"]),
                "struct" if inner else kind,
                is_array,
                in_versions(field.get("nullableVersions", "none"), version),
                field.get("tag")
                if in_versions(field.get("taggedVersions", "none"), version)
                else None,
                () if is_array else default_of(field, kind),
                rows_of_schema(inner, version, common),
            )
        )
    return sorted(rows, key=lambda row: -1 if row[4] is None else row[4])


def rows_of_class(cls: type) -> list[tuple[Any, ...]]:
    """Return the rows of :func:`rows_of_schema` for a class."""
    kinds = {"error_code": "int16", "timedelta_i32": "int32"}
    info = fields_of(cls)
    return [
        (
            field.name,
            "struct" if field.struct else kinds.get(str(field.kafka_type), field.kafka_type),
            field.is_array,
            field.nullable and field.kafka_type != "uuid",
            field.tag,
            field.default,
            rows_of_class(field.struct) if field.struct else [],
        )
        for field in (*info.plain, *info.tagged)
    ]


@pytest.mark.parametrize("message", MESSAGES, ids=str)
def test_class_has_the_fields_of_the_schema(message: overlay.Message) -> None:
    cls = message_class(*message)
    found = schema(cls.__name__, libs_of(message))
    common = {struct["name"]: struct["fields"] for struct in found.get("commonStructs", ())}
    assert (found["apiKey"], found["type"]) == message[::2]
    assert in_versions(found["validVersions"], message[1])
    assert not in_versions(found["validVersions"], message[1] + 1)
    assert in_versions(found["flexibleVersions"], message[1])
    assert rows_of_class(cls) == rows_of_schema(found["fields"], message[1], common)


def test_comparison_of_schemas_sees_each_difference() -> None:
    field = {"name": "ThrottleTimeMs", "type": "int32", "versions": "0+"}
    (row,) = rows_of_schema([field], 3)
    assert row == ("throttle_time", "int32", False, False, None, 0, [])
    for change in (
        {"name": "NodeId"}, {"type": "int64"}, {"type": "[]int32"}, {"nullableVersions": "3+"},
        {"taggedVersions": "3+", "tag": 0}, {"default": "-1"}, {"fields": [field]},
    ):  # fmt: skip
        assert rows_of_schema([{**field, **change}], 3) != [row]
    assert rows_of_schema([{**field, "versions": "4+"}], 3) == []
    assert rows_of_schema([{**field, "versions": "0-2"}], 3) == []


def camel(name: str) -> str:
    first, *rest = name.split("_")
    text = first + "".join(map(str.capitalize, rest))
    return f"{text}Ms" if name == "throttle_time" else text


def as_json(cls: type, entity: Any) -> dict[str, Any]:
    """Return an entity as Kafka's JSON converter writes it."""
    info = fields_of(cls)
    shown: dict[str, Any] = {}
    for field in (*info.plain, *info.tagged):
        value = getattr(entity, field.name)
        if field.struct is not None:
            value = [as_json(field.struct, item) for item in value]
        elif field.kafka_type == "error_code":
            value = int(value)
        elif field.kafka_type == "uuid":
            number = uuid.UUID(int=0) if value is None else value
            value = base64.urlsafe_b64encode(number.bytes).decode().rstrip("=")
        else:
            value = plain(value)
        is_default = value == field.default or (field.is_array and not value)
        if field.tag is None or not is_default:
            shown[camel(field.name)] = value
    return shown


def ours_as_bytes(entity: Any) -> bytes:
    parts: list[Any] = []
    for _ in compile_writer(type(entity))(entity, parts.append) or ():
        pass
    return b"".join(parts)


@pytest.mark.parametrize("libs", [kafka39.jars, jars], ids=["3.9", "4.4"])
def test_bytes_are_those_of_kafkas_classes(libs: Libs) -> None:
    """Java decodes Fencepost's bytes to the same values, and encodes these to the same bytes."""
    rng = random.Random(SEED)
    made = [
        (message[1], random_entity(message_class(*message), rng))
        for message in MESSAGES
        if libs_of(message) is libs
        for _ in range(ENTITIES)
    ]
    asked = "".join(
        f"{type(entity).__name__} {version} {ours_as_bytes(entity).hex()}\n"
        for version, entity in made
    )
    command = java_command(str(JUDGE), libs=libs)
    lines = run_to_end(command, deadline_s=120, stdin=asked).splitlines()
    assert len(lines) == len(made)
    for (_, entity), line in zip(made, lines, strict=True):
        shown, _, data = line.partition("\t")
        assert json.loads(shown) == as_json(type(entity), entity)
        assert data == ours_as_bytes(entity).hex()

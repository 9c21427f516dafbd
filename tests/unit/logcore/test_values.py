"""Classes whose methods are created on first use behave like the dataclasses that they replace."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import FrozenInstanceError, field, replace
from typing import ClassVar

import pytest

from fencepost.cluster.records import BrokerEndpoint
from fencepost.logcore.values import dataclass, fast_init


@dataclass(frozen=True, slots=True)
class _Value:
    name: str
    parts: dict[str, int] = field(default_factory=dict, compare=False)
    count: int = 7


@dataclass(frozen=True, slots=True)
class _Other:
    name: str
    parts: dict[str, int] = field(default_factory=dict, compare=False)
    count: int = 7


@dataclasses.dataclass(frozen=True, slots=True)
class _MadeAtOnce:
    name: str
    parts: dict[str, int] = field(default_factory=dict, compare=False)
    count: int = 7


def test_value_behaves_like_an_ordinary_dataclass() -> None:
    value, same = _Value("a"), _Value("a", {"b": 1}, count=7)
    assert (value.name, value.parts, value.count) == ("a", {}, 7)
    assert value == same
    assert hash(value) == hash(same) == hash(_MadeAtOnce("a"))
    assert value not in (replace(value, count=8), _Other("a"))
    assert repr(same) == repr(_MadeAtOnce("a", {"b": 1})).replace("_MadeAtOnce", "_Value")
    assert copy.copy(same).parts is same.parts
    assert copy.deepcopy(same).parts == same.parts
    match same:
        case _Value(name, parts, count):
            assert (name, parts, count) == ("a", {"b": 1}, 7)
    assert [attribute.name for attribute in dataclasses.fields(_Value)] == [
        "name",
        "parts",
        "count",
    ]


@fast_init
@dataclass(frozen=True, slots=True)
class _Often:
    name: str
    count: int = 7


@fast_init
@dataclass(frozen=True, slots=True)
class _Longer(_Often):
    more: str | None = None


class _Plain(_Longer):
    __slots__ = ()


def test_fast_init_value_behaves_like_an_ordinary_dataclass() -> None:
    value = _Longer("a")
    assert (value.name, value.count, value.more) == ("a", 7, None)
    assert value == _Longer(count=7, name="a") == copy.copy(value)
    assert pickle.loads(pickle.dumps(value)) == value
    assert hash(value) == hash(_Longer("a"))
    assert value not in (replace(value, more="b"), _Often("a"))
    assert type(replace(value, count=8)) is type(value) is _Longer
    assert (type(_Plain("a", more="b")), _Plain("a", more="b").more) == (_Plain, "b")
    for instance in (value, _Plain("a")):
        with pytest.raises(FrozenInstanceError):
            instance.count = 1  # type: ignore[misc]
    with pytest.raises(TypeError, match="'name'"):
        _Often()  # type: ignore[call-arg]


def test_fast_init_refuses_a_class_with_a_default_factory() -> None:
    @fast_init
    @dataclass(frozen=True, slots=True)
    class More:
        parts: dict[str, int] = field(default_factory=dict)

    with pytest.raises(TypeError, match="more than store"):
        More()


def test_first_value_of_a_class_is_checked_and_frozen() -> None:
    @dataclass(frozen=True, slots=True)
    class Late:
        name: str
        count: int = 0

    with pytest.raises(TypeError, match="'name'"):
        Late()  # type: ignore[call-arg]
    first = Late("a")
    for instance in (first, Late("b")):
        with pytest.raises(FrozenInstanceError):
            instance.count = 1  # type: ignore[misc]
        with pytest.raises(FrozenInstanceError):
            del instance.name
        with pytest.raises((AttributeError, TypeError)):
            instance.other = 1  # type: ignore[attr-defined]
    assert first == Late("a", 0)


def test_mutable_value_has_defaults_and_compares_by_identity() -> None:
    @dataclass(slots=True, eq=False)
    class State:
        limit: ClassVar[int] = 3
        name: str
        seen: list[str] = field(default_factory=list)
        refusal: str | None = field(default=None, init=False)

        def __post_init__(self) -> None:
            self.seen.append(self.name)

    one, same = State("a"), State("a")
    assert (one.name, one.seen, one.refusal, one.limit) == ("a", ["a"], None, 3)
    one.refusal = "late"
    assert (one.refusal, same.refusal) == ("late", None)
    assert one != same
    assert {one, same, one} == {same, one}
    with pytest.raises(AttributeError):
        one.other = 1  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class _Point:
    x: int
    label: str = "-"


@dataclass(frozen=True, slots=True)
class _Place(_Point):
    y: int = 0
    label: str = "here"

    def __repr__(self) -> str:
        return f"{self.label} at {self.x}, {self.y}"


def test_value_of_a_derived_class_has_the_fields_of_its_base() -> None:
    place = _Place(1, y=2)
    assert _Place.__match_args__ == ("x", "label", "y")
    assert (place, place.x, repr(place)) == (_Place(1, "here", 2), 1, "here at 1, 2")
    assert place != _Point(1, "here")
    assert [attribute.name for attribute in dataclasses.fields(_Point)] == ["x", "label"]
    assert pickle.loads(pickle.dumps(place)) == place


def test_value_unpickles_in_a_process_that_has_created_none() -> None:
    """The value may be unpickled in another process, in which the class was not used before."""
    code = "import pickle, sys; print(pickle.load(sys.stdin.buffer))"
    data = pickle.dumps(BrokerEndpoint("a", "b", 1, 2))
    read = subprocess.run([sys.executable, "-c", code], input=data, capture_output=True, check=True)
    assert read.stdout.decode().strip() == repr(BrokerEndpoint("a", "b", 1, 2))


def test_first_values_created_by_concurrent_threads_are_complete() -> None:
    for _ in range(20):

        @dataclass(frozen=True, slots=True)
        class Late:
            name: str

        with ThreadPoolExecutor(4) as pool:
            made = list(pool.map(Late, ["a"] * 8))
        assert made == [Late("a")] * 8

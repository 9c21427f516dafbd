"""MQTT filters, templates of Kafka topics and keys, and the location of message ids."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fencepost.cluster.topic_names import MAX_NAME_CHARACTERS
from fencepost.pipelines.mqtt.message_ids import OwnId
from fencepost.pipelines.mqtt.routes import (
    Mapped,
    MessageId,
    Route,
    RouteError,
    check_filter,
    covers,
    load,
    overlap,
)


@pytest.mark.parametrize(
    ("pattern", "topic", "fits"),
    [
        ("a/b", "a/b", True),
        ("a/b", "a/b/c", False),
        ("a/+", "a/b", True),
        ("a/+", "a", False),
        ("a/+", "a/", True),
        ("a/+/c", "a/b/c", True),
        ("a/#", "a", True),
        ("a/#", "a/b/c", True),
        ("a/#", "ab", False),
        ("#", "a/b", True),
        ("#", "$SYS/x", False),
        ("+/x", "$SYS/x", False),
        ("$SYS/#", "$SYS/x", True),
        ("+", "/a", False),
        ("+/+", "/a", True),
    ],
)
def test_filter_matches_topics_as_in_mqtt(pattern: str, topic: str, fits: bool) -> None:
    assert covers(pattern, topic) is fits


@pytest.mark.parametrize("wrong", ["", "a/#/b", "a#", "a/b+", "a\0", "x" * 65_536, "$share/g/a"])
def test_invalid_filter_is_refused(wrong: str) -> None:
    with pytest.raises(RouteError):
        check_filter(wrong)


def test_route_builds_topic_and_key_from_topic_levels() -> None:
    route = Route("weather/+/hourly", "weather.{1}", "{1}")
    assert route.target("weather/JFK/hourly") == ("weather.JFK", b"JFK")
    assert route.target("weather/J F/hourly") == ("weather.J_F", b"J F")
    with pytest.raises(RouteError, match="no level 9"):
        Route("a/#", "{9}").target("a/b")


def test_kafka_topic_name_above_the_length_limit_is_refused() -> None:
    route = Route("#", "{topic}")
    assert len(route.target("x" * MAX_NAME_CHARACTERS)[0]) == MAX_NAME_CHARACTERS
    with pytest.raises(RouteError):
        route.target("x" * (MAX_NAME_CHARACTERS + 1))


LEVELS = st.lists(st.sampled_from(["a", "b", "+", ""]), min_size=1, max_size=3)
FILTERS = st.builds(
    lambda levels, rest, system: "/".join([*(["$S"] if system else []), *levels, *rest]),
    LEVELS,
    st.sampled_from([[], ["#"]]),
    st.booleans(),
)
TOPICS = [
    "/".join(levels)
    for size in range(1, 5)
    for levels in itertools.product(["a", "b", "", "c"], repeat=size)
]
TOPICS += [*(f"$S/{topic}" for topic in TOPICS), "$S"]


@settings(deadline=None, max_examples=200)
@given(FILTERS, FILTERS)
def test_cover_and_overlap_of_filters_agree_with_matching(one: str, other: str) -> None:
    """Filters with at most four levels and two names cover all cases."""
    ours = {topic for topic in TOPICS if covers(one, topic)}
    theirs = {topic for topic in TOPICS if covers(other, topic)}
    assert overlap(one, other) is bool(ours & theirs)
    assert covers(one, other) is (theirs <= ours)


def test_overlapping_filters_are_one_subscription_or_are_refused() -> None:
    routes = (Route("a/b", "x", qos=2), Route("a/+", "y", qos=0), Route("c", "z", qos=1))
    assert Mapped(routes).subscriptions == [("a/+", 2), ("c", 1)]
    assert Mapped(routes).covered == ["a/b"]
    assert Mapped((Route("a", "x"), Route("a", "y"))).subscriptions == [("a", 2)]
    with pytest.raises(RouteError, match="overlap"):
        Mapped((Route("a/+", "x"), Route("+/b", "y")))
    both = Mapped((Route("a/+", "x"), Route("+/b", "y"), Route("#", "z", qos=0)))
    assert both.subscriptions == [("#", 2)]


def test_first_matching_route_is_used() -> None:
    mapped = Mapped((Route("a/b", "one"), Route("a/#", "two")))
    assert mapped.route("a/b").topic == "one"
    assert mapped.route("a/c").topic == "two"
    with pytest.raises(RouteError, match="no route"):
        mapped.route("c")


def test_message_id_is_read_from_property_json_or_level() -> None:
    assert MessageId.parse("property:id").of("t", b"", [("id", "7")]) == OwnId("7")
    assert MessageId.parse("property:id").of("t", b"", []) is None
    assert MessageId.parse("json:n").of("t", b'{"n": 7}', []) == OwnId("7", True, "7")
    assert MessageId.parse("json:n").of("t", b'{"n": null}', []) is None
    assert MessageId.parse("json:n").of("t", b"[7]", []) is None
    assert MessageId.parse("json:n").of("t", b"{", []) is None
    assert MessageId.parse("json:n").of("t", b"[" * 100_000, []) is None
    assert MessageId.parse("level:1").of("a/7", b"", []) == OwnId("7")
    assert MessageId.parse("level:2").of("a/7", b"", []) is None
    for wrong in ("", "property:", "level:x", "header:id"):
        with pytest.raises(RouteError):
            MessageId.parse(wrong)


def test_repeated_user_property_gives_one_id_of_all_its_values() -> None:
    of = MessageId.parse("property:id").of
    ids = [
        of("t", b"", [("id", text) for text in texts])
        for texts in (["a", "x"], ["b", "x"], ["x"], ['["a","x"]'])
    ]
    assert len({(message_id.text, message_id.is_json) for message_id in ids if message_id}) == len(
        ids
    )
    assert ids[0] is not None
    assert ids[0].former == "x"


LEAVES = ["1", '"1"', "1.0", "true", '"True"', "[1]", '"[1]"', '"null"', '""', '"\\u00e9"']
LEAVES += ['"e\\u0301"', "1e400", "1e500", "NaN", '"NaN"', "-0", "0", "9007199254740993"]
LEAVES += ["9007199254740993.0", "9007199254740992.0", "1" * 5_000, '"a\\u0000b"', '"\\ud800"']


TREES = st.recursive(
    st.sampled_from(LEAVES),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(st.tuples(st.sampled_from("ab"), inner), max_size=3).map(tuple)
    ),
)
"""JSON values: a scalar's text, a list, or an object as a tuple of members."""


def rendered(tree: Any) -> str:
    if isinstance(tree, list):
        return f"[{','.join(map(rendered, tree))}]"
    if isinstance(tree, tuple):
        return "{" + ", ".join(f'"{name}": {rendered(value)}' for name, value in tree) + "}"
    return str(tree)


def sorted_members(tree: Any) -> Any:
    if isinstance(tree, list):
        return [sorted_members(item) for item in tree]
    if isinstance(tree, tuple):
        return tuple(sorted(((name, sorted_members(value)) for name, value in tree), key=repr))
    return tree


@given(st.lists(TREES, min_size=2, max_size=6))
def test_json_ids_are_equal_exactly_if_their_values_are(trees: list[Any]) -> None:
    of = MessageId.parse("json:n").of
    found = [of("t", f'{{"n": {rendered(tree)}}}'.encode(), []) for tree in trees]
    for (tree, one), (other, two) in itertools.combinations(zip(trees, found, strict=True), 2):
        assert one is not None
        assert two is not None
        assert (one.text == two.text) == (sorted_members(tree) == sorted_members(other))


def test_json_id_ignores_blanks_and_the_order_of_members() -> None:
    of = MessageId.parse("json:n").of
    texts = (rb'{"n":{"a":1,"b":[2,"\u0063"]}}', b'{"n": {"b": [2, "c"], "a": 1}}')
    assert len({message_id.text for text in texts if (message_id := of("t", text, []))}) == 1


def test_deeply_nested_json_id_raises_no_recursion_error() -> None:
    deep = b'{"n":' + b"[" * 900 + b"]" * 900 + b"}"
    MessageId.parse("json:n").of("t", deep, [])  # no RecursionError


def test_routes_file_is_read_or_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "routes.toml"
    file.write_text(
        'message_id = "json:id"\n[[route]]\nfilter = "a/+"\ntopic = "a"\nkey = "{1}"\nqos = 1\n'
    )
    assert load(file) == Mapped((Route("a/+", "a", "{1}", 1),), MessageId("json", "id"))
    for wrong in ("", "x = 1", "[[route]]\nfilter='a'", "[[route]]\nfilter='a'\ntopic='b'\nz=1"):
        file.write_text(wrong)
        with pytest.raises(RouteError):
            load(file)

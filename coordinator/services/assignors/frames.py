"""Messages between the daemon and the process of a custom assignor.

Each message is a length (4 bytes, big-endian) and a msgpack value.

request   [{id: [instance id, [topic id], [[topic id, partition]]]}, {topic id: count}]
response  [{id: [[topic id, partition]]}, null] or [null, problem]
"""

from __future__ import annotations

from typing import Any, Final

import msgpack

from fencepost.groups.assignors.model import GroupAssignment, GroupSpec, MemberSpec

HEADER_BYTES: Final = 4

ENTRY_POINTS: Final = "fencepost.assignors"
"""The entry point group for assignors: assignor classes, or functions that return an assignor."""


def frame(message: object) -> bytes:
    """Return the bytes of a message."""
    body: bytes = msgpack.packb(message)
    return len(body).to_bytes(HEADER_BYTES) + body


def unpack(body: bytes) -> Any:
    """Return the value of a message's body. Raises ValueError for invalid msgpack."""
    return msgpack.unpackb(body, strict_map_key=False)


def request_of(group: GroupSpec) -> list[object]:
    """Return the request for a group."""
    members = {
        name: [spec.instance_id, sorted(spec.topic_ids), sorted(map(list, spec.assigned))]
        for name, spec in group.members.items()
    }
    return [members, dict(group.partition_counts)]


def group_of(request: Any) -> GroupSpec:
    """Return the group of a request."""
    members, counts = request
    return GroupSpec(
        {
            name: MemberSpec(instance, frozenset(topics), frozenset((t, i) for t, i in assigned))
            for name, (instance, topics, assigned) in members.items()
        },
        counts,
    )


def answer_of(result: GroupAssignment) -> list[object]:
    """Return the response with a result."""
    return [{name: sorted(map(list, mine)) for name, mine in result.items()}, None]


def result_of(answer: Any) -> tuple[dict[str, frozenset[tuple[bytes, int]]] | None, str]:
    """Return a response's result, or None and the problem. Raises ValueError or TypeError."""
    members, problem = answer
    if members is None:
        return None, str(problem)
    return {
        str(name): frozenset((bytes(topic), int(index)) for topic, index in mine)
        for name, mine in members.items()
    }, ""

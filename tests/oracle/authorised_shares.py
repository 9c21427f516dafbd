"""Requests of the matrix: share sessions, and the share coordinator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from tests.oracle.authorisation import ABSENT, HERE, Names, Request
from tests.support import requests

KINDS: Final = (HERE, ABSENT)
MEMBER: Final = "11111111-2222-4333-8444-555555555555"
NEXT: Final = 1
"""The epoch of the second request of a session. No case has opened such a session."""


def _of_topics(n: Names, topics: str) -> list[tuple[Any, list[int]]]:
    return [(n.id(slot), [0]) for slot in topics]


SESSIONS: Sequence[Request] = (
    Request(
        "share_fetch",
        (1, 2),
        "read g, read t",
        lambda n: requests.share_fetch(n["g"], MEMBER, *_of_topics(n, "t")),
        kinds={"t": KINDS},
    ),
    Request(
        "share_fetch",
        (2,),
        "read g, read t, read u",
        lambda n: requests.share_fetch(n["g"], MEMBER, *_of_topics(n, "tu")),
        "of two topics",
    ),
    Request(
        "share_acknowledge",
        (1, 2),
        "read g",
        lambda n: requests.share_acknowledge(
            n["g"], MEMBER, *_of_topics(n, "t"), share_session_epoch=NEXT
        ),
        kinds={"t": KINDS},
        others="read t",
    ),
)

STATE: Sequence[Request] = tuple(
    Request(
        api,
        versions,
        "cluster_action cluster",
        lambda n, api=api: requests.share_group_state(api, n["g"], n.id("t")),
        kinds={"g": (ABSENT,), "t": (ABSENT,)},
    )
    for api, versions in (
        ("initialize_share_group_state", (0,)),
        ("read_share_group_state", (0,)),
        ("write_share_group_state", (0, 1)),
        ("delete_share_group_state", (0,)),
        ("read_share_group_state_summary", (0, 1)),
    )
)

REQUESTS: Sequence[Request] = (*SESSIONS, *STATE)

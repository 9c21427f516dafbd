"""What a request names and its client may not touch: for requests that name many things.

Whoever is asked about one thing asks :meth:`Context.may`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from fencepost.coordinator.handlers import Context
from fencepost.coordinator.security.acl import Operation, ResourceType
from fencepost.coordinator.wire.steps import Steps

NOBODY_ASKED: Collection[str] = frozenset()
"""What is refused where nobody looks after it."""


def refused_topics(
    ctx: Context, operation: Operation, names: Iterable[str], *, audited: bool = True
) -> Steps[Collection[str]]:
    """The topics among ``names`` with which the client may not do that, whether they exist or not.

    With ``audited`` False a refusal is no news, as in :meth:`Context.may`.
    """
    if ctx.broker.authorizer is None:
        return NOBODY_ASKED
    found: dict[str, bool] = {}
    for name in names:
        if name not in found:
            found[name] = ctx.may(operation, ResourceType.TOPIC, name, audited=audited)
        yield
    return {name for name, may in found.items() if not may}


def named_topics(topics: Iterable[Any]) -> Iterable[str]:
    """The names of a request's topics."""
    return (topic.name for topic in topics)

"""Authorization of the many resources that one request names.

Checks of a single resource call :meth:`Context.may`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from fencepost.cluster.acl import Operation, ResourceType
from fencepost.coordinator.handlers import Context
from fencepost.groups.commands import TopicVisibility
from fencepost.protocol.steps import Steps

NO_TOPICS: Collection[str] = frozenset()
"""The refused topics if there is no authorizer."""


def refused_topics(
    ctx: Context, operation: Operation, names: Iterable[str], *, audited: bool = True
) -> Steps[Collection[str]]:
    """Return the topics in ``names`` on which the client may not perform the operation.

    Topics that do not exist are checked, too. If ``audited`` is False, a denial is not logged, as
    in :meth:`Context.may`.
    """
    if ctx.broker.authorizer is None:
        return NO_TOPICS
    named: dict[str, int] = {}
    for name in names:
        named[name] = named.get(name, 0) + 1
        yield
    refused: set[str] = set()
    for name, count in named.items():
        if not ctx.may(operation, ResourceType.TOPIC, name, audited=audited, count=count):
            refused.add(name)
        yield
    return refused


def visibility_of(ctx: Context) -> TopicVisibility | None:
    """Return a check of the topics that the client may describe; None without an authorizer.

    The check follows later changes of the ACLs.
    """
    authorizer, session = ctx.broker.authorizer, ctx.connection.session
    if authorizer is None:
        return None

    def may_see(name: str) -> bool:
        return authorizer.allows(
            session, Operation.DESCRIBE, ResourceType.TOPIC, name, audited=False
        )

    return TopicVisibility(authorizer.version, may_see)


def named_topics(topics: Iterable[Any]) -> Iterable[str]:
    """Return the names of a request's topics."""
    return (topic.name for topic in topics)

"""Whether topics exist, or can: asked before aiokafka, which looks for some of them for ever.

aiokafka asks for the Metadata of an illegal name, or of one that collides with a topic's, again and
again without an end, and takes a topic that is not there for one without records.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import structlog
from aiokafka.errors import TopicAuthorizationFailedError
from kio.schema.errors import ErrorCode

from fencepost.cluster.topic_names import check_name, hint
from fencepost.coordinator.wire.client.client import AsyncWireClient
from fencepost.coordinator.wire.client.security import PLAINTEXT, Security
from fencepost.logcore.machine import DomainError
from fencepost.pipelines.failures import MissingTopicError

_log = structlog.get_logger()

TOPIC_WAIT_MS = 5_000
"""How long a topic that does not exist, but could, is waited for: once, not for each record."""

FIRST_PAUSE_S, LAST_PAUSE_S = 0.05, 0.5
"""Between two questions; pauses double."""

MOST_MISSING = 10_000
"""Names of missing topics that are remembered, since when each has been missed."""

CREATE_TOPICS_VERSION = 5
"""The first in which the broker chooses the replication factor (KIP-464), and all still serve."""

_MISSING = frozenset({ErrorCode.unknown_topic_or_partition, ErrorCode.invalid_topic_exception})
_NO_ANSWER = frozenset(
    {
        ErrorCode.none,
        ErrorCode.topic_already_exists,
        ErrorCode.topic_authorization_failed,
        ErrorCode.cluster_authorization_failed,
        ErrorCode.not_controller,
    }
)
"""Codes of CreateTopics that do not tell why a topic is missing."""


class Topics:
    """The topics of one cluster, through a connection of its own."""

    def __init__(
        self, bootstrap: str, security: Security = PLAINTEXT, wait_ms: int = TOPIC_WAIT_MS
    ) -> None:
        self._client = AsyncWireClient(bootstrap, security=security)
        self._wait_s = wait_ms / 1000
        self._known: set[str] = set()
        self._missing: dict[str, float] = {}
        """Since when, by name; the oldest first."""

    async def close(self) -> None:
        """Close the connection."""
        await self._client.close()

    def forget(self) -> None:
        """Ask again for topics that were there: something has failed since."""
        self._known.clear()

    # --- topics that are written to ---

    async def unwritable(self, names: Iterable[str]) -> dict[str, str]:
        """Return why records cannot be written to some of ``names``.

        A topic that does not exist is waited for, and created by a broker that does so. Raises
        TopicAuthorizationFailedError, and what the wire client raises.
        """
        wanted = set(names) - self._known
        refused = {name: reason for name in wanted if (reason := illegal(name))}
        reasons: dict[str, str] | None = None
        pause_s = 0.0
        while wanted := wanted - refused.keys():
            await asyncio.sleep(pause_s)
            codes = await self._ask(wanted, create=True)
            there = {name for name in wanted if codes.get(name) is ErrorCode.none}
            self._known |= there
            wanted -= there
            late = self._miss(wanted, there)
            # The first answer of a broker that creates topics is that there is none.
            if reasons is None and wanted and (late or pause_s):
                reasons = await self._judge(wanted, refused)
                if waits := sorted(wanted - late - refused.keys()):
                    _log.warning("waits for topics that do not exist", topics=waits, s=self._wait_s)
            for name in late - refused.keys():
                why = (reasons or {}).get(name, "no broker creates it")
                refused[name] = f"topic {name!r} does not exist: {why}"
            pause_s = min(2 * pause_s, LAST_PAUSE_S) or FIRST_PAUSE_S
        return refused

    def _miss(self, missed: Collection[str], there: Iterable[str]) -> set[str]:
        """Remember what is missing; return the names of which that has been so for long enough."""
        now = time.monotonic()
        for name in there:
            self._missing.pop(name, None)
        for name in missed:
            self._missing.setdefault(name, now)
        while len(self._missing) > max(MOST_MISSING, len(missed)):
            del self._missing[next(iter(self._missing))]
        return {name for name in missed if now - self._missing[name] >= self._wait_s}

    async def _judge(self, names: Collection[str], refused: dict[str, str]) -> dict[str, str]:
        """Ask, without creating any, why topics cannot be created.

        Those that never can are added to ``refused``.
        """
        answer = await self._client.call(
            "CreateTopics",
            CREATE_TOPICS_VERSION,
            check=False,
            entity=lambda f: f.message(
                topics=[
                    f.CreatableTopic(
                        name=name,
                        num_partitions=-1,
                        replication_factor=-1,
                        assignments=[],
                        configs=[],
                    )
                    for name in names
                ],
                timeout_ms=int(self._wait_s * 1000),
                validate_only=True,
            ),
        )
        reasons = {}
        for row in answer.topics:
            reason = row.error_message or ErrorCode(row.error_code).name.upper()
            if row.error_code is ErrorCode.invalid_topic_exception:
                refused[row.name] = f"topic {row.name!r} cannot exist: {reason}"
            elif row.error_code not in _NO_ANSWER:
                reasons[row.name] = reason
        return reasons

    async def check_there(self, names: Collection[str]) -> None:
        """Raise TimeoutError if one of the topics that are being written to is gone."""
        codes = await self._ask(names, create=False)
        for name in names:
            if codes.get(name) is ErrorCode.unknown_topic_or_partition:
                self._known.discard(name)
                raise TimeoutError(f"topic {name!r} was deleted while records were written to it")

    # --- topics that are read ---

    async def present(self, names: Collection[str]) -> dict[str, Any]:
        """Return the ids of those that exist, None from a broker that tells of no ids."""
        legal = [name for name in names if not illegal(name)]
        answer = await self._metadata(legal, create=False)
        return {
            topic.name: getattr(topic, "topic_id", None)
            for topic in answer.topics
            if topic.error_code not in _MISSING
        }

    async def required(self, names: Collection[str], before: Mapping[str, Any]) -> dict[str, Any]:
        """Return the ids of topics of which each must exist, and be the one that it was ``before``.

        Raises MissingTopicError, for a missing one after it was waited for.
        """
        end = time.monotonic() + self._wait_s
        while missing := sorted(set(names) - (found := await self.present(names)).keys()):
            if time.monotonic() >= end:
                raise MissingTopicError(await self.absence(missing))
            await asyncio.sleep(LAST_PAUSE_S)
        for name, topic_id in found.items():
            if topic_id != before.get(name, topic_id):
                raise MissingTopicError(
                    f"the input topic {name!r} was deleted and created again while it was read"
                )
        return found

    async def absence(self, missing: Iterable[str]) -> str:
        """Say that topics do not exist, and which ones may be meant."""
        there = (await self._client.metadata(refresh=True)).topics
        told = (f"{name!r}{hint(name, there)}" for name in missing)
        return f"no such input topic: {', '.join(told)}"

    # --- asking ---

    async def _ask(self, names: Collection[str], *, create: bool) -> Mapping[str, ErrorCode]:
        answer = await self._metadata(names, create=create)
        codes = {topic.name: ErrorCode(topic.error_code) for topic in answer.topics}
        denied = [
            name for name, code in codes.items() if code is ErrorCode.topic_authorization_failed
        ]
        if denied:
            raise TopicAuthorizationFailedError(*sorted(denied))
        return codes

    async def _metadata(self, names: Collection[str], *, create: bool) -> Any:
        return await self._client.call(
            "Metadata",
            check=False,
            entity=lambda f: f.message(
                topics=[f.MetadataRequestTopic(name=name) for name in names],
                allow_auto_topic_creation=create,
            ),
        )


def illegal(name: str) -> str:
    """Why no topic may have this name; empty if one may."""
    try:
        check_name(name)
    except DomainError as error:
        return str(error)
    return ""

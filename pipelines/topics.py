"""Checks whether topics exist or can exist, before aiokafka would look for them forever.

aiokafka endlessly requests Metadata for an illegal name, or for a name that collides with an
existing topic's, and treats a missing topic as one without records.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import structlog
from aiokafka.errors import TopicAuthorizationFailedError
from kio.schema.errors import ErrorCode

from fencepost.client.client import AsyncWireClient
from fencepost.client.security import PLAINTEXT, Security
from fencepost.cluster.topic_names import check_name, hint
from fencepost.logcore.machine import DomainError
from fencepost.pipelines.failures import MissingTopicError

_log = structlog.get_logger()

TOPIC_WAIT_MS = 5_000
"""How long to wait for a missing topic that may still be created, from the first miss on."""

FIRST_PAUSE_S, LAST_PAUSE_S = 0.05, 0.5
"""Pauses between two requests, which double."""

MOST_MISSING = 10_000
"""The maximum number of missing topics whose first miss is remembered."""

CREATE_TOPICS_VERSION = 5
"""The first version in which the broker chooses the replication factor (KIP-464)."""

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
"""Error codes of CreateTopics that do not explain why a topic is missing."""


class Topics:
    """The topics of one cluster, through a connection of its own."""

    def __init__(
        self, bootstrap: str, security: Security = PLAINTEXT, wait_ms: int = TOPIC_WAIT_MS
    ) -> None:
        self._client = AsyncWireClient(bootstrap, security=security)
        self._wait_s = wait_ms / 1000
        self._known: set[str] = set()
        self._missing: dict[str, float] = {}
        """When each topic was first missed, by name; the oldest first."""

    async def close(self) -> None:
        """Close the connection."""
        await self._client.close()

    def forget(self) -> None:
        """Check known topics again after a failure."""
        self._known.clear()

    # --- output topics ---

    async def unwritable(self, names: Iterable[str]) -> dict[str, str]:
        """Return why records cannot be written to some of ``names``.

        A missing topic is waited for, and a broker with auto-creation creates it. Raises
        TopicAuthorizationFailedError, and the errors of the wire client.
        """
        unchecked = set(names) - self._known
        refused = {name: reason for name in unchecked if (reason := illegal(name))}
        reasons: dict[str, str] | None = None
        pause_s = 0.0
        while unchecked := unchecked - refused.keys():
            await asyncio.sleep(pause_s)
            codes = await self._error_codes(unchecked, create=True)
            there = {name for name in unchecked if codes.get(name) is ErrorCode.none}
            self._known |= there
            unchecked -= there
            late = self._note_missing(unchecked, there)
            # A broker with auto-creation answers first that the topic is missing.
            if reasons is None and unchecked and (late or pause_s):
                reasons = await self._creation_errors(unchecked, refused)
                if waits := sorted(unchecked - late - refused.keys()):
                    _log.warning("waits for topics that do not exist", topics=waits, s=self._wait_s)
            for name in late - refused.keys():
                why = (reasons or {}).get(name, "no broker creates it")
                refused[name] = f"topic {name!r} does not exist: {why}"
            pause_s = min(2 * pause_s, LAST_PAUSE_S) or FIRST_PAUSE_S
        return refused

    def _note_missing(self, missed: Collection[str], there: Iterable[str]) -> set[str]:
        """Remember missing topics; return the names that have been missing for too long."""
        now = time.monotonic()
        for name in there:
            self._missing.pop(name, None)
        for name in missed:
            self._missing.setdefault(name, now)
        while len(self._missing) > max(MOST_MISSING, len(missed)):
            del self._missing[next(iter(self._missing))]
        return {name for name in missed if now - self._missing[name] >= self._wait_s}

    async def _creation_errors(
        self, names: Collection[str], refused: dict[str, str]
    ) -> dict[str, str]:
        """Ask the broker why topics cannot be created, with a CreateTopics that only validates.

        Topics that can never exist are added to ``refused``.
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

    async def check_existing(self, names: Collection[str]) -> None:
        """Raise TimeoutError if one of the topics being written to is gone."""
        codes = await self._error_codes(names, create=False)
        for name in names:
            if codes.get(name) is ErrorCode.unknown_topic_or_partition:
                self._known.discard(name)
                raise TimeoutError(f"topic {name!r} was deleted while records were written to it")

    # --- input topics ---

    async def present(self, names: Collection[str]) -> dict[str, Any]:
        """Return the ids of existing topics, with None from a broker without topic ids."""
        legal = [name for name in names if not illegal(name)]
        answer = await self._metadata(legal, create=False)
        return {
            topic.name: getattr(topic, "topic_id", None)
            for topic in answer.topics
            if topic.error_code not in _MISSING
        }

    async def required(self, names: Collection[str], before: Mapping[str, Any]) -> dict[str, Any]:
        """Return the ids of topics, all of which must exist and have the ids in ``before``.

        Raises MissingTopicError, for a missing topic after the wait.
        """
        end = time.monotonic() + self._wait_s
        while missing := sorted(set(names) - (ids := await self.present(names)).keys()):
            if time.monotonic() >= end:
                raise MissingTopicError(await self.absence(missing))
            await asyncio.sleep(LAST_PAUSE_S)
        for name, topic_id in ids.items():
            if topic_id != before.get(name, topic_id):
                raise MissingTopicError(
                    f"the input topic {name!r} was deleted and created again while it was read"
                )
        return ids

    async def absence(self, missing: Iterable[str]) -> str:
        """Describe missing topics, with similar names that exist."""
        there = (await self._client.metadata(refresh=True)).topics
        texts = (f"{name!r}{hint(name, there)}" for name in missing)
        return f"no such input topic: {', '.join(texts)}"

    # --- requests ---

    async def _error_codes(
        self, names: Collection[str], *, create: bool
    ) -> Mapping[str, ErrorCode]:
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
    """Return why a name is illegal for a topic; empty if it is legal."""
    try:
        check_name(name)
    except DomainError as error:
        return str(error)
    return ""

"""Commits a group's offsets in transactions, and reads offsets that no transaction can change.

aiokafka sends the offsets of a transaction without the group's metadata (TxnOffsetCommit v0), and
reads committed offsets without waiting for open transactions, so this module uses the wire client.
It sends the generation and the member id, by which the coordinator rejects a worker that the group
has removed (KIP-447). It reads with ``require_stable``, so that the next worker waits until the
last transaction of the previous one has ended.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from aiokafka import AIOKafkaProducer, TopicPartition

from fencepost.client.client import ApiError, AsyncWireClient
from fencepost.client.requests import offset_fetch, rows_of, txn_offset_commit
from fencepost.client.security import PLAINTEXT, Security

ADD_OFFSETS_VERSION, TXN_COMMIT_VERSION, FETCH_VERSION = 3, 3, 7
"""The versions of AddOffsetsToTxn and TxnOffsetCommit that have the group's metadata and fit
aiokafka's transactions (EndTxn v0), and the first version of OffsetFetch with ``require_stable``.
"""

UNSTABLE_OFFSET_COMMIT = 88
UNSTABLE_PAUSE_S = 0.02
NO_OFFSET = -1


@dataclass(frozen=True, slots=True)
class MemberIdentity:
    """The member that commits. The coordinator compares it with the group's current state."""

    generation: int
    member_id: str
    instance_id: str | None = None


class GroupOffsetClient:
    """Commits and reads the offsets of one group. Calls may run concurrently."""

    def __init__(
        self, bootstrap: str, group: str, *, timeout_ms: int, security: Security = PLAINTEXT
    ) -> None:
        self._client = AsyncWireClient(bootstrap, client_id=f"{group}-offsets", security=security)
        self._group = group
        self._timeout_ms = timeout_ms

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def add(
        self,
        producer: AIOKafkaProducer,
        offsets: Mapping[TopicPartition, int],
        member: MemberIdentity,
    ) -> None:
        """Add ``offsets`` to the producer's open transaction.

        All records of the transaction must have been flushed. Raises ApiError, in which
        ILLEGAL_GENERATION, UNKNOWN_MEMBER_ID and FENCED_INSTANCE_ID mean that another member may
        own the partitions.
        """
        manager = producer._txn_manager  # there is no public access to id and epoch
        claim = {
            "transactional_id": manager.transactional_id,
            "group_id": self._group,
            "producer_id": manager.producer_id,
            "producer_epoch": manager.producer_epoch,
        }
        await self._client.call(
            "AddOffsetsToTxn",
            ADD_OFFSETS_VERSION,
            to_transaction=manager.transactional_id,
            timeout_ms=self._timeout_ms,
            **claim,
        )
        # From now on the client must send EndTxn even if it wrote no record.
        manager.consumer_group_added(self._group)
        answer = await self._client.call(
            "TxnOffsetCommit",
            TXN_COMMIT_VERSION,
            to_group=self._group,
            timeout_ms=self._timeout_ms,
            entity=lambda f: txn_offset_commit(
                f,
                offsets,
                **claim,
                generation_id=member.generation,
                member_id=member.member_id,
                group_instance_id=member.instance_id,
            ),
        )
        for _, row in rows_of(answer):
            if row.error_code:
                raise ApiError(row.error_code, "TxnOffsetCommit")

    async def stable(self, sources: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """Read committed offsets once no open transaction can change them; −1 for none.

        Raises TimeoutError after the timeout, ApiError for errors that a retry cannot fix.
        """
        partitions = [(source.topic, source.partition) for source in sources]
        end = time.monotonic() + self._timeout_ms / 1000
        while True:
            answer = await self._client.call(
                "OffsetFetch",
                FETCH_VERSION,
                to_group=self._group,
                timeout_ms=self._timeout_ms,
                check=False,
                entity=lambda f: offset_fetch(f, self._group, partitions, require_stable=True),
            )
            rows = dict(rows_of(answer))
            error_codes = (answer.error_code, *(row.error_code for row in rows.values()))
            codes = {int(code) for code in error_codes if code}
            if not codes:
                return {TopicPartition(*tp): row.committed_offset for tp, row in rows.items()}
            error = ApiError(min(codes), "OffsetFetch")
            if not (codes == {UNSTABLE_OFFSET_COMMIT} or error.code.retriable):
                raise error
            if time.monotonic() > end:
                raise TimeoutError(
                    f"group {self._group}: offsets not stable within {self._timeout_ms} ms"
                ) from error
            await asyncio.sleep(UNSTABLE_PAUSE_S)

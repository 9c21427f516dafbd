"""The sink's memory: which micro-batch was committed last, kept inside the transactions themselves.

It is the metadata of one committed offset of a group without members, so it is committed or aborted
together with the batch's records.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Self

from pipelines.spark.errors import ProgressError


@dataclass(frozen=True, slots=True)
class Progress:
    """The last committed batch of a query."""

    batch_id: int
    query_id: str
    digest: str
    """Of the batch's source offsets; empty where the checkpoint could not be read."""
    rows: int = 0

    def to_text(self) -> str:
        """The metadata of the offset commit; far below Kafka's limit of 4096 bytes."""
        return json.dumps(
            {"b": self.batch_id, "q": self.query_id, "d": self.digest, "rows": self.rows},
            separators=(",", ":"),
        )

    @classmethod
    def from_text(cls, text: str, group: str) -> Self:
        """The opposite. Raises :class:`ProgressError` if somebody else wrote it."""
        try:
            found = json.loads(text)
            return cls(int(found["b"]), str(found["q"]), str(found["d"]), int(found.get("rows", 0)))
        except (ValueError, KeyError, TypeError):
            raise ProgressError(
                f"group {group!r} holds an offset that this sink did not write ({text[:80]!r});"
                " another transactional id is needed"
            ) from None


def is_done(planned: Progress, done: Progress | None, transactional_id: str) -> bool:
    """Whether the batch was committed by an earlier attempt.

    Raises :class:`ProgressError` when progress and checkpoint do not belong together: then any
    choice would lose or double records.
    """
    batch = planned.batch_id
    if done is None:
        if batch == 0:
            return False
        raise ProgressError(
            f"the query is at batch {batch}, but {transactional_id!r} has committed nothing that is"
            " still known: its offsets have expired (offsets.retention.minutes), the broker is"
            " another one, or the checkpoint was begun with another sink. Whether batch"
            f" {batch - 1} arrived can't be told; begin with a new checkpoint"
        )
    if done.query_id != planned.query_id:
        raise ProgressError(
            f"{transactional_id!r} belongs to query {done.query_id}, and this is query"
            f" {planned.query_id}: a lost checkpoint, or two queries of one name. Give this one"
            " another kafka.transactional.id"
        )
    if done.batch_id == batch:
        if done.digest and planned.digest and done.digest != planned.digest:
            raise ProgressError(
                f"batch {batch} was committed from other source offsets than it has now: the"
                " checkpoint was rolled back and the batch planned anew"
            )
        return True
    if done.batch_id > batch:
        raise ProgressError(
            f"batch {done.batch_id} is committed, and the query is at batch {batch}: the checkpoint"
            " was rolled back"
        )
    if done.batch_id < batch - 1:
        raise ProgressError(
            f"the query is at batch {batch}, but only batch {done.batch_id} is committed: batches"
            " between them went elsewhere"
        )
    return False

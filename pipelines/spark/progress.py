"""The sink's progress: the last committed micro-batch, stored within the transactions themselves.

It is the metadata of one committed offset of a group without members, so it is committed or aborted
together with the batch's records.
"""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass, replace
from typing import Self

from fencepost.pipelines.spark.errors import ProgressError


def default_transactional_id(query_id: str) -> str:
    """Return the sink's transactional id. Spark's query id lasts as long as the checkpoint."""
    return f"fencepost-{query_id}"


def group_of(transactional_id: str) -> str:
    """Return the group whose one offset is the sink's progress. It never has members."""
    return f"{transactional_id}-progress"


@dataclass(frozen=True, slots=True)
class Progress:
    """The identity of a query's batch: its input, and its contents."""

    batch_id: int
    query_id: str
    digest: str
    """The digest of the batch's source offsets; empty if the checkpoint was unreadable."""
    rows: int = 0
    checksum: str = ""
    """The checksum of the batch's rows in any order (:class:`Tally`); empty with a digest."""

    def counted(self, rows: int, checksum: int) -> Self:
        """Return the progress with its contents; the checksum is dropped if there is a digest."""
        return replace(
            self, rows=rows, checksum="" if self.digest else f"{checksum % (1 << 64):016x}"
        )

    def to_text(self) -> str:
        """Return the metadata of the offset commit; far below Kafka's limit of 4096 bytes."""
        fields: dict[str, object] = {
            "b": self.batch_id,
            "q": self.query_id,
            "d": self.digest,
            "rows": self.rows,
        }
        if self.checksum:
            fields["c"] = self.checksum
        return json.dumps(fields, separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str, group: str) -> Self:
        """Read the result of ``to_text``. Raises :class:`ProgressError` for any other text."""
        try:
            fields = json.loads(text)
            return cls(
                int(fields["b"]),
                str(fields["q"]),
                str(fields["d"]),
                int(fields.get("rows", 0)),
                str(fields.get("c", "")),
            )
        except (ValueError, KeyError, TypeError):
            raise ProgressError(
                f"group {group!r} holds an offset that this sink did not write ({text[:80]!r});"
                " another transactional id is needed"
            ) from None


class BatchState(enum.Enum):
    """The state of a batch according to the committed progress."""

    NEXT = "next"
    """The batch must be written."""
    DONE = "done"
    """An earlier attempt has committed the batch."""
    LOOKS_DONE = "looks done"
    """A batch with its number was committed. Only the rows identify it: :func:`check_same`."""


def batch_state(planned: Progress, done: Progress | None, transactional_id: str) -> BatchState:
    """Return whether an earlier attempt has committed the batch.

    Raises :class:`ProgressError` if progress and checkpoint do not belong together: then any
    choice would lose or duplicate records.
    """
    batch = planned.batch_id
    if done is None:
        if batch == 0:
            return BatchState.NEXT
        raise ProgressError(
            f"the query is at batch {batch}, but {transactional_id!r} has committed nothing that is"
            " still known. Brokers forget what was committed when nothing follows for"
            " offsets.retention.minutes, 7 days by default: a query that runs less often needs"
            " more of them. Else the broker is another one, or the checkpoint was begun with"
            f" another sink. Whether batch {batch - 1} arrived can't be told here: it did if the"
            f" checkpoint's folder commits holds {batch - 1}. Then begin with a new checkpoint,"
            f" its startingOffsets the last line of the old one's offsets/{batch - 1}"
        )
    # Earlier versions of exactly_once_batch stored the transactional id instead of the query's id.
    if done.query_id not in {planned.query_id, transactional_id}:
        raise ProgressError(
            f"{transactional_id!r} belongs to query {done.query_id}, and this is query"
            f" {planned.query_id}: a lost checkpoint, or two queries of one name. Give this one"
            " another kafka.transactional.id"
        )
    if done.batch_id == batch:
        if not done.digest or not planned.digest:
            return BatchState.LOOKS_DONE
        if done.digest != planned.digest:
            raise ProgressError(
                f"batch {batch} was committed from other source offsets than it has now: the"
                " checkpoint was rolled back and the batch planned again"
            )
        return BatchState.DONE
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
    return BatchState.NEXT


def check_same(progress: Progress, done: Progress) -> None:
    """Refuse to skip a batch whose rows differ from the ones committed under its number.

    Raises :class:`ProgressError`. Progress of earlier versions has a count, but no checksum.
    """
    if progress.rows == done.rows and done.checksum in {"", progress.checksum}:
        return
    what = (
        f"{done.rows} rows, and now it has {progress.rows}"
        if progress.rows != done.rows
        else f"{done.rows} rows with other content than now"
    )
    raise ProgressError(
        f"batch {done.batch_id} was committed with {what}: the checkpoint was rolled back and the"
        " batch planned anew, or the query makes other rows each time it runs (rand, uuid, a table"
        " that changes). Where the sink can read the checkpoint (checkpointLocation on a file"
        " system of the driver's machine) it knows the batch by its offsets instead"
    )

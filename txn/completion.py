"""The markers of a transaction are written: the transaction is complete.

Source: ``TransactionMarkerChannelManager`` and ``TransactionMetadata.prepareComplete``.
"""

from __future__ import annotations

from fencepost.logcore.machine import Decision, Token
from fencepost.txn import init_producer, state
from fencepost.txn.commands import MarkersWritten, MarkersWrittenResult
from fencepost.txn.shard import Draft, TxnShardState


def decide(shard: TxnShardState, token: Token, command: MarkersWritten, now_ms: int) -> Decision:
    """Record that a transaction is complete once its last marker is written.

    A claim on the id that waited for this is recorded and answered in the same decision. Answers
    that repeat, or belong to an earlier transaction, change nothing.
    """
    transactional_id = command.transactional_id
    draft = Draft(shard)
    if not shard.markers.settle(command):
        draft.reply(token, MarkersWrittenResult(completed=False))
        return draft.decision()
    completed = state.completed(shard.transactions[transactional_id], now_ms)
    draft.write(transactional_id, completed)
    draft.reply(token, MarkersWrittenResult(completed=True))
    init_producer.grant_parked(shard, draft, transactional_id, completed, now_ms)
    return draft.decision()

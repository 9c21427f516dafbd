"""The completion of a transaction whose markers are written.

Source: ``TransactionMarkerChannelManager`` and ``TransactionMetadata.prepareComplete``.
"""

from __future__ import annotations

from fencepost.logcore.machine import DecisionBuilder, Token
from fencepost.txn import init_producer, state
from fencepost.txn.commands import MarkersWritten, MarkersWrittenResult
from fencepost.txn.shard import TxnShardState


def decide(
    shard: TxnShardState, decision: DecisionBuilder, token: Token, command: MarkersWritten
) -> None:
    """Append the Complete record of a transaction once its last marker is written.

    An InitProducerId that waits for the completion is answered in the same decision. Repeated
    reports, and reports on an earlier transaction, change nothing.
    """
    transactional_id = command.transactional_id
    if not shard.markers.settle(command):
        decision.reply(token, MarkersWrittenResult(completed=False))
        return
    completed = state.completed(shard.transactions[transactional_id], decision.now_ms)
    decision.append(shard.record(transactional_id, completed))
    decision.reply(token, MarkersWrittenResult(completed=True))
    init_producer.grant_parked(shard, decision, transactional_id, completed)

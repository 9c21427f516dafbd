"""Draws the README's diagram and table: ``python -m fencepost.txn.diagram``."""

from __future__ import annotations

import sys

from fencepost.txn.end_txn import TV1_COLUMNS, TV1_TABLE, TV2_COLUMNS, TV2_TABLE, EndTxnVerdict
from fencepost.txn.state import TRANSITIONS

_WORDS = {
    EndTxnVerdict.END: "**recorded**",
    EndTxnVerdict.DONE: "NONE again",
    EndTxnVerdict.WAIT: "CONCURRENT_TRANSACTIONS",
    EndTxnVerdict.ILLEGAL: "INVALID_TXN_STATE",
    EndTxnVerdict.FENCED: "PRODUCER_FENCED",
}


def states() -> str:
    """Return the states of a transaction as a Mermaid diagram."""
    lines = ["stateDiagram-v2", "    [*] --> Empty: InitProducerId of a new id"]
    for (old, new), cause in sorted(
        TRANSITIONS.items(), key=lambda transition: transition[0][::-1]
    ):
        lines.append(f"    {old.kafka_name} --> {new.kafka_name}: {cause}")
    return "\n".join([*lines, "    Dead --> [*]: tombstone"])


def ends() -> str:
    """Return the outcomes of EndTxn as a Markdown table."""
    lines = [
        "| state | TV1 commit | TV1 abort | TV2 commit | its retry | TV2 abort | its retry |",
        "|---|---|---|---|---|---|---|",
    ]
    for row_state in sorted({state for state, _ in TV1_TABLE}):
        verdicts = [TV1_TABLE[row_state, column] for column in TV1_COLUMNS]
        verdicts += [TV2_TABLE[row_state, *column] for column in TV2_COLUMNS]
        cells = " | ".join(_WORDS[verdict] for verdict in verdicts)
        lines.append(f"| {row_state.kafka_name} | {cells} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(f"{states()}\n\n{ends()}\n")

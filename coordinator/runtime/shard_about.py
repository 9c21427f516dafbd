"""The turn of a shard: its replies and effects, and its subject for the log and the history."""

from __future__ import annotations

from fencepost.coordinator.runtime.origin import Origin
from fencepost.logcore.machine import ProducerStamp, Reply

About = tuple[str, object]
"""The subject of a turn: its kind (``request``, ``upkeep``, ``report``, ``timer``, ``marker`` or
``load``), and the command, the timer's key or a description."""


class Turn:
    """The replies of one turn, and the number of its unfinished effects."""

    __slots__ = ("effects", "has_ended", "replies")

    def __init__(self) -> None:
        self.replies: list[Reply] = []
        self.effects = 0
        self.has_ended = False


def trigger(about: About | None) -> str | None:
    """Describe the subject of a turn in two words: ``request JoinGroup``, ``timer session``."""
    if about is None:
        return None
    kind, what = about
    if kind == "timer":
        return f"timer {what[0] if isinstance(what, tuple) else what}"
    return f"{kind} {what if isinstance(what, str) else type(what).__name__}"


def blame(about: About | None, origin: Origin | None) -> dict[str, object]:
    """Return the turn's fields for the log line of a failure: trigger, subject, client."""
    what = None if about is None else about[1]
    if isinstance(what, tuple):  # a timer's key: its kind, and its subject
        subject = what[1] if len(what) > 1 else None
    elif isinstance(what, ProducerStamp):
        subject = f"producer {what.producer_id} of epoch {what.producer_epoch}"
    else:
        subject = getattr(what, "group_id", None) or getattr(what, "transactional_id", None)
    fields: dict[str, object] = {"trigger": trigger(about), "subject": subject}
    if origin is not None:
        fields |= {"client_id": origin.client_id, "client_host": origin.client_host}
    return {name: value for name, value in fields.items() if value is not None}

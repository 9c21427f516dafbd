"""Decisions on requests by the active controller of this process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from fencepost.cluster.controller.machine import Controller
from fencepost.cluster.controller.outcome import ControllerResult
from fencepost.coordinator.controller.active import Decide
from fencepost.coordinator.handlers import Context
from fencepost.coordinator.handlers.answers import forced, result_of
from fencepost.coordinator.runtime.turns import Work
from fencepost.logcore.machine import DomainError
from fencepost.protocol.api import KNOWN_APIS
from fencepost.protocol.steps import Steps

T = TypeVar("T")
Item = TypeVar("Item")

ITEMS_PER_TURN = 500
"""The maximum number of partitions or ACLs in one decision, if a request can be split."""

CHARACTERS_PER_TURN = 1 << 20
"""The maximum length of all names in the records of one such decision. A name may have 32 KiB, and
each quota of an entity repeats the entity's names. So a decision on 500 entities could take 60 MB
and a fifth of a second."""

MAX_ITEMS = 10_000
"""The maximum number of partitions in a request that the controller decides on at once. Kafka's
limit for the records of an operation is the same (``QuorumController.MAX_RECORDS_PER_USER_OP``)."""


def decider(ctx: Context) -> Decide:
    """Return a function that makes decisions; the caller must flush them with :func:`forced`."""

    def decide(decision: Callable[[Controller], ControllerResult[T]]) -> T:
        active = ctx.controller
        with active.store.unforced():
            return active.decide(
                decision,
                origin=ctx.origin,
                trigger=f"request {KNOWN_APIS[ctx.api_key].name}",
            )

    return decide


def decided(ctx: Context, decision: Callable[[Controller], ControllerResult[T]]) -> Work[T]:
    """Have the controller decide on the request; return the result once the change is durable.

    Raises the decision's errors, and the store's errors such as StorageError.
    """
    (answer,) = yield from decided_each(ctx, (decision,))
    return answer


def decided_each(
    ctx: Context, decisions: Iterable[Callable[[Controller], ControllerResult[T]]]
) -> Work[list[T]]:
    """Have the controller make several decisions, yielding to other requests in between."""

    def changes() -> Steps[list[T]]:
        answers, decide = [], decider(ctx)
        for decision in decisions:
            answers.append(decide(decision))
            yield
        return answers

    return forced(ctx, changes())


def decided_by_item(
    ctx: Context,
    items: Sequence[Item],
    decide: Callable[[Sequence[Item], Controller], ControllerResult[list[DomainError | None]]],
    characters_of: Callable[[Item], int],
) -> Work[list[DomainError | None]]:
    """Have the controller decide on a request's items in batches; return the error of each item.

    ``characters_of`` returns the size of the names in an item's records. In a ZooKeeper cluster
    each batch is one item, since ZooKeeper may refuse the records of one item and accept the next.
    """
    store = None if ctx.zookeeper_controller is None else ctx.zookeeper_controller.active.store

    def changes() -> Work[list[DomainError | None]]:
        errors: list[DomainError | None] = []
        written, decide_on = [], decider(ctx)
        pieces = batches_per_turn(items, characters_of) if store is None else batched(items, 1)
        for batch in pieces:
            errors += decide_on(partial(decide, batch))
            if store is not None:
                written.append(store.durable())
            yield None
        for at, change in enumerate(written):
            if change is not None:
                errors[at] = yield from result_of(change)
        return errors

    return forced(ctx, changes())


def decide_until_done(
    ctx: Context,
    decision: Callable[[Controller], ControllerResult[T]],
    is_more: Callable[[T], bool],
) -> Work[T]:
    """Repeat a decision until ``is_more`` is false for its result; return the last result."""
    answers: list[T] = []

    def decide(machine: Controller) -> ControllerResult[T]:
        outcome = decision(machine)
        answers.append(outcome.answer)
        return outcome

    def decisions() -> Iterator[Callable[[Controller], ControllerResult[T]]]:
        yield decide
        while is_more(answers[-1]):
            yield decide

    yield from decided_each(ctx, decisions())
    return answers[-1]


def batched(items: Sequence[T], count: int) -> Iterator[Sequence[T]]:
    """Split items into batches of ``count``."""
    for start in range(0, len(items), count):
        yield items[start : start + count]


def batches_per_turn(
    items: Iterable[Item], characters_of: Callable[[Item], int]
) -> Iterator[Sequence[Item]]:
    """Split items into batches that each fit into one turn of the event loop."""
    piece: list[Item] = []
    characters = 0
    for item in items:
        more = characters_of(item)
        is_full = len(piece) >= ITEMS_PER_TURN or characters + more > CHARACTERS_PER_TURN
        if piece and is_full:
            yield piece
            piece, characters = [], 0
        piece.append(item)
        characters += more
    if piece:
        yield piece

"""Clients' regular expressions, matched in linear time.

The time for an expression is bounded by its length times the lengths of the texts, and long
expressions are processed in slices. Matching is Thompson's: all alternatives in parallel, never
backwards, with a cache of state sets. A match is a match of the whole text, as in Kafka for topics
and transactional ids. ``regex_syntax.py`` has the syntax.

Source: KIP-848's and KIP-1152's use of RE2/J; Russ Cox, "Regular Expression Matching Can Be Simple
And Fast".
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Final, TypeVar

from fencepost.logcore.regex_sets import ASCII_END, BEYOND, NEWLINE, WORD, CharSet, WideSet
from fencepost.logcore.regex_syntax import (
    Assertion,
    Choice,
    Piece,
    Repetition,
    Sequence,
    parse,
)
from fencepost.logcore.steps import Steps, finish

T = TypeVar("T")

AT_ONCE: Final = 2_000
"""The number of states that are built or visited between two yields."""
BUILD_STEPS: Final = 5
"""The cost of building one state, in steps; visiting a state costs one step."""
MAX_CACHED_STATES: Final = 100_000
"""The maximum number of states in all cached sets, which take a few megabytes; a larger cache is
cleared."""
MAX_KEPT_STATES: Final = 20_000
"""The maximum number of cached states of an expression between two slices. It is lower, because
the matching of many expressions may be in progress."""

_FINAL: Final = 0
_NOTHING: Final = -1
"""In place of a state's characters: the state consumes no character. 0 is an empty class."""
_BEGIN, _WORD, _NEWLINE, _OTHER = range(4)
"""Kinds of the character on one side of a position; ``_BEGIN`` means no character."""

_BUILD = Generator[tuple[Piece, int], int, int]
"""A task that builds a piece: it yields the pieces inside, and returns the piece's first state."""


def _bit(char: str) -> int:
    return 1 << min(ord(char), ASCII_END)


def _kind(char: str) -> int:
    bit = _bit(char)
    return _WORD if bit & WORD else _NEWLINE if bit & NEWLINE else _OTHER


def _assertions_between(before: int, after: int) -> int:
    """Return the assertions that hold between two characters, as a bit set."""
    is_boundary = (before == _WORD) != (after == _WORD)
    return (
        (before == _BEGIN) << Assertion.TEXT_BEGIN
        | (after == _BEGIN) << Assertion.TEXT_END
        | (before in {_BEGIN, _NEWLINE}) << Assertion.LINE_BEGIN
        | (after in {_BEGIN, _NEWLINE}) << Assertion.LINE_END
        | is_boundary << Assertion.WORD_BOUNDARY
        | (not is_boundary) << Assertion.NO_WORD_BOUNDARY
    )


class _StateSet:
    """The states after a text, before any further transition that consumes no character."""

    __slots__ = ("accepts", "before", "states", "steps")

    def __init__(self, states: frozenset[int], before: int) -> None:
        self.states, self.before = states, before
        self.steps: dict[str, _StateSet | None] = {}
        """The next set by character; None if no matching text continues with the character."""
        self.accepts: bool | None = None
        """Whether a text may end here; None while unknown."""


class Regex:
    """An expression, and its automaton once it is built."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self._is_built = False
        # Per state: the characters or the assertion of its transitions, and their targets.
        self._characters = [_NOTHING]
        self._wide_sets: dict[int, WideSet] = {}
        """Sets by state, where the bit for all characters beyond ASCII is not precise enough."""
        self._assertions: list[Assertion | None] = [None]
        self._nexts: list[tuple[int, ...]] = [()]
        self._has_context_assertions = False
        self._cached_states = 0
        self._sets: dict[tuple[frozenset[int], int], _StateSet] = {}
        self._first = _StateSet(frozenset((_FINAL,)), _BEGIN)

    # --- building ---

    def build(self) -> Generator[int, None, None]:
        """Build the automaton in small steps; yield the number of steps taken.

        Raises :class:`fencepost.logcore.machine.InvalidRegularExpressionError`; see ``parse``.
        """
        if self._is_built:
            return
        piece = yield from parse(self.pattern)
        stack, first, reported, nested = [self._build(piece, _FINAL)], 0, 0, 0
        result: int | None = None
        while stack:
            try:
                part, after = stack[-1].send(result) if result is not None else next(stack[-1])
            except StopIteration as end:
                stack.pop()
                result = first = end.value
            else:
                stack.append(self._build(part, after))
                result = None
            nested += 1
            done = len(self._nexts) + nested
            if done - reported > AT_ONCE:
                yield BUILD_STEPS * (done - reported)
                reported = done
        self._first = _StateSet(frozenset((first,)), _BEGIN)
        # Set only now, because other tasks may need the automaton before the build is complete, and
        # this build may be given up. A second build adds states of its own.
        self._is_built = True

    def _add(self, characters: CharSet, assertion: Assertion | None, *nexts: int) -> int:
        if isinstance(characters, WideSet):
            self._wide_sets[len(self._nexts)] = characters
            characters = characters.inside | BEYOND
        self._characters.append(characters)
        self._assertions.append(assertion)
        self._nexts.append(nexts)
        return len(self._nexts) - 1

    def _build(self, piece: Piece, after: int) -> _BUILD:
        """Add the states of a piece, whose transitions lead to ``after``."""
        match piece:
            case Assertion():
                self._has_context_assertions |= piece > Assertion.TEXT_END
                return self._add(_NOTHING, piece, after)
            case int() | WideSet():
                return self._add(piece, None, after)
            case Sequence():
                for part in reversed(piece.parts):
                    if type(part) is int:  # the common case
                        after = self._add(part, None, after)
                    else:
                        after = yield part, after
                return after
            case Choice():
                firsts: dict[int, None] = {}
                for part in piece.parts:
                    firsts[(yield part, after)] = None
                return self._add(_NOTHING, None, *firsts)
            case Repetition():
                return (yield from self._build_repetition(piece, after))

    def _build_repetition(self, piece: Repetition, after: int) -> _BUILD:
        if piece.most is None:
            loop = self._add(_NOTHING, None)
            first = yield piece.part, loop
            self._nexts[loop] = first, after
            after = loop
        else:
            end = after
            for _ in range(piece.most - piece.least):
                first = yield piece.part, after
                after = self._add(_NOTHING, None, end, first)
        for _ in range(piece.least):
            after = yield piece.part, after
        return after

    # --- matching ---

    def matches(self, text: str) -> bool:
        """Return whether the expression matches all of ``text``. Raises as :meth:`build`."""
        finish(self.build())
        return finish(self.walk(text))

    def walk(self, text: str) -> Generator[int, None, bool]:
        """Match ``text`` in small steps; yield the number of steps taken, return the result.

        A step is one visit of a state, or one character with a cached transition.
        """
        yield 1
        at = self._first
        for char in text:
            if char in at.steps:
                following = at.steps[char]
            else:
                following = yield from self._step(at, char)
            if following is None:
                return False
            at = following
        yield len(text)
        if at.accepts is None:
            states, _ = yield from self._reachable_states(at, "", _BEGIN)
            at.accepts = _FINAL in states
        return at.accepts

    def forget(self, most_states: int) -> None:
        """Clear the cached transitions, if they take more than ``most_states``."""
        if self._cached_states > most_states:
            for state_set in (self._first, *self._sets.values()):
                state_set.steps.clear()
            self._sets.clear()
            self._cached_states = 0

    def _step(self, at: _StateSet, char: str) -> Generator[int, None, _StateSet | None]:
        """Compute the transition for a character."""
        kind = _kind(char)
        _, following = yield from self._reachable_states(at, char, kind)
        result = None
        if following:
            self.forget(MAX_CACHED_STATES)
            key = frozenset(following), kind if self._has_context_assertions else _OTHER
            result = self._sets.get(key)
            if result is None:
                result = self._sets[key] = _StateSet(*key)
                self._cached_states += len(following)
        at.steps[char] = result
        self._cached_states += 1
        return result

    def _reachable_states(
        self, at: _StateSet, char: str, after: int
    ) -> Generator[int, None, tuple[set[int], set[int]]]:
        """Return the states reached without a character, and the states reached with one."""
        characters, assertions, nexts = self._characters, self._assertions, self._nexts
        holding = _assertions_between(at.before, after)
        wide_sets = self._wide_sets if char and not char.isascii() else {}
        bit = _bit(char) if char else 0
        reached: set[int] = set()
        following: set[int] = set()
        todo = list(at.states)
        while todo:
            state = todo.pop()
            if state in reached:
                continue
            reached.add(state)
            if not len(reached) % AT_ONCE:
                yield AT_ONCE
            if characters[state] != _NOTHING:
                if characters[state] & bit and (
                    state not in wide_sets or wide_sets[state].has(ord(char))
                ):
                    following.update(nexts[state])
                continue
            assertion = assertions[state]
            if assertion is None or holding >> assertion & 1:
                todo += nexts[state]
        yield len(reached) % AT_ONCE
        return reached, following


def in_steps(regex: Regex, work: Generator[int, None, T]) -> Steps[T]:
    """Run ``work`` of ``regex``, yielding after each step, and limit the states that it caches."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result
        regex.forget(MAX_KEPT_STATES)
        yield

r"""Regular expressions over topic names, matched in linear time.

A subscription's expression comes from a client, so no expression may take longer than its length
times that of the names, and a long one is worked at in slices (:class:`RegexScan`). Matching is
Thompson's: all alternatives at once, never backwards, with the sets of states remembered as they
are met. The syntax is RE2's as far as topic names need it;
what lies outside (backreferences, look-around, word boundaries, Unicode classes) is refused.
A match is one of the whole name, as in Kafka.

Supported: literals, ``.``, ``[...]`` with ranges, negation, escapes and POSIX classes, ``\\d \\w
\\s`` and their opposites, ``\\Q...\\E``, groups (plain, ``?:`` and named), ``|``, ``* + ? {n,m}``
(also lazy, which makes no difference), ``^ $ \\A \\z``, and ``(?i)`` at the start.

Source: KIP-848's use of RE2J; Russ Cox, "Regular Expression Matching Can Be Simple And Fast".
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Final, NoReturn

from fencepost.groups.errors import InvalidRegularExpressionError

MAX_STATES: Final = 40_000
"""States of one expression: repetitions multiply, and each set of states may hold them all."""
MAX_REPEAT: Final = 1_000
"""The largest n and m in ``{n,m}``; RE2's own."""
MAX_NESTING: Final = 100
"""Groups inside groups: the parser calls itself for each."""
MAX_BUILD_STEPS: Final = 100_000
"""Pieces that are put together to one expression: repetitions multiply what adds no state too."""
MAX_CACHED_STATES: Final = 100_000
"""States in all the sets that are remembered, a few megabytes; then all are forgotten at once."""
MAX_KEPT_STATES: Final = 5_000
"""The same between two slices, when many expressions may be half-way."""

Ranges = tuple[tuple[int, int], ...]
"""Code points, both ends included."""
Bounds = tuple[int, ...]
"""The same in order, as first code points of ranges and of the gaps between them."""

_LAST: Final = 0x10FFFF
_DIGIT: Final[Ranges] = ((48, 57),)
_LOWER: Final[Ranges] = ((97, 122),)
_UPPER: Final[Ranges] = ((65, 90),)
_WORD: Final[Ranges] = (*_DIGIT, *_UPPER, (95, 95), *_LOWER)
_SPACE: Final[Ranges] = ((9, 10), (12, 13), (32, 32))
_POSIX: Final[dict[str, Ranges]] = {
    "alnum": (*_DIGIT, *_UPPER, *_LOWER),
    "alpha": (*_UPPER, *_LOWER),
    "digit": _DIGIT,
    "lower": _LOWER,
    "punct": ((33, 47), (58, 64), (91, 96), (123, 126)),
    "space": ((9, 13), (32, 32)),
    "upper": _UPPER,
    "word": _WORD,
    "xdigit": (*_DIGIT, (65, 70), (97, 102)),
}
_CONTROL: Final = {"a": 7, "f": 12, "n": 10, "r": 13, "t": 9, "v": 11}


def _bounds(ranges: Ranges) -> Bounds:
    bounds: list[int] = []
    for low, high in sorted(ranges):
        if bounds and low <= bounds[-1]:
            bounds[-1] = max(bounds[-1], high + 1)
        else:
            bounds += (low, high + 1)
    return tuple(bounds)


def _inverted(ranges: Iterable[tuple[int, int]]) -> Ranges:
    result: list[tuple[int, int]] = []
    start = 0
    for low, high in sorted(ranges):
        if low > start:
            result.append((start, low - 1))
        start = max(start, high + 1)
    if start <= _LAST:
        result.append((start, _LAST))
    return tuple(result)


_CLASSES: Final[dict[str, Ranges]] = {
    "d": _DIGIT,
    "D": _inverted(_DIGIT),
    "w": _WORD,
    "W": _inverted(_WORD),
    "s": _SPACE,
    "S": _inverted(_SPACE),
}
_START: Final = "start"
_END: Final = "end"


class _Program:
    """States of the automaton. Each is a set of characters or an assertion, or only leads on."""

    def __init__(self) -> None:
        self.tests: list[Bounds | str | None] = []
        self.nexts: list[list[int]] = []
        self.steps = 0

    def step(self) -> None:
        self.steps += 1
        if self.steps > MAX_BUILD_STEPS:
            raise InvalidRegularExpressionError(f"the expression has over {MAX_BUILD_STEPS} pieces")

    def add(self, test: Bounds | str | None = None, *nexts: int) -> int:
        if len(self.tests) >= MAX_STATES:
            raise InvalidRegularExpressionError(f"the expression needs over {MAX_STATES} states")
        self.tests.append(test)
        self.nexts.append(list(nexts))
        return len(self.tests) - 1


Fragment = Callable[[_Program, int], int]
"""Adds its states, leading to the given one; returns the first."""


def _one(ranges: Ranges | str) -> Fragment:
    test = ranges if isinstance(ranges, str) else _bounds(ranges)
    return lambda program, after: program.add(test, after)


def _sequence(parts: list[Fragment]) -> Fragment:
    def build(program: _Program, after: int) -> int:
        program.step()
        for part in reversed(parts):
            after = part(program, after)
        return after

    return build


def _either(parts: list[Fragment]) -> Fragment:
    if len(parts) == 1:
        return parts[0]
    return lambda program, after: program.add(
        None, *dict.fromkeys(part(program, after) for part in parts)
    )


def _repeated(part: Fragment, least: int, most: int | None) -> Fragment:
    def build(program: _Program, after: int) -> int:
        program.step()
        if most is None:
            loop = program.add(None, after)
            program.nexts[loop].append(part(program, loop))
            after = loop
        else:
            end = after
            for _ in range(most - least):
                after = program.add(None, end, part(program, after))
        for _ in range(least):
            first = part(program, after)
            if first == after:
                break  # it is empty: repeating it adds nothing but time
            after = first
        return after

    return build


class _Parser:
    """Recursive descent over the expression."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._pos = 0
        self._depth = 0
        self._ignore_case = pattern.startswith("(?i)")
        if self._ignore_case:
            self._pos = 4

    def parse(self) -> Fragment:
        result = self._alternatives()
        if self._pos < len(self._pattern):
            self._refuse("unmatched )")
        return result

    def _refuse(self, why: str) -> NoReturn:
        raise InvalidRegularExpressionError(
            f"regular expression {self._pattern[:200]!r}: {why} at position {self._pos}"
        )

    def _peek(self, text: str) -> bool:
        return self._pattern.startswith(text, self._pos)

    def _accept(self, text: str) -> bool:
        found = self._peek(text)
        if found:
            self._pos += len(text)
        return found

    def _char(self) -> str:
        if self._pos >= len(self._pattern):
            self._refuse("unexpected end")
        self._pos += 1
        return self._pattern[self._pos - 1]

    def _alternatives(self) -> Fragment:
        parts = [self._concatenation()]
        while self._accept("|"):
            parts.append(self._concatenation())
        return _either(parts)

    def _concatenation(self) -> Fragment:
        parts: list[Fragment] = []
        while self._pos < len(self._pattern) and not self._peek("|") and not self._peek(")"):
            if self._accept("\\Q"):
                end = self._pattern.find("\\E", self._pos)
                end = len(self._pattern) if end < 0 else end
                parts += [self._literal(char) for char in self._pattern[self._pos : end]]
                self._pos = end
                self._accept("\\E")
            elif not self._accept("\\E"):
                parts.append(self._quantified(self._atom()))
        return _sequence(parts)

    def _atom(self) -> Fragment:
        char = self._char()
        if char in "*+?":
            self._refuse("nothing to repeat")
        if char == "(":
            return self._group()
        if char == "[":
            return _one(self._class())
        if char == "\\":
            return self._escape()
        tests: dict[str, Ranges | str] = {".": _inverted(((10, 10),)), "^": _START, "$": _END}
        return _one(tests[char]) if char in tests else self._literal(char)

    def _group(self) -> Fragment:
        if self._accept("?P<") or (not self._peek("?<=") and self._accept("?<")):
            while (char := self._char()) != ">":
                if not (char.isalnum() or char == "_"):
                    self._refuse("bad group name")
        elif self._peek("?") and not self._accept("?:"):
            self._refuse("this kind of group is not supported")
        self._depth += 1
        if self._depth > MAX_NESTING:
            self._refuse(f"over {MAX_NESTING} nested groups")
        inner = self._alternatives()
        self._depth -= 1
        if not self._accept(")"):
            self._refuse("missing )")
        return inner

    def _quantified(self, atom: Fragment) -> Fragment:
        quantified = False
        while True:
            bounds = self._quantifier()
            if bounds is None:
                return atom
            if quantified:
                self._refuse("a repetition of a repetition")
            quantified = True
            atom = _repeated(atom, *bounds)
            self._accept("?")

    def _quantifier(self) -> tuple[int, int | None] | None:
        for sign, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._accept(sign):
                return bounds
        if not self._peek("{"):
            return None
        end = self._pattern.find("}", self._pos)
        low, comma, high = self._pattern[self._pos + 1 : max(end, self._pos + 1)].partition(",")
        if end < 0 or not _is_number(low) or not (high == "" or _is_number(high)):
            return None  # then it is a literal brace
        self._pos = end + 1
        least = int(low)
        most = least if not comma else int(high) if high else None
        if least > MAX_REPEAT or (most is not None and not least <= most <= MAX_REPEAT):
            self._refuse("bad repetition")
        return least, most

    def _escape(self) -> Fragment:
        if self._accept("A"):
            return _one(_START)
        if self._accept("z"):
            return _one(_END)
        ranges = self._escaped()
        if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
            return self._literal(chr(ranges[0][0]))
        return _one(ranges)

    def _escaped(self) -> Ranges:
        """Return what an escape stands for, inside or outside of a class."""
        char = self._char()
        if char in _CLASSES:
            return _CLASSES[char]
        if char in _CONTROL:
            return ((_CONTROL[char],) * 2,)
        if char == "x":
            digits = self._pattern[self._pos : self._pos + 2]
            if self._accept("{"):
                end = self._pattern.find("}", self._pos)
                digits, self._pos = self._pattern[self._pos : max(end, self._pos)], end + 1
            else:
                self._pos += 2
            if not 1 <= len(digits) <= 6 or digits.strip("0123456789abcdefABCDEF"):
                self._refuse("bad hexadecimal escape")
            if int(digits, 16) > _LAST:
                self._refuse("no such character")
            return ((int(digits, 16),) * 2,)
        if char.isalnum():
            self._refuse(f"\\{char} is not supported")
        return ((ord(char),) * 2,)

    def _class(self) -> Ranges:
        negated = self._accept("^")
        ranges: list[tuple[int, int]] = []
        first = True
        while first or not self._accept("]"):
            first = False
            if self._accept("[:"):
                ranges += self._posix()
                continue
            item = self._class_item()
            if len(item) == 1 and item[0][0] == item[0][1] and self._starts_range():
                self._pos += 1
                end = self._class_item()
                if len(end) != 1 or end[0][0] != end[0][1] or end[0][0] < item[0][0]:
                    self._refuse("bad range")
                item = ((item[0][0], end[0][0]),)
            ranges += item
        folded = self._folded(tuple(ranges))
        return _inverted(folded) if negated else folded

    def _starts_range(self) -> bool:
        return self._peek("-") and not self._peek("-]")

    def _class_item(self) -> Ranges:
        char = self._char()
        return self._escaped() if char == "\\" else ((ord(char),) * 2,)

    def _posix(self) -> Ranges:
        end = self._pattern.find(":]", self._pos)
        name = self._pattern[self._pos : max(end, self._pos)]
        ranges = _POSIX.get(name.removeprefix("^"))
        if ranges is None:
            self._refuse("unknown character class")
        self._pos = end + 2
        return _inverted(ranges) if name.startswith("^") else ranges

    def _literal(self, char: str) -> Fragment:
        return _one(self._folded(((ord(char),) * 2,)))

    def _folded(self, ranges: Ranges) -> Ranges:
        """Return ``ranges`` with the other case of ASCII letters, if case does not matter."""
        if not self._ignore_case:
            return ranges
        result = list(ranges)
        for low, high in ranges:
            for first, last, shift in ((65, 90, 32), (97, 122, -32)):
                start, end = max(low, first), min(high, last)
                if start <= end:
                    result.append((start + shift, end + shift))
        return tuple(result)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 9


class TopicRegex:
    """A compiled expression.

    Raises :class:`fencepost.groups.errors.InvalidRegularExpressionError` for bad syntax, what is
    not supported, and what needs more than :data:`MAX_STATES` states.
    """

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self._program = _Program()
        self._final = self._program.add()
        first = _Parser(pattern).parse()(self._program, self._final)
        self._first = self._closure([first], at_start=True, at_end=False)
        self._steps: dict[tuple[frozenset[int], str], frozenset[int]] = {}
        self._cached_states = 0

    @property
    def size(self) -> int:
        """What it took to compile, in steps."""
        return len(self._program.tests) + self._program.steps

    def matches(self, text: str) -> bool:
        """Whether the expression matches all of ``text``."""
        walk = self.walk(text)
        while True:
            try:
                next(walk)
            except StopIteration as end:
                return bool(end.value)

    def walk(self, text: str) -> Generator[int, None, bool]:
        """Match ``text`` little by little: yield the steps that were taken, return what came out.

        A step is one look at a state, or one character where it is known what comes of it.
        """
        yield 1
        states = self._first
        for char in text:
            key = (states, char)
            found = self._steps.get(key)
            if found is None:
                found = self._remember(key, self._step(states, ord(char)))
                yield len(states) + len(found)
            if not found:
                return False
            states = found
        yield len(text)
        ended = self._closure(states, at_start=not text, at_end=True)
        return self._final in ended

    def forget(self, most_states: int) -> None:
        """Forget which states follow which, if that takes more than ``most_states``."""
        if self._cached_states > most_states:
            self._steps.clear()
            self._cached_states = 0

    def _remember(self, key: tuple[frozenset[int], str], states: frozenset[int]) -> frozenset[int]:
        self.forget(MAX_CACHED_STATES)
        self._steps[key] = states
        self._cached_states += len(states) + 1
        return states

    def _step(self, states: frozenset[int], code: int) -> frozenset[int]:
        after: list[int] = []
        for state in states:
            test = self._program.tests[state]
            if isinstance(test, tuple) and bisect_right(test, code) & 1:
                after += self._program.nexts[state]
        return self._closure(after, at_start=False, at_end=False)

    def _closure(self, states: Iterable[int], *, at_start: bool, at_end: bool) -> frozenset[int]:
        """Return the states that can be reached without a character."""
        seen: set[int] = set()
        todo = list(states)
        while todo:
            state = todo.pop()
            if state in seen:
                continue
            seen.add(state)
            test = self._program.tests[state]
            if test is None or (test == _START and at_start) or (test == _END and at_end):
                todo += self._program.nexts[state]
        return frozenset(seen)


class RegexScan:
    """Finds out, slice by slice, which of many names match which of many expressions.

    A name that nobody ``may_see`` matches none.
    """

    def __init__(
        self,
        patterns: Iterable[str],
        names: Iterable[str],
        version: int,
        may_see: Callable[[str], bool] | None = None,
    ) -> None:
        self.version = version
        """Of the names, for whoever takes what is found."""
        self.found: dict[str, tuple[str, ...]] = {}
        """The names that match, in order, of each expression that is done."""
        self.refused: dict[str, str] = {}
        """Why an expression can't be used."""
        self._regex: TopicRegex | None = None
        self._may_see = may_see
        self._work = self._run(sorted(patterns), sorted(names))

    def go_on(self, steps: int) -> bool:
        """Take about so many steps; say whether nothing is left to do."""
        for taken in self._work:
            steps -= taken
            if steps <= 0:
                if self._regex is not None:
                    self._regex.forget(MAX_KEPT_STATES)
                return False
        return True

    def _run(self, patterns: list[str], names: list[str]) -> Iterator[int]:
        for pattern in patterns:
            try:
                regex = self._regex = TopicRegex(pattern)
            except InvalidRegularExpressionError as error:
                self.refused[pattern] = str(error)
                yield MAX_STATES  # it may have come as far as that
                continue
            yield regex.size
            matching: list[str] = []
            for name in names:
                does_match = yield from regex.walk(name)
                if does_match and (self._may_see is None or self._may_see(name)):
                    matching.append(name)
            self.found[pattern] = tuple(matching)

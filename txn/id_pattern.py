"""The pattern of ListTransactions, kept from running away.

Kafka matches with RE2, whose time is linear. Python's engine backtracks, and this one runs between
the requests of every other client. So a pattern is looked at first: how many ways to match could
the engine have to try? What RE2 has not either (look-around, back-references) is refused as well.

Source: KIP-1152.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from fencepost.txn.errors import InvalidIdPatternError

MAX_PATTERN_CHARS = 256
"""Of a listing's pattern: room for any sensible one, and compiling stays cheap."""

MAX_WAYS = 2 * 10**6
"""Ways to match one id that the engine may have to try: at most some 15 ms."""

_BOUNDS = re.compile(r"\{(\d*)(,?)(\d*)\}")
_CLASS = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]")
_UNBOUNDED = {"*", "+"}


def compile_pattern(pattern: str) -> Callable[[str], bool]:
    """Return a function that says whether a whole id matches ``pattern``.

    Raises InvalidIdPatternError when ``pattern`` is longer than :data:`MAX_PATTERN_CHARS`, is no
    regular expression, or could take too long; the last may show only when an id is long.
    """
    if len(pattern) > MAX_PATTERN_CHARS:
        raise InvalidIdPatternError(f"the pattern is longer than {MAX_PATTERN_CHARS} characters")
    unbounded, ways = _Survey(pattern).cost()
    try:
        compiled = re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise InvalidIdPatternError(f"not a regular expression: {error}") from error

    def matches(transactional_id: str) -> bool:
        if ways * (len(transactional_id) + 1) ** unbounded > MAX_WAYS:
            raise InvalidIdPatternError("the pattern repeats too much to be tried on long ids")
        return compiled.fullmatch(transactional_id) is not None

    return matches


class _Survey:
    """One pass over a pattern that multiplies the choices the engine has to make."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._position = 0
        self._unbounded = 0
        self._ways = 1
        # Per open group, and last for the atom just read: does it hold a choice of its own?
        self._chooses = [False]
        self._atom_chooses = False

    def cost(self) -> tuple[int, int]:
        """Return how many repetitions have no bound, and the product of all other choices."""
        while self._position < len(self._pattern):
            self._step()
        if self._ways > MAX_WAYS:
            raise InvalidIdPatternError("the pattern has too many alternatives")
        return self._unbounded, self._ways

    def _step(self) -> None:
        char = self._pattern[self._position]
        bounds = _BOUNDS.match(self._pattern, self._position) if char == "{" else None
        if char in "*+?" or bounds is not None:
            self._repeat(char, bounds)
            return
        self._atom_chooses = False
        if char == "(":
            self._open()
        elif char == ")":
            self._position += 1
            if len(self._chooses) > 1:
                self._atom_chooses = self._chooses.pop()
                self._chooses[-1] |= self._atom_chooses
        elif char == "|":
            self._position += 1
            self._ways *= 2
            self._chooses[-1] = True
        elif char == "[" and (found := _CLASS.match(self._pattern, self._position)):
            self._position = found.end()
        elif char == "\\":
            if self._pattern[self._position + 1 : self._position + 2].isdigit():
                raise InvalidIdPatternError("back-references are not offered")
            self._position += 2
        else:
            self._position += 1

    def _open(self) -> None:
        self._chooses.append(False)
        self._position += 1
        if self._pattern.startswith("?", self._position):
            if not self._pattern.startswith(("?:", "?P<"), self._position):
                raise InvalidIdPatternError("only (?:…) and (?P<name>…) are offered")
            # What follows, up to a name's end, holds nothing that could be taken for a choice.
            self._position += 2

    def _repeat(self, char: str, bounds: re.Match[str] | None) -> None:
        if self._atom_chooses:
            raise InvalidIdPatternError("a repetition within a repetition is not offered")
        if bounds is None:
            self._position += 1
            self._unbounded += char in _UNBOUNDED
            self._ways *= 1 if char in _UNBOUNDED else 2
        else:
            self._position = bounds.end()
            low, comma, high = bounds.groups()
            if comma and not high:
                self._unbounded += 1
            elif comma:
                self._ways *= max(int(high[:9]) - int(low[:9] or 0) + 1, 1)
        self._chooses[-1] = True
        # A lazy or possessive suffix belongs to the repetition.
        if self._pattern[self._position : self._position + 1] in {"?", "+"}:
            self._position += 1

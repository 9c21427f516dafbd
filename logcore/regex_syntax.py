r"""The syntax of clients' regular expressions: RE2/J's, which Kafka uses.

Every expression that RE2/J accepts is accepted, unless its counted repetitions multiply to more
than :data:`MAX_PIECES`. Captures and greediness do not affect whether a whole text matches.

Source: ``com.google.re2j.Parser``, version 1.8, with the flags of
``Pattern.compile``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping
from enum import IntEnum
from typing import Final, NoReturn

from fencepost.logcore.machine import InvalidRegularExpressionError
from fencepost.logcore.regex_sets import (
    ANY,
    NEWLINE,
    PERL,
    POSIX,
    CharSet,
    Test,
    complement,
    folded,
    range_set,
    unicode_set,
    union,
)

MAX_PIECES: Final = 65_536
"""The maximum number of pieces in an expression; a counted repetition multiplies the pieces that it
repeats. An expression that fits a string of a record exceeds this only with counted repetitions."""
MAX_REPEAT: Final = 1_000
"""The largest n and m in ``{n,m}``: RE2's."""
SHOWN_CHARS: Final = 200
"""The maximum number of characters of an expression that an error message shows."""
CHARS_AT_ONCE: Final = 2_000
"""The number of characters that the parser reads between two yields."""
READ_STEPS: Final = 5
"""The cost of reading a character, in steps; :mod:`fencepost.logcore.regex` defines a step."""


class Assertion(IntEnum):
    """A condition on the position between two characters."""

    TEXT_BEGIN = 0
    TEXT_END = 1
    LINE_BEGIN = 2
    LINE_END = 3
    WORD_BOUNDARY = 4
    NO_WORD_BOUNDARY = 5


class Sequence:
    """Pieces one after another."""

    __slots__ = ("parts", "size")

    def __init__(self, parts: list[Piece]) -> None:
        self.parts = parts
        self.size = 1 + sum(map(size_of, parts))


class Choice:
    """One of several pieces."""

    __slots__ = ("parts", "size")

    def __init__(self, parts: list[Piece]) -> None:
        self.parts = parts
        self.size = 1 + sum(map(size_of, parts))


class Repetition:
    """A piece ``least`` to ``most`` times; without ``most`` any number of times."""

    __slots__ = ("least", "most", "part", "size")

    def __init__(self, part: Piece, least: int, most: int | None) -> None:
        self.part, self.least, self.most = part, least, most
        size = size_of(part)
        optional = 1 if most is None else most - least
        self.size = 1 + least * size + optional * (size + 1)


Piece = CharSet | Assertion | Sequence | Choice | Repetition
"""A part of an expression; a set of characters matches one of them."""


def size_of(piece: Piece) -> int:
    """Return the number of pieces in a piece, its repetitions multiplied."""
    return 1 if isinstance(piece, int) else piece.size


_EMPTY: Final = Sequence([])
"""Matches the empty text."""


# --- the parser ----------------------------------------------------------------------------------

_ESCAPES: Final = {"a": 7, "f": 12, "n": 10, "r": 13, "t": 9, "v": 11}
_ASSERTIONS: Final = {
    "A": Assertion.TEXT_BEGIN,
    "z": Assertion.TEXT_END,
    "b": Assertion.WORD_BOUNDARY,
    "B": Assertion.NO_WORD_BOUNDARY,
}
_PLAIN: Final = re.compile(r"[^\\.+*?()|\[{^$]+")
_COUNT: Final = re.compile(r"\{(0|[1-9][0-9]*)(?:(,)(0|[1-9][0-9]*)?)?\}")
_MARKS: Final[Mapping[str, tuple[int, int | None]]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_REPEATS: Final = frozenset((*_MARKS, "{"))
_HEX: Final = re.compile(r"x(?:\{([0-9A-Fa-f]+)\}|([0-9A-Fa-f]{2}))")
_UNICODE_END: Final = 0x10FFFF
_OCTAL: Final = re.compile(r"0[0-7]{0,2}|[1-7][0-7]{1,2}")
_GROUP_NAME: Final = re.compile(r"\(\?P?<([0-9A-Za-z_]+)>")
_FLAGS: Final = re.compile(r"\(\?([imsU]*)(?:-([imsU]+))?([:)])")


class _Group:
    """A group that is not closed yet, or the whole expression."""

    __slots__ = ("choices", "flags", "parts")

    def __init__(self, flags: frozenset[str]) -> None:
        self.flags = flags
        """The flags in effect after the group."""
        self.choices: list[Piece] = []
        self.parts: list[Piece] = []
        """The parts of the current alternative."""

    def end_choice(self) -> None:
        """End the current alternative."""
        if not self.parts:
            self.choices.append(_EMPTY)
            return
        self.choices.append(self.parts[0] if len(self.parts) == 1 else Sequence(self.parts))
        self.parts = []

    def piece(self) -> Piece:
        """Return the whole group as one piece."""
        self.end_choice()
        return self.choices[0] if len(self.choices) == 1 else Choice(self.choices)


class _Parser:
    """One pass over an expression, with the open groups on a stack: nesting has no limit."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0
        self._flags: frozenset[str] = frozenset()
        self._names: set[str] = set()
        self._groups = [_Group(self._flags)]
        self._reported = 0
        """The position up to which :meth:`parse` has yielded the steps."""

    def parse(self) -> Generator[int, None, Piece]:
        pattern, end = self._pattern, len(self._pattern)
        while self._at < end:
            if self._at - self._reported >= CHARS_AT_ONCE:
                yield self._steps()
            plain = _PLAIN.match(pattern, self._at, self._at + CHARS_AT_ONCE)
            if plain is not None:
                self._at = plain.end()
                self._literals(plain.group())
                continue
            char = pattern[self._at]
            step = _STEPS.get(char)
            if step is not None:
                step(self)
            elif char == "[":
                yield from self._class()
            else:
                self._repeat()
        yield self._steps()
        if len(self._groups) > 1:
            self._refuse("missing closing )")
        piece = self._groups[0].piece()
        self._require_small(size_of(piece))
        return piece

    def _steps(self) -> int:
        reported, self._reported = self._reported, self._at
        return READ_STEPS * (self._at - reported)

    def _refuse(self, why: str) -> NoReturn:
        raise InvalidRegularExpressionError(
            f"regular expression {self._pattern[:SHOWN_CHARS]!r}: {why} at position {self._at}"
        )

    def _require_small(self, size: int) -> None:
        if size > MAX_PIECES:
            self._refuse(f"its repetitions make over {MAX_PIECES} pieces")

    def _put(self, piece: Piece) -> None:
        self._groups[-1].parts.append(piece)

    # --- literals and assertions ---

    def _literals(self, text: str) -> None:
        parts = self._groups[-1].parts
        if "i" in self._flags or not text.isascii():
            parts += [self._range(code, code) for code in map(ord, text)]
        else:
            parts += [1 << code for code in text.encode()]

    def _range(self, low: int, high: int) -> CharSet:
        return range_set(low, high, is_folded="i" in self._flags)

    def _with_cases(self, characters: int) -> CharSet:
        return folded(characters) if "i" in self._flags else characters

    def _dot(self) -> None:
        self._at += 1
        self._put(ANY if "s" in self._flags else ANY & ~NEWLINE)

    def _caret(self) -> None:
        self._at += 1
        self._put(Assertion.LINE_BEGIN if "m" in self._flags else Assertion.TEXT_BEGIN)

    def _dollar(self) -> None:
        self._at += 1
        self._put(Assertion.LINE_END if "m" in self._flags else Assertion.TEXT_END)

    # --- groups ---

    def _open(self) -> None:
        pattern = self._pattern
        if not pattern.startswith("(?", self._at):
            self._at += 1
            self._groups.append(_Group(self._flags))
            return
        name = _GROUP_NAME.match(pattern, self._at)
        if name is not None:
            if name[1] in self._names:
                self._refuse(f"duplicate group name {name[1]!r}")
            self._names.add(name[1])
            self._at = name.end()
            self._groups.append(_Group(self._flags))
            return
        match = _FLAGS.match(pattern, self._at)
        if match is None:
            self._refuse("invalid or unsupported group")
        self._at = match.end()
        if match[3] == ":":
            self._groups.append(_Group(self._flags))
        self._flags = self._flags.union(match[1]).difference(match[2] or "")

    def _close(self) -> None:
        if len(self._groups) == 1:
            self._refuse("unmatched )")
        self._at += 1
        group = self._groups.pop()
        self._flags = group.flags
        self._put(group.piece())

    def _bar(self) -> None:
        self._at += 1
        self._groups[-1].end_choice()

    # --- repetitions ---

    def _repeat(self) -> None:
        """Parse ``*``, ``+``, ``?``, a count, or a literal brace."""
        bounds = self._bounds()
        parts = self._groups[-1].parts
        if bounds is None:
            self._at += 1
            self._literals("{")
        elif not parts:
            self._refuse("nothing to repeat")
        else:
            parts[-1] = self._repeated(parts[-1], *bounds)
            if self._pattern.startswith("?", self._at):
                self._at += 1
        # RE2/J refuses a repetition after a literal brace, too.
        at = self._at
        if self._pattern[at : at + 1] in _REPEATS and self._bounds() is not None:
            self._refuse("a repetition of a repetition")
        self._at = at

    def _repeated(self, part: Piece, least: int, most: int | None) -> Piece:
        if most == 0:
            return _EMPTY
        if part is _EMPTY:
            return part  # repeating the empty text only takes time
        repeated = Repetition(part, least, most)
        self._require_small(repeated.size)
        return repeated

    def _bounds(self) -> tuple[int, int | None] | None:
        mark = _MARKS.get(self._pattern[self._at])
        if mark is not None:
            self._at += 1
            return mark
        match = _COUNT.match(self._pattern, self._at)
        if match is None:
            return None
        low, comma, high = match.groups()
        longest = max(len(low), len(high or ""))
        least = int(low) if longest <= 4 else MAX_REPEAT + 1
        most = least if not comma else None if high is None else int(high[:5])
        if least > MAX_REPEAT or (most is not None and not least <= most <= MAX_REPEAT):
            self._refuse("invalid repeat count")
        self._at = match.end()
        return least, most

    # --- escapes and classes ---

    def _escape(self) -> None:
        pattern = self._pattern
        char = pattern[self._at + 1 : self._at + 2]
        if char == "Q":
            end = pattern.find("\\E", self._at)
            end = len(pattern) if end < 0 else end
            text = pattern[self._at + 2 : end]
            self._at = min(end + 2, len(pattern))
            self._literals(text)
        elif char in _ASSERTIONS:
            self._at += 2
            self._put(_ASSERTIONS[char])
        else:
            characters = self._escaped_set()
            if characters is None:
                code = self._escaped_code()
                characters = self._range(code, code)
            self._put(characters)

    def _escaped_set(self) -> CharSet | None:
        r"""Parse ``\pN``, ``\p{Name}``, ``\d`` and the like; None if none of them follows."""
        char = self._pattern[self._at + 1 : self._at + 2]
        if not self._pattern.startswith("\\", self._at) or not char:
            return None
        if char in "pP":
            return self._unicode_class(negated=char == "P")
        predefined = PERL.get(char.lower())
        if predefined is None:
            return None
        self._at += 2
        characters = self._with_cases(predefined)
        return complement(characters) if char.isupper() else characters

    def _unicode_class(self, *, negated: bool) -> CharSet:
        pattern, begin = self._pattern, self._at + 2
        name = pattern[begin : begin + 1]
        end = begin + 1
        if name == "{":
            end = pattern.find("}", begin) + 1
            name = pattern[begin + 1 : end - 1]
        if not name or not end:
            self._refuse("invalid character class")
        if name.startswith("^"):
            negated, name = not negated, name[1:]
        characters = unicode_set(name, is_folded="i" in self._flags)
        if characters is None:
            self._refuse(f"no Unicode class {name[:SHOWN_CHARS]!r}")
        self._at = end
        return complement(characters) if negated else characters

    def _escaped_code(self) -> int:
        """Parse the escape of one character, inside or outside of a class."""
        begin = self._at + 1
        char = self._pattern[begin : begin + 1]
        match = _HEX.match(self._pattern, begin)
        if match is not None:
            digits = (match[1] or match[2]).lstrip("0")
            if len(digits) <= 6 and int(digits or "0", 16) <= _UNICODE_END:
                self._at = match.end()
                return int(digits or "0", 16)
        match = _OCTAL.match(self._pattern, begin)
        if match is not None:
            self._at = match.end()
            return int(match.group(), 8)
        if not char or (char.isascii() and char.isalnum() and char not in _ESCAPES):
            self._refuse("invalid escape sequence")
        self._at = begin + 1
        return _ESCAPES.get(char) or ord(char)

    def _class(self) -> Generator[int, None, None]:
        pattern = self._pattern
        self._at += 1
        negated = pattern.startswith("^", self._at)
        self._at += negated
        inside, first = 0, True
        tests: list[Test] = []
        while first or not pattern.startswith("]", self._at):
            first = False
            if self._at - self._reported >= CHARS_AT_ONCE:
                yield self._steps()
            part = self._posix_class()
            if part is None:
                part = self._escaped_set()
            if part is None:
                part = self._class_range()
            if isinstance(part, int):
                inside |= part
            else:
                inside |= part.inside
                tests.append(part.has)
        self._at += 1
        characters = union(inside, tests)
        self._put(complement(characters) if negated else characters)

    def _posix_class(self) -> CharSet | None:
        if not self._pattern.startswith("[:", self._at):
            return None
        end = self._pattern.find(":]", self._at)
        if end < 0:
            return None
        name = self._pattern[self._at + 2 : end]
        predefined = POSIX.get(name.removeprefix("^"))
        if predefined is None:
            self._refuse("unknown character class")
        self._at = end + 2
        characters = self._with_cases(predefined)
        return complement(characters) if name.startswith("^") else characters

    def _class_range(self) -> CharSet:
        low = high = self._class_code()
        if self._pattern.startswith("-", self._at) and not self._pattern.startswith("-]", self._at):
            self._at += 1
            high = self._class_code()
            if high < low:
                self._refuse("invalid character class range")
        return self._range(low, high)

    def _class_code(self) -> int:
        if self._at >= len(self._pattern):
            self._refuse("missing closing ]")
        if self._pattern[self._at] == "\\":
            return self._escaped_code()
        self._at += 1
        return ord(self._pattern[self._at - 1])


_STEPS: Final[Mapping[str, Callable[[_Parser], None]]] = {
    "(": _Parser._open,
    ")": _Parser._close,
    "|": _Parser._bar,
    "\\": _Parser._escape,
    ".": _Parser._dot,
    "^": _Parser._caret,
    "$": _Parser._dollar,
}
"""The parsing method for each character. As attributes of a parser, these bound methods would form
a reference cycle with it."""


def parse(pattern: str) -> Generator[int, None, Piece]:
    """Parse an expression in small steps; yield the number of steps taken.

    Raises :class:`fencepost.logcore.machine.InvalidRegularExpressionError` for an expression that
    RE2/J refuses, or that has more than :data:`MAX_PIECES`.
    """
    return (yield from _Parser(pattern).parse())

"""Sets of characters of a regular expression.

Most sets are represented by a number: bit ``c`` stands for the character ``c`` of ASCII, and
:data:`BEYOND` for all other characters at once. A :class:`WideSet` distinguishes these other
characters. Scripts and case follow RE2/J, which uses Unicode 6.0; categories follow this Python's
Unicode.

Source: ``com.google.re2j.CharClass``, ``CharGroup`` and ``UnicodeTables``, version 1.8.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from typing import Final
from unicodedata import category

from fencepost.logcore.regex_scripts import scripts

ASCII_END: Final = 128
ASCII: Final = (1 << ASCII_END) - 1
BEYOND: Final = 1 << ASCII_END
"""The bit of all characters outside of ASCII."""
ANY: Final = ASCII | BEYOND
_UNICODE_END: Final = 0x10FFFF


Test = Callable[[int], bool]
"""Whether a set contains a code point."""


class WideSet:
    """A set of characters that has some characters outside of ASCII, but not all."""

    __slots__ = ("_code", "_has", "_is_negated", "_tests", "inside")

    size: Final = 1

    def __init__(self, inside: int, tests: tuple[Test, ...], *, is_negated: bool = False) -> None:
        self.inside = inside
        """The part in ASCII."""
        self._tests, self._is_negated = tests, is_negated
        self._code, self._has = -1, False

    def has(self, code: int) -> bool:
        """Return whether a code point is in the set."""
        if code < ASCII_END:
            return bool(self.inside >> code & 1)
        # Many states share a set, and test the same character one after another.
        if code != self._code:
            self._code = code
            self._has = any(test(code) for test in self._tests) != self._is_negated
        return self._has

    def complement(self) -> WideSet:
        """Return the set of all other characters."""
        return WideSet(ASCII & ~self.inside, self._tests, is_negated=not self._is_negated)


CharSet = int | WideSet


def _set_of(codes: Iterable[int]) -> int:
    return sum(1 << code for code in codes)


def _range(low: int, high: int) -> int:
    return (1 << high + 1) - (1 << low)


def complement(characters: CharSet) -> CharSet:
    """Return all characters that are not in a set."""
    return ANY & ~characters if isinstance(characters, int) else characters.complement()


def union(inside: int, tests: Iterable[Test]) -> CharSet:
    """Return a set from its ASCII part, maybe with :data:`BEYOND`, and tests of the rest."""
    tests = tuple(tests)
    return WideSet(inside, tests) if tests and not inside & BEYOND else inside


_UPPER: Final = _range(65, 90)
_LOWER: Final = _range(97, 122)
_LETTERS: Final = _UPPER | _LOWER
_DIGITS: Final = _range(48, 57)
WORD: Final = _LETTERS | _DIGITS | 1 << 95
NEWLINE: Final = 1 << 10
PERL: Final = {"d": _DIGITS, "s": _set_of(b"\t\n\f\r "), "w": WORD}
_GRAPHIC: Final = _range(33, 126)
POSIX: Final = {
    "alnum": _LETTERS | _DIGITS,
    "alpha": _LETTERS,
    "ascii": ASCII,
    "blank": _set_of(b"\t "),
    "cntrl": _range(0, 31) | 1 << 127,
    "digit": _DIGITS,
    "graph": _GRAPHIC,
    "lower": _LOWER,
    "print": _GRAPHIC | 1 << 32,
    "punct": _GRAPHIC & ~(_LETTERS | _DIGITS),
    "space": _range(9, 13) | 1 << 32,
    "upper": _UPPER,
    "word": WORD,
    "xdigit": _DIGITS | _range(65, 70) | _range(97, 102),
}
_CATEGORY_NAMES: Final = (
    "C Cc Cf Co Cs L Ll Lm Lo Lt Lu M Mc Me Mn N Nd Nl No P Pc Pd Pe Pf Pi Po Ps S Sc Sk Sm So Z Zl"
    " Zp Zs"
)
_CATEGORIES: Final = frozenset(_CATEGORY_NAMES.split())
_FOLDED: Final = frozenset({"Lu", "Lt", "Mn", "Greek", "Inherited", "Common"})
"""The Unicode classes with additional case tables in RE2/J."""
_LL_CASES: Final = (
    "KS\xc5\u01c4\u01c5\u01c7\u01c8\u01ca\u01cb\u01f1\u01f2\u0345\u0392\u0395\u0398\u0399"
    "\u039a\u039c\u03a0\u03a1\u03a3\u03a6\u03a9\u03f4\u1e60\u1e9e\u2126\u212a\u212b"
)
"""The characters that case adds to ``Ll`` in RE2/J, whose table lacks most letters."""
_DOTLESS_I: Final = 0x131
"""The letter dotless i. Its upper case is I, but without regard to case it does not equal I."""
_THREE_CASES: Final = b"ks"
"""The ASCII letters with a third case, which is outside of ASCII."""
_EXTRA_CASES_END: Final = 0x2140
"""The end of the characters that are a third case, such as the long s and the Kelvin sign."""


def _base(code: int) -> int:
    """Return the code point that represents all cases of a character."""
    if code == _DOTLESS_I:
        return code
    upper = chr(code).upper()
    lower = (upper if len(upper) == 1 else chr(code)).lower()
    return ord(lower) if len(lower) == 1 else code


@lru_cache(maxsize=1)
def _extra_cases() -> dict[int, list[int]]:
    """Return the further cases of each base, besides itself and its upper case."""
    cases: dict[int, list[int]] = {}
    for code in range(ASCII_END, _EXTRA_CASES_END):
        base = _base(code)
        if code != base and chr(code) != chr(base).upper():
            cases.setdefault(base, []).append(code)
    return cases


@lru_cache(maxsize=1_024)
def _cases(code: int) -> tuple[int, ...]:
    """Return all characters that equal a character without regard to case."""
    base = _base(code)
    upper = chr(base).upper()
    cases = {code, base, *_extra_cases().get(base, ())}
    if len(upper) == 1 and base != _DOTLESS_I:
        cases.add(ord(upper))
    return tuple(cases)


def _is_between(low: int, high: int, code: int) -> bool:
    return low <= code <= high


def _is_in_ranges(ranges: tuple[tuple[int, int], ...], code: int) -> bool:
    at = bisect_right(ranges, (code, _UNICODE_END))
    return at > 0 and code <= ranges[at - 1][1]


def _is_of_category(names: tuple[str, ...], code: int) -> bool:
    code_category = category(chr(code))
    return code_category.startswith(names) and code_category != "Cn"


def _has_a_case_in(test: Test, code: int) -> bool:
    return any(map(test, _cases(code)))


def _is_of_ll_or_folded(code: int) -> bool:
    return chr(code) in _LL_CASES or category(chr(code)) == "Ll"


def _set_by_test(test: Test) -> WideSet:
    return WideSet(_set_of(filter(test, range(ASCII_END))), (test,))


@lru_cache(maxsize=256)
def unicode_set(name: str, *, is_folded: bool) -> CharSet | None:
    """Return the characters of a category or script; None for a name that RE2/J lacks."""
    if name == "Any":
        return ANY
    if name in _CATEGORIES or name == "Unknown":
        test: Test = partial(_is_of_category, ("Co", "Cs") if name == "Unknown" else (name,))
    elif name in scripts():
        test = partial(_is_in_ranges, scripts()[name])
    else:
        return None
    if is_folded and name == "Ll":
        return _set_by_test(_is_of_ll_or_folded)
    return _set_by_test(partial(_has_a_case_in, test) if is_folded and name in _FOLDED else test)


def _both_cases(characters: int) -> int:
    return characters | (characters & _UPPER) << 32 | (characters & _LOWER) >> 32


@lru_cache(maxsize=1_024)
def range_set(low: int, high: int, *, is_folded: bool) -> CharSet:
    """Return the characters of a range of code points; ``is_folded`` adds their other cases."""
    inside = _range(low, min(high, ASCII_END - 1)) if low < ASCII_END else 0
    if high < ASCII_END:
        return folded(inside) if is_folded else inside
    test: Test = partial(_is_between, low, high)
    if is_folded:
        for letter in _THREE_CASES:
            inside |= any(map(test, _cases(letter))) << letter
        inside = _both_cases(inside)
        test = partial(_has_a_case_in, test)
    return union(inside | (BEYOND if low <= ASCII_END and high == _UNICODE_END else 0), [test])


@lru_cache(maxsize=64)
def folded(characters: int) -> CharSet:
    """Return a set of characters of ASCII with their other cases."""
    inside = _both_cases(characters)
    thirds = [code for letter in _THREE_CASES if inside >> letter & 1 for code in _cases(letter)]
    return union(inside, [partial(_is_between, code, code) for code in thirds if code >= ASCII_END])

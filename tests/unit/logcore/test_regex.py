"""Clients' regular expressions, compared with Python's ``re``."""

from __future__ import annotations

import contextlib
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fencepost.groups.limits import GroupLimits
from fencepost.groups.regex import RegexScan
from fencepost.logcore.machine import InvalidRegularExpressionError
from fencepost.logcore.regex import AT_ONCE, Regex
from fencepost.logcore.regex_syntax import CHARS_AT_ONCE, MAX_PIECES, READ_STEPS, parse
from fencepost.logcore.steps import finish
from tests.support.quick import only

LONGEST = GroupLimits().max_string_bytes
TRIES = 3
TURN_S = 0.1
"""Twice the allowed duration of a turn, because tests run on shared machines."""
NON_ASCII = ("é", "(?i:\u212a)", "[é-ü]", "[ц-яa]", r"\p{Greek}", "[^é]")
"""Expressions with non-ASCII characters, which tests repeat up to the maximum length."""
WORST = ("a", "a*", "|", "a|", "()", "[a]", r"\d", r"\pL", "(", "(?i:a)", "a{0,3}", "[[:alpha:]]")
"""Expressions that tests repeat up to the maximum length."""
TEXTS = [
    "",
    "a",
    "b",
    "ab",
    "abc",
    "aab",
    "orders.eu",
    "orders-us",
    "A",
    "a1",
    "_",
    "a b",
    "{",
]


@pytest.mark.parametrize(
    "pattern",
    [
        *("", "a", ".", ".*", "a|b", "(a|b)*", "a?b+", "orders[.-](eu|us)", "[^a]", "[a-c]+"),
        *("[]a]", "[a-]", r"\w+", r"\W", r"\d", r"[\w.]+", "a{2}b", "a{1,2}b?", "a{0}"),
        *("^a$", "a$b", "^", "(?:ab|a)b?", r"(?P<n>a)b", "(?i)ab?", r"\.", r"orders\..*", "{"),
        *(r"\x61", "(|a)b", "((a))", "a*?b", r"\Aa", "[^]a]", "(a*)*b", "(^a|b)$", "[é]"),
    ],
)
def test_regex_matches_like_python_re(pattern):
    mine, judge = Regex(pattern), re.compile(pattern, re.ASCII)
    for text in TEXTS:
        assert mine.matches(text) == (judge.fullmatch(text) is not None), text


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        (r"\Qa.b\E+", "a.b+"[:3], "axb"),
        (r"\Qa.b", "a.b", "axb"),
        ("[[:alpha:]]+[[:^digit:]]", "ab", "a1"),
        (r"\x{61}b", "ab", "b"),
        ("(?<name>a)", "a", "b"),
        (r"a\z", "a", "ab"),
    ],
)
def test_re2_syntax_is_supported(pattern, yes, no):
    if pattern.endswith("+") and pattern.startswith(r"\Q"):
        pattern = pattern[:-1]
    regex = Regex(pattern)
    assert regex.matches(yes)
    assert not regex.matches(no)


@pytest.mark.parametrize(
    "pattern",
    [
        *(
            "(",
            ")",
            "a)",
            "[",
            "[a",
            "*",
            "a**",
            "+a",
            r"\1",
            "(?=a)",
            "(?!a)",
            "(?<=a)b",
            "(?<!a)",
        ),
        *(r"\C", r"\p{Nope}", "a{3,2}", "a{1001}", "[b-a]", r"[a-\d]", "\\", "[[:nope:]]", r"\xzz"),
        *(r"\x{110000}", "(?P<a-b>x)", r"a\Eb", r"\x{", "(?<", "(?x)a", "a{999999}"),
    ],
)
def test_unsupported_or_malformed_regex_is_refused(pattern):
    with pytest.raises(InvalidRegularExpressionError):
        finish(parse(pattern))


def test_regex_size_limit_counts_expanded_repetitions():
    finish(parse("(?:a{99}){655}"))
    with pytest.raises(InvalidRegularExpressionError, match=str(MAX_PIECES)):
        finish(parse("(?:a{99}){656}"))
    with pytest.raises(InvalidRegularExpressionError, match=str(MAX_PIECES)):
        finish(parse("((a{100}){100}){100}"))
    finish(parse("((((){1000}){1000}){1000}){1000}"))
    finish(parse("(((a{0}){1000}){1000}){1000}"))


def check_turns(regex: str, names: list[str]) -> None:
    """Assert that no turn of matching is long.

    A garbage collection may lengthen a turn, so a scan with a long turn is repeated. Slow matching
    would be slow each time.
    """
    for _ in range(TRIES):
        scan = RegexScan([regex], names, 1)
        longest, is_done = 0.0, False
        while not is_done:
            begun = time.process_time()
            is_done = scan.advance(GroupLimits().max_regex_steps_per_turn)
            longest = max(longest, time.process_time() - begun)
        assert not scan.refused
        if longest < TURN_S:
            return
    pytest.fail(f"a turn of {longest * 1_000:.0f} ms for {regex[:40]!r}")


@pytest.mark.parametrize("pattern", only(WORST, *(set(WORST) - {"a{0,3}"})))
def test_longest_regex_is_processed_in_short_turns(pattern):
    """Measure the processor time of a turn for an expression of 32,767 bytes and long names."""
    regex = (pattern * LONGEST)[: LONGEST // len(pattern) * len(pattern)]
    if pattern == "(":
        regex = "(" * (LONGEST // 2) + ")" * (LONGEST // 2)
    check_turns(regex, ["a" * 249, "team.orders-abcdef", "x" * 100])


@pytest.mark.parametrize("pattern", [*WORST, "a?", "[", r"\Qa\E", "(?i)"])
def test_longest_regex_is_parsed_in_bounded_steps(pattern):
    regex = pattern * (LONGEST // len(pattern))
    if pattern in "([":
        regex = pattern + "a" * (LONGEST - 2) + {"(": ")", "[": "]"}[pattern]
    steps = list(parse(regex))
    assert sum(steps) == READ_STEPS * len(regex)
    assert max(steps) < READ_STEPS * 2 * CHARS_AT_ONCE


@pytest.mark.parametrize("pattern", NON_ASCII)
def test_non_ascii_sets_are_evaluated_once_per_character(pattern):
    """The cost depends neither on how often a set occurs nor on the number of its ranges."""
    number = LONGEST // (len(pattern.encode()) + 1)
    ranges = "(?i)(?:[" + pattern.strip("[]") * (number // 2) + "]|.)*"
    for regex in ((pattern + "?") * number, ranges):
        check_turns(regex, ["цé" * 20, "яü" * 20 + "\n"])


def test_catastrophic_backtracking_pattern_is_matched_quickly():
    started = time.process_time()
    assert not Regex("(a*)*(a|a)*" + "a?" * 30 + "b").matches("a" * 249)
    assert time.process_time() - started < 2


def test_expression_matches_before_and_after_another_task_has_built_it():
    text = "a" * 4 * AT_ONCE
    for turns in range(len(list(Regex(text).build()))):
        regex = Regex(text)
        other = regex.build()
        for _ in range(turns + 1):
            next(other)
        assert regex.matches(text), turns
        finish(other)
        assert regex.matches(text), turns


pieces = st.sampled_from(
    ["a", "b", ".", "[ab]", "[^a]", "(a|b)", "(a|)", "a*", "b?", "(ab)+", "a{2}"]
)


@settings(max_examples=200, deadline=None)
@given(st.lists(pieces, max_size=6), st.booleans(), st.text("abc\n", max_size=6))
def test_random_regex_matches_like_python_re(parts, either, text):
    pattern = ("|" if either else "").join(parts)
    assert Regex(pattern).matches(text) == (re.fullmatch(pattern, text) is not None)


@given(st.text("ab(){}[]|*+?\\^$.-,:1Qdw", max_size=20))
def test_any_text_compiles_or_is_refused(pattern):
    with contextlib.suppress(InvalidRegularExpressionError):
        Regex(pattern).matches("ab")

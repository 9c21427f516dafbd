"""Checks the syntax of ``java.util.regex`` expressions in steps.

This broker never matches with such expressions; it only checks whether Apache Kafka could compile
them. Constructs that RE2/J lacks are replaced by constructs of the same form, and the result is
parsed by the parser for RE2/J, which takes linear time and yields. Python's ``re`` never yields; it
visits each character of a case-insensitive range, so that compiling a few hundred characters may
take a second.
"""

from __future__ import annotations

import re

from fencepost.logcore.machine import InvalidRegularExpressionError
from fencepost.logcore.regex_syntax import parse
from fencepost.logcore.steps import Steps

_JAVA_ONLY = re.compile(
    r"""
    (?P<character>\\(?:[1-9] | k<\w+> | [pP]\{[^}]*\} | u[0-9A-Fa-f]{4} | c. | [eGhHRvVXZ]))
    | (?P<escape>\\.)
    | (?P<group>\(\? (?: [!>] | <! | [dimsuxU]*(?:-[dimsuxU]*)?: ))
    | (?P<flags>\(\? [dimsuxU]*(?:-[dimsuxU]*)? \))
    | (?P<quantifier>[*+?}])\+
    """,
    re.VERBOSE | re.DOTALL,
)
"""The syntax that Java has and RE2/J lacks: some escapes, groups and possessive quantifiers. Names
of Unicode classes are not checked."""


def _in_re2(match: re.Match[str]) -> str:
    if match["character"]:
        return "x"
    if match["group"]:
        return "(?:"
    return match["escape"] or match["quantifier"] or ""


def is_valid(pattern: str) -> Steps[bool]:
    """Return, in steps, whether Java could compile this expression."""
    try:
        for _ in parse(_JAVA_ONLY.sub(_in_re2, pattern)):
            yield
    except InvalidRegularExpressionError:
        return False
    return True

"""The mapping of the distinguished name in a client's certificate to a user's name.

The mapping is a comma-separated list of ``RULE:PATTERN/REPLACEMENT/[LU]`` and ``DEFAULT``. The
first rule whose pattern matches the whole name applies. Patterns use Python's syntax, which agrees
with Java's in everything that such rules use.
Source: ``SslPrincipalMapper``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Final

_RULE: Final = r"(DEFAULT)|RULE:((?:\\.|[^\\/])*)/((?:\\.|[^\\/])*)/([LU]?).*?|(.*?)"
_SPLITTER: Final = re.compile(rf"\s*({_RULE})\s*(?:,\s*|$)")
_PARSER: Final = re.compile(_RULE)
_NAMED_GROUP: Final = re.compile(r"\(\?<(?=[A-Za-z])")

Rule = Callable[[str], str | None]
"""Maps a distinguished name to a user's name; None if the rule does not match."""


class PrincipalMapping:
    """The mapping rules of one listener. Raises ValueError for an invalid rule."""

    def __init__(self, rules: str) -> None:
        self._rules = list(_rules(rules))

    def name_of(self, distinguished_name: str) -> str | None:
        """Return the user's name; None, which denies access, if no rule matches."""
        for rule in self._rules:
            name = rule(distinguished_name)
            if name is not None:
                return name
        return None


def split_rules(text: str) -> list[str]:
    """Split a mapping into its rules, including empty ones."""
    return [match[1] for match in _SPLITTER.finditer(text.strip())]


def _rules(text: str) -> Iterator[Rule]:
    for rule in split_rules(text):
        parts = _PARSER.match(rule)
        if parts is None or parts.end() != len(rule):
            rest = rule if parts is None else rule[parts.end() :]
            raise ValueError(f"Invalid rule: `{rule}`, unmatched substring: `{rest}`")
        if parts[1] is not None:
            yield str
        elif parts[2] is not None:
            yield _rule(rule, parts[2], parts[3], parts[4])


def _rule(rule: str, pattern: str, replacement: str, case: str) -> Rule:
    try:
        # Without re.ASCII, \w would match more letters than in Java.
        compiled = re.compile(_NAMED_GROUP.sub("(?P<", pattern), re.ASCII)
    except re.error as error:
        raise ValueError(f"Invalid rule: `{rule}`: {error}") from error
    expand = _template(rule, replacement, compiled)
    fold = {"L": str.lower, "U": str.upper}.get(case, str)

    def apply(distinguished_name: str) -> str | None:
        if compiled.fullmatch(distinguished_name) is None:
            return None
        return fold(compiled.sub(expand, distinguished_name))

    return apply


def _template(
    rule: str, replacement: str, pattern: re.Pattern[str]
) -> Callable[[re.Match[str]], str]:
    """Return a function that expands a replacement in Java's syntax.

    The syntax is ``$1``, ``${name}``, and a backslash before plain characters. ``$12`` refers to
    group 12, or, if the pattern has no such group, to group 1 and a literal ``2``.
    """
    parts: list[str | int] = []
    at = 0
    while at < len(replacement):
        character = replacement[at]
        at += 1
        if character == "\\" and at < len(replacement):
            parts.append(replacement[at])
            at += 1
        elif character == "$":
            group, at = _group(rule, replacement, at, pattern)
            parts.append(group)
        else:
            parts.append(character)

    def expand(match: re.Match[str]) -> str:
        return "".join(match[part] or "" if isinstance(part, int) else part for part in parts)

    return expand


def _group(rule: str, text: str, at: int, pattern: re.Pattern[str]) -> tuple[str | int, int]:
    """Return the group that a dollar refers to, and the end of the reference.

    If no group has that number, return the dollar and its first digit as literal text. Raises
    ValueError if the pattern has no groups at all.
    """
    named = re.compile(r"\{([A-Za-z][A-Za-z0-9]*)\}").match(text, at)
    if named is not None and named[1] in pattern.groupindex:
        return pattern.groupindex[named[1]], named.end()
    digits = re.compile(r"[0-9]+").match(text, at)
    if digits is None:
        raise ValueError(f"Invalid rule: `{rule}`: no group number after a dollar sign")
    if int(digits[0][0]) > pattern.groups:
        if not pattern.groups:
            raise ValueError(f"Invalid rule: `{rule}`: there is no group ${digits[0]}")
        return f"${digits[0][0]}", at + 1
    count = 1
    while count < len(digits[0]) and int(digits[0][: count + 1]) <= pattern.groups:
        count += 1
    return int(digits[0][:count]), at + count

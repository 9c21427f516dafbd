"""Parser for ``sasl.jaas.config``: a module, a flag, and options.

``org.apache.kafka.common.security.plain.PlainLoginModule required username="alice" password="…";``

Source: ``JaasConfig``, ``JaasContext``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from fencepost.logcore.values import dataclass

MODULES: Final[Mapping[str, str]] = {
    "org.apache.kafka.common.security.plain.PlainLoginModule": "PLAIN",
    "org.apache.kafka.common.security.scram.ScramLoginModule": "SCRAM",
    "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule": "OAUTHBEARER",
}
"""The known modules, with the prefix of the mechanisms that each supports."""

_FLAGS = frozenset({"required", "requisite", "sufficient", "optional"})
_TOKEN = re.compile(
    r"""(?P<blank>\s+|//[^\n]*|/\*.*?\*/)
    |"(?P<double>(?:[^"\\\n]|\\.)*)"
    |'(?P<single>(?:[^'\\\n]|\\.)*)'
    |(?P<sign>[=;])
    |(?P<word>[^\s"'=;]+)""",
    re.DOTALL | re.VERBOSE,
)
_ESCAPE = re.compile(r"\\([0-3]?[0-7]{1,2}|.)", re.DOTALL)
_LETTERS = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}


class JaasError(ValueError):
    """The text is not a valid login. The message quotes names of options, never a value."""


@dataclass(frozen=True, slots=True, repr=False)
class JaasLogin:
    """One login entry."""

    module: str
    """The name of a Java class."""
    options: Mapping[str, str]

    @property
    def family(self) -> str:
        """Return the prefix of the module's mechanisms; empty for an unknown module."""
        return MODULES.get(self.module, "")


def parse_jaas(text: str) -> JaasLogin:
    """Return the only login of ``text``. Raises :class:`JaasError`."""
    tokens = _tokens(text)
    kinds, values = [kind for kind, _ in tokens], [value for _, value in tokens]
    if kinds[:2] != ["word", "word"]:
        raise JaasError("it must begin with the name of a module and a flag such as `required`")
    if values[1].lower() not in _FLAGS:
        raise JaasError(f"after the module comes one of {', '.join(sorted(_FLAGS))}")
    options: dict[str, str] = {}
    at = 2
    while at < len(tokens) and tokens[at] != ("sign", ";"):
        is_option = kinds[at] == "word" and tokens[at + 1 : at + 2] == [("sign", "=")]
        if not is_option or at + 2 >= len(tokens) or kinds[at + 2] == "sign":
            position = f", after {list(options)[-1]}" if options else ""
            raise JaasError(f'an option is not NAME="VALUE"{position}')
        options[values[at]] = values[at + 2]
        at += 3
    if at == len(tokens):
        raise JaasError("it must end with a semicolon")
    if at + 1 < len(tokens):
        raise JaasError("it must be a single login: something follows its semicolon")
    return JaasLogin(values[0], options)


def _tokens(text: str) -> list[tuple[str, str]]:
    tokens: list[tuple[str, str]] = []
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise JaasError("a quotation mark is never closed")
        at = match.end()
        kind = match.lastgroup or ""
        value = match[kind]
        if kind in {"double", "single"}:
            tokens.append(("text", _ESCAPE.sub(_unescaped, value)))
        elif kind != "blank":
            tokens.append((kind, value))
    return tokens


def _unescaped(match: re.Match[str]) -> str:
    letter = match[1]
    return chr(int(letter, 8)) if letter[0] in "01234567" else _LETTERS.get(letter, letter)

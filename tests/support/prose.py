"""Phrases that a reader of technical English stops at, counted in docstrings, comments and pages.

A low count does not show that a text is good: it only keeps certain habits from coming back. They
are clauses without a noun ("What …", "who …" without an antecedent, "that of"), pronouns instead
of the actor ("somebody", "whoever"), and words that are not idiomatic ("anew", "can not").
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

MAX_PER_1000_WORDS: Final = 1.5

_PEOPLE: Final = (
    "people|persons?|users?|engineers?|developers?|operators?|readers?|testers?|maintainers?|"
    "contributors?|administrators?|owners?|authors?|anyone|someone|everyone|those|ones?"
)
_AFTER_PEOPLE: Final = re.compile(rf"\b(?:{_PEOPLE}),?\s+(?:(?:and|or)\s+)?$", re.IGNORECASE)
_WHO: Final = re.compile(r"(?:(?<=\s)|^)[Ww]hom?\s+\w+")
_PHRASES: Final = re.compile(
    r"\b[Ww]h(?:o|om|at|ich|ere)ever\b"
    r"|\b(?:[Ss]ome|[Nn]o|[Aa]ny|[Ee]very)body\b"
    r"|\banew\b|\bcan not\b|\b(?:no|any) more\b"
    r"|\b(?:that|those) of\b"
    r"|\b(?:is|are) to (?:be )?\w+\b"
    r"|(?:^|[.;:,]\s+)What\s+(?!if\b)\w+[^?]*?[.,]"
)
_WIDTH: Final = 25
"""How many characters before "who" are searched for its antecedent."""
_BLOCKS: Final = ("body", "orelse", "handlers", "finalbody", "cases")
"""The fields of a statement that contain statements."""
_STRING_OR_COMMENT: Final = re.compile(
    r'''"""(?:[^\\]|\\.)*?"""'''
    r"""|'''(?:[^\\]|\\.)*?'''"""
    r'''|"(?:[^"\\\n]|\\.)*"'''
    r"""|'(?:[^'\\\n]|\\.)*'"""
    r"|(?P<comment>#[^\n]*)",
    re.DOTALL,
)
"""Strings and comments; ``tokenize`` finds them too, but takes ten times as long."""


def prose_of(path: Path) -> str:
    """Return the docstrings and comments of a module, or the text of a page without its code."""
    source = path.read_text()
    if path.suffix != ".py":
        return re.sub(r"```.*?```", "", source, flags=re.DOTALL)
    return "\n".join((*_docstrings(source), *_comments(source)))


def statements(module: ast.Module) -> list[ast.AST]:
    """Return a module and all its statements; ``ast.walk`` visits all expressions as well."""
    found: list[ast.AST] = [module]
    for node in found:
        for block in _BLOCKS:
            found += getattr(node, block, ())
    return found


def _docstrings(source: str) -> Iterator[str]:
    """Yield every string that is a statement, including those below attributes."""
    for node in statements(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield text


def _comments(source: str) -> Iterator[str]:
    for token in _STRING_OR_COMMENT.finditer(source):
        comment = token["comment"]
        if comment and "noqa" not in comment:
            yield comment.lstrip("# ")


def phrases(text: str) -> list[str]:
    """Return the counted phrases of a text."""
    matches = [match.group() for match in _PHRASES.finditer(text)]
    matches += (
        who.group()
        for who in _WHO.finditer(text)
        if not _AFTER_PEOPLE.search(text[max(0, who.start() - _WIDTH) : who.start()])
    )
    return matches

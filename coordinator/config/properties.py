"""Files in Java's properties format, such as Apache Kafka's ``server.properties``.

Source: the format of ``java.util.Properties.load``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

SUFFIX = ".properties"

_BLANKS = " \t\f"
_LINE_END = re.compile(r"\r\n|\r|\n")
_PARTS = re.compile(r"((?:\\.|[^\\ \t\f=:])*)[ \t\f]*[=:]?[ \t\f]*(.*)", re.DOTALL)
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.)|$)", re.DOTALL)
_LETTERS = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}
_LETTER_OF = {char: letter for letter, char in _LETTERS.items()}


def parse(raw: bytes) -> dict[str, str]:
    r"""Return the keys and values of a file; the last value of a repeated key counts.

    Bytes are ISO 8859-1, as Java reads them; other characters are written ``\uXXXX``. Raises
    ValueError for an invalid escape.
    """
    pairs: dict[str, str] = {}
    for line in _logical_lines(raw.decode("latin-1")):
        match = _PARTS.fullmatch(line)
        if match is not None:
            key, value = (_unescaped(part) for part in match.groups())
            pairs[key] = value
    return pairs


def text_of(settings: Mapping[str, str]) -> bytes:
    r"""Return the contents of a file that :func:`parse` and Java read as these settings."""
    lines = [f"{_escaped(key, ' =:#!')}={_escaped(value)}\n" for key, value in settings.items()]
    return "".join(lines).encode("ascii")


def _escaped(text: str, more: str = "") -> str:
    """Escape a key or value; a leading blank is escaped too, since it would be stripped."""
    out: list[str] = []
    for at, char in enumerate(text):
        if char == "\\" or char in more or (char in _BLANKS and at == 0):
            out.append("\\" + _LETTER_OF.get(char, char))
        elif char in _LETTER_OF:
            out.append("\\" + _LETTER_OF[char])
        elif " " <= char <= "~":
            out.append(char)
        else:
            units = char.encode("utf-16-be", "surrogatepass")
            out += [f"\\u{units[i : i + 2].hex()}" for i in range(0, len(units), 2)]
    return "".join(out)


def _logical_lines(text: str) -> Iterator[str]:
    """Yield lines without comments and blank lines, with continuation lines joined."""
    begun = ""
    is_continued = False
    for natural in _LINE_END.split(text):
        line = natural.lstrip(_BLANKS)
        if not begun and (not line or line[0] in "#!"):
            is_continued = False
            continue
        is_continued = (len(line) - len(line.rstrip("\\"))) % 2 == 1
        begun += line[:-1] if is_continued else line
        if begun and not is_continued:
            yield begun
            begun = ""
    if begun:
        yield begun


def _unescaped(text: str) -> str:
    def unescape(match: re.Match[str]) -> str:
        digits, letter = match.groups()
        if digits is not None:
            return chr(int(digits, 16))
        if letter == "u":
            raise ValueError(f"{match.string!r} has an escape \\u without four hex digits")
        return _LETTERS.get(letter or "", letter or "")

    if "\\" not in text:
        return text
    # A character beyond U+FFFF is written as two escapes.
    return _ESCAPE.sub(unescape, text).encode("utf-16", "surrogatepass").decode("utf-16", "replace")

"""Text of clients and files as a terminal may show it.

Control characters move the cursor, rename the window or hide text; characters of formatting turn
the reading direction round; line separators forge lines. All are shown as Python's escapes.
"""

from __future__ import annotations


def printable(text: str) -> str:
    r"""Escape what is not printable, line ends included: ``\x1b``, ``\n``, ``\u202e``.

    Escaped are Unicode's categories Cc (C0, DEL, C1), Cf (marks of direction, tags), Cs (lone
    surrogates), Co, Cn, Zl, Zp, and every space but U+0020.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def json_printable(text: str) -> str:
    r"""Escape what is not printable in the JSON ``text`` as ``\uXXXX``, which leaves its meaning.

    The text has been written without line ends or tabs between its tokens.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _json_escape(char) for char in text)


def _json_escape(char: str) -> str:
    """One character as the escapes of its UTF-16 units."""
    units = char.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))

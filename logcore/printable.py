"""Escaping of text from clients and files, so that a terminal can show it safely.

Control characters move the cursor, rename the window or hide text; format characters reverse the
reading direction; line separators forge lines. All are shown as Python's escapes.
"""

from __future__ import annotations


def printable(text: str) -> str:
    r"""Escape unprintable characters, line ends included: ``\x1b``, ``\n``, ``\u202e``.

    These are Unicode's categories Cc (C0, DEL, C1), Cf (direction marks, tags), Cs (lone
    surrogates), Co, Cn, Zl, Zp, and every space but U+0020.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def json_printable(text: str) -> str:
    r"""Escape unprintable characters of the JSON ``text`` as ``\uXXXX``; its meaning is the same.

    The text must have no line ends or tabs between its tokens.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _json_escape(char) for char in text)


def _json_escape(char: str) -> str:
    """Return one character as the escapes of its UTF-16 units."""
    units = char.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))

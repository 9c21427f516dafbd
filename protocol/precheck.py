"""Validation of a message before it is decoded, to bound the cost of decoding.

kio's native decoder trusts every array count: it reserves 16 bytes per announced element before it
reads the first one, and a failed reservation aborts the *process*. Five bytes are enough for that.
So no frame is decoded before :func:`check` has verified that

* every count is backed by bytes: count x the smallest size of an element fits into the rest of the
  frame;
* all elements of all arrays, and all unknown tags, together stay within a budget;
* every length and every tag section ends inside the frame, and no string is longer than Kafka
  allows.

Kafka skips unknown tagged fields, kio refuses them. The walk finds them, and records the bytes that
must replace their sections.

The walker is compiled from the schema once per message class, like the writer. It skips adjacent
numbers together, and reads only lengths, counts and tags. It walks over the arrays of a large
message in steps, and records the positions of the long ones, which ``pieces.py`` then decodes in
steps as well.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import cache
from typing import Any, Final, NamedTuple

from fencepost.protocol.errors import MalformedRequest
from fencepost.protocol.limits import MAX_STRING_BYTES, UNKNOWN_TAG_OBJECTS
from fencepost.protocol.schema import FIXED_SIZES, FieldInfo, fields_of
from fencepost.protocol.steps import Steps
from fencepost.protocol.writer import FunctionSource, uvarint

Frame = bytes | bytearray | memoryview
Cut = tuple[int, int, bytes]
"""Start and end of a replaced part of a frame, and the replacement."""
TOO_SHORT: Final = "the message is longer than its frame"
_MAX_UVARINT_BYTES = 5
_INT16 = struct.Struct(">h").unpack_from
_INT32 = struct.Struct(">i").unpack_from


class ArrayPosition(NamedTuple):
    """The position and field of a long array in a frame."""

    start: int
    """The position of the array's count."""
    first: int
    """The position of the array's first element."""
    end: int
    field: FieldInfo
    flexible: bool


class Walk:
    """The result of a walk: the remaining budget, the parts to cut out, and the long arrays."""

    __slots__ = ("budget", "cuts", "ends", "long", "long_bytes")

    def __init__(self, budget: int, long_bytes: int = 0) -> None:
        self.budget = budget
        self.cuts: list[Cut] = []
        self.long_bytes = long_bytes
        """The size in bytes above which a walker in steps records an array."""
        self.long: dict[int, list[ArrayPosition]] = {}
        """The long arrays of a structure, by the structure's position."""
        self.ends: dict[int, int] = {}
        """The end of each structure with long arrays, by the structure's position."""


Walker = Callable[[Frame, int, int, Walk], int]
"""Walks over one instance of a class; returns the position after it."""

Stepper = Callable[[Frame, int, int, Walk], "int | Steps[int]"]
"""Walks like a :data:`Walker`, in steps if the instance may be large."""


def read_uvarint(frame: Frame, pos: int) -> tuple[int, int]:
    """Return the unsigned varint at ``pos``, and the position after it.

    Raises MalformedRequest beyond 32 bits, IndexError at the end of the frame.
    """
    value = 0
    for index in range(_MAX_UVARINT_BYTES):
        byte = frame[pos + index]
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            if value > 0xFFFFFFFF:
                break
            return value, pos + index + 1
    raise MalformedRequest("a varint is longer than 32 bits")


def _string_size(frame: Frame, pos: int) -> tuple[int, int]:
    """Return the size plus one of a compact string at ``pos``, and the position after it."""
    value, pos = read_uvarint(frame, pos)
    if value > MAX_STRING_BYTES + 1:
        raise MalformedRequest(f"a string of {value - 1} bytes, at most {MAX_STRING_BYTES}")
    return value, pos


@cache
def _smallest(cls: type) -> int:
    """Return the smallest number of bytes that an instance of ``cls`` takes on the wire."""
    info = fields_of(cls)
    size = 1 if info.flexible else 0
    for field in info.plain:
        if field.is_array:
            size += 1 if info.flexible else 4
        else:
            size += _smallest_element(field, flexible=info.flexible)
    return size


def _smallest_element(field: FieldInfo, *, flexible: bool) -> int:
    if field.struct is not None:
        return 1 if field.nullable and not field.is_array else _smallest(field.struct)
    size = FIXED_SIZES.get(field.kafka_type or "")
    if size is not None:
        return size
    if flexible:
        return 1
    return 2 if field.kafka_type == "string" else 4


class _WalkerSource(FunctionSource):
    """The body of a walker. ``b`` is the frame, ``p`` the position, ``e`` the end, ``w`` the walk.

    A walker that works in steps ``notes`` long arrays: ``o`` is the start of the structure, ``s``
    the start of an array, and ``f`` its first element.
    """

    def __init__(self, *, notes: bool) -> None:
        super().__init__(
            int16=_INT16,
            int32=_INT32,
            read_uvarint=read_uvarint,
            string_size=_string_size,
            skip_tags=_skip_tags,
            enter=_enter,
            note=_note,
            MalformedRequest=MalformedRequest,
        )
        self.notes = notes
        self._skip = 0
        if notes:
            self.line("    ", "o = p")

    def skip(self, size: int) -> None:
        """Add ``size`` bytes to the pending skip."""
        self._skip += size

    def flush(self, indent: str) -> None:
        """Emit the pending skip."""
        if self._skip:
            self.line(indent, f"p += {self._skip}")
            self._skip = 0


def _length(src: _WalkerSource, indent: str, code: str, *, flexible: bool) -> None:
    """Emit code that reads a length or count into ``n``, -1 for null, and advances past it."""
    src.flush(indent)
    if flexible:
        src.line(indent, "n = b[p] - 1; p += 1")
        read = "string_size" if code == "int16" else "read_uvarint"
        src.line(indent, f"if n > 126: n, p = {read}(b, p - 1); n -= 1")
    else:
        src.line(indent, f"n = {code}(b, p)[0]; p += {2 if code == 'int16' else 4}")


def _single(src: _WalkerSource, indent: str, field: FieldInfo, *, flexible: bool) -> None:
    if field.struct is not None:
        walk = src.name(_compile(field.struct, notes=src.notes), "walk")
        in_steps = src.notes and _has_loops(field.struct)
        call = f"{'yield from ' if in_steps else ''}{walk}(b, p, e, w)"
        src.flush(indent)
        if field.nullable and field.tag is None and not field.is_array:
            src.line(indent, "p += 1")
            src.line(indent, f"if b[p - 1] < 128: p = {call}")
        else:
            src.line(indent, f"p = {call}")
        return
    size = FIXED_SIZES.get(field.kafka_type or "")
    if size is not None:
        src.skip(size)
        return
    _length(src, indent, "int16" if field.kafka_type == "string" else "int32", flexible=flexible)
    src.line(indent, "if n > 0: p += n")
    # The decoder handles nulls; only -1 means null, and the position must never go back.
    src.line(indent, "elif n < -1: raise MalformedRequest('a length is negative')")


def _field(src: _WalkerSource, indent: str, field: FieldInfo, *, flexible: bool) -> None:
    if not field.is_array:
        _single(src, indent, field, flexible=flexible)
        return
    notes = src.notes and (field.struct is not None or field.kafka_type == "string")
    if notes:
        src.flush(indent)
        src.line(indent, "s = p")
    _length(src, indent, "int32", flexible=flexible)
    smallest = _smallest_element(field, flexible=flexible)
    src.line(indent, "if n > 0:")
    src.line(indent, f"    enter(n, {smallest}, e - p, w)")
    if notes:
        src.line(indent, "    f = p")
    if _is_loop(field):
        src.line(indent, "    for _ in range(n):")
        inner = indent + "        "
        _single(src, inner, field, flexible=flexible)
        src.flush(inner)
        if src.notes:
            src.line(inner, "yield")
        if notes:
            known = src.name((field, flexible), "known")
            src.line(indent, f"    if p - s > w.long_bytes: note(w, o, s, f, p, {known})")
    else:
        src.line(indent, f"    p += n * {smallest}")
    src.line(indent, "elif n < -1: raise MalformedRequest('a count is negative')")


def _is_loop(field: FieldInfo) -> bool:
    return field.is_array and (field.struct is not None or field.kafka_type not in FIXED_SIZES)


@cache
def _has_loops(cls: type) -> bool:
    """Return whether a large ``cls`` is walked over in steps. Tagged fields never are."""
    return any(
        _is_loop(field) or (field.struct is not None and _has_loops(field.struct))
        for field in fields_of(cls).plain
    )


def _enter(count: int, smallest: int, remaining: int, walk: Walk) -> None:
    if count * smallest > remaining:
        raise MalformedRequest(f"an array of {count} elements in {remaining} bytes")
    _charge(count, walk)


def _note(
    walk: Walk, owner: int, start: int, first: int, end: int, field: tuple[FieldInfo, bool]
) -> None:
    walk.long.setdefault(owner, []).append(ArrayPosition(start, first, end, *field))


def _charge(count: int, walk: Walk) -> None:
    walk.budget -= count
    if walk.budget < 0:
        raise MalformedRequest("the message has too many elements")


@cache
def _tag_walker(field: FieldInfo) -> Walker:
    src = _WalkerSource(notes=False)
    _field(src, "    ", field, flexible=True)
    src.flush("    ")
    walker: Walker = _compiled(src, f"tag {field.name}")
    return walker


def _skip_tags(frame: Frame, pos: int, end: int, walk: Walk, fields: dict[int, FieldInfo]) -> int:
    """Skip a tag section that is not empty; record its replacement if tags are unknown."""
    start = pos
    sections: list[tuple[int, int, int, list[Cut]]] = []
    count, pos = read_uvarint(frame, pos)
    _enter(count, 2, end - pos, walk)
    _charge(max(count - len(fields), 0) * (UNKNOWN_TAG_OBJECTS - 1), walk)
    for _ in range(count):
        tag, pos = read_uvarint(frame, pos)
        size, pos = read_uvarint(frame, pos)
        if size > end - pos:
            raise MalformedRequest("a tagged field is longer than the message")
        if tag in fields:
            cuts_before = len(walk.cuts)
            if _tag_walker(fields[tag])(frame, pos, pos + size, walk) != pos + size:
                raise MalformedRequest(f"tagged field {tag} does not have the size it says")
            sections.append((tag, pos, pos + size, walk.cuts[cuts_before:]))
            del walk.cuts[cuts_before:]
        pos += size
    if len(sections) < count or any(cuts for _, _, _, cuts in sections):
        section = [uvarint(len(sections))]
        for tag, first, behind, cuts in sections:
            value = apply_cuts(frame, cuts, first, behind)
            section += (uvarint(tag), uvarint(len(value)), value)
        walk.cuts.append((start, pos, b"".join(section)))
    return pos


def _compiled(src: _WalkerSource, label: str) -> Any:
    if src.notes:
        src.line("    ", "if o in w.long: w.ends[o] = p")
    src.line("    ", "return p")
    return src.function("def walk(b, p, e, w):", f"walker of {label}")


@cache
def _compile(cls: type, *, notes: bool) -> Any:
    info = fields_of(cls)
    src = _WalkerSource(notes=notes and _has_loops(cls))
    for field in info.plain:
        _field(src, "    ", field, flexible=info.flexible)
    src.flush("    ")
    if info.flexible:
        known = src.name({field.tag: field for field in info.tagged}, "known")
        src.line("    ", "if b[p]: p = skip_tags(b, p, e, w, " + known + ")")
        src.line("    ", "else: p += 1")
    return _compiled(src, f"{cls.__module__}.{cls.__qualname__}")


def walker(cls: type) -> Walker:
    """Return the walker that :func:`check` uses for messages of ``cls``."""
    compiled: Walker = _compile(cls, notes=False)
    return compiled


def check(cls: type, frame: Frame, pos: int, budget: int) -> list[Cut]:
    """Check that the rest of ``frame`` from ``pos`` on may be decoded as ``cls``.

    Returns the parts that :func:`apply_cuts` must replace before decoding: tag sections with
    unknown fields. Bytes after the message are ignored, as in Kafka. Raises MalformedRequest.
    """
    return checked(walker(cls), frame, pos, budget)


def checked(walk_over: Walker, frame: Frame, pos: int, budget: int) -> list[Cut]:
    """Check like :func:`check`, with the :func:`walker` of the class."""
    walk = Walk(budget)
    end = len(frame)
    try:
        after = walk_over(frame, pos, end, walk)
    except (IndexError, struct.error) as error:
        raise MalformedRequest(TOO_SHORT) from error
    if after > end:
        raise MalformedRequest(TOO_SHORT)
    return walk.cuts


def check_in_steps(cls: type, frame: Frame, pos: int, budget: int, long_bytes: int) -> Steps[Walk]:
    """Check in steps, and record the arrays of more than ``long_bytes``."""
    walk = Walk(budget, long_bytes)
    yield from _walked(_compile(cls, notes=True), frame, pos, walk)
    return walk


def _walked(walk_over: Stepper, frame: Frame, pos: int, walk: Walk) -> Steps[None]:
    end = len(frame)
    try:
        after = walk_over(frame, pos, end, walk)
        if not isinstance(after, int):
            after = yield from after
    except (IndexError, struct.error) as error:
        raise MalformedRequest(TOO_SHORT) from error
    if after > end:
        raise MalformedRequest(TOO_SHORT)


def apply_cuts(frame: Frame, cuts: list[Cut], start: int, end: int) -> bytes:
    """Return a copy of the frame from ``start`` to ``end`` with the cuts applied."""
    view = memoryview(frame)
    parts: list[Frame] = []
    for first, behind, instead in cuts:
        parts += (view[start:first], instead)
        start = behind
    parts.append(view[start:end])
    return b"".join(parts)

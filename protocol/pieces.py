"""Decoding and freeing of messages with many structures, in steps.

Decoding a hundred thousand structures takes 30 ms, and freeing them half of that: too long to block
the event loop. A long array is therefore cut out of its structure; the structure is decoded without
the array, and then the array's elements one by one, in the same way. The check of the message has
recorded which arrays are long (``fencepost.protocol.precheck``).
"""

from __future__ import annotations

from functools import cache
from typing import Any

from kio.serial import entity_reader
from kio.serial.readers import read_compact_string, read_legacy_string

from fencepost.protocol.precheck import ArrayPosition, Frame, Walk, apply_cuts
from fencepost.protocol.schema import Entity, fields_of, lenient_class
from fencepost.protocol.steps import Steps

LONG_BYTES = 4_096
"""An array of more bytes is decoded in steps; a shorter one takes a few tenths of a millisecond."""

FREED_PER_STEP = 64
"""The number of structures that are freed in one step."""

_NO_ELEMENTS = {True: b"\x01", False: bytes(4)}


@cache
def reader(cls: type) -> Any:
    """Return the native reader of a class: ``(frame, position) -> (entity, size)``."""
    return entity_reader(lenient_class(cls))


def read_in_steps(cls: type, frame: Frame, pos: int, walk: Walk) -> Steps[Entity]:
    """Decode the structure at ``pos`` of a frame.

    The frame has no unknown tags, and ``walk`` is the result of its check. Raises the errors of the
    native decoder.
    """
    arrays = walk.long.get(pos)
    if arrays is None:
        return reader(cls)(frame, pos)[0]
    cuts = [(array.start, array.end, _NO_ELEMENTS[array.flexible]) for array in arrays]
    entity = reader(cls)(apply_cuts(frame, cuts, pos, walk.ends[pos]), 0)[0]
    for array in arrays:
        elements = yield from _elements(array, frame, walk)
        object.__setattr__(entity, array.field.name, elements)
    return entity


def _elements(array: ArrayPosition, frame: Frame, walk: Walk) -> Steps[tuple[Any, ...]]:
    field, pos = array.field, array.first
    if field.struct is not None:
        read = reader(field.struct)
    else:
        read = read_compact_string if array.flexible else read_legacy_string
    elements = []
    while pos < array.end:
        if pos in walk.long and field.struct is not None:
            element = yield from read_in_steps(field.struct, frame, pos, walk)
            pos = walk.ends[pos]
        else:
            element, size = read(frame, pos)
            pos += size
        elements.append(element)
        yield
    return tuple(elements)


@cache
def _array_names(cls: type) -> tuple[str, ...]:
    return tuple(
        info.name for info in fields_of(cls).plain if info.is_array and info.struct is not None
    )


def free_in_steps(held: list[Entity]) -> Steps[None]:
    """Free messages in steps. ``held`` has the last references to them, and is empty afterwards."""
    count = 0
    while held:
        message = held.pop()
        cls: type = type(message)
        for name in _array_names(cls):
            held.extend(getattr(message, name) or ())
        count += 1
        if count % FREED_PER_STEP == 0:
            yield

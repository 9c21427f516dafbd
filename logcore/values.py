"""Dataclasses whose methods are generated with their first instance.

Generating the methods of a frozen dataclass takes a third of a millisecond. A start loads 200 of
them and uses few. For type checkers, ``fields`` and ``replace`` they are ordinary dataclasses;
an error in the fields is raised with the first instance.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

T = TypeVar("T")

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass  # noqa: PLC0414 - for others to import
else:

    def dataclass(*, slots, frozen=False, eq=True, repr=True):  # noqa: A002 - the name it has there
        """``dataclasses.dataclass`` for classes with ``slots`` and without keyword-only fields."""
        if not slots:
            raise ValueError("a class whose methods are made late has slots")
        options = {"frozen": frozen, "eq": eq, "repr": repr}
        return lambda kind: _with_late_methods(kind, options)


_GENERATED: Final = (
    "__eq__",
    "__hash__",
    "__repr__",
    "__replace__",
    "__dataclass_params__",
    "__dataclass_fields__",
    # ``__init__`` is set last: until then, other threads generate all methods themselves.
    "__init__",
)


class _DeferredMethods:
    """``__dataclass_fields__`` of a class whose methods are not generated yet."""

    def __init__(self, written: type, options: dict[str, bool]) -> None:
        self.options = options
        self.body = {
            name: value
            for name, value in vars(written).items()
            if name not in ("__dict__", "__weakref__")
        }
        """The class body as written."""
        self.kind: type
        self.has_fast_init = False

    def __get__(self, _value: object, _kind: type) -> Any:
        return _generate_methods(self.kind).__dataclass_fields__


def _with_late_methods(written: type, options: dict[str, bool]) -> type:
    names = [
        name
        for name, kind in written.__annotations__.items()
        if not str(kind).startswith("ClassVar")
    ]
    inherited = {slot for base in written.__mro__[1:] for slot in vars(base).get("__slots__", ())}
    earlier = getattr(written, "__match_args__", ())
    late = _DeferredMethods(written, options)
    body = {name: value for name, value in late.body.items() if name not in names}
    body |= {
        "__slots__": tuple(name for name in names if name not in inherited),
        "__match_args__": tuple(dict.fromkeys((*earlier, *names))),
        "__dataclass_fields__": late,
        "__init__": _first_init,
        "__getstate__": _state,
        "__setstate__": _restore,
    }
    if options["frozen"]:
        body["__setattr__"] = body["__delattr__"] = _frozen
    late.kind = type(written)(written.__name__, written.__bases__, body)
    late.kind.__qualname__ = written.__qualname__
    return late.kind


def _generate_methods(kind: type) -> Any:
    """Generate the methods of a class, unless that is done; return the class."""
    late = vars(kind)["__dataclass_fields__"]
    if isinstance(late, _DeferredMethods):
        written = type(kind)(kind.__name__, kind.__bases__, dict(late.body))
        whole = vars(dataclasses.dataclass(slots=True, **late.options)(written))
        methods = {name: whole[name] for name in _GENERATED if name in whole}
        if late.has_fast_init:
            methods["__init__"] = _storing_init(kind, methods)
        for name, method in methods.items():
            setattr(kind, name, method)
    return kind


def fast_init(kind: type[T]) -> type[T]:
    """Halve the time to construct instances of a frozen class, for classes that each request uses.

    A call of ``object.__setattr__`` for each field costs more than all other steps. Until its
    fields are set, an instance therefore belongs to a mutable class with the same slots.
    """
    vars(kind)["__dataclass_fields__"].has_fast_init = True
    return kind


def mutable_class(kind: type) -> type:
    """Return a mutable class with the slots of ``kind``, for instances under construction."""
    body = {"__slots__": vars(kind)["__slots__"], "__setattr__": object.__setattr__}
    return type(kind)(kind.__name__, kind.__bases__, body)


def _storing_init(kind: type, methods: dict[str, Any]) -> Any:
    fields = methods["__dataclass_fields__"].values()
    makes = any(field.default_factory is not dataclasses.MISSING for field in fields)
    if makes or hasattr(kind, "__post_init__"):
        raise TypeError(f"{kind.__qualname__} does more than store what it is given")
    heads = [
        field.name if field.default is dataclasses.MISSING else f"{field.name}=_{field.name}"
        for field in fields
    ]
    scope = {f"_{field.name}": field.default for field in fields} | {
        "_kind": kind,
        "_opened": mutable_class(kind),
        "_become": object.__dict__["__class__"].__set__,
        "_usual": methods["__init__"],
    }
    lines = [
        f"def __init__(self, {', '.join(heads)}):",
        "    if self.__class__ is not _kind:",
        f"        return _usual(self, {', '.join(field.name for field in fields)})",
        "    _become(self, _opened)",
        *(f"    self.{field.name} = {field.name}" for field in fields),
        "    self.__class__ = _kind",
    ]
    exec("\n".join(lines), scope)  # noqa: S102 - names of fields, and nothing else
    return scope["__init__"]


def _first_init(self: Any, *args: object, **named: object) -> None:
    """``__init__`` of a class's first instance: generates the methods, this one included."""
    for kind in type(self).__mro__:
        if "__dataclass_fields__" in vars(kind):
            break
    _generate_methods(kind).__init__(self, *args, **named)


def _state(self: Any) -> list[Any]:
    return [getattr(self, field.name) for field in dataclasses.fields(self)]


def _restore(self: Any, state: list[Any]) -> None:
    for field, value in zip(dataclasses.fields(self), state, strict=True):
        object.__setattr__(self, field.name, value)


def _frozen(_self: object, name: str, *_value: object) -> NoReturn:
    raise dataclasses.FrozenInstanceError(f"cannot assign to or delete field {name!r}")

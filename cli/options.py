"""The options that choose a cluster, before or after the command's name.

Command groups, such as ``fencepost`` itself and ``fencepost topics``, accept them too: ``fencepost
--bootstrap HOST:PORT topics list``. If an option is repeated, the last one on the line wins.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from fencepost.coordinator.config.durations import UNITS_MS, duration_ms
from fencepost.coordinator.config.key import nearest

R = TypeVar("R")

DEFAULT_BOOTSTRAP = "127.0.0.1:9092"
DEFAULT_TIMEOUT_S = 10.0

_BEFORE = "fencepost.connection"
"""The context's key for options given before the command, by the names of parameters."""


def duration(
    unit: str, low: float, high: float = math.inf
) -> Callable[[click.Context, click.Parameter, Any], float | None]:
    """Return the callback of an option: a duration, or a number of ``unit``."""

    def read(_ctx: click.Context, _param: click.Parameter, text: Any) -> float | None:
        if text is None:
            return None
        spent = duration_ms(str(text))
        try:
            number = float(text) if spent is None else spent / UNITS_MS[unit]
        except ValueError:
            raise click.BadParameter(
                f"{text!r} is not a duration such as 500ms, 90s, 1h30m"
            ) from None
        if not low <= number <= high:
            most = "" if high == math.inf else f" and at most {high:g}"
            raise click.BadParameter(f"{text} is not at least {low:g}{most} {unit}")
        return number

    return read


def connection_options(function: Callable[..., R]) -> Callable[..., R]:
    """Add ``--bootstrap``, ``--profile``, ``--command-config`` and ``--timeout``."""
    for names, attributes in reversed(_OPTIONS):
        function = click.option(*names, **attributes)(function)
    return function


_OPTIONS: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
    (
        ("--bootstrap", "--bootstrap-server", "-b", "bootstrap"),
        {
            "envvar": "FENCEPOST_BOOTSTRAP",
            "show_default": DEFAULT_BOOTSTRAP,
            "show_envvar": True,
            "metavar": "HOST:PORT",
            "help": "A bootstrap broker; several are separated by commas.",
        },
    ),
    (
        ("--profile",),
        {
            "envvar": "FENCEPOST_PROFILE",
            "show_envvar": True,
            "metavar": "NAME",
            "help": "Use this profile for everything that no option or variable sets.",
        },
    ),
    (
        ("--command-config",),
        {
            "envvar": "FENCEPOST_COMMAND_CONFIG",
            "show_envvar": True,
            "metavar": "FILE",
            "help": "A client's encryption and login by Kafka's keys, as properties or TOML.",
        },
    ),
    (
        ("--timeout",),
        {
            "show_default": f"{DEFAULT_TIMEOUT_S:g}",
            "metavar": "SECONDS",
            "callback": duration("s", 0.1),
            "help": "Give up after this time; also 500ms, 1m.",
        },
    ),
)


class ConnectionGroup(click.Group):
    """A group that accepts the connection options, and suggests the most similar command name."""

    shows_connection = False
    """Whether the group's help lists the connection options, as the help of each command does."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for names, attributes in _OPTIONS:
            plain = {name: value for name, value in attributes.items() if "env" not in name}
            plain |= {
                "callback": _remember_option(attributes.get("callback")),
                "hidden": not self.shows_connection,
            }
            self.params.append(click.Option(names, expose_value=False, **plain))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve as every group does, and refuse options that the command cannot use."""
        commands = self.list_commands(ctx)
        if args[0] not in commands and not args[0].startswith("-") and not ctx.resilient_parsing:
            longer = [command for command in commands if command.startswith(f"{args[0]}-")]
            hint = f"; did you mean {longer[0]}?" if longer else nearest(args[0], commands)
            ctx.fail(f"No such command '{args[0]}'{hint}")
        name, command, rest = super().resolve_command(ctx, args)
        is_for_brokers = isinstance(command, click.Group) or any(
            param.name == "bootstrap" for param in (command.params if command else ())
        )
        if ctx.meta.get(_BEFORE) and not is_for_brokers and not ctx.resilient_parsing:
            ctx.fail(f"{name} does not connect to a broker: leave out the options before it")
        return name, command, rest


def _remember_option(read: Callable[..., Any] | None) -> Callable[..., None]:
    """Return the callback of an option before the command; ``read`` checks the value."""

    def remember(ctx: click.Context, param: click.Parameter, value: Any) -> None:
        if value is not None:
            checked = value if read is None else read(ctx, param, value)
            ctx.meta.setdefault(_BEFORE, {})[param.name] = checked

    return remember


def option_before_command(name: str, value: Any) -> Any:
    """Return the value of a connection option, which may stand before the command's name."""
    context = click.get_current_context()
    if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
        return value
    return context.meta.get(_BEFORE, {}).get(name, value)

"""The reference of the command line, from the commands themselves."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Iterator

import click

from docs.settings import cell, table
from fencepost.cli import COMMANDS, main
from fencepost.cli.output import EXIT_CODES

_PROGRAM = "fencepost"
_SHARED_BY = 10
"""An option that at least this many commands have, with the same text, is listed only once."""

_Row = tuple[str, str]


def command_reference() -> str:
    """Return the reference of every command: usage, help text and options."""
    contexts = list(_commands(main, click.Context(main, info_name=_PROGRAM)))
    counted = Counter(row for ctx in contexts for row in _options(ctx))
    shared = {row: None for row, count in counted.items() if count >= _SHARED_BY}
    commands = ((f"[{name}](#{name})", text) for name, text in sorted(COMMANDS.items()))
    statuses = ((str(code), text) for code, text in EXIT_CODES.items())
    parts = [
        *_text(inspect.cleandoc(main.help or "")),
        table(("command", "what it does"), commands),
        table(("exit status", "meaning"), statuses),
        "## Options of many commands",
        table(("option", "meaning"), shared),
    ]
    for ctx in contexts:
        parts += _section(ctx, shared)
    return "\n\n".join(parts)


def _commands(command: click.Command, ctx: click.Context) -> Iterator[click.Context]:
    """Yield the contexts of a command and of all its subcommands."""
    if ctx.parent is not None:
        yield ctx
    if isinstance(command, click.Group):
        for name in command.list_commands(ctx):
            found = command.get_command(ctx, name)
            if found is not None and not found.hidden:
                yield from _commands(found, click.Context(found, info_name=name, parent=ctx))


def _options(ctx: click.Context) -> list[_Row]:
    records = (option.get_help_record(ctx) for option in ctx.command.params)
    return [
        (f"`{cell(names)}`", cell(meaning).replace("*", r"\*"))
        for names, meaning in filter(None, records)
        if meaning
    ]


def _section(ctx: click.Context, shared: dict[_Row, None]) -> Iterator[str]:
    command, path = ctx.command, ctx.command_path.removeprefix(f"{_PROGRAM} ")
    yield f"{'#' * (path.count(' ') + 2)} {path}"
    if not isinstance(command, click.Group):
        usage = " ".join((ctx.command_path, *command.collect_usage_pieces(ctx)))
        yield f"```text\n{usage}\n```"
    yield from _text(inspect.cleandoc(command.help or ""))
    rows = _options(ctx)
    own = [row for row in rows if row not in shared]
    if own:
        yield table(("option", "meaning"), own)
    if beside := [names for names, meaning in rows if (names, meaning) in shared]:
        yield f"And {', '.join(beside)}."


def _text(text: str) -> Iterator[str]:
    """Yield the paragraphs of a help text; those that click does not rewrap become blocks."""
    for paragraph in text.split("\f", maxsplit=1)[0].split("\n\n"):
        if paragraph.startswith("\b\n"):
            yield f"```text\n{paragraph.removeprefix(chr(8)).strip(chr(10))}\n```"
        elif paragraph:
            flat = " ".join(paragraph.split())
            # Markdown takes a word in angle brackets for HTML, and one in stars for emphasis.
            yield re.sub(r"<(\w)", r"&lt;\1", flat).replace("*", r"\*")

"""The reference of the command line, from the commands themselves."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click

from docs.settings import cell, table
from fencepost.coordinator.cli import main

_PROGRAM = "fencepost"


def command_reference() -> str:
    """Every command with its usage, its text and its options."""
    return "\n\n".join(_sections(main, click.Context(main, info_name=_PROGRAM)))


def _sections(command: click.Command, ctx: click.Context) -> Iterator[str]:
    if not isinstance(command, click.Group):
        yield _section(command, ctx)
        return
    if ctx.parent is not None:
        yield _section(command, ctx)
    for name in command.list_commands(ctx):
        found = command.get_command(ctx, name)
        if found is not None and not found.hidden:
            yield from _sections(found, click.Context(found, info_name=name, parent=ctx))


def _section(command: click.Command, ctx: click.Context) -> str:
    depth = ctx.command_path.count(" ")
    usage = " ".join((ctx.command_path, *command.collect_usage_pieces(ctx)))
    parts = [
        f"{'#' * (depth + 1)} {ctx.command_path}",
        *_text(command.help or ""),
        f"```text\n{usage}\n```",
    ]
    if isinstance(command, click.Group):
        return "\n\n".join(parts[:-1])
    rows = [
        (f"`{names}`", cell(meaning).replace("*", r"\*"))
        for names, meaning in filter(None, (one.get_help_record(ctx) for one in command.params))
    ]
    if rows:
        parts.append(table(("option", "meaning"), rows))
    return "\n\n".join(parts)


def _text(text: str) -> Iterator[str]:
    """Paragraphs of a command's help; those that click leaves as they are become blocks."""
    for paragraph in text.split("\f", maxsplit=1)[0].strip().split("\n\n"):
        if paragraph.startswith("\b"):
            yield f"```text\n{paragraph.removeprefix(chr(8)).strip(chr(10))}\n```"
        else:
            flat = " ".join(paragraph.split())
            # Capital words in angle brackets would be taken for HTML.
            yield re.sub(r"<(\w)", r"&lt;\1", flat)

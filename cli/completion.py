"""``fencepost completion``: the script by which a shell completes commands and options."""

from __future__ import annotations

import click
from click.shell_completion import BashComplete, FishComplete, ZshComplete

from fencepost.cli.printing import print_lines

PROGRAM = "fencepost"
VARIABLE = "_FENCEPOST_COMPLETE"
"""The variable that makes click answer with completions; the shell's script sets it."""

SHELLS = {"bash": BashComplete, "fish": FishComplete, "zsh": ZshComplete}


@click.command("completion")
@click.argument("shell", type=click.Choice(sorted(SHELLS)))
def command(shell: str) -> None:
    """Print the completion script of SHELL.

    \b
    bash  eval "$(fencepost completion bash)"        in ~/.bashrc
    zsh   eval "$(fencepost completion zsh)"         in ~/.zshrc, after compinit
    fish  fencepost completion fish >~/.config/fish/completions/fencepost.fish
    """  # noqa: D301 - click looks for the character, not for an escape of it
    from fencepost.cli import main

    made = SHELLS[shell](main, {}, PROGRAM, VARIABLE)
    print_lines(*(made.source_template % made.source_vars()).splitlines())

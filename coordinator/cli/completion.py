"""``fencepost completion``: what a shell needs to complete the commands and their options."""

from __future__ import annotations

import click
from click.shell_completion import BashComplete, FishComplete, ZshComplete

from fencepost.coordinator.cli.printing import say

PROGRAM = "fencepost"
VARIABLE = "_FENCEPOST_COMPLETE"
"""What click looks for: when a shell sets it, the command answers with completions."""

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
    from fencepost.coordinator.cli import main

    made = SHELLS[shell](main, {}, PROGRAM, VARIABLE)
    say(*(made.source_template % made.source_vars()).splitlines())

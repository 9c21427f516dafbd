"""``python -m coordinator.cli`` is ``fencepost``."""

from coordinator.cli import main

main(prog_name="fencepost")

"""``python -m fencepost.coordinator.cli`` is ``fencepost``."""

from fencepost.coordinator.cli import main

main(prog_name="fencepost")

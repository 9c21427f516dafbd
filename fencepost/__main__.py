"""``python -m fencepost``: the command line."""

from fencepost.coordinator.cli import main

if __name__ == "__main__":
    main()

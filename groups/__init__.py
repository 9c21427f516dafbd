"""The group coordinator: consumer groups and their offsets, as a pure state machine."""

if not __name__.startswith("fencepost."):
    raise ImportError("this package is fencepost.groups: import it by that name")

"""The group coordinator: consumer groups and their offsets, as a pure state machine."""

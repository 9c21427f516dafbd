"""The tests of the broker. ``support`` has the helpers that the other folders share."""

"""The daemon: sockets, handlers, shards, configuration.

A program begins with ``from fencepost import Broker``.
"""

if not __name__.startswith("fencepost."):
    raise ImportError("this package is fencepost.coordinator: import it by that name")

from fencepost.coordinator import moved_modules

moved_modules.install()

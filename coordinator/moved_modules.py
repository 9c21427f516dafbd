"""Former names of modules, which a program may still import; the next release removes them.

``fencepost.coordinator.wire.codec`` is the module ``fencepost.protocol.codec``, not a copy of it.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Final

MOVED: Final = {
    "fencepost.coordinator.wire.client": "fencepost.client",
    "fencepost.coordinator.wire": "fencepost.protocol",
    "fencepost.coordinator.cli.queries": "fencepost.client.queries",
    "fencepost.coordinator.cli": "fencepost.cli",
    "fencepost.coordinator.tools": "fencepost.tools",
    "fencepost.coordinator.net": "fencepost.coordinator.server",
    "fencepost.coordinator.data": "fencepost.coordinator.storage",
    "fencepost.coordinator.coordinators": "fencepost.coordinator.services",
}
"""Former package → present package. The first match counts, so nested packages come first."""


def present_name(name: str) -> str | None:
    """Return the present name of a module that has moved, else None."""
    for former, present in MOVED.items():
        if name == former or name.startswith(f"{former}."):
            return present + name.removeprefix(former)
    return None


class MovedModules:
    """Imports a module by its former name; the last finder that the import system calls.

    This finder and loader has no base class from importlib, whose import would make each program
    start 8 ms later.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for a module that has moved, else None."""
        del path, target
        if present_name(fullname) is None:
            return None
        return ModuleSpec(fullname, self)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Import the module by its present name. Raises ImportError."""
        name = present_name(spec.name) or spec.name
        warnings.warn(f"{spec.name} is {name} now", DeprecationWarning, stacklevel=2)
        module = import_module(name)
        if hasattr(module, "__path__"):
            # If the package kept its path, its modules would be loaded a second time.
            package = ModuleType(spec.name, module.__doc__)
            package.__path__ = []
            package.__getattr__ = partial(getattr, module)  # type: ignore[method-assign]
            return package
        # The import system is about to replace the module's own spec.
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the spec of a module, which is loaded already."""
        spec = module.__spec__
        if spec is not None and spec.loader_state is not None:
            module.__spec__ = spec.loader_state


def install() -> None:
    """Make the modules importable by their former names."""
    sys.meta_path.append(MovedModules())

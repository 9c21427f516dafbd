"""Python imports this module when it starts with this folder in PYTHONPATH: see emulation.py."""

import importlib.util
import os
import pathlib

if name := os.environ.get("EMULATED_SYSTEM"):
    spec = importlib.util.spec_from_file_location(
        "emulation", pathlib.Path(__file__).parents[1] / "emulation.py"
    )
    emulation = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(emulation)
    emulation.begin(name)

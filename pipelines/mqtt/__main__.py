"""``python -m fencepost.pipelines.mqtt``: run the bridge from the command line."""

from __future__ import annotations

import sys

EXTRA = ("aiokafka", "aiomqtt", "paho")
"""The packages that the bridge needs in addition."""

try:
    from fencepost.pipelines.mqtt.command import main
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] not in EXTRA:
        raise
    sys.exit(f"the bridge needs {error.name}: pip install '.[mqtt]' in a clone of Fencepost")

if __name__ == "__main__":
    main()

"""Run a cluster for tests in other languages: ``python -m fencepost.testing --brokers 3``."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from contextlib import suppress

from fencepost.testing.cluster import Cluster
from fencepost.testing.cluster_hooks import ClusterHooks


async def _serve(address: str, cluster: Cluster) -> None:
    hooks = ClusterHooks(address, cluster)
    hooks_address = await hooks.listen()
    sys.stdout.write(f"listening {cluster.bootstrap}\ntest hooks {hooks_address}\n")
    sys.stdout.flush()
    try:
        await asyncio.Event().wait()
    finally:
        await hooks.stop()


def main() -> None:
    """Serve until SIGTERM or Ctrl-C."""
    parser = argparse.ArgumentParser("python -m fencepost.testing", description=__doc__)
    parser.add_argument("--brokers", type=int, default=3, help="their number; the default is 3")
    parser.add_argument("--data-dir", help="kept at the end; by default temporary")
    parser.add_argument(
        "--test-hooks", metavar="HOST:PORT", default="127.0.0.1:0", help="on loopback only"
    )
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        cluster = Cluster(given.brokers, given.data_dir)
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    with suppress(KeyboardInterrupt), cluster:
        asyncio.run(_serve(given.test_hooks, cluster))


if __name__ == "__main__":
    main()
